// Counts what a program dispatches on its Vulkan devices and says so when it ends. Preloaded by
// scripts/check/vulkan/check.py:
//
//   cc -shared -fPIC count-dispatches.c -o count.so; LD_PRELOAD=./count.so PROGRAM

#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef void (*function)(void);
typedef function (*resolver)(void *, const char *);
typedef void (*dispatcher)(void *, uint32_t, uint32_t, uint32_t);

static long       dispatches;
static dispatcher dispatch;
static resolver   of_device;

static void report(void) {
    fprintf(stderr, "%ld dispatches\n", dispatches);
}

static void counted(void * commands, uint32_t x, uint32_t y, uint32_t z) {
    ++dispatches;
    dispatch(commands, x, y, z);
}

static function resolve(void * device, const char * name);

// Our function in place of one that is looked for.
static function replaced(function found, const char * name) {
    if (found != NULL && strcmp(name, "vkCmdDispatch") == 0) {
        if (dispatch == NULL) {
            atexit(report);
        }
        dispatch = (dispatcher) found;
        return (function) counted;
    }
    if (found != NULL && strcmp(name, "vkGetDeviceProcAddr") == 0) {
        of_device = (resolver) found;
        return (function) resolve;
    }
    return found;
}

static function resolve(void * device, const char * name) {
    return replaced(of_device(device, name), name);
}

function vkGetInstanceProcAddr(void * instance, const char * name) {
    static resolver of_instance;
    if (of_instance == NULL) {
        *(void **) &of_instance = dlsym(RTLD_NEXT, "vkGetInstanceProcAddr");
    }
    return replaced(of_instance(instance, name), name);
}

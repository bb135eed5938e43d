// Instructions that a product with one column executes per 256 weights, counted by single-stepping: the difference
// between 128 rows of 16 blocks and 64, divided by their blocks. Linux only.
//
//   count-instructions NAME=TYPE...     prints "name instructions"

#include "product.h"

#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ptrace.h>
#include <sys/wait.h>
#include <unistd.h>

static void die(const char * what) {
    perror(what);
    exit(1);
}

// Instructions from one SIGSTOP of the child to the next.
static long count_steps(pid_t child) {
    long count = 0;
    for (;;) {
        if (ptrace(PTRACE_SINGLESTEP, child, NULL, NULL) < 0) {
            die("ptrace");
        }
        int status;
        if (waitpid(child, &status, 0) < 0) {
            die("waitpid");
        }
        if (!WIFSTOPPED(status)) {
            fprintf(stderr, "error: the counted process ended early\n");
            exit(1);
        }
        if (WSTOPSIG(status) == SIGSTOP) {
            return count;
        }
        ++count;
    }
}

#define BLOCKS 16
#define ROWS   64

static void run(enum ggml_type type) {
    const struct product half = new_product(type, BLOCKS * 256, ROWS, 1, 1);
    const struct product full = new_product(type, BLOCKS * 256, 2 * ROWS, 1, 1);
    run_product(&half);  // resolve symbols
    run_product(&full);
    raise(SIGSTOP);
    run_product(&half);
    raise(SIGSTOP);
    run_product(&full);
    raise(SIGSTOP);
}

int main(int argc, char ** argv) {
    ggml_cpu_init();
    for (int i = 1; i < argc; ++i) {
        char * number = strchr(argv[i], '=');
        if (!number) {
            fprintf(stderr, "error: %s is not NAME=TYPE\n", argv[i]);
            return 1;
        }
        *number           = 0;
        const pid_t child = fork();
        if (child < 0) {
            die("fork");
        }
        if (child == 0) {
            if (ptrace(PTRACE_TRACEME, 0, NULL, NULL) < 0) {
                die("ptrace");
            }
            run((enum ggml_type) atoi(number + 1));
            _exit(0);
        }
        int status;
        if (waitpid(child, &status, 0) < 0 || !WIFSTOPPED(status)) {
            fprintf(stderr, "error: %s: the counted process did not start\n", argv[i]);
            return 1;
        }
        const long half = count_steps(child);
        const long full = count_steps(child);
        printf("%s %.1f\n", argv[i], (double) (full - half) / (BLOCKS * ROWS));
        ptrace(PTRACE_CONT, child, NULL, NULL);
        waitpid(child, &status, 0);
    }
    return 0;
}

// Instructions that vec_dot of a type executes per 256 weights, counted by single-stepping: the difference between a
// row of 32 blocks and one of 16, divided by 16. Linux only.
//
//   count-instructions NAME=TYPE...     prints "name instructions"

#include "ggml-cpu.h"
#include "ggml.h"

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

static void run(enum ggml_type type) {
    const int                           n      = 32 * 256;
    const struct ggml_type_traits_cpu * traits = ggml_get_type_traits_cpu(type);
    const struct ggml_type_traits_cpu * act    = ggml_get_type_traits_cpu(traits->vec_dot_type);

    float * x = malloc((size_t) n * sizeof(*x));
    char *  w = malloc(ggml_row_size(type, n));
    char *  y = malloc(ggml_row_size(traits->vec_dot_type, n));
    if (!x || !w || !y) {
        die("malloc");
    }
    for (int i = 0; i < n; ++i) {
        x[i] = (float) (i * 7919 % 101 - 50) * 0.01f;
    }
    ggml_quantize_chunk(type, x, w, 0, 1, n, NULL);
    act->from_float(x, y, n);

    float s;
    traits->vec_dot(n, &s, 0, w, 0, y, 0, 1);  // resolve symbols
    raise(SIGSTOP);
    traits->vec_dot(n / 2, &s, 0, w, 0, y, 0, 1);
    raise(SIGSTOP);
    traits->vec_dot(n, &s, 0, w, 0, y, 0, 1);
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
        printf("%s %.1f\n", argv[i], (double) (full - half) / 16);
        ptrace(PTRACE_CONT, child, NULL, NULL);
        waitpid(child, &status, 0);
    }
    return 0;
}

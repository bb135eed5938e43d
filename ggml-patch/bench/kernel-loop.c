// One kernel of a matrix product, alone: its instructions one by one, or its cycles. scripts/bench/cpu_model.py compiles
// this with the kernels of the trellis types and of llama.cpp for one processor, as a static program.
//
//   kernel-loop run KERNEL COLUMNS BLOCKS          one product, for an emulator that logs what it executes
//   kernel-loop trace KERNEL COLUMNS BLOCKS FILE   one product, single-stepped: the addresses of its instructions as
//                                                  64-bit words (Linux on x86-64)
//   kernel-loop time KERNEL COLUMNS FEW MANY       prints the core cycles of a block of every row of the kernel: the
//                                                  difference of products of MANY and FEW blocks, data in the cache
//
// KERNEL: a trellis type or tq2_0 (a panel of 16 rows), the same with _row (a row as a file has it, one column), q4_K (8
// rows, repacked), q3_K, q2_K, iq3_s or iq2_xxs (a row, by vec_dot).

#define _GNU_SOURCE

#include "ggml-common.h"
#include "itq-gemm.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define MAX_BLOCKS  64
#define MAX_COLUMNS ITQ_GROUP
#define ALIGNMENT   64
#define MILLION     1000000

// What llama.cpp's repack.cpp picks for Q4_K.
#if defined(__AVX2__) || defined(__ARM_FEATURE_MATMUL_INT8)
#    define gemv_q4_K ggml_gemv_q4_K_8x8_q8_K
#else
#    define gemv_q4_K ggml_gemv_q4_K_8x4_q8_K
#endif
void gemv_q4_K(int n, float * s, size_t bs, const void * x, const void * y, int nr, int nc);

// ggml-cpu's table of numbers of 16 bits, here all 0.
float ggml_table_f32_f16[1 << 16];

static uint8_t *          weights;
static block_q8_K *       activations;
static struct itq_columns columns;
static float              out[MAX_COLUMNS][ITQ_PANEL_ROWS];

// nb counts 256 weights, whatever the length of a block.
#define RUN_PANELS(name, length)                                                             \
    static void run_##name(int nb, int nc) {                                                 \
        itq_gemm_##name(nb * (QK_K / (length)), weights, &columns, nc, out);                 \
    }                                                                                        \
    static void run_##name##_row(int nb, int nc) {                                           \
        (void) nc;                                                                           \
        const int n = nb * (QK_K / (length));                                                \
        itq_gemv_##name(n, weights, sizeof(block_##name) * (size_t) n, 1, &columns, out[0]); \
    }
#define RUN_PANELS_OF_TYPE(NAME, name, bits, n_levels, length, ...) RUN_PANELS(name, length)
ITQ_TYPES(RUN_PANELS_OF_TYPE)
RUN_PANELS(tq2_0, QK_K)

static void run_q4_K(int nb, int nc) {
    (void) nc;
    gemv_q4_K(nb * QK_K, out[0], 8, weights, activations, 1, 8);
}

#define RUN_VEC_DOT(name)                                                                                              \
    void ggml_vec_dot_##name##_q8_K(int n, float * s, size_t bs, const void * x, size_t bx, const void * y, size_t by, \
                                    int nrc);                                                                          \
    static void run_##name(int nb, int nc) {                                                                           \
        (void) nc;                                                                                                     \
        ggml_vec_dot_##name##_q8_K(nb * QK_K, out[0], 0, weights, 0, activations, 0, 1);                               \
    }
RUN_VEC_DOT(q3_K)
RUN_VEC_DOT(q2_K)
RUN_VEC_DOT(iq3_s)
RUN_VEC_DOT(iq2_xxs)

static const struct kernel {
    const char * name;
    void (*run)(int nb, int nc);
} kernels[] = {
#define PANELS(NAME, name, ...) { #name, run_##name }, { #name "_row", run_##name##_row },
    ITQ_TYPES(PANELS) PANELS(TQ2_0, tq2_0){ "q4_K", run_q4_K },
    { "q3_K", run_q3_K },
    { "q2_K", run_q2_K },
    { "iq3_s", run_iq3_s },
    { "iq2_xxs", run_iq2_xxs },
};

static void * zeros(size_t size) {
    void * p = aligned_alloc(ALIGNMENT, (size + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT);
    if (!p) {
        fprintf(stderr, "error: out of memory\n");
        exit(1);
    }
    return memset(p, 0, size);
}

// Bytes of which any two are a normal number of 16 bits, any four one of 32: no kernel takes another path or another
// time for them.
static void fill(void * p, size_t size) {
    static uint64_t state = 88172645463325252u;
    for (size_t i = 0; i < size; ++i) {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        ((uint8_t *) p)[i] = (uint8_t) ((state >> 32 & 0x1F) | 0x20);
    }
}

static void prepare(const struct kernel * kernel, int nb, int nc) {
    // no layout takes more than 8 bits for a weight, so this is enough for every panel
    weights = zeros((size_t) (nb + 32) * ITQ_PANEL_ROWS * 2 * QK_K);
    if (kernel->run == run_itq3_s) {
        block_itq3_s * rows = zeros(sizeof(*rows) * (size_t) nb * ITQ_PANEL_ROWS);
        fill(rows, sizeof(*rows) * (size_t) nb * ITQ_PANEL_ROWS);
        for (int i = 0; i < nb * ITQ_PANEL_ROWS; ++i) {
            rows[i].z = 0;  // as all but the literal ternary code have it
        }
        itq_repack_itq3_s(rows, sizeof(*rows) * (size_t) nb, ITQ_PANEL_ROWS, nb, weights);
        free(rows);
    } else if (kernel->run == run_tq2_0) {
        block_tq2_0 * rows = zeros(sizeof(*rows) * (size_t) nb * ITQ_PANEL_ROWS);
        fill(rows, sizeof(*rows) * (size_t) nb * ITQ_PANEL_ROWS);
        itq_repack_tq2_0(rows, sizeof(*rows) * (size_t) nb, ITQ_PANEL_ROWS, nb, weights);
        free(rows);
    } else {
        fill(weights, (size_t) nb * 8 * 2 * QK_K);
        for (int i = 0; kernel->run == run_itq3_s_row && i < nb; ++i) {
            ((block_itq3_s *) weights)[i].z = 0;
        }
    }
    activations    = zeros(sizeof(*activations) * (size_t) nb);
    const size_t n = (size_t) nb * (size_t) nc;
    int8_t *     q = zeros(n * QK_K);
    const size_t m = n * (QK_K / 64);  // of the shortest blocks
    float *      d = zeros(m * sizeof(*d));
    int32_t *    s = zeros(m * sizeof(*s));
    fill(activations, sizeof(*activations) * (size_t) nb);
    fill(q, n * QK_K);
    fill(d, m * sizeof(*d));
    fill(s, m * sizeof(*s));
    columns = (struct itq_columns){ q, d, s };
}

// What is traced: from its first instruction to its return.
__attribute__((noinline)) void product(const struct kernel * kernel, int nb, int nc) {
    kernel->run(nb, nc);
    __asm__ volatile("" ::: "memory");
}

//
// time
//

static double now(void) {
    struct timespec t;
    timespec_get(&t, TIME_UTC);
    return (double) t.tv_sec + 1e-9 * (double) t.tv_nsec;
}

// Seconds of a million additions that wait for each other: a cycle each. Both operands are registers, because newer
// processors add up constants before they execute anything.
static double million_cycles(void) {
    uint64_t     sum = 0, one = 1;
    const double start = now();
    for (int i = 0; i < MILLION / 100; ++i) {
#if defined(__x86_64__)
        __asm__ volatile(".rept 100\n\tadd %1, %0\n\t.endr" : "+r"(sum) : "r"(one) : "cc");
#elif defined(__aarch64__)
        __asm__ volatile(".rept 100\n\tadd %0, %0, %1\n\t.endr" : "+r"(sum) : "r"(one));
#else
#    error no chain of additions for this processor
#endif
    }
    return now() - start;
}

static double seconds(const struct kernel * kernel, int nb, int nc, int times) {
    const double start = now();
    for (int i = 0; i < times; ++i) {
        product(kernel, nb, nc);
    }
    return (now() - start) / times;
}

static int ascending(const void * a, const void * b) {
    const double x = *(const double *) a, y = *(const double *) b;
    return (x > y) - (x < y);
}

#define ROUNDS 41

static double cycles(const struct kernel * kernel, int few, int many, int nc) {
    int times = 1;
    while (seconds(kernel, many, nc, times) * times < 5e-4) {
        times *= 2;
    }
    double got[ROUNDS];
    for (int i = 0; i < ROUNDS; ++i) {
        const double of_many = seconds(kernel, many, nc, times);
        const double cycle   = million_cycles() / MILLION;
        const double of_few  = seconds(kernel, few, nc, times);
        got[i]               = (of_many - of_few) / cycle / (many - few);
    }
    qsort(got, ROUNDS, sizeof(*got), ascending);
    return got[ROUNDS / 2];
}

//
// trace
//

#if defined(__linux__) && defined(__x86_64__)
#    include <signal.h>
#    include <sys/ptrace.h>
#    include <sys/user.h>
#    include <sys/wait.h>
#    include <unistd.h>

static void step(pid_t child, struct user_regs_struct * registers) {
    int status;
    if (ptrace(PTRACE_SINGLESTEP, child, NULL, NULL) < 0 || waitpid(child, &status, 0) < 0) {
        perror("ptrace");
        exit(1);
    }
    if (!WIFSTOPPED(status) || WSTOPSIG(status) == SIGILL) {
        fprintf(stderr, "error: an instruction that this processor does not have\n");
        exit(1);
    }
    if (WSTOPSIG(status) != SIGTRAP || ptrace(PTRACE_GETREGS, child, NULL, registers) < 0) {
        fprintf(stderr, "error: the traced product was stopped by signal %d\n", WSTOPSIG(status));
        exit(1);
    }
}

static int trace(const struct kernel * kernel, int nb, int nc, const char * path) {
    const pid_t child = fork();
    if (child == 0) {
        prepare(kernel, nb, nc);
        if (ptrace(PTRACE_TRACEME, 0, NULL, NULL) < 0) {
            perror("error: ptrace");
            _exit(1);
        }
        raise(SIGSTOP);
        product(kernel, nb, nc);
        _exit(0);
    }
    int status;
    if (child < 0 || waitpid(child, &status, 0) < 0 || !WIFSTOPPED(status) || WSTOPSIG(status) != SIGSTOP) {
        fprintf(stderr, "error: the product to be traced could not be prepared: %s\n",
                child > 0 && WIFSIGNALED(status) && WTERMSIG(status) == SIGILL
                    ? "an instruction that this processor does not have"
                    : "the process ended early");
        return 1;
    }
    FILE * file = fopen(path, "wb");
    if (!file) {
        perror(path);
        return 1;
    }
    struct user_regs_struct registers;
    do {
        step(child, &registers);
    } while (registers.rip != (uintptr_t) product);
    const unsigned long long stack = registers.rsp;
    while (registers.rsp <= stack) {
        const uint64_t address = registers.rip;
        fwrite(&address, sizeof(address), 1, file);
        step(child, &registers);
    }
    ptrace(PTRACE_CONT, child, NULL, NULL);
    waitpid(child, &status, 0);
    return fclose(file) != 0;
}
#else
static int trace(const struct kernel * kernel, int nb, int nc, const char * path) {
    (void) kernel, (void) nb, (void) nc, (void) path;
    fprintf(stderr, "error: tracing needs Linux on x86-64\n");
    return 1;
}
#endif

static int number(const char * text, int most) {
    const int n = atoi(text);
    if (n < 1 || n > most) {
        fprintf(stderr, "error: %s is not a number from 1 to %d\n", text, most);
        exit(1);
    }
    return n;
}

int main(int argc, char ** argv) {
    const struct kernel * kernel = NULL;
    for (size_t i = 0; argc >= 5 && i < sizeof(kernels) / sizeof(*kernels); ++i) {
        if (!strcmp(argv[2], kernels[i].name)) {
            kernel = &kernels[i];
        }
    }
    const char * mode = kernel ? argv[1] : "";
    if (!strcmp(mode, "trace") && argc == 6) {
        return trace(kernel, number(argv[4], MAX_BLOCKS), number(argv[3], MAX_COLUMNS), argv[5]);
    }
    if (!strcmp(mode, "run") && argc == 5) {
        const int nc = number(argv[3], MAX_COLUMNS), nb = number(argv[4], MAX_BLOCKS);
        prepare(kernel, nb, nc);
        product(kernel, nb, nc);
        return 0;
    }
    if (!strcmp(mode, "time") && argc == 6) {
        const int nc = number(argv[3], MAX_COLUMNS), few = number(argv[4], MAX_BLOCKS - 1);
        const int many = number(argv[5], MAX_BLOCKS);
        if (many <= few) {
            fprintf(stderr, "error: %d blocks are not more than %d\n", many, few);
            return 1;
        }
        prepare(kernel, many, nc);
        printf("%.3f\n", cycles(kernel, few, many, nc));
        return 0;
    }
    fprintf(stderr, "usage: kernel-loop run|trace|time KERNEL COLUMNS BLOCKS [FILE|BLOCKS]\n");
    return 1;
}

// One round of the kernel benchmark; scripts/bench/cpu.py runs it for several builds of ggml in turn and take medians.
//
//   bench-kernels COLUMNS|quantize TYPE...        TYPE: name=number of a ggml_type, e.g. Q3_K=11
//   bench-kernels memory MIB THREADS TYPE...
//
// Prints "name value" lines, of one thread: G products/s of a matrix product with so many columns, in the buffer type
// that llama.cpp picks, M weights/s of ggml_quantize_chunk.
//
// "memory" is products with one column of different matrices in turn, MIB of weights in all: "name weights read limit
// places ahead", G weights/s, GB/s of their bytes in memory, GB/s at which as many threads do nothing but read the same
// bytes, and how they read them (reader.h).

#include "product.h"
#include "reader.h"

#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define K           4096
#define CACHED_ROWS 512  // rows of weights that stay in the second-level cache
#define ROWS        1024
#define MANY        64    // columns from which on the products take longer than reading the weights
#define PASSES      9     // over the memory, the best counts
#define MEMORY_ROWS 4096  // of a matrix of many that no cache holds

// Products of K x rows weights and `columns` columns, in G/s.
static void bench_product(const char * name, enum ggml_type type, int64_t columns) {
    struct product p = new_product(type, K, columns < MANY ? CACHED_ROWS : ROWS, columns, 1);
    run_product(&p);

    double       best  = INFINITY;
    const double start = now();
    do {
        const double from = now();
        run_product(&p);
        best = fmin(best, now() - from);
    } while (now() < start + 0.1);
    printf("%s %.6g\n", name, (double) K * (columns < MANY ? CACHED_ROWS : ROWS) * (double) columns / best * 1e-9);
    free_product(&p);
}

static void bench_quantize(const char * name, enum ggml_type type) {
    const int rows    = 64;
    float *   x       = gaussian((int64_t) rows * K);
    float *   imatrix = checked(malloc(K * sizeof(*imatrix)));
    char *    w       = checked(malloc(ggml_row_size(type, K) * (size_t) rows));
    for (int i = 0; i < K; ++i) {
        imatrix[i] = 1.0f;
    }
    const float * importance = ggml_quantize_requires_imatrix(type) ? imatrix : NULL;
    ggml_quantize_chunk(type, x, w, 0, 1, K, importance);  // tables
    const double start = now();
    ggml_quantize_chunk(type, x, w, 0, rows, K, importance);
    printf("%s %.6g\n", name, (double) rows * K / (now() - start) * 1e-6);
    free(imatrix);
    free(w);
    free(x);
}

//
// memory
//

// Products of one column with all of a model's worth of matrices, and reading the same memory, in turn.
static void bench_memory_products(const char * name, enum ggml_type type, size_t bytes, int threads) {
    const size_t matrix   = ggml_row_size(type, K) * MEMORY_ROWS;
    const int    matrices = (int) ((bytes + matrix - 1) / matrix);

    struct product                p      = new_products(type, K, MEMORY_ROWS, 1, matrices, threads);
    struct ggml_threadpool_params params = ggml_threadpool_params_default(threads);
    struct ggml_threadpool *      pool   = checked(ggml_threadpool_new(&params));
    const void *                  data   = ggml_backend_buffer_get_base(p.matrix_buffer);
    const size_t                  size   = ggml_backend_buffer_get_size(p.matrix_buffer);
    double                        best   = INFINITY;
    double                        limit  = 0.0;
    ggml_backend_cpu_set_threadpool(p.backend, pool);
    run_product(&p);

    const struct way way = best_way(data, size, threads);
    for (int pass = 0; pass < PASSES; ++pass) {  // as many tries for the reader as for the product
        const double from = now();
        run_product(&p);
        best  = fmin(best, now() - from);
        limit = fmax(limit, read_speed(data, size, threads, way));
    }
    const double weights = (double) K * MEMORY_ROWS * matrices;
    printf("%s %.6g %.6g %.6g %d %zu\n", name, weights / best * 1e-9, (double) size / best * 1e-9, limit, way.places,
           way.ahead);
    free_product(&p);
    ggml_threadpool_free(pool);
}

static int usage(void) {
    fprintf(stderr,
            "usage: bench-kernels COLUMNS|quantize NAME=TYPE... | bench-kernels memory MIB THREADS NAME=TYPE...\n");
    return 1;
}

int main(int argc, char ** argv) {
    const char * mode     = argc > 1 ? argv[1] : "";
    const bool   memory   = !strcmp(mode, "memory");
    const bool   quantize = !strcmp(mode, "quantize");
    const int    first    = memory ? 4 : 2;
    if (argc <= first || (memory && (atoi(argv[2]) < 1 || atoi(argv[3]) < 1)) ||
        (!memory && !quantize && atoi(mode) < 1)) {
        return usage();
    }
    ggml_cpu_init();
    for (int i = first; i < argc; ++i) {
        char * number = strchr(argv[i], '=');
        if (!number) {
            fprintf(stderr, "error: %s is not NAME=TYPE\n", argv[i]);
            return 1;
        }
        *number                   = 0;
        const enum ggml_type type = (enum ggml_type) atoi(number + 1);
        if (memory) {
            bench_memory_products(argv[i], type, (size_t) atoi(argv[2]) << 20, atoi(argv[3]));
        } else if (quantize) {
            bench_quantize(argv[i], type);
        } else {
            bench_product(argv[i], type, atoi(mode));
        }
    }
    return 0;
}

// One round of the kernel benchmark; the scripts in scripts/bench run it for several builds of ggml in turn and take medians.
//
//   bench-kernels COLUMNS|quantize TYPE...        TYPE: name=number of a ggml_type, e.g. Q3_K=11
//   bench-kernels memory MIB THREADS TYPE...
//   bench-kernels roofline THREADS...
//
// Prints "name value" lines, of one thread: G products/s of a matrix product with so many columns, in the buffer type
// that llama.cpp picks, M weights/s of ggml_quantize_chunk; GB/s of reading memory with so many threads and G products/s
// of the 8-bit dot product on registers.
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

#if defined(__AVX2__)
#    include <immintrin.h>
#elif defined(__ARM_FEATURE_DOTPROD)
#    include <arm_neon.h>
#endif

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

//
// roofline
//

static void bench_memory(int threads) {
    const size_t size = ((size_t) 256 << 20) * (size_t) threads;
    void *       data = checked(malloc(size));
    memset(data, 1, size);
    const struct way way  = best_way(data, size, threads);
    double           best = 0.0;
    for (int pass = 0; pass < PASSES; ++pass) {
        best = fmax(best, read_speed(data, size, threads, way));
    }
    printf("memory_%d %.6g\n", threads, best);
    free(data);
}

// Products of 8 bits a second, operands in registers.
static void bench_products(void) {
    const int64_t n     = 4000000;
    int64_t       lanes = 0;
    double        best  = INFINITY;
    volatile int  sink  = 0;
    const int     one   = sink + 1;
    for (int round = 0; round < 5; ++round) {
        const double start = now();
#if defined(__AVX512VNNI__)
        lanes = 64;
        __m512i acc[12], u = _mm512_set1_epi8((char) one), v = _mm512_set1_epi8((char) one);
        for (int j = 0; j < 12; ++j) {
            acc[j] = _mm512_setzero_si512();
        }
        for (int64_t i = 0; i < n; ++i) {
            for (int j = 0; j < 12; ++j) {
                acc[j] = _mm512_dpbusd_epi32(acc[j], u, v);
            }
        }
        for (int j = 0; j < 12; ++j) {
            sink += _mm512_reduce_add_epi32(acc[j]);
        }
#elif defined(__AVX2__)
        lanes = 32;
        __m256i acc[12], u = _mm256_set1_epi8((char) one), v = _mm256_set1_epi16((short) one);
        for (int j = 0; j < 12; ++j) {
            acc[j] = _mm256_set1_epi8((char) (j + one));
        }
        for (int64_t i = 0; i < n; ++i) {
            for (int j = 0; j < 12; ++j) {
                acc[j] = _mm256_madd_epi16(_mm256_maddubs_epi16(acc[j], u), v);
            }
        }
        for (int j = 0; j < 12; ++j) {
            sink += _mm256_extract_epi32(acc[j], 0);
        }
#elif defined(__ARM_FEATURE_DOTPROD)
        lanes = 16;
        int32x4_t acc[12];
        int8x16_t u = vdupq_n_s8((int8_t) one);
        for (int j = 0; j < 12; ++j) {
            acc[j] = vdupq_n_s32(0);
        }
        for (int64_t i = 0; i < n; ++i) {
            for (int j = 0; j < 12; ++j) {
                acc[j] = vdotq_s32(acc[j], u, u);
            }
        }
        for (int j = 0; j < 12; ++j) {
            sink += vaddvq_s32(acc[j]);
        }
#else
        (void) one;
        return;
#endif
        best = fmin(best, now() - start);
    }
    printf("products %.6g\n", 12.0 * (double) n * (double) lanes / best * 1e-9);
}

static int usage(void) {
    fprintf(stderr,
            "usage: bench-kernels COLUMNS|quantize NAME=TYPE... | bench-kernels memory MIB THREADS NAME=TYPE... |"
            " bench-kernels roofline THREADS...\n");
    return 1;
}

int main(int argc, char ** argv) {
    const char * mode     = argc > 1 ? argv[1] : "";
    const bool   memory   = !strcmp(mode, "memory");
    const bool   quantize = !strcmp(mode, "quantize");
    const bool   roofline = !strcmp(mode, "roofline");
    const int    first    = memory ? 4 : 2;
    if (argc <= first || (memory && (atoi(argv[2]) < 1 || atoi(argv[3]) < 1)) ||
        (!memory && !quantize && !roofline && atoi(mode) < 1)) {
        return usage();
    }
    ggml_cpu_init();
    for (int i = first; i < argc; ++i) {
        if (roofline) {
            if (atoi(argv[i]) < 1) {
                return usage();
            }
            bench_memory(atoi(argv[i]));
            continue;
        }
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
    if (roofline) {
        bench_products();
    }
    return 0;
}

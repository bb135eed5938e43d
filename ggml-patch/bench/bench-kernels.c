// One round of the kernel benchmark, one thread; scripts/bench/kernels.py runs it for several builds of ggml in turn and takes
// medians.
//
//   bench-kernels COLUMNS|quantize TYPE...     TYPE: name=number of a ggml_type, e.g. Q3_K=11
//   bench-kernels roofline THREADS
//
// Prints "name value" lines: G products/s of a matrix product with so many columns, in the buffer type that llama.cpp
// picks, M weights/s of ggml_quantize_chunk; GB/s of reading memory and G products/s of the 8-bit dot product on
// registers.

#include "product.h"

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
#if !defined(_WIN32)
#    include <pthread.h>
#endif

#define K           4096
#define CACHED_ROWS 512  // rows of weights that stay in the second-level cache
#define ROWS        1024
#define MANY        64  // columns from which on the products take longer than reading the weights

static double now(void) {
    struct timespec t;
    timespec_get(&t, TIME_UTC);
    return (double) t.tv_sec + 1e-9 * (double) t.tv_nsec;
}

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
    ggml_quantize_chunk(type, x, w, 0, 1, K, NULL);  // tables
    const double start = now();
    ggml_quantize_chunk(type, x, w, 0, rows, K, NULL);
    printf("%s %.6g\n", name, (double) rows * K / (now() - start) * 1e-6);
    free(imatrix);
    free(w);
    free(x);
}

//
// roofline
//

struct reader {
    const uint8_t * data;
    size_t          size;
    uint64_t        sum;
};

static void * read_all(void * arg) {
    struct reader * r = arg;
    uint64_t        s[8];
    memset(s, 0, sizeof(s));
    for (size_t i = 0; i + sizeof(s) <= r->size; i += sizeof(s)) {
        uint64_t v[8];
        memcpy(v, r->data + i, sizeof(v));
        for (int j = 0; j < 8; ++j) {
            s[j] += v[j];
        }
    }
    for (int j = 0; j < 8; ++j) {
        r->sum += s[j];
    }
    return NULL;
}

static void bench_memory(int threads) {
    const size_t    size = (size_t) 256 << 20;
    struct reader * r    = checked(calloc((size_t) threads, sizeof(*r)));
    for (int t = 0; t < threads; ++t) {
        uint8_t * data = checked(malloc(size));
        memset(data, t + 1, size);
        r[t].data = data;
        r[t].size = size;
    }
    double best = INFINITY;
    for (int round = 0; round < 5; ++round) {
        const double start = now();
#if !defined(_WIN32)
        pthread_t * id = checked(calloc((size_t) threads, sizeof(*id)));
        for (int t = 1; t < threads; ++t) {
            if (pthread_create(&id[t], NULL, read_all, &r[t])) {
                fprintf(stderr, "error: a thread cannot be started\n");
                exit(1);
            }
        }
        read_all(&r[0]);
        for (int t = 1; t < threads; ++t) {
            pthread_join(id[t], NULL);
        }
        free(id);
#else
        for (int t = 0; t < threads; ++t) {
            read_all(&r[t]);
        }
#endif
        best = fmin(best, now() - start);
    }
    printf("memory_%d %.6g\n", threads, (double) size * threads / best * 1e-9);
    for (int t = 0; t < threads; ++t) {
        free((void *) (uintptr_t) r[t].data);
    }
    free(r);
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

int main(int argc, char ** argv) {
    if (argc < 3) {
        fprintf(stderr, "usage: bench-kernels COLUMNS|quantize NAME=TYPE... | bench-kernels roofline THREADS\n");
        return 1;
    }
    ggml_cpu_init();
    for (int i = 2; i < argc; ++i) {
        char *       number = strchr(argv[i], '=');
        const char * mode   = argv[1];
        if (!strcmp(mode, "roofline")) {
            bench_memory(atoi(argv[i]));
            continue;
        }
        if (!number) {
            fprintf(stderr, "error: %s is not NAME=TYPE\n", argv[i]);
            return 1;
        }
        *number                   = 0;
        const enum ggml_type type = (enum ggml_type) atoi(number + 1);
        if (!strcmp(mode, "quantize")) {
            bench_quantize(argv[i], type);
        } else if (atoi(mode) > 0) {
            bench_product(argv[i], type, atoi(mode));
        } else {
            fprintf(stderr, "error: unknown mode %s\n", mode);
            return 1;
        }
    }
    if (!strcmp(argv[1], "roofline")) {
        bench_products();
    }
    return 0;
}

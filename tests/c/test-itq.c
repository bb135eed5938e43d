// Unit test of the C files of a trellis type, made to be run under the address and undefined-behaviour sanitizers.
// Compiled with -DTYPE=itq3_s, or another name, -DLENGTH, weights of a block, -DCODECS, how many it has, and -DERROR, the
// relative squared error at default effort.
//
//   test-itq VECTORS      64 records of a block and its weights (double), 128 of blocks of 64
//
// Buffers come from malloc at their exact size, so that a read or a write beyond them is seen.

#include "ggml-cpu.h"
#include "ggml-itq.h"
#include "itq-quants.h"

#include <math.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define PASTE(a, b, c)  a##b##c
#define EXPAND(a, b, c) PASTE(a, b, c)
#define block_t         EXPAND(block_, TYPE, )
#define dequantize_row  EXPAND(dequantize_row_, TYPE, )
#define quantize        EXPAND(quantize_, TYPE, )
#define quantize_effort EXPAND(quantize_, TYPE, _effort)
#if LENGTH == 256
#    define vec_dot      EXPAND(ggml_vec_dot_, TYPE, _q8_K_h)
#    define quantize_row quantize_row_q8_K_h
typedef block_q8_K activations_t;
#else
#    define vec_dot      EXPAND(ggml_vec_dot_, TYPE, _q8_n_h)
#    define quantize_row quantize_row_q8_n_h
typedef block_q8_n_h activations_t;
#endif

static int failures = 0;

#define CHECK(condition)                                                                  \
    do {                                                                                  \
        if (!(condition)) {                                                               \
            fprintf(stderr, "%s:%d: %s: %s\n", __FILE__, __LINE__, __func__, #condition); \
            failures++;                                                                   \
        }                                                                                 \
    } while (0)

static void * allocate(size_t size) {
    void * p = malloc(size);
    if (p == NULL) {
        abort();
    }
    return p;
}

// Gaussian by the sum of twelve uniform numbers: good enough, and the same everywhere.
static float gaussian(uint32_t * state) {
    float sum = -6.0f;
    for (int i = 0; i < 12; ++i) {
        *state = *state * 1664525u + 1013904223u;
        sum += (float) (*state >> 8) / 16777216.0f;
    }
    return sum;
}

static float * gaussian_row(int64_t n, uint32_t seed) {
    float * x = allocate(sizeof(float) * (size_t) n);
    for (int64_t i = 0; i < n; ++i) {
        x[i] = 0.02f * gaussian(&seed);
    }
    return x;
}

static void test_vectors(const char * path) {
    FILE * file = fopen(path, "rb");
    CHECK(file != NULL);
    if (file == NULL) {
        return;
    }
    int count = 0;
    for (;; ++count) {
        block_t *  block   = allocate(sizeof(*block));
        double *   weights = allocate(LENGTH * sizeof(double));
        float *    decoded = allocate(LENGTH * sizeof(float));
        const bool read =
            fread(block, sizeof(*block), 1, file) == 1 && fread(weights, sizeof(double), LENGTH, file) == LENGTH;
        if (read) {
            double largest = 0.0;
            for (int i = 0; i < LENGTH; ++i) {
                largest = fmax(largest, fabs(weights[i]));
            }
            dequantize_row(block, decoded, LENGTH);
            for (int i = 0; i < LENGTH; ++i) {
                CHECK(fabs(decoded[i] - weights[i]) <= 1e-6 * largest);
            }
        }
        free(block);
        free(weights);
        free(decoded);
        if (!read) {
            break;
        }
    }
    fclose(file);
    CHECK(count == (LENGTH == 256 ? 64 : 128));
}

static void test_fwht_is_its_own_inverse(void) {
    uint32_t seed = 1;
    float *  x    = allocate(LENGTH * sizeof(float));
    float *  y    = allocate(LENGTH * sizeof(float));
    for (int i = 0; i < LENGTH; ++i) {
        x[i] = y[i] = floorf(100.0f * gaussian(&seed));  // small integers: every sum is exact
    }
    itq_fwht(y, LENGTH);
    itq_fwht(y, LENGTH);
    for (int i = 0; i < LENGTH; ++i) {
        CHECK(y[i] == (float) LENGTH * x[i]);
    }
    free(x);
    free(y);
}

static double relative_error(const float * x, const float * y, int64_t n) {
    double error = 0.0;
    double norm  = 0.0;
    for (int64_t i = 0; i < n; ++i) {
        error += ((double) x[i] - y[i]) * ((double) x[i] - y[i]);
        norm += (double) x[i] * x[i];
    }
    return error / norm;
}

// Every codec and effort, groups of blocks full and not; a block's bytes do not depend on its neighbours.
static void test_encoders(void) {
    static const int    counts[]     = { 1, 2, 15, 16, 17, 40 };
    static const double limits[2][2] = { { 1.09 * ERROR, 1.07 * ERROR }, { 0.30, 0.30 } };  // 40 blocks: a small sample

    for (size_t c = 0; c < sizeof(counts) / sizeof(counts[0]); ++c) {
        const int64_t n     = LENGTH * (int64_t) counts[c];
        float *       x     = gaussian_row(n, 7);
        float *       y     = allocate(sizeof(float) * (size_t) n);
        block_t *     q     = allocate(sizeof(block_t) * (size_t) counts[c]);
        block_t *     alone = allocate(sizeof(block_t));
        for (int codec = 0; codec < CODECS; ++codec) {
            for (int effort = 0; effort < 2; ++effort) {
                memset(q, 0xff, sizeof(block_t) * (size_t) counts[c]);
                CHECK(quantize_effort(x, q, counts[c], LENGTH, codec, effort) == sizeof(block_t) * (size_t) counts[c]);
                for (int i = 0; i < counts[c]; ++i) {
                    quantize_effort(x + LENGTH * i, alone, 1, LENGTH, codec, effort);
                    CHECK(memcmp(alone, &q[i], sizeof(*alone)) == 0);
                }
                dequantize_row(q, y, n);
                if (counts[c] == 40) {
                    CHECK(relative_error(x, y, n) <= limits[codec][effort]);
                }
            }
        }
        free(x);
        free(y);
        free(q);
        free(alone);
    }
}

static void test_zero_and_not_finite(void) {
    static const float bad[] = { NAN, INFINITY, -INFINITY, 3e38f };
    for (int codec = 0; codec < CODECS; ++codec) {
        for (size_t b = 0; b < sizeof(bad) / sizeof(bad[0]); ++b) {
            float *   x     = gaussian_row(4 * LENGTH, 9);
            block_t * clean = allocate(4 * sizeof(*clean));
            block_t * q     = allocate(4 * sizeof(*q));
            memset(x + LENGTH, 0, LENGTH * sizeof(float));
            quantize_effort(x, clean, 1, 4 * LENGTH, codec, ITQ_EFFORT_DEFAULT);
            x[2 * LENGTH + 13] = bad[b];
            quantize_effort(x, q, 1, 4 * LENGTH, codec, ITQ_EFFORT_DEFAULT);

            static const block_t zero;
            CHECK(memcmp(&q[1], &zero, sizeof(zero)) == 0);
            CHECK(isnan(ggml_fp16_to_fp32(q[2].d)));
            CHECK(memcmp(&q[0], &clean[0], 2 * sizeof(*q)) == 0 && memcmp(&q[3], &clean[3], sizeof(*q)) == 0);
            free(x);
            free(clean);
            free(q);
        }
    }
}

static double weighted_error(const float * x, const float * y, const float * importance, int64_t nrows, int n) {
    double sum = 0.0;
    for (int64_t i = 0; i < nrows * n; ++i) {
        sum += importance[i % n] * ((double) x[i] - y[i]) * ((double) x[i] - y[i]);
    }
    return sum;
}

// Encoding with an importance matrix: less of the error it weights, a row count that fills no group.
static void test_importance_matrix(void) {
    const int     n          = 2 * LENGTH;
    const int64_t nrows      = 19;
    uint32_t      seed       = 5;
    float *       x          = gaussian_row(nrows * n, 6);
    float *       y          = allocate(sizeof(float) * (size_t) (nrows * n));
    float *       importance = allocate(sizeof(float) * (size_t) n);
    block_t *     q          = allocate(sizeof(*q) * (size_t) (nrows * n / LENGTH));
    for (int i = 0; i < n; ++i) {
        importance[i] = expf(gaussian(&seed));
    }

    CHECK(quantize(x, q, nrows, n, NULL) == sizeof(*q) * (size_t) (nrows * n / LENGTH));
    dequantize_row(q, y, nrows * n);
    const double plain = weighted_error(x, y, importance, nrows, n);
    CHECK(quantize(x, q, nrows, n, importance) == sizeof(*q) * (size_t) (nrows * n / LENGTH));
    dequantize_row(q, y, nrows * n);
    CHECK(weighted_error(x, y, importance, nrows, n) < plain);

    x[3 * n + LENGTH + 44] = NAN;
    quantize(x, q, nrows, n, importance);
    CHECK(isnan(ggml_fp16_to_fp32(q[3 * 2 + 1].d)));
    CHECK(!isnan(ggml_fp16_to_fp32(q[2 * 2].d)) && !isnan(ggml_fp16_to_fp32(q[4 * 2].d)));
    free(x);
    free(y);
    free(importance);
    free(q);
}

// dot(H v, x) = dot(v, H x), up to the 8 bits of the activations.
static void test_vec_dot(void) {
    for (int codec = 0; codec < CODECS; ++codec) {
        const int       n = 2048;
        float *         w = gaussian_row(n, 3);
        float *         x = gaussian_row(n, 4);
        float *         d = allocate(sizeof(float) * (size_t) n);
        block_t *       q = allocate(sizeof(*q) * (size_t) n / LENGTH);
        activations_t * a = allocate(sizeof(*a) * (size_t) n / LENGTH);
        memset(x + 2 * LENGTH, 0, LENGTH * sizeof(float));
        quantize_effort(w, q, 1, n, codec, ITQ_EFFORT_FAST);
        dequantize_row(q, d, n);
        quantize_row(x, a, n);

        float result = 0.0f;
        vec_dot(n, &result, 0, q, 0, a, 0, 1);
        double exact  = 0.0;
        double norm_d = 0.0;
        double norm_x = 0.0;
        for (int i = 0; i < n; ++i) {
            exact += (double) d[i] * x[i];
            norm_d += (double) d[i] * d[i];
            norm_x += (double) x[i] * x[i];
        }
        // a step of 8 bits is about 1/42 of the block's RMS; n independent errors of step/sqrt(12)
        CHECK(fabs(result - exact) <= 5.0 * (1.0 / 42 / sqrt(12.0)) / sqrt((double) n) * sqrt(norm_d * norm_x));
        free(w);
        free(x);
        free(d);
        free(q);
        free(a);
    }
}

int main(int argc, char ** argv) {
    if (argc != 2) {
        fprintf(stderr, "usage: %s VECTORS\n", argv[0]);
        return 2;
    }
    ggml_cpu_init();  // the table of fp16 values
    test_vectors(argv[1]);
    test_fwht_is_its_own_inverse();
    test_encoders();
    test_zero_and_not_finite();
    test_importance_matrix();
    test_vec_dot();
    printf(failures == 0 ? "all passed\n" : "%d checks failed\n", failures);
    return failures != 0;
}

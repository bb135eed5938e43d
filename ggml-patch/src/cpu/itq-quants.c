// CPU kernels of the trellis types, portable C.

#include "itq-quants.h"

#include "ggml-cpu-impl.h"
#include "itq-arch-fallback.h"
#include "simd-mappings.h"

#include <assert.h>
#include <math.h>
#include <stdbool.h>
#include <string.h>

#define DEFINE_QUANTIZE_ROW(NAME, name, ...)                                                     \
    void quantize_row_##name(const float * GGML_RESTRICT x, void * GGML_RESTRICT y, int64_t k) { \
        quantize_row_##name##_ref(x, y, k);                                                      \
    }
ITQ_TYPES(DEFINE_QUANTIZE_ROW)

// What n numbers are multiplied by to fill 8 bits. 0: they have no usable scale, and *d is set to what they have for one,
// NaN if there is a NaN or an infinity among them, so that every product with them is NaN.
static float scale_to_8_bits(const float * x, int n, float * d) {
    float amax   = 0.0f;
    float max    = 0.0f;
    bool  finite = true;
    for (int j = 0; j < n; ++j) {
        const float ax = fabsf(x[j]);
        finite         = finite && ax < INFINITY;
        if (ax > amax) {
            amax = ax;
            max  = x[j];
        }
    }
    if (!finite || amax < ITQ3_S_ACT_MIN) {
        *d = finite ? 0.0f : NAN;
        return 0.0f;
    }
    const float iscale = -127.0f / max;
    *d                 = 1 / iscale;
    return iscale;
}

// Rounds n numbers; their sum. The rounding comes from a function, so that no compiler fuses it with the product before it.
static int round_to_8_bits(const float * x, int n, float iscale, int8_t * qs) {
    int sum = 0;
    for (int l = 0; l < n; ++l) {
        const int v = (int) lrintf(iscale * x[l]);
        qs[l]       = (int8_t) (v < 127 ? v : 127);
        sum += qs[l];
    }
    return sum;
}

// As quantize_row_q8_K_ref, with nothing left open: the sums of a block of zeros are set.
static void quantize_block_q8_K(const float * GGML_RESTRICT x, block_q8_K * GGML_RESTRICT y) {
    float       d;
    const float iscale = scale_to_8_bits(x, QK_K, &d);
    if (iscale == 0.0f) {
        memset(y, 0, sizeof(*y));
        y->d = d;
        return;
    }
    for (int j = 0; j < QK_K / 16; ++j) {
        y->bsums[j] = (int16_t) round_to_8_bits(x + 16 * j, 16, iscale, y->qs + 16 * j);
    }
    y->d = d;
}

void quantize_row_q8_K_h_generic(const float * GGML_RESTRICT x, void * GGML_RESTRICT vy, int64_t k) {
    assert(k % QK_K == 0);
    const int64_t nb = k / QK_K;

    block_q8_K * GGML_RESTRICT y = vy;

    for (int64_t i = 0; i < nb; ++i) {
        float rotated[QK_K];
        memcpy(rotated, x + i * QK_K, sizeof(rotated));
        itq_fwht(rotated, QK_K);
        for (int j = 0; j < QK_K; ++j) {
            rotated[j] *= 0.0625f;
        }
        quantize_block_q8_K(rotated, &y[i]);
    }
}

void quantize_row_q8_n_h_generic(const float * GGML_RESTRICT x, void * GGML_RESTRICT vy, int64_t k) {
    assert(k % 64 == 0);

    block_q8_n_h * GGML_RESTRICT y = vy;

    for (int64_t i = 0; i < k / 64; ++i) {
        float rotated[64];
        memcpy(rotated, x + i * 64, sizeof(rotated));
        itq_fwht(rotated, 64);
        for (int j = 0; j < 64; ++j) {
            rotated[j] *= 0.125f;
        }
        float       d;
        const float iscale = scale_to_8_bits(rotated, 64, &d);
        if (iscale == 0.0f) {
            memset(&y[i], 0, sizeof(y[i]));
        } else {
            y[i].sum = round_to_8_bits(rotated, 64, iscale, y[i].qs);
        }
        y[i].d = d;
    }
}

// Product of the levels of a block with a block of activations.
static float dot_block(const int8_t * levels, float d, float z, const block_q8_K * y) {
    int32_t sum = 0;
    for (int j = 0; j < QK_K; ++j) {
        sum += levels[j] * y->qs[j];
    }
    int32_t total = 0;  // of the activations, for the zero-point
    for (int j = 0; j < QK_K / 16; ++j) {
        total += y->bsums[j];
    }
    return d * 0.03125f * y->d * ((float) sum - z * (float) total);
}

#define ZERO_POINT_1(block) GGML_CPU_FP16_TO_FP32(itq_without_state(&(block)->z))
#define ZERO_POINT_0(block) 0.0f

#define DEFINE_VEC_DOT(NAME, name, bits, n_levels, length, has_z, number)                                            \
    void ggml_vec_dot_##name##_q8_K_h(int n, float * GGML_RESTRICT s, size_t bs, const void * GGML_RESTRICT vx,      \
                                      size_t bx, const void * GGML_RESTRICT vy, size_t by, int nrc) {                \
        assert(n % QK_K == 0);                                                                                       \
        assert(nrc == 1);                                                                                            \
        GGML_UNUSED(bs);                                                                                             \
        GGML_UNUSED(bx);                                                                                             \
        GGML_UNUSED(by);                                                                                             \
        GGML_UNUSED(nrc);                                                                                            \
                                                                                                                     \
        const block_##name * GGML_RESTRICT x    = vx;                                                                \
        const block_q8_K * GGML_RESTRICT   y    = vy;                                                                \
        float                              sumf = 0.0f;                                                              \
        for (int i = 0; i < n / QK_K; ++i) {                                                                         \
            int8_t levels[QK_K];                                                                                     \
            name##_decode_levels(&x[i], levels);                                                                     \
            sumf += dot_block(levels, GGML_CPU_FP16_TO_FP32(name##_scale(&x[i])), ZERO_POINT_##has_z(&x[i]), &y[i]); \
        }                                                                                                            \
        *s = sumf;                                                                                                   \
    }
ITQ_TYPES_256(DEFINE_VEC_DOT)

#define DEFINE_VEC_DOT_64(NAME, name, ...)                                                                      \
    void ggml_vec_dot_##name##_q8_n_h(int n, float * GGML_RESTRICT s, size_t bs, const void * GGML_RESTRICT vx, \
                                      size_t bx, const void * GGML_RESTRICT vy, size_t by, int nrc) {           \
        assert(n % 64 == 0);                                                                                    \
        assert(nrc == 1);                                                                                       \
        GGML_UNUSED(bs);                                                                                        \
        GGML_UNUSED(bx);                                                                                        \
        GGML_UNUSED(by);                                                                                        \
        GGML_UNUSED(nrc);                                                                                       \
                                                                                                                \
        const block_##name * GGML_RESTRICT x    = vx;                                                           \
        const block_q8_n_h * GGML_RESTRICT y    = vy;                                                           \
        float                              sumf = 0.0f;                                                         \
        for (int i = 0; i < n / 64; ++i) {                                                                      \
            int8_t levels[64];                                                                                  \
            name##_decode_levels(&x[i], levels);                                                                \
            int32_t sum = 0;                                                                                    \
            for (int j = 0; j < 64; ++j) {                                                                      \
                sum += levels[j] * y[i].qs[j];                                                                  \
            }                                                                                                   \
            sumf += GGML_CPU_FP16_TO_FP32(name##_scale(&x[i])) * 0.03125f * (float) sum * y[i].d;               \
        }                                                                                                       \
        *s = sumf;                                                                                              \
    }
ITQ_TYPES_64(DEFINE_VEC_DOT_64)

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

// As quantize_row_q8_K_ref, with nothing left open: the rounding comes from a function, so that no compiler fuses it
// with the product before it; the sums of a block of zeros are set; a block that has no usable scale is defined: one with
// a NaN or an infinity has NaN for its scale, so that every product with it is NaN.
static void quantize_block_q8_K(const float * GGML_RESTRICT x, block_q8_K * GGML_RESTRICT y) {
    float amax   = 0.0f;
    float max    = 0.0f;
    bool  finite = true;
    for (int j = 0; j < QK_K; ++j) {
        const float ax = fabsf(x[j]);
        finite         = finite && ax < INFINITY;
        if (ax > amax) {
            amax = ax;
            max  = x[j];
        }
    }
    if (!finite || amax < ITQ3_S_ACT_MIN) {
        memset(y, 0, sizeof(*y));
        y->d = finite ? 0.0f : NAN;
        return;
    }
    const float iscale = -127.0f / max;
    for (int j = 0; j < QK_K / 16; ++j) {
        int sum = 0;
        for (int l = 16 * j; l < 16 * j + 16; ++l) {
            const int v = (int) lrintf(iscale * x[l]);
            y->qs[l]    = (int8_t) (v < 127 ? v : 127);
            sum += y->qs[l];
        }
        y->bsums[j] = (int16_t) sum;
    }
    y->d = 1 / iscale;
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

#define ZERO_POINT_1(block) GGML_CPU_FP16_TO_FP32((block)->z)
#define ZERO_POINT_0(block) 0.0f

#define DEFINE_VEC_DOT(NAME, name, bits, n_levels, length, has_z, number)                                              \
    void ggml_vec_dot_##name##_q8_K_h_generic(int n, float * GGML_RESTRICT s, size_t bs,                               \
                                              const void * GGML_RESTRICT vx, size_t bx, const void * GGML_RESTRICT vy, \
                                              size_t by, int nrc) {                                                    \
        assert(n % QK_K == 0);                                                                                         \
        assert(nrc == 1);                                                                                              \
        GGML_UNUSED(bs);                                                                                               \
        GGML_UNUSED(bx);                                                                                               \
        GGML_UNUSED(by);                                                                                               \
        GGML_UNUSED(nrc);                                                                                              \
                                                                                                                       \
        const block_##name * GGML_RESTRICT x    = vx;                                                                  \
        const block_q8_K * GGML_RESTRICT   y    = vy;                                                                  \
        float                              sumf = 0.0f;                                                                \
        for (int i = 0; i < n / QK_K; ++i) {                                                                           \
            int8_t levels[QK_K];                                                                                       \
            name##_decode_levels(x[i].qs, x[i].sel, levels);                                                           \
            sumf += dot_block(levels, GGML_CPU_FP16_TO_FP32(x[i].d), ZERO_POINT_##has_z(&x[i]), &y[i]);                \
        }                                                                                                              \
        *s = sumf;                                                                                                     \
    }
ITQ_TYPES(DEFINE_VEC_DOT)

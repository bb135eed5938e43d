// CPU kernels of the trellis types, NEON: with the dot product instructions where the target has them, without elsewhere.
// docs/kernels.md explains them.

#include "../../itq-quants.h"
#include "itq-decode.h"

#include "ggml-cpu-impl.h"
#include "quants.h"
#include "simd-mappings.h"

#include <assert.h>
#include <math.h>
#include <string.h>

#if defined(__ARM_NEON) && defined(__aarch64__)

static inline float32x4_t negate_lanes(float32x4_t v, uint32x4_t minus) {
    return vreinterpretq_f32_u32(veorq_u32(vreinterpretq_u32_f32(v), minus));
}

// Stages h, 2h, 4h over eight vectors h apart.
static inline void fwht_8(float32x4_t * v) {
    for (int h = 1; h < 8; h *= 2) {
        for (int j = 0; j < 8; ++j) {
            if ((j & h) == 0) {
                const float32x4_t a = v[j];
                const float32x4_t b = v[j + h];
                v[j]                = vaddq_f32(a, b);
                v[j + h]            = vsubq_f32(a, b);
            }
        }
    }
}

// The bytes are those of the generic functions: the same additions in the same order, the same rounding.

// Stages h = 1 .. 16 of 32 numbers: 1, 2 within a vector, 4, 8, 16 over eight.
static inline void fwht_32(const float * x, float32x4_t v[8]) {
    static const uint32_t signs_1[4] = { 0, 0x80000000, 0, 0x80000000 };
    static const uint32_t signs_2[4] = { 0, 0, 0x80000000, 0x80000000 };
    const uint32x4_t      minus_1    = vld1q_u32(signs_1);
    const uint32x4_t      minus_2    = vld1q_u32(signs_2);
    for (int j = 0; j < 8; ++j) {
        float32x4_t a = vld1q_f32(x + 4 * j);
        a             = vaddq_f32(vrev64q_f32(a), negate_lanes(a, minus_1));
        v[j]          = vaddq_f32(vextq_f32(a, a, 2), negate_lanes(a, minus_2));
    }
    fwht_8(v);
}

// What n rotated numbers, the largest and the smallest of which are in vmax and vmin beside zeros, are multiplied by to fill
// 8 bits. 0: they have no usable scale, and *d is what they have for one.
static inline float scale_to_8_bits(const float * x, int n, float32x4_t vmax, float32x4_t vmin, float * d) {
    const float hi   = vmaxvq_f32(vmax);
    const float lo   = vminvq_f32(vmin);
    const float amax = hi > -lo ? hi : -lo;
    if (!(amax >= ITQ3_S_ACT_MIN && amax < INFINITY)) {
        *d = amax < INFINITY ? 0.0f : NAN;
        return 0.0f;
    }
    float max = hi > -lo ? hi : lo;
    if (hi == -lo) {  // the sign of the first of them
        for (int j = 0; j < n; ++j) {
            if (x[j] == hi || x[j] == lo) {
                max = x[j];
                break;
            }
        }
    }
    const float iscale = -127.0f / max;
    *d                 = 1 / iscale;
    return iscale;
}

// Rounds 16 numbers; their sum.
static inline int16_t round_to_8_bits(const float * x, float iscale, int8_t * qs) {
    int16x8_t h[2];
    for (int l = 0; l < 2; ++l) {
        const float32x4_t a = vmulq_n_f32(vld1q_f32(x + 8 * l), iscale);
        const float32x4_t b = vmulq_n_f32(vld1q_f32(x + 8 * l + 4), iscale);
        h[l]                = vcombine_s16(vqmovn_s32(vcvtnq_s32_f32(a)), vqmovn_s32(vcvtnq_s32_f32(b)));
    }
    const int8x16_t q = vcombine_s8(vqmovn_s16(h[0]), vqmovn_s16(h[1]));  // saturates at 127
    vst1q_s8(qs, q);
    return vaddlvq_s8(q);
}

void quantize_row_q8_K_h(const float * GGML_RESTRICT x, void * GGML_RESTRICT vy, int64_t k) {
    assert(k % QK_ITQ3_S == 0);
    const int64_t nb = k / QK_ITQ3_S;

    block_q8_K * GGML_RESTRICT y = vy;

    for (int64_t i = 0; i < nb; ++i, x += QK_ITQ3_S) {
        float       buf[QK_ITQ3_S];
        float32x4_t v[8];
        for (int g = 0; g < QK_ITQ3_S; g += 32) {
            fwht_32(x + g, v);
            for (int j = 0; j < 8; ++j) {
                vst1q_f32(buf + g + 4 * j, v[j]);
            }
        }

        // h = 32, 64, 128, and the scale
        float32x4_t vmax = vdupq_n_f32(0.0f);
        float32x4_t vmin = vdupq_n_f32(0.0f);
        for (int g = 0; g < 32; g += 4) {
            for (int j = 0; j < 8; ++j) {
                v[j] = vld1q_f32(buf + g + 32 * j);
            }
            fwht_8(v);
            for (int j = 0; j < 8; ++j) {
                v[j] = vmulq_n_f32(v[j], 0.0625f);
                vmax = vmaxq_f32(vmax, v[j]);  // NaN where either is
                vmin = vminq_f32(vmin, v[j]);
                vst1q_f32(buf + g + 32 * j, v[j]);
            }
        }

        float       d;
        const float iscale = scale_to_8_bits(buf, QK_ITQ3_S, vmax, vmin, &d);
        y[i].d             = d;
        if (iscale == 0.0f) {
            memset(y[i].qs, 0, sizeof(y[i].qs));
            memset(y[i].bsums, 0, sizeof(y[i].bsums));
            continue;
        }
        for (int j = 0; j < QK_ITQ3_S; j += 16) {
            y[i].bsums[j / 16] = round_to_8_bits(buf + j, iscale, y[i].qs + j);
        }
    }
}

void quantize_row_q8_n_h(const float * GGML_RESTRICT x, void * GGML_RESTRICT vy, int64_t k) {
    assert(k % 64 == 0);

    block_q8_n_h * GGML_RESTRICT y = vy;

    for (int64_t i = 0; i < k / 64; ++i, x += 64) {
        float32x4_t lower[8], upper[8];
        fwht_32(x, lower);
        fwht_32(x + 32, upper);

        // h = 32, and the scale
        float       buf[64];
        float32x4_t vmax = vdupq_n_f32(0.0f);
        float32x4_t vmin = vdupq_n_f32(0.0f);
        for (int j = 0; j < 8; ++j) {
            const float32x4_t v[2] = { vmulq_n_f32(vaddq_f32(lower[j], upper[j]), 0.125f),
                                       vmulq_n_f32(vsubq_f32(lower[j], upper[j]), 0.125f) };
            for (int h = 0; h < 2; ++h) {
                vmax = vmaxq_f32(vmax, v[h]);  // NaN where either is
                vmin = vminq_f32(vmin, v[h]);
                vst1q_f32(buf + 32 * h + 4 * j, v[h]);
            }
        }

        float       d;
        const float iscale = scale_to_8_bits(buf, 64, vmax, vmin, &d);
        y[i].d             = d;
        y[i].sum           = 0;
        if (iscale == 0.0f) {
            memset(y[i].qs, 0, sizeof(y[i].qs));
            continue;
        }
        for (int j = 0; j < 64; j += 16) {
            y[i].sum += round_to_8_bits(buf + j, iscale, y[i].qs + j);
        }
    }
}

#else

void quantize_row_q8_K_h(const float * GGML_RESTRICT x, void * GGML_RESTRICT y, int64_t k) {
    quantize_row_q8_K_h_generic(x, y, k);
}

void quantize_row_q8_n_h(const float * GGML_RESTRICT x, void * GGML_RESTRICT y, int64_t k) {
    quantize_row_q8_n_h_generic(x, y, k);
}

#endif

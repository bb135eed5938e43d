// CPU kernels of ITQ3_S, NEON: with the dot product instructions where the target has them, without elsewhere.
// docs/kernels.md explains them.

#include "../../itq3s-quants.h"

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

// The bytes are those of quantize_row_q8_K_h_generic: the same additions in the same order, the same rounding.
void quantize_row_q8_K_h(const float * GGML_RESTRICT x, void * GGML_RESTRICT vy, int64_t k) {
    assert(k % QK_ITQ3_S == 0);
    const int64_t nb = k / QK_ITQ3_S;

    block_q8_K * GGML_RESTRICT y = vy;

    static const uint32_t signs_1[4] = { 0, 0x80000000, 0, 0x80000000 };
    static const uint32_t signs_2[4] = { 0, 0, 0x80000000, 0x80000000 };
    const uint32x4_t      minus_1    = vld1q_u32(signs_1);
    const uint32x4_t      minus_2    = vld1q_u32(signs_2);

    for (int64_t i = 0; i < nb; ++i, x += QK_ITQ3_S) {
        float       buf[QK_ITQ3_S];
        float32x4_t v[8];

        // h = 1, 2 within a vector, 4, 8, 16 over eight
        for (int g = 0; g < QK_ITQ3_S; g += 32) {
            for (int j = 0; j < 8; ++j) {
                float32x4_t a = vld1q_f32(x + g + 4 * j);
                a             = vaddq_f32(vrev64q_f32(a), negate_lanes(a, minus_1));
                v[j]          = vaddq_f32(vextq_f32(a, a, 2), negate_lanes(a, minus_2));
            }
            fwht_8(v);
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

        const float hi   = vmaxvq_f32(vmax);
        const float lo   = vminvq_f32(vmin);
        const float amax = hi > -lo ? hi : -lo;
        if (!(amax >= ITQ3_S_ACT_MIN && amax < INFINITY)) {
            memset(&y[i], 0, sizeof(y[i]));
            y[i].d = amax < INFINITY ? 0.0f : NAN;
            continue;
        }
        float max = hi > -lo ? hi : lo;
        if (hi == -lo) {  // the sign of the first of them
            for (int j = 0; j < QK_ITQ3_S; ++j) {
                if (buf[j] == hi || buf[j] == lo) {
                    max = buf[j];
                    break;
                }
            }
        }

        const float iscale = -127.0f / max;
        for (int j = 0; j < QK_ITQ3_S; j += 16) {
            int16x8_t h[2];
            for (int l = 0; l < 2; ++l) {
                const float32x4_t a = vmulq_n_f32(vld1q_f32(buf + j + 8 * l), iscale);
                const float32x4_t b = vmulq_n_f32(vld1q_f32(buf + j + 8 * l + 4), iscale);
                h[l]                = vcombine_s16(vqmovn_s32(vcvtnq_s32_f32(a)), vqmovn_s32(vcvtnq_s32_f32(b)));
            }
            const int8x16_t q = vcombine_s8(vqmovn_s16(h[0]), vqmovn_s16(h[1]));  // saturates at 127
            vst1q_s8(y[i].qs + j, q);
            y[i].bsums[j / 16] = vaddlvq_s8(q);
        }
        y[i].d = 1 / iscale;
    }
}

// Where mask has a bit: of a, elsewhere of b.
static inline uint8x16_t select_bits(uint8_t mask, uint8x16_t a, uint8x16_t b) {
    return vbslq_u8(vdupq_n_u8(mask), a, b);
}

// 2*c1 + c0 of weights m, m+64, m+128, m+192, two bits each, for m = 0 .. 63, as the bytes of symbols hold theirs.
static inline void decode_grids(const uint8_t * sel, uint8x16_t grids[4]) {
    uint8x16_t a = vld1q_u8(sel);
    uint8x16_t b = vld1q_u8(sel + 16);

    // Transpose bits: byte m then holds the selectors of weights m, m+32, m+64, ..., m+224. Bits change place between
    // the registers, then the next bit of the byte number becomes the register.
    uint8x16x2_t r = vzipq_u8(vsliq_n_u8(a, b, 4), vsriq_n_u8(b, a, 4));
    a              = r.val[0];
    b              = r.val[1];
    r              = vzipq_u8(select_bits(0x33, a, vshlq_n_u8(b, 2)), select_bits(0x33, vshrq_n_u8(a, 2), b));
    a              = r.val[0];
    b              = r.val[1];
    r              = vzipq_u8(select_bits(0x55, a, vshlq_n_u8(b, 1)), select_bits(0x55, vshrq_n_u8(a, 1), b));
    a              = r.val[0];
    b              = r.val[1];

    // s[t-k] is k bytes back; from byte 0 on to byte 31, a bit higher
    const uint8x16_t b1  = vshlq_n_u8(b, 1);
    const uint8x16_t ac1 = veorq_u8(veorq_u8(a, vextq_u8(b1, a, 15)), vextq_u8(b1, a, 10));
    const uint8x16_t ac0 = veorq_u8(vextq_u8(b1, a, 14), vextq_u8(b1, a, 12));
    const uint8x16_t bc1 = veorq_u8(veorq_u8(b, vextq_u8(a, b, 15)), vextq_u8(a, b, 10));
    const uint8x16_t bc0 = veorq_u8(vextq_u8(a, b, 14), vextq_u8(a, b, 12));

    // even bits belong to m < 32
    grids[0] = select_bits(0x55, ac0, vshlq_n_u8(ac1, 1));
    grids[1] = select_bits(0x55, bc0, vshlq_n_u8(bc1, 1));
    grids[2] = select_bits(0x55, vshrq_n_u8(ac0, 1), ac1);
    grids[3] = select_bits(0x55, vshrq_n_u8(bc0, 1), bc1);
}

void ggml_vec_dot_itq3_s_q8_K_h(int n, float * GGML_RESTRICT s, size_t bs, const void * GGML_RESTRICT vx, size_t bx,
                                const void * GGML_RESTRICT vy, size_t by, int nrc) {
    assert(n % QK_ITQ3_S == 0);
    assert(nrc == 1);
    GGML_UNUSED(bs);
    GGML_UNUSED(bx);
    GGML_UNUSED(by);
    GGML_UNUSED(nrc);

    const block_itq3_s * GGML_RESTRICT x  = vx;
    const block_q8_K * GGML_RESTRICT   y  = vy;
    const int                          nb = n / QK_ITQ3_S;

    static const int8_t table[16] = ITQ3_S_LEVELS;
    const int8x16_t     levels    = vld1q_s8(table);
    const uint8x16_t    low       = vdupq_n_u8(0x0F);

    float32x4_t sum  = vdupq_n_f32(0.0f);
    float       zsum = 0.0f;
    for (int i = 0; i < nb; ++i) {
        uint8x16_t grids[4];
        decode_grids(x[i].sel, grids);

        int32x4_t acc[2] = { vdupq_n_s32(0), vdupq_n_s32(0) };
        for (int j = 0; j < 4; ++j) {
            const int8_t *   q8 = y[i].qs + 16 * j;
            const uint8x16_t q  = vld1q_u8(x[i].qs + 16 * j);
            const uint8x16_t g  = grids[j];

            // indices 4*q + 2*c1 + c0, two in a byte
            const uint8x16_t even = select_bits(0x33, g, vshlq_n_u8(q, 2));
            const uint8x16_t odd  = select_bits(0x33, vshrq_n_u8(g, 2), q);

            acc[0] = ggml_vdotq_s32(acc[0], ggml_vqtbl1q_s8(levels, vandq_u8(even, low)), vld1q_s8(q8));
            acc[1] = ggml_vdotq_s32(acc[1], ggml_vqtbl1q_s8(levels, vandq_u8(odd, low)), vld1q_s8(q8 + 64));
            acc[0] = ggml_vdotq_s32(acc[0], ggml_vqtbl1q_s8(levels, vshrq_n_u8(even, 4)), vld1q_s8(q8 + 128));
            acc[1] = ggml_vdotq_s32(acc[1], ggml_vqtbl1q_s8(levels, vshrq_n_u8(odd, 4)), vld1q_s8(q8 + 192));
        }

        const float d = GGML_CPU_FP16_TO_FP32(x[i].d) * y[i].d;
        sum           = vmlaq_n_f32(sum, vcvtq_f32_s32(vaddq_s32(acc[0], acc[1])), d);
        if ((x[i].z & 0x7FFF) != 0) {
            const int16x8_t sums = vaddq_s16(vld1q_s16(y[i].bsums), vld1q_s16(y[i].bsums + 8));
            zsum += d * GGML_CPU_FP16_TO_FP32(x[i].z) * (float) vaddlvq_s16(sums);
        }
    }
    *s = 0.03125f * (vaddvq_f32(sum) - zsum);
}

#else

void quantize_row_q8_K_h(const float * GGML_RESTRICT x, void * GGML_RESTRICT y, int64_t k) {
    quantize_row_q8_K_h_generic(x, y, k);
}

void ggml_vec_dot_itq3_s_q8_K_h(int n, float * GGML_RESTRICT s, size_t bs, const void * GGML_RESTRICT vx, size_t bx,
                                const void * GGML_RESTRICT vy, size_t by, int nrc) {
    ggml_vec_dot_itq3_s_q8_K_h_generic(n, s, bs, vx, bx, vy, by, nrc);
}

#endif

#pragma once

// From a block of ITQ3_S in the layout of a file to its levels and their products, NEON.

#include "ggml-cpu-impl.h"
#include "ggml-itq3s.h"

#if defined(__ARM_NEON) && defined(__aarch64__)

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

// Products of the levels of a block and its activations, bytes in the order of Q8_K_H; the lanes add up to the sum.
static inline int32x4_t multiply_block(const block_itq3_s * x, const int8_t * y) {
    static const int8_t table[16] = ITQ3_S_LEVELS;
    const int8x16_t     levels    = vld1q_s8(table);
    const uint8x16_t    low       = vdupq_n_u8(0x0F);

    uint8x16_t grids[4];
    decode_grids(x->sel, grids);

    int32x4_t acc[2] = { vdupq_n_s32(0), vdupq_n_s32(0) };
    for (int j = 0; j < 4; ++j) {
        const int8_t *   q8 = y + 16 * j;
        const uint8x16_t q  = vld1q_u8(x->qs + 16 * j);
        const uint8x16_t g  = grids[j];

        // indices 4*q + 2*c1 + c0, two in a byte
        const uint8x16_t even = select_bits(0x33, g, vshlq_n_u8(q, 2));
        const uint8x16_t odd  = select_bits(0x33, vshrq_n_u8(g, 2), q);

        acc[0] = ggml_vdotq_s32(acc[0], ggml_vqtbl1q_s8(levels, vandq_u8(even, low)), vld1q_s8(q8));
        acc[1] = ggml_vdotq_s32(acc[1], ggml_vqtbl1q_s8(levels, vandq_u8(odd, low)), vld1q_s8(q8 + 64));
        acc[0] = ggml_vdotq_s32(acc[0], ggml_vqtbl1q_s8(levels, vshrq_n_u8(even, 4)), vld1q_s8(q8 + 128));
        acc[1] = ggml_vdotq_s32(acc[1], ggml_vqtbl1q_s8(levels, vshrq_n_u8(odd, 4)), vld1q_s8(q8 + 192));
    }
    return vaddq_s32(acc[0], acc[1]);
}

#endif  // NEON

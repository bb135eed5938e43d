#pragma once

// From a block of a trellis type in the layout of a file to its levels and their products, NEON.

#include "ggml-cpu-impl.h"
#include "ggml-itq.h"

#if defined(__ARM_NEON) && defined(__aarch64__)

// Where mask has a bit: of a, elsewhere of b.
static inline uint8x16_t select_bits(uint8_t mask, uint8x16_t a, uint8x16_t b) {
    return vbslq_u8(vdupq_n_u8(mask), a, b);
}

// Transposes the 256 bits of a plane: byte m of rows[0] and byte m - 16 of rows[1] then hold those of weights m, m+32,
// m+64, ..., m+224.
static inline void transpose_plane(const uint8_t * plane, uint8x16_t rows[2]) {
    uint8x16_t a = vld1q_u8(plane);
    uint8x16_t b = vld1q_u8(plane + 16);

    // Bits change place between the registers, then the next bit of the byte number becomes the register.
    uint8x16x2_t r = vzipq_u8(vsliq_n_u8(a, b, 4), vsriq_n_u8(b, a, 4));
    a              = r.val[0];
    b              = r.val[1];
    r              = vzipq_u8(select_bits(0x33, a, vshlq_n_u8(b, 2)), select_bits(0x33, vshrq_n_u8(a, 2), b));
    a              = r.val[0];
    b              = r.val[1];
    r              = vzipq_u8(select_bits(0x55, a, vshlq_n_u8(b, 1)), select_bits(0x55, vshrq_n_u8(a, 1), b));
    rows[0]        = r.val[0];
    rows[1]        = r.val[1];
}

// 2*c1 + c0 of weights m, m+64, m+128, m+192, two bits each, for m = 0 .. 63, as the bytes of 2-bit symbols hold theirs.
// `carried` are the bits that may go on from one transposed byte to the next.
ITQ_INLINE void decode_grids(const uint8_t * sel, const int carried, uint8x16_t grids[4]) {
    uint8x16_t s[2];
    transpose_plane(sel, s);
    const uint8x16_t a = s[0];
    const uint8x16_t b = s[1];

    // s[t-k] is k bytes back; from byte 0 on to byte 31, a bit higher
    const uint8x16_t b1  = vandq_u8(vshlq_n_u8(b, 1), vdupq_n_u8((uint8_t) carried));
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

// The symbols of weights m, m+64, m+128, m+192, one in each field of two bits, for m = 0 .. 63. A field of 1-bit symbols
// has two of them: its lower bit belongs to weights m < 32, its upper one to m >= 32.
ITQ_INLINE void load_symbols(const int bits, const uint8_t * qs, uint8x16_t symbols[4]) {
    if (bits == 1) {
        transpose_plane(qs, symbols);
        symbols[2] = symbols[0];
        symbols[3] = symbols[1];
    } else {
        for (int j = 0; j < 4; ++j) {
            symbols[j] = vld1q_u8(qs + 16 * j);
        }
    }
}

// Levels by 4*field + grid. Of a field of two 1-bit symbols, [0] takes the lower one and [1] the upper one.
ITQ_INLINE void load_levels(const int bits, const int8_t * table, int8x16_t levels[2]) {
    if (bits == 1) {
        static const uint8_t at[2][16] = {
            { 0, 1, 2, 3, 4, 5, 6, 7, 0, 1, 2, 3, 4, 5, 6, 7 },
            { 0, 1, 2, 3, 0, 1, 2, 3, 4, 5, 6, 7, 4, 5, 6, 7 },
        };
        const int8x16_t eight = vcombine_s8(vld1_s8(table), vdup_n_s8(0));
        levels[0]             = vqtbl1q_s8(eight, vld1q_u8(at[0]));
        levels[1]             = vqtbl1q_s8(eight, vld1q_u8(at[1]));
    } else {
        levels[0] = levels[1] = vld1q_s8(table);
    }
}

// Products of the levels of a block and its activations, bytes in the order of Q8_K_H, of each quarter of the block; the lanes
// add up to the sum. q8[i] has the activations of quarter i.
ITQ_INLINE void multiply_quarters(const int bits, const int8_t * table, const int carried, const uint8_t * qs,
                                  const uint8_t * sel, const int8_t * const q8[4], int32x4_t acc[4]) {
    const uint8x16_t low = vdupq_n_u8(0x0F);

    int8x16_t  levels[2];
    uint8x16_t grids[4], symbols[4];
    load_levels(bits, table, levels);
    decode_grids(sel, carried, grids);
    load_symbols(bits, qs, symbols);

    for (int i = 0; i < 4; ++i) {
        acc[i] = vdupq_n_s32(0);
    }
    for (int j = 0; j < 4; ++j) {
        const uint8x16_t q = symbols[j];
        const uint8x16_t g = grids[j];
        const int8x16_t  t = levels[j / 2];

        // indices 4*q + 2*c1 + c0, two in a byte
        const uint8x16_t even = select_bits(0x33, g, vshlq_n_u8(q, 2));
        const uint8x16_t odd  = select_bits(0x33, vshrq_n_u8(g, 2), q);

        acc[0] = ggml_vdotq_s32(acc[0], ggml_vqtbl1q_s8(t, vandq_u8(even, low)), vld1q_s8(q8[0] + 16 * j));
        acc[1] = ggml_vdotq_s32(acc[1], ggml_vqtbl1q_s8(t, vandq_u8(odd, low)), vld1q_s8(q8[1] + 16 * j));
        acc[2] = ggml_vdotq_s32(acc[2], ggml_vqtbl1q_s8(t, vshrq_n_u8(even, 4)), vld1q_s8(q8[2] + 16 * j));
        acc[3] = ggml_vdotq_s32(acc[3], ggml_vqtbl1q_s8(t, vshrq_n_u8(odd, 4)), vld1q_s8(q8[3] + 16 * j));
    }
}

// The same of a whole block.
ITQ_INLINE int32x4_t multiply_codes(const int bits, const int8_t * table, const uint8_t * qs, const uint8_t * sel,
                                    const int8_t * y) {
    const int8_t * const q8[4] = { y, y + 64, y + 128, y + 192 };
    int32x4_t            acc[4];
    multiply_quarters(bits, table, 0xFF, qs, sel, q8, acc);
    return vaddq_s32(vaddq_s32(acc[0], acc[1]), vaddq_s32(acc[2], acc[3]));
}

#    define DEFINE_MULTIPLY(NAME, name, bits, n_levels, length, has_z, number)                    \
        static inline int32x4_t multiply_block_##name(const block_##name * x, const int8_t * y) { \
            static const int8_t table[n_levels] = NAME##_LEVELS;                                  \
            return multiply_codes(bits, table, x->qs, x->sel, y);                                 \
        }
ITQ_TYPES_256(DEFINE_MULTIPLY)

#endif  // NEON

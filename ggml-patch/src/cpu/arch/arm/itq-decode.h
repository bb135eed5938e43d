#pragma once

// From a block of a trellis type in the layout of a file to its levels and their products, NEON.

#include "../../itq-rows.h"

#include "ggml-cpu-impl.h"

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

// Subsets of a block of 256 weights.
struct subsets {
    uint8x16_t fields
        [4];  // 2*c1 + c0 of weights m, m+64, m+128, m+192, m = 0 .. 63, as the bytes of 2-bit symbols hold theirs
    uint8x16_t c2[2];  // of weights m, m+32, m+64, ..., m+224, m = 0 .. 31
};

// `carried` are the bits that may go on from one transposed byte to the next, `before` has the bytes before the first, in the
// order of weights -8 .. -1.
ITQ_INLINE void decode_subsets(const uint8_t * sel, const int carried, uint64_t before, struct subsets * to) {
    uint8x16_t s[2];
    transpose_plane(sel, s);
    const uint8x16_t a = s[0];
    const uint8x16_t b = s[1];

    // s[t-k] is k bytes back; from byte 0 on to byte 31, a bit higher
    const uint8x16_t states = vcombine_u8(vdup_n_u8(0), vcreate_u8(before));
    const uint8x16_t b1     = vorrq_u8(vandq_u8(vshlq_n_u8(b, 1), vdupq_n_u8((uint8_t) carried)), states);

#    define BACK(k, first, second) vextq_u8(first, second, 16 - (k))
#    define CHECKS(first, second, c2_, c1_, c0_)                                                        \
        {                                                                                               \
            const uint8x16_t s4 = BACK(4, first, second), s5 = BACK(5, first, second);                  \
            c2_ = veorq_u8(veorq_u8(second, s5), BACK(6, first, second));                               \
            c1_ = veorq_u8(veorq_u8(BACK(1, first, second), BACK(3, first, second)), veorq_u8(s4, s5)); \
            c0_ = veorq_u8(BACK(2, first, second), s4);                                                 \
        }
    uint8x16_t c1[2], c0[2];
    CHECKS(b1, a, to->c2[0], c1[0], c0[0])
    CHECKS(a, b, to->c2[1], c1[1], c0[1])
#    undef CHECKS
#    undef BACK

    // even bits belong to m < 32
    for (int i = 0; i < 2; ++i) {
        to->fields[i]     = select_bits(0x55, c0[i], vshlq_n_u8(c1[i], 1));
        to->fields[2 + i] = select_bits(0x55, vshrq_n_u8(c0[i], 1), c1[i]);
    }
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

// Levels by 16*c2 + 4*field + 2*c1 + c0, of symbols with q2 = 0 or 1. Of a field of two 1-bit symbols, [0] takes the lower one
// and [1] the upper one.
ITQ_INLINE void load_levels(const int bits, const int8_t * table, const int q2, int8x16x2_t levels[2]) {
    static const uint8_t of_two_bits[32]   = { 0, 1, 2, 3, 8,  9,  10, 11, 16, 17, 18, 19, 24, 25, 26, 27,
                                               4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31 };
    static const uint8_t of_one_bit[2][32] = {
        { 0, 1, 2, 3, 8, 9, 10, 11, 0, 1, 2, 3, 8, 9, 10, 11, 4, 5, 6, 7, 12, 13, 14, 15, 4, 5, 6, 7, 12, 13, 14, 15 },
        { 0, 1, 2, 3, 0, 1, 2, 3, 8, 9, 10, 11, 8, 9, 10, 11, 4, 5, 6, 7, 4, 5, 6, 7, 12, 13, 14, 15, 12, 13, 14, 15 },
    };
    const int         all = bits == 1 ? 0 : 16;  // of one bit there are 16 levels
    const int8x16x2_t in  = { { vld1q_s8(table + 32 * q2), vld1q_s8(table + 32 * q2 + all) } };
    for (int h = 0; h < 2; ++h) {
        const uint8_t * at = bits == 1 ? of_one_bit[h] : of_two_bits;
        for (int i = 0; i < 2; ++i) {
            levels[h].val[i] = vqtbl2q_s8(in, vld1q_u8(at + 16 * i));
        }
    }
}

// Levels by fields and subsets in lower nibbles, 0 above; c2 and q2 have their bits in place 4 of the bytes.
ITQ_INLINE int8x16_t look_up_levels(const int bits, const int8x16x2_t levels[2][2], const int h, uint8x16_t nibbles,
                                    uint8x16_t c2, uint8x16_t q2) {
    const uint8x16_t bit   = vdupq_n_u8(0x10);
    const uint8x16_t index = vorrq_u8(nibbles, vandq_u8(c2, bit));
    const int8x16_t  lower = vqtbl2q_s8(levels[0][h], index);
    return bits < 3 ? lower : vbslq_s8(vtstq_u8(q2, bit), vqtbl2q_s8(levels[1][h], index), lower);
}

// Products of the levels of a block and its activations, bytes in the order of Q8_K_H, of each quarter of the block; the lanes
// add up to the sum. q8[i] has the activations of quarter i.
ITQ_INLINE void multiply_quarters(const int bits, const int8_t * table, const int carried, uint64_t before,
                                  const uint8_t * qs, const uint8_t * sel, const int8_t * const q8[4],
                                  int32x4_t acc[4]) {
    const uint8x16_t low = vdupq_n_u8(0x0F);

    int8x16x2_t    levels[2][2];
    struct subsets subsets;
    uint8x16_t     symbols[4], third[2];
    load_levels(bits, table, 0, levels[0]);
    if (bits == 3) {
        load_levels(bits, table, 1, levels[1]);
        transpose_plane(qs + QK_ITQ / 4, third);
    }
    decode_subsets(sel, carried, before, &subsets);
    load_symbols(bits, qs, symbols);

    for (int i = 0; i < 4; ++i) {
        acc[i] = vdupq_n_s32(0);
    }
    for (int j = 0; j < 4; ++j) {
        const uint8x16_t q = symbols[j];
        const uint8x16_t s = subsets.fields[j];

        // nibbles 4*q + 2*c1 + c0, two in a byte
        const uint8x16_t even = select_bits(0x33, s, vshlq_n_u8(q, 2));
        const uint8x16_t odd  = select_bits(0x33, vshrq_n_u8(s, 2), q);

        // of quarters 0 to 3: bits 0, 2, 4 and 6, a bit higher for the upper half of a quarter
        const int        h  = j / 2;
        const uint8x16_t c2 = h ? vshrq_n_u8(subsets.c2[j % 2], 1) : subsets.c2[j % 2];
        const uint8x16_t q2 = bits < 3 ? c2 : h ? vshrq_n_u8(third[j % 2], 1) : third[j % 2];
#    define ADD_QUARTER(i, nibbles, SHIFT, n)                                                                 \
        acc[i] = ggml_vdotq_s32(acc[i], look_up_levels(bits, levels, h, nibbles, SHIFT(c2, n), SHIFT(q2, n)), \
                                vld1q_s8(q8[i] + 16 * j));
        ADD_QUARTER(0, vandq_u8(even, low), vshlq_n_u8, 4)
        ADD_QUARTER(1, vandq_u8(odd, low), vshlq_n_u8, 2)
        ADD_QUARTER(2, vshrq_n_u8(even, 4), vshlq_n_u8, 0)
        ADD_QUARTER(3, vshrq_n_u8(odd, 4), vshrq_n_u8, 2)
#    undef ADD_QUARTER
    }
}

// The same of a whole block.
#    define DEFINE_MULTIPLY(NAME, name, bits, n_levels, length, has_z, number)                               \
        static inline int32x4_t multiply_block_##name(const block_##name * x, const int8_t * y) {            \
            static const int8_t  table[n_levels] = NAME##_LEVELS;                                            \
            const int8_t * const q8[4]           = { y, y + 64, y + 128, y + 192 };                          \
            int32x4_t            acc[4];                                                                     \
            multiply_quarters(bits, table, 0xFF, itq_spread_state(name##_state(x)), x->qs, x->sel, q8, acc); \
            return vaddq_s32(vaddq_s32(acc[0], acc[1]), vaddq_s32(acc[2], acc[3]));                          \
        }
ITQ_TYPES_256(DEFINE_MULTIPLY)

#endif  // NEON

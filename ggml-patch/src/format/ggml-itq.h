#pragma once

// The trellis types. A block of weights is rotated by the Walsh-Hadamard transform (FWHT) and trellis-coded: a symbol of
// one bit or a few picks a level of one of eight interleaved subsets, and a shift register fed by one bit more, the
// selector, says which subset. ITQ3_S has 2-bit symbols (100 bytes for 256 weights, 3.125 bits a weight), ITQ2_S 1-bit
// symbols (66 bytes, 2.0625 bits), ITQ4_S 3-bit symbols (130 bytes, 4.0625 bits); ITQ3_N, ITQ2_N and ITQ4_N are the same
// codes in blocks of 64 (26 bytes, 3.25 bits; 18 bytes, 2.25 bits; 34 bytes, 4.25 bits), for rows that are no multiple of
// 256.
//
//   s[-1-i] = bit i of the start state      i from 0 to 5
//   c2   = s[t] ^ s[t-5] ^ s[t-6]
//   c1   = s[t-1] ^ s[t-3] ^ s[t-4] ^ s[t-5]
//   c0   = s[t-2] ^ s[t-4]
//   v[t] = d/32 * (LEVELS[8*q[t] + 4*c2 + 2*c1 + c0] - z)
//   w    = H v                              H: normalised Walsh-Hadamard matrix of the block, natural order, H = H^-1
//
// The start state is in the six lowest bits of the block's last number, z in ITQ3_S and d elsewhere; the number itself is
// read with these bits zero.
//
// C, C++ and CUDA sources include this header. Whoever wants another ggml_half than uint16_t (CUDA: half) includes
// ggml-common.h first, with the matching GGML_COMMON_DECL_*.

#ifndef GGML_COMMON_DECL
#    ifdef __cplusplus
#        define GGML_COMMON_DECL_CPP
#    else
#        define GGML_COMMON_DECL_C
#    endif
#    include "ggml-common.h"
#endif

#include "ggml-itq-types.h"

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if defined(__GNUC__) || defined(__clang__)
#    define ITQ_INLINE static inline __attribute__((always_inline))
#else
#    define ITQ_INLINE static inline
#endif

// Weights of the longest block.
#define QK_ITQ    256
#define QK_ITQ3_S 256
#define QK_ITQ2_S 256
#define QK_ITQ4_S 256
#define QK_ITQ3_N 64
#define QK_ITQ2_N 64
#define QK_ITQ4_N 64

// In units of d/32, index 8*symbol + subset; the upper half mirrors the lower. They fit 7 bits: level + 64 is an unsigned
// operand that cannot saturate maddubs or dpbusd. No other file writes them out.
#define ITQ3_S_LEVELS                                                                                \
    {                                                                                                \
        -59, -45, -37, -32, -27, -25, -21, -18, -16, -14, -11, -9, -7, -5, -3, -1, /* symbol 0, 1 */ \
        1,   3,   5,   7,   9,   11,  14,  16,  18,  21,  25,  27, 32, 37, 45, 59, /* symbol 2, 3 */ \
    }
#define ITQ2_S_LEVELS { -61, -41, -32, -25, -18, -13, -7, -3, 3, 7, 13, 18, 25, 32, 41, 61 }
#define ITQ4_S_LEVELS                                                                                     \
    {                                                                                                     \
        -61, -50, -43, -38, -34, -31, -29, -27, -25, -24, -22, -21, -19, -18, -17, -15, /* symbol 0, 1 */ \
        -15, -13, -12, -11, -11, -9,  -8,  -8,  -7,  -5,  -5,  -4,  -3,  -2,  -1,  -1,  /* symbol 2, 3 */ \
        1,   1,   2,   3,   4,   5,   5,   7,   8,   8,   9,   11,  11,  12,  13,  15,  /* symbol 4, 5 */ \
        15,  17,  18,  19,  21,  22,  24,  25,  27,  29,  31,  34,  38,  43,  50,  61,  /* symbol 6, 7 */ \
    }
#define ITQ3_N_LEVELS ITQ3_S_LEVELS
#define ITQ2_N_LEVELS ITQ2_S_LEVELS
#define ITQ4_N_LEVELS ITQ4_S_LEVELS

typedef struct {
    uint8_t   qs[QK_ITQ3_S / 4];   // 2-bit symbols, q[t] = (qs[t % 64] >> 2*(t / 64)) & 3
    uint8_t   sel[QK_ITQ3_S / 8];  // selector bits, s[t] = (sel[t / 8] >> (t % 8)) & 1
    ggml_half d;                   // scale
    ggml_half z;                   // zero-point in level units, 0 except in the literal ternary code, and start state
} block_itq3_s;

typedef struct {
    uint8_t   qs[QK_ITQ2_S / 8];   // symbols, q[t] = (qs[t / 8] >> (t % 8)) & 1
    uint8_t   sel[QK_ITQ2_S / 8];  // selector bits, s[t] = (sel[t / 8] >> (t % 8)) & 1
    ggml_half d;                   // scale and start state
} block_itq2_s;

typedef struct {
    uint8_t
        qs[QK_ITQ4_S / 4 + QK_ITQ4_S / 8];  // symbols: the lower two bits as in ITQ3_S, then the third, as in ITQ2_S
    uint8_t   sel[QK_ITQ4_S / 8];           // selector bits, s[t] = (sel[t / 8] >> (t % 8)) & 1
    ggml_half d;                            // scale and start state
} block_itq4_s;

typedef struct {
    uint8_t   qs[QK_ITQ3_N / 4];   // 2-bit symbols, q[t] = (qs[t % 16] >> 2*(t / 16)) & 3
    uint8_t   sel[QK_ITQ3_N / 8];  // selector bits, s[t] = (sel[t / 8] >> (t % 8)) & 1
    ggml_half d;                   // scale and start state
} block_itq3_n;

typedef struct {
    uint8_t   qs[QK_ITQ2_N / 8];   // symbols, q[t] = (qs[t / 8] >> (t % 8)) & 1
    uint8_t   sel[QK_ITQ2_N / 8];  // selector bits, s[t] = (sel[t / 8] >> (t % 8)) & 1
    ggml_half d;                   // scale and start state
} block_itq2_n;

typedef struct {
    uint8_t
        qs[QK_ITQ4_N / 4 + QK_ITQ4_N / 8];  // symbols: the lower two bits as in ITQ3_N, then the third, as in ITQ2_N
    uint8_t   sel[QK_ITQ4_N / 8];           // selector bits, s[t] = (sel[t / 8] >> (t % 8)) & 1
    ggml_half d;                            // scale and start state
} block_itq4_n;

// Activations of blocks of 64 (GGML_TYPE_Q8_N_H), rotated like them; never in a file.
typedef struct {
    float   d;    // scale
    int32_t sum;  // of qs
    int8_t  qs[64];
} block_q8_n_h;

#define ITQ_CHECK_TYPE(NAME, name, bits, n_levels, length, has_z, number)                                  \
    static_assert(GGML_TYPE_##NAME == number, "the registry has another number than ggml.h");              \
    static_assert((n_levels) == 8 << (bits), "eight subsets of 1 << bits levels");                         \
    static_assert(QK_##NAME == (length) && (length) <= QK_ITQ, "wrong length of a block");                 \
    static_assert(sizeof(block_##name) == (length) / 8 * ((bits) + 1) + sizeof(ggml_half) * (1 + (has_z)), \
                  "wrong size or padding of a block");
ITQ_TYPES(ITQ_CHECK_TYPE)

#ifdef __cplusplus
extern "C" {
#endif

enum itq_codec {
    ITQ_CODEC_TRELLIS = 0,
    ITQ_CODEC_TERNARY = 1,  // the literal ternary code, for reproduction: types with a zero-point
};

enum itq_effort {
    ITQ_EFFORT_FAST    = 0,  // one start scale
    ITQ_EFFORT_DEFAULT = 1,  // three
};

// Unnormalised FWHT of n values in place, n a power of two: stages h = 1, 2, 4, ..., n/2, each (a, b) -> (a + b, a - b)
// in float32. The normalised transform is 1/sqrt(n) of it.
GGML_API void itq_fwht(float * x, int n);

// What every type has:
//
//   name_levels                the levels as a table (ggml-base); kernels build theirs from NAME_LEVELS
//   dequantize_row_name        weights of k / length blocks, k a multiple of it:
//                              w = (d/32 / sqrt(length)) * FWHT(LEVELS[..] - z), the FWHT unnormalised
//   quantize_row_name_ref      trellis code at default effort. A block with a weight that is not finite gets d = NaN,
//                              which ggml_validate_row_data refuses.
//   quantize_name              rows of n_per_row weights, a multiple of length; returns the bytes written. With an
//                              importance matrix (or NULL) they are encoded as in itq-ldlq.h; 64 rows or more a call
//                              are fastest then.
//   quantize_name_effort       the same without one, with a choice of codec (enum itq_codec; the ternary one where there
//                              is a zero-point) and effort (enum itq_effort)
#define ITQ_DECLARE_TYPE(NAME, name, bits, n_levels, length, has_z, number)                                              \
    GGML_API const int8_t name##_levels[n_levels];                                                                       \
    GGML_API void   dequantize_row_##name(const block_##name * GGML_RESTRICT x, float * GGML_RESTRICT y, int64_t k);     \
    GGML_API void   quantize_row_##name##_ref(const float * GGML_RESTRICT x, block_##name * GGML_RESTRICT y, int64_t k); \
    GGML_API size_t quantize_##name(const float * GGML_RESTRICT src, void * GGML_RESTRICT dst, int64_t nrows,            \
                                    int64_t n_per_row, const float * imatrix);                                           \
    GGML_API size_t quantize_##name##_effort(const float * GGML_RESTRICT src, void * GGML_RESTRICT dst, int64_t nrows,   \
                                             int64_t n_per_row, int codec, int effort);
ITQ_TYPES(ITQ_DECLARE_TYPE)

//
// Decoding. Names that begin with itq_ are of any code on this trellis; what sets one code apart, the bits of a symbol
// and the table of levels, they take as constants that are folded when they are inlined.
//

// The start state in a block's last number, and the number without it.
#define ITQ_STATE_MASK 0x3f

ITQ_INLINE int itq_start_state(const void * last) {
    return *(const uint8_t *) last & ITQ_STATE_MASK;
}

ITQ_INLINE uint16_t itq_without_state(const void * last) {
    uint16_t number;
    memcpy(&number, last, sizeof(number));
    return number & ~ITQ_STATE_MASK;
}

// The start state as the byte of selectors before the first: bit 7-i is bit i of the state.
ITQ_INLINE uint8_t itq_selectors_before(int state) {
    uint8_t before = 0;
    for (int i = 0; i < 6; ++i) {
        before |= (uint8_t) ((state >> i & 1) << (7 - i));
    }
    return before;
}

// The subsets of 64 weights at once, of their selectors s and the byte p before them: bit i of *c2, *c1 and *c0 belongs to
// weight i.
ITQ_INLINE void itq_subsets_of_word(uint64_t s, uint64_t p, uint64_t * c2, uint64_t * c1, uint64_t * c0) {
    const uint64_t s4 = s << 4 | p >> 4;
    const uint64_t s5 = s << 5 | p >> 3;
    *c2               = s ^ s5 ^ (s << 6 | p >> 2);
    *c1               = (s << 1 | p >> 7) ^ (s << 3 | p >> 5) ^ s4 ^ s5;
    *c0               = (s << 2 | p >> 6) ^ s4;
}

// The same of word `word` of a block's selectors.
ITQ_INLINE void itq_subsets(const uint8_t * sel, int word, int state, uint64_t * c2, uint64_t * c1, uint64_t * c0) {
    uint64_t s = 0;
    for (int i = 0; i < 8; ++i) {
        s |= (uint64_t) sel[8 * word + i] << 8 * i;
    }
    itq_subsets_of_word(s, word > 0 ? sel[8 * word - 1] : itq_selectors_before(state), c2, c1, c0);
}

// Byte of qs, and bit of the byte, where the symbol of weight t begins, in a block of `length` weights. Symbols of one
// bit are in the order of the selectors; a byte has symbols of two bits from all four quarters of the block. Third bits
// follow the two lower ones in the order of the selectors.
ITQ_INLINE int itq_symbol_byte(int bits, int length, int t) {
    return bits == 1 ? t / 8 : t % (length / 4);
}

ITQ_INLINE int itq_symbol_shift(int bits, int length, int t) {
    return bits == 1 ? t % 8 : 2 * (t / (length / 4));
}

// The symbol of weight t.
ITQ_INLINE int itq_symbol(int bits, int length, const uint8_t * qs, int t) {
    const int low = qs[itq_symbol_byte(bits, length, t)] >> itq_symbol_shift(bits, length, t) & (bits == 1 ? 1 : 3);
    return bits < 3 ? low : low | (qs[length / 4 + t / 8] >> t % 8 & 1) << 2;
}

// Levels of a block of `length` weights whose symbols have `bits` bits and whose table has 8 << bits levels.
ITQ_INLINE void itq_decode_levels(int bits, int length, const int8_t * table, const uint8_t * qs, const uint8_t * sel,
                                  int state, int8_t * levels) {
    for (int word = 0; word < length / 64; ++word) {
        uint64_t c2, c1, c0;
        itq_subsets(sel, word, state, &c2, &c1, &c0);
        for (int i = 0; i < 64; ++i) {
            const int t      = 64 * word + i;
            const int subset = 4 * (int) (c2 >> i & 1) + 2 * (int) (c1 >> i & 1) + (int) (c0 >> i & 1);
            levels[t]        = table[8 * itq_symbol(bits, length, qs, t) + subset];
        }
    }
}

#define ITQ_LAST_1(block) (&(block)->z)
#define ITQ_LAST_0(block) (&(block)->d)

// Of each type: name_decode_levels, the levels of a block; name_state, its start state; name_scale, the bits of d.
#define ITQ_DEFINE_DECODE_LEVELS(NAME, name, bits, n_levels, length, has_z, number)     \
    ITQ_INLINE int name##_state(const block_##name * x) {                               \
        return itq_start_state(ITQ_LAST_##has_z(x));                                    \
    }                                                                                   \
    ITQ_INLINE uint16_t name##_scale(const block_##name * x) {                          \
        uint16_t d;                                                                     \
        memcpy(&d, &x->d, sizeof(d));                                                   \
        return (has_z) ? d : (uint16_t) (d & ~ITQ_STATE_MASK);                          \
    }                                                                                   \
    static inline void name##_decode_levels(const block_##name * x, int8_t * levels) {  \
        static const int8_t table[n_levels] = NAME##_LEVELS;                            \
        itq_decode_levels(bits, length, table, x->qs, x->sel, name##_state(x), levels); \
    }
ITQ_TYPES(ITQ_DEFINE_DECODE_LEVELS)

#ifdef __cplusplus
}
#endif

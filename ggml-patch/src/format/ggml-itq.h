#pragma once

// The trellis types. A block of weights is rotated by the Walsh-Hadamard transform (FWHT) and trellis-coded: a symbol of
// one bit or a few picks a level of one of four interleaved grids, and a shift register fed by one bit more, the
// selector, says which grid. ITQ3_S has 2-bit symbols (100 bytes for 256 weights, 3.125 bits a weight), ITQ2_S 1-bit
// symbols (66 bytes, 2.0625 bits); ITQ3_N and ITQ2_N are the same codes in blocks of 64 (26 bytes, 3.25 bits; 18 bytes,
// 2.25 bits), for rows that are no multiple of 256.
//
//   s[t] = 0 for t < 0
//   c1   = s[t] ^ s[t-1] ^ s[t-6]           Ungerboeck's 64-state code, parity checks 103 and 024 (octal)
//   c0   = s[t-2] ^ s[t-4]
//   v[t] = d/32 * (LEVELS[4*q[t] + 2*c1 + c0] - z)
//   w    = H v                              H: normalised Walsh-Hadamard matrix of the block, natural order, H = H^-1
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

#if defined(__GNUC__) || defined(__clang__)
#    define ITQ_INLINE static inline __attribute__((always_inline))
#else
#    define ITQ_INLINE static inline
#endif

// Weights of the longest block.
#define QK_ITQ    256
#define QK_ITQ3_S 256
#define QK_ITQ2_S 256
#define QK_ITQ3_N 64
#define QK_ITQ2_N 64

// In units of d/32, index 4*symbol + grid. They fit 7 bits: level + 64 is an unsigned operand that cannot saturate
// maddubs or dpbusd. No other file writes them out.
#define ITQ3_S_LEVELS { -63, -44, -33, -24, -20, -12, -7, -2, 2, 7, 12, 20, 24, 33, 44, 63 }
#define ITQ2_S_LEVELS { -63, -36, -20, -6, 6, 20, 36, 63 }
#define ITQ3_N_LEVELS ITQ3_S_LEVELS
#define ITQ2_N_LEVELS ITQ2_S_LEVELS

typedef struct {
    uint8_t   qs[QK_ITQ3_S / 4];   // 2-bit symbols, q[t] = (qs[t % 64] >> 2*(t / 64)) & 3
    uint8_t   sel[QK_ITQ3_S / 8];  // selector bits, s[t] = (sel[t / 8] >> (t % 8)) & 1
    ggml_half d;                   // scale
    ggml_half z;                   // zero-point in level units, 0 except in the literal ternary code
} block_itq3_s;

typedef struct {
    uint8_t   qs[QK_ITQ2_S / 8];   // symbols, q[t] = (qs[t / 8] >> (t % 8)) & 1
    uint8_t   sel[QK_ITQ2_S / 8];  // selector bits, s[t] = (sel[t / 8] >> (t % 8)) & 1
    ggml_half d;                   // scale
} block_itq2_s;

typedef struct {
    uint8_t   qs[QK_ITQ3_N / 4];   // 2-bit symbols, q[t] = (qs[t % 16] >> 2*(t / 16)) & 3
    uint8_t   sel[QK_ITQ3_N / 8];  // selector bits, s[t] = (sel[t / 8] >> (t % 8)) & 1
    ggml_half d;                   // scale
} block_itq3_n;

typedef struct {
    uint8_t   qs[QK_ITQ2_N / 8];   // symbols, q[t] = (qs[t / 8] >> (t % 8)) & 1
    uint8_t   sel[QK_ITQ2_N / 8];  // selector bits, s[t] = (sel[t / 8] >> (t % 8)) & 1
    ggml_half d;                   // scale
} block_itq2_n;

// Activations of blocks of 64 (GGML_TYPE_Q8_N_H), rotated like them; never in a file.
typedef struct {
    float   d;    // scale
    int32_t sum;  // of qs
    int8_t  qs[64];
} block_q8_n_h;

#define ITQ_CHECK_TYPE(NAME, name, bits, n_levels, length, has_z, number)                                  \
    static_assert(GGML_TYPE_##NAME == number, "the registry has another number than ggml.h");              \
    static_assert((n_levels) == 4 << (bits), "four grids of 1 << bits levels");                            \
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

// The two parity checks of 64 weights at once: bit i of *c1 and *c0 belongs to weight 64*word + i.
ITQ_INLINE void itq_grids(const uint8_t * sel, int word, uint64_t * c1, uint64_t * c0) {
    uint64_t s = 0;
    uint64_t p = 0;  // the 64 selectors before
    for (int i = 0; i < 8; ++i) {
        s |= (uint64_t) sel[8 * word + i] << 8 * i;
    }
    if (word > 0) {
        p = sel[8 * word - 1];
    }
    *c1 = s ^ (s << 1 | p >> 7) ^ (s << 6 | p >> 2);
    *c0 = (s << 2 | p >> 6) ^ (s << 4 | p >> 4);
}

// Byte of qs, and bit of the byte, where the symbol of weight t begins, in a block of `length` weights. Symbols of one
// bit are in the order of the selectors; a byte has symbols of two bits from all four quarters of the block. Third bits
// follow the two lower ones in the order of the selectors (no type has them yet).
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

// Levels of a block of `length` weights whose symbols have `bits` bits and whose table has 4 << bits levels.
ITQ_INLINE void itq_decode_levels(int bits, int length, const int8_t * table, const uint8_t * qs, const uint8_t * sel,
                                  int8_t * levels) {
    for (int word = 0; word < length / 64; ++word) {
        uint64_t c1, c0;
        itq_grids(sel, word, &c1, &c0);
        for (int i = 0; i < 64; ++i) {
            const int t = 64 * word + i;
            levels[t]   = table[4 * itq_symbol(bits, length, qs, t) + 2 * (int) (c1 >> i & 1) + (int) (c0 >> i & 1)];
        }
    }
}

// name_decode_levels: the same of each type.
#define ITQ_DEFINE_DECODE_LEVELS(NAME, name, bits, n_levels, length, has_z, number)                     \
    static inline void name##_decode_levels(const uint8_t * qs, const uint8_t * sel, int8_t * levels) { \
        static const int8_t table[n_levels] = NAME##_LEVELS;                                            \
        itq_decode_levels(bits, length, table, qs, sel, levels);                                        \
    }
ITQ_TYPES(ITQ_DEFINE_DECODE_LEVELS)

#ifdef __cplusplus
}
#endif

#pragma once

// ITQ3_S: 256 weights in 100 bytes, 3.125 bits a weight. A block is rotated by the Walsh-Hadamard transform (FWHT) and
// trellis-coded: a 2-bit symbol picks a level of one of four interleaved grids, and a shift register fed by the third
// bit, the selector, says which grid.
//
//   s[t] = 0 for t < 0
//   c1   = s[t] ^ s[t-1] ^ s[t-6]           Ungerboeck's 64-state code, parity checks 103 and 024 (octal)
//   c0   = s[t-2] ^ s[t-4]
//   v[t] = d/32 * (LEVELS[4*q[t] + 2*c1 + c0] - z)
//   w    = H v                              H: normalised 256-point Walsh-Hadamard matrix, natural order, H = H^-1
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

#include "ggml.h"

#include <stddef.h>
#include <stdint.h>

#if defined(__GNUC__) || defined(__clang__)
#    define ITQ_INLINE static inline __attribute__((always_inline))
#else
#    define ITQ_INLINE static inline
#endif

#define QK_ITQ3_S   256
#define ITQ3_S_BITS 2  // of a symbol

// In units of d/32, index 4*symbol + grid. They fit 7 bits: level + 64 is an unsigned operand that cannot saturate
// maddubs or dpbusd.
#define ITQ3_S_LEVELS { -63, -44, -33, -24, -20, -12, -7, -2, 2, 7, 12, 20, 24, 33, 44, 63 }

typedef struct {
    uint8_t   qs[QK_ITQ3_S / 4];   // 2-bit symbols, q[t] = (qs[t % 64] >> 2*(t / 64)) & 3
    uint8_t   sel[QK_ITQ3_S / 8];  // selector bits, s[t] = (sel[t / 8] >> (t % 8)) & 1
    ggml_half d;                   // scale
    ggml_half z;                   // zero-point in level units, 0 except in the literal ternary code
} block_itq3_s;
static_assert(sizeof(block_itq3_s) == 100, "wrong itq3_s block size/padding");

#ifdef __cplusplus
extern "C" {
#endif

enum itq3_s_codec {
    ITQ3_S_CODEC_TRELLIS = 0,
    ITQ3_S_CODEC_TERNARY = 1,  // the literal ternary code, for reproduction
};

enum itq3_s_effort {
    ITQ3_S_EFFORT_FAST    = 0,  // one start scale
    ITQ3_S_EFFORT_DEFAULT = 1,  // three
};

// The levels as a table (ggml-base); kernels build theirs from ITQ3_S_LEVELS.
GGML_API const int8_t itq3_s_levels[16];

// Unnormalised FWHT of 256 values in place: stages h = 1, 2, 4, ..., 128, each (a, b) -> (a + b, a - b) in float32.
// The normalised transform is 1/16 of it.
GGML_API void itq3_s_fwht(float * x);

// Weights of k / 256 blocks, w = (d * 2^-9) * FWHT(LEVELS[..] - z), the FWHT unnormalised. k is a multiple of 256.
GGML_API void dequantize_row_itq3_s(const block_itq3_s * GGML_RESTRICT x, float * GGML_RESTRICT y, int64_t k);

// Trellis code at default effort. A block with a weight that is not finite gets d = NaN, which
// ggml_validate_row_data refuses.
GGML_API void quantize_row_itq3_s_ref(const float * GGML_RESTRICT x, block_itq3_s * GGML_RESTRICT y, int64_t k);

// Rows of n_per_row weights, a multiple of 256; returns the bytes written. With an importance matrix (or NULL) they are
// encoded as in itq3s-ldlq.h; 64 rows or more a call are fastest then.
GGML_API size_t quantize_itq3_s(const float * GGML_RESTRICT src, void * GGML_RESTRICT dst, int64_t nrows,
                                int64_t n_per_row, const float * imatrix);

// The same with a choice of codec (enum itq3_s_codec) and effort (enum itq3_s_effort).
GGML_API size_t quantize_itq3_s_effort(const float * GGML_RESTRICT src, void * GGML_RESTRICT dst, int64_t nrows,
                                       int64_t n_per_row, int codec, int effort);

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

// Byte of qs, and bit of the byte, where the symbol of weight 64*word + i begins. A byte has symbols of two bits from
// all four words; symbols of one bit would be in the order of the selectors.
ITQ_INLINE int itq_symbol_byte(int bits, int word, int i) {
    return bits == 1 ? 8 * word + i / 8 : i;
}

ITQ_INLINE int itq_symbol_shift(int bits, int word, int i) {
    return bits == 1 ? i % 8 : 2 * word;
}

// The 256 levels of a block whose symbols have `bits` bits and whose table has 4 << bits levels.
ITQ_INLINE void itq_decode_levels(int bits, const int8_t * table, const uint8_t * qs, const uint8_t * sel,
                                  int8_t * levels) {
    const int mask = (1 << bits) - 1;
    for (int word = 0; word < 4; ++word) {
        uint64_t c1, c0;
        itq_grids(sel, word, &c1, &c0);
        for (int i = 0; i < 64; ++i) {
            const int q           = qs[itq_symbol_byte(bits, word, i)] >> itq_symbol_shift(bits, word, i) & mask;
            levels[64 * word + i] = table[4 * q + 2 * (int) (c1 >> i & 1) + (int) (c0 >> i & 1)];
        }
    }
}

static inline void itq3_s_decode_levels(const uint8_t * qs, const uint8_t * sel, int8_t * levels) {
    static const int8_t table[16] = ITQ3_S_LEVELS;
    itq_decode_levels(ITQ3_S_BITS, table, qs, sel, levels);
}

#ifdef __cplusplus
}
#endif

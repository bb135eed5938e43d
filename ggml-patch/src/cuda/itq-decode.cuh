// Decoding of the trellis types on 32-bit words (docs/format.md, section "Decoding").
//
// Everything in this file is integer arithmetic on registers and compiles for the device and for the host
// (plain C++ included), so that tests/cuda/ runs the very same functions without a GPU.
//
// Names: t is the index of a weight in its block. A chunk is 32 consecutive weights, its selector bits 32-bit word k of sel;
// in a block of 256 chunk k = 2*g + j takes its symbols from half j of qs (bytes 32*j .. 32*j + 31) at bit 2*g.

#pragma once

#include "ggml-itq.h"

#include <cstdint>

#if defined(__CUDACC__) || defined(__HIPCC__) || defined(__MUSACC__)
#    define ITQ_FUNC static __host__ __device__ __forceinline__
#else
#    define ITQ_FUNC static inline
#endif

// Of a trellis type: a block, its weights, the bits of a symbol, and the level of an index 4*q + 2*c1 + c0.
template <ggml_type type> struct itq_traits;

#define ITQ_CUDA_TRAITS(NAME, name, n_bits, n_levels, n_weights, ...) \
    template <> struct itq_traits<GGML_TYPE_##NAME> {                 \
        using block                   = block_##name;                 \
        static constexpr int   length = n_weights;                    \
        static constexpr int   bits   = n_bits;                       \
        ITQ_FUNC constexpr int level(const int index) {               \
            constexpr int levels[n_levels] = NAME##_LEVELS;           \
            return levels[index];                                     \
        }                                                             \
    };
ITQ_TYPES(ITQ_CUDA_TRAITS)

// Field offsets in 32-bit words of the 100 byte block of ITQ3_S: 16 words of symbols, 8 of selector bits, 1 of (d, z).
#define ITQ_WORDS    25
#define ITQ_WORD_QS  0
#define ITQ_WORD_SEL 16
#define ITQ_WORD_DZ  24

// Integers n with |n| < 2^22 as floats without a conversion: this much more, their bits are the float n + 3*2^22.
#define ITQ_FLOAT_ORIGIN      12582912.0f
#define ITQ_FLOAT_ORIGIN_BITS 0x4B400000

// Four table bytes level(first + 0..3) + offset, lowest index in the lowest byte.
template <ggml_type type = GGML_TYPE_ITQ3_S>
ITQ_FUNC constexpr uint32_t itq_level_bytes(const int first, const int offset) {
    using traits = itq_traits<type>;
    return ((uint32_t) (traits::level(first + 0) + offset) & 0xFF) << 0 |
           ((uint32_t) (traits::level(first + 1) + offset) & 0xFF) << 8 |
           ((uint32_t) (traits::level(first + 2) + offset) & 0xFF) << 16 |
           ((uint32_t) (traits::level(first + 3) + offset) & 0xFF) << 24;
}

// PTX prmt.b32 in its default mode: byte n of the result is byte (sel >> 4n) & 7 of the 8 bytes b:a, or, when bit 3 of
// that selector nibble is set, eight copies of that byte's sign bit. __byte_perm is no substitute: it masks bit 3.
ITQ_FUNC uint32_t itq_prmt(const uint32_t a, const uint32_t b, const uint32_t sel) {
#if defined(__CUDA_ARCH__) && !defined(GGML_USE_HIP) && !defined(GGML_USE_MUSA)
    uint32_t r;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(sel));
    return r;
#else
    const uint64_t ba = (uint64_t) b << 32 | a;
    uint32_t       r  = 0;
    for (int n = 0; n < 4; ++n) {
        const uint32_t s    = sel >> 4 * n;
        const uint32_t byte = (uint32_t) (ba >> 8 * (s & 7)) & 0xFF;
        r |= (s & 8 ? (byte & 0x80 ? 0xFFu : 0x00u) : byte) << 8 * n;
    }
    return r;
#endif
}

// Upper 32 bits of (hi:lo) << shift, 0 < shift < 32.
ITQ_FUNC uint32_t itq_funnel_left(const uint32_t lo, const uint32_t hi, const int shift) {
#if defined(__CUDA_ARCH__) && !defined(GGML_USE_HIP) && !defined(GGML_USE_MUSA)
    return __funnelshift_l(lo, hi, shift);
#else
    return hi << shift | lo >> (32 - shift);
#endif
}

// Bits of a where mask is set, of b elsewhere. One instruction: left to itself the compiler takes two for two
// constants.
ITQ_FUNC uint32_t itq_select(const uint32_t mask, const uint32_t a, const uint32_t b) {
#if defined(__CUDA_ARCH__) && !defined(GGML_USE_HIP) && !defined(GGML_USE_MUSA)
    uint32_t r;
    asm("lop3.b32 %0, %1, %2, %3, 0xE4;" : "=r"(r) : "r"(a), "r"(b), "r"(mask));
    return r;
#else
    return (a & mask) | (b & ~mask);
#endif
}

// Selector word of a chunk and the word before it (0 before the first chunk) to the subset index as two bit planes:
// bit b of c1 is s[t]^s[t-1]^s[t-6] and bit b of c0 is s[t-2]^s[t-4] for t = 32*k + b.
ITQ_FUNC void itq_subset_planes(const uint32_t sel, const uint32_t sel_prev, uint32_t & c1, uint32_t & c0) {
    c1 = sel ^ itq_funnel_left(sel_prev, sel, 1) ^ itq_funnel_left(sel_prev, sel, 6);
    c0 = itq_funnel_left(sel_prev, sel, 2) ^ itq_funnel_left(sel_prev, sel, 4);
}

// The planes interleaved: bits (2r + 1, 2r) of even hold (c1, c0) of bit 2r of the planes, those of odd of bit 2r + 1.
ITQ_FUNC void itq_subset_pairs(const uint32_t c1, const uint32_t c0, uint32_t & even, uint32_t & odd) {
    even = itq_select(0xAAAAAAAA, c1 << 1, c0);
    odd  = itq_select(0xAAAAAAAA, c1, c0 >> 1);
}

// ---------------------------------------------------------------------------------------------------------------------
// Half blocks: the 128 weights of the chunks k = j, 2 + j, 4 + j, 6 + j, which share the 8 symbol words of half j. A
// selector nibble of prmt wants its weights 4 bits apart in a word, and bits 4n + i of the planes already are: so
// eight weights t = 32*k + 4n + i, n = 0..7, go into one index word, and the symbols are transposed to match, once per
// half block.
//
// This orders the weights of a chunk by i first: "decoded order". Byte 8*i + n of a decoded chunk is weight 4n + i.
// The kernels that quantize activations for ITQ3_S store them in this order, see itq_decoded_offset.

// Offset of weight t of a block among 256 bytes in decoded order: half j, then group g, then the order within the
// chunk.
ITQ_FUNC constexpr int itq_decoded_offset(const int t) {
    return 128 * (t / 32 % 2) + 32 * (t / 64) + 8 * (t % 4) + t % 32 / 4;
}

// The 8 symbol words of a half block to nibbles: nibble n of sym[h][i] holds bits 4h .. 4h + 3 of byte i of word n,
// which are the symbols of the groups g = 2h (low two bits) and g = 2h + 1 (high two bits) of weight 4n + i.
ITQ_FUNC void itq_transpose_symbols(const uint32_t * q, uint32_t (&sym)[2][4]) {
    uint32_t x[2][4];
    for (int m = 0; m < 4; ++m) {
        const uint32_t a = q[2 * m + 0];
        const uint32_t b = q[2 * m + 1];
        x[0][m]          = itq_select(0x0F0F0F0F, a, b << 4);
        x[1][m]          = itq_select(0x0F0F0F0F, a >> 4, b);
    }
    for (int h = 0; h < 2; ++h) {
        const uint32_t lo01 = itq_prmt(x[h][0], x[h][1], 0x5140);
        const uint32_t lo23 = itq_prmt(x[h][2], x[h][3], 0x5140);
        const uint32_t hi01 = itq_prmt(x[h][0], x[h][1], 0x7362);
        const uint32_t hi23 = itq_prmt(x[h][2], x[h][3], 0x7362);
        sym[h][0]           = itq_prmt(lo01, lo23, 0x5410);
        sym[h][1]           = itq_prmt(lo01, lo23, 0x7632);
        sym[h][2]           = itq_prmt(hi01, hi23, 0x5410);
        sym[h][3]           = itq_prmt(hi01, hi23, 0x7632);
    }
}

// The level indices of the weights 4n + i, n = 0..7, of a chunk of group g, one per nibble.
ITQ_FUNC uint32_t itq_index_nibbles(const uint32_t (&sym)[2][4], const uint32_t even, const uint32_t odd, const int g,
                                    const int i) {
    const uint32_t q = g % 2 == 0 ? sym[g / 2][i] << 2 : sym[g / 2][i];
    const uint32_t c = (i % 2 == 0 ? even : odd) >> (i & 2);
    return itq_select(0xCCCCCCCC, q, c);
}

// ---------------------------------------------------------------------------------------------------------------------
// Level look-up of the four index nibbles in the low half of a word. prmt reaches 8 table bytes, so the 16 levels are
// two tables, negative and positive. Bit 3 of the index says which; it also switches prmt to copies of the sign bit,
// which are the same for all entries of one table: the table that is not meant returns a known constant instead of a
// level.

// Levels as the sum of two signed bytes, for two dp4a instead of a select: negative + positive.
ITQ_FUNC uint32_t itq_levels_negative(const uint32_t nibbles) {
    // Not meant: every entry is negative, so the constant is -1.
    return itq_prmt(itq_level_bytes(0, 0), itq_level_bytes(4, 0), nibbles);
}
ITQ_FUNC uint32_t itq_levels_positive(const uint32_t nibbles_flipped) {
    // nibbles_flipped = nibbles ^ 0x8888. Not meant: 0. Meant: one more than the level, against the -1 of the other
    // table.
    return itq_prmt(itq_level_bytes(8, 1), itq_level_bytes(12, 1), nibbles_flipped);
}

// Levels minus an integer zero-point z, |z| <= 64, as four signed bytes.
ITQ_FUNC uint32_t itq_levels_minus(const uint32_t nibbles, const int z) {
    // With 64 added no entry has its sign bit set, and the table that is not meant gives 0.
    const uint32_t lo = itq_prmt(itq_level_bytes(0, 64), itq_level_bytes(4, 64), nibbles);
    const uint32_t hi = itq_prmt(itq_level_bytes(8, 64), itq_level_bytes(12, 64), nibbles ^ 0x8888);
    // The sign bits keep the subtraction from borrowing across bytes: 128 + level + 64 - (64 + z) >= 1.
    return ((lo | hi | 0x80808080) - (uint32_t) (64 + z) * 0x01010101u) ^ 0x80808080;
}

// ---------------------------------------------------------------------------------------------------------------------
// Eight consecutive weights, for kernels that need them in their natural order.

// Bits 0..3 of x to bits 0, 8, 16, 24.
ITQ_FUNC uint32_t itq_spread4(const uint32_t x) {
    return (x & 0xF) * 0x00204081u & 0x01010101;
}

// Level indices of the weights t = 8*m + 0..7, one per nibble: weight r < 4 in nibble 2r, weight r >= 4 in nibble 2r -
// 7.
//   q0, q1: the symbol words of the weights 0..3 and 4..7 (of a block of 256 bytes 8*m % 64 .. + 7 of qs, group = m/8; of
//   one of 64 bytes 8*m % 16 .. + 7, group = m/2),
//   sel_window: selector byte m in bits 8..15, byte m - 1 (0 for m = 0) in bits 0..7.
ITQ_FUNC uint32_t itq_index_nibbles_8(const uint32_t q0, const uint32_t q1, const int group,
                                      const uint32_t sel_window) {
    const uint32_t c1 = (sel_window >> 8) ^ (sel_window >> 7) ^ (sel_window >> 2);
    const uint32_t c0 = (sel_window >> 6) ^ (sel_window >> 4);
    const uint32_t a  = (q0 >> 2 * group & 0x03030303) << 2 | itq_spread4(c1) << 1 | itq_spread4(c0);
    const uint32_t b  = (q1 >> 2 * group & 0x03030303) << 2 | itq_spread4(c1 >> 4) << 1 | itq_spread4(c0 >> 4);
    return a | b << 4;
}

// ---------------------------------------------------------------------------------------------------------------------
// Symbols of one bit (ITQ2_S, ITQ2_N) are a plane in the order of the selectors, and one prmt reaches all 8 levels.

// The level indices of the weights 4n + i, n = 0..7, of a chunk, one per nibble: q is the chunk's word of symbols.
ITQ_FUNC uint32_t itq2_s_index_nibbles(const uint32_t q, const uint32_t even, const uint32_t odd, const int i) {
    const uint32_t symbols = i < 2 ? q << (2 - i) : q >> (i - 2);
    const uint32_t grids   = (i % 2 == 0 ? even : odd) >> (i & 2);
    return itq_select(0x33333333, grids, symbols & 0x44444444);
}

// Level indices of the weights t = 8*m + 0..7, as itq_index_nibbles_8 has them: symbol byte m, and the window of selectors.
ITQ_FUNC uint32_t itq2_s_index_nibbles_8(const uint32_t q, const uint32_t sel_window) {
    const uint32_t c1 = (sel_window >> 8) ^ (sel_window >> 7) ^ (sel_window >> 2);
    const uint32_t c0 = (sel_window >> 6) ^ (sel_window >> 4);
    const uint32_t a  = itq_spread4(q) << 2 | itq_spread4(c1) << 1 | itq_spread4(c0);
    const uint32_t b  = itq_spread4(q >> 4) << 2 | itq_spread4(c1 >> 4) << 1 | itq_spread4(c0 >> 4);
    return a | b << 4;
}

// The levels of the four index nibbles in the low half of a word, as signed bytes.
ITQ_FUNC uint32_t itq2_s_look_up(const uint32_t nibbles) {
    return itq_prmt(itq_level_bytes<GGML_TYPE_ITQ2_S>(0, 0), itq_level_bytes<GGML_TYPE_ITQ2_S>(4, 0), nibbles);
}

// ---------------------------------------------------------------------------------------------------------------------
// Blocks of 64, two chunks. Their activations are in decoded order within each chunk, the chunks one after the other.

// Index words of chunk k of ITQ3_N: four nibbles, of the weights 4n + i with n = 4p + 0..3, in the lower half of
// index[2*i + p]. Byte i of symbol word m has bits 4k, 4k + 1 of weight 4m + i of the chunk, and after them those of the
// weight 16 further on, so that nibble k of four words is a half of eight weights of the same i.
//   q: the four symbol words of the block.
ITQ_FUNC void itq3_n_index_nibbles(const uint32_t (&q)[4], const int k, const uint32_t even, const uint32_t odd,
                                   uint32_t (&index)[8]) {
    const uint32_t x0 = itq_select(0x0F0F0F0F, q[0] >> 4 * k, q[1] >> 4 * k << 4);  // m = 0, 1
    const uint32_t x1 = itq_select(0x0F0F0F0F, q[2] >> 4 * k, q[3] >> 4 * k << 4);  // m = 2, 3
    for (int h = 0; h < 2; ++h) {  // i = 2h and, in the upper half, 2h + 1
        const uint32_t sym = itq_prmt(x0, x1, h == 0 ? 0x5140 : 0x7362);
        for (int p = 0; p < 2; ++p) {
            const uint32_t pairs = itq_prmt(even, odd, p == 0 ? 0x5410 : 0x7632);
            const uint32_t both  = itq_select(0xCCCCCCCC, p == 0 ? sym << 2 : sym, h == 0 ? pairs : pairs >> 2);
            index[4 * h + p]     = both;
            index[4 * h + 2 + p] = both >> 16;
        }
    }
}

// The same of ITQ2_N: q is the chunk's word of symbols.
ITQ_FUNC void itq2_n_index_nibbles(const uint32_t q, const uint32_t even, const uint32_t odd, uint32_t (&index)[8]) {
    for (int i = 0; i < 4; ++i) {
        index[2 * i + 0] = itq2_s_index_nibbles(q, even, odd, i);
        index[2 * i + 1] = index[2 * i + 0] >> 16;
    }
}

// The levels of the four index nibbles in the low half of a word, as signed bytes.
template <ggml_type type> ITQ_FUNC uint32_t itq_look_up(const uint32_t nibbles) {
    if constexpr (itq_traits<type>::bits == 2) {
        return itq_levels_minus(nibbles, 0);
    } else {
        return itq2_s_look_up(nibbles);
    }
}

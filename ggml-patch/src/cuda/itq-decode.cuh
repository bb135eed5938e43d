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

// Of a trellis type: a block, its weights, the bits of a symbol, whether it has a zero-point, and the level of an index
// 8*q + 4*c2 + 2*c1 + c0.
template <ggml_type type> struct itq_traits;

#define ITQ_CUDA_TRAITS(NAME, name, n_bits, n_levels, n_weights, zero_point, ...) \
    template <> struct itq_traits<GGML_TYPE_##NAME> {                             \
        using block                   = block_##name;                             \
        static constexpr int   length = n_weights;                                \
        static constexpr int   bits   = n_bits;                                   \
        static constexpr bool  has_z  = zero_point;                               \
        ITQ_FUNC constexpr int level(const int index) {                           \
            constexpr int levels[n_levels] = NAME##_LEVELS;                       \
            return levels[index];                                                 \
        }                                                                         \
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

// The byte that is looked up by a nibble. One symbol bit: 64 more than the level of q c2 c1 c0. Levels are symmetric: what
// complements an index negates its level, so that half of them are enough.
// Two: 64 more than the level of q1 q0 c1 c0 and c2 = 0; with c2 = 1 the nibble is complemented.
// Three: the nibble has q1 complemented by q2, and q0 c1 c0 by c2. With the levels a of q2 = 1 and c2 = 0 that it stands for,
// and b of q2 = c2 = 1, twice the level is +-(a + b) +- (a - b), the first negative where q2 = 0, the second where c2 = 1: no
// choice between two bytes, but two bytes that each have a sign. Table 0 has 64 + a - b, table 1 a + b; none reaches 128.
template <ggml_type type> ITQ_FUNC constexpr int itq_table_byte(const int table, const int nibble) {
    const int upper = nibble / 4, lower = nibble % 4;
    if (itq_traits<type>::bits < 3) {
        return 64 + itq_traits<type>::level(itq_traits<type>::bits == 1 ? nibble : 8 * upper + lower);
    }
    const int a = itq_traits<type>::level(8 * (4 + (upper ^ 2)) + lower);
    const int b = itq_traits<type>::level(8 * (4 + (upper ^ 3)) + 7 - lower);
    return table == 0 ? a - b + 64 : a + b;
}

// Four bytes, those of first + 0..3, lowest index in the lowest byte; down: of first - 0..3.
template <ggml_type type>
ITQ_FUNC constexpr uint32_t itq_table_bytes(const int table, const int first, const bool down = false) {
    uint32_t bytes = 0;
    for (int b = 0; b < 4; ++b) {
        bytes |= (uint32_t) itq_table_byte<type>(table, down ? first - b : first + b) << 8 * b;
    }
    return bytes;
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

// Upper 32 bits of (hi:lo) << shift, 0 <= shift < 32.
ITQ_FUNC uint32_t itq_funnel_left(const uint32_t lo, const uint32_t hi, const int shift) {
#if defined(__CUDA_ARCH__) && !defined(GGML_USE_HIP) && !defined(GGML_USE_MUSA)
    return __funnelshift_l(lo, hi, shift);
#else
    return ((uint64_t) hi << 32 | lo) << shift >> 32;
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

// The selectors before the first chunk as a word: of the start state, in the lowest bits of a block's last number, bit i in
// bit 31 - i. Others are never read.
ITQ_FUNC uint32_t itq_word_before(const uint32_t last) {
#if defined(__CUDA_ARCH__) || defined(__HIP_DEVICE_COMPILE__) || defined(__MUSA_ARCH__)
    return __brev(last);
#else
    uint32_t word = 0;
    for (int i = 0; i < 6; ++i) {
        word |= (last >> i & 1) << (31 - i);
    }
    return word;
#endif
}

// The bits of two 16-bit numbers, the second of which holds a start state, without it.
#define ITQ_WITHOUT_STATE 0xFFC0FFFF

// Selector word of a chunk and the word before it to the subset index as three bit planes, bit b of weight t = 32*k + b.
struct itq_planes {
    uint32_t c2, c1, c0;
};
ITQ_FUNC itq_planes itq_subset_planes(const uint32_t sel, const uint32_t before) {
    const uint32_t sel_4 = itq_funnel_left(before, sel, 4);
    const uint32_t sel_5 = itq_funnel_left(before, sel, 5);
    itq_planes     planes;
    planes.c2 = sel ^ sel_5 ^ itq_funnel_left(before, sel, 6);
    planes.c1 = itq_funnel_left(before, sel, 1) ^ itq_funnel_left(before, sel, 3) ^ sel_4 ^ sel_5;
    planes.c0 = itq_funnel_left(before, sel, 2) ^ sel_4;
    return planes;
}

// Two planes interleaved: bits (2r + 1, 2r) of even hold (upper, lower) of bit 2r of the planes, those of odd of bit 2r + 1.
ITQ_FUNC void itq_interleave(const uint32_t upper, const uint32_t lower, uint32_t & even, uint32_t & odd) {
    even = itq_select(0xAAAAAAAA, upper << 1, lower);
    odd  = itq_select(0xAAAAAAAA, upper, lower >> 1);
}

// Pairs of bits of the nibbles of a chunk, of its even and its odd weights: the lower two of a nibble, c1 and c0, with more
// than one symbol bit complemented by c2; in above, the symbol's highest bit and c2, but with two symbol bits c2 twice: what
// symbols of two bits are complemented by.
struct itq_pairs {
    uint32_t even, odd, above_even, above_odd;
};
// q: the chunk's word of symbols of one bit, or of third bits.
template <int bits>
ITQ_FUNC itq_pairs itq_pairs_of_chunk(const uint32_t sel, const uint32_t before, const uint32_t q = 0) {
    const itq_planes planes   = itq_subset_planes(sel, before);
    const uint32_t   mirrored = bits == 1 ? 0 : planes.c2;
    itq_pairs        pairs;
    itq_interleave(planes.c1 ^ mirrored, planes.c0 ^ mirrored, pairs.even, pairs.odd);
    itq_interleave(bits == 2 ? planes.c2 : q, planes.c2, pairs.above_even, pairs.above_odd);
    return pairs;
}

// Eight nibbles to look bytes up by, and pairs of above, in the upper or (low) the lower two bits of the nibbles of sign; the
// other two are of other weights.
struct itq_indices {
    uint32_t             nibbles, sign;
    bool                 low;
    ITQ_FUNC itq_indices upper_half(const itq_indices & x) { return { x.nibbles >> 16, x.sign >> 16, x.low }; }
};
// lower: pairs, in the lower two bits of the nibbles; above: in the lower two or in the upper two; q: symbols of two bits in
// the upper ones.
template <int bits>
ITQ_FUNC itq_indices itq_join(const uint32_t lower, const uint32_t above, const bool low, const uint32_t q) {
    const uint32_t upper = low ? above << 2 : above;
    return { itq_select(0xCCCCCCCC, bits == 1 ? upper : q ^ upper, lower), above, low };
}
// Of the weights 4n + i, n = 0..7, of a chunk.
template <int bits> ITQ_FUNC itq_indices itq_indices_of(const itq_pairs & pairs, const int i, const uint32_t q = 0) {
    const uint32_t lower = i % 2 == 0 ? pairs.even : pairs.odd;
    const uint32_t above = i % 2 == 0 ? pairs.above_even : pairs.above_odd;
    return itq_join<bits>(i < 2 ? lower : lower >> 2, above, i < 2, q);
}

// First words of the tables, up and down. prmt reaches 8 bytes, so that 16 are two tables, by the nibble and by its complement.
// Bit 3 also switches prmt to copies of the sign bit, which no byte has: the table that is not meant gives 0.
template <ggml_type type> struct itq_tables {
    static constexpr int n = itq_traits<type>::bits == 3 ? 2 : 1;
    uint32_t             up[n], down[n];
    uint32_t             minus = 0xFFFFFFFF;  // -1

    // By a pair in the lower two bits of a nibble, whatever the upper two do to 0 and to all ones: whether the lower bit is
    // set, whether the upper one is not. By one in the upper two the second takes 127, which bit 3 makes 0.
    uint32_t lower = 0xFF00FF00, not_upper = 0x0000FFFF, not_bit_3 = 0x7F7F7F7F;
};
template <ggml_type type> ITQ_FUNC itq_tables<type> itq_make_tables() {
    itq_tables<type> tables;
    for (int table = 0; table < tables.n; ++table) {
        tables.up[table]   = itq_table_bytes<type>(table, 0);
        tables.down[table] = itq_table_bytes<type>(table, 15, true);
    }
    return tables;
}

// 64 more than the levels of four nibbles, in parts: for products each, which saves merging them.
// One symbol bit: what the two tables gave. Two: the bytes with those of c2 = 1 complemented, 129 too small as signed numbers;
// and -1 in these, products with which are subtracted 129 times. Three, the levels doubled: the same two parts of the
// differences; the sums complemented where q2 = 0, and by what, -1 or 127, to be subtracted as it is.
template <ggml_type type> constexpr int itq_nparts = itq_traits<type>::bits == 3 ? 4 : 2;

template <ggml_type type>
ITQ_FUNC void itq_parts(const itq_tables<type> & tables, const itq_indices & index,
                        uint32_t (&parts)[itq_nparts<type>]) {
    const uint32_t up   = index.nibbles;
    const uint32_t down = up * tables.minus - 1;  // the complement on the pipe of products, which is not as busy
    parts[0]            = itq_prmt(tables.up[0], itq_table_bytes<type>(0, 4), up);
    parts[1]            = itq_prmt(tables.down[0], itq_table_bytes<type>(0, 11, true), down);
    if constexpr (itq_traits<type>::bits > 1) {
        const uint32_t bytes = parts[0] | parts[1];
        parts[1] = index.low ? itq_prmt(tables.lower, tables.lower, index.sign) : itq_prmt(0, 0xFFFFFFFF, index.sign);
        parts[0] = bytes ^ parts[1];
    }
    if constexpr (itq_traits<type>::bits == 3) {
        const uint32_t bytes = itq_prmt(tables.up[1], itq_table_bytes<type>(1, 4), up) |
                               itq_prmt(tables.down[1], itq_table_bytes<type>(1, 11, true), down);
        parts[3]             = index.low ? itq_prmt(tables.not_upper, tables.not_upper, index.sign)
                                         : itq_prmt(tables.not_bit_3, 0x7F7F7F7F, index.sign);
        parts[2]             = bytes ^ parts[3];
    }
}

// 64 more than the levels, in 1..127.
template <ggml_type type>
ITQ_FUNC uint32_t itq_levels_raised(const itq_indices &      index,
                                    const itq_tables<type> & tables = itq_make_tables<type>()) {
    uint32_t parts[itq_nparts<type>];
    itq_parts<type>(tables, index, parts);
    if constexpr (itq_traits<type>::bits == 1) {
        return parts[0] | parts[1];
    } else {
        // 255 - (64 + level) - 127 = 64 - level: nothing is borrowed from the next byte
        const uint32_t raised = parts[0] - (parts[1] & 0x7F7F7F7F);
        if constexpr (itq_traits<type>::bits == 2) {
            return raised;
        } else {
            // 128 more than twice the level, in 6..250 and even: nothing moves to the next byte
            return (raised + (parts[2] - parts[3]) + 0x40404040) >> 1;
        }
    }
}

// Levels minus an integer zero-point z, |z| <= 64, as four signed bytes.
template <ggml_type type> ITQ_FUNC uint32_t itq_levels_minus(const itq_indices & index, const int z) {
    // The sign bits keep the subtraction from borrowing across bytes: 128 + level + 64 - (64 + z) >= 1.
    return ((itq_levels_raised<type>(index) | 0x80808080) - (uint32_t) (64 + z) * 0x01010101u) ^ 0x80808080;
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

// Byte i of four words to word i; with lower and upper exchanged, byte (i + 2) % 4.
ITQ_FUNC void itq_transpose_bytes(const uint32_t (&x)[4], uint32_t (&to)[4], const uint32_t lower = 0x5140,
                                  const uint32_t upper = 0x7362) {
    const uint32_t lo01 = itq_prmt(x[0], x[1], lower);
    const uint32_t lo23 = itq_prmt(x[2], x[3], lower);
    const uint32_t hi01 = itq_prmt(x[0], x[1], upper);
    const uint32_t hi23 = itq_prmt(x[2], x[3], upper);
    to[0]               = itq_prmt(lo01, lo23, 0x5410);
    to[1]               = itq_prmt(lo01, lo23, 0x7632);
    to[2]               = itq_prmt(hi01, hi23, 0x5410);
    to[3]               = itq_prmt(hi01, hi23, 0x7632);
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
        itq_transpose_bytes(x[h], sym[h]);
    }
}

// The symbols of the weights 4n + i, n = 0..7, of a chunk of group g, in the upper two bits of nibbles.
ITQ_FUNC uint32_t itq_symbols_of_group(const uint32_t (&sym)[2][4], const int g, const int i) {
    return g % 2 == 0 ? sym[g / 2][i] << 2 : sym[g / 2][i];
}

// ---------------------------------------------------------------------------------------------------------------------
// Eight consecutive weights, for kernels that need them in their natural order.

// Bits 0..3 of x to bits 0, 8, 16, 24.
ITQ_FUNC uint32_t itq_spread4(const uint32_t x) {
    return (x & 0xF) * 0x00204081u & 0x01010101;
}

// Those of the weights t = 8*m + 0..7, one per nibble: weight r < 4 in nibble 2r, weight r >= 4 in nibble 2r - 7.
//   q0, q1: of two symbol bits the words of the weights 0..3 and 4..7 (of a block of 256 bytes 8*m % 64 .. + 7 of qs, group =
//   m/8; of one of 64 bytes 8*m % 16 .. + 7, group = m/2), of one bit symbol byte m;
//   sel_window: selector byte m in bits 8..15, the byte before in bits 0..7; q2: byte m of third bits.
template <int bits>
ITQ_FUNC itq_indices itq_indices_8(const uint32_t q0, const uint32_t q1, const int group, const uint32_t sel_window,
                                   const uint32_t q2 = 0) {
    const itq_planes planes = itq_subset_planes(sel_window, 0);
    itq_indices      index  = { 0, 0, false };
    for (int h = 0; h < 2; ++h) {
        const uint32_t c2    = itq_spread4(planes.c2 >> (8 + 4 * h));
        const uint32_t lower = itq_spread4(planes.c1 >> (8 + 4 * h)) << 1 | itq_spread4(planes.c0 >> (8 + 4 * h));
        const uint32_t above = bits == 2 ? c2 : itq_spread4((bits == 1 ? q0 : q2) >> 4 * h);
        const uint32_t sign  = above << 3 | c2 << 2;
        uint32_t       nibbles;
        if constexpr (bits == 1) {
            nibbles = sign | lower;
        } else {
            nibbles = (((h == 0 ? q0 : q1) >> 2 * group & 0x03030303) << 2 | lower) ^ (sign | 3 * c2);
        }
        index.nibbles |= nibbles << 4 * h;
        index.sign |= sign << 4 * h;
    }
    return index;
}

// ---------------------------------------------------------------------------------------------------------------------
// Blocks of 64, two chunks. Their activations are in decoded order within each chunk, the chunks one after the other.

// Indices of chunk k of more than one symbol bit: those of the weights 4n + i with n = 4p + 0..3 in the lower half of
// index[2*i + p]. Byte i of symbol word m has bits 4k, 4k + 1 of weight 4m + i of the chunk, and after them those of the weight 16 further on, so
// that nibble k of four words is a half of eight weights of the same i.
//   q: the four words of symbols of two bits of the block.
template <int bits>
ITQ_FUNC void itq_n_indices(const uint32_t (&q)[4], const int k, const itq_pairs & pairs, itq_indices (&index)[8]) {
    const uint32_t x0 = itq_select(0x0F0F0F0F, q[0] >> 4 * k, q[1] >> 4 * k << 4);  // m = 0, 1
    const uint32_t x1 = itq_select(0x0F0F0F0F, q[2] >> 4 * k, q[3] >> 4 * k << 4);  // m = 2, 3
    for (int h = 0; h < 2; ++h) {  // i = 2h and, in the upper half, 2h + 1
        const uint32_t sym = itq_prmt(x0, x1, h == 0 ? 0x5140 : 0x7362);
        for (int p = 0; p < 2; ++p) {
            const uint32_t lower = itq_prmt(pairs.even, pairs.odd, p == 0 ? 0x5410 : 0x7632);
            const uint32_t above = itq_prmt(pairs.above_even, pairs.above_odd, p == 0 ? 0x5410 : 0x7632);
            index[4 * h + p]     = itq_join<bits>(h == 0 ? lower : lower >> 2, above, h == 0, p == 0 ? sym << 2 : sym);
            index[4 * h + 2 + p] = itq_indices::upper_half(index[4 * h + p]);
        }
    }
}

// The same of one symbol bit.
ITQ_FUNC void itq2_n_indices(const itq_pairs & pairs, itq_indices (&index)[8]) {
    for (int i = 0; i < 4; ++i) {
        index[2 * i + 0] = itq_indices_of<1>(pairs, i);
        index[2 * i + 1] = itq_indices::upper_half(index[2 * i + 0]);
    }
}

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

// What is looked up by a nibble: of one symbol bit the level of q c2 c1 c0. Levels are symmetric, so that with two symbol
// bits those of c2 = 0, by q1 q0 c1 c0, are enough: c2 complements the index and negates the level. With three those from 16
// on are of q2 = 1.
template <ggml_type type> ITQ_FUNC constexpr int itq_nibble_level(const int nibble) {
    return itq_traits<type>::level(itq_traits<type>::bits == 1 ? nibble : 8 * (nibble / 4) + nibble % 4);
}

// Four table bytes, 64 more than the levels of first + 0..3, lowest index in the lowest byte; down: of first - 0..3.
template <ggml_type type> ITQ_FUNC constexpr uint32_t itq_level_bytes(const int first, const bool down = false) {
    uint32_t bytes = 0;
    for (int b = 0; b < 4; ++b) {
        bytes |= (uint32_t) (itq_nibble_level<type>(down ? first - b : first + b) + 64) << 8 * b;
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
// Where the chunk does not begin at a word: the two words that it lies in, bits 32 - at .. 63 - at, at <= 16.
struct itq_planes {
    uint32_t c2, c1, c0;
};
ITQ_FUNC itq_planes itq_subset_planes(const uint32_t sel, const uint32_t before, const int at = 0) {
    const uint32_t sel_4 = itq_funnel_left(before, sel, at + 4);
    const uint32_t sel_5 = itq_funnel_left(before, sel, at + 5);
    itq_planes     planes;
    planes.c2 = itq_funnel_left(before, sel, at) ^ sel_5 ^ itq_funnel_left(before, sel, at + 6);
    planes.c1 = itq_funnel_left(before, sel, at + 1) ^ itq_funnel_left(before, sel, at + 3) ^ sel_4 ^ sel_5;
    planes.c0 = itq_funnel_left(before, sel, at + 2) ^ sel_4;
    return planes;
}

// Two planes interleaved: bits (2r + 1, 2r) of even hold (upper, lower) of bit 2r of the planes, those of odd of bit 2r + 1.
ITQ_FUNC void itq_interleave(const uint32_t upper, const uint32_t lower, uint32_t & even, uint32_t & odd) {
    even = itq_select(0xAAAAAAAA, upper << 1, lower);
    odd  = itq_select(0xAAAAAAAA, upper, lower >> 1);
}

// Pairs of bits of the nibbles of a chunk, of its even and its odd weights: the lower two of a nibble, c1 and c0, with more
// than one symbol bit complemented by c2; in above, q and c2, or c2 twice, which is what symbols are complemented by; and, in
// the lower bit of third, third symbol bits complemented by c2.
struct itq_pairs {
    uint32_t even, odd, above_even, above_odd;
    uint32_t third_even = 0, third_odd = 0;
};
// q: the chunk's word of symbols of one bit, or of third bits.
template <int bits>
ITQ_FUNC itq_pairs itq_pairs_of_chunk(const uint32_t sel, const uint32_t before, const uint32_t q = 0,
                                      const int at = 0) {
    const itq_planes planes = itq_subset_planes(sel, before, at);
    itq_pairs        pairs;
    if constexpr (bits == 1) {
        itq_interleave(planes.c1, planes.c0, pairs.even, pairs.odd);
        itq_interleave(q, planes.c2, pairs.above_even, pairs.above_odd);
    } else {
        itq_interleave(planes.c1 ^ planes.c2, planes.c0 ^ planes.c2, pairs.even, pairs.odd);
        itq_interleave(planes.c2, planes.c2, pairs.above_even, pairs.above_odd);
    }
    if constexpr (bits == 3) {
        pairs.third_even = q ^ planes.c2;
        pairs.third_odd  = pairs.third_even >> 1;
    }
    return pairs;
}

// Eight nibbles to look levels up by; with more than one symbol bit, the upper two bits of those of sign are c2. Where there
// is a third, it says of which 16 levels they are: nibble n of four has n or n + 4, a byte of the lower or of the upper ones.
struct itq_indices {
    uint32_t             nibbles, sign, third;
    ITQ_FUNC itq_indices upper_half(const itq_indices & x) { return { x.nibbles >> 16, x.sign >> 16, x.third >> 16 }; }
};
// lower, and above and third: pairs, in the lower and in the upper two bits of the nibbles; q: symbols of two bits in the
// upper ones.
template <int bits>
ITQ_FUNC itq_indices itq_join(const uint32_t lower, const uint32_t above, const uint32_t third, const uint32_t q) {
    return { itq_select(0xCCCCCCCC, bits == 1 ? above : q ^ above, lower), above,
             bits == 3 ? itq_select(0x44444444, third, 0x32103210) : 0 };
}
// Of the weights 4n + i, n = 0..7, of a chunk.
template <int bits> ITQ_FUNC itq_indices itq_indices_of(const itq_pairs & pairs, const int i, const uint32_t q = 0) {
    const uint32_t lower = i % 2 == 0 ? pairs.even : pairs.odd;
    const uint32_t above = i % 2 == 0 ? pairs.above_even : pairs.above_odd;
    const uint32_t third = i % 2 == 0 ? pairs.third_even : pairs.third_odd;
    return itq_join<bits>(i < 2 ? lower : lower >> 2, i < 2 ? above << 2 : above, i < 2 ? third << 2 : third, q);
}

// ---------------------------------------------------------------------------------------------------------------------
// Level look-up of the four nibbles in the low half of a word. prmt reaches 8 table bytes, so 16 levels are two tables. Bit 3
// of a nibble says which; it also switches prmt to copies of the sign bit, which no entry has, so that the table that is
// not meant gives 0. Of 32 levels both halves are looked up.

// The levels first + 0..15, raised by 64.
template <ggml_type type> ITQ_FUNC uint32_t itq_levels_16(const int first, const uint32_t nibbles) {
    const uint32_t lower = itq_prmt(itq_level_bytes<type>(first + 0), itq_level_bytes<type>(first + 4), nibbles);
    const uint32_t upper =
        itq_prmt(itq_level_bytes<type>(first + 8), itq_level_bytes<type>(first + 12), nibbles ^ 0x8888);
    return lower | upper;
}

// All ones in the bytes that are complemented. Bits 3 and 2 of a nibble of sign are the same: copies of a sign bit, or zeros.
ITQ_FUNC uint32_t itq_complemented(const uint32_t sign) {
    return itq_prmt(0, 0x80808080, sign);
}

// 64 more than the levels, in 1..127.
template <ggml_type type> ITQ_FUNC uint32_t itq_levels_raised(const itq_indices & index) {
    uint32_t levels = itq_levels_16<type>(0, index.nibbles);
    if constexpr (itq_traits<type>::bits == 3) {
        levels = itq_prmt(levels, itq_levels_16<type>(16, index.nibbles), index.third);
    }
    if constexpr (itq_traits<type>::bits == 1) {
        return levels;
    } else {
        // 255 - (64 + level) - 127 = 64 - level: nothing is borrowed from the next byte
        const uint32_t negative = itq_complemented(index.sign);
        return (levels ^ negative) - (negative & 0x7F7F7F7F);
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
    itq_indices      index  = { 0, 0, bits == 3 ? 0x32103210u : 0 };
    for (int h = 0; h < 2; ++h) {
        const uint32_t c2    = itq_spread4(planes.c2 >> (8 + 4 * h));
        const uint32_t lower = itq_spread4(planes.c1 >> (8 + 4 * h)) << 1 | itq_spread4(planes.c0 >> (8 + 4 * h));
        uint32_t       nibbles, sign;
        if constexpr (bits == 1) {
            sign    = itq_spread4(q0 >> 4 * h) << 3 | c2 << 2;
            nibbles = sign | lower;
        } else {
            sign    = 12 * c2;
            nibbles = (((h == 0 ? q0 : q1) >> 2 * group & 0x03030303) << 2 | lower) ^ 15 * c2;
        }
        index.nibbles |= nibbles << 4 * h;
        index.sign |= sign << 4 * h;
        if constexpr (bits == 3) {
            index.third |= (itq_spread4(q2 >> 4 * h) ^ c2) << 2 << 4 * h;
        }
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
            const uint32_t third = itq_prmt(pairs.third_even, pairs.third_odd, p == 0 ? 0x5410 : 0x7632);
            index[4 * h + p]     = itq_join<bits>(h == 0 ? lower : lower >> 2, h == 0 ? above << 2 : above,
                                                  h == 0 ? third << 2 : third, p == 0 ? sym << 2 : sym);
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

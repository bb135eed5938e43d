// Weights of a block as fragments of the tensor core product m16n8k32 of signed bytes.
//
// The order of the 256 products of a block is free as long as weights and activations agree on it, so it is chosen for
// decoding: four neighbouring lanes c = 0..3 share the block of a row, each decodes 64 of its weights in registers and
// hands them to the product as they are. In step s = 0..7 of a block lane c gives words w = 0, 1 of four bytes, of the
// rows lane/4 and lane/4 + 8. The kernel that quantizes the activations puts them in the same order.

#pragma once

#include "itq3s-decode.cuh"
#include "itq3s-vecdot.cuh"
#include "tq-decode.cuh"

// Position of the weights t .. t + 3 (of a ternary type, t a multiple of 4), or of weight t (ITQ3_S) among the 256 bytes
// of a block in the order of fragments: 64 bytes for every two steps, in them 16 for each lane c, in them 8 for each
// step, in them 4 for each word.
ITQ3_S_FUNC constexpr int itq3_s_fragment_at(const int s, const int c, const int w) {
    return 64 * (s / 2) + 16 * c + 8 * (s % 2) + 4 * w;
}
// ITQ3_S: lane c = j + 2h decodes groups g = 2h, 2h + 1 of half j; step s = 4*(g % 2) + i holds the weights 4n + i of its
// chunk, n = 0..7.
ITQ3_S_FUNC constexpr int itq3_s_fragment_position(const int t) {
    const int j = t / 32 % 2, g = t / 64, i = t % 4, n = t % 32 / 4;
    return itq3_s_fragment_at(4 * (g % 2) + i, j + 2 * (g / 2), n / 4) + n % 4;
}
// TQ2_0: lane c has the words 4c .. 4c + 3 of qs; step s = 2g + p has digit g of the words 4c + 2p, 4c + 2p + 1.
ITQ3_S_FUNC constexpr int tq2_0_fragment_position(const int t) {
    const int m = 8 * (t / 128) + t % 32 / 4, g = t % 128 / 32;
    return itq3_s_fragment_at(2 * g + m % 4 / 2, m / 4, m % 2);
}
// TQ1_0: lane c has the words 2c, 2c + 1 (steps 0..4) and 8 + c of qs (steps 5, 6 and word 0 of step 7) and digit c of
// qh (word 1 of step 7).
ITQ3_S_FUNC constexpr int tq1_0_fragment_position(const int t) {
    if (t < 160) {
        return itq3_s_fragment_at(t / 32, t % 32 / 8, t % 8 / 4);
    }
    if (t < 240) {
        const int n = (t - 160) / 16;
        return itq3_s_fragment_at(5 + n / 2, t % 16 / 4, n % 2);
    }
    return itq3_s_fragment_at(7, (t - 240) / 4, 1);
}

// Halves of the two tables of the decoder: levels 0..3 and 8..11. As constants the compiler would move them to a register
// before every use, so they are made values that it does not know: no warp has a lane 32.
struct itq3_s_tables {
    uint32_t negative;
    uint32_t positive;
};
template <ggml_type type, bool two_tables>
static __device__ __forceinline__ itq3_s_tables itq3_s_make_tables(const int lane) {
    if constexpr (type == GGML_TYPE_ITQ3_S) {
        return { itq3_s_level_bytes(0, two_tables ? 0 : 64) + lane / 32,
                 itq3_s_level_bytes(8, two_tables ? 1 : 64) + lane / 32 };
    } else {
        return { 0, 0 };
    }
}

// What a lane keeps of its 64 weights of a block.
template <ggml_type type> struct itq3_s_fragments;

template <> struct itq3_s_fragments<GGML_TYPE_ITQ3_S> {
    uint32_t sym[4];   // per i: nibble n has the symbols of both groups of weight 4n + i
    uint32_t even[2];  // per group: the subset index of the even and of the odd bits
    uint32_t odd[2];
    float    d;
    float    z;

    // The block at byte x of the tile.
    __device__ __forceinline__ void load(const uint32_t * tile, const int x, const int c) {
        tile += x / 4;
        const int        j     = c % 2;
        const int        h     = c / 2;
        const uint32_t   scale = 16 >> 4 * h;  // by a product, which is not the pipe of shifts
        const uint32_t * q     = tile + ITQ3_S_WORD_QS + 8 * j;
        uint32_t         v[4];
#pragma unroll
        for (int m = 0; m < 4; ++m) {
            v[m] = itq3_s_select(0x0F0F0F0F, q[2 * m + 0] >> 4 * h, q[2 * m + 1] * scale);
        }
        const uint32_t lo01 = itq3_s_prmt(v[0], v[1], 0x5140);
        const uint32_t lo23 = itq3_s_prmt(v[2], v[3], 0x5140);
        const uint32_t hi01 = itq3_s_prmt(v[0], v[1], 0x7362);
        const uint32_t hi23 = itq3_s_prmt(v[2], v[3], 0x7362);
        sym[0]              = itq3_s_prmt(lo01, lo23, 0x5410);
        sym[1]              = itq3_s_prmt(lo01, lo23, 0x7632);
        sym[2]              = itq3_s_prmt(hi01, hi23, 0x5410);
        sym[3]              = itq3_s_prmt(hi01, hi23, 0x7632);

        const uint32_t * sel  = tile + ITQ3_S_WORD_SEL + 4 * h + j;
        const uint32_t   last = sel[-1];  // of chunk 0 that is a word of symbols
#pragma unroll
        for (int g = 0; g < 2; ++g) {
            uint32_t c1, c0;
            itq3_s_subset_planes(sel[2 * g], g == 0 ? (c == 0 ? 0 : last) : sel[1], c1, c0);
            itq3_s_subset_pairs(c1, c0, even[g], odd[g]);
        }
        const float2 dz = itq3_s_half2_bits(tile[ITQ3_S_WORD_DZ]);
        d               = dz.x * (1.0f / 32.0f);
        z               = dz.y;
    }

    __device__ __forceinline__ uint32_t index(const int s) const {
        const int      g = s / 4;
        const int      i = s % 4;
        const uint32_t q = g == 0 ? sym[i] << 2 : sym[i];
        const uint32_t p = i % 2 == 0 ? even[g] : odd[g];
        return itq3_s_select(0xCCCCCCCC, q, p >> (i & 2));
    }
    // Levels and 64 more, which leaves them in 1 .. 127: of two tables the one that is not meant gives 0.
    __device__ __forceinline__ void step(const int s, const itq3_s_tables & tables, uint32_t (&word)[2]) {
        uint32_t lo = index(s);
        uint32_t hi = lo ^ 0x88888888;
#pragma unroll
        for (int w = 0; w < 2; ++w) {
            word[w] = itq3_s_prmt(tables.negative, itq3_s_level_bytes(4, 64), lo) |
                      itq3_s_prmt(tables.positive, itq3_s_level_bytes(12, 64), hi);
            lo >>= 16;
            hi >>= 16;
        }
    }
    // Levels as the sum of two words, see itq3_s_levels_negative.
    __device__ __forceinline__ void step(const int s, const itq3_s_tables & tables, uint32_t (&negative)[2],
                                         uint32_t (&positive)[2]) {
        uint32_t lo = index(s);
        uint32_t hi = lo ^ 0x88888888;
#pragma unroll
        for (int w = 0; w < 2; ++w) {
            negative[w] = itq3_s_prmt(tables.negative, itq3_s_level_bytes(4, 0), lo);
            positive[w] = itq3_s_prmt(tables.positive, itq3_s_level_bytes(12, 1), hi);
            lo >>= 16;
            hi >>= 16;
        }
    }
};

// Words i .. i + n - 1 from byte x of a tile on, a multiple of 2; one word more is read.
template <int n>
static __device__ __forceinline__ void tq_fragment_words(const uint32_t * tile, const int x, uint32_t (&q)[n]) {
    const uint32_t * aligned = tile + x / 4;
    const uint32_t   bytes   = x & 2 ? 0x5432 : 0x3210;
#pragma unroll
    for (int l = 0; l < n; ++l) {
        q[l] = itq3_s_prmt(aligned[l], aligned[l + 1], bytes);
    }
}
static __device__ __forceinline__ float tq_fragment_scale(const uint32_t * tile, const int x) {
    return __half2float(((const half *) tile)[x / 2]);
}

// Digits are one more than the weights: z = 1.

template <> struct itq3_s_fragments<GGML_TYPE_TQ2_0> {
    uint32_t q[4];
    float    d;
    float    z;

    __device__ __forceinline__ void load(const uint32_t * tile, const int x, const int c) {
        tq_fragment_words(tile, x + 16 * c, q);
        d = tq_fragment_scale(tile, x + sizeof(block_tq2_0::qs));
        z = 1.0f;
    }
    __device__ __forceinline__ void step(const int s, const itq3_s_tables &, uint32_t (&word)[2]) {
        word[0] = tq2_0_digits(q[s % 2 * 2 + 0], s / 2);
        word[1] = tq2_0_digits(q[s % 2 * 2 + 1], s / 2);
    }
};

template <> struct itq3_s_fragments<GGML_TYPE_TQ1_0> {
    tq1_0_state a[2];
    tq1_0_state b;
    tq1_0_state e;
    float       d;
    float       z;

    __device__ __forceinline__ void load(const uint32_t * tile, const int x, const int c) {
        uint32_t qa[2], qb[1], qe[1];
        tq_fragment_words(tile, x + 8 * c, qa);
        tq_fragment_words(tile, x + 32 + 4 * c, qb);
        tq_fragment_words(tile, x + (int) sizeof(block_tq1_0::qs), qe);
        a[0]                 = tq1_0_begin(qa[0]);
        a[1]                 = tq1_0_begin(qa[1]);
        b                    = tq1_0_begin(qb[0]);
        e                    = tq1_0_begin(qe[0]);
        const uint32_t power = 0x1B090301u >> 8 * c & 0xFF;  // 3^c: past the digits before c
        e.even               = e.even * power & 0x00FF00FF;
        e.odd                = e.odd * power & 0x00FF00FF;
        d                    = tq_fragment_scale(tile, x + sizeof(block_tq1_0::qs) + sizeof(block_tq1_0::qh));
        z                    = 1.0f;
    }
    // Steps in their order.
    __device__ __forceinline__ void step(const int s, const itq3_s_tables &, uint32_t (&word)[2]) {
        word[0] = tq1_0_next(s < 5 ? a[0] : b);
        word[1] = tq1_0_next(s < 5 ? a[1] : s < 7 ? b : e);
    }
};

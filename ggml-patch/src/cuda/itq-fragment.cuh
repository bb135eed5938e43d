// Weights of a block as fragments of the tensor core product m16n8k32 of signed bytes.
//
// The order of the 256 products of a block is free as long as weights and activations agree on it, so it is chosen for
// decoding: four neighbouring lanes c = 0..3 share the block of a row, each decodes 64 of its weights in registers and
// hands them to the product as they are. In step s = 0..7 of a block lane c gives words w = 0, 1 of four bytes, of the
// rows lane/4 and lane/4 + 8. The kernel that quantizes the activations puts them in the same order.
//
// Of blocks of 64 lane c has the whole of block c of four, each with a scale of its own, but the product adds up the
// four lanes. So a column of activations is four of the eight columns of the product, one for each block, with zeros in
// the place of the others: four sums instead of one of all blocks, for four times the products.

#pragma once

#include "itq-decode.cuh"
#include "itq-vecdot.cuh"
#include "tq-decode.cuh"

#include <type_traits>

// Blocks of the 256 weights that four lanes share, and columns of activations in the eight of a product.
template <ggml_type type> constexpr int itq_fragment_blocks  = QK_K / ggml_cuda_type_traits<type>::qk;
template <ggml_type type> constexpr int itq_fragment_columns = 8 / itq_fragment_blocks<type>;

// Position of the weights t .. t + 3 (of a ternary type, t a multiple of 4), or of weight t (trellis) among the 256 bytes
// of a block, or of four, in the order of fragments: 64 bytes for every two steps, in them 16 for each lane c, in them
// 8 for each step, in them 4 for each word.
ITQ_FUNC constexpr int itq_fragment_at(const int s, const int c, const int w) {
    return 64 * (s / 2) + 16 * c + 8 * (s % 2) + 4 * w;
}
// ITQ3_S: lane c = j + 2h decodes groups g = 2h, 2h + 1 of half j; step s = 4*(g % 2) + m holds the weights 8m .. 8m + 7 of
// its chunk, weight r and weight r + 4 of them side by side.
ITQ_FUNC constexpr int itq3_s_fragment_position(const int t) {
    const int j = t / 32 % 2, g = t / 64, m = t % 32 / 8, n = 2 * (t % 4) + t % 8 / 4;
    return itq_fragment_at(4 * (g % 2) + m, j + 2 * (g / 2), n / 4) + n % 4;
}
// ITQ4_S: the same lanes; step s = 4*(g % 2) + i holds the weights 4n + i of the chunk, n = 0..7.
ITQ_FUNC constexpr int itq4_s_fragment_position(const int t) {
    const int j = t / 32 % 2, g = t / 64, i = t % 4, n = t % 32 / 4;
    return itq_fragment_at(4 * (g % 2) + i, j + 2 * (g / 2), n / 4) + n % 4;
}
// ITQ2_S: lane c decodes the chunks 2c and 2c + 1; step s = 4*(k % 2) + i holds the weights 4n + i of chunk k.
ITQ_FUNC constexpr int itq2_s_fragment_position(const int t) {
    const int k = t / 32, i = t % 4, n = t % 32 / 4;
    return itq_fragment_at(4 * (k % 2) + i, k / 2, n / 4) + n % 4;
}
// ITQ3_N and ITQ4_N: lane c decodes block c; step s = 4p + 2k + h has the weights 4n + i of chunk k, n = 4p .. 4p + 3, with
// i = 2h in word 0, with i = 2h + 1 in word 1. ITQ2_N: the two chunks of lane c are those of ITQ2_S.
ITQ_FUNC constexpr int itq3_n_fragment_position(const int t) {
    const int k = t / 32 % 2, i = t % 4, n = t % 32 / 4;
    return itq_fragment_at(4 * (n / 4) + 2 * k + i / 2, t / 64, i % 2) + n % 4;
}
// TQ2_0: lane c has the words 4c .. 4c + 3 of qs; step s = 2g + p has digit g of the words 4c + 2p, 4c + 2p + 1.
ITQ_FUNC constexpr int tq2_0_fragment_position(const int t) {
    const int m = 8 * (t / 128) + t % 32 / 4, g = t % 128 / 32;
    return itq_fragment_at(2 * g + m % 4 / 2, m / 4, m % 2);
}
// TQ1_0: lane c has the words 2c, 2c + 1 (steps 0..4) and 8 + c of qs (steps 5, 6 and word 0 of step 7) and digit c of
// qh (word 1 of step 7).
ITQ_FUNC constexpr int tq1_0_fragment_position(const int t) {
    if (t < 160) {
        return itq_fragment_at(t / 32, t % 32 / 8, t % 8 / 4);
    }
    if (t < 240) {
        const int n = (t - 160) / 16;
        return itq_fragment_at(5 + n / 2, t % 16 / 4, n % 2);
    }
    return itq_fragment_at(7, (t - 240) / 4, 1);
}
template <ggml_type type> ITQ_FUNC constexpr int itq_fragment_position(const int t) {
    if constexpr (ggml_cuda_is_itq(type)) {
        return itq_traits<type>::bits == 1 ? itq2_s_fragment_position(t)
               : ggml_cuda_is_itq_64(type) ? itq3_n_fragment_position(t)
               : type == GGML_TYPE_ITQ4_S  ? itq4_s_fragment_position(t)
                                           : itq3_s_fragment_position(t);
    } else {
        return type == GGML_TYPE_TQ2_0 ? tq2_0_fragment_position(t) : tq1_0_fragment_position(t);
    }
}

// What the activations of a block and column come with: the numbers that make a weight's product of integers a float, of
// this column and of the one after it, which a lane has beside it. They lie before the bytes of the block's columns.
//   scale: what a product is multiplied by, for trellis types with the 1/32 of the levels in it; at most 22 bits, so that
//   times the origin it is exact; origin: that product, negative; start: what the sum of the products begins with, so that
//   its bits are a float: the origin less what the bytes of the weights are too large by.
struct alignas(16) itq_fragment_scales {
    float scale, origin;
    float next_scale, next_origin;
    int   start, next_start;
    int   start_again, next_start_again;  // the four sums of a lane
};
static_assert(sizeof(itq_fragment_scales) == 32, "two vector loads");

// Of blocks of 64 a lane has sums of the blocks 0 and 1 of a column, or of 2 and 3. It multiplies by the scales of the
// weights first, so that the origins are those of the weights, which do not depend on the column.
struct alignas(16) itq_fragment_scales_64 {
    float scale[2];
    int   start[2];
};
static_assert(2 * sizeof(itq_fragment_scales_64) == sizeof(itq_fragment_scales), "of four blocks of a column");
template <ggml_type type>
using itq_fragment_scales_of =
    std::conditional_t<ggml_cuda_is_itq_64(type), itq_fragment_scales_64, itq_fragment_scales>;

// What the bytes that stand for weights are too large by.
template <ggml_type type> constexpr int itq_fragment_offset = ggml_cuda_is_itq(type) ? 64 : 1;

// The sum of a column's bytes from the number that the sum of the products begins with. Garbage may be any number.
template <ggml_type type> static __device__ __forceinline__ float itq_fragment_sum(const int start) {
    return (float) (int) (ITQ_FLOAT_ORIGIN_BITS - (uint32_t) start) * (1.0f / itq_fragment_offset<type>);
}

// Bytes of the activations of 256 weights: what upstream takes for them in q8_1.
ITQ_FUNC constexpr int64_t itq_fragment_bytes(const int64_t ncols) {
    return ncols * (int64_t) (sizeof(itq_fragment_scales) + QK_K);
}

// Blocks of ITQ3_S lie in shared memory as the lanes want them, 16 rows side by side. A lane has 16 bytes of its own for
// the symbols, twice, and for the selector bits: words k - 1, k, k + 1, k + 2 of sel, the chunks k and k + 2 and what
// stands before them. These eight parts ("quads") of a row are copied word by word, some words to two places. For k = 0
// the place of the word before has scale and zero-point, with the start state. Quads are 4 words more apart than 16 rows, which spreads them over the
// banks: symbols in even quads, selectors in odd ones.
#define ITQ_QUAD_WORDS (4 * 16 + 4)
#define ITQ_QUADS      8
#define ITQ_TILE_WORDS (ITQ_QUADS * ITQ_QUAD_WORDS)
// The word of a block that belongs to word w of a quad.
ITQ_FUNC constexpr int itq_quad_source(const int quad, const int w) {
    const int c = quad / 2;  // j + 2h
    if (quad % 2 == 0) {     // half j, the words of parity h
        return ITQ_WORD_QS + 8 * (c % 2) + 2 * w + c / 2;
    }
    return c == 0 && w == 0 ? ITQ_WORD_DZ : ITQ_WORD_SEL + 4 * (c / 2) + c % 2 + w - 1;
}

// Selector bits of 8 weights to subsets, by a table in shared memory: the code is linear, so that the subsets of 8 weights are
// an entry's `own` for their byte, XOR the `next` of the byte before. Nibble n of both is of weight n/2 + 4*(n % 2): c1 and
// c0, complemented by c2, and above them c2 twice. Each lane of half a warp has a copy of the table for itself, so that no two
// of them meet in a bank.
struct alignas(8) itq_subset_entry {
    uint32_t own, next;
};
#define ITQ_SUBSETS_COPIES 16
#define ITQ_SUBSETS_STRIDE (ITQ_SUBSETS_COPIES * (int) sizeof(itq_subset_entry))  // from entry to entry
static_assert(ITQ_SUBSETS_STRIDE == 128, "what a byte is multiplied by, a byte too");

// Where there are no symbols an index is the subset, as it is wanted here.
ITQ_FUNC itq_subset_entry itq_make_subset_entry(const uint32_t byte) {
    return { itq_indices_8<2>(0, 0, 0, byte << 8).nibbles, itq_indices_8<2>(0, 0, 0, byte).nibbles };
}

// x >> 16, on the pipe of products, which is not as busy as that of shifts where subsets come from the table.
ITQ_FUNC uint32_t itq_upper_half(const uint32_t x) {
#if defined(__CUDA_ARCH__) && !defined(GGML_USE_HIP) && !defined(GGML_USE_MUSA)
    return __dp2a_lo(x, 0x0100u, 0u);
#else
    return x >> 16;
#endif
}

// Byte of a word by its number, times 128, plus a number. One instruction, on the pipe of products.
ITQ_FUNC uint32_t itq_byte_times_128(const uint32_t word, const int byte, const uint32_t plus) {
#if defined(__CUDA_ARCH__) && !defined(GGML_USE_HIP) && !defined(GGML_USE_MUSA)
    return __dp4a(word, 0x80u << 8 * byte, plus);
#else
    return (word >> 8 * byte & 0xFF) * 128 + plus;
#endif
}

// Of blocks of 64, the words that hold one lie in the two quads of its lane, as in the file, from the word on in which
// the block begins; that may be in its middle, so there is a word more than it has, or half of one. A ninth word of each of
// the four blocks of a row is in one quad more.
template <ggml_type type>
constexpr int itq_block_words = (int) (sizeof(typename itq_traits<type>::block) + sizeof(half)) / 4;
template <ggml_type type>
constexpr int itq_tile_words_64 = ITQ_TILE_WORDS + (itq_block_words<type> > 8 ? ITQ_QUAD_WORDS : 0);

// Blocks of ITQ4_S lie as in the file, from the word on in which they begin, each row of them at a multiple of 16 bytes.
#define ITQ_ROW_WORDS 36

// A lane's own number, but one that the compiler knows nothing of, so that it keeps it in a register: left to itself it
// makes what is made easily anew before every use.
static __device__ __forceinline__ uint32_t itq_kept(const uint32_t x, const int lane) {
#if defined(__CUDA_ARCH__) && !defined(GGML_USE_HIP) && !defined(GGML_USE_MUSA)
    return __shfl_sync(0xFFFFFFFF, x + lane / 32, lane);  // no warp has a lane 32
#else
    GGML_UNUSED(lane);
    return x;
#endif
}

// Where a lane finds its parts of blocks in the ring, and how it takes them apart.

// Blocks as they are: the rows lane/4 and lane/4 + 8 of the first stage, and the bytes after that where they begin, 0 or 2.
template <ggml_type type> struct itq_fragment_lane {
    const uint32_t * rows[2];
    int              x[2];
    int              c;
    uint32_t         zero;

    __device__ __forceinline__ itq_fragment_lane(const uint32_t * row0, const uint32_t * row1, const int lane) :
        rows{ row0, row1 }, x{ 0, 0 }, c(lane % 4), zero(itq_kept(0, lane)) {}
};

// The tables in registers.
template <ggml_type type> struct itq_fragment_tables : itq_tables<type> {
    __device__ __forceinline__ itq_fragment_tables(const int lane) : itq_tables<type>(itq_make_tables<type>()) {
        const auto keep = [&](uint32_t & word) { word = itq_kept(word, lane); };
#pragma unroll
        for (int table = 0; table < this->n; ++table) {
            keep(this->up[table]);
            keep(this->down[table]);
        }
        keep(this->minus);
        keep(this->lower);
        keep(this->not_upper);
        keep(this->not_bit_3);
    }
};

template <> struct itq_fragment_lane<GGML_TYPE_ITQ3_S> {
    // Bytes of row lane/4 of the first stage.
    const char * own;      // the quad whose symbols are in place, and after it that of the selector
    const char * others;   // the quad whose symbols must be moved by 4 bits
    const char * subsets;  // the table; the kernel says where
    uint32_t     copy;     // byte of this lane's copy
    int          turn;     // of symbols, by so many to the left
    uint32_t     mask;     // of the symbols in place
    bool         first;    // whether the first chunk is that of the block
    uint32_t     zero;

    itq_fragment_tables<GGML_TYPE_ITQ3_S> tables;

    __device__ __forceinline__ itq_fragment_lane(const uint32_t * row0, const uint32_t *, const int lane) :
        subsets(nullptr), tables(lane) {
        const int c = lane % 4;
        const int h = c / 2;
        own         = (const char *) (row0 + ITQ_QUAD_WORDS * 2 * c);
        others      = (const char *) (row0 + ITQ_QUAD_WORDS * 2 * (c ^ 2));
        copy        = itq_kept(lane % ITQ_SUBSETS_COPIES * sizeof(itq_subset_entry), lane);
        turn        = itq_kept(4 + 24 * h, lane);
        mask        = itq_kept(0x0F0F0F0F << 4 * h, lane);
        first       = c == 0;
        zero        = itq_kept(0, lane);
    }

    __device__ __forceinline__ itq_subset_entry subsets_of(const uint32_t word, const int byte) const {
        return *((const itq_subset_entry *) (subsets + itq_byte_times_128(word, byte, copy)));
    }
};

template <> struct itq_fragment_lane<GGML_TYPE_ITQ2_S> {
    const uint32_t * rows[2];
    int              x[2];
    int              c;
    uint32_t         zero;

    itq_fragment_tables<GGML_TYPE_ITQ2_S> tables;

    __device__ __forceinline__ itq_fragment_lane(const uint32_t * row0, const uint32_t * row1, const int lane) :
        rows{ row0, row1 }, x{ 0, 0 }, c(lane % 4), zero(itq_kept(0, lane)), tables(lane) {}
};

template <> struct itq_fragment_lane<GGML_TYPE_ITQ4_S> {
    // Of row lane/4 of the first stage.
    const char * symbols;  // the words of this lane's half
    const char * chunk;    // as many words after the first as the first chunk has chunks before it
    const char * row;      // the first word
    int          turn;     // of symbols in word 2m, to the right, and 4 less that of those in word 2m + 1, to the left
    bool         first;    // whether the first chunk is that of the block
    bool         half;     // whether the first block of a unit begins in the middle of a word
    uint32_t     zero;

    itq_fragment_tables<GGML_TYPE_ITQ4_S> tables;

    __device__ __forceinline__ itq_fragment_lane(const uint32_t * row0, const uint32_t *, const int lane) :
        row((const char *) row0), turn(lane % 4 / 2 * 4), first(lane % 4 == 0), half(false), zero(itq_kept(0, lane)),
        tables(lane) {
        symbols = row + sizeof(uint32_t) * (8 * (lane % 2));
        chunk   = row + sizeof(uint32_t) * (turn + lane % 2);
    }

    // block: where a unit begins in memory, in row lane/4 or as well in row lane/4 + 8.
    __device__ __forceinline__ void begin(const char * block, const int) { half = (uintptr_t) block & 2; }
};

// Blocks of 64.
struct itq_fragment_lane_64 {
    const char * own;     // quad of words of row lane/4 of the first stage, and after it the other one
    const char * ninth;   // and its ninth word
    bool         active;  // whether this lane's block is the one that this lane's column of the product is for
    int          two[2];  // lanes, of the four, with the blocks whose sums this one has
    uint32_t     zero;
    uint32_t     words;   // bytes of two words that make one of the block
    uint32_t     scales;  // and of the last words of two rows, that make their two scales
    uint32_t     turn;    // to the right, the last word to its scale

    __device__ __forceinline__ itq_fragment_lane_64(const uint32_t * row0, const int lane) :
        own((const char *) (row0 + ITQ_QUAD_WORDS * 2 * (lane % 4))),
        ninth((const char *) (row0 + ITQ_TILE_WORDS + lane % 4)), active(lane / 4 % 4 == lane % 4),
        two{ lane % 2 * 2, (int) itq_kept(lane % 2 * 2 + 1, lane) }, zero(itq_kept(0, lane)), words(0), scales(0),
        turn(0) {}

    // block: where this lane's are in memory, in row lane/4. In row lane/4 + 8 they begin at the same half of a word.
    __device__ __forceinline__ void begin(const char * block, const int lane) {
        const bool half = (uintptr_t) block & 2;
        words           = itq_kept(half ? 0x5432 : 0x3210, lane);
        scales          = itq_kept(half ? 0x7632 : 0x5410, lane);
        turn            = itq_kept(half ? 16 : 0, lane);
    }
};

#define ITQ_FRAGMENT_LANE_64(NAME, ...)                                                                         \
    template <> struct itq_fragment_lane<GGML_TYPE_##NAME> : itq_fragment_lane_64 {                             \
        itq_fragment_tables<GGML_TYPE_##NAME> tables;                                                           \
                                                                                                                \
        __device__ __forceinline__ itq_fragment_lane(const uint32_t * row0, const uint32_t *, const int lane) : \
            itq_fragment_lane_64(row0, lane), tables(lane) {}                                                   \
    };
ITQ_TYPES_64(ITQ_FRAGMENT_LANE_64)

// What has the indices of a step in two halves, the words of a step, in parts or merged.
template <ggml_type type, typename own> struct itq_fragments_of {
    static __device__ __forceinline__ itq_indices upper_half(const itq_indices & x) {
        return itq_indices::upper_half(x);
    }

    __device__ __forceinline__ void step(const int s, const itq_fragment_lane<type> & at,
                                         uint32_t (&parts)[2][itq_nparts<type>]) const {
        const itq_indices index = ((const own *) this)->indices(s);
        itq_parts<type>(at.tables, index, parts[0]);
        itq_parts<type>(at.tables, own::upper_half(index), parts[1]);
    }
    __device__ __forceinline__ void step(const int s, const itq_fragment_lane<type> & at, uint32_t (&word)[2]) const {
        const itq_indices index = ((const own *) this)->indices(s);
        word[0]                 = itq_levels_raised<type>(index, at.tables);
        word[1]                 = itq_levels_raised<type>(own::upper_half(index), at.tables);
    }
};

// What a lane keeps of its 64 weights of a block.
template <ggml_type type> struct itq_fragments;

template <>
struct itq_fragments<GGML_TYPE_ITQ3_S> : itq_fragments_of<GGML_TYPE_ITQ3_S, itq_fragments<GGML_TYPE_ITQ3_S>> {
    uint32_t symbols[4];  // nibble n of word m: of weight 8m + n/2 + 4*(n % 2), those of both groups
    uint32_t subsets[8];  // word 4g + m: of these weights of group g
    uint32_t dz;          // without the start state
    float    d;

    // Row lane/4 + 8*r of a block of the stage that begins this many bytes after the ring.
    __device__ __forceinline__ void load(const itq_fragment_lane<GGML_TYPE_ITQ3_S> & at, const int r,
                                         const uint32_t stage, const int block) {
        const uint32_t row   = stage + sizeof(uint32_t) * (ITQ_TILE_WORDS * block + 4 * 8 * r);
        const uint4    a     = *((const uint4 *) (at.own + row));
        const uint4    s     = *((const uint4 *) (at.own + row + sizeof(uint32_t) * ITQ_QUAD_WORDS));
        const uint4    b     = *((const uint4 *) (at.others + row));
        const uint32_t va[4] = { a.x, a.y, a.z, a.w };
        const uint32_t vb[4] = { b.x, b.y, b.z, b.w };
#pragma unroll
        for (int m = 0; m < 4; ++m) {
            symbols[m] = itq_select(at.mask, va[m], itq_funnel_left(vb[m], vb[m], at.turn));
        }
#pragma unroll
        for (int g = 0; g < 2; ++g) {
            const uint32_t before = g == 1 ? s.z : at.first ? itq_word_before(s.x >> 16) : s.x;
            uint32_t       next   = at.subsets_of(before, 3).next;
#pragma unroll
            for (int m = 0; m < 4; ++m) {
                const itq_subset_entry of_8 = at.subsets_of(g == 0 ? s.y : s.w, m);
                subsets[4 * g + m]          = of_8.own ^ next;
                next                        = of_8.next;
            }
        }
        dz = __shfl_sync(0xFFFFFFFF, s.x, 0, 4) & ITQ_WITHOUT_STATE;  // lane c = 0 has it
        d  = itq_half2_bits(dz).x;
    }

    __device__ __forceinline__ itq_indices indices(const int s) const {
        const uint32_t q = s < 4 ? symbols[s] << 2 : symbols[s - 4];
        return { subsets[s] ^ (q & 0xCCCCCCCC), subsets[s], false };
    }
    static __device__ __forceinline__ itq_indices upper_half(const itq_indices & x) {
        return { itq_upper_half(x.nibbles), itq_upper_half(x.sign), x.low };
    }
};

// The words of a block of 64, and in last the one that has its scale.
template <ggml_type type, int n>
static __device__ __forceinline__ void itq_fragment_words_64(const itq_fragment_lane_64 & at, const int r,
                                                             const uint32_t stage, const int  block,
                                                             uint32_t (&words)[n], uint32_t & last) {
    static_assert(4 * n + sizeof(half) == sizeof(typename itq_traits<type>::block), "words and a scale");
    const uint32_t from     = stage + sizeof(uint32_t) * (itq_tile_words_64<type> * block + 4 * 8 * r);
    const char *   row      = at.own + from;
    const char *   next     = row + sizeof(uint32_t) * ITQ_QUAD_WORDS;
    const uint4    a        = *((const uint4 *) row);
    uint32_t       v[n + 1] = { a.x, a.y, a.z, a.w };
    if constexpr (n == 4) {
        v[4] = *((const uint32_t *) next);
    } else {
        const uint4 b = *((const uint4 *) next);
        v[4]          = b.x;
        v[5]          = b.y;
        v[6]          = b.z;
        if constexpr (n == 8) {
            v[7] = b.w;
            v[8] = *((const uint32_t *) (at.ninth + from));
        }
    }
#pragma unroll
    for (int l = 0; l < n; ++l) {
        words[l] = itq_prmt(v[l], v[l + 1], at.words);
    }
    last = v[n];
}

// Blocks of 64 with more than one symbol bit.
template <ggml_type type> struct itq_n_fragments : itq_fragments_of<type, itq_n_fragments<type>> {
    static constexpr int bits  = itq_traits<type>::bits;
    static constexpr int words = sizeof(typename itq_traits<type>::block) / 4;

    uint32_t sym[2]
                [2];  // per chunk and h: nibble 4q + m has the symbols of the weights 4m + 2h + q and, above, 16 more
    uint32_t lower[2][2];  // per chunk and p: pairs of bits of the weights 16p + 4m + q and, above, 2 more
    uint32_t above[2][2];
    uint32_t last;

    __device__ __forceinline__ void load(const itq_fragment_lane<type> & at, const int r, const uint32_t stage,
                                         const int block) {
        uint32_t v[words];
        itq_fragment_words_64<type>(at, r, stage, block, v, last);
#pragma unroll
        for (int k = 0; k < 2; ++k) {
            const uint32_t x0 =
                k == 0 ? itq_select(0x0F0F0F0F, v[0], v[1] << 4) : itq_select(0x0F0F0F0F, v[0] >> 4, v[1]);
            const uint32_t x1 =
                k == 0 ? itq_select(0x0F0F0F0F, v[2], v[3] << 4) : itq_select(0x0F0F0F0F, v[2] >> 4, v[3]);
            sym[k][0] = itq_prmt(x0, x1, 0x5140);
            sym[k][1] = itq_prmt(x0, x1, 0x7362);

            const uint32_t  before = k == 0 ? itq_word_before(last >> at.turn) : v[words - 2];
            const itq_pairs pairs  = itq_pairs_of_chunk<bits>(v[words - 2 + k], before, v[4 + k]);
#pragma unroll
            for (int p = 0; p < 2; ++p) {
                lower[k][p] = itq_prmt(pairs.even, pairs.odd, p == 0 ? 0x5410 : 0x7632);
                above[k][p] = itq_prmt(pairs.above_even, pairs.above_odd, p == 0 ? 0x5410 : 0x7632);
            }
        }
    }

    __device__ __forceinline__ itq_indices indices(const int s) const {
        const int p = s / 4;
        const int k = s / 2 % 2;
        const int h = s % 2;
        return itq_join<bits>(h == 0 ? lower[k][p] : lower[k][p] >> 2, above[k][p], h == 0,
                              p == 0 ? sym[k][h] << 2 : sym[k][h]);
    }
};
template <> struct itq_fragments<GGML_TYPE_ITQ3_N> : itq_n_fragments<GGML_TYPE_ITQ3_N> {};
template <> struct itq_fragments<GGML_TYPE_ITQ4_N> : itq_n_fragments<GGML_TYPE_ITQ4_N> {};

// Words i .. i + n - 1 from byte x of a tile on, a multiple of 2; one word more is read.
template <int n>
static __device__ __forceinline__ void tq_fragment_words(const uint32_t * tile, const int x, uint32_t (&q)[n]) {
    const uint32_t * aligned = tile + x / 4;
    const uint32_t   bytes   = x & 2 ? 0x5432 : 0x3210;
#pragma unroll
    for (int l = 0; l < n; ++l) {
        q[l] = itq_prmt(aligned[l], aligned[l + 1], bytes);
    }
}
static __device__ __forceinline__ uint16_t tq_fragment_half(const uint32_t * tile, const int x) {
    return ((const uint16_t *) tile)[x / 2];
}
static __device__ __forceinline__ float tq_fragment_scale(const uint32_t * tile, const int x) {
    return itq_half2_bits(tq_fragment_half(tile, x)).x;
}

template <>
struct itq_fragments<GGML_TYPE_ITQ4_S> : itq_fragments_of<GGML_TYPE_ITQ4_S, itq_fragments<GGML_TYPE_ITQ4_S>> {
    uint32_t  sym[4];    // as of ITQ3_S
    itq_pairs pairs[2];  // per group
    float     d;

    // A block that begins in the middle of a word is not put in place. Symbols: the last two bytes are put before the first
    // two, so that words have the lower bytes of one and, before them, the upper bytes of the word before. A chunk of third
    // bits or selectors begins in the middle of the first of two words, or at the second.
    __device__ __forceinline__ void load(const itq_fragment_lane<GGML_TYPE_ITQ4_S> & at, const int r,
                                         const uint32_t stage, const int block) {
        const bool     half = at.half != (block % 2 == 1);
        const uint32_t from = stage + sizeof(uint32_t) * (16 * ITQ_ROW_WORDS * block + ITQ_ROW_WORDS * 8 * r);

        const uint4    a    = ((const uint4 *) (at.symbols + from))[0];
        const uint4    b    = ((const uint4 *) (at.symbols + from))[1];
        const uint32_t q[8] = {
            itq_prmt(a.x, ((const uint32_t *) (at.symbols + from))[8], half ? 0x3254 : 0x3210),
            a.y,
            a.z,
            a.w,
            b.x,
            b.y,
            b.z,
            b.w,
        };
        uint32_t v[4];
#pragma unroll
        for (int m = 0; m < 4; ++m) {
            v[m] = itq_select(0x0F0F0F0F, q[2 * m] >> at.turn, q[2 * m + 1] << (4 - at.turn));
        }
        itq_transpose_bytes(v, sym, half ? 0x7362 : 0x5140, half ? 0x5140 : 0x7362);
        sym[2] = itq_funnel_left(sym[2], sym[2], half ? 28 : 0);  // the last weights are first
        sym[3] = itq_funnel_left(sym[3], sym[3], half ? 28 : 0);

        const uint32_t   last = *((const uint16_t *) (at.row + from + offsetof(block_itq4_s, d) + (half ? 2 : 0)));
        const uint32_t * from_before = (const uint32_t *) (at.chunk + from + (half ? 4 : 0)) - 1;
#pragma unroll
        for (int g = 0; g < 2; ++g) {
            const uint32_t * third  = from_before + QK_ITQ4_S / 16 + 2 * g;
            const uint32_t * sel    = from_before + offsetof(block_itq4_s, sel) / 4 + 2 * g;
            const uint32_t   chunk  = half ? 0x5432 : 0x7654;
            // Of what stands before the chunk six bits are read.
            const uint32_t   before = itq_prmt(sel[0], g == 0 ? itq_word_before(last) : 0,
                                               g == 0 && at.first ? 0x7654
                                               : half             ? 0x1010
                                                                  : 0x3210);
            pairs[g] =
                itq_pairs_of_chunk<3>(itq_prmt(sel[0], sel[1], chunk), before, itq_prmt(third[0], third[1], chunk));
        }
        d = itq_half2_bits(last & 0xFFFFFFC0).x;
    }

    __device__ __forceinline__ itq_indices indices(const int s) const {
        const int g = s / 4;
        const int i = s % 4;
        return itq_indices_of<3>(pairs[g], i, g == 0 ? sym[i] << 2 : sym[i]);
    }
};

// Two chunks with symbols of one bit.
template <ggml_type type> struct itq2_fragments : itq_fragments_of<type, itq2_fragments<type>> {
    itq_pairs pairs[2];  // per chunk

    __device__ __forceinline__ itq_indices indices(const int s) const { return itq_indices_of<1>(pairs[s / 4], s % 4); }
};

template <> struct itq_fragments<GGML_TYPE_ITQ2_N> : itq2_fragments<GGML_TYPE_ITQ2_N> {
    uint32_t last;

    __device__ __forceinline__ void load(const itq_fragment_lane<GGML_TYPE_ITQ2_N> & at, const int r,
                                         const uint32_t stage, const int block) {
        uint32_t v[4];
        itq_fragment_words_64<GGML_TYPE_ITQ2_N>(at, r, stage, block, v, last);
        pairs[0] = itq_pairs_of_chunk<1>(v[2], itq_word_before(last >> at.turn), v[0]);
        pairs[1] = itq_pairs_of_chunk<1>(v[3], v[2], v[1]);
    }
};

template <> struct itq_fragments<GGML_TYPE_ITQ2_S> : itq2_fragments<GGML_TYPE_ITQ2_S> {
    float d;

    __device__ __forceinline__ void load(const itq_fragment_lane<GGML_TYPE_ITQ2_S> & at, const int r,
                                         const uint32_t stage, const int block) {
        const uint32_t * tile = (const uint32_t *) ((const char *) at.rows[r] + stage);
        const int        x    = at.x[r] + (int) sizeof(block_itq2_s) * block;
        const uint32_t   last = tq_fragment_half(tile, x + (int) offsetof(block_itq2_s, d));
        uint32_t         q[2];
        uint32_t         sel[3];  // from the word before the first chunk's on
        tq_fragment_words(tile, x + 8 * at.c, q);
        tq_fragment_words(tile, x + (int) sizeof(block_itq2_s::qs) - 4 + 8 * at.c, sel);
        pairs[0] = itq_pairs_of_chunk<1>(sel[1], at.c == 0 ? itq_word_before(last) : sel[0], q[0]);
        pairs[1] = itq_pairs_of_chunk<1>(sel[2], sel[1], q[1]);
        d        = itq_half2_bits(last & 0xFFFFFFC0).x;
    }
};

// Digits are one more than the weights.

template <> struct itq_fragments<GGML_TYPE_TQ2_0> {
    uint32_t q[4];
    float    d;

    __device__ __forceinline__ void load(const itq_fragment_lane<GGML_TYPE_TQ2_0> & at, const int r,
                                         const uint32_t stage, const int block) {
        const uint32_t * tile = (const uint32_t *) ((const char *) at.rows[r] + stage);
        const int        x    = at.x[r] + (int) sizeof(block_tq2_0) * block;
        tq_fragment_words(tile, x + 16 * at.c, q);
        d = tq_fragment_scale(tile, x + sizeof(block_tq2_0::qs));
    }
    __device__ __forceinline__ void step(const int s, const itq_fragment_lane<GGML_TYPE_TQ2_0> &, uint32_t (&word)[2]) {
        word[0] = tq2_0_digits(q[s % 2 * 2 + 0], s / 2);
        word[1] = tq2_0_digits(q[s % 2 * 2 + 1], s / 2);
    }
};

template <> struct itq_fragments<GGML_TYPE_TQ1_0> {
    tq1_0_state a[2];
    tq1_0_state b;
    tq1_0_state e;
    float       d;

    __device__ __forceinline__ void load(const itq_fragment_lane<GGML_TYPE_TQ1_0> & at, const int r,
                                         const uint32_t stage, const int block) {
        const uint32_t * tile = (const uint32_t *) ((const char *) at.rows[r] + stage);
        const int        x    = at.x[r] + (int) sizeof(block_tq1_0) * block;
        const int        c    = at.c;
        uint32_t         qa[2], qb[1], qe[1];
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
    }
    // Steps in their order.
    __device__ __forceinline__ void step(const int s, const itq_fragment_lane<GGML_TYPE_TQ1_0> &, uint32_t (&word)[2]) {
        word[0] = tq1_0_next(s < 5 ? a[0] : b);
        word[1] = tq1_0_next(s < 5 ? a[1] : s < 7 ? b : e);
    }
};

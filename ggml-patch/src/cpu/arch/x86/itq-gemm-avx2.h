#pragma once

// Panels of the trellis types, TQ1_0 and TQ2_0 and their products with AVX2: 8 of the 16 rows in a register, half a panel.
// Included by itq-gemm.c after simd-mappings.h.

#include "../../itq-gemm.h"
#include "../../itq-repack-64.h"
#include "itq-repack-avx2.h"

#include <immintrin.h>
#include <string.h>

#define HALF_ROWS 8
#define PLACES \
    64  // words of weights of a block of 256, a fourth of its length: place p meets bytes 4*p .. 4*p + 3 of
        // the activations

//
// common parts
//

static inline __m256i load_words(const uint32_t * words, int half) {
    return _mm256_load_si256((const __m256i *) (words + HALF_ROWS * half));
}

// The four activations of a place, for all rows.
static inline __m256i load_place(const int8_t * q, int p) {
    int32_t four;
    memcpy(&four, q + 4 * p, sizeof(four));
    return _mm256_set1_epi32(four);
}

static inline __m128i load_bits(const ggml_half * halves, int half) {
    return _mm_load_si128((const __m128i *) (halves + HALF_ROWS * half));
}

static inline __m256 load_scales(const ggml_half * halves, int half) {
    return itq_halves_to_floats(load_bits(halves, half));
}

// The same of numbers that have a start state in them.
static inline __m256 load_scales_of_states(const ggml_half * halves, int half) {
    return itq_halves_to_floats(_mm_andnot_si128(_mm_set1_epi16(ITQ_STATE_MASK), load_bits(halves, half)));
}

static inline __m256 multiply_add(__m256 a, __m256 b, __m256 c) {
#if defined(__FMA__)
    return _mm256_fmadd_ps(a, b, c);
#else
    return _mm256_add_ps(c, _mm256_mul_ps(a, b));
#endif
}

static inline __m256 subtract_product(__m256 a, __m256 b, __m256 c) {
#if defined(__FMA__)
    return _mm256_fnmadd_ps(b, c, a);
#else
    return _mm256_sub_ps(a, _mm256_mul_ps(b, c));
#endif
}

// Sums of 4 products each of levels up to 127 and activations: two of them fill 16 bits.
static inline __m256i dot_levels(__m256i acc, __m256i levels, __m256i y) {
#if defined(__AVXVNNI__)
    return _mm256_dpbusd_avx_epi32(acc, levels, y);
#else
    return _mm256_add_epi32(acc, _mm256_madd_epi16(_mm256_maddubs_epi16(levels, y), _mm256_set1_epi16(1)));
#endif
}

static inline __m256i start_levels(int32_t sum) {
    return _mm256_set1_epi32(-64 * sum);  // takes the offset of the levels back
}

// Sums of the products of magnitudes of levels and activations in two places: 16 bits hold four, 4 * 61 * 127 < 2^15.
static inline __m256i dot_magnitudes(__m256i acc, __m256i a, __m256i of_a, __m256i b, __m256i of_b) {
#if defined(__AVXVNNI__)
    return _mm256_dpbusd_avx_epi32(_mm256_dpbusd_avx_epi32(acc, a, of_a), b, of_b);
#else
    const __m256i four = _mm256_add_epi16(_mm256_maddubs_epi16(a, of_a), _mm256_maddubs_epi16(b, of_b));
    return _mm256_add_epi32(acc, _mm256_madd_epi16(four, _mm256_set1_epi16(1)));
#endif
}

// Operands of all places of a block, unsigned bytes.
typedef struct {
    _Alignas(64) uint8_t operands[PLACES][2][32];
} decoded_block;

static inline void store_place(decoded_block * decoded, int p, int half, __m256i operands) {
    _mm256_store_si256((__m256i *) decoded->operands[p][half], operands);
}

static inline __m256i load_decoded(const decoded_block * decoded, int p, int half) {
    return _mm256_load_si256((const __m256i *) decoded->operands[p][half]);
}

// GCC would put off additions that may be made in any order, and keep what they add in memory.
#if defined(__GNUC__) || defined(__clang__)
#    define IN_ORDER(sum) __asm__("" : "+x"(sum))
#else
#    define IN_ORDER(sum) ((void) 0)
#endif

#if defined(__clang__)
#    define UNROLLED_4 _Pragma("unroll 4")
#elif defined(__GNUC__)
#    define UNROLLED_4 _Pragma("GCC unroll 4")
#else
#    define UNROLLED_4
#endif

// Columns that share the loads of operands: TILE_COLUMNS of those of a decoded block, DIRECT_TILE of levels that come from
// the table. Blocks are decoded to memory for more than DIRECT_COLUMNS. CHAINS sums of a column take turns, because
// dpbusd has a latency; the products of 16 bits have none in their chain but the addition.
#if defined(__AVXVNNI__)
#    define TILE_COLUMNS   6
#    define DIRECT_COLUMNS 4
#    define CHAINS         4
#else
#    define TILE_COLUMNS   4
#    define DIRECT_COLUMNS 4
#    define CHAINS         1
#endif
#define DIRECT_TILE 4
#define MAX_TILE    6

#define TILE_CASE(n, width, columns, first, out, ...)          \
    case n:                                                    \
        if ((n) <= (width)) {                                  \
            columns(__VA_ARGS__, (first) + c_, n, (out) + c_); \
        }                                                      \
        break;

// columns(..., index of the first column, their number, out) for all nc columns of a block, in tiles of about the same
// width, which the compiler knows.
#define EACH_TILE(width, columns, first, nc, out, ...)                                  \
    for (int c_ = 0, n_, left_ = ((nc) + (width) - 1) / (width); c_ < (nc); c_ += n_) { \
        n_ = ((nc) - c_ + left_ - 1) / left_;                                           \
        --left_;                                                                        \
        switch (n_) {                                                                   \
            TILE_CASE(1, width, columns, first, out, __VA_ARGS__)                       \
            TILE_CASE(2, width, columns, first, out, __VA_ARGS__)                       \
            TILE_CASE(3, width, columns, first, out, __VA_ARGS__)                       \
            TILE_CASE(4, width, columns, first, out, __VA_ARGS__)                       \
            TILE_CASE(5, width, columns, first, out, __VA_ARGS__)                       \
            TILE_CASE(6, width, columns, first, out, __VA_ARGS__)                       \
            default:                                                                    \
                break;                                                                  \
        }                                                                               \
    }

static inline __m256i sum_chains(const __m256i acc[CHAINS]) {
    __m256i sum = acc[0];
    for (int i = 1; i < CHAINS; ++i) {
        sum = _mm256_add_epi32(sum, acc[i]);
    }
    return sum;
}

//
// trellis types: codes to indices, two in a byte, and indices to levels
//

// Levels plus 64 by c2 and nibble i (itq-gemm.h). Symbols of three bits have magnitudes: of the levels below zero, whose
// third bit, q2, is not set.
struct level_tables {
    __m256i by_c2[2][4];
};

ITQ_INLINE struct level_tables load_level_tables(const int bits, const int8_t * levels) {
    struct level_tables tables;
    for (int c2 = 0; c2 < (bits == 1 ? 1 : 2); ++c2) {
        for (int i = 0; i < 4; ++i) {
            uint8_t table[16];
            itq_level_table(bits, levels, i, c2, table);
            const __m256i from  = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *) table));
            tables.by_c2[c2][i] = bits == 3 ? _mm256_sub_epi8(_mm256_set1_epi8(64), from) : from;
        }
    }
    return tables;
}

// The selectors of t = -6 .. words - 1 beside each other, in a block of 32 * words weights. Those before t = 0 are those of
// t + words, a bit lower, and of the start states, which are in the numbers at `last`.
#define SELECTORS_BEFORE 6

struct selectors {
    __m256i at[SELECTORS_BEFORE + 8];
};

ITQ_INLINE void load_selectors(const int words, const uint32_t sel[][ITQ_PANEL_ROWS], const ggml_half * last, int half,
                               struct selectors * s) {
    const __m256i states = _mm256_cvtepu16_epi32(load_bits(last, half));
    for (int t = 0; t < words; ++t) {
        s->at[SELECTORS_BEFORE + t] = load_words(sel[t], half);
    }
    for (int i = 0; i < SELECTORS_BEFORE; ++i) {
        const __m256i from              = s->at[SELECTORS_BEFORE - 1 - i + words];
        const __m256i state             = _mm256_and_si256(_mm256_srli_epi32(states, i), _mm256_set1_epi32(1));
        s->at[SELECTORS_BEFORE - 1 - i] = _mm256_or_si256(_mm256_add_epi32(from, from), state);
    }
}

// Of half a block: nibbles i of step t, and what an index has besides, moved so that the bits of the upper nibbles are the
// highest of the bytes: c2 and, of symbols of three bits, q2 in bytes that are not zero, as psignb takes it.
struct indices {
    __m256i nibbles[4][8];
    __m256i c2[4][8];
    __m256i q2[4][8];
};

// Bits of a where bytes of mask have a bit, else of b, in *to_a, and the other way round in *to_b.
ITQ_INLINE void exchange_bits(__m256i a, __m256i b, int mask, __m256i * to_a, __m256i * to_b) {
    const __m256i u = _mm256_and_si256(_mm256_xor_si256(a, b), _mm256_set1_epi8((char) mask));
    *to_a           = _mm256_xor_si256(b, u);
    *to_b           = _mm256_xor_si256(a, u);
}

ITQ_INLINE void make_indices(const int bits, const int length, const uint32_t sel[][ITQ_PANEL_ROWS],
                             const uint32_t qs[][ITQ_PANEL_ROWS], const ggml_half * last, int half,
                             struct indices * indices) {
    const int words = length / 32;

    struct selectors selectors;
    load_selectors(words, sel, last, half, &selectors);
    __m256i c0_before = _mm256_xor_si256(selectors.at[SELECTORS_BEFORE - 3], selectors.at[SELECTORS_BEFORE - 5]);
    for (int t = 0; t < words; ++t) {
        const __m256i * s  = selectors.at + SELECTORS_BEFORE + t;
        __m256i         c2 = _mm256_xor_si256(_mm256_xor_si256(s[0], s[-5]), s[-6]);
        __m256i         c1 = _mm256_xor_si256(_mm256_xor_si256(s[-1], s[-4]), c0_before);
        __m256i         c0 = _mm256_xor_si256(s[-2], s[-4]);
        c0_before          = c0;
        if (bits == 3) {
            const __m256i q2      = load_words(qs[2 * words + t], half);
            const __m256i ordered = exchange_bits_of_bytes(q2, 1, 0x55);
            const __m256i one     = _mm256_set1_epi8(1);

            c0 = _mm256_xor_si256(c0, ordered);
            c1 = _mm256_xor_si256(c1, ordered);
            c2 = _mm256_xor_si256(c2, ordered);

            indices->q2[0][t] = _mm256_or_si256(_mm256_slli_epi16(q2, 2), one);
            indices->q2[1][t] = _mm256_or_si256(_mm256_slli_epi16(q2, 3), one);
            indices->q2[2][t] = _mm256_or_si256(q2, one);
            indices->q2[3][t] = _mm256_or_si256(_mm256_add_epi8(q2, q2), one);
        }

        // c0 and c1 beside each other, of the even and of the odd g
        const __m256i u    = _mm256_and_si256(_mm256_xor_si256(_mm256_srli_epi16(c0, 1), c1), _mm256_set1_epi8(0x55));
        const __m256i even = _mm256_xor_si256(c0, _mm256_add_epi8(u, u));
        const __m256i odd  = _mm256_xor_si256(c1, u);

        __m256i of_even, of_odd;
        if (bits == 1) {
            exchange_bits(exchange_bits_of_bytes(c2, 2, 0x33), load_words(qs[t], half), 0x55, &of_even, &of_odd);
        } else {
            of_even = load_words(qs[2 * t], half);
            of_odd  = load_words(qs[2 * t + 1], half);
        }
        exchange_bits(even, of_even, 0x33, &indices->nibbles[0][t], &indices->nibbles[2][t]);
        exchange_bits(odd, of_odd, 0x33, &indices->nibbles[1][t], &indices->nibbles[3][t]);

        if (bits > 1) {
            indices->c2[0][t] = _mm256_slli_epi16(c2, 3);
            indices->c2[1][t] = _mm256_slli_epi16(c2, 2);
            indices->c2[2][t] = _mm256_add_epi8(c2, c2);
            indices->c2[3][t] = c2;
        }
    }
}

// Levels plus 64, or magnitudes, by indices in lower nibbles, 0 above; c2 is the highest bit of bytes.
ITQ_INLINE __m256i look_up(const int bits, const struct level_tables * tables, const int i, __m256i nibbles,
                           __m256i c2) {
    const __m256i found = _mm256_shuffle_epi8(tables->by_c2[0][i], nibbles);
    return bits == 1 ? found : _mm256_blendv_epi8(found, _mm256_shuffle_epi8(tables->by_c2[1][i], nibbles), c2);
}

// Of nibbles i of step t: levels plus 64, or magnitudes, of the lower and of the upper ones, half of all places apart.
ITQ_INLINE void look_up_nibbles(const int bits, const struct level_tables * tables, const struct indices * indices,
                                const int i, const int t, __m256i levels[2]) {
    const __m256i low     = _mm256_set1_epi8(0x0F);
    const __m256i nibbles = indices->nibbles[i][t];
    const __m256i c2      = bits > 1 ? indices->c2[i][t] : nibbles;
    levels[0]             = look_up(bits, tables, i, _mm256_and_si256(nibbles, low), _mm256_slli_epi16(c2, 4));
    levels[1]             = look_up(bits, tables, i, _mm256_and_si256(_mm256_srli_epi16(nibbles, 4), low), c2);
}

// Signs of the same levels, for psignb: above zero where q2 is not set, so that magnitudes become minus the levels.
ITQ_INLINE void load_signs(const struct indices * indices, const int i, const int t, __m256i signs[2]) {
    signs[0] = _mm256_slli_epi16(indices->q2[i][t], 4);
    signs[1] = indices->q2[i][t];
}

// Scales of a block and, where there are zero-points, of what they take.
struct block_scales {
    __m256 d0;
    __m256 dmin;
};

static inline struct block_scales scales_1(const itq_scales_1 * scales, int half) {
    struct block_scales s;
    s.d0   = _mm256_mul_ps(load_scales(scales->d, half), _mm256_set1_ps(0.03125f));
    s.dmin = _mm256_mul_ps(s.d0, load_scales_of_states(scales->z, half));
    return s;
}

static inline struct block_scales scales_0(const itq_scales_0 * scales, int half) {
    struct block_scales s;
    s.d0   = _mm256_mul_ps(load_scales_of_states(scales->d, half), _mm256_set1_ps(0.03125f));
    s.dmin = _mm256_setzero_ps();
    return s;
}

// A block's sums to its part of the result.
ITQ_INLINE void add_block(float * out, __m256i acc, struct block_scales s, const int has_min, int32_t sum, float d1) {
    __m256 v = _mm256_mul_ps(_mm256_cvtepi32_ps(acc), s.d0);
    if (has_min) {
        v = subtract_product(v, s.dmin, _mm256_set1_ps((float) sum));
    }
    _mm256_storeu_ps(out, multiply_add(v, _mm256_set1_ps(d1), _mm256_loadu_ps(out)));
}

// A block of a panel: the indices of the levels of both halves of its rows, and where its codes are, for requests of memory.
struct indexed_block {
    struct indices halves[2];
    const char *   codes;
};

// How many sums of either half of a panel take turns.
ITQ_INLINE int chains_of(const int n) {
    return CHAINS > 1 && n == 1 ? 2 : 1;
}

// A part of a block's products with the columns at .. at + n - 1: words t0 .. t0 + steps - 1 of one table.
ITQ_INLINE void multiply_part(const struct indexed_block * block, const struct level_tables * tables, const int bits,
                              const int length, const struct itq_columns * y, int64_t at, const int codes_size,
                              const int n, const int part, __m256i sums[MAX_TILE][2][2]) {
    const int chains = chains_of(n);
    const int words  = length / 32;
    const int steps  = words < 4 ? words : 4;
    const int turns  = words / steps;             // parts of the same table
    const int bytes  = codes_size / (4 * turns);  // of the codes, that a part asks for

    const int      t0    = steps * (part % turns);
    const int      i     = part / turns;
    const int8_t * q     = y->q + at * length + 4 * (words * i + t0);
    const int      first = bytes % 64 == 0 ? 0 : bytes * part;
    const char *   codes = block->codes + bytes * part - first;
    UNROLLED_4
    for (int t = 0; t < steps; ++t) {
        const int byte = first + bytes * t / steps;
        if (byte % 64 < bytes / steps) {  // another line begins
            ITQ_PREFETCH_BYTES(codes + byte);
        }
        __m256i levels[2][2];
        look_up_nibbles(bits, tables, &block->halves[0], i, t0 + t, levels[0]);
        look_up_nibbles(bits, tables, &block->halves[1], i, t0 + t, levels[1]);
        for (int half = 0; half < 2 && bits == 3; ++half) {  // activations take the signs
            __m256i signs[2];
            load_signs(&block->halves[half], i, t0 + t, signs);
            for (int c = 0; c < n; ++c) {
                const __m256i lower = _mm256_sign_epi8(load_place(q + c * length, t), signs[0]);
                const __m256i upper = _mm256_sign_epi8(load_place(q + c * length + length / 2, t), signs[1]);
                __m256i *     sum   = &sums[c][half][t % chains];
                *sum                = dot_magnitudes(*sum, levels[half][0], lower, levels[half][1], upper);
                IN_ORDER(*sum);
            }
        }
        for (int c = 0; c < n && bits < 3; ++c) {
            for (int upper = 0; upper < 2; ++upper) {
                const __m256i four = load_place(q + c * length + length / 2 * upper, t);
                for (int half = 0; half < 2; ++half) {
                    __m256i * sum = &sums[c][half][upper % chains];
                    *sum          = dot_levels(*sum, levels[half][upper], four);
                    IN_ORDER(*sum);
                }
            }
        }
    }
}

// Sums of a block's products with the columns at .. at + n - 1, levels straight from the table. Both halves share the
// activations of a place, and a table serves several registers of indices: what is loaded less often is fewer instructions.
ITQ_INLINE void multiply_indexed(const struct indexed_block * block, const struct level_tables * tables, const int bits,
                                 const int length, const struct itq_columns * y, int64_t at, const int codes_size,
                                 const int n, __m256i acc[MAX_TILE][2]) {
    __m256i sums[MAX_TILE][2][2];
    for (int c = 0; c < n; ++c) {
        for (int half = 0; half < 2; ++half) {
            sums[c][half][0] = bits == 3 ? _mm256_setzero_si256() : start_levels(y->sums[at + c]);
            sums[c][half][1] = _mm256_setzero_si256();
        }
    }
    if (length == 64) {  // so short that a loop would cost
        multiply_part(block, tables, bits, length, y, at, codes_size, n, 0, sums);
        multiply_part(block, tables, bits, length, y, at, codes_size, n, 1, sums);
        multiply_part(block, tables, bits, length, y, at, codes_size, n, 2, sums);
        multiply_part(block, tables, bits, length, y, at, codes_size, n, 3, sums);
    } else {
        for (int part = 0; part < 8; ++part) {
            multiply_part(block, tables, bits, length, y, at, codes_size, n, part, sums);
        }
    }
    ITQ_PREFETCH_BYTES(block->codes + codes_size);  // the scales
    for (int c = 0; c < n; ++c) {
        for (int half = 0; half < 2; ++half) {
            acc[c][half] = chains_of(n) == 1 ? sums[c][half][0] : _mm256_add_epi32(sums[c][half][0], sums[c][half][1]);
            if (bits == 3) {  // the signs were those of minus the levels
                acc[c][half] = _mm256_sub_epi32(_mm256_setzero_si256(), acc[c][half]);
            }
        }
    }
}

ITQ_INLINE void decode_indexed(const struct indexed_block * block, const struct level_tables * tables, const int bits,
                               const int length, decoded_block * decoded) {
    const int words = length / 32;
    for (int half = 0; half < 2; ++half) {
        for (int t = 0; t < words; ++t) {
            for (int i = 0; i < 4; ++i) {
                __m256i levels[2];
                look_up_nibbles(bits, tables, &block->halves[half], i, t, levels);
                if (bits == 3) {
                    const __m256i offset = _mm256_set1_epi8(64);
                    __m256i       signs[2];
                    load_signs(&block->halves[half], i, t, signs);
                    levels[0] = _mm256_sub_epi8(offset, _mm256_sign_epi8(levels[0], signs[0]));
                    levels[1] = _mm256_sub_epi8(offset, _mm256_sign_epi8(levels[1], signs[1]));
                }
                store_place(decoded, words * i + t, half, levels[0]);
                store_place(decoded, words * (i + 4) + t, half, levels[1]);
            }
        }
    }
}

// The same sums from a block that is decoded.
#if defined(__AVXVNNI__)
ITQ_INLINE void multiply_decoded(const decoded_block * decoded, const int length, const struct itq_columns * y,
                                 int64_t at, const int n, __m256i acc[MAX_TILE][2]) {
    const int8_t * q = y->q + at * length;

    for (int c = 0; c < n; ++c) {
        acc[c][0] = acc[c][1] = start_levels(y->sums[at + c]);
    }
    for (int p = 0; p < length / 4; ++p) {
        const __m256i lo = load_decoded(decoded, p, 0);
        const __m256i hi = load_decoded(decoded, p, 1);
        for (int c = 0; c < n; ++c) {
            const __m256i four = load_place(q + c * length, p);
            acc[c][0]          = dot_levels(acc[c][0], lo, four);
            acc[c][1]          = dot_levels(acc[c][1], hi, four);
        }
    }
}
#else
// 64 times the activations of places p and p + length/8: what the levels' offset adds to two sums of two products each.
ITQ_INLINE void offsets_of_pairs(const int length, const int8_t * q, int16_t offsets[PLACES]) {
    const __m256i offset = _mm256_set1_epi8(64);
    for (int i = 0; i < length / 64; ++i) {
        const __m256i a = _mm256_maddubs_epi16(offset, _mm256_loadu_si256((const __m256i *) (q + 32 * i)));
        const __m256i b = _mm256_maddubs_epi16(offset, _mm256_loadu_si256((const __m256i *) (q + length / 2 + 32 * i)));
        _mm256_store_si256((__m256i *) (offsets + 16 * i), _mm256_add_epi16(a, b));
    }
}

// Two places are added up in 16 bits and widened together: three multiplications in place of four, which go to two pipes
// where additions go to three or four. Without the offset of the levels the four products of a sum are at most
// 4 * 61 * 128 < 2^15. With it they are not, but 16 bits wrap, and what is right modulo 2^16 in the end is right.
static inline __m256i dot_pair(__m256i acc, __m256i a, __m256i of_a, __m256i b, __m256i of_b, __m256i offset) {
    const __m256i products = _mm256_sub_epi16(_mm256_maddubs_epi16(a, of_a), offset);
    const __m256i four     = _mm256_add_epi16(products, _mm256_maddubs_epi16(b, of_b));
    return _mm256_add_epi32(acc, _mm256_madd_epi16(four, _mm256_set1_epi16(1)));
}

ITQ_INLINE void multiply_decoded(const decoded_block * decoded, const int length, const struct itq_columns * y,
                                 int64_t at, const int n, __m256i acc[MAX_TILE][2]) {
    const int8_t * q     = y->q + at * length;
    const int      pairs = length / 8;

    _Alignas(32) int16_t offsets[MAX_TILE][PLACES];
    for (int c = 0; c < n; ++c) {
        offsets_of_pairs(length, q + c * length, offsets[c]);
        acc[c][0] = acc[c][1] = _mm256_setzero_si256();
    }
    for (int p = 0; p < pairs; ++p) {
        const __m256i a_lo = load_decoded(decoded, p, 0);
        const __m256i a_hi = load_decoded(decoded, p, 1);
        const __m256i b_lo = load_decoded(decoded, p + pairs, 0);
        const __m256i b_hi = load_decoded(decoded, p + pairs, 1);
        for (int c = 0; c < n; ++c) {
            const __m256i of_a   = load_place(q + c * length, p);
            const __m256i of_b   = load_place(q + c * length, p + pairs);
            const __m256i offset = load_place((const int8_t *) offsets[c], p);
            acc[c][0]            = dot_pair(acc[c][0], a_lo, of_a, b_lo, of_b, offset);
            acc[c][1]            = dot_pair(acc[c][1], a_hi, of_a, b_hi, of_b, offset);
            IN_ORDER(acc[c][0]);
            IN_ORDER(acc[c][1]);
        }
    }
}
#endif

// Products of columns at .. at + n - 1 and a block to their part of the result.
ITQ_INLINE void add_columns(__m256i acc[MAX_TILE][2], const struct block_scales s[2], const int has_min,
                            const struct itq_columns * y, int64_t at, const int n, float out[][ITQ_PANEL_ROWS]) {
    for (int c = 0; c < n; ++c) {
        for (int half = 0; half < 2; ++half) {
            add_block(out[c] + HALF_ROWS * half, acc[c][half], s[half], has_min, y->sums[at + c], y->d[at + c]);
        }
    }
}

#define LAST_1(scales) (scales)->z
#define LAST_0(scales) (scales)->d

// Few columns: levels go from the table into the products, scales after them. Many: a block is decoded to memory once.
#define GEMM_TRELLIS(NAME, name, bits, n_levels, length, has_z, number)                                                \
    static inline void load_scales_##name(const itq_scales_##name * scales, struct block_scales s[2]) {                \
        s[0] = scales_##has_z(scales, 0);                                                                              \
        s[1] = scales_##has_z(scales, 1);                                                                              \
    }                                                                                                                  \
                                                                                                                       \
    ITQ_INLINE void indexed_columns_##name(const struct indexed_block * block, const struct level_tables * tables,     \
                                           const itq_scales_##name * scales, const struct itq_columns * y, int64_t at, \
                                           const int n, float out[][ITQ_PANEL_ROWS]) {                                 \
        __m256i             acc[MAX_TILE][2];                                                                          \
        struct block_scales s[2];                                                                                      \
        multiply_indexed(block, tables, bits, length, y, at, (int) sizeof(itq_codes_##name), n, acc);                  \
        load_scales_##name(scales, s);                                                                                 \
        add_columns(acc, s, has_z, y, at, n, out);                                                                     \
    }                                                                                                                  \
                                                                                                                       \
    ITQ_INLINE void decoded_columns_##name(const decoded_block * decoded, const struct block_scales s[2],              \
                                           const struct itq_columns * y, int64_t at, const int n,                      \
                                           float out[][ITQ_PANEL_ROWS]) {                                              \
        __m256i acc[MAX_TILE][2];                                                                                      \
        multiply_decoded(decoded, length, y, at, n, acc);                                                              \
        add_columns(acc, s, has_z, y, at, n, out);                                                                     \
    }                                                                                                                  \
                                                                                                                       \
    ITQ_INLINE void gemm_##name(int64_t nb, const void * panel, const struct itq_columns * y, const int nc,            \
                                float out[][ITQ_PANEL_ROWS]) {                                                         \
        static const int8_t       levels[n_levels] = NAME##_LEVELS;                                                    \
        const struct level_tables tables           = load_level_tables(bits, levels);                                  \
        memset(out, 0, (size_t) nc * sizeof(*out));                                                                    \
                                                                                                                       \
        for (int64_t b = 0; b < nb; ++b) {                                                                             \
            const itq_codes_##name *  codes  = itq_codes_of_##name(panel, b);                                          \
            const itq_scales_##name * scales = itq_scales_of_##name(panel, b);                                         \
            struct indexed_block      block;                                                                           \
            block.codes = (const char *) codes;                                                                        \
            make_indices(bits, length, codes->sel, codes->qs, LAST_##has_z(scales), 0, &block.halves[0]);              \
            make_indices(bits, length, codes->sel, codes->qs, LAST_##has_z(scales), 1, &block.halves[1]);              \
            if (nc <= DIRECT_COLUMNS) {                                                                                \
                EACH_TILE(DIRECT_TILE, indexed_columns_##name, b * nc, nc, out, &block, &tables, scales, y)            \
            } else {                                                                                                   \
                decoded_block       decoded;                                                                           \
                struct block_scales s[2];                                                                              \
                decode_indexed(&block, &tables, bits, length, &decoded);                                               \
                load_scales_##name(scales, s);                                                                         \
                EACH_TILE(TILE_COLUMNS, decoded_columns_##name, b * nc, nc, out, &decoded, s, y)                       \
            }                                                                                                          \
        }                                                                                                              \
    }                                                                                                                  \
                                                                                                                       \
    static inline void itq_gemm_##name##_avx2(int64_t nb, const void * panel, const struct itq_columns * y, int nc,    \
                                              float out[][ITQ_PANEL_ROWS]) {                                           \
        if (nc == 1) {                                                                                                 \
            gemm_##name(nb, panel, y, 1, out);                                                                         \
        } else {                                                                                                       \
            gemm_##name(nb, panel, y, nc, out);                                                                        \
        }                                                                                                              \
    }
ITQ_TYPES(GEMM_TRELLIS)

//
// TQ2_0 and TQ1_0
//

static inline void add_block_tq(float * out, __m256i acc, __m256 d0, float d1) {
    const __m256 v = _mm256_mul_ps(_mm256_cvtepi32_ps(acc), d0);
    _mm256_storeu_ps(out, multiply_add(v, _mm256_set1_ps(d1), _mm256_loadu_ps(out)));
}

// Sums of products of small operands. 16 bits hold those of 42 places with operands up to 3, of 10 with operands up to
// 12: 42 * 3 * 2 * 127 < 2^15. With AVX-VNNI they have 32 bits.
#if defined(__AVXVNNI__)
#    define TRIT_RUN PLACES
#else
#    define TRIT_RUN (PLACES / 2)
#endif

static inline __m256i add_trits(__m256i acc, __m256i operands, __m256i y) {
#if defined(__AVXVNNI__)
    return _mm256_dpbusd_avx_epi32(acc, operands, y);
#else
    return _mm256_add_epi16(acc, _mm256_maddubs_epi16(operands, y));
#endif
}

static inline __m256i widen_trits(__m256i acc) {
#if defined(__AVXVNNI__)
    return acc;
#else
    return _mm256_madd_epi16(acc, _mm256_set1_epi16(1));
#endif
}

// Columns at .. at + n - 1 of a block that is decoded, and what its operands exceed the weights by.
ITQ_INLINE void columns_tq(const decoded_block * decoded, const __m256 d0[2], const struct itq_columns * y, int64_t at,
                           const int offset, const int n, float out[][ITQ_PANEL_ROWS]) {
    const int8_t * q      = y->q + at * QK_K;
    const int      chains = CHAINS > 1 && n <= 2 ? 2 : 1;

    __m256i acc[TILE_COLUMNS][2];
    for (int c = 0; c < n; ++c) {
        acc[c][0] = acc[c][1] = _mm256_setzero_si256();
    }
    for (int p = 0; p < PLACES;) {
        __m256i sums[TILE_COLUMNS][2][2];
        for (int c = 0; c < n; ++c) {
            for (int i = 0; i < chains; ++i) {
                sums[c][0][i] = sums[c][1][i] = _mm256_setzero_si256();
            }
        }
        for (const int end = p + TRIT_RUN; p < end; p += 2) {
            for (int i = 0; i < 2; ++i) {
                const __m256i lo = load_decoded(decoded, p + i, 0);
                const __m256i hi = load_decoded(decoded, p + i, 1);
                for (int c = 0; c < n; ++c) {
                    const __m256i four  = load_place(q + c * QK_K, p + i);
                    __m256i *     to_lo = &sums[c][0][i % chains];
                    __m256i *     to_hi = &sums[c][1][i % chains];
                    *to_lo              = add_trits(*to_lo, lo, four);
                    *to_hi              = add_trits(*to_hi, hi, four);
                }
            }
        }
        for (int c = 0; c < n; ++c) {
            for (int i = 0; i < chains; ++i) {
                acc[c][0] = _mm256_add_epi32(acc[c][0], widen_trits(sums[c][0][i]));
                acc[c][1] = _mm256_add_epi32(acc[c][1], widen_trits(sums[c][1][i]));
            }
        }
    }
    for (int c = 0; c < n; ++c) {
        const __m256i start = _mm256_set1_epi32(-offset * y->sums[at + c]);
        for (int half = 0; half < 2; ++half) {
            const __m256i sum = _mm256_add_epi32(acc[c][half], start);
            add_block_tq(out[c] + HALF_ROWS * half, sum, d0[half], y->d[at + c]);
        }
    }
}

//
// TQ2_0: trit f of the bytes of word w is at place 32*(w / 8) + 8*f + w % 8, stored plus one
//

// A product with levels that are stored plus `bias`: one column from registers, more from the decoded block.
#define GEMM_TQ(type, bias)                                                                                         \
    ITQ_INLINE void columns_##type(const decoded_block * decoded, const __m256 d0[2], const struct itq_columns * y, \
                                   int64_t at, const int n, float out[][ITQ_PANEL_ROWS]) {                          \
        columns_tq(decoded, d0, y, at, bias, n, out);                                                               \
    }                                                                                                               \
                                                                                                                    \
    static inline void itq_gemm_##type##_avx2(int64_t nb, const void * panel, const struct itq_columns * y, int nc, \
                                              float out[][ITQ_PANEL_ROWS]) {                                        \
        if (nc == 1) {                                                                                              \
            gemm_direct_##type(nb, panel, y, out);                                                                  \
            return;                                                                                                 \
        }                                                                                                           \
        memset(out, 0, (size_t) nc * sizeof(*out));                                                                 \
                                                                                                                    \
        for (int64_t b = 0; b < nb; ++b) {                                                                          \
            decoded_block decoded;                                                                                  \
            decode_##type(itq_codes_of_##type(panel, b), &decoded);                                                 \
            const ggml_half * d     = itq_scales_of_##type(panel, b)->d;                                            \
            const __m256      d0[2] = { load_scales(d, 0), load_scales(d, 1) };                                     \
            EACH_TILE(TILE_COLUMNS, columns_##type, b * nc, nc, out, &decoded, d0, y)                               \
        }                                                                                                           \
    }

static inline int place_tq2_0(int w, int f) {
    return 32 * (w / 8) + 8 * f + w % 8;
}

static inline void gemm_direct_tq2_0(int64_t nb, const void * panel, const struct itq_columns * y,
                                     float out[][ITQ_PANEL_ROWS]) {
    memset(out, 0, sizeof(*out));

    const __m256i ones  = _mm256_set1_epi8(0x03);
    const __m256i fours = _mm256_set1_epi8(0x0C);  // 4 times a trit
    for (int64_t b = 0; b < nb; ++b) {
        const itq_codes_tq2_0 * codes  = itq_codes_of_tq2_0(panel, b);
        const itq_scales_tq *   scales = itq_scales_of_tq2_0(panel, b);
        const int8_t *          q      = y->q + b * QK_K;
        for (int half = 0; half < 2; ++half) {
            __m256i sum[CHAINS];
            __m256i acc_4 = _mm256_setzero_si256();
            for (int i = 0; i < CHAINS; ++i) {
                sum[i] = _mm256_setzero_si256();
            }
            for (int w = 0; w < 16; w += 4) {
                const int8_t * v = q + 4 * place_tq2_0(w, 0);
                __m256i        sum_4[CHAINS];
                for (int i = 0; i < CHAINS; ++i) {
                    sum_4[i] = _mm256_setzero_si256();
                }
                for (int i = 0; i < 4; ++i) {
                    const __m256i x = load_words(codes->qs[w + i], half);
                    const __m256i u = _mm256_srli_epi16(x, 4);
                    ITQ_PREFETCH(codes, 16 * half + w + i);

                    __m256i * s   = &sum[i % CHAINS];
                    __m256i * s_4 = &sum_4[i % CHAINS];
                    *s            = add_trits(*s, _mm256_and_si256(x, ones), load_place(v, i));
                    *s_4          = add_trits(*s_4, _mm256_and_si256(x, fours), load_place(v, 8 + i));
                    *s            = add_trits(*s, _mm256_and_si256(u, ones), load_place(v, 16 + i));
                    *s_4          = add_trits(*s_4, _mm256_and_si256(u, fours), load_place(v, 24 + i));
                }
                acc_4 = _mm256_add_epi32(acc_4, widen_trits(sum_chains(sum_4)));
            }
            __m256i acc = _mm256_add_epi32(widen_trits(sum_chains(sum)), _mm256_srai_epi32(acc_4, 2));
            acc         = _mm256_sub_epi32(acc, _mm256_set1_epi32(y->sums[b]));
            add_block_tq(out[0] + HALF_ROWS * half, acc, load_scales(scales->d, half), y->d[b]);
        }
    }
}

static inline void decode_tq2_0(const itq_codes_tq2_0 * codes, decoded_block * decoded) {
    const __m256i mask = _mm256_set1_epi8(0x03);
    for (int w = 0; w < 16; ++w) {
        for (int half = 0; half < 2; ++half) {
            const __m256i x = load_words(codes->qs[w], half);
            store_place(decoded, place_tq2_0(w, 0), half, _mm256_and_si256(x, mask));
            store_place(decoded, place_tq2_0(w, 1), half, _mm256_and_si256(_mm256_srli_epi16(x, 2), mask));
            store_place(decoded, place_tq2_0(w, 2), half, _mm256_and_si256(_mm256_srli_epi16(x, 4), mask));
            store_place(decoded, place_tq2_0(w, 3), half, _mm256_and_si256(_mm256_srli_epi16(x, 6), mask));
        }
    }
}

GEMM_TQ(tq2_0, 1)

//
// TQ1_0: a byte is a fraction of 256, its next trit the integer part of three times that
//

// The trit plus one of every byte, which is the weight plus two. With 253 in the place of zero the roundings of both
// averages cancel: the upper two bits are 1 + floor(3*b / 256) for all 256 bytes.
static inline __m256i trits_tq1_0(__m256i b) {
    const __m256i v = _mm256_avg_epu8(b, _mm256_avg_epu8(b, _mm256_set1_epi8((char) 253)));
    return _mm256_and_si256(_mm256_srli_epi16(v, 6), _mm256_set1_epi8(0x03));
}

static inline __m256i next_tq1_0(__m256i b) {
    return _mm256_add_epi8(b, _mm256_add_epi8(b, b));
}

// Calls each(part, trit, place, operands) for the 64 places of a block: 5 trits of words 0 .. 7 and 8 .. 11, 4 of the last.
#define EACH_PLACE_TQ1_0(codes, half, each)               \
    for (int w = 0; w < 8; ++w) {                         \
        __m256i x = load_words((codes)->qs[w], half);     \
        for (int l = 0; l < 5; ++l, x = next_tq1_0(x)) {  \
            each(0, l, 8 * l + w, trits_tq1_0(x));        \
        }                                                 \
    }                                                     \
    for (int w = 0; w < 4; ++w) {                         \
        __m256i x = load_words((codes)->qs[8 + w], half); \
        for (int l = 0; l < 5; ++l, x = next_tq1_0(x)) {  \
            each(1, l, 40 + 4 * l + w, trits_tq1_0(x));   \
        }                                                 \
    }                                                     \
    {                                                     \
        __m256i x = load_words((codes)->qh, half);        \
        for (int l = 0; l < 4; ++l, x = next_tq1_0(x)) {  \
            each(1, l, 60 + l, trits_tq1_0(x));           \
        }                                                 \
    }

static inline void gemm_direct_tq1_0(int64_t nb, const void * panel, const struct itq_columns * y,
                                     float out[][ITQ_PANEL_ROWS]) {
    memset(out, 0, sizeof(*out));

    for (int64_t b = 0; b < nb; ++b) {
        const itq_codes_tq1_0 * codes  = itq_codes_of_tq1_0(panel, b);
        const itq_scales_tq *   scales = itq_scales_of_tq1_0(panel, b);
        const int8_t *          q      = y->q + b * QK_K;
        for (int line = 0; line <= 16; ++line) {
            ITQ_PREFETCH(codes, line);
        }
        for (int half = 0; half < 2; ++half) {
            __m256i sums[2][CHAINS];  // of 40 and of 24 places
            for (int i = 0; i < CHAINS; ++i) {
                sums[0][i] = sums[1][i] = _mm256_setzero_si256();
            }
#define ADD(part, l, place, operands) \
    sums[part][(l) % CHAINS] = add_trits(sums[part][(l) % CHAINS], operands, load_place(q, place))
            EACH_PLACE_TQ1_0(codes, half, ADD)
#undef ADD
            __m256i acc = _mm256_add_epi32(widen_trits(sum_chains(sums[0])), widen_trits(sum_chains(sums[1])));
            acc         = _mm256_sub_epi32(acc, _mm256_set1_epi32(2 * y->sums[b]));
            add_block_tq(out[0] + HALF_ROWS * half, acc, load_scales(scales->d, half), y->d[b]);
        }
    }
}

static inline void decode_tq1_0(const itq_codes_tq1_0 * codes, decoded_block * decoded) {
    for (int half = 0; half < 2; ++half) {
#define STORE(part, l, place, operands) store_place(decoded, place, half, operands)
        EACH_PLACE_TQ1_0(codes, half, STORE)
#undef STORE
    }
}

GEMM_TQ(tq1_0, 2)

//
// activations
//

#define itq_repack_itq3_n_avx2 itq_repack_itq3_n_words
#define itq_repack_itq2_n_avx2 itq_repack_itq2_n_words
#define itq_repack_itq4_n_avx2 itq_repack_itq4_n_words

#define itq_reorder_q8_n_h_avx2 itq_reorder_q8_n_h_sse

static inline void itq_reorder_q8_K_h_avx2(const int8_t * q, int8_t * y) {
    for (int p = 0; p < 64; p += 32) {
        const __m256i a = _mm256_loadu_si256((const __m256i *) (q + p));
        const __m256i b = _mm256_loadu_si256((const __m256i *) (q + 64 + p));
        const __m256i c = _mm256_loadu_si256((const __m256i *) (q + 128 + p));
        const __m256i d = _mm256_loadu_si256((const __m256i *) (q + 192 + p));

        const __m256i ab_lo = _mm256_unpacklo_epi8(a, b);
        const __m256i ab_hi = _mm256_unpackhi_epi8(a, b);
        const __m256i cd_lo = _mm256_unpacklo_epi8(c, d);
        const __m256i cd_hi = _mm256_unpackhi_epi8(c, d);
        // places 0 .. 3 and 16 .. 19, 4 .. 7 and 20 .. 23, ...
        const __m256i v0    = _mm256_unpacklo_epi16(ab_lo, cd_lo);
        const __m256i v1    = _mm256_unpackhi_epi16(ab_lo, cd_lo);
        const __m256i v2    = _mm256_unpacklo_epi16(ab_hi, cd_hi);
        const __m256i v3    = _mm256_unpackhi_epi16(ab_hi, cd_hi);

        __m256i * to = (__m256i *) (y + 4 * p);
        _mm256_storeu_si256(to, _mm256_permute2x128_si256(v0, v1, 0x20));
        _mm256_storeu_si256(to + 1, _mm256_permute2x128_si256(v2, v3, 0x20));
        _mm256_storeu_si256(to + 2, _mm256_permute2x128_si256(v0, v1, 0x31));
        _mm256_storeu_si256(to + 3, _mm256_permute2x128_si256(v2, v3, 0x31));
    }
}

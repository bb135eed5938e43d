#pragma once

// Panels and their products with AVX-512; VBMI, VNNI and GFNI where present. arch/x86/itq-gemm.c includes this file,
// docs/kernels.md explains it.

#include "../../itq-gemm.h"
#include "../../itq-repack-64.h"
#include "itq-repack-avx2.h"

#include <immintrin.h>
#include <string.h>

#define ROWS ITQ_PANEL_ROWS

#if defined(__clang__)
#    define UNROLL(n) _Pragma("unroll")
#elif defined(__GNUC__)
#    define PRAGMA(text) _Pragma(#text)
#    define UNROLL(n)    PRAGMA(GCC unroll n)
#else
#    define UNROLL(n)
#endif

// Four products of unsigned codes below 128 and the four signed activations at y, added to 32 bits.
ITQ_INLINE __m512i dot_4(__m512i acc, __m512i codes, const int8_t * y) {
#if defined(__AVX512VNNI__) && (defined(__GNUC__) || defined(__clang__))
    // GCC 12 broadcasts with an instruction of its own, which takes a slot that the products need
    typedef int32_t word __attribute__((may_alias));
    __asm__("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(acc) : "v"(codes), "m"(*(const word *) y));
    return acc;
#else
    int32_t four;
    memcpy(&four, y, sizeof(four));
#    if defined(__AVX512VNNI__)
    return _mm512_dpbusd_epi32(acc, codes, _mm512_set1_epi32(four));
#    else
    const __m512i pairs = _mm512_maddubs_epi16(codes, _mm512_set1_epi32(four));
    return _mm512_add_epi32(acc, _mm512_madd_epi16(pairs, _mm512_set1_epi16(1)));
#    endif
#endif
}

// Columns whose sums are registers, and the sums of one where several take turns because the products have a latency. Blocks
// of 64 are so short that the processor multiplies several side by side.
#define TILE   16
#define CHAINS 8
ITQ_INLINE int chains(int length, int nc) {
    if (length == 64) {
        return nc <= 2 ? 2 : 1;
    }
    return nc <= 2 ? 8 : nc == 3 ? 4 : nc <= 8 ? 2 : 1;
}

// Codes are the levels plus `bias`.
#define SUMS(length, nc, bias, sum1)                             \
    __m512i acc[TILE][CHAINS];                                   \
    UNROLL(16) for (int c = 0; c < (nc); ++c) {                  \
        acc[c][0] = _mm512_set1_epi32(-(bias) * (sum1)[c]);      \
        UNROLL(8) for (int i = 1; i < chains(length, nc); ++i) { \
            acc[c][i] = _mm512_setzero_si512();                  \
        }                                                        \
    }

// Multiply codes of place p of the activations; `turn` picks the sum. `length` is that of a block.
#define ADD_PRODUCTS(codes, p, turn)                                  \
    UNROLL(16) for (int c = 0; c < nc; ++c) {                         \
        __m512i * sum = &acc[c][(turn) % chains(length, nc)];         \
        *sum          = dot_4(*sum, codes, q + length * c + 4 * (p)); \
    }

// Or keep them.
#define STORE_CODES(codes, p, turn) _mm512_store_si512(kept + 64 * (p), codes);

ITQ_INLINE __m512i sum_chains(const __m512i * acc, int n) {
    __m512i sum = acc[0];
    UNROLL(8) for (int i = 1; i < n; ++i) {
        sum = _mm512_add_epi32(sum, acc[i]);
    }
    return sum;
}

// The products of a column where the bias is in its sums from the start.
ITQ_INLINE __m512i dot_of_chains(const __m512i * acc, int n, int32_t total) {
    (void) total;
    return sum_chains(acc, n);
}

ITQ_INLINE __m256i load_bits(const ggml_half * h) {
    return _mm256_loadu_si256((const __m256i *) h);
}

ITQ_INLINE __m512 load_halves(const ggml_half * h) {
    return _mm512_cvtph_ps(load_bits(h));
}

// The same of numbers that have a start state in them.
ITQ_INLINE __m512 load_halves_of_states(const ggml_half * h) {
    return _mm512_cvtph_ps(_mm256_andnot_si256(_mm256_set1_epi16(ITQ_STATE_MASK), load_bits(h)));
}

// What a block is scaled by: (dot * d - total of the activations * dmin) * d of the activations.
struct block_scales {
    __m512 d;
    __m512 dmin;
    int    has_min;
};

ITQ_INLINE struct block_scales scales_1(const itq_scales_1 * x) {
    const __m512 d = _mm512_mul_ps(load_halves(x->d), _mm512_set1_ps(0.03125f));
    const __m512 z = load_halves_of_states(x->z);
    return (struct block_scales) { d, _mm512_mul_ps(d, z), _mm512_cmp_ps_mask(z, _mm512_setzero_ps(), _CMP_NEQ_UQ) };
}

ITQ_INLINE struct block_scales scales_0(const itq_scales_0 * x) {
    const __m512 d = _mm512_mul_ps(load_halves_of_states(x->d), _mm512_set1_ps(0.03125f));
    return (struct block_scales) { d, _mm512_setzero_ps(), 0 };
}

ITQ_INLINE struct block_scales scales_tq(const itq_scales_tq * x) {
    return (struct block_scales) { load_halves(x->d), _mm512_setzero_ps(), 0 };
}

ITQ_INLINE __m512 add_block(__m512 sum, __m512i dot, const struct block_scales * x, int32_t total, float d1) {
    __m512 v = _mm512_mul_ps(_mm512_cvtepi32_ps(dot), x->d);
    if (x->has_min) {
        v = _mm512_fnmadd_ps(x->dmin, _mm512_cvtepi32_ps(_mm512_set1_epi32(total)), v);
    }
    return _mm512_fmadd_ps(v, _mm512_set1_ps(d1), sum);
}

// Products of n <= TILE columns and the codes of a block of 256 that are kept.
ITQ_INLINE void multiply_kept(const uint8_t * kept, int bias, const struct block_scales * scales, const int8_t * q,
                              const float * d1, const int32_t * sum1, const int nc, float out[][ROWS]) {
    const int length = 256;
    SUMS(length, nc, bias, sum1)
    for (int p = 0; p < 64; p += 4) {
        UNROLL(4) for (int i = 0; i < 4; ++i) {
            ADD_PRODUCTS(_mm512_load_si512(kept + 64 * (p + i)), p + i, i)
        }
    }
    UNROLL(16) for (int c = 0; c < nc; ++c) {
        const __m512 sum = _mm512_loadu_ps(out[c]);
        _mm512_storeu_ps(out[c], add_block(sum, sum_chains(acc[c], chains(length, nc)), scales, sum1[c], d1[c]));
    }
}

// A function for every number of columns.
#define KEPT(n)                                                 \
    case n:                                                     \
        multiply_kept(kept, bias, scales, q, d1, sum1, n, out); \
        break

static void multiply_kept_by(const uint8_t * kept, int bias, const struct block_scales * scales, const int8_t * q,
                             const float * d1, const int32_t * sum1, int nc, float out[][ROWS]) {
    switch (nc) {
        KEPT(1);
        KEPT(2);
        KEPT(3);
        KEPT(4);
        KEPT(5);
        KEPT(6);
        KEPT(7);
        KEPT(8);
        KEPT(9);
        KEPT(10);
        KEPT(11);
        KEPT(12);
        KEPT(13);
        KEPT(14);
        KEPT(15);
        KEPT(16);
    }
}

// Blocks of 64 that are kept together: sums of floats stay in registers over them, beside those of integers.
#define KEPT_64 4
#define TILE_64 12

struct kept_blocks {
    _Alignas(64) uint8_t codes[KEPT_64][16 * 64];
    struct block_scales scales[KEPT_64];
    int                 n;
};

// Products of nc <= TILE_64 columns, out of `all`, and blocks of 64 that are kept.
ITQ_INLINE void multiply_kept_64(const struct kept_blocks * kept, int bias, const struct itq_columns * y, int64_t at,
                                 int all, const int nc, float out[][ROWS]) {
    const int length = 64;

    __m512 sums[TILE_64];
    UNROLL(16) for (int c = 0; c < nc; ++c) {
        sums[c] = _mm512_loadu_ps(out[c]);
    }
    for (int b = 0; b < kept->n; ++b, at += all) {
        const int8_t *  q    = y->q + length * at;
        const float *   d1   = y->d + at;
        const int32_t * sum1 = y->sums + at;

        // the sums of integers begin with what the bias adds
        _Alignas(64) int32_t starts[16];
        const __m512i        totals = _mm512_maskz_loadu_epi32((__mmask16) ((1 << nc) - 1), sum1);
        _mm512_store_si512(starts, _mm512_mullo_epi32(totals, _mm512_set1_epi32(-bias)));
        __m512i acc[TILE_64][1];
        UNROLL(16) for (int c = 0; c < nc; ++c) {
            acc[c][0] = _mm512_set1_epi32(starts[c]);
        }
        for (int p = 0; p < 16; p += 4) {
            UNROLL(4) for (int i = 0; i < 4; ++i) {
                const __m512i codes = _mm512_load_si512(kept->codes[b] + 64 * (p + i));
                UNROLL(16) for (int c = 0; c < nc; ++c) {
                    acc[c][0] = dot_4(acc[c][0], codes, q + length * c + 4 * (p + i));
                }
            }
        }
        UNROLL(16) for (int c = 0; c < nc; ++c) {
            sums[c] = add_block(sums[c], acc[c][0], &kept->scales[b], sum1[c], d1[c]);
        }
    }
    UNROLL(16) for (int c = 0; c < nc; ++c) {
        _mm512_storeu_ps(out[c], sums[c]);
    }
}

#define CASE_KEPT_64(n)                                   \
    case n:                                               \
        multiply_kept_64(kept, bias, y, at, all, n, out); \
        break

static void multiply_kept_64_by(const struct kept_blocks * kept, int bias, const struct itq_columns * y, int64_t at,
                                int all, int nc, float out[][ROWS]) {
    switch (nc) {
        CASE_KEPT_64(1);
        CASE_KEPT_64(2);
        CASE_KEPT_64(3);
        CASE_KEPT_64(4);
        CASE_KEPT_64(5);
        CASE_KEPT_64(6);
        CASE_KEPT_64(7);
        CASE_KEPT_64(8);
        CASE_KEPT_64(9);
        CASE_KEPT_64(10);
        CASE_KEPT_64(11);
        CASE_KEPT_64(12);
    }
}

// A product of a few columns: LEVELS(b, F) decodes block b of `panel` and does F(codes, place, turn), BIAS is what these codes are
// above the levels, TABLES() is what LEVELS needs for all blocks, and dot_of(sums, how many, sum of the activations) adds up the sums of a column.
#define GEMM_FEW(type, way, block_length, scales_of, TABLES, LEVELS, BIAS, dot_of)                                  \
    ITQ_INLINE void gemm_##type##_##way(int64_t nb, const void * panel, const struct itq_columns * y, const int nc, \
                                        float out[][ROWS]) {                                                        \
        TABLES()                                                                                                    \
        const int length = block_length;                                                                            \
        __m512    sums[TILE];                                                                                       \
        UNROLL(16) for (int c = 0; c < nc; ++c) {                                                                   \
            sums[c] = _mm512_setzero_ps();                                                                          \
        }                                                                                                           \
        const int8_t *  q    = y->q;                                                                                \
        const float *   d1   = y->d;                                                                                \
        const int32_t * sum1 = y->sums;                                                                             \
        for (int64_t b = 0; b < nb; ++b, q += length * nc, d1 += nc, sum1 += nc) {                                  \
            SUMS(length, nc, BIAS, sum1)                                                                            \
            LEVELS(b, ADD_PRODUCTS)                                                                                 \
            const struct block_scales x = scales_of(itq_scales_of_##type(panel, b));                                \
            UNROLL(16) for (int c = 0; c < nc; ++c) {                                                               \
                sums[c] = add_block(sums[c], dot_of(acc[c], chains(length, nc), sum1[c]), &x, sum1[c], d1[c]);      \
            }                                                                                                       \
        }                                                                                                           \
        UNROLL(16) for (int c = 0; c < nc; ++c) {                                                                   \
            _mm512_storeu_ps(out[c], sums[c]);                                                                      \
        }                                                                                                           \
    }

// The two ways of a product of a type: a few columns take every level from its register; of more, the levels of a block are
// kept in the first-level cache and multiplied with TILE columns at a time.
#define GEMM(type, scales_of, TABLES, LEVELS, BIAS)                                                      \
    GEMM_FEW(type, direct, 256, scales_of, TABLES, LEVELS, BIAS, dot_of_chains)                          \
                                                                                                         \
    static void gemm_##type##_many(int64_t nb, const void * panel, const struct itq_columns * y, int nc, \
                                   float out[][ROWS]) {                                                  \
        TABLES()                                                                                         \
        memset(out, 0, (size_t) nc * sizeof(*out));                                                      \
        for (int64_t b = 0; b < nb; ++b) {                                                               \
            _Alignas(64) uint8_t kept[64 * 64];                                                          \
            LEVELS(b, STORE_CODES)                                                                       \
            const struct block_scales x = scales_of(itq_scales_of_##type(panel, b));                     \
            for (int c = 0; c < nc; c += TILE) {                                                         \
                const int64_t at = b * nc + c;                                                           \
                multiply_kept_by(kept, BIAS, &x, y->q + 256 * at, y->d + at, y->sums + at,               \
                                 nc - c < TILE ? nc - c : TILE, out + c);                                \
            }                                                                                            \
        }                                                                                                \
    }

// The same with blocks of 64.
#define GEMM_64(type, scales_of, TABLES, LEVELS, BIAS)                                                   \
    GEMM_FEW(type, direct, 64, scales_of, TABLES, LEVELS, BIAS, dot_of_chains)                           \
                                                                                                         \
    static void gemm_##type##_many(int64_t nb, const void * panel, const struct itq_columns * y, int nc, \
                                   float out[][ROWS]) {                                                  \
        TABLES()                                                                                         \
        memset(out, 0, (size_t) nc * sizeof(*out));                                                      \
        for (int64_t first = 0; first < nb; first += KEPT_64) {                                          \
            struct kept_blocks blocks;                                                                   \
            blocks.n = nb - first < KEPT_64 ? (int) (nb - first) : KEPT_64;                              \
            for (int b = 0; b < blocks.n; ++b) {                                                         \
                uint8_t * kept = blocks.codes[b];                                                        \
                LEVELS(first + b, STORE_CODES)                                                           \
                blocks.scales[b] = scales_of(itq_scales_of_##type(panel, first + b));                    \
            }                                                                                            \
            /* tiles of about the same width */                                                          \
            for (int c = 0, n, left = (nc + TILE_64 - 1) / TILE_64; c < nc; c += n, --left) {            \
                n = (nc - c + left - 1) / left;                                                          \
                multiply_kept_64_by(&blocks, BIAS, y, first * nc + c, nc, n, out + c);                   \
            }                                                                                            \
        }                                                                                                \
    }

//
// trellis types: codes to indices, two in a byte, and indices to levels
//

// Bits of `b` where bytes of `mask` have a bit, else of `a`. GCC has the result in the register of the first operand: if that
// is the last use of `a`, nothing is copied, where with the mask as the first every merge copies it.
ITQ_INLINE __m512i merge(__m512i a, __m512i b, int mask) {
    return _mm512_ternarylogic_epi64(a, b, _mm512_set1_epi8((char) mask), 0xD8);
}

// Exchange the bits of the bytes of mask with those `shift` higher.
ITQ_INLINE __m512i exchange_512(__m512i x, unsigned shift, int mask) {
    return merge(_mm512_slli_epi16(x, shift), _mm512_srli_epi16(x, shift), mask);
}

// Selectors of t = -6 .. words - 1, in a block of 32 * words, and those before t = 0 from the start states, in the numbers
// at `last`.
struct selectors {
    __m512i at[14];
};

ITQ_INLINE void load_selectors(const int words, const uint32_t * sel, const ggml_half * last, struct selectors * s) {
    const __m512i states = _mm512_cvtepu16_epi32(load_bits(last));
    UNROLL(8) for (int t = 0; t < words; ++t) {
        s->at[6 + t] = _mm512_load_si512(sel + ROWS * t);
    }
    UNROLL(6) for (int i = 0; i < 6; ++i) {
        const __m512i bits  = _mm512_srli_epi32(states, (unsigned) i);
        const __m512i twice = _mm512_add_epi32(s->at[5 - i + words], s->at[5 - i + words]);
        s->at[5 - i]        = _mm512_ternarylogic_epi32(twice, bits, _mm512_set1_epi32(1), 0xF8);  // twice | bits & 1
    }
}

// The codes of a step. Register i of the nibbles has weight i of a byte in the lower and weight i + 4 in the upper nibbles
// (itq-gemm.h); `rest` has c2 and the third bits of symbols.
struct step {
    __m512i nibbles[4];
    __m512i rest[2];
};

// c0 has that of the step before, and gets that of this one.
ITQ_INLINE struct step load_step(const int bits, const int words, const struct selectors * selectors, const int t,
                                 const uint32_t * qs, __m512i * c0_before) {
    const __m512i * s    = selectors->at + 6 + t;
    const __m512i   c2   = _mm512_ternarylogic_epi64(s[0], s[-5], s[-6], 0x96);
    const __m512i   c1   = _mm512_ternarylogic_epi64(s[-1], s[-4], *c0_before, 0x96);
    const __m512i   c0   = _mm512_xor_si512(s[-2], s[-4]);
    const __m512i   even = merge(_mm512_add_epi8(c1, c1), c0, 0x55);
    const __m512i   odd  = merge(c1, _mm512_srli_epi16(c0, 1), 0x55);
    *c0_before           = c0;

    struct step x;
    x.rest[0] = c2;
    if (bits == 1) {
        const __m512i q       = _mm512_load_si512(qs + ROWS * t);
        const __m512i swapped = exchange_512(c2, 2, 0x33);
        const __m512i of_even = merge(q, swapped, 0x55);
        const __m512i of_odd  = merge(q, swapped, 0xAA);
        x.nibbles[0]          = merge(even, of_even, 0xCC);
        x.nibbles[1]          = merge(odd, of_odd, 0xCC);
        x.nibbles[2]          = merge(even, of_even, 0x33);
        x.nibbles[3]          = merge(odd, of_odd, 0x33);
        return x;
    }
    const __m512i of_even = _mm512_load_si512(qs + ROWS * (2 * t));
    const __m512i of_odd  = _mm512_load_si512(qs + ROWS * (2 * t + 1));
    x.nibbles[0]          = merge(of_even, even, 0x33);
    x.nibbles[1]          = merge(of_odd, odd, 0x33);
    x.nibbles[2]          = merge(even, of_even, 0x33);
    x.nibbles[3]          = merge(odd, of_odd, 0x33);
    if (bits == 3) {
        x.rest[1] = _mm512_load_si512(qs + ROWS * (2 * words + t));
    }
    return x;
}

// Levels plus 64, by register i of the nibbles.
#if defined(__AVX512VBMI__)

struct level_tables {
    __m512i lower[4];
    __m512i upper[4];
};

// Six bits of a byte are looked up. c2 is bit 4 + i % 2 of an index in a lower nibble; an upper one begins at bit 2, and c2 is
// bit i % 2. The third symbol bit has the other one of these places.
#    define BIT(x, at)              ((x) >> (at) & 1)
#    define AT_LOWER(x, bits, i)    ITQ_INDEX_##bits((x) & 15, i, BIT(x, 4 + (i) % 2), BIT(x, 5 - (i) % 2))
#    define AT_UPPER(x, bits, i)    ITQ_INDEX_##bits((x) >> 2, i, BIT(x, (i) % 2), BIT(x, 1 - (i) % 2))
#    define TABLE_4(AT, x, bits, i) AT((x), bits, i), AT((x) + 1, bits, i), AT((x) + 2, bits, i), AT((x) + 3, bits, i)
#    define TABLE_16(AT, x, bits, i)                                                           \
        TABLE_4(AT, x, bits, i), TABLE_4(AT, (x) + 4, bits, i), TABLE_4(AT, (x) + 8, bits, i), \
            TABLE_4(AT, (x) + 12, bits, i)
#    define TABLE(AT, bits, i) \
        { TABLE_16(AT, 0, bits, i), TABLE_16(AT, 16, bits, i), TABLE_16(AT, 32, bits, i), TABLE_16(AT, 48, bits, i) }
#    define TABLES(AT, bits) { TABLE(AT, bits, 0), TABLE(AT, bits, 1), TABLE(AT, bits, 2), TABLE(AT, bits, 3) }

// Where an index finds its level.
static const uint8_t index_of_lower[3][4][64] = { TABLES(AT_LOWER, 1), TABLES(AT_LOWER, 2), TABLES(AT_LOWER, 3) };
static const uint8_t index_of_upper[3][4][64] = { TABLES(AT_UPPER, 1), TABLES(AT_UPPER, 2), TABLES(AT_UPPER, 3) };

ITQ_INLINE struct level_tables load_level_tables(const int bits, const int8_t * levels) {
    const __m512i all =
        _mm512_add_epi8(_mm512_maskz_loadu_epi8(~0ull >> (64 - (8 << bits)), levels), _mm512_set1_epi8(64));
    struct level_tables tables;
    UNROLL(4) for (int i = 0; i < 4; ++i) {
        tables.lower[i] = _mm512_permutexvar_epi8(_mm512_loadu_si512(index_of_lower[bits - 1][i]), all);
        tables.upper[i] = _mm512_permutexvar_epi8(_mm512_loadu_si512(index_of_upper[bits - 1][i]), all);
    }
    return tables;
}

// Of one bit the nibbles are all of an index. Third bits are stored with neighbours exchanged.
ITQ_INLINE __m512i rest_of(const int bits, const struct step * x, const int i) {
    return bits == 3 ? merge(x->rest[0], x->rest[1], i % 2 == 0 ? 0xAA : 0x55) : x->rest[0];
}

ITQ_INLINE __m512i lower_levels(const int bits, const struct level_tables * tables, const struct step * x,
                                const int i) {
    __m512i index = x->nibbles[i];
    if (bits > 1) {
        index = merge(index, _mm512_slli_epi16(rest_of(bits, x, i), i < 2 ? 4 : 2), 0x30);
    }
    return _mm512_permutexvar_epi8(index, tables->lower[i]);
}

ITQ_INLINE __m512i upper_levels(const int bits, const struct level_tables * tables, const struct step * x,
                                const int i) {
    __m512i index = x->nibbles[i];
    if (bits == 1) {
        return _mm512_permutexvar_epi8(_mm512_srli_epi16(index, 4), tables->lower[i]);
    }
    index = merge(index, _mm512_srli_epi16(rest_of(bits, x, i), i < 2 ? 2 : 4), 0x0C);
    return _mm512_permutexvar_epi8(_mm512_srli_epi16(index, 2), tables->upper[i]);
}

#else

struct level_tables {
    __m512i by_rest[4][4];  // [2*q2 + c2][i]
};

ITQ_INLINE struct level_tables load_level_tables(const int bits, const int8_t * levels) {
    struct level_tables tables;
    for (int rest = 0; rest < 1 << (bits - 1); ++rest) {
        for (int i = 0; i < 4; ++i) {
            uint8_t table[16];
            itq_level_table(bits, levels, i, rest, table);
            tables.by_rest[rest][i] = _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *) table));
        }
    }
    return tables;
}

// By nibbles and the rest of weight g of the bytes.
ITQ_INLINE __m512i look_up(const int bits, const struct level_tables * tables, const struct step * x, const int i,
                           __m512i nibbles, const int g) {
    const __m512i index  = _mm512_and_si512(nibbles, _mm512_set1_epi8(0x0F));
    __m512i       levels = _mm512_shuffle_epi8(tables->by_rest[0][i], index);
    if (bits > 1) {
        const __mmask64 c2 = _mm512_test_epi8_mask(x->rest[0], _mm512_set1_epi8((char) (1 << g)));
        levels             = _mm512_mask_shuffle_epi8(levels, c2, tables->by_rest[1][i], index);
        if (bits == 3) {
            const __mmask64 q2 = _mm512_test_epi8_mask(x->rest[1], _mm512_set1_epi8((char) (1 << (g ^ 1))));
            levels             = _mm512_mask_shuffle_epi8(levels, q2 & ~c2, tables->by_rest[2][i], index);
            levels             = _mm512_mask_shuffle_epi8(levels, q2 & c2, tables->by_rest[3][i], index);
        }
    }
    return levels;
}

ITQ_INLINE __m512i lower_levels(const int bits, const struct level_tables * tables, const struct step * x,
                                const int i) {
    return look_up(bits, tables, x, i, x->nibbles[i], i);
}

ITQ_INLINE __m512i upper_levels(const int bits, const struct level_tables * tables, const struct step * x,
                                const int i) {
    return look_up(bits, tables, x, i, _mm512_srli_epi16(x->nibbles[i], 4), i + 4);
}

#endif

// Block b of a panel, of 32 * words weights; `last` is where the start states are.
#define LEVELS_OF_TRELLIS(name, bits, words, last, b, F)                                        \
    const itq_codes_##name * codes_ = itq_codes_of_##name(panel, b);                            \
    struct selectors         selectors_;                                                        \
    load_selectors(words, codes_->sel[0], itq_scales_of_##name(panel, b)->last, &selectors_);   \
    __m512i c0_ = _mm512_xor_si512(selectors_.at[3], selectors_.at[1]);                         \
    UNROLL(8) for (int t = 0; t < (words); ++t) {                                               \
        const struct step step_ = load_step(bits, words, &selectors_, t, codes_->qs[0], &c0_);  \
        UNROLL(4) for (int i = 0; i < 4; ++i) {                                                 \
            if (i % 2 == 0) {                                                                   \
                ITQ_PREFETCH_PART(codes_, 2 * t + i / 2, 2 * (words));                          \
            }                                                                                   \
            F(lower_levels(bits, &tables, &step_, i), (words) * i + t, 8 * t + 2 * i)           \
            F(upper_levels(bits, &tables, &step_, i), (words) * (i + 4) + t, 8 * t + 2 * i + 1) \
        }                                                                                       \
    }
#define TABLES_OF_TRELLIS(NAME, bits)                                    \
    static const int8_t       level_values[8 << (bits)] = NAME##_LEVELS; \
    const struct level_tables tables                    = load_level_tables(bits, level_values);
#define TABLES_ITQ3_S()     TABLES_OF_TRELLIS(ITQ3_S, 2)
#define TABLES_ITQ2_S()     TABLES_OF_TRELLIS(ITQ2_S, 1)
#define TABLES_ITQ4_S()     TABLES_OF_TRELLIS(ITQ4_S, 3)
#define TABLES_ITQ3_N()     TABLES_OF_TRELLIS(ITQ3_N, 2)
#define TABLES_ITQ2_N()     TABLES_OF_TRELLIS(ITQ2_N, 1)
#define TABLES_ITQ4_N()     TABLES_OF_TRELLIS(ITQ4_N, 3)
#define LEVELS_ITQ3_S(b, F) LEVELS_OF_TRELLIS(itq3_s, 2, 8, z, b, F)
#define LEVELS_ITQ2_S(b, F) LEVELS_OF_TRELLIS(itq2_s, 1, 8, d, b, F)
#define LEVELS_ITQ4_S(b, F) LEVELS_OF_TRELLIS(itq4_s, 3, 8, d, b, F)
#define LEVELS_ITQ3_N(b, F) LEVELS_OF_TRELLIS(itq3_n, 2, 2, d, b, F)
#define LEVELS_ITQ2_N(b, F) LEVELS_OF_TRELLIS(itq2_n, 1, 2, d, b, F)
#define LEVELS_ITQ4_N(b, F) LEVELS_OF_TRELLIS(itq4_n, 3, 2, d, b, F)

#define GEMM_OF_TYPE(NAME, name, bits, n_levels, length, has_z, number) \
    GEMM(name, scales_##has_z, TABLES_##NAME, LEVELS_##NAME, 64)
#define GEMM_OF_TYPE_64(NAME, name, bits, n_levels, length, has_z, number) \
    GEMM_64(name, scales_##has_z, TABLES_##NAME, LEVELS_##NAME, 64)
ITQ_TYPES_256(GEMM_OF_TYPE)
ITQ_TYPES_64(GEMM_OF_TYPE_64)

//
// TQ2_0 and TQ1_0: trits are stored plus one
//

#if defined(__AVX512VNNI__)
// Bytes from 128 on may be operands: two products of theirs would be too much for 16 bits.
#    define WHOLE_BYTES 1
#else
#    define WHOLE_BYTES 0
#endif

#define NO_TABLES()

#define PLACE_TQ2_0(w, f) (32 * ((w) / 8) + 8 * (f) + (w) % 8)

#define LEVELS_TQ2_0(b, F)                                                                               \
    const itq_codes_tq2_0 * codes_ = itq_codes_of_tq2_0(panel, b);                                       \
    UNROLL(16) for (int w = 0; w < 16; ++w) {                                                            \
        const __m512i word = _mm512_load_si512(codes_->qs[w]);                                           \
        ITQ_PREFETCH_PART(codes_, w, 16);                                                                \
        UNROLL(4) for (int f = 0; f < 4; ++f) {                                                          \
            const __m512i field = _mm512_and_si512(_mm512_srli_epi16(word, 2 * f), _mm512_set1_epi8(3)); \
            F(field, PLACE_TQ2_0(w, f), f)                                                               \
        }                                                                                                \
    }
GEMM(tq2_0, scales_tq, NO_TABLES, LEVELS_TQ2_0, 1)

#if WHOLE_BYTES
// Few columns: no field of a byte is shifted, its sum is.
#    define FIELDS_TQ2_0(b, F)                                                                       \
        const itq_codes_tq2_0 * codes_ = itq_codes_of_tq2_0(panel, b);                               \
        UNROLL(16) for (int w = 0; w < 16; ++w) {                                                    \
            const __m512i word = _mm512_load_si512(codes_->qs[w]);                                   \
            ITQ_PREFETCH_PART(codes_, w, 16);                                                        \
            UNROLL(4) for (int f = 0; f < 4; ++f) {                                                  \
                const __m512i field = _mm512_and_si512(word, _mm512_set1_epi8((char) (3 << 2 * f))); \
                F(field, PLACE_TQ2_0(w, f), 4 * w + f)                                               \
            }                                                                                        \
        }

ITQ_INLINE __m512i dot_of_fields(const __m512i * acc, int n, int32_t total) {
    (void) total;
    __m512i dot = acc[0];
    UNROLL(8) for (int i = 1; i < n; ++i) {
        dot = _mm512_add_epi32(dot, _mm512_srai_epi32(acc[i], 2 * (i % 4)));
    }
    return dot;
}
GEMM_FEW(tq2_0, few, 256, scales_tq, NO_TABLES, FIELDS_TQ2_0, 1, dot_of_fields)
#endif

// A byte b of TQ1_0 is a fraction of 256, and t = floor(3*b / 256) its first trit; 3*b - 256*t is the byte of the next.
ITQ_INLINE __m512i next_trits(__m512i bytes) {
    return _mm512_add_epi8(bytes, _mm512_add_epi8(bytes, bytes));
}

// The means are rounded up, so that b - 1 is taken.
ITQ_INLINE __m512i first_trits(__m512i bytes) {
    const __m512i less = _mm512_subs_epu8(bytes, _mm512_set1_epi8(1));
    const __m512i mean = _mm512_avg_epu8(less, _mm512_avg_epu8(less, _mm512_setzero_si512()));
    return _mm512_and_si512(_mm512_srli_epi16(mean, 6), _mm512_set1_epi8(3));
}

#define TRITS_TQ1_0(b, DO, F)                                      \
    const itq_codes_tq1_0 * codes_ = itq_codes_of_tq1_0(panel, b); \
    UNROLL(12) for (int w = 0; w < 12; ++w) {                      \
        __m512i bytes = _mm512_load_si512(codes_->qs[w]);          \
        ITQ_PREFETCH_PART(codes_, w, 12);                          \
        UNROLL(5) for (int l = 0; l < 5; ++l) {                    \
            DO(F, w < 8 ? 8 * l + w : 32 + 4 * l + w, w)           \
        }                                                          \
    }                                                              \
    __m512i bytes = _mm512_load_si512(codes_->qh);                 \
    UNROLL(4) for (int l = 0; l < 4; ++l) {                        \
        DO(F, 60 + l, l)                                           \
    }
#define ONE_TRIT(F, p, turn)                      \
    {                                             \
        const __m512i trits = first_trits(bytes); \
        F(trits, p, turn)                         \
        bytes = next_trits(bytes);                \
    }
#define LEVELS_TQ1_0(b, F) TRITS_TQ1_0(b, ONE_TRIT, F)
GEMM(tq1_0, scales_tq, NO_TABLES, LEVELS_TQ1_0, 1)

#if WHOLE_BYTES
// Few columns: sum(t * y) = (3 * sum(b * y) - sum(next b * y)) / 256, two products and no trit.
#    define TWO_BYTES(F, p, turn)  \
        F(bytes, p, 2 * (turn))    \
        bytes = next_trits(bytes); \
        F(bytes, p, 2 * (turn) + 1)

#    define BYTES_TQ1_0(b, F) TRITS_TQ1_0(b, TWO_BYTES, F)

ITQ_INLINE __m512i dot_of_bytes(const __m512i * acc, int n, int32_t total) {
    __m512i dot = _mm512_setzero_si512();
    UNROLL(4) for (int i = 0; i < n; i += 2) {
        const __m512i twice = _mm512_slli_epi32(acc[i], 1);
        dot                 = _mm512_add_epi32(dot, _mm512_sub_epi32(_mm512_add_epi32(acc[i], twice), acc[i + 1]));
    }
    return _mm512_sub_epi32(_mm512_srai_epi32(dot, 8), _mm512_set1_epi32(total));
}
GEMM_FEW(tq1_0, few, 256, scales_tq, NO_TABLES, BYTES_TQ1_0, 0, dot_of_bytes)
#endif

//
// products
//

// A function for every number of columns, so that the sums are registers.
#define CASE(type, way, n)                         \
    case n:                                        \
        gemm_##type##_##way(nb, panel, y, n, out); \
        return

#if defined(__AVX512VNNI__)
#    define MORE_CASES(type)   \
        CASE(type, direct, 3); \
        CASE(type, direct, 4); \
        CASE(type, direct, 5); \
        CASE(type, direct, 6); \
        CASE(type, direct, 7); \
        CASE(type, direct, 8)
#else
// with three instructions for a product a compiler takes minutes for the unrolled code
#    define MORE_CASES(type)
#endif

#define PRODUCT(type, few)                                                                                     \
    static void itq_gemm_##type##_avx512(int64_t nb, const void * panel, const struct itq_columns * y, int nc, \
                                         float out[][ROWS]) {                                                  \
        switch (nc) {                                                                                          \
            CASE(type, few, 1);                                                                                \
            CASE(type, few, 2);                                                                                \
            MORE_CASES(type);                                                                                  \
            default:                                                                                           \
                gemm_##type##_many(nb, panel, y, nc, out);                                                     \
        }                                                                                                      \
    }
#define PRODUCT_OF_TYPE(NAME, name, ...) PRODUCT(name, direct)
ITQ_TYPES(PRODUCT_OF_TYPE)
#if WHOLE_BYTES
PRODUCT(tq2_0, few)
PRODUCT(tq1_0, few)
#else
PRODUCT(tq2_0, direct)
PRODUCT(tq1_0, direct)
#endif

//
// repacking
//

#if defined(__AVX512VBMI__)

// Word j of row i to word i of row j.
ITQ_INLINE void transpose_16x16(__m512i x[16]) {
    __m512i y[16];
    UNROLL(8) for (int i = 0; i < 16; i += 2) {
        y[i]     = _mm512_unpacklo_epi32(x[i], x[i + 1]);
        y[i + 1] = _mm512_unpackhi_epi32(x[i], x[i + 1]);
    }
    UNROLL(4) for (int i = 0; i < 16; i += 4) {
        x[i]     = _mm512_unpacklo_epi64(y[i], y[i + 2]);
        x[i + 1] = _mm512_unpackhi_epi64(y[i], y[i + 2]);
        x[i + 2] = _mm512_unpacklo_epi64(y[i + 1], y[i + 3]);
        x[i + 3] = _mm512_unpackhi_epi64(y[i + 1], y[i + 3]);
    }
    UNROLL(4) for (int i = 0; i < 4; ++i) {
        y[i]      = _mm512_shuffle_i32x4(x[i], x[i + 4], 0x88);
        y[i + 4]  = _mm512_shuffle_i32x4(x[i], x[i + 4], 0xDD);
        y[i + 8]  = _mm512_shuffle_i32x4(x[i + 8], x[i + 12], 0x88);
        y[i + 12] = _mm512_shuffle_i32x4(x[i + 8], x[i + 12], 0xDD);
    }
    UNROLL(4) for (int i = 0; i < 4; ++i) {
        x[i]      = _mm512_shuffle_i32x4(y[i], y[i + 8], 0x88);
        x[i + 8]  = _mm512_shuffle_i32x4(y[i], y[i + 8], 0xDD);
        x[i + 4]  = _mm512_shuffle_i32x4(y[i + 4], y[i + 12], 0x88);
        x[i + 12] = _mm512_shuffle_i32x4(y[i + 4], y[i + 12], 0xDD);
    }
}

// Exchange the bits of `mask` with those `shift` higher.
ITQ_INLINE __m512i swap_bits_32(__m512i x, int shift, int mask) {
    const __m512i t =
        _mm512_ternarylogic_epi32(x, _mm512_srli_epi32(x, (unsigned) shift), _mm512_set1_epi32(mask), 0x28);
    return _mm512_ternarylogic_epi32(x, t, _mm512_slli_epi32(t, (unsigned) shift), 0x96);
}

ITQ_INLINE __m512i swap_bits_64(__m512i x, int shift, int64_t mask) {
    const __m512i t =
        _mm512_ternarylogic_epi64(x, _mm512_srli_epi64(x, (unsigned) shift), _mm512_set1_epi64(mask), 0x28);
    return _mm512_ternarylogic_epi64(x, t, _mm512_slli_epi64(t, (unsigned) shift), 0x96);
}

// Transpose the 8x8 bits of every 8 bytes.
ITQ_INLINE __m512i transpose_bits(__m512i x) {
#    if defined(__GFNI__)
    const __m512i reversed =
        _mm512_broadcast_i32x4(_mm_setr_epi8(7, 6, 5, 4, 3, 2, 1, 0, 15, 14, 13, 12, 11, 10, 9, 8));
    return _mm512_gf2p8affine_epi64_epi8(_mm512_set1_epi64((int64_t) 0x8040201008040201),
                                         _mm512_shuffle_epi8(x, reversed), 0);
#    else
    x = swap_bits_64(x, 7, 0x00AA00AA00AA00AA);
    x = swap_bits_64(x, 14, 0x0000CCCC0000CCCC);
    return swap_bits_64(x, 28, 0x00000000F0F0F0F0);
#    endif
}

// Symbols of two bits, with which a block begins.
ITQ_INLINE void repack_symbols_512(const void * const x[ROWS], uint32_t (*qs)[ROWS]) {
    // byte a ^ 1 of word 2*t + h from byte 16*a + 8*h + t
#    define WORD(t, h) 16 + 8 * h + t, 8 * h + t, 48 + 8 * h + t, 32 + 8 * h + t
#    define WORDS(t)   WORD(t, 0), WORD(t, 1)
    static const uint8_t symbols_of[64] = { WORDS(0), WORDS(1), WORDS(2), WORDS(3),
                                            WORDS(4), WORDS(5), WORDS(6), WORDS(7) };
#    undef WORDS
#    undef WORD
    const __m512i symbols_at = _mm512_loadu_si512(symbols_of);
    __m512i       q[ROWS];
    UNROLL(16) for (int r = 0; r < ROWS; ++r) {
        q[r] = _mm512_permutexvar_epi8(symbols_at, _mm512_loadu_si512(x[r]));
    }
    transpose_16x16(q);
    UNROLL(16) for (int i = 0; i < 16; ++i) {
        // transpose the 4x4 pairs of bits of every word
        const __m512i t = swap_bits_32(q[i], 12, 0x0000F0F0);
        _mm512_store_si512(qs[i], swap_bits_32(t, 6, 0x00CC00CC));
    }
}

// Bytes of a plane for words: byte i of word t from byte 8*i + t, in both halves.
ITQ_INLINE __m512i plane_order(void) {
#    define HALF(t) t, 8 + t, 16 + t, 24 + t
    static const uint8_t plane_of[32] = { HALF(0), HALF(1), HALF(2), HALF(3), HALF(4), HALF(5), HALF(6), HALF(7) };
#    undef HALF
    const __m256i half = _mm256_loadu_si256((const __m256i *) plane_of);
    return _mm512_inserti64x4(_mm512_castsi256_si512(half), _mm256_add_epi8(half, _mm256_set1_epi8(32)), 1);
}

// Two planes of bits that follow each other, 64 bytes `offset` behind the begin of a block: the words of the first in
// q[0 .. 7], of the second in q[8 .. 15].
ITQ_INLINE void repack_two_planes(const void * const x[ROWS], size_t offset, __m512i q[ROWS]) {
    const __m512i at = plane_order();
    UNROLL(16) for (int r = 0; r < ROWS; ++r) {
        q[r] = _mm512_permutexvar_epi8(at, transpose_bits(_mm512_loadu_si512((const char *) x[r] + offset)));
    }
    transpose_16x16(q);
}

static void itq_repack_itq3_s_avx512(const void * rows, size_t row_size, int n_rows, int64_t nb, void * panel) {
    const __m512i selectors_at = plane_order();

    struct row_reader readers[ROWS];
    open_rows(readers, rows, row_size, n_rows, sizeof(block_itq3_s));
    for (int64_t b = 0; b < nb; ++b) {
        itq_codes_itq3_s *  codes  = itq_codes_of_itq3_s(panel, b);
        itq_scales_itq3_s * scales = itq_scales_of_itq3_s(panel, b);
        const void *        x[ROWS];
        for (int r = 0; r < ROWS; ++r) {
            x[r] = block_at(&readers[r], b);

            const block_itq3_s * block = x[r];
            scales->d[r]               = block->d;
            scales->z[r]               = block->z;
        }
        repack_symbols_512(x, codes->qs);

        __m512i s[8];
        UNROLL(8) for (int i = 0; i < 8; ++i) {
            const int            r = i < 4 ? i : i + 4;
            const block_itq3_s * y = x[r];
            const block_itq3_s * z = x[r + 4];
            s[i] = _mm512_inserti64x4(_mm512_castsi256_si512(_mm256_loadu_si256((const __m256i *) y->sel)),
                                      _mm256_loadu_si256((const __m256i *) z->sel), 1);
            s[i] = _mm512_permutexvar_epi8(selectors_at, transpose_bits(s[i]));
        }
        __m512i u[8];
        UNROLL(4) for (int i = 0; i < 8; i += 2) {
            u[i]     = _mm512_unpacklo_epi32(s[i], s[i + 1]);
            u[i + 1] = _mm512_unpackhi_epi32(s[i], s[i + 1]);
        }
        UNROLL(2) for (int i = 0; i < 8; i += 4) {
            s[i]     = _mm512_unpacklo_epi64(u[i], u[i + 2]);
            s[i + 1] = _mm512_unpackhi_epi64(u[i], u[i + 2]);
            s[i + 2] = _mm512_unpacklo_epi64(u[i + 1], u[i + 3]);
            s[i + 3] = _mm512_unpackhi_epi64(u[i + 1], u[i + 3]);
        }
        UNROLL(4) for (int t = 0; t < 4; ++t) {
            _mm512_store_si512(codes->sel[t], _mm512_shuffle_i32x4(s[t], s[t + 4], 0x88));
            _mm512_store_si512(codes->sel[t + 4], _mm512_shuffle_i32x4(s[t], s[t + 4], 0xDD));
        }
    }
}

// Two planes of bits: symbols of one bit, of which bit g goes to g ^ 3, or third bits, to g ^ 1; and the selectors.
#    define REPACK_TWO_PLANES(name, bits)                                                                    \
        static void itq_repack_##name##_avx512(const void * rows, size_t row_size, int n_rows, int64_t nb,   \
                                               void * panel) {                                               \
            enum { PLANE = (bits) == 1 ? 0 : 64 };                                                           \
            static_assert(offsetof(block_##name, sel) == PLANE + 32, "the planes do not follow each other"); \
                                                                                                             \
            struct row_reader readers[ROWS];                                                                 \
            open_rows(readers, rows, row_size, n_rows, sizeof(block_##name));                                \
            for (int64_t b = 0; b < nb; ++b) {                                                               \
                itq_codes_##name *  codes  = itq_codes_of_##name(panel, b);                                  \
                itq_scales_##name * scales = itq_scales_of_##name(panel, b);                                 \
                const void *        x[ROWS];                                                                 \
                for (int r = 0; r < ROWS; ++r) {                                                             \
                    x[r]         = block_at(&readers[r], b);                                                 \
                    scales->d[r] = ((const block_##name *) x[r])->d;                                         \
                }                                                                                            \
                if ((bits) > 1) {                                                                            \
                    repack_symbols_512(x, codes->qs);                                                        \
                }                                                                                            \
                __m512i q[ROWS];                                                                             \
                repack_two_planes(x, PLANE, q);                                                              \
                UNROLL(8) for (int t = 0; t < 8; ++t) {                                                      \
                    const __m512i turned = (bits) == 1 ? exchange_512(q[t], 2, 0x33) : q[t];                 \
                    _mm512_store_si512(codes->qs[PLANE / 4 + t], exchange_512(turned, 1, 0x55));             \
                    _mm512_store_si512(codes->sel[t], q[8 + t]);                                             \
                }                                                                                            \
                if ((bits) == 3) {                                                                           \
                    itq_mirror_symbols(8, codes->qs);                                                        \
                }                                                                                            \
            }                                                                                                \
        }
REPACK_TWO_PLANES(itq2_s, 1)
REPACK_TWO_PLANES(itq4_s, 3)

static void itq_repack_tq2_0_avx512(const void * rows, size_t row_size, int n_rows, int64_t nb, void * panel) {
    struct row_reader readers[ROWS];
    open_rows(readers, rows, row_size, n_rows, sizeof(block_tq2_0));
    for (int64_t b = 0; b < nb; ++b) {
        itq_codes_tq2_0 * codes  = itq_codes_of_tq2_0(panel, b);
        itq_scales_tq *   scales = itq_scales_of_tq2_0(panel, b);
        __m512i           q[ROWS];
        UNROLL(16) for (int r = 0; r < ROWS; ++r) {
            const block_tq2_0 * x = block_at(&readers[r], b);
            q[r]                  = _mm512_loadu_si512(x->qs);
            scales->d[r]          = x->d;
        }
        transpose_16x16(q);
        UNROLL(16) for (int w = 0; w < 16; ++w) {
            _mm512_store_si512(codes->qs[w], q[w]);
        }
    }
}

static void itq_repack_tq1_0_avx512(const void * rows, size_t row_size, int n_rows, int64_t nb, void * panel) {
    struct row_reader readers[ROWS];
    open_rows(readers, rows, row_size, n_rows, sizeof(block_tq1_0));
    for (int64_t b = 0; b < nb; ++b) {
        itq_codes_tq1_0 * codes  = itq_codes_of_tq1_0(panel, b);
        itq_scales_tq *   scales = itq_scales_of_tq1_0(panel, b);
        __m512i           q[ROWS];
        UNROLL(16) for (int r = 0; r < ROWS; ++r) {
            const block_tq1_0 * x = block_at(&readers[r], b);
            // the words of qs, and the one of qh behind them
            q[r]                  = _mm512_maskz_loadu_epi32(0x1FFF, x->qs);
            scales->d[r]          = x->d;
        }
        transpose_16x16(q);
        UNROLL(12) for (int w = 0; w < 12; ++w) {
            _mm512_store_si512(codes->qs[w], q[w]);
        }
        _mm512_store_si512(codes->qh, q[12]);
    }
}

#else
#    define itq_repack_itq3_s_avx512 itq_repack_itq3_s_avx2
#    define itq_repack_itq2_s_avx512 itq_repack_itq2_s_avx2
#    define itq_repack_itq4_s_avx512 itq_repack_itq4_s_avx2
#    define itq_repack_tq2_0_avx512  itq_repack_tq2_0_avx2
#    define itq_repack_tq1_0_avx512  itq_repack_tq1_0_avx2
#endif  // VBMI
#define itq_repack_itq3_n_avx512 itq_repack_itq3_n_words
#define itq_repack_itq2_n_avx512 itq_repack_itq2_n_words
#define itq_repack_itq4_n_avx512 itq_repack_itq4_n_words

#define itq_reorder_q8_n_h_avx512 itq_reorder_q8_n_h_sse

// From [4][64] to [64][4] bytes.
static void itq_reorder_q8_K_h_avx512(const int8_t * q, int8_t * y) {
    const __m512i a = _mm512_loadu_si512(q), b = _mm512_loadu_si512(q + 64);
    const __m512i c = _mm512_loadu_si512(q + 128), d = _mm512_loadu_si512(q + 192);

    const __m512i ab_lo = _mm512_unpacklo_epi8(a, b), ab_hi = _mm512_unpackhi_epi8(a, b);
    const __m512i cd_lo = _mm512_unpacklo_epi8(c, d), cd_hi = _mm512_unpackhi_epi8(c, d);

    // quarter i of x[j]: the words of places 16*i + 4*j .. 16*i + 4*j + 3
    const __m512i x[4] = { _mm512_unpacklo_epi16(ab_lo, cd_lo), _mm512_unpackhi_epi16(ab_lo, cd_lo),
                           _mm512_unpacklo_epi16(ab_hi, cd_hi), _mm512_unpackhi_epi16(ab_hi, cd_hi) };

    const __m512i even_lo = _mm512_shuffle_i32x4(x[0], x[1], 0x44), even_hi = _mm512_shuffle_i32x4(x[0], x[1], 0xEE);
    const __m512i odd_lo = _mm512_shuffle_i32x4(x[2], x[3], 0x44), odd_hi = _mm512_shuffle_i32x4(x[2], x[3], 0xEE);
    _mm512_storeu_si512(y, _mm512_shuffle_i32x4(even_lo, odd_lo, 0x88));
    _mm512_storeu_si512(y + 64, _mm512_shuffle_i32x4(even_lo, odd_lo, 0xDD));
    _mm512_storeu_si512(y + 128, _mm512_shuffle_i32x4(even_hi, odd_hi, 0x88));
    _mm512_storeu_si512(y + 192, _mm512_shuffle_i32x4(even_hi, odd_hi, 0xDD));
}

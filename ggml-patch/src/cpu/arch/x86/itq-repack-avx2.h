#pragma once

// Panels of the types with blocks of 256 out of the file's layout with AVX2: 8 of the 16 rows at a time.

#include "../../itq-rows.h"
#include "itq-decode.h"

#include <immintrin.h>

#define REPACKED_ROWS 8

// r[i] holds words w .. w + 3 of row i in its lower half and of row i + 4 in its upper half; words + 16*i gets word
// w + i of rows 0 .. 7.
static inline void store_transposed(uint32_t * words, const size_t step, const __m256i r[4]) {
    const __m256i a = _mm256_unpacklo_epi32(r[0], r[1]);
    const __m256i b = _mm256_unpackhi_epi32(r[0], r[1]);
    const __m256i c = _mm256_unpacklo_epi32(r[2], r[3]);
    const __m256i d = _mm256_unpackhi_epi32(r[2], r[3]);
    _mm256_store_si256((__m256i *) words, _mm256_unpacklo_epi64(a, c));
    _mm256_store_si256((__m256i *) (words + step), _mm256_unpackhi_epi64(a, c));
    _mm256_store_si256((__m256i *) (words + 2 * step), _mm256_unpacklo_epi64(b, d));
    _mm256_store_si256((__m256i *) (words + 3 * step), _mm256_unpackhi_epi64(b, d));
}

// Words 0 .. n_words - 1, a multiple of four, of blocks of 16 rows.
ITQ_INLINE void transpose_words(const struct row_reader * readers, int64_t b, size_t offset, const int n_words,
                                uint32_t words[][ITQ_PANEL_ROWS]) {
    for (int half = 0; half < 2; ++half) {
        for (int w = 0; w < n_words; w += 4) {
            __m256i r[4];
            for (int i = 0; i < 4; ++i) {
                const struct row_reader * from = readers + REPACKED_ROWS * half + i;
                r[i]                           = itq_load_2x128((const char *) block_at(&from[0], b) + offset + 4 * w,
                                                                (const char *) block_at(&from[4], b) + offset + 4 * w);
            }
            store_transposed(words[w] + REPACKED_ROWS * half, ITQ_PANEL_ROWS, r);
        }
    }
}

// Symbols of two bits, with which a block begins.
static inline void repack_symbols(const struct row_reader * readers, int64_t b, int half,
                                  uint32_t (*qs)[ITQ_PANEL_ROWS]) {
    __m256i words[4][4];  // [place / 4][row]: rows i and i + 4 in the halves of a register
    for (int i = 0; i < 4; ++i) {
        const char * x = (const char *) block_at(&readers[REPACKED_ROWS * half + i], b);
        const char * y = (const char *) block_at(&readers[REPACKED_ROWS * half + i + 4], b);

        // byte 8*h + t of register a has the symbols of places 16*a + 8*h + t, j = 0 .. 3 in its fields: the fields
        // become the register, and the other way round
        __m256i v0 = itq_load_2x128(x, y);
        __m256i v1 = itq_load_2x128(x + 16, y + 16);
        __m256i v2 = itq_load_2x128(x + 32, y + 32);
        __m256i v3 = itq_load_2x128(x + 48, y + 48);
        // a = 1, 0, 3, 2 in fields 0 .. 3
        SWAP_FIELDS(v1, v0, 2, 0x33);
        SWAP_FIELDS(v3, v2, 2, 0x33);
        SWAP_FIELDS(v1, v3, 4, 0x0F);
        SWAP_FIELDS(v0, v2, 4, 0x0F);
        const __m256i lo01 = _mm256_unpacklo_epi8(v1, v0);
        const __m256i hi01 = _mm256_unpackhi_epi8(v1, v0);
        const __m256i lo23 = _mm256_unpacklo_epi8(v3, v2);
        const __m256i hi23 = _mm256_unpackhi_epi8(v3, v2);
        words[0][i]        = _mm256_unpacklo_epi16(lo01, lo23);
        words[1][i]        = _mm256_unpackhi_epi16(lo01, lo23);
        words[2][i]        = _mm256_unpacklo_epi16(hi01, hi23);
        words[3][i]        = _mm256_unpackhi_epi16(hi01, hi23);
    }
    for (int w = 0; w < 4; ++w) {
        // places 4*w .. 4*w + 3 of 8*h + t, to word 2*t + h
        store_transposed(qs[2 * (4 * w % 8) + w / 2] + REPACKED_ROWS * half, 2 * ITQ_PANEL_ROWS, words[w]);
    }
}

// A plane of bits of one row: bit 8*j + g of words[t] from number 64*j + 8*g + t.
static inline void repack_plane(const uint8_t * plane, uint32_t (*words)[ITQ_PANEL_ROWS], int r) {
    __m256i s = _mm256_loadu_si256((const __m256i *) plane);
    for (int t = 7; t >= 0; --t, s = _mm256_add_epi8(s, s)) {
        words[t][r] = (uint32_t) _mm256_movemask_epi8(s);
    }
}

// Exchange the bits of the bytes that mask selects with those `shift` higher.
ITQ_INLINE __m256i exchange_bits_of_bytes(__m256i x, const int shift, const char mask) {
    const __m256i m = _mm256_set1_epi8(mask);
    return _mm256_or_si256(_mm256_slli_epi16(_mm256_and_si256(x, m), shift),
                           _mm256_and_si256(_mm256_srli_epi16(x, shift), m));
}

static inline void exchange_neighbours(uint32_t words[ITQ_PANEL_ROWS], int shift, char mask) {
    for (int r = 0; r < ITQ_PANEL_ROWS; r += REPACKED_ROWS) {
        __m256i * to = (__m256i *) &words[r];
        _mm256_store_si256(to, exchange_bits_of_bytes(_mm256_load_si256(to), shift, mask));
    }
}

// A plane has symbols of one bit, of which bit g goes to g ^ 3, or third bits: to g ^ 1.
#define REPACK_256(NAME, name, bits, n_levels, length, has_z, number)                                       \
    static inline void itq_repack_##name##_avx2(const void * rows, size_t row_size, int n_rows, int64_t nb, \
                                                void * panel) {                                             \
        struct row_reader readers[ITQ_PANEL_ROWS];                                                          \
        open_rows(readers, rows, row_size, n_rows, sizeof(block_##name));                                   \
        for (int64_t b = 0; b < nb; ++b) {                                                                  \
            itq_codes_##name *  codes         = itq_codes_of_##name(panel, b);                              \
            itq_scales_##name * scales        = itq_scales_of_##name(panel, b);                             \
            uint32_t (*plane)[ITQ_PANEL_ROWS] = codes->qs + ((bits) == 1 ? 0 : 16);                         \
            for (int r = 0; r < ITQ_PANEL_ROWS; ++r) {                                                      \
                const block_##name * x = (const block_##name *) block_at(&readers[r], b);                   \
                repack_plane(x->sel, codes->sel, r);                                                        \
                if ((bits) != 2) {                                                                          \
                    repack_plane(x->qs + ((bits) == 1 ? 0 : 64), plane, r);                                 \
                }                                                                                           \
                scales->d[r] = x->d;                                                                        \
                ITQ_COPY_ZERO_POINT_##has_z(scales->z[r], x->z);                                            \
            }                                                                                               \
            for (int half = 0; half < 2 && (bits) > 1; ++half) {                                            \
                repack_symbols(readers, b, half, codes->qs);                                                \
            }                                                                                               \
            for (int t = 0; t < 8 && (bits) != 2; ++t) {                                                    \
                if ((bits) == 1) {                                                                          \
                    exchange_neighbours(plane[t], 2, 0x33);                                                 \
                }                                                                                           \
                exchange_neighbours(plane[t], 1, 0x55);                                                     \
            }                                                                                               \
            if ((bits) == 3) {                                                                              \
                itq_mirror_symbols(8, codes->qs);                                                           \
            }                                                                                               \
        }                                                                                                   \
    }
ITQ_TYPES_256(REPACK_256)
#undef REPACK_256

static inline void itq_repack_tq2_0_avx2(const void * rows, size_t row_size, int n_rows, int64_t nb, void * panel) {
    struct row_reader readers[ITQ_PANEL_ROWS];
    open_rows(readers, rows, row_size, n_rows, sizeof(block_tq2_0));
    for (int64_t b = 0; b < nb; ++b) {
        itq_codes_tq2_0 * codes  = itq_codes_of_tq2_0(panel, b);
        itq_scales_tq *   scales = itq_scales_of_tq2_0(panel, b);
        transpose_words(readers, b, offsetof(block_tq2_0, qs), 16, codes->qs);
        for (int r = 0; r < ITQ_PANEL_ROWS; ++r) {
            scales->d[r] = ((const block_tq2_0 *) block_at(&readers[r], b))->d;
        }
    }
}

static inline void itq_repack_tq1_0_avx2(const void * rows, size_t row_size, int n_rows, int64_t nb, void * panel) {
    struct row_reader readers[ITQ_PANEL_ROWS];
    open_rows(readers, rows, row_size, n_rows, sizeof(block_tq1_0));
    for (int64_t b = 0; b < nb; ++b) {
        itq_codes_tq1_0 * codes  = itq_codes_of_tq1_0(panel, b);
        itq_scales_tq *   scales = itq_scales_of_tq1_0(panel, b);
        transpose_words(readers, b, offsetof(block_tq1_0, qs), 12, codes->qs);
        for (int r = 0; r < ITQ_PANEL_ROWS; ++r) {
            const block_tq1_0 * x = (const block_tq1_0 *) block_at(&readers[r], b);
            memcpy(&codes->qh[r], x->qh, sizeof(x->qh));
            scales->d[r] = x->d;
        }
    }
}

// Activations of blocks of 64, from [4][16] to [16][4] bytes.
static inline void itq_reorder_q8_n_h_sse(const int8_t * q, int8_t * y) {
    const __m128i a = _mm_loadu_si128((const __m128i *) q);
    const __m128i b = _mm_loadu_si128((const __m128i *) (q + 16));
    const __m128i c = _mm_loadu_si128((const __m128i *) (q + 32));
    const __m128i d = _mm_loadu_si128((const __m128i *) (q + 48));

    const __m128i ab_lo = _mm_unpacklo_epi8(a, b), ab_hi = _mm_unpackhi_epi8(a, b);
    const __m128i cd_lo = _mm_unpacklo_epi8(c, d), cd_hi = _mm_unpackhi_epi8(c, d);

    __m128i * to = (__m128i *) y;
    _mm_storeu_si128(to, _mm_unpacklo_epi16(ab_lo, cd_lo));
    _mm_storeu_si128(to + 1, _mm_unpackhi_epi16(ab_lo, cd_lo));
    _mm_storeu_si128(to + 2, _mm_unpacklo_epi16(ab_hi, cd_hi));
    _mm_storeu_si128(to + 3, _mm_unpackhi_epi16(ab_hi, cd_hi));
}

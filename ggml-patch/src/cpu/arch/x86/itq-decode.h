#pragma once

// From a block of a trellis type to its levels, AVX2 and AVX-512, for products with rows as a file has them.

#include "ggml-itq.h"

#if defined(__AVX2__)

#    include <immintrin.h>
#    include <stddef.h>
#    include <string.h>

#    if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512DQ__)
#        define ITQ_AVX512
#    endif

// The levels plus 64, unsigned operands of maddubs and dpbusd.
static inline __m128i itq3_s_unsigned_levels(void) {
    static const int8_t table[16] = ITQ3_S_LEVELS;
    return _mm_add_epi8(_mm_loadu_si128((const __m128i *) table), _mm_set1_epi8(64));
}

static inline __m256i itq_load_2x128(const void * a, const void * b) {
    return _mm256_inserti128_si256(_mm256_castsi128_si256(_mm_loadu_si128((const __m128i *) a)),
                                   _mm_loadu_si128((const __m128i *) b), 1);
}

// Exchanges fields of the bytes of two registers: those of *a that mask selects `shift` bits up with those of *b that
// mask selects. shift is known to the compiler.
#    define SWAP_FIELDS(a, b, shift, mask)                                                                  \
        do {                                                                                                \
            const __m256i swap_ =                                                                           \
                _mm256_and_si256(_mm256_xor_si256(_mm256_srli_epi16(a, shift), b), _mm256_set1_epi8(mask)); \
            b = _mm256_xor_si256(b, swap_);                                                                 \
            a = _mm256_xor_si256(a, _mm256_slli_epi16(swap_, shift));                                       \
        } while (0)

#    if defined(ITQ_AVX512)

// Levels plus 64 of weights 64*word .. 64*word + 63 of a block by 4 times their symbols: the grids are planes of bits, which
// are masks.
static inline __m512i itq_levels_64(__m512i symbols, const uint8_t * sel, int word, __m128i table) {
    uint64_t c1, c0;
    itq_grids(sel, word, &c1, &c0);
    const __m512i with_c1 = _mm512_mask_add_epi8(symbols, c1, symbols, _mm512_set1_epi8(2));
    const __m512i index   = _mm512_mask_add_epi8(with_c1, c0, with_c1, _mm512_set1_epi8(1));
    return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(table), index);
}

// The same with symbols of one bit, which are a plane too.
static inline __m512i itq2_levels_64(const uint8_t * qs, const uint8_t * sel, int word) {
    static const int8_t levels[8] = ITQ2_S_LEVELS;
    uint64_t            q;
    memcpy(&q, qs + 8 * word, sizeof(q));
    return itq_levels_64(_mm512_maskz_mov_epi8(q, _mm512_set1_epi8(4)), sel, word,
                         _mm_add_epi8(_mm_loadl_epi64((const __m128i *) levels), _mm_set1_epi8(64)));
}

#    endif

#    if defined(ITQ_AVX512) && defined(__AVX512VBMI__)

// A byte per weight with the seven selectors that its grid depends on, the trellis state, comes from one multishift; a
// table of 128 entries turns it into 2*c1 + c0.

struct itq3_s_tables {
    __m512i state_lo;  // 2*c1 + c0 of s[t-6 .. t], s[t] in bit 6
    __m512i state_hi;
    __m512i levels;
    // Weights 8j .. 8j+7 of a word of 64 depend on its bytes j-1 and j: these go to the low 16 bits of lane j, out of
    // the 16 bytes that begin one word earlier. The first word has zeros before it.
    __m512i bytes;
    __m512i bytes_first;
    __m512i windows;  // s[t-6] of weight 8j + i is bit 2 + i of lane j
};

static inline struct itq3_s_tables itq3_s_load_tables(void) {
#        define G1(w) (2 * (((w) >> 6 ^ (w) >> 5 ^ (w)) & 1) + (((w) >> 4 ^ (w) >> 2) & 1))
#        define G8(w) G1(w), G1((w) + 1), G1((w) + 2), G1((w) + 3), G1((w) + 4), G1((w) + 5), G1((w) + 6), G1((w) + 7)
#        define G64(w) \
            G8(w), G8((w) + 8), G8((w) + 16), G8((w) + 24), G8((w) + 32), G8((w) + 40), G8((w) + 48), G8((w) + 56)
    static const uint8_t grid_of_state[128] = { G64(0), G64(64) };
#        undef G1
#        undef G8
#        undef G64

    struct itq3_s_tables t;
    t.state_lo    = _mm512_loadu_si512(grid_of_state);
    t.state_hi    = _mm512_loadu_si512(grid_of_state + 64);
    t.levels      = _mm512_broadcast_i32x4(itq3_s_unsigned_levels());
    t.bytes       = _mm512_setr_epi64(0x0807, 0x0908, 0x0A09, 0x0B0A, 0x0C0B, 0x0D0C, 0x0E0D, 0x0F0E);
    t.bytes_first = _mm512_or_si512(t.bytes, _mm512_setr_epi64(0x80, 0, 0, 0, 0, 0, 0, 0));
    t.windows     = _mm512_set1_epi64(0x0908070605040302);
    return t;
}

// Four times the symbols of a word of 64 weights, in bits 2 and 3.
static inline __m512i itq3_s_symbols_times_4(__m512i q, int word) {
    switch (word) {
        case 0:
            return _mm512_slli_epi16(q, 2);
        case 1:
            return q;
        case 2:
            return _mm512_srli_epi16(q, 2);
        default:
            return _mm512_srli_epi16(q, 4);
    }
}

// Levels plus 64 of weights 64*word .. 64*word + 63; q holds the symbols of the block.
static inline __m512i itq3_s_levels_64(const struct itq3_s_tables * t, const block_itq3_s * x, __m512i q, int word) {
    const uint8_t * from   = (const uint8_t *) x + offsetof(block_itq3_s, sel) - 8 + 8 * word;
    const __m512i   bytes  = _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *) from));
    const __m512i   lanes  = _mm512_shuffle_epi8(bytes, word == 0 ? t->bytes_first : t->bytes);
    const __m512i   states = _mm512_multishift_epi64_epi8(t->windows, lanes);
    const __m512i   grids  = _mm512_permutex2var_epi8(t->state_lo, states, t->state_hi);
    const __m512i   q4     = itq3_s_symbols_times_4(q, word);
    // grids | (q4 & 12)
    const __m512i   index  = _mm512_ternarylogic_epi64(grids, q4, _mm512_set1_epi8(0x0C), 0xF8);
    return _mm512_shuffle_epi8(t->levels, index);
}

#    else

// Blocks decoded at a time. The steps depend on each other; those of several blocks run side by side.
#        define ITQ_DECODED_GROUP 8

#        if defined(ITQ_AVX512)

// Grids of `pairs` pairs of blocks, out of n. grids[64*b + m] holds 2*c1 + c0 of weights m, m+64, m+128, m+192 of block
// b, two bits each, as its byte m of symbols holds theirs.
static inline void itq3_s_decode_grids(const block_itq3_s * x, int n, int pairs, uint8_t * grids) {
    // byte 4r + b of the selectors to byte r of lane b
    const __m512i in_16  = _mm512_broadcast_i32x4(_mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15));
    const __m512i across = _mm512_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11, 15);
    const __m512i before = _mm512_setr_epi64(2, 3, 8, 9, 6, 7, 12, 13);
    const __m512i even   = _mm512_set1_epi8(0x55);

    __m512i s[ITQ_DECODED_GROUP / 2];
    for (int p = 0; p < pairs; ++p) {
        const block_itq3_s * a = x + (2 * p < n ? 2 * p : n - 1);
        const block_itq3_s * b = x + (2 * p + 1 < n ? 2 * p + 1 : n - 1);

        s[p] = _mm512_inserti64x4(_mm512_castsi256_si512(_mm256_loadu_si256((const __m256i *) a->sel)),
                                  _mm256_loadu_si256((const __m256i *) b->sel), 1);
        s[p] = _mm512_permutexvar_epi32(across, _mm512_shuffle_epi8(s[p], in_16));
    }

    // transpose every 8x8 bits: byte m of a block then holds the selectors of weights m, m+32, m+64, ..., m+224
#            define SWAP(shift, mask)                                                                        \
                for (int p = 0; p < pairs; ++p) {                                                            \
                    const __m512i t = _mm512_ternarylogic_epi64(s[p], _mm512_srli_epi64(s[p], shift),        \
                                                                _mm512_set1_epi64(mask), 0x28);              \
                    s[p]            = _mm512_ternarylogic_epi64(s[p], t, _mm512_slli_epi64(t, shift), 0x96); \
                }
    SWAP(7, 0x00AA00AA00AA00AA)
    SWAP(14, 0x0000CCCC0000CCCC)
    SWAP(28, 0x00000000F0F0F0F0)
#            undef SWAP

    for (int p = 0; p < pairs; ++p) {
        // s[t-k] is k bytes back; from byte 0 on to byte 31, a bit higher
        const __m512i prev = _mm512_permutex2var_epi64(_mm512_add_epi8(s[p], s[p]), before, s[p]);
        const __m512i c1   = _mm512_ternarylogic_epi64(s[p], _mm512_alignr_epi8(s[p], prev, 15),
                                                       _mm512_alignr_epi8(s[p], prev, 10), 0x96);
        const __m512i c0   = _mm512_xor_si512(_mm512_alignr_epi8(s[p], prev, 14), _mm512_alignr_epi8(s[p], prev, 12));
        // even bits belong to m < 32
        const __m512i lo   = _mm512_ternarylogic_epi64(even, c0, _mm512_add_epi8(c1, c1), 0xCA);
        const __m512i hi   = _mm512_ternarylogic_epi64(even, _mm512_srli_epi16(c0, 1), c1, 0xCA);
        _mm512_storeu_si512(grids + 128 * p, _mm512_inserti64x4(lo, _mm512_castsi512_si256(hi), 1));
        _mm512_storeu_si512(grids + 128 * p + 64, _mm512_shuffle_i64x2(lo, hi, 0xEE));
    }
}

// Levels plus 64 of weights 64*word .. 64*word + 63 of a block, for word = 0 .. 3.
static inline void itq3_s_levels_4x64(const uint8_t * grids, const uint8_t * qs, __m512i levels[4]) {
    const __m512i table  = _mm512_broadcast_i32x4(itq3_s_unsigned_levels());
    const __m512i low    = _mm512_set1_epi8(0x0F);
    const __m512i fields = _mm512_set1_epi8(0x33);
    const __m512i q      = _mm512_loadu_si512(qs);
    const __m512i g      = _mm512_loadu_si512(grids);

    // indices 4*q + 2*c1 + c0, two in a byte
    const __m512i even = _mm512_ternarylogic_epi64(fields, g, _mm512_slli_epi16(q, 2), 0xCA);
    const __m512i odd  = _mm512_ternarylogic_epi64(fields, _mm512_srli_epi16(g, 2), q, 0xCA);

    levels[0] = _mm512_shuffle_epi8(table, _mm512_and_si512(even, low));
    levels[1] = _mm512_shuffle_epi8(table, _mm512_and_si512(odd, low));
    levels[2] = _mm512_shuffle_epi8(table, _mm512_and_si512(_mm512_srli_epi16(even, 4), low));
    levels[3] = _mm512_shuffle_epi8(table, _mm512_and_si512(_mm512_srli_epi16(odd, 4), low));
}

#        else

// A plane of bits, 32 bytes, of each of `pairs` pairs of blocks, out of n `stride` bytes apart, transposed.
// ITQ_COLUMN_BYTES bytes a block, best a line of the cache: byte 16 + m holds the bits of weights m, m+32, m+64, ...,
// m+224, and the 16 bytes before carry them on from m = 31 to m = 0, a bit higher.
#            define ITQ_COLUMN_BYTES 64
// The planes are in r0 and r1, a block in each half, 16 bytes of it in each register; `carried` are the bits that may go on.
ITQ_INLINE void itq_transpose_pairs(__m256i * r0, __m256i * r1, int pairs, int carried, uint8_t * columns) {
    const __m256i mask_1 = _mm256_set1_epi8(0x55);
    const __m256i mask_2 = _mm256_set1_epi8(0x33);
    const __m256i mask_4 = _mm256_set1_epi8(0x0F);

    // Bits change place between the registers, then the next bit of the byte number becomes the register.
#            define SWAP(SLL, shift, mask)                                                                \
                for (int p = 0; p < pairs; ++p) {                                                         \
                    const __m256i t =                                                                     \
                        _mm256_and_si256(_mm256_xor_si256(_mm256_srli_epi16(r0[p], shift), r1[p]), mask); \
                    r1[p] = _mm256_xor_si256(r1[p], t);                                                   \
                    r0[p] = _mm256_xor_si256(r0[p], SLL);                                                 \
                }                                                                                         \
                for (int p = 0; p < pairs; ++p) {                                                         \
                    const __m256i t = _mm256_unpacklo_epi8(r0[p], r1[p]);                                 \
                    r1[p]           = _mm256_unpackhi_epi8(r0[p], r1[p]);                                 \
                    r0[p]           = t;                                                                  \
                }
    SWAP(_mm256_slli_epi16(t, 4), 4, mask_4)
    SWAP(_mm256_slli_epi16(t, 2), 2, mask_2)
    SWAP(_mm256_add_epi8(t, t), 1, mask_1)
#            undef SWAP

    for (int p = 0; p < pairs; ++p) {
        __m256i carry = _mm256_add_epi8(r1[p], r1[p]);
        if (carried != 0xFF) {
            carry = _mm256_and_si256(carry, _mm256_set1_epi8((char) carried));
        }

        __m128i * a = (__m128i *) (columns + 2 * ITQ_COLUMN_BYTES * p);
        _mm_storeu_si128(a, _mm256_castsi256_si128(carry));
        _mm_storeu_si128(a + 1, _mm256_castsi256_si128(r0[p]));
        _mm_storeu_si128(a + 2, _mm256_castsi256_si128(r1[p]));

        __m128i * b = (__m128i *) (columns + ITQ_COLUMN_BYTES * (2 * p + 1));
        _mm_storeu_si128(b, _mm256_extracti128_si256(carry, 1));
        _mm_storeu_si128(b + 1, _mm256_extracti128_si256(r0[p], 1));
        _mm_storeu_si128(b + 2, _mm256_extracti128_si256(r1[p], 1));
    }
}

static inline void itq_transpose(const uint8_t * plane, size_t stride, int n, int pairs, uint8_t * columns) {
    __m256i r0[ITQ_DECODED_GROUP / 2];
    __m256i r1[ITQ_DECODED_GROUP / 2];
    for (int p = 0; p < pairs; ++p) {
        const uint8_t * a = plane + stride * (size_t) (2 * p < n ? 2 * p : n - 1);
        const uint8_t * b = plane + stride * (size_t) (2 * p + 1 < n ? 2 * p + 1 : n - 1);

        r0[p] = itq_load_2x128(a, b);
        r1[p] = itq_load_2x128(a + 16, b + 16);
    }
    itq_transpose_pairs(r0, r1, pairs, 0xFF, columns);
}

static inline __m256i itq_load_256(const uint8_t * p) {
    return _mm256_loadu_si256((const __m256i *) p);
}

// 2*c1 + c0, the two bits beside each other, from the transposed selectors of a block: of weights m + 64*i in bits 2*i of
// byte m of grids[0], of m + 32 + 64*i in grids[1].
static inline void itq_grids_of_columns(const uint8_t * columns, __m256i grids[2]) {
    // s[t-k] is k bytes back
    const uint8_t * s  = columns + 16;
    const __m256i   c1 = _mm256_xor_si256(_mm256_xor_si256(itq_load_256(s), itq_load_256(s - 1)), itq_load_256(s - 6));
    const __m256i   c0 = _mm256_xor_si256(itq_load_256(s - 2), itq_load_256(s - 4));
    const __m256i   t  = _mm256_and_si256(_mm256_xor_si256(_mm256_srli_epi16(c0, 1), c1), _mm256_set1_epi8(0x55));
    grids[0]           = _mm256_xor_si256(c0, _mm256_add_epi8(t, t));
    grids[1]           = _mm256_xor_si256(c1, t);
}

// Nibbles with the two bits of a grid below the two bits of the symbols in the same place: *even those of the lower
// fields of the nibbles of both, *odd those of the upper fields.
static inline void itq_merge(__m256i grids, __m256i symbols, __m256i * even, __m256i * odd) {
    const __m256i u = _mm256_and_si256(_mm256_xor_si256(_mm256_srli_epi16(grids, 2), symbols), _mm256_set1_epi8(0x33));
    *even           = _mm256_xor_si256(grids, _mm256_slli_epi16(u, 2));
    *odd            = _mm256_xor_si256(symbols, u);
}

// Indices 4*q + 2*c1 + c0, two in a byte: indices[m] of weights m and m+128, indices[64 + m] of m+64 and m+192.
static inline void itq3_s_indices(const uint8_t * columns, const uint8_t * qs, uint8_t * indices) {
    __m256i grids[2];
    itq_grids_of_columns(columns, grids);
    for (int h = 0; h < 2; ++h) {
        __m256i even, odd;
        itq_merge(grids[h], itq_load_256(qs + 32 * h), &even, &odd);
        _mm256_storeu_si256((__m256i *) (indices + 32 * h), even);
        _mm256_storeu_si256((__m256i *) (indices + 64 + 32 * h), odd);
    }
}

// The same with the transposed symbols of ITQ2_S: a nibble has those of a weight, m + ..., and of the one 32 behind it,
// the first of which grids[0] and the second of which grids[1] belongs to. indices[32*h + m] of weights m + 32*h and
// m + 128 + 32*h, indices[64 + 32*h + m] of those 64 further.
static inline void itq2_s_indices(const uint8_t * columns, const uint8_t * symbols, uint8_t * indices) {
    __m256i grids[2];
    itq_grids_of_columns(columns, grids);
    for (int h = 0; h < 2; ++h) {
        __m256i even, odd;
        itq_merge(grids[h], itq_load_256(symbols + 16), &even, &odd);
        _mm256_storeu_si256((__m256i *) (indices + 32 * h), even);
        _mm256_storeu_si256((__m256i *) (indices + 64 + 32 * h), odd);
    }
}

// Levels plus 64 of ITQ2_S by such a nibble: h picks one of the two symbols.
static inline __m128i itq2_s_table(int h) {
    static const int8_t levels[8] = ITQ2_S_LEVELS;
    const __m128i       at        = h == 0 ? _mm_setr_epi8(0, 1, 2, 3, 4, 5, 6, 7, 0, 1, 2, 3, 4, 5, 6, 7)
                                           : _mm_setr_epi8(0, 1, 2, 3, 0, 1, 2, 3, 4, 5, 6, 7, 4, 5, 6, 7);
    return _mm_shuffle_epi8(_mm_add_epi8(_mm_loadl_epi64((const __m128i *) levels), _mm_set1_epi8(64)), at);
}

// Levels plus 64 of the weights with the lower and the upper indices of 32 bytes.
static inline void itq_levels_2x32(__m128i levels, const uint8_t * indices, __m256i * lower, __m256i * upper) {
    const __m256i table = _mm256_broadcastsi128_si256(levels);
    const __m256i low   = _mm256_set1_epi8(0x0F);
    const __m256i i     = itq_load_256(indices);

    *lower = _mm256_shuffle_epi8(table, _mm256_and_si256(i, low));
    *upper = _mm256_shuffle_epi8(table, _mm256_and_si256(_mm256_srli_epi16(i, 4), low));
}

#        endif

#    endif

#endif  // __AVX2__

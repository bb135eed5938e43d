#pragma once

// From a block of a trellis type to its levels, AVX2 and AVX-512, for products with rows as a file has them.

#include "../../itq-rows.h"

#include "ggml-cpu-impl.h"
#include "simd-mappings.h"

#if defined(__AVX2__)

#    include <immintrin.h>
#    include <stddef.h>
#    include <string.h>

#    if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512DQ__)
#        define ITQ_AVX512
#    endif

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

static inline __m256 itq_halves_to_floats(__m128i halves) {
#    if defined(__F16C__)
    return _mm256_cvtph_ps(halves);
#    else
    ggml_half h[8];
    float     f[8];
    memcpy(h, &halves, sizeof(h));
    for (int i = 0; i < 8; ++i) {
        f[i] = GGML_CPU_FP16_TO_FP32(h[i]);
    }
    return _mm256_loadu_ps(f);
#    endif
}

#    if defined(ITQ_AVX512)

// The byte of selectors before the first: the lowest bits of the bytes of a state that is spread, side by side.
ITQ_INLINE uint8_t itq_byte_before(int state) {
    return (uint8_t) (itq_spread_state(state) * 0x0102040810204080 >> 56);
}

// Subsets of weights 64*word .. 64*word + 63 of a block, added to what index has of them above the lowest three bits, of which
// it has none.
#        if defined(__AVX512VBMI__)
// A byte per weight with the seven selectors that its subset depends on, s[t-6 .. t], s[t] in bit 6, comes from one
// multishift; a table of 128 entries turns it into the subset.
ITQ_INLINE __m512i itq_add_subsets(__m512i index, const uint8_t * sel, int state, const int word) {
#            define S1(w)                                                                                        \
                (4 * (((w) >> 6 ^ (w) >> 1 ^ (w)) & 1) + 2 * (((w) >> 5 ^ (w) >> 3 ^ (w) >> 2 ^ (w) >> 1) & 1) + \
                 (((w) >> 4 ^ (w) >> 2) & 1))
#            define S8(w) \
                S1(w), S1((w) + 1), S1((w) + 2), S1((w) + 3), S1((w) + 4), S1((w) + 5), S1((w) + 6), S1((w) + 7)
#            define S32(w) S8(w), S8((w) + 8), S8((w) + 16), S8((w) + 24)
    static const uint8_t subsets[128] = { S32(0), S32(32), S32(64), S32(96) };
#            undef S1
#            undef S8
#            undef S32
    // Weights 8j .. 8j+7 of a word depend on its bytes j-1 and j: these go to the low 16 bits of lane j, out of the 16 bytes
    // that begin one word earlier; a block has eight bytes or more before its selectors.
    const __m512i at      = _mm512_setr_epi64(0x0807, 0x0908, 0x0A09, 0x0B0A, 0x0C0B, 0x0D0C, 0x0E0D, 0x0F0E);
    const __m512i windows = _mm512_set1_epi64(0x0908070605040302);  // s[t-6] of weight 8j + i is bit 2 + i of lane j

    __m128i bytes = _mm_loadu_si128((const __m128i *) (sel - 8 + 8 * word));
    if (word == 0) {
        bytes = _mm_insert_epi8(bytes, itq_byte_before(state), 7);
    }
    const __m512i lanes  = _mm512_shuffle_epi8(_mm512_broadcast_i32x4(bytes), at);
    const __m512i states = _mm512_multishift_epi64_epi8(windows, lanes);
    const __m512i found =
        _mm512_permutex2var_epi8(_mm512_loadu_si512(subsets), states, _mm512_loadu_si512(subsets + 64));
    return _mm512_or_si512(index, found);
}
#        else
// Planes of bits, which are masks.
ITQ_INLINE __m512i itq_add_subsets(__m512i index, const uint8_t * sel, int state, const int word) {
    uint64_t s, c2, c1, c0;
    memcpy(&s, sel + 8 * word, sizeof(s));
    itq_subsets_of_word(s, word > 0 ? sel[8 * word - 1] : itq_byte_before(state), &c2, &c1, &c0);
    index = _mm512_mask_add_epi8(index, c2, index, _mm512_set1_epi8(4));
    index = _mm512_mask_add_epi8(index, c1, index, _mm512_set1_epi8(2));
    return _mm512_mask_add_epi8(index, c0, index, _mm512_set1_epi8(1));
}
#        endif

// Levels plus 64 of weights 64*word .. 64*word + 63 of a block of `length`. What symbols have in the
// order of the selectors are planes of bits, which are masks.
ITQ_INLINE __m512i itq_levels_64(const int bits, const int length, const int8_t * levels, const uint8_t * qs,
                                 const uint8_t * sel, int state, const int word) {
    uint64_t plane;
    __m512i  index;
    if (bits == 1) {
        memcpy(&plane, qs + 8 * word, sizeof(plane));
        index = _mm512_maskz_mov_epi8(plane, _mm512_set1_epi8(8));
    } else {
        __m512i q;  // each symbol in the two bits above the lowest three
        if (length == 64) {
            q = _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *) qs));  // a quarter of them in each quarter
            q = _mm512_slli_epi16(_mm512_srlv_epi64(q, _mm512_setr_epi64(0, 0, 2, 2, 4, 4, 6, 6)), 3);
        } else {
            q = _mm512_loadu_si512(qs);
            q = word < 2 ? _mm512_slli_epi16(q, 3 - 2 * word) : _mm512_srli_epi16(q, 2 * word - 3);
        }
        index = _mm512_and_si512(q, _mm512_set1_epi8(0x18));
    }
    index = itq_add_subsets(index, sel, state, word);
    if (bits == 3) {
        memcpy(&plane, qs + length / 4 + 8 * word, sizeof(plane));
        index = _mm512_mask_add_epi8(index, plane, index, _mm512_set1_epi8(32));
    }

    const __m512i all =
        _mm512_add_epi8(_mm512_maskz_loadu_epi8(~0ull >> (64 - (8 << bits)), levels), _mm512_set1_epi8(64));
#        if defined(__AVX512VBMI__)
    return _mm512_permutexvar_epi8(index, all);
#        else
    __m512i result = _mm512_shuffle_epi8(_mm512_shuffle_i32x4(all, all, 0x00), index);
    if (bits > 1) {
        const __mmask64 second = _mm512_test_epi8_mask(index, _mm512_set1_epi8(16));
        if (bits == 2) {
            return _mm512_mask_shuffle_epi8(result, second, _mm512_shuffle_i32x4(all, all, 0x55), index);
        }
        const __mmask64 upper = _mm512_test_epi8_mask(index, _mm512_set1_epi8(32));
        result = _mm512_mask_shuffle_epi8(result, second & ~upper, _mm512_shuffle_i32x4(all, all, 0x55), index);
        result = _mm512_mask_shuffle_epi8(result, upper & ~second, _mm512_shuffle_i32x4(all, all, 0xAA), index);
        result = _mm512_mask_shuffle_epi8(result, upper & second, _mm512_shuffle_i32x4(all, all, 0xFF), index);
    }
    return result;
#        endif
}

#    else

// Blocks decoded at a time. The steps depend on each other; those of several blocks run side by side.
#        define ITQ_DECODED_GROUP 8

// A plane of bits, 32 bytes, of each of `pairs` pairs of blocks transposed. ITQ_COLUMN_BYTES bytes a block, best a line of
// the cache: byte 16 + m holds the bits of weights m, m+32, m+64, ..., m+224, and the 16 bytes before carry them on from
// m = 31 to m = 0, a bit higher, with the start states, bytes 8 .. 15 of states[block].
#        define ITQ_COLUMN_BYTES  64
// The planes are in r0 and r1, a block in each half, 16 bytes of it in each register; `carried` are the bits that may go on.
ITQ_INLINE void itq_transpose_pairs(__m256i * r0, __m256i * r1, int pairs, int carried, const uint64_t * states,
                                    uint8_t * columns) {
    const __m256i mask_1 = _mm256_set1_epi8(0x55);
    const __m256i mask_2 = _mm256_set1_epi8(0x33);
    const __m256i mask_4 = _mm256_set1_epi8(0x0F);

    // Bits change place between the registers, then the next bit of the byte number becomes the register.
#        define SWAP(SLL, shift, mask)                                                                              \
            for (int p = 0; p < pairs; ++p) {                                                                       \
                const __m256i t = _mm256_and_si256(_mm256_xor_si256(_mm256_srli_epi16(r0[p], shift), r1[p]), mask); \
                r1[p]           = _mm256_xor_si256(r1[p], t);                                                       \
                r0[p]           = _mm256_xor_si256(r0[p], SLL);                                                     \
            }                                                                                                       \
            for (int p = 0; p < pairs; ++p) {                                                                       \
                const __m256i t = _mm256_unpacklo_epi8(r0[p], r1[p]);                                               \
                r1[p]           = _mm256_unpackhi_epi8(r0[p], r1[p]);                                               \
                r0[p]           = t;                                                                                \
            }
    SWAP(_mm256_slli_epi16(t, 4), 4, mask_4)
    SWAP(_mm256_slli_epi16(t, 2), 2, mask_2)
    SWAP(_mm256_add_epi8(t, t), 1, mask_1)
#        undef SWAP

    for (int p = 0; p < pairs; ++p) {
        const __m256i last  = _mm256_setr_epi64x(0, (int64_t) states[2 * p], 0, (int64_t) states[2 * p + 1]);
        __m256i       carry = _mm256_add_epi8(r1[p], r1[p]);
        if (carried != 0xFF) {
            carry = _mm256_and_si256(carry, _mm256_set1_epi8((char) carried));
        }
        carry = _mm256_or_si256(carry, last);

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

// Planes of n blocks `stride` bytes apart; `last` is where the first has its start state, NULL if the planes have none.
ITQ_INLINE void itq_transpose(const uint8_t * plane, const uint8_t * last, size_t stride, int n, int pairs,
                              uint8_t * columns) {
    __m256i  r0[ITQ_DECODED_GROUP / 2];
    __m256i  r1[ITQ_DECODED_GROUP / 2];
    uint64_t states[ITQ_DECODED_GROUP];
    for (int p = 0; p < pairs; ++p) {
        const size_t a = stride * (size_t) (2 * p < n ? 2 * p : n - 1);
        const size_t b = stride * (size_t) (2 * p + 1 < n ? 2 * p + 1 : n - 1);

        r0[p]             = itq_load_2x128(plane + a, plane + b);
        r1[p]             = itq_load_2x128(plane + a + 16, plane + b + 16);
        states[2 * p]     = last ? itq_spread_state(itq_start_state(last + a)) : 0;
        states[2 * p + 1] = last ? itq_spread_state(itq_start_state(last + b)) : 0;
    }
    itq_transpose_pairs(r0, r1, pairs, 0xFF, states, columns);
}

static inline __m256i itq_load_256(const uint8_t * p) {
    return _mm256_loadu_si256((const __m256i *) p);
}

// Indices of a block by nibbles, two in a byte: at[m] of weights m and m + 128, at[64 + m] of m + 64 and m + 192, m < 64. From
// bit 0 on a nibble has c0 c1 q0 q1; of one symbol bit it has two symbols, that of weight m and of the one 32 further, the
// first of which is that of weights with m % 64 < 32, the second that of the others. c2 and q2 are planes: bit g of byte m of
// weight m + 32*g. Where q2 is set, all others are inverted.
typedef struct {
    _Alignas(32) uint8_t at[QK_ITQ / 2];
    __m256i c2;
    __m256i q2;
} itq_indices;

// From the transposed selectors and from symbols as a block of 256 has them; those of one bit, and third bits, transposed.
ITQ_INLINE void itq_make_indices(const int bits, const uint8_t * columns, const uint8_t * qs, const uint8_t * third,
                                 itq_indices * to) {
    // s[t-k] is k bytes back
    const uint8_t * s  = columns + 16;
    const __m256i   s4 = itq_load_256(s - 4), s5 = itq_load_256(s - 5);
    const __m256i   c1 =
        _mm256_xor_si256(_mm256_xor_si256(itq_load_256(s - 1), itq_load_256(s - 3)), _mm256_xor_si256(s4, s5));
    const __m256i c0         = _mm256_xor_si256(itq_load_256(s - 2), s4);
    const __m256i t          = _mm256_and_si256(_mm256_xor_si256(_mm256_srli_epi16(c0, 1), c1), _mm256_set1_epi8(0x55));
    // c0 and c1 beside each other, of the even and of the odd g
    __m256i       subsets[2] = { _mm256_xor_si256(c0, _mm256_add_epi8(t, t)), _mm256_xor_si256(c1, t) };
    to->c2                   = _mm256_xor_si256(_mm256_xor_si256(itq_load_256(s), itq_load_256(s - 6)), s5);
    if (bits == 3) {
        to->q2 = itq_load_256(third + 16);
        to->c2 = _mm256_xor_si256(to->c2, to->q2);
    }
    for (int h = 0; h < 2; ++h) {
        __m256i q = bits == 1 ? itq_load_256(qs + 16) : itq_load_256(qs + 32 * h);
        if (bits == 3) {  // bit 2*f + h to both bits of field f
            const __m256i one =
                _mm256_and_si256(h == 0 ? to->q2 : _mm256_srli_epi16(to->q2, 1), _mm256_set1_epi8(0x55));
            const __m256i both = _mm256_or_si256(one, _mm256_add_epi8(one, one));
            subsets[h]         = _mm256_xor_si256(subsets[h], both);
            q                  = _mm256_xor_si256(q, both);
        }
        const __m256i u =
            _mm256_and_si256(_mm256_xor_si256(_mm256_srli_epi16(subsets[h], 2), q), _mm256_set1_epi8(0x33));
        _mm256_store_si256((__m256i *) (to->at + 32 * h), _mm256_xor_si256(subsets[h], _mm256_slli_epi16(u, 2)));
        _mm256_store_si256((__m256i *) (to->at + 64 + 32 * h), _mm256_xor_si256(q, u));
    }
}

// Levels by a nibble with the symbols of weight m % 64 < 32 (h = 0) or of the others, of one c2; plus 64, but of symbols of
// three bits, where they are those whose q2 is not set.
ITQ_INLINE __m256i itq_nibble_levels(const int bits, const int8_t * levels, const int h, const int c2) {
    const __m128i a = _mm_loadu_si128((const __m128i *) levels);
    __m128i       table;  // four levels of each symbol
    if (bits == 1) {
        table = h == 0 ? (c2 ? _mm_shuffle_epi32(a, 0xDD) : _mm_shuffle_epi32(a, 0x88))
                       : (c2 ? _mm_shuffle_epi32(a, 0xF5) : _mm_shuffle_epi32(a, 0xA0));
    } else {
        const __m128 b = _mm_castsi128_ps(_mm_loadu_si128((const __m128i *) levels + 1));
        const __m128 f = _mm_castsi128_ps(a);
        table          = _mm_castps_si128(c2 ? _mm_shuffle_ps(f, b, 0xDD) : _mm_shuffle_ps(f, b, 0x88));
    }
    return _mm256_broadcastsi128_si256(bits == 3 ? table : _mm_add_epi8(table, _mm_set1_epi8(64)));
}

// Levels plus 64 of 32 weights by their indices: g says which bit of c2 and q2.
ITQ_INLINE __m256i itq_look_up(const int bits, const int8_t * levels, const itq_indices * from, __m256i nibbles,
                               const int g) {
    const __m256i c2    = _mm256_slli_epi16(from->c2, 7 - g);
    const int     h     = g % 2;
    const __m256i found = _mm256_blendv_epi8(_mm256_shuffle_epi8(itq_nibble_levels(bits, levels, h, 0), nibbles),
                                             _mm256_shuffle_epi8(itq_nibble_levels(bits, levels, h, 1), nibbles), c2);
    if (bits < 3) {
        return found;
    }
    const __m256i q2 = _mm256_or_si256(_mm256_slli_epi16(from->q2, 7 - g), _mm256_set1_epi8(1));  // never 0
    return _mm256_add_epi8(_mm256_sign_epi8(found, q2), _mm256_set1_epi8(64));
}

// Of weights m .. m + 31 and m + 128 .. m + 159 of a block, m = 0, 32, 64, 96.
ITQ_INLINE void itq_levels_2x32(const int bits, const int8_t * levels, const itq_indices * from, const int m,
                                __m256i * lower, __m256i * upper) {
    const __m256i low = _mm256_set1_epi8(0x0F);
    const __m256i i   = itq_load_256(from->at + m);

    *lower = itq_look_up(bits, levels, from, _mm256_and_si256(i, low), m / 32);
    *upper = itq_look_up(bits, levels, from, _mm256_and_si256(_mm256_srli_epi16(i, 4), low), m / 32 + 4);
}

#    endif

#endif  // __AVX2__

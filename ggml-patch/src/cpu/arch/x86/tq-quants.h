#pragma once

// TQ1_0 and TQ2_0 with AVX-512 VNNI.

#ifndef GGML_COMMON_DECL
#    ifdef __cplusplus
#        define GGML_COMMON_DECL_CPP
#    else
#        define GGML_COMMON_DECL_C
#    endif
#    include "ggml-common.h"
#endif

#include "ggml.h"

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512DQ__) && \
    defined(__AVX512VNNI__)
#    define GGML_TQ_AVX512

#    include <immintrin.h>
#    include <string.h>

#    ifdef __cplusplus
extern "C" {
#    endif

void ggml_vec_dot_tq1_0_q8_K_avx512(int n, float * GGML_RESTRICT s, const void * GGML_RESTRICT vx,
                                    const void * GGML_RESTRICT vy);
void ggml_vec_dot_tq2_0_q8_K_avx512(int n, float * GGML_RESTRICT s, const void * GGML_RESTRICT vx,
                                    const void * GGML_RESTRICT vy);

#    ifdef __cplusplus
}
#    endif

// Trits plus one of the 128 weights in 32 bytes of TQ2_0, in the order of the weights.
static inline void tq2_0_trits_128(const uint8_t * qs, __m512i * lo, __m512i * hi) {
    const __m512i three = _mm512_set1_epi8(3);
    const __m512i low   = _mm512_setr_epi64(0, 0, 0, 0, 2, 2, 2, 2);
    const __m512i high  = _mm512_setr_epi64(4, 4, 4, 4, 6, 6, 6, 6);
    const __m512i q     = _mm512_broadcast_i64x4(_mm256_loadu_si256((const __m256i *) qs));

    *lo = _mm512_and_si512(_mm512_srlv_epi64(q, low), three);
    *hi = _mm512_and_si512(_mm512_srlv_epi64(q, high), three);
}

// One step of the fixed-point expansion for every byte b of `even` and `odd` (b << 8 in 16 bits): power is 3^l, so the
// product's upper byte is b * 3^l modulo 256, and the upper byte of three times that is trit l plus one.
static inline __m512i tq1_0_trits_64(__m512i even, __m512i odd, __m512i power) {
    const __m512i e = _mm512_mulhi_epu16(_mm512_mullo_epi16(even, power), _mm512_set1_epi16(3));
    const __m512i o = _mm512_mulhi_epu16(_mm512_mullo_epi16(odd, power), _mm512_set1_epi16(3 * 256));
    return _mm512_ternarylogic_epi64(_mm512_set1_epi16((short) 0xFF00), o, e, 0xCA);
}

// Trits plus one of a block of TQ1_0, in the order of the weights: 32 bytes hold five trits each at steps of 32, 16
// bytes five at steps of 16, 4 bytes four at steps of 4.
static inline void tq1_0_trits(const block_tq1_0 * x, __m512i trits[4]) {
#    define P(l)           (short) ((l) == 0 ? 1 : (l) == 1 ? 3 : (l) == 2 ? 9 : (l) == 3 ? 27 : 81)
#    define P2(a, b)       _mm256_setr_m128i(_mm_set1_epi16(P(a)), _mm_set1_epi16(P(b)))
#    define P4(a, b, c, d) _mm512_inserti64x4(_mm512_castsi256_si512(P2(a, b)), P2(c, d), 1)
    const __m512i high = _mm512_set1_epi16((short) 0xFF00);

    int32_t last;
    memcpy(&last, x->qh, sizeof(last));
    const __m512i a  = _mm512_broadcast_i64x4(_mm256_loadu_si256((const __m256i *) x->qs));
    const __m128i b  = _mm_loadu_si128((const __m128i *) (x->qs + 32));
    const __m512i bb = _mm512_broadcast_i32x4(b);
    const __m512i ab = _mm512_mask_blend_epi64(0xF0, a, bb);
    const __m512i bh = _mm512_inserti32x4(bb, _mm_set1_epi32(last), 3);

    // four bytes with the same power, two of them even
    const __m512i last_powers =
        _mm512_inserti32x4(P4(2, 3, 4, 0), _mm_setr_epi16(P(0), P(0), P(1), P(1), P(2), P(2), P(3), P(3)), 3);

    const __m512i a_even = _mm512_slli_epi16(a, 8);
    const __m512i a_odd  = _mm512_and_si512(a, high);
    trits[0]             = tq1_0_trits_64(a_even, a_odd, P4(0, 0, 1, 1));
    trits[1]             = tq1_0_trits_64(a_even, a_odd, P4(2, 2, 3, 3));
    trits[2]             = tq1_0_trits_64(_mm512_slli_epi16(ab, 8), _mm512_and_si512(ab, high), P4(4, 4, 0, 1));
    trits[3]             = tq1_0_trits_64(_mm512_slli_epi16(bh, 8), _mm512_and_si512(bh, high), last_powers);
#    undef P
#    undef P2
#    undef P4
}

#endif  // AVX-512 VNNI

#pragma once

// From the integer sums of blocks to the dot product, in the order of the tiled product (itq3s-tiled.cpp): the sum times
// the scale of the weights, less what the zero-point takes, times the scale of the activations, added up block by block.
// So a row has the same bits whatever the number of columns. Included after simd-mappings.h.

#if defined(__AVX2__)

#    include <immintrin.h>
#    include <stdint.h>
#    include <string.h>

#    define ITQ3_S_SUM_BLOCKS 4  // at a time

// Sums of the 8 or 16 numbers of each of four registers.
static inline __m128i itq3_s_sum_4x8(const __m256i a[ITQ3_S_SUM_BLOCKS]) {
    const __m256i s = _mm256_hadd_epi32(_mm256_hadd_epi32(a[0], a[1]), _mm256_hadd_epi32(a[2], a[3]));
    return _mm_add_epi32(_mm256_castsi256_si128(s), _mm256_extracti128_si256(s, 1));
}

#    if defined(__AVX512F__) && defined(__AVX512BW__)
static inline __m128i itq3_s_sum_4x16(const __m512i a[ITQ3_S_SUM_BLOCKS]) {
    const __m512i s = _mm512_add_epi32(_mm512_unpacklo_epi32(a[0], a[1]), _mm512_unpackhi_epi32(a[0], a[1]));
    const __m512i t = _mm512_add_epi32(_mm512_unpacklo_epi32(a[2], a[3]), _mm512_unpackhi_epi32(a[2], a[3]));
    const __m512i u = _mm512_add_epi32(_mm512_unpacklo_epi64(s, t), _mm512_unpackhi_epi64(s, t));
    const __m256i v = _mm256_add_epi32(_mm512_castsi512_si256(u), _mm512_extracti64x4_epi64(u, 1));
    return _mm_add_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
}
#    endif

// What is known of up to four blocks; what is missing is zero.
struct itq3_s_block_scales {
    __m128 d0;    // of the weights
    __m128 dmin;  // d0 times the zero-point
    __m128 sum;   // of the activations, where dmin is not zero
    __m128 d1;    // of the activations
};

static inline __m128 itq3_s_add_blocks(__m128 sum, __m128i products, const struct itq3_s_block_scales * s,
                                       int has_min) {
    const __m128 d1 = s->d1;
    __m128       v  = _mm_mul_ps(_mm_cvtepi32_ps(products), s->d0);
#    if defined(__FMA__)
    if (has_min) {
        v = _mm_fnmadd_ps(s->dmin, s->sum, v);
    }
    sum = _mm_fmadd_ss(v, d1, sum);
    sum = _mm_fmadd_ss(_mm_movehdup_ps(v), _mm_movehdup_ps(d1), sum);
    sum = _mm_fmadd_ss(_mm_movehl_ps(v, v), _mm_movehl_ps(d1, d1), sum);
    return _mm_fmadd_ss(_mm_shuffle_ps(v, v, 0xFF), _mm_shuffle_ps(d1, d1, 0xFF), sum);
#    else
    if (has_min) {
        v = _mm_sub_ps(v, _mm_mul_ps(s->dmin, s->sum));
    }
    v   = _mm_mul_ps(v, d1);
    sum = _mm_add_ss(sum, v);
    sum = _mm_add_ss(sum, _mm_movehdup_ps(v));
    sum = _mm_add_ss(sum, _mm_movehl_ps(v, v));
    return _mm_add_ss(sum, _mm_shuffle_ps(v, v, 0xFF));
#    endif
}

// Four FP16 numbers.
static inline __m128 itq3_s_load_scales(const uint16_t * a, const uint16_t * b, const uint16_t * c,
                                        const uint16_t * d) {
#    if defined(__F16C__)
    __m128i h = _mm_cvtsi32_si128(*a);
    h         = _mm_insert_epi16(h, *b, 1);
    h         = _mm_insert_epi16(h, *c, 2);
    return _mm_cvtph_ps(_mm_insert_epi16(h, *d, 3));
#    else
    return _mm_setr_ps(GGML_CPU_FP16_TO_FP32(*a), GGML_CPU_FP16_TO_FP32(*b), GGML_CPU_FP16_TO_FP32(*c),
                       GGML_CPU_FP16_TO_FP32(*d));
#    endif
}

// d0 and d1 of the first n > 0 of four blocks x of weights and y of activations.
#    define ITQ3_S_LOAD_SCALES(x, y, n, scales)                                                                    \
        do {                                                                                                       \
            static const uint16_t none = 0;                                                                        \
            (scales)->d0 = itq3_s_load_scales(&(x)[0].d, (n) > 1 ? &(x)[1].d : &none, (n) > 2 ? &(x)[2].d : &none, \
                                              (n) > 3 ? &(x)[3].d : &none);                                        \
            (scales)->d1 = _mm_setr_ps((y)[0].d, (n) > 1 ? (y)[1].d : 0.0f, (n) > 2 ? (y)[2].d : 0.0f,             \
                                       (n) > 3 ? (y)[3].d : 0.0f);                                                 \
        } while (0)

#endif  // __AVX2__

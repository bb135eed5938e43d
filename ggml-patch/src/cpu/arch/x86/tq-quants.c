// Dot products of TQ1_0 and TQ2_0 with AVX-512 VNNI, beside upstream's AVX2 (0004-cpu-arch-tq.patch branches to them).

#include "tq-quants.h"

#if defined(GGML_TQ_AVX512)

#    include "ggml-cpu-impl.h"
#    include "simd-mappings.h"

#    include <assert.h>
#    include <string.h>

// Minus the sum of the activations: trits are stored plus one.
static inline __m512i dot_start(const block_q8_K * y) {
    const __m256i sums = _mm256_loadu_si256((const __m256i *) y->bsums);
    return _mm512_zextsi256_si512(_mm256_madd_epi16(sums, _mm256_set1_epi16(-1)));
}

void ggml_vec_dot_tq2_0_q8_K_avx512(int n, float * GGML_RESTRICT s, const void * GGML_RESTRICT vx,
                                    const void * GGML_RESTRICT vy) {
    assert(n % QK_K == 0);
    const block_tq2_0 * GGML_RESTRICT x  = vx;
    const block_q8_K * GGML_RESTRICT  y  = vy;
    const int                         nb = n / QK_K;

    __m512 sum = _mm512_setzero_ps();
    for (int i = 0; i < nb; ++i) {
        __m512i acc0 = dot_start(&y[i]);
        __m512i acc1 = _mm512_setzero_si512();
        for (int j = 0; j < 2; ++j) {
            __m512i lo, hi;
            tq2_0_trits_128(x[i].qs + 32 * j, &lo, &hi);
            acc0 = _mm512_dpbusd_epi32(acc0, lo, _mm512_loadu_si512(y[i].qs + 128 * j));
            acc1 = _mm512_dpbusd_epi32(acc1, hi, _mm512_loadu_si512(y[i].qs + 128 * j + 64));
        }
        const float d = GGML_CPU_FP16_TO_FP32(x[i].d) * y[i].d;
        sum           = _mm512_fmadd_ps(_mm512_set1_ps(d), _mm512_cvtepi32_ps(_mm512_add_epi32(acc0, acc1)), sum);
    }
    *s = _mm512_reduce_add_ps(sum);
}

void ggml_vec_dot_tq1_0_q8_K_avx512(int n, float * GGML_RESTRICT s, const void * GGML_RESTRICT vx,
                                    const void * GGML_RESTRICT vy) {
    assert(n % QK_K == 0);
    const block_tq1_0 * GGML_RESTRICT x  = vx;
    const block_q8_K * GGML_RESTRICT  y  = vy;
    const int                         nb = n / QK_K;

    __m512 sum = _mm512_setzero_ps();
    for (int i = 0; i < nb; ++i) {
        __m512i trits[4];
        tq1_0_trits(&x[i], trits);

        __m512i acc0 = dot_start(&y[i]);
        __m512i acc1 = _mm512_setzero_si512();
        acc0         = _mm512_dpbusd_epi32(acc0, trits[0], _mm512_loadu_si512(y[i].qs));
        acc1         = _mm512_dpbusd_epi32(acc1, trits[1], _mm512_loadu_si512(y[i].qs + 64));
        acc0         = _mm512_dpbusd_epi32(acc0, trits[2], _mm512_loadu_si512(y[i].qs + 128));
        acc1         = _mm512_dpbusd_epi32(acc1, trits[3], _mm512_loadu_si512(y[i].qs + 192));

        const float d = GGML_CPU_FP16_TO_FP32(x[i].d) * y[i].d;
        sum           = _mm512_fmadd_ps(_mm512_set1_ps(d), _mm512_cvtepi32_ps(_mm512_add_epi32(acc0, acc1)), sum);
    }
    *s = _mm512_reduce_add_ps(sum);
}

#endif

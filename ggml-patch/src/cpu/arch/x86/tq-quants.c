// Dot products of TQ1_0 and TQ2_0 with AVX-512 VNNI, in the place of upstream's AVX2 (0004-cpu-arch-tq.patch), and, with
// AVX2 too, in the order of the tiled product (itq3s-sum.h), where that is asked for.

#include "tq-quants.h"

#if defined(GGML_TQ_X86)

#    include "ggml-cpu-impl.h"
#    include "simd-mappings.h"

#    include "../../itq3s-quants.h"
#    include "itq3s-sum.h"

#    include <assert.h>
#    include <string.h>

#    if defined(GGML_TQ_AVX512)

typedef __m512i acc_t;

static inline __m128i sums(const acc_t * acc) {
    return itq3_s_sum_4x16(acc);
}
static inline acc_t acc_zero(void) {
    return _mm512_setzero_si512();
}

// Minus the sum of the activations: trits are stored plus one.
static inline __m512i dot_start(const block_q8_K * y) {
    const __m256i sums = _mm256_loadu_si256((const __m256i *) y->bsums);
    return _mm512_zextsi256_si512(_mm256_madd_epi16(sums, _mm256_set1_epi16(-1)));
}

static inline acc_t tq2_0_product(const block_tq2_0 * x, const block_q8_K * y) {
    __m512i acc0 = dot_start(y);
    __m512i acc1 = _mm512_setzero_si512();
    for (int j = 0; j < 2; ++j) {
        __m512i lo, hi;
        tq2_0_trits_128(x->qs + 32 * j, &lo, &hi);
        acc0 = _mm512_dpbusd_epi32(acc0, lo, _mm512_loadu_si512(y->qs + 128 * j));
        acc1 = _mm512_dpbusd_epi32(acc1, hi, _mm512_loadu_si512(y->qs + 128 * j + 64));
    }
    return _mm512_add_epi32(acc0, acc1);
}

static inline acc_t tq1_0_product(const block_tq1_0 * x, const block_q8_K * y) {
    __m512i trits[4];
    tq1_0_trits(x, trits);

    __m512i acc0 = dot_start(y);
    __m512i acc1 = _mm512_setzero_si512();
    acc0         = _mm512_dpbusd_epi32(acc0, trits[0], _mm512_loadu_si512(y->qs));
    acc1         = _mm512_dpbusd_epi32(acc1, trits[1], _mm512_loadu_si512(y->qs + 64));
    acc0         = _mm512_dpbusd_epi32(acc0, trits[2], _mm512_loadu_si512(y->qs + 128));
    acc1         = _mm512_dpbusd_epi32(acc1, trits[3], _mm512_loadu_si512(y->qs + 192));
    return _mm512_add_epi32(acc0, acc1);
}

#    else  // AVX2

typedef __m256i acc_t;

static inline __m128i sums(const acc_t * acc) {
    return itq3_s_sum_4x8(acc);
}
static inline acc_t acc_zero(void) {
    return _mm256_setzero_si256();
}

// Products of trits plus one in 16 bits, of which 64 can be added up: 64 * 2 * 2 * 127 < 2^15.
static inline __m256i add_trits(__m256i acc, __m256i trits, const int8_t * y) {
    return _mm256_add_epi16(acc, _mm256_maddubs_epi16(trits, _mm256_loadu_si256((const __m256i *) y)));
}

// Less the sum of the activations: trits are stored plus one.
static inline acc_t finish(__m256i acc, const block_q8_K * y) {
    const __m256i bsums = _mm256_loadu_si256((const __m256i *) y->bsums);
    return _mm256_sub_epi32(_mm256_madd_epi16(acc, _mm256_set1_epi16(1)),
                            _mm256_madd_epi16(bsums, _mm256_set1_epi16(1)));
}

static inline acc_t tq2_0_product(const block_tq2_0 * x, const block_q8_K * y) {
    const __m256i three = _mm256_set1_epi8(3);
    __m256i       acc0  = _mm256_setzero_si256();
    __m256i       acc1  = _mm256_setzero_si256();
    for (int j = 0; j < 2; ++j) {
        const __m256i  q = _mm256_loadu_si256((const __m256i *) (x->qs + 32 * j));
        const int8_t * u = y->qs + 128 * j;
        acc0             = add_trits(acc0, _mm256_and_si256(q, three), u);
        acc1             = add_trits(acc1, _mm256_and_si256(_mm256_srli_epi16(q, 2), three), u + 32);
        acc0             = add_trits(acc0, _mm256_and_si256(_mm256_srli_epi16(q, 4), three), u + 64);
        acc1             = add_trits(acc1, _mm256_and_si256(_mm256_srli_epi16(q, 6), three), u + 96);
    }
    return finish(_mm256_add_epi16(acc0, acc1), y);
}

// As tq1_0_trits_64: bytes times a power of three in 16 bits, three times the upper byte of which has the trit above.
static inline __m256i trits_32(__m256i even, __m256i odd, __m256i power) {
    const __m256i e = _mm256_mulhi_epu16(_mm256_mullo_epi16(even, power), _mm256_set1_epi16(3));
    const __m256i o = _mm256_mulhi_epu16(_mm256_mullo_epi16(odd, power), _mm256_set1_epi16(3 * 256));
    return _mm256_or_si256(e, _mm256_and_si256(o, _mm256_set1_epi16((short) 0xFF00)));
}

static inline acc_t tq1_0_product(const block_tq1_0 * x, const block_q8_K * y) {
    static const short powers[5] = { 1, 3, 9, 27, 81 };
    const __m256i      high      = _mm256_set1_epi16((short) 0xFF00);

    int32_t last;
    memcpy(&last, x->qh, sizeof(last));
    const __m256i a      = _mm256_loadu_si256((const __m256i *) x->qs);
    const __m128i b      = _mm_loadu_si128((const __m128i *) (x->qs + 32));
    const __m256i bb     = _mm256_setr_m128i(b, b);
    const __m256i bh     = _mm256_setr_m128i(b, _mm_set1_epi32(last));
    const __m256i a_even = _mm256_slli_epi16(a, 8), a_odd = _mm256_and_si256(a, high);
    const __m256i b_even = _mm256_slli_epi16(bb, 8), b_odd = _mm256_and_si256(bb, high);

    __m256i acc0 = _mm256_setzero_si256();
    __m256i acc1 = _mm256_setzero_si256();
    for (int l = 0; l < 4; l += 2) {
        acc0 = add_trits(acc0, trits_32(a_even, a_odd, _mm256_set1_epi16(powers[l])), y->qs + 32 * l);
        acc1 = add_trits(acc1, trits_32(a_even, a_odd, _mm256_set1_epi16(powers[l + 1])), y->qs + 32 * l + 32);

        const __m256i pair = _mm256_setr_m128i(_mm_set1_epi16(powers[l]), _mm_set1_epi16(powers[l + 1]));
        acc0               = add_trits(acc0, trits_32(b_even, b_odd, pair), y->qs + 160 + 16 * l);
    }
    // four bytes with the same power, two of them even
    const __m256i ends = _mm256_setr_m128i(_mm_set1_epi16(81), _mm_setr_epi16(1, 1, 3, 3, 9, 9, 27, 27));
    acc1               = add_trits(acc1, trits_32(a_even, a_odd, _mm256_set1_epi16(81)), y->qs + 128);
    acc0 = add_trits(acc0, trits_32(_mm256_slli_epi16(bh, 8), _mm256_and_si256(bh, high), ends), y->qs + 224);
    return finish(_mm256_add_epi16(acc0, acc1), y);
}

#    endif  // AVX2

typedef float tq_dot_t(const void * x, const block_q8_K * y, int nb);

#    define TQ_DOT_ORDERED(name, block_t, product)                         \
        static float name(const void * vx, const block_q8_K * y, int nb) { \
            const block_t * x   = (const block_t *) vx;                    \
            __m128          sum = _mm_setzero_ps();                        \
            for (; nb > 0; nb -= ITQ3_S_SUM_BLOCKS) {                      \
                struct itq3_s_block_scales scales;                         \
                acc_t                      acc[ITQ3_S_SUM_BLOCKS];         \
                ITQ3_S_LOAD_SCALES(x, y, nb, &scales);                     \
                for (int b = 0; b < ITQ3_S_SUM_BLOCKS; ++b) {              \
                    acc[b] = b < nb ? product(&x[b], &y[b]) : acc_zero();  \
                }                                                          \
                sum = itq3_s_add_blocks(sum, sums(acc), &scales, 0);       \
                x += ITQ3_S_SUM_BLOCKS;                                    \
                y += ITQ3_S_SUM_BLOCKS;                                    \
            }                                                              \
            return _mm_cvtss_f32(sum);                                     \
        }

TQ_DOT_ORDERED(tq2_0_dot_ordered, block_tq2_0, tq2_0_product)
TQ_DOT_ORDERED(tq1_0_dot_ordered, block_tq1_0, tq1_0_product)

#    if defined(GGML_TQ_AVX512)
#        define TQ_DOT(name, block_t, product)                                                                          \
            static float name(const void * vx, const block_q8_K * y, int nb) {                                          \
                const block_t * x   = (const block_t *) vx;                                                             \
                __m512          sum = _mm512_setzero_ps();                                                              \
                for (int i = 0; i < nb; ++i) {                                                                          \
                    const float d = GGML_CPU_FP16_TO_FP32(x[i].d) * y[i].d;                                             \
                    sum           = _mm512_fmadd_ps(_mm512_set1_ps(d), _mm512_cvtepi32_ps(product(&x[i], &y[i])), sum); \
                }                                                                                                       \
                return _mm512_reduce_add_ps(sum);                                                                       \
            }

TQ_DOT(tq2_0_dot, block_tq2_0, tq2_0_product)
TQ_DOT(tq1_0_dot, block_tq1_0, tq1_0_product)
#    else
static tq_dot_t * const tq2_0_dot = NULL;  // upstream's
static tq_dot_t * const tq1_0_dot = NULL;
#    endif

static inline bool vec_dot(int n, float * s, const void * x, const void * y, tq_dot_t * dot, tq_dot_t * ordered) {
    assert(n % QK_K == 0);
    if (itq3_s_deterministic()) {
        dot = ordered;
    }
    if (!dot) {
        return false;
    }
    *s = dot(x, (const block_q8_K *) y, n / QK_K);
    return true;
}

bool ggml_vec_dot_tq2_0_q8_K_x86(int n, float * GGML_RESTRICT s, const void * GGML_RESTRICT vx,
                                 const void * GGML_RESTRICT vy) {
    return vec_dot(n, s, vx, vy, tq2_0_dot, tq2_0_dot_ordered);
}

bool ggml_vec_dot_tq1_0_q8_K_x86(int n, float * GGML_RESTRICT s, const void * GGML_RESTRICT vx,
                                 const void * GGML_RESTRICT vy) {
    return vec_dot(n, s, vx, vy, tq1_0_dot, tq1_0_dot_ordered);
}

#endif

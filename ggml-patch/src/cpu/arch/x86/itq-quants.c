// CPU kernels of the trellis types, AVX2 and AVX-512. docs/kernels.md explains them.

#include "../../itq-quants.h"
#include "itq-decode.h"

#include "ggml-cpu-impl.h"
#include "quants.h"
#include "simd-mappings.h"

#include <assert.h>
#include <math.h>
#include <string.h>

#if defined(__AVX2__)

//
// activations
//

static inline __m256 fwht_lanes(__m256 v, __m256 swapped, __m256 minus) {
    return _mm256_add_ps(swapped, _mm256_xor_ps(v, minus));
}

// The bytes are those of the generic functions: the same additions in the same order, the same rounding. In a register, a
// stage adds its swapped neighbour to every value, negated in the upper half of the pair.

// Stages h = 1 .. 32 of 64 numbers: 1, 2, 4 within a register, 8, 16, 32 over eight of them.
ITQ_INLINE void fwht_64(const float * x, __m256 t[8]) {
    const __m256 minus1 = _mm256_setr_ps(0.0f, -0.0f, 0.0f, -0.0f, 0.0f, -0.0f, 0.0f, -0.0f);
    const __m256 minus2 = _mm256_setr_ps(0.0f, 0.0f, -0.0f, -0.0f, 0.0f, 0.0f, -0.0f, -0.0f);
    const __m256 minus4 = _mm256_setr_ps(0.0f, 0.0f, 0.0f, 0.0f, -0.0f, -0.0f, -0.0f, -0.0f);
    for (int j = 0; j < 8; ++j) {
        __m256 a = _mm256_loadu_ps(x + 8 * j);
        a        = fwht_lanes(a, _mm256_permute_ps(a, 0xB1), minus1);
        a        = fwht_lanes(a, _mm256_permute_ps(a, 0x4E), minus2);
        t[j]     = fwht_lanes(a, _mm256_permute2f128_ps(a, a, 1), minus4);
    }
    for (int h = 1; h < 8; h *= 2) {
        for (int j = 0; j < 8; ++j) {
            if ((j & h) == 0) {
                const __m256 a = t[j];
                const __m256 b = t[j + h];
                t[j]           = _mm256_add_ps(a, b);
                t[j + h]       = _mm256_sub_ps(a, b);
            }
        }
    }
}

// Largest and smallest of numbers so far, 0 among them, and NaN where any is.
struct range {
    __m256 max;
    __m256 min;
    __m256 nan;
};

ITQ_INLINE struct range no_range(void) {
    return (struct range){ _mm256_setzero_ps(), _mm256_setzero_ps(), _mm256_setzero_ps() };
}

ITQ_INLINE void widen(struct range * r, __m256 v) {
    r->max = _mm256_max_ps(v, r->max);  // in this order they pass over NaN
    r->min = _mm256_min_ps(v, r->min);
}

ITQ_INLINE void note_nan(struct range * r, __m256 a, __m256 b) {
    r->nan = _mm256_or_ps(r->nan, _mm256_cmp_ps(a, b, _CMP_UNORD_Q));  // where either is
}

// What the numbers of n registers are multiplied by to fill 8 bits. 0: they have no usable scale, and *d is what they have
// for one.
ITQ_INLINE float scale_to_8_bits(const __m256 * v, const int n, struct range range, float * d) {
    __m128 m4 = _mm_max_ps(_mm256_castps256_ps128(range.max), _mm256_extractf128_ps(range.max, 1));
    __m128 n4 = _mm_min_ps(_mm256_castps256_ps128(range.min), _mm256_extractf128_ps(range.min, 1));
    m4        = _mm_max_ps(m4, _mm_movehl_ps(m4, m4));
    n4        = _mm_min_ps(n4, _mm_movehl_ps(n4, n4));

    const float hi   = _mm_cvtss_f32(_mm_max_ss(m4, _mm_movehdup_ps(m4)));
    const float lo   = _mm_cvtss_f32(_mm_min_ss(n4, _mm_movehdup_ps(n4)));
    const float amax = hi > -lo ? hi : -lo;
    const int   nan  = _mm256_movemask_ps(range.nan);
    if (nan || !(amax >= ITQ3_S_ACT_MIN && amax < INFINITY)) {
        *d = nan || amax == INFINITY ? NAN : 0.0f;
        return 0.0f;
    }
    float max = hi > -lo ? hi : lo;
    if (hi == -lo) {  // the sign of the first of them
        const __m256 a = _mm256_set1_ps(hi);
        const __m256 b = _mm256_set1_ps(lo);
        for (int r = 0; r < n; ++r) {
            const int p = _mm256_movemask_ps(_mm256_cmp_ps(v[r], a, _CMP_EQ_OQ));
            const int m = _mm256_movemask_ps(_mm256_cmp_ps(v[r], b, _CMP_EQ_OQ));
            if (p | m) {
                max = (p & -p & 0xFF) != 0 && (m == 0 || (p & -p) < (m & -m)) ? hi : lo;
                break;
            }
        }
    }
    const float iscale = -127.0f / max;
    *d                 = 1 / iscale;
    return iscale;
}

// Rounds the 32 numbers of four registers; their sums, 16 each, in the lowest lanes of the halves.
ITQ_INLINE __m256i round_to_8_bits(const __m256 * v, __m256 iscale, int8_t * qs) {
    const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    const __m256i a     = _mm256_cvtps_epi32(_mm256_mul_ps(v[0], iscale));
    const __m256i b     = _mm256_cvtps_epi32(_mm256_mul_ps(v[1], iscale));
    const __m256i c     = _mm256_cvtps_epi32(_mm256_mul_ps(v[2], iscale));
    const __m256i d     = _mm256_cvtps_epi32(_mm256_mul_ps(v[3], iscale));
    // packing saturates at 127
    __m256i       q     = _mm256_packs_epi16(_mm256_packs_epi32(a, b), _mm256_packs_epi32(c, d));
    q                   = _mm256_permutevar8x32_epi32(q, order);
    _mm256_storeu_si256((__m256i *) qs, q);

    // sums of 8 bytes, moved to be unsigned
    const __m256i s = _mm256_sad_epu8(_mm256_xor_si256(q, _mm256_set1_epi8(-128)), _mm256_setzero_si256());
    return _mm256_sub_epi32(_mm256_add_epi32(s, _mm256_shuffle_epi32(s, 0x4E)), _mm256_set1_epi32(16 * 128));
}

void quantize_row_q8_K_h(const float * GGML_RESTRICT x, void * GGML_RESTRICT vy, int64_t k) {
    assert(k % QK_ITQ3_S == 0);
    const int64_t nb = k / QK_ITQ3_S;

    block_q8_K * GGML_RESTRICT y = vy;

    for (int64_t i = 0; i < nb; ++i, x += QK_ITQ3_S) {
        __m256 v[32];
        for (int g = 0; g < 32; g += 8) {
            fwht_64(x + 8 * g, v + g);
        }

        // h = 64, 128, and the scale
        const __m256 sixteenth = _mm256_set1_ps(0.0625f);
        struct range range     = no_range();
        for (int j = 0; j < 8; ++j) {
            const __m256 a = _mm256_add_ps(v[j], v[j + 8]);
            const __m256 b = _mm256_sub_ps(v[j], v[j + 8]);
            const __m256 c = _mm256_add_ps(v[j + 16], v[j + 24]);
            const __m256 d = _mm256_sub_ps(v[j + 16], v[j + 24]);
            v[j]           = _mm256_mul_ps(_mm256_add_ps(a, c), sixteenth);
            v[j + 8]       = _mm256_mul_ps(_mm256_add_ps(b, d), sixteenth);
            v[j + 16]      = _mm256_mul_ps(_mm256_sub_ps(a, c), sixteenth);
            v[j + 24]      = _mm256_mul_ps(_mm256_sub_ps(b, d), sixteenth);
            for (int r = j; r < 32; r += 8) {
                widen(&range, v[r]);
            }
            note_nan(&range, v[j], v[j + 8]);
            note_nan(&range, v[j + 16], v[j + 24]);
        }

        float       d;
        const float iscale = scale_to_8_bits(v, 32, range, &d);
        y[i].d             = d;
        if (iscale == 0.0f) {
            memset(y[i].qs, 0, sizeof(y[i].qs));
            memset(y[i].bsums, 0, sizeof(y[i].bsums));
            continue;
        }
        for (int r = 0; r < 32; r += 4) {
            const __m256i sums    = round_to_8_bits(v + r, _mm256_set1_ps(iscale), y[i].qs + 8 * r);
            y[i].bsums[r / 2]     = (int16_t) _mm_cvtsi128_si32(_mm256_castsi256_si128(sums));
            y[i].bsums[r / 2 + 1] = (int16_t) _mm_cvtsi128_si32(_mm256_extracti128_si256(sums, 1));
        }
    }
}

void quantize_row_q8_n_h(const float * GGML_RESTRICT x, void * GGML_RESTRICT vy, int64_t k) {
    assert(k % 64 == 0);

    block_q8_n_h * GGML_RESTRICT y = vy;

    for (int64_t i = 0; i < k / 64; ++i, x += 64) {
        __m256 v[8];
        fwht_64(x, v);
        struct range range = no_range();
        for (int j = 0; j < 8; ++j) {
            v[j] = _mm256_mul_ps(v[j], _mm256_set1_ps(0.125f));
            widen(&range, v[j]);
            note_nan(&range, v[j], v[j]);
        }

        float       d;
        const float iscale = scale_to_8_bits(v, 8, range, &d);
        y[i].d             = d;
        if (iscale == 0.0f) {
            memset(y[i].qs, 0, sizeof(y[i].qs));
            y[i].sum = 0;
            continue;
        }
        const __m256i sums = _mm256_add_epi32(round_to_8_bits(v, _mm256_set1_ps(iscale), y[i].qs),
                                              round_to_8_bits(v + 4, _mm256_set1_ps(iscale), y[i].qs + 32));
        y[i].sum =
            _mm_cvtsi128_si32(_mm256_castsi256_si128(sums)) + _mm_cvtsi128_si32(_mm256_extracti128_si256(sums, 1));
    }
}

//
// dot product
//

// What the zero-point of a block takes from the dot product, in units of 1/32: nothing but in the literal ternary code.
static inline float zero_point_term(const block_itq3_s * x, const block_q8_K * y) {
    if ((x->z & 0x7FFF) == 0) {
        return 0.0f;
    }
    int32_t total = 0;
    for (int j = 0; j < QK_ITQ3_S / 16; ++j) {
        total += y->bsums[j];
    }
    return GGML_CPU_FP16_TO_FP32(x->d) * y->d * GGML_CPU_FP16_TO_FP32(x->z) * (float) total;
}

#endif  // __AVX2__

#if defined(ITQ_AVX512)

static inline __m512i dot_64(__m512i acc, __m512i levels, const int8_t * y) {
#    if defined(__AVX512VNNI__)
    return _mm512_dpbusd_epi32(acc, levels, _mm512_loadu_si512(y));
#    else
    const __m512i p = _mm512_maddubs_epi16(levels, _mm512_loadu_si512(y));
    return _mm512_add_epi32(acc, _mm512_madd_epi16(p, _mm512_set1_epi16(1)));
#    endif
}

// -64 times the sum of the activations takes the levels' offset back.
static inline __m512i dot_start(const block_q8_K * y) {
    const __m256i sums = _mm256_loadu_si256((const __m256i *) y->bsums);
    return _mm512_zextsi256_si512(_mm256_madd_epi16(sums, _mm256_set1_epi16(-64)));
}

#endif

#if defined(ITQ_AVX512) && defined(__AVX512VBMI__)

void ggml_vec_dot_itq3_s_q8_K_h(int n, float * GGML_RESTRICT s, size_t bs, const void * GGML_RESTRICT vx, size_t bx,
                                const void * GGML_RESTRICT vy, size_t by, int nrc) {
    assert(n % QK_ITQ3_S == 0);
    assert(nrc == 1);
    GGML_UNUSED(bs);
    GGML_UNUSED(bx);
    GGML_UNUSED(by);
    GGML_UNUSED(nrc);

    const block_itq3_s * GGML_RESTRICT x  = vx;
    const block_q8_K * GGML_RESTRICT   y  = vy;
    const int                          nb = n / QK_ITQ3_S;

    const struct itq3_s_tables tables = itq3_s_load_tables();

    __m512 sum  = _mm512_setzero_ps();
    float  zsum = 0.0f;
    for (int i = 0; i < nb; ++i) {
        const __m512i q   = _mm512_loadu_si512(x[i].qs);
        __m512i       acc = dot_start(&y[i]);

        for (int word = 0; word < 4; ++word) {
            acc = dot_64(acc, itq3_s_levels_64(&tables, &x[i], q, word), y[i].qs + 64 * word);
        }

        const float d = GGML_CPU_FP16_TO_FP32(x[i].d) * y[i].d;
        sum           = _mm512_fmadd_ps(_mm512_set1_ps(d), _mm512_cvtepi32_ps(acc), sum);
        zsum += zero_point_term(&x[i], &y[i]);
    }
    *s = 0.03125f * (_mm512_reduce_add_ps(sum) - zsum);
}

#elif defined(__AVX2__)

// Blocks whose selectors are decoded before their products: enough to keep both busy.
#    define BATCH (2 * ITQ_DECODED_GROUP)

#    if defined(ITQ_AVX512)

#        define DECODED 64  // bytes a block

typedef __m512 sum_t;

static inline void decode(const block_itq3_s * x, int n, int pairs, uint8_t * decoded) {
    itq3_s_decode_grids(x, n, pairs, decoded);
}

static inline sum_t add_products(sum_t sum, const block_itq3_s * x, const block_q8_K * y, int n,
                                 const uint8_t * decoded) {
    for (int i = 0; i < n; ++i) {
        __m512i levels[4];
        itq3_s_levels_4x64(decoded + DECODED * i, x[i].qs, levels);

        __m512i acc = dot_start(&y[i]);
        for (int word = 0; word < 4; ++word) {
            acc = dot_64(acc, levels[word], y[i].qs + 64 * word);
        }
        const float d = GGML_CPU_FP16_TO_FP32(x[i].d) * y[i].d;
        sum           = _mm512_fmadd_ps(_mm512_set1_ps(d), _mm512_cvtepi32_ps(acc), sum);
    }
    return sum;
}

static inline sum_t sum_zero(void) {
    return _mm512_setzero_ps();
}

static inline float sum_all(sum_t sum) {
    return _mm512_reduce_add_ps(sum);
}

#    else  // AVX2

#        define DECODED ITQ_COLUMN_BYTES

typedef __m256 sum_t;

static inline void decode(const block_itq3_s * x, int n, int pairs, uint8_t * decoded) {
    itq_transpose(x->sel, sizeof(*x), n, pairs, decoded);
}

static inline __m256i dot_32(__m256i acc, __m256i levels, const int8_t * y) {
    const __m256i v = _mm256_loadu_si256((const __m256i *) y);
#        if defined(__AVXVNNI__)
    return _mm256_dpbusd_avx_epi32(acc, levels, v);
#        else
    return _mm256_add_epi32(acc, _mm256_madd_epi16(_mm256_maddubs_epi16(levels, v), _mm256_set1_epi16(1)));
#        endif
}

static inline sum_t add_product(sum_t sum, const block_itq3_s * x, const block_q8_K * y, const uint8_t * indices) {
    // -64 times the sum of the activations takes the levels' offset back
    __m256i acc0 = _mm256_madd_epi16(_mm256_loadu_si256((const __m256i *) y->bsums), _mm256_set1_epi16(-64));
    __m256i acc1 = _mm256_setzero_si256();
    for (int m = 0; m < 128; m += 32) {
        __m256i lower, upper;
        itq_levels_2x32(itq3_s_unsigned_levels(), indices + m, &lower, &upper);
        acc0 = dot_32(acc0, lower, y->qs + m);
        acc1 = dot_32(acc1, upper, y->qs + 128 + m);
    }
    const __m256 f = _mm256_cvtepi32_ps(_mm256_add_epi32(acc0, acc1));
    const __m256 d = _mm256_set1_ps(GGML_CPU_FP16_TO_FP32(x->d) * y->d);
#        if defined(__FMA__)
    return _mm256_fmadd_ps(d, f, sum);
#        else
    return _mm256_add_ps(_mm256_mul_ps(d, f), sum);
#        endif
}

// The indices of a block are made while the one before is multiplied.
static inline sum_t add_products(sum_t sum, const block_itq3_s * x, const block_q8_K * y, int n,
                                 const uint8_t * decoded) {
    _Alignas(64) uint8_t indices[BATCH][QK_ITQ3_S / 2];
    itq3_s_indices(decoded, x[0].qs, indices[0]);
#        if defined(__GNUC__)
#            pragma GCC unroll 5
#        endif
    for (int i = 0; i < n - 1; ++i) {
        itq3_s_indices(decoded + DECODED * (i + 1), x[i + 1].qs, indices[i + 1]);
        sum = add_product(sum, &x[i], &y[i], indices[i]);
    }
    return add_product(sum, &x[n - 1], &y[n - 1], indices[n - 1]);
}

static inline sum_t sum_zero(void) {
    return _mm256_setzero_ps();
}

static inline float sum_all(sum_t sum) {
    __m128 r = _mm_add_ps(_mm256_castps256_ps128(sum), _mm256_extractf128_ps(sum, 1));
    r        = _mm_add_ps(r, _mm_movehl_ps(r, r));
    return _mm_cvtss_f32(_mm_add_ss(r, _mm_movehdup_ps(r)));
}

#    endif  // AVX2

void ggml_vec_dot_itq3_s_q8_K_h(int n, float * GGML_RESTRICT s, size_t bs, const void * GGML_RESTRICT vx, size_t bx,
                                const void * GGML_RESTRICT vy, size_t by, int nrc) {
    assert(n % QK_ITQ3_S == 0);
    assert(nrc == 1);
    GGML_UNUSED(bs);
    GGML_UNUSED(bx);
    GGML_UNUSED(by);
    GGML_UNUSED(nrc);

    const block_itq3_s * GGML_RESTRICT x  = vx;
    const block_q8_K * GGML_RESTRICT   y  = vy;
    const int                          nb = n / QK_ITQ3_S;

    _Alignas(64) uint8_t decoded[DECODED * BATCH];

    sum_t sum  = sum_zero();
    float zsum = 0.0f;
    for (int i = 0; i < nb; i += BATCH) {
        const int m = nb - i < BATCH ? nb - i : BATCH;
        for (int b = 0; b < m; b += ITQ_DECODED_GROUP) {
            // numbers of pairs that the compiler knows; what is beyond n repeats the last block
            const int left = m - b < ITQ_DECODED_GROUP ? m - b : ITQ_DECODED_GROUP;
            if (left > 4) {
                decode(x + i + b, left, ITQ_DECODED_GROUP / 2, decoded + DECODED * b);
            } else if (left > 2) {
                decode(x + i + b, left, 2, decoded + DECODED * b);
            } else {
                decode(x + i + b, left, 1, decoded + DECODED * b);
            }
        }
        sum = add_products(sum, x + i, y + i, m, decoded);
        for (int b = i; b < i + m; ++b) {
            zsum += zero_point_term(&x[b], &y[b]);
        }
    }
    *s = 0.03125f * (sum_all(sum) - zsum);
}

#    undef BATCH
#    undef DECODED

#endif

#if defined(__AVX2__)

#    if defined(ITQ_AVX512)

static inline __m512 add_block_itq2_s(__m512 sum, const block_itq2_s * x, const block_q8_K * y) {
    __m512i acc = dot_start(y);
    for (int word = 0; word < 4; ++word) {
        acc = dot_64(acc, itq2_levels_64(x->qs, x->sel, word), y->qs + 64 * word);
    }
    const float d = GGML_CPU_FP16_TO_FP32(x->d) * y->d;
    return _mm512_fmadd_ps(_mm512_set1_ps(d), _mm512_cvtepi32_ps(acc), sum);
}

static float dot_itq2_s(const block_itq2_s * x, const block_q8_K * y, int nb) {
    __m512 sum = _mm512_setzero_ps();
    for (int i = 0; i < nb; ++i) {
        sum = add_block_itq2_s(sum, &x[i], &y[i]);
    }
    return _mm512_reduce_add_ps(sum);
}

#    else

static float dot_itq2_s(const block_itq2_s * x, const block_q8_K * y, int nb) {
    const __m128i tables[2] = { itq2_s_table(0), itq2_s_table(1) };
    __m256        sum       = _mm256_setzero_ps();
    for (int i = 0; i < nb; i += ITQ_DECODED_GROUP) {
        const int            n = nb - i < ITQ_DECODED_GROUP ? nb - i : ITQ_DECODED_GROUP;
        _Alignas(64) uint8_t selectors[ITQ_COLUMN_BYTES * ITQ_DECODED_GROUP];
        _Alignas(64) uint8_t symbols[ITQ_COLUMN_BYTES * ITQ_DECODED_GROUP];
        itq_transpose(x[i].sel, sizeof(*x), n, ITQ_DECODED_GROUP / 2, selectors);
        itq_transpose(x[i].qs, sizeof(*x), n, ITQ_DECODED_GROUP / 2, symbols);
        for (int b = 0; b < n; ++b) {
            _Alignas(32) uint8_t indices[QK_K / 2];
            itq2_s_indices(selectors + ITQ_COLUMN_BYTES * b, symbols + ITQ_COLUMN_BYTES * b, indices);

            const block_q8_K * q = &y[i + b];
            // -64 times the sum of the activations takes the levels' offset back
            __m256i acc = _mm256_madd_epi16(_mm256_loadu_si256((const __m256i *) q->bsums), _mm256_set1_epi16(-64));
            for (int m = 0; m < 128; m += 32) {
                __m256i lower, upper;
                itq_levels_2x32(tables[m / 32 % 2], indices + m, &lower, &upper);
                acc = dot_32(acc, lower, q->qs + m);
                acc = dot_32(acc, upper, q->qs + 128 + m);
            }
            const __m256 d = _mm256_set1_ps(GGML_CPU_FP16_TO_FP32(x[i + b].d) * q->d);
            sum            = _mm256_add_ps(_mm256_mul_ps(d, _mm256_cvtepi32_ps(acc)), sum);
        }
    }
    return sum_all(sum);
}

#    endif

void ggml_vec_dot_itq2_s_q8_K_h(int n, float * GGML_RESTRICT s, size_t bs, const void * GGML_RESTRICT vx, size_t bx,
                                const void * GGML_RESTRICT vy, size_t by, int nrc) {
    assert(n % QK_K == 0);
    assert(nrc == 1);
    GGML_UNUSED(bs);
    GGML_UNUSED(bx);
    GGML_UNUSED(by);
    GGML_UNUSED(nrc);
    *s = 0.03125f * dot_itq2_s(vx, vy, n / QK_K);
}

#else

void quantize_row_q8_K_h(const float * GGML_RESTRICT x, void * GGML_RESTRICT y, int64_t k) {
    quantize_row_q8_K_h_generic(x, y, k);
}

void quantize_row_q8_n_h(const float * GGML_RESTRICT x, void * GGML_RESTRICT y, int64_t k) {
    quantize_row_q8_n_h_generic(x, y, k);
}

#    define VEC_DOT_GENERIC(NAME, name, ...)                                                                        \
        void ggml_vec_dot_##name##_q8_K_h(int n, float * GGML_RESTRICT s, size_t bs, const void * GGML_RESTRICT vx, \
                                          size_t bx, const void * GGML_RESTRICT vy, size_t by, int nrc) {           \
            ggml_vec_dot_##name##_q8_K_h_generic(n, s, bs, vx, bx, vy, by, nrc);                                    \
        }
ITQ_TYPES_256(VEC_DOT_GENERIC)

#endif

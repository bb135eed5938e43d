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

#else

void quantize_row_q8_K_h(const float * GGML_RESTRICT x, void * GGML_RESTRICT y, int64_t k) {
    quantize_row_q8_K_h_generic(x, y, k);
}

void quantize_row_q8_n_h(const float * GGML_RESTRICT x, void * GGML_RESTRICT y, int64_t k) {
    quantize_row_q8_n_h_generic(x, y, k);
}

#endif

// Products of one column with rows of ITQ3_S as a file has them, x86. docs/kernels.md explains them.

#include "../../itq3s-gemm.h"
#include "itq3s-decode.h"

#include "ggml-cpu-impl.h"
#include "simd-mappings.h"

#include <string.h>

#if defined(ITQ3S_HAS_GEMV)

#    define GROUP 8  // blocks of a row whose products are made side by side

// Sums of 8 vectors of products, one of each block.
#    if defined(ITQ3_S_AVX512)

typedef __m512i products;

static inline __m512i dot_64(__m512i acc, __m512i levels, const int8_t * q) {
#        if defined(__AVX512VNNI__)
    return _mm512_dpbusd_epi32(acc, levels, _mm512_loadu_si512(q));
#        else
    const __m512i pairs = _mm512_maddubs_epi16(levels, _mm512_loadu_si512(q));
    return _mm512_add_epi32(acc, _mm512_madd_epi16(pairs, _mm512_set1_epi16(1)));
#        endif
}

static inline __m128i sum_4(const __m512i p[4]) {
    const __m512i ab = _mm512_add_epi32(_mm512_unpacklo_epi32(p[0], p[1]), _mm512_unpackhi_epi32(p[0], p[1]));
    const __m512i cd = _mm512_add_epi32(_mm512_unpacklo_epi32(p[2], p[3]), _mm512_unpackhi_epi32(p[2], p[3]));
    const __m512i s  = _mm512_add_epi32(_mm512_unpacklo_epi64(ab, cd), _mm512_unpackhi_epi64(ab, cd));
    const __m256i h  = _mm256_add_epi32(_mm512_castsi512_si256(s), _mm512_extracti64x4_epi64(s, 1));
    return _mm_add_epi32(_mm256_castsi256_si128(h), _mm256_extracti128_si256(h, 1));
}

#    else

typedef __m256i products;

static inline __m256i dot_32(__m256i acc, __m256i levels, const int8_t * q) {
    const __m256i y = _mm256_loadu_si256((const __m256i *) q);
#        if defined(__AVXVNNI__)
    return _mm256_dpbusd_avx_epi32(acc, levels, y);
#        else
    return _mm256_add_epi32(acc, _mm256_madd_epi16(_mm256_maddubs_epi16(levels, y), _mm256_set1_epi16(1)));
#        endif
}

static inline __m128i sum_4(const __m256i p[4]) {
    const __m256i s = _mm256_hadd_epi32(_mm256_hadd_epi32(p[0], p[1]), _mm256_hadd_epi32(p[2], p[3]));
    return _mm_add_epi32(_mm256_castsi256_si128(s), _mm256_extracti128_si256(s, 1));
}

#    endif

static inline __m256i sum_8(const products p[GROUP]) {
    return _mm256_inserti128_si256(_mm256_castsi128_si256(sum_4(p)), sum_4(p + 4), 1);
}

// Products of levels plus 64 and activations of the n <= GROUP blocks from x and q on; those beyond n are any number.
#    if defined(ITQ3_S_AVX512) && defined(__AVX512VBMI__)

#        define TABLES const struct itq3_s_tables tables = itq3_s_load_tables();

static inline __m256i dots(const struct itq3_s_tables * tables, const block_itq3_s * x, int n, const int8_t * q) {
    products p[GROUP];
    for (int i = 0; i < GROUP; ++i) {
        const int     b       = i < n ? i : n - 1;
        const __m512i symbols = _mm512_loadu_si512(x[b].qs);
        p[i]                  = _mm512_setzero_si512();
        for (int word = 0; word < 4; ++word) {
            p[i] = dot_64(p[i], itq3_s_levels_64(tables, &x[b], symbols, word), q + QK_ITQ3_S * b + 64 * word);
        }
    }
    return sum_8(p);
}

#    else

struct no_tables {
    int unused;
};
#        define TABLES const struct no_tables tables = { 0 };

#        if defined(ITQ3_S_AVX512)

static inline __m256i dots(const struct no_tables * tables, const block_itq3_s * x, int n, const int8_t * q) {
    (void) tables;
    _Alignas(64) uint8_t grids[64 * GROUP];
    itq3_s_decode_grids(x, n, GROUP / 2, grids);

    products p[GROUP];
    for (int i = 0; i < GROUP; ++i) {
        const int b = i < n ? i : n - 1;
        __m512i   levels[4];
        itq3_s_levels_4x64(grids + 64 * b, x[b].qs, levels);
        p[i] = _mm512_setzero_si512();
        for (int word = 0; word < 4; ++word) {
            p[i] = dot_64(p[i], levels[word], q + QK_ITQ3_S * b + 64 * word);
        }
    }
    return sum_8(p);
}

#        else

static inline __m256i dots(const struct no_tables * tables, const block_itq3_s * x, int n, const int8_t * q) {
    (void) tables;
    _Alignas(64) uint8_t columns[ITQ3_S_COLUMNS * GROUP];
    _Alignas(64) uint8_t indices[GROUP][QK_ITQ3_S / 2];
    itq3_s_transpose(x, n, GROUP / 2, columns);

    products p[GROUP];
    for (int i = 0; i < GROUP; ++i) {
        const int b = i < n ? i : n - 1;
        itq3_s_indices(columns + ITQ3_S_COLUMNS * b, x[b].qs, indices[i]);
        __m256i acc[2] = { _mm256_setzero_si256(), _mm256_setzero_si256() };
        for (int m = 0; m < 128; m += 32) {
            __m256i lower, upper;
            itq3_s_levels_2x32(indices[i] + m, &lower, &upper);
            acc[0] = dot_32(acc[0], lower, q + QK_ITQ3_S * b + m);
            acc[1] = dot_32(acc[1], upper, q + QK_ITQ3_S * b + 128 + m);
        }
        p[i] = _mm256_add_epi32(acc[0], acc[1]);
    }
    return sum_8(p);
}

#        endif
#    endif

static inline __m256 halves_to_floats(__m128i halves) {
#    if defined(__F16C__)
    return _mm256_cvtph_ps(halves);
#    else
    ggml_half h[GROUP];
    float     f[GROUP];
    memcpy(h, &halves, sizeof(h));
    for (int i = 0; i < GROUP; ++i) {
        f[i] = GGML_CPU_FP16_TO_FP32(h[i]);
    }
    return _mm256_loadu_ps(f);
#    endif
}

// d and z of a block.
static inline int32_t load_scales(const block_itq3_s * x) {
    int32_t both;
    static_assert(offsetof(block_itq3_s, z) == offsetof(block_itq3_s, d) + 2, "z does not follow d");
    memcpy(&both, (const char *) x + offsetof(block_itq3_s, d), sizeof(both));
    return both;
}

// The sums of n <= GROUP blocks times their scales, added in the order and with the roundings of a panel's product.
static inline __m128 add_blocks(__m128 sum, __m256i dot, const block_itq3_s * x, int n, const float * d1,
                                const int32_t * sums) {
    int32_t scales[GROUP];
    int32_t s1[GROUP];
    float   y[GROUP];
    for (int i = 0; i < GROUP; ++i) {
        const int b = i < n ? i : n - 1;
        scales[i]   = load_scales(&x[b]);
        s1[i]       = sums[b];
        y[i]        = d1[b];
    }
    const __m256i both =
        _mm256_setr_epi32(scales[0], scales[1], scales[2], scales[3], scales[4], scales[5], scales[6], scales[7]);
    const __m256i total = _mm256_setr_epi32(s1[0], s1[1], s1[2], s1[3], s1[4], s1[5], s1[6], s1[7]);

    // the lower halves of 32 bits, then the upper ones
    const __m256i lower = _mm256_blend_epi16(both, _mm256_setzero_si256(), 0xAA);
    const __m256i upper = _mm256_srli_epi32(both, 16);
    const __m256i dz    = _mm256_permute4x64_epi64(_mm256_packus_epi32(lower, upper), 0xD8);
    const __m256  d     = _mm256_mul_ps(halves_to_floats(_mm256_castsi256_si128(dz)), _mm256_set1_ps(0.03125f));
    const __m256  z     = halves_to_floats(_mm256_extracti128_si256(dz, 1));

    // the levels had 64 added
    dot            = _mm256_sub_epi32(dot, _mm256_slli_epi32(total, 6));
    const __m256 t = _mm256_mul_ps(_mm256_cvtepi32_ps(dot), d);
    const __m256 m = _mm256_mul_ps(d, z);
    float        v[GROUP];
#    if defined(__FMA__)
    _mm256_storeu_ps(v, _mm256_fnmadd_ps(m, _mm256_cvtepi32_ps(total), t));
    for (int i = 0; i < n; ++i) {
        sum = _mm_fmadd_ss(_mm_load_ss(&v[i]), _mm_load_ss(&y[i]), sum);
    }
#    else
    _mm256_storeu_ps(v, _mm256_sub_ps(t, _mm256_mul_ps(m, _mm256_cvtepi32_ps(total))));
    for (int i = 0; i < n; ++i) {
        sum = _mm_add_ss(sum, _mm_mul_ss(_mm_load_ss(&v[i]), _mm_load_ss(&y[i])));
    }
#    endif
    return sum;
}

void itq3s_gemv_itq3_s(int64_t nb, const void * rows, size_t row_size, int n_rows, const struct itq3s_columns * y,
                       float * out) {
    TABLES
    for (int r = 0; r < n_rows; ++r) {
        const block_itq3_s * x   = (const void *) ((const char *) rows + (size_t) r * row_size);
        __m128               sum = _mm_setzero_ps();
        for (int64_t b = 0; b < nb; b += GROUP) {
            for (int line = 0; line < (int) (GROUP * sizeof(block_itq3_s)); line += 64) {
                ITQ3S_PREFETCH_BYTES((const char *) (x + b) + line);
            }
            const __m256i dot = nb - b < GROUP ? dots(&tables, x + b, (int) (nb - b), y->q + QK_ITQ3_S * b)
                                               : dots(&tables, x + b, GROUP, y->q + QK_ITQ3_S * b);
            sum               = nb - b < GROUP ? add_blocks(sum, dot, x + b, (int) (nb - b), y->d + b, y->sums + b)
                                               : add_blocks(sum, dot, x + b, GROUP, y->d + b, y->sums + b);
        }
        out[r] = _mm_cvtss_f32(sum);
    }
}

#endif  // ITQ3S_HAS_GEMV

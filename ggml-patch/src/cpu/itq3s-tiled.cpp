// The tiled matrix product for ITQ3_S, TQ1_0 and TQ2_0.

#include "itq3s-tiled.h"

#include "ggml-impl.h"
#include "ggml.h"

#if defined(__x86_64__) || defined(__i386__) || defined(_M_IX86) || defined(_M_X64)
#    include "arch/x86/itq3s-decode.h"
#    include "arch/x86/tq-quants.h"
#endif

#include <cstring>

//
// codes
//

static void unpack_block(const block_itq3_s & x, uint8_t * q) {
#if defined(ITQ3_S_AVX512) && defined(__AVX512VBMI__)
    const itq3_s_tables tables  = itq3_s_load_tables();
    const __m512i       symbols = _mm512_loadu_si512(x.qs);
    for (int word = 0; word < 4; ++word) {
        _mm512_storeu_si512(q + 64 * word, itq3_s_levels_64(&tables, &x, symbols, word));
    }
#elif defined(ITQ3_S_AVX512)
    uint8_t grids[128];  // a pair of blocks, twice the same
    itq3_s_decode_grids(&x, 1, 1, grids);
    __m512i levels[4];
    itq3_s_levels_4x64(grids, x.qs, levels);
    for (int word = 0; word < 4; ++word) {
        _mm512_storeu_si512(q + 64 * word, levels[word]);
    }
#elif defined(__AVX2__)
    uint8_t columns[2 * ITQ3_S_COLUMNS];  // a pair of blocks, twice the same
    uint8_t indices[QK_ITQ3_S / 2];
    itq3_s_transpose(&x, 1, 1, columns);
    itq3_s_indices(columns, x.qs, indices);
    for (int m = 0; m < 128; m += 32) {
        __m256i lower, upper;
        itq3_s_levels_2x32(indices + m, &lower, &upper);
        _mm256_storeu_si256((__m256i *) (q + m), lower);
        _mm256_storeu_si256((__m256i *) (q + 128 + m), upper);
    }
#else
    int8_t levels[QK_ITQ3_S];
    itq3_s_decode_levels(x.qs, x.sel, levels);
    for (int j = 0; j < QK_ITQ3_S; ++j) {
        q[j] = (uint8_t) (levels[j] + 64);
    }
#endif
}

static void unpack_block(const block_tq1_0 & x, uint8_t * q) {
#if defined(GGML_TQ_AVX512)
    __m512i trits[4];
    tq1_0_trits(&x, trits);
    for (int j = 0; j < 4; ++j) {
        _mm512_storeu_si512(q + 64 * j, trits[j]);
    }
#else
    // fixed point: the byte is a fraction of 256, its next trit the integer part of three times that
    static const uint8_t pow3[5] = { 1, 3, 9, 27, 81 };
    for (int l = 0; l < 5; ++l) {
        for (int m = 0; m < 32; ++m) {
            const uint8_t b = (uint8_t) (x.qs[m] * pow3[l]);
            q[32 * l + m]   = (uint8_t) (b * 3 >> 8);
        }
        for (int m = 0; m < 16; ++m) {
            const uint8_t b     = (uint8_t) (x.qs[32 + m] * pow3[l]);
            q[160 + 16 * l + m] = (uint8_t) (b * 3 >> 8);
        }
    }
    for (int l = 0; l < 4; ++l) {
        for (int m = 0; m < 4; ++m) {
            const uint8_t b    = (uint8_t) (x.qh[m] * pow3[l]);
            q[240 + 4 * l + m] = (uint8_t) (b * 3 >> 8);
        }
    }
#endif
}

static void unpack_block(const block_tq2_0 & x, uint8_t * q) {
    for (int j = 0; j < 2; ++j) {
#if defined(GGML_TQ_AVX512)
        __m512i lo, hi;
        tq2_0_trits_128(x.qs + 32 * j, &lo, &hi);
        _mm512_storeu_si512(q + 128 * j, lo);
        _mm512_storeu_si512(q + 128 * j + 64, hi);
#else
        tiled_unpk_2bit<0>(x.qs + 32 * j, q + 128 * j);
        tiled_unpk_2bit<2>(x.qs + 32 * j, q + 128 * j + 32);
        tiled_unpk_2bit<4>(x.qs + 32 * j, q + 128 * j + 64);
        tiled_unpk_2bit<6>(x.qs + 32 * j, q + 128 * j + 96);
#endif
    }
}

static float zero_point(const block_itq3_s & x) {
    return ggml_fp16_to_fp32(x.z);
}

template <typename B> static float zero_point(const B &) {
    return 0.0f;
}

// The scale of the codes: levels count in units of d/32.
static float code_scale(const block_itq3_s & x) {
    return ggml_fp16_to_fp32(x.d) * 0.03125f;
}

template <typename B> static float code_scale(const B & x) {
    return ggml_fp16_to_fp32(x.d);
}

template <typename B>
static void unpack_rows(const B * rows, int64_t row_stride, int n_rows, tiled_tile_src0 * tile, int num_k) {
    GGML_ASSERT(n_rows <= TILED_TILE_ROWS);
    for (int slab = 0; slab < num_k; ++slab) {
        for (int r = 0; r < n_rows; ++r) {
            const B & x = rows[r * row_stride + slab];

            const int   at    = slab * TILED_MICRO + r;
            const float scale = code_scale(x);
            tile->d[at]       = scale;
            tile->dmin[at]    = scale * zero_point(x);
            unpack_block(x, &tile->q[(r * num_k + slab) * TILED_TILE_K]);
        }
    }
}

void tiled_unpack_src0(const block_itq3_s * rows, int64_t row_stride, int n_rows, tiled_tile_src0 * tile, int num_k) {
    unpack_rows(rows, row_stride, n_rows, tile, num_k);
}

void tiled_unpack_src0(const block_tq1_0 * rows, int64_t row_stride, int n_rows, tiled_tile_src0 * tile, int num_k) {
    unpack_rows(rows, row_stride, n_rows, tile, num_k);
}

void tiled_unpack_src0(const block_tq2_0 * rows, int64_t row_stride, int n_rows, tiled_tile_src0 * tile, int num_k) {
    unpack_rows(rows, row_stride, n_rows, tile, num_k);
}

//
// 16x16 products
//

// Where slab `slab` of a tile that holds num_k blocks of every row begins; see tiled-kernel.h.
struct tile_view {
    const uint8_t * q0;  // codes of src0 row i0, rows row_stride apart
    const int8_t *  q1;  // 16 rows of src1
    const int32_t * sums;
    const float *   d0;
    const float *   dmin;
    const float *   d1;
    int             row_stride;
    int             sum_stride;

    tile_view(const tiled_tile_src0 & src0, const tiled_tile_src1 & src1, int i0, int j0, int num_k, int slab) {
        row_stride = num_k * TILED_TILE_K;
        sum_stride = num_k == 1 ? TILED_TILE_ROWS : TILED_MICRO;
        q0         = src0.q + i0 * row_stride + slab * TILED_TILE_K;
        q1         = src1.q + j0 * row_stride + slab * TILED_TILE_K;
        sums       = src1.bsums + slab * (TILED_TILE_K / 16) * sum_stride + j0;
        d0         = src0.d + slab * TILED_MICRO + i0;
        dmin       = src0.dmin + slab * TILED_MICRO + i0;
        d1         = src1.d + slab * TILED_MICRO + j0;
    }
};

#if defined(__AVX512VNNI__) && defined(__AVX512VL__) && defined(__AVX512DQ__)

// 16 columns in a register, a register per row: no multiplication but the dpbusd, no scale before the end. STRIDE is
// the distance of the rows where it is known, else 0.
template <bool HAS_MIN, int BIAS, int STRIDE>
static void run_microtile_vnni(const tile_view & t, float * buf, int buf_stride) {
    const int stride = STRIDE > 0 ? STRIDE : t.row_stride;

    __m512i sum = _mm512_load_si512(t.sums);
    for (int s = 1; s < TILED_TILE_K / 16; ++s) {
        sum = _mm512_add_epi32(sum, _mm512_load_si512(t.sums + s * t.sum_stride));
    }
    const __m512i start = _mm512_mullo_epi32(sum, _mm512_set1_epi32(-BIAS));

    __m512i acc[TILED_MICRO];
    for (int i = 0; i < TILED_MICRO; ++i) {
        acc[i] = start;
    }
    // tiled_repack_src1 left the codes of four k of all 16 columns at [k/4 % 16][k/64]
    for (int hi = 0; hi < 4; ++hi) {
        const int8_t *  q1 = t.q1 + hi * 64;
        const uint8_t * q0 = t.q0 + hi * 64;
        // unrolled: gcc copies every accumulator once a turn
#    if defined(__GNUC__)
#        pragma GCC unroll 16
#    endif
        for (int lo = 0; lo < 16; ++lo) {
            const __m512i codes = _mm512_load_si512(q1);
            for (int i = 0; i < TILED_MICRO; ++i) {
                int32_t four;
                memcpy(&four, q0 + i * stride, sizeof(four));
                acc[i] = _mm512_dpbusd_epi32(acc[i], _mm512_set1_epi32(four), codes);
            }
            q1 += stride;
            q0 += 4;
        }
    }

    const __m512 d1   = _mm512_load_ps(t.d1);
    const __m512 sumf = _mm512_cvtepi32_ps(sum);
    for (int i = 0; i < TILED_MICRO; ++i) {
        __m512 v = _mm512_mul_ps(_mm512_cvtepi32_ps(acc[i]), _mm512_set1_ps(t.d0[i]));
        if (HAS_MIN) {
            v = _mm512_fnmadd_ps(_mm512_set1_ps(t.dmin[i]), sumf, v);
        }
        float * p = buf + i * buf_stride;
        _mm512_store_ps(p, _mm512_fmadd_ps(v, d1, _mm512_load_ps(p)));
    }
}

template <bool HAS_MIN, int BIAS> static void run_microtile(const tile_view & t, float * buf, int buf_stride) {
    if (t.row_stride == TILED_TILE_K) {
        run_microtile_vnni<HAS_MIN, BIAS, TILED_TILE_K>(t, buf, buf_stride);
    } else {
        run_microtile_vnni<HAS_MIN, BIAS, 0>(t, buf, buf_stride);
    }
}

#elif defined(__AVX2__)

// 16 products of 16 bits, summed to 8 of 32. Codes up to 127 fill 16 bits with two products, trits can wait.
template <int BIAS> static inline __m256i sum_pairs(__m256i acc, __m256i p) {
    return BIAS == 1 ? _mm256_add_epi16(acc, p) : _mm256_add_epi32(acc, _mm256_madd_epi16(p, _mm256_set1_epi16(1)));
}

template <bool HAS_MIN, int BIAS> static void run_microtile(const tile_view & t, float * buf, int buf_stride) {
    for (int j = 0; j < TILED_MICRO; j += 8) {
        __m256i sum = _mm256_load_si256((const __m256i *) (t.sums + j));
        for (int s = 1; s < TILED_TILE_K / 16; ++s) {
            sum = _mm256_add_epi32(sum, _mm256_load_si256((const __m256i *) (t.sums + s * t.sum_stride + j)));
        }
        const __m256i start = _mm256_mullo_epi32(sum, _mm256_set1_epi32(-BIAS));
        const __m256  sumf  = _mm256_cvtepi32_ps(sum);
        const __m256  d1    = _mm256_load_ps(t.d1 + j);

        for (int i = 0; i < TILED_MICRO; ++i) {
            const uint8_t * q0 = t.q0 + i * t.row_stride;

            __m256i acc[8];
            for (int c = 0; c < 8; ++c) {
                acc[c] = _mm256_setzero_si256();
            }
            for (int k = 0; k < TILED_TILE_K; k += 32) {
                const __m256i  codes = _mm256_load_si256((const __m256i *) (q0 + k));
                const int8_t * q1    = t.q1 + j * t.row_stride + k;
                for (int c = 0; c < 8; ++c) {
                    const __m256i y = _mm256_load_si256((const __m256i *) (q1 + c * t.row_stride));
#    if defined(__AVXVNNI__)
                    acc[c] = _mm256_dpbusd_avx_epi32(acc[c], codes, y);
#    else
                    acc[c] = sum_pairs<BIAS>(acc[c], _mm256_maddubs_epi16(codes, y));
#    endif
                }
            }
#    if !defined(__AVXVNNI__)
            if (BIAS == 1) {
                for (int c = 0; c < 8; ++c) {
                    acc[c] = _mm256_madd_epi16(acc[c], _mm256_set1_epi16(1));
                }
            }
#    endif
            // the sum of register c to lane c
            for (int c = 0; c < 8; c += 2) {
                acc[c] = _mm256_hadd_epi32(acc[c], acc[c + 1]);
            }
            const __m256i a = _mm256_hadd_epi32(acc[0], acc[2]);
            const __m256i b = _mm256_hadd_epi32(acc[4], acc[6]);
            const __m256i v =
                _mm256_add_epi32(_mm256_permute2x128_si256(a, b, 0x20), _mm256_permute2x128_si256(a, b, 0x31));

            __m256  f = _mm256_mul_ps(_mm256_cvtepi32_ps(_mm256_add_epi32(v, start)), _mm256_set1_ps(t.d0[i]));
            float * p = buf + i * buf_stride + j;
            // as in arch/x86/itq3s-sum.h
#    if defined(__FMA__)
            if (HAS_MIN) {
                f = _mm256_fnmadd_ps(_mm256_set1_ps(t.dmin[i]), sumf, f);
            }
            _mm256_storeu_ps(p, _mm256_fmadd_ps(f, d1, _mm256_loadu_ps(p)));
#    else
            if (HAS_MIN) {
                f = _mm256_sub_ps(f, _mm256_mul_ps(_mm256_set1_ps(t.dmin[i]), sumf));
            }
            _mm256_storeu_ps(p, _mm256_add_ps(_mm256_loadu_ps(p), _mm256_mul_ps(f, d1)));
#    endif
        }
    }
}

#else

template <bool HAS_MIN, int BIAS> static void run_microtile(const tile_view & t, float * buf, int buf_stride) {
    for (int i = 0; i < TILED_MICRO; ++i) {
        for (int j = 0; j < TILED_MICRO; ++j) {
            int32_t dot = 0;
            for (int k = 0; k < TILED_TILE_K; ++k) {
                dot += t.q0[i * t.row_stride + k] * t.q1[j * t.row_stride + k];
            }
            int32_t sum = 0;
            for (int s = 0; s < TILED_TILE_K / 16; ++s) {
                sum += t.sums[s * t.sum_stride + j];
            }
            float v = t.d0[i] * (float) (dot - BIAS * sum);
            if (HAS_MIN) {
                v -= t.dmin[i] * (float) sum;
            }
            buf[i * buf_stride + j] += v * t.d1[j];
        }
    }
}

#endif

template <>
void tiled_run_microtile<256, true, 64, false>(const tiled_tile_src0 & src0, const tiled_tile_src1 & src1, int i0,
                                               int j0, int num_k, int slab, float * buf, int buf_stride) {
    run_microtile<true, 64>(tile_view(src0, src1, i0, j0, num_k, slab), buf + i0 * buf_stride + j0, buf_stride);
}

template <>
void tiled_run_microtile<256, false, 1, false>(const tiled_tile_src0 & src0, const tiled_tile_src1 & src1, int i0,
                                               int j0, int num_k, int slab, float * buf, int buf_stride) {
    run_microtile<false, 1>(tile_view(src0, src1, i0, j0, num_k, slab), buf + i0 * buf_stride + j0, buf_stride);
}

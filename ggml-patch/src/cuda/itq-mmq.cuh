// MMQ for the trellis types, TQ1_0 and TQ2_0: tiles of signed bytes in the layout of upstream's Q8_0 tiles. Weights have one scale a
// block, and quantize_mmq_q8_1_128 gives the activations one for 128 values (in all four places of D4), so the product on
// tensor cores stays in integers for 128 values, where upstream's scales after every 32. With blocks of 64 both have one for
// 64. Included by mmq.cuh after upstream's load_tiles and vec_dot functions.
//
// Tiles of trellis types are in decoded order (itq-decode.cuh), as quantize_mmq_q8_1_128 stores the activations. The integer
// part of the zero-point is folded into the bytes, so the zero-points that are in use, 0 and 2, cost nothing. What is
// left of any other goes into the padding of the tile row as a float and is applied in a pass of its own when a warp
// meets one.

#pragma once

#include "itq-vecdot.cuh"

#if defined(AMD_MFMA_AVAILABLE) || defined(TURING_MMA_AVAILABLE) || defined(AMD_WMMA_AVAILABLE)
#    define ITQ_MMQ_MMA_LAYOUT true
#else
#    define ITQ_MMQ_MMA_LAYOUT false
#endif

// Where things are in a tile, in 32-bit words from its start.
template <ggml_type type, int J, bool fallback> struct itq_mmq_tile {
    // A function, not a constant: clang's HIP has no initializers at class scope that call device functions.
    static constexpr __device__ int rows() { return ggml_cuda_mmq_get_I(type, J, fallback); }
    // Row stride of the values: 64 words and padding.
    static constexpr __device__ int stride() {
        return ITQ_MMQ_MMA_LAYOUT ? ggml_cuda_mmq_get_sram_stride(type, J, fallback) : 2 * MMQ_TILE_NE_K + 1;
    }
    // The 8 scales of row i.
    static constexpr __device__ int scale(const int i) {
        return ITQ_MMQ_MMA_LAYOUT ? i * stride() + 2 * MMQ_TILE_NE_K
                                  : mmq_get_dp4a_tile_x_sizes(GGML_TYPE_Q8_0, rows()).qs +
                                        i * (2 * MMQ_TILE_NE_K / QI8_0) + i / (QI8_0 / 2);
    }
    // A word of padding of row i that upstream's product never reads.
    static constexpr __device__ int padding(const int i) {
        return i * stride() + 2 * MMQ_TILE_NE_K + (ITQ_MMQ_MMA_LAYOUT ? 2 * MMQ_TILE_NE_K / QI8_0 : 0);
    }
};

// Words i .. i + 3 of shared memory; with the MMA layout they are 16 byte aligned.
static __device__ __forceinline__ void itq_mmq_load4(uint32_t * dst, const int * src) {
    if constexpr (ITQ_MMQ_MMA_LAYOUT) {
        const int4 v = *((const int4 *) src);
        dst[0]       = v.x;
        dst[1]       = v.y;
        dst[2]       = v.z;
        dst[3]       = v.w;
    } else {
#pragma unroll
        for (int l = 0; l < 4; ++l) {
            dst[l] = src[l];
        }
    }
}
static __device__ __forceinline__ void itq_mmq_store4(int * dst, const uint32_t * src) {
    if constexpr (ITQ_MMQ_MMA_LAYOUT) {
        *((int4 *) dst) = make_int4(src[0], src[1], src[2], src[3]);
    } else {
#pragma unroll
        for (int l = 0; l < 4; ++l) {
            dst[l] = src[l];
        }
    }
}

// Types with blocks of 256 and more than one symbol bit. Upstream names the functions of all types for each: of is the type
// that this one is for.
template <ggml_type of, ggml_type type, int J, bool fallback>
static __device__ __forceinline__ void ggml_cuda_mmq_load_tiles_itq_s(const char * __restrict__ x,
                                                                      int * __restrict__ x_tile, const int kbx0,
                                                                      const int i_max, const int stride) {
    using tile                   = itq_mmq_tile<type, J, fallback>;
    using block                  = typename itq_traits<of>::block;
    constexpr int bits           = itq_traits<of>::bits;
    constexpr int third_word     = sizeof(block::qs) / 4 - 8;
    constexpr int sel_word       = sizeof(block::qs) / 4;
    constexpr int words          = sizeof(block) / 4;  // a scale that is half a word is not among them
    constexpr int I              = tile::rows();
    constexpr int rows_per_group = 16;  // a group of 32 lanes loads and decodes its own rows, two lanes to a row
    constexpr int rows_per_pass  = ggml_cuda_mmq_get_nthreads(type, J, fallback) / 32 * rows_per_group;

    const int tid  = threadIdx.y * ggml_cuda_get_physical_warp_size() + threadIdx.x;
    const int lane = tid % 32;

#pragma unroll
    for (int i0 = 0; i0 < I; i0 += rows_per_pass) {
        const int i_group = i0 + tid / 32 * rows_per_group;
        if (I % rows_per_pass != 0 && i_group >= I) {
            break;
        }

        // The blocks as they are, one after the other and so coalesced, into the rows that they will be decoded to.
        if (words == 32 || lane < words) {
            uint32_t raw[rows_per_group];
#pragma unroll
            for (int r = 0; r < rows_per_group; ++r) {
                // Rows past the end repeat the last one in a tile row of their own; nothing is written back from those.
                const int i_src = fallback ? min(i_group + r, i_max) : i_group + r;
                raw[r]          = itq_load_word<block>(((const block *) x)[kbx0 + i_src * stride].qs, lane);
            }
#pragma unroll
            for (int r = 0; r < rows_per_group; ++r) {
                x_tile[(i_group + r) * tile::stride() + lane] = raw[r];
            }
        }
        ggml_cuda_syncwarp();

        // Lanes 0..15 take the half j = 0 of the rows, 16..31 the half j = 1: eight neighbours, one phase of a 16 byte
        // access, then have rows whose stride spreads them over all banks.
        const int i = i_group + lane % rows_per_group;
        const int j = lane / rows_per_group;

        uint32_t q[8], sel[8], third[8] = {};
        itq_mmq_load4(q + 0, x_tile + i * tile::stride() + 8 * j + 0);
        itq_mmq_load4(q + 4, x_tile + i * tile::stride() + 8 * j + 4);
        itq_mmq_load4(sel + 0, x_tile + i * tile::stride() + sel_word + 0);
        itq_mmq_load4(sel + 4, x_tile + i * tile::stride() + sel_word + 4);
        if constexpr (bits == 3) {
            itq_mmq_load4(third + 0, x_tile + i * tile::stride() + third_word + 0);
            itq_mmq_load4(third + 4, x_tile + i * tile::stride() + third_word + 4);
        }
        float2   dz;
        uint32_t before;  // the first chunk
        if constexpr (words * 4 == sizeof(block)) {
            const uint32_t last = x_tile[i * tile::stride() + words - 1];
            dz                  = itq_half2_bits(last & ITQ_WITHOUT_STATE);
            before              = itq_word_before(last >> 16);
        } else {
            const block & bxi = ((const block *) x)[kbx0 + (fallback ? min(i, i_max) : i) * stride];
            dz                = itq_load_scale(bxi);
            before            = itq_load_before(bxi, 0);
        }
        ggml_cuda_syncwarp();  // both lanes of a row have read it

        const float z_int = fminf(fmaxf(rintf(dz.y), -64.0f), 64.0f);
        const int   z     = (int) z_int;

        uint32_t sym[2][4];
        itq_transpose_symbols(q, sym);
#pragma unroll
        for (int g = 0; g < 4; ++g) {
            // Selects between registers: j differs within the warp, so it must not index them.
            const uint32_t  cur   = j == 0 ? sel[2 * g] : sel[2 * g + 1];
            const uint32_t  prev  = j == 0 ? (g == 0 ? before : sel[g == 0 ? 0 : 2 * g - 1]) : sel[2 * g];
            const uint32_t  q2    = j == 0 ? third[2 * g] : third[2 * g + 1];
            const itq_pairs pairs = itq_pairs_of_chunk<bits>(cur, prev, q2);
            uint32_t        level[8];
#pragma unroll
            for (int l = 0; l < 4; ++l) {
                const itq_indices index = itq_indices_of<bits>(pairs, l, itq_symbols_of_group(sym, g, l));
                level[2 * l + 0]        = itq_levels_minus<of>(index, z);
                level[2 * l + 1]        = itq_levels_minus<of>(itq_indices::upper_half(index), z);
            }
            itq_mmq_store4(x_tile + i * tile::stride() + 32 * j + 8 * g + 0, level + 0);
            itq_mmq_store4(x_tile + i * tile::stride() + 32 * j + 8 * g + 4, level + 4);
        }

        const float d    = dz.x * (1.0f / 32.0f);
        float *     x_df = (float *) x_tile;
#pragma unroll
        for (int l = 0; l < 4; ++l) {
            x_df[tile::scale(i) + 4 * j + l] = d;
        }
        if (itq_traits<of>::has_z && j == 0) {
            x_df[tile::padding(i)] = d * (z_int - dz.y);
        }
    }
}

template <ggml_type type, int J, bool fallback>
static __device__ __forceinline__ void ggml_cuda_mmq_load_tiles_itq2_s(const char * __restrict__ x,
                                                                       int * __restrict__ x_tile, const int kbx0,
                                                                       const int i_max, const int stride) {
    using tile                    = itq_mmq_tile<type, J, fallback>;
    constexpr int I               = tile::rows();
    constexpr int threads_per_row = 8;  // one chunk each
    constexpr int rows_per_pass   = ggml_cuda_mmq_get_nthreads(type, J, fallback) / threads_per_row;
    static_assert(I % rows_per_pass == 0, "rows that no thread loads");

    const int tid = threadIdx.y * ggml_cuda_get_physical_warp_size() + threadIdx.x;
    const int k   = tid % threads_per_row;

#pragma unroll
    for (int i0 = 0; i0 < I; i0 += rows_per_pass) {
        int i = i0 + tid / threads_per_row;
        if (fallback) {
            i = min(i, i_max);
        }
        const block_itq2_s * bxi = (const block_itq2_s *) x + kbx0 + i * stride;

        const itq_pairs pairs =
            itq_pairs_of_chunk<1>(tq_load_word(bxi->sel, k), itq_load_before(*bxi, k), tq_load_word(bxi->qs, k));
        // The weights 4n and 4n + 1, then 4n + 2 and 4n + 3, in odd chunks the other way round: so the eight threads of a
        // row, one phase of a 16 byte access, reach all banks.
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const int       part  = (k + h) % 2;
            const itq_pairs moved = { pairs.even >> 2 * part, pairs.odd >> 2 * part, pairs.above_even >> 2 * part,
                                      pairs.above_odd >> 2 * part };
            uint32_t        level[4];
#pragma unroll
            for (int l = 0; l < 2; ++l) {
                const itq_indices index = itq_indices_of<1>(moved, l);
                level[2 * l + 0]        = itq_levels_minus<GGML_TYPE_ITQ2_S>(index, 0);
                level[2 * l + 1]        = itq_levels_minus<GGML_TYPE_ITQ2_S>(itq_indices::upper_half(index), 0);
            }
            itq_mmq_store4(x_tile + i * tile::stride() + 32 * (k % 2) + 8 * (k / 2) + 4 * part, level);
        }
        ((float *) x_tile)[tile::scale(i) + k] = itq_scale_beside_state(bxi->d) * (1.0f / 32.0f);
    }
}

// Types with blocks of 64, four of them side by side, in decoded order within each chunk. Past the end of a row whose length
// is no multiple of 256 stand blocks of the next one or, behind the last, the padding that upstream gives to quantized
// tensors; their activations are 0.
template <ggml_type of, ggml_type type, int J, bool fallback>
static __device__ __forceinline__ void ggml_cuda_mmq_load_tiles_itq_n(const char * __restrict__ x,
                                                                      int * __restrict__ x_tile, const int kbx0,
                                                                      const int i_max, const int stride) {
    using tile                    = itq_mmq_tile<type, J, fallback>;
    using block                   = typename itq_traits<of>::block;
    constexpr int I               = tile::rows();
    constexpr int threads_per_row = 8;  // one chunk each
    constexpr int rows_per_pass   = ggml_cuda_mmq_get_nthreads(type, J, fallback) / threads_per_row;
    constexpr int rows_per_phase  = 8;
    static_assert(I % rows_per_pass == 0 && rows_per_pass % rows_per_phase == 0, "rows that no thread loads");

    // Eight neighbours, one phase of a 16 byte access, have rows whose stride spreads them over all banks.
    const int tid = threadIdx.y * ggml_cuda_get_physical_warp_size() + threadIdx.x;
    const int k   = tid / rows_per_phase % threads_per_row;

#pragma unroll
    for (int i0 = 0; i0 < I; i0 += rows_per_pass) {
        int i = i0 + tid / (rows_per_phase * threads_per_row) * rows_per_phase + tid % rows_per_phase;
        if (fallback) {
            i = min(i, i_max);
        }
        const block & bxi = ((const block *) x)[kbx0 + i * stride + k / 2];

        itq_indices index[8];
        uint32_t    level[8];
        itq_load_chunk<of>(bxi, k % 2, index);
#pragma unroll
        for (int w = 0; w < 8; ++w) {
            level[w] = itq_levels_minus<of>(index[w], 0);
        }
        itq_mmq_store4(x_tile + i * tile::stride() + 8 * k + 0, level + 0);
        itq_mmq_store4(x_tile + i * tile::stride() + 8 * k + 4, level + 4);
        ((float *) x_tile)[tile::scale(i) + k] = itq_scale_beside_state(bxi.d) * (1.0f / 32.0f);
    }
}

template <ggml_type type, int J, bool fallback>
static __device__ __forceinline__ void ggml_cuda_mmq_load_tiles_tq2_0(const char * __restrict__ x,
                                                                      int * __restrict__ x_tile, const int kbx0,
                                                                      const int i_max, const int stride) {
    using tile                    = itq_mmq_tile<type, J, fallback>;
    constexpr int I               = tile::rows();
    constexpr int threads_per_row = 16;  // one word of qs each
    constexpr int rows_per_pass   = ggml_cuda_mmq_get_nthreads(type, J, fallback) / threads_per_row;

    const int tid = threadIdx.y * ggml_cuda_get_physical_warp_size() + threadIdx.x;
    const int m   = tid % threads_per_row;

#pragma unroll
    for (int i0 = 0; i0 < I; i0 += rows_per_pass) {
        int i = i0 + tid / threads_per_row;
        if (fallback) {
            i = min(i, i_max);
        }
        const block_tq2_0 * bxi = (const block_tq2_0 *) x + kbx0 + i * stride;

        const uint32_t q = tq_load_word(bxi->qs, m);
#pragma unroll
        for (int g = 0; g < 4; ++g) {
            x_tile[i * tile::stride() + 32 * (m / 8) + 8 * g + m % 8] = tq_signed(tq2_0_digits(q, g));
        }
        if (m < 8) {
            ((float *) x_tile)[tile::scale(i) + m] = __half2float(bxi->d);
        }
    }
}

template <ggml_type type, int J, bool fallback>
static __device__ __forceinline__ void ggml_cuda_mmq_load_tiles_tq1_0(const char * __restrict__ x,
                                                                      int * __restrict__ x_tile, const int kbx0,
                                                                      const int i_max, const int stride) {
    using tile                    = itq_mmq_tile<type, J, fallback>;
    constexpr int I               = tile::rows();
    constexpr int threads_per_row = 16;  // 12 words of qs, 1 of qh
    constexpr int rows_per_pass   = ggml_cuda_mmq_get_nthreads(type, J, fallback) / threads_per_row;

    const int tid  = threadIdx.y * ggml_cuda_get_physical_warp_size() + threadIdx.x;
    const int m    = tid % threads_per_row;
    // Tile word of the first digit, distance of the next, number of digits.
    const int dst  = m < 8 ? m : m < 12 ? 40 + (m - 8) : 60;
    const int step = m < 8 ? 8 : m < 12 ? 4 : 1;
    const int n    = m < 12 ? 5 : m < 13 ? 4 : 0;

#pragma unroll
    for (int i0 = 0; i0 < I; i0 += rows_per_pass) {
        int i = i0 + tid / threads_per_row;
        if (fallback) {
            i = min(i, i_max);
        }
        const block_tq1_0 * bxi = (const block_tq1_0 *) x + kbx0 + i * stride;

        tq1_0_state q = tq1_0_begin(m < 12 ? tq_load_word(bxi->qs, m) : tq_load_word(bxi->qh, 0));
#pragma unroll
        for (int l = 0; l < 5; ++l) {
            const uint32_t digits = tq1_0_next(q);
            if (l < n) {
                x_tile[i * tile::stride() + dst + l * step] = tq_signed(digits);
            }
        }
        if (m < 8) {
            ((float *) x_tile)[tile::scale(i) + m] = __half2float(bxi->d);
        }
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// Products over the 128 values from word k00 of the tile on. Those of a scale are added up as integers: all, or 64.

template <ggml_type type, int J, bool fallback>
static __device__ __forceinline__ void ggml_cuda_mmq_vec_dot_tq_q8_1_mma(const int * __restrict__ x,
                                                                         const int * __restrict__ y,
                                                                         float * __restrict__ sum, const int k00) {
#if defined(AMD_MFMA_AVAILABLE) || defined(AMD_WMMA_AVAILABLE)
    ggml_cuda_mmq_vec_dot_q8_0_q8_1_mma<type, J, fallback, MMQ_Q8_1_DS_LAYOUT_D4>(x, y, sum, k00);
#else
    typedef ggml_cuda_mma::tile<16, 8, int> tile_A;
    typedef ggml_cuda_mma::tile<8, 8, int>  tile_B;
    typedef ggml_cuda_mma::tile<16, 8, int> tile_C;

    using tile_x                = itq_mmq_tile<type, J, fallback>;
    constexpr int rows_per_warp = ggml_cuda_mmq_get_rows_per_warp(type, J, fallback);
    constexpr int ntx           = rows_per_warp / tile_C::I;  // Number of x minitiles per warp.
    constexpr int nsteps        = MMQ_TILE_NE_K / QI8_0;
    constexpr int nscales       = ggml_cuda_is_itq_64(type) ? 2 : 1;  // of the 128 values
    constexpr int scale_steps   = nsteps / nscales;

    y += (threadIdx.y % ntx) * (tile_C::J * MMQ_TILE_Y_K);
    const float * x_f  = (const float *) x;
    const int *   y_qs = y + 4;
    const float * y_df = (const float *) y;
    const int     i0   = (threadIdx.y / ntx) * rows_per_warp;

    tile_A A[ntx][nsteps];
    float  dA[ntx][nscales][tile_C::ne / 2];
#    pragma unroll
    for (int n = 0; n < ntx; ++n) {
#    pragma unroll
        for (int s = 0; s < nsteps; ++s) {
            load_ldmatrix(A[n][s], x + (i0 + n * tile_A::I) * tile_x::stride() + k00 + s * QI8_0, tile_x::stride());
        }
#    pragma unroll
        for (int l = 0; l < tile_C::ne / 2; ++l) {
            const float * scales = x_f + tile_x::scale(i0 + n * tile_A::I + tile_C::get_i(2 * l));
#    pragma unroll
            for (int g = 0; g < nscales; ++g) {
                dA[n][g][l] = scales[nscales == 1 ? 0 : k00 / QI8_0 + g * scale_steps];
            }
        }
    }

#    pragma unroll
    for (int j0 = 0; j0 < J; j0 += ntx * tile_C::J) {
#    pragma unroll
        for (int g = 0; g < nscales; ++g) {
            tile_C C[ntx];
#    pragma unroll
            for (int n = 0; n < ntx; ++n) {
#    pragma unroll
                for (int l = 0; l < tile_C::ne; ++l) {
                    C[n].x[l] = ITQ_FLOAT_ORIGIN_BITS;  // a sum is below 2^22
                }
            }
#    pragma unroll
            for (int s = g * scale_steps; s < (g + 1) * scale_steps; ++s) {
                tile_B B;
                load_generic(B, y_qs + j0 * MMQ_TILE_Y_K + s * QI8_0, MMQ_TILE_Y_K);
#    pragma unroll
                for (int n = 0; n < ntx; ++n) {
                    mma(C[n], A[n][s], B);
                }
            }
#    pragma unroll
            for (int l = 0; l < tile_C::ne; ++l) {
                const float dB = y_df[(j0 + tile_C::get_j(l)) * MMQ_TILE_Y_K + g * scale_steps];
#    pragma unroll
                for (int n = 0; n < ntx; ++n) {
                    sum[(j0 / tile_C::J + n) * tile_C::ne + l] +=
                        dA[n][g][l / 2] * dB * (__int_as_float(C[n].x[l]) - ITQ_FLOAT_ORIGIN);
                }
            }
        }
    }
#endif  // defined(AMD_MFMA_AVAILABLE) || defined(AMD_WMMA_AVAILABLE)
}

// For ITQ3_S also the rest of the zero-points where there is one. That rest times the sum of the activations is the same
// product with a row of ones for the weights.

template <ggml_type type, int J, bool fallback>
static __device__ __forceinline__ void ggml_cuda_mmq_vec_dot_itq3_s_q8_1_dp4a(const int * __restrict__ x,
                                                                              const int * __restrict__ y,
                                                                              float * __restrict__ sum, const int k00) {
    ggml_cuda_mmq_vec_dot_q8_0_q8_1_dp4a<type, J, fallback>(x, y, sum, k00);

    using tile              = itq_mmq_tile<type, J, fallback>;
    constexpr int I         = tile::rows();
    constexpr int warp_size = ggml_cuda_get_physical_warp_size();
    constexpr int nwarps    = ggml_cuda_mmq_get_nthreads(type, J, fallback) / warp_size;
    const float * x_f       = (const float *) x;
    const float * y_df      = (const float *) y;
    const int *   y_qs      = y + 4;

    bool any = false;
#pragma unroll
    for (int i0 = 0; i0 < I; i0 += warp_size) {
        any = any || x_f[tile::padding(i0 + threadIdx.x)] != 0.0f;
    }
    if (!warp_reduce_any<warp_size>(any)) {
        return;
    }

#pragma unroll
    for (int j0 = 0; j0 < J; j0 += nwarps) {
        const int j    = j0 + threadIdx.y;
        int       sumi = 0;
#pragma unroll
        for (int l = 0; l < MMQ_TILE_NE_K; ++l) {
            sumi = ggml_cuda_dp4a(0x01010101, y_qs[j * MMQ_TILE_Y_K + l], sumi);
        }
        const float sum_y = y_df[j * MMQ_TILE_Y_K] * sumi;
#pragma unroll
        for (int i0 = 0; i0 < I; i0 += warp_size) {
            sum[j0 / nwarps * I / warp_size + i0 / warp_size] += x_f[tile::padding(i0 + threadIdx.x)] * sum_y;
        }
    }
}

template <ggml_type type, int J, bool fallback>
static __device__ __forceinline__ void ggml_cuda_mmq_vec_dot_itq3_s_q8_1_mma(const int * __restrict__ x,
                                                                             const int * __restrict__ y,
                                                                             float * __restrict__ sum, const int k00) {
    ggml_cuda_mmq_vec_dot_tq_q8_1_mma<type, J, fallback>(x, y, sum, k00);

#if defined(AMD_MFMA_AVAILABLE) || defined(AMD_WMMA_AVAILABLE)
    constexpr data_layout                                         input_layout = get_input_data_layout();
    typedef ggml_cuda_mma::tile<16, 8, int, input_layout>         tile_A;
    typedef ggml_cuda_mma::tile<16, 8, int, input_layout>         tile_B;
    typedef ggml_cuda_mma::tile<16, 16, int, DATA_LAYOUT_J_MAJOR> tile_C;
#else
    typedef ggml_cuda_mma::tile<16, 8, int> tile_A;
    typedef ggml_cuda_mma::tile<8, 8, int>  tile_B;
    typedef ggml_cuda_mma::tile<16, 8, int> tile_C;
#endif  // defined(AMD_MFMA_AVAILABLE) || defined(AMD_WMMA_AVAILABLE)

    using tile_x                = itq_mmq_tile<type, J, fallback>;
    constexpr int rows_per_warp = ggml_cuda_mmq_get_rows_per_warp(type, J, fallback);
    constexpr int ntx           = rows_per_warp / tile_C::I;  // Number of x minitiles per warp.
    const float * x_f           = (const float *) x;

    const int  i0  = (threadIdx.y / ntx) * rows_per_warp;
    const bool any = x_f[tile_x::padding(i0 + threadIdx.x % rows_per_warp)] != 0.0f;
    if (!warp_reduce_any<ggml_cuda_get_physical_warp_size()>(any)) {
        return;
    }

    y += (threadIdx.y % ntx) * (tile_C::J * MMQ_TILE_Y_K);
    const int *   y_qs = y + 4;
    const float * y_df = (const float *) y;

    tile_A ones;
#pragma unroll
    for (int l = 0; l < tile_A::ne; ++l) {
        ones.x[l] = 0x01010101;
    }

#pragma unroll
    for (int j0 = 0; j0 < J; j0 += ntx * tile_C::J) {
        tile_C C;
#pragma unroll 1  // rare: no registers for it
        for (int k01 = 0; k01 < MMQ_TILE_NE_K; k01 += QI8_0) {
            tile_B B;
#if defined(AMD_MFMA_AVAILABLE) || defined(AMD_WMMA_AVAILABLE)
            load_ldmatrix(B, y_qs + j0 * MMQ_TILE_Y_K + k01, MMQ_TILE_Y_K);
#else
            load_generic(B, y_qs + j0 * MMQ_TILE_Y_K + k01, MMQ_TILE_Y_K);
#endif  // defined(AMD_MFMA_AVAILABLE) || defined(AMD_WMMA_AVAILABLE)
            mma(C, ones, B);
        }
        float sum_y[tile_C::ne];
#pragma unroll
        for (int l = 0; l < tile_C::ne; ++l) {
            sum_y[l] = C.x[l] * y_df[(j0 + tile_C::get_j(l)) * MMQ_TILE_Y_K];
        }
#pragma unroll
        for (int n = 0; n < ntx; ++n) {
#pragma unroll
            for (int l = 0; l < tile_C::ne; ++l) {
                const int i = i0 + n * tile_C::I + tile_C::get_i(l);
                sum[(j0 / tile_C::J + n) * tile_C::ne + l] += x_f[tile_x::padding(i)] * sum_y[l];
            }
        }
    }
}

// Functions of a type for mmq.cuh: the loader of its tiles, its product, without tensor cores and with them.
#define ITQ_CUDA_MMQ_DP4A(NAME, load, vec_dot)                                                          \
    case GGML_TYPE_##NAME:                                                                              \
        return ggml_cuda_mmq_util_funcs(VDR_ITQ_Q8_1_MMQ, load,                                         \
                                        ggml_cuda_mmq_vec_dot_##vec_dot##_q8_1_dp4a<type, J, fallback>, \
                                        ggml_cuda_mmq_write_back_dp4a<type, J, fallback>);
#define ITQ_CUDA_MMQ_MMA(NAME, load, vec_dot)                                                                    \
    case GGML_TYPE_##NAME:                                                                                       \
        return ggml_cuda_mmq_util_funcs(-1, load, ggml_cuda_mmq_vec_dot_##vec_dot##_q8_1_mma<type, J, fallback>, \
                                        ggml_cuda_mmq_write_back_mma<type, J, fallback>);
#define ITQ_CUDA_MMQ_LOAD(name)         (ggml_cuda_mmq_load_tiles_##name<type, J, fallback>)
#define ITQ_CUDA_MMQ_LOAD_256(NAME)     (ggml_cuda_mmq_load_tiles_itq_s<GGML_TYPE_##NAME, type, J, fallback>)
#define ITQ_CUDA_MMQ_LOAD_64(NAME)      (ggml_cuda_mmq_load_tiles_itq_n<GGML_TYPE_##NAME, type, J, fallback>)
#define ITQ_CUDA_MMQ_DP4A_64(NAME, ...) ITQ_CUDA_MMQ_DP4A(NAME, ITQ_CUDA_MMQ_LOAD_64(NAME), q8_0)
#define ITQ_CUDA_MMQ_MMA_64(NAME, ...)  ITQ_CUDA_MMQ_MMA(NAME, ITQ_CUDA_MMQ_LOAD_64(NAME), tq)
// X of every type, X_64 of those with blocks of 64; other: the product of types without a zero-point.
#define ITQ_CUDA_MMQ_CASES(X, X_64, other)           \
    X(ITQ3_S, ITQ_CUDA_MMQ_LOAD_256(ITQ3_S), itq3_s) \
    X(ITQ4_S, ITQ_CUDA_MMQ_LOAD_256(ITQ4_S), other)  \
    X(ITQ2_S, ITQ_CUDA_MMQ_LOAD(itq2_s), other)      \
    X(TQ1_0, ITQ_CUDA_MMQ_LOAD(tq1_0), other)        \
    X(TQ2_0, ITQ_CUDA_MMQ_LOAD(tq2_0), other)        \
    ITQ_TYPES_64(X_64)
#define ITQ_CUDA_MMQ_DP4A_CASES ITQ_CUDA_MMQ_CASES(ITQ_CUDA_MMQ_DP4A, ITQ_CUDA_MMQ_DP4A_64, q8_0)
#define ITQ_CUDA_MMQ_MMA_CASES  ITQ_CUDA_MMQ_CASES(ITQ_CUDA_MMQ_MMA, ITQ_CUDA_MMQ_MMA_64, tq)

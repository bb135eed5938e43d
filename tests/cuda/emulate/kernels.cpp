// The CUDA kernels of this repository behind a C interface, run by launch.h. tests/cuda/test_emulated.py compiles and
// calls it.

#include "common.cuh"
#include "mmq.cuh"

#include "itq3s-dequantize.cuh"
#include "itq3s-mmq.cuh"
#include "itq3s-mmvq.cuh"
#include "itq3s-quantize.cuh"
#include "itq3s-vecdot.cuh"

#include <algorithm>

// As itq3s-quantize.cu launches it.
extern "C" void emulate_quantize_mmvq(const int rotate, const float * x, void * y, const int64_t ne00,
                                      const int64_t s01, const int64_t s02, const int64_t s03, const int64_t ne0,
                                      const int64_t ne1, const int64_t ne2, const int64_t ne3) {
    const dim3 grid((ne0 / ITQ3_S_BLOCK + ITQ3_S_QUANTIZE_WARPS - 1) / ITQ3_S_QUANTIZE_WARPS, ne1, ne2 * ne3);
    emulate::launch(grid, dim3(ITQ3_S_LANES, ITQ3_S_QUANTIZE_WARPS),
                    rotate ? quantize_q8_1x4<true> : quantize_q8_1x4<false>, x, y, ne00, s01, s02, s03, ne0,
                    (uint32_t) ne1, init_fastdiv_values(ne2));
}

extern "C" void emulate_quantize_mmq(const float * x, const int32_t * ids, void * y, const int64_t ne00,
                                     const int64_t s01, const int64_t s02, const int64_t s03, const int64_t ne0,
                                     const int64_t ne1, const int64_t ne2, const int64_t ne3) {
    const dim3 grid(ne1, (ne0 / ITQ3_S_BLOCK + ITQ3_S_QUANTIZE_WARPS - 1) / ITQ3_S_QUANTIZE_WARPS, ne2 * ne3);
    emulate::launch(grid, dim3(ITQ3_S_LANES, ITQ3_S_QUANTIZE_WARPS), quantize_mmq_q8_1_itq3_s<false>, x, ids, y, ne00,
                    s01, s02, s03, ne0, (int) ne1, (int) ne2, 0);
}

extern "C" void emulate_quantize_scatter_mmq(const float * x, const int32_t * ids, void * y, const int64_t ne00,
                                             const int64_t stride_token, const int64_t ne0, const int64_t n_tokens,
                                             const int64_t nrows_dst, const int n_expert_used) {
    const dim3 grid(n_tokens, (ne0 / ITQ3_S_BLOCK + ITQ3_S_QUANTIZE_WARPS - 1) / ITQ3_S_QUANTIZE_WARPS, 1);
    emulate::launch(grid, dim3(ITQ3_S_LANES, ITQ3_S_QUANTIZE_WARPS), quantize_mmq_q8_1_itq3_s<true>, x, ids, y, ne00,
                    (int64_t) 0, stride_token, (int64_t) 0, ne0, (int) nrows_dst, 1, n_expert_used);
}

// type: 0 ITQ3_S, 1 TQ1_0, 2 TQ2_0. dst: 0 float, 1 half, 2 bfloat16. As itq3s-convert.cuh launches it, with at most
// max_rows rows and channels in the grid.
template <typename dst_t>
static void dequantize(const int type, const void * x, void * y, const int64_t * ne, const int64_t * s,
                       const int64_t max_rows) {
    const int64_t nblocks = ne[0] / ITQ3_S_BLOCK;
    const int64_t ne0203  = ne[2] * ne[3];
    const dim3    grid((nblocks + ITQ3_S_DEQUANTIZE_WARPS - 1) / ITQ3_S_DEQUANTIZE_WARPS, std::min(ne[1], max_rows),
                       std::min(ne0203, max_rows));
    const auto    kernel = type == 0   ? dequantize_rows_256<dst_t, dequantize_itq3_s<dst_t>>
                           : type == 1 ? dequantize_rows_256<dst_t, dequantize_tq1_0<dst_t>>
                                       : dequantize_rows_256<dst_t, dequantize_tq2_0<dst_t>>;
    emulate::launch(grid, dim3(ITQ3_S_LANES, ITQ3_S_DEQUANTIZE_WARPS), kernel, x, (dst_t *) y, nblocks, ne[1], ne0203,
                    init_fastdiv_values(ne[2]), s[0], s[1], s[2]);
}
extern "C" void emulate_dequantize(const int type, const int dst, const void * x, void * y, const int64_t * ne,
                                   const int64_t * s, const int64_t max_rows) {
    switch (dst) {
        case 0:
            dequantize<float>(type, x, y, ne, s, max_rows);
            break;
        case 1:
            dequantize<half>(type, x, y, ne, s, max_rows);
            break;
        case 2:
            dequantize<nv_bfloat16>(type, x, y, ne, s, max_rows);
            break;
        default:
            abort();
    }
}

// A row of weights times activations as MMVQ splits it over lanes: the lanes' sums are added.
extern "C" float emulate_vec_dot(const int type, const void * x, const void * y, const int nblocks, const int kbx0) {
    const auto vec_dot = type == 0 ? vec_dot_itq3_s_q8_1 : type == 1 ? vec_dot_tq1_0_q8_1 : vec_dot_tq2_0_q8_1;
    float      sum     = 0.0f;
    for (int kbx = 0; kbx < nblocks; ++kbx) {
        for (int iqs = 0; iqs < 16; iqs += VDR_ITQ3_S_Q8_1_MMVQ) {
            sum += vec_dot(x, (const block_q8_1 *) y + kbx * (QK_K / QK8_1), kbx0 + kbx, iqs);
        }
    }
    return sum;
}

uint4 itq3_s_mmvq_shared[96 * 1024 / sizeof(uint4)];  // the shared memory of the kernel's one CUDA block at a time

// The kernel for one vector. dims: blocks of a row, rows, channels of x, y and dst, samples of x and dst, CUDA blocks
// that share the rows. strides: x by row, channel, sample (blocks); y by channel, sample (q8_1 blocks); dst by channel,
// sample.
template <ggml_type type>
static void mmvq(const void * x, const void * y, const int32_t * ids, const ggml_cuda_mm_fusion_args_device & fusion,
                 float * dst, const int64_t * dims, const int64_t * s) {
    if (itq3_s_mmvq_shared_bytes(ggml_cuda_type_traits<type>::bs, dims[0]) > sizeof(itq3_s_mmvq_shared)) {
        emulate::fail("too long a row");
    }
    memset(itq3_s_mmvq_shared, 0xA5, sizeof(itq3_s_mmvq_shared));
    const bool has_fusion = fusion.gate || fusion.x_bias;
    emulate::launch(dim3(dims[7], dims[4], dims[6]), dim3(32, ITQ3_S_MMVQ_WARPS),
                    has_fusion ? mul_mat_vec_q_itq3_s<type, true> : mul_mat_vec_q_itq3_s<type, false>, x, y, ids,
                    fusion, dst, (int) dims[0], (int) dims[1], init_fastdiv_values(dims[3]), s[0],
                    init_fastdiv_values(ids ? 1 : dims[4] / dims[2]), s[1], s[3], s[5],
                    init_fastdiv_values(dims[6] / dims[5]), s[2], s[4], s[6]);
}
extern "C" void emulate_mmvq(const int type, const void * x, const void * y, const int32_t * ids, const void * gate,
                             const float * x_bias, const float * gate_bias, const int glu_op, float * dst,
                             const int64_t * dims, const int64_t * strides) {
    ggml_cuda_mm_fusion_args_device fusion;
    fusion.gate      = gate;
    fusion.x_bias    = x_bias;
    fusion.gate_bias = gate_bias;
    fusion.glu_op    = (ggml_glu_op) glu_op;
    fusion.glu_limit = 0.5f;
    switch (type) {
        case 0:
            mmvq<GGML_TYPE_ITQ3_S>(x, y, ids, fusion, dst, dims, strides);
            break;
        case 1:
            mmvq<GGML_TYPE_TQ1_0>(x, y, ids, fusion, dst, dims, strides);
            break;
        case 2:
            mmvq<GGML_TYPE_TQ2_0>(x, y, ids, fusion, dst, dims, strides);
            break;
        default:
            abort();
    }
}

// A tile of 128 rows (i_max + 1 of them there) times J columns over nblocks blocks of 256, as mul_mat_q goes about it.
// y: block_q8_1_mmq, 128 values of all columns side by side. out: J x 128.
template <ggml_type type, int J>
static void mmq_tile(const char * x, const int * y, float * out, const int kbx0, const int i_max, const int stride,
                     const int nblocks, int * shared) {
    constexpr int I                = 128;
    int *         tile_y           = shared;
    int *         tile_x           = shared + J * MMQ_TILE_Y_K;
    float         sum[J * I / 256] = { 0.0f };
    for (int kb = 0; kb < nblocks; ++kb) {
        if constexpr (type == GGML_TYPE_ITQ3_S) {
            ggml_cuda_mmq_load_tiles_itq3_s<type, J, true>(x, tile_x, kbx0 + kb, i_max, stride);
        } else if constexpr (type == GGML_TYPE_TQ1_0) {
            ggml_cuda_mmq_load_tiles_tq1_0<type, J, true>(x, tile_x, kbx0 + kb, i_max, stride);
        } else {
            ggml_cuda_mmq_load_tiles_tq2_0<type, J, true>(x, tile_x, kbx0 + kb, i_max, stride);
        }
        for (int half_block = 0; half_block < 2; ++half_block) {
            for (int l = threadIdx.y * 32 + threadIdx.x; l < J * MMQ_TILE_Y_K; l += 256) {
                tile_y[l] = y[(2 * kb + half_block) * J * MMQ_TILE_Y_K + l];
            }
            __syncthreads();
#ifdef TURING_MMA_AVAILABLE
            if constexpr (type == GGML_TYPE_ITQ3_S) {
                ggml_cuda_mmq_vec_dot_itq3_s_q8_1_mma<type, J, true>(tile_x, tile_y, sum, half_block * MMQ_TILE_NE_K);
            } else {
                ggml_cuda_mmq_vec_dot_q8_0_q8_1_mma<type, J, true, MMQ_Q8_1_DS_LAYOUT_D4>(tile_x, tile_y, sum,
                                                                                          half_block * MMQ_TILE_NE_K);
            }
#else
            if constexpr (type == GGML_TYPE_ITQ3_S) {
                ggml_cuda_mmq_vec_dot_itq3_s_q8_1_dp4a<type, J, true>(tile_x, tile_y, sum, half_block * MMQ_TILE_NE_K);
            } else {
                ggml_cuda_mmq_vec_dot_q8_0_q8_1_dp4a<type, J, true>(tile_x, tile_y, sum, half_block * MMQ_TILE_NE_K);
            }
#endif
            __syncthreads();
        }
    }
    emulate_for_each_output<type, J, true>(
        [&](const int index, const int i, const int j) { out[j * I + i] = sum[index]; });
}
template <ggml_type type>
static void mmq(const int J, const char * x, const int * y, float * out, const int kbx0, const int i_max,
                const int stride, const int nblocks) {
    std::vector<int4> shared((J * MMQ_TILE_Y_K + 128 * 76 + 3) / 4 + 128);
    emulate::launch(dim3(1), dim3(32, 8), J == 16 ? mmq_tile<type, 16> : mmq_tile<type, 64>, x, y, out, kbx0, i_max,
                    stride, nblocks, (int *) shared.data());
}
extern "C" void emulate_mmq(const int type, const int J, const char * x, const int * y, float * out, const int kbx0,
                            const int i_max, const int stride, const int nblocks) {
    switch (type) {
        case 0:
            mmq<GGML_TYPE_ITQ3_S>(J, x, y, out, kbx0, i_max, stride, nblocks);
            break;
        case 1:
            mmq<GGML_TYPE_TQ1_0>(J, x, y, out, kbx0, i_max, stride, nblocks);
            break;
        case 2:
            mmq<GGML_TYPE_TQ2_0>(J, x, y, out, kbx0, i_max, stride, nblocks);
            break;
        default:
            abort();
    }
}

// Levels of a block, decoded by the two paths of itq3s-decode.cuh: halves (t from decoded order) and eights.
extern "C" void emulate_levels(const uint8_t * block, const int z, int8_t * by_half, int8_t * by_eight) {
    uint32_t w[ITQ3_S_WORDS];
    memcpy(w, block, sizeof(w));
    int8_t decoded[256];
    for (int j = 0; j < 2; ++j) {
        uint32_t sym[2][4];
        itq3_s_transpose_symbols(w + ITQ3_S_WORD_QS + 8 * j, sym);
        for (int g = 0; g < 4; ++g) {
            const int k = 2 * g + j;
            uint32_t  c1, c0, even, odd;
            itq3_s_subset_planes(w[ITQ3_S_WORD_SEL + k], k == 0 ? 0 : w[ITQ3_S_WORD_SEL + k - 1], c1, c0);
            itq3_s_subset_pairs(c1, c0, even, odd);
            for (int i = 0; i < 4; ++i) {
                const uint32_t index    = itq3_s_index_nibbles(sym, even, odd, g, i);
                const uint32_t level[2] = { itq3_s_levels_minus(index, z), itq3_s_levels_minus(index >> 16, z) };
                memcpy(decoded + 128 * j + 32 * g + 8 * i, level, 8);
                // The split form must add up to the same.
                for (int n = 0; n < 8; ++n) {
                    const uint32_t nibbles  = index >> 16 * (n / 4);
                    const int8_t   negative = itq3_s_levels_negative(nibbles) >> 8 * (n % 4);
                    const int8_t   positive = itq3_s_levels_positive(nibbles ^ 0x8888) >> 8 * (n % 4);
                    if (negative + positive - z != decoded[128 * j + 32 * g + 8 * i + n]) {
                        emulate::fail("the two look-ups differ");
                    }
                }
            }
        }
    }
    for (int t = 0; t < 256; ++t) {
        by_half[t] = decoded[itq3_s_decoded_offset(t)];
    }
    const uint8_t * sel = block + 4 * ITQ3_S_WORD_SEL;
    for (int m = 0; m < 32; ++m) {
        const uint32_t index = itq3_s_index_nibbles_8(w[2 * (m % 8)], w[2 * (m % 8) + 1], m / 8,
                                                      (uint32_t) sel[m] << 8 | (m == 0 ? 0 : sel[m - 1]));
        for (int r = 0; r < 8; ++r) {
            const int nibble    = r < 4 ? 2 * r : 2 * r - 7;
            by_eight[8 * m + r] = itq3_s_levels_minus(index >> 16 * (nibble / 4), z) >> 8 * (nibble % 4);
        }
    }
}

#include "itq-launch.cuh"
#include "quantize.cuh"

#include "itq-quantize.cuh"

static_assert(sizeof(block_itq3_s) == 4 * ITQ_WORDS, "another block than in ggml-itq.h");

size_t ggml_cuda_itq_activation_bytes(const ggml_tensor * src1) {
    // MMQ reads past the end of the last column's blocks, by a tile at most; MMVQ takes less.
    constexpr int widest_tile = 512;
    const int64_t padded      = GGML_PAD(src1->ne[0], MATRIX_ROW_PADDING);
    return padded / QK8_1 * sizeof(block_q8_1) * ggml_nrows(src1) + widest_tile * sizeof(block_q8_1_mmq);
}

bool ggml_cuda_itq_quantize_row_q8_1(const float * x, void * vy, const ggml_type type_src0, const int64_t ne00,
                                     const int64_t s01, const int64_t s02, const int64_t s03, const int64_t ne0,
                                     const int64_t ne1, const int64_t ne2, const int64_t ne3, cudaStream_t stream) {
    if (!ggml_cuda_has_own_products(type_src0)) {
        return false;
    }
    GGML_ASSERT(ne00 % ggml_blck_size(type_src0) == 0);
    GGML_ASSERT(ne0 % ITQ_BLOCK == 0);

    const uint3 ne2_fastdiv = init_fastdiv_values(ne2);
    if (ggml_cuda_itq_mma_max_columns(type_src0) > 0) {
        const int64_t nblocks          = ne00 / ggml_blck_size(type_src0);
        const int64_t warps            = (ne00 + ITQ_BLOCK - 1) / ITQ_BLOCK;
        const int64_t stride_channel_y = ne1 * ne0 / QK8_1 * sizeof(block_q8_1);
        const dim3    num_blocks((warps + ITQ_QUANTIZE_WARPS - 1) / ITQ_QUANTIZE_WARPS, ne1, ne2 * ne3);
        const dim3    block_size(ITQ_WARP_LANES, ITQ_QUANTIZE_WARPS, 1);
        const ggml_cuda_kernel_launch_params params(num_blocks, block_size, (size_t) 0, stream);
        switch (type_src0) {
#define ITQ_QUANTIZE_FRAGMENTS(NAME, ...)                                                                          \
    case GGML_TYPE_##NAME:                                                                                         \
        ggml_cuda_kernel_launch(quantize_fragments<GGML_TYPE_##NAME>, params, x, vy, (int) nblocks, s01, s02, s03, \
                                stride_channel_y, ne2_fastdiv);                                                    \
        break;
            ITQ_TYPES(ITQ_QUANTIZE_FRAGMENTS)
            ITQ_QUANTIZE_FRAGMENTS(TQ1_0)
            ITQ_QUANTIZE_FRAGMENTS(TQ2_0)
#undef ITQ_QUANTIZE_FRAGMENTS
            default:
                GGML_ABORT("fatal error");
        }
        return true;
    }

    const dim3 num_blocks((ne0 / ITQ_BLOCK + ITQ_QUANTIZE_WARPS - 1) / ITQ_QUANTIZE_WARPS, ne1, ne2 * ne3);
    const dim3 block_size(ITQ_WARP_LANES, ITQ_QUANTIZE_WARPS, 1);
    const ggml_cuda_kernel_launch_params params(num_blocks, block_size, (size_t) 0, stream);
    if (itq_points(type_src0) == 64) {
        ggml_cuda_kernel_launch(quantize_q8_n_h, params, x, vy, ne00, s01, s02, s03, ne0, (uint32_t) ne1, ne2_fastdiv);
    } else if (itq_points(type_src0) == 256) {
        ggml_cuda_kernel_launch(quantize_q8_1x4<true>, params, x, vy, ne00, s01, s02, s03, ne0, (uint32_t) ne1,
                                ne2_fastdiv);
    } else {
        ggml_cuda_kernel_launch(quantize_q8_1x4<false>, params, x, vy, ne00, s01, s02, s03, ne0, (uint32_t) ne1,
                                ne2_fastdiv);
    }
    return true;
}

template <bool scatter, typename... args_t>
static bool quantize_mmq(const ggml_type type, const int64_t ne00, const int64_t ne0, const int64_t nrows,
                         const int64_t nchannels, cudaStream_t stream, const args_t &... args) {
    GGML_ASSERT(ne00 % ggml_blck_size(type) == 0);
    GGML_ASSERT(ne0 % ITQ_BLOCK == 0);
    const dim3 num_blocks(nrows, (ne0 / ITQ_BLOCK + ITQ_QUANTIZE_WARPS - 1) / ITQ_QUANTIZE_WARPS, nchannels);
    const dim3 block_size(ITQ_WARP_LANES, ITQ_QUANTIZE_WARPS, 1);
    const ggml_cuda_kernel_launch_params params(num_blocks, block_size, (size_t) 0, stream);
    switch (itq_points(type)) {
        case 256:
            ggml_cuda_kernel_launch(quantize_mmq_q8_1_128<256, scatter>, params, args...);
            break;
        case 64:
            ggml_cuda_kernel_launch(quantize_mmq_q8_1_128<64, scatter>, params, args...);
            break;
        default:
            ggml_cuda_kernel_launch(quantize_mmq_q8_1_128<0, scatter>, params, args...);
            break;
    }
    return true;
}

bool ggml_cuda_itq_quantize_mmq_q8_1(const float * x, const int32_t * ids, void * vy, const ggml_type type_src0,
                                     const int64_t ne00, const int64_t s01, const int64_t s02, const int64_t s03,
                                     const int64_t ne0, const int64_t ne1, const int64_t ne2, const int64_t ne3,
                                     cudaStream_t stream) {
    if (!ggml_cuda_has_own_products(type_src0)) {
        return false;
    }
    return quantize_mmq<false>(type_src0, ne00, ne0, ne1, ne2 * ne3, stream, x, ids, vy, ne00, s01, s02, s03, ne0,
                               (int) ne1, (int) ne2, /*n_expert_used =*/0);
}

bool ggml_cuda_itq_quantize_scatter_mmq_q8_1(const float * x, const int32_t * ids_src1_inv, void * vy,
                                             const ggml_type type_src0, const int64_t ne00, const int64_t stride_token,
                                             const int64_t ne0, const int64_t n_tokens, const int64_t nrows_dst,
                                             const int n_expert_used, cudaStream_t stream) {
    if (!ggml_cuda_has_own_products(type_src0)) {
        return false;
    }
    return quantize_mmq<true>(type_src0, ne00, ne0, n_tokens, 1, stream, x, ids_src1_inv, vy, ne00,
                              /*s01 =*/(int64_t) 0, stride_token, /*s03 =*/(int64_t) 0, ne0, (int) nrows_dst,
                              /*ne2 =*/1, n_expert_used);
}

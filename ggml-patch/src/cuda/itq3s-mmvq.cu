#include "itq3s-launch.cuh"
#include "itq3s-mmvq.cuh"

// Shared memory that every card since Ampere lets a CUDA block have.
static constexpr size_t max_shared_bytes = 96 * 1024;

// CUDA blocks a multiprocessor has registers for, as __launch_bounds__ of the kernel says, and what the system keeps
// of its shared memory for each.
static constexpr int64_t max_blocks_per_multiprocessor = 3;
static constexpr size_t  reserved_shared_bytes         = 1024;

template <ggml_type type, bool has_fusion>
static void launch(const void * vx, const void * vy, const int32_t * ids,
                   const ggml_cuda_mm_fusion_args_device & fusion, float * dst, const int64_t nblocks,
                   const int64_t nrows, const int64_t stride_row_x, const int64_t nchannels_x,
                   const int64_t nchannels_y, const int64_t nchannels_dst, const int64_t stride_channel_x,
                   const int64_t stride_channel_y, const int64_t stride_channel_dst, const int64_t nsamples_x,
                   const int64_t nsamples_dst, const int64_t stride_sample_x, const int64_t stride_sample_y,
                   const int64_t stride_sample_dst, cudaStream_t stream) {
    const size_t nbytes_shared = itq3_s_mmvq_shared_bytes(ggml_cuda_type_traits<type>::bs, nblocks);
    CUDA_SET_SHARED_MEMORY_LIMIT((mul_mat_vec_q_itq3_s<type, has_fusion>), (int) max_shared_bytes);

    // As many CUDA blocks as the card holds at a time, each with the same number of rows for all of its warps.
    const auto &  device      = ggml_cuda_info().devices[ggml_cuda_get_device()];
    const int64_t by_memory   = (device.smpbo + reserved_shared_bytes) / (nbytes_shared + reserved_shared_bytes);
    const int64_t per_sm      = std::max<int64_t>(1, std::min(by_memory, max_blocks_per_multiprocessor));
    const int64_t room        = std::max<int64_t>(1, per_sm * device.nsm / (nchannels_dst * nsamples_dst));
    const int64_t rows_a_warp = (nrows + room * ITQ3_S_MMVQ_WARPS - 1) / (room * ITQ3_S_MMVQ_WARPS);
    const int64_t nblocks_x   = (nrows + rows_a_warp * ITQ3_S_MMVQ_WARPS - 1) / (rows_a_warp * ITQ3_S_MMVQ_WARPS);

    const dim3                           grid(nblocks_x, nchannels_dst, nsamples_dst);
    const dim3                           block(32, ITQ3_S_MMVQ_WARPS, 1);
    const ggml_cuda_kernel_launch_params params(grid, block, nbytes_shared, stream);
    ggml_cuda_kernel_launch(mul_mat_vec_q_itq3_s<type, has_fusion>, params, vx, vy, ids, fusion, dst, (int) nblocks,
                            (int) nrows, ids ? init_fastdiv_values(nchannels_y) : make_uint3(0, 0, 0), stride_row_x,
                            ids ? make_uint3(0, 0, 0) : init_fastdiv_values(nchannels_dst / nchannels_x),
                            stride_channel_x, stride_channel_y, stride_channel_dst,
                            init_fastdiv_values(nsamples_dst / nsamples_x), stride_sample_x, stride_sample_y,
                            stride_sample_dst);
}

template <ggml_type type, typename... args_t>
static void switch_fusion(const ggml_cuda_mm_fusion_args_device & fusion, const args_t &... args) {
    if (fusion.gate || fusion.x_bias || fusion.gate_bias) {
        launch<type, true>(args...);
    } else {
        launch<type, false>(args...);
    }
}

bool ggml_cuda_itq3_s_mul_mat_vec_q(const void * vx, const ggml_type type_x, const void * vy, const int32_t * ids,
                                    const ggml_cuda_mm_fusion_args_device & fusion, float * dst, const int64_t ncols_x,
                                    const int64_t nrows_x, const int64_t ncols_dst, const int64_t stride_row_x,
                                    const int64_t nchannels_x, const int64_t nchannels_y, const int64_t nchannels_dst,
                                    const int64_t stride_channel_x, const int64_t stride_channel_y,
                                    const int64_t stride_channel_dst, const int64_t nsamples_x,
                                    const int64_t nsamples_dst, const int64_t stride_sample_x,
                                    const int64_t stride_sample_y, const int64_t stride_sample_dst,
                                    cudaStream_t stream) {
    if ((type_x != GGML_TYPE_ITQ3_S && type_x != GGML_TYPE_TQ1_0 && type_x != GGML_TYPE_TQ2_0) || ncols_dst != 1) {
        return false;
    }
    const int cc = ggml_cuda_info().devices[ggml_cuda_get_device()].cc;
    if (!GGML_CUDA_CC_IS_NVIDIA(cc) || ggml_cuda_highest_compiled_arch(cc) < GGML_CUDA_CC_AMPERE) {
        return false;
    }
    const int64_t bs      = ggml_type_size(type_x);
    const int64_t nblocks = ncols_x / QK_K;
    if (itq3_s_mmvq_shared_bytes(bs, nblocks) > max_shared_bytes) {
        return false;
    }
    // The blocks of the ternary types are multiples of 2 bytes; tiles are copied in words of 4.
    for (const int64_t bytes : { (int64_t) (uintptr_t) vx, (int64_t) (uintptr_t) fusion.gate, nblocks * bs,
                                 stride_row_x * bs, stride_channel_x * bs, stride_sample_x * bs }) {
        if (bytes % 4 != 0) {
            return false;
        }
    }

#define ITQ3_S_MMVQ_CASE(type)                                                                                      \
    case type:                                                                                                      \
        switch_fusion<type>(fusion, vx, vy, ids, fusion, dst, nblocks, nrows_x, stride_row_x, nchannels_x,          \
                            nchannels_y, nchannels_dst, stride_channel_x, stride_channel_y, stride_channel_dst,     \
                            nsamples_x, nsamples_dst, stride_sample_x, stride_sample_y, stride_sample_dst, stream); \
        return true

    switch (type_x) {
        ITQ3_S_MMVQ_CASE(GGML_TYPE_ITQ3_S);
        ITQ3_S_MMVQ_CASE(GGML_TYPE_TQ1_0);
        ITQ3_S_MMVQ_CASE(GGML_TYPE_TQ2_0);
        default:
            GGML_ABORT("fatal error");
    }
#undef ITQ3_S_MMVQ_CASE
}

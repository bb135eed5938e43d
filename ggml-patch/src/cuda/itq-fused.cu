#include "itq-fused.cuh"
#include "itq-launch.cuh"

// cmake -DGGML_CUDA_ITQ3S_FUSED=ON puts the paper's kernel in the place of mul_mat_q. It is compiled either way.
#ifdef GGML_CUDA_ITQ3S_FUSED
static constexpr bool enabled = true;
#else
static constexpr bool enabled = false;
#endif  // GGML_CUDA_ITQ3S_FUSED

// Fewer columns are left to the kernels that do not decode the weights for a tile of 32.
static constexpr int64_t min_columns = 9;

// Largest size of a grid in y and z.
static constexpr int64_t max_grid = 65535;

template <int J>
static void launch(const void * x, const half * y, float * dst, const itq_fused_args & a, cudaStream_t stream) {
    constexpr int nbytes_shared = itq_fused_shared_bytes(J);
    CUDA_SET_SHARED_MEMORY_LIMIT((mul_mat_itq3_s_fused<J>), nbytes_shared);
    const dim3                           grid((a.nrows + ITQ_FUSED_ROWS - 1) / ITQ_FUSED_ROWS, (a.ncolumns + J - 1) / J,
                                              a.nchannels * a.nsamples);
    const dim3                           block(32, ITQ_FUSED_WARPS, 1);
    const ggml_cuda_kernel_launch_params params(grid, block, (size_t) nbytes_shared, stream);
    ggml_cuda_kernel_launch(
        mul_mat_itq3_s_fused<J>, params, x, y, dst, (int) a.nblocks, (int) a.nrows, (int) a.ncolumns, a.stride_row_x,
        a.stride_column_y, a.stride_column_dst, init_fastdiv_values(a.nchannels),
        init_fastdiv_values(a.nchannels / a.nchannels_x), a.stride_channel_x, a.stride_channel_y, a.stride_channel_dst,
        init_fastdiv_values(a.nsamples / a.nsamples_x), a.stride_sample_x, a.stride_sample_y, a.stride_sample_dst);
}

void ggml_cuda_itq_fused(const void * x, const half * y, float * dst, const itq_fused_args & args,
                         cudaStream_t stream) {
    if (args.ncolumns <= 32) {
        launch<32>(x, y, dst, args, stream);
    } else if (args.ncolumns <= 64) {
        launch<64>(x, y, dst, args, stream);
    } else {
        launch<128>(x, y, dst, args, stream);
    }
}

bool ggml_cuda_itq_mul_mat_fused(ggml_backend_cuda_context & ctx, const ggml_tensor * src0, const ggml_tensor * src1,
                                 ggml_tensor * dst) {
    if (!enabled || src0->type != GGML_TYPE_ITQ3_S || src1->type != GGML_TYPE_F32 || dst->type != GGML_TYPE_F32) {
        return false;
    }
    GGML_TENSOR_BINARY_OP_LOCALS
    const auto & device = ggml_cuda_info().devices[ctx.device];
    if (!GGML_CUDA_CC_IS_NVIDIA(device.cc) || ggml_cuda_highest_compiled_arch(device.cc) < GGML_CUDA_CC_AMPERE) {
        return false;
    }
    if (ne11 < min_columns || ne11 > 32 * max_grid || ne12 * ne13 > max_grid) {
        return false;
    }
    if (device.smpbo < (size_t) itq_fused_shared_bytes(128)) {
        return false;
    }
    GGML_ASSERT(nb00 == ggml_type_size(src0->type) && nb10 == sizeof(float) && nb0 == sizeof(float));

    cudaStream_t               stream = ctx.stream();
    ggml_cuda_pool_alloc<half> y(ctx.pool(), ggml_nelements(src1));
    const auto                 to_fp16 = ggml_get_to_fp16_nc_cuda(src1->type);
    to_fp16(src1->data, y.get(), ne10, ne11, ne12, ne13, nb11 / nb10, nb12 / nb10, nb13 / nb10, stream);

    itq_fused_args args;
    args.nblocks            = ne00 / ITQ_BLOCK;
    args.nrows              = ne01;
    args.ncolumns           = ne11;
    args.stride_row_x       = nb01 / nb00;
    args.stride_column_y    = ne10;
    args.stride_column_dst  = nb1 / nb0;
    args.nchannels_x        = ne02;
    args.nchannels          = ne12;
    args.stride_channel_x   = nb02 / nb00;
    args.stride_channel_y   = ne10 * ne11;
    args.stride_channel_dst = nb2 / nb0;
    args.nsamples_x         = ne03;
    args.nsamples           = ne13;
    args.stride_sample_x    = nb03 / nb00;
    args.stride_sample_y    = ne10 * ne11 * ne12;
    args.stride_sample_dst  = nb3 / nb0;
    ggml_cuda_itq_fused(src0->data, y.get(), (float *) dst->data, args, stream);
    return true;
}

#include "itq-launch.cuh"
#include "itq-mma.cuh"

#include <algorithm>
#include <cstdlib>

bool ggml_cuda_itq_prefers_cublas(const ggml_type type, const int64_t ncols) {
    static const int64_t from = [] {
        const char * text = getenv("GGML_CUDA_ITQ3S_CUBLAS_COLUMNS");
        return text ? strtoll(text, nullptr, 10) : 0;
    }();
    return ggml_cuda_has_own_products(type) && from > 0 && ncols >= from;
}

// As many groups of columns as have room for their sums beside two stages of the ring.
template <ggml_type type> static int64_t max_columns(const size_t smpbo) {
    int ngroups = ITQ_MMA_MAX_GROUPS;
    while (ngroups > 0 && itq_mma_shared_bytes<type>(2, ngroups, false) > smpbo) {
        ngroups /= 2;
    }
    return ngroups * itq_fragment_columns<type>;
}

int64_t ggml_cuda_itq_mma_max_columns(const ggml_type type) {
    const auto & device = ggml_cuda_info().devices[ggml_cuda_get_device()];
    if (!GGML_CUDA_CC_IS_NVIDIA(device.cc) || ggml_cuda_highest_compiled_arch(device.cc) < GGML_CUDA_CC_AMPERE) {
        return 0;
    }
    switch (type) {
#define ITQ_MAX_COLUMNS(NAME, ...) \
    case GGML_TYPE_##NAME:         \
        return max_columns<GGML_TYPE_##NAME>(device.smpbo);
        ITQ_TYPES(ITQ_MAX_COLUMNS)
        ITQ_MAX_COLUMNS(TQ1_0)
        ITQ_MAX_COLUMNS(TQ2_0)
#undef ITQ_MAX_COLUMNS
        default:
            return 0;
    }
}

// What the system keeps of a multiprocessor's shared memory for each CUDA block.
static constexpr size_t reserved_shared_bytes = 1024;

// How many of a CUDA block's warps share rows: the number that makes the longest way of a warp shortest, in units of
// the ring. Handing in the sum of a tile costs about as much as half a unit.
static int choose_log2_warps_k(const int64_t nrows, const int64_t nunits, const int64_t room) {
    int     best      = 0;
    int64_t best_cost = INT64_MAX;
    for (int log2 = 0; log2 <= itq_log2(ITQ_MMA_WARPS); ++log2) {
        const int     warps_k = 1 << log2;
        const int64_t rows    = ITQ_MMA_ROWS * (ITQ_MMA_WARPS / warps_k);
        const int64_t tiles   = (nrows + rows - 1) / rows;
        const int64_t cost    = ((tiles + room - 1) / room) * (2 * ((nunits + warps_k - 1) / warps_k) + 1);
        if (cost < best_cost) {
            best      = log2;
            best_cost = cost;
        }
    }
    return best;
}

// A product, its shape but for how it is shared among warps and CUDA blocks.
struct itq_mma_args {
    const void *    vx;
    const void *    vy;
    const int32_t * ids;
    float *         dst;
    int64_t         nchannels_dst;
    int64_t         nsamples_dst;
    itq_mma_shape   shape;
};

template <ggml_type type, int ngroups, bool aligned, bool has_fusion>
static void launch(const itq_mma_args & args, const ggml_cuda_mm_fusion_args_device & fusion, cudaStream_t stream) {
    const auto & device = ggml_cuda_info().devices[ggml_cuda_get_device()];

    // As many CUDA blocks a multiprocessor as it has registers for, if two stages of the ring fit for each, and then as
    // many stages as fit.
    int        per_sm = itq_mma_blocks_per_multiprocessor(ngroups);
    const auto fits   = [&](const int stages) {
        return per_sm * (itq_mma_shared_bytes<type>(stages, ngroups, has_fusion) + reserved_shared_bytes) <=
               device.smpbo + reserved_shared_bytes;
    };
    while (per_sm > 1 && !fits(2)) {
        --per_sm;
    }
    int stages = ITQ_MMA_MAX_STAGES;
    while (stages > 2 && !fits(stages)) {
        --stages;
    }
    const size_t nbytes_shared = itq_mma_shared_bytes<type>(stages, ngroups, has_fusion);
    GGML_ASSERT(nbytes_shared <= device.smpbo);
    CUDA_SET_SHARED_MEMORY_LIMIT((mul_mat_itq_mma<type, ngroups, aligned, has_fusion>), (int) nbytes_shared);

    const int64_t products = args.nchannels_dst * args.nsamples_dst;
    const int64_t room     = std::max<int64_t>(1, per_sm * device.nsm / products);

    itq_mma_shape shape = args.shape;
    constexpr int unit  = itq_mma_unit<type> * itq_fragment_blocks<type>;
    shape.log2_warps_k  = choose_log2_warps_k(shape.nrows, (shape.nblocks + unit - 1) / unit, room);
    shape.stages        = stages;
    const int rows      = ITQ_MMA_ROWS * ITQ_MMA_WARPS >> shape.log2_warps_k;
    shape.tiles         = (shape.nrows + rows - 1) / rows;

    // As many CUDA blocks as the card holds at a time, each with the same number of tiles but for the last.
    const int64_t tiles_a_block = (shape.tiles + room - 1) / room;
    const int64_t nblocks_x     = (shape.tiles + tiles_a_block - 1) / tiles_a_block;

    const dim3                           grid(nblocks_x, args.nchannels_dst, args.nsamples_dst);
    const dim3                           block(32, ITQ_MMA_WARPS, 1);
    const ggml_cuda_kernel_launch_params params(grid, block, nbytes_shared, stream);
    ggml_cuda_kernel_launch(mul_mat_itq_mma<type, ngroups, aligned, has_fusion>, params, args.vx, args.vy, args.ids,
                            fusion, args.dst, shape);
}

template <ggml_type type, int ngroups, bool has_fusion>
static void switch_aligned(const itq_mma_args & args, const ggml_cuda_mm_fusion_args_device & fusion,
                           cudaStream_t stream) {
    // Rows of blocks of 64 are there because they are no multiple of 256, and every second block of ITQ4_S is not aligned.
    constexpr bool never  = itq_mma_by_block<type>;
    constexpr bool always = type == GGML_TYPE_ITQ3_S;  // one block at a time, and all of them are

    const itq_mma_shape & shape   = args.shape;
    bool                  aligned = always || (!never && shape.nblocks % ITQ_MMA_UNIT == 0);
    if constexpr (!never && !always) {
        for (const int64_t bytes : { (int64_t) (uintptr_t) args.vx, (int64_t) (uintptr_t) fusion.gate,
                                     (int64_t) shape.stride_row_x, shape.stride_channel_x, shape.stride_sample_x }) {
            aligned = aligned && bytes % itq_mma_ring<type>::copy_bytes == 0;
        }
    }
    if constexpr (!never) {
        if (aligned) {
            launch<type, ngroups, true, has_fusion>(args, fusion, stream);
        }
    }
    if constexpr (!always) {
        if (!aligned) {
            launch<type, ngroups, false, has_fusion>(args, fusion, stream);
        }
    }
}

template <ggml_type type>
static void switch_columns(const itq_mma_args & args, const ggml_cuda_mm_fusion_args_device & fusion,
                           cudaStream_t stream) {
    if (fusion.gate || fusion.x_bias || fusion.gate_bias) {
        GGML_ASSERT(args.shape.ncols == 1);
        switch_aligned<type, 1, true>(args, fusion, stream);
    } else if (args.shape.ncols <= itq_fragment_columns<type>) {
        switch_aligned<type, 1, false>(args, fusion, stream);
    } else if (args.shape.ncols <= 2 * itq_fragment_columns<type>) {
        switch_aligned<type, 2, false>(args, fusion, stream);
    } else if (args.shape.ncols <= 4 * itq_fragment_columns<type>) {
        switch_aligned<type, 4, false>(args, fusion, stream);
    } else {
        switch_aligned<type, 8, false>(args, fusion, stream);
    }
}

bool ggml_cuda_itq_mul_mat_vec_q(const void * vx, const ggml_type type_x, const void * vy, const int32_t * ids,
                                 const ggml_cuda_mm_fusion_args_device & fusion, float * dst, const int64_t ncols_x,
                                 const int64_t nrows_x, const int64_t ncols_dst, const int64_t stride_row_x,
                                 const int64_t stride_col_y, const int64_t stride_col_dst, const int64_t nchannels_x,
                                 const int64_t nchannels_y, const int64_t nchannels_dst, const int64_t stride_channel_x,
                                 const int64_t stride_channel_y, const int64_t stride_channel_dst,
                                 const int64_t nsamples_x, const int64_t nsamples_dst, const int64_t stride_sample_x,
                                 const int64_t stride_sample_y, const int64_t stride_sample_dst,
                                 const int64_t ids_stride, cudaStream_t stream) {
    const int64_t max_columns = ggml_cuda_itq_mma_max_columns(type_x);
    if (max_columns == 0) {
        return false;
    }
    GGML_ASSERT(ids || ncols_dst <= max_columns);
    const int64_t bs   = ggml_type_size(type_x);
    const int64_t q8_1 = sizeof(block_q8_1);

    itq_mma_args args  = {};
    args.vx            = vx;
    args.vy            = vy;
    args.ids           = ids;
    args.dst           = dst;
    args.nchannels_dst = nchannels_dst;

    itq_mma_shape & shape    = args.shape;
    shape.nblocks            = ncols_x / ggml_blck_size(type_x);
    shape.nrows              = nrows_x;
    shape.stride_row_x       = stride_row_x * bs;
    shape.stride_channel_x   = stride_channel_x * bs;
    shape.stride_sample_x    = stride_sample_x * bs;
    shape.stride_channel_dst = stride_channel_dst;
    if (ids) {
        // Every token chooses its experts: a product with one column for each of its choices. The activations of a token
        // lie together.
        args.nsamples_dst       = ncols_dst;
        shape.ncols             = 1;
        shape.ncols_y           = nchannels_y;
        shape.ids_stride        = ids_stride;
        shape.nchannels_y       = init_fastdiv_values(nchannels_y);
        shape.stride_sample_y   = stride_col_y * q8_1;
        shape.stride_sample_dst = stride_col_dst;
    } else {
        args.nsamples_dst       = nsamples_dst;
        shape.ncols             = ncols_dst;
        shape.ncols_y           = ncols_dst;
        shape.channel_ratio     = init_fastdiv_values(nchannels_dst / nchannels_x);
        shape.sample_ratio      = init_fastdiv_values(nsamples_dst / nsamples_x);
        shape.stride_channel_y  = stride_channel_y * q8_1;
        shape.stride_sample_y   = stride_sample_y * q8_1;
        shape.stride_col_dst    = stride_col_dst;
        shape.stride_sample_dst = stride_sample_dst;
    }

    switch (type_x) {
#define ITQ_SWITCH_COLUMNS(NAME, ...)                           \
    case GGML_TYPE_##NAME:                                      \
        switch_columns<GGML_TYPE_##NAME>(args, fusion, stream); \
        break;
        ITQ_TYPES(ITQ_SWITCH_COLUMNS)
        ITQ_SWITCH_COLUMNS(TQ1_0)
        ITQ_SWITCH_COLUMNS(TQ2_0)
#undef ITQ_SWITCH_COLUMNS
        default:
            GGML_ABORT("fatal error");
    }
    return true;
}

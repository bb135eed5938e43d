// The paper's kernel (itq-fused.cuh) behind a C interface, run by launch.h. tests/cuda/test_fused.py compiles and
// calls it.

#include "common.cuh"

#include "itq-fused.cuh"

// dims: blocks of a row, rows, columns, channels and samples of x, of y. strides: x by row, channel, sample (blocks); y
// and dst by column, channel, sample.
template <int J>
static void fused(const void * x, const half * y, float * dst, const int64_t * dims, const int64_t * s) {
    const dim3 grid((dims[1] + ITQ_FUSED_ROWS - 1) / ITQ_FUSED_ROWS, (dims[2] + J - 1) / J, dims[5] * dims[6]);
    emulate::launch_shared(grid, dim3(32, ITQ_FUSED_WARPS), itq_fused_shared_bytes(J), mul_mat_itq3_s_fused<J>, x, y,
                           dst, (int) dims[0], (int) dims[1], (int) dims[2], s[0], s[3], s[6],
                           init_fastdiv_values(dims[5]), init_fastdiv_values(dims[5] / dims[3]), s[1], s[4], s[7],
                           init_fastdiv_values(dims[6] / dims[4]), s[2], s[5], s[8]);
}

// seed: the order in which threads run between barriers.
extern "C" void emulate_fused(const int seed, const int J, const void * x, const half * y, float * dst,
                              const int64_t * dims, const int64_t * strides) {
    emulate::device.seed = seed;
    switch (J) {
        case 32:
            fused<32>(x, y, dst, dims, strides);
            break;
        case 64:
            fused<64>(x, y, dst, dims, strides);
            break;
        case 128:
            fused<128>(x, y, dst, dims, strides);
            break;
        default:
            abort();
    }
}

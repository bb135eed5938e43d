// The paper's kernel (itq3s-fused.cuh) behind a C interface, run by launch.h. tests/cuda/test_fused.py compiles and
// calls it.

#include "common.cuh"

// What the header declares and only itq3s-fused.cu defines is not called here.
typedef struct CUstream_st * cudaStream_t;
struct ggml_backend_cuda_context;
struct ggml_tensor;

#define AMPERE_MMA_AVAILABLE
#include "itq3s-fused.cuh"

// The shared memory of the kernel's one CUDA block at a time, and words behind it that nobody may write.
uint4 itq3_s_fused_shared[itq3_s_fused_shared_bytes(128) / sizeof(uint4) + 16];

// dims: blocks of a row, rows, columns, channels and samples of x, of y. strides: x by row, channel, sample (blocks); y
// and dst by column, channel, sample.
template <int J>
static void fused(const void * x, const half * y, float * dst, const int64_t * dims, const int64_t * s) {
    memset(itq3_s_fused_shared, 0xA5, sizeof(itq3_s_fused_shared));
    const dim3 grid((dims[1] + ITQ3_S_FUSED_ROWS - 1) / ITQ3_S_FUSED_ROWS, (dims[2] + J - 1) / J, dims[5] * dims[6]);
    emulate::launch(grid, dim3(32, ITQ3_S_FUSED_WARPS), mul_mat_itq3_s_fused<J>, x, y, dst, (int) dims[0],
                    (int) dims[1], (int) dims[2], s[0], s[3], s[6], init_fastdiv_values(dims[5]),
                    init_fastdiv_values(dims[5] / dims[3]), s[1], s[4], s[7], init_fastdiv_values(dims[6] / dims[4]),
                    s[2], s[5], s[8]);
    const uint8_t * shared = (const uint8_t *) itq3_s_fused_shared;
    for (size_t i = itq3_s_fused_shared_bytes(J); i < sizeof(itq3_s_fused_shared); ++i) {
        if (shared[i] != 0xA5) {
            emulate::fail("written past the shared memory");
        }
    }
}

extern "C" void emulate_fused(const int J, const void * x, const half * y, float * dst, const int64_t * dims,
                              const int64_t * strides) {
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

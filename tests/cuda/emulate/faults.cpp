// Kernels with mistakes that the emulated device must find, for tests/cuda/test_emulated.py.

#include "common.cuh"
#include "itq-copy.cuh"

// Two warps, 64 words of shared memory. out: 64 words.
static __global__ void faulty(const int fault, const uint32_t * in, uint32_t * out) {
    extern __shared__ uint32_t words[];
    const int                  lane = threadIdx.x;
    const int                  i    = threadIdx.y * 32 + lane;

    const bool late = fault == 1;  // the wait
    const bool none = fault == 2;  // the barrier
    itq_copy_async<4>(words + i, in + i);
    itq_copy_commit();
    if (!late) {
        itq_copy_wait<0>();
    }
    if (!none) {
        __syncthreads();
    }
    out[i] = words[63 - i];
    itq_copy_wait<0>();

    switch (fault) {
        case 3:
            out[i] = words[i + 1];
            break;
        case 4:
            words[i - 1] = 0;
            break;
        case 5:
            itq_copy_async<16>(words + i, in + i);
            break;
        case 6:
            itq_copy_async<4>(out + i, in + i);
            break;
        case 7:
            if (lane == 0) {
                __syncwarp();
            } else {
                out[i] = __shfl_xor_sync(0xFFFFFFFF, i, 1, 32);
            }
            break;
        case 8:
            if (lane != 0) {
                __syncwarp();
            }
            break;
        case 9:
            if (threadIdx.y == 0) {
                __syncwarp();
                __syncthreads();
            } else {
                __syncwarp();
                __shfl_xor_sync(0xFFFFFFFF, i, 1, 32);
                if (lane < 16) {
                    __syncthreads();
                }
                __syncwarp();
            }
            break;
        case 10:
            itq_copy_async<4>(words + i, in + i);
            itq_copy_commit();
            break;
        default:
            break;
    }
}

// fault 11: more shared memory than all may have; 12: than the device has; 13, 14: too large a grid, too large a block.
extern "C" void emulate_fault(const int fault, const int64_t seed, const uint32_t * in, uint32_t * out) {
    emulate::device.seed = seed;
    if (fault == 12) {
        CUDA_SET_SHARED_MEMORY_LIMIT(faulty, 228 * 1024);
    }
    const size_t bytes = fault == 11 || fault == 12 ? 49 * 1024 : 256;
    const dim3   grid(1, fault == 13 ? 65536 : 1);
    const dim3   block(32, fault == 14 ? 33 : 2);
    ggml_cuda_kernel_launch(faulty, ggml_cuda_kernel_launch_params(grid, block, bytes, nullptr), fault, in, out);
}

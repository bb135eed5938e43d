// What llama.cpp uses of HIP 6.1 and HIP 5 does not have, for scripts/check/hip.py.

#pragma once

#include <hip/hip_fp16.h>
#include <hip/hip_runtime.h>

#if HIP_VERSION < 60100000

#    define hipHostRegisterReadOnly 0x08

static inline hipError_t hipStreamWaitEvent(hipStream_t stream, hipEvent_t event) {
    return hipStreamWaitEvent(stream, event, 0);
}

static __device__ inline __half __hmax(__half a, __half b) {
    return __half2float(a) > __half2float(b) ? a : b;
}
static __device__ inline __half2 __shfl_xor(__half2 value, int lane_mask, int width) {
    return __builtin_bit_cast(__half2, __shfl_xor(__builtin_bit_cast(int, value), lane_mask, width));
}
static __device__ inline __half2 __shfl_up(__half2 value, unsigned delta, int width) {
    return __builtin_bit_cast(__half2, __shfl_up(__builtin_bit_cast(int, value), delta, width));
}

#endif  // HIP_VERSION < 60100000

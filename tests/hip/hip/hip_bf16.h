// What llama.cpp uses of ROCm's hip_bf16.h, for scripts/check/hip.py where the headers of HIP are older than that file
// (ROCm 5.6). Declarations with bodies that the compiler can generate code for, no more: nothing of this is run.

#pragma once

#include <hip/hip_runtime.h>

struct alignas(2) __hip_bfloat16 {
    unsigned short bits;

    __hip_bfloat16() = default;
    __host__ __device__ __hip_bfloat16(float value) : bits(__builtin_bit_cast(unsigned, value) >> 16) {}
    __host__ __device__ operator float() const { return __builtin_bit_cast(float, (unsigned) bits << 16); }
};
struct alignas(4) __hip_bfloat162 {
    __hip_bfloat16 x, y;

    __hip_bfloat162() = default;
    __host__ __device__ __hip_bfloat162(__hip_bfloat16 a, __hip_bfloat16 b) : x(a), y(b) {}
};

static __host__ __device__ inline __hip_bfloat16 __float2bfloat16(float value) {
    return value;
}
static __host__ __device__ inline float __bfloat162float(__hip_bfloat16 value) {
    return value;
}
static __host__ __device__ inline float2 __bfloat1622float2(__hip_bfloat162 value) {
    return { value.x, value.y };
}
static __host__ __device__ inline __hip_bfloat162 __float22bfloat162_rn(float2 value) {
    return { value.x, value.y };
}
static __host__ __device__ inline __hip_bfloat162 __floats2bfloat162_rn(float x, float y) {
    return { x, y };
}
static __host__ __device__ inline __hip_bfloat162 __halves2bfloat162(__hip_bfloat16 x, __hip_bfloat16 y) {
    return { x, y };
}
static __host__ __device__ inline float __low2float(__hip_bfloat162 value) {
    return value.x;
}
static __host__ __device__ inline float __high2float(__hip_bfloat162 value) {
    return value.y;
}

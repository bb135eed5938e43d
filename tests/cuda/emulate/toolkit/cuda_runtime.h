// The CUDA toolkit for sources that are compiled as C++ and run by launch.h: what upstream's and our files use of its
// headers. Compiled for the architecture __CUDA_ARCH__.

#pragma once

#include "launch.h"
#include "ptx.h"

#include <climits>
#include <cmath>
#include <type_traits>
#include <utility>

#define CUDART_VERSION 12040

#define __host__
#define __device__
#define __global__
#define __forceinline__      inline
#define __align__(n)         alignas(n)
#define __builtin_align__(n) alignas(n)
#define __launch_bounds__(...)
#define __builtin_assume(x)

struct alignas(8) float2 {
    float x, y;
};
struct alignas(16) float4 {
    float x, y, z, w;
};
struct alignas(8) int2 {
    int x, y;
};
struct alignas(16) int4 {
    int x, y, z, w;
};
struct alignas(8) uint2 {
    unsigned int x, y;
};
struct alignas(16) uint4 {
    unsigned int x, y, z, w;
};
struct alignas(2) char2 {
    signed char x, y;
};
struct alignas(4) char4 {
    signed char x, y, z, w;
};
static inline float2 make_float2(float x, float y) {
    return { x, y };
}
static inline float4 make_float4(float x, float y, float z, float w) {
    return { x, y, z, w };
}
static inline int2 make_int2(int x, int y) {
    return { x, y };
}
static inline int4 make_int4(int x, int y, int z, int w) {
    return { x, y, z, w };
}
static inline uint2 make_uint2(unsigned int x, unsigned int y) {
    return { x, y };
}
static inline uint3 make_uint3(unsigned int x, unsigned int y, unsigned int z) {
    return { x, y, z };
}
static inline uint4 make_uint4(unsigned int x, unsigned int y, unsigned int z, unsigned int w) {
    return { x, y, z, w };
}
static inline char2 make_char2(signed char x, signed char y) {
    return { x, y };
}
static inline char4 make_char4(signed char x, signed char y, signed char z, signed char w) {
    return { x, y, z, w };
}

// ---------------------------------------------------------------------------------------------------------------------
// Barriers and warp operations

static inline void __syncthreads() {
    emulate::block_barrier();
}
static inline void __syncwarp(const uint32_t mask = 0xFFFFFFFF) {
    emulate::warp_barrier(mask);
}
[[noreturn]] static inline void __trap() {
    emulate::fail("trap");
}

namespace emulate {
inline void all_lanes(const uint32_t mask, const int width) {
    if (mask != 0xFFFFFFFF || width < 1 || width > warp_size || (width & (width - 1)) != 0) {
        fail("a shuffle without all lanes");
    }
}
}  // namespace emulate

// Lanes in groups of width; one that would read from another group reads its own.
template <typename T>
static inline T __shfl_sync(const uint32_t mask, const T value, const int lane, const int width = emulate::warp_size) {
    emulate::all_lanes(mask, width);
    return emulate::exchange(value, emulate::this_lane() / width * width + lane % width);
}
template <typename T>
static inline T __shfl_xor_sync(const uint32_t mask, const T value, const int lane_mask,
                                const int width = emulate::warp_size) {
    emulate::all_lanes(mask, width);
    const int lane = emulate::this_lane(), source = lane ^ lane_mask;
    return emulate::exchange(value, source / width == lane / width ? source : lane);
}
template <typename T>
static inline T __shfl_up_sync(const uint32_t mask, const T value, const int delta,
                               const int width = emulate::warp_size) {
    emulate::all_lanes(mask, width);
    const int lane = emulate::this_lane();
    return emulate::exchange(value, lane % width >= delta ? lane - delta : lane);
}
static inline int __reduce_add_sync(const uint32_t mask, int value) {
    for (int lane_mask = 1; lane_mask < emulate::warp_size; lane_mask *= 2) {
        value += __shfl_xor_sync(mask, value, lane_mask);
    }
    return value;
}
static inline int __any_sync(const uint32_t mask, const int predicate) {
    return __reduce_add_sync(mask, predicate != 0) != 0;
}
static inline int __all_sync(const uint32_t mask, const int predicate) {
    return __reduce_add_sync(mask, predicate != 0) == emulate::warp_size;
}

// ---------------------------------------------------------------------------------------------------------------------
// Arithmetic

template <typename T> static inline T min(const T a, const T b) {
    return a < b ? a : b;
}
template <typename T> static inline T max(const T a, const T b) {
    return a > b ? a : b;
}
static inline unsigned int min(const unsigned int a, const int b) {
    return min(a, (unsigned int) b);
}
static inline unsigned int min(const int a, const unsigned int b) {
    return min((unsigned int) a, b);
}

static inline float __int_as_float(const int x) {
    float f;
    memcpy(&f, &x, sizeof(f));
    return f;
}
static inline int __float_as_int(const float f) {
    int x;
    memcpy(&x, &f, sizeof(x));
    return x;
}
static inline int __float2int_rn(const float f) {
    return (int) nearbyintf(f);
}
static inline float __frcp_rn(const float f) {
    return 1.0f / f;
}
static inline unsigned int __umulhi(const unsigned int a, const unsigned int b) {
    return (unsigned int) ((uint64_t) a * b >> 32);
}
static inline int __popc(const unsigned int x) {
    return __builtin_popcount(x);
}
static inline unsigned int __brev(unsigned int x) {
    unsigned int reversed = 0;
    for (int i = 0; i < 32; ++i, x >>= 1) {
        reversed = reversed << 1 | (x & 1);
    }
    return reversed;
}
static inline unsigned int __funnelshift_l(const unsigned int lo, const unsigned int hi, const unsigned int n) {
    return (unsigned int) (((uint64_t) hi << 32 | lo) << n % 32 >> 32);
}
static inline unsigned int __byte_perm(const unsigned int x, const unsigned int y, const unsigned int selectors) {
    unsigned int result;
    emulate::ptx::prmt_b32(result, x, y, selectors & 0x7777);
    return result;
}
template <typename F>
static inline unsigned int emulate_bytewise(const unsigned int a, const unsigned int b, F operation) {
    unsigned int result = 0;
    for (int n = 0; n < 32; n += 8) {
        result |= (unsigned int) (uint8_t) operation((uint8_t) (a >> n), (uint8_t) (b >> n)) << n;
    }
    return result;
}
static inline unsigned int __vsub4(const unsigned int a, const unsigned int b) {
    return emulate_bytewise(a, b, [](const uint8_t x, const uint8_t y) { return x - y; });
}
static inline unsigned int __vcmpne4(const unsigned int a, const unsigned int b) {
    return emulate_bytewise(a, b, [](const uint8_t x, const uint8_t y) { return x != y ? 0xFF : 0; });
}
static inline unsigned int __dp4a(const unsigned int a, const unsigned int b, unsigned int c) {
    for (int n = 0; n < 32; n += 8) {
        c += (uint8_t) (a >> n) * (uint8_t) (b >> n);
    }
    return c;
}
static inline unsigned int __dp2a_lo(const unsigned int a, const unsigned int b, const unsigned int c) {
    return c + (uint16_t) a * (uint8_t) b + (uint16_t) (a >> 16) * (uint8_t) (b >> 8);
}
static inline int __dp4a(const int a, const int b, int c) {
    for (int n = 0; n < 32; n += 8) {
        c += (int) (int8_t) (a >> n) * (int) (int8_t) (b >> n);
    }
    return c;
}
static inline size_t __cvta_generic_to_shared(const void * p) {
    return emulate::shared.offset(p);
}
static inline size_t __cvta_generic_to_global(const void * p) {
    return (size_t) p;
}
static inline void * __cvta_global_to_generic(const size_t p) {
    return (void *) p;
}

// ---------------------------------------------------------------------------------------------------------------------
// The runtime: one device, of which launch.h knows all; streams do nothing, for launches are done when they return.

typedef enum { cudaSuccess = 0 } cudaError_t;
typedef struct CUstream_st * cudaStream_t;
typedef struct CUevent_st *  cudaEvent_t;
enum { cudaStreamNonBlocking, cudaEventDisableTiming };

static inline const char * cudaGetErrorString(cudaError_t) {
    return "no error";
}
static inline cudaError_t cudaGetLastError() {
    return cudaSuccess;
}
static inline cudaError_t cudaStreamCreateWithFlags(cudaStream_t * stream, unsigned int) {
    *stream = nullptr;
    return cudaSuccess;
}
static inline cudaError_t cudaEventCreateWithFlags(cudaEvent_t * event, unsigned int) {
    *event = nullptr;
    return cudaSuccess;
}
static inline cudaError_t cudaEventDestroy(cudaEvent_t) {
    return cudaSuccess;
}
static inline cudaError_t cudaMemsetAsync(void * p, const int value, const size_t n, cudaStream_t) {
    memset(p, value, n);
    return cudaSuccess;
}
template <typename T> static inline cudaError_t cudaMalloc(T **, size_t) {
    emulate::fail("memory that is not of the pool");
}

enum cudaFuncAttribute { cudaFuncAttributeMaxDynamicSharedMemorySize };
struct cudaFuncAttributes {
    int ptxVersion;
};
template <typename... params_t>
static inline cudaError_t cudaFuncSetAttribute(void (*kernel)(params_t...), cudaFuncAttribute, const int value) {
    emulate::shared_limits[(const void *) kernel] = value;
    return cudaSuccess;
}
static inline cudaError_t cudaFuncGetAttributes(cudaFuncAttributes * attributes, const void *) {
    attributes->ptxVersion = __CUDA_ARCH__ / 10;
    return cudaSuccess;
}

// Launches that may begin before the last kernel ends. Here that has ended.
enum { cudaLaunchAttributeProgrammaticStreamSerialization = 1 };
struct cudaLaunchAttribute {
    int id;
    struct {
        int programmaticStreamSerializationAllowed;
    } val;
};
struct cudaLaunchConfig_t {
    dim3                  gridDim, blockDim;
    size_t                dynamicSmemBytes;
    cudaStream_t          stream;
    cudaLaunchAttribute * attrs;
    unsigned int          numAttrs;
};
template <typename... params_t, typename... args_t>
static inline cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t * config, void (*kernel)(params_t...),
                                             args_t &&... args) {
    emulate::launch_checked(kernel, config->gridDim, config->blockDim, config->dynamicSmemBytes, args...);
    return cudaSuccess;
}
static inline void cudaGridDependencySynchronize() {}
static inline void cudaTriggerProgrammaticLaunchCompletion() {}

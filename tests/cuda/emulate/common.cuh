// Stands in for upstream's common.cuh when the CUDA sources are compiled as C++ for the CPU: the names that they use.

#pragma once

#include "launch.h"

#include <algorithm>
#include <cmath>
#include <type_traits>

#define ITQ3_S_EMULATE  // itq3s-copy.cuh and the tensor core products go to launch.h

// The copies of our sources that test_emulated.py makes have launches and dynamic shared memory in C++; shared memory
// that is not dynamic becomes static there, which is one for all threads of the block that runs.
#ifndef __shared__
#    define __shared__
#endif

#define __host__
#define __device__
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define GGML_CUDA_RESTRICT    __restrict__
#define GGML_UNUSED_VARS(...) emulate_unused(__VA_ARGS__)
template <typename... T> static inline void emulate_unused(const T &...) {}

#define GGML_ASSERT(x)         \
    do {                       \
        if (!(x)) {            \
            emulate::fail(#x); \
        }                      \
    } while (0)
#define GGML_ABORT(...) emulate::fail("aborted")
#define GGML_UNUSED(x)  (void) (x)
#define NO_DEVICE_CODE  emulate::fail("code for another architecture")

// For ggml-itq3s.h.
#define GGML_COMMON_DECL
#define GGML_API      extern
#define GGML_RESTRICT __restrict__

enum ggml_type { GGML_TYPE_F32, GGML_TYPE_IQ3_S, GGML_TYPE_Q8_0, GGML_TYPE_ITQ3_S, GGML_TYPE_TQ1_0, GGML_TYPE_TQ2_0 };

#define QK_K  256
#define QK8_1 32
#define QI8_0 8
#define QI8_1 8

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
struct char2 {
    signed char x, y;
};
struct alignas(4) char4 {
    signed char x, y, z, w;
};
static inline uint2 make_uint2(unsigned int x, unsigned int y) {
    return { x, y };
}
static inline uint3 make_uint3(unsigned int x, unsigned int y, unsigned int z) {
    return { x, y, z };
}
static inline uint4 make_uint4(unsigned int x, unsigned int y, unsigned int z, unsigned int w) {
    return { x, y, z, w };
}
static inline int2 make_int2(int x, int y) {
    return { x, y };
}
static inline float2 make_float2(float x, float y) {
    return { x, y };
}
static inline float4 make_float4(float x, float y, float z, float w) {
    return { x, y, z, w };
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
static inline char2 make_char2(signed char x, signed char y) {
    return { x, y };
}
static inline char4 make_char4(signed char x, signed char y, signed char z, signed char w) {
    return { x, y, z, w };
}
static inline int4 make_int4(int x, int y, int z, int w) {
    return { x, y, z, w };
}

// IEEE binary16 and bfloat16 as storage; conversions round to nearest even, as the device's do.
struct half {
    uint16_t bits;
};
struct alignas(4) half2 {
    half x, y;
};
struct nv_bfloat16 {
    uint16_t bits;
};

static inline float __half2float(const half h) {
    const uint32_t sign     = (uint32_t) (h.bits & 0x8000) << 16;
    const uint32_t exponent = h.bits >> 10 & 0x1F;
    const uint32_t mantissa = h.bits & 0x3FF;
    float          value;
    if (exponent == 31) {
        value = mantissa ? NAN : INFINITY;
    } else if (exponent == 0) {
        value = std::ldexp((float) mantissa, -24);
    } else {
        value = std::ldexp((float) (mantissa | 0x400), (int) exponent - 25);
    }
    return sign ? -value : value;
}
static inline half __float2half(const float f) {
    const uint16_t sign = std::signbit(f) ? 0x8000 : 0;
    const float    a    = std::fabs(f);
    if (std::isnan(f)) {
        return { (uint16_t) (sign | 0x7E00) };
    }
    if (a < std::ldexp(1.0f, -14)) {  // subnormal; 1024 is the smallest normal number, and carries into it as it should
        return { (uint16_t) (sign | (uint16_t) std::nearbyint(std::ldexp(a, 24))) };
    }
    int exponent;
    std::frexp(a, &exponent);  // a = m * 2^exponent, 0.5 <= m < 1
    const uint32_t mantissa = (uint32_t) std::nearbyint(std::ldexp(a, 11 - exponent));  // 1024 .. 2048
    const uint32_t bits     = ((uint32_t) (exponent + 14) << 10) + (mantissa - 1024);
    return { (uint16_t) (sign | (std::isinf(a) || bits >= 0x7C00 ? 0x7C00 : bits)) };
}
static inline half2 make_half2(const half x, const half y) {
    return { x, y };
}
static inline float2 __half22float2(const half2 h) {
    return { __half2float(h.x), __half2float(h.y) };
}
static inline float __low2float(const half2 h) {
    return __half2float(h.x);
}

typedef half ggml_half;

struct block_q8_1 {
    half2  ds;
    int8_t qs[QK8_1];
};
struct block_tq1_0 {
    uint8_t qs[48];
    uint8_t qh[4];
    half    d;
};
struct block_tq2_0 {
    uint8_t qs[64];
    half    d;
};
static_assert(sizeof(block_tq1_0) == 54 && sizeof(block_tq2_0) == 66, "wrong block sizes");

template <ggml_type type> struct ggml_cuda_type_traits;
#include "itq3s-type-traits.cuh"

enum ggml_glu_op {
    GGML_GLU_OP_REGLU,
    GGML_GLU_OP_GEGLU,
    GGML_GLU_OP_SWIGLU,
    GGML_GLU_OP_SWIGLU_OAI,
    GGML_GLU_OP_SWIGLU_CLAMP
};
struct ggml_cuda_mm_fusion_args_device {
    const void * x_bias    = nullptr;
    const void * gate      = nullptr;
    const void * gate_bias = nullptr;
    ggml_glu_op  glu_op    = GGML_GLU_OP_SWIGLU;
    float        glu_limit = 0.0f;
};

template <typename dst_t> using dequantize_kq_t = void (*)(const void * vx, const int64_t ib, dst_t * y, const int tid);

static inline void ggml_cuda_pdl_sync() {}
static inline void ggml_cuda_pdl_lc() {}
static inline void __syncthreads() {
    emulate::block_barrier();
}
static inline void __syncwarp() {
    emulate::warp_barrier(0xFFFFFFFF);
}
static inline void ggml_cuda_syncwarp() {
    __syncwarp();
}

template <typename T>
static inline T __shfl_xor_sync(const uint32_t mask, const T value, const int lane_mask, const int width) {
    if (mask != 0xFFFFFFFF || width != emulate::warp_size) {
        emulate::fail("a shuffle without all lanes");
    }
    return emulate::exchange(value, emulate::this_lane() ^ lane_mask);
}
// Lane source of the lane's segment of so many lanes.
template <typename T>
static inline T __shfl_sync(const uint32_t mask, const T value, const int source, const int width = emulate::warp_size) {
    if (mask != 0xFFFFFFFF) {
        emulate::fail("a shuffle without all lanes");
    }
    return emulate::exchange(value, emulate::this_lane() / width * width + source % width);
}
template <int width> static inline int warp_reduce_any(int x) {
    for (int mask = width / 2; mask > 0; mask /= 2) {
        x |= __shfl_xor_sync(0xFFFFFFFF, x, mask, width);
    }
    return x;
}

template <int width> static inline float warp_reduce_sum(float x) {
    for (int mask = width / 2; mask > 0; mask /= 2) {
        x += __shfl_xor_sync(0xFFFFFFFF, x, mask, width);
    }
    return x;
}

static inline constexpr int ggml_cuda_get_physical_warp_size() {
    return emulate::warp_size;
}

static inline int ggml_cuda_dp4a(const int a, const int b, int c) {
    for (int i = 0; i < 4; ++i) {
        c += (int) (int8_t) (a >> 8 * i) * (int) (int8_t) (b >> 8 * i);
    }
    return c;
}

template <typename T> static inline T min(const T a, const T b) {
    return a < b ? a : b;
}
template <typename T> static inline T max(const T a, const T b) {
    return a > b ? a : b;
}

static inline uint3 init_fastdiv_values(const uint64_t d) {
    return { 0, 0, (unsigned int) d };
}
static inline uint32_t fastdiv(const uint32_t n, const uint3 values) {
    return n / values.z;
}
static inline uint32_t fastmodulo(const uint32_t n, const uint3 values) {
    return n % values.z;
}
static inline uint2 fast_div_modulo(const uint32_t n, const uint3 values) {
    return { n / values.z, n % values.z };
}

// ---------------------------------------------------------------------------------------------------------------------
// What launchers use of the host's side. The device is the one that emulate_configure (kernels.cpp) sets.

typedef struct CUstream_st * cudaStream_t;

struct ggml_tensor {
    int64_t ne[4];
};
#define GGML_PAD(x, n) (((x) + (n) - 1) / (n) * (n))
static inline int64_t ggml_nrows(const ggml_tensor * tensor) {
    return tensor->ne[1] * tensor->ne[2] * tensor->ne[3];
}

#define GGML_CUDA_CC_TURING        750
#define GGML_CUDA_CC_AMPERE        800
#define GGML_CUDA_CC_ADA_LOVELACE  890
#define GGML_CUDA_CC_HOPPER        900
#define GGML_CUDA_CC_BLACKWELL     1200
#define GGML_CUDA_CC_IS_NVIDIA(cc) ((cc) < 0x0100000)
#define MATRIX_ROW_PADDING         512

static inline int ggml_cuda_highest_compiled_arch(const int cc) {
    return cc;
}
static inline bool turing_mma_available(const int cc) {
    return cc >= GGML_CUDA_CC_TURING;
}
static inline bool ampere_mma_available(const int cc) {
    return cc >= GGML_CUDA_CC_AMPERE;
}
static inline bool cp_async_available(const int cc) {
    return cc >= GGML_CUDA_CC_AMPERE;
}

struct ggml_cuda_device_info {
    int device_count = 1;
    struct cuda_device_info {
        int    cc;
        int    nsm;
        size_t smpb;
        size_t smpbo;
        int    warp_size;
    } devices[1];
};
static inline int ggml_cuda_get_device() {
    return 0;
}
static inline const ggml_cuda_device_info & ggml_cuda_info() {
    static ggml_cuda_device_info info;
    info.devices[0] = { emulate::device.cc, emulate::device.nsm, emulate::max_shared_static, emulate::device.smpbo,
                        emulate::warp_size };
    return info;
}

static inline size_t ggml_type_size(const ggml_type type) {
    switch (type) {
        case GGML_TYPE_ITQ3_S:
            return 100;
        case GGML_TYPE_TQ1_0:
            return sizeof(block_tq1_0);
        case GGML_TYPE_TQ2_0:
            return sizeof(block_tq2_0);
        default:
            emulate::fail("the size of a type that is not ours");
    }
}

struct ggml_cuda_kernel_launch_params {
    dim3   block_nums;
    dim3   block_dims;
    size_t shmem;
    ggml_cuda_kernel_launch_params(const dim3 block_nums, const dim3 block_dims, const size_t shmem, cudaStream_t) :
        block_nums(block_nums), block_dims(block_dims), shmem(shmem) {}
};
template <typename kernel_t, typename... args_t>
static void ggml_cuda_kernel_launch(kernel_t kernel, const ggml_cuda_kernel_launch_params & params, args_t &&... args) {
    emulate::launch_checked(kernel, params.block_nums, params.block_dims, params.shmem, args...);
}

// Upstream's sets a limit once a device, whatever later calls at the same place ask for.
#define CUDA_SET_SHARED_MEMORY_LIMIT(kernel, nbytes)                                 \
    do {                                                                             \
        static int raised_on = 0;                                                    \
        if (raised_on != emulate::devices_seen) {                                    \
            raised_on                                       = emulate::devices_seen; \
            emulate::shared_limits[(const void *) (kernel)] = (size_t) (nbytes);     \
        }                                                                            \
    } while (0)

// Asynchronous copies from global to shared memory, for Ampere and newer; plain ones before.
//
// Copies between two commits are a group. What a group brought is there for the thread that copied it after its wait,
// and for others after the next barrier. On the emulated device of tests/cuda/ it is there at the wait and not before.

#pragma once

#include "common.cuh"

#include <cstdint>

// bytes = 4, 8 or 16, to which both addresses are aligned.
template <int bytes> static __device__ __forceinline__ void itq_copy_async(void * dst, const void * src) {
    static_assert(bytes == 4 || bytes == 8 || bytes == 16, "no such copy");
#if defined(CP_ASYNC_AVAILABLE)
    const uint32_t dst_shared = __cvta_generic_to_shared(dst);
    if constexpr (bytes == 16) {  // past the first level of memory: nothing of it is read twice
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" : : "r"(dst_shared), "l"(src) : "memory");
    } else {
        asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" : : "r"(dst_shared), "l"(src), "n"(bytes) : "memory");
    }
#else
    memcpy(dst, src, bytes);
#endif
}

// The first 2 bytes of a word; the other two are 0.
static __device__ __forceinline__ void itq_copy_async_half_word(void * dst, const void * src) {
#if defined(CP_ASYNC_AVAILABLE)
    const uint32_t dst_shared = __cvta_generic_to_shared(dst);
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, 2;" : : "r"(dst_shared), "l"(src) : "memory");
#else
    *(uint32_t *) dst = *(const uint16_t *) src;
#endif
}

// Ends a group of copies.
static __device__ __forceinline__ void itq_copy_commit() {
#if defined(CP_ASYNC_AVAILABLE)
    asm volatile("cp.async.commit_group;" : : : "memory");
#endif
}

// Waits until at most pending of this thread's groups are on their way.
template <int pending> static __device__ __forceinline__ void itq_copy_wait() {
#if defined(CP_ASYNC_AVAILABLE)
    asm volatile("cp.async.wait_group %0;" : : "n"(pending) : "memory");
#endif
}

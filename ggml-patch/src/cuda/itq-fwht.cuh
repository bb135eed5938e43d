// The 256-point Walsh-Hadamard transform of ITQ3_S by one warp, in registers and shuffles.

#pragma once

#include "common.cuh"

#define ITQ_BLOCK      256  // weights in a block, points of the transform
#define ITQ_WARP_LANES 32   // threads that work on one block, whatever the physical warp size is
#define ITQ_VALUES     (ITQ_BLOCK / ITQ_WARP_LANES)

// In place and unnormalised: lane holds the values 8*lane + 0..7 of the block in v. Stages h = 1, 2, 4, ..., 128 in
// this order and (a, b) -> (a + b, a - b) in float: the arithmetic of the CPU code, so the result is the same to the
// bit. All 32 lanes of the group must call it.
static __device__ __forceinline__ void itq_warp_fwht(float (&v)[ITQ_VALUES], const int lane) {
#pragma unroll
    for (int h = 1; h < ITQ_VALUES; h *= 2) {
#pragma unroll
        for (int i = 0; i < ITQ_VALUES; i += 2 * h) {
#pragma unroll
            for (int r = i; r < i + h; ++r) {
                const float a = v[r];
                const float b = v[r + h];
                v[r]          = a + b;
                v[r + h]      = a - b;
            }
        }
    }
#pragma unroll
    for (int mask = 1; mask < ITQ_WARP_LANES; mask *= 2) {  // h = 8*mask
        // A product with 1 or -1 is exact, and one instruction where a choice of sums is two.
        const float sign = lane & mask ? -1.0f : 1.0f;
#pragma unroll
        for (int r = 0; r < ITQ_VALUES; ++r) {
            const float other = __shfl_xor_sync(0xFFFFFFFF, v[r], mask, ITQ_WARP_LANES);
            v[r]              = fmaf(v[r], sign, other);
        }
    }
}

// The Walsh-Hadamard transforms of the trellis types by one warp, in registers and shuffles: of 256 points, or of 64, then
// of four blocks at a time.

#pragma once

#include "common.cuh"

#define ITQ_BLOCK      256  // values of a warp: a block of 256 or four of 64
#define ITQ_WARP_LANES 32   // threads that work on them, whatever the physical warp size is
#define ITQ_VALUES     (ITQ_BLOCK / ITQ_WARP_LANES)

// 1 over the square root of the points: what normalises the transform.
template <int points> static constexpr float itq_fwht_norm = points == 256 ? 1.0f / 16.0f : 1.0f / 8.0f;

// In place and unnormalised: lane holds the values 8*lane + 0..7 in v. Stages h = 1, 2, 4, ..., points/2 in this order and
// (a, b) -> (a + b, a - b) in float: the arithmetic of the CPU code, so the result is the same to the bit. All 32 lanes of
// the group must call it.
template <int points = 256>
static __device__ __forceinline__ void itq_warp_fwht(float (&v)[ITQ_VALUES], const int lane) {
    static_assert(points == 256 || points == 64, "no such blocks");
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
    for (int mask = 1; mask < points / ITQ_VALUES; mask *= 2) {  // h = 8*mask
        // A product with 1 or -1 is exact, and one instruction where a choice of sums is two.
        const float sign = lane & mask ? -1.0f : 1.0f;
#pragma unroll
        for (int r = 0; r < ITQ_VALUES; ++r) {
            const float other = __shfl_xor_sync(0xFFFFFFFF, v[r], mask, ITQ_WARP_LANES);
            v[r]              = fmaf(v[r], sign, other);
        }
    }
}

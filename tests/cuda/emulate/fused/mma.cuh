// Stands in for upstream's mma.cuh for tests/cuda/emulate/fused.cpp: the tiles of the F16 product with 16 rows, 8
// columns and 16 values between them, and that product from its definition.

#pragma once

#include "common.cuh"

namespace ggml_cuda_mma {

// J counts 32-bit words, as upstream's tiles do.
template <int I_, int J_, typename T> struct tile {
    static constexpr int I     = I_;
    static constexpr int J     = J_;
    static constexpr int ne    = I * J / 32;
    T                    x[ne] = {};

    static int get_i(const int l) {
        const int lane = emulate::this_lane();
        if (std::is_same_v<T, half2>) {
            return I == 8 ? lane / 4 : l % 2 * 8 + lane / 4;
        }
        return l / 2 * 8 + lane / 4;
    }
    static int get_j(const int l) {
        const int lane = emulate::this_lane();
        if (std::is_same_v<T, half2>) {
            return I == 8 ? l * 4 + lane % 4 : l / 2 * 4 + lane % 4;
        }
        return 2 * (lane % 4) + l % 2;
    }
};

// ldmatrix reads rows of 16 bytes, which it wants aligned.
template <int I> static inline void load_ldmatrix(tile<I, 8, half2> & t, const half2 * x, const int stride) {
    const int lane = emulate::this_lane();
    if ((uintptr_t) (x + lane % I * stride + lane / I % 2 * 4) % 16 != 0) {
        emulate::fail("ldmatrix: a row is not aligned");
    }
    emulate::warp_barrier(0xFFFFFFFF);
    for (int l = 0; l < t.ne; ++l) {
        t.x[l] = x[t.get_i(l) * stride + t.get_j(l)];
    }
}

static inline void mma(tile<16, 8, float> & D, const tile<16, 8, half2> & A, const tile<8, 8, half2> & B) {
    // The matrices of each warp, between the two barriers.
    static float a[32][16][16];
    static float b[32][8][16];
    const int    warp = emulate::current->linear / emulate::warp_size;
    for (int l = 0; l < A.ne; ++l) {
        a[warp][A.get_i(l)][2 * A.get_j(l) + 0] = __half2float(A.x[l].x);
        a[warp][A.get_i(l)][2 * A.get_j(l) + 1] = __half2float(A.x[l].y);
    }
    for (int l = 0; l < B.ne; ++l) {
        b[warp][B.get_i(l)][2 * B.get_j(l) + 0] = __half2float(B.x[l].x);
        b[warp][B.get_i(l)][2 * B.get_j(l) + 1] = __half2float(B.x[l].y);
    }
    emulate::warp_barrier(0xFFFFFFFF);
    for (int l = 0; l < D.ne; ++l) {
        for (int k = 0; k < 16; ++k) {
            D.x[l] += a[warp][D.get_i(l)][k] * b[warp][D.get_j(l)][k];
        }
    }
    emulate::warp_barrier(0xFFFFFFFF);
}

}  // namespace ggml_cuda_mma

// Stands in for upstream's mma.cuh: the tiles of the int8 and F16 products with 16 rows and 8 columns, in the layout of
// the PTX instructions. Sums are added to what D holds.

#pragma once

#include "common.cuh"

namespace ggml_cuda_mma {

// J counts words of 4 bytes. A: 16 x 8, B: 8 x 8 (a column a row), of int or half2; D: 16 x 8, of int or float. Tiles of
// int with 16 rows are A as well as D.
template <int I_, int J_, typename T> struct tile {
    static_assert((I_ == 16 || I_ == 8) && J_ == 8, "a tile that is not emulated");
    static constexpr int I     = I_;
    static constexpr int J     = J_;
    static constexpr int ne    = I * J / 32;
    T                    x[ne] = {};

    // Upstream's tiles of int and float give the places of D, those of half2 those of A.
    static int get_i(const int l) {
        const int lane = emulate::this_lane();
        if (I == 8) {
            return lane / 4;
        }
        return std::is_same_v<T, half2> ? l % 2 * 8 + lane / 4 : l / 2 * 8 + lane / 4;
    }
    static int get_j(const int l) {
        const int lane = emulate::this_lane();
        if (I == 8) {
            return l * 4 + lane % 4;
        }
        return std::is_same_v<T, half2> ? l / 2 * 4 + lane % 4 : 2 * (lane % 4) + l % 2;
    }
};

// The words of A and B in memory, stride words from row to row.
template <int I, typename T> static inline void load_generic(tile<I, 8, T> & t, const T * x, const int stride) {
    for (int l = 0; l < t.ne; ++l) {
        t.x[l] = x[t.get_i(l) * stride + t.get_j(l)];
    }
}

// ldmatrix: rows of 16 bytes, which it wants aligned, into the layout of A and B, whatever the type.
template <int I, typename T> static inline void load_ldmatrix(tile<I, 8, T> & t, const T * x, const int stride) {
    const int lane = emulate::this_lane();
    if ((uintptr_t) (x + lane % I * stride + lane / I % 2 * 4) % 16 != 0) {
        emulate::fail("ldmatrix: a row is not aligned");
    }
    emulate::warp_barrier(0xFFFFFFFF);
    for (int l = 0; l < t.ne; ++l) {
        t.x[l] = I == 8 ? x[lane / 4 * stride + l * 4 + lane % 4]
                        : x[(l % 2 * 8 + lane / 4) * stride + l / 2 * 4 + lane % 4];
    }
}

template <int n, typename T> static inline void words_of(const T (&x)[n], uint32_t (&words)[n]) {
    static_assert(sizeof(x) == sizeof(words), "elements of 4 bytes");
    memcpy(words, x, sizeof(words));
}

static inline void mma(tile<16, 8, int> & D, const tile<16, 8, int> & A, const tile<8, 8, int> & B) {
    uint32_t a[4], b[2];
    words_of(A.x, a);
    words_of(B.x, b);
    emulate::mma_s8(D.x, a, b[0], b[1], D.x);
}

static inline void mma(tile<16, 8, float> & D, const tile<16, 8, half2> & A, const tile<8, 8, half2> & B) {
    uint32_t a[4], b[2];
    words_of(A.x, a);
    words_of(B.x, b);
    emulate::matrix_product<float>(D.x, a, b, D.x, [](const uint32_t x, const uint32_t y, const float sum) {
        const auto number = [](const uint32_t word, const int n) { return __half2float({ (uint16_t) (word >> n) }); };
        return sum + number(x, 0) * number(y, 0) + number(x, 16) * number(y, 16);
    });
}

}  // namespace ggml_cuda_mma

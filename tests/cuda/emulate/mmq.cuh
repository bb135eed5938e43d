// Stands in for upstream's mmq.cuh: the shape of the tiles, and the int8 product of Q8_0 tiles computed from its
// definition, one output at a time, in the layout that upstream's code has on the architecture emulated.
// -DTURING_MMA_AVAILABLE selects the tensor core layout, otherwise it is the dp4a one; -DEMULATE_MMQ_ROWS=64 the tiles
// of Pascal.

#pragma once

#include "mma.cuh"

#ifndef EMULATE_MMQ_ROWS
#    define EMULATE_MMQ_ROWS 128
#endif

static constexpr int QK8_1_MMQ = 4 * QK8_1;

struct block_q8_1_mmq {
    union {
        float d4[4];
        half2 ds4[4];
    };
    int8_t qs[QK8_1_MMQ];
};
static_assert(sizeof(block_q8_1_mmq) == 144, "wrong block size");

#define MMQ_TILE_NE_K 32
#define MMQ_TILE_Y_K  (MMQ_TILE_NE_K + MMQ_TILE_NE_K / QI8_1)

enum mmq_q8_1_ds_layout { MMQ_Q8_1_DS_LAYOUT_D4 };

struct tile_x_sizes {
    int qs, dm, sc;
};

// The configuration of IQ3_S: rows of a tile from Volta on and before, 8 warps.
static constexpr int ggml_cuda_mmq_get_I(ggml_type, int, bool) {
    return EMULATE_MMQ_ROWS;
}
static constexpr int ggml_cuda_mmq_get_nthreads(ggml_type, int, bool) {
    return 256;
}
static constexpr int ggml_cuda_mmq_get_sram_stride(ggml_type, int, bool) {
    return 2 * MMQ_TILE_NE_K + 2 * MMQ_TILE_NE_K / QI8_0 + 4;
}
static constexpr int ggml_cuda_mmq_get_rows_per_warp(ggml_type, int J, bool) {
    return J >= 48 && J % 16 == 0 ? 32 : 16;
}
static constexpr tile_x_sizes mmq_get_dp4a_tile_x_sizes(ggml_type, int I) {
    return tile_x_sizes{ I * MMQ_TILE_NE_K * 2 + I, I * MMQ_TILE_NE_K * 2 / QI8_0 + I / (QI8_0 / 2), 0 };
}

// One output of the product of Q8_0 tiles over the 128 values from word k00 on.
template <bool mma_layout, int I>
static float emulate_product(const int * x, const int * y, const int i, const int j, const int k00) {
    float sum = 0.0f;
    for (int c = 0; c < 4; ++c) {
        int sumi = 0;
        for (int l = 0; l < 8; ++l) {
            const int xw = x[i * (mma_layout ? 76 : 65) + k00 + 8 * c + l];
            sumi         = ggml_cuda_dp4a(xw, y[j * MMQ_TILE_Y_K + 4 + 8 * c + l], sumi);
        }
        const int scale = mma_layout ? i * 76 + 64 + k00 / 8 + c : 65 * I + 8 * i + i / 4 + k00 / 8 + c;
        sum += ((const float *) x)[scale] * ((const float *) y)[j * MMQ_TILE_Y_K + c] * sumi;
    }
    return sum;
}

// The outputs that this thread holds, in upstream's order: f(index in sum, row, column).
template <ggml_type type, int J, bool fallback, typename F> static void emulate_for_each_output(F f) {
    constexpr int I      = EMULATE_MMQ_ROWS;
    constexpr int nwarps = 8;
#ifdef TURING_MMA_AVAILABLE
    typedef ggml_cuda_mma::tile<16, 8, int> tile_C;
    constexpr int                           rows_per_warp = ggml_cuda_mmq_get_rows_per_warp(type, J, fallback);
    constexpr int                           ntx           = rows_per_warp / tile_C::I;
    static_assert(I / rows_per_warp * ntx == nwarps, "wrong shape");
    for (int j0 = 0; j0 < J; j0 += ntx * tile_C::J) {
        for (int n = 0; n < ntx; ++n) {
            for (int l = 0; l < tile_C::ne; ++l) {
                f((j0 / tile_C::J + n) * tile_C::ne + l,
                  (int) (threadIdx.y / ntx) * rows_per_warp + n * tile_C::I + tile_C::get_i(l),
                  j0 + (int) (threadIdx.y % ntx) * tile_C::J + tile_C::get_j(l));
            }
        }
    }
#else
    for (int j0 = 0; j0 < J; j0 += nwarps) {
        for (int i0 = 0; i0 < I; i0 += 32) {
            f(j0 / nwarps * I / 32 + i0 / 32, i0 + (int) threadIdx.x, j0 + (int) threadIdx.y);
        }
    }
#endif
}

template <ggml_type type, int J, bool fallback>
static void ggml_cuda_mmq_vec_dot_q8_0_q8_1_dp4a(const int * x, const int * y, float * sum, const int k00) {
    emulate_for_each_output<type, J, fallback>([&](const int index, const int i, const int j) {
        sum[index] += emulate_product<false, EMULATE_MMQ_ROWS>(x, y, i, j, k00);
    });
}
template <ggml_type type, int J, bool fallback, mmq_q8_1_ds_layout>
static void ggml_cuda_mmq_vec_dot_q8_0_q8_1_mma(const int * x, const int * y, float * sum, const int k00) {
    emulate_for_each_output<type, J, fallback>([&](const int index, const int i, const int j) {
        sum[index] += emulate_product<true, EMULATE_MMQ_ROWS>(x, y, i, j, k00);
    });
}

// The emulated device and the launchers of itq3s-quantize.cu behind a C interface. tests/cuda/test_emulated.py compiles
// this with every set of kernels.

#include "itq3s-launch.cuh"
#include "mma.cuh"

// For sets without itq3s-mma.cu: activations are for upstream's kernels then.
int64_t                       ggml_cuda_itq3_s_mma_max_columns(ggml_type type);
__attribute__((weak)) int64_t ggml_cuda_itq3_s_mma_max_columns(ggml_type) {
    return 0;
}

// The device that the launchers see, and the order of the threads (launch.h).
extern "C" void emulate_configure(const int cc, const int nsm, const int64_t smpbo, const int64_t seed,
                                  const int64_t max_grid) {
    emulate::device = { cc, nsm, (size_t) smpbo, (uint64_t) seed, max_grid };
    emulate::shared_limits.clear();
    ++emulate::devices_seen;
}

extern "C" void emulate_quantize_mmvq(const int rotate, const float * x, void * y, const int64_t ne00,
                                      const int64_t s01, const int64_t s02, const int64_t s03, const int64_t ne0,
                                      const int64_t ne1, const int64_t ne2, const int64_t ne3) {
    GGML_ASSERT(ggml_cuda_itq3_s_quantize_row_q8_1(x, y, rotate ? GGML_TYPE_ITQ3_S : GGML_TYPE_TQ2_0, ne00, s01, s02,
                                                   s03, ne0, ne1, ne2, ne3, nullptr));
}

extern "C" void emulate_quantize_mmq(const int rotate, const float * x, const int32_t * ids, void * y,
                                     const int64_t ne00, const int64_t s01, const int64_t s02, const int64_t s03,
                                     const int64_t ne0, const int64_t ne1, const int64_t ne2, const int64_t ne3) {
    GGML_ASSERT(ggml_cuda_itq3_s_quantize_mmq_q8_1(x, ids, y, rotate ? GGML_TYPE_ITQ3_S : GGML_TYPE_TQ2_0, ne00, s01,
                                                   s02, s03, ne0, ne1, ne2, ne3, nullptr));
}

extern "C" void emulate_quantize_scatter_mmq(const float * x, const int32_t * ids, void * y, const int64_t ne00,
                                             const int64_t stride_token, const int64_t ne0, const int64_t n_tokens,
                                             const int64_t nrows_dst, const int n_expert_used) {
    GGML_ASSERT(ggml_cuda_itq3_s_quantize_scatter_mmq_q8_1(x, ids, y, GGML_TYPE_ITQ3_S, ne00, stride_token, ne0,
                                                           n_tokens, nrows_dst, n_expert_used, nullptr));
}

// One product of tiles: kind 0 int8, A 16 x 32 and B 8 x 32 bytes; 1 F16, A 16 x 16 and B 8 x 16. Added to C, 16 x 8.
template <typename tile_A, typename tile_B, typename tile_C, typename word_t, typename sum_t>
static void tile_product(const word_t * a, const word_t * b, sum_t * c) {
    tile_A A;
    tile_B B;
    tile_C C;
    ggml_cuda_mma::load_ldmatrix(A, a, 8);
    load_generic(B, b, 8);
    for (int l = 0; l < C.ne; ++l) {
        C.x[l] = c[C.get_i(l) * 8 + C.get_j(l)];
    }
    mma(C, A, B);
    for (int l = 0; l < C.ne; ++l) {
        c[C.get_i(l) * 8 + C.get_j(l)] = C.x[l];
    }
}
extern "C" void emulate_tile_product(const int kind, const void * a, const void * b, void * c) {
    using namespace ggml_cuda_mma;
    if (kind == 0) {
        emulate::launch(dim3(1), dim3(32), tile_product<tile<16, 8, int>, tile<8, 8, int>, tile<16, 8, int>, int, int>,
                        (const int *) a, (const int *) b, (int *) c);
    } else {
        emulate::launch(dim3(1), dim3(32),
                        tile_product<tile<16, 8, half2>, tile<8, 8, half2>, tile<16, 8, float>, half2, float>,
                        (const half2 *) a, (const half2 *) b, (float *) c);
    }
}

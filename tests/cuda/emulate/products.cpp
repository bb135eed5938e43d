// itq-mma.cu and the activations for it behind a C interface.

#include "device.h"
#include "itq-launch.cuh"

// As upstream's ggml_cuda_mul_mat_vec_q calls them. dims: blocks of a row, rows, columns, channels of x, of y and of dst,
// samples of x and of dst. strides: x by row, channel, sample (blocks); activations by column, channel, sample
// (elements); dst by column, channel, sample (elements). With ids: columns are tokens, ids_stride the ids of one.
extern "C" void emulate_product(const int type, const void * x, const float * activations, void * y,
                                const int32_t * ids, const int64_t ids_stride, const void * gate, const float * x_bias,
                                const float * gate_bias, const int glu_op, float * dst, const int64_t * dims,
                                const int64_t * s) {
    ggml_cuda_mm_fusion_args_device fusion;
    fusion.gate      = gate;
    fusion.x_bias    = x_bias;
    fusion.gate_bias = gate_bias;
    fusion.glu_op    = (ggml_glu_op) glu_op;
    fusion.glu_limit = 0.5f;

    const int64_t ne00 = dims[0] * ggml_blck_size(emulate_types[type]), padded = (ne00 + 511) / 512 * 512;
    // Activations as ggml has them: ne11 by ne12 by ne13.
    const int64_t ne11 = ids ? dims[4] : dims[2], ne12 = ids ? dims[2] : dims[4], ne13 = ids ? 1 : dims[7];
    const int64_t s11 = ids ? s[4] : s[3], s12 = ids ? s[3] : s[4];
    GGML_ASSERT(ggml_cuda_itq_quantize_row_q8_1(activations, y, emulate_types[type], ne00, s11, s12, s[5], padded, ne11,
                                                ne12, ne13, nullptr));
    const int64_t row = padded / QK8_1, inner = row * ne11, outer = inner * ne12;
    GGML_ASSERT(ggml_cuda_itq_mul_mat_vec_q(x, emulate_types[type], y, ids, fusion, dst, ne00, dims[1], dims[2], s[0],
                                            ids ? inner : row, s[6], dims[3], dims[4], dims[5], s[1], ids ? row : inner,
                                            s[7], dims[6], dims[7], s[2], outer, s[8], ids_stride, nullptr));
}

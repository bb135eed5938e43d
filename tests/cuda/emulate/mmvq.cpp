// itq3s-mmvq.cu behind a C interface.

#include "itq3s-launch.cuh"

// The product with one vector. dims: blocks of a row, rows, channels of x, y and dst, samples of x and dst. strides: x
// by row, channel, sample (blocks); y by channel, sample (q8_1 blocks); dst by channel, sample.
extern "C" void emulate_mmvq(const int type, const void * x, const void * y, const int32_t * ids, const void * gate,
                             const float * x_bias, const float * gate_bias, const int glu_op, float * dst,
                             const int64_t * dims, const int64_t * s) {
    ggml_cuda_mm_fusion_args_device fusion;
    fusion.gate      = gate;
    fusion.x_bias    = x_bias;
    fusion.gate_bias = gate_bias;
    fusion.glu_op    = (ggml_glu_op) glu_op;
    fusion.glu_limit = 0.5f;

    const ggml_type types[] = { GGML_TYPE_ITQ3_S, GGML_TYPE_TQ1_0, GGML_TYPE_TQ2_0 };
    GGML_ASSERT(ggml_cuda_itq3_s_mul_mat_vec_q(x, types[type], y, ids, fusion, dst, dims[0] * QK_K, dims[1], 1, s[0],
                                               dims[2], dims[3], dims[4], s[1], s[3], s[5], dims[5], dims[6], s[2],
                                               s[4], s[6], nullptr));
}

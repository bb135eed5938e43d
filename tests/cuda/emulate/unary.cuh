// Stands in for upstream's unary.cuh: the gates that a product can be fused with.

#pragma once

#include "common.cuh"

static inline float ggml_cuda_op_silu_single(const float x) {
    return x / (1.0f + std::exp(-x));
}
static inline float ggml_cuda_op_gelu_single(const float x) {
    return 0.5f * x * (1.0f + std::tanh(0.79788456080286535588f * x * (1.0f + 0.044715f * x * x)));
}
static inline float ggml_cuda_op_swiglu_oai_single(float x, float g) {
    x = std::fmin(x, 7.0f);
    g = std::fmax(std::fmin(g, 7.0f), -7.0f);
    return x / (1.0f + std::exp(-1.702f * x)) * (1.0f + g);
}
static inline float ggml_cuda_op_swiglu_clamp_single(const float gate, const float up, const float limit) {
    return ggml_cuda_op_silu_single(std::fmin(gate, limit)) * std::fmax(std::fmin(up, limit), -limit);
}

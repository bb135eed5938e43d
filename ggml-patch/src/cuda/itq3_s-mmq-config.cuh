// Included by mmq.cuh before its tables of tile configurations are asked.

#pragma once

// ITQ3_S, TQ1_0 and TQ2_0 fill the same tile as IQ3_S (Q8_0 layout, 256 values deep) and run the same product on it, so
// they take its configuration on every architecture. Other types are their own model.
static constexpr __host__ __device__ ggml_type ggml_cuda_itq3_s_mmq_config_model(const ggml_type type) {
    return type == GGML_TYPE_ITQ3_S || type == GGML_TYPE_TQ1_0 || type == GGML_TYPE_TQ2_0 ? GGML_TYPE_IQ3_S : type;
}

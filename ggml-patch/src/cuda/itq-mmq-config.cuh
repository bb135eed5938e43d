// Tile configurations of MMQ for the trellis types, TQ1_0 and TQ2_0. Included by mmq.cuh after the tables of the architectures.

#pragma once

// They fill the same tile as IQ3_S (Q8_0 layout, 256 values deep) and run the same product on it, so they take its
// configuration on every architecture. Other types are their own model.
static constexpr __host__ __device__ ggml_type ggml_cuda_itq_mmq_config_model(const ggml_type type) {
    return ggml_cuda_has_own_products(type) ? GGML_TYPE_IQ3_S : type;
}

// The model's configuration for the type itself; GGML_TYPE_COUNT says that there is none.
static constexpr __host__ __device__ ggml_cuda_mmq_config ggml_cuda_itq_mmq_config(const ggml_type      type,
                                                                                   ggml_cuda_mmq_config config) {
    config.type = config.type == GGML_TYPE_COUNT ? GGML_TYPE_COUNT : type;
    return config;
}

// Included by common.cuh after upstream's ggml_cuda_type_traits.

#pragma once

#include "ggml-itq.h"

static constexpr __host__ __device__ bool ggml_cuda_is_itq(const ggml_type type) {
#define ITQ_CUDA_IS(NAME, ...) || type == GGML_TYPE_##NAME
    return false ITQ_TYPES(ITQ_CUDA_IS);
}

// Those with blocks of 64.
static constexpr __host__ __device__ bool ggml_cuda_is_itq_64(const ggml_type type) {
    return false ITQ_TYPES_64(ITQ_CUDA_IS);
}

// Whether the products of a type are ours, and the activations that they want.
static constexpr __host__ __device__ bool ggml_cuda_has_own_products(const ggml_type type) {
    return ggml_cuda_is_itq(type) || type == GGML_TYPE_TQ1_0 || type == GGML_TYPE_TQ2_0;
}

// X(NAME, name, ...) for each of them, and their labels in upstream's switches.
#define ITQ_CUDA_TYPES(X)         ITQ_TYPES(X) X(TQ1_0, tq1_0) X(TQ2_0, tq2_0)
#define ITQ_CUDA_LABEL(NAME, ...) case GGML_TYPE_##NAME:
#define ITQ_CUDA_CASES            ITQ_CUDA_TYPES(ITQ_CUDA_LABEL)

// Block geometry for MMVQ and MMQ. With qi = 16 and vdr = 4 (itq-vecdot.cuh) four lanes share a block of 256, with qi = 4
// and vdr = 2 two lanes one of 64.
#define ITQ_CUDA_TYPE_TRAITS(NAME, name, bits, n_levels, length, ...) \
    template <> struct ggml_cuda_type_traits<GGML_TYPE_##NAME> {      \
        static constexpr int qk = length;                             \
        static constexpr int qr = 4;                                  \
        static constexpr int qi = qk / (4 * qr);                      \
        static constexpr int bs = sizeof(block_##name);               \
    };
ITQ_TYPES(ITQ_CUDA_TYPE_TRAITS)

template <> struct ggml_cuda_type_traits<GGML_TYPE_TQ1_0> {
    static constexpr int qk = QK_K;
    static constexpr int qr = 4;
    static constexpr int qi = QK_K / (4 * qr);
    static constexpr int bs = sizeof(block_tq1_0);
};

template <> struct ggml_cuda_type_traits<GGML_TYPE_TQ2_0> {
    static constexpr int qk = QK_K;
    static constexpr int qr = 4;
    static constexpr int qi = QK_K / (4 * qr);
    static constexpr int bs = sizeof(block_tq2_0);
};

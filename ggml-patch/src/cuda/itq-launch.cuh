// What upstream's quantize.cu and mmvq.cu call first: each function launches our kernel and returns true, or returns
// false and does nothing where upstream's own kernel is meant. Arguments are those of upstream's functions of the same
// name.

#pragma once

#include "common.cuh"

struct ggml_backend_cuda_context;
struct ggml_tensor;

bool ggml_cuda_itq_quantize_row_q8_1(const float * x, void * vy, ggml_type type_src0, int64_t ne00, int64_t s01,
                                     int64_t s02, int64_t s03, int64_t ne0, int64_t ne1, int64_t ne2, int64_t ne3,
                                     cudaStream_t stream);

bool ggml_cuda_itq_quantize_mmq_q8_1(const float * x, const int32_t * ids, void * vy, ggml_type type_src0, int64_t ne00,
                                     int64_t s01, int64_t s02, int64_t s03, int64_t ne0, int64_t ne1, int64_t ne2,
                                     int64_t ne3, cudaStream_t stream);

bool ggml_cuda_itq_quantize_scatter_mmq_q8_1(const float * x, const int32_t * ids_src1_inv, void * vy,
                                             ggml_type type_src0, int64_t ne00, int64_t stride_token, int64_t ne0,
                                             int64_t n_tokens, int64_t nrows_dst, int n_expert_used,
                                             cudaStream_t stream);

// The most bytes that upstream takes for the activations of a product without experts.
size_t ggml_cuda_itq_activation_bytes(const ggml_tensor * src1);

// Whether a product with this many columns goes to cuBLAS in F16 instead of MMQ: from as many on as the environment
// variable GGML_CUDA_ITQ3S_CUBLAS_COLUMNS says, from none without it.
bool ggml_cuda_itq_prefers_cublas(ggml_type type, int64_t ncols);

// Cases of mmq.cu.
#define ITQ_CUDA_MUL_MAT_Q(NAME, ...)                        \
    case GGML_TYPE_##NAME:                                   \
        mul_mat_q_case<GGML_TYPE_##NAME>(ctx, args, stream); \
        break;

// The kernel of the paper (itq-fused.cuh), if it is built in and applies.
bool ggml_cuda_itq_mul_mat_fused(ggml_backend_cuda_context & ctx, const ggml_tensor * src0, const ggml_tensor * src1,
                                 ggml_tensor * dst);

// The most columns of a product of this type for the tensor cores of the current device (itq-mma.cuh); 0 where
// upstream's kernels are meant. Experts are products with one column.
int64_t ggml_cuda_itq_mma_max_columns(ggml_type type);

bool ggml_cuda_itq_mul_mat_vec_q(const void * vx, ggml_type type_x, const void * vy, const int32_t * ids,
                                 const ggml_cuda_mm_fusion_args_device & fusion, float * dst, int64_t ncols_x,
                                 int64_t nrows_x, int64_t ncols_dst, int64_t stride_row_x, int64_t stride_col_y,
                                 int64_t stride_col_dst, int64_t nchannels_x, int64_t nchannels_y,
                                 int64_t nchannels_dst, int64_t stride_channel_x, int64_t stride_channel_y,
                                 int64_t stride_channel_dst, int64_t nsamples_x, int64_t nsamples_dst,
                                 int64_t stride_sample_x, int64_t stride_sample_y, int64_t stride_sample_dst,
                                 int64_t ids_stride, cudaStream_t stream);

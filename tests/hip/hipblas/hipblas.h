// What llama.cpp uses of hipBLAS, declared for scripts/check/hip.py where hipBLAS is not installed. Nothing links to it.

#pragma once

#include <hip/hip_runtime.h>

typedef void * hipblasHandle_t;

enum hipblasStatus_t {
    HIPBLAS_STATUS_SUCCESS,
    HIPBLAS_STATUS_NOT_INITIALIZED,
    HIPBLAS_STATUS_ALLOC_FAILED,
    HIPBLAS_STATUS_INVALID_VALUE,
    HIPBLAS_STATUS_MAPPING_ERROR,
    HIPBLAS_STATUS_EXECUTION_FAILED,
    HIPBLAS_STATUS_INTERNAL_ERROR,
    HIPBLAS_STATUS_NOT_SUPPORTED,
    HIPBLAS_STATUS_ARCH_MISMATCH
};
enum hipblasOperation_t { HIPBLAS_OP_N, HIPBLAS_OP_T };
enum hipblasFillMode_t { HIPBLAS_FILL_MODE_UPPER };
enum hipblasDiagType_t { HIPBLAS_DIAG_NON_UNIT };
enum hipblasSideMode_t { HIPBLAS_SIDE_RIGHT };
enum hipblasGemmAlgo_t { HIPBLAS_GEMM_DEFAULT };
enum hipblasDatatype_t { HIPBLAS_R_16B, HIPBLAS_R_16F, HIPBLAS_R_32F };
enum hipblasComputeType_t { HIPBLAS_COMPUTE_16F, HIPBLAS_COMPUTE_32F, HIPBLAS_COMPUTE_32F_FAST_16F };

extern "C" {
hipblasStatus_t hipblasCreate(hipblasHandle_t *);
hipblasStatus_t hipblasDestroy(hipblasHandle_t);
hipblasStatus_t hipblasSetStream(hipblasHandle_t, hipStream_t);
}

// Of the products only that they are called matters here.
template <typename... T> hipblasStatus_t hipblasSgemm(T...);
template <typename... T> hipblasStatus_t hipblasSgemmBatched(T...);
template <typename... T> hipblasStatus_t hipblasSgemmStridedBatched(T...);
template <typename... T> hipblasStatus_t hipblasGemmEx(T...);
template <typename... T> hipblasStatus_t hipblasGemmBatchedEx(T...);
template <typename... T> hipblasStatus_t hipblasGemmStridedBatchedEx(T...);
template <typename... T> hipblasStatus_t hipblasStrsmBatched(T...);

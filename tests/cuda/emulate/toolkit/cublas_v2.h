// Declarations that upstream's common.cuh refers to; no kernel does.

#pragma once

#include "cuda_runtime.h"

#define CUBLAS_VER_MAJOR 12
#define CUBLAS_VER_MINOR 4

typedef enum { CUBLAS_STATUS_SUCCESS } cublasStatus_t;
typedef struct cublasContext * cublasHandle_t;
enum { CUBLAS_TF32_TENSOR_OP_MATH };

static inline const char * cublasGetStatusString(cublasStatus_t) {
    return "no error";
}
static inline cublasStatus_t cublasCreate(cublasHandle_t *) {
    emulate::fail("cuBLAS is not emulated");
}
static inline cublasStatus_t cublasSetMathMode(cublasHandle_t, int) {
    return CUBLAS_STATUS_SUCCESS;
}
static inline cublasStatus_t cublasSetStream(cublasHandle_t, cudaStream_t) {
    return CUBLAS_STATUS_SUCCESS;
}
static inline cublasStatus_t cublasSetWorkspace(cublasHandle_t, void *, size_t) {
    return CUBLAS_STATUS_SUCCESS;
}

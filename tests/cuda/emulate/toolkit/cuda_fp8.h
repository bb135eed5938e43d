// A type that upstream's common.cuh names; only kernels of NVFP4 convert to and from it.

#pragma once

#include "cuda_runtime.h"

struct __nv_fp8_e4m3 {
    uint8_t __x;

    explicit __nv_fp8_e4m3(float) { emulate::fail("FP8 is not emulated"); }
    operator float() const { emulate::fail("FP8 is not emulated"); }
};

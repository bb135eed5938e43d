// Stands in for upstream's convert.cuh.

#pragma once

#include "common.cuh"

template <typename dst_t, typename src_t> static inline dst_t ggml_cuda_cast(const src_t x) {
    if constexpr (std::is_same_v<dst_t, half>) {
        return __float2half(x);
    } else if constexpr (std::is_same_v<dst_t, nv_bfloat16>) {
        const float f = x;
        uint32_t    bits;
        memcpy(&bits, &f, sizeof(bits));
        return { (uint16_t) ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16) };
    } else {
        return x;
    }
}

// bfloat16 as storage; conversions round to nearest even.

#pragma once

#include "cuda_runtime.h"

struct nv_bfloat16 {
    uint16_t bits;

    nv_bfloat16() = default;
    nv_bfloat16(const float f) {
        const uint32_t word = (uint32_t) __float_as_int(f);
        bits                = (uint16_t) ((word + 0x7FFF + (word >> 16 & 1)) >> 16);
    }
    operator float() const { return __int_as_float((int) ((uint32_t) bits << 16)); }
};
struct alignas(4) nv_bfloat162 {
    nv_bfloat16 x, y;

    nv_bfloat162() = default;
    nv_bfloat162(const nv_bfloat16 x, const nv_bfloat16 y) : x(x), y(y) {}
};

static inline nv_bfloat16 __float2bfloat16(const float f) {
    return f;
}
static inline float __bfloat162float(const nv_bfloat16 b) {
    return b;
}
static inline float2 __bfloat1622float2(const nv_bfloat162 b) {
    return { b.x, b.y };
}

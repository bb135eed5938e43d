// IEEE binary16. Arithmetic is that of float, rounded.

#pragma once

#include "cuda_runtime.h"
#include "f16.h"

struct half {
    uint16_t bits;

    half() = default;
    half(const float f) : bits(emulate::f16_bits(f)) {}
    operator float() const { return emulate::f16(bits); }
};

struct alignas(4) half2 {
    half x, y;

    half2() = default;
    half2(const half x, const half y) : x(x), y(y) {}
};

static inline float __half2float(const half h) {
    return h;
}
static inline half __float2half(const float f) {
    return f;
}
static inline half2 make_half2(const half x, const half y) {
    return { x, y };
}
static inline float2 __half22float2(const half2 h) {
    return { h.x, h.y };
}
static inline half2 __float22half2_rn(const float2 f) {
    return { f.x, f.y };
}
static inline half2 __float2half2_rn(const float f) {
    return { f, f };
}
static inline half __low2half(const half2 h) {
    return h.x;
}
static inline half __high2half(const half2 h) {
    return h.y;
}
static inline float __low2float(const half2 h) {
    return h.x;
}
static inline float __high2float(const half2 h) {
    return h.y;
}
static inline half2 __lows2half2(const half2 a, const half2 b) {
    return { a.x, b.x };
}
static inline half2 __highs2half2(const half2 a, const half2 b) {
    return { a.y, b.y };
}
static inline half2 __hadd2(const half2 a, const half2 b) {
    return { (float) a.x + (float) b.x, (float) a.y + (float) b.y };
}
static inline half2 __hmul2(const half2 a, const half2 b) {
    return { (float) a.x * (float) b.x, (float) a.y * (float) b.y };
}
static inline half __hmax(const half a, const half b) {
    return fmaxf(a, b);
}
static inline half2 __hmax2(const half2 a, const half2 b) {
    return { __hmax(a.x, b.x), __hmax(a.y, b.y) };
}
static inline half2 operator+(const half2 a, const half2 b) {
    return __hadd2(a, b);
}
static inline half2 operator*(const half2 a, const half2 b) {
    return __hmul2(a, b);
}
static inline half2 & operator+=(half2 & a, const half2 b) {
    return a = a + b;
}

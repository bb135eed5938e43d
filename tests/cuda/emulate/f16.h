// IEEE binary16 in bits, to float and, rounded to the nearest and then to even, back.

#pragma once

#include <cmath>
#include <cstdint>

namespace emulate {

inline float f16(const uint16_t bits) {
    const int exponent = bits >> 10 & 0x1F;
    const int mantissa = bits & 0x3FF;
    float     value;
    if (exponent == 31) {
        value = mantissa ? NAN : INFINITY;
    } else if (exponent == 0) {
        value = std::ldexp((float) mantissa, -24);
    } else {
        value = std::ldexp((float) (mantissa | 0x400), exponent - 25);
    }
    return bits & 0x8000 ? -value : value;
}

inline uint16_t f16_bits(const float f) {
    const uint16_t sign = std::signbit(f) ? 0x8000 : 0;
    const float    a    = std::fabs(f);
    if (std::isnan(f)) {
        return sign | 0x7E00;
    }
    if (a < std::ldexp(1.0f, -14)) {  // subnormal; 1024 is the smallest normal number, and carries into it as it should
        return sign | (uint16_t) std::nearbyint(std::ldexp(a, 24));
    }
    int exponent;
    std::frexp(a, &exponent);  // a = m * 2^exponent, 0.5 <= m < 1
    const uint32_t mantissa = (uint32_t) std::nearbyint(std::ldexp(a, 11 - exponent));  // 1024 .. 2048
    const uint32_t bits     = ((uint32_t) (exponent + 14) << 10) + (mantissa - 1024);
    return sign | (uint16_t) (std::isinf(a) || bits >= 0x7C00 ? 0x7C00 : bits);
}

}  // namespace emulate

#pragma once

// Vectors of ITQ_LANES floats for the calibrated encoders (private to ggml-base), the same code for every processor.
//
// Compilers turn comparisons of vectors that are longer than a register into scalar code, and leave loops over sums in
// memory. So what includes this is compiled once for each length: by itq-ldlq.c and grid-ldlq.c for the lowest processor,
// by ldlq-avx2.c and ldlq-avx512.c for better ones. ITQ_VARIANT(name) is what the functions of each are called.

#include "ggml-itq.h"

#include <string.h>

#ifndef ITQ_VARIANT
#    define ITQ_LANES         4  // SSE, NEON
#    define ITQ_VARIANT(name) name##_generic
#endif

// ITQ_LANES floats, integers or masks: a register. Left to vectorise loops over the lanes, GCC and Clang shuffle. Other
// compilers get the loops.
#if defined(__GNUC__) || defined(__clang__)
typedef float   vec __attribute__((vector_size(4 * ITQ_LANES), may_alias));
typedef int32_t ivec __attribute__((vector_size(4 * ITQ_LANES), may_alias));

#    define VEC_OPERATION(type, name, result, expression) \
        ITQ_INLINE result name(type a, type b) {          \
            return (result) (expression);                 \
        }
#    define MASK_OPERATION(type, name, expression)        \
        ITQ_INLINE type name(ivec mask, type a, type b) { \
            return (type) (expression);                   \
        }
VEC_OPERATION(vec, v_add, vec, a + b)
VEC_OPERATION(vec, v_sub, vec, a - b)
VEC_OPERATION(vec, v_mul, vec, a * b)
VEC_OPERATION(vec, v_greater, ivec, a > b)
VEC_OPERATION(ivec, i_add, ivec, a + b)
VEC_OPERATION(ivec, i_and, ivec, a & b)
VEC_OPERATION(ivec, i_equal, ivec, a == b)
MASK_OPERATION(vec, v_select, (mask & (ivec) a) | (~mask & (ivec) b))
MASK_OPERATION(ivec, i_select, (mask & a) | (~mask & b))

// A scalar operand is broadcast by one instruction, an initialiser by one a lane (GCC 12).
ITQ_INLINE vec v_scale(float a, vec b) {
    return a * b;
}

ITQ_INLINE vec v_all(float x) {
    return x - (vec) { 0 };
}

ITQ_INLINE ivec i_all(int32_t x) {
    return x - (ivec) { 0 };
}

ITQ_INLINE ivec i_of(vec x) {
    return __builtin_convertvector(x, ivec);
}

ITQ_INLINE ivec i_shift_left(ivec a, int bits) {
    return a << bits;
}

// Arithmetic shift.
ITQ_INLINE ivec i_shift_right(ivec a, int bits) {
    return a >> bits;
}

// The low byte of each lane. GCC 12 narrows only the longest vectors by one instruction.
ITQ_INLINE void i_store_bytes(uint8_t * to, ivec a) {
#    if defined(__clang__) || defined(__AVX512F__)
    typedef uint8_t bytes __attribute__((vector_size(ITQ_LANES)));
    const bytes     low = __builtin_convertvector(a, bytes);
    memcpy(to, &low, sizeof(low));
#    else
    for (int l = 0; l < ITQ_LANES; ++l) {
        to[l] = (uint8_t) a[l];
    }
#    endif
}
#else
typedef union {
    float f[ITQ_LANES];
} vec;

typedef union {
    int32_t f[ITQ_LANES];
} ivec;

#    define EACH_LANE(result, expression)     \
        result r;                             \
        for (int l = 0; l < ITQ_LANES; ++l) { \
            r.f[l] = expression;              \
        }                                     \
        return r;
#    define VEC_OPERATION(type, name, result, expression) \
        ITQ_INLINE result name(type a, type b) {          \
            EACH_LANE(result, expression)                 \
        }
#    define MASK_OPERATION(type, name)                    \
        ITQ_INLINE type name(ivec mask, type a, type b) { \
            EACH_LANE(type, mask.f[l] ? a.f[l] : b.f[l])  \
        }
VEC_OPERATION(vec, v_add, vec, a.f[l] + b.f[l])
VEC_OPERATION(vec, v_sub, vec, a.f[l] - b.f[l])
VEC_OPERATION(vec, v_mul, vec, a.f[l] * b.f[l])
VEC_OPERATION(vec, v_greater, ivec, a.f[l] > b.f[l] ? -1 : 0)
VEC_OPERATION(ivec, i_add, ivec, a.f[l] + b.f[l])
VEC_OPERATION(ivec, i_and, ivec, a.f[l] & b.f[l])
VEC_OPERATION(ivec, i_equal, ivec, a.f[l] == b.f[l] ? -1 : 0)
MASK_OPERATION(vec, v_select)
MASK_OPERATION(ivec, i_select)

ITQ_INLINE vec v_scale(float a, vec b){ EACH_LANE(vec, a * b.f[l]) }

ITQ_INLINE vec v_all(float x){ EACH_LANE(vec, x) }

ITQ_INLINE ivec i_all(int32_t x){ EACH_LANE(ivec, x) }

ITQ_INLINE ivec i_of(vec x){ EACH_LANE(ivec, (int32_t) x.f[l]) }

ITQ_INLINE ivec i_shift_left(ivec a, int bits){ EACH_LANE(ivec, (int32_t) ((uint32_t) a.f[l] << bits)) }

ITQ_INLINE ivec i_shift_right(ivec a, int bits){ EACH_LANE(ivec, a.f[l] >> bits) }

ITQ_INLINE void i_store_bytes(uint8_t * to, ivec a) {
    for (int l = 0; l < ITQ_LANES; ++l) {
        to[l] = (uint8_t) a.f[l];
    }
}
#endif

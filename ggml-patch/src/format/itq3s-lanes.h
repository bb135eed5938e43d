#pragma once

// What the encoders of ITQ3_S share (private to ggml-base). LANES blocks are encoded side by side: arrays are
// [weight or state][lane] and every innermost loop runs over the lanes, one vector register or a few. The arithmetic is
// that of gguf_itq3s/transform.py, trellis.py and scale.py, byte for byte: float32, one order of operations, no contraction
// into fused multiply-adds (-ffp-contract=off, set by itq3s.cmake).

#include "ggml-itq3s.h"

#include <math.h>
#include <stdbool.h>
#include <string.h>

#ifdef __FAST_MATH__
#    error "ITQ3_S fixes the order of its floating-point operations; build it without -ffast-math"
#endif

// ggml-base is compiled for the lowest processor of its architecture; let the loader choose better. Features, not
// architecture levels: compilers before GCC 12 cannot dispatch on those.
#if defined(__x86_64__) && defined(__GLIBC__) && defined(__has_attribute)
#    if __has_attribute(target_clones)
#        define ITQ3_S_CLONES __attribute__((target_clones("avx512f", "avx2", "default")))
#    endif
#endif
#ifndef ITQ3_S_CLONES
#    define ITQ3_S_CLONES
#endif

#if defined(__GNUC__) || defined(__clang__)
#    define ITQ3_S_INLINE static inline __attribute__((always_inline))
#else
#    define ITQ3_S_INLINE static inline
#endif

#define N      QK_ITQ3_S
#define LANES  16
#define STATES 64
#define HALF   (STATES / 2)

// Marks states that state 0 cannot have reached: larger than any path metric, far below the end of float32.
#define UNREACHED 1e30f

// Largest magnitude of a rotated weight: squares and sums of 256 of them stay finite.
#define MAGNITUDE_LIMIT 0x1p56f

#define F16_MAX 65504.0f
#define F16_NAN 0x7e00

// The block's RMS in level units at each start scale, 25.5 / start (scale.py).
static const float rms_in_levels[] = { (float) (25.5 / 1.0), (float) (25.5 / 0.91), (float) (25.5 / 1.09) };
static const int   n_starts[]      = { 1, 3 };  // enum itq3_s_effort

// Grid of the transition from state k < HALF with s[t] = 0; taking s[t] = 1, or starting from k + HALF, flips its high
// bit. A state is the sum of s[t-1-i] << i.
ITQ3_S_INLINE int butterfly_grid(int k) {
    return 2 * (k & 1) + ((k >> 1 ^ k >> 3) & 1);
}

// Sum of each lane by folding halves: p[i] + p[i + n/2], then n/4, and so on. fold[i] holds p[i] + p[i + N/2] already.
ITQ3_S_INLINE void fold_sum(float fold[N / 2][LANES], float * sum) {
    for (int half = N / 4; half > 0; half /= 2) {
        for (int i = 0; i < half; ++i) {
            for (int l = 0; l < LANES; ++l) {
                fold[i][l] += fold[i + half][l];
            }
        }
    }
    memcpy(sum, fold[0], sizeof(fold[0]));
}

ITQ3_S_INLINE void sum_of_products(float a[N][LANES], float b[N][LANES], float fold[N / 2][LANES], float * sum) {
    for (int i = 0; i < N / 2; ++i) {
        for (int l = 0; l < LANES; ++l) {
            fold[i][l] = a[i][l] * b[i][l] + a[i + N / 2][l] * b[i + N / 2][l];
        }
    }
    fold_sum(fold, sum);
}

// Rotate LANES blocks of weights into ws->x.
ITQ3_S_INLINE void rotate(float x[N][LANES]) {
    for (int h = 1; h < N; h *= 2) {
        for (int i = 0; i < N; i += 2 * h) {
            for (int j = i; j < i + h; ++j) {
                for (int l = 0; l < LANES; ++l) {
                    const float a = x[j][l];
                    const float b = x[j + h][l];
                    x[j][l]       = a + b;
                    x[j + h][l]   = a - b;
                }
            }
        }
    }
    for (int i = 0; i < N; ++i) {
        for (int l = 0; l < LANES; ++l) {
            x[i][l] *= 0.0625f;
        }
    }
}

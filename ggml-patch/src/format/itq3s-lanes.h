#pragma once

// What the encoders share (private to ggml-base). Names that begin with itq_ are of any code on this trellis, those with
// itq3_s_ of ITQ3_S alone.
//
// ITQ_LANES blocks are encoded side by side: arrays are [weight or state][lane] and every innermost loop runs over the
// lanes, one vector register or a few. The arithmetic is that of gguf_itq3s/transform.py, trellis.py and scale.py, byte
// for byte: float32, one order of operations, no contraction into fused multiply-adds (-ffp-contract=off, set by
// itq3s.cmake).

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
#        define ITQ_CLONES __attribute__((target_clones("avx512f", "avx2", "default")))
#    endif
#endif
#ifndef ITQ_CLONES
#    define ITQ_CLONES
#endif

#if defined(__GNUC__) || defined(__clang__)
#    define ITQ_INLINE static inline __attribute__((always_inline))
#else
#    define ITQ_INLINE static inline
#endif

#define ITQ_LANES  16
#define ITQ_STATES 64
#define ITQ_HALF   (ITQ_STATES / 2)

// Marks states that state 0 cannot have reached: larger than any path metric, far below the end of float32.
#define ITQ_UNREACHED 1e30f

// Largest magnitude of a rotated weight: squares and sums of 256 of them stay finite.
#define ITQ_MAGNITUDE_LIMIT 0x1p56f

#define ITQ_F16_MAX 65504.0f
#define ITQ_F16_NAN 0x7e00

// The block's RMS in level units at each start scale, 25.5 / start (scale.py).
static const float itq3_s_rms_in_levels[] = { (float) (25.5 / 1.0), (float) (25.5 / 0.91), (float) (25.5 / 1.09) };
static const int   itq3_s_n_starts[]      = { 1, 3 };  // enum itq3_s_effort

// Grid of the transition from state k < ITQ_HALF with s[t] = 0; taking s[t] = 1, or starting from k + ITQ_HALF, flips its
// high bit. A state is the sum of s[t-1-i] << i.
ITQ_INLINE int itq_butterfly_grid(int k) {
    return 2 * (k & 1) + ((k >> 1 ^ k >> 3) & 1);
}

// Sum of each lane by folding halves: p[i] + p[i + n/2], then n/4, and so on. fold[i] holds p[i] + p[i + 128] already.
ITQ_INLINE void itq_fold_sum(float fold[QK_ITQ3_S / 2][ITQ_LANES], float * sum) {
    for (int half = QK_ITQ3_S / 4; half > 0; half /= 2) {
        for (int i = 0; i < half; ++i) {
            for (int l = 0; l < ITQ_LANES; ++l) {
                fold[i][l] += fold[i + half][l];
            }
        }
    }
    memcpy(sum, fold[0], sizeof(fold[0]));
}

ITQ_INLINE void itq_sum_of_products(float a[QK_ITQ3_S][ITQ_LANES], float b[QK_ITQ3_S][ITQ_LANES],
                                    float fold[QK_ITQ3_S / 2][ITQ_LANES], float * sum) {
    for (int i = 0; i < QK_ITQ3_S / 2; ++i) {
        for (int l = 0; l < ITQ_LANES; ++l) {
            fold[i][l] = a[i][l] * b[i][l] + a[i + QK_ITQ3_S / 2][l] * b[i + QK_ITQ3_S / 2][l];
        }
    }
    itq_fold_sum(fold, sum);
}

// Rotate ITQ_LANES blocks of weights into ws->x.
ITQ_INLINE void itq_rotate(float x[QK_ITQ3_S][ITQ_LANES]) {
    for (int h = 1; h < QK_ITQ3_S; h *= 2) {
        for (int i = 0; i < QK_ITQ3_S; i += 2 * h) {
            for (int j = i; j < i + h; ++j) {
                for (int l = 0; l < ITQ_LANES; ++l) {
                    const float a = x[j][l];
                    const float b = x[j + h][l];
                    x[j][l]       = a + b;
                    x[j + h][l]   = a - b;
                }
            }
        }
    }
    for (int i = 0; i < QK_ITQ3_S; ++i) {
        for (int l = 0; l < ITQ_LANES; ++l) {
            x[i][l] *= 0.0625f;
        }
    }
}

#pragma once

// What the encoders share (private to ggml-base).
//
// ITQ_LANES blocks are encoded side by side: arrays are [weight or state][lane] and every innermost loop runs over the
// lanes, one vector register or a few. The arithmetic is that of gguf_itq3s/codec (transform.py, trellis.py, scale.py),
// byte for byte: float32, one order of operations, no contraction into fused multiply-adds (-ffp-contract=off, set by
// itq.cmake).

#include "ggml-itq.h"
#include "itq-exact.h"

#include <math.h>
#include <stdbool.h>
#include <string.h>

#ifndef ITQ_LANES
#    define ITQ_LANES 16
#endif
#define ITQ_STATES 64
#define ITQ_HALF   (ITQ_STATES / 2)

// Largest magnitude of a rotated weight: squares and sums of 256 of them stay finite.
#define ITQ_MAGNITUDE_LIMIT 0x1p56f

#define ITQ_F16_MAX       65504.0f
#define ITQ_F16_NAN       0x7e00
// The largest scale whose lowest bits are zero.
#define ITQ_F16_MAX_STATE 63488.0f

#define ITQ_MAX_STARTS 3

// What sets a code apart. The functions that take one are inlined into callers that name it, so that it is folded.
struct itq_code {
    int    bits;                                 // of a symbol: a subset has 1 << bits levels
    int    length;                               // weights of a block
    bool   has_z;                                // there is a zero-point: the start state is in it and not in the scale
    int8_t levels[64];                           // in units of d/32, index 8*symbol + subset
    bool   by_peak;                              // start scales go by the largest magnitude of a block, not by its RMS
    int    n_starts[2];                          // enum itq_effort
    float  magnitude_in_levels[ITQ_MAX_STARTS];  // that in level units at each start scale (formats.py)
};

#define ITQ3_S_STARTS                                                         \
    false, { 1, 3 }, {                                                        \
        (float) (21.97 / 1.0), (float) (21.97 / 0.93), (float) (21.97 / 1.08) \
    }
#define ITQ2_S_STARTS                                  \
    false, { 1, 2 }, {                                 \
        (float) (28.69 / 0.97), (float) (28.69 / 1.05) \
    }
#define ITQ4_S_STARTS                                                         \
    false, { 1, 3 }, {                                                        \
        (float) (19.26 / 1.0), (float) (19.26 / 0.93), (float) (19.26 / 1.07) \
    }
#define ITQ3_N_STARTS                                                     \
    true, { 1, 3 }, {                                                     \
        (float) (59.0 / 0.95), (float) (59.0 / 1.0), (float) (59.0 / 0.9) \
    }
#define ITQ2_N_STARTS                                                       \
    false, { 1, 3 }, {                                                      \
        (float) (28.69 / 1.0), (float) (28.69 / 0.9), (float) (28.69 / 1.1) \
    }
#define ITQ4_N_STARTS                                                       \
    false, { 1, 3 }, {                                                      \
        (float) (19.26 / 1.0), (float) (19.26 / 0.9), (float) (19.26 / 1.1) \
    }

#define ITQ_DEFINE_CODE(NAME, name, bits, n_levels, length, has_z, number) \
    static const struct itq_code name##_code = { bits, length, has_z, NAME##_LEVELS, NAME##_STARTS };
ITQ_TYPES(ITQ_DEFINE_CODE)

// Levels of the widest table, a power of two: codes of a weight are ITQ_S_BIT*s + 8*q + c.
#define ITQ_S_BIT 64

// Subset of the transition from state k < ITQ_HALF with s[t] = 0; taking s[t] = 1, or starting from k + ITQ_HALF, flips
// its high bit. A state is the sum of s[t-1-i] << i.
ITQ_INLINE int itq_butterfly_subset(int k) {
    return 4 * (k >> 4 & 1) + 2 * ((k ^ k >> 2 ^ k >> 3 ^ k >> 4) & 1) + ((k >> 1 ^ k >> 3) & 1);
}

// Sum of each lane by folding halves: p[i] + p[i + n/2], then n/4, and so on. fold[i] holds p[i] + p[i + n/2] already.
ITQ_INLINE void itq_fold_sum(int n, float (*fold)[ITQ_LANES], float * sum) {
    for (int half = n / 4; half > 0; half /= 2) {
        for (int i = 0; i < half; ++i) {
            for (int l = 0; l < ITQ_LANES; ++l) {
                fold[i][l] += fold[i + half][l];
            }
        }
    }
    memcpy(sum, fold[0], sizeof(fold[0]));
}

ITQ_INLINE void itq_sum_of_products(int     n, float (*a)[ITQ_LANES], float (*b)[ITQ_LANES], float (*fold)[ITQ_LANES],
                                    float * sum) {
    for (int i = 0; i < n / 2; ++i) {
        for (int l = 0; l < ITQ_LANES; ++l) {
            fold[i][l] = a[i][l] * b[i][l] + a[i + n / 2][l] * b[i + n / 2][l];
        }
    }
    itq_fold_sum(n, fold, sum);
}

// Rotate ITQ_LANES blocks of weights in place.
ITQ_INLINE void itq_rotate(int n, float (*x)[ITQ_LANES]) {
    for (int h = 1; h < n; h *= 2) {
        for (int i = 0; i < n; i += 2 * h) {
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
    const float root = n == 256 ? 0.0625f : 0.125f;
    for (int i = 0; i < n; ++i) {
        for (int l = 0; l < ITQ_LANES; ++l) {
            x[i][l] *= root;
        }
    }
}

// Load and rotate n <= ITQ_LANES blocks, stride weights apart; lanes without a block are zero. finite[l] becomes false
// for a lane that cannot be encoded, and its weights zero.
ITQ_INLINE void itq_load(const struct itq_code * code, float (*x)[ITQ_LANES], const float * src, int64_t stride, int n,
                         bool * finite) {
    const int length = code->length;
    for (int l = 0; l < ITQ_LANES; ++l) {
        for (int t = 0; t < length; ++t) {
            x[t][l] = l < n ? src[l * stride + t] : 0.0f;
        }
    }
    itq_rotate(length, x);
    for (int t = 0; t < length; ++t) {
        for (int l = 0; l < ITQ_LANES; ++l) {
            finite[l] &= fabsf(x[t][l]) < ITQ_MAGNITUDE_LIMIT;  // false for NaN
        }
    }
    for (int l = 0; l < ITQ_LANES; ++l) {
        if (!finite[l]) {
            for (int t = 0; t < length; ++t) {
                x[t][l] = 0.0f;
            }
        }
    }
}

// Root mean square of each lane.
ITQ_INLINE void itq_rms(int n, float (*x)[ITQ_LANES], float (*fold)[ITQ_LANES], float * rms) {
    itq_sum_of_products(n, x, x, fold, rms);
    for (int l = 0; l < ITQ_LANES; ++l) {
        rms[l] = sqrtf(rms[l] * (n == 256 ? 1.0f / 256 : 1.0f / 64));
    }
}

// What start scales go by, the root mean square of each lane or its largest magnitude; 0 where the former is.
ITQ_INLINE void itq_magnitude(const struct itq_code * code, float (*x)[ITQ_LANES], float (*fold)[ITQ_LANES],
                              float *                 magnitude) {
    itq_rms(code->length, x, fold, magnitude);
    if (!code->by_peak) {
        return;
    }
    float peak[ITQ_LANES] = { 0 };
    for (int t = 0; t < code->length; ++t) {
        for (int l = 0; l < ITQ_LANES; ++l) {
            const float here = fabsf(x[t][l]);
            peak[l]          = here > peak[l] ? here : peak[l];
        }
    }
    for (int l = 0; l < ITQ_LANES; ++l) {
        magnitude[l] = magnitude[l] > 0 ? peak[l] : 0.0f;
    }
}

// The nearest scale that a block can store: fp16, its lowest bits zero where the start state takes them. NaN stays.
ITQ_INLINE ggml_half itq_storable(const struct itq_code * code, float d) {
    const float     most = code->has_z ? ITQ_F16_MAX : ITQ_F16_MAX_STATE;
    const ggml_half half = ggml_fp32_to_fp16(d <= 0 ? 0.0f : d > most ? most : d);
    return code->has_z ? half : (ggml_half) ((half + (ITQ_STATE_MASK + 1) / 2) & ~ITQ_STATE_MASK);
}

// What takes the weights of each lane to level units at a start scale. Where few scales can be stored, the search is at
// one of them.
ITQ_INLINE void itq_start(const struct itq_code * code, int start, const float * magnitude, float * factor) {
    for (int l = 0; l < ITQ_LANES; ++l) {
        const float size = magnitude[l] > 0 ? magnitude[l] : 1.0f;
        factor[l]        = code->magnitude_in_levels[start] / size;
        if (!code->has_z) {
            const float d = ggml_fp16_to_fp32(itq_storable(code, 32.0f / factor[l]));
            factor[l]     = d > 0 ? 32.0f / d : factor[l];
        }
    }
}

// Least-squares refit, xl = <x, L> and ll = <L, L> for the levels L: d, and d/32, the levels' unit.
ITQ_INLINE void itq_refit(const struct itq_code * code, const float * xl, const float * ll, ggml_half * d,
                          float * unit) {
    for (int l = 0; l < ITQ_LANES; ++l) {
        d[l]    = itq_storable(code, 32.0f * (xl[l] / ll[l]));
        unit[l] = ggml_fp16_to_fp32(d[l]) * 0.03125f;
    }
}

// The best of the start scales so far.
struct itq_best {
    float     error[ITQ_LANES];
    ggml_half d[ITQ_LANES];
    uint8_t   state[ITQ_LANES];         // before the first weight
    uint8_t   code[QK_ITQ][ITQ_LANES];  // ITQ_S_BIT*s + 8*q + c
};

// Keep what a start found in the lanes where its error is the least; the earlier start on a tie.
ITQ_INLINE void itq_keep_better(int n, struct itq_best * best, bool first, const float * error, const ggml_half * d,
                                const uint8_t * state, uint8_t (*code)[ITQ_LANES]) {
    uint8_t better[ITQ_LANES];
    for (int l = 0; l < ITQ_LANES; ++l) {
        better[l] = first || error[l] < best->error[l] ? 0xff : 0;
        if (better[l]) {
            best->error[l] = error[l];
            best->d[l]     = d[l];
            best->state[l] = state[l];
        }
    }
    for (int t = 0; t < n; ++t) {
        for (int l = 0; l < ITQ_LANES; ++l) {
            best->code[t][l] = (uint8_t) ((code[t][l] & better[l]) | (best->code[t][l] & ~better[l]));
        }
    }
}

// Blocks that are zero are zero bytes, as are those too small for a scale: their scale becomes 0.
ITQ_INLINE void itq_clear_zeros(struct itq_best * best, const float * magnitude) {
    for (int l = 0; l < ITQ_LANES; ++l) {
        if (!(magnitude[l] > 0)) {
            best->d[l] = 0;
        }
    }
}

// Symbols and selectors of a lane; the bytes are zero before.
ITQ_INLINE void itq_pack(int bits, int length, const struct itq_best * best, int l, uint8_t * qs, uint8_t * sel) {
    for (int t = 0; t < length; ++t) {
        const int code   = best->code[t][l];
        const int symbol = code >> 3 & ((1 << bits) - 1);
        qs[itq_symbol_byte(bits, length, t)] |=
            (uint8_t) ((symbol & (bits == 1 ? 1 : 3)) << itq_symbol_shift(bits, length, t));
        if (bits > 2) {
            qs[length / 4 + t / 8] |= (uint8_t) (symbol >> 2 << t % 8);
        }
        sel[t / 8] |= (uint8_t) (code / ITQ_S_BIT << t % 8);
    }
}

#define ITQ_SET_SCALE_1(block, scale, zero_point, state) \
    (block)->d = (scale);                                \
    (block)->z = (ggml_half) ((zero_point) | (state))
#define ITQ_SET_SCALE_0(block, scale, zero_point, state) \
    (void) (zero_point);                                 \
    (block)->d = (ggml_half) ((scale) | (state))

// name_pack: the block of a lane. One that could not be encoded gets d = NaN.
#define ITQ_DEFINE_PACK(NAME, name, bits, n_levels, length, has_z, number)                                     \
    static void name##_pack(const struct itq_best * best, int l, ggml_half z, bool finite, block_##name * y) { \
        memset(y, 0, sizeof(*y));                                                                              \
        if (!finite) {                                                                                         \
            y->d = ITQ_F16_NAN;                                                                                \
        } else if (best->d[l] != 0) {                                                                          \
            ITQ_SET_SCALE_##has_z(y, best->d[l], z, best->state[l]);                                           \
            itq_pack(bits, length, best, l, y->qs, y->sel);                                                    \
        }                                                                                                      \
    }
ITQ_TYPES(ITQ_DEFINE_PACK)

// name_load: itq_load of a type, in clones for the processors there are.
#define ITQ_DEFINE_LOAD(NAME, name, ...)                                                                \
    ITQ_CLONES static void name##_load(float (*x)[ITQ_LANES], const float * src, int64_t stride, int n, \
                                       bool * finite) {                                                 \
        itq_load(&name##_code, x, src, stride, n, finite);                                              \
    }
ITQ_TYPES(ITQ_DEFINE_LOAD)

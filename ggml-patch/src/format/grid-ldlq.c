// Rounding to the grid of a type with error feedback. See gguf_itq3s/rounding/grid.py for the method; the arithmetic is
// the same, byte for byte: float32, one order of operations, no contraction (-ffp-contract=off, set by itq.cmake).

#include "grid-ldlq.h"

#include "grid-ldlq-feed.h"
#include "itq-exact.h"

#include <math.h>
#include <string.h>

void grid_ldlq_feed(float * GGML_RESTRICT target, const float * GGML_RESTRICT errors, int64_t nrows, int64_t n,
                    const float * GGML_RESTRICT feedback, int64_t start) {
    ITQ_BEST_VARIANT(grid_ldlq_feed)(target, errors, nrows, n, feedback, start);
}

// The code that is nearest to a target in units of the scale; half-way, the lower level of a table or the even code.
ITQ_INLINE int nearest_code(float x, int low, int high, const float * table) {
    if (table) {
        int code = 0;
        for (int c = 0; c < high; ++c) {
            code += x > (table[c] + table[c + 1]) * 0.5f;
        }
        return code;
    }
    x = x > (float) low ? x : (float) low;  // what is not a number becomes the least code
    x = x < (float) high ? x : (float) high;
    return (int) rintf(x);
}

ITQ_CLONES
void grid_ldlq_round(int8_t * GGML_RESTRICT codes, float * GGML_RESTRICT errors, float * GGML_RESTRICT residual,
                     const float * GGML_RESTRICT weights, const float * GGML_RESTRICT target, int64_t nrows,
                     const float * GGML_RESTRICT feedback, int64_t stride, const float * GGML_RESTRICT scale,
                     const float * GGML_RESTRICT minimum, int group, int low, int high,
                     const float * GGML_RESTRICT table) {
    for (int64_t r = 0; r < nrows; ++r) {
        float left[BLOCK];
        memcpy(left, target + r * BLOCK, sizeof(left));
        for (int k = 0; k < BLOCK; ++k) {
            const int64_t here = r * BLOCK + k;
            const int64_t at   = r * (BLOCK / group) + k / group;
            const float   d    = scale[at];
            const float   m    = minimum[at];
            const float   unit = d != 0.0f ? 1.0f / d : 0.0f;
            const int     code = nearest_code((left[k] + m) * unit, low, high, table);
            const float   q    = d * (table ? table[code] : (float) code) - m;
            const float   e    = q - weights[here];
            codes[here]        = (int8_t) code;
            errors[here]       = e;
            residual[here]     = q - left[k];

            const float * a = feedback + k * stride;
            // columns up to k are done; whole vectors are faster than an odd start
            for (int i = k / 16 * 16; i < BLOCK; ++i) {
                left[i] -= a[i] * e;
            }
        }
    }
}

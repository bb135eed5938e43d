#pragma once

// Calibrated encoding of ITQ3_S: LDLQ with a trellis search that carries the feedback of every survivor. The method and
// the arithmetic are those of gguf_itq3s/rounding/ldlq.py, byte for byte.

#include "ggml-itq3s.h"

#include <stdbool.h>

#ifdef __cplusplus
extern "C" {
#endif

// Longest history of a survivor, segment + lookahead.
#define ITQ3_S_LDLQ_WINDOW 64

// What rounding errors e of a rotated row cost: sum over k of weight[k] * (e[k] + sum over j < k of A[j][k] e[j])^2.
struct itq3_s_factor {
    const float * feedback;  // A, unit upper triangular, row-major: n*n, or 256*256 for each block if not full
    const float * weight;    // n, positive
    int64_t       columns;   // n, a multiple of 256
    bool          full;      // whether errors are fed across blocks
};

struct itq3_s_search {
    int segment;    // columns committed at a time, at least 1
    int lookahead;  // columns searched past a segment before it is committed; segment + lookahead <= 64
    int effort;     // enum itq3_s_effort
};

// Measured defaults (docs/calibration.md).
#define ITQ3_S_LDLQ_SEGMENT   8
#define ITQ3_S_LDLQ_LOOKAHEAD 16
#define ITQ3_S_LDLQ_DAMPING   0.003

// Rows of factor->columns weights; returns the bytes written. A block that cannot be encoded (a weight that is not
// finite, errors that grew beyond float32) gets d = NaN, which ggml_validate_row_data refuses. Best called with 64 rows
// or more.
GGML_API size_t quantize_itq3_s_ldlq(const float * GGML_RESTRICT src, void * GGML_RESTRICT dst, int64_t nrows,
                                     const struct itq3_s_factor * factor, struct itq3_s_search search);

// The same with the scalars side by side, for callers that cannot pass structures.
GGML_API size_t quantize_itq3_s_ldlq_flat(const float * src, void * dst, int64_t nrows, int64_t n_per_row,
                                          const float * feedback, const float * weight, int full, int segment,
                                          int lookahead, int effort);

// Rows of n_per_row weights with an importance matrix: the mean squares of their n_per_row inputs, not rotated.
GGML_API size_t quantize_itq3_s_imatrix(const float * GGML_RESTRICT src, void * GGML_RESTRICT dst, int64_t nrows,
                                        int64_t n_per_row, const float * imatrix);

#ifdef __cplusplus
}
#endif

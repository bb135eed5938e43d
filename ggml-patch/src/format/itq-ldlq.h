#pragma once

// Calibrated encoding of the trellis types: LDLQ with a trellis search that carries the feedback of every survivor. The method and
// the arithmetic are those of gguf_itq3s/rounding/ldlq.py, byte for byte.

#include "ggml-itq.h"

#include <stdbool.h>

#ifdef __cplusplus
extern "C" {
#endif

// Longest history of a survivor, segment + lookahead.
#define ITQ_LDLQ_WINDOW 64

// What rounding errors e of a rotated row cost: sum over k of weight[k] * (e[k] + sum over j < k of A[j][k] e[j])^2.
struct itq_factor {
    const float * feedback;  // A, unit upper triangular, row-major: n*n, or length*length for each block if not full
    const float * weight;    // n, positive
    int64_t       columns;   // n, a multiple of the type's length
    bool          full;      // whether errors are fed across blocks
};

struct itq_search {
    int segment;    // columns committed at a time, at least 1
    int lookahead;  // columns searched past a segment before it is committed; segment + lookahead <= 64
    int effort;     // enum itq_effort
};

// Measured defaults (docs/calibration.md).
#define ITQ_LDLQ_SEGMENT              39
#define ITQ_LDLQ_LOOKAHEAD            25
#define ITQ_LDLQ_DAMPING              0.003
#define ITQ_LDLQ_EFFORT(bits, length) ((length) < 256 || (bits) == 3 ? ITQ_EFFORT_DEFAULT : ITQ_EFFORT_FAST)

// What every type has:
//
//   quantize_name_ldlq       rows of factor->columns weights; returns the bytes written. A block that cannot be encoded (a
//                            weight that is not finite, errors that grew beyond float32) gets d = NaN, which
//                            ggml_validate_row_data refuses. Best called with 64 rows or more.
//   quantize_name_ldlq_flat  the same with the scalars side by side, for callers that cannot pass structures
//   quantize_name_imatrix    rows of n_per_row weights with an importance matrix: the mean squares of their n_per_row
//                            inputs, not rotated
//
// quantize_name_ldlq_flat_variant is that for one kind of processor, of which the others take the best there is.
#define ITQ_DECLARE_FLAT(function)                                                                                    \
    GGML_API size_t function(const float * src, void * dst, int64_t nrows, int64_t n_per_row, const float * feedback, \
                             const float * weight, int full, int segment, int lookahead, int effort);
#define ITQ_DECLARE_LDLQ(NAME, name, ...)                                                                            \
    GGML_API size_t quantize_##name##_ldlq(const float * GGML_RESTRICT src, void * GGML_RESTRICT dst, int64_t nrows, \
                                           const struct itq_factor * factor, struct itq_search search);              \
    ITQ_DECLARE_FLAT(quantize_##name##_ldlq_flat)                                                                    \
    ITQ_DECLARE_FLAT(quantize_##name##_ldlq_flat_generic)                                                            \
    ITQ_DECLARE_FLAT(quantize_##name##_ldlq_flat_avx2)                                                               \
    ITQ_DECLARE_FLAT(quantize_##name##_ldlq_flat_avx512)                                                             \
    GGML_API size_t quantize_##name##_imatrix(const float * GGML_RESTRICT src, void * GGML_RESTRICT dst,             \
                                              int64_t nrows, int64_t n_per_row, const float * imatrix);
ITQ_TYPES(ITQ_DECLARE_LDLQ)

// The best variant here, of which all before it run too: 0 for generic, 1 for avx2, 2 for avx512.
GGML_API int quantize_ldlq_variant(void);

#ifdef __cplusplus
}
#endif

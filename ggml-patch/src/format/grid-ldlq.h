#pragma once

// Rounding to the grid of a type of ggml with error feedback along the row. The method and the arithmetic are those of
// gguf_itq3s/rounding/grid.py, byte for byte.

#include "ggml.h"

#ifdef __cplusplus
extern "C" {
#endif

// Columns that are rounded together.
#define GRID_LDLQ_BLOCK 256

// What the errors of the columns before start take from a block of targets: for j < start, in ascending order,
// target[r][k] -= feedback[j][start + k] * errors[r][j].
//
//   target    nrows * 256
//   errors    nrows * n
//   feedback  n * n, unit upper triangular, row-major
GGML_API void grid_ldlq_feed(float * GGML_RESTRICT target, const float * GGML_RESTRICT errors, int64_t nrows, int64_t n,
                             const float * GGML_RESTRICT feedback, int64_t start);

// The same for one kind of processor; grid_ldlq_feed takes the best there is.
#define GRID_DECLARE_FEED(variant)                                                                           \
    GGML_API void grid_ldlq_feed_##variant(float * GGML_RESTRICT target, const float * GGML_RESTRICT errors, \
                                           int64_t nrows, int64_t n, const float * GGML_RESTRICT feedback,   \
                                           int64_t start);
GRID_DECLARE_FEED(generic)
GRID_DECLARE_FEED(avx2)
GRID_DECLARE_FEED(avx512)

// Round a block of every row, column after column, and feed each error to the columns right of it.
//
//   codes     nrows * 256, what is found
//   errors    nrows * 256, what is found: the value of the code less the weight
//   residual  nrows * 256, what is found: the value of the code less the target through the feedback
//   weights   nrows * 256
//   target    nrows * 256, the weights less what the errors of the blocks before take
//   feedback  256 rows of `stride` floats: that of the block
//   scale     nrows * (256 / group)
//   minimum   the same
//   low, high least and greatest code
//   table     level of each code from 0 to high, ascending; NULL where a code is its own level
GGML_API void grid_ldlq_round(int8_t * GGML_RESTRICT codes, float * GGML_RESTRICT errors,
                              float * GGML_RESTRICT residual, const float * GGML_RESTRICT weights,
                              const float * GGML_RESTRICT target, int64_t nrows, const float * GGML_RESTRICT feedback,
                              int64_t stride, const float * GGML_RESTRICT scale, const float * GGML_RESTRICT minimum,
                              int group, int low, int high, const float * GGML_RESTRICT table);

#ifdef __cplusplus
}
#endif

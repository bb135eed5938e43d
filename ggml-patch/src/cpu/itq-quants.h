#pragma once

#include "ggml-itq.h"

// CPU kernels of the trellis types. The dot product needs no rotated weight: with H orthogonal and symmetric,
// dot(H v, x) = dot(v, H x), so the activation row is rotated once and quantized to 8 bits: to Q8_K_H, in block_q8_K, for
// blocks of 256, to Q8_N_H for blocks of 64.

#ifdef __cplusplus
extern "C" {
#endif

// Below this largest magnitude a rotated block of activations counts as zero: the inverse of its scale would overflow.
#define ITQ3_S_ACT_MIN 1e-36f

// Rotate every block of 256 by the normalised FWHT, then quantize as quantize_row_q8_K does. A NaN or an infinity in a
// block, or what overflows to one, makes its scale NaN.
void quantize_row_q8_K_h(const float * GGML_RESTRICT x, void * GGML_RESTRICT y, int64_t k);

void quantize_row_q8_K_h_generic(const float * GGML_RESTRICT x, void * GGML_RESTRICT y, int64_t k);

// The same in blocks of 64, block_q8_n_h.
void quantize_row_q8_n_h(const float * GGML_RESTRICT x, void * GGML_RESTRICT y, int64_t k);

void quantize_row_q8_n_h_generic(const float * GGML_RESTRICT x, void * GGML_RESTRICT y, int64_t k);

// The dot product of a type by the length of its blocks, and its activations.
#define ITQ_VEC_DOT_OF_256(name)  ggml_vec_dot_##name##_q8_K_h
#define ITQ_VEC_DOT_OF_64(name)   ggml_vec_dot_##name##_q8_n_h
#define ITQ_VEC_DOT(name, length) ITQ_VEC_DOT_OF_##length(name)
#define ITQ_VEC_DOT_TYPE(length)  ((length) == QK_K ? GGML_TYPE_Q8_K_H : GGML_TYPE_Q8_N_H)

// What every type has, for code that takes any type of ggml; portable alone, for products with its rows and panels are
// those of itq-mul-mat.cpp:
//
//   quantize_row_name          quantize_row_name_ref
//   ggml_vec_dot_name_q8_K_h   dot product of a row of its blocks and a row of Q8_K_H, n weights each; the arguments are
//                              ggml_vec_dot_t's
//   ggml_vec_dot_name_q8_n_h   the same of a type whose blocks have 64, with a row of Q8_N_H
#define ITQ_DECLARE(NAME, name, bits, n_levels, length, ...)                                                 \
    void quantize_row_##name(const float * GGML_RESTRICT x, void * GGML_RESTRICT y, int64_t k);              \
    void ITQ_VEC_DOT(name, length)(int n, float * GGML_RESTRICT s, size_t bs, const void * GGML_RESTRICT vx, \
                                   size_t bx, const void * GGML_RESTRICT vy, size_t by, int nrc);
ITQ_TYPES(ITQ_DECLARE)

#ifdef __cplusplus
}
#endif

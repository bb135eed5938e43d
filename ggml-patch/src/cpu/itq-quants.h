#pragma once

#include "ggml-itq.h"

// CPU kernels of the trellis types. The dot product needs no rotated weight: with H orthogonal and symmetric,
// dot(H v, x) = dot(v, H x), so the activation row is rotated once and quantized to 8 bits (Q8_K_H, in block_q8_K).

#ifdef __cplusplus
extern "C" {
#endif

// Below this largest magnitude a rotated block of activations counts as zero: the inverse of its scale would overflow.
#define ITQ3_S_ACT_MIN 1e-36f

// Rotate every block of 256 by the normalised FWHT, then quantize as quantize_row_q8_K does. A NaN or an infinity in a
// block, or what overflows to one, makes its scale NaN.
void quantize_row_q8_K_h(const float * GGML_RESTRICT x, void * GGML_RESTRICT y, int64_t k);

void quantize_row_q8_K_h_generic(const float * GGML_RESTRICT x, void * GGML_RESTRICT y, int64_t k);

// What every type has, beside a generic implementation of each product:
//
//   quantize_row_name          quantize_row_name_ref
//   ggml_vec_dot_name_q8_K_h   dot product of a row of its blocks and a row of Q8_K_H, n weights each; the arguments are
//                              ggml_vec_dot_t's
#define ITQ_DECLARE_PRODUCTS(NAME, name, ...)                                                                          \
    void quantize_row_##name(const float * GGML_RESTRICT x, void * GGML_RESTRICT y, int64_t k);                        \
    void ggml_vec_dot_##name##_q8_K_h(int n, float * GGML_RESTRICT s, size_t bs, const void * GGML_RESTRICT vx,        \
                                      size_t bx, const void * GGML_RESTRICT vy, size_t by, int nrc);                   \
    void ggml_vec_dot_##name##_q8_K_h_generic(int n, float * GGML_RESTRICT s, size_t bs,                               \
                                              const void * GGML_RESTRICT vx, size_t bx, const void * GGML_RESTRICT vy, \
                                              size_t by, int nrc);
ITQ_TYPES(ITQ_DECLARE_PRODUCTS)

#ifdef __cplusplus
}
#endif

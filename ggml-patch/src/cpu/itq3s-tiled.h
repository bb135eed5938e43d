#pragma once

// The tiled matrix product for ITQ3_S (rotated activations, Q8_K_H), TQ1_0 and TQ2_0: what tiled/tiled.cpp calls for a
// type, specialised to one scale a block.

#include "tiled/tiled-kernel.h"

#include "ggml-itq3s.h"

#if defined(__AVX2__)
#    define GGML_TILED_ITQ3_S 1  // x86 with AVX2 or better; elsewhere vec_dot is faster
#else
#    define GGML_TILED_ITQ3_S 0
#endif

// Template arguments <SUBBLK, HAS_MIN, BIAS, ACTBIAS> of a type with one scale for 256 weights. The codes are unsigned,
// the level plus 64 or the trit plus one, and the kernel subtracts BIAS. With HAS_MIN, dmin is d times the zero-point.
#define TILED_ITQ3_S block_itq3_s, 256, true, 64, false
#define TILED_TQ1_0  block_tq1_0, 256, false, 1, false
#define TILED_TQ2_0  block_tq2_0, 256, false, 1, false

// Codes and scales of n_rows rows, num_k blocks each, row_stride blocks apart.
void tiled_unpack_src0(const block_itq3_s * rows, int64_t row_stride, int n_rows, tiled_tile_src0 * tile, int num_k);
void tiled_unpack_src0(const block_tq1_0 * rows, int64_t row_stride, int n_rows, tiled_tile_src0 * tile, int num_k);
void tiled_unpack_src0(const block_tq2_0 * rows, int64_t row_stride, int n_rows, tiled_tile_src0 * tile, int num_k);

template <>
void tiled_run_microtile<256, true, 64, false>(const tiled_tile_src0 & src0, const tiled_tile_src1 & src1, int i0,
                                               int j0, int num_k, int slab, float * buf, int buf_stride);
template <>
void tiled_run_microtile<256, false, 1, false>(const tiled_tile_src0 & src0, const tiled_tile_src1 & src1, int i0,
                                               int j0, int num_k, int slab, float * buf, int buf_stride);

// Nothing to prepare: the activations are not biased.
template <> inline void tiled_repack_src0<256>(tiled_tile_src0 *, int, int, int, bool) {}

// Weights of the trellis types, TQ1_0 and TQ2_0 as numbers: the functions that get_rows and the conversion kernels call.
//
// 32 lanes work on one block of 256, or 8 lanes on one of 64, and each writes 8 consecutive weights. For trellis types the
// inverse transform runs in registers and shuffles; rotated weights never reach memory. The results equal those of the CPU
// code to the bit.

#pragma once

#include "common.cuh"
#include "convert.cuh"
#include "itq-fwht.cuh"
#include "itq-vecdot.cuh"

template <typename dst_t>
static __device__ __forceinline__ void itq_store_values(dst_t * y, const float (&v)[ITQ_VALUES]) {
    constexpr int n = 16 / sizeof(dst_t);
    struct alignas(16) dst_vec {
        dst_t v[n];
    };
    if ((uintptr_t) y % sizeof(dst_vec) == 0) {  // one outcome for the whole warp
#pragma unroll
        for (int i = 0; i < ITQ_VALUES / n; ++i) {
            dst_vec out;
#pragma unroll
            for (int r = 0; r < n; ++r) {
                out.v[r] = ggml_cuda_cast<dst_t>(v[n * i + r]);
            }
            ((dst_vec *) y)[i] = out;
        }
    } else {
#pragma unroll
        for (int r = 0; r < ITQ_VALUES; ++r) {
            y[r] = ggml_cuda_cast<dst_t>(v[r]);
        }
    }
}

// The values 8*tid .. 8*tid + 7 of a block, rotated back, to yy. Levels are signed bytes that alternate between the first
// four weights and the second four: level_lo those of 0, 4, 1, 5, level_hi of 2, 6, 3, 7. d: the scale; z: the zero-point.
template <int points, typename dst_t>
static __device__ __forceinline__ void itq_store_rotated_back(dst_t * yy, const uint32_t level_lo,
                                                              const uint32_t level_hi, const float d, const float z,
                                                              const int tid) {
    float v[ITQ_VALUES];
#pragma unroll
    for (int r = 0; r < ITQ_VALUES; ++r) {
        const uint32_t levels = r % 4 < 2 ? level_lo : level_hi;
        v[r]                  = (float) (int8_t) (levels >> 8 * (2 * (r % 2) + r / 4)) - z;
    }
    itq_warp_fwht<points>(v, tid);

    const float scale = d * (1.0f / 32.0f * itq_fwht_norm<points>);  // of the level unit, of the transform
#pragma unroll
    for (int r = 0; r < ITQ_VALUES; ++r) {
        v[r] *= scale;
    }
    itq_store_values(yy + ITQ_VALUES * tid, v);
}

// Block ib of vx to the values at yy, by lane tid of those that share it. All 32 lanes must call these together: those of a
// block of 256, tid = 0..31, or of four of 64, tid = 0..7.

template <typename dst_t>
static __device__ __forceinline__ void dequantize_itq3_s(const void * vx, const int64_t ib, dst_t * yy, const int tid) {
    const uint32_t * x   = (const uint32_t *) vx + ib * ITQ_WORDS;
    const uint8_t *  sel = (const uint8_t *) (x + ITQ_WORD_SEL);

    const uint32_t    last   = x[ITQ_WORD_DZ];
    const uint32_t    before = tid == 0 ? itq_word_before(last >> 16) >> 24 : sel[tid - 1];
    const itq_indices index  = itq_indices_8<2>(x[ITQ_WORD_QS + 2 * (tid % 8) + 0], x[ITQ_WORD_QS + 2 * (tid % 8) + 1],
                                                tid / 8, (uint32_t) sel[tid] << 8 | before);
    const uint32_t    level_lo = itq_levels_minus<GGML_TYPE_ITQ3_S>(index, 0);
    const uint32_t    level_hi = itq_levels_minus<GGML_TYPE_ITQ3_S>(itq_indices::upper_half(index), 0);

    const float2 dz = itq_half2_bits(last & ITQ_WITHOUT_STATE);
    itq_store_rotated_back<256>(yy, level_lo, level_hi, dz.x, dz.y, tid);
}

// Types whose blocks start at multiples of 2 and have no zero-point.
template <ggml_type type, typename dst_t>
static __device__ __forceinline__ void dequantize_itq(const void * vx, const int64_t ib, dst_t * yy, const int tid) {
    using traits                     = itq_traits<type>;
    const typename traits::block * x = (const typename traits::block *) vx + ib;

    const uint32_t before     = tid == 0 ? itq_load_before(*x, 0) >> 24 : x->sel[tid - 1];
    const uint32_t sel_window = (uint32_t) x->sel[tid] << 8 | before;
    itq_indices    index;
    if constexpr (traits::bits > 1) {
        constexpr int lanes = traits::length / 4 / ITQ_VALUES;  // that read the same symbols, a group each
        const int     third = traits::bits == 3 ? x->qs[traits::length / 4 + tid] : 0;
        index = itq_indices_8<traits::bits>(tq_load_word(x->qs, 2 * (tid % lanes) + 0),
                                            tq_load_word(x->qs, 2 * (tid % lanes) + 1), tid / lanes, sel_window, third);
    } else {
        index = itq_indices_8<1>(x->qs[tid], 0, 0, sel_window);
    }
    const uint32_t level_lo = itq_levels_minus<type>(index, 0);
    const uint32_t level_hi = itq_levels_minus<type>(itq_indices::upper_half(index), 0);

    itq_store_rotated_back<traits::length>(yy, level_lo, level_hi, itq_scale_beside_state(x->d), 0.0f, tid);
}

#define ITQ_DEQUANTIZE(NAME, name, ...)                                                                     \
    template <typename dst_t>                                                                               \
    static __device__ __forceinline__ void dequantize_##name(const void * vx, const int64_t ib, dst_t * yy, \
                                                             const int tid) {                               \
        dequantize_itq<GGML_TYPE_##NAME>(vx, ib, yy, tid);                                                  \
    }
ITQ_DEQUANTIZE(ITQ2_S, itq2_s)
ITQ_DEQUANTIZE(ITQ4_S, itq4_s)
ITQ_TYPES_64(ITQ_DEQUANTIZE)
#undef ITQ_DEQUANTIZE

// Digits 0, 1, 2 of 8 weights to values.
template <typename dst_t>
static __device__ __forceinline__ void tq_store_digits(dst_t * y, const uint32_t digits_lo, const uint32_t digits_hi,
                                                       const float d) {
    float v[ITQ_VALUES];
#pragma unroll
    for (int r = 0; r < ITQ_VALUES; ++r) {
        const uint32_t digits = r < 4 ? digits_lo : digits_hi;
        v[r]                  = (float) ((int) (digits >> 8 * (r % 4) & 3) - 1) * d;
    }
    itq_store_values(y, v);
}

template <typename dst_t>
static __device__ __forceinline__ void dequantize_tq2_0(const void * vx, const int64_t ib, dst_t * yy, const int tid) {
    const block_tq2_0 * x = (const block_tq2_0 *) vx + ib;
    const int           m = 8 * (tid / 16) + 2 * (tid % 4);
    const int           g = tid / 4 % 4;
    tq_store_digits(yy + ITQ_VALUES * tid, tq2_0_digits(tq_load_word(x->qs, m + 0), g),
                    tq2_0_digits(tq_load_word(x->qs, m + 1), g), __half2float(x->d));
}

template <typename dst_t>
static __device__ __forceinline__ void dequantize_tq1_0(const void * vx, const int64_t ib, dst_t * yy, const int tid) {
    const block_tq1_0 * x = (const block_tq1_0 *) vx + ib;
    // First word, digit of it, and the same of the second four weights.
    uint32_t            w0, w1;
    int                 n0, n1;
    if (tid < 20) {  // weights below 160
        w0 = tq_load_word(x->qs, 2 * (tid % 4) + 0);
        w1 = tq_load_word(x->qs, 2 * (tid % 4) + 1);
        n0 = n1 = tid / 4;
    } else if (tid < 30) {  // weights below 240
        w0 = tq_load_word(x->qs, 8 + 2 * (tid % 2) + 0);
        w1 = tq_load_word(x->qs, 8 + 2 * (tid % 2) + 1);
        n0 = n1 = (tid - 20) / 2;
    } else {
        w0 = w1 = tq_load_word(x->qh, 0);
        n0      = 2 * (tid - 30);
        n1      = n0 + 1;
    }
    tq1_0_state s0      = tq1_0_begin(w0);
    tq1_0_state s1      = tq1_0_begin(w1);
    uint32_t    digits0 = 0;
    uint32_t    digits1 = 0;
#pragma unroll
    for (int n = 0; n < 5; ++n) {
        const uint32_t next0 = tq1_0_next(s0);
        const uint32_t next1 = tq1_0_next(s1);
        digits0              = n == n0 ? next0 : digits0;
        digits1              = n == n1 ? next1 : digits1;
    }
    tq_store_digits(yy + ITQ_VALUES * tid, digits0, digits1, __half2float(x->d));
}

#define ITQ_DEQUANTIZE_WARPS 8  // in a CUDA block, each with 256 weights at a time

// The block of this lane, of those that its warp takes from the one with this number on. Past the end of a row lanes repeat
// the last block, as all are needed, and write the same to the same place.
template <int length>
static __device__ __forceinline__ int64_t itq_lane_block(const int64_t first, const int64_t nblocks) {
    return length == ITQ_BLOCK ? first : min(first + (int) threadIdx.x / (length / ITQ_VALUES), nblocks - 1);
}

// A tensor of rows that need not be contiguous (strides in blocks) to a contiguous one.
// Grid: (256 weights of a row / warps, rows, channels and samples), the latter two looped over; block: (32, warps).
template <int length, typename dst_t, dequantize_kq_t<dst_t> dequantize>
static __device__ __forceinline__ void
itq_dequantize_rows(const void * __restrict__ vx, dst_t * __restrict__ y, const int64_t nblocks, const int64_t ne01,
                    const int64_t ne0203, const uint3 ne02, const int64_t s01, const int64_t s02, const int64_t s03) {
    const int64_t first = ((int64_t) blockIdx.x * ITQ_DEQUANTIZE_WARPS + threadIdx.y) * (ITQ_BLOCK / length);
    if (first >= nblocks) {
        return;
    }
    const int64_t ib = itq_lane_block<length>(first, nblocks);
    for (int64_t i01 = blockIdx.y; i01 < ne01; i01 += gridDim.y) {
        for (int64_t i0203 = blockIdx.z; i0203 < ne0203; i0203 += gridDim.z) {
            const uint2 dm = fast_div_modulo((uint32_t) i0203, ne02);
            dequantize(vx, dm.x * s03 + dm.y * s02 + i01 * s01 + ib, y + ((i0203 * ne01 + i01) * nblocks + ib) * length,
                       length == ITQ_BLOCK ? threadIdx.x : threadIdx.x % (length / ITQ_VALUES));
        }
    }
}

template <typename dst_t, dequantize_kq_t<dst_t> dequantize>
__launch_bounds__(ITQ_DEQUANTIZE_WARPS * ITQ_WARP_LANES, 1) static __global__ void
dequantize_rows_256(const void * __restrict__ vx, dst_t * __restrict__ y, const int64_t nblocks, const int64_t ne01,
                    const int64_t ne0203, const uint3 ne02, const int64_t s01, const int64_t s02, const int64_t s03) {
    itq_dequantize_rows<256, dst_t, dequantize>(vx, y, nblocks, ne01, ne0203, ne02, s01, s02, s03);
}

template <typename dst_t, dequantize_kq_t<dst_t> dequantize>
__launch_bounds__(ITQ_DEQUANTIZE_WARPS * ITQ_WARP_LANES, 1) static __global__ void
dequantize_rows_64(const void * __restrict__ vx, dst_t * __restrict__ y, const int64_t nblocks, const int64_t ne01,
                   const int64_t ne0203, const uint3 ne02, const int64_t s01, const int64_t s02, const int64_t s03) {
    itq_dequantize_rows<64, dst_t, dequantize>(vx, y, nblocks, ne01, ne0203, ne02, s01, s02, s03);
}

// Rows of blocks of 64 by their numbers, as upstream's k_get_rows_kq, which wants rows of a multiple of 256.
// Grid: (ne10, 256 weights of a row / warps, ne11*ne12), the latter two looped over; block: (32, warps).
template <typename dst_t, dequantize_kq_t<dst_t> dequantize>
__launch_bounds__(ITQ_DEQUANTIZE_WARPS * ITQ_WARP_LANES, 1) static __global__ void
get_rows_64(const void * __restrict__ src0, const int32_t * __restrict__ src1, dst_t * __restrict__ dst,
            const int64_t nblocks, const int64_t ne11, const uint3 ne12, const size_t s1, const size_t s2,
            const size_t s3, const size_t nb01, const size_t nb02, const size_t nb03, const size_t s10,
            const size_t s11, const size_t s12) {
    constexpr int     length = 64;
    constexpr int64_t step   = ITQ_DEQUANTIZE_WARPS * (ITQ_BLOCK / length);
    ggml_cuda_pdl_sync();
    for (int64_t z = blockIdx.z; z < ne11 * (int64_t) ne12.z; z += gridDim.z) {
        const int64_t i10 = blockIdx.x;
        const uint2   dm  = fast_div_modulo((uint32_t) z, ne12);
        const int64_t i01 = src1[i10 * s10 + dm.x * s11 + dm.y * s12];

        const void * row     = (const char *) src0 + i01 * nb01 + dm.x * nb02 + dm.y * nb03;
        dst_t *      dst_row = dst + i10 * s1 + dm.x * s2 + dm.y * s3;
        for (int64_t first = blockIdx.y * step + threadIdx.y * (ITQ_BLOCK / length); first < nblocks;
             first += gridDim.y * step) {
            const int64_t ib = itq_lane_block<length>(first, nblocks);
            dequantize(row, ib, dst_row + ib * length, threadIdx.x % (length / ITQ_VALUES));
        }
    }
}

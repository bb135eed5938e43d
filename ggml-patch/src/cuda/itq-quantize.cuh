// Activations in 8 bits for the products with the trellis types, TQ1_0 and TQ2_0.
//
// On tensor cores with few columns: the order of fragments (itq-fragment.cuh), a scale and sum for a block of weights.
// Upstream's MMVQ, before Ampere: block_q8_1x4. The bytes are in natural order for the ternary types; for the others the
// values are rotated and in decoded order (itq-decode.cuh), group j of a block of 256 being half j. MMQ: upstream's
// block_q8_1_mmq in the D4 layout, with one scale for all 128 values; for them rotated and in decoded order as above.
// Weights in blocks of 64, four of which a warp takes at a time: block_q8_n_h in MMVQ; one scale for 64 values in MMQ.

#pragma once

#include "itq-fragment.cuh"
#include "itq-fwht.cuh"
#include "itq-vecdot.cuh"
#include "mmq.cuh"

#include <cstdint>

#define ITQ_QUANTIZE_WARPS 4  // in a CUDA block, each with 256 values

// Values that are rotated together for weights of a type; 0: none are.
static constexpr __host__ __device__ int itq_points(const ggml_type type) {
    return ggml_cuda_is_itq_64(type) ? 64 : ggml_cuda_is_itq(type) ? 256 : 0;
}

// Values 8*lane + 0..7 of the block that starts at x.
static __device__ __forceinline__ void itq_load_values(const float * x, const int lane, float (&v)[ITQ_VALUES]) {
    x += ITQ_VALUES * lane;
    // Rows of a view may start anywhere, so 16 byte loads need a check; it has one outcome for the whole warp.
    if ((uintptr_t) x % sizeof(float4) == 0) {
        const float4 lo = ((const float4 *) x)[0];
        const float4 hi = ((const float4 *) x)[1];
        v[0]            = lo.x;
        v[1]            = lo.y;
        v[2]            = lo.z;
        v[3]            = lo.w;
        v[4]            = hi.x;
        v[5]            = hi.y;
        v[6]            = hi.z;
        v[7]            = hi.w;
    } else {
#pragma unroll
        for (int r = 0; r < ITQ_VALUES; ++r) {
            v[r] = x[r];
        }
    }
}

// Normalised transform of the values of a block: the activation that meets rotated weights.
template <int points = 256> static __device__ __forceinline__ void itq_rotate(float (&v)[ITQ_VALUES], const int lane) {
    itq_warp_fwht<points>(v, lane);
#pragma unroll
    for (int r = 0; r < ITQ_VALUES; ++r) {
        v[r] *= itq_fwht_norm<points>;
    }
}

// Lanes that share a scale, as the bits in which their numbers differ: the four of a chunk of 32 values, the eight of a block
// of 64, all; those of a part of 256 values with a scale of its own in the tiles of MMQ: half a block as its 128 bytes lie
// there, the chunks of one parity in decoded order, or one after the other; a block of 64.
static constexpr int                       itq_lanes_of_chunk = 3;
static constexpr int                       itq_lanes_of_64    = 7;
static constexpr int                       itq_lanes_of_block = 31;
template <int points> static constexpr int itq_lanes_of_part = points == 256 ? 27 : points == 64 ? itq_lanes_of_64 : 15;

// Symmetric 8 bit quantization of the values of these lanes; returns their scale, NaN where a value is. Magnitudes are
// compared as integers: in that order a NaN comes after infinity, where fmaxf passes over it.
template <int lanes>
static __device__ __forceinline__ float itq_quantize_lanes(const float (&v)[ITQ_VALUES], int8_t (&q)[ITQ_VALUES]) {
    int bits = 0;
#pragma unroll
    for (int r = 0; r < ITQ_VALUES; ++r) {
        bits = max(bits, __float_as_int(v[r]) & 0x7FFFFFFF);
    }
#pragma unroll
    for (int mask = 1; mask < ITQ_WARP_LANES; mask *= 2) {
        if (lanes & mask) {
            bits = max(bits, __shfl_xor_sync(0xFFFFFFFF, bits, mask, ITQ_WARP_LANES));
        }
    }
    const float d      = __int_as_float(bits) / 127.0f;
    const bool  usable = bits < 0x7F800000 && d > 0.0f;
#pragma unroll
    for (int r = 0; r < ITQ_VALUES; ++r) {
        q[r] = usable ? (int8_t) roundf(v[r] / d) : 0;
    }
    return d;
}

// Sum of the quantized values of these lanes.
template <int lanes> static __device__ __forceinline__ int itq_sum_lanes(const int8_t (&q)[ITQ_VALUES]) {
    int sum = 0;
#pragma unroll
    for (int r = 0; r < ITQ_VALUES; ++r) {
        sum += q[r];
    }
#pragma unroll
    for (int mask = 1; mask < ITQ_WARP_LANES; mask *= 2) {
        if (lanes & mask) {
            sum += __shfl_xor_sync(0xFFFFFFFF, sum, mask, ITQ_WARP_LANES);
        }
    }
    return sum;
}

// Values 256*ib .. 256*ib + 255 of the row at x, rotated by so many points. Values from ne00 on are zero.
template <int points>
static __device__ __forceinline__ void itq_load_block(const float * x, const int64_t ib, const int64_t ne00,
                                                      const int lane, float (&v)[ITQ_VALUES]) {
#pragma unroll
    for (int r = 0; r < ITQ_VALUES; ++r) {
        v[r] = 0.0f;
    }
    // Rows of blocks of 64 may end within the 256 values.
    if (ib * ITQ_BLOCK + (points == 64 ? ITQ_VALUES * lane : 0) < ne00) {
        itq_load_values(x + ib * ITQ_BLOCK, lane, v);
    }
    if constexpr (points != 0) {
        itq_rotate<points>(v, lane);
    }
}

// A lane's bytes to their places: in the chunk at slot `slot` in decoded order, or in the 128 bytes of its group in natural
// order.
static __device__ __forceinline__ void itq_store_decoded(int8_t * qs, const int slot, const int lane,
                                                         const int8_t (&q)[ITQ_VALUES]) {
    // Values 0..3 and 4..7 are the weights 4n + i, i = 0..3, of two consecutive n, hence neighbours in decoded order.
    const int n = 2 * (lane % 4);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        *((char2 *) (qs + 32 * slot + 8 * i + n)) = make_char2(q[i], q[i + 4]);
    }
}
static __device__ __forceinline__ void itq_store_natural(int8_t * qs, const int lane, const int8_t (&q)[ITQ_VALUES]) {
    char4 * dst = (char4 *) (qs + ITQ_VALUES * (lane % 16));
    dst[0]      = make_char4(q[0], q[1], q[2], q[3]);
    dst[1]      = make_char4(q[4], q[5], q[6], q[7]);
}

// For MMVQ. Grid: (blocks of a padded row / warps, ne1, ne2*ne3); block: (32, warps), one warp per 256 values.
// Values from ne00 on, up to the padded row length ne0, are zero.
template <bool rotate>
__launch_bounds__(ITQ_QUANTIZE_WARPS * ITQ_WARP_LANES, 1) static __global__ void
quantize_q8_1x4(const float * x_ptr, void * vy_ptr, const int64_t ne00, const int64_t s01, const int64_t s02,
                const int64_t s03, const int64_t ne0, const uint32_t ne1, const uint3 ne2) {
    ggml_cuda_pdl_lc();
    const float * GGML_CUDA_RESTRICT x  = x_ptr;
    void * GGML_CUDA_RESTRICT        vy = vy_ptr;

    const int     lane = threadIdx.x;
    const int64_t ib   = (int64_t) blockIdx.x * ITQ_QUANTIZE_WARPS + threadIdx.y;
    if (ib * ITQ_BLOCK >= ne0) {
        return;
    }

    const int64_t i1 = blockIdx.y;
    const int64_t i3 = fastdiv(blockIdx.z, ne2);
    const int64_t i2 = blockIdx.z - i3 * ne2.z;

    ggml_cuda_pdl_sync();
    float  v[ITQ_VALUES];
    int8_t q[ITQ_VALUES];
    itq_load_block<rotate ? 256 : 0>(x + i3 * s03 + i2 * s02 + i1 * s01, ib, ne00, lane, v);
    const float d   = itq_quantize_lanes<itq_lanes_of_chunk>(v, q);
    const int   sum = itq_sum_lanes<itq_lanes_of_chunk>(q);

    const int      chunk = lane / 4;
    const int      group = rotate ? chunk % 2 : chunk / 4;
    const int      slot  = rotate ? chunk / 2 : chunk % 4;
    block_q8_1x4 * y     = (block_q8_1x4 *) vy + ((((i3 * ne2.z + i2) * ne1 + i1) * ne0) / ITQ_BLOCK + ib) * 2 + group;
    if constexpr (rotate) {
        itq_store_decoded(y->qs, slot, lane, q);
    } else {
        itq_store_natural(y->qs, lane, q);
    }
    if (lane % 4 == 0) {
        y->ds[slot] = { __float2half(d), (int16_t) sum };
    }
}

// The same for weights in blocks of 64.
__launch_bounds__(ITQ_QUANTIZE_WARPS * ITQ_WARP_LANES, 1) static __global__ void
quantize_q8_n_h(const float * x_ptr, void * vy_ptr, const int64_t ne00, const int64_t s01, const int64_t s02,
                const int64_t s03, const int64_t ne0, const uint32_t ne1, const uint3 ne2) {
    ggml_cuda_pdl_lc();
    const float * GGML_CUDA_RESTRICT x  = x_ptr;
    void * GGML_CUDA_RESTRICT        vy = vy_ptr;

    const int     lane = threadIdx.x;
    const int64_t ib   = (int64_t) blockIdx.x * ITQ_QUANTIZE_WARPS + threadIdx.y;
    if (ib * ITQ_BLOCK >= ne0) {
        return;
    }

    const int64_t i1 = blockIdx.y;
    const int64_t i3 = fastdiv(blockIdx.z, ne2);
    const int64_t i2 = blockIdx.z - i3 * ne2.z;

    ggml_cuda_pdl_sync();
    float  v[ITQ_VALUES];
    int8_t q[ITQ_VALUES];
    itq_load_block<64>(x + i3 * s03 + i2 * s02 + i1 * s01, ib, ne00, lane, v);
    const float d   = itq_quantize_lanes<itq_lanes_of_64>(v, q);
    const int   sum = itq_sum_lanes<itq_lanes_of_64>(q);

    const int64_t  row = (i3 * ne2.z + i2) * ne1 + i1;
    block_q8_n_h * y   = (block_q8_n_h *) vy + (row * ne0 + ib * ITQ_BLOCK) / 64 + lane / 8;
    itq_store_decoded(y->qs, lane / 4 % 2, lane, q);
    if (lane % 8 == 0) {
        y->d   = d;
        y->sum = sum;
    }
}

// A lane's bytes to their places among the 256 of the block.
template <ggml_type type>
static __device__ __forceinline__ void itq_store_fragments(int8_t * qs, const int lane, const int8_t (&q)[ITQ_VALUES]) {
    const int t = ITQ_VALUES * lane;
    if constexpr (ggml_cuda_is_itq(type)) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {  // weights t + i and t + i + 4 are neighbours
            *((char2 *) (qs + itq_fragment_position<type>(t + i))) = make_char2(q[i], q[i + 4]);
        }
    } else {
#pragma unroll
        for (int r = 0; r < ITQ_VALUES; r += 4) {
            *((char4 *) (qs + itq_fragment_position<type>(t + r))) = make_char4(q[r + 0], q[r + 1], q[r + 2], q[r + 3]);
        }
    }
}

// Grid: (blocks of a row / warps, ne1, ne2*ne3); block: (32, warps), one warp per 256 values. The columns of a channel
// lie together, in the bytes that upstream's q8_1 would take.
template <ggml_type type>
__launch_bounds__(ITQ_QUANTIZE_WARPS * ITQ_WARP_LANES, 1) static __global__ void
quantize_fragments(const float * x, void * vy, const int nblocks, const int64_t s01, const int64_t s02,
                   const int64_t s03, const int64_t stride_channel_y, const uint3 ne2) {
    ggml_cuda_pdl_lc();
    constexpr bool is_64 = ggml_cuda_is_itq_64(type);
    const int      lane  = threadIdx.x;
    const int      ib    = blockIdx.x * ITQ_QUANTIZE_WARPS + threadIdx.y;
    if (ib * itq_fragment_blocks<type> >= nblocks) {
        return;
    }
    const int i1 = blockIdx.y;
    const int i3 = fastdiv(blockIdx.z, ne2);
    const int i2 = blockIdx.z - i3 * ne2.z;

    ggml_cuda_pdl_sync();
    float         v[ITQ_VALUES];
    int8_t        q[ITQ_VALUES];
    constexpr int block = ITQ_BLOCK / itq_fragment_blocks<type>;
    constexpr int lanes = is_64 ? itq_lanes_of_64 : itq_lanes_of_block;
    itq_load_block<itq_points(type)>(x + i3 * s03 + i2 * s02 + i1 * s01, ib, (int64_t) nblocks * block, lane, v);
    const float d   = itq_quantize_lanes<lanes>(v, q);
    const int   sum = itq_sum_lanes<lanes>(q);

    // The scales of the block's columns, then the bytes.
    const int             ncols  = gridDim.y;
    int8_t *              y      = (int8_t *) vy + blockIdx.z * stride_channel_y + ib * itq_fragment_bytes(ncols);
    itq_fragment_scales * scales = (itq_fragment_scales *) y + i1;
    itq_store_fragments<type>(y + ncols * sizeof(itq_fragment_scales) + i1 * ITQ_BLOCK, lane, q);
    const float scale = __int_as_float(__float_as_int(ggml_cuda_is_itq(type) ? d * (1.0f / 32.0f) : d) & ~3);
    const int   start = ITQ_FLOAT_ORIGIN_BITS - itq_fragment_offset<type> * sum;
    if constexpr (is_64) {
        if (lane % 8 == 0) {
            itq_fragment_scales_64 & two = ((itq_fragment_scales_64 *) scales)[lane / 16];
            two.scale[lane / 8 % 2]      = scale;
            two.start[lane / 8 % 2]      = start;
        }
    } else if (lane == 0) {
        const float origin  = -ITQ_FLOAT_ORIGIN * scale;
        scales->scale       = scale;
        scales->origin      = origin;
        scales->start       = start;
        scales->start_again = start;
        if (i1 > 0) {
            scales[-1].next_scale       = scale;
            scales[-1].next_origin      = origin;
            scales[-1].next_start       = start;
            scales[-1].next_start_again = start;
        }
    }
}

// For MMQ: a scale for 128 values, or 64. Grid: (ne1 or tokens, blocks of a padded row / warps, ne2*ne3); block: (32, warps). Values from ne00 on, up to
// the padded row length ne0, are zero.
// ids maps the rows of the output to those of x (not scatter), or a token's slots to the rows of the output (scatter).
template <int points, bool scatter>
__launch_bounds__(ITQ_QUANTIZE_WARPS * ITQ_WARP_LANES, 1) static __global__ void
quantize_mmq_q8_1_128(const float * __restrict__ x, const int32_t * __restrict__ ids, void * __restrict__ vy,
                      const int64_t ne00, const int64_t s01, const int64_t s02, const int64_t s03, const int64_t ne0,
                      const int ne1, const int ne2, const int n_expert_used) {
    const int     lane = threadIdx.x;
    const int64_t ib   = (int64_t) blockIdx.y * ITQ_QUANTIZE_WARPS + threadIdx.y;
    if (ib * ITQ_BLOCK >= ne0) {
        return;
    }
    ggml_cuda_pdl_sync();

    int64_t row;  // first element of the row of x
    if constexpr (scatter) {
        row = (int64_t) blockIdx.x * s02;  // one physical row per token
    } else {
        const int64_t i01 = ids ? ids[blockIdx.x] : blockIdx.x;
        row               = i01 * s01 + (blockIdx.z % ne2) * s02 + (blockIdx.z / ne2) * s03;
    }

    float  v[ITQ_VALUES];
    int8_t q[ITQ_VALUES];
    itq_load_block<points>(x + row, ib, ne00, lane, v);
    const float d = itq_quantize_lanes<itq_lanes_of_part<points>>(v, q);

    const int half_block = points == 256 ? lane / 4 % 2 : lane / 16;
    const int slot_128   = points == 256 ? lane / 8 : lane % 16 / 4;  // of the chunk
    const int nwrite     = scatter ? n_expert_used : 1;
    for (int slot = 0; slot < nwrite; ++slot) {
        int64_t i1;
        if constexpr (scatter) {
            i1 = ids[(int64_t) blockIdx.x * n_expert_used + slot];
        } else {
            i1 = blockIdx.x;
        }
        // The 128 value blocks of all rows lie side by side: half j of block ib is row 2*ib + j of a matrix of ne1
        // blocks.
        block_q8_1_mmq * y = (block_q8_1_mmq *) vy + (blockIdx.z * (ne0 / QK8_1_MMQ) + 2 * ib + half_block) * ne1 + i1;
        if constexpr (points != 0) {
            itq_store_decoded(y->qs, slot_128, lane, q);
        } else {
            itq_store_natural(y->qs, lane, q);
        }
        if (lane % 4 == 0) {
            y->d4[slot_128] = d;
        }
    }
    GGML_UNUSED_VARS(n_expert_used, s01, s03);
}

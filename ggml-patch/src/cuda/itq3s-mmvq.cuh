// Matrix times one vector for ITQ3_S, TQ1_0 and TQ2_0: the kernel of generation.
//
// On a fast card the integer work to decode the weights and the accesses to the first level of memory should matter
// more than the products themselves; the kernel is laid out for that, see docs/cuda.md. Two lanes share a block and
// decode half of it each, which spreads the work that belongs to a half over 128 weights. The weights come in as they
// are, coalesced, into shared memory, where lanes read blocks an odd number of words apart. Every warp has its own rows
// and its own ring of tiles, so warps never wait for each other; the activations are in shared memory once for all.

#pragma once

#include "itq3s-vecdot.cuh"
#include "unary.cuh"

#include <cstdint>

#define ITQ3_S_MMVQ_WARPS       8
#define ITQ3_S_MMVQ_STAGES      3   // tiles in a warp's ring: one to work on, the others on their way
#define ITQ3_S_MMVQ_TILE_BLOCKS 16  // two lanes to a block

// 4 bytes from global to shared memory; on their way until itq3_s_copy_wait.
static __device__ __forceinline__ void itq3_s_copy_async(uint32_t * dst, const uint32_t * src) {
#ifdef CP_ASYNC_AVAILABLE
    const uint32_t dst_shared = __cvta_generic_to_shared(dst);
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" : : "r"(dst_shared), "l"(src) : "memory");
#else
    *dst = *src;
#endif  // CP_ASYNC_AVAILABLE
}
// Ends a group of copies.
static __device__ __forceinline__ void itq3_s_copy_commit() {
#ifdef CP_ASYNC_AVAILABLE
    asm volatile("cp.async.commit_group;" : : : "memory");
#endif  // CP_ASYNC_AVAILABLE
}
// Waits until at most pending of this thread's groups are on their way.
template <int pending> static __device__ __forceinline__ void itq3_s_copy_wait() {
#ifdef CP_ASYNC_AVAILABLE
    asm volatile("cp.async.wait_group %0;" : : "n"(pending) : "memory");
#endif  // CP_ASYNC_AVAILABLE
}

// Half j = 0, 1 of a block in shared memory times the activations y of the block. The block of a ternary type starts x
// bytes into its tile, which need not be a multiple of 4.

static __device__ __forceinline__ float itq3_s_dot_half(const uint32_t * x, const int j, const block_q8_1x4 * y) {
    y += j;
    uint32_t q[8];
#pragma unroll
    for (int n = 0; n < 8; ++n) {
        q[n] = x[ITQ3_S_WORD_QS + 8 * j + n];
    }
    uint32_t sym[2][4];
    itq3_s_transpose_symbols(q, sym);

    const float2 dz = itq3_s_half2_bits(x[ITQ3_S_WORD_DZ]);
    int          ds[4];
    itq3_s_load_words(y->ds, ds);
    float sum = 0.0f;
#pragma unroll
    for (int g = 0; g < 4; ++g) {
        const uint32_t * sel  = x + ITQ3_S_WORD_SEL + 2 * g + j;
        const uint32_t   prev = g == 0 && j == 0 ? 0 : sel[-1];
        sum += itq3_s_dot_chunk(sym, g, sel[0], prev, dz.y, (const int4 *) y->qs + 2 * g, ds[g]);
    }
    return dz.x * (1.0f / 32.0f) * sum;
}

// n words of a tile from byte offset on, a multiple of 2, by aligned accesses. One word more is read.
template <int n>
static __device__ __forceinline__ void tq_load_words(const uint32_t * tile, const int offset, uint32_t (&q)[n]) {
    const uint32_t * aligned = tile + offset / 4;
    const bool       odd     = offset & 2;
    uint32_t         word    = aligned[0];
#pragma unroll
    for (int l = 0; l < n; ++l) {
        const uint32_t next = aligned[l + 1];
        q[l]                = odd ? word >> 16 | next << 16 : word;
        word                = next;
    }
}

static __device__ __forceinline__ float tq2_0_dot_half(const uint32_t * tile, const int x, const int j,
                                                       const block_q8_1x4 * y) {
    y += j;
    uint32_t q[8];
    tq_load_words(tile, x + 32 * j, q);
    int ds[4];
    itq3_s_load_words(y->ds, ds);
    float sum = 0.0f;
#pragma unroll
    for (int g = 0; g < 4; ++g) {
        int u[8];
        itq3_s_load_words((const int4 *) y->qs + 2 * g, u);
        sum += q8_1x4_d(ds[g]) * (tq2_0_dot(q, g, u) - q8_1x4_s(ds[g]));  // digits are one more than the weights
    }
    return __half2float(((const half *) tile)[(x + sizeof(block_tq2_0::qs)) / sizeof(half)]) * sum;
}

// Half j takes the words 4j .. 4j + 3 and 8 + 2j, 9 + 2j of qs and the digits 2j, 2j + 1 of qh.
static __device__ __forceinline__ float tq1_0_dot_half(const uint32_t * tile, const int x, const int j,
                                                       const block_q8_1x4 * y) {
    uint32_t qa[4], qb[2], qc[1];
    tq_load_words(tile, x + 16 * j, qa);
    tq_load_words(tile, x + 32 + 8 * j, qb);
    tq_load_words(tile, x + 48, qc);

    int         sumi[8] = { 0 };
    tq1_0_state a[4], b[2];
#pragma unroll
    for (int l = 0; l < 4; ++l) {
        a[l] = tq1_0_begin(qa[l]);
    }
#pragma unroll
    for (int n = 0; n < 5; ++n) {  // weights 32*n + 16*j + 0..15
        int u[4];
        itq3_s_load_words((const int4 *) y[n / 4].qs + 2 * (n % 4) + j, u);
        sumi[n] = tq1_0_dot_next(a, u, sumi[n]);
    }
    b[0] = tq1_0_begin(qb[0]);
    b[1] = tq1_0_begin(qb[1]);
#pragma unroll
    for (int n = 0; n < 5; ++n) {  // weights 160 + 16*n + 8*j + 0..7, in chunk 5 + n/2
        const int k = 5 + n / 2;
        int       u[2];
        itq3_s_load_words((const int2 *) y[1].qs + 4 * (k - 4) + 2 * (n % 2) + j, u);
        sumi[k] = tq1_0_dot_next(b, u, sumi[k]);
    }
    {  // weights 240 + 8*j + 0..7
        tq1_0_state s = tq1_0_begin(qc[0]);
        uint32_t    digits[4];
#pragma unroll
        for (int n = 0; n < 4; ++n) {
            digits[n] = tq1_0_next(s);
        }
        int u[2];
        itq3_s_load_words((const int2 *) y[1].qs + 14 + j, u);
        sumi[7] = ggml_cuda_dp4a(j == 0 ? digits[0] : digits[2], u[0], sumi[7]);
        sumi[7] = ggml_cuda_dp4a(j == 0 ? digits[1] : digits[3], u[1], sumi[7]);
    }

    int ds[2][4];
    itq3_s_load_words(y[0].ds, ds[0]);
    itq3_s_load_words(y[1].ds, ds[1]);
    float sum = 0.0f;
#pragma unroll
    for (int k = 0; k < 8; ++k) {
        // Digits are one more than the weights; the sum is of the whole chunk, so one lane of the two takes it off.
        const int ds_k = ds[k / 4][k % 4];
        sum += q8_1x4_d(ds_k) * (j == 0 ? sumi[k] - q8_1x4_s(ds_k) : sumi[k]);
    }
    return __half2float(((const half *) tile)[(x + sizeof(block_tq1_0::qs) + sizeof(block_tq1_0::qh)) / sizeof(half)]) *
           sum;
}

template <ggml_type type>
static __device__ __forceinline__ float itq3_s_mmvq_dot_half(const uint32_t * tile, const int b, const int j,
                                                             const block_q8_1x4 * y) {
    [[maybe_unused]] const int x = b * ggml_cuda_type_traits<type>::bs;
    if constexpr (type == GGML_TYPE_ITQ3_S) {
        return itq3_s_dot_half(tile + b * ITQ3_S_WORDS, j, y);
    } else if constexpr (type == GGML_TYPE_TQ1_0) {
        return tq1_0_dot_half(tile, x, j, y);
    } else {
        return tq2_0_dot_half(tile, x, j, y);
    }
}

// Words of a tile in the ring: its blocks, and the word that tq_load_words may read past them, to a multiple of 16
// bytes.
static constexpr __host__ __device__ int itq3_s_mmvq_tile_words(const int block_bytes) {
    return (ITQ3_S_MMVQ_TILE_BLOCKS * block_bytes / 4 + 1 + 3) / 4 * 4;
}
static constexpr __host__ __device__ size_t itq3_s_mmvq_shared_bytes(const int block_bytes, const int64_t nblocks) {
    return nblocks * 2 * sizeof(block_q8_1x4) +
           (size_t) ITQ3_S_MMVQ_WARPS * ITQ3_S_MMVQ_STAGES * itq3_s_mmvq_tile_words(block_bytes) * sizeof(uint32_t);
}

// A tile on a warp's way through its rows: matrix 0 is x, matrix 1 the gate.
struct itq3_s_mmvq_cursor {
    int row;
    int matrix;
    int tile;
};

// Grid: (CUDA blocks that share the rows, channels, samples); block: (32, ITQ3_S_MMVQ_WARPS). Strides of x in blocks,
// of y in q8_1 blocks, of dst in elements. Rows and matrices start at multiples of 4 bytes.
template <ggml_type type, bool has_fusion>
__launch_bounds__(ITQ3_S_MMVQ_WARPS * 32, 3) static __global__ void
mul_mat_vec_q_itq3_s(const void * vx, const void * vy, const int32_t * ids,
                     const ggml_cuda_mm_fusion_args_device fusion, float * dst, const int nblocks, const int nrows,
                     const uint3 nchannels_y, const int64_t stride_row_x, const uint3 channel_ratio,
                     const int64_t stride_channel_x, const int64_t stride_channel_y, const int64_t stride_channel_dst,
                     const uint3 sample_ratio, const int64_t stride_sample_x, const int64_t stride_sample_y,
                     const int64_t stride_sample_dst) {
    constexpr int bs         = ggml_cuda_type_traits<type>::bs;
    constexpr int tile_words = itq3_s_mmvq_tile_words(bs);
    constexpr int stages     = ITQ3_S_MMVQ_STAGES;

    extern __shared__ uint4 itq3_s_mmvq_shared[];
    block_q8_1x4 *          y_shared = (block_q8_1x4 *) itq3_s_mmvq_shared;
    uint32_t *              ring     = (uint32_t *) (y_shared + 2 * nblocks) + threadIdx.y * (stages * tile_words);

    ggml_cuda_pdl_sync();
    const uint32_t channel_dst = blockIdx.y;
    const uint32_t sample_dst  = blockIdx.z;
    const uint32_t channel_x   = ids ? ids[channel_dst] : fastdiv(channel_dst, channel_ratio);
    const uint32_t channel_y   = ids ? fastmodulo(channel_dst, nchannels_y) : channel_dst;
    const uint32_t sample_x    = fastdiv(sample_dst, sample_ratio);

    const int64_t first_block = sample_x * stride_sample_x + channel_x * stride_channel_x;
    const int     lane        = threadIdx.x;
    const int     ntiles      = (nblocks + ITQ3_S_MMVQ_TILE_BLOCKS - 1) / ITQ3_S_MMVQ_TILE_BLOCKS;
    const int     row_step    = gridDim.x * ITQ3_S_MMVQ_WARPS;
    bool          use_gate    = false;
    if constexpr (has_fusion) {
        use_gate = fusion.gate != nullptr;
    }
    const int last_matrix = use_gate ? 1 : 0;

    const auto advance = [&](itq3_s_mmvq_cursor & c) {
        if (++c.tile == ntiles) {
            c.tile = 0;
            if (++c.matrix > last_matrix) {
                c.matrix = 0;
                c.row += row_step;
            }
        }
    };
    // Copies of a tile into a stage of the ring; a group even past the last row, so that groups count tiles.
    const auto fetch = [&](const itq3_s_mmvq_cursor & c, const int stage) {
        if (c.row < nrows) {
            const int64_t    ib   = first_block + c.row * stride_row_x + c.tile * ITQ3_S_MMVQ_TILE_BLOCKS;
            const int        rest = min(ITQ3_S_MMVQ_TILE_BLOCKS, nblocks - c.tile * ITQ3_S_MMVQ_TILE_BLOCKS);
            const void *     base = has_fusion && c.matrix == 1 ? fusion.gate : vx;
            const uint32_t * src  = (const uint32_t *) ((const char *) base + ib * bs);
            for (int w = lane; w < rest * bs / 4; w += 32) {
                itq3_s_copy_async(ring + stage * tile_words + w, src + w);
            }
        }
        itq3_s_copy_commit();
    };

    itq3_s_mmvq_cursor now  = { (int) (blockIdx.x * ITQ3_S_MMVQ_WARPS + threadIdx.y), 0, 0 };
    itq3_s_mmvq_cursor next = now;
#pragma unroll
    for (int stage = 0; stage < stages - 1; ++stage) {
        fetch(next, stage);
        advance(next);
    }

    // The activations of the channel, while the first tiles are on their way.
    const uint4 * y =
        (const uint4 *) ((const block_q8_1 *) vy + sample_dst * stride_sample_y + channel_y * stride_channel_y);
    constexpr int y_words = 2 * sizeof(block_q8_1x4) / sizeof(uint4);  // a block
    for (int i = threadIdx.y * 32 + lane; i < nblocks * y_words; i += ITQ3_S_MMVQ_WARPS * 32) {
        itq3_s_mmvq_shared[i] = y[i];
    }
    __syncthreads();

    const int b = lane / 2;
    const int j = lane % 2;
    dst += sample_dst * stride_sample_dst + channel_dst * stride_channel_dst;

    float sum   = 0.0f;
    float sum_x = 0.0f;  // sum over the row of x while that of the gate is made
    int   stage = 0;
    while (now.row < nrows) {
        itq3_s_copy_wait<stages - 2>();
        ggml_cuda_syncwarp();  // all lanes have their copies, and are done with the stage that is filled next
        fetch(next, stage == 0 ? stages - 1 : stage - 1);
        advance(next);

        const int ib = now.tile * ITQ3_S_MMVQ_TILE_BLOCKS + b;
        if (ib < nblocks) {
            sum += itq3_s_mmvq_dot_half<type>(ring + stage * tile_words, b, j, y_shared + 2 * ib);
        }
        stage = stage == stages - 1 ? 0 : stage + 1;

        if (now.tile == ntiles - 1) {
            sum = warp_reduce_sum<32>(sum);
            if (now.matrix < last_matrix) {
                sum_x = sum;
            } else if (lane == 0) {
                float result = use_gate ? sum_x : sum;
                if constexpr (has_fusion) {
                    const int64_t i_bias =
                        sample_dst * stride_sample_dst + (ids ? channel_x : channel_dst) * stride_channel_dst + now.row;
                    if (fusion.x_bias) {
                        result += ((const float *) fusion.x_bias)[i_bias];
                    }
                    if (use_gate) {
                        float gate = sum;
                        if (fusion.gate_bias) {
                            gate += ((const float *) fusion.gate_bias)[i_bias];
                        }
                        switch (fusion.glu_op) {
                            case GGML_GLU_OP_SWIGLU:
                                result *= ggml_cuda_op_silu_single(gate);
                                break;
                            case GGML_GLU_OP_GEGLU:
                                result *= ggml_cuda_op_gelu_single(gate);
                                break;
                            case GGML_GLU_OP_SWIGLU_OAI:
                                result = ggml_cuda_op_swiglu_oai_single(gate, result);
                                break;
                            case GGML_GLU_OP_SWIGLU_CLAMP:
                                result = ggml_cuda_op_swiglu_clamp_single(gate, result, fusion.glu_limit);
                                break;
                            default:
                                result *= gate;
                                break;
                        }
                    }
                }
                dst[now.row] = result;
            }
            sum = 0.0f;
        }
        advance(now);
    }
    itq3_s_copy_wait<0>();
}

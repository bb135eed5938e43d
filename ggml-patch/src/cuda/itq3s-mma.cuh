// Matrix times 1 to 64 columns for ITQ3_S, TQ1_0 and TQ2_0 on tensor cores: the kernel of generation and of small
// batches, on Ampere and newer.
//
// What limits it on a fast card is the integer work to decode the weights, so each weight is decoded once, in the
// registers of the lane that hands it to the product (itq3s-fragment.cuh), whatever the number of columns. A warp takes
// 16 rows and a share of their blocks. It copies its weights, coalesced and as they are, into a ring in shared memory
// and waits for nobody but at the end of its rows, where the shares are added up in a fixed order. One scale for the 256
// activations of a block, as on the CPU: the sum over a block is an integer.

#pragma once

#include "itq3s-copy.cuh"
#include "itq3s-fragment.cuh"
#include "unary.cuh"

#include <cstdint>

#define ITQ3_S_MMA_WARPS       8
#define ITQ3_S_MMA_ROWS        16
#define ITQ3_S_MMA_UNIT        2  // blocks of each row in a stage of the ring
#define ITQ3_S_MMA_MAX_STAGES  4
#define ITQ3_S_MMA_MAX_COLUMNS 64

// d += a*b for the warp: a of 16 rows by 32 bytes, b of 32 bytes by 8 columns.
static __device__ __forceinline__ void itq3_s_mma(int (&d)[4], const uint32_t (&a)[4], const uint32_t b0,
                                                  const uint32_t b1) {
#if defined(ITQ3_S_EMULATE)
    emulate::mma_s8(d, a, b0, b1, d);
#elif defined(TURING_MMA_AVAILABLE) && __CUDA_ARCH__ >= GGML_CUDA_CC_AMPERE
    asm volatile(
        "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, "
        "%3};"
        : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#else
    GGML_UNUSED_VARS(d, a, b0, b1);
    NO_DEVICE_CODE;
#endif
}

// Activations of a product: per block of 256 and column 256 bytes in the order of fragments, then, for all of them, the
// scale and the sum of the bytes. Both are within the bytes that upstream takes for q8_1: 264 of 288 a block.
static constexpr __host__ __device__ int64_t itq3_s_mma_activation_bytes(const int64_t nblocks, const int64_t ncols) {
    return nblocks * ncols * QK_K;
}

// The ring: row i of a stage starts at word i*stride + 8*(i/4), so that the eight rows of a phase, read at one of two
// words 8 apart, lie in different banks as far as they can.
template <ggml_type type> struct itq3_s_mma_ring {
    static constexpr int bs         = ggml_cuda_type_traits<type>::bs;
    static constexpr int row_bytes  = ITQ3_S_MMA_UNIT * bs;
    // The widest copy that all rows can start with when the first does.
    static constexpr int copy_bytes = row_bytes % 16 == 0 ? 16 : row_bytes % 8 == 0 ? 8 : 4;
    static constexpr int copies     = row_bytes / copy_bytes;
    static_assert(row_bytes % 4 == 0, "a unit is a number of words");
    // A word more for ternary blocks that do not start at a word, one that is read past the end; 8 byte alignment.
    static constexpr int stride =
        (row_bytes / 4 + (type == GGML_TYPE_ITQ3_S ? 0 : 2) + copy_bytes / 4 - 1) / (copy_bytes / 4) * (copy_bytes / 4);
    static constexpr int words = (ITQ3_S_MMA_ROWS * stride + 8 * 4 + 3) / 4 * 4;

    static constexpr __host__ __device__ int row(const int i) { return i * stride + 8 * (i / 4); }
};

struct itq3_s_mma_shape {
    int      nblocks;  // of a row
    int      nrows;
    int      ncols;         // of a product
    int      ncols_y;       // that lie together in y
    int      log2_warps_k;  // warps that share rows
    int      stages;        // of the ring, 2 to ITQ3_S_MMA_MAX_STAGES
    int      tiles;         // of ITQ3_S_MMA_ROWS * ITQ3_S_MMA_WARPS / warps_k rows
    int      ids_stride;
    uint32_t stride_row_x;  // of x in bytes, of y in bytes, of dst in elements
    uint3    nchannels_y;
    uint3    channel_ratio;
    uint3    sample_ratio;
    int64_t  stride_channel_x;
    int64_t  stride_sample_x;
    int64_t  stride_channel_y;
    int64_t  stride_sample_y;
    int64_t  stride_col_dst;
    int64_t  stride_channel_dst;
    int64_t  stride_sample_dst;
};

static constexpr __host__ __device__ int itq3_s_log2(const int n) {
    return n == 1 ? 0 : 1 + itq3_s_log2(n / 2);
}

// Buffers for the sums of a tile: two while they are small, so that one barrier a tile is enough.
static constexpr __host__ __device__ int itq3_s_mma_sum_buffers(const int ngroups) {
    return ngroups <= 2 ? 2 : 1;
}
static constexpr __host__ __device__ int itq3_s_mma_sum_words(const int ngroups, const bool has_fusion) {
    return ITQ3_S_MMA_WARPS * ITQ3_S_MMA_ROWS * 8 * ngroups * itq3_s_mma_sum_buffers(ngroups) * (has_fusion ? 2 : 1);
}
template <ggml_type type>
static constexpr __host__ __device__ size_t itq3_s_mma_shared_bytes(const int stages, const int ngroups,
                                                                    const bool has_fusion) {
    return sizeof(uint32_t) *
           (ITQ3_S_MMA_WARPS * stages * itq3_s_mma_ring<type>::words + itq3_s_mma_sum_words(ngroups, has_fusion));
}

// CUDA blocks that a multiprocessor has registers for: with many columns the sums of one fill them.
static constexpr __host__ __device__ int itq3_s_mma_blocks_per_multiprocessor(const int ngroups) {
    return ngroups <= 2 ? 2 : 1;
}

// With few columns there is room for two products a step, which saves merging the two tables of levels.
static constexpr __host__ __device__ bool itq3_s_mma_two_tables(const ggml_type type, const int ngroups) {
    return type == GGML_TYPE_ITQ3_S && ngroups <= 2;
}

// A block of the warp's 16 rows, at byte x0 of the tile row of lane/4 and byte x1 of that of lane/4 + 8, times the
// activations, added to sum[group][..]: rows lane/4 (0, 1) and lane/4 + 8 (2, 3) of columns 2*(lane % 4) + (0, 1).
//   y: this lane's bytes of the block in the first group; at_y: how far those of the other groups are; ds: scales and sums
//   of the block; last: the last column, which those past the end repeat; nothing is written back from those.
template <ggml_type type, int ngroups>
static __device__ __forceinline__ void itq3_s_mma_block(const uint32_t * row0, const int x0, const uint32_t * row1,
                                                        const int x1, const char * y, const uint32_t (&at_y)[ngroups],
                                                        const float2 * ds, const int last, const itq3_s_tables & tables,
                                                        const int lane, float (&sum)[ngroups][4]) {
    constexpr bool two_tables = itq3_s_mma_two_tables(type, ngroups);

    uint4 b[ngroups];
#pragma unroll
    for (int n = 0; n < ngroups; ++n) {
        b[n] = *((const uint4 *) (y + (n < ngroups / 2 ? n * (8 * QK_K) : at_y[n])));
    }

    itq3_s_fragments<type> w[2];
    w[0].load(row0, x0, lane % 4);
    w[1].load(row1, x1, lane % 4);

    // A sum is below 2^22 in magnitude (256 * 127 * 127), so that with this under it its bits are a float, 3*2^22 more.
    constexpr int   magic       = 0x4B400000;
    constexpr float magic_float = 12582912.0f;
    int             acc[ngroups][4];
#pragma unroll
    for (int n = 0; n < ngroups; ++n) {
#pragma unroll
        for (int l = 0; l < 4; ++l) {
            acc[n][l] = magic;
        }
    }
    // The digits of TQ2_0 would all be made ahead otherwise, for which many columns leave no registers.
    [[maybe_unused]] constexpr int steps_at_a_time = type == GGML_TYPE_TQ2_0 && (ngroups == 2 || ngroups == 8) ? 4 : 8;
#pragma unroll steps_at_a_time
    for (int s = 0; s < 8; ++s) {
        uint32_t a[2][4];
        if constexpr (two_tables) {
            uint32_t p[2][2], q[2][2];
            w[0].step(s, tables, p[0], q[0]);
            w[1].step(s, tables, p[1], q[1]);
#pragma unroll
            for (int l = 0; l < 4; ++l) {
                a[0][l] = p[l % 2][l / 2];
                a[1][l] = q[l % 2][l / 2];
            }
        } else {
            uint32_t p[2][2];
            w[0].step(s, tables, p[0]);
            w[1].step(s, tables, p[1]);
#pragma unroll
            for (int l = 0; l < 4; ++l) {
                a[0][l] = p[l % 2][l / 2];
            }
        }
#pragma unroll
        for (int n = 0; n < ngroups; ++n) {
            const uint32_t b0 = s % 2 == 0 ? b[n].x : b[n].z;
            const uint32_t b1 = s % 2 == 0 ? b[n].y : b[n].w;
            itq3_s_mma(acc[n], a[0], b0, b1);
            if constexpr (two_tables) {
                itq3_s_mma(acc[n], a[1], b0, b1);
            }
            if (s % 2 == 1 && s < 7) {
                b[n] = *((const uint4 *) (y + (n < ngroups / 2 ? n * (8 * QK_K) : at_y[n]) + (s + 1) / 2 * 64));
            }
        }
    }

#pragma unroll
    for (int n = 0; n < ngroups; ++n) {
#pragma unroll
        for (int l = 0; l < 2; ++l) {
            // From 17 columns on those past the end are still in the buffer: it has 24 bytes more a block and column.
            const int    c = 2 * (lane % 4);
            const float2 u = (ds + c)[ngroups < 4 && n >= ngroups / 2 ? min(8 * n + l, last - c) : 8 * n + l];
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                // Merged levels are 64 more. The fused sum rounds once, so that is as if they were not.
                const float z = w[r].z + (type == GGML_TYPE_ITQ3_S && !two_tables ? 64.0f : 0.0f);
                const float f = __int_as_float(acc[n][2 * r + l]) - magic_float;
                sum[n][2 * r + l] += w[r].d * u.x * fmaf(-z, u.y, f);
            }
        }
    }
}

// Ends the copies of a stage. With fewer stages than the most it is as if those that are missing had been filled, so that
// the same wait is right for any number.
static __device__ __forceinline__ void itq3_s_mma_commit(const int stages) {
    static_assert(ITQ3_S_MMA_MAX_STAGES == 4, "a group for each stage that may be missing");
    itq3_s_copy_commit();
    if (stages < 4) {
        itq3_s_copy_commit();
    }
    if (stages < 3) {
        itq3_s_copy_commit();
    }
}

// Grid: (CUDA blocks that share the tiles, channels, samples or, with ids, tokens); block: (32, ITQ3_S_MMA_WARPS).
// aligned: all rows start at multiples of copy_bytes and hold whole units; without it they start at multiples of 2.
template <ggml_type type, int ngroups, bool aligned, bool has_fusion>
__launch_bounds__(ITQ3_S_MMA_WARPS * 32, itq3_s_mma_blocks_per_multiprocessor(ngroups)) static __global__ void
mul_mat_itq3_s_mma(const void * vx, const void * vy, const int32_t * ids, const ggml_cuda_mm_fusion_args_device fusion,
                   float * dst, const itq3_s_mma_shape shape) {
    using ring                                 = itq3_s_mma_ring<type>;
    constexpr int                  bs          = ring::bs;
    constexpr int                  unit        = ITQ3_S_MMA_UNIT;
    constexpr int                  columns     = 8 * ngroups;
    constexpr bool                 two_buffers = ngroups <= 2;
    // More blocks at a time need more registers than there are.
    [[maybe_unused]] constexpr int blocks_at_a_time =
        type != GGML_TYPE_ITQ3_S && ngroups == 1 && !has_fusion ? unit : 1;

    extern __shared__ uint4 itq3_s_mma_shared[];
    const int               lane    = threadIdx.x;
    const int               warps_k = 1 << shape.log2_warps_k;
    const int               warp_k  = threadIdx.y % warps_k;
    const int               warp_i  = threadIdx.y >> shape.log2_warps_k;
    const int log2_rows  = itq3_s_log2(ITQ3_S_MMA_ROWS * ITQ3_S_MMA_WARPS) - shape.log2_warps_k;  // of a tile
    const int nunits     = (shape.nblocks + unit - 1) / unit;
    const int ring_words = shape.stages * ring::words;

    uint32_t * const tiles = (uint32_t *) itq3_s_mma_shared + threadIdx.y * ring_words;
    float * const    sums  = (float *) ((uint32_t *) itq3_s_mma_shared + ITQ3_S_MMA_WARPS * ring_words);

    ggml_cuda_pdl_lc();
    if (ids) {
        ggml_cuda_pdl_sync();  // the choice of the experts is made on the device
    }
    const uint32_t channel_dst = blockIdx.y;
    const uint32_t sample_dst  = blockIdx.z;
    const uint32_t channel_x =
        ids ? ids[channel_dst + sample_dst * shape.ids_stride] : fastdiv(channel_dst, shape.channel_ratio);
    const uint32_t sample_x = ids ? 0 : fastdiv(sample_dst, shape.sample_ratio);
    const int64_t  offset_x = sample_x * shape.stride_sample_x + channel_x * shape.stride_channel_x;

    bool use_gate = false;
    if constexpr (has_fusion) {
        use_gate = fusion.gate != nullptr;
    }
    const int nmatrices = use_gate ? 2 : 1;

    // First row of the warp in a tile of matrix 0 (x) or 1 (gate).
    const auto rows_of = [&](const int tile, const int matrix) {
        const char * base = (const char *) (has_fusion && matrix == 1 ? fusion.gate : vx);
        const int    i0   = (tile << log2_rows) + warp_i * ITQ3_S_MMA_ROWS;
        return base + offset_x + (int64_t) min(i0, shape.nrows - 1) * shape.stride_row_x;
    };
    // Rows past the end repeat the last one; nothing is written back from those.
    const auto last_row_of = [&](const int tile) {
        const int i0 = (tile << log2_rows) + warp_i * ITQ3_S_MMA_ROWS;
        return max(min(ITQ3_S_MMA_ROWS, shape.nrows - i0), 1) - 1;
    };

    // The copies of a warp's units: tiles of the CUDA block, matrices, units of the warp's share.
    int          next_tile   = warp_k < nunits ? blockIdx.x : shape.tiles;
    int          next_matrix = 0;
    int          next_unit   = warp_k;
    const char * next_rows   = rows_of(next_tile, 0);
    int          last_row    = last_row_of(next_tile);
    uint32_t *   next_stage  = tiles;
    const auto   fetch       = [&]() {
        if (next_tile < shape.tiles) {
            const char * base = next_rows + next_unit * ring::row_bytes;
            uint32_t *   to   = next_stage;
            if constexpr (aligned) {
                constexpr int words = ring::copy_bytes / 4;
                const auto    copy  = [&](const int i, const int i_from, const int l) {
                    itq3_s_copy_async<ring::copy_bytes>(to + ring::row(i) + l * words,
                                                        base + l * ring::copy_bytes +
                                                            (uint64_t) (uint32_t) i_from * shape.stride_row_x);
                };
                if (lane < ring::copies) {
                    if (last_row == ITQ3_S_MMA_ROWS - 1) {
#pragma unroll
                        for (int i = 0; i < ITQ3_S_MMA_ROWS; ++i) {
                            copy(i, i, lane);
                        }
                    } else {
#pragma unroll 1
                        for (int i = 0; i < ITQ3_S_MMA_ROWS; ++i) {
                            copy(i, min(i, last_row), lane);
                        }
                    }
                }
                if constexpr (ring::copies > 32) {
                    static_assert(ring::copies <= 34, "two lanes a row for the rest");
                    const int i = lane % ITQ3_S_MMA_ROWS;
                    const int l = 32 + lane / ITQ3_S_MMA_ROWS;
                    if (l < ring::copies) {
                        copy(i, min(i, last_row), l);
                    }
                }
            } else {
                constexpr bool words_only = type == GGML_TYPE_ITQ3_S;
                constexpr int  steps      = (ring::row_bytes / 4 + (words_only ? 0 : 1) + 31) / 32;
                const int      bytes      = min(unit, shape.nblocks - next_unit * unit) * bs;
#pragma unroll 4
                for (int i = 0; i < ITQ3_S_MMA_ROWS; ++i) {
                    const char * from   = base + (uint64_t) (uint32_t) min(i, last_row) * shape.stride_row_x;
                    const int    before = words_only ? 0 : (uintptr_t) from & 2;
#pragma unroll
                    for (int k = 0; k < steps; ++k) {
                        const int l    = lane + 32 * k;
                        const int rest = bytes + before - 4 * l;
                        if (rest >= 4) {
                            itq3_s_copy_async<4>(to + ring::row(i) + l, from - before + 4 * l);
                        } else if (!words_only && rest == 2) {
                            itq3_s_copy_async_half_word(to + ring::row(i) + l, from - before + 4 * l);
                        }
                    }
                }
            }
            next_unit += warps_k;
            if (next_unit >= nunits) {
                next_unit = warp_k;
                if (++next_matrix == nmatrices) {
                    next_matrix = 0;
                    next_tile += gridDim.x;
                }
                next_rows = rows_of(next_tile, next_matrix);
                last_row  = last_row_of(next_tile);
            }
        }
        itq3_s_mma_commit(shape.stages);  // also past the end, so that groups count units
        next_stage += ring::words;
        next_stage = next_stage == tiles + ring_words ? tiles : next_stage;
    };
#pragma unroll 1
    for (int stage = 0; stage < shape.stages - 1; ++stage) {
        fetch();
    }
    if (!ids) {
        ggml_cuda_pdl_sync();  // the weights are on their way; the activations may still be quantized
    }

    const uint32_t channel_y = ids ? 0 : channel_dst;
    const uint32_t first     = ids ? fastmodulo(channel_dst, shape.nchannels_y) : 0;
    const char *   y  = (const char *) vy + sample_dst * shape.stride_sample_y + channel_y * shape.stride_channel_y;
    const float2 * ds = (const float2 *) (y + itq3_s_mma_activation_bytes(shape.nblocks, shape.ncols_y)) + first;
    const uint32_t stride_y      = shape.ncols_y * QK_K;
    // A kernel for this many groups of columns is only chosen when the first half of them is full.
    const int      last          = shape.ncols - 1;
    uint32_t       at_y[ngroups] = { 0 };
#pragma unroll
    for (int n = 1; n < ngroups; ++n) {
        at_y[n] = (min(8 * n + lane / 4, last) - lane / 4) * QK_K;
    }
    y += (first + min(lane / 4, last)) * QK_K + 16 * (lane % 4);

    const itq3_s_tables tables = itq3_s_make_tables<type, itq3_s_mma_two_tables(type, ngroups)>(lane);
    const uint32_t *    stage  = tiles + ring::row(lane / 4);
    int                 buffer = 0;
    for (int tile = blockIdx.x; tile < shape.tiles; tile += gridDim.x) {
        for (int matrix = 0; matrix < nmatrices; ++matrix) {
            float sum[ngroups][4] = { { 0.0f } };

            // Ternary rows may start in the middle of a word.
            int x0 = 0, x1 = 0;
            if constexpr (!aligned && type != GGML_TYPE_ITQ3_S) {
                const char * row  = rows_of(tile, matrix);
                const int    last = last_row_of(tile);
                x0                = (uintptr_t) (row + (uint32_t) min(lane / 4 + 0, last) * shape.stride_row_x) & 2;
                x1                = (uintptr_t) (row + (uint32_t) min(lane / 4 + 8, last) * shape.stride_row_x) & 2;
            }

#pragma unroll 1
            for (int u = warp_k; u < nunits; u += warps_k) {
                itq3_s_copy_wait<ITQ3_S_MMA_MAX_STAGES - 2>();
                ggml_cuda_syncwarp();  // all lanes have their copies, and are done with the stage that is filled next
                fetch();
#pragma unroll blocks_at_a_time
                for (int b = 0; b < unit; ++b) {
                    const int ib = u * unit + b;
                    if (aligned || ib < shape.nblocks) {
                        itq3_s_mma_block<type, ngroups>(stage, b * bs + x0, stage + ring::row(8), b * bs + x1,
                                                        y + (uint64_t) ib * stride_y, at_y, ds + ib * shape.ncols_y,
                                                        last, tables, lane, sum);
                    }
                }
                stage += ring::words;
                stage = stage >= tiles + ring_words ? stage - ring_words : stage;
            }

            // [buffer][matrix][warp][row][column]
            float * mine =
                sums + ((buffer * nmatrices + matrix) * ITQ3_S_MMA_WARPS + threadIdx.y) * (ITQ3_S_MMA_ROWS * columns);
#pragma unroll
            for (int n = 0; n < ngroups; ++n) {
#pragma unroll
                for (int r = 0; r < 2; ++r) {
                    *((float2 *) (mine + (lane / 4 + 8 * r) * columns + 8 * n + 2 * (lane % 4))) =
                        make_float2(sum[n][2 * r], sum[n][2 * r + 1]);
                }
            }
        }
        __syncthreads();

        const float * all = sums + buffer * nmatrices * (ITQ3_S_MMA_WARPS * ITQ3_S_MMA_ROWS * columns);
        for (int o = threadIdx.y * 32 + lane; o < shape.ncols << log2_rows; o += ITQ3_S_MMA_WARPS * 32) {
            const int j   = o >> log2_rows;
            const int i   = o - (j << log2_rows);
            const int row = (tile << log2_rows) + i;
            if (row >= shape.nrows) {
                continue;
            }
            // Row i is in the shares of warps_k warps.
            const float * share =
                all + ((i / ITQ3_S_MMA_ROWS << shape.log2_warps_k) * ITQ3_S_MMA_ROWS + i % ITQ3_S_MMA_ROWS) * columns +
                j;
            float result = 0.0f;
            for (int k = 0; k < warps_k; ++k) {
                result += share[k * (ITQ3_S_MMA_ROWS * columns)];
            }
            if constexpr (has_fusion) {
                const int64_t i_bias = (ids ? channel_x : channel_dst) * shape.stride_channel_dst + row +
                                       (ids ? 0 : sample_dst * shape.stride_sample_dst);
                if (fusion.x_bias) {
                    result += ((const float *) fusion.x_bias)[i_bias];
                }
                if (use_gate) {
                    float gate = 0.0f;
                    for (int k = 0; k < warps_k; ++k) {
                        gate += share[(ITQ3_S_MMA_WARPS + k) * (ITQ3_S_MMA_ROWS * columns)];
                    }
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
            dst[sample_dst * shape.stride_sample_dst + channel_dst * shape.stride_channel_dst +
                j * shape.stride_col_dst + row] = result;
        }
        if constexpr (two_buffers) {
            buffer ^= 1;
        } else {
            __syncthreads();
        }
    }
    itq3_s_copy_wait<0>();
}

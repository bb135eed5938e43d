// Matrix times 1 to 64 columns for the trellis types, TQ1_0 and TQ2_0 on tensor cores: the kernel of generation and of small
// batches, on Ampere and newer.
//
// What limits it on a fast card is the integer work to decode the weights, so each weight is decoded once, in the
// registers of the lane that hands it to the product (itq-fragment.cuh), whatever the number of columns. A warp takes
// 16 rows and a share of their blocks. It copies its weights, still coded, into a ring in shared memory, coalesced,
// and waits for nobody but at the end of its rows, where the shares are added up in a fixed order. One scale for the 256
// activations of a block, as on the CPU: the sum over a block is an integer.

#pragma once

#include "itq-copy.cuh"
#include "itq-fragment.cuh"
#include "unary.cuh"

#include <cstdint>

#define ITQ_MMA_WARPS      8
#define ITQ_MMA_ROWS       16
#define ITQ_MMA_UNIT       2  // blocks of each row in a stage of the ring
#define ITQ_MMA_MAX_STAGES 3
#define ITQ_MMA_MAX_GROUPS 8  // of columns

// One of ITQ3_S, whose blocks all start at words.
template <ggml_type type> constexpr int itq_mma_unit = type == GGML_TYPE_ITQ3_S ? 1 : ITQ_MMA_UNIT;

// d += a*b for the warp: a of 16 rows by 32 bytes, b of 32 bytes by 8 columns.
static __device__ __forceinline__ void itq_mma(int (&d)[4], const uint32_t (&a)[4], const uint32_t b0,
                                               const uint32_t b1) {
#if defined(TURING_MMA_AVAILABLE) && __CUDA_ARCH__ >= GGML_CUDA_CC_AMPERE
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

// The ring. Blocks as they are: row i of a stage starts at word i*stride + 8*(i/4), so that the eight rows of a phase, read at one of
// two words 8 apart, lie in different banks as far as they can.
template <ggml_type type> struct itq_mma_ring {
    static constexpr int bs         = ggml_cuda_type_traits<type>::bs;
    static constexpr int row_bytes  = ITQ_MMA_UNIT * bs;
    static constexpr int copy_bytes = 4;
    static constexpr int row_words  = row_bytes / 4;
    static constexpr int lanes      = row_words < 32 ? row_words : 32;  // that copy
    static_assert(row_bytes % 4 == 0, "a unit is a number of words");
    // A word more for blocks that do not start at a word, one that is read past the end.
    static constexpr int stride = row_bytes / 4 + 2;
    static constexpr int words  = (ITQ_MMA_ROWS * stride + 8 * 4 + 3) / 4 * 4;

    static constexpr __host__ __device__ int row(const int i) { return i * stride + 8 * (i / 4); }
};

// ITQ3_S and blocks of 64: in quads, as itq-fragment.cuh has them.
template <> struct itq_mma_ring<GGML_TYPE_ITQ3_S> {
    static constexpr int bs         = ggml_cuda_type_traits<GGML_TYPE_ITQ3_S>::bs;
    static constexpr int row_bytes  = bs;
    static constexpr int copy_bytes = 4;
    static constexpr int row_words  = row_bytes / 4;
    static constexpr int lanes      = 32;
    static constexpr int words      = ITQ_TILE_WORDS;
    static_assert(ITQ_MMA_ROWS == 16, "the rows of a tile");

    static constexpr __host__ __device__ int row(const int i) { return 4 * i; }
};

template <> struct itq_mma_ring<GGML_TYPE_ITQ4_S> {
    static constexpr int bs        = ggml_cuda_type_traits<GGML_TYPE_ITQ4_S>::bs;
    static constexpr int row_bytes = ITQ_MMA_UNIT * bs;
    static constexpr int words     = ITQ_MMA_UNIT * ITQ_MMA_ROWS * ITQ_ROW_WORDS;

    static constexpr __host__ __device__ int row(const int i) { return ITQ_ROW_WORDS * i; }
};

template <ggml_type type> struct itq_mma_ring_64 {
    static constexpr int bs        = ggml_cuda_type_traits<type>::bs;
    static constexpr int row_bytes = ITQ_MMA_UNIT * itq_fragment_blocks<type> * bs;
    static constexpr int words     = ITQ_MMA_UNIT * itq_tile_words_64<type>;

    static constexpr __host__ __device__ int row(const int i) { return 4 * i; }
};
#define ITQ_MMA_RING_64(NAME, ...) \
    template <> struct itq_mma_ring<GGML_TYPE_##NAME> : itq_mma_ring_64<GGML_TYPE_##NAME> {};
ITQ_TYPES_64(ITQ_MMA_RING_64)

// Whether a block is copied in the words that hold it, wherever it begins.
template <ggml_type type> constexpr bool itq_mma_by_block = ggml_cuda_is_itq_64(type) || type == GGML_TYPE_ITQ4_S;

struct itq_mma_shape {
    int      nblocks;  // of a row, blocks of the type
    int      nrows;
    int      ncols;         // of a product
    int      ncols_y;       // that lie together in y
    int      log2_warps_k;  // warps that share rows
    int      stages;        // of the ring, 2 to ITQ_MMA_MAX_STAGES
    int      tiles;         // of ITQ_MMA_ROWS * ITQ_MMA_WARPS / warps_k rows
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

static constexpr __host__ __device__ int itq_log2(const int n) {
    return n == 1 ? 0 : 1 + itq_log2(n / 2);
}

// Buffers for the sums of a tile: two while they are small, so that one barrier a tile is enough.
static constexpr __host__ __device__ int itq_mma_sum_buffers(const int ngroups, const bool has_fusion) {
    return ngroups == 1 && !has_fusion ? 2 : 1;
}
// Parts of a row's sum of a column: lanes that share the blocks of 64 add up what they have of theirs.
template <ggml_type type> constexpr int itq_mma_parts = itq_fragment_blocks<type> == 1 ? 1 : 2;
// Sums that a lane has of a group.
template <ggml_type type> constexpr int itq_mma_sums  = 4 / itq_mma_parts<type>;

template <ggml_type type>
static constexpr __host__ __device__ int itq_mma_sum_words(const int ngroups, const bool has_fusion) {
    return ITQ_MMA_WARPS * ITQ_MMA_ROWS * itq_fragment_columns<type> * itq_mma_parts<type> * ngroups *
           itq_mma_sum_buffers(ngroups, has_fusion) * (has_fusion ? 2 : 1);
}
// Words of the table of subsets.
template <ggml_type type>
constexpr int itq_mma_table_words = type == GGML_TYPE_ITQ3_S ? 256 * ITQ_SUBSETS_STRIDE / 4 : 0;

template <ggml_type type>
static constexpr __host__ __device__ size_t itq_mma_shared_bytes(const int stages, const int ngroups,
                                                                 const bool has_fusion) {
    return sizeof(uint32_t) * (itq_mma_table_words<type> + ITQ_MMA_WARPS * stages * itq_mma_ring<type>::words +
                               itq_mma_sum_words<type>(ngroups, has_fusion));
}

// CUDA blocks that a multiprocessor has registers for: with many columns the sums of one fill them.
static constexpr __host__ __device__ int itq_mma_blocks_per_multiprocessor(const int ngroups) {
    return ngroups <= 2 ? 2 : 1;
}

// Words of activations that a lane has at a time, by four: of every group those of two steps, or, where one group comes
// after the other, all of four of them.
static constexpr __host__ __device__ int itq_mma_quads(const int ngroups) {
    return ngroups < 8 ? ngroups : 4 * 4;
}

// The sum of so many parts.
template <int parts> static __device__ __forceinline__ float itq_mma_sum_of(const float * part) {
    return parts == 1 ? part[0] : part[0] + part[1];
}

// Of the bits of a symbol: the products that the parts of levels (itq_parts) are added up in.
template <ggml_type type> constexpr int itq_mma_bits = 0;
#define ITQ_MMA_BITS(NAME, name, bits, ...) template <> constexpr int itq_mma_bits<GGML_TYPE_##NAME> = bits;
ITQ_TYPES(ITQ_MMA_BITS)

// With few columns there is room for a product for each part of the levels, which saves merging them.
template <ggml_type type, int ngroups>
constexpr bool itq_mma_in_parts = ggml_cuda_is_itq(type) && ngroups <= (itq_mma_bits<type> > 1 ? 1 : 2);

// A pointer that the compiler does not see through, to global memory still: it would take the sum apart and add up the
// parts again at every use.
static const __device__ __forceinline__ char * itq_mma_opaque(const char * p) {
#if defined(__CUDA_ARCH__) && !defined(GGML_USE_HIP) && !defined(GGML_USE_MUSA)
    size_t at = __cvta_generic_to_global(p);
    asm("" : "+l"(at));
    return (const char *) __cvta_global_to_generic(at);
#else
    return p;
#endif
}

// The same number, but what follows from it is not made ahead of a loop: what the end of a tile needs would keep
// registers from the products.
static __device__ __forceinline__ int itq_mma_anew(int x) {
#if defined(__CUDA_ARCH__) && !defined(GGML_USE_HIP) && !defined(GGML_USE_MUSA)
    asm volatile("" : "+r"(x));
#endif
    return x;
}

static const __device__ __forceinline__ char * itq_mma_anew(const char * p) {
#if defined(__CUDA_ARCH__) && !defined(GGML_USE_HIP) && !defined(GGML_USE_MUSA)
    size_t at = __cvta_generic_to_global(p);
    asm volatile("" : "+l"(at));
    return (const char *) __cvta_global_to_generic(at);
#else
    return p;
#endif
}

// In one instruction, which 64 bit factors whose upper halves are 0 do not always become.
static __device__ __forceinline__ uint64_t itq_mma_product(const uint32_t a, const uint32_t b) {
#if defined(__CUDA_ARCH__) && !defined(GGML_USE_HIP) && !defined(GGML_USE_MUSA)
    uint64_t product;
    asm("mul.wide.u32 %0, %1, %2;" : "=l"(product) : "r"(a), "r"(b));
    return product;
#else
    return (uint64_t) a * b;
#endif
}

// 256 weights of the warp's 16 rows times the activations, added to sum[group][..]: rows lane/4 (0, 1) and lane/4 + 8
// (2, 3) of columns 2*(lane % 4) + (0, 1); with blocks of 64 rows lane/4 (0) and lane/4 + 8 (1) of column lane % 4 / 2,
// and of the four blocks the two from lane % 2 * 2 on.
//   stage, block: where the block is in the ring; scales and bytes: this lane's of the activations in the first group;
//   at_bytes: how far from there the bytes of a group are that may not be full. Columns past the end repeat the last or
//   are garbage; nothing is written back from those.
template <ggml_type type, int ngroups>
static __device__ __forceinline__ void
itq_mma_block(const itq_fragment_lane<type> & at, const uint32_t stage, const int block,
              const itq_fragment_scales_of<type> * scales, const char * bytes, const uint32_t (&at_bytes)[ngroups],
              uint4 (&b)[itq_mma_quads(ngroups)], float (&sum)[ngroups][itq_mma_sums<type>]) {
    constexpr bool in_parts = itq_mma_in_parts<type, ngroups>;
    constexpr int  nparts   = in_parts ? (itq_mma_bits<type> == 3 ? 4 : 2) : 1;
    constexpr bool is_64    = ggml_cuda_is_itq_64(type);
    constexpr int  columns  = itq_fragment_columns<type>;

    // Where the bytes of the groups begin that may not be full.
    [[maybe_unused]] const char * begins[ngroups] = {};
    if constexpr (is_64) {
        bytes = itq_mma_anew(bytes);
#pragma unroll
        for (int n = ngroups / 2; n < ngroups; ++n) {
            begins[n] = itq_mma_anew(bytes + at_bytes[n]);
        }
    }
    const auto load = [&](uint4 & b, const int n, const int s) {
        if constexpr (is_64) {  // for columns of another block b stays what it is, 0
            if (at.active) {
                b = *((const uint4 *) ((n < ngroups / 2 ? bytes + n * (columns * QK_K) : begins[n]) + s / 2 * 64));
            }
        } else {
            b = *((const uint4 *) (bytes + (n < ngroups / 2 ? n * (columns * QK_K) : at_bytes[n]) + s / 2 * 64));
        }
    };
    itq_fragments<type> w[2];
    w[0].load(at, 0, stage, block);
    w[1].load(at, 1, stage, block);

    // Of blocks of 64 the scales of the sums, and what they make of the origin, exact: they have 11 bits.
    [[maybe_unused]] float d[4], origin[4];
    if constexpr (is_64) {
        const uint32_t own = itq_prmt(w[0].last, w[1].last, at.scales) & 0xFFC0FFC0;  // without the start states
#pragma unroll
        for (int l = 0; l < 2; ++l) {
            const float2 rows = itq_half2_bits(__shfl_sync(0xFFFFFFFF, own, at.two[l], 4));
            d[l]              = rows.x;
            d[2 + l]          = rows.y;
        }
#pragma unroll
        for (int l = 0; l < 4; ++l) {
            origin[l] = -ITQ_FLOAT_ORIGIN * d[l];
        }
    }

    const auto begin = [&](const int n, int (&acc)[4]) {
        if constexpr (is_64) {
            const int2 from = *((const int2 *) scales[2 * columns * n].start);
            acc[0] = acc[2] = from.x;
            acc[1] = acc[3] = from.y;
        } else {
            const int4 from = *((const int4 *) &scales[columns * n].start);
            acc[0]          = from.x;
            acc[1]          = from.y;
            acc[2]          = from.z;
            acc[3]          = from.w;
        }
    };
    const auto end = [&](const int n, const int (&acc)[4]) {
        if constexpr (is_64) {
            const float2 u = *((const float2 *) scales[2 * columns * n].scale);
#pragma unroll
            for (int l = 0; l < 4; ++l) {
                const float f = fmaf(d[l], __int_as_float(acc[l]), origin[l]);
                sum[n][l / 2] = fmaf(l % 2 == 0 ? u.x : u.y, f, sum[n][l / 2]);
            }
        } else {
            const float4 u = *((const float4 *) &scales[columns * n].scale);
#pragma unroll
            for (int l = 0; l < 4; ++l) {
                const float f = fmaf(l % 2 == 0 ? u.x : u.z, __int_as_float(acc[l]), l % 2 == 0 ? u.y : u.w);
                sum[n][l]     = fmaf(w[l / 2].d, f, sum[n][l]);
            }
        }
    };
    const auto decode = [&](const int s, uint32_t (&a)[4]) {
        uint32_t p[2][2];
        w[0].step(s, at, p[0]);
        w[1].step(s, at, p[1]);
#pragma unroll
        for (int l = 0; l < 4; ++l) {
            a[l] = p[l % 2][l / 2];
        }
    };
    if constexpr (ngroups < 8) {
        int acc[ngroups][4];
        int apart[ngroups][2][4] = {};  // products of what was complemented
#pragma unroll
        for (int n = 0; n < ngroups; ++n) {
            load(b[n], n, 0);
            begin(n, acc[n]);
        }
#pragma unroll
        for (int s = 0; s < 8; ++s) {
            uint32_t a[nparts][4];
            if constexpr (in_parts) {
                uint32_t p[2][2][nparts];
                w[0].step(s, at, p[0]);
                w[1].step(s, at, p[1]);
#pragma unroll
                for (int l = 0; l < 4 * nparts; ++l) {
                    a[l / 4][l % 4] = p[l % 2][l / 2 % 2][l / 4];
                }
            } else {
                decode(s, a[0]);
            }
#pragma unroll
            for (int n = 0; n < ngroups; ++n) {
                const uint32_t b0 = s % 2 == 0 ? b[n].x : b[n].z;
                const uint32_t b1 = s % 2 == 0 ? b[n].y : b[n].w;
#pragma unroll
                for (int part = 0; part < nparts; ++part) {
                    itq_mma(itq_mma_bits<type> > 1 && part % 2 == 1 ? apart[n][part / 2] : acc[n], a[part], b0, b1);
                }
                if (s % 2 == 1 && s < 7) {
                    load(b[n], n, s + 1);
                }
            }
        }
#pragma unroll
        for (int n = 0; n < ngroups; ++n) {
            if constexpr (in_parts && itq_mma_bits<type> > 1) {
#pragma unroll
                for (int l = 0; l < 4; ++l) {
                    acc[n][l] -= 129 * apart[n][0][l] + apart[n][1][l];
                }
            }
            end(n, acc[n]);
        }
    } else {
        // All weights of the block first: there are no registers for the products of all groups at a time. A branch that
        // is always taken keeps the compiler from loading the activations of the second half with those of the first.
        uint32_t a[8][4];
#pragma unroll
        for (int s = 0; s < 8; ++s) {
            decode(s, a[s]);
        }
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            if (half == 0 || at.zero == 0) {
#pragma unroll
                for (int n = half * (ngroups / 2); n < (half + 1) * (ngroups / 2); ++n) {
                    int acc[4];
                    begin(n, acc);
#pragma unroll
                    for (int s = 0; s < 8; s += 2) {
                        uint4 & two = b[n % 4 * 4 + s / 2];
                        load(two, n, s);
                        itq_mma(acc, a[s], two.x, two.y);
                        itq_mma(acc, a[s + 1], two.z, two.w);
                    }
                    end(n, acc);
                }
            }
        }
    }

    // Zero-points: blocks of the trellis code have none.
    if constexpr (type == GGML_TYPE_ITQ3_S) {
        if (warp_reduce_any<32>((w[0].dz | w[1].dz) >> 16)) {
            const float z[2] = { w[0].d * itq_half2_bits(w[0].dz).y, w[1].d * itq_half2_bits(w[1].dz).y };
#pragma unroll
            for (int n = 0; n < ngroups; ++n) {
                const itq_fragment_scales u    = scales[columns * n];
                const float               s[2] = { u.scale * itq_fragment_sum<type>(u.start),
                                                   u.next_scale * itq_fragment_sum<type>(u.next_start) };
#pragma unroll
                for (int l = 0; l < 4; ++l) {
                    sum[n][l] -= z[l / 2] * s[l % 2];
                }
            }
        }
    }
}

// Ends the copies of a stage. With two stages it is as if the third had been filled, so that the same wait is right for
// both.
static __device__ __forceinline__ void itq_mma_commit(const int stages) {
    static_assert(ITQ_MMA_MAX_STAGES == 3, "a group for each stage that may be missing");
    itq_copy_commit();
    if (stages < 3) {
        itq_copy_commit();
    }
}

// Grid: (CUDA blocks that share the tiles, channels, samples or, with ids, tokens); block: (32, ITQ_MMA_WARPS).
// aligned: all rows start at multiples of copy_bytes and hold whole units; without it they start at multiples of 2.
template <ggml_type type, int ngroups, bool aligned, bool has_fusion>
__launch_bounds__(ITQ_MMA_WARPS * 32, itq_mma_blocks_per_multiprocessor(ngroups)) static __global__ void
mul_mat_itq_mma(const void * vx, const void * vy, const int32_t * ids, const ggml_cuda_mm_fusion_args_device fusion,
                float * dst, const itq_mma_shape shape) {
    using ring                                      = itq_mma_ring<type>;
    constexpr int                  bs               = ring::bs;
    constexpr int                  unit             = itq_mma_unit<type>;
    constexpr bool                 is_64            = ggml_cuda_is_itq_64(type);
    constexpr bool                 by_block         = itq_mma_by_block<type>;
    constexpr int                  per_256          = itq_fragment_blocks<type>;
    constexpr int                  parts            = itq_mma_parts<type>;
    constexpr int                  column_lanes     = 4 * per_256;  // that have activations of a column
    constexpr int                  columns          = itq_fragment_columns<type> * parts * ngroups;
    constexpr bool                 two_buffers      = itq_mma_sum_buffers(ngroups, has_fusion) == 2;
    // More blocks at a time need more registers than there are.
    [[maybe_unused]] constexpr int blocks_at_a_time = itq_mma_bits<type> < 2 && ngroups == 1 && !has_fusion ? unit : 1;

    extern __shared__ uint4 itq_mma_shared[];
    const int               lane = threadIdx.x;
    // With two groups of columns of ITQ3_S there is no register left.
    const auto              keep = [&](const uint32_t x) {
        return type == GGML_TYPE_ITQ3_S && ngroups == 2 ? x : itq_kept(x, lane);
    };
    const int warps_k    = keep(1 << shape.log2_warps_k);
    const int warp_k     = threadIdx.y % warps_k;
    const int warp_i     = threadIdx.y >> shape.log2_warps_k;
    const int log2_rows  = itq_log2(ITQ_MMA_ROWS * ITQ_MMA_WARPS) - shape.log2_warps_k;  // of a tile
    const int nunits     = (shape.nblocks + unit * per_256 - 1) / (unit * per_256);
    const int ring_words = shape.stages * ring::words;

    uint32_t * const rings = (uint32_t *) itq_mma_shared + itq_mma_table_words<type>;
    uint32_t * const tiles = rings + threadIdx.y * ring_words;
    float * const    sums  = (float *) (rings + ITQ_MMA_WARPS * ring_words);

    if constexpr (ngroups > 1) {
        ids = nullptr;  // a token's experts are products with one column
    }
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
        const int    i0   = (tile << log2_rows) + warp_i * ITQ_MMA_ROWS;
        return base + offset_x + (int64_t) min(i0, shape.nrows - 1) * shape.stride_row_x;
    };
    // Its rows there, 0 past the end. Those that are missing are garbage in the ring; nothing is written back from them.
    const auto nrows_of = [&](const int tile) {
        const int i0 = (tile << log2_rows) + warp_i * ITQ_MMA_ROWS;
        return max(min(ITQ_MMA_ROWS, shape.nrows - i0), 0);
    };

    // This lane's word of a block (ITQ3_S) or unit in a row of x, and its place in the ring.
    const int     from_word   = type == GGML_TYPE_ITQ3_S ? itq_quad_source(lane / 4, lane % 4) : aligned ? lane : 0;
    constexpr int block_lanes = 32 / per_256;                                        // that copy a block
    const int     from_byte   = by_block ? lane / block_lanes * bs : 4 * from_word;  // of blocks of 64: of the lane's
    uint32_t *    lane_tiles  = tiles + (type == GGML_TYPE_ITQ3_S || is_64 ? ITQ_QUAD_WORDS * (lane / 4) + lane % 4
                                         : aligned || by_block             ? lane
                                                                           : 0);
    // The copies of a warp's units: tiles of the CUDA block, matrices, units of the warp's share.
    int           next_tile   = warp_k < nunits ? blockIdx.x : shape.tiles;
    int           next_matrix = 0;
    int           next_unit   = warp_k;
    const char *  next_from   = rows_of(next_tile, 0) + next_unit * ring::row_bytes + from_byte;
    int           next_nrows  = nrows_of(next_tile);
    const auto    fetch       = [&](const uint32_t stage) {  // stage: its byte
        uint32_t * const to = (uint32_t *) ((char *) lane_tiles + stage);
        if constexpr (aligned) {
            if (ring::lanes == 32 || lane < ring::lanes) {
                const char * from = next_from;
                if (next_nrows == ITQ_MMA_ROWS) {
#pragma unroll
                    for (int i = 0; i < ITQ_MMA_ROWS; ++i) {
                        itq_copy_async<4>(to + ring::row(i), from);
                        from += shape.stride_row_x;
                    }
                } else {
#pragma unroll 1
                    for (int i = 0; i < next_nrows; ++i) {
                        itq_copy_async<4>(to + ring::row(i), from);
                        from += shape.stride_row_x;
                    }
                }
            }
            if constexpr (ring::row_words > ring::lanes) {
                static_assert(ring::row_words == 33, "a lane a row for the rest");
                if (lane < next_nrows) {
                    const char * from = next_from - from_byte + itq_mma_product(lane, shape.stride_row_x);
                    itq_copy_async<4>(to - lane + ring::row(lane) + 32, from + 4 * 32);
                }
            }
        } else if constexpr (by_block) {
            // Word `own` of those that hold block lane/block_lanes of the 256 weights; where there is one more than lanes, it
            // has a place of its own, and without all rows the first lane copies it too.
            constexpr int block_words = itq_block_words<type>;
            constexpr int tile_words  = ring::words / unit;
            constexpr int step        = per_256 * bs;
            const int     own         = lane % block_lanes;

            const auto last_word = [&](const int i, const int block, const int b) {
                const int place = is_64 ? ITQ_TILE_WORDS + block : block_lanes;
                return to - (lane_tiles - tiles) + b * tile_words + ring::row(i) + place;
            };
            if (own < block_words) {
                if (next_nrows == ITQ_MMA_ROWS && (next_unit + 1) * (unit * per_256) < shape.nblocks) {
                    // Blocks an odd number of halves apart do not begin at the same half of a word.
                    constexpr int starts = step % 4 == 0 ? 1 : unit;
                    const char *  from[2][starts];
#pragma unroll
                    for (int r = 0; r < 2; ++r) {
#pragma unroll
                        for (int b = 0; b < starts; ++b) {
                            from[r][b] = next_from + r * (uint64_t) shape.stride_row_x + b * step;
                            from[r][b] += 4 * own - ((uintptr_t) from[r][b] & 2);
                        }
                    }
#pragma unroll
                    for (int i = 0; i < ITQ_MMA_ROWS; ++i) {
#pragma unroll
                        for (int b = 0; b < unit; ++b) {
                            itq_copy_async<4>(to + b * tile_words + ring::row(i),
                                              from[i % 2][b % starts] + b / starts * step);
                        }
#pragma unroll
                        for (int b = 0; b < starts; ++b) {
                            from[i % 2][b] = itq_mma_anew(from[i % 2][b] + 2 * (uint64_t) shape.stride_row_x);
                        }
                    }
                    if constexpr (block_words > block_lanes) {
                        static_assert(ITQ_MMA_ROWS * per_256 * unit % 32 == 0, "all lanes copy as many words");
#pragma unroll
                        for (int k = 0; k < ITQ_MMA_ROWS * per_256 * unit / 32; ++k) {
                            const int    e     = 32 * k + lane;
                            const int    i     = e % ITQ_MMA_ROWS;
                            const int    block = e / ITQ_MMA_ROWS % per_256;
                            const int    b     = e / ITQ_MMA_ROWS / per_256;
                            const char * from =
                                next_from - from_byte + block * bs + b * step + itq_mma_product(i, shape.stride_row_x);
                            itq_copy_async<4>(last_word(i, block, b), from + 4 * block_lanes - ((uintptr_t) from & 2));
                        }
                    }
                } else {
                    // Blocks that are not there are 0: their activations are, but a scale may be no number.
                    const char * from = next_from;
                    const int    left = shape.nblocks * bs - next_unit * ring::row_bytes - from_byte;
#pragma unroll 1
                    for (int i = 0; i < next_nrows; ++i) {
#pragma unroll
                        for (int b = 0; b < unit; ++b) {
                            const char * const block = from + b * step;
#pragma unroll
                            for (int w = 0; w < block_words; w += block_lanes) {
                                if (w > 0 && own > 0) {
                                    break;
                                }
                                const int        at   = 4 * (own + w) - (int) ((uintptr_t) block & 2);
                                const int        rest = left - b * step - at;
                                uint32_t * const word =
                                    w == 0 ? to + b * tile_words + ring::row(i) : last_word(i, lane / block_lanes, b);
                                if (rest >= 4) {
                                    itq_copy_async<4>(word, block + at);
                                } else if (rest == 2) {
                                    itq_copy_async_half_word(word, block + at);
                                } else {
                                    *word = 0;
                                }
                            }
                        }
                        from += shape.stride_row_x;
                    }
                }
            }
        } else if (next_nrows == ITQ_MMA_ROWS && (next_unit + 1) * unit < shape.nblocks) {
            // From the word on in which a unit begins. A word that it ends in is whole, as the row goes on.
            constexpr int words = ring::row_words + 1;
            constexpr int lanes = words < 32 ? words : 32;
            if (lanes == 32 || lane < lanes) {
                const char * from[2] = { next_from, next_from + shape.stride_row_x };
#pragma unroll
                for (int r = 0; r < 2; ++r) {
                    from[r] += 4 * lane - ((uintptr_t) from[r] & 2);
                }
#pragma unroll
                for (int i = 0; i < ITQ_MMA_ROWS; ++i) {
                    itq_copy_async<4>(to + lane + ring::row(i), from[i % 2]);
                    from[i % 2] += 2 * (uint64_t) shape.stride_row_x;
                }
            }
            if constexpr (words > lanes) {
                static_assert(words == 34, "two lanes a row for the rest");
                const char * from = next_from + itq_mma_product(lane / 2, shape.stride_row_x);
                from -= (uintptr_t) from & 2;
                itq_copy_async<4>(to + ring::row(lane / 2) + 32 + lane % 2, from + 4 * (32 + lane % 2));
            }
        } else {
            constexpr int steps = (ring::row_words + 1 + 31) / 32;
            const int     bytes = min(unit, shape.nblocks - next_unit * unit) * bs;
            const char *  from  = next_from;
#pragma unroll 1
            for (int i = 0; i < next_nrows; ++i) {
                const int before = (uintptr_t) from & 2;
#pragma unroll
                for (int k = 0; k < steps; ++k) {
                    const int l    = lane + 32 * k;
                    const int rest = bytes + before - 4 * l;
                    if (rest >= 4) {
                        itq_copy_async<4>(to + ring::row(i) + l, from - before + 4 * l);
                    } else if (rest == 2) {
                        itq_copy_async_half_word(to + ring::row(i) + l, from - before + 4 * l);
                    }
                }
                from += shape.stride_row_x;
            }
        }
        next_unit += warps_k;
        next_from += warps_k * ring::row_bytes;
        if (next_unit >= nunits) {
            next_unit = warp_k;
            if (++next_matrix == nmatrices) {
                next_matrix = 0;
                next_tile += gridDim.x;
            }
            next_from  = rows_of(next_tile, next_matrix) + next_unit * ring::row_bytes + from_byte;
            next_nrows = nrows_of(next_tile);
        }
        itq_mma_commit(shape.stages);  // also past the end, so that groups count units
    };
#pragma unroll 1
    for (int i = 0; i < shape.stages - 1; ++i) {
        fetch(i * sizeof(uint32_t) * ring::words);
    }
    if constexpr (itq_mma_table_words<type> > 0) {
        itq_subset_entry * const table = (itq_subset_entry *) itq_mma_shared;
#pragma unroll 1
        for (int e = threadIdx.y * 32 + lane; e < 256; e += ITQ_MMA_WARPS * 32) {
            const itq_subset_entry entry = itq_make_subset_entry(e);
#pragma unroll
            for (int k = 0; k < ITQ_SUBSETS_COPIES; ++k) {  // each lane begins at another bank
                table[ITQ_SUBSETS_COPIES * e + (k + lane) % ITQ_SUBSETS_COPIES] = entry;
            }
        }
        __syncthreads();
    }
    if (!ids) {
        ggml_cuda_pdl_sync();  // the weights are on their way; the activations may still be quantized
    }

    const uint32_t channel_y = ids ? 0 : channel_dst;
    const uint32_t first     = ids ? fastmodulo(channel_dst, shape.nchannels_y) : 0;
    const char *   y = (const char *) vy + sample_dst * shape.stride_sample_y + channel_y * shape.stride_channel_y;
    const uint32_t stride_y = (uint32_t) itq_fragment_bytes(1) * (uint32_t) shape.ncols_y;
    const char *   scales   = itq_mma_opaque(is_64 ? y + (first + lane % 4 / 2) * sizeof(itq_fragment_scales) +
                                                         lane % 2 * sizeof(itq_fragment_scales_64)
                                                   : y + (first + 2 * (lane % 4)) * sizeof(itq_fragment_scales));
    // A kernel for this many groups of columns is only chosen when the first half of them is full.
    const int      last     = shape.ncols - 1;
    const char *   bytes    = itq_mma_opaque(y + shape.ncols_y * sizeof(itq_fragment_scales) +
                                             (first + min(lane / column_lanes, last)) * QK_K + 16 * (lane % 4));
    uint32_t       at_bytes[ngroups] = { 0 };
#pragma unroll
    for (int n = 1; n < ngroups; ++n) {
        at_bytes[n] = (min(itq_fragment_columns<type> * n + lane / column_lanes, last) - lane / column_lanes) * QK_K;
    }

    const uint32_t * const  row0 = tiles + ring::row(lane / 4);
    itq_fragment_lane<type> at(row0, row0 + ring::row(8), lane);
    if constexpr (itq_mma_table_words<type> > 0) {
        at.subsets = (const char *) itq_mma_shared;
    }
    const uint32_t last_stage                          = keep(sizeof(uint32_t) * (ring_words - ring::words));
    uint4          activations[itq_mma_quads(ngroups)] = {};
    uint32_t       stage                               = 0;  // bytes of the ring: read, and filled meanwhile
    uint32_t       fill                                = last_stage;
    int            buffer                              = 0;
    for (int tile = blockIdx.x; tile < shape.tiles; tile += gridDim.x) {
        for (int matrix = 0; matrix < nmatrices; ++matrix) {
            float sum[ngroups][itq_mma_sums<type>] = { { 0.0f } };

            if constexpr (by_block) {
                const int last = max(nrows_of(tile), 1) - 1;
                at.begin(rows_of(tile, matrix) + (uint32_t) min(lane / 4, last) * shape.stride_row_x +
                             (is_64 ? lane % 4 * bs : 0),
                         lane);
            } else if constexpr (!aligned) {
                const char * row  = rows_of(tile, matrix);
                const int    last = max(nrows_of(tile), 1) - 1;
#pragma unroll
                for (int r = 0; r < 2; ++r) {
                    at.x[r] = (uintptr_t) (row + (uint32_t) min(lane / 4 + 8 * r, last) * shape.stride_row_x) & 2;
                }
            }

#pragma unroll 1
            for (int u = warp_k; u < nunits; u += warps_k) {
                itq_copy_wait<ITQ_MMA_MAX_STAGES - 2>();
                ggml_cuda_syncwarp();  // all lanes have their copies, and are done with the stage that is filled next
                fetch(fill);
#pragma unroll blocks_at_a_time
                for (int b = 0; b < unit; ++b) {
                    const int ib = u * unit + b;
                    if (aligned || b == 0 || ib * per_256 < shape.nblocks) {
                        const uint64_t from = itq_mma_product(ib, stride_y);
                        itq_mma_block<type, ngroups>(at, stage, b,
                                                     (const itq_fragment_scales_of<type> *) (scales + from),
                                                     bytes + from, at_bytes, activations, sum);
                    }
                }
                fill  = stage;
                stage = stage == last_stage ? 0 : stage + sizeof(uint32_t) * ring::words;
            }

            // [buffer][matrix][warp][row][column]
            float * mine = sums + ((buffer * nmatrices + matrix) * ITQ_MMA_WARPS + itq_mma_anew(threadIdx.y)) *
                                      (ITQ_MMA_ROWS * columns);
#pragma unroll
            for (int n = 0; n < ngroups; ++n) {
#pragma unroll
                for (int r = 0; r < 2; ++r) {
                    // Parts of levels of three bits are of their doubles.
                    constexpr float half = itq_mma_in_parts<type, ngroups> && itq_mma_bits<type> == 3 ? 0.5f : 1.0f;
                    float * const   row  = mine + (lane / 4 + 8 * r) * columns;
                    if constexpr (is_64) {
                        row[4 * n + lane % 4] = half * sum[n][r];
                    } else {
                        *((float2 *) (row + 8 * n + 2 * (lane % 4))) =
                            make_float2(half * sum[n][2 * r], half * sum[n][2 * r + 1]);
                    }
                }
            }
        }
        __syncthreads();

        const float * all    = sums + buffer * nmatrices * (ITQ_MMA_WARPS * ITQ_MMA_ROWS * columns);
        const int     shares = itq_mma_anew(warps_k);
#pragma unroll 1
        for (int o = itq_mma_anew(threadIdx.y * 32 + lane); o < shape.ncols << log2_rows; o += ITQ_MMA_WARPS * 32) {
            const int j   = o >> log2_rows;
            const int i   = o - (j << log2_rows);
            const int row = (tile << log2_rows) + i;
            if (row >= shape.nrows) {
                continue;
            }
            // Row i is in the shares of warps_k warps.
            const float * share =
                all + ((i / ITQ_MMA_ROWS << shape.log2_warps_k) * ITQ_MMA_ROWS + i % ITQ_MMA_ROWS) * columns +
                parts * j;
            float result = 0.0f;
            for (int k = 0; k < shares; ++k) {
                result += itq_mma_sum_of<parts>(share + k * (ITQ_MMA_ROWS * columns));
            }
            if constexpr (has_fusion) {
                const int64_t i_bias = (ids ? channel_x : channel_dst) * shape.stride_channel_dst + row +
                                       (ids ? 0 : sample_dst * shape.stride_sample_dst);
                if (fusion.x_bias) {
                    result += ((const float *) fusion.x_bias)[i_bias];
                }
                if (use_gate) {
                    float gate = 0.0f;
                    for (int k = 0; k < shares; ++k) {
                        gate += itq_mma_sum_of<parts>(share + (ITQ_MMA_WARPS + k) * (ITQ_MMA_ROWS * columns));
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
    itq_copy_wait<0>();
}

// Matrix product for ITQ3_S as the ITQ3_S paper describes it (its Algorithm 2): the weights are rotated back while they
// are loaded into shared memory, and the tensor cores multiply F16 weights by F16 activations.
//
// For comparison with mul_mat_q, which rotates the activations instead (docs/cuda.md): here every weight is transformed
// once per tile of columns, there every activation once per product.

#pragma once

#include "itq-copy.cuh"
#include "itq-dequantize.cuh"
#include "mma.cuh"

#define ITQ_FUSED_ROWS  128  // rows of a tile
#define ITQ_FUSED_WARPS 8

// Words of shared memory. Rows of 32-bit words that ldmatrix reads, 16 bytes from each of 8 rows at a time, start 16
// bytes apart modulo 128 or 80 bytes apart, so that they spread over all banks.
#define ITQ_FUSED_STRIDE_X (ITQ_BLOCK / 2 + 4)        // a row of decoded weights, two to a word
#define ITQ_FUSED_CHUNK    32                         // activations of a column that are loaded at a time
#define ITQ_FUSED_STRIDE_Y (ITQ_FUSED_CHUNK / 2 + 4)  // a column of them, two to a word
#define ITQ_FUSED_CHUNKS   (ITQ_BLOCK / ITQ_FUSED_CHUNK)

// Bytes of shared memory of a tile of J columns: decoded weights, two chunks of activations, blocks as they are.
static constexpr __host__ __device__ int itq_fused_shared_bytes(const int J) {
    return 4 * (ITQ_FUSED_ROWS * ITQ_FUSED_STRIDE_X + 2 * J * ITQ_FUSED_STRIDE_Y + ITQ_FUSED_ROWS * ITQ_WORDS);
}

// Each warp has rows of its own among those of the tile.
#define ITQ_FUSED_WARP_ROWS (ITQ_FUSED_ROWS / ITQ_FUSED_WARPS)

// The warp's blocks to raw. x: the blocks of row 0 of the matrix at the place that is loaded. Rows past the end repeat
// the last one, nothing is written back from those.
static __device__ __forceinline__ void itq_fused_copy_blocks(uint32_t * raw, const uint32_t * x, const int row0,
                                                             const int nrows, const int64_t stride_row) {
    if (threadIdx.x < ITQ_WORDS) {
#pragma unroll 4
        for (int r = 0; r < ITQ_FUSED_WARP_ROWS; ++r) {
            const int row = min(row0 + r, nrows - 1);
            itq_copy_async<4>(raw + r * ITQ_WORDS + threadIdx.x, x + row * stride_row * ITQ_WORDS + threadIdx.x);
        }
    }
}

// The warp's blocks in raw to weights in tile_x: decoded, rotated back and scaled as the numbers that dequantize gives.
static __device__ __forceinline__ void itq_fused_load_tile(half2 * tile_x, const uint32_t * raw) {
#pragma unroll 4
    for (int r = 0; r < ITQ_FUSED_WARP_ROWS; ++r) {
        half * row = (half *) __builtin_assume_aligned(tile_x + r * ITQ_FUSED_STRIDE_X, 16);
        dequantize_itq3_s<half>(raw, r, row, threadIdx.x);
    }
}

// A chunk of J columns to tile_y, y: column 0 at the place that is loaded. Columns past the end repeat the last one.
template <int J>
static __device__ __forceinline__ void itq_fused_copy_chunk(half2 * tile_y, const half * y, const int column0,
                                                            const int ncolumns, const int64_t stride_column) {
    constexpr int pieces = ITQ_FUSED_CHUNK / 8;  // of 16 bytes, in a column
    const int     tid    = threadIdx.y * 32 + threadIdx.x;
#pragma unroll
    for (int p0 = 0; p0 < J * pieces; p0 += ITQ_FUSED_WARPS * 32) {
        const int p = p0 + tid;
        if (J * pieces % (ITQ_FUSED_WARPS * 32) != 0 && p >= J * pieces) {
            break;
        }
        const int column = min(column0 + p / pieces, ncolumns - 1);
        itq_copy_async<16>(tile_y + p / pieces * ITQ_FUSED_STRIDE_Y + p % pieces * 4,
                           y + column * stride_column + p % pieces * 8);
    }
}

// A tile of 128 rows and J columns of dst. Grid: (row tiles, column tiles, channels and samples); block: (32, warps).
// Strides of x in blocks, of y and dst in elements; y is contiguous halfs, columns start at multiples of 16 bytes.
template <int J>
__launch_bounds__(ITQ_FUSED_WARPS * 32, 2) static __global__ void
mul_mat_itq3_s_fused(const void * vx, const half * y, float * dst, const int nblocks, const int nrows,
                     const int ncolumns, const int64_t stride_row_x, const int64_t stride_column_y,
                     const int64_t stride_column_dst, const uint3 nchannels, const uint3 channel_ratio,
                     const int64_t stride_channel_x, const int64_t stride_channel_y, const int64_t stride_channel_dst,
                     const uint3 sample_ratio, const int64_t stride_sample_x, const int64_t stride_sample_y,
                     const int64_t stride_sample_dst) {
#ifdef AMPERE_MMA_AVAILABLE
    using namespace ggml_cuda_mma;
    typedef tile<16, 8, half2> tile_A;
    typedef tile<8, 8, half2>  tile_B;
    typedef tile<16, 8, float> tile_C;

    // A warp multiplies 32 columns by as many rows as make 8 such rectangles of the tile.
    constexpr int warp_columns = 32;
    constexpr int warps_across = J / warp_columns;
    constexpr int warp_rows    = ITQ_FUSED_ROWS / (ITQ_FUSED_WARPS / warps_across);
    constexpr int nA           = warp_rows / tile_A::I;
    constexpr int nB           = warp_columns / tile_B::I;
    static_assert(J % warp_columns == 0 && ITQ_FUSED_WARPS % warps_across == 0, "wrong shape");
    static_assert(ITQ_FUSED_CHUNK % (2 * tile_A::J) == 0, "wrong shape");

    extern __shared__ uint4 itq_fused_shared[];
    half2 *                 tile_x  = (half2 *) itq_fused_shared;
    half2 *                 tile_y  = tile_x + ITQ_FUSED_ROWS * ITQ_FUSED_STRIDE_X;
    constexpr int           ystage  = J * ITQ_FUSED_STRIDE_Y;
    uint32_t *              raw_all = (uint32_t *) (tile_y + 2 * ystage);

    ggml_cuda_pdl_sync();
    const uint2 sample_channel = fast_div_modulo(blockIdx.z, nchannels);
    const int   sample         = sample_channel.x;
    const int   channel        = sample_channel.y;
    const int   row_tile       = blockIdx.x * ITQ_FUSED_ROWS;
    const int   column_tile    = blockIdx.y * J;

    const uint32_t * x = (const uint32_t *) vx + ITQ_WORDS * (fastdiv(sample, sample_ratio) * stride_sample_x +
                                                              fastdiv(channel, channel_ratio) * stride_channel_x);
    y += sample * stride_sample_y + channel * stride_channel_y;
    dst += sample * stride_sample_dst + channel * stride_channel_dst;

    const int  first_row  = threadIdx.y * ITQ_FUSED_WARP_ROWS;  // of those that this warp loads
    half2 *    own_tile_x = tile_x + first_row * ITQ_FUSED_STRIDE_X;
    uint32_t * raw        = raw_all + first_row * ITQ_WORDS;
    const int  i0         = threadIdx.y / warps_across * warp_rows;
    const int  j0         = threadIdx.y % warps_across * warp_columns;

    tile_C C[nA][nB];

    itq_fused_copy_blocks(raw, x, row_tile + first_row, nrows, stride_row_x);
    itq_fused_copy_chunk<J>(tile_y, y, column_tile, ncolumns, stride_column_y);
    itq_copy_commit();

    for (int kb = 0; kb < nblocks; ++kb) {
#    pragma unroll 1
        for (int c = 0; c < ITQ_FUSED_CHUNKS; ++c) {
            // This chunk is there, and the one before it, with the weights if it was the last of a block, is used up.
            itq_copy_wait<0>();
            __syncthreads();
            if (c == 0) {
                itq_fused_load_tile(own_tile_x, raw);
                ggml_cuda_syncwarp();  // all lanes have read raw
                if (kb + 1 < nblocks) {
                    itq_fused_copy_blocks(raw, x + (kb + 1) * ITQ_WORDS, row_tile + first_row, nrows, stride_row_x);
                }
                __syncthreads();
            }
            const int k = kb * ITQ_BLOCK + c * ITQ_FUSED_CHUNK;
            if (k + ITQ_FUSED_CHUNK < nblocks * ITQ_BLOCK) {
                itq_fused_copy_chunk<J>(tile_y + (c + 1) % 2 * ystage, y + k + ITQ_FUSED_CHUNK, column_tile, ncolumns,
                                        stride_column_y);
            }
            itq_copy_commit();

            const half2 * ty = tile_y + c % 2 * ystage;
#    pragma unroll
            for (int k0 = 0; k0 < ITQ_FUSED_CHUNK / 2; k0 += tile_A::J) {
                tile_A A[nA];
#    pragma unroll
                for (int a = 0; a < nA; ++a) {
                    load_ldmatrix(A[a],
                                  tile_x + (i0 + a * tile_A::I) * ITQ_FUSED_STRIDE_X + c * ITQ_FUSED_CHUNK / 2 + k0,
                                  ITQ_FUSED_STRIDE_X);
                }
#    pragma unroll
                for (int b = 0; b < nB; ++b) {
                    tile_B B;
                    load_ldmatrix(B, ty + (j0 + b * tile_B::I) * ITQ_FUSED_STRIDE_Y + k0, ITQ_FUSED_STRIDE_Y);
#    pragma unroll
                    for (int a = 0; a < nA; ++a) {
                        mma(C[a][b], A[a], B);
                    }
                }
            }
        }
    }

#    pragma unroll
    for (int a = 0; a < nA; ++a) {
#    pragma unroll
        for (int b = 0; b < nB; ++b) {
#    pragma unroll
            for (int l = 0; l < tile_C::ne; ++l) {
                const int row    = row_tile + i0 + a * tile_C::I + tile_C::get_i(l);
                const int column = column_tile + j0 + b * tile_C::J + tile_C::get_j(l);
                if (row < nrows && column < ncolumns) {
                    dst[column * stride_column_dst + row] = C[a][b].x[l];
                }
            }
        }
    }
#else
    GGML_UNUSED_VARS(vx, y, dst, nblocks, nrows, ncolumns, stride_row_x, stride_column_y, stride_column_dst, nchannels,
                     channel_ratio, stride_channel_x, stride_channel_y, stride_channel_dst, sample_ratio,
                     stride_sample_x, stride_sample_y, stride_sample_dst);
    NO_DEVICE_CODE;
#endif  // AMPERE_MMA_AVAILABLE
}

// Sizes and strides of a product: x in blocks, y and dst in elements.
struct itq_fused_args {
    int64_t nblocks, nrows, ncolumns;
    int64_t stride_row_x, stride_column_y, stride_column_dst;
    int64_t nchannels_x, nchannels, stride_channel_x, stride_channel_y, stride_channel_dst;
    int64_t nsamples_x, nsamples, stride_sample_x, stride_sample_y, stride_sample_dst;
};

// The kernel with tiles of the width that suits the number of columns. It is there whether or not the build option is
// set.
void ggml_cuda_itq_fused(const void * x, const half * y, float * dst, const itq_fused_args & args, cudaStream_t stream);

// Launchers for convert.cu: trellis types, TQ1_0 and TQ2_0 to F32, F16 and BF16, contiguous and not; and for getrows.cu those
// with blocks of 64.

#pragma once

#include "itq-dequantize.cuh"

#include <algorithm>
#include <limits>

// CUDA blocks for a row.
static int64_t dequantize_num_blocks(const int64_t ne00) {
    constexpr int64_t values = ITQ_DEQUANTIZE_WARPS * ITQ_BLOCK;
    return (ne00 + values - 1) / values;
}

template <int length, typename dst_t, dequantize_kq_t<dst_t> dequantize>
static void dequantize_rows_cuda(const void * vx, dst_t * y, const int64_t ne00, const int64_t ne01, const int64_t ne02,
                                 const int64_t ne03, const int64_t s01, const int64_t s02, const int64_t s03,
                                 cudaStream_t stream) {
    GGML_ASSERT(ne00 % length == 0);
    const int64_t nblocks = ne00 / length;
    const int64_t ne0203  = ne02 * ne03;
    const dim3    num_blocks(dequantize_num_blocks(ne00), (int) std::min(ne01, (int64_t) 65535),
                             (int) std::min(ne0203, (int64_t) 65535));
    const dim3    block_size(ITQ_WARP_LANES, ITQ_DEQUANTIZE_WARPS, 1);
    const uint3   ne02_fastdiv = init_fastdiv_values(ne02);
    if constexpr (length == 256) {
        dequantize_rows_256<dst_t, dequantize>
            <<<num_blocks, block_size, 0, stream>>>(vx, y, nblocks, ne01, ne0203, ne02_fastdiv, s01, s02, s03);
    } else {
        static_assert(length == 64, "no kernel for such blocks");
        dequantize_rows_64<dst_t, dequantize>
            <<<num_blocks, block_size, 0, stream>>>(vx, y, nblocks, ne01, ne0203, ne02_fastdiv, s01, s02, s03);
    }
    CUDA_CHECK(cudaGetLastError());
}

// In the place of upstream's get_rows_cuda_kq; arguments are that function's.
template <typename dst_t, dequantize_kq_t<dst_t> dequantize>
static void get_rows_64_cuda(const void * src0_d, const int32_t * src1_d, dst_t * dst_d, const int64_t ne00,
                             const size_t nb01, const size_t nb02, const size_t nb03, const int64_t ne10,
                             const int64_t ne11, const int64_t ne12, const size_t nb10, const size_t nb11,
                             const size_t nb12, const size_t nb1, const size_t nb2, const size_t nb3,
                             cudaStream_t stream) {
    GGML_ASSERT(ne00 % 64 == 0);
    GGML_ASSERT(ne12 > 0);
    GGML_ASSERT(ne11 <= std::numeric_limits<uint32_t>::max() / ne12);
    const dim3 num_blocks(ne10, (int) std::min(dequantize_num_blocks(ne00), (int64_t) 65535),
                          (int) std::min(ne11 * ne12, (int64_t) 65535));
    const dim3 block_size(ITQ_WARP_LANES, ITQ_DEQUANTIZE_WARPS, 1);
    get_rows_64<dst_t, dequantize><<<num_blocks, block_size, 0, stream>>>(
        src0_d, src1_d, dst_d, ne00 / 64, ne11, init_fastdiv_values(ne12), nb1 / sizeof(dst_t), nb2 / sizeof(dst_t),
        nb3 / sizeof(dst_t), nb01, nb02, nb03, nb10 / sizeof(int32_t), nb11 / sizeof(int32_t), nb12 / sizeof(int32_t));
    CUDA_CHECK(cudaGetLastError());
}

// One conversion for a type and a result type, in the two forms that convert.cu hands out.
#define ITQ_CONVERT(name, length)                                                                                   \
    template <typename dst_t>                                                                                       \
    static void dequantize_##name##_nc_cuda(const void * vx, dst_t * y, const int64_t ne00, const int64_t ne01,     \
                                            const int64_t ne02, const int64_t ne03, const int64_t s01,              \
                                            const int64_t s02, const int64_t s03, cudaStream_t stream) {            \
        dequantize_rows_cuda<length, dst_t, dequantize_##name<dst_t>>(vx, y, ne00, ne01, ne02, ne03, s01, s02, s03, \
                                                                      stream);                                      \
    }                                                                                                               \
    template <typename dst_t>                                                                                       \
    static void dequantize_row_##name##_cuda(const void * vx, dst_t * y, const int64_t k, cudaStream_t stream) {    \
        dequantize_##name##_nc_cuda(vx, y, k, 1, 1, 1, 0, 0, 0, stream);                                            \
    }

#define ITQ_CONVERT_OF_TYPE(NAME, name, bits, n_levels, length, ...) ITQ_CONVERT(name, length)
ITQ_TYPES(ITQ_CONVERT_OF_TYPE)
ITQ_CONVERT(tq1_0, QK_K)
ITQ_CONVERT(tq2_0, QK_K)

#undef ITQ_CONVERT_OF_TYPE
#undef ITQ_CONVERT

// Cases of convert.cu, and of getrows.cu with the names of its arguments.
#define ITQ_CUDA_CONVERT_ROW(NAME, name, ...) \
    case GGML_TYPE_##NAME:                    \
        return dequantize_row_##name##_cuda;
#define ITQ_CUDA_CONVERT_NC(NAME, name, ...) \
    case GGML_TYPE_##NAME:                   \
        return dequantize_##name##_nc_cuda;
#define ITQ_CUDA_GET_ROWS(NAME, function)                                                                          \
    case GGML_TYPE_##NAME:                                                                                         \
        function(src0_d, src1_d, dst_d, ne00, nb01, nb02, nb03, ne10, ne11, ne12, nb10, nb11, nb12, nb1, nb2, nb3, \
                 stream);                                                                                          \
        break;
#define ITQ_CUDA_GET_ROWS_256(NAME, name, ...) \
    ITQ_CUDA_GET_ROWS(NAME, (get_rows_cuda_kq<32, dst_t, dequantize_##name<dst_t>>) )
#define ITQ_CUDA_GET_ROWS_64(NAME, name, ...) \
    ITQ_CUDA_GET_ROWS(NAME, (get_rows_64_cuda<dst_t, dequantize_##name<dst_t>>) )
#define ITQ_CUDA_GET_ROWS_CASES          \
    ITQ_TYPES_256(ITQ_CUDA_GET_ROWS_256) \
    ITQ_TYPES_64(ITQ_CUDA_GET_ROWS_64) ITQ_CUDA_GET_ROWS_256(TQ1_0, tq1_0) ITQ_CUDA_GET_ROWS_256(TQ2_0, tq2_0)

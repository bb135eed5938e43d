// Launchers for convert.cu: trellis types, TQ1_0 and TQ2_0 to F32, F16 and BF16, contiguous and not.

#pragma once

#include "itq-dequantize.cuh"

template <typename dst_t, dequantize_kq_t<dst_t> dequantize>
static void dequantize_rows_256_cuda(const void * vx, dst_t * y, const int64_t ne00, const int64_t ne01,
                                     const int64_t ne02, const int64_t ne03, const int64_t s01, const int64_t s02,
                                     const int64_t s03, cudaStream_t stream) {
    GGML_ASSERT(ne00 % ITQ_BLOCK == 0);
    const int64_t nblocks = ne00 / ITQ_BLOCK;
    const int64_t ne0203  = ne02 * ne03;
    const dim3    num_blocks((nblocks + ITQ_DEQUANTIZE_WARPS - 1) / ITQ_DEQUANTIZE_WARPS,
                             (int) std::min(ne01, (int64_t) 65535), (int) std::min(ne0203, (int64_t) 65535));
    const dim3    block_size(ITQ_WARP_LANES, ITQ_DEQUANTIZE_WARPS, 1);
    dequantize_rows_256<dst_t, dequantize>
        <<<num_blocks, block_size, 0, stream>>>(vx, y, nblocks, ne01, ne0203, init_fastdiv_values(ne02), s01, s02, s03);
}

// One conversion for a type and a result type, in the two forms that convert.cu hands out.
#define ITQ_CONVERT(name)                                                                                        \
    template <typename dst_t>                                                                                    \
    static void dequantize_##name##_nc_cuda(const void * vx, dst_t * y, const int64_t ne00, const int64_t ne01,  \
                                            const int64_t ne02, const int64_t ne03, const int64_t s01,           \
                                            const int64_t s02, const int64_t s03, cudaStream_t stream) {         \
        dequantize_rows_256_cuda<dst_t, dequantize_##name<dst_t>>(vx, y, ne00, ne01, ne02, ne03, s01, s02, s03,  \
                                                                  stream);                                       \
    }                                                                                                            \
    template <typename dst_t>                                                                                    \
    static void dequantize_row_##name##_cuda(const void * vx, dst_t * y, const int64_t k, cudaStream_t stream) { \
        dequantize_##name##_nc_cuda(vx, y, k, 1, 1, 1, 0, 0, 0, stream);                                         \
    }

#define ITQ_CONVERT_OF_TYPE(NAME, name, ...) ITQ_CONVERT(name)
ITQ_TYPES(ITQ_CONVERT_OF_TYPE)
ITQ_CONVERT(tq1_0)
ITQ_CONVERT(tq2_0)

#undef ITQ_CONVERT_OF_TYPE
#undef ITQ_CONVERT

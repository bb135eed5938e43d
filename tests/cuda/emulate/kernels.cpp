// Conversions, tiles of MMQ and the functions of upstream's MMVQ behind a C interface.

#include "common.cuh"
#include "mmq.cuh"

#include "itq3s-convert.cuh"
#include "itq3s-mmq.cuh"
#include "itq3s-vecdot.cuh"

// type: 0 ITQ3_S, 1 TQ1_0, 2 TQ2_0. dst: 0 float, 1 half, 2 bfloat16.
template <typename dst_t>
static void dequantize(const int type, const void * x, void * y, const int64_t * ne, const int64_t * s) {
    const auto convert = type == 0   ? dequantize_itq3_s_nc_cuda<dst_t>
                         : type == 1 ? dequantize_tq1_0_nc_cuda<dst_t>
                                     : dequantize_tq2_0_nc_cuda<dst_t>;
    convert(x, (dst_t *) y, ne[0], ne[1], ne[2], ne[3], s[0], s[1], s[2], nullptr);
}
extern "C" void emulate_dequantize(const int type, const int dst, const void * x, void * y, const int64_t * ne,
                                   const int64_t * s) {
    switch (dst) {
        case 0:
            dequantize<float>(type, x, y, ne, s);
            break;
        case 1:
            dequantize<half>(type, x, y, ne, s);
            break;
        case 2:
            dequantize<nv_bfloat16>(type, x, y, ne, s);
            break;
        default:
            abort();
    }
}

// A row of weights times activations as MMVQ splits it over lanes: the lanes' sums are added.
extern "C" float emulate_vec_dot(const int type, const void * x, const void * y, const int nblocks, const int kbx0) {
    const auto vec_dot = type == 0 ? vec_dot_itq3_s_q8_1 : type == 1 ? vec_dot_tq1_0_q8_1 : vec_dot_tq2_0_q8_1;
    float      sum     = 0.0f;
    for (int kbx = 0; kbx < nblocks; ++kbx) {
        for (int iqs = 0; iqs < 16; iqs += VDR_ITQ3_S_Q8_1_MMVQ) {
            sum += vec_dot(x, (const block_q8_1 *) y + kbx * (QK_K / QK8_1), kbx0 + kbx, iqs);
        }
    }
    return sum;
}

// A tile of rows (i_max + 1 of them there) times J columns over nblocks blocks of 256, as mul_mat_q goes about it.
// y: block_q8_1_mmq, 128 values of all columns side by side. out: J x rows.
template <ggml_type type, int J, bool fallback>
static void mmq_tile(const char * x, const int * y, float * out, const int kbx0, const int i_max, const int stride,
                     const int nblocks) {
    constexpr int I                = EMULATE_MMQ_ROWS;
    int *         shared           = emulate::dynamic_shared<int>();
    int *         tile_y           = shared;
    int *         tile_x           = shared + J * MMQ_TILE_Y_K;
    float         sum[J * I / 256] = { 0.0f };
    for (int kb = 0; kb < nblocks; ++kb) {
        if constexpr (type == GGML_TYPE_ITQ3_S) {
            ggml_cuda_mmq_load_tiles_itq3_s<type, J, fallback>(x, tile_x, kbx0 + kb, i_max, stride);
        } else if constexpr (type == GGML_TYPE_TQ1_0) {
            ggml_cuda_mmq_load_tiles_tq1_0<type, J, fallback>(x, tile_x, kbx0 + kb, i_max, stride);
        } else {
            ggml_cuda_mmq_load_tiles_tq2_0<type, J, fallback>(x, tile_x, kbx0 + kb, i_max, stride);
        }
        for (int half_block = 0; half_block < 2; ++half_block) {
            for (int l = threadIdx.y * 32 + threadIdx.x; l < J * MMQ_TILE_Y_K; l += 256) {
                tile_y[l] = y[(2 * kb + half_block) * J * MMQ_TILE_Y_K + l];
            }
            __syncthreads();
#ifdef TURING_MMA_AVAILABLE
            if constexpr (type == GGML_TYPE_ITQ3_S) {
                ggml_cuda_mmq_vec_dot_itq3_s_q8_1_mma<type, J, fallback>(tile_x, tile_y, sum,
                                                                         half_block * MMQ_TILE_NE_K);
            } else {
                ggml_cuda_mmq_vec_dot_tq_q8_1_mma<type, J, fallback>(tile_x, tile_y, sum, half_block * MMQ_TILE_NE_K);
            }
#else
            if constexpr (type == GGML_TYPE_ITQ3_S) {
                ggml_cuda_mmq_vec_dot_itq3_s_q8_1_dp4a<type, J, fallback>(tile_x, tile_y, sum,
                                                                          half_block * MMQ_TILE_NE_K);
            } else {
                ggml_cuda_mmq_vec_dot_q8_0_q8_1_dp4a<type, J, fallback>(tile_x, tile_y, sum,
                                                                        half_block * MMQ_TILE_NE_K);
            }
#endif
            __syncthreads();
        }
    }
    emulate_for_each_output<type, J, fallback>(
        [&](const int index, const int i, const int j) { out[j * I + i] = sum[index]; });
}
template <ggml_type type, int J, bool fallback> struct mmq_launch {
    static void run(const char * x, const int * y, float * out, const int kbx0, const int i_max, const int stride,
                    const int nblocks) {
        constexpr int I = EMULATE_MMQ_ROWS;
#ifdef TURING_MMA_AVAILABLE
        constexpr int tile_words = I * ggml_cuda_mmq_get_sram_stride(type, J, fallback);
#else
        constexpr tile_x_sizes sizes      = mmq_get_dp4a_tile_x_sizes(GGML_TYPE_Q8_0, I);
        constexpr int          tile_words = sizes.qs + sizes.dm;
#endif
        emulate::launch_shared(dim3(1), dim3(32, 8), (J * MMQ_TILE_Y_K + tile_words) * sizeof(int),
                               mmq_tile<type, J, fallback>, x, y, out, kbx0, i_max, stride, nblocks);
    }
};
// The widths that upstream has tiles for.
template <ggml_type type, typename... args_t> static void mmq(const int J, const bool fallback, args_t... args) {
#define EMULATE_MMQ(width, fallback_)                            \
    if (J == width && fallback == fallback_) {                   \
        return mmq_launch<type, width, fallback_>::run(args...); \
    }
    EMULATE_MMQ(8, true)
    EMULATE_MMQ(16, true)
    EMULATE_MMQ(32, true)
    EMULATE_MMQ(64, true)
    EMULATE_MMQ(8, false)
    EMULATE_MMQ(16, false)
    EMULATE_MMQ(24, false)
    EMULATE_MMQ(32, false)
    EMULATE_MMQ(40, false)
    EMULATE_MMQ(48, false)
    EMULATE_MMQ(64, false)
#if EMULATE_MMQ_ROWS == 128
    EMULATE_MMQ(128, true)
    EMULATE_MMQ(80, false)
    EMULATE_MMQ(96, false)
    EMULATE_MMQ(112, false)
    EMULATE_MMQ(128, false)
#endif
#undef EMULATE_MMQ
    emulate::fail("a tile that upstream does not have");
}
extern "C" void emulate_mmq(const int type, const int J, const int fallback, const char * x, const int * y, float * out,
                            const int kbx0, const int i_max, const int stride, const int nblocks) {
    switch (type) {
        case 0:
            mmq<GGML_TYPE_ITQ3_S>(J, fallback, x, y, out, kbx0, i_max, stride, nblocks);
            break;
        case 1:
            mmq<GGML_TYPE_TQ1_0>(J, fallback, x, y, out, kbx0, i_max, stride, nblocks);
            break;
        case 2:
            mmq<GGML_TYPE_TQ2_0>(J, fallback, x, y, out, kbx0, i_max, stride, nblocks);
            break;
        default:
            abort();
    }
}

// Levels of a block, decoded by the two paths of itq3s-decode.cuh: halves (t from decoded order) and eights.
extern "C" void emulate_levels(const uint8_t * block, const int z, int8_t * by_half, int8_t * by_eight) {
    uint32_t w[ITQ3_S_WORDS];
    memcpy(w, block, sizeof(w));
    int8_t decoded[256];
    for (int j = 0; j < 2; ++j) {
        uint32_t sym[2][4];
        itq3_s_transpose_symbols(w + ITQ3_S_WORD_QS + 8 * j, sym);
        for (int g = 0; g < 4; ++g) {
            const int k = 2 * g + j;
            uint32_t  c1, c0, even, odd;
            itq3_s_subset_planes(w[ITQ3_S_WORD_SEL + k], k == 0 ? 0 : w[ITQ3_S_WORD_SEL + k - 1], c1, c0);
            itq3_s_subset_pairs(c1, c0, even, odd);
            for (int i = 0; i < 4; ++i) {
                const uint32_t index    = itq3_s_index_nibbles(sym, even, odd, g, i);
                const uint32_t level[2] = { itq3_s_levels_minus(index, z), itq3_s_levels_minus(index >> 16, z) };
                memcpy(decoded + 128 * j + 32 * g + 8 * i, level, 8);
                // The split form must add up to the same.
                for (int n = 0; n < 8; ++n) {
                    const uint32_t nibbles  = index >> 16 * (n / 4);
                    const int8_t   negative = itq3_s_levels_negative(nibbles) >> 8 * (n % 4);
                    const int8_t   positive = itq3_s_levels_positive(nibbles ^ 0x8888) >> 8 * (n % 4);
                    if (negative + positive - z != decoded[128 * j + 32 * g + 8 * i + n]) {
                        emulate::fail("the two look-ups differ");
                    }
                }
            }
        }
    }
    for (int t = 0; t < 256; ++t) {
        by_half[t] = decoded[itq3_s_decoded_offset(t)];
    }
    const uint8_t * sel = block + 4 * ITQ3_S_WORD_SEL;
    for (int m = 0; m < 32; ++m) {
        const uint32_t index = itq3_s_index_nibbles_8(w[2 * (m % 8)], w[2 * (m % 8) + 1], m / 8,
                                                      (uint32_t) sel[m] << 8 | (m == 0 ? 0 : sel[m - 1]));
        for (int r = 0; r < 8; ++r) {
            const int nibble    = r < 4 ? 2 * r : 2 * r - 7;
            by_eight[8 * m + r] = itq3_s_levels_minus(index >> 16 * (nibble / 4), z) >> 8 * (nibble % 4);
        }
    }
}

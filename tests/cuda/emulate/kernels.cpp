// Conversions, decoders and the functions of upstream's MMVQ behind a C interface.

#include "common.cuh"
#include "convert.cuh"
#include "device.h"
#include "itq-convert.cuh"
#include "itq-vecdot.cuh"

#define FUNCTION_OF_TYPE(NAME, name, ...) \
    case GGML_TYPE_##NAME:                \
        return OF_TYPE(NAME, name);

// dst: 0 float, 1 half, 2 bfloat16.
template <typename dst_t> static auto conversion(const ggml_type type) -> decltype(&dequantize_tq1_0_nc_cuda<dst_t>) {
#define OF_TYPE(NAME, name) dequantize_##name##_nc_cuda<dst_t>
    switch (type) {
        ITQ_TYPES(FUNCTION_OF_TYPE)
        FUNCTION_OF_TYPE(TQ1_0, tq1_0)
        FUNCTION_OF_TYPE(TQ2_0, tq2_0)
        default:
            abort();
    }
#undef OF_TYPE
}
template <typename dst_t>
static void dequantize(const int type, const void * x, void * y, const int64_t * ne, const int64_t * s) {
    conversion<dst_t>(emulate_types[type])(x, (dst_t *) y, ne[0], ne[1], ne[2], ne[3], s[0], s[1], s[2], nullptr);
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

// Rows of types with blocks of 64 by their numbers, to float. ne: of a row, then of the numbers; nb: strides in bytes, of the
// rows, of the numbers and of the result.
extern "C" void emulate_get_rows(const int type, const void * x, const int32_t * ids, float * y, const int64_t * ne,
                                 const int64_t * nb) {
#define GET_ROWS(NAME, name, ...)                                                                                     \
    case GGML_TYPE_##NAME:                                                                                            \
        get_rows_64_cuda<float, dequantize_##name<float>>(x, ids, y, ne[0], nb[0], nb[1], nb[2], ne[1], ne[2], ne[3], \
                                                          nb[3], nb[4], nb[5], nb[6], nb[7], nb[8], nullptr);         \
        break;
    switch (emulate_types[type]) {
        ITQ_TYPES_64(GET_ROWS)
        default:
            abort();
    }
}

static auto vec_dot_of(const ggml_type type) -> decltype(&vec_dot_tq1_0_q8_1) {
    switch (type) {
#define OF_TYPE(NAME, name) vec_dot_##name##_q8_1
        FUNCTION_OF_TYPE(TQ1_0, tq1_0)
        FUNCTION_OF_TYPE(TQ2_0, tq2_0)
#undef OF_TYPE
#define OF_TYPE(NAME, name) vec_dot_itq_s_q8_1<GGML_TYPE_##NAME>
        ITQ_TYPES_256(FUNCTION_OF_TYPE)
#undef OF_TYPE
#define OF_TYPE(NAME, name) vec_dot_itq_n_q8_1<GGML_TYPE_##NAME>
        ITQ_TYPES_64(FUNCTION_OF_TYPE)
#undef OF_TYPE
        default:
            abort();
    }
}

// A row of weights times activations as MMVQ splits it over lanes: the lanes' sums are added.
extern "C" float emulate_vec_dot(const int type, const void * x, const void * y, const int nblocks, const int kbx0) {
    const auto vec_dot      = vec_dot_of(emulate_types[type]);
    const bool short_blocks = ggml_blck_size(emulate_types[type]) == 64;
    const int  qk = short_blocks ? 64 : QK_K, qi = qk / 16;
    const int  vdr = short_blocks ? VDR_ITQ_N_Q8_1_MMVQ : VDR_ITQ_Q8_1_MMVQ;
    float      sum = 0.0f;
    for (int kbx = 0; kbx < nblocks; ++kbx) {
        for (int iqs = 0; iqs < qi; iqs += vdr) {
            sum += vec_dot(x, (const block_q8_1 *) y + kbx * (qk / QK8_1), kbx0 + kbx, iqs);
        }
    }
    return sum;
}

// Levels of a block, decoded by the two paths of itq-decode.cuh: halves (t from decoded order) and eights.
extern "C" void emulate_levels(const uint8_t * block, const int z, int8_t * by_half, int8_t * by_eight) {
    uint32_t w[ITQ_WORDS];
    memcpy(w, block, sizeof(w));
    int8_t decoded[256];
    for (int j = 0; j < 2; ++j) {
        uint32_t sym[2][4];
        itq_transpose_symbols(w + ITQ_WORD_QS + 8 * j, sym);
        for (int g = 0; g < 4; ++g) {
            const int       k     = 2 * g + j;
            const itq_pairs pairs = itq_pairs_of_chunk<2>(
                w[ITQ_WORD_SEL + k], k == 0 ? itq_word_before(w[ITQ_WORD_DZ] >> 16) : w[ITQ_WORD_SEL + k - 1]);
            for (int i = 0; i < 4; ++i) {
                const itq_indices index    = itq_indices_of<2>(pairs, i, itq_symbols_of_group(sym, g, i));
                const uint32_t    level[2] = { itq_levels_minus<GGML_TYPE_ITQ3_S>(index, z),
                                               itq_levels_minus<GGML_TYPE_ITQ3_S>(itq_indices::upper_half(index), z) };
                memcpy(decoded + 128 * j + 32 * g + 8 * i, level, 8);
            }
        }
    }
    for (int t = 0; t < 256; ++t) {
        by_half[t] = decoded[itq_decoded_offset(t)];
    }
    const uint8_t * sel = block + 4 * ITQ_WORD_SEL;
    for (int m = 0; m < 32; ++m) {
        const uint32_t    before = m == 0 ? itq_word_before(w[ITQ_WORD_DZ] >> 16) >> 24 : sel[m - 1];
        const itq_indices index =
            itq_indices_8<2>(w[2 * (m % 8)], w[2 * (m % 8) + 1], m / 8, (uint32_t) sel[m] << 8 | before);
        const uint32_t level[2] = { itq_levels_minus<GGML_TYPE_ITQ3_S>(index, z),
                                    itq_levels_minus<GGML_TYPE_ITQ3_S>(itq_indices::upper_half(index), z) };
        for (int r = 0; r < 8; ++r) {
            const int nibble    = r < 4 ? 2 * r : 2 * r - 7;
            by_eight[8 * m + r] = (int8_t) (level[nibble / 4] >> 8 * (nibble % 4));
        }
    }
}

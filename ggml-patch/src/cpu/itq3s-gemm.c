// Panels of ITQ3_S, TQ1_0 and TQ2_0 and their products, portable C.

#include "itq3s-gemm.h"

#include "ggml-cpu-impl.h"
#include "itq3s-arch-fallback.h"
#include "simd-mappings.h"

#include <string.h>

#define ROWS ITQ3S_PANEL_ROWS

static uint32_t load_word(const uint8_t * bytes) {
    return (uint32_t) bytes[0] | (uint32_t) bytes[1] << 8 | (uint32_t) bytes[2] << 16 | (uint32_t) bytes[3] << 24;
}

//
// repacking
//

void itq3s_repack_itq3_s_generic(const void * rows, size_t row_size, int n_rows, int64_t nb, void * panel) {
    memset(panel, 0, (size_t) nb * ITQ3S_PANEL_ROWS * sizeof(block_itq3_s));

    for (int r = 0; r < n_rows; ++r) {
        const block_itq3_s * x = (const void *) ((const char *) rows + (size_t) r * row_size);
        for (int64_t b = 0; b < nb; ++b) {
            itq3s_codes_itq3_s *  codes  = itq3s_codes_of_itq3_s(panel, b);
            itq3s_scales_itq3_s * scales = itq3s_scales_of_itq3_s(panel, b);
            for (int k = 0; k < QK_ITQ3_S; ++k) {
                const int      t = k % 8, h = k / 8 % 2, a = k / 16 % 4, j = k / 64;
                const uint32_t selector = x[b].sel[k / 8] >> t & 1;
                const uint32_t symbol   = x[b].qs[k % 64] >> 2 * j & 3;
                codes->sel[t][r] |= selector << k / 8;
                codes->qs[2 * t + h][r] |= symbol << (8 * j + 2 * (a ^ 1));
            }
            scales->d[r] = x[b].d;
            scales->z[r] = x[b].z;
        }
    }
}

void itq3s_repack_tq2_0_generic(const void * rows, size_t row_size, int n_rows, int64_t nb, void * panel) {
    memset(panel, 0, (size_t) nb * ITQ3S_PANEL_ROWS * sizeof(block_tq2_0));

    for (int r = 0; r < n_rows; ++r) {
        const block_tq2_0 * x = (const void *) ((const char *) rows + (size_t) r * row_size);
        for (int64_t b = 0; b < nb; ++b) {
            itq3s_codes_tq2_0 * codes  = itq3s_codes_of_tq2_0(panel, b);
            itq3s_scales_tq *   scales = itq3s_scales_of_tq2_0(panel, b);
            for (int w = 0; w < 16; ++w) {
                codes->qs[w][r] = load_word(x[b].qs + 4 * w);
            }
            scales->d[r] = x[b].d;
        }
    }
}

void itq3s_repack_tq1_0_generic(const void * rows, size_t row_size, int n_rows, int64_t nb, void * panel) {
    memset(panel, 0, (size_t) nb * ITQ3S_PANEL_ROWS * sizeof(block_tq1_0));

    for (int r = 0; r < n_rows; ++r) {
        const block_tq1_0 * x = (const void *) ((const char *) rows + (size_t) r * row_size);
        for (int64_t b = 0; b < nb; ++b) {
            itq3s_codes_tq1_0 * codes  = itq3s_codes_of_tq1_0(panel, b);
            itq3s_scales_tq *   scales = itq3s_scales_of_tq1_0(panel, b);
            for (int w = 0; w < 12; ++w) {
                codes->qs[w][r] = load_word(x[b].qs + 4 * w);
            }
            codes->qh[r] = load_word(x[b].qh);
            scales->d[r] = x[b].d;
        }
    }
}

static void store_word(uint8_t * bytes, uint32_t word) {
    for (int j = 0; j < 4; ++j) {
        bytes[j] = (uint8_t) (word >> 8 * j);
    }
}

void itq3s_unpack_itq3_s(const void * panel, int64_t nb, void * rows, size_t row_size) {
    for (int r = 0; r < ROWS; ++r) {
        block_itq3_s * x = (void *) ((char *) rows + (size_t) r * row_size);
        for (int64_t b = 0; b < nb; ++b) {
            const itq3s_codes_itq3_s *  codes  = itq3s_codes_of_itq3_s(panel, b);
            const itq3s_scales_itq3_s * scales = itq3s_scales_of_itq3_s(panel, b);
            memset(&x[b], 0, sizeof(x[b]));
            for (int k = 0; k < QK_ITQ3_S; ++k) {
                const int      t = k % 8, h = k / 8 % 2, a = k / 16 % 4, j = k / 64;
                const uint32_t selector = codes->sel[t][r] >> k / 8 & 1;
                const uint32_t symbol   = codes->qs[2 * t + h][r] >> (8 * j + 2 * (a ^ 1)) & 3;
                x[b].sel[k / 8] |= (uint8_t) (selector << t);
                x[b].qs[k % 64] |= (uint8_t) (symbol << 2 * j);
            }
            x[b].d = scales->d[r];
            x[b].z = scales->z[r];
        }
    }
}

void itq3s_unpack_tq2_0(const void * panel, int64_t nb, void * rows, size_t row_size) {
    for (int r = 0; r < ROWS; ++r) {
        block_tq2_0 * x = (void *) ((char *) rows + (size_t) r * row_size);
        for (int64_t b = 0; b < nb; ++b) {
            const itq3s_codes_tq2_0 * codes  = itq3s_codes_of_tq2_0(panel, b);
            const itq3s_scales_tq *   scales = itq3s_scales_of_tq2_0(panel, b);
            for (int w = 0; w < 16; ++w) {
                store_word(x[b].qs + 4 * w, codes->qs[w][r]);
            }
            x[b].d = scales->d[r];
        }
    }
}

void itq3s_unpack_tq1_0(const void * panel, int64_t nb, void * rows, size_t row_size) {
    for (int r = 0; r < ROWS; ++r) {
        block_tq1_0 * x = (void *) ((char *) rows + (size_t) r * row_size);
        for (int64_t b = 0; b < nb; ++b) {
            const itq3s_codes_tq1_0 * codes  = itq3s_codes_of_tq1_0(panel, b);
            const itq3s_scales_tq *   scales = itq3s_scales_of_tq1_0(panel, b);
            for (int w = 0; w < 12; ++w) {
                store_word(x[b].qs + 4 * w, codes->qs[w][r]);
            }
            store_word(x[b].qh, codes->qh[r]);
            x[b].d = scales->d[r];
        }
    }
}

//
// products
//

// Levels of row r of a block in the order of the activations.
static void levels_itq3_s(const itq3s_codes_itq3_s * codes, int r, int8_t * levels) {
    static const int8_t table[16] = ITQ3_S_LEVELS;

    uint32_t s[8 + 6];  // the selectors of t = -6 .. 7
    for (int t = 0; t < 8; ++t) {
        s[6 + t] = codes->sel[t][r];
    }
    for (int t = 0; t < 6; ++t) {
        s[t] = s[8 + t] << 1;
    }
    for (int t = 0; t < 8; ++t) {
        const uint32_t c1 = s[6 + t] ^ s[5 + t] ^ s[t];
        const uint32_t c0 = s[4 + t] ^ s[2 + t];
        for (int g = 0; g < 8; ++g) {
            const uint32_t qs = codes->qs[2 * t + g % 2][r] >> 2 * (g / 2 ^ 1);
            for (int j = 0; j < 4; ++j) {
                const int bit = 8 * j + g;

                levels[4 * (8 * g + t) + j] = table[4 * (qs >> 8 * j & 3) + 2 * (c1 >> bit & 1) + (c0 >> bit & 1)];
            }
        }
    }
}

static void levels_tq2_0(const itq3s_codes_tq2_0 * codes, int r, int8_t * levels) {
    for (int i = 0; i < QK_K; ++i) {
        const int byte = i / 128 * 32 + i % 32;
        levels[i]      = (int8_t) ((codes->qs[byte / 4][r] >> (8 * (byte % 4) + 2 * (i / 32 % 4)) & 3) - 1);
    }
}

// Trit l of a byte of TQ1_0, a fraction of 256: the integer part of three times what l steps before left over.
static int8_t trit(uint32_t byte, int l) {
    static const uint8_t pow3[5] = { 1, 3, 9, 27, 81 };
    return (int8_t) ((int) ((uint8_t) (byte * pow3[l]) * 3 >> 8) - 1);
}

static void levels_tq1_0(const itq3s_codes_tq1_0 * codes, int r, int8_t * levels) {
    for (int j = 0; j < 4; ++j) {
        for (int l = 0; l < 5; ++l) {
            for (int w = 0; w < 8; ++w) {
                levels[32 * l + 4 * w + j] = trit(codes->qs[w][r] >> 8 * j & 0xFF, l);
            }
            for (int w = 0; w < 4; ++w) {
                levels[160 + 16 * l + 4 * w + j] = trit(codes->qs[8 + w][r] >> 8 * j & 0xFF, l);
            }
        }
        for (int l = 0; l < 4; ++l) {
            levels[240 + 4 * l + j] = trit(codes->qh[r] >> 8 * j & 0xFF, l);
        }
    }
}

static int32_t dot_block(const int8_t * levels, const int8_t * q) {
    int32_t sum = 0;
    for (int i = 0; i < QK_K; ++i) {
        sum += levels[i] * q[i];
    }
    return sum;
}

void itq3s_gemm_itq3_s_generic(int64_t nb, const void * panel, const struct itq3s_columns * y, int nc,
                               float out[][ROWS]) {
    memset(out, 0, (size_t) nc * sizeof(*out));

    for (int64_t b = 0; b < nb; ++b) {
        const itq3s_codes_itq3_s *  codes  = itq3s_codes_of_itq3_s(panel, b);
        const itq3s_scales_itq3_s * scales = itq3s_scales_of_itq3_s(panel, b);
        for (int r = 0; r < ROWS; ++r) {
            int8_t levels[QK_ITQ3_S];
            levels_itq3_s(codes, r, levels);
            const float d = GGML_CPU_FP16_TO_FP32(scales->d[r]) * 0.03125f;
            const float m = d * GGML_CPU_FP16_TO_FP32(scales->z[r]);
            for (int c = 0; c < nc; ++c) {
                const int64_t at  = b * nc + c;
                const float   dot = (float) dot_block(levels, y->q + at * QK_K);
                out[c][r] += (d * dot - m * (float) y->sums[at]) * y->d[at];
            }
        }
    }
}

#define GEMM_TQ(type)                                                                                        \
    void itq3s_gemm_##type##_generic(int64_t nb, const void * panel, const struct itq3s_columns * y, int nc, \
                                     float out[][ROWS]) {                                                    \
        memset(out, 0, (size_t) nc * sizeof(*out));                                                          \
                                                                                                             \
        for (int64_t b = 0; b < nb; ++b) {                                                                   \
            const itq3s_codes_##type * codes  = itq3s_codes_of_##type(panel, b);                             \
            const itq3s_scales_tq *    scales = itq3s_scales_of_##type(panel, b);                            \
            for (int r = 0; r < ROWS; ++r) {                                                                 \
                int8_t levels[QK_K];                                                                         \
                levels_##type(codes, r, levels);                                                             \
                const float d = GGML_CPU_FP16_TO_FP32(scales->d[r]);                                         \
                for (int c = 0; c < nc; ++c) {                                                               \
                    const int64_t at = b * nc + c;                                                           \
                    out[c][r] += d * (float) dot_block(levels, y->q + at * QK_K) * y->d[at];                 \
                }                                                                                            \
            }                                                                                                \
        }                                                                                                    \
    }

GEMM_TQ(tq2_0)
GEMM_TQ(tq1_0)

void itq3s_reorder_q8_K_h_generic(const int8_t * q, int8_t * y) {
    for (int p = 0; p < 64; ++p) {
        for (int j = 0; j < 4; ++j) {
            y[4 * p + j] = q[64 * j + p];
        }
    }
}

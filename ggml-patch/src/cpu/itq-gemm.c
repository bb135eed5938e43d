// Panels of the trellis types, TQ1_0 and TQ2_0 and their products, portable C.

#include "itq-gemm.h"

#include "ggml-cpu-impl.h"
#include "itq-arch-fallback.h"
#include "simd-mappings.h"

#include <string.h>

#define ROWS ITQ_PANEL_ROWS

static uint32_t load_word(const uint8_t * bytes) {
    return (uint32_t) bytes[0] | (uint32_t) bytes[1] << 8 | (uint32_t) bytes[2] << 16 | (uint32_t) bytes[3] << 24;
}

//
// repacking
//

// Where a panel has bits of the symbol of weight k of a block, the lower two or the only one: word and lowest bit.
ITQ_INLINE int symbol_word(int bits, int length, int k) {
    const int words = length / 32;
    return bits == 1 ? k % words : 2 * (k % words) + k / words % 2;
}

ITQ_INLINE int symbol_bit(int bits, int length, int k) {
    const int g = k / (length / 32) % 8;
    return 8 * (k / (length / 4)) + (bits == 1 ? g ^ 3 : 2 * ((g / 2) ^ 1));
}

// The third bit.
ITQ_INLINE int third_word(int length, int k) {
    return length / 16 + k % (length / 32);
}

ITQ_INLINE int third_bit(int length, int k) {
    return 8 * (k / (length / 4)) + (k / (length / 32) % 8 ^ 1);
}

// A third bit inverts the others in a panel.
static uint32_t mirrored(uint32_t symbol) {
    return symbol ^ 3 * (symbol >> 2);
}

ITQ_INLINE void put_symbol(int bits, int length, uint32_t (*qs)[ROWS], int r, int k, uint32_t symbol) {
    qs[symbol_word(bits, length, k)][r] |= (mirrored(symbol) & 3) << symbol_bit(bits, length, k);
    if (bits == 3) {
        qs[third_word(length, k)][r] |= symbol >> 2 << third_bit(length, k);
    }
}

ITQ_INLINE uint32_t get_symbol(int bits, int length, const uint32_t (*qs)[ROWS], int r, int k) {
    const uint32_t low = qs[symbol_word(bits, length, k)][r] >> symbol_bit(bits, length, k) & (bits == 1 ? 1 : 3);
    return bits < 3 ? low : mirrored(low | (qs[third_word(length, k)][r] >> third_bit(length, k) & 1) << 2);
}

// To the place that it has in a file.
ITQ_INLINE void put_file_symbol(int bits, int length, uint8_t * qs, int k, uint32_t symbol) {
    qs[itq_symbol_byte(bits, length, k)] |= (uint8_t) ((symbol & 3) << itq_symbol_shift(bits, length, k));
    if (bits == 3) {
        qs[length / 4 + k / 8] |= (uint8_t) (symbol >> 2 << k % 8);
    }
}

// And its selector: bit of the word k % (length / 32).
ITQ_INLINE int selector_bit(int length, int k) {
    return k / (length / 32);
}

#define DEFINE_PANELS(NAME, name, bits, n_levels, length, has_z, number)                                         \
    void itq_repack_##name##_generic(const void * rows, size_t row_size, int n_rows, int64_t nb, void * panel) { \
        memset(panel, 0, (size_t) nb * ITQ_PANEL_ROWS * sizeof(block_##name));                                   \
                                                                                                                 \
        for (int r = 0; r < n_rows; ++r) {                                                                       \
            const block_##name * x = (const void *) ((const char *) rows + (size_t) r * row_size);               \
            for (int64_t b = 0; b < nb; ++b) {                                                                   \
                itq_codes_##name *  codes  = itq_codes_of_##name(panel, b);                                      \
                itq_scales_##name * scales = itq_scales_of_##name(panel, b);                                     \
                for (int k = 0; k < (length); ++k) {                                                             \
                    const uint32_t selector = x[b].sel[k / 8] >> k % 8 & 1;                                      \
                    const uint32_t symbol   = (uint32_t) itq_symbol(bits, length, x[b].qs, k);                   \
                    codes->sel[k % ((length) / 32)][r] |= selector << selector_bit(length, k);                   \
                    put_symbol(bits, length, codes->qs, r, k, symbol);                                           \
                }                                                                                                \
                scales->d[r] = x[b].d;                                                                           \
                ITQ_COPY_ZERO_POINT_##has_z(scales->z[r], x[b].z);                                               \
            }                                                                                                    \
        }                                                                                                        \
    }                                                                                                            \
                                                                                                                 \
    void itq_unpack_##name(const void * panel, int64_t nb, void * rows, size_t row_size) {                       \
        for (int r = 0; r < ROWS; ++r) {                                                                         \
            block_##name * x = (void *) ((char *) rows + (size_t) r * row_size);                                 \
            for (int64_t b = 0; b < nb; ++b) {                                                                   \
                const itq_codes_##name *  codes  = itq_codes_of_##name(panel, b);                                \
                const itq_scales_##name * scales = itq_scales_of_##name(panel, b);                               \
                memset(&x[b], 0, sizeof(x[b]));                                                                  \
                for (int k = 0; k < (length); ++k) {                                                             \
                    const uint32_t selector = codes->sel[k % ((length) / 32)][r] >> selector_bit(length, k) & 1; \
                    const uint32_t symbol   = get_symbol(bits, length, codes->qs, r, k);                         \
                    x[b].sel[k / 8] |= (uint8_t) (selector << k % 8);                                            \
                    put_file_symbol(bits, length, x[b].qs, k, symbol);                                           \
                }                                                                                                \
                x[b].d = scales->d[r];                                                                           \
                ITQ_COPY_ZERO_POINT_##has_z(x[b].z, scales->z[r]);                                               \
            }                                                                                                    \
        }                                                                                                        \
    }
ITQ_TYPES(DEFINE_PANELS)

void itq_repack_tq2_0_generic(const void * rows, size_t row_size, int n_rows, int64_t nb, void * panel) {
    memset(panel, 0, (size_t) nb * ITQ_PANEL_ROWS * sizeof(block_tq2_0));

    for (int r = 0; r < n_rows; ++r) {
        const block_tq2_0 * x = (const void *) ((const char *) rows + (size_t) r * row_size);
        for (int64_t b = 0; b < nb; ++b) {
            itq_codes_tq2_0 * codes  = itq_codes_of_tq2_0(panel, b);
            itq_scales_tq *   scales = itq_scales_of_tq2_0(panel, b);
            for (int w = 0; w < 16; ++w) {
                codes->qs[w][r] = load_word(x[b].qs + 4 * w);
            }
            scales->d[r] = x[b].d;
        }
    }
}

void itq_repack_tq1_0_generic(const void * rows, size_t row_size, int n_rows, int64_t nb, void * panel) {
    memset(panel, 0, (size_t) nb * ITQ_PANEL_ROWS * sizeof(block_tq1_0));

    for (int r = 0; r < n_rows; ++r) {
        const block_tq1_0 * x = (const void *) ((const char *) rows + (size_t) r * row_size);
        for (int64_t b = 0; b < nb; ++b) {
            itq_codes_tq1_0 * codes  = itq_codes_of_tq1_0(panel, b);
            itq_scales_tq *   scales = itq_scales_of_tq1_0(panel, b);
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

void itq_unpack_tq2_0(const void * panel, int64_t nb, void * rows, size_t row_size) {
    for (int r = 0; r < ROWS; ++r) {
        block_tq2_0 * x = (void *) ((char *) rows + (size_t) r * row_size);
        for (int64_t b = 0; b < nb; ++b) {
            const itq_codes_tq2_0 * codes  = itq_codes_of_tq2_0(panel, b);
            const itq_scales_tq *   scales = itq_scales_of_tq2_0(panel, b);
            for (int w = 0; w < 16; ++w) {
                store_word(x[b].qs + 4 * w, codes->qs[w][r]);
            }
            x[b].d = scales->d[r];
        }
    }
}

void itq_unpack_tq1_0(const void * panel, int64_t nb, void * rows, size_t row_size) {
    for (int r = 0; r < ROWS; ++r) {
        block_tq1_0 * x = (void *) ((char *) rows + (size_t) r * row_size);
        for (int64_t b = 0; b < nb; ++b) {
            const itq_codes_tq1_0 * codes  = itq_codes_of_tq1_0(panel, b);
            const itq_scales_tq *   scales = itq_scales_of_tq1_0(panel, b);
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
ITQ_INLINE void levels_of_row(int bits, int length, const int8_t * table, const uint32_t (*sel)[ROWS],
                              const uint32_t (*qs)[ROWS], int state, int r, int8_t * levels) {
    const int words = length / 32;
    uint32_t  s[QK_ITQ / 32 + 6];  // the selectors of t = -6 .. words - 1
    for (int t = 0; t < words; ++t) {
        s[6 + t] = sel[t][r];
    }
    for (int t = 5; t >= 0; --t) {
        s[t] = s[words + t] << 1 | (state >> (5 - t) & 1);
    }
    for (int t = 0; t < words; ++t) {
        const uint32_t c2 = s[6 + t] ^ s[1 + t] ^ s[t];
        const uint32_t c1 = s[5 + t] ^ s[3 + t] ^ s[2 + t] ^ s[1 + t];
        const uint32_t c0 = s[4 + t] ^ s[2 + t];
        for (int g = 0; g < 8; ++g) {
            for (int j = 0; j < 4; ++j) {
                const int      p      = words * g + t;
                const int      k      = length / 4 * j + p;
                const int      bit    = 8 * j + g;
                const uint32_t symbol = get_symbol(bits, length, qs, r, k);

                levels[4 * p + j] = table[8 * symbol + 4 * (c2 >> bit & 1) + 2 * (c1 >> bit & 1) + (c0 >> bit & 1)];
            }
        }
    }
}

static void levels_tq2_0(const itq_codes_tq2_0 * codes, int r, int8_t * levels) {
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

static void levels_tq1_0(const itq_codes_tq1_0 * codes, int r, int8_t * levels) {
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

ITQ_INLINE int32_t dot_block(int length, const int8_t * levels, const int8_t * q) {
    int32_t sum = 0;
    for (int i = 0; i < length; ++i) {
        sum += levels[i] * q[i];
    }
    return sum;
}

// Start state, scale and zero-point of row r of a block.
#define LAST_1(scales, r)       (&(scales)->z[r])
#define LAST_0(scales, r)       (&(scales)->d[r])
#define SCALE_1(scales, r)      GGML_CPU_FP16_TO_FP32((scales)->d[r])
#define SCALE_0(scales, r)      GGML_CPU_FP16_TO_FP32(itq_without_state(&(scales)->d[r]))
#define ZERO_POINT_1(scales, r) GGML_CPU_FP16_TO_FP32(itq_without_state(&(scales)->z[r]))
#define ZERO_POINT_0(scales, r) 0.0f

#define DEFINE_GEMM(NAME, name, bits, n_levels, length, has_z, number)                                   \
    void itq_gemm_##name##_generic(int64_t nb, const void * panel, const struct itq_columns * y, int nc, \
                                   float out[][ROWS]) {                                                  \
        static const int8_t table[n_levels] = NAME##_LEVELS;                                             \
        memset(out, 0, (size_t) nc * sizeof(*out));                                                      \
                                                                                                         \
        for (int64_t b = 0; b < nb; ++b) {                                                               \
            const itq_codes_##name *  codes  = itq_codes_of_##name(panel, b);                            \
            const itq_scales_##name * scales = itq_scales_of_##name(panel, b);                           \
            for (int r = 0; r < ROWS; ++r) {                                                             \
                int8_t    levels[length];                                                                \
                const int state = itq_start_state(LAST_##has_z(scales, r));                              \
                levels_of_row(bits, length, table, codes->sel, codes->qs, state, r, levels);             \
                const float d = SCALE_##has_z(scales, r) * 0.03125f;                                     \
                const float m = d * ZERO_POINT_##has_z(scales, r);                                       \
                for (int c = 0; c < nc; ++c) {                                                           \
                    const int64_t at  = b * nc + c;                                                      \
                    const float   dot = (float) dot_block(length, levels, y->q + at * (length));         \
                    out[c][r] += (d * dot - m * (float) y->sums[at]) * y->d[at];                         \
                }                                                                                        \
            }                                                                                            \
        }                                                                                                \
    }
ITQ_TYPES(DEFINE_GEMM)

#define GEMM_TQ(type)                                                                                    \
    void itq_gemm_##type##_generic(int64_t nb, const void * panel, const struct itq_columns * y, int nc, \
                                   float out[][ROWS]) {                                                  \
        memset(out, 0, (size_t) nc * sizeof(*out));                                                      \
                                                                                                         \
        for (int64_t b = 0; b < nb; ++b) {                                                               \
            const itq_codes_##type * codes  = itq_codes_of_##type(panel, b);                             \
            const itq_scales_tq *    scales = itq_scales_of_##type(panel, b);                            \
            for (int r = 0; r < ROWS; ++r) {                                                             \
                int8_t levels[QK_K];                                                                     \
                levels_##type(codes, r, levels);                                                         \
                const float d = GGML_CPU_FP16_TO_FP32(scales->d[r]);                                     \
                for (int c = 0; c < nc; ++c) {                                                           \
                    const int64_t at = b * nc + c;                                                       \
                    out[c][r] += d * (float) dot_block(QK_K, levels, y->q + at * QK_K) * y->d[at];       \
                }                                                                                        \
            }                                                                                            \
        }                                                                                                \
    }

GEMM_TQ(tq2_0)
GEMM_TQ(tq1_0)

ITQ_INLINE void reorder(int length, const int8_t * q, int8_t * y) {
    for (int p = 0; p < length / 4; ++p) {
        for (int j = 0; j < 4; ++j) {
            y[4 * p + j] = q[length / 4 * j + p];
        }
    }
}

void itq_reorder_q8_K_h_generic(const int8_t * q, int8_t * y) {
    reorder(QK_K, q, y);
}

void itq_reorder_q8_n_h_generic(const int8_t * q, int8_t * y) {
    reorder(64, q, y);
}

// Panels of ITQ3_S, TQ1_0 and TQ2_0 and their products, NEON: with the dot product instructions where the target has
// them, without elsewhere. docs/kernels.md explains them.

#include "../../itq3s-gemm.h"
#include "../../itq3s-rows.h"

#include "ggml-cpu-impl.h"

#include <string.h>

#if defined(__ARM_NEON) && defined(__aarch64__)

#    include <arm_neon.h>

#    define QUARTER_ROWS 4  // in a register
#    define QUARTERS     (ITQ3S_PANEL_ROWS / QUARTER_ROWS)
#    define PLACES 64  // words of weights of a block of 256: place p meets bytes 4*p .. 4*p + 3 of the activations

// Where mask has a bit: of a, elsewhere of b.
static inline uint8x16_t select_bits(uint8_t mask, uint8x16_t a, uint8x16_t b) {
    return vbslq_u8(vdupq_n_u8(mask), a, b);
}

static inline uint8x16_t load_words(const uint32_t * words, int quarter) {
    return vreinterpretq_u8_u32(vld1q_u32(words + QUARTER_ROWS * quarter));
}

//
// products
//

// Signed operands of all places of a block, for all rows: it stays in the first-level cache, where every column finds it.
typedef struct {
    int8_t operands[PLACES][QUARTERS][16];
} decoded_block;

static inline void store_place(decoded_block * decoded, int place, int quarter, int8x16_t operands) {
    vst1q_s8(decoded->operands[place][quarter], operands);
}

// Adds products of operands and the four activations in 32-bit lane `lane` of y, a number that the compiler knows.
#    if defined(__ARM_FEATURE_DOTPROD)
#        define ADD_PRODUCTS(acc, operands, y, lane) vdotq_laneq_s32(acc, operands, y, lane)
#    else
static inline int32x4_t add_products(int32x4_t acc, int8x16_t operands, int8x16_t four) {
    const int16x8_t lo = vmull_s8(vget_low_s8(operands), vget_low_s8(four));
    const int16x8_t hi = vmull_high_s8(operands, four);
    return vpadalq_s16(acc, vpaddq_s16(lo, hi));  // 2 * 63 * 127 fit 16 bits
}

#        define ADD_PRODUCTS(acc, operands, y, lane) \
            add_products(acc, operands, vreinterpretq_s8_s32(vdupq_laneq_s32(vreinterpretq_s32_s8(y), lane)))
#    endif

// Scales of a block, and of what zero-points take (TQ1_0 and TQ2_0 have none).
struct block_scales {
    float32x4_t d0[QUARTERS];
    float32x4_t dmin[QUARTERS];
};

static inline float32x4_t load_halves(const ggml_half * halves, int quarter) {
    return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16((const uint16_t *) halves + QUARTER_ROWS * quarter)));
}

#    define TILE_COLUMNS 4

// n columns, the first of which is `at`, of a block that is decoded; `offset` is what operands exceed the weights by.
ITQ_INLINE void multiply_tile(const decoded_block * decoded, const struct block_scales * s, int offset, int has_min,
                              const struct itq3s_columns * y, int64_t at, const int n, float out[][ITQ3S_PANEL_ROWS]) {
    const int8_t * q = y->q + at * QK_K;

    int32x4_t acc[TILE_COLUMNS][QUARTERS];
    for (int c = 0; c < n; ++c) {
        for (int i = 0; i < QUARTERS; ++i) {
            acc[c][i] = vdupq_n_s32(-offset * y->sums[at + c]);
        }
    }
    for (int p = 0; p < PLACES; p += 4) {
        int8x16_t v[TILE_COLUMNS];
        for (int c = 0; c < n; ++c) {
            v[c] = vld1q_s8(q + c * QK_K + 4 * p);
        }
#    define ADD_PLACE(lane)                                                        \
        for (int i = 0; i < QUARTERS; ++i) {                                       \
            const int8x16_t operands = vld1q_s8(decoded->operands[p + (lane)][i]); \
            for (int c = 0; c < n; ++c) {                                          \
                acc[c][i] = ADD_PRODUCTS(acc[c][i], operands, v[c], lane);         \
            }                                                                      \
        }
        ADD_PLACE(0)
        ADD_PLACE(1)
        ADD_PLACE(2)
        ADD_PLACE(3)
#    undef ADD_PLACE
    }
    for (int c = 0; c < n; ++c) {
        for (int i = 0; i < QUARTERS; ++i) {
            float *     to = out[c] + QUARTER_ROWS * i;
            float32x4_t v  = vmulq_f32(vcvtq_f32_s32(acc[c][i]), s->d0[i]);
            if (has_min) {
                v = vfmsq_f32(v, s->dmin[i], vdupq_n_f32((float) y->sums[at + c]));
            }
            vst1q_f32(to, vfmaq_f32(vld1q_f32(to), v, vdupq_n_f32(y->d[at + c])));
        }
    }
}

// All columns of block b.
static inline void multiply_block(const decoded_block * decoded, const struct block_scales * s, int offset, int has_min,
                                  const struct itq3s_columns * y, int64_t b, int nc, float out[][ITQ3S_PANEL_ROWS]) {
    int c = 0;
    for (; c + TILE_COLUMNS <= nc; c += TILE_COLUMNS) {
        multiply_tile(decoded, s, offset, has_min, y, b * nc + c, TILE_COLUMNS, out + c);
    }
    switch (nc - c) {
        case 3:
            multiply_tile(decoded, s, offset, has_min, y, b * nc + c, 3, out + c);
            break;
        case 2:
            multiply_tile(decoded, s, offset, has_min, y, b * nc + c, 2, out + c);
            break;
        case 1:
            multiply_tile(decoded, s, offset, has_min, y, b * nc + c, 1, out + c);
            break;
        default:
            break;
    }
}

//
// ITQ3_S
//

#    define SELECTORS_BEFORE 6

static inline void decode_itq3_s(const itq3s_codes_itq3_s * codes, int quarter, decoded_block * decoded) {
    static const int8_t  levels[16]    = ITQ3_S_LEVELS;
    static const uint8_t transpose[16] = { 0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15 };

    const int8x16_t  by_symbol = vld1q_s8(levels);  // index 4*symbol + grid, and 4*grid + symbol
    const int8x16_t  by_grid   = vqtbl1q_s8(by_symbol, vld1q_u8(transpose));
    const uint8x16_t low       = vdupq_n_u8(0x0F);

    // s[t], t = -6 .. 7: before t = 0 those of t + 8, a bit lower; weight 0 has zeros before it
    uint8x16_t selectors[SELECTORS_BEFORE + 8];
    for (int t = 0; t < 8; ++t) {
        selectors[SELECTORS_BEFORE + t] = load_words(codes->sel[t], quarter);
    }
    for (int i = 0; i < SELECTORS_BEFORE; ++i) {
        selectors[i] = vreinterpretq_u8_u32(vshlq_n_u32(vreinterpretq_u32_u8(selectors[i + 8]), 1));
    }
    for (int t = 0; t < 8; ++t) {
        const uint8x16_t * s  = selectors + SELECTORS_BEFORE + t;
        const uint8x16_t   c1 = veorq_u8(veorq_u8(s[0], s[-1]), s[-6]);
        const uint8x16_t   c0 = veorq_u8(s[-2], s[-4]);

        // 2*c1 + c0 of places 16*a + 8*h + t in bits 2*a
        const uint8x16_t grids[2] = { select_bits(0x55, c0, vshlq_n_u8(c1, 1)),
                                      select_bits(0x55, vshrq_n_u8(c0, 1), c1) };
        for (int h = 0; h < 2; ++h) {
            // two indices in a byte: of a = 0 and 2, of a = 1 and 3
            const uint8x16_t symbols = load_words(codes->qs[2 * t + h], quarter);
            const uint8x16_t even    = select_bits(0x33, grids[h], symbols);
            const uint8x16_t odd     = select_bits(0x33, symbols, grids[h]);

            const int place = 8 * h + t;
            store_place(decoded, place, quarter, vqtbl1q_s8(by_symbol, vandq_u8(even, low)));
            store_place(decoded, place + 16, quarter, vqtbl1q_s8(by_grid, vandq_u8(odd, low)));
            store_place(decoded, place + 32, quarter, vqtbl1q_s8(by_symbol, vshrq_n_u8(even, 4)));
            store_place(decoded, place + 48, quarter, vqtbl1q_s8(by_grid, vshrq_n_u8(odd, 4)));
        }
    }
}

void itq3s_gemm_itq3_s(int64_t nb, const void * panel, const struct itq3s_columns * y, int nc,
                       float out[][ITQ3S_PANEL_ROWS]) {
    memset(out, 0, (size_t) nc * sizeof(*out));

    for (int64_t b = 0; b < nb; ++b) {
        const itq3s_codes_itq3_s *  codes  = itq3s_codes_of_itq3_s(panel, b);
        const itq3s_scales_itq3_s * scales = itq3s_scales_of_itq3_s(panel, b);
        decoded_block               decoded;
        struct block_scales         s;
        for (int i = 0; i < QUARTERS; ++i) {
            decode_itq3_s(codes, i, &decoded);
            s.d0[i]   = vmulq_n_f32(load_halves(scales->d, i), 0.03125f);
            s.dmin[i] = vmulq_f32(s.d0[i], load_halves(scales->z, i));
        }
        multiply_block(&decoded, &s, 0, 1, y, b, nc, out);
    }
}

//
// TQ2_0 and TQ1_0
//

// Trits plus one: trit f of the bytes of word w is at place 32*(w / 8) + 8*f + w % 8.
static inline void decode_tq2_0(const itq3s_codes_tq2_0 * codes, int quarter, decoded_block * decoded) {
    const uint8x16_t three = vdupq_n_u8(3);
    for (int w = 0; w < 16; ++w) {
        const uint8x16_t x     = load_words(codes->qs[w], quarter);
        const int        place = 32 * (w / 8) + w % 8;
        store_place(decoded, place, quarter, vreinterpretq_s8_u8(vandq_u8(x, three)));
        store_place(decoded, place + 8, quarter, vreinterpretq_s8_u8(vandq_u8(vshrq_n_u8(x, 2), three)));
        store_place(decoded, place + 16, quarter, vreinterpretq_s8_u8(vandq_u8(vshrq_n_u8(x, 4), three)));
        store_place(decoded, place + 24, quarter, vreinterpretq_s8_u8(vshrq_n_u8(x, 6)));
    }
}

// Trits plus one of the bytes of a word, fractions of 256, to places `step` apart: the integer part of three times that
// is the next trit, what is left over the next fraction.
static inline void decode_word_tq1_0(const uint32_t * words, int quarter, int n, int place, int step,
                                     decoded_block * decoded) {
    uint8x16_t x = load_words(words, quarter);
    for (int l = 0; l < n; ++l) {
        const uint8x16_t trits = vshrq_n_u8(vhaddq_u8(x, vshrq_n_u8(x, 1)), 6);
        store_place(decoded, place + step * l, quarter, vreinterpretq_s8_u8(trits));
        x = vmulq_u8(x, vdupq_n_u8(3));
    }
}

static inline void decode_tq1_0(const itq3s_codes_tq1_0 * codes, int quarter, decoded_block * decoded) {
    for (int w = 0; w < 8; ++w) {
        decode_word_tq1_0(codes->qs[w], quarter, 5, w, 8, decoded);
    }
    for (int w = 0; w < 4; ++w) {
        decode_word_tq1_0(codes->qs[8 + w], quarter, 5, 40 + w, 4, decoded);
    }
    decode_word_tq1_0(codes->qh, quarter, 4, 60, 1, decoded);
}

#    define GEMM_TQ(type)                                                                              \
        void itq3s_gemm_##type(int64_t nb, const void * panel, const struct itq3s_columns * y, int nc, \
                               float out[][ITQ3S_PANEL_ROWS]) {                                        \
            memset(out, 0, (size_t) nc * sizeof(*out));                                                \
                                                                                                       \
            for (int64_t b = 0; b < nb; ++b) {                                                         \
                decoded_block       decoded;                                                           \
                struct block_scales s;                                                                 \
                for (int i = 0; i < QUARTERS; ++i) {                                                   \
                    decode_##type(itq3s_codes_of_##type(panel, b), i, &decoded);                       \
                    s.d0[i]   = load_halves(itq3s_scales_of_##type(panel, b)->d, i);                   \
                    s.dmin[i] = vdupq_n_f32(0.0f);                                                     \
                }                                                                                      \
                multiply_block(&decoded, &s, 1, 0, y, b, nc, out);                                     \
            }                                                                                          \
        }

GEMM_TQ(tq2_0)
GEMM_TQ(tq1_0)

//
// repacking
//

// r[i] holds four words of row i; words + i*step gets word i of the four rows.
static inline void store_transposed(uint32_t * words, size_t step, const uint8x16_t r[4]) {
    const uint32x4_t r0 = vreinterpretq_u32_u8(r[0]), r1 = vreinterpretq_u32_u8(r[1]);
    const uint32x4_t r2 = vreinterpretq_u32_u8(r[2]), r3 = vreinterpretq_u32_u8(r[3]);
    const uint64x2_t a = vreinterpretq_u64_u32(vzip1q_u32(r0, r1)), b = vreinterpretq_u64_u32(vzip2q_u32(r0, r1));
    const uint64x2_t c = vreinterpretq_u64_u32(vzip1q_u32(r2, r3)), d = vreinterpretq_u64_u32(vzip2q_u32(r2, r3));
    vst1q_u32(words, vreinterpretq_u32_u64(vzip1q_u64(a, c)));
    vst1q_u32(words + step, vreinterpretq_u32_u64(vzip2q_u64(a, c)));
    vst1q_u32(words + 2 * step, vreinterpretq_u32_u64(vzip1q_u64(b, d)));
    vst1q_u32(words + 3 * step, vreinterpretq_u32_u64(vzip2q_u64(b, d)));
}

// The first n_words words of blocks of four rows, a multiple of four.
static inline void transpose_words(const struct row_reader * readers, int64_t b, int quarter, int n_words,
                                   uint32_t words[][ITQ3S_PANEL_ROWS]) {
    for (int w = 0; w < n_words; w += 4) {
        uint8x16_t r[QUARTER_ROWS];
        for (int i = 0; i < QUARTER_ROWS; ++i) {
            r[i] = vld1q_u8((const uint8_t *) block_at(&readers[QUARTER_ROWS * quarter + i], b) + 4 * w);
        }
        store_transposed(words[w] + QUARTER_ROWS * quarter, ITQ3S_PANEL_ROWS, r);
    }
}

// Exchanges bits of the 8 bytes of each half: bit t of byte g and bit g of byte t change places.
static inline uint8x16_t transpose_bits(uint8x16_t bytes) {
    uint64x2_t v = vreinterpretq_u64_u8(bytes);
#    define SWAP_BITS(shift, mask)                                                                  \
        {                                                                                           \
            const uint64x2_t u = vandq_u64(veorq_u64(v, vshrq_n_u64(v, shift)), vdupq_n_u64(mask)); \
            v                  = veorq_u64(veorq_u64(v, u), vshlq_n_u64(u, shift));                 \
        }
    SWAP_BITS(7, 0x00AA00AA00AA00AA)
    SWAP_BITS(14, 0x0000CCCC0000CCCC)
    SWAP_BITS(28, 0x00000000F0F0F0F0)
#    undef SWAP_BITS
    return vreinterpretq_u8_u64(v);
}

static inline void repack_selectors(const struct row_reader * readers, int64_t b, int quarter,
                                    uint32_t sel[8][ITQ3S_PANEL_ROWS]) {
    static const uint8_t order[16] = { 0, 8, 16, 24, 1, 9, 17, 25, 2, 10, 18, 26, 3, 11, 19, 27 };
    const uint8x16_t     first     = vld1q_u8(order);
    const uint8x16_t     second    = vaddq_u8(first, vdupq_n_u8(4));

    uint8x16_t words[2][QUARTER_ROWS];
    for (int i = 0; i < QUARTER_ROWS; ++i) {
        const block_itq3_s * x     = block_at(&readers[QUARTER_ROWS * quarter + i], b);
        // byte t of every 8 then has the bits of word t
        const uint8x16x2_t   bytes = { { transpose_bits(vld1q_u8(x->sel)), transpose_bits(vld1q_u8(x->sel + 16)) } };
        words[0][i]                = vqtbl2q_u8(bytes, first);
        words[1][i]                = vqtbl2q_u8(bytes, second);
    }
    store_transposed(sel[0] + QUARTER_ROWS * quarter, ITQ3S_PANEL_ROWS, words[0]);
    store_transposed(sel[4] + QUARTER_ROWS * quarter, ITQ3S_PANEL_ROWS, words[1]);
}

static inline void repack_symbols(const struct row_reader * readers, int64_t b, int quarter,
                                  uint32_t qs[16][ITQ3S_PANEL_ROWS]) {
    uint8x16_t words[4][QUARTER_ROWS];
    for (int i = 0; i < QUARTER_ROWS; ++i) {
        const block_itq3_s * x = block_at(&readers[QUARTER_ROWS * quarter + i], b);

        // byte 8*h + t of v[a] has the symbols of places 16*a + 8*h + t, j = 0 .. 3 in its fields: the fields become the
        // register, and a = 1, 0, 3, 2 fields 0 .. 3
        const uint8x16_t v0 = vld1q_u8(x->qs), v1 = vld1q_u8(x->qs + 16);
        const uint8x16_t v2 = vld1q_u8(x->qs + 32), v3 = vld1q_u8(x->qs + 48);
        const uint8x16_t lo10 = select_bits(0x33, v1, vshlq_n_u8(v0, 2));
        const uint8x16_t hi10 = select_bits(0x33, vshrq_n_u8(v1, 2), v0);
        const uint8x16_t lo32 = select_bits(0x33, v3, vshlq_n_u8(v2, 2));
        const uint8x16_t hi32 = select_bits(0x33, vshrq_n_u8(v3, 2), v2);
        const uint8x16_t j0 = vsliq_n_u8(lo10, lo32, 4), j2 = vsriq_n_u8(lo32, lo10, 4);
        const uint8x16_t j1 = vsliq_n_u8(hi10, hi32, 4), j3 = vsriq_n_u8(hi32, hi10, 4);

        const uint16x8_t lo01 = vreinterpretq_u16_u8(vzip1q_u8(j0, j1)), hi01 = vreinterpretq_u16_u8(vzip2q_u8(j0, j1));
        const uint16x8_t lo23 = vreinterpretq_u16_u8(vzip1q_u8(j2, j3)), hi23 = vreinterpretq_u16_u8(vzip2q_u8(j2, j3));
        words[0][i] = vreinterpretq_u8_u16(vzip1q_u16(lo01, lo23));
        words[1][i] = vreinterpretq_u8_u16(vzip2q_u16(lo01, lo23));
        words[2][i] = vreinterpretq_u8_u16(vzip1q_u16(hi01, hi23));
        words[3][i] = vreinterpretq_u8_u16(vzip2q_u16(hi01, hi23));
    }
    for (int w = 0; w < 4; ++w) {
        // places 4*w .. 4*w + 3 of 8*h + t, to word 2*t + h
        store_transposed(qs[2 * (4 * w % 8) + w / 2] + QUARTER_ROWS * quarter, 2 * ITQ3S_PANEL_ROWS, words[w]);
    }
}

void itq3s_repack_itq3_s(const void * rows, size_t row_size, int n_rows, int64_t nb, void * panel) {
    struct row_reader readers[ITQ3S_PANEL_ROWS];
    open_rows(readers, rows, row_size, n_rows, sizeof(block_itq3_s));
    for (int64_t b = 0; b < nb; ++b) {
        itq3s_codes_itq3_s *  codes  = itq3s_codes_of_itq3_s(panel, b);
        itq3s_scales_itq3_s * scales = itq3s_scales_of_itq3_s(panel, b);
        for (int i = 0; i < QUARTERS; ++i) {
            repack_selectors(readers, b, i, codes->sel);
            repack_symbols(readers, b, i, codes->qs);
        }
        for (int r = 0; r < ITQ3S_PANEL_ROWS; ++r) {
            const block_itq3_s * x = block_at(&readers[r], b);
            scales->d[r]           = x->d;
            scales->z[r]           = x->z;
        }
    }
}

void itq3s_repack_tq2_0(const void * rows, size_t row_size, int n_rows, int64_t nb, void * panel) {
    struct row_reader readers[ITQ3S_PANEL_ROWS];
    open_rows(readers, rows, row_size, n_rows, sizeof(block_tq2_0));
    for (int64_t b = 0; b < nb; ++b) {
        itq3s_codes_tq2_0 * codes  = itq3s_codes_of_tq2_0(panel, b);
        itq3s_scales_tq *   scales = itq3s_scales_of_tq2_0(panel, b);
        for (int i = 0; i < QUARTERS; ++i) {
            transpose_words(readers, b, i, 16, codes->qs);  // a block begins with them
        }
        for (int r = 0; r < ITQ3S_PANEL_ROWS; ++r) {
            scales->d[r] = ((const block_tq2_0 *) block_at(&readers[r], b))->d;
        }
    }
}

void itq3s_repack_tq1_0(const void * rows, size_t row_size, int n_rows, int64_t nb, void * panel) {
    struct row_reader readers[ITQ3S_PANEL_ROWS];
    open_rows(readers, rows, row_size, n_rows, sizeof(block_tq1_0));
    for (int64_t b = 0; b < nb; ++b) {
        itq3s_codes_tq1_0 * codes  = itq3s_codes_of_tq1_0(panel, b);
        itq3s_scales_tq *   scales = itq3s_scales_of_tq1_0(panel, b);
        for (int i = 0; i < QUARTERS; ++i) {
            transpose_words(readers, b, i, 12, codes->qs);
        }
        for (int r = 0; r < ITQ3S_PANEL_ROWS; ++r) {
            const block_tq1_0 * x = block_at(&readers[r], b);
            memcpy(&codes->qh[r], x->qh, sizeof(x->qh));
            scales->d[r] = x->d;
        }
    }
}

void itq3s_reorder_q8_K_h(const int8_t * q, int8_t * y) {
    for (int p = 0; p < 64; p += 16) {
        const int8x16x4_t v = { { vld1q_s8(q + p), vld1q_s8(q + 64 + p), vld1q_s8(q + 128 + p),
                                  vld1q_s8(q + 192 + p) } };
        vst4q_s8(y + 4 * p, v);
    }
}

#else

#    define KERNELS(type)                                                                                    \
        void itq3s_gemm_##type(int64_t nb, const void * panel, const struct itq3s_columns * y, int nc,       \
                               float out[][ITQ3S_PANEL_ROWS]) {                                              \
            itq3s_gemm_##type##_generic(nb, panel, y, nc, out);                                              \
        }                                                                                                    \
        void itq3s_repack_##type(const void * rows, size_t row_size, int n_rows, int64_t nb, void * panel) { \
            itq3s_repack_##type##_generic(rows, row_size, n_rows, nb, panel);                                \
        }

KERNELS(itq3_s)
KERNELS(tq2_0)
KERNELS(tq1_0)

void itq3s_reorder_q8_K_h(const int8_t * q, int8_t * y) {
    itq3s_reorder_q8_K_h_generic(q, y);
}

#endif

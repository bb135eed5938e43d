// Panels of the trellis types, TQ1_0 and TQ2_0 and their products, NEON: with the dot product instructions where the target has
// them, without elsewhere. docs/kernels.md explains them.

#include "../../itq-gemm.h"
#include "../../itq-repack-64.h"
#include "../../itq-rows.h"
#include "itq-decode.h"

#include "ggml-cpu-impl.h"

#include <string.h>

#if defined(__ARM_NEON) && defined(__aarch64__)

#    include <arm_neon.h>

#    define QUARTER_ROWS 4  // in a register
#    define QUARTERS     (ITQ_PANEL_ROWS / QUARTER_ROWS)
// Words of weights of a block of 256, a fourth of its length: place p meets bytes 4*p .. 4*p + 3 of the activations.
#    define PLACES       64

static inline uint8x16_t load_words(const uint32_t * words, int quarter) {
    return vreinterpretq_u8_u32(vld1q_u32(words + QUARTER_ROWS * quarter));
}

// What the kernels ask of a compiler beyond the intrinsics, so that blocks are decoded and multiplied in registers. The
// vector pipes are what binds, and a copy of a register takes one of them.
// - HOLD_LOADS: loads behind it stay behind it. Compilers would load much of a block first, and spill it.
// - hide_address: the same address, unknown to the compiler, so that it loads again what an instruction overwrites.
// - hide_vector: the same for a constant. GCC makes two instructions of a multiplication by 3.
// - insert_bits: where mask has a bit: of a, elsewhere of b, whose register has the result. insert_bits_outside is the
//   opposite. Compilers choose the register of the mask as often, and copy it.
// - ADD_PRODUCTS: adds to acc the products of operands and the four activations in 32-bit lane `lane` of y, a constant.
//   GCC moves acc between registers where it makes this of the intrinsic.
#    if defined(__GNUC__) || defined(__clang__)
#        define HOLD_LOADS() __asm__ volatile("" ::: "memory")

static inline const uint32_t * hide_address(const uint32_t * words) {
    __asm__("" : "+r"(words));
    return words;
}

static inline uint8x16_t hide_vector(uint8x16_t x) {
    __asm__("" : "+w"(x));
    return x;
}

static inline uint8x16_t insert_bits(uint8x16_t mask, uint8x16_t a, uint8x16_t b) {
    __asm__("bit %0.16b, %1.16b, %2.16b" : "+w"(b) : "w"(a), "w"(mask));
    return b;
}

static inline uint8x16_t insert_bits_outside(uint8x16_t mask, uint8x16_t a, uint8x16_t b) {
    __asm__("bif %0.16b, %1.16b, %2.16b" : "+w"(b) : "w"(a), "w"(mask));
    return b;
}
#    else
#        define HOLD_LOADS() ((void) 0)

static inline const uint32_t * hide_address(const uint32_t * words) {
    return words;
}

static inline uint8x16_t hide_vector(uint8x16_t x) {
    return x;
}

static inline uint8x16_t insert_bits(uint8x16_t mask, uint8x16_t a, uint8x16_t b) {
    return vbslq_u8(mask, a, b);
}

static inline uint8x16_t insert_bits_outside(uint8x16_t mask, uint8x16_t a, uint8x16_t b) {
    return vbslq_u8(mask, b, a);
}
#    endif

#    if defined(__ARM_FEATURE_DOTPROD) && (defined(__GNUC__) || defined(__clang__))
#        define ADD_PRODUCTS(acc, operands, y, lane)                                                      \
            do {                                                                                          \
                int32x4_t sum_ = acc;                                                                     \
                __asm__("sdot %0.4s, %1.16b, %2.4b[%3]" : "+w"(sum_) : "w"(operands), "w"(y), "i"(lane)); \
                acc = sum_;                                                                               \
            } while (0)
#    elif defined(__ARM_FEATURE_DOTPROD)
#        define ADD_PRODUCTS(acc, operands, y, lane) ((acc) = vdotq_laneq_s32(acc, operands, y, lane))
#    else
static inline int32x4_t add_products(int32x4_t acc, int8x16_t operands, int8x16_t four) {
    const int16x8_t lo = vmull_s8(vget_low_s8(operands), vget_low_s8(four));
    const int16x8_t hi = vmull_high_s8(operands, four);
    return vpadalq_s16(acc, vpaddq_s16(lo, hi));  // 4 * 61 * 127 fit 16 bits
}

#        define ADD_PRODUCTS(acc, operands, y, lane) \
            ((acc) = add_products(acc, operands, vreinterpretq_s8_s32(vdupq_laneq_s32(vreinterpretq_s32_s8(y), lane))))
#    endif

static inline uint8x16_t xor3(uint8x16_t a, uint8x16_t b, uint8x16_t c) {
#    if defined(__ARM_FEATURE_SHA3)
    return veor3q_u8(a, b, c);
#    else
    return veorq_u8(veorq_u8(a, b), c);
#    endif
}

//
// products
//

// Scales of a quarter of the rows of a block, and of what zero-points take (TQ1_0 and TQ2_0 have none).
struct block_scales {
    float32x4_t d0;
    float32x4_t dmin;
};

static inline float32x4_t load_halves(const ggml_half * halves, int quarter) {
    return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16((const uint16_t *) halves + QUARTER_ROWS * quarter)));
}

// The same of numbers that have a start state in them.
static inline float32x4_t load_halves_of_states(const ggml_half * halves, int quarter) {
    const uint16x4_t bits = vld1_u16((const uint16_t *) halves + QUARTER_ROWS * quarter);
    return vcvt_f32_f16(vreinterpret_f16_u16(vbic_u16(bits, vdup_n_u16(ITQ_STATE_MASK))));
}

// A block's sums to its part of the result.
ITQ_INLINE void add_block(float * to, int32x4_t acc, struct block_scales s, const int has_min, int32_t sum, float d1) {
    float32x4_t v = vmulq_f32(vcvtq_f32_s32(acc), s.d0);
    if (has_min) {
        v = vfmsq_f32(v, s.dmin, vdupq_n_f32((float) sum));
    }
    vst1q_f32(to, vfmaq_f32(vld1q_f32(to), v, vdupq_n_f32(d1)));
}

// Up to this many columns are multiplied as a block is decoded.
#    define DIRECT_COLUMNS 4

// direct(nb, panel, y, number of columns, out) for up to DIRECT_COLUMNS, with a number that the compiler knows.
#    define DIRECT_CASE(n, direct, nb, panel, y, out) \
        case n:                                       \
            direct(nb, panel, y, n, out);             \
            return;
#    define RETURN_DIRECT(direct, nb, panel, y, nc, out) \
        switch (nc) {                                    \
            DIRECT_CASE(1, direct, nb, panel, y, out)    \
            DIRECT_CASE(2, direct, nb, panel, y, out)    \
            DIRECT_CASE(3, direct, nb, panel, y, out)    \
            DIRECT_CASE(4, direct, nb, panel, y, out)    \
            default:                                     \
                break;                                   \
        }

// More columns: signed operands of all places of a block, for all rows; they stay in the first-level cache, where every
// column finds them.
typedef struct {
    int8_t operands[PLACES][QUARTERS][16];
} decoded_block;

static inline void store_place(decoded_block * decoded, int place, int quarter, int8x16_t operands) {
    vst1q_s8(decoded->operands[place][quarter], operands);
}

#    define TILE_COLUMNS 4

// n columns, the first of which is `at`, of a block that is decoded; `offset` is what operands exceed the weights by.
ITQ_INLINE void multiply_tile(const decoded_block * decoded, const struct block_scales s[QUARTERS], const int length,
                              int offset, int has_min, const struct itq_columns * y, int64_t at, const int n,
                              float out[][ITQ_PANEL_ROWS]) {
    const int8_t * q = y->q + at * length;

    int32x4_t acc[TILE_COLUMNS][QUARTERS];
    for (int c = 0; c < n; ++c) {
        for (int i = 0; i < QUARTERS; ++i) {
            acc[c][i] = vdupq_n_s32(-offset * y->sums[at + c]);
        }
    }
    for (int p = 0; p < length / 4; p += 4) {
        int8x16_t v[TILE_COLUMNS];
        for (int c = 0; c < n; ++c) {
            v[c] = vld1q_s8(q + c * length + 4 * p);
        }
#    define ADD_PLACE(lane)                                                        \
        for (int i = 0; i < QUARTERS; ++i) {                                       \
            const int8x16_t operands = vld1q_s8(decoded->operands[p + (lane)][i]); \
            for (int c = 0; c < n; ++c) {                                          \
                ADD_PRODUCTS(acc[c][i], operands, v[c], lane);                     \
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
            add_block(out[c] + QUARTER_ROWS * i, acc[c][i], s[i], has_min, y->sums[at + c], y->d[at + c]);
        }
    }
}

// All columns of block b.
ITQ_INLINE void multiply_block(const decoded_block * decoded, const struct block_scales s[QUARTERS], const int length,
                               int offset, int has_min, const struct itq_columns * y, int64_t b, int nc,
                               float out[][ITQ_PANEL_ROWS]) {
    int c = 0;
    for (; c + TILE_COLUMNS <= nc; c += TILE_COLUMNS) {
        multiply_tile(decoded, s, length, offset, has_min, y, b * nc + c, TILE_COLUMNS, out + c);
    }
    switch (nc - c) {
        case 3:
            multiply_tile(decoded, s, length, offset, has_min, y, b * nc + c, 3, out + c);
            break;
        case 2:
            multiply_tile(decoded, s, length, offset, has_min, y, b * nc + c, 2, out + c);
            break;
        case 1:
            multiply_tile(decoded, s, length, offset, has_min, y, b * nc + c, 1, out + c);
            break;
        default:
            break;
    }
}

//
// trellis types: codes to indices, two in a byte, and indices to levels
//

#    define SELECTORS_BEFORE 6

// Selectors of t = -6 .. words - 1 of a block of 32 * words weights: before t = 0 those of t + words, a bit lower, and those of
// the start states, which are in the numbers at `last`. The others are loaded as they are needed.
struct selectors {
    uint8x16_t at[SELECTORS_BEFORE + 8];
    uint8x16_t c0;  // of the step before
};

ITQ_INLINE struct selectors load_selectors_before(const int         words, uint32_t (*sel)[ITQ_PANEL_ROWS],
                                                  const ggml_half * last, int quarter) {
    const uint32x4_t states = vmovl_u16(vld1_u16((const uint16_t *) last + QUARTER_ROWS * quarter));
    struct selectors s;
#    define BEFORE(i, bit)                                                                                       \
        {                                                                                                        \
            const int        t    = words - 1 - (i);                                                             \
            const uint8x16_t from = t < 0 ? s.at[SELECTORS_BEFORE + t] : load_words(sel[t], quarter);            \
            const uint32x4_t all  = vsliq_n_u32(bit, vreinterpretq_u32_u8(from), 1); /* twice, and the lowest */ \
            s.at[SELECTORS_BEFORE - 1 - (i)] = vreinterpretq_u8_u32(all);                                        \
        }
    BEFORE(0, states)
    BEFORE(1, vshrq_n_u32(states, 1))
    BEFORE(2, vshrq_n_u32(states, 2))
    BEFORE(3, vshrq_n_u32(states, 3))
    BEFORE(4, vshrq_n_u32(states, 4))
    BEFORE(5, vshrq_n_u32(states, 5))
#    undef BEFORE
    s.c0 = veorq_u8(s.at[SELECTORS_BEFORE - 3], s.at[SELECTORS_BEFORE - 5]);
    return s;
}

// The codes of a step: nibbles i (itq-gemm.h), c2 and, of symbols of three bits, q2, which has neighbours exchanged.
struct step {
    uint8x16_t nibbles[4];
    uint8x16_t c2;
    uint8x16_t q2;
};

ITQ_INLINE struct step load_step(const int bits, const int           words, uint32_t (*sel)[ITQ_PANEL_ROWS],
                                 uint32_t (*qs)[ITQ_PANEL_ROWS], int quarter, struct selectors * selectors,
                                 const int t) {
    const uint8x16_t bit = vdupq_n_u8(0x55), fields = vdupq_n_u8(0x33);

    uint8x16_t * s = selectors->at + SELECTORS_BEFORE + t;
    s[0]           = load_words(sel[t], quarter);

    struct step x;
    x.c2                = xor3(s[0], s[-5], s[-6]);
    const uint8x16_t c1 = xor3(s[-1], s[-4], selectors->c0);
    const uint8x16_t c0 = veorq_u8(s[-2], s[-4]);
    selectors->c0       = c0;

    const uint8x16_t even = insert_bits(bit, c0, vaddq_u8(c1, c1));
    const uint8x16_t odd  = insert_bits_outside(bit, c1, vshrq_n_u8(c0, 1));
    if (bits == 1) {
        const uint8x16_t swapped = insert_bits(fields, vshrq_n_u8(x.c2, 2), vshlq_n_u8(x.c2, 2));
        const uint8x16_t of_even = insert_bits(bit, swapped, load_words(qs[t], quarter));
        const uint8x16_t of_odd  = insert_bits_outside(bit, swapped, load_words(hide_address(qs[t]), quarter));
        x.nibbles[0]             = vbslq_u8(fields, even, of_even);
        x.nibbles[1]             = vbslq_u8(fields, odd, of_odd);
        x.nibbles[2]             = insert_bits_outside(fields, even, of_even);
        x.nibbles[3]             = insert_bits_outside(fields, odd, of_odd);
    } else {
        x.nibbles[0] = insert_bits(fields, even, load_words(qs[2 * t], quarter));
        x.nibbles[1] = insert_bits(fields, odd, load_words(qs[2 * t + 1], quarter));
        x.nibbles[2] = insert_bits_outside(fields, even, load_words(hide_address(qs[2 * t]), quarter));
        x.nibbles[3] = insert_bits_outside(fields, odd, load_words(hide_address(qs[2 * t + 1]), quarter));
    }
    x.q2 = bits == 3 ? load_words(qs[2 * words + t], quarter) : x.c2;
    return x;
}

// Levels by 16*c2 + nibble and by 2*nibble + c2, of nibbles i < 2 and i >= 2 and q2 = 0 and 1; of one symbol bit by nibble i.
struct level_tables {
    int8x16x2_t lower[2][2];
    int8x16x2_t upper[2][2];
    int8x16_t   by_nibble[4];
};

ITQ_INLINE int8x16_t level_table(const int bits, const int8_t * levels, int i, int rest) {
    uint8_t table[16];
    itq_level_table(bits, levels, i, rest, table);
    return vreinterpretq_s8_u8(vsubq_u8(vld1q_u8(table), vdupq_n_u8(64)));
}

ITQ_INLINE struct level_tables load_level_tables(const int bits, const int8_t * levels) {
    struct level_tables tables;
    for (int i = 0; i < 4 && bits == 1; ++i) {
        tables.by_nibble[i] = level_table(bits, levels, i, 0);
    }
    for (int q2 = 0; q2 < bits - 1; ++q2) {
        for (int i = 0; i < 2; ++i) {
            const int8x16_t a   = level_table(bits, levels, 2 * i, 2 * q2);
            const int8x16_t b   = level_table(bits, levels, 2 * i, 2 * q2 + 1);
            tables.lower[q2][i] = (int8x16x2_t){ { a, b } };
            tables.upper[q2][i] = vzipq_s8(a, b);
        }
    }
    return tables;
}

// Lower nibbles i below bit i of the bytes of a plane, in place 4.
ITQ_INLINE uint8x16_t lower_index(uint8x16_t nibbles, uint8x16_t plane, const int i) {
    if (i == 0) {
        return vsliq_n_u8(nibbles, vandq_u8(plane, vdupq_n_u8(1)), 4);
    }
    const uint8x16_t up = i == 1 ? vshlq_n_u8(plane, 3) : i == 2 ? vshlq_n_u8(plane, 2) : vshlq_n_u8(plane, 1);
    return insert_bits(vdupq_n_u8(0x0F), nibbles, vandq_u8(up, vdupq_n_u8(0x10)));
}

// Upper nibbles i = 1 to 3 above bit i + 4, in place 0.
ITQ_INLINE uint8x16_t upper_index(uint8x16_t nibbles, uint8x16_t plane, const int i) {
    if (i == 3) {
        return vshrq_n_u8(vsriq_n_u8(nibbles, plane, 4), 3);
    }
    const uint8x16_t down = i == 1 ? vshrq_n_u8(plane, 2) : vshrq_n_u8(plane, 3);
    return vshrq_n_u8(insert_bits_outside(vdupq_n_u8(0x08), nibbles, down), 3);
}

// Levels of weights g by one of the tables of q2 = 0 and 1.
ITQ_INLINE int8x16_t look_up(const int bits, const int8x16x2_t tables[2][2], const int i, uint8x16_t index,
                             uint8x16_t q2, int g) {
    const int8x16_t levels = vqtbl2q_s8(tables[0][i / 2], index);
    if (bits == 2) {
        return levels;
    }
    const uint8x16_t upper = vtstq_u8(q2, vdupq_n_u8((uint8_t) (1 << (g ^ 1))));
    return vbslq_s8(upper, vqtbl2q_s8(tables[1][i / 2], index), levels);
}

// Levels of the weights in the lower and in the upper nibbles i of a step.
ITQ_INLINE void levels_of_nibbles(const int bits, const struct level_tables * tables, const struct step * x,
                                  const int i, int8x16_t levels[2]) {
    const uint8x16_t low     = vdupq_n_u8(0x0F);
    const uint8x16_t nibbles = x->nibbles[i];
    if (bits == 1) {
        levels[0] = vqtbl1q_s8(tables->by_nibble[i], vandq_u8(nibbles, low));
        levels[1] = vqtbl1q_s8(tables->by_nibble[i], vshrq_n_u8(nibbles, 4));
        return;
    }
    // what overwrites the nibbles comes last
    if (i == 0) {
        const uint8x16_t upper = vsriq_n_u8(vandq_u8(x->c2, vdupq_n_u8(0x10)), nibbles, 4);
        levels[1]              = look_up(bits, tables->lower, i, upper, x->q2, 4);
        levels[0]              = look_up(bits, tables->lower, i, lower_index(nibbles, x->c2, i), x->q2, i);
    } else {
        levels[0] = look_up(bits, tables->lower, i, lower_index(nibbles, x->c2, i), x->q2, i);
        levels[1] = look_up(bits, tables->upper, i, upper_index(nibbles, x->c2, i), x->q2, i + 4);
    }
}

static inline struct block_scales scales_1(const itq_scales_1 * scales, int quarter) {
    struct block_scales s;
    s.d0   = vmulq_n_f32(load_halves(scales->d, quarter), 0.03125f);
    s.dmin = vmulq_f32(s.d0, load_halves_of_states(scales->z, quarter));
    return s;
}

static inline struct block_scales scales_0(const itq_scales_0 * scales, int quarter) {
    return (struct block_scales){ vmulq_n_f32(load_halves_of_states(scales->d, quarter), 0.03125f), vdupq_n_f32(0.0f) };
}

#    define LAST_1(scales) (scales)->z
#    define LAST_0(scales) (scales)->d

// A step of gemm_direct_name: t = first + lane in a block of 256. In a block of 64 the places of one register of activations are
// those of both steps and of i and i + 1.
#    define NIBBLES(bits, i, length, at, lane)                                                    \
        {                                                                                         \
            int8x16_t levels[2];                                                                  \
            levels_of_nibbles(bits, &tables, &step, i, levels);                                   \
            for (int upper = 0; upper < 2; ++upper) {                                             \
                for (int c = 0; c < nc; ++c) {                                                    \
                    const int8x16_t v = vld1q_s8(q + c * (length) + (at) + (length) / 2 * upper); \
                    ADD_PRODUCTS(acc[c][upper % chains], levels[upper], v, lane);                 \
                }                                                                                 \
            }                                                                                     \
        }
#    define STEP(bits, lane)                                                                                   \
        {                                                                                                      \
            HOLD_LOADS();                                                                                      \
            ITQ_PREFETCH(codes, QUARTERS * (first + (lane)) + i);                                              \
            const struct step step = load_step(bits, 8, codes->sel, codes->qs, i, &selectors, first + (lane)); \
            NIBBLES(bits, 0, QK_K, 4 * first, lane)                                                            \
            NIBBLES(bits, 1, QK_K, 4 * (8 + first), lane)                                                      \
            NIBBLES(bits, 2, QK_K, 4 * (16 + first), lane)                                                     \
            NIBBLES(bits, 3, QK_K, 4 * (24 + first), lane)                                                     \
        }

#    define MULTIPLY_256(bits)                                               \
        _Pragma("GCC unroll 2") for (int first = 0; first < 8; first += 4) { \
            STEP(bits, 0)                                                    \
            STEP(bits, 1)                                                    \
            STEP(bits, 2)                                                    \
            STEP(bits, 3)                                                    \
        }

#    define STEP_OF_64(bits, t)                                                                   \
        {                                                                                         \
            HOLD_LOADS();                                                                         \
            ITQ_PREFETCH(codes, 2 * i + (t));                                                     \
            const struct step step = load_step(bits, 2, codes->sel, codes->qs, i, &selectors, t); \
            NIBBLES(bits, 0, 64, 0, t)                                                            \
            NIBBLES(bits, 1, 64, 0, 2 + (t))                                                      \
            NIBBLES(bits, 2, 64, 16, t)                                                           \
            NIBBLES(bits, 3, 64, 16, 2 + (t))                                                     \
        }
#    define MULTIPLY_64(bits) STEP_OF_64(bits, 0) STEP_OF_64(bits, 1)

// Few columns: two sums of a column take turns, because sdot has a latency. Many: a block is decoded to memory once.
#    define GEMM_TRELLIS(NAME, name, bits, n_levels, length, has_z, number)                                            \
        ITQ_INLINE void gemm_direct_##name(int64_t nb, const void * panel, const struct itq_columns * y, const int nc, \
                                           float out[][ITQ_PANEL_ROWS]) {                                              \
            static const int8_t       table[n_levels] = NAME##_LEVELS;                                                 \
            const struct level_tables tables          = load_level_tables(bits, table);                                \
            const int                 chains          = nc <= 2 ? 2 : 1;                                               \
            memset(out, 0, (size_t) nc * sizeof(*out));                                                                \
                                                                                                                       \
            for (int64_t b = 0; b < nb; ++b) {                                                                         \
                itq_codes_##name *        codes  = itq_codes_of_##name(panel, b);                                      \
                const itq_scales_##name * scales = itq_scales_of_##name(panel, b);                                     \
                const int8_t *            q      = y->q + b * nc * (length);                                           \
                for (int i = 0; i < QUARTERS; ++i) {                                                                   \
                    int32x4_t acc[DIRECT_COLUMNS][2];                                                                  \
                    for (int c = 0; c < nc; ++c) {                                                                     \
                        acc[c][0] = acc[c][1] = vdupq_n_s32(0);                                                        \
                    }                                                                                                  \
                    struct selectors selectors =                                                                       \
                        load_selectors_before((length) / 32, codes->sel, LAST_##has_z(scales), i);                     \
                    MULTIPLY_##length(bits) const struct block_scales s = scales_##has_z(scales, i);                   \
                    for (int c = 0; c < nc; ++c) {                                                                     \
                        const int64_t   at  = b * nc + c;                                                              \
                        const int32x4_t sum = chains == 2 ? vaddq_s32(acc[c][0], acc[c][1]) : acc[c][0];               \
                        add_block(out[c] + QUARTER_ROWS * i, sum, s, has_z, y->sums[at], y->d[at]);                    \
                    }                                                                                                  \
                }                                                                                                      \
            }                                                                                                          \
        }                                                                                                              \
                                                                                                                       \
        static inline void decode_##name(itq_codes_##name * codes, const itq_scales_##name * scales, int quarter,      \
                                         decoded_block * decoded) {                                                    \
            static const int8_t       table[n_levels] = NAME##_LEVELS;                                                 \
            const struct level_tables tables          = load_level_tables(bits, table);                                \
            struct selectors          selectors =                                                                      \
                load_selectors_before((length) / 32, codes->sel, LAST_##has_z(scales), quarter);                       \
            _Pragma("GCC unroll 8") for (int t = 0; t < (length) / 32; ++t) {                                          \
                const struct step step =                                                                               \
                    load_step(bits, (length) / 32, codes->sel, codes->qs, quarter, &selectors, t);                     \
                for (int i = 0; i < 4; ++i) {                                                                          \
                    int8x16_t levels[2];                                                                               \
                    levels_of_nibbles(bits, &tables, &step, i, levels);                                                \
                    store_place(decoded, (length) / 32 * i + t, quarter, levels[0]);                                   \
                    store_place(decoded, (length) / 32 * (i + 4) + t, quarter, levels[1]);                             \
                }                                                                                                      \
            }                                                                                                          \
        }                                                                                                              \
                                                                                                                       \
        void itq_gemm_##name(int64_t nb, const void * panel, const struct itq_columns * y, int nc,                     \
                             float out[][ITQ_PANEL_ROWS]) {                                                            \
            RETURN_DIRECT(gemm_direct_##name, nb, panel, y, nc, out)                                                   \
                                                                                                                       \
            memset(out, 0, (size_t) nc * sizeof(*out));                                                                \
            for (int64_t b = 0; b < nb; ++b) {                                                                         \
                decoded_block       decoded;                                                                           \
                struct block_scales s[QUARTERS];                                                                       \
                for (int i = 0; i < QUARTERS; ++i) {                                                                   \
                    const itq_scales_##name * scales = itq_scales_of_##name(panel, b);                                 \
                    decode_##name(itq_codes_of_##name(panel, b), scales, i, &decoded);                                 \
                    s[i] = scales_##has_z(scales, i);                                                                  \
                }                                                                                                      \
                multiply_block(&decoded, s, length, 0, has_z, y, b, nc, out);                                          \
            }                                                                                                          \
        }
ITQ_TYPES(GEMM_TRELLIS)

#    undef STEP

//
// TQ2_0 and TQ1_0
//

static inline struct block_scales scales_tq(const itq_scales_tq * scales, int quarter) {
    return (struct block_scales){ load_halves(scales->d, quarter), vdupq_n_f32(0.0f) };
}

// Products of more than DIRECT_COLUMNS columns.
#    define GEMM_DECODED_TQ(type)                                                                                    \
        static inline void gemm_decoded_##type(int64_t nb, const void * panel, const struct itq_columns * y, int nc, \
                                               float out[][ITQ_PANEL_ROWS]) {                                        \
            memset(out, 0, (size_t) nc * sizeof(*out));                                                              \
            for (int64_t b = 0; b < nb; ++b) {                                                                       \
                decoded_block       decoded;                                                                         \
                struct block_scales s[QUARTERS];                                                                     \
                for (int i = 0; i < QUARTERS; ++i) {                                                                 \
                    decode_##type(itq_codes_of_##type(panel, b), i, &decoded);                                       \
                    s[i] = scales_tq(itq_scales_of_##type(panel, b), i);                                             \
                }                                                                                                    \
                multiply_block(&decoded, s, QK_K, 1, 0, y, b, nc, out);                                              \
            }                                                                                                        \
        }

// Trits plus one: trit f of the bytes of word w is at place first_place_tq2_0(w) + 8*f.
static inline int first_place_tq2_0(int w) {
    return 32 * (w / 8) + w % 8;
}

// Few columns: fields have sums of their own, so that those of a multiple of their trits are shifted once a block. Rows
// are taken as their sums find registers.
ITQ_INLINE void gemm_direct_tq2_0(int64_t nb, const void * panel, const struct itq_columns * y, const int nc,
                                  float out[][ITQ_PANEL_ROWS]) {
    const uint8x16_t ones = vdupq_n_u8(0x03), fours = vdupq_n_u8(0x0C), sixteens = vdupq_n_u8(0x30);
    const int        quarters = nc == 1 ? 2 : 1;
    memset(out, 0, (size_t) nc * sizeof(*out));

    for (int64_t b = 0; b < nb; ++b) {
        const itq_codes_tq2_0 * codes  = itq_codes_of_tq2_0(panel, b);
        const itq_scales_tq *   scales = itq_scales_of_tq2_0(panel, b);
        const int8_t *          q      = y->q + b * nc * QK_K;
        for (int line = 0; line < 17; ++line) {
            ITQ_PREFETCH(codes, line);
        }
        for (int first = 0; first < QUARTERS; first += quarters) {
            int32x4_t acc[2][DIRECT_COLUMNS][4];
            for (int i = 0; i < quarters; ++i) {
                for (int c = 0; c < nc; ++c) {
                    acc[i][c][0] = vdupq_n_s32(-y->sums[b * nc + c]);
                    acc[i][c][1] = acc[i][c][2] = acc[i][c][3] = vdupq_n_s32(0);
                }
            }
            for (int w = 0; w < 16; w += 4) {
                const int8_t * at = q + 4 * first_place_tq2_0(w);
#    define STEP(lane)                                                                                   \
        HOLD_LOADS();                                                                                    \
        for (int i = 0; i < quarters; ++i) {                                                             \
            const uint8x16_t x         = load_words(codes->qs[w + (lane)], first + i);                   \
            const uint8x16_t fields[4] = { vandq_u8(x, ones), vandq_u8(x, fours), vandq_u8(x, sixteens), \
                                           vshrq_n_u8(x, 6) };                                           \
            for (int f = 0; f < 4; ++f) {                                                                \
                for (int c = 0; c < nc; ++c) {                                                           \
                    const int8x16_t v = vld1q_s8(at + c * QK_K + 32 * f);                                \
                    ADD_PRODUCTS(acc[i][c][f], vreinterpretq_s8_u8(fields[f]), v, lane);                 \
                }                                                                                        \
            }                                                                                            \
        }
                STEP(0)
                STEP(1)
                STEP(2)
                STEP(3)
#    undef STEP
            }
            for (int i = 0; i < quarters; ++i) {
                const struct block_scales s = scales_tq(scales, first + i);
                for (int c = 0; c < nc; ++c) {
                    const int32x4_t * sums = acc[i][c];
                    const int32x4_t   sum  = vsraq_n_s32(vsraq_n_s32(sums[0], sums[1], 2), sums[2], 4);
                    add_block(out[c] + QUARTER_ROWS * (first + i), vaddq_s32(sum, sums[3]), s, 0, 0, y->d[b * nc + c]);
                }
            }
        }
    }
}

static inline void decode_tq2_0(const itq_codes_tq2_0 * codes, int quarter, decoded_block * decoded) {
    const uint8x16_t three = vdupq_n_u8(3);
    for (int w = 0; w < 16; ++w) {
        const uint8x16_t x     = load_words(codes->qs[w], quarter);
        const int        place = first_place_tq2_0(w);
        store_place(decoded, place, quarter, vreinterpretq_s8_u8(vandq_u8(x, three)));
        store_place(decoded, place + 8, quarter, vreinterpretq_s8_u8(vandq_u8(vshrq_n_u8(x, 2), three)));
        store_place(decoded, place + 16, quarter, vreinterpretq_s8_u8(vandq_u8(vshrq_n_u8(x, 4), three)));
        store_place(decoded, place + 24, quarter, vreinterpretq_s8_u8(vshrq_n_u8(x, 6)));
    }
}

GEMM_DECODED_TQ(tq2_0)

void itq_gemm_tq2_0(int64_t nb, const void * panel, const struct itq_columns * y, int nc, float out[][ITQ_PANEL_ROWS]) {
    RETURN_DIRECT(gemm_direct_tq2_0, nb, panel, y, nc, out)
    gemm_decoded_tq2_0(nb, panel, y, nc, out);
}

// The trit plus one of every byte, a fraction of 256: the integer part of three times that. What is left over is the
// fraction of the next.
static inline int8x16_t trits_tq1_0(uint8x16_t x) {
    return vreinterpretq_s8_u8(vshrq_n_u8(vhaddq_u8(x, vshrq_n_u8(x, 1)), 6));
}

static inline uint8x16_t next_tq1_0(uint8x16_t x) {
    return vmulq_u8(x, hide_vector(vdupq_n_u8(3)));
}

// Few columns. Two sums of a column take turns, because sdot has a latency.
ITQ_INLINE void gemm_direct_tq1_0(int64_t nb, const void * panel, const struct itq_columns * y, const int nc,
                                  float out[][ITQ_PANEL_ROWS]) {
    const int chains = nc <= 2 ? 2 : 1;
    memset(out, 0, (size_t) nc * sizeof(*out));

    for (int64_t b = 0; b < nb; ++b) {
        const itq_codes_tq1_0 * codes  = itq_codes_of_tq1_0(panel, b);
        const itq_scales_tq *   scales = itq_scales_of_tq1_0(panel, b);
        const int8_t *          q      = y->q + b * nc * QK_K;
        for (int line = 0; line < 14; ++line) {
            ITQ_PREFETCH(codes, line);
        }
        for (int i = 0; i < QUARTERS; ++i) {
            int32x4_t acc[DIRECT_COLUMNS][2];
            for (int c = 0; c < nc; ++c) {
                acc[c][0] = vdupq_n_s32(-y->sums[b * nc + c]);
                acc[c][1] = vdupq_n_s32(0);
            }
#    define ADD_TRITS(x, v, lane) ADD_PRODUCTS(acc[c][(lane) % chains], trits_tq1_0(x), v, lane)
            // two words at a time share the loads of activations
#    define STEP(lane)                                                                                           \
        {                                                                                                        \
            HOLD_LOADS();                                                                                        \
            uint8x16_t x0 = load_words(codes->qs[w + (lane)], i), x1 = load_words(codes->qs[w + (lane) + 1], i); \
            for (int l = 0; l < 5; ++l, x0 = next_tq1_0(x0), x1 = next_tq1_0(x1)) {                              \
                for (int c = 0; c < nc; ++c) {                                                                   \
                    const int8x16_t v = vld1q_s8(q + c * QK_K + 4 * (place + step * l));                         \
                    ADD_TRITS(x0, v, lane);                                                                      \
                    ADD_TRITS(x1, v, (lane) + 1);                                                                \
                }                                                                                                \
            }                                                                                                    \
        }
            for (int w = 0; w < 12; w += 4) {
                const int place = w < 8 ? w : 40, step = w < 8 ? 8 : 4;
                STEP(0)
                STEP(2)
            }
#    undef STEP
            HOLD_LOADS();
            const uint8x16_t x0 = load_words(codes->qh, i), x1 = next_tq1_0(x0), x2 = next_tq1_0(x1);
            for (int c = 0; c < nc; ++c) {
                const int8x16_t v = vld1q_s8(q + c * QK_K + 240);
                ADD_TRITS(x0, v, 0);
                ADD_TRITS(x1, v, 1);
                ADD_TRITS(x2, v, 2);
                ADD_TRITS(next_tq1_0(x2), v, 3);
            }
#    undef ADD_TRITS
            for (int c = 0; c < nc; ++c) {
                const int32x4_t sum = chains == 2 ? vaddq_s32(acc[c][0], acc[c][1]) : acc[c][0];
                add_block(out[c] + QUARTER_ROWS * i, sum, scales_tq(scales, i), 0, 0, y->d[b * nc + c]);
            }
        }
    }
}

// Trits of the bytes of a word to places `step` apart.
static inline void decode_word_tq1_0(const uint32_t * words, int quarter, int n, int place, int step,
                                     decoded_block * decoded) {
    uint8x16_t x = load_words(words, quarter);
    for (int l = 0; l < n; ++l, x = next_tq1_0(x)) {
        store_place(decoded, place + step * l, quarter, trits_tq1_0(x));
    }
}

static inline void decode_tq1_0(const itq_codes_tq1_0 * codes, int quarter, decoded_block * decoded) {
    for (int w = 0; w < 8; ++w) {
        decode_word_tq1_0(codes->qs[w], quarter, 5, w, 8, decoded);
    }
    for (int w = 0; w < 4; ++w) {
        decode_word_tq1_0(codes->qs[8 + w], quarter, 5, 40 + w, 4, decoded);
    }
    decode_word_tq1_0(codes->qh, quarter, 4, 60, 1, decoded);
}

GEMM_DECODED_TQ(tq1_0)

void itq_gemm_tq1_0(int64_t nb, const void * panel, const struct itq_columns * y, int nc, float out[][ITQ_PANEL_ROWS]) {
    RETURN_DIRECT(gemm_direct_tq1_0, nb, panel, y, nc, out)
    gemm_decoded_tq1_0(nb, panel, y, nc, out);
}

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
                                   uint32_t words[][ITQ_PANEL_ROWS]) {
    for (int w = 0; w < n_words; w += 4) {
        uint8x16_t r[QUARTER_ROWS];
        for (int i = 0; i < QUARTER_ROWS; ++i) {
            r[i] = vld1q_u8((const uint8_t *) block_at(&readers[QUARTER_ROWS * quarter + i], b) + 4 * w);
        }
        store_transposed(words[w] + QUARTER_ROWS * quarter, ITQ_PANEL_ROWS, r);
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

// A plane of bits, `offset` bytes into the blocks: bit 8*j + g of planes[t] from number 64*j + 8*g + t. `swap` moves bit
// g to g ^ swap, 1 or 3.
ITQ_INLINE void repack_plane(const struct row_reader * readers, int64_t b, size_t offset, const int swap, int quarter,
                             uint32_t (*planes)[ITQ_PANEL_ROWS]) {
    static const uint8_t order[16] = { 0, 8, 16, 24, 1, 9, 17, 25, 2, 10, 18, 26, 3, 11, 19, 27 };
    const uint8x16_t     first     = vld1q_u8(order);
    const uint8x16_t     second    = vaddq_u8(first, vdupq_n_u8(4));

    uint8x16_t words[2][QUARTER_ROWS];
    for (int i = 0; i < QUARTER_ROWS; ++i) {
        const uint8_t *    x     = (const uint8_t *) block_at(&readers[QUARTER_ROWS * quarter + i], b) + offset;
        // byte t of every 8 then has the bits of word t
        const uint8x16x2_t bytes = { { transpose_bits(vld1q_u8(x)), transpose_bits(vld1q_u8(x + 16)) } };
        words[0][i]              = vqtbl2q_u8(bytes, first);
        words[1][i]              = vqtbl2q_u8(bytes, second);
        for (int w = 0; w < 2 && swap; ++w) {
            if (swap == 3) {
                words[w][i] = select_bits(0x33, vshrq_n_u8(words[w][i], 2), vshlq_n_u8(words[w][i], 2));
            }
            words[w][i] = select_bits(0x55, vshrq_n_u8(words[w][i], 1), vshlq_n_u8(words[w][i], 1));
        }
    }
    store_transposed(planes[0] + QUARTER_ROWS * quarter, ITQ_PANEL_ROWS, words[0]);
    store_transposed(planes[4] + QUARTER_ROWS * quarter, ITQ_PANEL_ROWS, words[1]);
}

// Symbols of two bits, with which a block begins.
static inline void repack_symbols(const struct row_reader * readers, int64_t b, int quarter,
                                  uint32_t (*qs)[ITQ_PANEL_ROWS]) {
    uint8x16_t words[4][QUARTER_ROWS];
    for (int i = 0; i < QUARTER_ROWS; ++i) {
        const uint8_t * x = block_at(&readers[QUARTER_ROWS * quarter + i], b);

        // byte 8*h + t of v[a] has the symbols of places 16*a + 8*h + t, j = 0 .. 3 in its fields: the fields become the
        // register, and a = 1, 0, 3, 2 fields 0 .. 3
        const uint8x16_t v0 = vld1q_u8(x), v1 = vld1q_u8(x + 16);
        const uint8x16_t v2 = vld1q_u8(x + 32), v3 = vld1q_u8(x + 48);
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
        store_transposed(qs[2 * (4 * w % 8) + w / 2] + QUARTER_ROWS * quarter, 2 * ITQ_PANEL_ROWS, words[w]);
    }
}

#    define REPACK_256(NAME, name, bits, n_levels, length, has_z, number)                                  \
        void itq_repack_##name(const void * rows, size_t row_size, int n_rows, int64_t nb, void * panel) { \
            struct row_reader readers[ITQ_PANEL_ROWS];                                                     \
            open_rows(readers, rows, row_size, n_rows, sizeof(block_##name));                              \
            for (int64_t b = 0; b < nb; ++b) {                                                             \
                itq_codes_##name *  codes  = itq_codes_of_##name(panel, b);                                \
                itq_scales_##name * scales = itq_scales_of_##name(panel, b);                               \
                for (int i = 0; i < QUARTERS; ++i) {                                                       \
                    repack_plane(readers, b, offsetof(block_##name, sel), 0, i, codes->sel);               \
                    if ((bits) == 1) {                                                                     \
                        repack_plane(readers, b, 0, 3, i, codes->qs);                                      \
                    } else {                                                                               \
                        repack_symbols(readers, b, i, codes->qs);                                          \
                    }                                                                                      \
                    if ((bits) == 3) {                                                                     \
                        repack_plane(readers, b, QK_ITQ / 4, 1, i, codes->qs + 16);                        \
                    }                                                                                      \
                }                                                                                          \
                if ((bits) == 3) {                                                                         \
                    itq_mirror_symbols(8, codes->qs);                                                      \
                }                                                                                          \
                for (int r = 0; r < ITQ_PANEL_ROWS; ++r) {                                                 \
                    const block_##name * x = block_at(&readers[r], b);                                     \
                    scales->d[r]           = x->d;                                                         \
                    ITQ_COPY_ZERO_POINT_##has_z(scales->z[r], x->z);                                       \
                }                                                                                          \
            }                                                                                              \
        }
ITQ_TYPES_256(REPACK_256)

void itq_repack_tq2_0(const void * rows, size_t row_size, int n_rows, int64_t nb, void * panel) {
    struct row_reader readers[ITQ_PANEL_ROWS];
    open_rows(readers, rows, row_size, n_rows, sizeof(block_tq2_0));
    for (int64_t b = 0; b < nb; ++b) {
        itq_codes_tq2_0 * codes  = itq_codes_of_tq2_0(panel, b);
        itq_scales_tq *   scales = itq_scales_of_tq2_0(panel, b);
        for (int i = 0; i < QUARTERS; ++i) {
            transpose_words(readers, b, i, 16, codes->qs);  // a block begins with them
        }
        for (int r = 0; r < ITQ_PANEL_ROWS; ++r) {
            scales->d[r] = ((const block_tq2_0 *) block_at(&readers[r], b))->d;
        }
    }
}

void itq_repack_tq1_0(const void * rows, size_t row_size, int n_rows, int64_t nb, void * panel) {
    struct row_reader readers[ITQ_PANEL_ROWS];
    open_rows(readers, rows, row_size, n_rows, sizeof(block_tq1_0));
    for (int64_t b = 0; b < nb; ++b) {
        itq_codes_tq1_0 * codes  = itq_codes_of_tq1_0(panel, b);
        itq_scales_tq *   scales = itq_scales_of_tq1_0(panel, b);
        for (int i = 0; i < QUARTERS; ++i) {
            transpose_words(readers, b, i, 12, codes->qs);
        }
        for (int r = 0; r < ITQ_PANEL_ROWS; ++r) {
            const block_tq1_0 * x = block_at(&readers[r], b);
            memcpy(&codes->qh[r], x->qh, sizeof(x->qh));
            scales->d[r] = x->d;
        }
    }
}

#    define REPACK_64(NAME, name, ...)                                                                     \
        void itq_repack_##name(const void * rows, size_t row_size, int n_rows, int64_t nb, void * panel) { \
            itq_repack_##name##_words(rows, row_size, n_rows, nb, panel);                                  \
        }
ITQ_TYPES_64(REPACK_64)

void itq_reorder_q8_n_h(const int8_t * q, int8_t * y) {
    const int8x16x4_t v = { { vld1q_s8(q), vld1q_s8(q + 16), vld1q_s8(q + 32), vld1q_s8(q + 48) } };
    vst4q_s8(y, v);
}

void itq_reorder_q8_K_h(const int8_t * q, int8_t * y) {
    for (int p = 0; p < 64; p += 16) {
        const int8x16x4_t v = { { vld1q_s8(q + p), vld1q_s8(q + 64 + p), vld1q_s8(q + 128 + p),
                                  vld1q_s8(q + 192 + p) } };
        vst4q_s8(y + 4 * p, v);
    }
}

#else

#    define KERNELS(type)                                                                                  \
        void itq_gemm_##type(int64_t nb, const void * panel, const struct itq_columns * y, int nc,         \
                             float out[][ITQ_PANEL_ROWS]) {                                                \
            itq_gemm_##type##_generic(nb, panel, y, nc, out);                                              \
        }                                                                                                  \
        void itq_repack_##type(const void * rows, size_t row_size, int n_rows, int64_t nb, void * panel) { \
            itq_repack_##type##_generic(rows, row_size, n_rows, nb, panel);                                \
        }

#    define KERNELS_OF_TYPE(NAME, name, ...) KERNELS(name)
ITQ_TYPES(KERNELS_OF_TYPE)
KERNELS(tq2_0)
KERNELS(tq1_0)

void itq_reorder_q8_K_h(const int8_t * q, int8_t * y) {
    itq_reorder_q8_K_h_generic(q, y);
}

void itq_reorder_q8_n_h(const int8_t * q, int8_t * y) {
    itq_reorder_q8_n_h_generic(q, y);
}

#endif

// Products of one column with rows of the trellis types and TQ2_0 as a file has them, NEON. docs/kernels.md explains them.

#include "../../itq-gemm.h"
#include "itq-decode.h"

#include "ggml-cpu-impl.h"
#include "simd-mappings.h"

#include <math.h>
#include <string.h>

#if defined(ITQ_HAS_GEMV)

#    define GROUP 4  // blocks of a row whose sums fill a register

// Trit f of byte 32*h + i of a block is number 128*h + 32*f + i, plus one.
static inline int32x4_t multiply_block_tq2_0(const block_tq2_0 * x, const int8_t * q) {
    const int8x16_t three  = vdupq_n_s8(3);
    int32x4_t       acc[2] = { vdupq_n_s32(0), vdupq_n_s32(0) };
    for (int j = 0; j < 4; ++j) {
        const uint8x16_t codes = vld1q_u8(x->qs + 16 * j);
        const int8_t *   y     = q + 128 * (j / 2) + 16 * (j % 2);
        const int8x16_t  t0    = vandq_s8(vreinterpretq_s8_u8(codes), three);
        const int8x16_t  t1    = vandq_s8(vreinterpretq_s8_u8(vshrq_n_u8(codes, 2)), three);
        const int8x16_t  t2    = vandq_s8(vreinterpretq_s8_u8(vshrq_n_u8(codes, 4)), three);
        const int8x16_t  t3    = vreinterpretq_s8_u8(vshrq_n_u8(codes, 6));
        acc[0]                 = ggml_vdotq_s32(acc[0], t0, vld1q_s8(y));
        acc[1]                 = ggml_vdotq_s32(acc[1], t1, vld1q_s8(y + 32));
        acc[0]                 = ggml_vdotq_s32(acc[0], t2, vld1q_s8(y + 64));
        acc[1]                 = ggml_vdotq_s32(acc[1], t3, vld1q_s8(y + 96));
    }
    return vaddq_s32(acc[0], acc[1]);
}

static inline int32x4_t sum_4(const int32x4_t p[GROUP]) {
    return vpaddq_s32(vpaddq_s32(p[0], p[1]), vpaddq_s32(p[2], p[3]));
}

// Adds what n <= GROUP blocks have, times the scales of the activations, in the order and with the roundings of a panel.
static inline float add_in_order(float sum, float32x4_t blocks, int n, const float * d1) {
    float v[GROUP];
    vst1q_f32(v, blocks);
    for (int i = 0; i < n; ++i) {
        sum = fmaf(v[i], d1[i], sum);
    }
    return sum;
}

// What zero-points take from n blocks.
static inline float32x4_t subtract_zero_points(float32x4_t v, float32x4_t d0, const float * z, const int32_t * sums) {
    return vfmsq_f32(v, vmulq_f32(d0, vld1q_f32(z)), vcvtq_f32_s32(vld1q_s32(sums)));
}

#    define ZERO_POINT_1(block) GGML_CPU_FP16_TO_FP32(itq_without_state(&(block)->z))
#    define ZERO_POINT_0(block) 0.0f

#    define ADD_GROUP(NAME, name, bits, n_levels, length, has_z, number)                                 \
        ITQ_INLINE float add_group_##name(float sum, const block_##name * x, const int n,                \
                                          const struct itq_columns * y, int64_t at) {                    \
            int32x4_t p[GROUP];                                                                          \
            float     d[GROUP], z[GROUP];                                                                \
            int32_t   total[GROUP];                                                                      \
            for (int i = 0; i < GROUP; ++i) {                                                            \
                const int b = i < n ? i : n - 1;                                                         \
                p[i]        = multiply_block_##name(&x[b], y->q + QK_K * (at + b));                      \
                d[i]        = GGML_CPU_FP16_TO_FP32(name##_scale(&x[b]));                                \
                z[i]        = ZERO_POINT_##has_z(&x[b]);                                                 \
                total[i]    = y->sums[at + b];                                                           \
            }                                                                                            \
            const float32x4_t d0 = vmulq_n_f32(vld1q_f32(d), 0.03125f);                                  \
            const float32x4_t v  = vmulq_f32(vcvtq_f32_s32(sum_4(p)), d0);                               \
            return add_in_order(sum, (has_z) ? subtract_zero_points(v, d0, z, total) : v, n, y->d + at); \
        }
ITQ_TYPES_256(ADD_GROUP)

// Four blocks of 64 together are a block of 256 of the same codes, but that no selector is carried from one to the next: bits
// go on from the first half of a block to the second, to odd places.
#    define CARRIED 0xAA

// Symbols as a block of 256 has them: those of one bit in the order of the blocks, of two bits as field i of quarter f, where
// block i has them in field f.
ITQ_INLINE void gather_symbols(const int bits, const uint8_t * const from[GROUP], uint8_t * qs) {
    if (bits == 1) {
        for (int i = 0; i < GROUP; ++i) {
            memcpy(qs + 8 * i, from[i], 8);
        }
        return;
    }
    const uint8x16_t a = vld1q_u8(from[0]), b = vld1q_u8(from[1]), c = vld1q_u8(from[2]), d = vld1q_u8(from[3]);

    // fields 0 and 2 of pairs of blocks, 1 and 3
    const uint8x16_t ab0 = select_bits(0x33, a, vshlq_n_u8(b, 2)), ab1 = select_bits(0x33, vshrq_n_u8(a, 2), b);
    const uint8x16_t cd0 = select_bits(0x33, c, vshlq_n_u8(d, 2)), cd1 = select_bits(0x33, vshrq_n_u8(c, 2), d);
    vst1q_u8(qs, select_bits(0x0F, ab0, vshlq_n_u8(cd0, 4)));
    vst1q_u8(qs + 16, select_bits(0x0F, ab1, vshlq_n_u8(cd1, 4)));
    vst1q_u8(qs + 32, select_bits(0x0F, vshrq_n_u8(ab0, 4), cd0));
    vst1q_u8(qs + 48, select_bits(0x0F, vshrq_n_u8(ab1, 4), cd1));
    for (int i = 0; i < GROUP && bits == 3; ++i) {
        memcpy(qs + 64 + 8 * i, from[i] + 16, 8);
    }
}

#    define ADD_GROUP_64(NAME, name, bits, n_levels, length, has_z, number)                 \
        ITQ_INLINE float add_group_##name(float sum, const block_##name * x, const int n,   \
                                          const struct itq_columns * y, int64_t at) {       \
            static const int8_t table[n_levels] = NAME##_LEVELS;                            \
            const int8_t *      q8[GROUP];                                                  \
            const uint8_t *     symbols[GROUP];                                             \
            uint8_t             qs[QK_ITQ / 8 * ((bits) == 1 ? 2 : (bits))];                \
            uint8_t             sel[QK_ITQ / 8];                                            \
            int32x4_t           p[GROUP];                                                   \
            float               d[GROUP];                                                   \
            uint64_t            before = 0;                                                 \
            for (int i = 0; i < GROUP; ++i) {                                               \
                const int b = i < n ? i : n - 1;                                            \
                q8[i]       = y->q + 64 * (at + b);                                         \
                d[i]        = GGML_CPU_FP16_TO_FP32(name##_scale(&x[b]));                   \
                before |= itq_spread_state(name##_state(&x[b])) << 2 * i;                   \
                symbols[i] = x[b].qs;                                                       \
                memcpy(sel + 8 * i, x[b].sel, 8);                                           \
            }                                                                               \
            gather_symbols(bits, symbols, qs);                                              \
            multiply_quarters(bits, table, CARRIED, before, qs, sel, q8, p);                \
            const float32x4_t d0 = vmulq_n_f32(vld1q_f32(d), 0.03125f);                     \
            return add_in_order(sum, vmulq_f32(vcvtq_f32_s32(sum_4(p)), d0), n, y->d + at); \
        }
ITQ_TYPES_64(ADD_GROUP_64)

ITQ_INLINE float add_group_tq2_0(float sum, const block_tq2_0 * x, const int n, const struct itq_columns * y,
                                 int64_t at) {
    int32x4_t p[GROUP];
    float     d[GROUP];
    int32_t   total[GROUP];
    for (int i = 0; i < GROUP; ++i) {
        const int b = i < n ? i : n - 1;
        p[i]        = multiply_block_tq2_0(&x[b], y->q + QK_K * (at + b));
        d[i]        = GGML_CPU_FP16_TO_FP32(x[b].d);
        total[i]    = y->sums[at + b];
    }
    const int32x4_t dot = vsubq_s32(sum_4(p), vld1q_s32(total));
    return add_in_order(sum, vmulq_f32(vcvtq_f32_s32(dot), vld1q_f32(d)), n, y->d + at);
}

#    define GEMV(type)                                                                                                 \
        void itq_gemv_##type(int64_t nb, const void * rows, size_t row_size, int n_rows, const struct itq_columns * y, \
                             float * out) {                                                                            \
            for (int r = 0; r < n_rows; ++r) {                                                                         \
                const block_##type * x   = (const void *) ((const char *) rows + (size_t) r * row_size);               \
                float                sum = 0.0f;                                                                       \
                for (int64_t b = 0; b < nb; b += GROUP) {                                                              \
                    for (int line = 0; line < (int) (GROUP * sizeof(*x)); line += 64) {                                \
                        ITQ_PREFETCH_BYTES((const char *) (x + b) + line);                                             \
                    }                                                                                                  \
                    sum = nb - b < GROUP ? add_group_##type(sum, x + b, (int) (nb - b), y, b)                          \
                                         : add_group_##type(sum, x + b, GROUP, y, b);                                  \
                }                                                                                                      \
                out[r] = sum;                                                                                          \
            }                                                                                                          \
        }

#    define GEMV_OF_TYPE(NAME, name, ...) GEMV(name)
ITQ_TYPES(GEMV_OF_TYPE)
GEMV(tq2_0)

#endif  // ITQ_HAS_GEMV

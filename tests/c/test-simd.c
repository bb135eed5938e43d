// The SIMD kernels of the trellis types, TQ1_0 and TQ2_0 against the portable C, on random and adversarial blocks, and against the
// reference vectors. Compiled with the flags of the variant under test (tests/native/test_simd.py, scripts/check/arm.py).
//
//   test-simd [VECTORS]    VECTORS: a file of each trellis type; per block its bytes, and its rotated values as doubles
//
// Prints a line per check; the exit status is 1 when one fails.

#include "itq3s/itq-gemm.h"
#include "itq3s/itq-quants.h"

#include "ggml-cpu-impl.h"
#include "ggml-impl.h"
#include "quants.h"
#include "simd-mappings.h"

#include <float.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

// What the kernels take from the rest of ggml.
float ggml_table_f32_f16[1 << 16];

float ggml_fp16_to_fp32(ggml_fp16_t x) {
    return GGML_COMPUTE_FP16_TO_FP32(x);
}

#define MAX_BLOCKS 40

static int failures = 0;

static void report(const char * name, int ok) {
    printf("%-60s %s\n", name, ok ? "ok" : "FAILED");
    failures += !ok;
}

static uint64_t state = 88172645463325252u;

static uint32_t random_u32(void) {
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    return (uint32_t) (state >> 32);
}

static float random_uniform(void) {
    return (float) random_u32() * 0x1p-31f - 1.0f;
}

static float random_normal(void) {
    float sum = 0.0f;
    for (int i = 0; i < 12; ++i) {
        sum += random_uniform();
    }
    return 0.5f * sum;
}

static void random_bytes(void * p, size_t n) {
    for (size_t i = 0; i < n; ++i) {
        ((uint8_t *) p)[i] = (uint8_t) random_u32();
    }
}

//
// rotated activations
//

// Numbers in blocks of `length`.
static float * activation_case(int kind, float * x, int n, int length) {
    for (int i = 0; i < n; ++i) {
        x[i] = random_normal();
    }
    switch (kind) {
        case 1:  // zeros
            memset(x, 0, n * sizeof(*x));
            break;
        case 2:  // one value: all magnitudes of the rotated block tie, with both signs
            memset(x, 0, n * sizeof(*x));
            for (int i = 0; i < n; i += length) {
                x[i + random_u32() % length] = random_normal();
            }
            break;
        case 3:  // two values: many ties
            memset(x, 0, n * sizeof(*x));
            for (int i = 0; i < n; i += length) {
                x[i + random_u32() % length] = 1.0f;
                x[i + random_u32() % length] = -1.0f;
            }
            break;
        case 4:  // subnormal and smallest magnitudes
            for (int i = 0; i < n; ++i) {
                x[i] *= i % (2 * length) < length ? 1e-40f : 1e-35f;
            }
            break;
        case 5:  // large
            for (int i = 0; i < n; ++i) {
                x[i] *= 1e34f;
            }
            break;
        case 6:  // overflow to infinity, infinity, NaN
            for (int i = 0; i < n; i += length) {
                x[i + 3] = i / length % 3 == 0 ? FLT_MAX : i / length % 3 == 1 ? INFINITY : NAN;
                x[i + 9] = FLT_MAX;
            }
            break;
        case 7:  // outliers
            for (int i = 0; i < n; i += 97) {
                x[i] *= 1000.0f;
            }
            break;
        case 8:  // small integers: products land on halves
            for (int i = 0; i < n; ++i) {
                x[i] = (float) (int) (random_u32() % 9) - 4.0f;
            }
            break;
        case 9:  // overflow of some of the sums
            for (int i = 0; i < n; ++i) {
                x[i] *= i / length % 2 ? 1.5e37f : 5e37f;
            }
            break;
    }
    return x;
}

// A quantizer of rotated activations.
struct quantizer {
    const char * name;
    int          length;
    size_t       block_size;
    size_t       qs;
    void (*quantize)(const float * x, void * y, int64_t k);
    void (*generic)(const float * x, void * y, int64_t k);
};

static const struct quantizer quantizers[] = {
    { "quantize_row_q8_K_h", QK_K, sizeof(block_q8_K), offsetof(block_q8_K, qs), quantize_row_q8_K_h,
      quantize_row_q8_K_h_generic },
    { "quantize_row_q8_n_h", 64, sizeof(block_q8_n_h), offsetof(block_q8_n_h, qs), quantize_row_q8_n_h,
      quantize_row_q8_n_h_generic },
};

// Both kinds of block begin with their scale.
static float scale_of_activations(const char * block) {
    static_assert(offsetof(block_q8_K, d) == 0 && offsetof(block_q8_n_h, d) == 0, "the scale is not first");
    float d;
    memcpy(&d, block, sizeof(d));
    return d;
}

// Whether the sums of a block are those of its numbers.
static int right_sums(const struct quantizer * f, const char * block) {
    const int8_t * q = (const int8_t *) (block + f->qs);
    if (f->length != QK_K) {
        int sum = 0;
        for (int l = 0; l < f->length; ++l) {
            sum += q[l];
        }
        return sum == ((const block_q8_n_h *) (const void *) block)->sum;
    }
    int ok = 1;
    for (int j = 0; j < QK_K / 16; ++j) {
        int sum = 0;
        for (int l = 0; l < 16; ++l) {
            sum += q[16 * j + l];
        }
        ok &= sum == ((const block_q8_K *) (const void *) block)->bsums[j];
    }
    return ok;
}

static void test_activations(const struct quantizer * f) {
    static const char * names[] = { "normal",           "zero",     "one value", "two values", "subnormal", "large",
                                    "infinity and NaN", "outliers", "integers",  "overflow" };
    static float        x[MAX_BLOCKS * QK_K];
    static _Alignas(16) char a[MAX_BLOCKS * sizeof(block_q8_K)];
    static _Alignas(16) char b[MAX_BLOCKS * sizeof(block_q8_K)];
    const int                length = f->length;
    char                     line[80];
    for (int kind = 0; kind < 10; ++kind) {
        int ok = 1;
        for (int round = 0; round < 50; ++round) {
            const int nb = 1 + (int) (random_u32() % MAX_BLOCKS);
            activation_case(kind, x, nb * length, length);
            memset(a, 0x55, sizeof(a));
            memset(b, 0xAA, sizeof(b));
            f->generic(x, a, nb * length);
            f->quantize(x, b, nb * length);
            ok &= memcmp(a, b, nb * f->block_size) == 0;
            for (int i = 0; i < nb; ++i) {
                ok &= right_sums(f, b + i * f->block_size);
            }
        }
        snprintf(line, sizeof(line), "%s, same bytes: %s", f->name, names[kind]);
        report(line, ok);
    }

    // A block that has a NaN or an infinity has NaN for its scale, wherever it stands, and no other block has.
    int ok = 1;
    for (int j = 0; j < length; ++j) {
        static const float values[] = { NAN, -NAN, INFINITY, -INFINITY };
        for (size_t v = 0; v < sizeof(values) / sizeof(*values); ++v) {
            activation_case(j % 2 ? 0 : 1, x, 3 * length, length);
            x[length + j] = values[v];
            f->quantize(x, a, 3 * length);
            ok &= isnan(scale_of_activations(a + f->block_size)) && isfinite(scale_of_activations(a)) &&
                  isfinite(scale_of_activations(a + 2 * f->block_size));
        }
    }
    snprintf(line, sizeof(line), "%s, NaN and infinity are NaN", f->name);
    report(line, ok);

    // and against the definition: H x in double precision
    double worst = 0.0;
    for (int round = 0; round < 20; ++round) {
        activation_case(0, x, length, length);
        f->quantize(x, a, length);
        double amax  = 0.0;
        double error = 0.0;
        for (int r = 0; r < length; ++r) {
            double sum = 0.0;
            for (int c = 0; c < length; ++c) {
                int bits = r & c;
                bits ^= bits >> 4;
                bits ^= bits >> 2;
                bits ^= bits >> 1;
                sum += bits & 1 ? -x[c] : x[c];
            }
            sum /= sqrt(length);
            amax  = fmax(amax, fabs(sum));
            error = fmax(error, fabs(sum - (double) scale_of_activations(a) * ((const int8_t *) a)[f->qs + r]));
        }
        worst = fmax(worst, error / amax * 127);
    }
    snprintf(line, sizeof(line), "%s within half a step of H x", f->name);
    report(line, worst < 0.5001);
}

//
// dot products
//

// A block of activations, of any length up to QK_K.
struct activations {
    float  d;
    int8_t qs[QK_K];
};

static void random_activations(struct activations * y, int nb, int length, int kind) {
    for (int i = 0; i < nb; ++i) {
        y[i].d = 0.02f * random_uniform();
        for (int j = 0; j < length; ++j) {
            int v = (int) (random_u32() % 255) - 127;
            if (kind == 1) {
                v = 127;
            } else if (kind == 2) {
                v = -127;
            } else if (kind == 3) {
                v = random_u32() & 1 ? 127 : -127;
            }
            y[i].qs[j] = (int8_t) v;
        }
    }
}

static ggml_half half(float x) {
    return GGML_COMPUTE_FP32_TO_FP16(x);
}

typedef void repack_t(const void * rows, size_t row_size, int n_rows, int64_t nb, void * panel);
typedef void gemm_t(int64_t nb, const void * panel, const struct itq_columns * y, int nc, float out[][ITQ_PANEL_ROWS]);
typedef void gemv_t(int64_t nb, const void * rows, size_t row_size, int n_rows, const struct itq_columns * y,
                    float * out);
typedef void vec_dot_t(int n, float * s, size_t bs, const void * x, size_t bx, const void * y, size_t by, int nrc);

#ifdef ITQ_HAS_GEMV
#    define GEMV_OF(name) itq_gemv_##name
#else
#    define GEMV_OF(name) NULL
#endif

// A type; of a trellis type, where the parts of a block are. Symbols are at its begin.
struct type {
    const char * name;
    size_t       block_size;
    int          length;   // weights of a block
    int          rotated;  // a trellis type: activations are in the order of Q8_K_H or Q8_N_H
    repack_t *   repack;
    repack_t *   repack_generic;
    gemm_t *     gemm;
    gemm_t *     gemm_generic;
    gemv_t *     gemv;
    vec_dot_t *  vec_dot;  // portable
    size_t       sel;
    size_t       d;
    int          has_z;
};

#define KERNELS(name) itq_repack_##name, itq_repack_##name##_generic, itq_gemm_##name, itq_gemm_##name##_generic
#define TRELLIS_TYPE(NAME, name, bits, n_levels, length, has_z, number) \
    { #name,                                                            \
      sizeof(block_##name),                                             \
      length,                                                           \
      1,                                                                \
      KERNELS(name),                                                    \
      GEMV_OF(name),                                                    \
      ITQ_VEC_DOT(name, length),                                        \
      offsetof(block_##name, sel),                                      \
      offsetof(block_##name, d),                                        \
      has_z },

static const struct type types[] = {
    ITQ_TYPES(TRELLIS_TYPE){ "tq2_0", sizeof(block_tq2_0), QK_K, 0, KERNELS(tq2_0), GEMV_OF(tq2_0),
                             ggml_vec_dot_tq2_0_q8_K_generic, 0, 0, 0 },
    { "tq1_0", sizeof(block_tq1_0), QK_K, 0, KERNELS(tq1_0), NULL, ggml_vec_dot_tq1_0_q8_K_generic, 0, 0, 0 },
};

#define EACH_TYPE(t)    for (const struct type * t = types; t < types + sizeof(types) / sizeof(*types); ++t)
#define EACH_TRELLIS(t) EACH_TYPE(t) if (t->rotated)

#define MAX_BLOCK_BYTES sizeof(block_itq4_s)

static ggml_half scale_of(const struct type * t, const char * block) {
    ggml_half d;
    memcpy(&d, block + t->d, sizeof(d));
    return t->has_z ? d : itq_without_state(&d);
}

static ggml_half zero_point_of(const struct type * t, const char * block) {
    return t->has_z ? itq_without_state(block + t->d + sizeof(ggml_half)) : 0;
}

// With any start state.
static void set_scales(const struct type * t, char * block, ggml_half d, ggml_half z) {
    ggml_half numbers[2] = { d, z };
    numbers[t->has_z]    = (ggml_half) (itq_without_state(&numbers[t->has_z]) | (random_u32() & ITQ_STATE_MASK));
    memcpy(block + t->d, numbers, (1 + (size_t) t->has_z) * sizeof(d));
}

static void trellis_case(const struct type * t, char * blocks, int nb, int kind) {
    random_bytes(blocks, nb * t->block_size);
    for (int i = 0; i < nb; ++i) {
        char *       x   = blocks + i * t->block_size;
        char *       sel = x + t->sel;
        const size_t n   = t->d - t->sel;
        ggml_half    d   = half(0.01f + 0.1f * fabsf(random_uniform()));
        ggml_half    z   = 0;
        switch (kind) {
            case 1:
                memset(sel, 0xFF, n);
                break;
            case 2:
                memset(x, 0xFF, t->sel);
                break;
            case 3:
                memset(x, 0xFF, t->sel);
                memset(sel, 0xFF, n);
                break;
            case 4:  // c0 = 1 after the first weights
                memset(x, 0xFF, t->sel);
                memset(sel, 0x33, n);
                break;
            case 5:
                memset(x, 0, t->sel);
                memset(sel, 0, n);
                break;
            case 6:
                d ^= 0x8000;
                break;
            case 7:
                d = (ggml_half) (random_u32() & 0x83FF);
                break;
            case 8:
                d = i & 1 ? 0x7BFF : 0xFBFF;
                break;
            case 9:
                z = half(4.0f * random_uniform());
                break;
            case 10:  // the literal ternary code
                memset(sel, 0, n);
                z = half(1.0f);
                break;
            case 11:
                d = 0;
                z = 0x8000;
                break;
        }
        set_scales(t, x, d, z);
    }
}

#define TRELLIS_CASES 12

static const char * const case_names[TRELLIS_CASES] = { "random",
                                                        "selectors 1",
                                                        "symbols 1",
                                                        "selectors 1, symbols 1",
                                                        "selectors 33, symbols 1",
                                                        "selectors 0, symbols 0",
                                                        "d negative",
                                                        "d subnormal",
                                                        "d maximal",
                                                        "z not zero",
                                                        "ternary",
                                                        "d zero, z -0" };

// Blocks of activations as the dot products of a type read them.
static const void * packed(const struct type * t, const struct activations * y, int nb) {
    static union {
        block_q8_K   of_256[MAX_BLOCKS];
        block_q8_n_h of_64[MAX_BLOCKS];
    } blocks;
    for (int i = 0; i < nb; ++i) {
        int8_t * qs;
        if (t->length == QK_K) {
            blocks.of_256[i].d = y[i].d;
            qs                 = blocks.of_256[i].qs;
            for (int j = 0; j < QK_K / 16; ++j) {
                int sum = 0;
                for (int l = 0; l < 16; ++l) {
                    sum += y[i].qs[16 * j + l];
                }
                blocks.of_256[i].bsums[j] = (int16_t) sum;
            }
        } else {
            blocks.of_64[i].d   = y[i].d;
            blocks.of_64[i].sum = 0;
            qs                  = blocks.of_64[i].qs;
            for (int l = 0; l < 64; ++l) {
                blocks.of_64[i].sum += y[i].qs[l];
            }
        }
        memcpy(qs, y[i].qs, (size_t) t->length);
    }
    return &blocks;
}

// Activations with a NaN give NaN, whatever they meet.
static void test_nan(const struct type * t) {
    static char       x[MAX_BLOCKS * MAX_BLOCK_BYTES];
    static block_q8_K y[MAX_BLOCKS];  // or blocks of Q8_N_H
    static float      act[MAX_BLOCKS * QK_K];
    int               ok = 1;
    for (int kind = 0; kind < TRELLIS_CASES; ++kind) {
        for (int nb = 1; nb <= MAX_BLOCKS; ++nb) {
            trellis_case(t, x, nb, kind);
            activation_case(0, act, nb * t->length, t->length);
            act[random_u32() % (uint32_t) (nb * t->length)] = NAN;
            (t->length == QK_K ? quantize_row_q8_K_h : quantize_row_q8_n_h)(act, y, nb * t->length);
            float dot;
            t->vec_dot(nb * t->length, &dot, 0, x, 0, y, 0, 1);
            ok &= isnan(dot);
        }
    }
    char line[80];
    snprintf(line, sizeof(line), "%s dot: NaN in the activations is NaN", t->name);
    report(line, ok);
}

//
// panels
//

#define MAX_PANEL_BLOCKS 5

// Rows of nb blocks, and the scale of the weights of every block of every row, times the largest of them.
static void panel_case(const struct type * t, int kind, char * rows, int n_rows, int nb, double * largest) {
    for (int i = 0; i < n_rows * nb; ++i) {
        char * block = rows + (size_t) i * t->block_size;
        if (t->rotated) {
            trellis_case(t, block, 1, kind);
            const ggml_half z = zero_point_of(t, block);
            ggml_half       d = scale_of(t, block);
            if (kind == 8 && random_u32() & 1) {
                d ^= 0x8000;
                set_scales(t, block, d, z);
            }
            largest[i] = fabs((double) ggml_fp16_to_fp32(d) / 32) * (64 + fabs((double) ggml_fp16_to_fp32(z)));
            continue;
        }
        random_bytes(block, t->block_size);
        if (kind == 1) {  // all fields 3, all trits 2
            memset(block, 0xFF, t->block_size);
        }
        const ggml_half d = half(random_uniform());
        memcpy(block + t->block_size - sizeof(d), &d, sizeof(d));
        largest[i] = 2 * fabs((double) ggml_fp16_to_fp32(d));
    }
}

// Columns first .. first + nc - 1 of nb blocks of activations each, in the order of a product.
static void panel_columns(const struct type * t, const struct activations * y, int nb, int first, int nc, int8_t * q,
                          float * d, int32_t * sums) {
    for (int b = 0; b < nb; ++b) {
        for (int c = 0; c < nc; ++c) {
            const struct activations * block = &y[(first + c) * nb + b];
            const int                  at    = b * nc + c;
            int8_t *                   to    = q + at * t->length;
            if (!t->rotated) {
                memcpy(to, block->qs, (size_t) t->length);
            } else if (t->length == QK_K) {
                itq_reorder_q8_K_h_generic(block->qs, to);
            } else {
                itq_reorder_q8_n_h_generic(block->qs, to);
            }
            d[at]    = block->d;
            sums[at] = 0;
            for (int j = 0; j < t->length; ++j) {
                sums[at] += block->qs[j];
            }
        }
    }
}

static void test_reorder(void) {
    int ok = 1;
    for (int round = 0; round < 10; ++round) {
        int8_t              q[QK_K];
        _Alignas(64) int8_t a[QK_K];
        _Alignas(64) int8_t b[QK_K];
        random_bytes(q, sizeof(q));
        itq_reorder_q8_K_h_generic(q, a);
        itq_reorder_q8_K_h(q, b);
        ok &= memcmp(a, b, sizeof(a)) == 0;
    }
    report("reorder_q8_K_h, same bytes", ok);
    for (int round = 0; round < 10; ++round) {
        int8_t              q[64];
        _Alignas(64) int8_t a[64];
        _Alignas(64) int8_t b[64];
        random_bytes(q, sizeof(q));
        itq_reorder_q8_n_h_generic(q, a);
        itq_reorder_q8_n_h(q, b);
        ok &= memcmp(a, b, sizeof(a)) == 0;
    }
    report("reorder_q8_n_h, same bytes", ok);
}

static void test_repack(const struct type * t) {
    static char              rows[ITQ_PANEL_ROWS * (MAX_PANEL_BLOCKS * MAX_BLOCK_BYTES + 6)];
    static _Alignas(64) char a[(ITQ_PANEL_ROWS + 1) * MAX_PANEL_BLOCKS * MAX_BLOCK_BYTES];
    static _Alignas(64) char b[sizeof(a)];

    int ok = 1;
    for (int nb = 1; nb <= MAX_PANEL_BLOCKS; ++nb) {
        for (int n_rows = 1; n_rows <= ITQ_PANEL_ROWS; ++n_rows) {
            const size_t row_size = (size_t) nb * t->block_size + 2 * (size_t) (n_rows % 4);
            random_bytes(rows, sizeof(rows));
            memset(a, 0x55, sizeof(a));
            memset(b, 0x55, sizeof(b));
            t->repack_generic(rows, row_size, n_rows, nb, a);
            t->repack(rows, row_size, n_rows, nb, b);
            ok &= memcmp(a, b, sizeof(a)) == 0;
        }
    }
    char line[80];
    snprintf(line, sizeof(line), "%s panel, same bytes", t->name);
    report(line, ok);
}

#ifdef ITQ_HAS_GEMV
// Rows as a file has them times column c: the bits of the panel's product, and nothing behind n_rows.
#    define MAX_ROW_BLOCKS 19  // two groups of 8, the longest of a kernel, and a part of one

static int same_as_rows(const struct type * t, const char * rows, size_t row_size, int n_rows, int nb,
                        const struct activations * y, const float * panel) {
    static int8_t q[MAX_ROW_BLOCKS * QK_K];
    float         d[MAX_ROW_BLOCKS];
    int32_t       sums[MAX_ROW_BLOCKS];
    for (int b = 0; b < nb; ++b) {
        memcpy(q + b * t->length, y[b].qs, (size_t) t->length);
        d[b]    = y[b].d;
        sums[b] = 0;
        for (int i = 0; i < t->length; ++i) {
            sums[b] += y[b].qs[i];
        }
    }
    const struct itq_columns columns = { q, d, sums };
    float                    out[ITQ_PANEL_ROWS + 1];
    memset(out, 0x55, sizeof(out));
    t->gemv(nb, rows, row_size, n_rows, &columns, out);
    uint32_t after;
    memcpy(&after, &out[n_rows], sizeof(after));
    return memcmp(out, panel, n_rows * sizeof(float)) == 0 && after == 0x55555555;
}
#endif

static void test_gemm(const struct type * t, const char * name, int kind, int act) {
    static char                rows[ITQ_PANEL_ROWS * MAX_PANEL_BLOCKS * MAX_BLOCK_BYTES];
    static double              largest[ITQ_PANEL_ROWS * MAX_PANEL_BLOCKS];
    static _Alignas(64) char   panel[sizeof(rows)];
    static struct activations  y[ITQ_GROUP * MAX_PANEL_BLOCKS];
    static _Alignas(64) int8_t q[ITQ_GROUP * MAX_PANEL_BLOCKS * QK_K];
    static float               d[ITQ_GROUP * MAX_PANEL_BLOCKS];
    static int32_t             sums[ITQ_GROUP * MAX_PANEL_BLOCKS];
    const struct itq_columns   columns = { q, d, sums };

    double           worst     = 0.0;
    int              same_bits = 1;
    static const int lengths[] = { 1, 4, MAX_PANEL_BLOCKS };
    for (size_t i = 0; i < sizeof(lengths) / sizeof(*lengths); ++i) {
        const int nb = lengths[i];
        panel_case(t, kind, rows, ITQ_PANEL_ROWS, nb, largest);
        t->repack_generic(rows, nb * t->block_size, ITQ_PANEL_ROWS, nb, panel);
        random_activations(y, ITQ_GROUP * nb, t->length, act);

        float want[ITQ_GROUP][ITQ_PANEL_ROWS];
        float got[ITQ_GROUP][ITQ_PANEL_ROWS];
        panel_columns(t, y, nb, 0, ITQ_GROUP, q, d, sums);
        t->gemm_generic(nb, panel, &columns, ITQ_GROUP, want);
        memset(got, 0x55, sizeof(got));
        t->gemm(nb, panel, &columns, ITQ_GROUP, got);
        for (int c = 0; c < ITQ_GROUP; ++c) {
            for (int r = 0; r < ITQ_PANEL_ROWS; ++r) {
                double scale = FLT_MIN;  // what the terms amount to
                for (int b = 0; b < nb; ++b) {
                    for (int j = 0; j < t->length; ++j) {
                        const struct activations * block = &y[c * nb + b];
                        scale += largest[r * nb + b] * fabs((double) block->d * block->qs[j]);
                    }
                }
                double error = fabs((double) got[c][r] - want[c][r]);
                if (c < 4) {
                    float dot;
                    t->vec_dot(nb * t->length, &dot, 0, rows + (size_t) r * nb * t->block_size, 0,
                               packed(t, y + c * nb, nb), 0, 1);
                    error = fmax(error, fabs((double) got[c][r] - dot));
                }
                worst = fmax(worst, isfinite(got[c][r]) ? error / scale : INFINITY);
            }
        }

#ifdef ITQ_HAS_GEMV
        for (int c = 0; t->gemv && c < 8; ++c) {
            const int n_rows = ITQ_PANEL_ROWS - c;
            same_bits &= same_as_rows(t, rows, nb * t->block_size, n_rows, nb, y + c * nb, got[c]);
        }
#endif

        static const int groups[] = { 1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 15, 16, 17, 33, 63 };
        for (size_t g = 0; g < sizeof(groups) / sizeof(*groups); ++g) {
            const int nc = groups[g];
            for (int first = 0; first + nc <= ITQ_GROUP; first += ITQ_GROUP - nc) {
                float some[ITQ_GROUP + 1][ITQ_PANEL_ROWS];
                panel_columns(t, y, nb, first, nc, q, d, sums);
                memset(some, 0x55, sizeof(some));
                t->gemm(nb, panel, &columns, nc, some);
                same_bits &= memcmp(some, got[first], (size_t) nc * sizeof(*some)) == 0;
                uint32_t after;
                memcpy(&after, some[nc], sizeof(after));
                same_bits &= after == 0x55555555;  // nothing is written behind the columns
            }
        }
    }
    char line[80];
    snprintf(line, sizeof(line), "%s panel: %s, activations %d: %.1e", t->name, name, act, worst);
    report(line, worst < 1e-6);
    snprintf(line, sizeof(line), "%s panel: %s, activations %d, same bits", t->name, name, act);
    report(line, same_bits);
}

// A column whose activations have a NaN is NaN, and no other column changes.
static void test_panel_nan(const struct type * t) {
    enum { nb = 3, nan_block = 1 };

    static char                rows[ITQ_PANEL_ROWS * nb * MAX_BLOCK_BYTES];
    static double              largest[ITQ_PANEL_ROWS * nb];
    static _Alignas(64) char   panel[sizeof(rows)];
    static struct activations  y[ITQ_GROUP * nb];
    static _Alignas(64) int8_t q[ITQ_GROUP * nb * QK_K];
    static float               d[ITQ_GROUP * nb];
    static int32_t             sums[ITQ_GROUP * nb];
    const struct itq_columns   columns = { q, d, sums };

    panel_case(t, 0, rows, ITQ_PANEL_ROWS, nb, largest);
    t->repack_generic(rows, nb * t->block_size, ITQ_PANEL_ROWS, nb, panel);
    int              ok       = 1;
    static const int groups[] = { 1, 2, 3, 4, 5, 8, 9, 16, 17, ITQ_GROUP };
    for (size_t g = 0; g < sizeof(groups) / sizeof(*groups); ++g) {
        const int nc     = groups[g];
        const int column = (int) (random_u32() % (uint32_t) nc);
        float     without[ITQ_GROUP][ITQ_PANEL_ROWS];
        float     with[ITQ_GROUP][ITQ_PANEL_ROWS];
        random_activations(y, nc * nb, t->length, 0);
        panel_columns(t, y, nb, 0, nc, q, d, sums);
        t->gemm(nb, panel, &columns, nc, without);
        memset(&y[column * nb + nan_block], 0, sizeof(*y));
        y[column * nb + nan_block].d = NAN;
        panel_columns(t, y, nb, 0, nc, q, d, sums);
        t->gemm(nb, panel, &columns, nc, with);
        for (int c = 0; c < nc; ++c) {
            for (int r = 0; r < ITQ_PANEL_ROWS; ++r) {
                ok &= c == column ? isnan(with[c][r]) != 0 : memcmp(&with[c][r], &without[c][r], sizeof(float)) == 0;
            }
        }
    }
    char line[80];
    snprintf(line, sizeof(line), "%s panel: NaN in a column is NaN in that column", t->name);
    report(line, ok);
}

#ifdef ITQ_HAS_GEMV
// Rows as a file has them: of any number of blocks, further apart than they are long, and with a zero-point in some rows
// of a panel and none in others.
static void test_rows(const struct type * t) {
    enum { max_size = MAX_ROW_BLOCKS * MAX_BLOCK_BYTES + 4 };

    static char                row[MAX_ROW_BLOCKS * MAX_BLOCK_BYTES];
    static char                rows[ITQ_PANEL_ROWS * max_size];
    static double              largest[MAX_ROW_BLOCKS];
    static _Alignas(64) char   panel[ITQ_PANEL_ROWS * sizeof(row)];
    static struct activations  y[MAX_ROW_BLOCKS];
    static _Alignas(64) int8_t q[MAX_ROW_BLOCKS * QK_K];
    static float               d[MAX_ROW_BLOCKS];
    static int32_t             sums[MAX_ROW_BLOCKS];
    const struct itq_columns   columns = { q, d, sums };

    int ok = 1;
    for (int nb = 1; nb <= MAX_ROW_BLOCKS; ++nb) {
        const size_t row_size = (size_t) nb * t->block_size + 2 * (size_t) (nb % 3);
        random_bytes(rows, sizeof(rows));
        for (int r = 0; r < ITQ_PANEL_ROWS; ++r) {
            panel_case(t, r % 3 == 1 ? 9 : 0, row, 1, nb, largest);
            memcpy(rows + r * row_size, row, (size_t) nb * t->block_size);
        }
        t->repack_generic(rows, row_size, ITQ_PANEL_ROWS, nb, panel);
        random_activations(y, nb, t->length, 0);
        panel_columns(t, y, nb, 0, 1, q, d, sums);
        float want[1][ITQ_PANEL_ROWS];
        t->gemm(nb, panel, &columns, 1, want);
        for (int n_rows = 1; n_rows <= ITQ_PANEL_ROWS; ++n_rows) {
            ok &= same_as_rows(t, rows, row_size, n_rows, nb, y, want[0]);
        }
    }
    char line[80];
    snprintf(line, sizeof(line), "%s rows of 1 to %d blocks, the bits of a panel", t->name, MAX_ROW_BLOCKS);
    report(line, ok);
}
#endif

static void test_panels(const struct type * t) {
    test_repack(t);
    test_panel_nan(t);
#ifdef ITQ_HAS_GEMV
    if (t->gemv) {
        test_rows(t);
    }
#endif
    for (int kind = 0; kind < (t->rotated ? TRELLIS_CASES : 2); ++kind) {
        for (int act = 0; act < 4; ++act) {
            test_gemm(t, t->rotated ? case_names[kind] : kind == 1 ? "bytes 255" : "any bytes", kind, act);
        }
    }
}

// The product of a row of two blocks and activations, by row r of a panel.
static float product_of_2(const struct type * t, const char * x, const struct activations * y, int r) {
    static _Alignas(64) char   panel[2 * ITQ_PANEL_ROWS * MAX_BLOCK_BYTES];
    static _Alignas(64) int8_t q[2 * QK_K];
    float                      d[2];
    int32_t                    sums[2];
    const struct itq_columns   columns = { q, d, sums };
    float                      out[1][ITQ_PANEL_ROWS];
    panel_columns(t, y, 2, 0, 1, q, d, sums);
    t->repack(x, 0, ITQ_PANEL_ROWS, 2, panel);  // the same row, 16 times
    t->gemm(2, panel, &columns, 1, out);
    return out[0][r];
}

// Records of a block and its rotated weights (double).
static void test_vectors(const struct type * t, const char * path) {
    FILE * file = fopen(path, "rb");
    if (!file) {
        fprintf(stderr, "error: %s cannot be read\n", path);
        exit(1);
    }
    char         block[MAX_BLOCK_BYTES];
    double       rotated[QK_K];
    int          blocks = 0;
    double       worst  = 0.0;
    const size_t n      = (size_t) t->length;
    while (fread(block, t->block_size, 1, file) == 1 && fread(rotated, sizeof(*rotated), n, file) == n) {
        for (int j = 0; j < t->length; ++j) {
            // a row of two blocks, to have the block in both places
            char x[2 * MAX_BLOCK_BYTES];
            memcpy(x, block, t->block_size);
            memcpy(x + t->block_size, block, t->block_size);
            struct activations y[2];
            memset(y, 0, sizeof(y));
            y[j & 1].d        = 1.0f;
            y[j & 1].qs[j]    = 127;
            const float  got  = product_of_2(t, x, y, j % ITQ_PANEL_ROWS);
            const double unit = fabs((double) ggml_fp16_to_fp32(scale_of(t, block))) * 2 + FLT_MIN;  // 64 levels
            worst             = fmax(worst, fabs(got - 127 * rotated[j]) / (127 * unit));
        }
        ++blocks;
    }
    fclose(file);
    char line[80];
    snprintf(line, sizeof(line), "%s dot: %d reference blocks: %.1e", t->name, blocks, worst);
    report(line, blocks > 0 && worst < 1e-6);
}

int main(int argc, char ** argv) {
    for (int i = 0; i < 1 << 16; ++i) {
        ggml_table_f32_f16[i] = GGML_COMPUTE_FP16_TO_FP32((ggml_fp16_t) i);
    }
    for (size_t i = 0; i < sizeof(quantizers) / sizeof(*quantizers); ++i) {
        test_activations(&quantizers[i]);
    }
    test_reorder();
    EACH_TRELLIS(t) {
        test_nan(t);
    }
    EACH_TYPE(t) {
        test_panels(t);
    }
    // a file of records for each trellis type, in the order of the registry
    int file = 1;
    EACH_TRELLIS(t) {
        if (file < argc) {
            test_vectors(t, argv[file++]);
        }
    }
    printf("%d failed\n", failures);
    return failures != 0;
}

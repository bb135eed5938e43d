// The SIMD kernels of ITQ3_S, TQ1_0 and TQ2_0 against the portable C, on random and adversarial blocks, and against the
// reference vectors. Compiled with the flags of the variant under test (tests/native/test_simd.py, scripts/check/arm.py).
//
//   test-simd [VECTORS]    VECTORS: per block 100 bytes and 256 doubles, the rotated values
//
// Prints a line per check; the exit status is 1 when one fails.

#include "itq3s/itq3s-gemm.h"
#include "itq3s/itq3s-quants.h"
#if defined(__x86_64__) || defined(__i386__)
#    include "itq3s/arch/x86/tq-quants.h"
#endif

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

static float * activation_case(int kind, float * x, int n) {
    for (int i = 0; i < n; ++i) {
        x[i] = random_normal();
    }
    switch (kind) {
        case 1:  // zeros
            memset(x, 0, n * sizeof(*x));
            break;
        case 2:  // one value: all magnitudes of the rotated block tie, with both signs
            memset(x, 0, n * sizeof(*x));
            for (int i = 0; i < n; i += QK_K) {
                x[i + random_u32() % QK_K] = random_normal();
            }
            break;
        case 3:  // two values: many ties
            memset(x, 0, n * sizeof(*x));
            for (int i = 0; i < n; i += QK_K) {
                x[i + random_u32() % QK_K] = 1.0f;
                x[i + random_u32() % QK_K] = -1.0f;
            }
            break;
        case 4:  // subnormal and smallest magnitudes
            for (int i = 0; i < n; ++i) {
                x[i] *= i % 512 < 256 ? 1e-40f : 1e-35f;
            }
            break;
        case 5:  // large
            for (int i = 0; i < n; ++i) {
                x[i] *= 1e34f;
            }
            break;
        case 6:  // overflow to infinity, infinity, NaN
            for (int i = 0; i < n; i += QK_K) {
                x[i + 3] = i / QK_K % 3 == 0 ? FLT_MAX : i / QK_K % 3 == 1 ? INFINITY : NAN;
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
                x[i] *= i / QK_K % 2 ? 1.5e37f : 5e37f;
            }
            break;
    }
    return x;
}

static void test_activations(void) {
    static const char * names[] = { "normal",           "zero",     "one value", "two values", "subnormal", "large",
                                    "infinity and NaN", "outliers", "integers",  "overflow" };
    static float        x[MAX_BLOCKS * QK_K];
    static block_q8_K   a[MAX_BLOCKS];
    static block_q8_K   b[MAX_BLOCKS];
    for (int kind = 0; kind < 10; ++kind) {
        int ok = 1;
        for (int round = 0; round < 50; ++round) {
            const int nb = 1 + (int) (random_u32() % MAX_BLOCKS);
            activation_case(kind, x, nb * QK_K);
            memset(a, 0x55, sizeof(a));
            memset(b, 0xAA, sizeof(b));
            quantize_row_q8_K_h_generic(x, a, nb * QK_K);
            quantize_row_q8_K_h(x, b, nb * QK_K);
            ok &= memcmp(a, b, nb * sizeof(*a)) == 0;
            for (int i = 0; i < nb; ++i) {
                for (int j = 0; j < QK_K / 16; ++j) {
                    int sum = 0;
                    for (int l = 0; l < 16; ++l) {
                        sum += b[i].qs[16 * j + l];
                    }
                    ok &= sum == b[i].bsums[j];
                }
            }
        }
        char line[80];
        snprintf(line, sizeof(line), "quantize_row_q8_K_h, same bytes: %s", names[kind]);
        report(line, ok);
    }

    // A block that has a NaN or an infinity has NaN for its scale, wherever it stands, and no other block has.
    int ok = 1;
    for (int j = 0; j < QK_K; ++j) {
        static const float values[] = { NAN, -NAN, INFINITY, -INFINITY };
        for (size_t v = 0; v < sizeof(values) / sizeof(*values); ++v) {
            activation_case(j % 2 ? 0 : 1, x, 3 * QK_K);
            x[QK_K + j] = values[v];
            quantize_row_q8_K_h(x, a, 3 * QK_K);
            ok &= isnan(a[1].d) && isfinite(a[0].d) && isfinite(a[2].d);
        }
    }
    report("quantize_row_q8_K_h, NaN and infinity are NaN", ok);

    // and against the definition: H x in double precision
    double worst = 0.0;
    for (int round = 0; round < 20; ++round) {
        activation_case(0, x, QK_K);
        quantize_row_q8_K_h(x, a, QK_K);
        double amax  = 0.0;
        double error = 0.0;
        for (int r = 0; r < QK_K; ++r) {
            double sum = 0.0;
            for (int c = 0; c < QK_K; ++c) {
                int bits = r & c;
                bits ^= bits >> 4;
                bits ^= bits >> 2;
                bits ^= bits >> 1;
                sum += bits & 1 ? -x[c] : x[c];
            }
            sum /= 16;
            amax  = fmax(amax, fabs(sum));
            error = fmax(error, fabs(sum - (double) a[0].d * a[0].qs[r]));
        }
        worst = fmax(worst, error / amax * 127);
    }
    report("quantize_row_q8_K_h within half a step of H x", worst < 0.5001);
}

//
// dot products
//

static void random_q8_K(block_q8_K * y, int nb, int kind) {
    for (int i = 0; i < nb; ++i) {
        y[i].d = 0.02f * random_uniform();
        for (int j = 0; j < QK_K / 16; ++j) {
            int sum = 0;
            for (int l = 0; l < 16; ++l) {
                int v = (int) (random_u32() % 255) - 127;
                if (kind == 1) {
                    v = 127;
                } else if (kind == 2) {
                    v = -127;
                } else if (kind == 3) {
                    v = random_u32() & 1 ? 127 : -127;
                }
                y[i].qs[16 * j + l] = (int8_t) v;
                sum += v;
            }
            y[i].bsums[j] = (int16_t) sum;
        }
    }
}

static ggml_half half(float x) {
    return GGML_COMPUTE_FP32_TO_FP16(x);
}

static void itq3_s_case(block_itq3_s * x, int nb, int kind) {
    random_bytes(x, nb * sizeof(*x));
    for (int i = 0; i < nb; ++i) {
        x[i].d = half(0.01f + 0.1f * fabsf(random_uniform()));
        x[i].z = 0;
        switch (kind) {
            case 1:
                memset(x[i].sel, 0xFF, sizeof(x[i].sel));
                break;
            case 2:
                memset(x[i].qs, 0xFF, sizeof(x[i].qs));
                break;
            case 3:
                memset(x[i].qs, 0xFF, sizeof(x[i].qs));
                memset(x[i].sel, 0xFF, sizeof(x[i].sel));
                break;
            case 4:  // the highest level everywhere: c1 = c0 = 1 after the first weights
                memset(x[i].qs, 0xFF, sizeof(x[i].qs));
                memset(x[i].sel, 0x33, sizeof(x[i].sel));
                break;
            case 5:
                memset(x[i].qs, 0, sizeof(x[i].qs));
                memset(x[i].sel, 0, sizeof(x[i].sel));
                break;
            case 6:
                x[i].d ^= 0x8000;
                break;
            case 7:
                x[i].d = (ggml_half) (random_u32() & 0x83FF);
                break;
            case 8:
                x[i].d = i & 1 ? 0x7BFF : 0xFBFF;
                break;
            case 9:
                x[i].z = half(4.0f * random_uniform());
                break;
            case 10:  // the literal ternary code
                memset(x[i].sel, 0, sizeof(x[i].sel));
                x[i].z = half(2.0f);
                break;
            case 11:
                x[i].d = 0;
                x[i].z = 0x8000;
                break;
        }
    }
}

#define ITQ3_S_CASES 12

static const char * const itq3_s_names[ITQ3_S_CASES] = {
    "random",    "selectors 1", "symbols 3",  "selectors 1, symbols 3",
    "level 63",  "level -63",   "d negative", "d subnormal",
    "d maximal", "z not zero",  "ternary",    "d zero, z -0"
};

static void test_itq3_s(void) {
    static const char * activations[] = { "random", "127", "-127", "+-127" };
    static block_itq3_s x[MAX_BLOCKS];
    static block_q8_K   y[MAX_BLOCKS];
    for (int kind = 0; kind < ITQ3_S_CASES; ++kind) {
        for (int act = 0; act < 4; ++act) {
            double worst = 0.0;
            for (int nb = 1; nb <= MAX_BLOCKS; ++nb) {
                itq3_s_case(x, nb, kind);
                random_q8_K(y, nb, act);
                float portable, simd;
                ggml_vec_dot_itq3_s_q8_K_h_generic(nb * QK_K, &portable, 0, x, 0, y, 0, 1);
                ggml_vec_dot_itq3_s_q8_K_h(nb * QK_K, &simd, 0, x, 0, y, 0, 1);

                double scale = FLT_MIN;  // what the terms amount to
                for (int i = 0; i < nb; ++i) {
                    const double d = fabs((double) ggml_fp16_to_fp32(x[i].d) * y[i].d / 32);
                    int8_t       levels[QK_K];
                    itq3_s_decode_levels(x[i].qs, x[i].sel, levels);
                    for (int j = 0; j < QK_K; ++j) {
                        scale += d * (fabs((double) levels[j] * y[i].qs[j]) + 64.0 * abs(y[i].qs[j]) +
                                      fabs((double) ggml_fp16_to_fp32(x[i].z) * y[i].qs[j]));
                    }
                }
                worst = fmax(worst, isfinite(simd) ? fabs((double) simd - portable) / scale : INFINITY);
            }
            char line[80];
            snprintf(line, sizeof(line), "itq3_s dot: %s, activations %s: %.1e", itq3_s_names[kind], activations[act],
                     worst);
            report(line, worst < 1e-6);
        }
    }
}

// Activations with a NaN give NaN, whatever they meet.
static void test_nan(void) {
    static block_itq3_s x[MAX_BLOCKS];
    static block_q8_K   y[MAX_BLOCKS];
    static float        act[MAX_BLOCKS * QK_K];
    int                 ok = 1;
    for (int kind = 0; kind < ITQ3_S_CASES; ++kind) {
        for (int nb = 1; nb <= MAX_BLOCKS; ++nb) {
            itq3_s_case(x, nb, kind);
            activation_case(0, act, nb * QK_K);
            act[random_u32() % (uint32_t) (nb * QK_K)] = NAN;
            quantize_row_q8_K_h(act, y, nb * QK_K);
            float portable, simd;
            ggml_vec_dot_itq3_s_q8_K_h_generic(nb * QK_K, &portable, 0, x, 0, y, 0, 1);
            ggml_vec_dot_itq3_s_q8_K_h(nb * QK_K, &simd, 0, x, 0, y, 0, 1);
            ok &= isnan(portable) && isnan(simd);
        }
    }
    report("itq3_s dot: NaN in the activations is NaN", ok);
}

//
// panels
//

typedef void repack_t(const void * rows, size_t row_size, int n_rows, int64_t nb, void * panel);
typedef void gemm_t(int64_t nb, const void * panel, const struct itq3s_columns * y, int nc,
                    float out[][ITQ3S_PANEL_ROWS]);
typedef void vec_dot_t(int n, float * s, size_t bs, const void * x, size_t bx, const void * y, size_t by, int nrc);

#define MAX_PANEL_BLOCKS 5

struct panel_type {
    const char * name;
    size_t       block_size;
    int          rotated;  // activations in the order of ITQ3_S
    repack_t *   repack;
    repack_t *   repack_generic;
    gemm_t *     gemm;
    gemm_t *     gemm_generic;
    vec_dot_t *  vec_dot_generic;
};

static const struct panel_type panel_types[] = {
    { "itq3_s", sizeof(block_itq3_s), 1, itq3s_repack_itq3_s, itq3s_repack_itq3_s_generic, itq3s_gemm_itq3_s,
      itq3s_gemm_itq3_s_generic, ggml_vec_dot_itq3_s_q8_K_h_generic },
    { "tq2_0", sizeof(block_tq2_0), 0, itq3s_repack_tq2_0, itq3s_repack_tq2_0_generic, itq3s_gemm_tq2_0,
      itq3s_gemm_tq2_0_generic, ggml_vec_dot_tq2_0_q8_K_generic },
    { "tq1_0", sizeof(block_tq1_0), 0, itq3s_repack_tq1_0, itq3s_repack_tq1_0_generic, itq3s_gemm_tq1_0,
      itq3s_gemm_tq1_0_generic, ggml_vec_dot_tq1_0_q8_K_generic },
};

// Rows of nb blocks, and the scale of the weights of every block of every row, times the largest of them.
static void panel_case(const struct panel_type * t, int kind, char * rows, int n_rows, int nb, double * largest) {
    for (int i = 0; i < n_rows * nb; ++i) {
        char * block = rows + (size_t) i * t->block_size;
        if (t->rotated) {
            block_itq3_s * x = (block_itq3_s *) block;
            itq3_s_case(x, 1, kind);
            if (kind == 8 && random_u32() & 1) {
                x->d ^= 0x8000;
            }
            largest[i] = fabs((double) ggml_fp16_to_fp32(x->d) / 32) * (64 + fabs((double) ggml_fp16_to_fp32(x->z)));
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
static void panel_columns(const struct panel_type * t, const block_q8_K * y, int nb, int first, int nc, int8_t * q,
                          float * d, int32_t * sums) {
    for (int b = 0; b < nb; ++b) {
        for (int c = 0; c < nc; ++c) {
            const block_q8_K * block = &y[(first + c) * nb + b];
            const int          at    = b * nc + c;
            if (t->rotated) {
                itq3s_reorder_q8_K_h_generic(block->qs, q + at * QK_K);
            } else {
                memcpy(q + at * QK_K, block->qs, QK_K);
            }
            d[at]    = block->d;
            sums[at] = 0;
            for (int j = 0; j < QK_K / 16; ++j) {
                sums[at] += block->bsums[j];
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
        itq3s_reorder_q8_K_h_generic(q, a);
        itq3s_reorder_q8_K_h(q, b);
        ok &= memcmp(a, b, sizeof(a)) == 0;
    }
    report("reorder_q8_K_h, same bytes", ok);
}

static void test_repack(const struct panel_type * t) {
    static char              rows[ITQ3S_PANEL_ROWS * (MAX_PANEL_BLOCKS * sizeof(block_itq3_s) + 6)];
    static _Alignas(64) char a[(ITQ3S_PANEL_ROWS + 1) * MAX_PANEL_BLOCKS * sizeof(block_itq3_s)];
    static _Alignas(64) char b[sizeof(a)];

    int ok = 1;
    for (int nb = 1; nb <= MAX_PANEL_BLOCKS; ++nb) {
        for (int n_rows = 1; n_rows <= ITQ3S_PANEL_ROWS; ++n_rows) {
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

#ifdef ITQ3S_HAS_GEMV
// Rows as a file has them times column c: the bits of the panel's product, and nothing behind n_rows.
typedef void gemv_t(int64_t nb, const void * rows, size_t row_size, int n_rows, const struct itq3s_columns * y,
                    float * out);

static gemv_t * gemv_of(const struct panel_type * t) {
    return t->rotated ? itq3s_gemv_itq3_s : t->block_size == sizeof(block_tq2_0) ? itq3s_gemv_tq2_0 : NULL;
}

#    define MAX_ROW_BLOCKS 19  // two groups of 8, the longest of a kernel, and a part of one

static int same_as_rows(gemv_t * gemv, const char * rows, size_t row_size, int n_rows, int nb, const block_q8_K * y,
                        const float * panel) {
    static int8_t q[MAX_ROW_BLOCKS * QK_K];
    float         d[MAX_ROW_BLOCKS];
    int32_t       sums[MAX_ROW_BLOCKS];
    for (int b = 0; b < nb; ++b) {
        memcpy(q + b * QK_K, y[b].qs, QK_K);
        d[b]    = y[b].d;
        sums[b] = 0;
        for (int i = 0; i < QK_K; ++i) {
            sums[b] += y[b].qs[i];
        }
    }
    const struct itq3s_columns columns = { q, d, sums };
    float                      out[ITQ3S_PANEL_ROWS + 1];
    memset(out, 0x55, sizeof(out));
    gemv(nb, rows, row_size, n_rows, &columns, out);
    uint32_t after;
    memcpy(&after, &out[n_rows], sizeof(after));
    return memcmp(out, panel, n_rows * sizeof(float)) == 0 && after == 0x55555555;
}
#endif

static void test_gemm(const struct panel_type * t, const char * name, int kind, int act) {
    static char                rows[ITQ3S_PANEL_ROWS * MAX_PANEL_BLOCKS * sizeof(block_itq3_s)];
    static double              largest[ITQ3S_PANEL_ROWS * MAX_PANEL_BLOCKS];
    static _Alignas(64) char   panel[sizeof(rows)];
    static block_q8_K          y[ITQ3S_GROUP * MAX_PANEL_BLOCKS];
    static _Alignas(64) int8_t q[ITQ3S_GROUP * MAX_PANEL_BLOCKS * QK_K];
    static float               d[ITQ3S_GROUP * MAX_PANEL_BLOCKS];
    static int32_t             sums[ITQ3S_GROUP * MAX_PANEL_BLOCKS];
    const struct itq3s_columns columns = { q, d, sums };

    double           worst     = 0.0;
    int              same_bits = 1;
    static const int lengths[] = { 1, 4, MAX_PANEL_BLOCKS };
    for (size_t i = 0; i < sizeof(lengths) / sizeof(*lengths); ++i) {
        const int nb = lengths[i];
        panel_case(t, kind, rows, ITQ3S_PANEL_ROWS, nb, largest);
        t->repack_generic(rows, nb * t->block_size, ITQ3S_PANEL_ROWS, nb, panel);
        random_q8_K(y, ITQ3S_GROUP * nb, act);

        float want[ITQ3S_GROUP][ITQ3S_PANEL_ROWS];
        float got[ITQ3S_GROUP][ITQ3S_PANEL_ROWS];
        panel_columns(t, y, nb, 0, ITQ3S_GROUP, q, d, sums);
        t->gemm_generic(nb, panel, &columns, ITQ3S_GROUP, want);
        memset(got, 0x55, sizeof(got));
        t->gemm(nb, panel, &columns, ITQ3S_GROUP, got);
        for (int c = 0; c < ITQ3S_GROUP; ++c) {
            for (int r = 0; r < ITQ3S_PANEL_ROWS; ++r) {
                double scale = FLT_MIN;  // what the terms amount to
                for (int b = 0; b < nb; ++b) {
                    for (int j = 0; j < QK_K; ++j) {
                        const block_q8_K * block = &y[c * nb + b];
                        scale += largest[r * nb + b] * fabs((double) block->d * block->qs[j]);
                    }
                }
                double error = fabs((double) got[c][r] - want[c][r]);
                if (c < 4) {
                    float dot;
                    t->vec_dot_generic(nb * QK_K, &dot, 0, rows + (size_t) r * nb * t->block_size, 0, y + c * nb, 0, 1);
                    error = fmax(error, fabs((double) got[c][r] - dot));
                }
                worst = fmax(worst, isfinite(got[c][r]) ? error / scale : INFINITY);
            }
        }

#ifdef ITQ3S_HAS_GEMV
        gemv_t * gemv = gemv_of(t);
        for (int c = 0; gemv && c < 8; ++c) {
            const int n_rows = ITQ3S_PANEL_ROWS - c;
            same_bits &= same_as_rows(gemv, rows, nb * t->block_size, n_rows, nb, y + c * nb, got[c]);
        }
#endif

        static const int groups[] = { 1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 15, 16, 17, 33, 63 };
        for (size_t g = 0; g < sizeof(groups) / sizeof(*groups); ++g) {
            const int nc = groups[g];
            for (int first = 0; first + nc <= ITQ3S_GROUP; first += ITQ3S_GROUP - nc) {
                float some[ITQ3S_GROUP + 1][ITQ3S_PANEL_ROWS];
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
static void test_panel_nan(const struct panel_type * t) {
    enum { nb = 3, nan_block = 1 };

    static char                rows[ITQ3S_PANEL_ROWS * nb * sizeof(block_itq3_s)];
    static double              largest[ITQ3S_PANEL_ROWS * nb];
    static _Alignas(64) char   panel[sizeof(rows)];
    static block_q8_K          y[ITQ3S_GROUP * nb];
    static _Alignas(64) int8_t q[ITQ3S_GROUP * nb * QK_K];
    static float               d[ITQ3S_GROUP * nb];
    static int32_t             sums[ITQ3S_GROUP * nb];
    const struct itq3s_columns columns = { q, d, sums };

    panel_case(t, 0, rows, ITQ3S_PANEL_ROWS, nb, largest);
    t->repack_generic(rows, nb * t->block_size, ITQ3S_PANEL_ROWS, nb, panel);
    int              ok       = 1;
    static const int groups[] = { 1, 2, 3, 4, 5, 8, 9, 16, 17, ITQ3S_GROUP };
    for (size_t g = 0; g < sizeof(groups) / sizeof(*groups); ++g) {
        const int nc     = groups[g];
        const int column = (int) (random_u32() % (uint32_t) nc);
        float     without[ITQ3S_GROUP][ITQ3S_PANEL_ROWS];
        float     with[ITQ3S_GROUP][ITQ3S_PANEL_ROWS];
        random_q8_K(y, nc * nb, 0);
        panel_columns(t, y, nb, 0, nc, q, d, sums);
        t->gemm(nb, panel, &columns, nc, without);
        memset(&y[column * nb + nan_block], 0, sizeof(*y));
        y[column * nb + nan_block].d = NAN;
        panel_columns(t, y, nb, 0, nc, q, d, sums);
        t->gemm(nb, panel, &columns, nc, with);
        for (int c = 0; c < nc; ++c) {
            for (int r = 0; r < ITQ3S_PANEL_ROWS; ++r) {
                ok &= c == column ? isnan(with[c][r]) != 0 : memcmp(&with[c][r], &without[c][r], sizeof(float)) == 0;
            }
        }
    }
    char line[80];
    snprintf(line, sizeof(line), "%s panel: NaN in a column is NaN in that column", t->name);
    report(line, ok);
}

#ifdef ITQ3S_HAS_GEMV
// Rows as a file has them: of any number of blocks, further apart than they are long, and with a zero-point in some rows
// of a panel and none in others.
static void test_rows(const struct panel_type * t) {
    enum { max_size = MAX_ROW_BLOCKS * sizeof(block_itq3_s) + 4 };

    static char                row[MAX_ROW_BLOCKS * sizeof(block_itq3_s)];
    static char                rows[ITQ3S_PANEL_ROWS * max_size];
    static double              largest[MAX_ROW_BLOCKS];
    static _Alignas(64) char   panel[ITQ3S_PANEL_ROWS * sizeof(row)];
    static block_q8_K          y[MAX_ROW_BLOCKS];
    static _Alignas(64) int8_t q[MAX_ROW_BLOCKS * QK_K];
    static float               d[MAX_ROW_BLOCKS];
    static int32_t             sums[MAX_ROW_BLOCKS];
    const struct itq3s_columns columns = { q, d, sums };

    int ok = 1;
    for (int nb = 1; nb <= MAX_ROW_BLOCKS; ++nb) {
        const size_t row_size = (size_t) nb * t->block_size + 2 * (size_t) (nb % 3);
        random_bytes(rows, sizeof(rows));
        for (int r = 0; r < ITQ3S_PANEL_ROWS; ++r) {
            panel_case(t, r % 3 == 1 ? 9 : 0, row, 1, nb, largest);
            memcpy(rows + r * row_size, row, (size_t) nb * t->block_size);
        }
        t->repack_generic(rows, row_size, ITQ3S_PANEL_ROWS, nb, panel);
        random_q8_K(y, nb, 0);
        panel_columns(t, y, nb, 0, 1, q, d, sums);
        float want[1][ITQ3S_PANEL_ROWS];
        t->gemm(nb, panel, &columns, 1, want);
        for (int n_rows = 1; n_rows <= ITQ3S_PANEL_ROWS; ++n_rows) {
            ok &= same_as_rows(gemv_of(t), rows, row_size, n_rows, nb, y, want[0]);
        }
    }
    char line[80];
    snprintf(line, sizeof(line), "%s rows of 1 to %d blocks, the bits of a panel", t->name, MAX_ROW_BLOCKS);
    report(line, ok);
}
#endif

static void test_panels(void) {
    test_reorder();
    for (size_t i = 0; i < sizeof(panel_types) / sizeof(*panel_types); ++i) {
        const struct panel_type * t = &panel_types[i];
        test_repack(t);
        test_panel_nan(t);
#ifdef ITQ3S_HAS_GEMV
        if (gemv_of(t)) {
            test_rows(t);
        }
#endif
        for (int kind = 0; kind < (t->rotated ? ITQ3_S_CASES : 2); ++kind) {
            for (int act = 0; act < 4; ++act) {
                test_gemm(t, t->rotated ? itq3_s_names[kind] : kind == 1 ? "bytes 255" : "any bytes", kind, act);
            }
        }
    }
}

static void test_vectors(const char * path) {
    FILE * file = fopen(path, "rb");
    if (!file) {
        fprintf(stderr, "error: %s cannot be read\n", path);
        exit(1);
    }
    struct {
        block_itq3_s block;
        uint8_t      rotated[QK_K * sizeof(double)];
    } v;

    int    blocks = 0;
    double worst  = 0.0;
    while (fread(&v, sizeof(v), 1, file) == 1) {
        for (int j = 0; j < QK_K; ++j) {
            double want;
            memcpy(&want, v.rotated + j * sizeof(double), sizeof(want));
            // a row of two blocks, to have the block in both places
            block_itq3_s x[2] = { v.block, v.block };
            block_q8_K   y[2];
            memset(y, 0, sizeof(y));
            y[j & 1].d             = 1.0f;
            y[j & 1].qs[j]         = 127;
            y[j & 1].bsums[j / 16] = 127;
            float got;
            ggml_vec_dot_itq3_s_q8_K_h(2 * QK_K, &got, 0, x, 0, y, 0, 1);
            const double unit = fabs((double) ggml_fp16_to_fp32(v.block.d)) * 2 + FLT_MIN;  // 64 levels
            worst             = fmax(worst, fabs(got - 127 * want) / (127 * unit));
        }
        ++blocks;
    }
    fclose(file);
    char line[80];
    snprintf(line, sizeof(line), "itq3_s dot: %d reference blocks: %.1e", blocks, worst);
    report(line, blocks > 0 && worst < 1e-6);
}

#if defined(GGML_TQ_AVX512)
static void test_ternary(void) {
    static block_tq1_0 x1[MAX_BLOCKS];
    static block_tq2_0 x2[MAX_BLOCKS];
    static block_q8_K  y[MAX_BLOCKS];
    for (int act = 0; act < 4; ++act) {
        double worst1 = 0.0;
        double worst2 = 0.0;
        for (int nb = 1; nb <= MAX_BLOCKS; ++nb) {
            random_bytes(x1, nb * sizeof(*x1));
            random_bytes(x2, nb * sizeof(*x2));
            random_q8_K(y, nb, act);
            double scale = FLT_MIN;
            for (int i = 0; i < nb; ++i) {
                x1[i].d = x2[i].d = half(random_uniform());
                for (int j = 0; j < QK_K; ++j) {
                    scale += fabs((double) ggml_fp16_to_fp32(x1[i].d) * y[i].d * y[i].qs[j]) * 4;
                }
            }
            float portable, simd;
            ggml_vec_dot_tq1_0_q8_K_generic(nb * QK_K, &portable, 0, x1, 0, y, 0, 1);
            ggml_vec_dot_tq1_0_q8_K_avx512(nb * QK_K, &simd, x1, y);
            worst1 = fmax(worst1, fabs((double) simd - portable) / scale);
            ggml_vec_dot_tq2_0_q8_K_generic(nb * QK_K, &portable, 0, x2, 0, y, 0, 1);
            ggml_vec_dot_tq2_0_q8_K_avx512(nb * QK_K, &simd, x2, y);
            worst2 = fmax(worst2, fabs((double) simd - portable) / scale);
        }
        char line[80];
        snprintf(line, sizeof(line), "tq1_0 dot, any bytes, activations %d: %.1e", act, worst1);
        report(line, worst1 < 1e-6);
        snprintf(line, sizeof(line), "tq2_0 dot, any bytes, activations %d: %.1e", act, worst2);
        report(line, worst2 < 1e-6);
    }
}
#endif

int main(int argc, char ** argv) {
    for (int i = 0; i < 1 << 16; ++i) {
        ggml_table_f32_f16[i] = GGML_COMPUTE_FP16_TO_FP32((ggml_fp16_t) i);
    }
    test_activations();
    test_itq3_s();
    test_nan();
    test_panels();
#if defined(GGML_TQ_AVX512)
    test_ternary();
#endif
    if (argc > 1) {
        test_vectors(argv[1]);
    }
    printf("%d failed\n", failures);
    return failures != 0;
}

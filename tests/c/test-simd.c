// The SIMD kernels of ITQ3_S, TQ1_0 and TQ2_0 against the portable C, on random and adversarial blocks, and against the
// reference vectors. Compiled with the flags of the variant under test (tests/native/test_simd.py, scripts/check/arm.py).
//
//   test-simd [VECTORS]    VECTORS: per block 100 bytes and 256 doubles, the rotated values
//
// Prints a line per check; the exit status is 1 when one fails.

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
    }
    return x;
}

static void test_activations(void) {
    static const char * names[] = { "normal",           "zero",     "one value", "two values", "subnormal", "large",
                                    "infinity and NaN", "outliers", "integers" };
    static float        x[MAX_BLOCKS * QK_K];
    static block_q8_K   a[MAX_BLOCKS];
    static block_q8_K   b[MAX_BLOCKS];
    for (int kind = 0; kind < 9; ++kind) {
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

static void test_itq3_s(void) {
    static const char * names[]       = { "random",    "selectors 1", "symbols 3",  "selectors 1, symbols 3",
                                          "level 63",  "level -63",   "d negative", "d subnormal",
                                          "d maximal", "z not zero",  "ternary",    "d zero, z -0" };
    static const char * activations[] = { "random", "127", "-127", "+-127" };
    static block_itq3_s x[MAX_BLOCKS];
    static block_q8_K   y[MAX_BLOCKS];
    for (int kind = 0; kind < 12; ++kind) {
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
            snprintf(line, sizeof(line), "itq3_s dot: %s, activations %s: %.1e", names[kind], activations[act], worst);
            report(line, worst < 1e-6);
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
#if defined(GGML_TQ_AVX512)
    test_ternary();
#endif
    if (argc > 1) {
        test_vectors(argv[1]);
    }
    printf("%d failed\n", failures);
    return failures != 0;
}

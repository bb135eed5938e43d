// mul_mat and mul_mat_id of the trellis types, TQ1_0 and TQ2_0 on the CPU, in the layout of the file and in the buffer of panels:
//
//   - against vec_dot, element by element, within rounding;
//   - columns of a product against the same columns of products with other numbers of columns, of threads, of either
//     layout, and against the ordinary product of a matrix for experts: equal bits;
//   - columns with a NaN: NaN, and the others as they were.
//
// Prints a line per case; the exit status is 1 when one fails.

#include "ggml-backend.h"
#include "ggml-cpu.h"
#include "ggml-itq-types.h"
#include "ggml.h"

#include <math.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static uint64_t state = 88172645463325252u;
static int      failed;

static uint32_t random_u32(void) {
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    return (uint32_t) (state >> 32);
}

static void * checked(void * p) {
    if (!p) {
        fprintf(stderr, "error: out of memory\n");
        exit(1);
    }
    return p;
}

static bool has_zero_point(enum ggml_type type) {
#define ZERO_POINT(NAME, name, bits, n_levels, length, has_z, number) || (type == GGML_TYPE_##NAME && (has_z))
    return false ITQ_TYPES(ZERO_POINT);
}

// Random bytes are valid blocks of all types but for the scales; the last field of each block is made one.
static void * random_blocks(enum ggml_type type, size_t size) {
    const size_t block = ggml_type_size(type);
    uint8_t *    data  = checked(malloc(size));
    for (size_t i = 0; i < size; ++i) {
        data[i] = (uint8_t) random_u32();
    }
    for (size_t at = 0; at < size; at += block) {
        uint8_t *         end = data + at + block;
        const ggml_fp16_t d   = ggml_fp32_to_fp16(0.01f + (float) (random_u32() % 100) * 0.001f);
        if (has_zero_point(type)) {
            ggml_fp16_t z = ggml_fp32_to_fp16(random_u32() % 4 ? 0.0f : 2.0f);
            z |= random_u32() & 0x3f;  // the start state
            memcpy(end - 4, &d, 2);
            memcpy(end - 2, &z, 2);
        } else {
            memcpy(end - 2, &d, 2);
        }
    }
    return data;
}

static float * random_columns(int64_t n) {
    float * data = checked(malloc((size_t) n * sizeof(float)));
    for (int64_t i = 0; i < n; ++i) {
        data[i] = (float) (int32_t) random_u32() * 0x1p-31f;
    }
    return data;
}

struct shape {
    int  k, m, n;           // row length, rows, columns
    int  experts, used;     // mul_mat_id; 0 experts: mul_mat
    int  batch_w, batch_x;  // of mul_mat
    bool shared;            // mul_mat_id: the experts of a token see the same column
};

static int columns_of(const struct shape * s) {
    return s->experts ? s->used * s->n : s->n * s->batch_x;
}

// Which of the columns of x, and which matrix, column c of the result comes from.
static int source_of(const struct shape * s, int c) {
    return s->experts && s->shared ? c / s->used : c;
}

static int matrix_of(const struct shape * s, const int32_t * ids, int c) {
    return s->experts ? ids[c] : c / s->n / (s->batch_x / s->batch_w);
}

static ggml_backend_buffer_type_t panels(void) {
    ggml_backend_dev_t                 device = ggml_backend_reg_dev_get(ggml_backend_cpu_reg(), 0);
    ggml_backend_dev_get_extra_bufts_t get    = (ggml_backend_dev_get_extra_bufts_t) ggml_backend_reg_get_proc_address(
        ggml_backend_cpu_reg(), "ggml_backend_dev_get_extra_bufts");
    for (ggml_backend_buffer_type_t * buft = get ? get(device) : NULL; buft && *buft; ++buft) {
        if (strcmp(ggml_backend_buft_name(*buft), "CPU_ITQ3S") == 0) {
            return *buft;
        }
    }
    fprintf(stderr, "error: the CPU backend has no buffer type CPU_ITQ3S\n");
    exit(1);
}

enum layout {
    PLAIN,
    PANELS,
    QUANTIZED,  // plain, with activations that are quantized already
    STRIDED,    // plain, with gaps between the rows of the weights and between the columns
    LAYOUTS,
    REFERENCE = LAYOUTS,  // plain, upstream's product of vec_dot
};

static const char * const layout_names[] = { "plain", "panels", "quantized", "strided", "reference" };

// A product: floats, column after column. NULL where the layout cannot hold the weights.
static float * product(enum ggml_type type, const struct shape * s, enum layout layout, int threads, const void * w,
                       const float * x, const int32_t * ids) {
    const bool     id      = s->experts > 0;
    const int      n_w     = id ? s->experts : s->batch_w;
    const int      n_x     = id ? (s->shared ? 1 : s->used) : s->n;
    const int      n_x3    = id ? s->n : s->batch_x;
    const int      gap     = layout == STRIDED ? 1 : 0;
    ggml_backend_t backend = checked(ggml_backend_cpu_init());
    ggml_backend_cpu_set_n_threads(backend, threads);
    ggml_backend_cpu_set_use_ref(backend, layout == REFERENCE);
    struct ggml_init_params params = { .mem_size = 1 << 20, .mem_buffer = NULL, .no_alloc = true };
    struct ggml_context *   at_w   = checked(ggml_init(params));
    struct ggml_context *   at_x   = checked(ggml_init(params));
    const enum ggml_type    xt     = layout == QUANTIZED ? ggml_get_type_traits_cpu(type)->vec_dot_type : GGML_TYPE_F32;

    struct ggml_tensor * wt   = ggml_new_tensor_3d(at_w, type, s->k * (1 + gap), s->m + gap, n_w);
    struct ggml_tensor * xs   = ggml_new_tensor_3d(at_x, xt, s->k * (1 + gap), n_x + gap, n_x3);
    struct ggml_tensor * it   = ggml_new_tensor_2d(at_x, GGML_TYPE_I32, (id ? s->used : 1) + gap, s->n);
    struct ggml_tensor * wv   = wt;
    struct ggml_tensor * xv   = xs;
    struct ggml_tensor * view = it;
    if (gap) {
        wv   = ggml_view_3d(at_x, wt, s->k, s->m, n_w, wt->nb[1], wt->nb[2], 0);
        xv   = ggml_view_3d(at_x, xs, s->k, n_x, n_x3, xs->nb[1], xs->nb[2], 0);
        view = ggml_view_2d(at_x, it, id ? s->used : 1, s->n, it->nb[1], 0);
    }
    struct ggml_tensor * out = id ? ggml_mul_mat_id(at_x, wv, xv, view) : ggml_mul_mat(at_x, wv, xv);

    float *               result = NULL;
    ggml_backend_buffer_t buffer = checked(
        ggml_backend_alloc_ctx_tensors_from_buft(at_w, layout == PANELS ? panels() : ggml_backend_cpu_buffer_type()));
    if (ggml_backend_supports_op(backend, out)) {
        struct ggml_cgraph * graph = ggml_new_graph(at_x);
        ggml_build_forward_expand(graph, out);
        ggml_backend_buffer_t rest = checked(ggml_backend_alloc_ctx_tensors(at_x, backend));

        const size_t row = ggml_row_size(type, s->k);
        if (gap) {
            for (int r = 0; r < n_w * s->m; ++r) {
                memcpy((char *) wt->data + r / s->m * wt->nb[2] + r % s->m * wt->nb[1], (const char *) w + r * row,
                       row);
            }
        } else {
            ggml_backend_tensor_set(wt, w, 0, ggml_nbytes(wt));
            void * back = checked(malloc(ggml_nbytes(wt)));
            ggml_backend_tensor_get(wt, back, 0, ggml_nbytes(wt));
            if (memcmp(back, w, ggml_nbytes(wt)) != 0) {
                printf("%s %s: the buffer gives other bytes back FAILED\n", ggml_type_name(type), layout_names[layout]);
                ++failed;
            }
            free(back);
        }
        for (int c = 0; c < n_x * n_x3; ++c) {
            char *        to   = (char *) xs->data + c / n_x * xs->nb[2] + c % n_x * xs->nb[1];
            const float * from = x + (int64_t) c * s->k;
            if (layout == QUANTIZED) {
                ggml_get_type_traits_cpu(xt)->from_float(from, to, s->k);
            } else {
                memcpy(to, from, (size_t) s->k * sizeof(float));
            }
        }
        for (int c = 0; id && c < s->used * s->n; ++c) {
            memcpy((char *) it->data + c / s->used * it->nb[1] + c % s->used * 4, &ids[c], 4);
        }
        if (ggml_backend_graph_compute(backend, graph) != GGML_STATUS_SUCCESS) {
            fprintf(stderr, "error: no result\n");
            exit(1);
        }
        result = checked(malloc(ggml_nbytes(out)));
        memcpy(result, out->data, ggml_nbytes(out));
        ggml_backend_buffer_free(rest);
    }
    ggml_backend_buffer_free(buffer);
    ggml_free(at_x);
    ggml_free(at_w);
    ggml_backend_free(backend);
    return result;
}

static void check(const char * what, enum ggml_type type, const struct shape * s, enum layout layout, int threads,
                  bool ok, double figure) {
    printf("%-7s %-10s k=%d m=%d n=%d batch %d/%d experts %d/%d %s, threads %d: %s %.2g %s\n", ggml_type_name(type),
           s->experts ? "mul_mat_id" : "mul_mat", s->k, s->m, s->n, s->batch_w, s->batch_x, s->used, s->experts,
           layout_names[layout], threads, what, figure, ok ? "ok" : "FAILED");
    failed += !ok;
}

// All layouts, one and three threads: the first against vec_dot, the others against the first. Then products of fewer
// columns, and of a matrix alone.
static void run(enum ggml_type type, const struct shape * s) {
    const bool   id  = s->experts > 0;
    const size_t row = ggml_row_size(type, s->k);
    const int    n   = columns_of(s);
    void *       w   = random_blocks(type, row * (size_t) s->m * (size_t) (id ? s->experts : s->batch_w));
    float *      x   = random_columns((int64_t) s->k * n);
    int32_t *    ids = checked(calloc((size_t) n, sizeof(*ids)));
    for (int token = 0; id && token < s->n; ++token) {
        // few experts get most of the columns
        const int first = random_u32() % 4 ? 0 : (int) (random_u32() % (uint32_t) s->experts);
        for (int j = 0; j < s->used; ++j) {
            ids[token * s->used + j] = (first + j) % s->experts;
        }
    }

    const struct ggml_type_traits_cpu * traits = ggml_get_type_traits_cpu(type);
    const struct ggml_type_traits_cpu * act    = ggml_get_type_traits_cpu(traits->vec_dot_type);
    char *                              y      = checked(malloc(ggml_row_size(traits->vec_dot_type, s->k)));
    float *                             all    = product(type, s, PLAIN, 1, w, x, ids);
    float *                             ref    = checked(product(type, s, REFERENCE, 2, w, x, ids));
    double                              error  = 0.0;
    double                              size   = 0.0;
    bool                                is_dot = true;
    for (int c = 0; c < n; ++c) {
        act->from_float(x + (int64_t) source_of(s, c) * s->k, y, s->k);
        for (int r = 0; r < s->m; ++r) {
            float want;
            traits->vec_dot(s->k, &want, 0, (char *) w + ((size_t) matrix_of(s, ids, c) * s->m + r) * row, 0, y, 0, 1);
            const float got = all[(size_t) c * s->m + r];
            is_dot          = is_dot && memcmp(&ref[(size_t) c * s->m + r], &want, sizeof(want)) == 0;
            error           = isfinite(got) ? fmax(error, fabs((double) got - want)) : INFINITY;
            size            = fmax(size, fabs(want));
        }
    }
    check("largest difference from vec_dot", type, s, PLAIN, 1, error <= 2e-5 * size && size > 0, error / size);
    check("the bits of vec_dot", type, s, REFERENCE, 2, is_dot, 0.0);
    free(ref);

    for (int layout = 0; layout < LAYOUTS; ++layout) {
        for (int threads = 1; threads <= 3; ++threads) {
            float * other = product(type, s, (enum layout) layout, threads, w, x, ids);
            if (other) {
                const bool same = memcmp(other, all, (size_t) n * s->m * sizeof(float)) == 0;
                check("the same bits", type, s, (enum layout) layout, threads, same, 0.0);
            } else if (layout != PANELS || s->m % 16 == 0) {
                check("no product", type, s, (enum layout) layout, threads, false, 0.0);
            }
            free(other);
        }
    }

    // every column alone, and the first few together
    static const int counts[] = { 1, 2, 3, 7, 8, 9, 15, 16, 17, 64, 300 };
    for (size_t i = 0; i < sizeof(counts) / sizeof(counts[0]); ++i) {
        struct shape part = { s->k, s->m, counts[i], 0, 0, 1, 1, false };
        int          bad  = 0;
        int          done = 0;
        for (int c = 0; c < n; c += counts[i]) {
            const int matrix = matrix_of(s, ids, c);
            // columns that follow each other in x and meet the same matrix
            bool      usable = c + counts[i] <= n;
            for (int j = 1; usable && j < counts[i]; ++j) {
                usable = matrix_of(s, ids, c + j) == matrix && source_of(s, c + j) == source_of(s, c) + j;
            }
            if (!usable || done == 20) {
                continue;
            }
            const enum layout layout = s->m % 16 || done % 2 ? PLAIN : PANELS;
            float *           few    = product(type, &part, layout, 1, (char *) w + (size_t) matrix * s->m * row,
                                               x + (int64_t) source_of(s, c) * s->k, ids);
            bad += !few || memcmp(few, all + (size_t) c * s->m, (size_t) counts[i] * s->m * sizeof(float)) != 0;
            ++done;
            free(few);
        }
        if (done) {
            check("products of fewer columns that differ", type, &part, PLAIN, 1, bad == 0, bad);
        }
    }
    // A NaN in one column of activations is NaN in what comes of it, and nowhere else. The ternary types' activations
    // are upstream's Q8_K, which takes a NaN for a zero.
    if (ggml_is_itq(type)) {
        const int bad                                    = n / 2;
        x[(int64_t) source_of(s, bad) * s->k + s->k / 3] = NAN;
        for (int layout = 0; layout <= LAYOUTS; ++layout) {
            float * other = product(type, s, (enum layout) layout, 2, w, x, ids);
            if (!other) {
                continue;
            }
            int wrong = 0;
            for (int c = 0; c < n; ++c) {
                const bool   nan = source_of(s, c) == source_of(s, bad);
                const size_t at  = (size_t) c * s->m;
                const bool   same =
                    layout == REFERENCE || memcmp(other + at, all + at, (size_t) s->m * sizeof(float)) == 0;
                for (int r = 0; r < s->m; ++r) {
                    wrong += nan ? !isnan(other[at + (size_t) r]) : isnan(other[at + (size_t) r]) || !same;
                }
            }
            check("numbers that should, or should not, be NaN", type, s, (enum layout) layout, 2, wrong == 0, wrong);
            free(other);
        }
    }
    free(all);
    free(y);
    free(ids);
    free(x);
    free(w);
}

int main(void) {
    static const struct shape shapes[] = {
        { 256, 1, 8, 0, 0, 1, 1, false },
        { 512, 16, 9, 0, 0, 1, 1, false },
        { 2048, 64, 16, 0, 0, 1, 1, false },
        { 768, 33, 17, 0, 0, 1, 1, false },
        { 1280, 304, 40, 0, 0, 1, 1, false },
        { 256, 257, 300, 0, 0, 1, 1, false },
        { 512, 32, 301, 0, 0, 1, 1, false },
        { 2816, 40, 11, 0, 0, 1, 1, false },
        { 512, 48, 20, 0, 0, 1, 3, false },
        { 512, 20, 33, 0, 0, 2, 4, false },
        { 768, 32, 5, 0, 0, 2, 4, false },
        { 512, 5, 1, 0, 0, 1, 1, false },
        { 512, 70, 40, 4, 2, 1, 1, false },
        { 1024, 130, 300, 8, 3, 1, 1, false },
        { 256, 17, 12, 2, 1, 1, 1, false },
        { 512, 64, 3, 4, 2, 1, 1, false },
        { 768, 512, 21, 6, 3, 1, 1, true },
        { 1024, 48, 1, 8, 4, 1, 1, true },
        { 256, 16, 70, 3, 3, 1, 1, false },
        // whole blocks of 64 alone
        { 64, 16, 9, 0, 0, 1, 1, false },
        { 576, 48, 17, 0, 0, 1, 1, false },
        { 960, 35, 40, 0, 0, 1, 1, false },
        { 1408, 32, 5, 4, 2, 1, 1, false },
        { 192, 20, 33, 0, 0, 2, 4, false },
        { 320, 48, 1, 8, 4, 1, 1, true },
    };
#define TYPE(NAME, ...) GGML_TYPE_##NAME,
    static const int types[] = { ITQ_TYPES(TYPE) GGML_TYPE_TQ1_0, GGML_TYPE_TQ2_0 };
    ggml_cpu_init();
    for (size_t t = 0; t < sizeof(types) / sizeof(types[0]); ++t) {
        for (size_t i = 0; i < sizeof(shapes) / sizeof(shapes[0]); ++i) {
            if (shapes[i].k % ggml_blck_size((enum ggml_type) types[t]) == 0) {
                run((enum ggml_type) types[t], &shapes[i]);
            }
        }
    }
    printf("%d failed\n", failed);
    return failed != 0;
}

// The tiled matrix product against vec_dot, row by row: mul_mat and mul_mat_id of ITQ3_S, TQ1_0 and TQ2_0, with ragged
// edges, broadcasting, one and two threads.
//
// Prints a line per case; the exit status is 1 when one fails.

#include "ggml-backend.h"
#include "ggml-cpu.h"
#include "ggml.h"

#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static uint64_t state = 88172645463325252u;

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

// Random bytes are valid blocks of all three types but for the scales; the last field of each block is made one.
static void random_blocks(enum ggml_type type, uint8_t * data, size_t size) {
    const size_t block = ggml_type_size(type);
    for (size_t i = 0; i < size; ++i) {
        data[i] = (uint8_t) random_u32();
    }
    for (size_t at = 0; at < size; at += block) {
        uint8_t *         end = data + at + block;
        const ggml_fp16_t d   = ggml_fp32_to_fp16(0.01f + (float) (random_u32() % 100) * 0.001f);
        if ((int) type == 500) {
            const ggml_fp16_t z = ggml_fp32_to_fp16(random_u32() % 4 ? 0.0f : 2.0f);
            memcpy(end - 4, &d, 2);
            memcpy(end - 2, &z, 2);
        } else {
            memcpy(end - 2, &d, 2);
        }
    }
}

struct shape {
    int k, m, n;           // row length, rows, columns
    int experts, used;     // mul_mat_id; 0 experts: mul_mat
    int batch_w, batch_x;  // of mul_mat
};

// Whether results must be those of vec_dot to the bit.
static int exact = 0;

static int run(enum ggml_type type, struct shape s, int threads) {
    ggml_backend_t backend = checked(ggml_backend_cpu_init());
    ggml_backend_cpu_set_n_threads(backend, threads);
    struct ggml_init_params params = { .mem_size = 1 << 20, .mem_buffer = NULL, .no_alloc = true };
    struct ggml_context *   ctx    = checked(ggml_init(params));

    const int            id    = s.experts > 0;
    struct ggml_tensor * w     = ggml_new_tensor_3d(ctx, type, s.k, s.m, id ? s.experts : s.batch_w);
    struct ggml_tensor * x     = id ? ggml_new_tensor_3d(ctx, GGML_TYPE_F32, s.k, s.used, s.n)
                                    : ggml_new_tensor_3d(ctx, GGML_TYPE_F32, s.k, s.n, s.batch_x);
    struct ggml_tensor * ids   = ggml_new_tensor_2d(ctx, GGML_TYPE_I32, id ? s.used : 1, s.n);
    struct ggml_tensor * out   = id ? ggml_mul_mat_id(ctx, w, x, ids) : ggml_mul_mat(ctx, w, x);
    struct ggml_cgraph * graph = ggml_new_graph(ctx);
    ggml_build_forward_expand(graph, out);
    ggml_backend_buffer_t buffer = checked(ggml_backend_alloc_ctx_tensors(ctx, backend));

    uint8_t * wd  = w->data;
    float *   xd  = x->data;
    int32_t * idd = ids->data;
    random_blocks(type, wd, ggml_nbytes(w));
    for (int64_t i = 0; i < ggml_nelements(x); ++i) {
        xd[i] = (float) (int32_t) random_u32() * 0x1p-31f;
    }
    if (id) {
        for (int i = 0; i < s.n; ++i) {
            const int first = (int) (random_u32() % (uint32_t) s.experts);
            for (int j = 0; j < s.used; ++j) {
                // few experts get most of the columns, as the tiled path wants eight
                idd[i * s.used + j] = (first % 2 + j) % s.experts;
            }
        }
    }
    ggml_backend_graph_compute(backend, graph);

    const struct ggml_type_traits_cpu * traits = ggml_get_type_traits_cpu(type);
    const struct ggml_type_traits_cpu * act    = ggml_get_type_traits_cpu(traits->vec_dot_type);
    const size_t                        row    = ggml_row_size(type, s.k);
    char *                              y      = checked(malloc(ggml_row_size(traits->vec_dot_type, s.k)));

    int           different = 0;
    double        error     = 0.0;
    double        size      = 0.0;
    const int64_t columns   = ggml_nrows(x);
    for (int64_t c = 0; c < columns; ++c) {
        act->from_float(xd + c * s.k, y, s.k);
        const int64_t matrix = id ? idd[c] : c / s.n * s.batch_w / s.batch_x;
        for (int r = 0; r < s.m; ++r) {
            float want;
            traits->vec_dot(s.k, &want, 0, wd + (size_t) (matrix * s.m + r) * row, 0, y, 0, 1);
            const float got = ((const float *) out->data)[c * s.m + r];
            different += memcmp(&got, &want, sizeof(got)) != 0;
            error = isfinite(got) ? fmax(error, fabs((double) got - want)) : INFINITY;
            size  = fmax(size, fabs(want));
        }
    }
    const int ok = (different == 0 || !exact) && error <= 2e-5 * size && size > 0;
    printf("%-7s %s k=%d m=%d n=%d batch %d/%d experts %d/%d threads %d: %.1e, %d differ %s\n", ggml_type_name(type),
           id ? "mul_mat_id" : "mul_mat", s.k, s.m, s.n, s.batch_w, s.batch_x, s.used, s.experts, threads, error / size,
           different, ok ? "ok" : "FAILED");
    free(y);
    ggml_backend_buffer_free(buffer);
    ggml_free(ctx);
    ggml_backend_free(backend);
    return ok;
}

int main(void) {
    static const struct shape shapes[] = {
        { 256, 1, 8, 0, 0, 1, 1 },    { 512, 16, 9, 0, 0, 1, 1 },     { 2048, 64, 16, 0, 0, 1, 1 },
        { 768, 33, 17, 0, 0, 1, 1 },  { 1280, 300, 40, 0, 0, 1, 1 },  { 256, 257, 300, 0, 0, 1, 1 },
        { 2816, 40, 11, 0, 0, 1, 1 }, { 512, 48, 20, 0, 0, 1, 3 },    { 512, 20, 33, 0, 0, 2, 4 },
        { 512, 70, 40, 4, 2, 1, 1 },  { 1024, 130, 300, 8, 3, 1, 1 }, { 256, 17, 12, 2, 1, 1, 1 },
        { 512, 5, 1, 0, 0, 1, 1 },    { 512, 64, 3, 4, 2, 1, 1 },
    };
    static const int types[] = { 500, GGML_TYPE_TQ1_0, GGML_TYPE_TQ2_0 };
    ggml_cpu_init();
    exact = getenv("GGML_ITQ3S_DETERMINISTIC") != NULL;

    int failed = 0;
    for (size_t t = 0; t < sizeof(types) / sizeof(types[0]); ++t) {
        for (size_t i = 0; i < sizeof(shapes) / sizeof(shapes[0]); ++i) {
            failed += !run((enum ggml_type) types[t], shapes[i], 1 + (int) (i % 2));
        }
    }
    printf("%d failed\n", failed);
    return failed != 0;
}

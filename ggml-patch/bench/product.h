#pragma once

// Matrix products on the CPU backend as llama.cpp would run them, of matrices of random weights.

#include "ggml-backend.h"
#include "ggml-cpu.h"
#include "ggml.h"

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static void * checked(void * p) {
    if (!p) {
        fprintf(stderr, "error: out of memory\n");
        exit(1);
    }
    return p;
}

static float * gaussian(int64_t n) {
    static uint64_t state = 88172645463325252u;
    float *         x     = checked(malloc((size_t) n * sizeof(*x)));
    for (int64_t i = 0; i < n; ++i) {
        float sum = 0.0f;
        for (int j = 0; j < 4; ++j) {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            sum += (float) (uint32_t) (state >> 32) * 0x1p-32f - 0.5f;
        }
        x[i] = 0.03f * sum;
    }
    return x;
}

// `rows` rows of k weights in the type; a few that are quantized, repeated.
static char * weights(enum ggml_type type, int64_t k, int64_t rows) {
    const int64_t distinct = rows < 8 ? rows : 8;
    const size_t  size     = ggml_row_size(type, k);
    float *       x        = gaussian(distinct * k);
    char *        w        = checked(malloc(size * (size_t) rows));
    float *       imatrix  = checked(malloc((size_t) k * sizeof(*imatrix)));
    for (int64_t i = 0; i < k; ++i) {
        imatrix[i] = 1.0f;
    }
    ggml_quantize_chunk(type, x, w, 0, distinct, k, imatrix);
    for (int64_t i = distinct; i < rows; ++i) {
        memcpy(w + size * (size_t) i, w + size * (size_t) (i % distinct), size);
    }
    free(imatrix);
    free(x);
    return w;
}

struct product {
    ggml_backend_t        backend;
    struct ggml_context * matrix;
    struct ggml_context * rest;
    ggml_backend_buffer_t matrix_buffer;
    ggml_backend_buffer_t rest_buffer;
    struct ggml_cgraph *  graph;
};

// The first of the CPU's extra buffer types that takes the matrix of this product, as llama.cpp's loader picks it, or
// the plain one.
static ggml_backend_buffer_type_t buffer_type_for(struct ggml_tensor * matrix, struct ggml_tensor * product) {
    ggml_backend_reg_t                 reg    = ggml_backend_cpu_reg();
    ggml_backend_dev_t                 device = ggml_backend_reg_dev_get(reg, 0);
    ggml_backend_dev_get_extra_bufts_t get =
        (ggml_backend_dev_get_extra_bufts_t) ggml_backend_reg_get_proc_address(reg, "ggml_backend_dev_get_extra_bufts");
    for (ggml_backend_buffer_type_t * types = get ? get(device) : NULL; types && *types; ++types) {
        matrix->buffer = checked(ggml_backend_buft_alloc_buffer(*types, 0));
        const bool ok  = ggml_backend_dev_supports_op(device, product);
        ggml_backend_buffer_free(matrix->buffer);
        matrix->buffer = NULL;
        if (ok) {
            return *types;
        }
    }
    return ggml_backend_cpu_buffer_type();
}

// Products of `matrices` matrices of k x rows, one after the other, and the same columns.
static struct product new_products(enum ggml_type type, int64_t k, int64_t rows, int64_t columns, int matrices,
                                   int threads) {
    struct product          p;
    const size_t            nodes  = 2 * (size_t) matrices + 8;
    const size_t            memory = nodes * ggml_tensor_overhead() + ggml_graph_overhead_custom(nodes, false);
    struct ggml_init_params params = { .mem_size = memory, .mem_buffer = NULL, .no_alloc = true };

    p.backend = checked(ggml_backend_cpu_init());
    ggml_backend_cpu_set_n_threads(p.backend, threads);
    p.matrix = checked(ggml_init(params));
    p.rest   = checked(ggml_init(params));
    p.graph  = ggml_new_graph_custom(p.rest, nodes, false);

    struct ggml_tensor *  b = ggml_new_tensor_2d(p.rest, GGML_TYPE_F32, k, columns);
    struct ggml_tensor ** a = checked(calloc((size_t) matrices, sizeof(*a)));
    for (int i = 0; i < matrices; ++i) {
        a[i] = ggml_new_tensor_2d(p.matrix, type, k, rows);
        ggml_build_forward_expand(p.graph, ggml_mul_mat(p.rest, a[i], b));
    }
    ggml_backend_buffer_type_t buffer_type = buffer_type_for(a[0], ggml_graph_node(p.graph, 0));

    p.matrix_buffer = checked(ggml_backend_alloc_ctx_tensors_from_buft(p.matrix, buffer_type));
    ggml_backend_buffer_set_usage(p.matrix_buffer, GGML_BACKEND_BUFFER_USAGE_WEIGHTS);
    p.rest_buffer = checked(ggml_backend_alloc_ctx_tensors(p.rest, p.backend));

    char *  w = weights(type, k, rows);
    float * x = gaussian(k * columns);
    for (int i = 0; i < matrices; ++i) {
        ggml_backend_tensor_set(a[i], w, 0, ggml_nbytes(a[i]));
    }
    ggml_backend_tensor_set(b, x, 0, ggml_nbytes(b));
    free(w);
    free(x);
    free(a);
    return p;
}

static struct product new_product(enum ggml_type type, int64_t k, int64_t rows, int64_t columns, int threads) {
    return new_products(type, k, rows, columns, 1, threads);
}

static void run_product(const struct product * p) {
    ggml_backend_graph_compute(p->backend, p->graph);
}

static inline void free_product(struct product * p) {
    ggml_backend_buffer_free(p->matrix_buffer);
    ggml_backend_buffer_free(p->rest_buffer);
    ggml_free(p->matrix);
    ggml_free(p->rest);
    ggml_backend_free(p->backend);
}

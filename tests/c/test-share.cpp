// itq-share.h: whatever the graph, activations that are said to lie in the buffer are those of the product.
//
// Graphs are made at random, with operations in place, views and memory that the allocator uses again, and run on the
// CPU backend, one node at a time. The buffer is a copy of the activations of the product that claimed it.

#include "itq-share.h"

#include "ggml-alloc.h"
#include "ggml-backend.h"
#include "ggml-cpu.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <random>
#include <vector>

static const int       width   = 256;
static const ggml_type types[] = { GGML_TYPE_F32, GGML_TYPE_TQ1_0, GGML_TYPE_TQ2_0 };

static bool ours(const ggml_type type) {
    return type == GGML_TYPE_TQ1_0 || type == GGML_TYPE_TQ2_0;
}

// One matrix a type, which all products with the type have.
struct matrices {
    ggml_context *        context;
    ggml_backend_buffer_t buffer;
    ggml_tensor *         of_type[GGML_TYPE_COUNT] = {};

    matrices(ggml_backend_t backend, std::mt19937 & random) {
        context = ggml_init({ ggml_tensor_overhead() * GGML_TYPE_COUNT, nullptr, true });
        for (const ggml_type type : types) {
            of_type[type] = ggml_new_tensor_2d(context, type, width, width);
        }
        buffer = ggml_backend_alloc_ctx_tensors(context, backend);
        std::normal_distribution<float> normal;
        std::vector<float>              values(width * width);
        for (const ggml_type type : types) {
            std::generate(values.begin(), values.end(), [&] { return normal(random); });
            std::vector<uint8_t> bytes(ggml_nbytes(of_type[type]));
            ggml_quantize_chunk(type, values.data(), bytes.data(), 0, width, width, nullptr);
            ggml_backend_tensor_set(of_type[type], bytes.data(), 0, bytes.size());
        }
    }

    ~matrices() {
        ggml_backend_buffer_free(buffer);
        ggml_free(context);
    }
};

struct graph_under_test {
    const matrices &           weights;
    ggml_context *             context;
    ggml_cgraph *              graph;
    std::vector<ggml_tensor *> inputs;

    explicit graph_under_test(const matrices & weights) : weights(weights) {
        context = ggml_init({ ggml_tensor_overhead() * 512 + ggml_graph_overhead(), nullptr, true });
        graph   = ggml_new_graph(context);
    }

    ~graph_under_test() { ggml_free(context); }

    ggml_tensor * input(const int columns) {
        inputs.push_back(ggml_new_tensor_2d(context, GGML_TYPE_F32, width, columns));
        ggml_set_input(inputs.back());
        return inputs.back();
    }

    // With a norm, so that values stay numbers.
    ggml_tensor * product(const ggml_type type, ggml_tensor * x) {
        return ggml_rms_norm(context, ggml_mul_mat(context, weights.of_type[type], x), 1e-5f);
    }

    void add(ggml_tensor * result) { ggml_build_forward_expand(graph, result); }
};

struct counts {
    int products  = 0;  // with a type of ours
    int quantized = 0;
    int wrong     = 0;  // of those that were not quantized: those with other activations in the buffer than their own
};

static counts run(graph_under_test & g, ggml_backend_t backend, std::mt19937 & random) {
    ggml_gallocr_t allocator = ggml_gallocr_new(ggml_backend_get_default_buffer_type(backend));
    if (!ggml_gallocr_alloc_graph(allocator, g.graph)) {
        fprintf(stderr, "no memory for the graph\n");
        exit(2);
    }
    std::normal_distribution<float> normal;
    for (ggml_tensor * x : g.inputs) {
        if (!x->buffer) {
            continue;  // not in the graph
        }
        std::vector<float> values(ggml_nelements(x));
        std::generate(values.begin(), values.end(), [&] { return normal(random); });
        ggml_backend_tensor_set(x, values.data(), 0, ggml_nbytes(x));
    }

    counts            n;
    itq_share         share(g.graph, ours, ggml_nbytes);
    std::vector<char> buffer(share.size());
    for (int i = 0; i < ggml_graph_n_nodes(g.graph); ++i) {
        ggml_tensor * node = ggml_graph_node(g.graph, i);
        if (node->op == GGML_OP_MUL_MAT && ours(node->src[0]->type)) {
            const ggml_tensor * x      = node->src[1];
            const size_t        nbytes = ggml_nbytes(x);
            n.products++;
            if (!share.is_shared(x, nbytes)) {
                n.quantized++;
            } else if (share.claim(x, { node->src[0]->type, false })) {
                n.wrong += memcmp(buffer.data(), x->data, nbytes) != 0;
            } else {
                n.quantized++;
                memcpy(buffer.data(), x->data, nbytes);
            }
        }
        ggml_cgraph one = ggml_graph_view(g.graph, i, i + 1);
        if (ggml_backend_graph_compute(backend, &one) != GGML_STATUS_SUCCESS) {
            fprintf(stderr, "node %d was not computed\n", i);
            exit(2);
        }
    }
    ggml_gallocr_free(allocator);
    return n;
}

static void random_graph(graph_under_test & g, std::mt19937 & random) {
    const auto                 below   = [&](const size_t n) { return random() % n; };
    const int                  columns = 1 + below(3);
    std::vector<ggml_tensor *> live    = { g.input(columns), g.product(GGML_TYPE_F32, g.input(columns)) };
    for (int i = 0; i < 40; ++i) {
        // What was made lately, so that memory is soon used again.
        const auto    any  = [&] { return live[live.size() - 1 - below(std::min<size_t>(live.size(), 3))]; };
        ggml_tensor * x    = any();
        ggml_tensor * half = nullptr;
        switch (below(12)) {
            case 0:
                live.push_back(ggml_scale_inplace(g.context, x, 0.75f));
                break;
            case 1:
                half = ggml_view_1d(g.context, x, width / 2, 0);
                g.add(ggml_scale_inplace(g.context, half, 1.25f));
                continue;
            case 2:
                live.push_back(ggml_cpy(g.context, any(), x));
                break;
            case 3:
            case 4:
                live.push_back(ggml_add(g.context, x, any()));
                break;
            default:
                // Several products of the same activations, other operations perhaps between.
                g.add(g.product(types[below(3)], x));
                if (below(2)) {
                    live.push_back(g.product(types[below(3)], x));
                    break;
                }
                continue;
        }
        g.add(live.back());
    }
}

int main() {
    const ggml_type f32 = GGML_TYPE_F32;
    const ggml_type tq1 = GGML_TYPE_TQ1_0;
    const ggml_type tq2 = GGML_TYPE_TQ2_0;

    std::mt19937   random(20);
    ggml_backend_t backend = ggml_backend_cpu_init();
    ggml_backend_cpu_set_n_threads(backend, 1);
    const matrices weights(backend, random);

    int        failures = 0;
    const auto expect   = [&](const char * what, const int products, const int quantized,
                              const std::function<void(graph_under_test &)> & build) {
        graph_under_test g(weights);
        build(g);
        const counts n = run(g, backend, random);
        if (n.products != products || n.quantized != quantized || n.wrong != 0) {
            fprintf(stderr, "%s: %d products, %d times quantized, %d wrong; expected %d, %d, 0\n", what, n.products,
                    n.quantized, n.wrong, products, quantized);
            failures++;
        }
    };
    const auto activations = [](graph_under_test & g) { return g.product(GGML_TYPE_F32, g.input(2)); };
    const auto products    = [](graph_under_test & g, const std::vector<ggml_type> & with, ggml_tensor * x) {
        for (const ggml_type type : with) {
            g.add(g.product(type, x));
        }
    };

    expect("q, k, v", 3, 1, [&](auto & g) { products(g, { tq2, tq2, tq2 }, activations(g)); });
    expect("one product", 1, 1, [&](auto & g) { products(g, { tq2 }, activations(g)); });
    expect("another type", 3, 3, [&](auto & g) { products(g, { tq2, tq1, tq2 }, activations(g)); });
    expect("a type of llama.cpp's", 2, 1, [&](auto & g) { products(g, { tq2, f32, tq2 }, activations(g)); });
    expect("two layers", 4, 2, [&](auto & g) {
        ggml_tensor * x = activations(g);
        for (int i = 0; i < 2; ++i) {
            ggml_tensor * gate = g.product(tq2, x);
            x                  = ggml_mul(g.context, gate, g.product(tq2, x));
        }
        g.add(x);
    });
    expect("written in place between", 2, 2, [&](auto & g) {
        ggml_tensor * x = activations(g);
        products(g, { tq2 }, x);
        g.add(ggml_scale_inplace(g.context, x, 3.0f));
        products(g, { tq2 }, x);
    });
    expect("a view written between", 2, 2, [&](auto & g) {
        ggml_tensor * x = activations(g);
        products(g, { tq2 }, x);
        g.add(ggml_scale_inplace(g.context, ggml_view_1d(g.context, x, 8, 16), 3.0f));
        products(g, { tq2 }, x);
    });

    counts all;
    for (int i = 0; i < 2000; ++i) {
        graph_under_test g(weights);
        random_graph(g, random);
        const counts n = run(g, backend, random);
        all.products += n.products;
        all.quantized += n.quantized;
        all.wrong += n.wrong;
    }
    printf("%d products, %d times quantized, %d wrong\n", all.products, all.quantized, all.wrong);
    if (all.wrong > 0 || all.quantized > all.products * 9 / 10) {
        fprintf(stderr, "wrong activations, or hardly any were shared\n");
        failures++;
    }
    ggml_backend_free(backend);
    return failures > 0;
}

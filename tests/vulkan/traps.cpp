// What a backend with rotated activations can get wrong, on the first Vulkan device: scripts/check/vulkan/check.py builds
// and runs this. Results are compared with products in double precision of the weights as ggml decodes them.
//
//   traps [--all | --large]
//
// Ends with the number of products that were compared. --all: more numbers of columns. --large: matrices that no storage
// buffer of the device holds.

#include "ggml-alloc.h"
#include "ggml-backend.h"
#include "ggml-cpu.h"
#include "ggml-itq-types.h"
#include "ggml.h"

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <vector>

static std::mt19937 engine(1);
static int          compared = 0;
static int          failed   = 0;

static std::vector<float> normal(int64_t n) {
    std::normal_distribution<float> distribution;
    std::vector<float>              x(n);
    for (float & v : x) {
        v = distribution(engine);
    }
    return x;
}

// A matrix, or several: its blocks and what they decode to.
struct weights {
    ggml_type            type;
    int64_t              k, rows, count;
    std::vector<uint8_t> blocks;
    std::vector<float>   values;

    void decode() {
        values.resize(k * rows * count);
        ggml_get_type_traits(type)->to_float(blocks.data(), values.data(), (int64_t) values.size());
    }
};

static weights make_weights(ggml_type type, int64_t k, int64_t rows, int64_t count = 1, float size = 1.0f) {
    weights            w{ type, k, rows, count, {}, {} };
    std::vector<float> x = normal(k * rows * count);
    for (float & v : x) {
        v *= size;
    }
    w.blocks.resize(ggml_row_size(type, k) * rows * count);
    ggml_quantize_chunk(type, x.data(), w.blocks.data(), 0, rows * count, k, nullptr);
    w.decode();
    return w;
}

// Columns of activations as a graph sees them: values in the order of ne[0], ne[1], ne[2].
struct product {
    std::string          name;
    const weights *      w;
    std::vector<float>   x;
    int64_t              columns;
    std::vector<int32_t> experts;  // of every column, empty without
    std::vector<float>   bias;
    ggml_tensor *        result;
};

static void compare(const product & p, double most = 5e-4) {
    std::vector<float> found(ggml_nelements(p.result));
    ggml_backend_tensor_get(p.result, found.data(), 0, ggml_nbytes(p.result));
    double error = 0;
    double norm  = 0;
    for (int64_t c = 0; c < p.columns; ++c) {
        const int64_t first = p.experts.empty() ? 0 : p.experts[c];
        for (int64_t r = 0; r < p.w->rows; ++r) {
            const float * row = p.w->values.data() + (first * p.w->rows + r) * p.w->k;
            double        sum = p.bias.empty() ? 0.0 : p.bias[r];
            for (int64_t i = 0; i < p.w->k; ++i) {
                sum += (double) row[i] * p.x[c * p.w->k + i];
            }
            const double difference = found[c * p.w->rows + r] - sum;
            error += difference * difference;
            norm += sum * sum;
        }
    }
    ++compared;
    if (!(error <= most * norm)) {
        ++failed;
        printf("FAILED %s, %s, %lld columns: %g\n", p.name.c_str(), ggml_type_name(p.w->type), (long long) p.columns,
               error / norm);
    }
}

// A graph on the device: tensors are made, then filled, then computed.
struct graph {
    ggml_backend_t        backend;
    ggml_context *        ctx;
    ggml_backend_buffer_t buffer = nullptr;
    ggml_cgraph *         nodes;

    explicit graph(ggml_backend_t b) : backend(b) {
        ctx   = ggml_init({ 256 * ggml_tensor_overhead() + ggml_graph_overhead(), nullptr, true });
        nodes = ggml_new_graph(ctx);
    }

    graph(const graph &)             = delete;
    graph & operator=(const graph &) = delete;

    ~graph() {
        ggml_backend_buffer_free(buffer);
        ggml_free(ctx);
    }

    ggml_tensor * matrix(const weights & w) {
        return w.count == 1 ? ggml_new_tensor_2d(ctx, w.type, w.k, w.rows)
                            : ggml_new_tensor_3d(ctx, w.type, w.k, w.rows, w.count);
    }

    void allocate() {
        buffer = ggml_backend_alloc_ctx_tensors(ctx, backend);
        if (buffer == nullptr) {
            fprintf(stderr, "error: no memory on the device\n");
            exit(1);
        }
    }

    void compute(bool ask = true) {
        for (int i = 0; ask && i < ggml_graph_n_nodes(nodes); ++i) {
            if (!ggml_backend_supports_op(backend, ggml_graph_node(nodes, i))) {
                fprintf(stderr, "error: the device does not support %s of %s\n",
                        ggml_op_desc(ggml_graph_node(nodes, i)),
                        ggml_type_name(ggml_graph_node(nodes, i)->src[0]->type));
                exit(1);
            }
        }
        if (ggml_backend_graph_compute(backend, nodes) != GGML_STATUS_SUCCESS) {
            fprintf(stderr, "error: the graph was not computed\n");
            exit(1);
        }
    }

    ggml_tensor * result(ggml_tensor * t) {
        ggml_build_forward_expand(nodes, t);
        return t;
    }
};

static void set(ggml_tensor * t, const std::vector<float> & x) {
    if (t->type == GGML_TYPE_F16) {
        std::vector<ggml_fp16_t> half(x.size());
        ggml_fp32_to_fp16_row(x.data(), half.data(), (int64_t) x.size());
        ggml_backend_tensor_set(t, half.data(), 0, ggml_nbytes(t));
    } else {
        ggml_backend_tensor_set(t, x.data(), 0, ggml_nbytes(t));
    }
}

static void set(ggml_tensor * t, const weights & w) {
    ggml_backend_tensor_set(t, w.blocks.data(), 0, ggml_nbytes(t));
}

// Columns of the matrices: of types in blocks of 64 no multiple of 256.
static int64_t columns_of(ggml_type type) {
    return ggml_blck_size(type) == 64 ? 576 : 512;
}

// Two activations in turn, then new values in both: what is rotated belongs to one of them, in one graph.
static void in_turn(ggml_backend_t backend, ggml_type type, int64_t n) {
    const int64_t k = columns_of(type);
    const weights a = make_weights(type, k, 67);
    const weights b = make_weights(type, k, 40);
    graph         g(backend);
    ggml_tensor * ta     = g.matrix(a);
    ggml_tensor * tb     = g.matrix(b);
    ggml_tensor * x      = ggml_new_tensor_2d(g.ctx, GGML_TYPE_F32, k, n);
    ggml_tensor * y      = ggml_new_tensor_2d(g.ctx, GGML_TYPE_F32, k, n);
    ggml_tensor * ends[] = { g.result(ggml_mul_mat(g.ctx, ta, x)), g.result(ggml_mul_mat(g.ctx, tb, y)),
                             g.result(ggml_mul_mat(g.ctx, tb, x)), g.result(ggml_mul_mat(g.ctx, ta, y)) };
    g.allocate();
    set(ta, a);
    set(tb, b);
    for (int round = 0; round < 2; ++round) {
        const std::vector<float> vx = normal(k * n);
        const std::vector<float> vy = normal(k * n);
        set(x, vx);
        set(y, vy);
        g.compute();
        compare({ "in turn", &a, vx, n, {}, {}, ends[0] });
        compare({ "in turn", &b, vy, n, {}, {}, ends[1] });
        compare({ "in turn", &b, vx, n, {}, {}, ends[2] });
        compare({ "in turn", &a, vy, n, {}, {}, ends[3] });
    }
}

// One activation for two types: `other` wants it as it is, or rotated otherwise.
static void shared(ggml_backend_t backend, ggml_type type, ggml_type other, int64_t n) {
    const weights a = make_weights(type, 768, 33);
    const weights b = make_weights(other, 768, 33);
    graph         g(backend);
    ggml_tensor * ta     = g.matrix(a);
    ggml_tensor * tb     = g.matrix(b);
    ggml_tensor * x      = ggml_new_tensor_2d(g.ctx, GGML_TYPE_F32, 768, n);
    ggml_tensor * ends[] = { g.result(ggml_mul_mat(g.ctx, ta, x)), g.result(ggml_mul_mat(g.ctx, tb, x)),
                             g.result(ggml_mul_mat(g.ctx, ta, x)) };
    g.allocate();
    set(ta, a);
    set(tb, b);
    const std::vector<float> v = normal(768 * n);
    set(x, v);
    g.compute();
    compare({ "shared", &a, v, n, {}, {}, ends[0] });
    compare({ "shared, the other type", &b, v, n, {}, {}, ends[1] });
    compare({ "shared", &a, v, n, {}, {}, ends[2] });
}

// Rows that end within the 128 weights that products of integers take at once, or within the first, behind a product whose
// scales are no numbers: what that leaves in shared memory does not reach them.
static void short_rows(ggml_backend_t backend, ggml_type type, int64_t n) {
    weights none = make_weights(type, 512, 70);
    memset(none.blocks.data(), 0xFF, none.blocks.size());
    for (const int64_t k : { 64, 192 }) {
        const weights a = make_weights(type, k, 70);
        graph         g(backend);
        ggml_tensor * tn = g.matrix(none);
        ggml_tensor * ta = g.matrix(a);
        ggml_tensor * y  = ggml_new_tensor_2d(g.ctx, GGML_TYPE_F32, 512, n);
        ggml_tensor * x  = ggml_new_tensor_2d(g.ctx, GGML_TYPE_F32, k, n);
        g.result(ggml_mul_mat(g.ctx, tn, y));
        ggml_tensor * end = g.result(ggml_mul_mat(g.ctx, ta, x));
        g.allocate();
        set(tn, none);
        set(ta, a);
        set(y, normal(512 * n));
        const std::vector<float> v = normal(k * n);
        set(x, v);
        g.compute();
        compare({ "rows of " + std::to_string(k), &a, v, n, {}, {}, end });
    }
}

// An activation in F16, and a large constant one, whose rotation F16 does not hold. Weights are small then: sums are in F16
// too where the backend thinks that is enough.
static void half(ggml_backend_t backend, ggml_type type, int64_t n, ggml_type activation, bool large) {
    const int64_t k = columns_of(type);
    const weights a = make_weights(type, k, 40, 1, large ? 1.0f / 64 : 1.0f);
    graph         g(backend);
    ggml_tensor * ta  = g.matrix(a);
    ggml_tensor * x   = ggml_new_tensor_2d(g.ctx, activation, k, n);
    ggml_tensor * end = g.result(ggml_mul_mat(g.ctx, ta, x));
    g.allocate();
    set(ta, a);
    std::vector<float> v = normal(k * n);
    for (float & f : v) {
        f = ggml_fp16_to_fp32(ggml_fp32_to_fp16(large ? 30000.0f + 100.0f * f : f));
    }
    set(x, v);
    g.compute();
    compare({ large ? "large" : "half", &a, v, n, {}, {}, end });
}

// Views: rows further apart than they are long, and permuted dimensions.
static void strided(ggml_backend_t backend, ggml_type type, int64_t n) {
    const int64_t k = columns_of(type);
    const weights a = make_weights(type, k, 35);
    graph         g(backend);
    ggml_tensor * ta     = g.matrix(a);
    ggml_tensor * wide   = ggml_new_tensor_2d(g.ctx, GGML_TYPE_F32, 1280, n);
    ggml_tensor * view   = ggml_view_2d(g.ctx, wide, k, n, wide->nb[1], 256 * sizeof(float));
    ggml_tensor * cube   = ggml_new_tensor_3d(g.ctx, GGML_TYPE_F32, k, 3, n);
    ggml_tensor * moved  = ggml_permute(g.ctx, cube, 0, 2, 1, 3);  // k, n, 3
    ggml_tensor * ends[] = { g.result(ggml_mul_mat(g.ctx, ta, view)), g.result(ggml_mul_mat(g.ctx, ta, moved)) };
    g.allocate();
    set(ta, a);
    const std::vector<float> vw = normal(1280 * n);
    const std::vector<float> vc = normal(k * 3 * n);
    set(wide, vw);
    set(cube, vc);
    g.compute();
    std::vector<float> x(k * n);
    for (int64_t c = 0; c < n; ++c) {
        memcpy(&x[k * c], &vw[1280 * c + 256], k * sizeof(float));
    }
    compare({ "strided", &a, x, n, {}, {}, ends[0] });
    std::vector<float> y(k * 3 * n);
    for (int64_t i = 0; i < 3; ++i) {
        for (int64_t c = 0; c < n; ++c) {
            memcpy(&y[k * (n * i + c)], &vc[k * (3 * c + i)], k * sizeof(float));
        }
    }
    compare({ "permuted", &a, y, 3 * n, {}, {}, ends[1] });
}

// Experts: an activation for each of those in use, or one for all of them.
static void experts(ggml_backend_t backend, ggml_type type, int64_t tokens, bool broadcast) {
    const int64_t k    = columns_of(type);
    const int     used = 3;
    const weights a    = make_weights(type, k, 37, 6);
    graph         g(backend);
    ggml_tensor * ta  = g.matrix(a);
    ggml_tensor * x   = ggml_new_tensor_3d(g.ctx, GGML_TYPE_F32, k, broadcast ? 1 : used, tokens);
    ggml_tensor * ids = ggml_new_tensor_2d(g.ctx, GGML_TYPE_I32, used, tokens);
    ggml_tensor * end = g.result(ggml_mul_mat_id(g.ctx, ta, x, ids));
    g.allocate();
    set(ta, a);
    const std::vector<float> v = normal(ggml_nelements(x));
    std::vector<int32_t>     chosen;
    std::vector<float>       columns;
    for (int64_t t = 0; t < tokens; ++t) {
        const int first = (int) (engine() % 6);
        for (int i = 0; i < used; ++i) {
            chosen.push_back((first + i) % 6);
            const float * from = v.data() + k * (broadcast ? t : used * t + i);
            columns.insert(columns.end(), from, from + k);
        }
    }
    set(x, v);
    ggml_backend_tensor_set(ids, chosen.data(), 0, ggml_nbytes(ids));
    g.compute();
    compare({ broadcast ? "experts, one activation" : "experts", &a, columns, used * tokens, chosen, {}, end });
}

// The sum with a bias that the backend fuses into the product.
static void biased(ggml_backend_t backend, ggml_type type) {
    const int64_t k = columns_of(type);
    const weights a = make_weights(type, k, 41);
    graph         g(backend);
    ggml_tensor * ta   = g.matrix(a);
    ggml_tensor * x    = ggml_new_tensor_2d(g.ctx, GGML_TYPE_F32, k, 1);
    ggml_tensor * bias = ggml_new_tensor_2d(g.ctx, GGML_TYPE_F32, 41, 1);
    ggml_tensor * end  = g.result(ggml_add(g.ctx, ggml_mul_mat(g.ctx, ta, x), bias));
    g.allocate();
    set(ta, a);
    const std::vector<float> v = normal(k);
    const std::vector<float> b = normal(41);
    set(x, v);
    set(bias, b);
    g.compute();
    compare({ "bias", &a, v, 1, {}, b, end });
}

// Rows of a matrix as the device decodes them.
static void compare_rows(const weights & a, const std::vector<int32_t> & which, ggml_tensor * row) {
    std::vector<float> found(a.k * which.size());
    ggml_backend_tensor_get(row, found.data(), 0, ggml_nbytes(row));
    ++compared;
    for (size_t i = 0; i < found.size(); ++i) {
        const float want = a.values[a.k * which[i / a.k] + i % a.k];
        if (!(std::fabs(found[i] - want) <= 1e-5f * (1.0f + std::fabs(want)))) {
            ++failed;
            printf("FAILED rows, %s: %g for %g\n", ggml_type_name(a.type), found[i], want);
            break;
        }
    }
}

static void rows(ggml_backend_t backend, ggml_type type) {
    const weights a = make_weights(type, columns_of(type), 35);
    graph         g(backend);
    ggml_tensor * ta  = g.matrix(a);
    ggml_tensor * ids = ggml_new_tensor_1d(g.ctx, GGML_TYPE_I32, 5);
    ggml_tensor * row = g.result(ggml_get_rows(g.ctx, ta, ids));
    g.allocate();
    set(ta, a);
    const std::vector<int32_t> which = { 3, 34, 0, 8, 8 };
    ggml_backend_tensor_set(ids, which.data(), 0, ggml_nbytes(ids));
    g.compute();
    compare_rows(a, which, row);
}

// The last number of a block, whose start state stays.
static void set_number(uint8_t * last, ggml_fp16_t number) {
    ggml_fp16_t before;
    memcpy(&before, last, sizeof(before));
    number |= before & 0x3f;
    memcpy(last, &number, sizeof(number));
}

// Blocks with a zero-point, as the literal ternary code has them, beside blocks without, and blocks of zeros.
static void zero_points(ggml_backend_t backend, int64_t n) {
    weights           a    = make_weights(GGML_TYPE_ITQ3_S, 768, 35);
    const size_t      size = ggml_type_size(GGML_TYPE_ITQ3_S);
    const ggml_fp16_t two  = ggml_fp32_to_fp16(2.0f);
    for (size_t i = 0; i < a.blocks.size() / size; ++i) {
        if (i % 3 == 1) {
            set_number(&a.blocks[i * size + size - sizeof(two)], two);
        } else if (i % 7 == 2) {
            memset(&a.blocks[i * size], 0, size);
        }
    }
    a.decode();
    graph         g(backend);
    ggml_tensor * ta  = g.matrix(a);
    ggml_tensor * x   = ggml_new_tensor_2d(g.ctx, GGML_TYPE_F32, 768, n);
    ggml_tensor * ids = ggml_new_tensor_1d(g.ctx, GGML_TYPE_I32, 5);
    ggml_tensor * end = g.result(ggml_mul_mat(g.ctx, ta, x));
    ggml_tensor * row = g.result(ggml_get_rows(g.ctx, ta, ids));
    g.allocate();
    set(ta, a);
    const std::vector<float> v = normal(768 * n);
    set(x, v);
    const std::vector<int32_t> which = { 3, 34, 0, 8, 8 };
    ggml_backend_tensor_set(ids, which.data(), 0, ggml_nbytes(ids));
    g.compute();
    compare({ "zero-points", &a, v, n, {}, {}, end });

    compare_rows(a, which, row);
}

// A matrix of random blocks that is larger than a storage buffer of the device may be: upstream cuts it, though the device
// says that it does not support it unless it has indices of 64 bits.
static void large(ggml_backend_t backend, ggml_type type, int64_t n) {
    const int64_t     k     = 4096;
    const size_t      size  = ggml_type_size(type);
    const int64_t     rows  = (160 << 20) / (int64_t) ggml_row_size(type, k);
    const ggml_fp16_t scale = ggml_fp32_to_fp16(0.5f);
    weights           a{ type, k, rows, 1, {}, {} };
    a.blocks.resize(ggml_row_size(type, k) * rows);
    for (size_t i = 0; i + 4 <= a.blocks.size(); i += 4) {
        const uint32_t word = (uint32_t) engine();
        memcpy(&a.blocks[i], &word, 4);
    }
    for (size_t i = 0; i < a.blocks.size() / size; ++i) {
        if (type == GGML_TYPE_ITQ3_S) {
            memcpy(&a.blocks[i * size + 96], &scale, 2);
            set_number(&a.blocks[i * size + 98], 0);
        } else {
            set_number(&a.blocks[i * size + size - 2], scale);
        }
    }
    graph         g(backend);
    ggml_tensor * ta  = g.matrix(a);
    ggml_tensor * x   = ggml_new_tensor_2d(g.ctx, GGML_TYPE_F32, k, n);
    ggml_tensor * end = g.result(ggml_mul_mat(g.ctx, ta, x));
    g.allocate();
    set(ta, a);
    const std::vector<float> v = normal(k * n);
    set(x, v);
    g.compute(false);
    std::vector<float> found(ggml_nelements(end));
    ggml_backend_tensor_get(end, found.data(), 0, ggml_nbytes(end));
    std::vector<float> row(k);
    double             error = 0;
    double             norm  = 0;
    for (int64_t r = 0; r < rows; r += r < rows - 2000 ? 997 : 1) {
        ggml_get_type_traits(type)->to_float(a.blocks.data() + ggml_row_size(type, k) * r, row.data(), k);
        for (int64_t c = 0; c < n; ++c) {
            double sum = 0;
            for (int64_t i = 0; i < k; ++i) {
                sum += (double) row[i] * v[k * c + i];
            }
            error += (found[rows * c + r] - sum) * (found[rows * c + r] - sum);
            norm += sum * sum;
        }
    }
    ++compared;
    if (!(error <= 5e-4 * norm)) {
        ++failed;
        printf("FAILED large, %s, %lld columns: %g\n", ggml_type_name(type), (long long) n, error / norm);
    }
}

int main(int argc, char ** argv) {
    ggml_backend_load_all();
    ggml_backend_dev_t device = nullptr;
    for (size_t i = 0; i < ggml_backend_dev_count() && device == nullptr; ++i) {
        ggml_backend_dev_t found = ggml_backend_dev_get(i);
        device                   = strncmp(ggml_backend_dev_name(found), "Vulkan", 6) == 0 ? found : nullptr;
    }
    if (device == nullptr) {
        fprintf(stderr, "error: there is no Vulkan device\n");
        return 1;
    }
    const std::string          option = argc > 1 ? argv[1] : "";
    const std::vector<int64_t> columns =
        option == "--all" ? std::vector<int64_t>{ 1, 3, 8, 9, 40 } : std::vector<int64_t>{ 1, 3, 9 };
    ggml_backend_t backend = ggml_backend_dev_init(device, nullptr);
    if (option == "--large") {
        large(backend, GGML_TYPE_ITQ3_S, 1);
        large(backend, GGML_TYPE_ITQ3_S, 9);
        large(backend, GGML_TYPE_ITQ2_S, 1);
    } else {
#define OWN_TYPE(NAME, ...) GGML_TYPE_##NAME,
        for (const ggml_type type : { ITQ_TYPES(OWN_TYPE) GGML_TYPE_TQ1_0, GGML_TYPE_TQ2_0 }) {
            const bool rotated = type != GGML_TYPE_TQ1_0 && type != GGML_TYPE_TQ2_0;
            for (const int64_t n : columns) {
                in_turn(backend, type, n);
                shared(backend, type, GGML_TYPE_Q4_K, n);
                // upstream's products of many F16 columns with TQ2_0 and Q2_K are off by 3% on Mesa's software device
                if (rotated || n < 9) {
                    half(backend, type, n, GGML_TYPE_F16, false);
                }
                if (rotated) {
                    half(backend, type, n, GGML_TYPE_F16, true);
                    half(backend, type, n, GGML_TYPE_F32, true);
                }
                strided(backend, type, n);
                experts(backend, type, n, false);
                experts(backend, type, n, true);
                if (ggml_blck_size(type) == 64) {
                    short_rows(backend, type, n);
                }
                if (type == GGML_TYPE_ITQ3_S) {
                    zero_points(backend, n);
                    shared(backend, type, GGML_TYPE_ITQ3_N, n);  // blocks of 256 and of 64
                }
            }
            biased(backend, type);
            rows(backend, type);
        }
    }
    ggml_backend_free(backend);
    printf("%d products compared, %d failed\n", compared, failed);
    return failed > 0;
}

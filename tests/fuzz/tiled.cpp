// The product of many columns (mul_mat, mul_mat_id) for ITQ3_S, TQ1_0 and TQ2_0, any numbers of rows and columns, one
// and two threads, against vec_dot.
//
// A case is one element of a product: a row times a column.

#include "cases.h"
#include "ggml-backend.h"
#include "ggml-cpu.h"
#include "ggml.h"

#include <algorithm>
#include <cmath>
#include <vector>

static uint64_t & cases = (Counts<1>::all[0].name = "elements", Counts<1>::all[0].n);

static ggml_backend_t backend;

extern "C" int LLVMFuzzerInitialize(int *, char ***) {
    ggml_cpu_init();
    backend = ggml_backend_cpu_init();
    return atexit(report_counts<1>);
}

// Random bytes are blocks of every type but for their scales. Returns whether the scales are ordinary ones.
static bool blocks(Input & in, ggml_type type, uint8_t * data, size_t size) {
    const bool   any_scale = in.below(8) == 0;
    const size_t block     = ggml_type_size(type);
    in.fill(data, size);
    for (size_t at = block; at <= size && !any_scale; at += block) {
        ggml_fp16_t d = ggml_fp32_to_fp16(0.01f + 0.01f * in.uniform());
        if (type == GGML_TYPE_ITQ3_S) {
            memcpy(data + at - 4, &d, 2);
            d = ggml_fp32_to_fp16(in.random() % 4 ? 0.0f : 2.0f);
        }
        memcpy(data + at - 2, &d, 2);
    }
    return !any_scale;
}

extern "C" int LLVMFuzzerTestOneInput(const uint8_t * data, size_t size) {
    static const ggml_type types[] = { GGML_TYPE_ITQ3_S, GGML_TYPE_TQ1_0, GGML_TYPE_TQ2_0 };
    Input                  in(data, size);
    const ggml_type        type    = types[in.below(3)];
    const int              experts = in.below(4) ? 0 : 1 + (int) in.below(4);
    const int              used    = experts ? 1 + (int) in.below((uint32_t) experts) : 1;
    const int              k       = 256 * (1 + (int) in.below(12));
    int                    columns = 1 + (int) in.below(in.below(8) ? 40 : 300);
    int                    rows    = 1 + (int) in.below(in.below(8) ? 70 : 600);
    const int              batch_w = experts ? 1 : 1 + (int) in.below(2);
    const int              batch_x = batch_w * (experts ? 1 : 1 + (int) in.below(2));
    // a case takes milliseconds
    while ((int64_t) rows * columns * batch_x * used * (k / 256) > 30000) {
        (rows > columns ? rows : columns) = (std::max(rows, columns) + 1) / 2;
    }
    ggml_backend_cpu_set_n_threads(backend, in.below(16) ? 1 : 2);

    ggml_init_params params = { 1 << 18, nullptr, true };
    ggml_context *   ctx    = ggml_init(params);
    ggml_tensor *    w      = ggml_new_tensor_3d(ctx, type, k, rows, experts ? experts : batch_w);
    ggml_tensor *    x      = experts ? ggml_new_tensor_3d(ctx, GGML_TYPE_F32, k, used, columns)
                                      : ggml_new_tensor_3d(ctx, GGML_TYPE_F32, k, columns, batch_x);
    ggml_tensor *    ids    = ggml_new_tensor_2d(ctx, GGML_TYPE_I32, used, columns);
    ggml_tensor *    out    = experts ? ggml_mul_mat_id(ctx, w, x, ids) : ggml_mul_mat(ctx, w, x);
    ggml_cgraph *    graph  = ggml_new_graph_custom(ctx, 8, false);
    ggml_build_forward_expand(graph, out);

    // each in memory of its own, which ends where it ends
    std::vector<std::unique_ptr<uint8_t[]>> memory;
    for (ggml_tensor * tensor : { w, x, ids, out }) {
        memory.push_back(exactly<uint8_t>(ggml_nbytes(tensor)));
        tensor->data = memory.back().get();
    }
    const bool ordinary = blocks(in, type, static_cast<uint8_t *>(w->data), ggml_nbytes(w));
    float *    xd       = static_cast<float *>(x->data);
    int32_t *  chose    = static_cast<int32_t *>(ids->data);
    const bool odd      = type == GGML_TYPE_ITQ3_S && in.below(8) == 0;  // upstream's 8-bit code asserts what it takes
    for (int64_t i = 0; i < ggml_nelements(x); ++i) {
        xd[i] = odd && in.random() % 64 == 0 ? special(in) : in.uniform();
    }
    for (int i = 0; i < columns && experts; ++i) {
        // few experts get most of the columns: eight take the tiled path
        const uint32_t first = in.random() % 8 ? 0 : in.random() % (uint32_t) experts;
        for (int j = 0; j < used; ++j) {
            chose[i * used + j] = (int32_t) (first + (uint32_t) j) % experts;
        }
    }
    if (ggml_backend_graph_compute(backend, graph) != GGML_STATUS_SUCCESS) {
        wrong("the status", ggml_type_name(type), 0, 1, 0);
    }

    const auto *  traits = ggml_get_type_traits_cpu(type);
    const auto *  act    = ggml_get_type_traits_cpu(traits->vec_dot_type);
    const size_t  stride = ggml_row_size(type, k);
    const auto    y      = exactly<uint8_t>(ggml_row_size(traits->vec_dot_type, k));
    const float * outs   = static_cast<const float *>(out->data);
    for (int64_t c = 0; c < ggml_nrows(x); ++c) {
        act->from_float(xd + c * k, y.get(), k);
        const int64_t matrix = experts ? chose[c] : c / columns * batch_w / batch_x;
        double        most   = 0.0;
        double        error  = 0.0;
        bool          finite = ordinary;
        for (int r = 0; r < rows; ++r) {
            float want;
            traits->vec_dot(k, &want, 0, static_cast<uint8_t *>(w->data) + (size_t) (matrix * rows + r) * stride, 0,
                            y.get(), 0, 1);
            const float got = outs[c * rows + r];
            // another order of additions may reach what is not finite before it is taken back
            finite          = finite && std::isfinite(want) && std::fabs(want) < 0x1p100f;
            most            = std::fmax(most, std::fabs(want));
            error           = std::isfinite(got) ? std::fmax(error, std::fabs((double) got - want)) : INFINITY;
        }
        // by the size of the column's weights and activations: a row may cancel out
        double norm = 0.0;
        for (int i = 0; i < k; ++i) {
            norm += (double) xd[c * k + i] * xd[c * k + i];
        }
        const double weight = type == GGML_TYPE_ITQ3_S ? 0.02 / 32 * 65 : 0.02 * 2;
        if (finite && std::isfinite(norm) && norm < 0x1p200 &&
            error > 1e-6 * std::fmax(most, weight * std::sqrt(norm * k))) {
            wrong("the tiled product", ggml_type_name(type), (int) c, error, most);
        }
    }
    cases += (uint64_t) ggml_nelements(out);
    ggml_free(ctx);
    return 0;
}

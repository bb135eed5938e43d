// Matrix products (mul_mat, mul_mat_id) of the trellis types, TQ1_0 and TQ2_0, any numbers of rows and columns, one and
// two threads, in the layout of the file and in panels, against vec_dot. Before that, what they are made of: this processor's kernels
// on a panel of any bytes against the portable C.
//
// A case is one element of a product: a row times a column.

#include "cases.h"
#include "ggml-backend.h"
#include "ggml-cpu.h"
#include "ggml.h"
#include "itq3s/itq-gemm.h"
#include "itq3s/itq-mul-mat.h"

#include <algorithm>
#include <cmath>
#include <iterator>
#include <numeric>
#include <vector>

static uint64_t & cases = (Counts<1>::all[0].name = "elements", Counts<1>::all[0].n);

static ggml_backend_t backend;

extern "C" int LLVMFuzzerInitialize(int *, char ***) {
    ggml_cpu_init();
    backend = ggml_backend_cpu_init();
    return atexit(report_counts<1>);
}

// The kernels are compiled for this processor and this file is not: whether they have products of rows shows when it is
// linked.
#define WEAK_GEMV(name)                                                                                               \
    extern "C" __attribute__((weak)) void itq_gemv_##name(int64_t nb, const void * rows, size_t row_size, int n_rows, \
                                                          const itq_columns * y, float * out);
#define WEAK_GEMV_OF_TYPE(NAME, name, ...) WEAK_GEMV(name)
ITQ_TYPES(WEAK_GEMV_OF_TYPE)
WEAK_GEMV(tq2_0)

struct kernels {
    ggml_type type;
    int       length;   // weights of a block
    bool      rotated;  // a trellis type
    bool      has_z;
    // of a block of a panel: scales of its rows, and zero-points or NULL
    ggml_half * (*scales)(const void *, int64_t);
    ggml_half * (*zero_points)(const void *, int64_t);
    void (*repack)(const void *, size_t, int, int64_t, void *);
    void (*repack_generic)(const void *, size_t, int, int64_t, void *);
    void (*unpack)(const void *, int64_t, void *, size_t);
    void (*gemm)(int64_t, const void *, const itq_columns *, int, float (*)[ITQ_PANEL_ROWS]);
    void (*gemm_generic)(int64_t, const void *, const itq_columns *, int, float (*)[ITQ_PANEL_ROWS]);
    // of rows as a file has them; NULL where there are none
    void (*gemv)(int64_t, const void *, size_t, int, const itq_columns *, float *);
};

#define ZERO_POINTS_1(name) [](const void * panel, int64_t b) { return itq_scales_of_##name(panel, b)->z; }
#define ZERO_POINTS_0(name) nullptr

#define KERNELS(NAME, name, length, rotated, has_z, gemv)                              \
    { GGML_TYPE_##NAME,                                                                \
      length,                                                                          \
      rotated,                                                                         \
      has_z != 0,                                                                      \
      [](const void * panel, int64_t b) { return itq_scales_of_##name(panel, b)->d; }, \
      ZERO_POINTS_##has_z(name),                                                       \
      itq_repack_##name,                                                               \
      itq_repack_##name##_generic,                                                     \
      itq_unpack_##name,                                                               \
      itq_gemm_##name,                                                                 \
      itq_gemm_##name##_generic,                                                       \
      gemv }

static const kernels all_kernels[] = {
#define KERNELS_OF_TYPE(NAME, name, bits, n_levels, length, has_z, number) \
    KERNELS(NAME, name, length, true, has_z, itq_gemv_##name),
    ITQ_TYPES(KERNELS_OF_TYPE) KERNELS(TQ1_0, tq1_0, QK_K, false, 0, nullptr),
    KERNELS(TQ2_0, tq2_0, QK_K, false, 0, itq_gemv_tq2_0),
};

// From the order of Q8_K_H or Q8_N_H to that of the kernels; the portable code says the same.
static void reorder(const kernels & k, const int8_t * codes, int8_t * ordered) {
    int8_t also[QK_K];
    if (k.length == QK_K) {
        itq_reorder_q8_K_h(codes, ordered);
        itq_reorder_q8_K_h_generic(codes, also);
    } else {
        itq_reorder_q8_n_h(codes, ordered);
        itq_reorder_q8_n_h_generic(codes, also);
    }
    if (memcmp(ordered, also, (size_t) k.length) != 0) {
        wrong("the order of the activations", ggml_type_name(k.type), 0, 1, 0);
    }
}

// n bytes on a cache line, which end where they end.
struct aligned {
    size_t    n;
    uint8_t * data;

    explicit aligned(size_t n) : n(n) {
        void * p = nullptr;
        if (posix_memalign(&p, 64, n) != 0) {
            abort();
        }
        data = static_cast<uint8_t *>(p);
    }
    aligned(const aligned &) = delete;
    ~aligned() { free(data); }
};

// The rows of a panel as a file has them, times a column: the bits of the product of the panel.
static void rows_alone(Input & in, const kernels & k, int nb, const uint8_t * packed) {
    const int    rows   = 1 + (int) (in.random() % ITQ_PANEL_ROWS);
    const size_t row    = ggml_row_size(k.type, (int64_t) k.length * nb);
    const size_t stride = row + (in.random() % 4 ? 0 : 2 * (in.random() % 8));
    const auto   x      = exactly<uint8_t>((size_t) (rows - 1) * stride + row);
    const auto   all    = exactly<uint8_t>(ITQ_PANEL_ROWS * row);
    k.unpack(packed, nb, all.get(), row);
    for (int r = 0; r < rows; ++r) {
        memcpy(x.get() + (size_t) r * stride, all.get() + (size_t) r * row, row);
    }

    const size_t n = (size_t) (nb * k.length);
    aligned      plain(n), ordered(n);
    const auto   d    = exactly<float>((size_t) nb);
    const auto   sums = exactly<int32_t>((size_t) nb);
    for (int b = 0; b < nb; ++b) {
        int8_t * codes = reinterpret_cast<int8_t *>(plain.data) + b * k.length;
        int8_t * to    = reinterpret_cast<int8_t *>(ordered.data) + b * k.length;
        for (int i = 0; i < k.length; ++i) {
            codes[i] = (int8_t) ((int) (in.random() % 255) - 127);
        }
        if (k.rotated) {
            reorder(k, codes, to);
        } else {
            memcpy(to, codes, (size_t) k.length);
        }
        d[b]    = in.normal();
        sums[b] = std::accumulate(codes, codes + k.length, 0);
    }
    const itq_columns of_rows  = { reinterpret_cast<int8_t *>(plain.data), d.get(), sums.get() };
    const itq_columns of_panel = { reinterpret_cast<int8_t *>(ordered.data), d.get(), sums.get() };
    alignas(64) float want[1][ITQ_PANEL_ROWS];
    const auto        got = exactly<float>((size_t) rows);
    k.gemm(nb, packed, &of_panel, 1, want);
    k.gemv(nb, x.get(), stride, rows, &of_rows, got.get());
    for (int r = 0; r < rows; ++r) {
        if (!same(got[r], want[0][r])) {
            wrong("the product of a row", ggml_type_name(k.type), r, got[r], want[0][r]);
        }
    }
}

// A panel of 1 to 16 rows, times 1 to 16 columns of any 8-bit activations.
static void panel(Input & in, const kernels & k) {
    const int    rows   = in.below(2) ? ITQ_PANEL_ROWS : 1 + (int) in.below(ITQ_PANEL_ROWS);
    const int    nc     = 1 + (int) in.below(ITQ_GROUP);
    const int    nb     = 1 + (int) in.below(k.length == QK_K ? 9 : 19);
    const int    length = k.length;
    const size_t row    = ggml_row_size(k.type, (int64_t) length * nb);
    const size_t gap    = in.below(4) ? 0 : row;
    const size_t stride = row + gap;
    const auto   x      = exactly<uint8_t>((size_t) rows * stride - gap);
    in.fill(x.get(), (size_t) rows * stride - gap);

    aligned packed(ITQ_PANEL_ROWS * row), portable(ITQ_PANEL_ROWS * row);
    k.repack(x.get(), stride, rows, nb, packed.data);
    k.repack_generic(x.get(), stride, rows, nb, portable.data);
    if (memcmp(packed.data, portable.data, packed.n) != 0) {
        wrong("the panel", ggml_type_name(k.type), rows, nb, 0);
    }
    aligned back(ITQ_PANEL_ROWS * row);
    k.unpack(packed.data, nb, back.data, row);
    for (int r = 0; r < rows; ++r) {
        if (memcmp(back.data + (size_t) r * row, x.get() + (size_t) r * stride, row) != 0) {
            wrong("the unpacked row", ggml_type_name(k.type), r, nb, 0);
        }
    }

    // ordinary scales, but for some of their signs
    for (int b = 0; b < nb; ++b) {
        ggml_half * d = k.scales(packed.data, b);
        ggml_half * z = k.has_z ? k.zero_points(packed.data, b) : nullptr;
        for (int r = 0; r < ITQ_PANEL_ROWS; ++r) {
            d[r] = ggml_fp32_to_fp16(0.02f * in.uniform());
            if (z) {
                z[r] = ggml_fp32_to_fp16(in.random() % 4 ? 0.0f : 2.0f);
            }
        }
    }

    aligned    q((size_t) (nb * nc * length));
    const auto d    = exactly<float>((size_t) (nb * nc));
    const auto sums = exactly<int32_t>((size_t) (nb * nc));
    in.fill(q.data, q.n);
    auto * codes = reinterpret_cast<int8_t *>(q.data);
    for (int b = 0; b < nb * nc; ++b) {
        int32_t sum = 0;
        for (int i = length * b; i < length * b + length; ++i) {
            codes[i] = std::max<int8_t>(codes[i], -127);
            sum += codes[i];
        }
        sums[b] = sum;
        d[b]    = in.normal();
    }
    const itq_columns y = { codes, d.get(), sums.get() };

    aligned got((size_t) nc * 64), want((size_t) nc * 64);
    auto *  got_out  = reinterpret_cast<float (*)[ITQ_PANEL_ROWS]>(got.data);
    auto *  want_out = reinterpret_cast<float (*)[ITQ_PANEL_ROWS]>(want.data);
    k.gemm(nb, packed.data, &y, nc, got_out);
    k.gemm_generic(nb, packed.data, &y, nc, want_out);
    for (int c = 0; c < nc; ++c) {
        double size = 0.0;  // of a block's sum, at most
        for (int b = 0; b < nb; ++b) {
            double total = 0.0;
            for (int i = 0; i < length; ++i) {
                total += std::abs(codes[(b * nc + c) * length + i]);
            }
            size += 0.02 * (k.rotated ? 65.0 / 32 : 1.0) * total * std::fabs(d[b * nc + c]);
        }
        for (int r = 0; r < ITQ_PANEL_ROWS; ++r) {
            if (!(std::fabs((double) got_out[c][r] - want_out[c][r]) <= 1e-6 * size)) {
                wrong("the product of a panel", ggml_type_name(k.type), r, got_out[c][r], want_out[c][r]);
            }
        }
        // the bits do not depend on the other columns
        const auto one_d    = exactly<float>((size_t) nb);
        const auto one_sums = exactly<int32_t>((size_t) nb);
        aligned    one_q((size_t) (nb * length));
        for (int b = 0; b < nb; ++b) {
            memcpy(one_q.data + b * length, codes + (b * nc + c) * length, (size_t) length);
            one_d[b]    = d[b * nc + c];
            one_sums[b] = sums[b * nc + c];
        }
        const itq_columns one = { reinterpret_cast<int8_t *>(one_q.data), one_d.get(), one_sums.get() };
        alignas(64) float alone[1][ITQ_PANEL_ROWS];
        k.gemm(nb, packed.data, &one, 1, alone);
        if (memcmp(alone, got_out[c], sizeof(alone)) != 0) {
            wrong("a column alone", ggml_type_name(k.type), c, alone[0][0], got_out[c][0]);
        }
    }
    if (k.gemv) {
        rows_alone(in, k, nb, packed.data);
    }
    cases += (uint64_t) nc * ITQ_PANEL_ROWS;
}

// Random bytes are blocks of every type but for their scales. Returns whether the scales are ordinary ones.
static bool blocks(Input & in, const kernels & parts, uint8_t * data, size_t size) {
    const bool   any_scale = in.below(8) == 0;
    const size_t block     = ggml_type_size(parts.type);
    in.fill(data, size);
    for (size_t at = block; at <= size && !any_scale; at += block) {
        ggml_fp16_t d = ggml_fp32_to_fp16(0.01f + 0.01f * in.uniform());
        if (parts.has_z) {
            memcpy(data + at - 4, &d, 2);
            d = ggml_fp32_to_fp16(in.random() % 4 ? 0.0f : 2.0f);
        }
        memcpy(data + at - 2, &d, 2);
    }
    return !any_scale;
}

extern "C" int LLVMFuzzerTestOneInput(const uint8_t * data, size_t size) {
    Input           in(data, size);
    const kernels & parts   = all_kernels[in.below((uint32_t) std::size(all_kernels))];
    const ggml_type type    = parts.type;
    const int       experts = in.below(4) ? 0 : 1 + (int) in.below(4);
    const int       used    = experts ? 1 + (int) in.below((uint32_t) experts) : 1;
    const int       k       = parts.length * (1 + (int) in.below(parts.length == QK_K ? 12 : 24));
    int             columns = 1 + (int) in.below(in.below(8) ? 40 : 300);
    int             rows    = 1 + (int) in.below(in.below(8) ? 70 : 600);
    const int       batch_w = experts ? 1 : 1 + (int) in.below(2);
    const int       batch_x = batch_w * (experts ? 1 : 1 + (int) in.below(2));
    panel(in, parts);
    // a case takes milliseconds
    while ((int64_t) rows * columns * batch_x * used * (k / parts.length) > 30000) {
        (rows > columns ? rows : columns) = (std::max(rows, columns) + 1) / 2;
    }
    const bool panels = in.below(2) != 0;
    if (panels) {
        rows = (rows + ITQ_PANEL_ROWS - 1) / ITQ_PANEL_ROWS * ITQ_PANEL_ROWS;
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
    const uint8_t *       bytes    = memory.front().get();
    const bool            ordinary = blocks(in, parts, memory.front().get(), ggml_nbytes(w));
    ggml_backend_buffer_t buffer   = nullptr;
    if (panels) {
        ggml_backend_buffer_type_t buft = ggml_backend_cpu_itq_buffer_type();
        buffer  = ggml_backend_buft_alloc_buffer(buft, ggml_backend_buft_get_alloc_size(buft, w));
        w->data = nullptr;
        ggml_backend_tensor_alloc(buffer, w, ggml_backend_buffer_get_base(buffer));
        ggml_backend_tensor_set(w, bytes, 0, ggml_nbytes(w));
    }
    float *    xd    = static_cast<float *>(x->data);
    int32_t *  chose = static_cast<int32_t *>(ids->data);
    const bool odd   = parts.rotated && in.below(8) == 0;  // upstream's 8-bit code asserts what it takes
    for (int64_t i = 0; i < ggml_nelements(x); ++i) {
        xd[i] = odd && in.random() % 64 == 0 ? special(in) : in.uniform();
    }
    for (int i = 0; i < columns && experts; ++i) {
        // few experts get most of the columns
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
            traits->vec_dot(k, &want, 0, bytes + (size_t) (matrix * rows + r) * stride, 0, y.get(), 0, 1);
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
        const double weight = parts.rotated ? 0.02 / 32 * 65 : 0.02 * 2;
        if (finite && std::isfinite(norm) && norm < 0x1p200 &&
            error > 1e-6 * std::fmax(most, weight * std::sqrt(norm * k))) {
            wrong("the product", ggml_type_name(type), (int) c, error, most);
        }
    }
    cases += (uint64_t) ggml_nelements(out);
    ggml_backend_buffer_free(buffer);
    ggml_free(ctx);
    return 0;
}

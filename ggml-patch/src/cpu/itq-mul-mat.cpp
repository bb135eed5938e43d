// The matrix products of the trellis types, TQ1_0 and TQ2_0 on the CPU: shares of threads, activations, and the buffer of panels.

#include "itq-mul-mat.h"

#include "ggml-backend-impl.h"
#include "ggml-cpu-impl.h"
#include "ggml-cpu.h"
#include "ggml-impl.h"
#include "itq-gemm.h"
#include "itq-quants.h"
#include "quants.h"
#include "traits.h"

#include <algorithm>
#include <cstring>

namespace {

constexpr int64_t ROWS  = ITQ_PANEL_ROWS;
constexpr int64_t GROUP = ITQ_GROUP;
constexpr size_t  LINE  = 64;  // bytes of a cache line, which panels and activations begin on

struct type_kernels {
    int64_t length;  // weights of a block: 256, with activations in block_q8_K, or 64, with block_q8_n_h
    void (*quantize)(const float * GGML_RESTRICT, void * GGML_RESTRICT, int64_t);
    void (*reorder)(const int8_t *, int8_t *);  // NULL: the bytes stay as they are
    void (*repack)(const void *, size_t, int, int64_t, void *);
    void (*unpack)(const void *, int64_t, void *, size_t);
    void (*gemm)(int64_t, const void *, const itq_columns *, int, float (*)[ROWS]);
    // one column and rows of the file's layout, activations in their order; NULL: such rows are repacked
    void (*gemv)(int64_t, const void *, size_t, int, const itq_columns *, float *);
};

const type_kernels * kernels_of(ggml_type type) {
#ifdef ITQ_HAS_GEMV
#    define GEMV_OF(name) itq_gemv_##name
#else
#    define GEMV_OF(name) nullptr
#endif
    switch (type) {
#define KERNELS_OF_TYPE(NAME, length, activations, name)                      \
    case GGML_TYPE_##NAME:                                                    \
        {                                                                     \
            static const type_kernels kernels = { length,                     \
                                                  quantize_row_##activations, \
                                                  itq_reorder_##activations,  \
                                                  itq_repack_##name,          \
                                                  itq_unpack_##name,          \
                                                  itq_gemm_##name,            \
                                                  GEMV_OF(name) };            \
            return &kernels;                                                  \
        }
#define KERNELS_OF_TYPE_256(NAME, name, ...) KERNELS_OF_TYPE(NAME, QK_K, q8_K_h, name)
#define KERNELS_OF_TYPE_64(NAME, name, ...)  KERNELS_OF_TYPE(NAME, 64, q8_n_h, name)
        ITQ_TYPES_256(KERNELS_OF_TYPE_256)
        ITQ_TYPES_64(KERNELS_OF_TYPE_64)
        case GGML_TYPE_TQ1_0:
            {
                static const type_kernels kernels = {
                    QK_K, quantize_row_q8_K, nullptr, itq_repack_tq1_0, itq_unpack_tq1_0, itq_gemm_tq1_0, nullptr
                };
                return &kernels;
            }
        case GGML_TYPE_TQ2_0:
            {
                static const type_kernels kernels = {
                    QK_K, quantize_row_q8_K, nullptr, itq_repack_tq2_0, itq_unpack_tq2_0, itq_gemm_tq2_0, GEMV_OF(tq2_0)
                };
                return &kernels;
            }
        default:
            return nullptr;
    }
}

// Weights of a block.
int64_t length_of(const ggml_tensor * weights) {
    return kernels_of(weights->type)->length;
}

int64_t divide_up(int64_t a, int64_t b) {
    return (a + b - 1) / b;
}

// Bytes from one panel to the next.
size_t panel_stride(const ggml_tensor * weights) {
    return GGML_PAD(ROWS * ggml_row_size(weights->type, weights->ne[0]), LINE);
}

bool has_panels(const ggml_tensor * weights) {
    return weights->buffer && weights->buffer->buft == ggml_backend_cpu_itq_buffer_type();
}

// Whether rows of the file's layout are multiplied as they are: every column is alone with them.
bool takes_rows(const ggml_tensor * op) {
    const ggml_tensor * weights = op->src[0];
    const ggml_tensor * src1    = op->src[1];
    const bool alone = op->op == GGML_OP_MUL_MAT_ID
                           ? src1->ne[2] == 1
                           : src1->ne[1] == 1 && src1->ne[2] == weights->ne[2] && src1->ne[3] == weights->ne[3];
    return alone && !has_panels(weights) && kernels_of(weights->type)->gemv;
}

//
// work memory
//

// Hands out memory on cache lines; from NULL it only counts.
class arena {
  public:
    explicit arena(void * base) : start((uintptr_t) base), at(GGML_PAD((uintptr_t) base, LINE)) {}

    template <typename T> T * take(int64_t n) {
        T * const p = (T *) at;
        at += GGML_PAD((size_t) n * sizeof(T), LINE);
        return p;
    }

    size_t used() const { return at - start; }

  private:
    uintptr_t start;
    uintptr_t at;
};

// Quantized columns one behind the other, in groups as struct itq_columns has them.
struct activations {
    int64_t   length;  // of a block
    int8_t *  q;
    float *   d;
    int32_t * sums;

    activations(arena & memory, int64_t length, int64_t blocks) :
        length(length), q(memory.take<int8_t>(blocks * length)), d(memory.take<float>(blocks)),
        sums(memory.take<int32_t>(blocks)) {}

    int8_t * bytes(int64_t block) const { return q + block * length; }

    itq_columns from(int64_t block) const { return { bytes(block), d + block, sums + block }; }
};

struct mapping {
    int32_t slot;  // which of the experts of a token
    int32_t token;
};

// What a product has of params->wdata. Constructed from NULL, it tells how much that is.
struct workspace {
    arena       memory;
    activations columns;

    // of mul_mat_id: rows of src1 that an expert meets, [offsets[e], offsets[e + 1]) of rows, and the experts with any
    int64_t *   offsets = nullptr;
    int32_t *   active  = nullptr;  // active[n_experts]: how many
    mapping *   rows    = nullptr;
    activations gathered;  // a group per thread

    int64_t panels = 0;  // that a thread repacks at a time, 0 if the weights have panels
    char *  packed;

    workspace(void * base, int n_threads, const ggml_tensor * op) :
        memory(base), columns(memory, length_of(op->src[0]), ggml_nelements(op->src[1]) / length_of(op->src[0])),
        gathered(memory, length_of(op->src[0]), op->op == GGML_OP_MUL_MAT_ID ? n_threads * gathered_blocks(op) : 0) {
        const ggml_tensor * weights = op->src[0];
        if (op->op == GGML_OP_MUL_MAT_ID) {
            const int64_t n_experts = weights->ne[2];
            offsets                 = memory.take<int64_t>(n_experts + 1);
            active                  = memory.take<int32_t>(n_experts + 1);
            rows                    = memory.take<mapping>(ggml_nelements(op->src[2]));
        }
        if (!has_panels(weights)) {
            panels = std::min(divide_up(weights->ne[1], ROWS), chunk_limit(op));
        }
        packed = memory.take<char>(n_threads * panels * (int64_t) panel_stride(weights));
    }

    static int64_t gathered_blocks(const ggml_tensor * op) {
        return GROUP * (op->src[1]->ne[0] / length_of(op->src[0]));
    }

    // Panels of a chunk: they stay in the cache of second level while groups of columns go by. Experts gather their
    // columns for every chunk.
    static int64_t chunk_limit(const ggml_tensor * op) { return op->op == GGML_OP_MUL_MAT_ID ? 16 : 4; }
};

//
// activations
//

// A block of src1 to where the kernels read it.
void quantize_block(const type_kernels & kernels, const char * x, bool quantized, bool reorder, const activations & to,
                    int64_t at) {
    union {
        block_q8_K   of_256;
        block_q8_n_h of_64;
    } own;
    if (!quantized) {
        kernels.quantize((const float *) x, &own, kernels.length);
        x = (const char *) &own;
    }
    const int8_t * qs;
    float          d;
    int32_t        sum = 0;
    if (kernels.length == QK_K) {
        const block_q8_K * y = (const block_q8_K *) x;
        qs                   = y->qs;
        d                    = y->d;
        for (int i = 0; d != 0.0f && i < QK_K / 16; ++i) {  // upstream leaves the sums of a block of zeros open
            sum += y->bsums[i];
        }
    } else {
        const block_q8_n_h * y = (const block_q8_n_h *) x;
        qs                     = y->qs;
        d                      = y->d;
        sum                    = y->sum;
    }
    if (reorder) {
        kernels.reorder(qs, to.bytes(at));
    } else {
        memcpy(to.bytes(at), qs, kernels.length);
    }
    to.d[at]    = d;
    to.sums[at] = sum;
}

// The part of thread ith of the columns of src1: sets of n columns that meet the same weights, each in groups of up to
// `group` columns. offset_of(set, c) is where column c begins in src1.
template <typename Offset>
void quantize_columns(const ggml_compute_params * params, const ggml_tensor * op, const activations & to, int64_t sets,
                      int64_t n, int64_t group, const Offset & offset_of) {
    const ggml_tensor *  src1       = op->src[1];
    const type_kernels & kernels    = *kernels_of(op->src[0]->type);
    const bool           quantized  = src1->type != GGML_TYPE_F32;
    const bool           reorder    = kernels.reorder && !takes_rows(op);
    const size_t         block_size = quantized ? ggml_type_size(src1->type) : kernels.length * sizeof(float);
    const int64_t        nb         = src1->ne[0] / kernels.length;
    const int64_t        total      = sets * n * nb;
    const int64_t        start      = total * params->ith / params->nth;
    const int64_t        end        = total * (params->ith + 1) / params->nth;

    int64_t at = 0;
    for (int64_t set = 0; set < sets; ++set) {
        for (int64_t first = 0; first < n; first += group) {
            const int64_t nc   = std::min(group, n - first);
            const int64_t next = at + nc * nb;
            if (at < end && next > start) {
                const char * x[GROUP];
                for (int64_t c = 0; c < nc; ++c) {
                    x[c] = (const char *) src1->data + offset_of(set, first + c);
                }
                const int64_t from = std::max(start, at);
                int64_t       b    = (from - at) / nc;
                int64_t       c    = (from - at) % nc;
                for (int64_t i = from; i < std::min(end, next); ++i) {
                    quantize_block(kernels, x[c] + b * block_size, quantized, reorder, to, i);
                    if (++c == nc) {
                        c = 0;
                        ++b;
                    }
                }
            }
            at = next;
        }
    }
}

//
// products
//

// A group of columns and where their results begin, row 0.
struct column_group {
    itq_columns y;
    int         nc;
    char *      out[GROUP];
};

// Panels [begin, end) of a matrix times groups first, first + step, ... < n_groups; fill(group, &columns) sets one.
template <typename Fill>
void multiply(const ggml_tensor * weights, bool by_rows, const char * matrix, int64_t begin, int64_t end, int64_t first,
              int64_t step, int64_t n_groups, int64_t limit, char * scratch, const Fill & fill) {
    const type_kernels & kernels = *kernels_of(weights->type);
    const int64_t        nb      = weights->ne[0] / kernels.length;
    const int64_t        n_rows  = weights->ne[1];
    const size_t         nb01    = weights->nb[1];
    const size_t         stride  = panel_stride(weights);
    const bool           repack  = limit > 0;
    const bool           once    = first + step >= n_groups;  // a repacked panel is used right away
    const int64_t        chunk   = repack && !once ? limit : end - begin;

    const auto repack_panel = [&](int64_t panel, char * to) {
        const int64_t row = panel * ROWS;
        kernels.repack(matrix + row * nb01, nb01, (int) std::min(ROWS, n_rows - row), nb, to);
    };

    column_group columns;
    for (int64_t at = begin; at < end; at += chunk) {
        const int64_t stop = std::min(end, at + chunk);
        for (int64_t panel = at; repack && !once && panel < stop; ++panel) {
            repack_panel(panel, scratch + (panel - at) * stride);
        }
        for (int64_t group = first; group < n_groups; group += step) {
            fill(group, columns);
            if (by_rows && columns.nc == 1) {
                for (int64_t row = at * ROWS; row < std::min(stop * ROWS, n_rows); row += ROWS) {
                    float     out[ROWS];
                    const int n = (int) std::min(ROWS, n_rows - row);
                    kernels.gemv(nb, matrix + row * nb01, nb01, n, &columns.y, out);
                    memcpy(columns.out[0] + row * sizeof(float), out, n * sizeof(float));
                }
                continue;
            }
            for (int64_t panel = at; panel < stop; ++panel) {
                const char * x = scratch;
                if (!repack) {
                    x = matrix + panel * stride;
                } else if (once) {
                    repack_panel(panel, scratch);
                } else {
                    x = scratch + (panel - at) * stride;
                }
                alignas(LINE) float out[GROUP][ROWS];
                kernels.gemm(nb, x, &columns.y, columns.nc, out);

                const int64_t row  = panel * ROWS;
                const size_t  size = (size_t) std::min(ROWS, n_rows - row) * sizeof(float);
                for (int c = 0; c < columns.nc; ++c) {
                    memcpy(columns.out[c] + row * sizeof(float), out[c], size);
                }
            }
        }
    }
}

// How the panels of n matrices are shared out: chunks of so many panels, and columns in parts where these are too few.
struct shares {
    int64_t panels;
    int64_t chunks;  // of a matrix
    int64_t parts;   // of its groups of columns

    shares(int64_t matrices, int64_t n_panels, int64_t n_groups, int64_t limit, int n_threads) {
        if (n_groups == 1) {
            limit = 64;  // panels go by once: long stretches of memory, which processors fetch ahead
        }
        // four or more turns each: threads are not equally fast
        panels = std::clamp<int64_t>(matrices * n_panels / (4 * n_threads), 1, limit);
        if (ggml_is_numa()) {
            panels = divide_up(n_panels, n_threads);  // the same rows for a thread, every time
        }
        chunks = divide_up(n_panels, panels);
        parts  = std::min(n_groups, divide_up(n_threads, matrices * chunks));
    }
};

template <typename Job> void run_jobs(const ggml_compute_params * params, int64_t n, const Job & job) {
    for (int64_t i = params->ith; i < n; i = ggml_threadpool_chunk_add(params->threadpool, 1)) {
        job(i);
    }
}

const char * matrix_of(const ggml_tensor * weights, int64_t i2, int64_t i3) {
    if (has_panels(weights)) {
        const int64_t n_panels = weights->ne[1] / ROWS;
        return (const char *) weights->data + (i3 * weights->ne[2] + i2) * n_panels * panel_stride(weights);
    }
    return (const char *) weights->data + i2 * weights->nb[2] + i3 * weights->nb[3];
}

void mul_mat(const ggml_compute_params * params, const workspace & work, ggml_tensor * dst) {
    const ggml_tensor * src0 = dst->src[0];
    const ggml_tensor * src1 = dst->src[1];

    GGML_TENSOR_BINARY_OP_LOCALS

    GGML_ASSERT(ne0 == ne01 && ne1 == ne11 && ne2 == ne12 && ne3 == ne13);

    const int64_t nb      = ne00 / length_of(src0);
    const int64_t r2      = ne12 / ne02;
    const int64_t r3      = ne13 / ne03;
    const int64_t columns = r2 * ne11;    // that meet a matrix
    const int64_t sets    = ne02 * ne13;  // of such columns

    // of column c of a set, in src1 or in dst
    const auto offset_of = [&](int64_t set, int64_t c, size_t stride1, size_t stride2, size_t stride3) {
        const int64_t i12 = set % ne02 * r2 + (r2 == 1 ? 0 : c / ne11);
        const int64_t i11 = r2 == 1 ? c : c % ne11;
        return i11 * stride1 + i12 * stride2 + set / ne02 * stride3;
    };

    quantize_columns(params, dst, work.columns, sets, columns, GROUP,
                     [&](int64_t set, int64_t c) { return offset_of(set, c, nb11, nb12, nb13); });
    if (params->ith == 0) {
        ggml_threadpool_chunk_set(params->threadpool, params->nth);
    }
    ggml_barrier(params->threadpool);

    const int64_t n_groups = divide_up(columns, GROUP);
    const int64_t n_panels = divide_up(ne01, ROWS);
    const shares  share(sets, n_panels, n_groups, workspace::chunk_limit(dst), params->nth);
    char *        scratch = work.packed + params->ith * work.panels * panel_stride(src0);

    run_jobs(params, sets * share.parts * share.chunks, [&](int64_t job) {
        const int64_t begin = job % share.chunks * share.panels;
        const int64_t part  = job / share.chunks % share.parts;
        const int64_t set   = job / share.chunks / share.parts;

        multiply(src0, takes_rows(dst), matrix_of(src0, set % ne02, set / ne02 / r3), begin,
                 std::min(begin + share.panels, n_panels), part, share.parts, n_groups, work.panels, scratch,
                 [&](int64_t group, column_group & to) {
                     const int64_t first = group * GROUP;
                     to.nc               = (int) std::min(GROUP, columns - first);
                     to.y                = work.columns.from((set * columns + first) * nb);
                     for (int c = 0; c < to.nc; ++c) {
                         to.out[c] = (char *) dst->data + offset_of(set, first + c, nb1, nb2, nb3);
                     }
                 });
    });
}

// Which rows of src1 every expert meets, expert by expert.
void route(const workspace & work, const ggml_tensor * ids, int64_t n_experts) {
    const auto expert_of = [&](int64_t slot, int64_t token) {
        const int32_t e = *(const int32_t *) ((const char *) ids->data + slot * ids->nb[0] + token * ids->nb[1]);
        GGML_ASSERT(e >= 0 && e < n_experts);
        return e;
    };
    const int64_t slots  = ids->ne[0];
    const int64_t tokens = ids->ne[1];

    // counted one place on, then added up: offsets[e] runs from the begin of e to that of e + 1 as its rows are filled in
    memset(work.offsets, 0, (n_experts + 1) * sizeof(*work.offsets));
    for (int64_t token = 0; token < tokens; ++token) {
        for (int64_t slot = 0; slot < slots; ++slot) {
            ++work.offsets[expert_of(slot, token) + 1];
        }
    }
    int32_t n_active = 0;
    for (int64_t e = 0; e < n_experts; ++e) {
        if (work.offsets[e + 1] > 0) {
            work.active[n_active++] = (int32_t) e;
        }
        work.offsets[e + 1] += work.offsets[e];
    }
    work.active[n_experts] = n_active;
    for (int64_t token = 0; token < tokens; ++token) {
        for (int64_t slot = 0; slot < slots; ++slot) {
            work.rows[work.offsets[expert_of(slot, token)]++] = { (int32_t) slot, (int32_t) token };
        }
    }
    for (int64_t e = n_experts; e > 0; --e) {
        work.offsets[e] = work.offsets[e - 1];
    }
    work.offsets[0] = 0;
}

void mul_mat_id(const ggml_compute_params * params, const workspace & work, ggml_tensor * dst) {
    const ggml_tensor * src0 = dst->src[0];
    const ggml_tensor * src1 = dst->src[1];
    const ggml_tensor * ids  = dst->src[2];

    GGML_TENSOR_BINARY_OP_LOCALS

    GGML_ASSERT(ne03 == 1 && ne13 == 1 && ne3 == 1);
    GGML_ASSERT(ne0 == ne01 && ne1 == ids->ne[0] && ne2 == ne12 && ne12 == ids->ne[1]);

    const int64_t nb = ne00 / length_of(src0);

    quantize_columns(params, dst, work.columns, 1, ne11 * ne12, 1,
                     [&](int64_t, int64_t c) { return c % ne11 * nb11 + c / ne11 * nb12; });
    if (params->ith == 0) {
        route(work, ids, ne02);
        ggml_threadpool_chunk_set(params->threadpool, params->nth);
    }
    ggml_barrier(params->threadpool);

    const int64_t n_active = work.active[ne02];
    const int64_t n_panels = divide_up(ne01, ROWS);
    const shares  share(n_active, n_panels, divide_up(ids->ne[0] * ne12, n_active * GROUP), workspace::chunk_limit(dst),
                        params->nth);
    char *        scratch = work.packed + params->ith * work.panels * panel_stride(src0);

    const bool by_rows = takes_rows(dst);
    const auto reorder = kernels_of(src0->type)->reorder;

    // the group that this thread gathers
    const int64_t     own      = params->ith * workspace::gathered_blocks(dst);
    const itq_columns gathered = work.gathered.from(own);

    run_jobs(params, n_active * share.parts * share.chunks, [&](int64_t job) {
        const int64_t   begin  = job % share.chunks * share.panels;
        const int64_t   part   = job / share.chunks % share.parts;
        const int64_t   expert = work.active[job / share.chunks / share.parts];
        const mapping * rows   = work.rows + work.offsets[expert];
        const int64_t   n      = work.offsets[expert + 1] - work.offsets[expert];

        multiply(src0, by_rows, matrix_of(src0, expert, 0), begin, std::min(begin + share.panels, n_panels), part,
                 share.parts, divide_up(n, GROUP), work.panels, scratch, [&](int64_t group, column_group & to) {
                     const int64_t first = group * GROUP;
                     const int     nc    = (int) std::min(GROUP, n - first);
                     to.nc               = nc;
                     to.y                = gathered;
                     for (int c = 0; c < nc; ++c) {
                         const mapping row = rows[first + c];
                         to.out[c]         = (char *) dst->data + row.slot * nb1 + row.token * nb2;

                         const int64_t block = (row.slot % ne11 + row.token * ne11) * nb;
                         if (nc == 1) {
                             to.y = work.columns.from(block);
                             break;
                         }
                         for (int64_t b = 0; b < nb; ++b) {
                             const int64_t  at = own + b * nc + c;
                             const int8_t * q  = work.columns.bytes(block + b);
                             if (by_rows && reorder) {
                                 reorder(q, work.gathered.bytes(at));  // an expert that a token names twice
                             } else {
                                 memcpy(work.gathered.bytes(at), q, work.gathered.length);
                             }
                             work.gathered.d[at]    = work.columns.d[block + b];
                             work.gathered.sums[at] = work.columns.sums[block + b];
                         }
                     }
                 });
    });
}

class product_traits : public ggml::cpu::tensor_traits {
    bool work_size(int n_threads, const ggml_tensor * op, size_t & size) override {
        // upstream's own product of reference has to find its memory too
        const size_t rows =
            ggml_row_size(ggml_get_type_traits_cpu(op->src[0]->type)->vec_dot_type, ggml_nelements(op->src[1]));
        const size_t experts  = op->op == GGML_OP_MUL_MAT_ID ? (size_t) op->src[0]->ne[2] : 0;
        const size_t mappings = experts ? experts * (size_t) ggml_nelements(op->src[2]) : 0;
        size                  = std::max(workspace(nullptr, n_threads, op).memory.used() + LINE,
                                         has_panels(op->src[0]) ? 0 : rows + mappings * 8 + experts * (8 + 256) + 512);
        return true;
    }

    bool compute_forward(ggml_compute_params * params, ggml_tensor * op) override {
        if (params->use_ref && !has_panels(op->src[0])) {
            return false;
        }
        // no permuted operand, no transposed result, as in upstream's product
        GGML_ASSERT(op->src[0]->nb[0] == ggml_type_size(op->src[0]->type));
        GGML_ASSERT(op->src[1]->nb[0] == ggml_type_size(op->src[1]->type));
        GGML_ASSERT(op->nb[0] == sizeof(float) && op->nb[0] <= op->nb[1]);

        const workspace work(params->wdata, params->nth, op);
        GGML_ASSERT(work.memory.used() <= params->wsize);
        if (op->op == GGML_OP_MUL_MAT) {
            mul_mat(params, work, op);
        } else {
            mul_mat_id(params, work, op);
        }
        return true;
    }
};

//
// the buffer
//

// Whether panels can hold the tensor.
bool fits_panels(const ggml_tensor * tensor) {
    return kernels_of(tensor->type) && tensor->ne[1] % ROWS == 0 && !tensor->view_src && ggml_is_contiguous(tensor);
}

int64_t panels_of(const ggml_tensor * tensor) {
    return ggml_nrows(tensor) / ROWS;
}

// Run f(panel, its rows) for all panels of a tensor.
template <typename F> void for_panels(const ggml_tensor * tensor, size_t offset, size_t size, const F & f) {
    GGML_ASSERT(fits_panels(tensor));
    GGML_ASSERT(offset == 0 && size == ggml_nbytes(tensor));
    const size_t stride = panel_stride(tensor);
    for (int64_t i = 0; i < panels_of(tensor); ++i) {
        f((char *) tensor->data + i * stride, i * ROWS * tensor->nb[1]);
    }
}

void buffer_set_tensor(ggml_backend_buffer_t, ggml_tensor * tensor, const void * data, size_t offset, size_t size) {
    const type_kernels & kernels = *kernels_of(tensor->type);
    for_panels(tensor, offset, size, [&](char * panel, size_t rows) {
        kernels.repack((const char *) data + rows, tensor->nb[1], (int) ROWS, tensor->ne[0] / kernels.length, panel);
    });
}

void buffer_get_tensor(ggml_backend_buffer_t, const ggml_tensor * tensor, void * data, size_t offset, size_t size) {
    const type_kernels & kernels = *kernels_of(tensor->type);
    for_panels(tensor, offset, size, [&](char * panel, size_t rows) {
        kernels.unpack(panel, tensor->ne[0] / kernels.length, (char *) data + rows, tensor->nb[1]);
    });
}

const char * buffer_type_get_name(ggml_backend_buffer_type_t) {
    return "CPU_ITQ3S";
}

ggml_backend_buffer_t buffer_type_alloc_buffer(ggml_backend_buffer_type_t buft, size_t size) {
    ggml_backend_buffer_t buffer = ggml_backend_buft_alloc_buffer(ggml_backend_cpu_buffer_type(), size);
    if (!buffer) {
        return nullptr;
    }
    buffer->buft             = buft;
    buffer->iface.set_tensor = buffer_set_tensor;
    buffer->iface.get_tensor = buffer_get_tensor;
    buffer->iface.cpy_tensor = nullptr;
    return buffer;
}

size_t buffer_type_get_alignment(ggml_backend_buffer_type_t) {
    return LINE;
}

size_t buffer_type_get_alloc_size(ggml_backend_buffer_type_t, const ggml_tensor * tensor) {
    return fits_panels(tensor) ? panels_of(tensor) * panel_stride(tensor) : ggml_nbytes(tensor);
}

class panel_buffer_type : public ggml::cpu::extra_buffer_type {
    bool supports_op(ggml_backend_dev_t, const ggml_tensor * op) override {
#ifdef GGML_USE_CPU_REPACK
        const ggml_tensor * weights = op->src[0];
        return (op->op == GGML_OP_MUL_MAT || op->op == GGML_OP_MUL_MAT_ID) && has_panels(weights) &&
               fits_panels(weights) && op->src[1]->type == GGML_TYPE_F32 &&
               (!op->src[1]->buffer || ggml_backend_buft_is_host(op->src[1]->buffer->buft));
#else
        GGML_UNUSED(op);
        return false;  // this build repacks nothing when it loads a model
#endif
    }

    // Of every layout that the processor can read.
    ggml::cpu::tensor_traits * get_tensor_traits(const ggml_tensor * op) override {
        static product_traits traits;
        if (op->op != GGML_OP_MUL_MAT && op->op != GGML_OP_MUL_MAT_ID) {
            return nullptr;
        }
        const ggml_tensor * weights = op->src[0];
        if (!kernels_of(weights->type) || (op->src[1]->type != GGML_TYPE_F32 &&
                                           op->src[1]->type != ggml_get_type_traits_cpu(weights->type)->vec_dot_type)) {
            return nullptr;
        }
        const bool readable = !weights->buffer || has_panels(weights) || ggml_backend_buffer_is_host(weights->buffer);
        return readable ? &traits : nullptr;
    }
};

}  // namespace

ggml_backend_buffer_type_t ggml_backend_cpu_itq_buffer_type(void) {
    static panel_buffer_type               context;
    static struct ggml_backend_buffer_type type = {
        /* .iface   = */ {
            /* .get_name       = */ buffer_type_get_name,
            /* .alloc_buffer   = */ buffer_type_alloc_buffer,
            /* .get_alignment  = */ buffer_type_get_alignment,
            /* .get_max_size   = */ nullptr,
            /* .get_alloc_size = */ buffer_type_get_alloc_size,
            /* .is_host        = */ nullptr,
        },
        /* .device  = */ ggml_backend_reg_dev_get(ggml_backend_cpu_reg(), 0),
        /* .context = */ &context,
    };
    return &type;
}

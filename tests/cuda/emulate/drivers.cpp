// Upstream's products behind a C interface: the functions that its backend calls, with tensors as they are.

#include "device.h"
#include "itq-share.cuh"
#include "mmq.cuh"
#include "mmvq.cuh"

// Which kernels the backend takes for a product with so many columns, of so many experts or of none (0): those for few
// columns, 1, those for many, 2, or neither, 0.
extern "C" float emulate_choice(const int type, const int64_t columns, const int64_t experts) {
    const int       cc   = emulate::device.cc;
    const ggml_type ours = emulate_types[type];
    return ggml_cuda_should_use_mmvq(ours, cc, columns)           ? 1
           : ggml_cuda_should_use_mmq(ours, cc, columns, experts) ? 2
                                                                  : 0;
}

// A tensor of the host, copied to the end of memory of the device. The backend's buffers start at multiples of 128.
struct device_tensor {
    static constexpr size_t alignment = 16;

    guarded_pool pool;
    ggml_tensor  tensor = {};
    void *       host;
    void *       memory = nullptr;
    size_t       size   = 0;

    // room: bytes behind it that may be read, clear: of them that are 0.
    device_tensor(const ggml_type type, void * data, const int64_t * ne, const int64_t * nb, const size_t room = 0,
                  const size_t clear = 0) : host(data) {
        if (!data) {
            return;
        }
        tensor.type = type;
        std::copy(ne, ne + GGML_MAX_DIMS, tensor.ne);
        std::copy(nb, nb + GGML_MAX_DIMS, tensor.nb);
        const size_t bytes = ggml_nbytes(&tensor);
        memory             = pool.alloc(bytes + room, &size);
        tensor.data        = (uint8_t *) memory + (size - bytes - room) / alignment * alignment;
        memcpy(tensor.data, host, bytes);
        memset((uint8_t *) tensor.data + bytes, 0, clear);
    }
    ~device_tensor() {
        if (host) {
            pool.free(memory, size);
        }
    }
    device_tensor(const device_tensor &) = delete;

    void          fetch() { memcpy(host, tensor.data, ggml_nbytes(&tensor)); }
    ggml_tensor * get() { return host ? &tensor : nullptr; }
};

// What the backend's buffers have behind a tensor whose rows are no multiple of this, and clear: MMQ reads past the last row.
static size_t row_padding(const ggml_type type, const int64_t ne0) {
    return (GGML_PAD(ne0, MATRIX_ROW_PADDING) - ne0) / ggml_blck_size(type) * ggml_type_size(type);
}

// dst = x*y by the kernels for few (1) or many (2) columns. ne and nb: four numbers for each of x, y, dst, ids, the bias
// of x, the gate and its bias; those with data nullptr are not there.
extern "C" void emulate_mul_mat(const int choice, const int type, void * x, void * y, void * dst, void * ids,
                                void * x_bias, void * gate, void * gate_bias, const int64_t * ne, const int64_t * nb,
                                const int glu_op) {
    ggml_backend_cuda_context ctx(0);
    const ggml_type           ours  = emulate_types[type];
    // MMVQ takes up to four rows at a time, of which it throws away those that are not there.
    const size_t              clear = choice == 2 ? row_padding(ours, ne[0]) : 0;
    const size_t              room  = choice == 1 ? 3 * nb[1] : clear;
    device_tensor             tx(ours, x, ne, nb, room, clear), ty(GGML_TYPE_F32, y, ne + 4, nb + 4);
    device_tensor             tdst(GGML_TYPE_F32, dst, ne + 8, nb + 8), tids(GGML_TYPE_I32, ids, ne + 12, nb + 12);
    device_tensor tx_bias(GGML_TYPE_F32, x_bias, ne + 16, nb + 16), tgate(ours, gate, ne + 20, nb + 20, room);
    device_tensor tgate_bias(GGML_TYPE_F32, gate_bias, ne + 24, nb + 24);

    if (choice == 2) {
        GGML_ASSERT(!x_bias && !gate && !gate_bias);
        ggml_cuda_mul_mat_q(ctx, tx.get(), ty.get(), tids.get(), tdst.get());
    } else {
        ggml_cuda_mm_fusion_args_host fusion;
        fusion.x_bias    = tx_bias.get();
        fusion.gate      = tgate.get();
        fusion.gate_bias = tgate_bias.get();
        fusion.glu_op    = (ggml_glu_op) glu_op;
        fusion.glu_limit = 0.5f;
        ggml_cuda_mul_mat_vec_q(ctx, tx.get(), ty.get(), tids.get(), tdst.get(),
                                x_bias || gate || gate_bias ? &fusion : nullptr);
    }
    tdst.fetch();
}

// Two products with the same activations, x 0 and x 1 by y, as a graph that shares those. ne and nb: four numbers for
// each of x 0, dst 0, x 1, dst 1 and y.
extern "C" void emulate_mul_mat_shared(const int choice, const int type_0, const int type_1, void * x_0, void * dst_0,
                                       void * x_1, void * dst_1, void * y, const int64_t * ne, const int64_t * nb) {
    const size_t  clear  = choice == 2 ? row_padding(emulate_types[type_0], ne[0]) : 0;
    const size_t  room   = choice == 1 ? 3 * nb[1] : clear;
    device_tensor x[2]   = { { emulate_types[type_0], x_0, ne, nb, room, clear },
                             { emulate_types[type_1], x_1, ne + 8, nb + 8, room, clear } };
    device_tensor dst[2] = { { GGML_TYPE_F32, dst_0, ne + 4, nb + 4 }, { GGML_TYPE_F32, dst_1, ne + 12, nb + 12 } };
    device_tensor ty(GGML_TYPE_F32, y, ne + 16, nb + 16);

    ggml_tensor * nodes[2] = { dst[0].get(), dst[1].get() };
    for (int i = 0; i < 2; ++i) {
        nodes[i]->op     = GGML_OP_MUL_MAT;
        nodes[i]->src[0] = x[i].get();
        nodes[i]->src[1] = ty.get();
    }
    ggml_cgraph graph = {};
    graph.n_nodes     = 2;
    graph.nodes       = nodes;

    ggml_backend_cuda_context ctx(0);
    ggml_cuda_itq_share       share(ctx, &graph);
    for (int i = 0; i < 2; ++i) {
        if (choice == 2) {
            ggml_cuda_mul_mat_q(ctx, nodes[i]->src[0], ty.get(), nullptr, nodes[i]);
        } else {
            ggml_cuda_mul_mat_vec_q(ctx, nodes[i]->src[0], ty.get(), nullptr, nodes[i], nullptr);
        }
        dst[i].fetch();
    }
}

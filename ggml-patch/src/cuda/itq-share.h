// Which products of a graph share their activations (q, k and v; gate and up where they are two products), so that those
// are rotated and quantized once. What is known of a graph before it runs, without CUDA.

#pragma once

#include "ggml-impl.h"
#include "ggml.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <unordered_map>

// How activations are quantized for a type of weights.
struct itq_layout {
    ggml_type type;
    bool      mmq;

    bool operator==(const itq_layout & other) const { return type == other.type && mmq == other.mmq; }
};

// A buffer of one place: activations stay there until others that are shared need it. A tensor of the graph is computed
// once, so that its address says what lies there, as long as nothing writes to its memory between the products.
class itq_share {
  public:
    // ours: whether products with a type are meant; nbytes: what the quantized activations take.
    template <typename is_ours, typename size_of>
    itq_share(const ggml_cgraph * graph, const is_ours & ours, const size_of & nbytes) {
        std::unordered_map<const ggml_tensor *, range> uses;
        for (int i = 0; i < graph->n_nodes; ++i) {
            const ggml_tensor * node = graph->nodes[i];
            if (node->op == GGML_OP_MUL_MAT && ours(node->src[0]->type) && node->src[1]->type == GGML_TYPE_F32) {
                range & use = uses.try_emplace(node->src[1], range{ i, i }).first->second;
                use.last    = i;
            }
        }
        for (const auto & [src1, use] : uses) {
            if (use.last > use.first && !is_written(graph, src1, use)) {
                const size_t bytes = nbytes(src1);
                shared.emplace(src1, bytes);
                buffer_bytes = std::max(buffer_bytes, bytes);
            }
        }
    }

    // Bytes of the buffer; 0 if nothing is shared.
    size_t size() const { return buffer_bytes; }

    // Whether the buffer is the place of these activations.
    bool is_shared(const ggml_tensor * src1, const size_t nbytes) const {
        const auto found = shared.find(src1);
        return found != shared.end() && nbytes <= found->second;
    }

    // For activations that the buffer is the place of: whether they are there. If not, the caller puts them there now.
    bool claim(const ggml_tensor * src1, const itq_layout layout) {
        const bool there = holder == src1 && holder_layout == layout;
        holder           = src1;
        holder_layout    = layout;
        return there;
    }

  private:
    struct range {
        int first;
        int last;
    };

    // Whether a node from the first product to the last writes to the memory of their activations: an operation in place,
    // or one on a view of them.
    static bool is_written(const ggml_cgraph * graph, const ggml_tensor * src1, const range use) {
        const uintptr_t begin = (uintptr_t) src1->data;
        const uintptr_t end   = begin + ggml_nbytes(src1);
        for (int i = use.first; i < use.last; ++i) {
            const ggml_tensor * node = graph->nodes[i];
            if (ggml_op_is_empty(node->op)) {
                continue;
            }
            const uintptr_t to = (uintptr_t) node->data;
            if (to < end && begin < to + ggml_nbytes(node)) {
                return true;
            }
        }
        return false;
    }

    std::unordered_map<const ggml_tensor *, size_t> shared;
    size_t                                          buffer_bytes  = 0;
    const ggml_tensor *                             holder        = nullptr;
    itq_layout                                      holder_layout = {};
};

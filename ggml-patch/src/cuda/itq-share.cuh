// Quantized activations of upstream's ggml_cuda_mul_mat_vec_q and ggml_cuda_mul_mat_q, in a buffer for the product alone
// or in one that products with the same activations share (itq-share.h).

#pragma once

#include "common.cuh"
#include "itq-launch.cuh"
#include "itq-share.h"

#include <cstdlib>
#include <cstring>
#include <optional>

// Lives as long as a graph is evaluated or captured. GGML_CUDA_ITQ3S_SHARE=0 in the environment turns it off.
struct ggml_cuda_itq_share {
    ggml_cuda_itq_share(ggml_backend_cuda_context & ctx, const ggml_cgraph * graph) : ctx(ctx), buffer(ctx.pool()) {
        static const bool on = [] {
            const char * text = getenv("GGML_CUDA_ITQ3S_SHARE");
            return !text || strcmp(text, "0") != 0;
        }();
        if (!on) {
            return;
        }
        share.emplace(graph, ggml_cuda_has_own_products, ggml_cuda_itq_activation_bytes);
        if (share->size() > 0) {
            buffer.alloc(share->size());
            ctx.itq3s_share = this;
        }
    }

    ~ggml_cuda_itq_share() { ctx.itq3s_share = nullptr; }

    ggml_cuda_itq_share(const ggml_cuda_itq_share &)             = delete;
    ggml_cuda_itq_share & operator=(const ggml_cuda_itq_share &) = delete;

    ggml_backend_cuda_context & ctx;
    ggml_cuda_pool_alloc<char>  buffer;
    std::optional<itq_share>    share;
};

// In the place of upstream's ggml_cuda_pool_alloc of a product.
struct ggml_cuda_itq_activations {
    // With ids, what is quantized depends on more than src1, so nothing is shared; nor among streams.
    ggml_cuda_itq_activations(ggml_backend_cuda_context & ctx, const ggml_tensor * src0, const ggml_tensor * src1,
                              const ggml_tensor * ids, const bool mmq, const size_t nbytes) : own(ctx.pool()) {
        ggml_cuda_itq_share * shared = ctx.itq3s_share;
        if (shared && !ids && ctx.curr_stream_no == 0 && ggml_cuda_has_own_products(src0->type) &&
            shared->share->is_shared(src1, nbytes)) {
            ptr   = shared->buffer.get();
            ready = shared->share->claim(src1, { src0->type, mmq });
        } else {
            ptr = own.alloc(nbytes);
        }
    }

    char * get() const { return ptr; }

    ggml_cuda_pool_alloc<char> own;
    char *                     ptr   = nullptr;
    bool                       ready = false;
};

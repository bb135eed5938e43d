#pragma once

// Activations for the products of the trellis types: rotated, and quantized where the product is one of integers, once
// for all products that read them.
//
// A product asks for the rotated activation in place of its own (ggml_vk_itq_src1) and goes on with it as with any other
// tensor. When it knows that it multiplies floating point it has it written (ggml_vk_itq_rotate); a product of integers
// quantizes it instead, and ggml_vk_itq_quantize does that in one pass over the activation as it was.

#include "ggml-itq-types.h"
#include "ggml-vulkan-common.h"

// As itq_activations.glsl has them.
struct ggml_vk_itq_push_constants {
    uint32_t blocks;
    uint32_t ne[3];
    uint32_t nb[4];
    uint32_t offset;
};

// Whether there are products of a matrix in a trellis type with an activation.
static bool ggml_vk_itq_supports(const ggml_tensor * src0, const ggml_tensor * src1) {
    return (src1->type == GGML_TYPE_F32 || src1->type == GGML_TYPE_F16) && ggml_is_contiguous_1(src0);
}

// Forget the rotated activation: a graph begins, or the backend goes and its buffer with it.
static void ggml_vk_itq_reset(ggml_backend_vk_context * ctx, bool release = false) {
    ctx->itq_rotation.source = nullptr;
    if (release) {
        ggml_backend_buffer_free(ctx->itq_rotation.buffer);
        ctx->itq_rotation = {};
    }
}

// A buffer of this size for the rotated activation.
static void ggml_vk_itq_reserve(ggml_backend_vk_context * ctx, vk_context & subctx, size_t size) {
    ggml_vk_itq_rotation & rotation = ctx->itq_rotation;
    if (rotation.buffer != nullptr) {
        if (ggml_backend_buffer_get_size(rotation.buffer) >= size) {
            return;
        }
        ggml_vk_preallocate_buffers(ctx, subctx);  // which waits for what reads the old one
        ggml_backend_buffer_free(rotation.buffer);
    }
    rotation.buffer = ggml_backend_buft_alloc_buffer(&ctx->device->buffer_type, size);
    if (rotation.buffer == nullptr) {
        throw vk::OutOfDeviceMemoryError("no memory for rotated activations of trellis types");
    }
    rotation.need_sync = false;
}

// The activation of a product with src0: src1, or for a trellis type the tensor that is to have its rotated copy.
static const ggml_tensor * ggml_vk_itq_src1(ggml_backend_vk_context * ctx, vk_context & subctx,
                                            const ggml_tensor * src0, const ggml_tensor * src1) {
    if (!ggml_is_itq(src0->type)) {
        return src1;
    }
    GGML_ASSERT(ggml_vk_itq_supports(src0, src1));
    ggml_vk_itq_rotation & rotation = ctx->itq_rotation;
    ggml_tensor &          rotated  = rotation.rotated;
    if (rotation.source != src1) {
        ggml_vk_itq_reserve(ctx, subctx, ggml_nelements(src1) * sizeof(float));
        rotated           = *src1;
        rotated.type      = GGML_TYPE_F32;
        rotated.view_src  = nullptr;
        rotated.view_offs = 0;
        rotated.buffer    = rotation.buffer;
        rotated.data      = ggml_backend_buffer_get_base(rotation.buffer);
        rotated.nb[0]     = sizeof(float);
        for (int i = 1; i < GGML_MAX_DIMS; ++i) {
            rotated.nb[i] = rotated.nb[i - 1] * rotated.ne[i - 1];
        }
        rotation.source                  = src1;
        rotation.written                 = false;
        // upstream's copies of it in another type are of what it was before
        ctx->prealloc_y_last_tensor_used = nullptr;
    }
    return &rotated;
}

// A pass over the activation that is to be rotated; one that is F16 has the second pipeline.
static void ggml_vk_itq_dispatch(ggml_backend_vk_context * ctx, vk_context & subctx, vk_pipeline (&pipelines)[2],
                                 const vk_subbuffer & out) {
    const ggml_tensor *        source    = ctx->itq_rotation.source;
    const uint32_t             type_size = (uint32_t) ggml_type_size(source->type);
    ggml_vk_itq_push_constants pc        = {};
    pc.blocks                            = (uint32_t) (source->ne[0] / 256);
    for (int i = 0; i < 3; ++i) {
        pc.ne[i] = (uint32_t) source->ne[i + 1];
    }
    for (int i = 0; i < GGML_MAX_DIMS; ++i) {
        pc.nb[i] = (uint32_t) (source->nb[i] / type_size);
    }
    pc.offset = get_misalign_bytes(ctx, source) / type_size;

    vk_pipeline &  pipeline = pipelines[source->type == GGML_TYPE_F16];
    const auto &   limits   = ctx->device->properties.limits.maxComputeWorkGroupCount;
    const uint32_t rows     = (uint32_t) std::min<int64_t>(ggml_nrows(source), limits[1]);
    ggml_pipeline_request_descriptor_sets(ctx, pipeline, 1);
    ggml_vk_dispatch_pipeline(ctx, subctx, pipeline, { ggml_vk_tensor_subbuffer(ctx, source, true), out }, pc,
                              { std::min(pc.blocks, limits[0]), rows, 1 });
    ggml_vk_sync_buffers(ctx, subctx);
}

// Have the activation of a product in floating point: nothing to be done unless it is a rotated one.
static void ggml_vk_itq_rotate(ggml_backend_vk_context * ctx, vk_context & subctx, const ggml_tensor * src1) {
    ggml_vk_itq_rotation & rotation = ctx->itq_rotation;
    if (src1 != &rotation.rotated) {
        return;
    }
    if (!rotation.written) {
        if (rotation.need_sync) {
            ggml_vk_sync_buffers(ctx, subctx);
        }
        ggml_vk_itq_dispatch(ctx, subctx, ctx->device->pipeline_itq_rotate,
                             ggml_vk_tensor_subbuffer(ctx, &rotation.rotated));
        rotation.written = true;
    }
    rotation.need_sync = true;
}

// Quantize the activation of a product of integers; false if `in` is none that is to be rotated.
static bool ggml_vk_itq_quantize(ggml_backend_vk_context * ctx, vk_context & subctx, const vk_subbuffer & in,
                                 const vk_subbuffer & out) {
    ggml_vk_itq_rotation & rotation = ctx->itq_rotation;
    if (rotation.source == nullptr || in.buffer != ggml_vk_tensor_subbuffer(ctx, &rotation.rotated).buffer) {
        return false;
    }
    ggml_vk_itq_dispatch(ctx, subctx, ctx->device->pipeline_itq_quantize_q8_1, out);
    return true;
}

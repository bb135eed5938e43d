#pragma once

// Activations for the products of the trellis types: rotated, and quantized where the product is one of integers, once
// for all products that read them.
//
// A product asks for the rotated activation in place of its own (ggml_vk_itq_src1) and goes on with it as with any other
// tensor. When it knows that it multiplies floating point it has it written (ggml_vk_itq_rotate); a product of integers
// quantizes it instead, and ggml_vk_itq_quantize does that in one pass over the activation as it was.

#include "ggml-itq-types.h"
#include "ggml-vulkan-common.h"

// Pipelines of a type (X of ITQ_TYPES), where upstream makes those of its own: its variables are named.
#define ITQ_VK_MAT_VEC(NAME, name, b)                                                                                 \
    ggml_vk_create_pipeline(device, device->pipeline_dequant_mul_mat_vec_##b##_f32[w][GGML_TYPE_##NAME][i],           \
                            "mul_mat_vec_" #name "_" #b "_f32", arr_dmmv_##name##_##b##_f32_len[reduc16],             \
                            arr_dmmv_##name##_##b##_f32_data[reduc16], "main", mul_mat_vec_num_bindings,              \
                            sizeof(vk_mat_vec_push_constants), { rm_kq, 1, 1 }, { wg_size_subgroup16, rm_kq, i + 1 }, \
                            1, true, use_subgroups16, force_subgroup_size16);
#define ITQ_VK_MAT_VEC_F32(NAME, name, ...) ITQ_VK_MAT_VEC(NAME, name, f32)
#define ITQ_VK_MAT_VEC_F16(NAME, name, ...) ITQ_VK_MAT_VEC(NAME, name, f16)
#define ITQ_VK_MAT_VEC_ID(NAME, name, ...)                                                                           \
    ggml_vk_create_pipeline(device, device->pipeline_dequant_mul_mat_vec_id_f32[w][GGML_TYPE_##NAME],                \
                            "mul_mat_vec_id_" #name "_f32", arr_dmmv_id_##name##_f32_f32_len[reduc16],               \
                            arr_dmmv_id_##name##_f32_f32_data[reduc16], "main", mul_mat_vec_id_num_bindings,         \
                            sizeof(vk_mat_vec_id_push_constants), { rm_kq, 1, 1 }, { wg_size_subgroup16, rm_kq }, 1, \
                            true, use_subgroups16, force_subgroup_size16);
#define ITQ_VK_DEQUANT(NAME, name, ...)                                                                   \
    ggml_vk_create_pipeline(device, device->pipeline_dequant[GGML_TYPE_##NAME], "dequant_" #name,         \
                            dequant_##name##_len, dequant_##name##_data, "main", 2, 5 * sizeof(uint32_t), \
                            { 256, 1, 1 }, {}, 1);
#define ITQ_VK_GET_ROWS(NAME, name, ...)                                                            \
    ggml_vk_create_pipeline(device, device->pipeline_get_rows[GGML_TYPE_##NAME], "get_rows_" #name, \
                            get_rows_##name##_len, get_rows_##name##_data, "main", 3,               \
                            sizeof(vk_op_binary_push_constants), { 256, 1, 1 }, {}, 1);
#define ITQ_VK_GET_ROWS_F32(NAME, name, ...)                                                                   \
    ggml_vk_create_pipeline(device, device->pipeline_get_rows_f32[GGML_TYPE_##NAME], "get_rows_" #name "_f32", \
                            get_rows_##name##_f32_len, get_rows_##name##_f32_data, "main", 3,                  \
                            sizeof(vk_op_binary_push_constants), { 256, 1, 1 }, {}, 1);

// Those of activations: of blocks of 256 and of 64, of F32 and F16.
#define ITQ_VK_ACTIVATION(pipeline, name)                                                \
    ggml_vk_create_pipeline(device, pipeline, #name, name##_len, name##_data, "main", 2, \
                            sizeof(ggml_vk_itq_push_constants), { 1, 1, 1 }, {}, 1);
#define ITQ_VK_ACTIVATIONS(name)                                     \
    ITQ_VK_ACTIVATION(device->pipeline_##name[0][0], name##_256_f32) \
    ITQ_VK_ACTIVATION(device->pipeline_##name[0][1], name##_256_f16) \
    ITQ_VK_ACTIVATION(device->pipeline_##name[1][0], name##_64_f32)  \
    ITQ_VK_ACTIVATION(device->pipeline_##name[1][1], name##_64_f16)

// Products of integers, which upstream's backend has of no ternary type either.
#define ITQ_VK_INTEGER_TYPES(X) ITQ_TYPES(X) X(TQ1_0, tq1_0, ) X(TQ2_0, tq2_0, )
#define ITQ_VK_MAT_VEC_Q8_1(NAME, name, ...)                                                                   \
    ggml_vk_create_pipeline(device, device->pipeline_dequant_mul_mat_vec_q8_1_f32[w][GGML_TYPE_##NAME][i],     \
                            "mul_mat_vec_" #name "_q8_1_f32", arr_dmmv_##name##_q8_1_f32_len[reduc],           \
                            arr_dmmv_##name##_q8_1_f32_data[reduc], "main", mul_mat_vec_num_bindings,          \
                            sizeof(vk_mat_vec_push_constants), { rm_int_n(rm_stdq_int, i), 1, 1 },             \
                            { wg_size_subgroup_int, rm_int_n(rm_stdq_int, i), i + 1 }, 1, true, use_subgroups, \
                            subgroup_size_int);
#define ITQ_VK_MAT_VEC_ID_Q8_1(NAME, name, ...)                                                             \
    ggml_vk_create_pipeline(device, device->pipeline_dequant_mul_mat_vec_id_q8_1_f32[w][GGML_TYPE_##NAME],  \
                            "mul_mat_vec_id_" #name "_q8_1_f32", arr_dmmv_id_##name##_q8_1_f32_len[reduc],  \
                            arr_dmmv_id_##name##_q8_1_f32_data[reduc], "main", mul_mat_vec_id_num_bindings, \
                            sizeof(vk_mat_vec_id_push_constants), { rm_id(rm_stdq_int), 1, 1 },             \
                            { wg_size_subgroup_int, rm_id(rm_stdq_int) }, 1, true, use_subgroups, subgroup_size_int);
#define ITQ_VK_MMQ_OF(NAME, shader, by_expert, tiles, constants, ...)                                                  \
    sg_create_mmq({ GGML_TYPE_##NAME, GGML_TYPE_Q8_1, by_expert, false }, tiles, #shader, shader##_len, shader##_data, \
                  sizeof(constants), __VA_ARGS__);
#define ITQ_VK_MMQ(NAME, name, ...) \
    ITQ_VK_MMQ_OF(NAME, matmul_##name##_q8_1, false, tc_mmq_int_k, vk_mat_mat_push_constants, 3)
#define ITQ_VK_MMQ_FP32(NAME, name, ...) \
    ITQ_VK_MMQ_OF(NAME, matmul_##name##_q8_1_fp32, false, tc_mmq_int_k, vk_mat_mat_push_constants, 3)
#define ITQ_VK_MMQ_ID(NAME, name, ...)                                                               \
    ITQ_VK_MMQ_OF(NAME, matmul_id_##name##_q8_1, true, tc_mmqid_int_k, vk_mat_mat_id_push_constants, \
                  mul_mat_id_param_count)
#define ITQ_VK_MMQ_ID_SUBGROUP(NAME, name, ...)                                                               \
    ITQ_VK_MMQ_OF(NAME, matmul_id_subgroup_##name##_q8_1, true, tc_mmqid_int_k, vk_mat_mat_id_push_constants, \
                  mul_mat_id_param_count, mul_mat_subgroup_size_16)

// As itq_activations.glsl has them.
struct ggml_vk_itq_push_constants {
    uint32_t ne[4];
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
    const int64_t          block    = ggml_blck_size(src0->type);
    if (rotation.source != src1 || rotation.block != block) {
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
        rotation.block                   = block;
        rotation.written                 = false;
        // upstream's copies of it in another type are of what it was before
        ctx->prealloc_y_last_tensor_used = nullptr;
    }
    return &rotated;
}

// A pass over the activation that is to be rotated: pipelines[blocks of 64][F16].
static void ggml_vk_itq_dispatch(ggml_backend_vk_context * ctx, vk_context & subctx, vk_pipeline (&pipelines)[2][2],
                                 const vk_subbuffer & out) {
    const ggml_tensor *        source    = ctx->itq_rotation.source;
    const uint32_t             type_size = (uint32_t) ggml_type_size(source->type);
    ggml_vk_itq_push_constants pc        = {};
    for (int i = 0; i < GGML_MAX_DIMS; ++i) {
        pc.ne[i] = (uint32_t) source->ne[i];
        pc.nb[i] = (uint32_t) (source->nb[i] / type_size);
    }
    pc.offset = get_misalign_bytes(ctx, source) / type_size;

    vk_pipeline &  pipeline = pipelines[ctx->itq_rotation.block == 64][source->type == GGML_TYPE_F16];
    const auto &   limits   = ctx->device->properties.limits.maxComputeWorkGroupCount;
    const uint32_t rows     = (uint32_t) std::min<int64_t>(ggml_nrows(source), limits[1]);
    ggml_pipeline_request_descriptor_sets(ctx, pipeline, 1);
    ggml_vk_dispatch_pipeline(ctx, subctx, pipeline, { ggml_vk_tensor_subbuffer(ctx, source, true), out }, pc,
                              { std::min((pc.ne[0] + 255) / 256, limits[0]), rows, 1 });
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

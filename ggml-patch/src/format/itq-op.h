#pragma once

// For backends without kernels for the types of ggml-itq.h that support every type they do not know.

#include "ggml-itq-types.h"

#include <stdbool.h>

static inline bool ggml_itq_type(enum ggml_type type) {
    return ggml_is_itq(type) || type == GGML_TYPE_Q8_K_H || type == GGML_TYPE_Q8_N_H;
}

// Whether an operation reads or writes one of the types.
static inline bool ggml_itq_in_op(const struct ggml_tensor * op) {
    switch (op->op) {
        case GGML_OP_NONE:
        case GGML_OP_RESHAPE:
        case GGML_OP_VIEW:
        case GGML_OP_PERMUTE:
        case GGML_OP_TRANSPOSE:
            return false;  // nothing is computed
        default:
            break;
    }
    if (ggml_itq_type(op->type)) {
        return true;
    }
    for (int i = 0; i < GGML_MAX_SRC; ++i) {
        if (op->src[i] && ggml_itq_type(op->src[i]->type)) {
            return true;
        }
    }
    return false;
}

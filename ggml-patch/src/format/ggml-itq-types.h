#pragma once

// The registry of trellis types; ggml-itq.h has what they are made of. This header alone is for files that only ask which
// types there are.

#include "ggml.h"

#include <stdbool.h>

// Upstream's header without the patch: the kernels alone, for tests and for the model of processors.
#ifndef GGML_TYPE_COUNT
#    define GGML_TYPE_ITQ3_S ((enum ggml_type) 510)
#    define GGML_TYPE_ITQ2_S ((enum ggml_type) 512)
#    define GGML_TYPE_ITQ3_N ((enum ggml_type) 513)
#    define GGML_TYPE_ITQ2_N ((enum ggml_type) 514)
#    define GGML_TYPE_ITQ4_S ((enum ggml_type) 516)
#    define GGML_TYPE_ITQ4_N ((enum ggml_type) 517)
#endif

// The registry: X(NAME, name, bits of a symbol, levels, weights of a block, whether a block has a zero-point, number).
// What a type needs besides: block_name and NAME_LEVELS here, NAME_STARTS in itq-lanes.h, and its row of
// gguf_itq3s/codec/family.py.
// Blocks of 64, for rows that are no multiple of 256, have their activations in blocks of 64 too: Q8_N_H.
#define ITQ_TYPES_256(X)                  \
    X(ITQ3_S, itq3_s, 2, 32, 256, 1, 510) \
    X(ITQ2_S, itq2_s, 1, 16, 256, 0, 512) \
    X(ITQ4_S, itq4_s, 3, 64, 256, 0, 516)
#define ITQ_TYPES_64(X)                  \
    X(ITQ3_N, itq3_n, 2, 32, 64, 0, 513) \
    X(ITQ2_N, itq2_n, 1, 16, 64, 0, 514) \
    X(ITQ4_N, itq4_n, 3, 64, 64, 0, 517)
#define ITQ_TYPES(X) ITQ_TYPES_256(X) ITQ_TYPES_64(X)

// Labels of a switch over enum ggml_type, for upstream's lists of types.
#define ITQ_CASE_LABEL(NAME, ...) case GGML_TYPE_##NAME:
#define ITQ_CASES                 ITQ_TYPES(ITQ_CASE_LABEL)

static inline bool ggml_is_itq(enum ggml_type type) {
    switch ((int) type) {
        ITQ_CASES
        return true;
        default:
            return false;
    }
}

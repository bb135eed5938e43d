#pragma once

// The mixes of types that llama-quantize makes for the file types of the trellis types.

#include "../ggml/src/ggml-itq-types.h"
#include "llama.h"

// The file type of the same size whose mix one of ours follows: the same tensors get more bits.
static inline llama_ftype itq_followed_mix(llama_ftype ftype) {
    switch (ftype) {
        case LLAMA_FTYPE_MOSTLY_ITQ3_S:
            return LLAMA_FTYPE_MOSTLY_IQ3_S;
        case LLAMA_FTYPE_MOSTLY_ITQ2_S:
            return LLAMA_FTYPE_MOSTLY_IQ2_XXS;
        default:
            return ftype;
    }
}

// What takes the place of a type in that mix.
static inline ggml_type itq_in_mix(llama_ftype ftype, ggml_type type) {
    return ftype == LLAMA_FTYPE_MOSTLY_ITQ2_S && type == GGML_TYPE_Q2_K ? GGML_TYPE_ITQ3_S : type;
}

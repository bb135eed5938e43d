#pragma once

// The file types of the trellis types, and the mixes of types that llama-quantize makes for them.

#include "../ggml/src/ggml-itq-types.h"
#include "llama.h"

// X(NAME, bits of a weight, the file type whose mix it follows, what takes the place of Q2_K and of Q4_K in that mix, of values
// that query heads share, and of its own type in rows that are not whole blocks of it), as the rows of
// gguf_itq3s/codec/family.py.
#define ITQ_FTYPES(X)                                            \
    X(ITQ3_S, "3.125", IQ3_S, Q2_K, ITQ4_S, Q6_K, ITQ3_N)        \
    X(ITQ2_S, "2.0625", IQ2_XXS, ITQ3_S, ITQ4_S, ITQ4_S, ITQ2_N) \
    X(ITQ4_S, "4.0625", IQ3_S, Q2_K, Q5_K, Q6_K, ITQ4_N)         \
    X(ITQ3_N, "3.25", IQ3_S, Q2_K, ITQ4_N, Q6_K, IQ4_NL)         \
    X(ITQ2_N, "2.25", IQ2_XXS, ITQ3_N, ITQ4_N, ITQ4_N, IQ4_NL)   \
    X(ITQ4_N, "4.25", IQ3_S, Q2_K, Q5_K, Q6_K, IQ4_NL)

// Cases of upstream's switches: the name of a file type, the file type of a type, the type of a file type.
#define ITQ_FTYPE_NAME(NAME, bits, ...)                    \
    case LLAMA_FTYPE_MOSTLY_##NAME:                        \
        name = LLAMA_FTYPE_PREFIX #NAME " - " bits " bpw"; \
        break;
#define ITQ_FTYPE_OF_TYPE(NAME, ...)       \
    case GGML_TYPE_##NAME:                 \
        ftype = LLAMA_FTYPE_MOSTLY_##NAME; \
        break;
#define ITQ_TYPE_OF_FTYPE(NAME, ...) \
    case LLAMA_FTYPE_MOSTLY_##NAME:  \
        return GGML_TYPE_##NAME;

// The file type whose mix one of ours follows: the same tensors get more bits.
static inline llama_ftype itq_followed_mix(llama_ftype ftype) {
    switch (ftype) {
#define ITQ_FOLLOWED(NAME, bits, follows, ...) \
    case LLAMA_FTYPE_MOSTLY_##NAME:            \
        return LLAMA_FTYPE_MOSTLY_##follows;
        ITQ_FTYPES(ITQ_FOLLOWED)
#undef ITQ_FOLLOWED
        default:
            return ftype;
    }
}

// What takes the place of a type in that mix. Values that several query heads read cost most for a weight: a fourth of the
// divergence in a thirtieth of the weights of the layers.
static inline ggml_type itq_in_mix(llama_ftype ftype, ggml_type type, bool shared_values) {
    shared_values = shared_values && type != GGML_TYPE_Q8_0;
    switch (ftype) {
#define ITQ_IN_MIX(NAME, bits, follows, q2_k, q4_k, values, ...) \
    case LLAMA_FTYPE_MOSTLY_##NAME:                              \
        return shared_values            ? GGML_TYPE_##values     \
               : type == GGML_TYPE_Q2_K ? GGML_TYPE_##q2_k       \
               : type == GGML_TYPE_Q4_K ? GGML_TYPE_##q4_k       \
                                        : type;
        ITQ_FTYPES(ITQ_IN_MIX)
#undef ITQ_IN_MIX
        default:
            return type;
    }
}

// What takes the place of one of our types in rows of n weights that are not whole blocks of it.
static inline ggml_type itq_fallback(ggml_type type, int64_t n) {
    switch (type) {
#define ITQ_FALLBACK(NAME, bits, follows, q2_k, q4_k, values, fallback) \
    case GGML_TYPE_##NAME:                                              \
        return n % ggml_blck_size(GGML_TYPE_##fallback) == 0 ? GGML_TYPE_##fallback : GGML_TYPE_IQ4_NL;
        ITQ_FTYPES(ITQ_FALLBACK)
#undef ITQ_FALLBACK
        default:
            return GGML_TYPE_IQ4_NL;
    }
}

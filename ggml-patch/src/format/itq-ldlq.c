// The trellis types: the calibrated encoder, for the lowest processor of an architecture and for the one there is.

#include "itq-ldlq-search.h"

#define DEFINE_ENTRIES(NAME, name, ...)                                                                          \
    size_t quantize_##name##_ldlq_flat(const float * src, void * dst, int64_t nrows, int64_t n_per_row,          \
                                       const float * feedback, const float * weight, int full, int segment,      \
                                       int lookahead, int effort) {                                              \
        return ITQ_BEST_VARIANT(quantize_##name##_ldlq_flat)(src, dst, nrows, n_per_row, feedback, weight, full, \
                                                             segment, lookahead, effort);                        \
    }                                                                                                            \
                                                                                                                 \
    size_t quantize_##name##_ldlq(const float * GGML_RESTRICT src, void * GGML_RESTRICT dst, int64_t nrows,      \
                                  const struct itq_factor * factor, struct itq_search search) {                  \
        return quantize_##name##_ldlq_flat(src, dst, nrows, factor->columns, factor->feedback, factor->weight,   \
                                           factor->full, search.segment, search.lookahead, search.effort);       \
    }

ITQ_TYPES(DEFINE_ENTRIES)

int quantize_ldlq_variant(void) {
    enum { variant_generic, variant_avx2, variant_avx512 };

    return ITQ_BEST_VARIANT(variant);
}

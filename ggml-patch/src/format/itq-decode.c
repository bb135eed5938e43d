// The trellis types: the rotation and the decoders.

#include "ggml-itq.h"

#include <assert.h>

#ifdef __FAST_MATH__
#    error "The trellis types fix the order of their floating-point operations; build them without -ffast-math"
#endif

void itq_fwht(float * x, int n) {
    for (int h = 1; h < n; h *= 2) {
        for (int i = 0; i < n; i += 2 * h) {
            for (int j = i; j < i + h; ++j) {
                const float a = x[j];
                const float b = x[j + h];
                x[j]          = a + b;
                x[j + h]      = a - b;
            }
        }
    }
}

// Weights of a block from its levels and the bits of its scale and zero-point.
ITQ_INLINE void decode(int length, const int8_t * levels, uint16_t d, uint16_t zero_point, float * y) {
    const float scale = ggml_fp16_to_fp32(d) * (length == 256 ? 0x1p-9f : 0x1p-8f);  // d/32 over sqrt(length)
    const float z     = ggml_fp16_to_fp32(zero_point);
    for (int j = 0; j < length; ++j) {
        y[j] = (float) levels[j] - z;
    }
    itq_fwht(y, length);
    for (int j = 0; j < length; ++j) {
        y[j] *= scale;
    }
}

#define ZERO_POINT_1(block) itq_without_state(&(block)->z)
#define ZERO_POINT_0(block) 0

#define DEFINE_DECODER(NAME, name, bits, n_levels, length, has_z, number)                                  \
    const int8_t name##_levels[n_levels] = NAME##_LEVELS;                                                  \
                                                                                                           \
    void dequantize_row_##name(const block_##name * GGML_RESTRICT x, float * GGML_RESTRICT y, int64_t k) { \
        static_assert((length) == 256 || (length) == 64, "the scale knows the roots of these");            \
        assert(k % (length) == 0);                                                                         \
        for (int64_t i = 0; i < k / (length); ++i) {                                                       \
            int8_t levels[length];                                                                         \
            name##_decode_levels(&x[i], levels);                                                           \
            decode(length, levels, name##_scale(&x[i]), ZERO_POINT_##has_z(&x[i]), y + i * (length));      \
        }                                                                                                  \
    }

ITQ_TYPES(DEFINE_DECODER)

// ITQ3_S: the rotation and the decoder.

#include "ggml-itq3s.h"

#include <assert.h>

#ifdef __FAST_MATH__
#    error "ITQ3_S fixes the order of its floating-point operations; build it without -ffast-math"
#endif

const int8_t itq3_s_levels[16] = ITQ3_S_LEVELS;

void itq3_s_fwht(float * x) {
    for (int h = 1; h < QK_ITQ3_S; h *= 2) {
        for (int i = 0; i < QK_ITQ3_S; i += 2 * h) {
            for (int j = i; j < i + h; ++j) {
                const float a = x[j];
                const float b = x[j + h];
                x[j]          = a + b;
                x[j + h]      = a - b;
            }
        }
    }
}

void dequantize_row_itq3_s(const block_itq3_s * GGML_RESTRICT x, float * GGML_RESTRICT y, int64_t k) {
    assert(k % QK_ITQ3_S == 0);
    const int64_t nb = k / QK_ITQ3_S;

    for (int64_t i = 0; i < nb; ++i, y += QK_ITQ3_S) {
        const float scale = ggml_fp16_to_fp32(x[i].d) * 0x1p-9f;  // d/32, and 1/16 of the normalised transform
        const float z     = ggml_fp16_to_fp32(x[i].z);

        int8_t levels[QK_ITQ3_S];
        itq3_s_decode_levels(x[i].qs, x[i].sel, levels);
        for (int j = 0; j < QK_ITQ3_S; ++j) {
            y[j] = (float) levels[j] - z;
        }
        itq3_s_fwht(y);
        for (int j = 0; j < QK_ITQ3_S; ++j) {
            y[j] *= scale;
        }
    }
}

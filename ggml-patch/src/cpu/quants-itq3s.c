// CPU kernels of ITQ3_S, portable C.

#include "quants-itq3s.h"

#include "arch-fallback-itq3s.h"
#include "ggml-cpu-impl.h"
#include "quants.h"
#include "simd-mappings.h"

#include <assert.h>
#include <string.h>

void quantize_row_itq3_s(const float * GGML_RESTRICT x, void * GGML_RESTRICT y, int64_t k) {
    quantize_row_itq3_s_ref(x, y, k);
}

void quantize_row_q8_K_h_generic(const float * GGML_RESTRICT x, void * GGML_RESTRICT vy, int64_t k) {
    assert(k % QK_ITQ3_S == 0);
    const int64_t nb = k / QK_ITQ3_S;

    block_q8_K * GGML_RESTRICT y = vy;

    for (int64_t i = 0; i < nb; ++i) {
        float rotated[QK_ITQ3_S];
        memcpy(rotated, x + i * QK_ITQ3_S, sizeof(rotated));
        itq3_s_fwht(rotated);
        for (int j = 0; j < QK_ITQ3_S; ++j) {
            rotated[j] *= 0.0625f;
        }
        quantize_row_q8_K(rotated, &y[i], QK_ITQ3_S);
        if (y[i].d == 0) {
            memset(y[i].bsums, 0, sizeof(y[i].bsums));  // quantize_row_q8_K leaves them unset
        }
    }
}

void ggml_vec_dot_itq3_s_q8_K_h_generic(int n, float * GGML_RESTRICT s, size_t bs, const void * GGML_RESTRICT vx,
                                        size_t bx, const void * GGML_RESTRICT vy, size_t by, int nrc) {
    assert(n % QK_ITQ3_S == 0);
    assert(nrc == 1);
    GGML_UNUSED(bs);
    GGML_UNUSED(bx);
    GGML_UNUSED(by);
    GGML_UNUSED(nrc);

    const block_itq3_s * GGML_RESTRICT x  = vx;
    const block_q8_K * GGML_RESTRICT   y  = vy;
    const int                          nb = n / QK_ITQ3_S;

    float sumf = 0.0f;
    for (int i = 0; i < nb; ++i) {
        int8_t levels[QK_ITQ3_S];
        itq3_s_decode_levels(x[i].qs, x[i].sel, levels);

        int32_t sum = 0;
        for (int j = 0; j < QK_ITQ3_S; ++j) {
            sum += levels[j] * y[i].qs[j];
        }
        int32_t total = 0;  // of the activations, for the zero-point
        for (int j = 0; j < QK_ITQ3_S / 16; ++j) {
            total += y[i].bsums[j];
        }

        const float d = GGML_CPU_FP16_TO_FP32(x[i].d) * 0.03125f * y[i].d;
        const float z = GGML_CPU_FP16_TO_FP32(x[i].z);
        sumf += d * ((float) sum - z * (float) total);
    }
    *s = sumf;
}

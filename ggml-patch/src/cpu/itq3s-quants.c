// CPU kernels of ITQ3_S, portable C.

#include "itq3s-quants.h"

#include "ggml-cpu-impl.h"
#include "itq3s-arch-fallback.h"
#include "simd-mappings.h"

#include <assert.h>
#include <math.h>
#include <stdbool.h>
#include <string.h>

void quantize_row_itq3_s(const float * GGML_RESTRICT x, void * GGML_RESTRICT y, int64_t k) {
    quantize_row_itq3_s_ref(x, y, k);
}

// As quantize_row_q8_K_ref, with nothing left open: the rounding comes from a function, so that no compiler fuses it
// with the product before it; the sums of a block of zeros are set; a block that has no usable scale is defined: one with
// a NaN or an infinity has NaN for its scale, so that every product with it is NaN.
static void quantize_block_q8_K(const float * GGML_RESTRICT x, block_q8_K * GGML_RESTRICT y) {
    float amax   = 0.0f;
    float max    = 0.0f;
    bool  finite = true;
    for (int j = 0; j < QK_K; ++j) {
        const float ax = fabsf(x[j]);
        finite         = finite && ax < INFINITY;
        if (ax > amax) {
            amax = ax;
            max  = x[j];
        }
    }
    if (!finite || amax < ITQ3_S_ACT_MIN) {
        memset(y, 0, sizeof(*y));
        y->d = finite ? 0.0f : NAN;
        return;
    }
    const float iscale = -127.0f / max;
    for (int j = 0; j < QK_K / 16; ++j) {
        int sum = 0;
        for (int l = 16 * j; l < 16 * j + 16; ++l) {
            const int v = (int) lrintf(iscale * x[l]);
            y->qs[l]    = (int8_t) (v < 127 ? v : 127);
            sum += y->qs[l];
        }
        y->bsums[j] = (int16_t) sum;
    }
    y->d = 1 / iscale;
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
        quantize_block_q8_K(rotated, &y[i]);
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

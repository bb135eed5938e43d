// Panels of ITQ3_S, TQ1_0 and TQ2_0 and their products, x86. docs/kernels.md explains them.

#include "../../itq3s-gemm.h"

#include "ggml-cpu-impl.h"
#include "simd-mappings.h"

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512DQ__)
#    include "itq3s-gemm-avx512.h"
#    define NATIVE(name) name##_avx512
#elif defined(__AVX2__)
#    include "itq3s-gemm-avx2.h"
#    define NATIVE(name) name##_avx2
#else
#    define NATIVE(name) name##_generic
#endif

void itq3s_repack_itq3_s(const void * rows, size_t row_size, int n_rows, int64_t nb, void * panel) {
    NATIVE(itq3s_repack_itq3_s)(rows, row_size, n_rows, nb, panel);
}

void itq3s_repack_tq2_0(const void * rows, size_t row_size, int n_rows, int64_t nb, void * panel) {
    NATIVE(itq3s_repack_tq2_0)(rows, row_size, n_rows, nb, panel);
}

void itq3s_repack_tq1_0(const void * rows, size_t row_size, int n_rows, int64_t nb, void * panel) {
    NATIVE(itq3s_repack_tq1_0)(rows, row_size, n_rows, nb, panel);
}

void itq3s_gemm_itq3_s(int64_t nb, const void * panel, const struct itq3s_columns * y, int nc,
                       float out[][ITQ3S_PANEL_ROWS]) {
    NATIVE(itq3s_gemm_itq3_s)(nb, panel, y, nc, out);
}

void itq3s_gemm_tq2_0(int64_t nb, const void * panel, const struct itq3s_columns * y, int nc,
                      float out[][ITQ3S_PANEL_ROWS]) {
    NATIVE(itq3s_gemm_tq2_0)(nb, panel, y, nc, out);
}

void itq3s_gemm_tq1_0(int64_t nb, const void * panel, const struct itq3s_columns * y, int nc,
                      float out[][ITQ3S_PANEL_ROWS]) {
    NATIVE(itq3s_gemm_tq1_0)(nb, panel, y, nc, out);
}

void itq3s_reorder_q8_K_h(const int8_t * q, int8_t * y) {
    NATIVE(itq3s_reorder_q8_K_h)(q, y);
}

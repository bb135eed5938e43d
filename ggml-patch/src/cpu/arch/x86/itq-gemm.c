// Panels of the trellis types, TQ1_0 and TQ2_0 and their products, x86. docs/kernels.md explains them.

#include "../../itq-gemm.h"

#include "ggml-cpu-impl.h"
#include "simd-mappings.h"

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512DQ__)
#    include "itq-gemm-avx512.h"
#    define NATIVE(name) name##_avx512
#elif defined(__AVX2__)
#    include "itq-gemm-avx2.h"
#    define NATIVE(name) name##_avx2
#else
#    define NATIVE(name) name##_generic
#endif

#define KERNELS(name)                                                                                  \
    void itq_repack_##name(const void * rows, size_t row_size, int n_rows, int64_t nb, void * panel) { \
        NATIVE(itq_repack_##name)(rows, row_size, n_rows, nb, panel);                                  \
    }                                                                                                  \
    void itq_gemm_##name(int64_t nb, const void * panel, const struct itq_columns * y, int nc,         \
                         float out[][ITQ_PANEL_ROWS]) {                                                \
        NATIVE(itq_gemm_##name)(nb, panel, y, nc, out);                                                \
    }
#define KERNELS_OF_TYPE(NAME, name, ...) KERNELS(name)
ITQ_TYPES(KERNELS_OF_TYPE)
KERNELS(tq2_0)
KERNELS(tq1_0)

void itq_reorder_q8_K_h(const int8_t * q, int8_t * y) {
    NATIVE(itq_reorder_q8_K_h)(q, y);
}

void itq_reorder_q8_n_h(const int8_t * q, int8_t * y) {
    NATIVE(itq_reorder_q8_n_h)(q, y);
}

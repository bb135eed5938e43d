// Panels of ITQ3_S, TQ1_0 and TQ2_0 and their products, AVX2 and AVX-512.

#include "../../itq3s-gemm.h"

#include "ggml-cpu-impl.h"
#include "simd-mappings.h"

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512DQ__)
#    define ITQ3S_GEMM_AVX512
#    include "itq3s-gemm-avx512.h"
#elif defined(__AVX2__)
#    include "itq3s-gemm-avx2.h"
#endif

#if defined(ITQ3S_GEMM_AVX512)

// A function for every number of columns, so that the sums are registers.
#    define DIRECT_CASE(type, n)                        \
        case n:                                         \
            gemm_##type##_direct(nb, panel, y, n, out); \
            return;
#    define PRODUCT(type)                                                                                       \
        void itq3s_gemm_##type(int64_t nb, const void * panel, const struct itq3s_columns * y, int nc,          \
                               float out[][ITQ3S_PANEL_ROWS]) {                                                 \
            switch (nc) {                                                                                       \
                FEW_##type(1) FEW_##type(2) DIRECT_CASE(type, 3) DIRECT_CASE(type, 4) DIRECT_CASE(type, 5)      \
                    DIRECT_CASE(type, 6) DIRECT_CASE(type, 7) DIRECT_CASE(type, 8) DIRECT_CASE(type, 9)         \
                        DIRECT_CASE(type, 10) DIRECT_CASE(type, 11) DIRECT_CASE(type, 12) DIRECT_CASE(type, 13) \
                            DIRECT_CASE(type, 14) DIRECT_CASE(type, 15) DIRECT_CASE(type, 16) default           \
                    : gemm_##type##_many(nb, panel, y, nc, out);                                                \
            }                                                                                                   \
        }
#    define FEW_itq3_s(n) DIRECT_CASE(itq3_s, n)
#    if WHOLE_BYTES
#        define FEW_CASE(type, n)                        \
            case n:                                      \
                gemm_##type##_few(nb, panel, y, n, out); \
                return;
#        define FEW_tq2_0(n) FEW_CASE(tq2_0, n)
#        define FEW_tq1_0(n) FEW_CASE(tq1_0, n)
#    else
#        define FEW_tq2_0(n) DIRECT_CASE(tq2_0, n)
#        define FEW_tq1_0(n) DIRECT_CASE(tq1_0, n)
#    endif
PRODUCT(itq3_s)
PRODUCT(tq2_0)
PRODUCT(tq1_0)

void itq3s_reorder_q8_K_h(const int8_t * q, int8_t * y) {
    reorder_q8_K_h(q, y);
}
#    define REPACK(type)                                                                                     \
        void itq3s_repack_##type(const void * rows, size_t row_size, int n_rows, int64_t nb, void * panel) { \
            repack_##type(rows, row_size, n_rows, nb, panel);                                                \
        }
REPACK(itq3_s)
REPACK(tq2_0)
REPACK(tq1_0)

#else

#    if defined(__AVX2__)
#        define NATIVE(name) name##_avx2
#    else
#        define NATIVE(name) name##_generic
#    endif
#    define KERNELS(type)                                                                                    \
        void itq3s_gemm_##type(int64_t nb, const void * panel, const struct itq3s_columns * y, int nc,       \
                               float out[][ITQ3S_PANEL_ROWS]) {                                              \
            NATIVE(itq3s_gemm_##type)(nb, panel, y, nc, out);                                                \
        }                                                                                                    \
        void itq3s_repack_##type(const void * rows, size_t row_size, int n_rows, int64_t nb, void * panel) { \
            NATIVE(itq3s_repack_##type)(rows, row_size, n_rows, nb, panel);                                  \
        }

KERNELS(itq3_s)
KERNELS(tq2_0)
KERNELS(tq1_0)

void itq3s_reorder_q8_K_h(const int8_t * q, int8_t * y) {
    NATIVE(itq3s_reorder_q8_K_h)(q, y);
}

#endif

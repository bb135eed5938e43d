// Panels of ITQ3_S, TQ1_0 and TQ2_0 and their products, AVX2 and AVX-512.

#include "../../itq3s-gemm.h"

#include "ggml-cpu-impl.h"

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512DQ__)
#    define ITQ3S_GEMM_AVX512
#    include "itq3s-gemm-avx512.h"
#endif

#if defined(ITQ3S_GEMM_AVX512)

// A function for every number of columns, so that the accumulators are registers.
#    define CASE(type, n)                      \
        case n:                                \
            gemm_##type(nb, panel, y, n, out); \
            break;
#    define GEMM(type)                                                                                            \
        void itq3s_gemm_##type(int64_t nb, const void * panel, const struct itq3s_columns * y, int nc,            \
                               float out[][ITQ3S_PANEL_ROWS]) {                                                   \
            switch (nc) {                                                                                         \
                CASE(type, 1)                                                                                     \
                CASE(type, 2) CASE(type, 3) CASE(type, 4) CASE(type, 5) CASE(type, 6) CASE(type, 7) CASE(type, 8) \
                    CASE(type, 9) CASE(type, 10) CASE(type, 11) CASE(type, 12) CASE(type, 13) CASE(type, 14)      \
                        CASE(type, 15) CASE(type, 16)                                                             \
            }                                                                                                     \
        }
GEMM(itq3_s)
GEMM(tq2_0)
GEMM(tq1_0)
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
#endif

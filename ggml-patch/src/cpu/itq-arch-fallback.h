#pragma once

// Rename `_generic` functions that have no native implementation on the target, as ggml-cpu's arch-fallback.h does. An
// architecture that gets one in itq3s/arch/<arch>/ gets a branch here that leaves its functions out.

#if !defined(GGML_CPU_GENERIC) &&                                                                               \
    (defined(__x86_64__) || defined(__i386__) || defined(_M_IX86) || defined(_M_X64) || defined(__aarch64__) || \
     defined(__arm__) || defined(_M_ARM) || defined(_M_ARM64) || defined(_M_ARM64EC))
// arch/x86 and arch/arm have them all
#else
#    define quantize_row_q8_K_h_generic quantize_row_q8_K_h
#    define quantize_row_q8_n_h_generic quantize_row_q8_n_h
#    define itq_repack_itq3_s_generic   itq_repack_itq3_s
#    define itq_repack_itq2_s_generic   itq_repack_itq2_s
#    define itq_repack_itq4_s_generic   itq_repack_itq4_s
#    define itq_repack_itq3_n_generic   itq_repack_itq3_n
#    define itq_repack_itq2_n_generic   itq_repack_itq2_n
#    define itq_repack_itq4_n_generic   itq_repack_itq4_n
#    define itq_repack_tq2_0_generic    itq_repack_tq2_0
#    define itq_repack_tq1_0_generic    itq_repack_tq1_0
#    define itq_gemm_itq3_s_generic     itq_gemm_itq3_s
#    define itq_gemm_itq2_s_generic     itq_gemm_itq2_s
#    define itq_gemm_itq4_s_generic     itq_gemm_itq4_s
#    define itq_gemm_itq3_n_generic     itq_gemm_itq3_n
#    define itq_gemm_itq2_n_generic     itq_gemm_itq2_n
#    define itq_gemm_itq4_n_generic     itq_gemm_itq4_n
#    define itq_gemm_tq2_0_generic      itq_gemm_tq2_0
#    define itq_gemm_tq1_0_generic      itq_gemm_tq1_0
#    define itq_reorder_q8_K_h_generic  itq_reorder_q8_K_h
#    define itq_reorder_q8_n_h_generic  itq_reorder_q8_n_h
#endif

#pragma once

// Rename `_generic` functions that have no native implementation on the target, as ggml-cpu's arch-fallback.h does. An
// architecture that gets one in itq3s/arch/<arch>/ gets a branch here that leaves its functions out.

#define quantize_row_q8_K_h_generic        quantize_row_q8_K_h
#define ggml_vec_dot_itq3_s_q8_K_h_generic ggml_vec_dot_itq3_s_q8_K_h

#pragma once

// The matrix products of ITQ3_S, TQ1_0 and TQ2_0, mul_mat and mul_mat_id at any number of columns, on panels of 16 rows
// (itq-gemm.h). Weights in buffers of our type are panels already; those in any other memory that the processor can
// read have the layout of the file, and each thread repacks the rows that it multiplies.

#include "ggml-backend.h"

// "CPU_ITQ3S": holds panels. Its context is the ggml::cpu::extra_buffer_type that computes the products of both layouts.
ggml_backend_buffer_type_t ggml_backend_cpu_itq_buffer_type(void);

#include "../mmq.cuh"

DECL_MMQ_CASE(GGML_TYPE_TQ1_0);

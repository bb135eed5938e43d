#include "../mmq.cuh"

DECL_MMQ_CASE(GGML_TYPE_TQ2_0);

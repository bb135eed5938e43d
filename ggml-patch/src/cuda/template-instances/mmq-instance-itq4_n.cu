#include "../mmq.cuh"

DECL_MMQ_CASE(GGML_TYPE_ITQ4_N);

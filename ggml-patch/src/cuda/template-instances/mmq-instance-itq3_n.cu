#include "../mmq.cuh"

DECL_MMQ_CASE(GGML_TYPE_ITQ3_N);

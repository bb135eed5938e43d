// Upstream is compiled without virtual memory (GGML_CUDA_NO_VMM), for which it takes the driver's interface.

#pragma once

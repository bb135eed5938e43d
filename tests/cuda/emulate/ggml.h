// Stands in for upstream's ggml.h where ggml-itq3s.h includes it; common.cuh has what that needs.

#pragma once

#pragma once

// The activation that the products of the trellis types read (itq-vulkan.h): part of a backend's context.

#include "ggml-backend.h"
#include "ggml.h"

struct ggml_vk_itq_rotation {
    // What `rotated` is the rotation of, until the graph ends or a product reads another.
    const ggml_tensor *   source = nullptr;
    // Weights of the blocks that it is the rotation for.
    int64_t               block  = 0;
    // Describes the rotated activation to upstream's code: F32, contiguous, at the start of `buffer`.
    ggml_tensor           rotated{};
    ggml_backend_buffer_t buffer    = nullptr;
    // Whether it has been written; products of integers do without.
    bool                  written   = false;
    // Whether products that read it may be in flight.
    bool                  need_sync = false;
};

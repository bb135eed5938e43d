// Memory of the emulated device and its types, for the C interfaces of the kernels.

#pragma once

#include "common.cuh"
#include "ggml-itq-types.h"

// Their places are their numbers in the C interfaces.
#define EMULATE_TYPE(NAME, ...) GGML_TYPE_##NAME,
static const ggml_type emulate_types[] = { ITQ_TYPES(EMULATE_TYPE) GGML_TYPE_TQ1_0, GGML_TYPE_TQ2_0 };

static inline bool emulate_is_ours(const ggml_type type) {
    return std::find(std::begin(emulate_types), std::end(emulate_types), type) != std::end(emulate_types);
}

// Memory that is full of garbage, with a page behind it that cannot be accessed.
struct guarded_pool : ggml_cuda_pool {
    static constexpr size_t page = 4096, alignment = 256;

    void * alloc(const size_t size, size_t * actual_size) override {
        const size_t bytes = (size + alignment - 1) / alignment * alignment;
        const size_t pages = (bytes + page - 1) / page * page;
        uint8_t *    p =
            (uint8_t *) mmap(nullptr, pages + page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (p == MAP_FAILED || mprotect(p + pages, page, PROT_NONE) != 0) {
            emulate::fail("no memory");
        }
        memset(p, emulate::garbage, pages);
        *actual_size = bytes;
        return p + pages - bytes;
    }
    void free(void * ptr, const size_t size) override {
        const size_t pages = (size + page - 1) / page * page;
        munmap((uint8_t *) ptr + size - pages, pages + page);
    }
};

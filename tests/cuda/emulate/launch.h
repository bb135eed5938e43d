// Runs a CUDA kernel on the CPU with its launch structure: every thread of a block is a fiber, blocks run one after
// another. Fibers stop at barriers and at warp operations until all partners are there, so a kernel that lets a lane
// miss a shuffle or a barrier ends the test instead of passing by luck.

#pragma once

#include <ucontext.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <vector>

struct uint3 {
    unsigned int x, y, z;
};

struct dim3 {
    unsigned int x, y, z;
    constexpr dim3(const unsigned int x = 1, const unsigned int y = 1, const unsigned int z = 1) : x(x), y(y), z(z) {}
};

namespace emulate {

constexpr int warp_size = 32;

struct fiber {
    ucontext_t        context;
    std::vector<char> stack;
    uint3             thread;
    int               linear  = 0;
    bool              done    = false;
    const int *       waiting = nullptr;  // generation counter it waits for, and the value that is not enough
    int               passed  = 0;
};

struct warp {
    int      arrived    = 0;
    int      generation = 0;
    uint64_t slot[warp_size];
};

struct block {
    std::vector<std::unique_ptr<fiber>> fibers;
    std::vector<warp>                   warps;
    int                                 live       = 0;
    int                                 arrived    = 0;
    int                                 generation = 0;
    ucontext_t                          scheduler;
    std::function<void()>               body;
};

inline uint3   thread_index, block_index;
inline dim3    block_dim, grid_dim;
inline block * current_block = nullptr;
inline fiber * current       = nullptr;

inline void fail(const char * what) {
    fprintf(stderr, "CUDA emulation: %s (block %u,%u,%u thread %u,%u,%u)\n", what, block_index.x, block_index.y,
            block_index.z, thread_index.x, thread_index.y, thread_index.z);
    abort();
}

inline void wait_for(const int & generation) {
    current->waiting = &generation;
    current->passed  = generation;
    swapcontext(&current->context, &current_block->scheduler);
}

inline warp & this_warp() {
    return current_block->warps[current->linear / warp_size];
}
inline int this_lane() {
    return current->linear % warp_size;
}

// All 32 lanes of the warp must come; there are no partial masks in our kernels.
inline void warp_barrier(const uint32_t mask) {
    if (mask != 0xFFFFFFFF) {
        fail("a warp operation without all lanes");
    }
    warp & w = this_warp();
    if (++w.arrived == warp_size) {
        w.arrived = 0;
        ++w.generation;
    } else {
        wait_for(w.generation);
    }
}

inline void block_barrier() {
    block & b = *current_block;
    if (++b.arrived == b.live) {
        b.arrived = 0;
        ++b.generation;
    } else {
        wait_for(b.generation);
    }
}

template <typename T> T exchange(const T value, const int source_lane) {
    static_assert(sizeof(T) <= sizeof(uint64_t), "too large for a lane's slot");
    warp & w = this_warp();
    memcpy(&w.slot[this_lane()], &value, sizeof(T));
    warp_barrier(0xFFFFFFFF);
    T result;
    memcpy(&result, &w.slot[source_lane], sizeof(T));
    warp_barrier(0xFFFFFFFF);  // the slots are free again
    return result;
}

inline void fiber_main() {
    current_block->body();
    current->done = true;
    --current_block->live;
    if (current_block->arrived > 0 && current_block->arrived == current_block->live) {
        current_block->arrived = 0;
        ++current_block->generation;
    }
    swapcontext(&current->context, &current_block->scheduler);
}

inline void prepare(fiber & f) {
    f.stack.resize(128 * 1024);
    getcontext(&f.context);
    f.context.uc_stack.ss_sp   = f.stack.data();
    f.context.uc_stack.ss_size = f.stack.size();
    f.context.uc_link          = nullptr;
    makecontext(&f.context, fiber_main, 0);
}

// kernel(args...) for every thread of a grid.
template <typename kernel_t, typename... args_t>
void launch(const dim3 grid, const dim3 dims, kernel_t kernel, args_t... args) {
    const int nthreads = dims.x * dims.y * dims.z;
    if (nthreads % warp_size != 0) {
        fail("a block that is no multiple of a warp");
    }
    grid_dim  = grid;
    block_dim = dims;
    for (unsigned int bz = 0; bz < grid.z; ++bz) {
        for (unsigned int by = 0; by < grid.y; ++by) {
            for (unsigned int bx = 0; bx < grid.x; ++bx) {
                block b;
                b.body = [&] { kernel(args...); };
                b.live = nthreads;
                b.warps.resize(nthreads / warp_size);
                block_index   = { bx, by, bz };
                current_block = &b;
                for (int i = 0; i < nthreads; ++i) {
                    auto f    = std::make_unique<fiber>();
                    f->linear = i;
                    f->thread = { i % dims.x, i / dims.x % dims.y, i / dims.x / dims.y };
                    prepare(*f);
                    b.fibers.push_back(std::move(f));
                }
                while (b.live > 0) {
                    bool progress = false;
                    for (auto & f : b.fibers) {
                        if (f->done || (f->waiting && *f->waiting == f->passed)) {
                            continue;
                        }
                        progress     = true;
                        f->waiting   = nullptr;
                        current      = f.get();
                        thread_index = f->thread;
                        swapcontext(&b.scheduler, &f->context);
                    }
                    if (!progress) {
                        fail("threads wait for others that never come");
                    }
                }
            }
        }
    }
}

}  // namespace emulate

#define threadIdx emulate::thread_index
#define blockIdx  emulate::block_index
#define blockDim  emulate::block_dim
#define gridDim   emulate::grid_dim

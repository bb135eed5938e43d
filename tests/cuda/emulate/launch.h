// Runs a CUDA kernel on the CPU with its launch structure: every thread of a block is a fiber, blocks run one after
// another. Fibers stop at barriers and at warp operations until all partners are there, so a kernel that lets a lane
// miss a shuffle or a barrier ends the test instead of passing by luck. In what order the others run between, and the
// blocks, is chosen by a seed. Asynchronous copies arrive when their thread waits for them and not before; shared memory is exactly as
// large as the launch asks for, and full of garbage when a block begins.

#pragma once

#include <signal.h>
#include <sys/mman.h>
#include <ucontext.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <numeric>
#include <random>
#include <vector>

struct uint3 {
    unsigned int x, y, z;
};

struct dim3 {
    unsigned int x, y, z;
    constexpr dim3(const unsigned int x = 1, const unsigned int y = 1, const unsigned int z = 1) : x(x), y(y), z(z) {}
};

inline uint3 threadIdx, blockIdx;
inline dim3  blockDim, gridDim;

namespace emulate {

constexpr int     warp_size         = 32;
constexpr uint8_t garbage           = 0xFF;  // NaN as a float, -1 as an integer
constexpr size_t  max_shared_static = 48 * 1024;

// The device, as the tests set it.
struct device_settings {
    int      cc       = 900;
    int      nsm      = 2;
    size_t   smpbo    = 227 * 1024;
    uint64_t seed     = 0;      // 0: threads run in the order of their numbers
    int64_t  max_grid = 65535;  // in y and z
};
inline device_settings device;
inline int             devices_seen = 1;  // every setting is another device, of which nothing is known

struct copy {
    void *       dst;
    const void * src;
    int          bytes;
};

// Where a fiber, or the scheduler, has stopped.
#ifdef __x86_64__
struct execution {
    void * stack_pointer;
};
// swapcontext without its two calls of the system: they would be half of the time that the tests take.
__attribute__((naked, noinline)) inline void switch_stack(void ** /*from: rdi*/, void * /*to: rsi*/) {
    asm("pushq %rbp; pushq %rbx; pushq %r12; pushq %r13; pushq %r14; pushq %r15; movq %rsp, (%rdi);"
        "movq %rsi, %rsp; popq %r15; popq %r14; popq %r13; popq %r12; popq %rbx; popq %rbp; ret");
}
inline void go_on(execution & from, const execution & to) {
    switch_stack(&from.stack_pointer, to.stack_pointer);
}
// Lets an execution begin with a function that does not return.
inline void begin(execution & e, char * stack, const size_t bytes, void (*function)()) {
    void ** top = (void **) ((uintptr_t) (stack + bytes) / 16 * 16);
    std::fill(top - 8, top, nullptr);  // six registers, the function, and where that would return to
    top[-2]         = (void *) function;
    e.stack_pointer = top - 8;
}
#else
struct execution {
    ucontext_t context;
};
inline void go_on(execution & from, const execution & to) {
    swapcontext(&from.context, &to.context);
}
inline void begin(execution & e, char * stack, const size_t bytes, void (*function)()) {
    getcontext(&e.context);
    e.context.uc_stack.ss_sp   = stack;
    e.context.uc_stack.ss_size = bytes;
    e.context.uc_link          = nullptr;
    makecontext(&e.context, function, 0);
}
#endif

struct fiber {
    execution                     stopped;
    std::unique_ptr<char[]>       stack;
    uint3                         thread;
    int                           linear   = 0;
    uint64_t                      priority = 0;
    bool                          done     = false;
    std::vector<copy>             open;    // copies since the last commit
    std::deque<std::vector<copy>> groups;  // on their way, oldest first
};

enum class warp_operation { none, barrier, exchange, load_matrices, matrix_product };

struct warp {
    int                  arrived   = 0;
    warp_operation       operation = warp_operation::none;
    std::vector<fiber *> waiting;
    void *               operands[warp_size];
};

struct block {
    std::vector<std::unique_ptr<fiber>> fibers;
    std::vector<warp>                   warps;
    std::vector<fiber *>                ready;
    std::vector<fiber *>                waiting;  // at the barrier of the block
    int                                 live    = 0;
    int                                 arrived = 0;
    execution                           scheduler;
    std::function<void()>               body;
};

inline block * current_block = nullptr;
inline fiber * current       = nullptr;

[[noreturn]] inline void fail(const char * what) {
    fprintf(stderr, "CUDA emulation: %s (block %u,%u,%u thread %u,%u,%u)\n", what, blockIdx.x, blockIdx.y, blockIdx.z,
            threadIdx.x, threadIdx.y, threadIdx.z);
    fflush(stderr);
    abort();
}

// ---------------------------------------------------------------------------------------------------------------------
// Shared memory: the bytes that the launch asks for, up to a page that cannot be accessed; before them bytes that must
// not change.

struct shared_memory {
    static constexpr size_t page = 4096;
    static constexpr size_t room = 1024 * 1024;

    uint8_t * arena = nullptr;
    uint8_t * begin = nullptr;
    size_t    bytes = 0;

    uint8_t * end() const { return arena + room; }

    void resize(const size_t n) {
        if (!arena) {
            arena = (uint8_t *) mmap(nullptr, room + page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
            if (arena == MAP_FAILED || mprotect(arena + room, page, PROT_NONE) != 0) {
                fail("no memory");
            }
        }
        bytes = n;
        begin = end() - (n + 15) / 16 * 16;
        memset(begin - page, garbage, page);
        memset(begin, garbage, end() - begin);
    }
    void check() const {
        const auto is_garbage = [](const uint8_t b) { return b == garbage; };
        if (arena &&
            (!std::all_of(begin - page, begin, is_garbage) || !std::all_of(begin + bytes, end(), is_garbage))) {
            fail("written outside of the shared memory");
        }
    }
    // Addresses of 32 bits, as the PTX instructions have them.
    uint32_t offset(const void * p) const { return (uint32_t) ((const uint8_t *) p - arena); }
    void *   at(const uint32_t offset) const { return arena + offset; }

    bool holds(const void * p, const size_t n) const {
        return (uint8_t *) p >= begin && (uint8_t *) p + n <= begin + bytes;
    }
};
inline shared_memory shared;

// What "extern __shared__" names.
template <typename T> T * dynamic_shared() {
    if (shared.bytes == 0) {
        fail("shared memory that the launch does not ask for");
    }
    return (T *) shared.begin;
}

// Shared memory with a name is one for all threads of the block that runs, and full of garbage when a block begins.
inline uint64_t            blocks_begun = 0;
template <typename T> void begin_shared(T & variable) {
    static std::map<const void *, uint64_t> begun;
    uint64_t &                              of = begun[&variable];
    if (of != blocks_begun) {
        of = blocks_begun;
        memset((void *) &variable, garbage, sizeof(variable));
    }
}

inline void on_fault(int, siginfo_t * info, void *) {
    uint8_t * at = (uint8_t *) info->si_addr;
    fail(shared.arena && at >= shared.end() && at < shared.end() + shared_memory::page
             ? "access past the shared memory"
             : "access to an address that is not there");
}

// ---------------------------------------------------------------------------------------------------------------------
// Barriers and warp operations

inline void wake(std::vector<fiber *> & waiting) {
    current_block->ready.insert(current_block->ready.end(), waiting.begin(), waiting.end());
    waiting.clear();
}
inline void wait_in(std::vector<fiber *> & waiting) {
    waiting.push_back(current);
    go_on(current->stopped, current_block->scheduler);
}

inline warp & this_warp() {
    return current_block->warps[current->linear / warp_size];
}
inline int this_lane() {
    return current->linear % warp_size;
}

// All 32 lanes of the warp must come to the same operation; there are no partial masks in our kernels. The last one does
// the work of all.
template <typename F> void meet(const warp_operation operation, F work) {
    warp & w = this_warp();
    if (w.arrived > 0 && w.operation != operation) {
        fail("lanes of a warp are at different operations");
    }
    w.operation = operation;
    if (++w.arrived == warp_size) {
        w.arrived = 0;
        work(w);
        wake(w.waiting);
    } else {
        wait_in(w.waiting);
    }
}

inline void warp_barrier(const uint32_t mask) {
    if (mask != 0xFFFFFFFF) {
        fail("a warp operation without all lanes");
    }
    meet(warp_operation::barrier, [](warp &) {});
}

inline void block_barrier() {
    block & b = *current_block;
    if (++b.arrived == b.live) {
        b.arrived = 0;
        wake(b.waiting);
    } else {
        wait_in(b.waiting);
    }
}

template <typename T> T exchange(const T value, const int source_lane) {
    static_assert(sizeof(T) <= sizeof(uint64_t), "too large for a lane's slot");
    struct {
        T   value;
        int source;
        T   result;
    } mine{ value, source_lane, value };
    using operand                     = decltype(mine);
    this_warp().operands[this_lane()] = &mine;
    meet(warp_operation::exchange, [](warp & w) {
        for (void * lane : w.operands) {
            operand & own = *(operand *) lane;
            own.result    = ((operand *) w.operands[own.source])->value;
        }
    });
    return mine.result;
}

// ---------------------------------------------------------------------------------------------------------------------
// Matrix products of a warp in the layout of the PTX instructions: A has I rows (8 or 16) of W words (4 or 8), B 8
// columns of W words, C and D I rows and 8 columns of numbers. A word is four int8 or two F16.

// Word of row i, words counted along the product; of column j; number of row i and column j: lane and index.
template <int I> inline void place_a(const int i, const int word, int & lane, int & l) {
    lane = i % 8 * 4 + word % 4;
    l    = i / 8 + word / 4 * (I / 8);
}
inline void place_b(const int word, const int j, int & lane, int & l) {
    lane = j * 4 + word % 4;
    l    = word / 4;
}
inline void place_c(const int i, const int j, int & lane, int & l) {
    lane = i % 8 * 4 + j / 2;
    l    = i / 8 * 2 + j % 2;
}

// multiply(a, b, sum): the sum with the products of the words a and b added. d may be c.
template <typename T, int I, int W, typename F>
void matrix_product(T * d, const uint32_t * a, const uint32_t * b, const T * c, F multiply) {
    struct operand {
        T *              d;
        const uint32_t * a;
        const uint32_t * b;
        const T *        c;
    } mine{ d, a, b, c };
    this_warp().operands[this_lane()] = &mine;
    meet(warp_operation::matrix_product, [&](warp & w) {
        uint32_t wa[I][W], wb[8][W];
        int      lane, l;
        for (int word = 0; word < W; ++word) {
            for (int i = 0; i < I; ++i) {
                place_a<I>(i, word, lane, l);
                wa[i][word] = ((operand *) w.operands[lane])->a[l];
            }
            for (int j = 0; j < 8; ++j) {
                place_b(word, j, lane, l);
                wb[j][word] = ((operand *) w.operands[lane])->b[l];
            }
        }
        for (int i = 0; i < I; ++i) {
            for (int j = 0; j < 8; ++j) {
                place_c(i, j, lane, l);
                const operand & own = *(operand *) w.operands[lane];
                T               sum = own.c[l];
                for (int word = 0; word < W; ++word) {
                    sum = multiply(wa[i][word], wb[j][word], sum);
                }
                own.d[l] = sum;
            }
        }
    });
}

// Sums wrap around, also those of garbage that no result comes from.
struct multiply_s8 {
    int operator()(const uint32_t x, const uint32_t y, int sum) const {
        for (int n = 0; n < 32; n += 8) {
            sum = (int) ((uint32_t) sum + (uint32_t) ((int) (int8_t) (x >> n) * (int) (int8_t) (y >> n)));
        }
        return sum;
    }
};

// ---------------------------------------------------------------------------------------------------------------------
// Asynchronous copies

// 2 bytes: a word of which the rest becomes 0.
inline void copy_async(void * dst, const void * src, const int bytes) {
    const int width = bytes == 2 ? 4 : bytes;
    if (width != 4 && width != 8 && width != 16) {
        fail("an asynchronous copy of another size than 4, 8 or 16 bytes");
    }
    if ((uintptr_t) dst % width != 0 || (uintptr_t) src % width != 0) {
        fail("an asynchronous copy that is not aligned");
    }
    if (!shared.holds(dst, width)) {
        fail("an asynchronous copy to somewhere else than shared memory");
    }
    memset(dst, garbage, width);
    current->open.push_back({ dst, src, bytes });
}
inline void copy_commit() {
    current->groups.push_back(std::move(current->open));
    current->open.clear();
}
inline void copy_wait(const int pending) {
    while ((int) current->groups.size() > pending) {
        for (const copy & c : current->groups.front()) {
            if (c.bytes == 2) {
                memset(c.dst, 0, 4);
            }
            memcpy(c.dst, c.src, c.bytes);
        }
        current->groups.pop_front();
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// Launches

inline void fiber_main() {
    for (;;) {  // a fiber serves one thread after the other
        current_block->body();
        block & b = *current_block;
        if (!current->open.empty() || std::any_of(current->groups.begin(), current->groups.end(),
                                                  [](const auto & group) { return !group.empty(); })) {
            fail("a thread ends with copies on their way");
        }
        if (this_warp().arrived > 0) {
            fail("a thread ends that its warp waits for");
        }
        current->done = true;
        --b.live;
        if (b.arrived > 0 && b.arrived == b.live) {
            b.arrived = 0;
            wake(b.waiting);
        }
        go_on(current->stopped, b.scheduler);
    }
}

inline void prepare(fiber & f) {
    constexpr size_t bytes = 128 * 1024;
    f.stack                = std::unique_ptr<char[]>(new char[bytes]);
    begin(f.stopped, f.stack.get(), bytes, fiber_main);
}

// Which of the threads that can go on does. Odd seeds: any. Even ones: by priorities of warps and lanes, so that some
// run as far ahead of the others as barriers let them; priorities change now and then.
inline size_t choose(const std::vector<fiber *> & ready, std::mt19937_64 & random) {
    if (device.seed == 0) {
        return std::min_element(ready.begin(), ready.end(), [](auto a, auto b) { return a->linear < b->linear; }) -
               ready.begin();
    }
    if (device.seed % 2 == 1) {
        return random() % ready.size();
    }
    return std::max_element(ready.begin(), ready.end(), [](auto a, auto b) { return a->priority < b->priority; }) -
           ready.begin();
}
inline void prioritize(block & b, std::mt19937_64 & random) {
    std::vector<uint64_t> of_warp(b.warps.size());
    for (uint64_t & p : of_warp) {
        p = random() % 256;
    }
    for (auto & f : b.fibers) {
        f->priority = of_warp[f->linear / warp_size] << 32 | random() % 65536;
    }
}

inline void run_block(block & b) {
    std::seed_seq   sequence{ (uint32_t) device.seed, blockIdx.x, blockIdx.y, blockIdx.z };
    std::mt19937_64 random(sequence);
    for (int steps = 0; b.live > 0; ++steps) {
        if (b.ready.empty()) {
            fail("threads wait for others that never come");
        }
        if (device.seed != 0 && device.seed % 2 == 0 && steps % 1024 == 0) {
            prioritize(b, random);
        }
        const size_t i = choose(b.ready, random);
        current        = b.ready[i];
        b.ready[i]     = b.ready.back();
        b.ready.pop_back();
        threadIdx = current->thread;
        go_on(b.scheduler, current->stopped);
    }
}

// kernel(args...) for every thread of a grid, with so many bytes of dynamic shared memory.
template <typename kernel_t, typename... args_t>
void launch_shared(const dim3 grid, const dim3 dims, const size_t shared_bytes, kernel_t kernel, args_t... args) {
    blockIdx           = { 0, 0, 0 };
    threadIdx          = { 0, 0, 0 };
    const int nthreads = dims.x * dims.y * dims.z;
    if (nthreads % warp_size != 0) {
        fail("a block that is no multiple of a warp");
    }
    if (nthreads == 0 || nthreads > 1024 || dims.z > 64) {
        fail("a block of a size that no device takes");
    }
    if (grid.x == 0 || grid.y == 0 || grid.z == 0 || grid.x > 0x7FFFFFFF || grid.y > device.max_grid ||
        grid.z > device.max_grid) {
        fail("a grid of a size that no device takes");
    }
    gridDim  = grid;
    blockDim = dims;

    struct sigaction action = {}, before_segv, before_bus;
    action.sa_sigaction     = on_fault;
    action.sa_flags         = SA_SIGINFO;
    sigaction(SIGSEGV, &action, &before_segv);
    sigaction(SIGBUS, &action, &before_bus);

    block b;
    b.body = [&] { kernel(args...); };
    b.fibers.reserve(nthreads);
    for (int i = 0; i < nthreads; ++i) {
        b.fibers.push_back(std::make_unique<fiber>());
        fiber & f = *b.fibers.back();
        f.linear  = i;
        f.thread  = { i % dims.x, i / dims.x % dims.y, i / dims.x / dims.y };
        prepare(f);
    }
    current_block = &b;
    std::vector<size_t> order((size_t) grid.x * grid.y * grid.z);
    std::iota(order.begin(), order.end(), 0);
    if (device.seed != 0) {
        std::shuffle(order.begin(), order.end(), std::mt19937_64(device.seed));
    }
    for (const size_t i : order) {
        blockIdx = { (unsigned int) (i % grid.x), (unsigned int) (i / grid.x % grid.y),
                     (unsigned int) (i / grid.x / grid.y) };
        b.live   = nthreads;
        b.warps.assign(nthreads / warp_size, warp());
        b.ready.clear();
        for (auto & f : b.fibers) {
            f->done = false;
            f->groups.clear();
            b.ready.push_back(f.get());
        }
        shared.resize(shared_bytes);
        ++blocks_begun;
        run_block(b);
        shared.check();
    }
    current       = nullptr;
    current_block = nullptr;
    sigaction(SIGSEGV, &before_segv, nullptr);
    sigaction(SIGBUS, &before_bus, nullptr);
}

// Without dynamic shared memory.
template <typename kernel_t, typename... args_t>
void launch(const dim3 grid, const dim3 dims, kernel_t kernel, args_t... args) {
    launch_shared(grid, dims, 0, kernel, args...);
}

// What was launched since the device was set.
struct launched {
    dim3   grid, block;
    size_t shared_bytes;
};
inline std::vector<launched> launches;

// Dynamic shared memory that a kernel was allowed, where it is more than all may have.
inline std::map<const void *, size_t> shared_limits;

template <typename... params_t, typename... args_t>
void launch_checked(void (*kernel)(params_t...), const dim3 grid, const dim3 dims, const size_t shared_bytes,
                    args_t &&... args) {
    static_assert(sizeof...(params_t) == sizeof...(args_t), "a kernel takes as many arguments as it is launched with");
    blockIdx         = { 0, 0, 0 };
    threadIdx        = { 0, 0, 0 };
    const auto limit = shared_limits.find((const void *) kernel);
    if (limit != shared_limits.end() && limit->second > device.smpbo) {
        fail("a limit of shared memory above that of the device");
    }
    if (shared_bytes >
        (limit == shared_limits.end() ? max_shared_static : std::max(max_shared_static, limit->second))) {
        fail("more shared memory than the kernel is allowed");
    }
    launches.push_back({ grid, dims, shared_bytes });
    launch_shared(grid, dims, shared_bytes, kernel, (params_t) args...);
}

// What stands in <<<...>>>.
struct configuration {
    dim3   grid, block;
    size_t shared_bytes;
    configuration(const dim3 grid, const dim3 block, const size_t shared_bytes = 0, const void * = nullptr) :
        grid(grid), block(block), shared_bytes(shared_bytes) {}
};
template <typename... params_t, typename... args_t>
void launch_configured(void (*kernel)(params_t...), const configuration & c, args_t &&... args) {
    launch_checked(kernel, c.grid, c.block, c.shared_bytes, args...);
}

// A note that upstream makes once for a device; every setting is another device.
struct once_a_device {
    int    seen = 0;
    bool   raised;
    bool & operator[](int) {
        if (seen != devices_seen) {
            seen   = devices_seen;
            raised = false;
        }
        return raised;
    }
};

// A mistake that a test plants in a source, by its number; 0: none.
inline int fault = 0;

}  // namespace emulate

// PTX instructions. tests/cuda/emulated.py turns asm statements into calls of the functions here: the name of the
// instruction with _ for every other sign, its operands in the order of its text, those in braces as a list. An
// instruction that is not here ends the test.

#pragma once

#include "f16.h"
#include "launch.h"

#include <initializer_list>

namespace emulate::ptx {

// A register of 4 bytes, whatever its type.
struct reg {
    void * at;
    template <typename T> reg(const T & x) : at((void *) &x) { static_assert(sizeof(T) == 4, "a register of 4 bytes"); }
};
using regs = std::initializer_list<reg>;

template <typename T> void read(T * values, const regs & from) {
    for (const reg & r : from) {
        memcpy(values++, r.at, sizeof(T));
    }
}
template <typename T> void write(const regs & to, const T * values) {
    for (const reg & r : to) {
        memcpy(r.at, values++, sizeof(T));
    }
}

// d = a*b + c, rows of A and C: I; words along the product: W.
template <typename T, int I, int W, typename F>
void mma(const regs & d, const regs & a, const regs & b, const regs & c, F multiply) {
    T        sums[I / 4];
    uint32_t words_a[I * W / 32], words_b[W / 4];
    if (d.size() != I / 4 || c.size() != I / 4 || a.size() != I * W / 32 || b.size() != W / 4) {
        fail("a product with a wrong number of registers");
    }
    read(words_a, a);
    read(words_b, b);
    read(sums, c);
    matrix_product<T, I, W>(sums, words_a, words_b, sums, multiply);
    write(d, sums);
}

inline void mma_sync_aligned_m16n8k32_row_col_s32_s8_s8_s32(const regs & d, const regs & a, const regs & b,
                                                            const regs & c) {
    mma<int, 16, 8>(d, a, b, c, multiply_s8());
}
inline void mma_sync_aligned_m16n8k16_row_col_s32_s8_s8_s32(const regs & d, const regs & a, const regs & b,
                                                            const regs & c) {
    mma<int, 16, 4>(d, a, b, c, multiply_s8());
}
inline void mma_sync_aligned_m8n8k16_row_col_s32_s8_s8_s32(const regs & d, const regs & a, const regs & b,
                                                           const regs & c) {
    mma<int, 8, 4>(d, a, b, c, multiply_s8());
}

struct multiply_f16 {
    float operator()(const uint32_t x, const uint32_t y, const float sum) const {
        return sum + f16((uint16_t) x) * f16((uint16_t) y) + f16((uint16_t) (x >> 16)) * f16((uint16_t) (y >> 16));
    }
};
inline void mma_sync_aligned_m16n8k16_row_col_f32_f16_f16_f32(const regs & d, const regs & a, const regs & b,
                                                              const regs & c) {
    mma<float, 16, 8>(d, a, b, c, multiply_f16());
}

// Matrices of 8 rows of 16 bytes, of which lane 8*m + i has the address of row i of matrix m: every lane gets a word of
// each.
inline void load_matrices(const regs & d, const void * row) {
    const int n = d.size();
    if (this_lane() < 8 * n && ((uintptr_t) row % 16 != 0 || !shared.holds(row, 16))) {
        fail("ldmatrix: a row that is not aligned or not in shared memory");
    }
    struct operand {
        const void * row;
        uint32_t     words[4];
    } mine{ row, {} };
    this_warp().operands[this_lane()] = &mine;
    meet(warp_operation::load_matrices, [n](warp & w) {
        for (int lane = 0; lane < warp_size; ++lane) {
            for (int m = 0; m < n; ++m) {
                const operand & source = *(operand *) w.operands[8 * m + lane / 4];
                memcpy(&((operand *) w.operands[lane])->words[m], (const uint32_t *) source.row + lane % 4, 4);
            }
        }
    });
    write(d, mine.words);
}
inline void ldmatrix_sync_aligned_m8n8_x2_b16(const regs & d, const void * row) {
    load_matrices(d, row);
}
inline void ldmatrix_sync_aligned_m8n8_x4_b16(const regs & d, const void * row) {
    load_matrices(d, row);
}

// Addresses in shared memory are those of __cvta_generic_to_shared. Of the bytes that are copied the first n are the
// source's, the others 0.
inline void cp_async_cg_shared_global(const uint32_t dst, const void * src, const int bytes) {
    if (bytes != 16) {
        fail("an asynchronous copy past the first level of memory that is not of 16 bytes");
    }
    copy_async(shared.at(dst), src, bytes);
}
inline void cp_async_ca_shared_global(const uint32_t dst, const void * src, const int bytes) {
    copy_async(shared.at(dst), src, bytes);
}
inline void cp_async_ca_shared_global(const uint32_t dst, const void * src, const int bytes, const int n) {
    if (bytes != 4 || n != 2) {
        fail("an asynchronous copy that is not emulated");
    }
    copy_async(shared.at(dst), src, n);
}
inline void cp_async_commit_group() {
    copy_commit();
}
inline void cp_async_wait_group(const int pending) {
    copy_wait(pending);
}
inline void prefetch_global_L2(const void *) {}

inline void mul_wide_u32(uint64_t & d, const uint32_t a, const uint32_t b) {
    d = (uint64_t) a * b;
}

// Byte n of d: byte (selectors >> 4n) & 7 of b:a; with bit 3 of the selector set its sign bit eight times.
inline void prmt_b32(uint32_t & d, const uint32_t a, const uint32_t b, const uint32_t selectors) {
    const uint64_t bytes = (uint64_t) b << 32 | a;
    d                    = 0;
    for (int n = 0; n < 4; ++n) {
        const uint32_t selector = selectors >> 4 * n;
        const uint8_t  byte     = bytes >> 8 * (selector & 7);
        d |= (uint32_t) (selector & 8 ? (byte & 0x80 ? 0xFF : 0) : byte) << 8 * n;
    }
}
// Bit i of the table is the result for the bits a, b, c of i.
inline void lop3_b32(uint32_t & d, const uint32_t a, const uint32_t b, const uint32_t c, const uint32_t table) {
    d = 0;
    for (int n = 0; n < 32; ++n) {
        const uint32_t i = (a >> n & 1) << 2 | (b >> n & 1) << 1 | (c >> n & 1);
        d |= (table >> i & 1) << n;
    }
}

}  // namespace emulate::ptx

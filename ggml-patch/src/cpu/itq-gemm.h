#pragma once

// Products of the trellis types, TQ1_0 and TQ2_0 with 16 rows of weights side by side: docs/kernels.md explains them.
//
// A panel is 16 rows of a matrix, nb blocks each, repacked to as many bytes as they had, block 0 of all rows first, then
// block 1, ... Codes are words of 32 bits, one of each row beside each other, so that a lane of a register belongs to a
// row from the first shift to the last sum, and nothing has to be added up across lanes. Every sum of a block is an exact
// integer, and blocks are added up in order: a row of the result has the same bits whatever the number of columns and
// whatever other rows are computed with it.
//
// The scales of a block lie behind its codes, so that a product reads a panel from one end to the other: processors fetch
// one ascending stream by themselves, but hardly two. Codes begin on a cache line. The scales of a type without
// zero-point fill half of one, so two blocks share it: it lies between their codes, half of it unused behind an odd number of blocks.

#include "ggml-itq.h"

#include <stddef.h>
#include <stdint.h>

#define ITQ_PANEL_ROWS 16
#define ITQ_GROUP      64  // columns that one call multiplies, at most

// Codes of a block of a trellis type of n weights, in n/32 = T words of selectors. Byte j of a word belongs to the weights
// n/4*j .. n/4*(j + 1) - 1, of which place p = T*g + t says which: bit 8*j + g of sel[t] is the selector of weight
// n/4*j + T*g + t, so that the selector before is the same bit of sel[t - 1], or of sel[T - 1] a bit lower. Start states stay in
// the scales. Symbols lie so that masks merge them with the subsets to nibbles, two in a byte, without a shift:
// - two bits: the symbol of p = 2*T*a + T*h + t is in bits 2*(a ^ 1) of qs[2*t + h];
// - a third bit: that of p = T*g + t is bit g ^ 1 of the bytes of qs[2*T + t]; where it is set, the two bits are stored
//   inverted. With c0, c1 and c2 inverted too, what is looked up is a magnitude, and the third bit its sign;
// - one bit: that of p = T*g + t is bit g ^ 3 of the bytes of qs[t].
//
// Of the weights g = 0 .. 7 of a step t, nibbles i = 0 .. 3 are those of g = i in the lower half and of g = i + 4 in the upper
// half of a byte. From bit 0 on they have
// - of one symbol bit c0 c1 c2 q, c0 c1 q c2, c2 q c0 c1, q c2 c0 c1 for i = 0 .. 3;
// - of more c0 c1 q0 q1 for i < 2, q0 q1 c0 c1 else; c2, and the third bit q2 of a symbol, are what an index has besides.
#define ITQ_INDEX_1(nibble, i, c2, q2)   \
    (8 * ((nibble) >> ((i) == 0   ? 3    \
                       : (i) == 1 ? 2    \
                       : (i) == 2 ? 1    \
                                  : 0) & \
          1) +                           \
     4 * ((nibble) >> ((i) == 0   ? 2    \
                       : (i) == 1 ? 3    \
                       : (i) == 2 ? 0    \
                                  : 1) & \
          1) +                           \
     ((nibble) >> ((i) < 2 ? 0 : 2) & 3))
#define ITQ_INDEX_2(nibble, i, c2, q2) \
    (8 * ((nibble) >> ((i) < 2 ? 2 : 0) & 3) + 4 * (c2) + ((nibble) >> ((i) < 2 ? 0 : 2) & 3))
// 32 * q2, and q0 and q1 as they were before q2 inverted them
#define ITQ_INDEX_3(nibble, i, c2, q2) (ITQ_INDEX_2(nibble, i, c2, q2) ^ 56 * (q2))

// Levels plus 64 by nibble i, where the rest of the index, 2*q2 + c2, is given.
ITQ_INLINE void itq_level_table(int bits, const int8_t * levels, int i, int rest, uint8_t table[16]) {
    for (int nibble = 0; nibble < 16; ++nibble) {
        const int index = bits == 1 ? ITQ_INDEX_1(nibble, i, 0, 0) : ITQ_INDEX_3(nibble, i, rest & 1, rest >> 1);
        table[nibble]   = (uint8_t) (levels[index] + 64);
    }
}

// Numbers of the blocks of 16 rows, of types without a zero-point and with one.
typedef struct {
    ggml_half d[ITQ_PANEL_ROWS];
} itq_scales_0;
typedef struct {
    ggml_half d[ITQ_PANEL_ROWS];
    ggml_half z[ITQ_PANEL_ROWS];
} itq_scales_1;

// What only types with a zero-point have to copy, by has_z.
#define ITQ_COPY_ZERO_POINT_0(to, from)
#define ITQ_COPY_ZERO_POINT_1(to, from) (to) = (from)

// Codes of a block of TQ2_0 and TQ1_0: the words of the block.
typedef struct {
    uint32_t qs[16][ITQ_PANEL_ROWS];
} itq_codes_tq2_0;
typedef struct {
    uint32_t qs[12][ITQ_PANEL_ROWS];
    uint32_t qh[ITQ_PANEL_ROWS];
} itq_codes_tq1_0;
typedef itq_scales_0 itq_scales_tq;

// Where a panel has the codes and the scales of block b; the scales of n blocks fill a cache line.
#define ITQ_PANEL_OF(type, scales_t, n)                                                                          \
    static_assert(sizeof(itq_codes_##type) + sizeof(scales_t) == ITQ_PANEL_ROWS * sizeof(block_##type),          \
                  "a panel has another size than its rows");                                                     \
    static_assert(sizeof(itq_codes_##type) % 64 == 0 && sizeof(scales_t) * (n) == 64, "codes leave their line"); \
    static inline char * itq_blocks_of_##type(const void * panel, int64_t b) {                                   \
        return (char *) (uintptr_t) panel + b / (n) * (n) * (int64_t) (ITQ_PANEL_ROWS * sizeof(block_##type));   \
    }                                                                                                            \
    static inline itq_codes_##type * itq_codes_of_##type(const void * panel, int64_t b) {                        \
        char * const blocks = itq_blocks_of_##type(panel, b);                                                    \
        return (itq_codes_##type *) (void *) (blocks + b % (n) * (int64_t) (sizeof(itq_codes_##type) + 64));     \
    }                                                                                                            \
    static inline scales_t * itq_scales_of_##type(const void * panel, int64_t b) {                               \
        return (scales_t *) (void *) (itq_blocks_of_##type(panel, b) + sizeof(itq_codes_##type)) + b % (n);      \
    }
#define ITQ_PANEL_OF_TYPE(NAME, name, bits, n_levels, length, has_z, number) \
    typedef struct {                                                         \
        uint32_t sel[(length) / 32][ITQ_PANEL_ROWS];                         \
        uint32_t qs[(bits) * (length) / 32][ITQ_PANEL_ROWS];                 \
    } itq_codes_##name;                                                      \
    typedef itq_scales_##has_z itq_scales_##name;                            \
    ITQ_PANEL_OF(name, itq_scales_##name, 2 - (has_z))
ITQ_TYPES(ITQ_PANEL_OF_TYPE)
ITQ_PANEL_OF(tq2_0, itq_scales_tq, 2)
ITQ_PANEL_OF(tq1_0, itq_scales_tq, 2)

// Quantized activations of nc columns of a product, block by block, n = 256 or 64 numbers each. The bytes of a block are in
// the order of the kernels, four that meet the four bytes of one word of weights side by side: byte 4*p + j is number
// n/4*j + p of the rotated block for the trellis types, and they stay in their order for TQ1_0 and TQ2_0.
struct itq_columns {
    const int8_t *  q;     // [nb][nc][n], on a 64-byte boundary
    const float *   d;     // [nb][nc] scales
    const int32_t * sums;  // [nb][nc] sums of the n
};

// Ask for the memory a few blocks behind line `line` of the codes of a block; the line that follows them has scales. What
// processors fetch by themselves comes too late for one column. Behind the last block comes the next panel. Requests are
// best spread over a block, in ascending order: with a compiler's builtin GCC gathers them at its begin, and memory is
// read a sixth more slowly.
#define ITQ_PREFETCH_DISTANCE 12288
#if (defined(__GNUC__) || defined(__clang__)) && (defined(__x86_64__) || defined(__i386__))
#    define ITQ_PREFETCH_BYTES(at) \
        __asm__ volatile("prefetcht0 %0" : : "m"(*((const char *) (at) + ITQ_PREFETCH_DISTANCE)))
#elif defined(__GNUC__) || defined(__clang__)
#    define ITQ_PREFETCH_BYTES(at) __builtin_prefetch((const char *) (at) + ITQ_PREFETCH_DISTANCE)
#else
#    define ITQ_PREFETCH_BYTES(at) ((void) (at))
#endif
#define ITQ_PREFETCH(codes, line)                                     \
    do {                                                              \
        if (64 * (line) <= (int) sizeof(*(codes))) {                  \
            ITQ_PREFETCH_BYTES((const char *) (codes) + 64 * (line)); \
        }                                                             \
    } while (0)

// Part i of n of these lines, two at most.
#define ITQ_PREFETCH_PART(codes, i, n)                           \
    do {                                                         \
        const int lines_ = (int) sizeof(*(codes)) / 64 + 1;      \
        ITQ_PREFETCH(codes, lines_ * (i) / (n));                 \
        if (lines_ * (i) / (n) + 1 < lines_ * ((i) + 1) / (n)) { \
            ITQ_PREFETCH(codes, lines_ * (i) / (n) + 1);         \
        }                                                        \
    } while (0)

#ifdef __cplusplus
extern "C" {
#endif

// What every type has, each also as portable code:
//
//   itq_repack_name  repack n_rows <= 16 rows of nb blocks, row_size bytes apart, into a panel on a 64-byte boundary. Rows
//                    that are missing get zeros.
//   itq_unpack_name  the other way round: all 16 rows of a panel. Portable code alone, for whoever asks a buffer for its
//                    bytes.
//   itq_gemm_name    out[c][r]: the product of row r of a panel and column c of y, 1 <= nc <= ITQ_GROUP
#define ITQ_DECLARE_PANELS(name)                                                                                \
    void itq_repack_##name(const void * rows, size_t row_size, int n_rows, int64_t nb, void * panel);           \
    void itq_repack_##name##_generic(const void * rows, size_t row_size, int n_rows, int64_t nb, void * panel); \
    void itq_unpack_##name(const void * panel, int64_t nb, void * rows, size_t row_size);                       \
    void itq_gemm_##name(int64_t nb, const void * panel, const struct itq_columns * y, int nc,                  \
                         float out[][ITQ_PANEL_ROWS]);                                                          \
    void itq_gemm_##name##_generic(int64_t nb, const void * panel, const struct itq_columns * y, int nc,        \
                                   float out[][ITQ_PANEL_ROWS]);

#define ITQ_PANELS_OF_TYPE(NAME, name, ...) ITQ_DECLARE_PANELS(name)
ITQ_TYPES(ITQ_PANELS_OF_TYPE)
ITQ_DECLARE_PANELS(tq2_0)
ITQ_DECLARE_PANELS(tq1_0)

// out[r]: the product of row r of n_rows, row_size bytes apart as a file has them, and the one column of y, the bytes of
// which are in the order of Q8_K_H, Q8_N_H or Q8_K. It has the bits that a panel's product has. TQ1_0 has none.
#if defined(__AVX2__) || (defined(__ARM_NEON) && defined(__aarch64__))
#    define ITQ_HAS_GEMV
#    define ITQ_DECLARE_GEMV(name)                                                                                     \
        void itq_gemv_##name(int64_t nb, const void * rows, size_t row_size, int n_rows, const struct itq_columns * y, \
                             float * out);
#    define ITQ_GEMV_OF_TYPE(NAME, name, ...) ITQ_DECLARE_GEMV(name)
ITQ_TYPES(ITQ_GEMV_OF_TYPE)
ITQ_DECLARE_GEMV(tq2_0)
#endif

// From 256 bytes of Q8_K_H, 64 of Q8_N_H, to the order of the kernels.
void itq_reorder_q8_K_h(const int8_t * q, int8_t * y);
void itq_reorder_q8_n_h(const int8_t * q, int8_t * y);

// Generic implementation
void itq_reorder_q8_K_h_generic(const int8_t * q, int8_t * y);
void itq_reorder_q8_n_h_generic(const int8_t * q, int8_t * y);

#ifdef __cplusplus
}
#endif

#pragma once

// Panels of the types with blocks of 64 out of the file's layout: a row of a block is two words of selectors and two to six of
// symbols, which integer operations turn to the order that itq-gemm.h describes. Architectures share this file.

#include "itq-rows.h"

// Exchange the bits of `mask` with those `shift` higher.
ITQ_INLINE uint32_t swap_bits_of_word(uint32_t x, int shift, uint32_t mask) {
    const uint32_t t = (x ^ x >> shift) & mask;
    return x ^ t ^ t << shift;
}

// The even bits of x, in order.
ITQ_INLINE uint32_t even_bits(uint64_t x) {
    x &= 0x5555555555555555;
    x = (x | x >> 1) & 0x3333333333333333;
    x = (x | x >> 2) & 0x0F0F0F0F0F0F0F0F;
    x = (x | x >> 4) & 0x00FF00FF00FF00FF;
    x = (x | x >> 8) & 0x0000FFFF0000FFFF;
    return (uint32_t) (x | x >> 16);
}

// A plane of bits of one row: bit 8*j + g of words[t] from number 16*j + 2*g + t.
ITQ_INLINE void split_plane(const uint8_t plane[8], uint32_t words[2]) {
    uint64_t bits = 0;
    for (int i = 0; i < 8; ++i) {
        bits |= (uint64_t) plane[i] << 8 * i;
    }
    words[0] = even_bits(bits);
    words[1] = even_bits(bits >> 1);
}

// Symbols of two bits of one row: word 2*t + h has in its byte a ^ 1 those of the weights 4*a + 2*h + t + 16*j, j = 0 .. 3 in
// its fields, and a and j change places.
ITQ_INLINE void split_symbols_2(const uint8_t qs[16], uint32_t words[4]) {
    for (int t = 0; t < 2; ++t) {
        for (int h = 0; h < 2; ++h) {
            const uint8_t * q = qs + 2 * h + t;
            uint32_t        x = (uint32_t) q[4] | (uint32_t) q[0] << 8 | (uint32_t) q[12] << 16 | (uint32_t) q[8] << 24;
            x                 = swap_bits_of_word(x, 12, 0x0000F0F0);
            words[2 * t + h]  = swap_bits_of_word(x, 6, 0x00CC00CC);
        }
    }
}

// Symbols of one bit: bit g of every byte goes to g ^ 3.
static inline void split_symbols_1(const uint8_t qs[8], uint32_t words[2]) {
    split_plane(qs, words);
    for (int t = 0; t < 2; ++t) {
        const uint32_t x = swap_bits_of_word(words[t], 2, 0x33333333);
        words[t]         = swap_bits_of_word(x, 1, 0x55555555);
    }
}

// Symbols of three bits: bit g of the bytes of third bits goes to g ^ 1.
static inline void split_symbols_3(const uint8_t qs[24], uint32_t words[6]) {
    split_symbols_2(qs, words);
    split_plane(qs + 16, words + 4);
    for (int t = 4; t < 6; ++t) {
        words[t] = swap_bits_of_word(words[t], 1, 0x55555555);
    }
}

#define ITQ_REPACK_64(NAME, name, bits, ...)                                                                 \
    static inline void itq_repack_##name##_words(const void * rows, size_t row_size, int n_rows, int64_t nb, \
                                                 void * panel) {                                             \
        struct row_reader readers[ITQ_PANEL_ROWS];                                                           \
        open_rows(readers, rows, row_size, n_rows, sizeof(block_##name));                                    \
        for (int64_t b = 0; b < nb; ++b) {                                                                   \
            itq_codes_##name *  codes  = itq_codes_of_##name(panel, b);                                      \
            itq_scales_##name * scales = itq_scales_of_##name(panel, b);                                     \
            for (int r = 0; r < ITQ_PANEL_ROWS; ++r) {                                                       \
                const block_##name * x = (const block_##name *) block_at(&readers[r], b);                    \
                uint32_t             sel[2], qs[2 * (bits)];                                                 \
                split_plane(x->sel, sel);                                                                    \
                split_symbols_##bits(x->qs, qs);                                                             \
                for (int t = 0; t < 2; ++t) {                                                                \
                    codes->sel[t][r] = sel[t];                                                               \
                }                                                                                            \
                for (int i = 0; i < 2 * (bits); ++i) {                                                       \
                    codes->qs[i][r] = qs[i];                                                                 \
                }                                                                                            \
                scales->d[r] = x->d;                                                                         \
            }                                                                                                \
            if ((bits) == 3) {                                                                               \
                itq_mirror_symbols(2, codes->qs);                                                            \
            }                                                                                                \
        }                                                                                                    \
    }
ITQ_TYPES_64(ITQ_REPACK_64)

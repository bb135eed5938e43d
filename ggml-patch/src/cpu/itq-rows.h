#pragma once

// The rows that a panel is made of, for the SIMD versions of repacking, and the start states of their blocks.

#include "itq-gemm.h"

// Row r of a panel; rows that are missing read the same zeros for every block.
struct row_reader {
    const char * bytes;
    size_t       stride;
};

static inline void open_rows(struct row_reader readers[ITQ_PANEL_ROWS], const void * rows, size_t row_size, int n_rows,
                             size_t block_size) {
    static const char zeros[sizeof(block_itq4_s)];  // the largest block
    for (int r = 0; r < ITQ_PANEL_ROWS; ++r) {
        readers[r].bytes  = r < n_rows ? (const char *) rows + (size_t) r * row_size : zeros;
        readers[r].stride = r < n_rows ? block_size : 0;
    }
}

static inline const void * block_at(const struct row_reader * reader, int64_t b) {
    return reader->bytes + (size_t) b * reader->stride;
}

// Inverts symbols of two bits where the third bit is set, in a block of 32 * words weights that has the order of a panel.
static inline void itq_mirror_symbols(const int words, uint32_t (*qs)[ITQ_PANEL_ROWS]) {
    for (int t = 0; t < words; ++t) {
        for (int r = 0; r < ITQ_PANEL_ROWS; ++r) {
            // third bits of two neighbours in the field that the symbols of both have: of an odd g, of an even one
            const uint32_t third  = qs[2 * words + t][r];
            const uint32_t fields = (third & 0x33333333) << 2 | (third >> 2 & 0x33333333);
            const uint32_t odd = fields & 0x55555555, even = fields & 0xAAAAAAAA;
            qs[2 * t][r] ^= even | even >> 1;
            qs[2 * t + 1][r] ^= odd | odd << 1;
        }
    }
}

// Bit i of a start state as the lowest bit of byte 7 - i.
ITQ_INLINE uint64_t itq_spread_state(int state) {
    // i to i + (56 - 9*i); no two products of bits meet
    return (uint64_t) state * 0x0100804020100800 & 0x0101010101010000;
}

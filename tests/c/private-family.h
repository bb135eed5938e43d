#pragma once

// A registry of trellis types that no file has: a 4-bit sibling, with 32 levels and 3-bit symbols, and blocks of 64 without
// a zero-point. tests/native/test_family.py compiles the sources of the format with it, in place of the registry there is,
// and compares the bytes with those of numpy.

#include "ggml-itq.h"

#undef ITQ_TYPES
#define ITQ_TYPES(X)                    \
    X(ITQ4_X, itq4_x, 3, 32, 256, 0, 0) \
    X(ITQ3_X, itq3_x, 2, 16, 64, 0, 0)  \
    X(ITQ2_X, itq2_x, 1, 8, 64, 0, 0)

#define QK_ITQ4_X 256
#define QK_ITQ3_X 64
#define QK_ITQ2_X 64

#define ITQ4_X_LEVELS                                                             \
    { -63, -52, -45, -39, -35, -30, -27, -23, -20, -17, -14, -12, -9, -6, -4, -1, \
      1,   4,   6,   9,   12,  14,  17,  20,  23,  27,  30,  35,  39, 45, 52, 63 }
#define ITQ3_X_LEVELS ITQ3_S_LEVELS
#define ITQ2_X_LEVELS ITQ2_S_LEVELS

typedef struct {
    uint8_t   qs[96];  // two bits of every symbol, then the third ones
    uint8_t   sel[32];
    ggml_half d;
} block_itq4_x;

typedef struct {
    uint8_t   qs[16];
    uint8_t   sel[8];
    ggml_half d;
} block_itq3_x;

typedef struct {
    uint8_t   qs[8];
    uint8_t   sel[8];
    ggml_half d;
} block_itq2_x;

ITQ_TYPES(ITQ_DECLARE_TYPE)
ITQ_TYPES(ITQ_DEFINE_DECODE_LEVELS)

#define ITQ4_X_STARTS                                                      \
    false, { 1, 3 }, {                                                     \
        (float) (19.3 / 1.0), (float) (19.3 / 0.92), (float) (19.3 / 1.08) \
    }
#define ITQ3_X_STARTS ITQ3_S_STARTS
#define ITQ2_X_STARTS ITQ2_S_STARTS

// Decoding of the ternary types TQ1_0 and TQ2_0 on 32-bit words: digits 0, 1, 2 in bytes, which stand for -1, 0, 1.
// Integer arithmetic on registers, for the device and the host alike. Layouts: ggml-common.h and ggml-quants.c
// upstream.

#pragma once

#include "itq-decode.cuh"

// TQ2_0: byte b of word m (0..15) of qs holds the weights 128*(m/8) + 32*g + 4*(m % 8) + b at bit 2*g, g = 0..3.
ITQ_FUNC uint32_t tq2_0_digits(const uint32_t qs, const int g) {
    return qs >> 2 * g & 0x03030303;
}

// TQ1_0: a byte is a fraction of 256 in base 3, most significant digit first: the digit is the integer part of three
// times it, the rest goes on. Four bytes at a time in two words of 16-bit lanes, so that no product crosses a lane.
//   byte b of word m of qs, m =  0..7:  weights       32*n + 4*m     + b for digit n = 0..4
//                           m = 8..11:  weights 160 + 16*n + 4*(m-8) + b for digit n = 0..4
//   byte b of qh:                       weights 240 +  4*n           + b for digit n = 0..3
struct tq1_0_state {
    uint32_t even;
    uint32_t odd;
};

ITQ_FUNC tq1_0_state tq1_0_begin(const uint32_t qs) {
    return { qs & 0x00FF00FF, qs >> 8 & 0x00FF00FF };
}

// The next digit of the four bytes.
ITQ_FUNC uint32_t tq1_0_next(tq1_0_state & state) {
    const uint32_t even = 3 * state.even;
    const uint32_t odd  = 3 * state.odd;
    state               = { even & 0x00FF00FF, odd & 0x00FF00FF };
    return itq_prmt(even, odd, 0x7351);  // the upper bytes of the lanes
}

// Digits 0, 1, 2 to the signed bytes -1, 0, 1.
ITQ_FUNC uint32_t tq_signed(const uint32_t digits) {
    return ((digits | 0x80808080) - 0x01010101) ^ 0x80808080;
}

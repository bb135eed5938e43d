// What an invocation of a mat-vec product decodes of a block of TQ1_0, which four invocations share out: two of the eight
// words of every chunk of 32 weights, a word being the digits (trits plus one) of four weights. The first 32 bytes have
// five digits each, a chunk a digit; the next 16 as many, half a chunk a digit; the last four have four, an eighth each.
#define GROUPS 8
#define WORDS 2

uint chunk_of(const uint lane, const uint g) {
    return g;
}

uint word_of(const uint lane, const uint g, const uint w) {
    return g < 5 ? 2 * lane + w : lane + 4 * w;
}

// The next digit of the four bytes x.x and x.y << 8, and what follows it.
int32_t next_digits(inout uvec2 x) {
    x *= 3;
    const int32_t digits = int32_t(((x.x >> 8) & 0x00030003u) | (x.y & 0x03000300u));
    x &= 0x00FF00FFu;
    return digits;
}

uvec2 bytes(const uint a, const uint b, const uint c, const uint d) {
    return uvec2(a | (c << 16), b | (d << 16));
}

void decode(const uint ib, const uint lane, out int32_t weights[GROUPS][WORDS], out float d, out float z) {
    [[unroll]] for (uint w = 0; w < 2; ++w) {
        const uint m = 8 * lane + 4 * w;
        uvec2 x = bytes(data_a[ib].qs[m], data_a[ib].qs[m + 1], data_a[ib].qs[m + 2], data_a[ib].qs[m + 3]);
        [[unroll]] for (uint n = 0; n < 5; ++n) {
            weights[n][w] = next_digits(x);
        }
    }
    const uint m = 32 + 4 * lane;
    uvec2 x = bytes(data_a[ib].qs[m], data_a[ib].qs[m + 1], data_a[ib].qs[m + 2], data_a[ib].qs[m + 3]);
    [[unroll]] for (uint n = 0; n < 5; ++n) {
        weights[5 + n / 2][n % 2] = next_digits(x);
    }
    const uint power = lane == 0 ? 1 : lane == 1 ? 3 : lane == 2 ? 9 : 27;
    x = (bytes(data_a[ib].qh[0], data_a[ib].qh[1], data_a[ib].qh[2], data_a[ib].qh[3]) * power) & 0x00FF00FFu;
    weights[7][1] = next_digits(x);
    d = float(data_a[ib].d);
    z = 1.0;
}

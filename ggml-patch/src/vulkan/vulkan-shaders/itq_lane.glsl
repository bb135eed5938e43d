// What an invocation of a mat-vec product decodes of a block of a trellis type: two chunks. Blocks of 256 are shared out
// among four: number 2*j + h takes the chunks 4*h + j and 4*h + j + 2; those are in one half j of the symbols of ITQ3_S.
// Products of many columns read a chunk's selectors as it does.

#define ITQ_LANES (QUANT_K / 64)

struct itq_lane_block {
    uint symbols[4];  // of two bits, of both chunks
    float d;
    float z;
};

uint itq_lane_chunk(const uint lane, const uint g) {
#if QUANT_K == 256
    return 4 * (lane % 2) + lane / 2 + 2 * g;
#else
    return g;
#endif
}

// The selectors of chunk k, and those before it as far as they reach into it: its last bits.
#if defined(A_TYPE_PACKED32)
uint itq_selectors(const uint ib, const uint k) {
    return data_a_packed32[ib].sel[k];
}

uint itq_selectors_before(const uint ib, const uint k) {
    return k == 0 ? 0 : data_a_packed32[ib].sel[max(k, 1) - 1];
}
#else
// Word k of an array of halves of words.
#define ITQ_PAIR(ARRAY, k) (uint((ARRAY)[2 * (k)]) | (uint((ARRAY)[2 * (k) + 1]) << 16))

uint itq_selectors(const uint ib, const uint k) {
    return ITQ_PAIR(data_a_packed16[ib].sel, k);
}

uint itq_selectors_before(const uint ib, const uint k) {
    return k == 0 ? 0 : uint(data_a_packed16[ib].sel[2 * max(k, 1) - 1]) << 16;
}
#endif

itq_lane_block itq_open(const uint ib, const uint lane) {
    itq_lane_block block;
#if defined(DATA_A_ITQ3_S)
    const uint from = 4 * (lane % 2);
    [[unroll]] for (uint m = 0; m < 4; ++m) {
        block.symbols[m] = ((data_a_packed32[ib].qs[8 * (lane / 2) + 2 * m] >> from) & 0x0F0F0F0Fu) |
                           ((data_a_packed32[ib].qs[8 * (lane / 2) + 2 * m + 1] << (4 - from)) & 0xF0F0F0F0u);
    }
    itq_transpose(block.symbols);
    const vec2 dz = unpackHalf2x16(data_a_packed32[ib].dz);
    block.d       = dz.x;
    block.z       = dz.y;
#else
#if defined(DATA_A_ITQ3_N)
    // A byte has the symbols of four planes. Nibbles of two words come together, then the planes that are one apart part,
    // so that nibbles have a symbol of either chunk.
    [[unroll]] for (uint m = 0; m < 2; ++m) {
        uint a = ITQ_PAIR(data_a_packed16[ib].qs, 2 * m);
        uint b = ITQ_PAIR(data_a_packed16[ib].qs, 2 * m + 1);
        itq_swap(a, b, 4, 0x0F0F0F0Fu);
        itq_swap(a, b, 2, 0x33333333u);
        block.symbols[m]     = a;
        block.symbols[m + 2] = b;
    }
    itq_transpose(block.symbols);
#endif
    block.d = float(data_a_packed16[ib].d);
    block.z = 0.0;
#endif
    return block;
}

// Indices of chunk k, number g of the invocation: see itq_indices.
void itq_lane_indices(const itq_lane_block block, const uint ib, const uint k, const uint g, out uint index[4]) {
    uint symbols[4];
#if ITQ_SYMBOL_BITS == 2
    [[unroll]] for (uint i = 0; i < 4; ++i) {
        symbols[i] = (g == 0 ? block.symbols[i] << 2 : block.symbols[i]) & 0xCCCCCCCCu;
    }
#else
    itq_symbols(ITQ_PAIR(data_a_packed16[ib].qs, k), symbols);
#endif
    itq_indices(symbols, itq_selectors(ib, k), itq_selectors_before(ib, k), index);
}

// What an invocation of a mat-vec product decodes of a block of a trellis type: two chunks, which four invocations share
// out. Number 2*j + h takes the chunks 4*h + j and 4*h + j + 2; those are in one half j of the symbols of ITQ3_S.

struct itq_lane_block {
    uint symbols[4];  // of both chunks (ITQ3_S)
    float d;
    float z;
};

uint itq_lane_chunk(const uint lane, const uint g) {
    return 4 * (lane % 2) + lane / 2 + 2 * g;
}

#if defined(DATA_A_ITQ3_S)
uint itq_selectors(const uint ib, const uint k) {
    return data_a_packed32[ib].sel[k];
}

itq_lane_block itq_open(const uint ib, const uint lane) {
    itq_lane_block block;
    uint q[8];
    [[unroll]] for (uint m = 0; m < 8; ++m) {
        q[m] = data_a_packed32[ib].qs[8 * (lane / 2) + m];
    }
    itq_transpose(q, 4 * (lane % 2), block.symbols);
    const vec2 dz = unpackHalf2x16(data_a_packed32[ib].dz);
    block.d       = dz.x;
    block.z       = dz.y;
    return block;
}
#else
uint itq_selectors(const uint ib, const uint k) {
    return uint(data_a_packed16[ib].sel[2 * k]) | (uint(data_a_packed16[ib].sel[2 * k + 1]) << 16);
}

itq_lane_block itq_open(const uint ib, const uint lane) {
    itq_lane_block block;
    block.d = float(data_a_packed16[ib].d);
    block.z = 0.0;
    return block;
}
#endif

// Indices of chunk k, number g of the invocation: see itq_indices.
void itq_lane_indices(const itq_lane_block block, const uint ib, const uint k, const uint g, out uint index[4]) {
    uint symbols[4];
#if defined(DATA_A_ITQ3_S)
    [[unroll]] for (uint i = 0; i < 4; ++i) {
        symbols[i] = (g == 0 ? block.symbols[i] << 2 : block.symbols[i]) & 0xCCCCCCCCu;
    }
#else
    itq_symbols(uint(data_a_packed16[ib].qs[2 * k]) | (uint(data_a_packed16[ib].qs[2 * k + 1]) << 16), symbols);
#endif
    const uint before = itq_selectors(ib, max(k, 1) - 1);
    itq_indices(symbols, itq_selectors(ib, k), k == 0 ? 0 : before, index);
}

// What an invocation of a mat-vec product decodes of a block of a trellis type: two chunks. Blocks of 256 are shared out
// among four: number 2*j + h takes the chunks 4*h + j and 4*h + j + 2; those are in one half j of the symbols' bytes.
// Products of many columns read a chunk's selectors as it does.
//
// The weights of a chunk come in eight words of four: number w has 2*w, 2*w + 1, 2*w + 16 and 2*w + 17. The activations of
// products of integers are in that order (itq_quantize_q8_1.comp).

#define ITQ_LANES (QUANT_K / 64)

// Word k of an array of halves of words.
#define ITQ_PAIR(ARRAY, k) (uint((ARRAY)[2 * (k)]) | (uint((ARRAY)[2 * (k) + 1]) << 16))

struct itq_lane_block {
#if ITQ_SYMBOL_BITS > 1
    uint symbols[8];  // two bits a weight, a word of both chunks each, for the first from bit `from` of every byte on
    uint from;
#endif
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

// The selectors of chunk k, and in the highest bits those before it. Those of an invocation's second chunk are no state.
#if defined(A_TYPE_PACKED32)
uint itq_selectors(const uint ib, const uint k) {
    return data_a_packed32[ib].sel[k];
}

uint itq_selectors_before(const uint ib, const uint k, const uint g) {
    const uint before = data_a_packed32[ib].sel[max(k, 1) - 1];
    return g == 0 && k == 0 ? bitfieldReverse(data_a_packed32[ib].dz >> 16) : before;
}
#else
uint itq_selectors(const uint ib, const uint k) {
    return ITQ_PAIR(data_a_packed16[ib].sel, k);
}

uint itq_selectors_before(const uint ib, const uint k, const uint g) {
    const uint before = uint(data_a_packed16[ib].sel[2 * max(k, 1) - 1]) << 16;
    return g == 0 && k == 0 ? ITQ_STATE(data_a_packed16[ib]) : before;
}
#endif

itq_lane_block itq_open(const uint ib, const uint lane) {
    itq_lane_block block;
#if ITQ_SYMBOL_BITS > 1 && QUANT_K == 256
    // the first half of a chunk and the second, side by side
#if defined(A_TYPE_PACKED32)
    [[unroll]] for (uint n = 0; n < 4; ++n) {
        const uint a = data_a_packed32[ib].qs[8 * (lane / 2) + n];
        const uint b = data_a_packed32[ib].qs[8 * (lane / 2) + n + 4];
        block.symbols[2 * n]     = bitfieldInsert(a, b, 16, 16);
        block.symbols[2 * n + 1] = bitfieldInsert(b, a >> 16, 0, 16);
    }
#else
    [[unroll]] for (uint w = 0; w < 8; ++w) {
        const uint a     = uint(data_a_packed16[ib].qs[16 * (lane / 2) + w]);
        const uint b     = uint(data_a_packed16[ib].qs[16 * (lane / 2) + w + 8]);
        block.symbols[w] = (a | (b << 16)) >> (4 * (lane % 2));
    }
#endif
    block.from = ITQ_SYMBOL_BITS == 2 ? 4 * (lane % 2) : 0;
#elif ITQ_SYMBOL_BITS > 1
    // the second half of a chunk is in the next plane of the same bytes
    [[unroll]] for (uint w = 0; w < 8; ++w) {
        const uint q     = uint(data_a_packed16[ib].qs[w]);
        block.symbols[w] = q | (q << 14);
    }
    block.from = 0;
#endif
#if defined(A_TYPE_PACKED32)
    const vec2 dz = unpackHalf2x16(data_a_packed32[ib].dz & 0xFFC0FFFFu);
    block.d       = dz.x;
    block.z       = dz.y;
#else
    block.d = ITQ_SCALE(data_a_packed16[ib]);
    block.z = 0.0;
#endif
    return block;
}

// Fields of a and b change places: those of a that are not in `low` and those of b that are, `by` bits apart.
void itq_swap(inout uint a, inout uint b, const uint by, const uint low) {
    const uint changed = ((a >> by) ^ b) & low;
    a ^= changed << by;
    b ^= changed;
}

// What says which levels the words of a chunk have, number g of the invocation.
struct itq_lane_words {
#if ITQ_SYMBOL_BITS == 1
    uint word[4];  // those of the words w and, from bit 8 on, w + 4
#else
    uint word[8];  // of three-bit symbols an index in every byte
    uint from;
#endif
};

itq_lane_words itq_lane_chunk_words(const itq_lane_block block, const uint ib, const uint k, const uint g) {
    // planes of bits to bytes with a field from each; of three-bit symbols to half bytes with a bit from each
    uint fields[4];
    itq_subsets(itq_selectors(ib, k), itq_selectors_before(ib, k, g), fields[3], fields[2], fields[1]);
#if ITQ_SYMBOL_BITS == 2
    fields[0] = (fields[1] & 0x33333333u) << 2;
    fields[1] &= 0xCCCCCCCCu;
#else
    fields[0] = ITQ_PAIR(data_a_packed16[ib].qs, ITQ_BITS_FROM / 4 + k);
#endif
#if ITQ_SYMBOL_BITS == 1
    itq_swap(fields[0], fields[1], 2, 0x33333333u);
#endif
#if ITQ_SYMBOL_BITS < 3
    itq_swap(fields[2], fields[3], 2, 0x33333333u);
    itq_swap(fields[0], fields[2], 4, 0x0F0F0F0Fu);
    itq_swap(fields[1], fields[3], 4, 0x0F0F0F0Fu);
#else
    itq_swap(fields[0], fields[2], 2, 0x33333333u);
    itq_swap(fields[1], fields[3], 2, 0x33333333u);
    [[unroll]] for (uint n = 0; n < 4; n += 2) {
        itq_swap(fields[n], fields[n + 1], 1, 0x55555555u);
        itq_swap(fields[n], fields[n + 1], 8, 0x00FF00FFu);
    }
#endif

    itq_lane_words words;
#if ITQ_SYMBOL_BITS == 1
    words.word = fields;
#elif ITQ_SYMBOL_BITS == 3
    words.from = QUANT_K == 256 ? 2 * g : 0;
    [[unroll]] for (uint w = 0; w < 8; ++w) {
        const uint symbols = block.symbols[w] >> (QUANT_K == 256 ? 0 : 4 * g);
        const uint field   = fields[2 * (w % 2) + w / 4];
        const uint others  = w % 4 < 2 ? field << (2 + words.from) : field >> (2 - words.from);
        words.word[w]      = (symbols & (0x03030303u << words.from)) | (others & (0x3C3C3C3Cu << words.from));
    }
#else
    words.from = block.from + (QUANT_K == 256 ? 2 : 4) * g;
    [[unroll]] for (uint w = 0; w < 8; ++w) {
        const uint subsets = w < 4 ? fields[w] << words.from : fields[w - 4] >> (8 - words.from);
        words.word[w]      = (block.symbols[w] & (0x03030303u << words.from)) | subsets;
    }
#endif
    return words;
}

// Levels of word w.
#if ITQ_SYMBOL_BITS == 1
#define ITQ_LANE_LEVELS(words, w) itq_levels_at((words).word[(w) % 4], 8 * ((w) / 4))
#elif ITQ_SYMBOL_BITS == 2
#define ITQ_LANE_LEVELS(words, w) itq_levels_at((words).word[w], (words).from)
#else
#define ITQ_LANE_LEVELS(words, w) itq_levels4((words).word[w], (words).from)
#endif

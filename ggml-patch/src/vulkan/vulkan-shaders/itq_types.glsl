// Blocks of the trellis types, their levels, and the indices of levels (docs/format.md, section "Decoding"). types.glsl
// includes this file; DATA_A_ITQ3_S or the like says of which type the weights are: what sets one apart stands here, and
// all that follows takes it from here.
//
// A chunk is 32 consecutive weights of a block, k = 0..7 or, of blocks of 64, 0..1. An index of a level has the symbol in
// its lowest bits, then c0, c1 and c2.

#if defined(DATA_A_ITQ3_S)
#define ITQ_SYMBOL_BITS 2
#define QUANT_K 256
#define ITQ_HAS_ZERO_POINT
#elif defined(DATA_A_ITQ2_S)
#define ITQ_SYMBOL_BITS 1
#define QUANT_K 256
#elif defined(DATA_A_ITQ4_S)
#define ITQ_SYMBOL_BITS 3
#define QUANT_K 256
#elif defined(DATA_A_ITQ3_N)
#define ITQ_SYMBOL_BITS 2
#define QUANT_K 64
#elif defined(DATA_A_ITQ2_N)
#define ITQ_SYMBOL_BITS 1
#define QUANT_K 64
#elif defined(DATA_A_ITQ4_N)
#define ITQ_SYMBOL_BITS 3
#define QUANT_K 64
#endif

#if defined(ITQ_SYMBOL_BITS)

#define DATA_A_ITQ
#define QUANT_R 1
#define ITQ_SYMBOL_BYTES (QUANT_K * ITQ_SYMBOL_BITS / 8)
#define ITQ_LEVELS (8 << ITQ_SYMBOL_BITS)
// Byte of qs from which on there are bits in the order of the selectors: symbols of one bit, or third bits.
#define ITQ_BITS_FROM (ITQ_SYMBOL_BITS == 1 ? 0 : QUANT_K / 4)

// d and z are numbers of 16 bits; the six lowest bits of the last one are the start state.
struct block_itq
{
    uint8_t qs[ITQ_SYMBOL_BYTES];
    uint8_t sel[QUANT_K / 8];
    uint16_t d;
#if defined(ITQ_HAS_ZERO_POINT)
    uint16_t z;
#endif
};

struct block_itq_packed16
{
    uint16_t qs[ITQ_SYMBOL_BYTES / 2];
    uint16_t sel[QUANT_K / 16];
    uint16_t d;
#if defined(ITQ_HAS_ZERO_POINT)
    uint16_t z;
#endif
};

#define A_TYPE block_itq
#define A_TYPE_PACKED16 block_itq_packed16

#if defined(ITQ_HAS_ZERO_POINT)  // which makes whole words of it
struct block_itq_packed32
{
    uint32_t qs[ITQ_SYMBOL_BYTES / 4];
    uint32_t sel[QUANT_K / 32];
    uint32_t dz;
};

#define A_TYPE_PACKED32 block_itq_packed32
#endif

// Scale, zero-point and start state of a block. The state is in the order of the selectors before the first: bit 31-i is
// its bit i, and bits below the sixth are not of it.
#define ITQ_WITHOUT_STATE(number) unpackHalf2x16(uint(number) & 0xFFC0u).x
#if defined(ITQ_HAS_ZERO_POINT)
#define ITQ_SCALE(BLOCK) unpackHalf2x16(uint((BLOCK).d)).x
#define ITQ_ZERO_POINT(BLOCK) ITQ_WITHOUT_STATE((BLOCK).z)
#define ITQ_STATE(BLOCK) bitfieldReverse(uint((BLOCK).z))
#else
#define ITQ_SCALE(BLOCK) ITQ_WITHOUT_STATE((BLOCK).d)
#define ITQ_ZERO_POINT(BLOCK) 0.0
#define ITQ_STATE(BLOCK) bitfieldReverse(uint((BLOCK).d))
#endif

// Rotated activations are a sixteenth of what the formula says, so that a near-constant block of numbers that F16 holds
// is none that overflows it; weights are sixteen times as large: d/2 for d/32.
#define ITQ_WEIGHT_SCALE 0.5
// In products of integers neither is: a sixteenth would cost them bits of a small scale of activations.
#define ITQ_INTEGER_SCALE 0.03125
// A true weight is d/32 times the normalised transform of levels.
#define ITQ_ROTATED_BACK (ITQ_INTEGER_SCALE * ITQ_FWHT_NORMALISED)

// By 8*symbol + 4*c2 + 2*c1 + c0.
#if ITQ_SYMBOL_BITS == 3
const int itq_levels_const[ITQ_LEVELS] = int[](
    -61, -50, -43, -38, -34, -31, -29, -27, -25, -24, -22, -21, -19, -18, -17, -15,
    -15, -13, -12, -11, -11, -9, -8, -8, -7, -5, -5, -4, -3, -2, -1, -1,
    1, 1, 2, 3, 4, 5, 5, 7, 8, 8, 9, 11, 11, 12, 13, 15,
    15, 17, 18, 19, 21, 22, 24, 25, 27, 29, 31, 34, 38, 43, 50, 61
);
#elif ITQ_SYMBOL_BITS == 2
const int itq_levels_const[ITQ_LEVELS] = int[](
    -59, -45, -37, -32, -27, -25, -21, -18, -16, -14, -11, -9, -7, -5, -3, -1,
    1, 3, 5, 7, 9, 11, 14, 16, 18, 21, 25, 27, 32, 37, 45, 59
);
#else
const int itq_levels_const[ITQ_LEVELS] = int[](-61, -41, -32, -25, -18, -13, -7, -3, 3, 7, 13, 18, 25, 32, 41, 61);
#endif

// Bits 0 to 3 of x to bits 0, 8, 16 and 24.
uint itq_spread4(const uint x) {
    return ((x & 0xF) * 0x00204081u) & 0x01010101u;
}

// Indices of four consecutive weights, a byte each: their symbols, a byte each, and the bits of the selectors from the
// sixth before the first weight on.
uint itq_index4(const uint symbols, const uint window) {
    const uint c2 = (window >> 6) ^ (window >> 1) ^ window;
    const uint c1 = (window >> 5) ^ (window >> 3) ^ (window >> 2) ^ (window >> 1);
    const uint c0 = (window >> 4) ^ (window >> 2);
    return symbols | (itq_spread4(c2) << (ITQ_SYMBOL_BITS + 2)) | (itq_spread4(c1) << (ITQ_SYMBOL_BITS + 1)) |
           (itq_spread4(c0) << ITQ_SYMBOL_BITS);
}

// The same of weights 4*q to 4*q + 3 of a block from its arrays of bytes. A plane of symbols of two bits is a quarter of
// the block.
#define ITQ_BITS4(BLOCK, q) itq_spread4(uint((BLOCK).qs[ITQ_BITS_FROM + (q) / 2]) >> (4 * ((q) & 1)))
#define ITQ_PLANE (QUANT_K / 16)
#define ITQ_LOWER4(BLOCK, q) \
    ((pack32(u8vec4((BLOCK).qs[4 * ((q) % ITQ_PLANE)], (BLOCK).qs[4 * ((q) % ITQ_PLANE) + 1], \
                    (BLOCK).qs[4 * ((q) % ITQ_PLANE) + 2], (BLOCK).qs[4 * ((q) % ITQ_PLANE) + 3])) \
      >> (2 * ((q) / ITQ_PLANE))) & 0x03030303u)
#if ITQ_SYMBOL_BITS == 1
#define ITQ_SYMBOLS4(BLOCK, q) ITQ_BITS4(BLOCK, q)
#elif ITQ_SYMBOL_BITS == 2
#define ITQ_SYMBOLS4(BLOCK, q) ITQ_LOWER4(BLOCK, q)
#else
#define ITQ_SYMBOLS4(BLOCK, q) (ITQ_LOWER4(BLOCK, q) | (ITQ_BITS4(BLOCK, q) << 2))
#endif
#define ITQ_WINDOW4(BLOCK, q) \
    (((uint((BLOCK).sel[(q) / 2]) << 8) | \
      ((q) < 2 ? ITQ_STATE(BLOCK) >> 24 : uint((BLOCK).sel[max((q) / 2, 1) - 1]))) >> (2 + 4 * ((q) & 1)))
#define ITQ_INDEX4(BLOCK, q) itq_index4(ITQ_SYMBOLS4(BLOCK, q), ITQ_WINDOW4(BLOCK, q))

// The selectors of a chunk, and those before it in the highest bits, to the subsets of its weights: bit b of c2, c1 and c0
// belongs to weight b.
void itq_subsets(const uint sel, const uint before, out uint c2, out uint c1, out uint c0) {
    const uint s4 = (sel << 4) | (before >> 28);
    const uint s5 = (sel << 5) | (before >> 27);
    c2 = sel ^ s5 ^ ((sel << 6) | (before >> 26));
    c1 = ((sel << 1) | (before >> 31)) ^ ((sel << 3) | (before >> 29)) ^ s4 ^ s5;
    c0 = ((sel << 2) | (before >> 30)) ^ s4;
}

#define NEEDS_INIT_IQ_SHMEM

#if (defined(KVALUES_IQ4NL_I8) || defined(ITQ_PAIRS)) && ITQ_SYMBOL_BITS < 3  // products of integers, and of few columns
// Levels of two neighbouring weights by what says which: in the lower half signed bytes or, in floating point, two F16.
//
// Their number has the bits of both side by side, as fields of two bits: from the lowest on those of one-bit symbols (of
// longer ones the symbol of the first), of c0, of c1, of c2, and of longer symbols that of the second.
#define ITQ_PAIR_BITS (2 * ITQ_SYMBOL_BITS + 6)
shared uint itq_pairs[1 << ITQ_PAIR_BITS];

uint itq_pair(const int a, const int b) {
#if defined(ITQ_PAIRS)
    return packHalf2x16(vec2(a, b));
#else
    return bitfieldInsert(uint(a) & 0xFF, uint(b), 8, 8);
#endif
}

// A number's bits of the first weight's subset.
uint itq_pair_subset(const uint subset) {
    return ((subset & 1) | ((subset & 2) << 1) | ((subset & 4) << 2)) << 2;
}

void init_iq_shmem(uvec3 wgsize) {
    for (uint i = gl_LocalInvocationIndex.x; i < ITQ_LEVELS << ITQ_SYMBOL_BITS; i += wgsize.x) {
        const uint a    = i % ITQ_LEVELS;
        const uint b    = i / ITQ_LEVELS;  // symbol of the second
        const uint from = (a / 8) | itq_pair_subset(a % 8) | (ITQ_SYMBOL_BITS == 1 ? b << 1 : b << 8);
        [[unroll]] for (uint c = 0; c < 8; ++c) {
            itq_pairs[from | (itq_pair_subset(c) << 1)] = itq_pair(itq_levels_const[a], itq_levels_const[8 * b + c]);
        }
    }
    barrier();
}

// What two numbers, from these bits of both halves of a word on, stand for: the levels of four weights.
#define ITQ_PAIR_AT(word, from, upper) itq_pairs[bitfieldExtract(word, int((from) + 16 * (upper)), ITQ_PAIR_BITS)]
#if defined(ITQ_PAIRS)
vec4 itq_levels_at(const uint word, const uint from) {
    return vec4(unpackHalf2x16(ITQ_PAIR_AT(word, from, 0)), unpackHalf2x16(ITQ_PAIR_AT(word, from, 1)));
}
#else
int32_t itq_levels_at(const uint word, const uint from) {
    return int32_t(bitfieldInsert(ITQ_PAIR_AT(word, from, 0), ITQ_PAIR_AT(word, from, 1), 16, 16));
}
#endif
#else
// Of symbols of three bits there would be 4096 pairs, too many to make for a workgroup: one look-up a weight.
#define ITQ_LEVEL_OF(index) itq_levels_const[8 * ((index) % (ITQ_LEVELS / 8)) + (index) / (ITQ_LEVELS / 8)]
#if defined(KVALUES_IQ4NL_I8)
shared int itq_levels[4][ITQ_LEVELS];  // by place in a word of four signed bytes

void init_iq_shmem(uvec3 wgsize) {
    for (uint i = gl_LocalInvocationIndex.x; i < ITQ_LEVELS; i += wgsize.x) {
        [[unroll]] for (uint n = 0; n < 4; ++n) {
            itq_levels[n][i] = (ITQ_LEVEL_OF(i) & 0xFF) << (8 * n);
        }
    }
    barrier();
}

// Levels of four indices, six bits from this bit of every byte on.
int32_t itq_levels4(const uint index, const uint from) {
    int levels = itq_levels[0][bitfieldExtract(index, int(from), 6)];
    [[unroll]] for (uint n = 1; n < 4; ++n) {
        levels |= itq_levels[n][bitfieldExtract(index, int(8 * n + from), 6)];
    }
    return int32_t(levels);
}
#else
#if !defined(FLOAT_TYPE)  // weights that are rotated back
#define FLOAT_TYPE float
#endif
shared FLOAT_TYPE itq_levels[ITQ_LEVELS];

void init_iq_shmem(uvec3 wgsize) {
    for (uint i = gl_LocalInvocationIndex.x; i < itq_levels.length(); i += wgsize.x) {
        itq_levels[i] = FLOAT_TYPE(ITQ_LEVEL_OF(i));
    }
    barrier();
}

// Levels of four indices, six bits from this bit of every byte on.
vec4 itq_levels4(const uint index, const uint from) {
    vec4 levels;
    [[unroll]] for (uint n = 0; n < 4; ++n) {
        levels[n] = itq_levels[bitfieldExtract(index, int(8 * n + from), 6)];
    }
    return levels;
}
#endif
#endif

#endif

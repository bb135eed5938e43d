// Blocks of the trellis types, their levels, and the indices of levels (docs/format.md, section "Decoding"). types.glsl
// includes this file; DATA_A_ITQ3_S, DATA_A_ITQ2_S, DATA_A_ITQ3_N or DATA_A_ITQ2_N says of which type the weights are.
//
// A chunk is 32 consecutive weights of a block, k = 0..7 or, of blocks of 64, 0..1. An index of a level is
// 4*symbol + 2*c1 + c0.

struct block_itq3_s
{
    uint8_t qs[64];
    uint8_t sel[32];
    float16_t d;
    float16_t z;
};

struct block_itq3_s_packed32
{
    uint32_t qs[16];
    uint32_t sel[8];
    uint32_t dz;
};

struct block_itq2_s
{
    uint8_t qs[32];
    uint8_t sel[32];
    float16_t d;
};

struct block_itq2_s_packed16
{
    uint16_t qs[16];
    uint16_t sel[16];
    float16_t d;
};

// Those of blocks of 64 where they are wanted alone: the sources of all other shaders are then what they were.
#if defined(DATA_A_ITQ3_N)
struct block_itq3_n
{
    uint8_t qs[16];
    uint8_t sel[8];
    float16_t d;
};

struct block_itq3_n_packed16
{
    uint16_t qs[8];
    uint16_t sel[4];
    float16_t d;
};
#elif defined(DATA_A_ITQ2_N)
struct block_itq2_n
{
    uint8_t qs[8];
    uint8_t sel[8];
    float16_t d;
};

struct block_itq2_n_packed16
{
    uint16_t qs[4];
    uint16_t sel[4];
    float16_t d;
};
#endif

#if defined(DATA_A_ITQ3_S) || defined(DATA_A_ITQ2_S) || defined(DATA_A_ITQ3_N) || defined(DATA_A_ITQ2_N)

#define DATA_A_ITQ
#define QUANT_R 1
#if defined(DATA_A_ITQ3_S) || defined(DATA_A_ITQ2_S)
#define QUANT_K 256
#else
#define QUANT_K 64
#endif

// Rotated activations are a sixteenth of what the formula says, so that a near-constant block of numbers that F16 holds
// is none that overflows it; weights are sixteen times as large: d/2 for d/32.
#define ITQ_WEIGHT_SCALE 0.5
// In products of integers neither is: a sixteenth would cost them bits of a small scale of activations.
#define ITQ_INTEGER_SCALE 0.03125
// A true weight is d/32 times the normalised transform of levels.
#define ITQ_ROTATED_BACK (ITQ_INTEGER_SCALE * ITQ_FWHT_NORMALISED)

#if defined(DATA_A_ITQ3_S)
#define A_TYPE block_itq3_s
#define A_TYPE_PACKED32 block_itq3_s_packed32
#elif defined(DATA_A_ITQ2_S)
#define A_TYPE block_itq2_s
#define A_TYPE_PACKED16 block_itq2_s_packed16
#elif defined(DATA_A_ITQ3_N)
#define A_TYPE block_itq3_n
#define A_TYPE_PACKED16 block_itq3_n_packed16
#else
#define A_TYPE block_itq2_n
#define A_TYPE_PACKED16 block_itq2_n_packed16
#endif

// The upper half of the levels, four a word, lowest in the lowest byte; the lower half is their negative.
#if defined(DATA_A_ITQ3_S) || defined(DATA_A_ITQ3_N)
#define ITQ_SYMBOL_BITS 2
#define ITQ_LEVELS 16
const uint itq_upper_levels[2] = { 0x140C0702u, 0x3F2C2118u };  // 2 7 12 20, 24 33 44 63
#else
#define ITQ_SYMBOL_BITS 1
#define ITQ_LEVELS 8
const uint itq_upper_levels[2] = { 0x3F241406u, 0u };  // 6 20 36 63
#endif

int itq_level(const uint index) {
    const uint upper = index >= ITQ_LEVELS / 2 ? index - ITQ_LEVELS / 2 : ITQ_LEVELS / 2 - 1 - index;
    const uint word  = upper < 4 ? itq_upper_levels[0] : itq_upper_levels[1];
    const int  level = int((word >> (8 * (upper & 3))) & 0xFF);
    return index >= ITQ_LEVELS / 2 ? level : -level;
}

// Bits 0 to 3 of x to bits 0, 8, 16 and 24.
uint itq_spread4(const uint x) {
    return ((x & 0xF) * 0x00204081u) & 0x01010101u;
}

// Indices of four consecutive weights, a byte each: their symbols, a byte each, and the bits of the selectors from the
// sixth before the first weight on.
uint itq_index4(const uint symbols, const uint window) {
    const uint c1 = (window >> 6) ^ (window >> 5) ^ window;
    const uint c0 = (window >> 4) ^ (window >> 2);
    return (symbols << 2) | (itq_spread4(c1) << 1) | itq_spread4(c0);
}

// The same of weights 4*q to 4*q + 3 of a block from its arrays of bytes. A plane of symbols of two bits is a quarter of
// the block.
#if ITQ_SYMBOL_BITS == 2
#define ITQ_PLANE (QUANT_K / 16)
#define ITQ_SYMBOLS4(BLOCK, q) \
    ((pack32(u8vec4((BLOCK).qs[4 * ((q) % ITQ_PLANE)], (BLOCK).qs[4 * ((q) % ITQ_PLANE) + 1], \
                    (BLOCK).qs[4 * ((q) % ITQ_PLANE) + 2], (BLOCK).qs[4 * ((q) % ITQ_PLANE) + 3])) \
      >> (2 * ((q) / ITQ_PLANE))) & 0x03030303u)
#else
#define ITQ_SYMBOLS4(BLOCK, q) itq_spread4(uint((BLOCK).qs[(q) / 2]) >> (4 * ((q) & 1)))
#endif
#define ITQ_WINDOW4(BLOCK, q) \
    (((uint((BLOCK).sel[(q) / 2]) << 8) | ((q) < 2 ? 0u : uint((BLOCK).sel[max((q) / 2, 1) - 1]))) >> (2 + 4 * ((q) & 1)))
#define ITQ_INDEX4(BLOCK, q) itq_index4(ITQ_SYMBOLS4(BLOCK, q), ITQ_WINDOW4(BLOCK, q))

#if defined(DATA_A_ITQ3_S)
#define ITQ_HAS_ZERO_POINT
#define ITQ_ZERO_POINT(BLOCK) float((BLOCK).z)
#else
#define ITQ_ZERO_POINT(BLOCK) 0.0
#endif

// The selectors of a chunk, and of the one before it (0 before the first), to the grids of its weights: bit b of c1 and
// of c0 belongs to weight b.
void itq_grids(const uint sel, const uint before, out uint c1, out uint c0) {
    c1 = sel ^ ((sel << 1) | (before >> 31)) ^ ((sel << 6) | (before >> 26));
    c0 = ((sel << 2) | (before >> 30)) ^ ((sel << 4) | (before >> 28));
}

// Indices of the levels of a chunk, eight a word: nibble m of index[i] belongs to weight 4*m + i.
//
// symbols[i] has the symbols where the indices have them: bits 2 and 3 (ITQ2_S: bit 2) of nibble m. The others are 0.
void itq_indices(const uint symbols[4], const uint sel, const uint before, out uint index[4]) {
    uint c1, c0;
    itq_grids(sel, before, c1, c0);
    const uint even = ((c1 << 1) & 0xAAAAAAAAu) | (c0 & 0x55555555u);
    const uint odd  = (c1 & 0xAAAAAAAAu) | ((c0 >> 1) & 0x55555555u);
    index[0] = symbols[0] | (even & 0x33333333u);
    index[1] = symbols[1] | (odd & 0x33333333u);
    index[2] = symbols[2] | ((even >> 2) & 0x33333333u);
    index[3] = symbols[3] | ((odd >> 2) & 0x33333333u);
}

#if ITQ_SYMBOL_BITS == 2
// Fields of a and b change places: those of a that are not in `low` and those of b that are, `by` bits apart.
void itq_swap(inout uint a, inout uint b, const uint by, const uint low) {
    const uint lower = (a & low) | ((b << by) & ~low);
    b                = ((a >> by) & low) | (b & ~low);
    a                = lower;
}

// Symbols of 64 weights, four words of four bytes of two nibbles, to words of nibbles: byte i of all words makes word i.
void itq_transpose(inout uint x[4]) {
    itq_swap(x[0], x[1], 8, 0x00FF00FFu);
    itq_swap(x[2], x[3], 8, 0x00FF00FFu);
    [[unroll]] for (uint i = 0; i < 2; ++i) {
        const uint lower = x[i];
        x[i]     = bitfieldInsert(lower, x[i + 2], 16, 16);
        x[i + 2] = bitfieldInsert(x[i + 2], lower >> 16, 0, 16);
    }
}
#else
// Symbols of a chunk, a bit each, to the third bits of nibbles: nibble m of symbols[i] belongs to weight 4*m + i.
void itq_symbols(const uint q, out uint symbols[4]) {
    symbols[0] = (q << 2) & 0x44444444u;
    symbols[1] = (q << 1) & 0x44444444u;
    symbols[2] = q & 0x44444444u;
    symbols[3] = (q >> 1) & 0x44444444u;
}
#endif

#define NEEDS_INIT_IQ_SHMEM

#if defined(KVALUES_IQ4NL_I8)  // products of integers
// Levels of two indices as signed bytes in the lower half: entry 16*b + a is those of a and b.
shared uint itq_pairs[256];

void init_iq_shmem(uvec3 wgsize) {
    for (uint i = gl_LocalInvocationIndex.x; i < itq_pairs.length(); i += wgsize.x) {
        const uint mask = ITQ_LEVELS - 1;
        itq_pairs[i]    = (uint(itq_level(i & mask)) & 0xFF) | ((uint(itq_level((i >> 4) & mask)) & 0xFF) << 8);
    }
    barrier();
}

// Levels of the four indices in a half of a word, the lower or the upper one, as four signed bytes.
int32_t itq_level_bytes(const uint index, const uint upper) {
    const uint a = upper == 0 ? index & 0xFF : bitfieldExtract(index, 16, 8);
    const uint b = upper == 0 ? bitfieldExtract(index, 8, 8) : index >> 24;
    return int32_t(bitfieldInsert(itq_pairs[a], itq_pairs[b], 16, 16));
}
#else
shared FLOAT_TYPE itq_levels[ITQ_LEVELS];

void init_iq_shmem(uvec3 wgsize) {
    for (uint i = gl_LocalInvocationIndex.x; i < itq_levels.length(); i += wgsize.x) {
        itq_levels[i] = FLOAT_TYPE(itq_level(i));
    }
    barrier();
}

// Levels of four indices, a byte each.
vec4 itq_levels4(const uint index) {
    return vec4(itq_levels[index & 0xFF], itq_levels[bitfieldExtract(index, 8, 8)],
                itq_levels[bitfieldExtract(index, 16, 8)], itq_levels[index >> 24]);
}
#endif

#endif

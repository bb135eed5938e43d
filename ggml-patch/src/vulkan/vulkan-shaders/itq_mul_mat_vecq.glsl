// Products of the trellis types and of TQ1_0 and TQ2_0 with one to eight columns of quantized activations
// (itq_quantize_q8_1.comp; upstream's quantize_q8_1.comp for the ternary types). mul_mat_vecq.comp includes this file.
//
// An invocation takes 64 weights of a block, GROUPS chunks of 32 with WORDS words of four weights from each; LANES share it.

#define LANES (QUANT_K / 64)

#if defined(DATA_A_ITQ)
#include "itq_lane.glsl"

#define GROUPS 2
#define WORDS 8

uint chunk_of(const uint lane, const uint g) {
    return itq_lane_chunk(lane, g);
}

uint word_of(const uint lane, const uint g, const uint w) {
    return w;
}

void decode(const uint ib, const uint lane, out int32_t weights[GROUPS][WORDS], out float d, out float z) {
    const itq_lane_block block = itq_open(ib, lane);
    [[unroll]] for (uint g = 0; g < GROUPS; ++g) {
        const itq_lane_words words = itq_lane_chunk_words(block, ib, chunk_of(lane, g), g);
        [[unroll]] for (uint w = 0; w < WORDS; ++w) {
            weights[g][w] = ITQ_LANE_LEVELS(words, w);
        }
    }
    d = block.d * ITQ_INTEGER_SCALE;
    z = block.z;
}
#elif defined(DATA_A_TQ2_0)
// Number 2*h + s takes half s of the bytes of half h of a block.
#define GROUPS 4
#define WORDS 4

uint chunk_of(const uint lane, const uint g) {
    return 4 * (lane / 2) + g;
}

uint word_of(const uint lane, const uint g, const uint w) {
    return 4 * (lane % 2) + w;
}

void decode(const uint ib, const uint lane, out int32_t weights[GROUPS][WORDS], out float d, out float z) {
    [[unroll]] for (uint w = 0; w < WORDS; ++w) {
        const uint q = pack32(u16vec2(data_a_packed16[ib].qs[8 * lane + 2 * w], data_a_packed16[ib].qs[8 * lane + 2 * w + 1]));
        [[unroll]] for (uint g = 0; g < GROUPS; ++g) {
            weights[g][w] = int32_t((q >> (2 * g)) & 0x03030303u);
        }
    }
    d = float(data_a_packed16[ib].d);
    z = 1.0;
}
#else
#include "tq1_0_lane.glsl"
#endif

// Of the activations that belong to chunk k of block i in a row of them from y on: their block, and the chunk in it.
uvec2 activations_of(const uint y, const uint i, const uint k) {
#if QUANT_K == 256
    return uvec2(y / 128 + 2 * i + k / 4, k % 4);
#else
    const uint half_block = y / 64 + i;
    return uvec2(half_block / 2, 2 * (half_block % 2) + k);
#endif
}

void calc_block(inout FLOAT_TYPE temp[NUM_COLS][NUM_ROWS], const uint a_offset, const uint b_offset, const uint lane,
                const uint i, const uint num_blocks_per_row, const uint first_row, const uint num_rows) {
    [[unroll]] for (uint n = 0; n < num_rows; ++n) {
        int32_t weights[GROUPS][WORDS];
        float d;
        float z;
        decode(a_offset + (first_row + n) * num_blocks_per_row + i, lane, weights, d, z);
        [[unroll]] for (uint j = 0; j < NUM_COLS; ++j) {
            FLOAT_TYPE sum = FLOAT_TYPE(0);
            [[unroll]] for (uint g = 0; g < GROUPS; ++g) {
                const uvec2 y = activations_of(j * p.batch_stride_b + b_offset, i, chunk_of(lane, g));
                int32_t q_sum = 0;
                [[unroll]] for (uint w = 0; w < WORDS; ++w) {
                    q_sum += dotPacked4x8EXT(weights[g][w], data_b[y.x].qs[8 * y.y + word_of(lane, g, w)]);
                }
                const vec2 ds = vec2(data_b[y.x].ds[y.y]);
#if defined(DATA_A_ITQ)
                float q = float(q_sum);
                if (z != 0.0) {
                    int32_t y_sum = 0;
                    [[unroll]] for (uint w = 0; w < WORDS; ++w) {
                        y_sum += dotPacked4x8EXT(0x01010101, data_b[y.x].qs[8 * y.y + w]);
                    }
                    q -= z * float(y_sum);
                }
                sum = fma(FLOAT_TYPE(ds.x), FLOAT_TYPE(q), sum);
#else
                // digits minus one: the sum of a chunk is shared by the invocations that share it
                sum = fma(FLOAT_TYPE(ds.x), FLOAT_TYPE(q_sum), sum - FLOAT_TYPE(ds.y * (WORDS / 8.0)));
#endif
            }
            temp[j][n] = fma(FLOAT_TYPE(d), sum, temp[j][n]);
        }
    }
}

void compute_outputs(const uint32_t first_row, const uint32_t num_rows) {
    uint a_offset, b_offset, d_offset;
    get_offsets(a_offset, b_offset, d_offset);

    const uint num_blocks_per_row = p.ncols / QUANT_K;
    const uint tid                = gl_LocalInvocationID.x;

    FLOAT_TYPE temp[NUM_COLS][NUM_ROWS];
    [[unroll]] for (uint j = 0; j < NUM_COLS; ++j) {
        [[unroll]] for (uint i = 0; i < NUM_ROWS; ++i) {
            temp[j][i] = FLOAT_TYPE(0);
        }
    }
    for (uint i = tid / LANES; i < num_blocks_per_row; i += gl_WorkGroupSize.x / LANES) {
        calc_block(temp, a_offset, b_offset, tid % LANES, i, num_blocks_per_row, first_row, num_rows);
    }
    reduce_result(temp, d_offset, first_row, num_rows, tid);
}

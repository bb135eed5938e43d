#version 450

// Products of TQ1_0 with one to eight columns in floating point: a row is decoded once for all of them. Four invocations
// share a block (tq1_0_lane.glsl).

#extension GL_EXT_shader_explicit_arithmetic_types : require

#include "mul_mat_vec_base.glsl"

layout(local_size_x_id = 0, local_size_y = 1, local_size_z = 1) in;

FLOAT_TYPE temp[NUM_COLS][NUM_ROWS];

#include "tq1_0_lane.glsl"

void calc_block(const uint a_offset, const uint b_offset, const uint lane, const uint i, const uint num_blocks_per_row,
                const uint first_row, const uint num_rows) {
    [[unroll]] for (uint n = 0; n < num_rows; ++n) {
        int32_t words[GROUPS][WORDS];
        float d;
        float z;
        decode(a_offset + (first_row + n) * num_blocks_per_row + i, lane, words, d, z);
        FLOAT_TYPE sum[NUM_COLS];
        [[unroll]] for (uint j = 0; j < NUM_COLS; ++j) {
            sum[j] = FLOAT_TYPE(0);
        }
        [[unroll]] for (uint g = 0; g < GROUPS; ++g) {
            [[unroll]] for (uint w = 0; w < WORDS; ++w) {
                const vec4 trits = vec4(unpack8(uint32_t(words[g][w]))) - 1.0;
                const uint y     = QUANT_K / 4 * i + 8 * chunk_of(lane, g) + word_of(lane, g, w);
                [[unroll]] for (uint j = 0; j < NUM_COLS; ++j) {
                    const vec4 b = vec4(data_b_v4[(j * p.batch_stride_b + b_offset) / 4 + y]);
                    sum[j] = fma(FLOAT_TYPE(b.x), FLOAT_TYPE(trits.x),
                             fma(FLOAT_TYPE(b.y), FLOAT_TYPE(trits.y),
                             fma(FLOAT_TYPE(b.z), FLOAT_TYPE(trits.z),
                             fma(FLOAT_TYPE(b.w), FLOAT_TYPE(trits.w), sum[j]))));
                }
            }
        }
        [[unroll]] for (uint j = 0; j < NUM_COLS; ++j) {
            temp[j][n] = fma(FLOAT_TYPE(d), sum[j], temp[j][n]);
        }
    }
}

void compute_outputs(const uint32_t first_row, const uint32_t num_rows) {
    uint a_offset, b_offset, d_offset;
    get_offsets(a_offset, b_offset, d_offset);

    const uint num_blocks_per_row = p.ncols / QUANT_K;
    const uint tid                = gl_LocalInvocationID.x;

    [[unroll]] for (uint j = 0; j < NUM_COLS; ++j) {
        [[unroll]] for (uint i = 0; i < NUM_ROWS; ++i) {
            temp[j][i] = FLOAT_TYPE(0);
        }
    }
    for (uint i = tid / 4; i < num_blocks_per_row; i += gl_WorkGroupSize.x / 4) {
        calc_block(a_offset, b_offset, tid % 4, i, num_blocks_per_row, first_row, num_rows);
    }
    reduce_result(temp, d_offset, first_row, num_rows, tid);
}

void main() {
    const uint first_row = NUM_ROWS * (gl_WorkGroupID.x + gl_NumWorkGroups.x * gl_WorkGroupID.z);

    if (first_row + NUM_ROWS <= p.stride_d) {
        compute_outputs(first_row, NUM_ROWS);
    } else if (first_row < p.stride_d) {
        compute_outputs(first_row, p.stride_d - first_row);
    }
}

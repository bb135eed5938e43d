#version 450

// Products of the trellis types with one to eight columns of rotated activations (itq_rotate.comp), in floating point.
// Four invocations share a block of 256 (itq_lane.glsl).

#extension GL_EXT_shader_explicit_arithmetic_types_int8 : require
#extension GL_EXT_shader_explicit_arithmetic_types_int32 : require

#define ITQ_PAIRS
#include "mul_mat_vec_base.glsl"

layout(local_size_x_id = 0, local_size_y = 1, local_size_z = 1) in;

FLOAT_TYPE temp[NUM_COLS][NUM_ROWS];

#include "itq_lane.glsl"

// The activations of column j that belong to word w of a chunk, whose own begin at the fourfold y.
vec4 activations(const uint j, const uint b_offset, const uint y, const uint w) {
    const uint at    = (j * p.batch_stride_b + b_offset) / 4 + y + w / 2;
    const vec4 lower = vec4(data_b_v4[at]);
    const vec4 upper = vec4(data_b_v4[at + 4]);
    return w % 2 == 0 ? vec4(lower.xy, upper.xy) : vec4(lower.zw, upper.zw);
}

void calc_block(const uint a_offset, const uint b_offset, const uint lane, const uint i, const uint num_blocks_per_row,
                const uint first_row, const uint num_rows) {
    [[unroll]] for (uint n = 0; n < num_rows; ++n) {
        const uint ib              = a_offset + (first_row + n) * num_blocks_per_row + i;
        const itq_lane_block block = itq_open(ib, lane);

        FLOAT_TYPE sum[NUM_COLS];
        [[unroll]] for (uint j = 0; j < NUM_COLS; ++j) {
            sum[j] = FLOAT_TYPE(0);
        }
        [[unroll]] for (uint g = 0; g < 2; ++g) {
            const uint k = itq_lane_chunk(lane, g);
            const uint y = QUANT_K / 4 * i + 8 * k;
            const itq_lane_words words = itq_lane_chunk_words(block, ib, k, g);
            [[unroll]] for (uint w = 0; w < 8; ++w) {
                const vec4 level = ITQ_LANE_LEVELS(words, w);
                [[unroll]] for (uint j = 0; j < NUM_COLS; ++j) {
                    const vec4 b = activations(j, b_offset, y, w);
                    sum[j] = fma(FLOAT_TYPE(b.x), FLOAT_TYPE(level.x),
                             fma(FLOAT_TYPE(b.y), FLOAT_TYPE(level.y),
                             fma(FLOAT_TYPE(b.z), FLOAT_TYPE(level.z),
                             fma(FLOAT_TYPE(b.w), FLOAT_TYPE(level.w), sum[j]))));
                }
            }
            if (block.z != 0.0) {
                [[unroll]] for (uint j = 0; j < NUM_COLS; ++j) {
                    vec4 b = vec4(0);
                    [[unroll]] for (uint w = 0; w < 8; ++w) {
                        b += activations(j, b_offset, y, w);
                    }
                    sum[j] = fma(FLOAT_TYPE(-block.z), FLOAT_TYPE((b.x + b.y) + (b.z + b.w)), sum[j]);
                }
            }
        }
        [[unroll]] for (uint j = 0; j < NUM_COLS; ++j) {
            temp[j][n] = fma(FLOAT_TYPE(block.d * ITQ_WEIGHT_SCALE), sum[j], temp[j][n]);
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
    for (uint i = tid / ITQ_LANES; i < num_blocks_per_row; i += gl_WorkGroupSize.x / ITQ_LANES) {
        calc_block(a_offset, b_offset, tid % ITQ_LANES, i, num_blocks_per_row, first_row, num_rows);
    }
    reduce_result(temp, d_offset, first_row, num_rows, tid);
}

void main() {
    const uint first_row = NUM_ROWS * (gl_WorkGroupID.x + gl_NumWorkGroups.x * gl_WorkGroupID.z);

    init_iq_shmem(gl_WorkGroupSize);

    if (first_row + NUM_ROWS <= p.stride_d) {
        compute_outputs(first_row, NUM_ROWS);
    } else if (first_row < p.stride_d) {
        compute_outputs(first_row, p.stride_d - first_row);
    }
}

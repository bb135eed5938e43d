#version 450

// Activations rotated by the Walsh-Hadamard transform, in blocks of ITQ_FWHT_LENGTH, and quantized to block_q8_1_x4: what
// the integer products of the trellis types read. Any strides in; rows without a gap out, so that one of blocks of 64 may
// begin in the middle of a block_q8_1_x4. A workgroup takes 256 values of one row after another.
//
// The 32 values of a chunk are in the order of the words of itq_lane.glsl: word w has 2*w, 2*w + 1, 2*w + 16 and 2*w + 17.
// The second half of ds, a sum, is written as upstream does it; the products of the trellis types do not read it.

#extension GL_EXT_control_flow_attributes : require
#extension GL_EXT_shader_16bit_storage : require

#include "types.glsl"
#include "itq_fwht.glsl"
#include "itq_activations.glsl"

layout(local_size_x = 64, local_size_y = 1, local_size_z = 1) in;

layout(binding = 1) writeonly buffer D { block_q8_1_x4 data_d[]; };

void main() {
    const uint lane = gl_LocalInvocationID.x;
    for (uint group = gl_WorkGroupID.x; 256 * group < p.ne0; group += gl_NumWorkGroups.x) {
        for (uint row = gl_WorkGroupID.y; row < p.ne1 * p.ne2 * p.ne3; row += gl_NumWorkGroups.y) {
            vec4 x = itq_fwht(itq_activations4(group, row, lane), lane) * ITQ_FWHT_NORMALISED;
            barrier();
            // values of this lane: word w of chunk k
            [[unroll]] for (uint n = 0; n < 4; ++n) {
                itq_exchange[itq_fwht_first(lane) + ITQ_FWHT_LENGTH / 4 * n] = x[n];
            }
            barrier();
            const uint k = lane / 8;
            const uint w = lane % 8;
            [[unroll]] for (uint n = 0; n < 4; ++n) {
                x[n] = itq_exchange[32 * k + 2 * w + 16 * (n / 2) + n % 2];
            }
            barrier();

            // eight lanes share a chunk: the largest magnitude, then the sum
            const vec4 magnitude = abs(x);
            itq_exchange[lane]   = max(max(magnitude.x, magnitude.y), max(magnitude.z, magnitude.w));
            barrier();
            float most = 0.0;
            [[unroll]] for (uint n = 0; n < 8; ++n) {
                most = max(most, itq_exchange[8 * k + n]);
            }
            const float d     = most / 127.0;
            const float d_inv = d != 0.0 ? 1.0 / d : 0.0;
            x                 = round(x * d_inv);
            barrier();
            itq_exchange[lane] = (x.x + x.y) + (x.z + x.w);
            barrier();

            if (256 * group + 32 * k < p.ne0) {
                const uint to = row * (p.ne0 / 32) + 8 * group + k;
                data_d[to / 4].qs[8 * (to % 4) + w] = pack32(i8vec4(x));
                if (w == 0) {
                    float sum = 0.0;
                    [[unroll]] for (uint n = 0; n < 8; ++n) {
                        sum += itq_exchange[lane + n];
                    }
                    data_d[to / 4].ds[to % 4] = f16vec2(vec2(d, sum * d));
                }
            }
            barrier();  // before the exchange is written again
        }
    }
}

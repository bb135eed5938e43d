#version 450

// Activations rotated by the Walsh-Hadamard transform, in blocks of ITQ_FWHT_LENGTH: what the products of the trellis
// types read in floating point. Any strides in, contiguous F32 out. A workgroup takes 256 values of one row after another.

#extension GL_EXT_control_flow_attributes : require
#extension GL_EXT_shader_16bit_storage : require

#include "itq_fwht.glsl"
#include "itq_activations.glsl"

layout(local_size_x = 64, local_size_y = 1, local_size_z = 1) in;

layout(binding = 1) writeonly buffer D { float data_d[]; };

void main() {
    const uint lane = gl_LocalInvocationID.x;
    for (uint group = gl_WorkGroupID.x; 256 * group < p.ne0; group += gl_NumWorkGroups.x) {
        for (uint row = gl_WorkGroupID.y; row < p.ne1 * p.ne2 * p.ne3; row += gl_NumWorkGroups.y) {
            const vec4 x     = itq_fwht(itq_activations4(group, row, lane), lane);
            const uint first = 256 * group + itq_fwht_first(lane);
            if (first < p.ne0) {
                [[unroll]] for (uint i = 0; i < 4; ++i) {
                    // a sixteenth: see itq_types.glsl
                    data_d[row * p.ne0 + first + ITQ_FWHT_LENGTH / 4 * i] = x[i] * (ITQ_FWHT_NORMALISED / 16.0);
                }
            }
            barrier();  // before the exchange is written again
        }
    }
}

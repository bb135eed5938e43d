#version 450

// Activations rotated by the Walsh-Hadamard transform, in blocks of 256: what the products of the trellis types read in
// floating point. Any strides in, contiguous F32 out. A workgroup takes a block of one row after another.

#extension GL_EXT_control_flow_attributes : require
#extension GL_EXT_shader_16bit_storage : require

#include "itq_fwht.glsl"
#include "itq_activations.glsl"

layout(local_size_x = 64, local_size_y = 1, local_size_z = 1) in;

layout(binding = 1) writeonly buffer D { float data_d[]; };

void main() {
    const uint lane = gl_LocalInvocationID.x;
    for (uint block = gl_WorkGroupID.x; block < p.blocks; block += gl_NumWorkGroups.x) {
        for (uint row = gl_WorkGroupID.y; row < p.ne1 * p.ne2 * p.ne3; row += gl_NumWorkGroups.y) {
            const vec4 x  = itq_fwht256(itq_activations4(block, row, lane), lane);
            const uint to = (row * p.blocks + block) * 256 + lane;
            [[unroll]] for (uint i = 0; i < 4; ++i) {
                data_d[to + 64 * i] = x[i] * (1.0 / 256.0);  // normalised, and a sixteenth: see itq_types.glsl
            }
            barrier();  // before the exchange is written again
        }
    }
}

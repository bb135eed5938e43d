#version 450

// Weights of the trellis types, rotated back: a workgroup takes a block.

#include "dequant_head.glsl"
#include "itq_fwht.glsl"

layout(local_size_x = 64, local_size_y = 1, local_size_z = 1) in;

layout(binding = 0) readonly buffer A { A_TYPE data_a[]; };
layout(binding = 1) writeonly buffer D { D_TYPE data_b[]; };

void main() {
    const uint lane = gl_LocalInvocationID.x;
    for (uint ib = gl_WorkGroupID.x; ib < p.nel / QUANT_K; ib += gl_NumWorkGroups.x) {
        const uint index = ITQ_INDEX4(data_a[ib], lane);
        vec4 x;
        [[unroll]] for (uint i = 0; i < 4; ++i) {
            x[i] = float(itq_level(bitfieldExtract(index, int(8 * i), 8)));
        }
        x = itq_fwht256(x - ITQ_ZERO_POINT(data_a[ib]), lane) * (float(data_a[ib].d) * ITQ_ROTATED_BACK);
        [[unroll]] for (uint i = 0; i < 4; ++i) {
            data_b[QUANT_K * ib + lane + 64 * i] = D_TYPE(x[i]);
        }
        barrier();
    }
}

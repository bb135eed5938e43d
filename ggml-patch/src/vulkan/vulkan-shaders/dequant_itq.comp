#version 450

// Weights of the trellis types, rotated back: a workgroup takes 256, a block or four.

#include "dequant_head.glsl"
#define ITQ_FWHT_LENGTH QUANT_K
#include "itq_fwht.glsl"

layout(local_size_x = 64, local_size_y = 1, local_size_z = 1) in;

layout(binding = 0) readonly buffer A { A_TYPE data_a[]; };
layout(binding = 1) writeonly buffer D { D_TYPE data_b[]; };

void main() {
    const uint lane = gl_LocalInvocationID.x;
    const uint lanes = QUANT_K / 4;  // of a block
    init_iq_shmem(gl_WorkGroupSize);
    for (uint first = 256 * gl_WorkGroupID.x; first < p.nel; first += 256 * gl_NumWorkGroups.x) {
        // the last workgroup may have fewer blocks than it could
        const uint ib      = first / QUANT_K + lane / lanes;
        const bool present = ib * QUANT_K < p.nel;
        vec4  x = vec4(0.0);
        float d = 0.0;
        if (present) {
            x = itq_levels4(ITQ_INDEX4(data_a[ib], lane % lanes), 0) - ITQ_ZERO_POINT(data_a[ib]);
            d = ITQ_SCALE(data_a[ib]) * ITQ_ROTATED_BACK;
        }
        x = itq_fwht(x, lane) * d;
        if (present) {
            [[unroll]] for (uint i = 0; i < 4; ++i) {
                data_b[first + itq_fwht_first(lane) + lanes * i] = D_TYPE(x[i]);
            }
        }
        barrier();
    }
}

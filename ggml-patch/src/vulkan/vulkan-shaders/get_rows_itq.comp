#version 450

// Rows of matrices in the trellis types, rotated back: a workgroup takes 256 weights of one row after another, a block
// or four.

#extension GL_EXT_control_flow_attributes : enable

#include "types.glsl"
#include "generic_binary_head.glsl"
#define ITQ_FWHT_LENGTH QUANT_K
#include "itq_fwht.glsl"

layout(local_size_x = 64, local_size_y = 1, local_size_z = 1) in;

void main() {
    const uint lane  = gl_LocalInvocationID.x;
    const uint lanes = QUANT_K / 4;  // of a block
    init_iq_shmem(gl_WorkGroupSize);
    for (uint first = 256 * gl_WorkGroupID.x; first < p.ne00; first += 256 * gl_NumWorkGroups.x) {
        // the last workgroup may have fewer blocks than it could
        const uint block   = first / QUANT_K + lane / lanes;
        const bool present = block * QUANT_K < p.ne00;
        for (uint z = gl_WorkGroupID.z; z < p.ne11 * p.ne12; z += gl_NumWorkGroups.z) {
            for (uint i10 = gl_WorkGroupID.y; i10 < p.ne10; i10 += gl_NumWorkGroups.y) {
                const uint i11 = z / p.ne12;
                const uint i12 = z % p.ne12;
                const uint i01 = data_b[get_boffset() + i10 * p.nb10 + i11 * p.nb11 + i12 * p.nb12];
                const uint ib  = get_aoffset() + i01 * p.nb01 + i11 * p.nb02 + i12 * p.nb03 + block;
                const uint to  = get_doffset() + i10 * p.nb21 + i11 * p.nb22 + i12 * p.nb23 + first + itq_fwht_first(lane);

                vec4  x = vec4(0.0);
                float d = 0.0;
                if (present) {
                    x = itq_levels4(ITQ_INDEX4(data_a[ib], lane % lanes), 0) - ITQ_ZERO_POINT(data_a[ib]);
                    d = ITQ_SCALE(data_a[ib]) * ITQ_ROTATED_BACK;
                }
                x = itq_fwht(x, lane) * d;
                if (present) {
                    [[unroll]] for (uint i = 0; i < 4; ++i) {
                        data_d[to + lanes * i] = D_TYPE(x[i]);
                    }
                }
                barrier();
            }
        }
    }
}

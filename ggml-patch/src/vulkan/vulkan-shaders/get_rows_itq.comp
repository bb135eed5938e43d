#version 450

// Rows of matrices in the trellis types, rotated back: a workgroup takes a block of one row after another.

#extension GL_EXT_control_flow_attributes : enable

#include "types.glsl"
#include "generic_binary_head.glsl"
#include "itq_fwht.glsl"

layout(local_size_x = 64, local_size_y = 1, local_size_z = 1) in;

void main() {
    const uint lane = gl_LocalInvocationID.x;
    for (uint block = gl_WorkGroupID.x; block < p.ne00 / QUANT_K; block += gl_NumWorkGroups.x) {
        for (uint z = gl_WorkGroupID.z; z < p.ne11 * p.ne12; z += gl_NumWorkGroups.z) {
            for (uint i10 = gl_WorkGroupID.y; i10 < p.ne10; i10 += gl_NumWorkGroups.y) {
                const uint i11 = z / p.ne12;
                const uint i12 = z % p.ne12;
                const uint i01 = data_b[get_boffset() + i10 * p.nb10 + i11 * p.nb11 + i12 * p.nb12];
                const uint ib  = get_aoffset() + i01 * p.nb01 + i11 * p.nb02 + i12 * p.nb03 + block;
                const uint to  = get_doffset() + i10 * p.nb21 + i11 * p.nb22 + i12 * p.nb23 + QUANT_K * block + lane;

                const uint index = ITQ_INDEX4(data_a[ib], lane);
                vec4 x;
                [[unroll]] for (uint i = 0; i < 4; ++i) {
                    x[i] = float(itq_level(bitfieldExtract(index, int(8 * i), 8)));
                }
                x = itq_fwht256(x - ITQ_ZERO_POINT(data_a[ib]), lane) * (float(data_a[ib].d) * ITQ_ROTATED_BACK);
                [[unroll]] for (uint i = 0; i < 4; ++i) {
                    data_d[to + 64 * i] = D_TYPE(x[i]);
                }
                barrier();
            }
        }
    }
}

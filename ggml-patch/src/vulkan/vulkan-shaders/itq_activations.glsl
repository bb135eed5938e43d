// Four activations, of any strides, that a lane of a block loads; for itq_rotate.comp and itq_quantize_q8_1.comp.

layout(push_constant) uniform parameter
{
    uint ne0;
    uint ne1;
    uint ne2;
    uint ne3;
    uint nb0;     // in elements
    uint nb1;
    uint nb2;
    uint nb3;
    uint offset;
} p;

layout(binding = 0) readonly buffer B { B_TYPE data_b[]; };

// Of 256 of a row, those of a lane: zeros behind its end.
vec4 itq_activations4(const uint group, const uint row, const uint lane) {
    const uint i1   = row % p.ne1;
    const uint i2   = (row / p.ne1) % p.ne2;
    const uint i3   = row / (p.ne1 * p.ne2);
    const uint from = p.offset + i1 * p.nb1 + i2 * p.nb2 + i3 * p.nb3 + (256 * group + 4 * lane) * p.nb0;

    vec4 x = vec4(0.0);
    if (256 * group + 4 * lane < p.ne0) {
        [[unroll]] for (uint i = 0; i < 4; ++i) {
            x[i] = float(data_b[from + i * p.nb0]);
        }
    }
    return x;
}

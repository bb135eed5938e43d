// The Walsh-Hadamard transform of 256 values by 64 invocations (a workgroup, any size of subgroups), four values each:
// radix 4, the additions in the order of itq_fwht of ggml-itq.h.

shared float itq_exchange[256];

// Two stages of four values, the later one over pairs.
vec4 itq_fwht4(const vec4 x) {
    const vec4 y = vec4(x.x + x.y, x.x - x.y, x.z + x.w, x.z - x.w);
    return vec4(y.x + y.z, y.y + y.w, y.x - y.z, y.y - y.w);
}

// Values 4*lane to 4*lane + 3 in, values lane + 64*i out.
vec4 itq_fwht256(vec4 x, const uint lane) {
    x = itq_fwht4(x);
    [[unroll]] for (uint i = 0; i < 4; ++i) {
        itq_exchange[4 * lane + i] = x[i];
    }
    barrier();
    [[unroll]] for (uint h = 4; h <= 64; h *= 4) {
        // values first + h*i
        const uint first = (lane / h) * 4 * h + lane % h;
        [[unroll]] for (uint i = 0; i < 4; ++i) {
            x[i] = itq_exchange[first + h * i];
        }
        x = itq_fwht4(x);
        if (h < 64) {
            [[unroll]] for (uint i = 0; i < 4; ++i) {
                itq_exchange[first + h * i] = x[i];
            }
            barrier();
        }
    }
    return x;
}

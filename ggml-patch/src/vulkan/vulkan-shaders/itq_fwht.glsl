// The Walsh-Hadamard transform of 256 values by 64 invocations (a workgroup, any size of subgroups), four values each:
// radix 4, the additions in the order of itq_fwht of ggml-itq.h. With ITQ_FWHT_LENGTH 64 that of four blocks of 64.

#ifndef ITQ_FWHT_LENGTH
#define ITQ_FWHT_LENGTH 256
#endif

// What makes the transform an isometry: the inverse of the square root of its length.
#define ITQ_FWHT_NORMALISED (ITQ_FWHT_LENGTH == 256 ? 1.0 / 16.0 : 1.0 / 8.0)

shared float itq_exchange[256];

// Two stages of four values, the later one over pairs.
vec4 itq_fwht4(const vec4 x) {
    const vec4 y = vec4(x.x + x.y, x.x - x.y, x.z + x.w, x.z - x.w);
    return vec4(y.x + y.z, y.y + y.w, y.x - y.z, y.y - y.w);
}

// Of the values that an invocation has in the end, the first; the others are ITQ_FWHT_LENGTH / 4 apart.
uint itq_fwht_first(const uint lane) {
    const uint h = ITQ_FWHT_LENGTH / 4;
    return (lane / h) * 4 * h + lane % h;
}

// Values 4*lane to 4*lane + 3 in.
vec4 itq_fwht(vec4 x, const uint lane) {
    x = itq_fwht4(x);
    [[unroll]] for (uint i = 0; i < 4; ++i) {
        itq_exchange[4 * lane + i] = x[i];
    }
    barrier();
    [[unroll]] for (uint h = 4; h <= ITQ_FWHT_LENGTH / 4; h *= 4) {
        // values first + h*i
        const uint first = (lane / h) * 4 * h + lane % h;
        [[unroll]] for (uint i = 0; i < 4; ++i) {
            x[i] = itq_exchange[first + h * i];
        }
        x = itq_fwht4(x);
        if (h < ITQ_FWHT_LENGTH / 4) {
            [[unroll]] for (uint i = 0; i < 4; ++i) {
                itq_exchange[first + h * i] = x[i];
            }
            barrier();
        }
    }
    return x;
}

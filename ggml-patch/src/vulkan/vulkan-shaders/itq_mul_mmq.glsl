// Tiles of the trellis types and of TQ1_0 and TQ2_0 for mul_mmq.comp: mul_mmq_funcs.glsl includes this file.
//
// Four invocations load the eight words of a chunk; number iqs of a trellis type takes the words 2*iqs and 2*iqs + 1, of a
// ternary one the words iqs and iqs + 4.

#if defined(DATA_A_ITQ)
#include "itq_lane.glsl"

void block_a_to_shmem(const uint buf_ib, const uint ib, const uint iqs) {
    const uint ib_k = ib / (QUANT_K / 32);
    const uint k    = ib % (QUANT_K / 32);

    uint symbols = 0;
#if ITQ_SYMBOL_BITS == 2
    // words 8*k + m of the planes, of which a chunk has half of one or two
    [[unroll]] for (uint m = 0; m < 8; ++m) {
        const uint q    = data_a[ib_k].qs[4 * (8 * k % ITQ_PLANE + m % ITQ_PLANE) + iqs];
        const uint from = 2 * (8 * k / ITQ_PLANE + m / ITQ_PLANE);
        symbols |= ((q >> from) & 3) << (4 * m + 2);
    }
#else
    const uint q = ITQ_PAIR(data_a_packed16[ib_k].qs, k);
    symbols      = (iqs < 2 ? q << (2 - iqs) : q >> (iqs - 2)) & 0x44444444u;
#endif
    uint c1, c0;
    itq_grids(itq_selectors(ib_k, k), itq_selectors_before(ib_k, k), c1, c0);
    // bits iqs of nibbles to their bits 1 and 0
    const uint index = symbols | (((c1 >> iqs) & 0x11111111u) << 1) | ((c0 >> iqs) & 0x11111111u);

    buf_a[buf_ib].qs[2 * iqs]     = itq_level_bytes(index, 0);
    buf_a[buf_ib].qs[2 * iqs + 1] = itq_level_bytes(index, 1);
    if (iqs == 0) {
        buf_a[buf_ib].dz = FLOAT_TYPEV2(data_a[ib_k].d, ITQ_ZERO_POINT(data_a[ib_k]));
    }
}
#elif defined(DATA_A_TQ2_0)
void block_a_to_shmem(const uint buf_ib, const uint ib, const uint iqs) {
    const uint ib_k = ib / 8;
    const uint k    = ib % 8;
    [[unroll]] for (uint w = iqs; w < 8; w += 4) {
        const uint at = 16 * (k / 4) + 2 * w;
        const uint q  = pack32(u16vec2(data_a_packed16[ib_k].qs[at], data_a_packed16[ib_k].qs[at + 1]));
        buf_a[buf_ib].qs[w] = int32_t((q >> (2 * (k % 4))) & 0x03030303u);
    }
    if (iqs == 0) {
        buf_a[buf_ib].dz = FLOAT_TYPEV2(data_a[ib_k].d, 1.0);
    }
}
#else
void block_a_to_shmem(const uint buf_ib, const uint ib, const uint iqs) {
    const uint ib_k = ib / 8;
    const uint k    = ib % 8;
    [[unroll]] for (uint w = iqs; w < 8; w += 4) {
        uvec4 trits;
        [[unroll]] for (uint n = 0; n < 4; ++n) {
            const uint e    = 32 * k + 4 * w + n;
            const uint byte = tq1_0_byte_of(e);
            const uint q    = byte < 48 ? uint(data_a[ib_k].qs[byte]) : uint(data_a[ib_k].qh[byte - 48]);
            trits[n]        = tq1_0_trit(q, tq1_0_digit_of(e));
        }
        buf_a[buf_ib].qs[w] = int32_t(trits.x | (trits.y << 8) | (trits.z << 16) | (trits.w << 24));
    }
    if (iqs == 0) {
        buf_a[buf_ib].dz = FLOAT_TYPEV2(data_a[ib_k].d, 1.0);
    }
}
#endif

void block_a_to_registers(const uint reg_ib, const uint buf_ib) {
    cache_a[reg_ib] = buf_a[buf_ib];
}

ACC_TYPE mmq_dot_product(const uint ib_a) {
    int32_t q_sum = 0;
    [[unroll]] for (uint w = 0; w < 8; ++w) {
        q_sum += dotPacked4x8EXT(cache_a[ib_a].qs[w], cache_b.qs[w]);
    }
    const vec2 dz = vec2(cache_a[ib_a].dz);
    const vec2 ds = vec2(cache_b.ds);
#if defined(DATA_A_ITQ)
    float q = float(q_sum);
#if defined(ITQ_HAS_ZERO_POINT)
    if (dz.y != 0.0) {
        int32_t y_sum = 0;
        [[unroll]] for (uint w = 0; w < 8; ++w) {
            y_sum += dotPacked4x8EXT(0x01010101, cache_b.qs[w]);
        }
        q -= dz.y * float(y_sum);
    }
#endif
#if QUANT_K < BK * BK_STEP
    // the steps behind the end of a row: activations of 0, and a scale that nobody has written
    const float d = q_sum == 0 ? 0.0 : dz.x;
#else
    const float d = dz.x;
#endif
    return ACC_TYPE(d * ITQ_INTEGER_SCALE * (ds.x * q));
#else
    return ACC_TYPE(dz.x * (ds.x * float(q_sum) - ds.y));
#endif
}

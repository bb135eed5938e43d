// Tiles of the trellis types and of TQ1_0 and TQ2_0 for mul_mmq.comp: mul_mmq_funcs.glsl includes this file.
//
// Four invocations load the eight words of a chunk; number iqs of a trellis type takes the words 2*iqs and 2*iqs + 1, of a
// ternary one the words iqs and iqs + 4.

#if defined(DATA_A_ITQ)
void block_a_to_shmem(const uint buf_ib, const uint ib, const uint iqs) {
    const uint ib_k = ib / 8;
    const uint k    = ib % 8;

    uint symbols = 0;
#if defined(DATA_A_ITQ3_S)
    [[unroll]] for (uint m = 0; m < 8; ++m) {
        const uint q = data_a[ib_k].qs[32 * (k % 2) + 4 * m + iqs];
        symbols |= ((q >> (2 * (k / 2))) & 3) << (4 * m + 2);
    }
    const uint sel    = data_a_packed32[ib_k].sel[k];
    const uint before = k == 0 ? 0 : data_a_packed32[ib_k].sel[max(k, 1) - 1];
#else
    const uint q = uint(data_a_packed16[ib_k].qs[2 * k]) | (uint(data_a_packed16[ib_k].qs[2 * k + 1]) << 16);
    symbols      = (iqs < 2 ? q << (2 - iqs) : q >> (iqs - 2)) & 0x44444444u;
    const uint sel    = uint(data_a_packed16[ib_k].sel[2 * k]) | (uint(data_a_packed16[ib_k].sel[2 * k + 1]) << 16);
    const uint before = k == 0 ? 0 : uint(data_a_packed16[ib_k].sel[max(2 * k, 1) - 1]) << 16;
#endif
    uint c1, c0;
    itq_grids(sel, before, c1, c0);
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
    if (dz.y != 0.0) {
        int32_t y_sum = 0;
        [[unroll]] for (uint w = 0; w < 8; ++w) {
            y_sum += dotPacked4x8EXT(0x01010101, cache_b.qs[w]);
        }
        q -= dz.y * float(y_sum);
    }
    return ACC_TYPE(dz.x * ITQ_INTEGER_SCALE * (ds.x * q));
#else
    return ACC_TYPE(dz.x * (ds.x * float(q_sum) - ds.y));
#endif
}

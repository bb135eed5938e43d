// Tiles of the trellis types and of TQ1_0 and TQ2_0 for mul_mmq.comp: mul_mmq_funcs.glsl includes this file.
//
// Four invocations load the eight words of a chunk, number iqs the words iqs and iqs + 4.

#if defined(DATA_A_ITQ)
#include "itq_lane.glsl"

void block_a_to_shmem(const uint buf_ib, const uint ib, const uint iqs) {
    const uint ib_k = ib / (QUANT_K / 32);
    const uint k    = ib % (QUANT_K / 32);

    // what says which levels the words have (itq_types.glsl): of the word iqs + 4 in the odd bytes
    uint c2, c1, c0;
    itq_subsets(itq_selectors(ib_k, k), itq_selectors_before(ib_k, k, 0), c2, c1, c0);
    const int from = int(2 * iqs);
#if ITQ_SYMBOL_BITS == 3
    // a byte for each bit: of the even weights, of the odd ones, then of a word each
    uint fields[2] = uint[](0, 0);
    const uint planes[4] = uint[](ITQ_PAIR(data_a_packed16[ib_k].qs, ITQ_BITS_FROM / 4 + k), c0, c1, c2);
    [[unroll]] for (uint n = 0; n < 4; ++n) {
        [[unroll]] for (uint x = 0; x < 2; ++x) {
            fields[x] |= ((planes[n] >> (from + x)) & 0x01010101u) << (2 + n);
        }
    }
    itq_swap(fields[0], fields[1], 8, 0x00FF00FFu);
#else
    uint fields = (((c0 >> from) & 0x03030303u) << 2) | (((c1 >> from) & 0x03030303u) << 4) |
                  (((c2 >> from) & 0x03030303u) << 6);
#if ITQ_SYMBOL_BITS == 1
    fields |= (ITQ_PAIR(data_a_packed16[ib_k].qs, k) >> from) & 0x03030303u;
#endif
#endif
    [[unroll]] for (uint x = 0; x < 2; ++x) {
        const uint w = iqs + 4 * x;
#if ITQ_SYMBOL_BITS == 3
        uint word = fields[x];
#else
        uint word = fields >> (8 * x);
#endif
#if ITQ_SYMBOL_BITS > 1
        // halves of words 16*k + w of the planes, and eight further on
        const uint plane = QUANT_K / 8;
        const uint lower = 16 * k + w;
        const uint upper = lower + 8;
        word |= ((uint(data_a_packed16[ib_k].qs[lower % plane]) >> (2 * (lower / plane))) |
                 (uint(data_a_packed16[ib_k].qs[upper % plane]) >> (2 * (upper / plane)) << 16)) & 0x03030303u;
#endif
#if ITQ_SYMBOL_BITS == 3
        buf_a[buf_ib].qs[w] = itq_levels4(word, 0);
#else
        buf_a[buf_ib].qs[w] = itq_levels_at(word, 0);
#endif
    }
    if (iqs == 0) {
        buf_a[buf_ib].dz = FLOAT_TYPEV2(ITQ_SCALE(data_a[ib_k]), ITQ_ZERO_POINT(data_a[ib_k]));
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

// Products of quantized weights and 8-bit activations for MMVQ: trellis types, TQ1_0, TQ2_0.
//
// Four lanes share a block of 256, each takes 64 weights; the activations are block_q8_1x4 (itq-quantize.cuh). Two lanes share
// a block of 64, each takes a chunk; the activations are block_q8_n_h, as on the CPU.

#pragma once

#include "common.cuh"
#include "itq-decode.cuh"
#include "tq-decode.cuh"

// Scale of 32 quantized values and their sum. The sum is an integer so that zero-points cancel exactly and large
// activations cannot overflow it.
struct alignas(4) q8_1x4_ds {
    half    d;
    int16_t s;
};

// The content of four q8_1 blocks, scales first, so that 16 byte loads of the values are aligned.
struct alignas(16) block_q8_1x4 {
    q8_1x4_ds ds[4];
    int8_t    qs[4 * QK8_1];
};

static_assert(sizeof(block_q8_1x4) == 4 * sizeof(block_q8_1), "wrong block_q8_1x4 size");
static_assert(sizeof(block_q8_n_h) == 2 * sizeof(block_q8_1), "wrong block_q8_n_h size");

// Lane l of a block is called with iqs = VDR*l; QI = 16 words a block of 256, 4 of 64, is the types' qi in
// itq-type-traits.cuh.
#define VDR_ITQ_Q8_1_MMVQ   4
#define VDR_ITQ_N_Q8_1_MMVQ 2

// Only carried along by mmq.cuh.
#define VDR_ITQ_Q8_1_MMQ 8

static __device__ __forceinline__ float2 itq_half2_bits(const uint32_t bits) {
    half2 h;
    memcpy(&h, &bits, sizeof(h));
    return __half22float2(h);
}

// Scale and sum of a chunk in the word that holds them.
static __device__ __forceinline__ float q8_1x4_d(const uint32_t ds) {
    return itq_half2_bits(ds).x;
}
static __device__ __forceinline__ int q8_1x4_s(const uint32_t ds) {
    return (int32_t) ds >> 16;
}

// n words at x, aligned to their size or to 16 bytes, in accesses of up to 16 bytes.
template <int n> static __device__ __forceinline__ void itq_load_words(const void * x, int (&words)[n]) {
    if constexpr (n == 1) {
        words[0] = *((const int *) x);
    } else if constexpr (n == 2) {
        const int2 v = *((const int2 *) x);
        words[0]     = v.x;
        words[1]     = v.y;
    } else {
#pragma unroll
        for (int l = 0; l < n; l += 4) {
            const int4 v = ((const int4 *) x)[l / 4];
            words[l + 0] = v.x;
            words[l + 1] = v.y;
            words[l + 2] = v.z;
            words[l + 3] = v.w;
        }
    }
}

// A scale that holds a start state, without it.
static __device__ __forceinline__ float itq_scale_beside_state(const half & d) {
    uint16_t bits;
    memcpy(&bits, &d, sizeof(bits));
    return itq_half2_bits(bits & 0xFFFFFFC0).x;
}

// The scale of a block and its zero-point, without the start state.
template <typename block> static __device__ __forceinline__ float2 itq_load_scale(const block & x) {
    return make_float2(itq_scale_beside_state(x.d), 0.0f);
}
static __device__ __forceinline__ float2 itq_load_scale(const block_itq3_s & x) {
    uint32_t bits;
    memcpy(&bits, __builtin_assume_aligned(&x.d, sizeof(bits)), sizeof(bits));
    return itq_half2_bits(bits & ITQ_WITHOUT_STATE);
}

// Word of data that starts at an even address.
static __device__ __forceinline__ uint32_t tq_load_word(const uint8_t * x, const int i) {
    const uint16_t * x16 = (const uint16_t *) x + 2 * i;
    return x16[0] | (uint32_t) x16[1] << 16;
}

// Word i of a field of a block. Blocks of whole words begin at one.
template <typename block> static __device__ __forceinline__ uint32_t itq_load_word(const uint8_t * x, const int i) {
    if constexpr (sizeof(block) % sizeof(uint32_t) == 0) {
        return ((const uint32_t *) x)[i];
    } else {
        return tq_load_word(x, i);
    }
}

// The selectors before chunk k of a block.
template <typename block> static __device__ __forceinline__ uint32_t itq_load_before(const block & x, const int k) {
    uint16_t last;
    memcpy(&last, (const char *) (&x + 1) - sizeof(last), sizeof(last));
    return k == 0 ? itq_word_before(last) : itq_load_word<block>(x.sel, k - 1);
}

// The bits of chunk k of a block as pairs.
template <ggml_type type>
static __device__ __forceinline__ itq_pairs itq_load_pairs(const typename itq_traits<type>::block & x, const int k) {
    using traits   = itq_traits<type>;
    using block    = typename traits::block;
    uint32_t plane = 0;  // of symbols of one bit, or of third bits
    if constexpr (traits::bits != 2) {
        plane = itq_load_word<block>(x.qs + (traits::bits == 3 ? traits::length / 4 : 0), k);
    }
    return itq_pairs_of_chunk<traits::bits>(itq_load_word<block>(x.sel, k), itq_load_before(x, k), plane);
}

// The indices of chunk k of a block of 64, see itq_n_indices.
template <ggml_type type>
static __device__ __forceinline__ void itq_load_chunk(const typename itq_traits<type>::block & x, const int k,
                                                      itq_indices (&index)[8]) {
    static_assert(itq_traits<type>::length == 64, "other blocks have another order of symbols");
    const itq_pairs pairs = itq_load_pairs<type>(x, k);
    if constexpr (itq_traits<type>::bits > 1) {
        const uint32_t q[4] = { tq_load_word(x.qs, 0), tq_load_word(x.qs, 1), tq_load_word(x.qs, 2),
                                tq_load_word(x.qs, 3) };
        itq_n_indices<itq_traits<type>::bits>(q, k, pairs, index);
    } else {
        itq2_n_indices(pairs, index);
    }
}

// The eight weights of an index times the activations of two words, 64 times the sum of which is too much.
template <ggml_type type>
static __device__ __forceinline__ int itq_dot_raised(const itq_indices & index, const int u0, const int u1, int sumi) {
    sumi = ggml_cuda_dp4a(itq_levels_raised<type>(index), u0, sumi);
    return ggml_cuda_dp4a(itq_levels_raised<type>(itq_indices::upper_half(index)), u1, sumi);
}

// Digit g of n words of TQ2_0 times their activations.
template <int n>
static __device__ __forceinline__ int tq2_0_dot(const uint32_t (&q)[n], const int g, const int (&u)[n]) {
    int sumi = 0;
#pragma unroll
    for (int m = 0; m < n; ++m) {
        sumi = ggml_cuda_dp4a(tq2_0_digits(q[m], g), u[m], sumi);
    }
    return sumi;
}

// The next digit of n words of TQ1_0 times their activations, added to sumi.
template <int n>
static __device__ __forceinline__ int tq1_0_dot_next(tq1_0_state (&q)[n], const int (&u)[n], int sumi) {
#pragma unroll
    for (int m = 0; m < n; ++m) {
        sumi = ggml_cuda_dp4a(tq1_0_next(q[m]), u[m], sumi);
    }
    return sumi;
}

// Sum of the activations of n words, added to sumu.
template <int n> static __device__ __forceinline__ int tq_sum(const int (&u)[n], int sumu) {
#pragma unroll
    for (int m = 0; m < n; ++m) {
        sumu = ggml_cuda_dp4a(0x01010101, u[m], sumu);
    }
    return sumu;
}

// Types with blocks of 256: lane l = 2*j + h takes the groups 2h and 2h + 1 of half j, the chunks k = 2*(2h + g) + j, g = 0, 1.
template <ggml_type type>
static __device__ __forceinline__ float vec_dot_itq_s_q8_1(const void * __restrict__ vbq,
                                                           const block_q8_1 * __restrict__ bq8_1, const int & kbx,
                                                           const int & iqs) {
    using traits           = itq_traits<type>;
    using block            = typename traits::block;
    const block &        x = ((const block *) vbq)[kbx];
    const int            j = iqs / VDR_ITQ_Q8_1_MMVQ / 2;
    const int            h = iqs / VDR_ITQ_Q8_1_MMVQ % 2;
    const block_q8_1x4 * y = (const block_q8_1x4 *) bq8_1 + j;

    uint32_t sym[2][4] = {};
    if constexpr (traits::bits > 1) {
        uint32_t q[8];
#pragma unroll
        for (int n = 0; n < 8; ++n) {
            // the two groups of this lane to the place of groups 0 and 1
            q[n] = itq_load_word<block>(x.qs, 8 * j + n) >> 4 * h;
        }
        itq_transpose_symbols(q, sym);
    }

    int ds[2];
    itq_load_words((const int2 *) y->ds + h, ds);
    const float2 dz  = itq_load_scale(x);
    float        sum = 0.0f;
#pragma unroll
    for (int g = 0; g < 2; ++g) {
        const itq_pairs pairs = itq_load_pairs<type>(x, 2 * (2 * h + g) + j);

        int u[8];
        itq_load_words((const int4 *) y->qs + 2 * (2 * h + g), u);
        int sumi = -64 * q8_1x4_s(ds[g]);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const itq_indices index = itq_indices_of<traits::bits>(pairs, i, itq_symbols_of_group(sym, g, i));
            sumi                    = itq_dot_raised<type>(index, u[2 * i + 0], u[2 * i + 1], sumi);
        }
        sum += q8_1x4_d(ds[g]) * (traits::has_z ? sumi - dz.y * q8_1x4_s(ds[g]) : sumi);
    }
    return dz.x * (1.0f / 32.0f) * sum;
}

// Types with blocks of 64: lane l takes chunk l.
template <ggml_type type>
static __device__ __forceinline__ float vec_dot_itq_n_q8_1(const void * __restrict__ vbq,
                                                           const block_q8_1 * __restrict__ bq8_1, const int & kbx,
                                                           const int & iqs) {
    using block            = typename itq_traits<type>::block;
    const block &        x = ((const block *) vbq)[kbx];
    const int            k = iqs / VDR_ITQ_N_Q8_1_MMVQ;
    const block_q8_n_h * y = (const block_q8_n_h *) bq8_1;

    itq_indices index[8];
    itq_load_chunk<type>(x, k, index);
    int sumi = k == 0 ? -64 * y->sum : 0;  // of both chunks
#pragma unroll
    for (int w = 0; w < 8; w += 2) {
        int u[2];
        itq_load_words((const int2 *) y->qs + 4 * k + w / 2, u);
#pragma unroll
        for (int p = 0; p < 2; ++p) {
            sumi = ggml_cuda_dp4a(itq_levels_raised<type>(index[w + p]), u[p], sumi);
        }
    }
    return itq_scale_beside_state(x.d) * (1.0f / 32.0f) * (y->d * sumi);
}

// Lane l = 2*j + s takes bytes 16*s .. 16*s + 15 of half j of qs.
static __device__ __forceinline__ float vec_dot_tq2_0_q8_1(const void * __restrict__ vbq,
                                                           const block_q8_1 * __restrict__ bq8_1, const int & kbx,
                                                           const int & iqs) {
    const block_tq2_0 *  x = (const block_tq2_0 *) vbq + kbx;
    const int            j = iqs / VDR_ITQ_Q8_1_MMVQ / 2;
    const int            s = iqs / VDR_ITQ_Q8_1_MMVQ % 2;
    const block_q8_1x4 * y = (const block_q8_1x4 *) bq8_1 + j;

    uint32_t q[4];
#pragma unroll
    for (int m = 0; m < 4; ++m) {
        q[m] = tq_load_word(x->qs, 8 * j + 4 * s + m);
    }

    int ds[4];
    itq_load_words(y->ds, ds);
    float sum = 0.0f;
#pragma unroll
    for (int g = 0; g < 4; ++g) {
        int u[4];
        itq_load_words((const int4 *) y->qs + 2 * g + s, u);
        sum += q8_1x4_d(ds[g]) * (tq2_0_dot(q, g, u) - tq_sum(u, 0));
    }
    return __half2float(x->d) * sum;
}

// Lane l takes the words 2l, 2l + 1 and 8 + l of qs and digit l of qh.
static __device__ __forceinline__ float vec_dot_tq1_0_q8_1(const void * __restrict__ vbq,
                                                           const block_q8_1 * __restrict__ bq8_1, const int & kbx,
                                                           const int & iqs) {
    const block_tq1_0 *  x = (const block_tq1_0 *) vbq + kbx;
    const int            l = iqs / VDR_ITQ_Q8_1_MMVQ;
    const block_q8_1x4 * y = (const block_q8_1x4 *) bq8_1;

    tq1_0_state a[2] = { tq1_0_begin(tq_load_word(x->qs, 2 * l + 0)), tq1_0_begin(tq_load_word(x->qs, 2 * l + 1)) };
    tq1_0_state b[1] = { tq1_0_begin(tq_load_word(x->qs, 8 + l)) };
    tq1_0_state c    = tq1_0_begin(tq_load_word(x->qh, 0));

    // Per chunk of 32 activations: sum of digit * activation and sum of activation over this lane's weights.
    int sumi[8] = { 0 };
    int sumu[8] = { 0 };
#pragma unroll
    for (int n = 0; n < 5; ++n) {  // weights 32*n + 8*l + 0..7
        int u[2];
        itq_load_words((const int2 *) y[n / 4].qs + 4 * (n % 4) + l, u);
        sumi[n] = tq1_0_dot_next(a, u, sumi[n]);
        sumu[n] = tq_sum(u, sumu[n]);
    }
#pragma unroll
    for (int n = 0; n < 5; ++n) {  // weights 160 + 16*n + 4*l + 0..3, in chunk 5 + n/2
        const int k = 5 + n / 2;
        int       u[1];
        itq_load_words((const int *) y[1].qs + 8 * (k - 4) + 4 * (n % 2) + l, u);
        sumi[k] = tq1_0_dot_next(b, u, sumi[k]);
        sumu[k] = tq_sum(u, sumu[k]);
    }
    {  // weights 240 + 4*l + 0..3
        int u[1];
        itq_load_words((const int *) y[1].qs + 28 + l, u);
        uint32_t digit = 0;
#pragma unroll
        for (int n = 0; n < 4; ++n) {
            const uint32_t next = tq1_0_next(c);
            digit               = n == l ? next : digit;
        }
        sumi[7] = ggml_cuda_dp4a(digit, u[0], sumi[7]);
        sumu[7] = tq_sum(u, sumu[7]);
    }

    int ds[2][4];
    itq_load_words(y[0].ds, ds[0]);
    itq_load_words(y[1].ds, ds[1]);
    float sum = 0.0f;
#pragma unroll
    for (int k = 0; k < 8; ++k) {
        sum += q8_1x4_d(ds[k / 4][k % 4]) * (sumi[k] - sumu[k]);
    }
    return __half2float(x->d) * sum;
}

// Cases of mmvq.cu, the last with the names of its arguments.
#define ITQ_CUDA_VEC_DOT(NAME, name, ...) \
    case GGML_TYPE_##NAME:                \
        return vec_dot_##name##_q8_1;
#define ITQ_CUDA_VEC_DOT_256(NAME, ...) \
    case GGML_TYPE_##NAME:              \
        return vec_dot_itq_s_q8_1<GGML_TYPE_##NAME>;
#define ITQ_CUDA_VEC_DOT_64(NAME, ...) \
    case GGML_TYPE_##NAME:             \
        return vec_dot_itq_n_q8_1<GGML_TYPE_##NAME>;
#define ITQ_CUDA_VEC_DOT_CASES          \
    ITQ_TYPES_256(ITQ_CUDA_VEC_DOT_256) \
    ITQ_TYPES_64(ITQ_CUDA_VEC_DOT_64) ITQ_CUDA_VEC_DOT(TQ1_0, tq1_0) ITQ_CUDA_VEC_DOT(TQ2_0, tq2_0)
#define ITQ_CUDA_VDR(NAME, ...) \
    case GGML_TYPE_##NAME:      \
        return ggml_cuda_is_itq_64(GGML_TYPE_##NAME) ? VDR_ITQ_N_Q8_1_MMVQ : VDR_ITQ_Q8_1_MMVQ;
#define ITQ_CUDA_MUL_MAT_VEC_Q(NAME, ...)                                                                       \
    case GGML_TYPE_##NAME:                                                                                      \
        mul_mat_vec_q_switch_ncols_dst<GGML_TYPE_##NAME>(                                                       \
            vx, vy, ids, fusion, dst, ncols_x, nrows_x, ncols_dst, stride_row_x, stride_col_y, stride_col_dst,  \
            nchannels_x, nchannels_y, nchannels_dst, stride_channel_x, stride_channel_y, stride_channel_dst,    \
            nsamples_x, nsamples_dst, stride_sample_x, stride_sample_y, stride_sample_dst, ids_stride, stream); \
        break;

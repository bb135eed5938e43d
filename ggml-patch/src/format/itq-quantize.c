// The trellis types: the encoder of weights alone. The same arithmetic as gguf_itq3s/codec (scale.py, trellis.py, blocks.py), byte
// for byte: float32, one order of operations, no contraction into fused multiply-adds (-ffp-contract=off, set by
// itq.cmake).
//
// ITQ_LANES blocks are encoded side by side: arrays are [weight or state][lane] and every innermost loop runs over the
// lanes, one vector register or a few.

#include "itq-lanes.h"

#include <assert.h>

// The literal ternary code of ITQ3_S: symbols 1, 2, 3 read levels 1 + 17 * {-1, 0, 1}.
#define TERNARY_ALPHA 0.798f
#define TERNARY_TO_D  ((float) (32.0 / 17.0))
#define TERNARY_Z     1.0f

struct workspace {
    float    x[QK_ITQ][ITQ_LANES];       // rotated weights
    float    levels[QK_ITQ][ITQ_LANES];  // levels of the path found
    float    fold[QK_ITQ / 2][ITQ_LANES];
    float    metric[2][ITQ_STATES][ITQ_LANES];
    uint32_t survivor[2][QK_ITQ][ITQ_LANES];  // [s[t]]: bit k says whether state 2k + s[t] came from k + ITQ_HALF
    uint32_t symbols[QK_ITQ][ITQ_LANES];      // nearest symbols of the subsets, side by side
    uint8_t  code[QK_ITQ][ITQ_LANES];         // ITQ_S_BIT*s + 8*q + c of the path found
    uint8_t  state[ITQ_LANES];                // that the path starts from

    struct itq_best best;
};

// Branch metric of subset c: squared distance to its nearest level; a weight half-way takes the lower level.
ITQ_INLINE float nearest(const struct itq_code * code, float y, int c, uint32_t * symbols) {
    float    nearest = code->levels[c];
    uint32_t symbol  = 0;
    for (int q = 1; q < 1 << code->bits; ++q) {
        const float lower = code->levels[8 * (q - 1) + c];
        const float upper = code->levels[8 * q + c];
        const bool  above = y > (lower + upper) * 0.5f;
        nearest           = above ? upper : nearest;
        symbol += above;
    }
    *symbols |= symbol << code->bits * c;

    const float distance = y - nearest;
    return distance * distance;
}

// The two states that k and k + ITQ_HALF lead to; a tie keeps the survivor from k.
ITQ_INLINE void butterfly(float (*GGML_RESTRICT from)[ITQ_LANES], float (*GGML_RESTRICT to)[ITQ_LANES], int l, int k,
                          const float * branch, uint32_t * even, uint32_t * odd) {
    const float low     = from[k][l];
    const float high    = from[k + ITQ_HALF][l];
    const float same    = branch[itq_butterfly_subset(k)];
    const float flipped = branch[itq_butterfly_subset(k) ^ 4];

    const float low0  = low + same;
    const float high0 = high + flipped;
    const float low1  = low + flipped;
    const float high1 = high + same;

    *even |= high0 < low0 ? 1u << k : 0u;
    *odd |= high1 < low1 ? 1u << k : 0u;
    to[2 * k][l]     = high0 < low0 ? high0 : low0;
    to[2 * k + 1][l] = high1 < low1 ? high1 : low1;
}

// One weight of the search. The butterflies are written out so that the loop over the lanes is the one to vectorise.
ITQ_INLINE void step(const struct itq_code * code, float (*GGML_RESTRICT from)[ITQ_LANES],
                     float (*GGML_RESTRICT to)[ITQ_LANES], const float * GGML_RESTRICT x,
                     const float * GGML_RESTRICT factor, uint32_t * GGML_RESTRICT survivor0,
                     uint32_t * GGML_RESTRICT survivor1, uint32_t * GGML_RESTRICT symbols) {
    for (int l = 0; l < ITQ_LANES; ++l) {
        const float y = x[l] * factor[l];

        uint32_t    packed    = 0;
        const float m0        = nearest(code, y, 0, &packed);
        const float m1        = nearest(code, y, 1, &packed);
        const float m2        = nearest(code, y, 2, &packed);
        const float m3        = nearest(code, y, 3, &packed);
        const float m4        = nearest(code, y, 4, &packed);
        const float m5        = nearest(code, y, 5, &packed);
        const float m6        = nearest(code, y, 6, &packed);
        const float m7        = nearest(code, y, 7, &packed);
        const float branch[8] = { m0, m1, m2, m3, m4, m5, m6, m7 };

        uint32_t even = 0;
        uint32_t odd  = 0;
#define BUTTERFLY(k) butterfly(from, to, l, k, branch, &even, &odd)
#define BUTTERFLIES4(k) \
    BUTTERFLY(k);       \
    BUTTERFLY(k + 1);   \
    BUTTERFLY(k + 2);   \
    BUTTERFLY(k + 3)
        BUTTERFLIES4(0);
        BUTTERFLIES4(4);
        BUTTERFLIES4(8);
        BUTTERFLIES4(12);
        BUTTERFLIES4(16);
        BUTTERFLIES4(20);
        BUTTERFLIES4(24);
        BUTTERFLIES4(28);
#undef BUTTERFLIES4
#undef BUTTERFLY
        survivor0[l] = even;
        survivor1[l] = odd;
        symbols[l]   = packed;
    }
}

// Viterbi search for the path of least squared error from any state to any state; fills code, state and levels.
ITQ_INLINE void search(const struct itq_code * code, struct workspace * ws, const float * factor) {
    const int n = code->length;
    memset(ws->metric[0], 0, sizeof(ws->metric[0]));
    for (int t = 0; t < n; t += 2) {
        step(code, ws->metric[0], ws->metric[1], ws->x[t], factor, ws->survivor[0][t], ws->survivor[1][t],
             ws->symbols[t]);
        step(code, ws->metric[1], ws->metric[0], ws->x[t + 1], factor, ws->survivor[0][t + 1], ws->survivor[1][t + 1],
             ws->symbols[t + 1]);
    }

    // best final state, the lowest number on a tie
    float    least[ITQ_LANES];
    uint32_t state[ITQ_LANES];
    for (int l = 0; l < ITQ_LANES; ++l) {
        least[l] = ws->metric[0][0][l];
        state[l] = 0;
    }
    for (int s = 1; s < ITQ_STATES; ++s) {
        for (int l = 0; l < ITQ_LANES; ++l) {
            const float m = ws->metric[0][s][l];
            state[l]      = m < least[l] ? (uint32_t) s : state[l];
            least[l]      = m < least[l] ? m : least[l];
        }
    }

    for (int t = n - 1; t >= 0; --t) {
        for (int l = 0; l < ITQ_LANES; ++l) {
            const uint32_t bit  = state[l] & 1;
            const uint32_t k    = state[l] >> 1;
            const uint32_t word = bit ? ws->survivor[1][t][l] : ws->survivor[0][t][l];
            const uint32_t high = word >> k & 1;
            const uint32_t c    = (uint32_t) itq_butterfly_subset((int) k) ^ ((bit ^ high) << 2);
            const uint32_t q    = ws->symbols[t][l] >> code->bits * c & ((1u << code->bits) - 1);

            ws->code[t][l]   = (uint8_t) (ITQ_S_BIT * bit + 8 * q + c);
            ws->levels[t][l] = (float) code->levels[8 * q + c];
            state[l]         = k + high * ITQ_HALF;
        }
    }
    for (int l = 0; l < ITQ_LANES; ++l) {
        ws->state[l] = (uint8_t) state[l];
    }
}

// Search path and scale: for each start scale one search and a least-squares refit of d, rounded to what can be stored;
// the start with the least error wins, the earlier on a tie.
ITQ_INLINE void solve(const struct itq_code * code, struct workspace * ws, int starts) {
    const int n = code->length;

    float magnitude[ITQ_LANES];
    itq_magnitude(code, ws->x, ws->fold, magnitude);
    for (int start = 0; start < starts; ++start) {
        float factor[ITQ_LANES];
        itq_start(code, start, magnitude, factor);
        search(code, ws, factor);

        float     xl[ITQ_LANES];
        float     ll[ITQ_LANES];
        float     unit[ITQ_LANES];
        ggml_half d[ITQ_LANES];
        itq_sum_of_products(n, ws->x, ws->levels, ws->fold, xl);
        itq_sum_of_products(n, ws->levels, ws->levels, ws->fold, ll);
        itq_refit(code, xl, ll, d, unit);

        float error[ITQ_LANES];
        for (int i = 0; i < n / 2; ++i) {
            for (int l = 0; l < ITQ_LANES; ++l) {
                const float a  = ws->x[i][l] - ws->levels[i][l] * unit[l];
                const float b  = ws->x[i + n / 2][l] - ws->levels[i + n / 2][l] * unit[l];
                ws->fold[i][l] = a * a + b * b;
            }
        }
        itq_fold_sum(n, ws->fold, error);
        itq_keep_better(n, &ws->best, start == 0, error, d, ws->state, ws->code);
    }
    itq_clear_zeros(&ws->best, magnitude);
}

ITQ_CLONES static void solve_ternary(struct workspace * ws) {
    float rms[ITQ_LANES];
    itq_rms(QK_ITQ, ws->x, ws->fold, rms);
    for (int l = 0; l < ITQ_LANES; ++l) {
        const float alpha     = TERNARY_ALPHA * rms[l];
        const float threshold = alpha * 0.5f;
        ws->best.d[l]         = itq_storable(&itq3_s_code, alpha * TERNARY_TO_D);
        ws->best.state[l]     = 0;
        for (int t = 0; t < QK_ITQ; ++t) {
            ws->best.code[t][l] = (uint8_t) (8 * (2 + (ws->x[t][l] > threshold) - (ws->x[t][l] < -threshold)));
        }
    }
}

#define DEFINE_ENCODER(NAME, name, bits, n_levels, length, has_z, number)                                      \
    ITQ_CLONES static void solve_##name(struct workspace * ws, int starts) {                                   \
        solve(&name##_code, ws, starts);                                                                       \
    }                                                                                                          \
                                                                                                               \
    size_t quantize_##name##_effort(const float * GGML_RESTRICT src, void * GGML_RESTRICT dst, int64_t nrows,  \
                                    int64_t n_per_row, int codec, int effort) {                                \
        GGML_ASSERT(n_per_row % (length) == 0);                                                                \
        GGML_ASSERT(codec == ITQ_CODEC_TRELLIS || (codec == ITQ_CODEC_TERNARY && (has_z)));                    \
        GGML_ASSERT(effort == ITQ_EFFORT_FAST || effort == ITQ_EFFORT_DEFAULT);                                \
        const int64_t    nb = nrows * (n_per_row / (length));                                                  \
        struct workspace ws;                                                                                   \
        memset(&ws.best, 0, sizeof(ws.best));                                                                  \
        for (int64_t i = 0; i < nb; i += ITQ_LANES) {                                                          \
            const int n = nb - i < ITQ_LANES ? (int) (nb - i) : ITQ_LANES;                                     \
            ggml_half z = 0;                                                                                   \
            bool      finite[ITQ_LANES];                                                                       \
            memset(finite, true, sizeof(finite));                                                              \
            name##_load(ws.x, src + i * (length), length, n, finite);                                          \
            if (codec == ITQ_CODEC_TERNARY) {                                                                  \
                solve_ternary(&ws);                                                                            \
                z = ggml_fp32_to_fp16(TERNARY_Z);                                                              \
            } else {                                                                                           \
                solve_##name(&ws, name##_code.n_starts[effort]);                                               \
            }                                                                                                  \
            for (int l = 0; l < n; ++l) {                                                                      \
                name##_pack(&ws.best, l, z, finite[l], (block_##name *) dst + i + l);                          \
            }                                                                                                  \
        }                                                                                                      \
        return (size_t) nb * sizeof(block_##name);                                                             \
    }                                                                                                          \
                                                                                                               \
    void quantize_row_##name##_ref(const float * GGML_RESTRICT x, block_##name * GGML_RESTRICT y, int64_t k) { \
        assert(k % (length) == 0);                                                                             \
        quantize_##name##_effort(x, y, 1, k, ITQ_CODEC_TRELLIS, ITQ_EFFORT_DEFAULT);                           \
    }

ITQ_TYPES(DEFINE_ENCODER)

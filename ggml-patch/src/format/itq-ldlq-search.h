// The trellis types: the calibrated encoder, for one length of vectors (itq-vectors.h). See gguf_itq3s/rounding/ldlq.py for the method; the
// arithmetic is the same, byte for byte.
//
// ITQ_LANES rows are encoded side by side, ROWS of them against each panel of the feedback matrix.

#pragma once

#include "itq-ldlq.h"

#include "itq-vectors.h"

#include "itq-lanes.h"

#include <stdlib.h>

#define WINDOW      (ITQ_LDLQ_WINDOW + 1)  // columns a survivor's feedback takes, made odd
#define LOOKAHEAD   25                     // a state that far back is still in 31 bits of history
#define ROWS        64
#define GROUPS      (ROWS / ITQ_LANES)
// Columns whose sums are held in registers, and rows of the feedback matrix that stay in the cache meanwhile.
#define TILE        8
#define PANEL       64
#define STATE_BITS  6
#define LEVEL_LIMIT 64  // beyond the magnitude of any level
#define FROM_UPPER  (2 * LEVEL_LIMIT)
#define DROPPED     1e30f  // metric of a dropped survivor: beyond that of any path, far below the end of float32

typedef float   lanes[ITQ_LANES];
typedef int32_t ilanes[ITQ_LANES];

// How far the search goes within a block.
struct reach {
    int  segment;
    int  lookahead;
    bool coupled;  // whether there is feedback within the block
};

// The levels of a subset.
struct subset {
    vec level[8];
    vec middle[7];
};

struct ldlq_workspace {
    vec     target[QK_ITQ];  // what the levels through the feedback should come to, in level units
    vec     levels[QK_ITQ];
    vec     through[QK_ITQ];  // levels through the feedback
    vec     fold[QK_ITQ / 2];
    // Of the states, by place: see itq_place.
    vec     metric[ITQ_STATES];
    vec     pending[ITQ_STATES * WINDOW];  // [p]: what a survivor's levels add to column t + p
    ivec    history[ITQ_STATES];           // the survivor's last selector bits
    uint8_t chosen[QK_ITQ][ITQ_STATES]
                  [ITQ_LANES];        // the level, plus FROM_UPPER where the survivor came from k + ITQ_HALF
    uint8_t code[QK_ITQ][ITQ_LANES];  // ITQ_S_BIT*s + 8*q + c of the path found
    uint8_t start[ITQ_LANES];         // the state that it starts from

    struct itq_best best;
    struct subset   subsets[8];
    uint8_t         symbol[8][2 * LEVEL_LIMIT];  // of a subset's level + LEVEL_LIMIT

    // Parts of the feedback matrix, copied together: its own rows lie a power of two apart and would evict each other.
    float feedback[QK_ITQ][QK_ITQ];            // of the block
    float tiles[QK_ITQ / TILE][QK_ITQ][TILE];  // the same, TILE columns at a time
    float panel[QK_ITQ / TILE][PANEL][TILE];   // from PANEL columns of earlier blocks to the block

    vec x[GROUPS][QK_ITQ];  // rotated weights
    vec y[GROUPS][QK_ITQ];  // what the rounded weights through the feedback should come to
};

static void set_subsets(const struct itq_code * code, struct ldlq_workspace * ws) {
    const int8_t * levels = code->levels;
    for (int c = 0; c < 8; ++c) {
        for (int q = 0; q < 1 << code->bits; ++q) {
            ws->subsets[c].level[q]                        = v_all(levels[8 * q + c]);
            ws->symbol[c][levels[8 * q + c] + LEVEL_LIMIT] = (uint8_t) q;
        }
        for (int q = 0; q + 1 < 1 << code->bits; ++q) {
            ws->subsets[c].middle[q] = v_all((levels[8 * q + c] + levels[8 * q + 8 + c]) * 0.5f);
        }
    }
}

// Where a state is kept at column t. The two states that k and k + ITQ_HALF lead to take their places, 2k that of k: half
// the memory of two sets of places in turn. So a state's number, rotated to the right by a bit a column, is its place.
ITQ_INLINE int place_of(int state, int t) {
    const int by = t % STATE_BITS;
    return (state >> by | state << (STATE_BITS - by)) & (ITQ_STATES - 1);
}

// Nearest level of a subset, a target half-way takes the lower one.
ITQ_INLINE vec nearest_level(int bits, vec y, const struct subset * subset) {
    vec level = subset->level[0];
    for (int q = 1; q < 1 << bits; ++q) {
        level = v_select(v_greater(y, subset->middle[q - 1]), subset->level[q], level);
    }
    return level;
}

// One state: its survivor comes from k, with metric low and a level of subset_low, or from k + ITQ_HALF; a tie keeps that
// from k.
struct survivor {
    vec  metric;
    vec  level;
    ivec high;
};

ITQ_INLINE struct survivor survive(int bits, vec low, vec up, vec y_low, vec y_high, float weight,
                                   const struct subset * subset_low, const struct subset * subset_high) {
    const vec level_low     = nearest_level(bits, y_low, subset_low);
    const vec level_high    = nearest_level(bits, y_high, subset_high);
    const vec distance_low  = v_sub(y_low, level_low);
    const vec distance_high = v_sub(y_high, level_high);

    low = v_add(low, v_scale(weight, v_mul(distance_low, distance_low)));
    up  = v_add(up, v_scale(weight, v_mul(distance_high, distance_high)));

    struct survivor s;
    s.high   = v_greater(low, up);
    s.metric = v_select(s.high, up, low);
    s.level  = v_select(s.high, level_high, level_low);
    return s;
}

// Move the feedback of a pair of survivors on by a column and add that of their new levels.
ITQ_INLINE void carry(vec * GGML_RESTRICT lower, vec * GGML_RESTRICT upper, const float * GGML_RESTRICT feedback,
                      const struct survivor * s, int moved, int count) {
    const ivec high0  = s[0].high;
    const ivec high1  = s[1].high;
    const vec  level0 = s[0].level;
    const vec  level1 = s[1].level;
#pragma GCC unroll 4
    for (int p = 0; p < moved; ++p) {
        const vec l = lower[p + 1];
        const vec u = upper[p + 1];
        lower[p]    = v_add(v_select(high0, u, l), v_scale(feedback[p], level0));
        upper[p]    = v_add(v_select(high1, u, l), v_scale(feedback[p], level1));
    }
    for (int p = moved; p < count; ++p) {
        lower[p] = v_scale(feedback[p], level0);
        upper[p] = v_scale(feedback[p], level1);
    }
    if (count == 0) {
        lower[0] = upper[0] = v_all(0);
    }
}

// One column of the search. A survivor's own feedback reaches the next count columns; before this column it reached the
// first moved of them. The feedback of a state takes stride places.
ITQ_INLINE void step(int bits, struct ldlq_workspace * ws, int t, float weight, int moved, int count, int stride) {
    const float * feedback = ws->feedback[t] + t + 1;
    const vec     y        = ws->target[t];
    const int     apart    = place_of(ITQ_HALF, t);

    for (int k = 0; k < ITQ_HALF; ++k) {
        const struct subset * even = &ws->subsets[itq_butterfly_subset(k)];
        const struct subset * odd  = &ws->subsets[itq_butterfly_subset(k) ^ 4];

        const int lower       = place_of(k, t);
        const int upper       = lower + apart;
        vec *     lower_queue = ws->pending + lower * stride;
        vec *     upper_queue = ws->pending + upper * stride;
        const vec low         = ws->metric[lower];
        const vec up          = ws->metric[upper];
        const vec y_low       = v_sub(y, lower_queue[0]);
        const vec y_high      = v_sub(y, upper_queue[0]);

        struct survivor s[2];
        s[0] = survive(bits, low, up, y_low, y_high, weight, even, odd);
        s[1] = survive(bits, low, up, y_low, y_high, weight, odd, even);

        const ivec past[2] = { ws->history[lower], ws->history[upper] };
        for (int bit = 0; bit < 2; ++bit) {
            const int  place  = bit ? upper : lower;
            const ivec kept   = i_shift_left(i_select(s[bit].high, past[1], past[0]), 1);
            const ivec chosen = i_add(i_of(s[bit].level), i_and(s[bit].high, i_all(FROM_UPPER)));
            i_store_bytes(ws->chosen[t][2 * k + bit], chosen);
            ws->metric[place]  = s[bit].metric;
            ws->history[place] = i_add(kept, i_all(bit));
        }
        carry(lower_queue, upper_queue, feedback, s, moved, count);
    }
}

// Best state of each lane before column t, the lowest number on a tie.
ITQ_INLINE void best_state(const vec * metric, int t, int32_t * state) {
    vec  least = metric[place_of(0, t)];
    ivec best  = i_all(0);
    for (int s = 1; s < ITQ_STATES; ++s) {
        const vec  here = metric[place_of(s, t)];
        const ivec less = v_greater(least, here);
        best            = i_select(less, i_all(s), best);
        least           = v_select(less, here, least);
    }
    memcpy(state, &best, sizeof(best));
}

// Trace back from the states after column last; keep the columns from start to stop, and the state before the first.
ITQ_INLINE void commit(struct ldlq_workspace * ws, int start, int stop, int last, const int32_t * best) {
    lanes * levels = (lanes *) ws->levels;
    ilanes  state;
    memcpy(state, best, sizeof(state));
    for (int t = last; t >= start; --t) {
        for (int l = 0; l < ITQ_LANES; ++l) {
            const int chosen = (ws->chosen[t][state[l]][l] + LEVEL_LIMIT) & 0xff;
            const int high   = chosen / FROM_UPPER;
            const int s      = state[l] & 1;
            const int k      = state[l] >> 1;
            if (t < stop) {
                const int level = chosen % FROM_UPPER;
                const int c     = itq_butterfly_subset(k) ^ (s ^ high) << 2;
                ws->code[t][l]  = (uint8_t) (ITQ_S_BIT * s + 8 * ws->symbol[c][level] + c);
                levels[t][l]    = (float) (level - LEVEL_LIMIT);
            }
            state[l] = k + high * ITQ_HALF;
        }
    }
    for (int l = 0; start == 0 && l < ITQ_LANES; ++l) {
        ws->start[l] = (uint8_t) state[l];
    }
}

// Drop the survivors, before column t, that were in another state than the best one lookahead columns ago.
ITQ_INLINE void drop(vec * metric, const ivec * history, int t, const int32_t * best, int lookahead) {
    ilanes kept;
    for (int l = 0; l < ITQ_LANES; ++l) {
        kept[l] = ((const int32_t *) &history[place_of(best[l], t)])[l];
    }
    ivec state;
    memcpy(&state, kept, sizeof(state));
    state = i_and(i_shift_right(state, lookahead), i_all(ITQ_STATES - 1));
    for (int place = 0; place < ITQ_STATES; ++place) {
        const ivec same = i_equal(i_and(i_shift_right(history[place], lookahead), i_all(ITQ_STATES - 1)), state);
        metric[place]   = v_select(same, metric[place], v_all(DROPPED));
    }
}

// First column that the feedback of column t reaches only once its segment is committed.
ITQ_INLINE int horizon(int n, int t, const struct reach * reach) {
    const int stop = (t / reach->segment + 1) * reach->segment + reach->lookahead;
    return stop < n ? stop : n;
}

// Path of a block with a small sum of weight[k] * (through[k] - target[k])^2; fills code, start and levels, changes
// target.
ITQ_INLINE void search(const struct itq_code * code, struct ldlq_workspace * ws, const float * weight,
                       const struct reach * reach) {
    const int n      = code->length;
    const int stride = reach->coupled ? (reach->segment + reach->lookahead) | 1 : 1;  // odd: places apart in the cache
    for (int s = 0; s < ITQ_STATES; ++s) {
        ws->metric[s]           = v_all(0);
        ws->history[s]          = i_all(s);
        ws->pending[s * stride] = v_all(0);
    }

    ilanes state;
    int    committed = 0;
    int    before    = 0;  // horizon of the column before
    for (int t = 0; t < n; ++t) {
        const int stop  = reach->coupled ? horizon(n, t, reach) : t + 1;
        const int moved = before > t + 1 ? before - t - 1 : 0;
        step(code->bits, ws, t, weight[t], moved, stop - t - 1, stride);
        before = stop;

        const int end = committed + reach->segment;
        if (t + 1 == end + reach->lookahead && t + 1 < n) {
            best_state(ws->metric, t + 1, state);
            commit(ws, committed, end, t, state);
            drop(ws->metric, ws->history, t + 1, state, reach->lookahead);
            for (int k = t + 1; k < n; ++k) {
                vec sum = ws->target[k];
                for (int j = committed; j < end; ++j) {
                    sum = v_sub(sum, v_scale(ws->feedback[j][k], ws->levels[j]));
                }
                ws->target[k] = sum;
            }
            committed = end;
        }
    }
    best_state(ws->metric, n, state);
    commit(ws, committed, n, n - 1, state);
}

// Sums of a tile in registers: loops over them are written out because compilers leave them in memory.
#define TILE_EACH(X)     X(0) X(1) X(2) X(3) X(4) X(5) X(6) X(7)
#define TILE_LOAD(i)     vec sum##i = from[k + i];
#define TILE_STORE(i)    to[k + i] = sum##i;
#define TILE_ADD(i)      sum##i = v_add(sum##i, v_scale(a[j][i], x));
#define TILE_SUBTRACT(i) sum##i = v_sub(sum##i, v_scale(a[j][i], x));
#define TILE_ADD_LATER(i)                            \
    if (j < k + i) {                                 \
        sum##i = v_add(sum##i, v_scale(a[j][i], x)); \
    }

// to[k] = from[k] + sum over j < k of A[j][k] from[j], j ascending.
ITQ_INLINE void through_feedback(int n, const vec * GGML_RESTRICT from, vec * GGML_RESTRICT to,
                                 float (*GGML_RESTRICT tiles)[QK_ITQ][TILE]) {
    for (int k = 0; k < n; k += TILE) {
        float (*a)[TILE] = tiles[k / TILE];
        TILE_EACH(TILE_LOAD)
        for (int j = 0; j < k; ++j) {
            const vec x = from[j];
            TILE_EACH(TILE_ADD)
        }
        for (int j = k; j < k + TILE - 1; ++j) {
            const vec x = from[j];
            TILE_EACH(TILE_ADD_LATER)
        }
        TILE_EACH(TILE_STORE)
    }
}

// y[k] -= sum over j of A[j][k] e[j] for PANEL columns of earlier blocks, j ascending.
static void feed_forward(int n, const vec * GGML_RESTRICT error, vec * y, float (*GGML_RESTRICT panel)[PANEL][TILE]) {
    const vec * from = y;
    vec *       to   = y;
    for (int k = 0; k < n; k += TILE) {
        float (*a)[TILE] = panel[k / TILE];
        TILE_EACH(TILE_LOAD)
        for (int j = 0; j < PANEL; ++j) {
            const vec x = error[j];
            TILE_EACH(TILE_SUBTRACT)
        }
        TILE_EACH(TILE_STORE)
    }
}

static void start_from_weights(int n, const vec * GGML_RESTRICT x, vec * GGML_RESTRICT y,
                               float (*GGML_RESTRICT tiles)[QK_ITQ][TILE]) {
    through_feedback(n, x, y, tiles);
}

// Copy the feedback within a block; returns whether there is any.
static bool copy_feedback(int n, struct ldlq_workspace * ws, const float * feedback, int64_t stride) {
    bool coupled = false;
    for (int j = 0; j < n; ++j) {
        memcpy(ws->feedback[j], feedback + j * stride, (size_t) n * sizeof(float));
        for (int k = 0; k < n; k += TILE) {
            memcpy(ws->tiles[k / TILE][j], ws->feedback[j] + k, TILE * sizeof(float));
        }
        for (int k = j + 1; k < n; ++k) {
            coupled |= ws->feedback[j][k] != 0.0f;
        }
    }
    return coupled;
}

static void copy_panel(int n, struct ldlq_workspace * ws, const float * feedback, int64_t stride) {
    for (int j = 0; j < PANEL; ++j) {
        for (int k = 0; k < n; k += TILE) {
            memcpy(ws->panel[k / TILE][j], feedback + j * stride + k, TILE * sizeof(float));
        }
    }
}

// ldlq.solve for one block of ITQ_LANES rows: fills ws->best and the errors of the rounded weights.
ITQ_INLINE void solve(const struct itq_code * code, struct ldlq_workspace * ws, vec * GGML_RESTRICT x,
                      const vec * GGML_RESTRICT y, const float * weight, const struct reach * reach, int starts,
                      vec * GGML_RESTRICT error) {
    const int n = code->length;

    lanes * fold = (lanes *) ws->fold;
    lanes   magnitude;
    itq_magnitude(code, (lanes *) x, fold, magnitude);
    for (int start = 0; start < starts; ++start) {
        lanes factor;
        vec   factors;
        itq_start(code, start, magnitude, factor);
        memcpy(&factors, factor, sizeof(factors));
        for (int t = 0; t < n; ++t) {
            ws->target[t] = v_mul(y[t], factors);
        }
        search(code, ws, weight, reach);
        through_feedback(n, ws->levels, ws->through, ws->tiles);

        lanes       zy;
        lanes       zz;
        const vec * z = ws->through;
        for (int i = 0, j = n / 2; i < n / 2; ++i, ++j) {
            ws->fold[i] = v_add(v_mul(v_scale(weight[i], z[i]), y[i]), v_mul(v_scale(weight[j], z[j]), y[j]));
        }
        itq_fold_sum(n, fold, zy);
        for (int i = 0, j = n / 2; i < n / 2; ++i, ++j) {
            ws->fold[i] = v_add(v_mul(v_scale(weight[i], z[i]), z[i]), v_mul(v_scale(weight[j], z[j]), z[j]));
        }
        itq_fold_sum(n, fold, zz);

        ggml_half d[ITQ_LANES];
        lanes     unit;
        vec       units;
        itq_refit(code, zy, zz, d, unit);
        memcpy(&units, unit, sizeof(units));

        lanes total;
        for (int i = 0, j = n / 2; i < n / 2; ++i, ++j) {
            const vec a = v_sub(y[i], v_mul(z[i], units));
            const vec b = v_sub(y[j], v_mul(z[j], units));
            ws->fold[i] = v_add(v_scale(weight[i], v_mul(a, a)), v_scale(weight[j], v_mul(b, b)));
        }
        itq_fold_sum(n, fold, total);
        itq_keep_better(n, &ws->best, start == 0, total, d, ws->start, ws->code);
    }
    itq_clear_zeros(&ws->best, magnitude);

    lanes unit;
    for (int l = 0; l < ITQ_LANES; ++l) {
        unit[l] = ggml_fp16_to_fp32(ws->best.d[l]) * 0.03125f;
    }
    lanes * errors  = (lanes *) error;
    lanes * weights = (lanes *) x;
    for (int t = 0; t < n; ++t) {
        for (int l = 0; l < ITQ_LANES; ++l) {
            errors[t][l] = (float) code->levels[ws->best.code[t][l] % ITQ_S_BIT] * unit[l] - weights[t][l];
        }
    }
}

// What a type's part of the encoder is called with.
struct entry {
    const struct itq_code * code;
    size_t                  block_bytes;
    void (*load)(float (*x)[ITQ_LANES], const float * src, int64_t stride, int n, bool * finite);
    void (*solve)(struct ldlq_workspace * ws, vec * GGML_RESTRICT x, const vec * GGML_RESTRICT y, const float * weight,
                  const struct reach * reach, int starts, vec * GGML_RESTRICT error);
    void (*pack)(const struct itq_best * best, int l, bool finite, void * block);
};

static size_t quantize(const struct entry * type, const float * GGML_RESTRICT src, char * GGML_RESTRICT dst,
                       int64_t nrows, const struct itq_factor * factor, struct itq_search options) {
    const int     length = type->code->length;
    const int64_t n      = factor->columns;
    const int64_t nb     = n / length;
    GGML_ASSERT(n % length == 0);
    GGML_ASSERT(options.segment >= 1 && options.lookahead >= 0 && options.lookahead <= LOOKAHEAD &&
                options.segment + options.lookahead <= ITQ_LDLQ_WINDOW);
    GGML_ASSERT(options.effort == ITQ_EFFORT_FAST || options.effort == ITQ_EFFORT_DEFAULT);

    void * memory = malloc(sizeof(struct ldlq_workspace) + GROUPS * (size_t) n * sizeof(vec) + sizeof(vec));
    struct ldlq_workspace * ws     = (void *) GGML_PAD((uintptr_t) memory, sizeof(vec));
    vec *                   errors = (vec *) (ws + 1);
    GGML_ASSERT(memory != NULL);
    memset(&ws->best, 0, sizeof(ws->best));
    set_subsets(type->code, ws);

    for (int64_t row = 0; row < nrows; row += ROWS) {
        const int64_t left = nrows - row;
        bool          finite[GROUPS][ITQ_LANES];
        memset(finite, true, sizeof(finite));
        for (int64_t b = 0; b < nb; ++b) {
            const int64_t start    = b * length;
            const float * feedback = factor->feedback + (factor->full ? start * n + start : b * length * length);
            struct reach  reach    = { length, 0, false };
            if (copy_feedback(length, ws, feedback, factor->full ? n : length)) {
                reach = (struct reach) { options.segment, options.lookahead, true };
            }

            for (int g = 0; g < GROUPS && g * ITQ_LANES < left; ++g) {
                const int rows = left - g * ITQ_LANES < ITQ_LANES ? (int) left - g * ITQ_LANES : ITQ_LANES;
                type->load((lanes *) ws->x[g], src + (row + g * ITQ_LANES) * n + start, n, rows, finite[g]);
                start_from_weights(length, ws->x[g], ws->y[g], ws->tiles);
            }
            if (factor->full) {
                for (int64_t j = 0; j < start; j += PANEL) {
                    copy_panel(length, ws, factor->feedback + j * n + start, n);
                    for (int g = 0; g < GROUPS && g * ITQ_LANES < left; ++g) {
                        feed_forward(length, errors + g * n + j, ws->y[g], ws->panel);
                    }
                }
            }
            for (int g = 0; g < GROUPS && g * ITQ_LANES < left; ++g) {
                type->solve(ws, ws->x[g], ws->y[g], factor->weight + start, &reach,
                            type->code->n_starts[options.effort], errors + g * n + start);
                for (int l = 0; l < ITQ_LANES && g * ITQ_LANES + l < left; ++l) {
                    const int64_t block = (row + g * ITQ_LANES + l) * nb + b;
                    type->pack(&ws->best, l, finite[g][l], dst + (size_t) block * type->block_bytes);
                }
            }
        }
    }
    free(memory);
    return (size_t) (nrows * nb) * type->block_bytes;
}

#define DEFINE_LDLQ(NAME, name, ...)                                                                                 \
    static void solve_##name(struct ldlq_workspace * ws, vec * GGML_RESTRICT x, const vec * GGML_RESTRICT y,         \
                             const float * weight, const struct reach * reach, int starts,                           \
                             vec * GGML_RESTRICT error) {                                                            \
        solve(&name##_code, ws, x, y, weight, reach, starts, error);                                                 \
    }                                                                                                                \
                                                                                                                     \
    static void pack_##name(const struct itq_best * best, int l, bool finite, void * block) {                        \
        name##_pack(best, l, 0, finite, block);                                                                      \
    }                                                                                                                \
                                                                                                                     \
    size_t ITQ_VARIANT(quantize_##name##_ldlq_flat)(const float * src, void * dst, int64_t nrows, int64_t n_per_row, \
                                                    const float * feedback, const float * weight, int full,          \
                                                    int segment, int lookahead, int effort) {                        \
        static const struct entry type   = { &name##_code, sizeof(block_##name), name##_load, solve_##name,          \
                                             pack_##name };                                                          \
        const struct itq_factor   factor = { feedback, weight, n_per_row, full != 0 };                               \
        const struct itq_search   search = { segment, lookahead, effort };                                           \
        return quantize(&type, src, dst, nrows, &factor, search);                                                    \
    }

ITQ_TYPES(DEFINE_LDLQ)

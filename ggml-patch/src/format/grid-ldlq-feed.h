#pragma once

// grid_ldlq_feed for one length of vectors (itq-vectors.h).

#include "grid-ldlq.h"
#include "itq-vectors.h"

#define BLOCK      GRID_LDLQ_BLOCK
#define FEED_WIDTH (4 * ITQ_LANES)  // columns whose sums are held in registers
#define FEED_PANEL 64               // rows of the feedback matrix that stay in the cache meanwhile

ITQ_INLINE vec v_load(const float * from) {
    vec x;
    memcpy(&x, from, sizeof(x));
    return x;
}

// target[r][i] -= sum over j of feedback[j][i] * errors[r][j] for FEED_WIDTH columns of two rows, `apart` rows from each
// other, j ascending. A row may be both.
ITQ_INLINE void feed_tile(float * target, const float * errors, int apart, int64_t n, const float * feedback,
                          int64_t count) {
#define EACH(X) X(0) X(1) X(2) X(3)
#define LOAD(i)                                    \
    vec upper##i = v_load(target + i * ITQ_LANES); \
    vec lower##i = v_load(target + apart * BLOCK + i * ITQ_LANES);
#define SUBTRACT(i)                                                       \
    {                                                                     \
        const vec a = v_load(feedback + j * n + i * ITQ_LANES);           \
        upper##i    = v_sub(upper##i, v_scale(errors[j], a));             \
        lower##i    = v_sub(lower##i, v_scale(errors[apart * n + j], a)); \
    }
#define STORE(i)                                                 \
    memcpy(target + i * ITQ_LANES, &upper##i, sizeof(upper##i)); \
    memcpy(target + apart * BLOCK + i * ITQ_LANES, &lower##i, sizeof(lower##i));

    EACH(LOAD)
    for (int64_t j = 0; j < count; ++j) {
        EACH(SUBTRACT)
    }
    EACH(STORE)
}

void ITQ_VARIANT(grid_ldlq_feed)(float * GGML_RESTRICT target, const float * GGML_RESTRICT errors, int64_t nrows,
                                 int64_t n, const float * GGML_RESTRICT feedback, int64_t start) {
    for (int64_t j = 0; j < start; j += FEED_PANEL) {
        const int64_t count = j + FEED_PANEL < start ? FEED_PANEL : start - j;
        for (int64_t r = 0; r < nrows; r += 2) {
            for (int c = 0; c < BLOCK; c += FEED_WIDTH) {
                feed_tile(target + r * BLOCK + c, errors + r * n + j, r + 1 < nrows, n, feedback + j * n + start + c,
                          count);
            }
        }
    }
}

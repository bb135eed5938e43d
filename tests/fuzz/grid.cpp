// Rounding to the grids of ggml's own types with error feedback, on any float32: bit for bit what plain loops in the
// order of the definition make, codes within the grid, nothing written past the end.
//
// A case is one block of 256 columns of one row.

#include "cases.h"
#include "grid-ldlq.h"

#include <cmath>

static Count (&counts)[2] = Counts<2>::all;

extern "C" int LLVMFuzzerInitialize(int *, char ***) {
    counts[0].name = "blocks";
    counts[1].name = "blocks-with-others-before";
    return atexit(report_counts<2>);
}

struct Grid {
    int           group;
    int           low;
    int           high;
    const float * table;
};

// Levels of IQ4_NL's kind: ascending, not even.
static const float levels[16] = { -127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113 };

static const Grid grids[] = {
    { 32, -8, 7, nullptr },   { 32, -127, 127, nullptr }, { 16, -4, 3, nullptr },
    { 16, 0, 3, nullptr },    { 32, 0, 15, nullptr },     { 32, 0, 31, nullptr },
    { 16, -32, 31, nullptr }, { 32, 0, 15, levels },      { 256, -128, 127, nullptr },
};

static int nearest(const Grid & grid, float x) {
    if (grid.table) {
        int code = 0;
        while (code < grid.high && x > (grid.table[code] + grid.table[code + 1]) * 0.5f) {
            ++code;
        }
        return code;
    }
    if (!(x > (float) grid.low)) {
        return grid.low;
    }
    return x < (float) grid.high ? (int) std::nearbyint((double) x) : grid.high;
}

static void expect(const char * what, int at, float found, float wanted) {
    if (!same(found, wanted)) {
        wrong("grid_ldlq", what, at, found, wanted);
    }
}

extern "C" int LLVMFuzzerTestOneInput(const uint8_t * data, size_t size) {
    Input        in(data, size);
    const Grid & grid   = grids[in.below(sizeof(grids) / sizeof(*grids))];
    const int    blocks = 1 + (int) in.below(3);
    const int    block  = (int) in.below((uint32_t) blocks);
    const int    rows   = 1 + (int) in.below(5);
    const int    n      = 256 * blocks;
    const int    start  = 256 * block;
    const int    groups = 256 / grid.group;

    const auto weights  = exactly<float>((size_t) rows * 256);
    const auto target   = exactly<float>((size_t) rows * 256);
    const auto before   = exactly<float>((size_t) rows * (size_t) n);  // errors of the columns so far
    const auto feedback = exactly<float>((size_t) n * (size_t) n);
    const auto scale    = exactly<float>((size_t) (rows * groups));
    const auto minimum  = exactly<float>((size_t) (rows * groups));
    floats(in, weights.get(), rows * 256);
    floats(in, before.get(), rows * n);
    floats(in, scale.get(), rows * groups);
    floats(in, minimum.get(), rows * groups);
    const bool much = in.below(8) == 0;
    for (int i = 0; i < start + 256; ++i) {  // what is not read stays unset
        for (int j = start; j < start + 256; ++j) {
            feedback[(size_t) (i * n + j)] = j > i ? (much ? 2.0f : 0.05f) * in.uniform() : (j == i ? 1.0f : 0.0f);
        }
    }

    const auto wanted = exactly<float>((size_t) rows * 256);
    for (int r = 0; r < rows; ++r) {
        for (int k = 0; k < 256; ++k) {
            float sum = weights[(size_t) (r * 256 + k)];
            for (int j = 0; j < start; ++j) {
                sum -= feedback[(size_t) (j * n + start + k)] * before[(size_t) (r * n + j)];
            }
            wanted[(size_t) (r * 256 + k)] = sum;
        }
    }
    memcpy(target.get(), weights.get(), (size_t) rows * 256 * sizeof(float));
    grid_ldlq_feed(target.get(), before.get(), rows, n, feedback.get(), start);
    for (int i = 0; i < rows * 256; ++i) {
        expect("target", i, target[(size_t) i], wanted[(size_t) i]);
    }

    const auto    codes    = exactly<int8_t>((size_t) rows * 256);
    const auto    errors   = exactly<float>((size_t) rows * 256);
    const auto    residual = exactly<float>((size_t) rows * 256);
    const float * own      = feedback.get() + (size_t) start * (size_t) n + start;
    grid_ldlq_round(codes.get(), errors.get(), residual.get(), weights.get(), target.get(), rows, own, n, scale.get(),
                    minimum.get(), grid.group, grid.low, grid.high, grid.table);
    for (int r = 0; r < rows; ++r) {
        float left[256];
        memcpy(left, target.get() + r * 256, sizeof(left));
        for (int k = 0; k < 256; ++k) {
            const int   here = r * 256 + k;
            const float d    = scale[(size_t) (r * groups + k / grid.group)];
            const float m    = minimum[(size_t) (r * groups + k / grid.group)];
            const int   code = nearest(grid, (left[k] + m) * (d != 0.0f ? 1.0f / d : 0.0f));
            const float q    = d * (grid.table ? grid.table[code] : (float) code) - m;
            if (codes[(size_t) here] != code) {
                wrong("grid_ldlq", "code", here, codes[(size_t) here], code);
            }
            expect("error", here, errors[(size_t) here], q - weights[(size_t) here]);
            expect("residual", here, residual[(size_t) here], q - left[k]);
            for (int i = k + 1; i < 256; ++i) {
                left[i] -= own[(size_t) k * (size_t) n + (size_t) i] * errors[(size_t) here];
            }
        }
    }
    counts[start > 0].n += (uint64_t) rows;
    return 0;
}

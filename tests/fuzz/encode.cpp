// Encoding of any weights as a trellis type, TQ1_0 and TQ2_0: alone, with an importance matrix, and with the feedback of a
// calibration. What comes out is a block that decodes to finite weights, or one that ggml_validate_row_data refuses;
// only weights that no block can hold are refused.
//
// A case is one block.

#include "cases.h"
#include "ggml-cpu.h"
#include "ggml-itq.h"
#include "ggml.h"
#include "itq-ldlq.h"

#include <cmath>
#include <vector>

static Count (&counts)[4] = Counts<4>::all;

// The encoders of a trellis type, and how large the squared error of blocks may be that are as most are.
struct Trellis {
    ggml_type                            type;
    bool                                 has_z;
    double                               error;
    decltype(&quantize_itq3_s)           quantize;
    decltype(&quantize_itq3_s_effort)    with_effort;
    decltype(&quantize_itq3_s_ldlq_flat) with_feedback;
};

#define TRELLIS(NAME, name, bits, n_levels, length, has_z, number)                                                  \
    { GGML_TYPE_##NAME,           (has_z) != 0, (bits) == 1 ? 0.3 : 0.1, quantize_##name, quantize_##name##_effort, \
      quantize_##name##_ldlq_flat },
static const Trellis trellises[] = { ITQ_TYPES(TRELLIS) };

static const Trellis * trellis_of(ggml_type type) {
    for (const Trellis & trellis : trellises) {
        if (trellis.type == type) {
            return &trellis;
        }
    }
    return nullptr;
}

// Where the scale of a block is: the float16 fields end the block.
static size_t scale_of(ggml_type type) {
    const Trellis * trellis = trellis_of(type);
    return ggml_type_size(type) - (trellis && trellis->has_z ? 4 : 2);
}

extern "C" int LLVMFuzzerInitialize(int *, char ***) {
    static const char * const names[4] = { "blocks", "blocks-with-importance", "blocks-with-feedback", "refused" };
    for (int i = 0; i < 4; ++i) {
        counts[i].name = names[i];
    }
    ggml_cpu_init();
    return atexit(report_counts<4>);
}

// Whether every weight is finite, and whether the rotated ones certainly stay below the encoder's limit.
static void look(const float * x, int length, bool * finite, bool * encodable) {
    double sum = 0.0;
    *finite    = true;
    for (int t = 0; t < length; ++t) {
        *finite = *finite && std::isfinite(x[t]);
        sum += std::fabs((double) x[t]);
    }
    *encodable = *finite && sum / std::sqrt((double) length) < 0x1p55;
}

// Whether the rotated weights are such as most blocks have: none beyond the levels by much, a scale that float16 holds
// well. Their squared error is near 2.2 percent.
static bool even(const float * x, int length) {
    double y[256];
    double sum  = 0.0;
    double most = 0.0;
    for (int t = 0; t < length; ++t) {
        y[t] = x[t];
    }
    for (int h = 1; h < length; h *= 2) {
        for (int i = 0; i < length; ++i) {
            if (!(i & h)) {
                const double a = y[i];
                const double b = y[i + h];
                y[i]           = (a + b) * M_SQRT1_2;
                y[i + h]       = (a - b) * M_SQRT1_2;
            }
        }
    }
    for (int t = 0; t < length; ++t) {
        sum += y[t] * y[t];
        most = std::fmax(most, std::fabs(y[t]));
    }
    const double rms = std::sqrt(sum / length);
    return rms > 1e-3 && rms < 1e4 && most < 3 * rms;
}

static void check(ggml_type type, const float * x, const uint8_t * block, bool plain, int at) {
    const auto *    traits  = ggml_get_type_traits(type);
    const int       length  = (int) traits->blck_size;
    const Trellis * trellis = trellis_of(type);
    bool            finite, encodable;
    look(x, length, &finite, &encodable);
    float amax = 0.0f;
    for (int t = 0; t < length; ++t) {
        amax = std::fmax(amax, std::fabs(x[t]));
    }
    // ggml_validate_row_data prints a line for every block that it refuses: it is asked about the others
    ggml_fp16_t d;
    memcpy(&d, block + scale_of(type), sizeof(d));
    if (!std::isfinite(ggml_fp16_to_fp32(d))) {
        ++counts[3].n;
        // the scale of TQ is the largest magnitude, in float16
        if (trellis ? encodable && plain : finite && amax < 65504.0f) {
            wrong("a block", traits->type_name, at, NAN, amax);
        }
        return;
    }
    if (!ggml_validate_row_data(type, block, traits->type_size)) {
        wrong("a block with a finite scale", traits->type_name, at, 0, 1);
    }
    // upstream's encoders of TQ look past what is no number, as a maximum does
    if (trellis && !finite) {
        wrong("a block of weights that are not finite", traits->type_name, at, 1, 0);
    }
    float y[256];
    traits->to_float(block, y, length);
    double error = 0.0;
    double size  = 0.0;
    for (int t = 0; t < length; ++t) {
        if (!std::isfinite(y[t])) {
            wrong("a decoded weight", traits->type_name, t, y[t], x[t]);
        }
        error += ((double) x[t] - y[t]) * ((double) x[t] - y[t]);
        size += (double) x[t] * x[t];
    }
    if (trellis && plain && even(x, length) && !(error <= trellis->error * size)) {
        wrong("the squared error of an even block", traits->type_name, at, error, size);
    }
    // the scale is fitted to the levels, so nothing is worse than a block of zeros
    if (trellis && plain && !(error <= size * (1 + 1e-4))) {
        wrong("the squared error", traits->type_name, at, error, size);
    }
}

// Weights of `rows` rows; all of one kind, so that an input need not be long, or each block of its own.
static std::unique_ptr<float[]> weights(Input & in, int rows, int columns, int length) {
    auto       x    = exactly<float>((size_t) rows * (size_t) columns);
    const bool each = in.below(4) != 0;
    for (int i = 0; i < rows * columns; i += each ? length : rows * columns) {
        floats(in, &x[(size_t) i], each ? length : rows * columns);
    }
    return x;
}

// With importance the factors of a matrix are kept until another one comes; making them takes longer than 64 rows.
// Rows of one block have the first of them or the second.
static const float * importance(Input & in, int columns, int length) {
    static std::vector<float> kept(512);
    static int                left = 0;
    if (left-- <= 0) {
        left = 31;
        floats(in, kept.data(), 512);
        if (in.below(4)) {
            for (float & value : kept) {
                value = std::fabs(value);
            }
        }
    }
    return kept.data() + (columns == length && left % 2 ? length : 0);
}

extern "C" int LLVMFuzzerTestOneInput(const uint8_t * data, size_t size) {
    Input           in(data, size);
    const uint32_t  way     = in.below(16);
    const Trellis & trellis = trellises[in.below(sizeof(trellises) / sizeof(*trellises))];
    const bool      ternary = way == 3 || way == 4;
    const ggml_type type    = way == 3 ? GGML_TYPE_TQ1_0 : way == 4 ? GGML_TYPE_TQ2_0 : trellis.type;
    const int       length  = (int) ggml_blck_size(type);
    const int       columns = length * (1 + (int) in.below(length == 256 ? 2 : 5));
    const int       rows    = 1 + (int) in.below(way < 2 ? 64 : 17);
    const int       blocks  = rows * columns / length;
    const auto      x       = weights(in, rows, columns, length);

    bool         plain  = true;
    int          effort = ITQ_EFFORT_DEFAULT;
    Count *      count  = &counts[0];
    const size_t bytes  = (size_t) blocks * ggml_type_size(type);
    const auto   y      = exactly<uint8_t>(bytes);
    size_t       wrote  = bytes;
    if (way < 2) {
        plain = false;
        count = &counts[1];
        wrote = trellis.quantize(x.get(), y.get(), rows, columns, importance(in, columns, length));
    } else if (way == 15) {
        plain                 = false;
        count                 = &counts[2];
        const int   full      = (int) in.below(2);
        const int   segment   = 1 + (int) in.below(ITQ_LDLQ_SEGMENT);
        const int   lookahead = (int) in.below(ITQ_LDLQ_LOOKAHEAD + 1);
        const int   across    = full ? columns : length;
        const auto  feedback  = exactly<float>((size_t) columns * (size_t) across);
        const auto  weight    = exactly<float>((size_t) columns);
        const bool  much      = in.below(8) == 0;
        const float magnitude = much ? from_bits((uint32_t) in.byte() % 255 << 23) : 0.05f;
        for (int i = 0; i < columns; ++i) {
            weight[(size_t) i] = std::fabs(in.normal()) + 0.01f;
            for (int j = 0; j < across; ++j) {
                const int row = full ? i : i % length;
                feedback[(size_t) i * (size_t) across + (size_t) j] =
                    j > row ? magnitude * in.uniform() : (j == row ? 1.0f : 0.0f);
            }
        }
        wrote = trellis.with_feedback(x.get(), y.get(), rows, columns, feedback.get(), weight.get(), full, segment,
                                      lookahead, (int) in.below(2));
    } else if (way == 5 && trellis.has_z) {
        plain = false;  // its scale is a share of the magnitude, not fitted
        wrote = trellis.with_effort(x.get(), y.get(), rows, columns, ITQ_CODEC_TERNARY, effort);
    } else if (way < 9 && way > 4) {
        effort = ITQ_EFFORT_FAST;
        wrote  = trellis.with_effort(x.get(), y.get(), rows, columns, ITQ_CODEC_TRELLIS, effort);
    } else {
        wrote = ggml_quantize_chunk(type, x.get(), y.get(), 0, rows, columns, nullptr);
    }
    if (wrote != bytes) {
        wrong("the size", ggml_type_name(type), rows, (double) wrote, (double) bytes);
    }
    for (int b = 0; b < blocks; ++b) {
        const float *   block = x.get() + (size_t) (b * length);
        const uint8_t * coded = y.get() + (size_t) b * ggml_type_size(type);
        check(type, block, coded, plain, b);
    }
    // sixteen blocks are encoded side by side and know nothing of each other
    if (plain && !ternary && in.below(4) == 0) {
        const uint32_t b     = in.random() % (uint32_t) blocks;
        const size_t   size  = ggml_type_size(type);
        const auto     alone = exactly<uint8_t>(size);
        trellis.with_effort(x.get() + (size_t) b * (size_t) length, alone.get(), 1, length, ITQ_CODEC_TRELLIS, effort);
        if (memcmp(alone.get(), y.get() + (size_t) b * size, size) != 0) {
            wrong("a block encoded with others", ggml_type_name(type), (int) b, 0, 0);
        }
    }
    count->n += (uint64_t) blocks;
    return 0;
}

// Dot products of the trellis types, held against integers and float64, and activations by this processor's kernels against
// the portable C. Rows of any length, blocks of any bytes, activations that a quantizer made and others.
//
// A case is one block of a row.

#include "cases.h"
#include "ggml-cpu.h"
#include "ggml.h"
#include "itq3s/itq-quants.h"
#include "quants.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <iterator>
#include <numeric>

static uint64_t & cases = (Counts<1>::all[0].name = "blocks", Counts<1>::all[0].n);

extern "C" int LLVMFuzzerInitialize(int *, char ***) {
    ggml_cpu_init();
    return atexit(report_counts<1>);
}

static bool same_sums(const block_q8_K & a, const block_q8_K & b) {
    return memcmp(a.bsums, b.bsums, sizeof(a.bsums)) == 0;
}

static bool same_sums(const block_q8_n_h & a, const block_q8_n_h & b) {
    return a.sum == b.sum;
}

static void set_sums(block_q8_K & y) {
    for (int i = 0; i < 16; ++i) {
        y.bsums[i] = (int16_t) std::accumulate(y.qs + 16 * i, y.qs + 16 * i + 16, 0);
    }
}

static void set_sums(block_q8_n_h & y) {
    y.sum = std::accumulate(std::begin(y.qs), std::end(y.qs), 0);
}

using Quantizer = decltype(quantize_row_q8_K_h);

// Activations in 8 bits: of the quantizers of this processor and in portable C, which agree, or any that a quantizer
// might make.
template <typename Block>
static std::unique_ptr<Block[]> activations(Input & in, Quantizer * quantize, Quantizer * portable, int blocks) {
    const int length = sizeof(Block::qs);
    auto      y      = exactly<Block>((size_t) blocks);
    if (quantize && in.below(2)) {
        const auto x    = exactly<float>((size_t) (blocks * length));
        const auto also = exactly<Block>((size_t) blocks);
        for (int b = 0; b < blocks; ++b) {
            floats(in, x.get() + (size_t) (b * length), length);
        }
        quantize(x.get(), y.get(), (int64_t) blocks * length);
        portable(x.get(), also.get(), (int64_t) blocks * length);
        for (int b = 0; b < blocks; ++b) {
            const bool equal = same(y[b].d, also[b].d) && memcmp(y[b].qs, also[b].qs, sizeof(y[b].qs)) == 0;
            if (!equal || !same_sums(y[b], also[b])) {
                wrong("the scale or codes", "activations", b, y[b].d, also[b].d);
            }
        }
        return y;
    }
    for (int b = 0; b < blocks; ++b) {
        in.fill(y[b].qs, sizeof(y[b].qs));
        for (int8_t & q : y[b].qs) {
            q = std::max<int8_t>(q, -127);
        }
        set_sums(y[b]);
        y[b].d = in.below(8) ? in.normal() * 0.01f : special(in);
    }
    return y;
}

// A type: where a block has its scale, its selectors, and whether a zero-point follows the scale.
struct Kind {
    ggml_type type;
    size_t    scale;
    void (*decode)(const uint8_t *, const uint8_t *, int8_t *);
    size_t sel;
    bool   has_z;
};

#define TRELLIS_TYPE(NAME, name, bits, n_levels, length, has_z, number) \
    { GGML_TYPE_##NAME, offsetof(block_##name, d), name##_decode_levels, offsetof(block_##name, sel), has_z != 0 },

static const Kind kinds[] = { ITQ_TYPES(TRELLIS_TYPE) };

// A row of blocks of any bytes, and activations.
template <typename Block> static void row(Input & in, const Kind & kind, int blocks, const Block * y) {
    const int    length    = sizeof(Block::qs);
    const size_t bytes     = ggml_type_size(kind.type);
    const auto   x         = exactly<uint8_t>((size_t) blocks * bytes);
    const bool   any_scale = in.below(4) == 0;
    in.fill(x.get(), (size_t) blocks * bytes);

    // How far the order of the additions may move the result.
    double sum    = 0.0;
    double within = 0.0;
    double tiny   = 0.0;  // what a product of scales that is denormal may be multiplied by
    for (int b = 0; b < blocks; ++b) {
        uint8_t *    block   = x.get() + (size_t) b * bytes;
        const size_t n_halfs = kind.has_z ? 2 : 1;
        ggml_fp16_t  d[2]    = { 0, 0 };
        memcpy(d, block + kind.scale, n_halfs * sizeof(*d));
        if (!any_scale) {
            d[0] = ggml_fp32_to_fp16(0.01f + 0.01f * in.uniform());
        }
        if (kind.has_z && !any_scale) {
            d[1] = ggml_fp32_to_fp16(in.below(4) ? 0.0f : 2.0f);
        }
        memcpy(block + kind.scale, d, n_halfs * sizeof(*d));
        double dot   = 0.0;
        double total = 0.0;
        double lanes = 0.0;
        int8_t levels[length];
        kind.decode(block, block + kind.sel, levels);
        for (int t = 0; t < length; ++t) {
            dot += levels[t] * y[b].qs[t];
            lanes += 128.0 * std::abs(y[b].qs[t]);
            total += y[b].qs[t];
        }
        const double unit = (double) ggml_fp16_to_fp32(d[0]) / 32 * y[b].d;
        const double z    = ggml_fp16_to_fp32(d[1]);
        sum += unit * (dot - z * total);
        within += std::fabs(unit) * (lanes + std::fabs(z * total));
        tiny += lanes + std::fabs(z * total);
    }

    const auto   dot = ggml_get_type_traits_cpu(kind.type)->vec_dot;
    const auto   got = exactly<float>(1);
    const double n   = blocks;
    dot(blocks * length, got.get(), 0, x.get(), 0, y, 0, 1);
    // what float32 holds with room to add; past that all that is asked is that nothing breaks
    if (within < 0x1p100) {
        // a rounding a block and a few for its scale; a denormal product of scales may lose all its digits
        const double may = within * (n + 4) * 0x1p-23 + tiny * 0x1p-148;
        if (!(std::fabs((double) got[0] - sum) <= may)) {
            wrong("the product", ggml_type_name(kind.type), blocks, got[0], sum);
        }
    }
    cases += (uint64_t) blocks;
}

extern "C" int LLVMFuzzerTestOneInput(const uint8_t * data, size_t size) {
    Input        in(data, size);
    const Kind & kind   = kinds[in.below((uint32_t) std::size(kinds))];
    const int    blocks = 1 + (int) in.below(24);
    if (ggml_blck_size(kind.type) == 64) {
        row(in, kind, blocks,
            activations<block_q8_n_h>(in, quantize_row_q8_n_h, quantize_row_q8_n_h_generic, blocks).get());
    } else {
        row(in, kind, blocks,
            activations<block_q8_K>(in, quantize_row_q8_K_h, quantize_row_q8_K_h_generic, blocks).get());
    }
    return 0;
}

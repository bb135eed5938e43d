// Dot products of the trellis types, TQ1_0 and TQ2_0 by this processor's kernels, against the portable C, which is held against
// integers and float64. Rows of any length, blocks of any bytes, activations that a quantizer made and others.
//
// A case is one block of a row.

#include "cases.h"
#include "ggml-cpu.h"
#include "ggml.h"
#include "itq3s/itq-quants.h"
#include "quants.h"

#include <cmath>
#include <cstddef>
#include <iterator>

static uint64_t & cases = (Counts<1>::all[0].name = "blocks", Counts<1>::all[0].n);

extern "C" int LLVMFuzzerInitialize(int *, char ***) {
    ggml_cpu_init();
    return atexit(report_counts<1>);
}

// Activations in 8 bits: of the quantizer that the type has (0), or any that it might make.
static void activations(Input & in, bool rotated, block_q8_K * y, int blocks) {
    if (rotated && in.below(2)) {
        const auto x    = exactly<float>((size_t) blocks * 256);
        const auto also = exactly<block_q8_K>((size_t) blocks);
        for (int b = 0; b < blocks; ++b) {
            floats(in, x.get() + (size_t) b * 256, 256);
        }
        quantize_row_q8_K_h(x.get(), y, (int64_t) blocks * 256);
        quantize_row_q8_K_h_generic(x.get(), also.get(), (int64_t) blocks * 256);
        for (int b = 0; b < blocks; ++b) {
            bool equal = same(y[b].d, also[b].d) && memcmp(y[b].qs, also[b].qs, sizeof(y[b].qs)) == 0;
            equal      = equal && memcmp(y[b].bsums, also[b].bsums, sizeof(y[b].bsums)) == 0;
            if (!equal) {
                wrong("the scale or codes", "q8_K_h", b, y[b].d, also[b].d);
            }
        }
        return;
    }
    for (int b = 0; b < blocks; ++b) {
        in.fill(y[b].qs, sizeof(y[b].qs));
        for (int i = 0; i < 16; ++i) {
            int sum = 0;
            for (int j = 0; j < 16; ++j) {
                y[b].qs[16 * i + j] = (int8_t) (y[b].qs[16 * i + j] == -128 ? -127 : y[b].qs[16 * i + j]);
                sum += y[b].qs[16 * i + j];
            }
            y[b].bsums[i] = (int16_t) sum;
        }
        y[b].d = in.below(8) ? in.normal() * 0.01f : special(in);
    }
}

extern "C" int LLVMFuzzerTestOneInput(const uint8_t * data, size_t size) {
    // where a block has its scale, and of a trellis type its selectors and whether a zero-point follows the scale
    static const struct {
        ggml_type      type;
        ggml_vec_dot_t portable;
        size_t         scale;
        void (*decode)(const uint8_t *, const uint8_t *, int8_t *);
        size_t sel;
        bool   has_z;
    } kinds[] = {
#define TRELLIS_TYPE(NAME, name, bits, n_levels, length, has_z, number)                      \
    { GGML_TYPE_##NAME,     ggml_vec_dot_##name##_q8_K_h_generic, offsetof(block_##name, d), \
      name##_decode_levels, offsetof(block_##name, sel),          has_z != 0 },
        ITQ_TYPES(TRELLIS_TYPE){ GGML_TYPE_TQ1_0, ggml_vec_dot_tq1_0_q8_K_generic, 52, nullptr, 0, false },
        { GGML_TYPE_TQ2_0, ggml_vec_dot_tq2_0_q8_K_generic, 64, nullptr, 0, false },
    };
    Input        in(data, size);
    const auto & kind   = kinds[in.below((uint32_t) std::size(kinds))];
    const int    blocks = 1 + (int) in.below(24);
    const size_t bytes  = ggml_type_size(kind.type);
    const auto   y      = exactly<block_q8_K>((size_t) blocks);
    const auto   x      = exactly<uint8_t>((size_t) blocks * bytes);
    activations(in, kind.decode != nullptr, y.get(), blocks);
    const bool any_scale = in.below(4) == 0;
    in.fill(x.get(), (size_t) blocks * bytes);

    // How far the order of the additions may move the result: kernels add up every lane of a register on its own, with
    // the offset that makes levels unsigned.
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
        float  weights[256];
        if (kind.decode) {
            int8_t levels[256];
            kind.decode(block, block + kind.sel, levels);
            for (int t = 0; t < 256; ++t) {
                dot += levels[t] * y[b].qs[t];
                lanes += 128.0 * std::abs(y[b].qs[t]);
                total += y[b].qs[t];
            }
            const double unit = (double) ggml_fp16_to_fp32(d[0]) / 32 * y[b].d;
            const double z    = ggml_fp16_to_fp32(d[1]);
            sum += unit * (dot - z * total);
            within += std::fabs(unit) * (lanes + std::fabs(z * total));
            tiny += lanes + std::fabs(z * total);
        } else {
            // the trits, by a scale of one
            const auto        copy = exactly<uint8_t>(bytes);
            const ggml_fp16_t one  = ggml_fp32_to_fp16(1.0f);
            memcpy(copy.get(), block, bytes);
            memcpy(copy.get() + kind.scale, &one, sizeof(one));
            ggml_get_type_traits(kind.type)->to_float(copy.get(), weights, 256);
            for (int t = 0; t < 256; ++t) {
                dot += weights[t] * y[b].qs[t];
                lanes += 3.0 * std::abs(y[b].qs[t]);
            }
            const double unit = (double) ggml_fp16_to_fp32(d[0]) * y[b].d;
            sum += unit * dot;
            within += std::fabs(unit) * lanes;
            tiny += lanes;
        }
    }

    const auto   dot      = ggml_get_type_traits_cpu(kind.type)->vec_dot;
    const auto   got      = exactly<float>(1);
    const auto   portable = exactly<float>(1);
    const double n        = blocks;
    dot((int) n * 256, got.get(), 0, x.get(), 0, y.get(), 0, 1);
    kind.portable((int) n * 256, portable.get(), 0, x.get(), 0, y.get(), 0, 1);
    // what float32 holds with room to add; past that all that is asked is that nothing breaks
    if (within < 0x1p100) {
        // a rounding a block and a few for its scale; a denormal product of scales may lose all its digits
        const double may = within * (n + 4) * 0x1p-23 + tiny * 0x1p-148;
        if (!(std::fabs((double) portable[0] - sum) <= may)) {
            wrong("the portable product", ggml_type_name(kind.type), blocks, portable[0], sum);
        }
        if (!(std::fabs((double) got[0] - portable[0]) <= may)) {
            wrong("the product", ggml_type_name(kind.type), blocks, got[0], portable[0]);
        }
    }
    cases += (uint64_t) blocks;
    return 0;
}

// Decoding of any bytes as blocks of the trellis types, TQ1_0 and TQ2_0, against what the format's text says weight by
// weight.
//
// A case is one block.

#include "cases.h"
#include "ggml-cpu.h"
#include "ggml-itq.h"
#include "ggml.h"

#include <cmath>

static uint64_t & cases = (Counts<1>::all[0].name = "blocks", Counts<1>::all[0].n);

static float half(const uint8_t * bytes) {
    ggml_fp16_t value;
    memcpy(&value, bytes, sizeof(value));
    return ggml_fp16_to_fp32(value);
}

// A trellis type of blocks of 256 or 64 weights with symbols of 1 to 3 bits.
static void trellis(int bits, int length, bool has_z, const int8_t * levels, const uint8_t * block, float * w) {
    const uint8_t * sel       = block + length / 8 * bits;
    const uint8_t * end       = sel + length / 8;
    const uint8_t * last      = has_z ? end + 2 : end;
    const auto      s         = [&](int t) { return t < 0 ? last[0] >> (-1 - t) & 1 : sel[t / 8] >> t % 8 & 1; };
    const uint8_t   number[2] = { (uint8_t) (last[0] & 0xc0), last[1] };
    const float     z         = has_z ? half(number) : 0.0f;
    const int       n         = length / 4;
    for (int t = 0; t < length; ++t) {
        const int low  = bits == 1 ? 0 : block[t % n] >> 2 * (t / n) & 3;
        const int high = bits == 2 ? 0 : block[(bits == 3 ? n : 0) + t / 8] >> t % 8 & 1;
        const int q    = bits == 3 ? low + 4 * high : low + high;
        const int c2   = s(t) ^ s(t - 5) ^ s(t - 6);
        const int c1   = s(t - 1) ^ s(t - 3) ^ s(t - 4) ^ s(t - 5);
        const int c0   = s(t - 2) ^ s(t - 4);
        w[t]           = (float) levels[8 * q + 4 * c2 + 2 * c1 + c0] - z;
    }
    for (int h = 1; h < length; h *= 2) {
        for (int i = 0; i < length; ++i) {
            if (!(i & h)) {
                const float a = w[i];
                const float b = w[i + h];
                w[i]          = a + b;
                w[i + h]      = a - b;
            }
        }
    }
    const float scale =
        half(has_z ? end : number) * (length == 256 ? 0x1p-9f : 0x1p-8f);  // of 1/32 and the root of the length
    for (int t = 0; t < length; ++t) {
        w[t] *= scale;
    }
}

#define DECODE(NAME, name, bits, n_levels, length, has_z, number)                          \
    static void name(const uint8_t * block, float * w) {                                   \
        static_assert(((length) == 256 || (length) == 64) && (bits) <= 3, "another text"); \
        static const int8_t levels[n_levels] = NAME##_LEVELS;                              \
        trellis(bits, length, has_z, levels, block, w);                                    \
    }
ITQ_TYPES(DECODE)

static void tq1_0(const uint8_t * block, float * w) {
    static const int pow3[] = { 1, 3, 9, 27, 81 };
    const float      d      = half(block + 52);
    for (int t = 0; t < 256; ++t) {
        const int byte = t < 160 ? t % 32 : t < 240 ? 32 + (t - 160) % 16 : 48 + (t - 240) % 4;
        const int trit = t < 160 ? t / 32 : t < 240 ? (t - 160) / 16 : (t - 240) / 4;
        w[t]           = (float) ((block[byte] * pow3[trit] % 256 * 3 >> 8) - 1) * d;
    }
}

static void tq2_0(const uint8_t * block, float * w) {
    const float d = half(block + 64);
    for (int t = 0; t < 256; ++t) {
        const int q = block[t / 128 * 32 + t % 32] >> 2 * (t % 128 / 32) & 3;
        w[t]        = (float) (q - 1) * d;
    }
}

static const struct {
    ggml_type type;
    void (*decode)(const uint8_t *, float *);
    int scales;  // where they begin; they end the block
} kinds[] = {
#define KIND(NAME, name, bits, n_levels, length, has_z, number) { GGML_TYPE_##NAME, name, (length) / 8 * ((bits) + 1) },
    ITQ_TYPES(KIND){ GGML_TYPE_TQ1_0, tq1_0, 52 },
    { GGML_TYPE_TQ2_0, tq2_0, 64 },
};

extern "C" int LLVMFuzzerInitialize(int *, char ***) {
    ggml_cpu_init();
    return atexit(report_counts<1>);
}

extern "C" int LLVMFuzzerTestOneInput(const uint8_t * data, size_t size) {
    Input        in(data, size);
    const auto & kind   = kinds[in.below(sizeof(kinds) / sizeof(*kinds))];
    const int    blocks = 1 + (int) in.below(256);
    const auto * traits = ggml_get_type_traits(kind.type);
    const int    length = (int) traits->blck_size;

    const size_t bytes = (size_t) blocks * traits->type_size;
    const auto   x     = exactly<uint8_t>(bytes);
    const auto   y     = exactly<float>((size_t) (blocks * length));
    in.fill(x.get(), bytes);
    traits->to_float(x.get(), y.get(), (int64_t) blocks * length);

    for (int b = 0; b < blocks; ++b) {
        const uint8_t * block = x.get() + (size_t) b * traits->type_size;
        float           want[256];
        kind.decode(block, want);
        for (int t = 0; t < length; ++t) {
            const float got = y[(size_t) (b * length + t)];
            if (!same(got, want[t])) {
                wrong("a weight", traits->type_name, t, got, want[t]);
            }
        }
        bool finite = true;
        for (size_t at = (size_t) kind.scales; at < traits->type_size; at += 2) {
            finite = finite && std::isfinite(half(block + at));
        }
        // it prints a line for every block that it refuses
        const bool asked = finite || in.random() % 256 == 0;
        if (asked && ggml_validate_row_data(kind.type, block, traits->type_size) != finite) {
            wrong("validity", traits->type_name, b, !finite, finite);
        }
    }
    cases += (uint64_t) blocks;
    return 0;
}

#pragma once

// What the fuzzers share: cases drawn from libFuzzer's input, memory that ends where the data ends, counts.
//
// An input begins with choices and goes on with raw content; where it ends early, random numbers seeded by all of it
// take over. So every input is a whole case of any size, the same one whenever it is run.

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>

class Input {
    const uint8_t * at;
    const uint8_t * end;
    uint64_t        state = 0xcbf29ce484222325u;

  public:
    Input(const uint8_t * data, size_t size) : at(data), end(data + size) {
        for (size_t i = 0; i < size; ++i) {
            state = (state ^ data[i]) * 0x100000001b3u;
        }
        state |= 1;
    }

    uint32_t random() {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        return (uint32_t) (state >> 32);
    }

    uint8_t byte() { return at < end ? *at++ : (uint8_t) random(); }

    // A choice of the input, a byte or two of it.
    uint32_t below(uint32_t n) { return (n > 256 ? byte() * 256u + byte() : byte()) % n; }

    void fill(void * to, size_t size) {
        uint8_t *    out  = static_cast<uint8_t *>(to);
        const size_t mine = size < (size_t) (end - at) ? size : (size_t) (end - at);
        memcpy(out, at, mine);
        at += mine;
        for (size_t i = mine; i < size; i += 4) {
            const uint32_t four = random();
            memcpy(out + i, &four, size - i < 4 ? size - i : 4);
        }
    }

    // In (-1, 1), no choice of the input.
    float uniform() { return (float) (int32_t) random() * 0x1p-31f; }

    float normal() {
        float sum = 0.0f;
        for (int i = 0; i < 12; ++i) {
            sum += uniform();
        }
        return 0.5f * sum;
    }
};

// Exactly n elements, so that one too far is seen.
template <typename T> std::unique_ptr<T[]> exactly(size_t n) {
    return std::unique_ptr<T[]>(new T[n]);
}

static inline float from_bits(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof(value));
    return value;
}

static inline uint32_t to_bits(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof(bits));
    return bits;
}

// The same bits, or both no number.
static inline bool same(float a, float b) {
    return to_bits(a) == to_bits(b) || (a != a && b != b);
}

// Floats that arithmetic stumbles over.
static inline float special(Input & in) {
    static const uint32_t bits[] = {
        0x00000000, 0x80000000, 0x00000001, 0x807fffff, 0x00800000,  // zeros, denormals, the least normal
        0x03aa2425, 0x33000000, 0x33800000, 0x38800000, 0x477fe000,  // 1e-36, around and inside float16
        0x477ff000, 0x47800000, 0x5b000000, 0x5b800000, 0xdb7fffff,  // beyond it, 2^55, 2^56 and just below
        0x5f000000, 0x7e800000, 0x7f7fffff, 0xff7fffff, 0x7f000000,  // towards the largest
        0x7f800000, 0xff800000, 0x7fc00000, 0xffc00001, 0x7f800001,  // infinite, NaN
    };
    return from_bits(bits[in.byte() % (sizeof(bits) / sizeof(bits[0]))]);
}

// n weights or activations of one of many kinds; several kinds have values that are not finite.
static inline void floats(Input & in, float * x, int n) {
    const uint32_t kind = in.below(8);
    const float    size = from_bits((uint32_t) in.byte() % 255 << 23);  // any power of two
    for (int i = 0; i < n; ++i) {
        x[i] = in.normal();
    }
    switch (kind) {
        case 0:  // as they come
            break;
        case 1:  // of any magnitude
            for (int i = 0; i < n; ++i) {
                x[i] *= size;
            }
            break;
        case 2:  // any bits
            in.fill(x, (size_t) n * sizeof(*x));
            break;
        case 3:  // any finite bits
            in.fill(x, (size_t) n * sizeof(*x));
            for (int i = 0; i < n; ++i) {
                x[i] = x[i] - x[i] == 0.0f ? x[i] : size;
            }
            break;
        case 4:  // some odd ones among ordinary ones
            for (uint32_t left = in.below(5); left > 0; --left) {
                x[in.random() % (uint32_t) n] = special(in);
            }
            break;
        case 5:  // almost nothing
            memset(x, 0, (size_t) n * sizeof(*x));
            for (uint32_t left = in.below(3); left > 0; --left) {
                x[in.random() % (uint32_t) n] = in.below(2) ? special(in) : size;
            }
            break;
        case 6:
            {  // one row of the transform, which the rotation makes a single value
                const uint32_t row = in.byte();
                for (int i = 0; i < n; ++i) {
                    x[i] = __builtin_parity(row & (uint32_t) i) ? -size : size;
                }
                break;
            }
        default:
            {  // one value
                const float value = special(in);
                for (int i = 0; i < n; ++i) {
                    x[i] = value;
                }
            }
    }
}

//
// counts, written when the fuzzer ends: to stderr, and to the file that ITQ3S_FUZZ_COUNTS names
//

struct Count {
    const char * name;
    uint64_t     n;
};

template <int N> struct Counts {
    static inline Count all[N] = {};
};

template <int N> void report_counts() {
    const char * path = getenv("ITQ3S_FUZZ_COUNTS");
    FILE *       file = path ? fopen(path, "w") : nullptr;
    for (const Count & count : Counts<N>::all) {
        fprintf(stderr, "counted %s %llu\n", count.name, (unsigned long long) count.n);
        if (file) {
            fprintf(file, "%s %llu\n", count.name, (unsigned long long) count.n);
        }
    }
    if (file) {
        fclose(file);
    }
}

[[noreturn]] static inline void wrong(const char * what, const char * of, int at, double got, double want) {
    fprintf(stderr, "%s of %s at %d: %.9g, not %.9g\n", what, of, at, got, want);
    abort();
}

// Products of one column with rows of the trellis types and TQ2_0 as a file has them, x86. docs/kernels.md explains them.

#include "../../itq-gemm.h"
#include "itq-decode.h"

#include "ggml-cpu-impl.h"
#include "simd-mappings.h"

#include <string.h>

#if defined(ITQ_HAS_GEMV)

#    if defined(__GNUC__) && !defined(__clang__)
#        define UNROLL_8 _Pragma("GCC unroll 8")
#    else
#        define UNROLL_8
#    endif

#    define GROUP 8  // blocks of a row whose products are made side by side

// Sums of 8 vectors of products, one of each block.
#    if defined(ITQ_AVX512)

typedef __m512i products;

static inline __m512i dot_64(__m512i acc, __m512i levels, const int8_t * q) {
#        if defined(__AVX512VNNI__)
    return _mm512_dpbusd_epi32(acc, levels, _mm512_loadu_si512(q));
#        else
    const __m512i pairs = _mm512_maddubs_epi16(levels, _mm512_loadu_si512(q));
    return _mm512_add_epi32(acc, _mm512_madd_epi16(pairs, _mm512_set1_epi16(1)));
#        endif
}

static inline __m128i sum_4_512(const __m512i p[4]) {
    const __m512i ab = _mm512_add_epi32(_mm512_unpacklo_epi32(p[0], p[1]), _mm512_unpackhi_epi32(p[0], p[1]));
    const __m512i cd = _mm512_add_epi32(_mm512_unpacklo_epi32(p[2], p[3]), _mm512_unpackhi_epi32(p[2], p[3]));
    const __m512i s  = _mm512_add_epi32(_mm512_unpacklo_epi64(ab, cd), _mm512_unpackhi_epi64(ab, cd));
    const __m256i h  = _mm256_add_epi32(_mm512_castsi512_si256(s), _mm512_extracti64x4_epi64(s, 1));
    return _mm_add_epi32(_mm256_castsi256_si128(h), _mm256_extracti128_si256(h, 1));
}

#    else

typedef __m256i products;

static inline __m256i dot_32(__m256i acc, __m256i levels, const int8_t * q) {
    const __m256i y = _mm256_loadu_si256((const __m256i *) q);
#        if defined(__AVXVNNI__)
    return _mm256_dpbusd_avx_epi32(acc, levels, y);
#        else
    return _mm256_add_epi32(acc, _mm256_madd_epi16(_mm256_maddubs_epi16(levels, y), _mm256_set1_epi16(1)));
#        endif
}

#    endif

static inline __m128i sum_4_256(const __m256i p[4]) {
    const __m256i s = _mm256_hadd_epi32(_mm256_hadd_epi32(p[0], p[1]), _mm256_hadd_epi32(p[2], p[3]));
    return _mm_add_epi32(_mm256_castsi256_si128(s), _mm256_extracti128_si256(s, 1));
}

static inline __m256i sum_8_256(const __m256i p[GROUP]) {
    return _mm256_inserti128_si256(_mm256_castsi128_si256(sum_4_256(p)), sum_4_256(p + 4), 1);
}

static inline __m256i sum_8(const products p[GROUP]) {
#    if defined(ITQ_AVX512)
    return _mm256_inserti128_si256(_mm256_castsi128_si256(sum_4_512(p)), sum_4_512(p + 4), 1);
#    else
    return sum_8_256(p);
#    endif
}

#    define LAST_1(block) (const uint8_t *) &(block)->z
#    define LAST_0(block) (const uint8_t *) &(block)->d

// The levels of a group of n <= GROUP blocks are made in steps: what a step leaves in memory is read only a group or a
// block later, so that loads do not wait for stores: prepare_name(), and multiply_8_name(), which has the products of levels
// plus 64 of each block.
#    if defined(ITQ_AVX512)

#        define NO_PREPARATION(NAME, name, ...)                                                   \
            typedef struct {                                                                      \
                int nothing;                                                                      \
            } prepared_##name;                                                                    \
            ITQ_INLINE void prepare_##name(const block_##name * x, int n, prepared_##name * to) { \
                (void) x;                                                                         \
                (void) n;                                                                         \
                (void) to;                                                                        \
            }
ITQ_TYPES(NO_PREPARATION)

#        define MULTIPLY(NAME, name, bits, n_levels, length, has_z, number)                                      \
            ITQ_INLINE products multiply_##name(const block_##name * x, const int8_t * q) {                      \
                static const int8_t levels[n_levels] = NAME##_LEVELS;                                            \
                products            p                = _mm512_setzero_si512();                                   \
                for (int word = 0; word < (length) / 64; ++word) {                                               \
                    const __m512i v = itq_levels_64(bits, length, levels, x->qs, x->sel, name##_state(x), word); \
                    p               = dot_64(p, v, q + 64 * word);                                               \
                }                                                                                                \
                return p;                                                                                        \
            }
ITQ_TYPES(MULTIPLY)

#        define MULTIPLY_8(NAME, name, bits, n_levels, length, ...)                                        \
            ITQ_INLINE void multiply_8_##name(const block_##name * x, int n, const prepared_##name * from, \
                                              const int8_t * q, products p[GROUP]) {                       \
                (void) from;                                                                               \
                UNROLL_8                                                                                   \
                for (int i = 0; i < GROUP; ++i) {                                                          \
                    const int b = i < n ? i : n - 1;                                                       \
                    p[i]        = multiply_##name(&x[b], q + (length) * b);                                \
                }                                                                                          \
            }
ITQ_TYPES(MULTIPLY_8)

#    else

typedef struct {
    _Alignas(64) uint8_t columns[ITQ_COLUMN_BYTES * GROUP];
    _Alignas(64) uint8_t planes[ITQ_COLUMN_BYTES * GROUP];  // symbols of one bit, third bits
} prepared_planes;

// The plane of symbols that is transposed, of an odd number of bits.
#        define PLANE_1(qs) (qs)
#        define PLANE_2(qs) NULL
#        define PLANE_3(qs) (qs) + QK_K / 4

#        define MULTIPLY_8_256(NAME, name, bits, n_levels, length, has_z, number)                                  \
            typedef prepared_planes prepared_##name;                                                               \
            ITQ_INLINE void         prepare_##name(const block_##name * x, int n, prepared_##name * to) {          \
                const uint8_t * plane = PLANE_##bits(x->qs);                                                       \
                itq_transpose(x->sel, LAST_##has_z(x), sizeof(*x), n, GROUP / 2, to->columns);                     \
                if (plane) {                                                                                       \
                    itq_transpose(plane, NULL, sizeof(*x), n, GROUP / 2, to->planes);                              \
                }                                                                                                  \
            }                                                                                                      \
                                                                                                                   \
            ITQ_INLINE void make_indices_##name(const block_##name * x, const prepared_##name * from, int b,       \
                                                itq_indices * to) {                                                \
                const uint8_t * planes = from->planes + ITQ_COLUMN_BYTES * b;                                      \
                itq_make_indices(bits, from->columns + ITQ_COLUMN_BYTES * b, (bits) == 1 ? planes : x->qs, planes, \
                                 to);                                                                              \
            }                                                                                                      \
                                                                                                                   \
            ITQ_INLINE void multiply_8_##name(const block_##name * x, int n, const prepared_##name * from,         \
                                              const int8_t * q, products p[GROUP]) {                               \
                static const int8_t levels[n_levels] = NAME##_LEVELS;                                              \
                itq_indices         indices[GROUP];                                                                \
                make_indices_##name(x, from, 0, &indices[0]);                                                      \
                UNROLL_8                                                                                           \
                for (int i = 0; i < GROUP; ++i) {                                                                  \
                    const int b = i < n ? i : n - 1;                                                               \
                    if (i + 1 < n) {                                                                               \
                        make_indices_##name(&x[i + 1], from, i + 1, &indices[i + 1]);                              \
                    }                                                                                              \
                    __m256i sums[2] = { _mm256_setzero_si256(), _mm256_setzero_si256() };                          \
                    for (int m = 0; m < 128; m += 32) {                                                            \
                        __m256i lower, upper;                                                                      \
                        itq_levels_2x32(bits, levels, &indices[b], m, &lower, &upper);                             \
                        sums[0] = dot_32(sums[0], lower, q + QK_K * b + m);                                        \
                        sums[1] = dot_32(sums[1], upper, q + QK_K * b + 128 + m);                                  \
                    }                                                                                              \
                    p[i] = _mm256_add_epi32(sums[0], sums[1]);                                                     \
                }                                                                                                  \
            }
ITQ_TYPES_256(MULTIPLY_8_256)

// Four blocks of 64 together are a block of 256 of the same codes, but that no selector is carried from one to the next: bits
// go on from the first half of a block to the second, to odd places.
#        define CARRIED 0xAA

typedef struct {
    _Alignas(64) uint8_t columns[2 * ITQ_COLUMN_BYTES];  // transposed selectors of two times four blocks
    _Alignas(64) uint8_t symbols[2 * 64];                // of two bits, as a block of 256 has them
    _Alignas(64) uint8_t planes[2 * ITQ_COLUMN_BYTES];   // of one bit and third bits, transposed
} prepared_of_64;

// A plane of bits, 8 bytes at `plane` of blocks `stride` bytes apart, of 8 blocks; `last` as in itq_transpose.
ITQ_INLINE void transpose_64(const uint8_t * plane, const uint8_t * last, size_t stride, int n, uint8_t * columns) {
    int64_t  bits[GROUP];
    uint64_t states[2] = { 0, 0 };
    for (int i = 0; i < GROUP; ++i) {
        const size_t at = stride * (size_t) (i < n ? i : n - 1);
        memcpy(&bits[i], plane + at, sizeof(bits[i]));
        states[i / 4] |= last ? itq_spread_state(itq_start_state(last + at)) << i % 4 * 2 : 0;
    }
    __m256i r0 = _mm256_setr_epi64x(bits[0], bits[1], bits[4], bits[5]);
    __m256i r1 = _mm256_setr_epi64x(bits[2], bits[3], bits[6], bits[7]);
    itq_transpose_pairs(&r0, &r1, 1, CARRIED, states, columns);
}

// Symbols of two bits, 16 bytes at `qs` of such blocks: field f of the bytes of block i goes to field i of those of quarter f.
ITQ_INLINE void gather_symbols(const uint8_t * qs, size_t stride, int n, uint8_t * symbols) {
    __m256i v[4];
    for (int i = 0; i < 4; ++i) {
        v[i] = itq_load_2x128(qs + stride * (size_t) (i < n ? i : n - 1),
                              qs + stride * (size_t) (i + 4 < n ? i + 4 : n - 1));
    }
    SWAP_FIELDS(v[0], v[1], 2, 0x33);
    SWAP_FIELDS(v[2], v[3], 2, 0x33);
    SWAP_FIELDS(v[0], v[2], 4, 0x0F);
    SWAP_FIELDS(v[1], v[3], 4, 0x0F);
    for (int f = 0; f < 4; ++f) {
        _mm_store_si128((__m128i *) (symbols + 16 * f), _mm256_castsi256_si128(v[f]));
        _mm_store_si128((__m128i *) (symbols + 64 + 16 * f), _mm256_extracti128_si256(v[f], 1));
    }
}

#        define MULTIPLY_8_64(NAME, name, bits, n_levels, length, has_z, number)                                \
            typedef prepared_of_64 prepared_##name;                                                             \
            ITQ_INLINE void        prepare_##name(const block_##name * x, int n, prepared_##name * to) {        \
                transpose_64(x->sel, LAST_##has_z(x), sizeof(*x), n, to->columns);                              \
                if ((bits) > 1) {                                                                               \
                    gather_symbols(x->qs, sizeof(*x), n, to->symbols);                                          \
                }                                                                                               \
                if ((bits) != 2) {                                                                              \
                    transpose_64((bits) == 1 ? x->qs : x->qs + (length) / 4, NULL, sizeof(*x), n, to->planes);  \
                }                                                                                               \
            }                                                                                                   \
                                                                                                                \
            ITQ_INLINE void multiply_8_##name(const block_##name * x, int n, const prepared_##name * from,      \
                                              const int8_t * q, products p[GROUP]) {                            \
                static const int8_t levels[n_levels] = NAME##_LEVELS;                                           \
                (void) x;                                                                                       \
                itq_indices indices[2];                                                                         \
                for (int four = 0; four < 2; ++four) {                                                          \
                    const uint8_t * planes = from->planes + ITQ_COLUMN_BYTES * four;                            \
                    itq_make_indices(bits, from->columns + ITQ_COLUMN_BYTES * four,                             \
                                     (bits) == 1 ? planes : from->symbols + 64 * four, planes, &indices[four]); \
                }                                                                                               \
                UNROLL_8                                                                                        \
                for (int i = 0; i < GROUP; ++i) {                                                               \
                    p[i] = _mm256_setzero_si256();                                                              \
                }                                                                                               \
                UNROLL_8                                                                                        \
                for (int i = 0; i < GROUP; ++i) { /* a half of a block, and of the one two further */           \
                    const int four = i / 4, half = i % 2;                                                       \
                    const int at    = 4 * four + i / 2 % 2;                                                     \
                    const int lower = at < n ? at : n - 1, upper = at + 2 < n ? at + 2 : n - 1;                 \
                    __m256i   of_lower, of_upper;                                                               \
                    itq_levels_2x32(bits, levels, &indices[four], 32 * (i % 4), &of_lower, &of_upper);          \
                    p[at]     = dot_32(p[at], of_lower, q + 64 * lower + 32 * half);                            \
                    p[at + 2] = dot_32(p[at + 2], of_upper, q + 64 * upper + 32 * half);                        \
                }                                                                                               \
            }
ITQ_TYPES_64(MULTIPLY_8_64)

#    endif

// Numbers without the start states in them.
static inline __m128i without_states(__m128i halves) {
    return _mm_andnot_si128(_mm_set1_epi16(ITQ_STATE_MASK), halves);
}

// Adds what n <= GROUP blocks have, times the scales of the activations, in the order and with the roundings of a panel.
ITQ_INLINE __m128 add_in_order(__m128 sum, __m256 blocks, int n, const float * d1) {
    float v[GROUP];
    _mm256_storeu_ps(v, blocks);
    for (int i = 0; i < n; ++i) {
#    if defined(__FMA__)
        sum = _mm_fmadd_ss(_mm_load_ss(&v[i]), _mm_load_ss(&d1[i]), sum);
#    else
        sum = _mm_add_ss(sum, _mm_mul_ss(_mm_load_ss(&v[i]), _mm_load_ss(&d1[i])));
#    endif
    }
    return sum;
}

// Sums of the activations of n <= GROUP blocks.
ITQ_INLINE __m256i load_totals(const int32_t * sums, int n) {
    int32_t totals[GROUP];
    for (int i = 0; i < GROUP; ++i) {
        totals[i] = sums[i < n ? i : n - 1];
    }
    return _mm256_setr_epi32(totals[0], totals[1], totals[2], totals[3], totals[4], totals[5], totals[6], totals[7]);
}

// Products of n blocks with a zero-point behind the scale; `d` is where the first has its scale, stride bytes apart.
ITQ_INLINE __m128 add_1(__m128 sum, __m256i dot, const char * d, size_t stride, int n, const float * d1,
                        const int32_t * sums) {
    int32_t s[GROUP];
    for (int i = 0; i < GROUP; ++i) {
        memcpy(&s[i], d + stride * (size_t) (i < n ? i : n - 1), sizeof(s[i]));
    }
    const __m256i both  = _mm256_setr_epi32(s[0], s[1], s[2], s[3], s[4], s[5], s[6], s[7]);
    const __m256i total = load_totals(sums, n);

    // the lower halves of 32 bits, then the upper ones
    const __m256i lower = _mm256_blend_epi16(both, _mm256_setzero_si256(), 0xAA);
    const __m256i upper = _mm256_srli_epi32(both, 16);
    const __m256i dz    = _mm256_permute4x64_epi64(_mm256_packus_epi32(lower, upper), 0xD8);
    const __m256  scale = _mm256_mul_ps(itq_halves_to_floats(_mm256_castsi256_si128(dz)), _mm256_set1_ps(0.03125f));
    const __m256  m     = _mm256_mul_ps(scale, itq_halves_to_floats(without_states(_mm256_extracti128_si256(dz, 1))));

    // the levels had 64 added
    dot            = _mm256_sub_epi32(dot, _mm256_slli_epi32(total, 6));
    const __m256 v = _mm256_mul_ps(_mm256_cvtepi32_ps(dot), scale);
#    if defined(__FMA__)
    return add_in_order(sum, _mm256_fnmadd_ps(m, _mm256_cvtepi32_ps(total), v), n, d1);
#    else
    return add_in_order(sum, _mm256_sub_ps(v, _mm256_mul_ps(m, _mm256_cvtepi32_ps(total))), n, d1);
#    endif
}

// The same of types without a zero-point.
ITQ_INLINE __m128 add_0(__m128 sum, __m256i dot, const char * d, size_t stride, int n, const float * d1,
                        const int32_t * sums) {
    short s[GROUP];
    for (int i = 0; i < GROUP; ++i) {
        memcpy(&s[i], d + stride * (size_t) (i < n ? i : n - 1), sizeof(s[i]));
    }
    const __m128i halves = _mm_setr_epi16(s[0], s[1], s[2], s[3], s[4], s[5], s[6], s[7]);
    const __m256  f      = itq_halves_to_floats(without_states(halves));

    // the levels had 64 added
    dot = _mm256_sub_epi32(dot, _mm256_slli_epi32(load_totals(sums, n), 6));
    return add_in_order(sum, _mm256_mul_ps(_mm256_cvtepi32_ps(dot), _mm256_mul_ps(f, _mm256_set1_ps(0.03125f))), n, d1);
}

// Rows of blocks, a group of them prepared while the one before is multiplied. add_group_name() adds n <= GROUP blocks, the
// first of which is number b of the row, to a sum.
#    define GEMV_ROWS(name)                                                                                            \
        void itq_gemv_##name(int64_t nb, const void * rows, size_t row_size, int n_rows, const struct itq_columns * y, \
                             float * out) {                                                                            \
            prepared_##name prepared[2];                                                                               \
            __m128          sum   = _mm_setzero_ps();                                                                  \
            const int       first = nb < GROUP ? (int) nb : GROUP;                                                     \
            prepare_##name(rows, first, &prepared[0]);                                                                 \
            int turn = 0;                                                                                              \
            for (int r = 0; r < n_rows; ++r) {                                                                         \
                const block_##name * x    = (const void *) ((const char *) rows + (size_t) r * row_size);              \
                const block_##name * next = (const void *) ((const char *) x + row_size);                              \
                for (int64_t b = 0; b < nb; b += GROUP, turn ^= 1) {                                                   \
                    for (int line = 0; line < (int) (GROUP * sizeof(*x)); line += 64) {                                \
                        ITQ_PREFETCH_BYTES((const char *) (x + b) + line);                                             \
                    }                                                                                                  \
                    const int            left   = (int) (nb - b < 2 * GROUP ? nb - b : 2 * GROUP);                     \
                    const int            n_next = left > GROUP ? left - GROUP : first;                                 \
                    const block_##name * x_next = left > GROUP ? x + b + GROUP : r + 1 < n_rows ? next : x;            \
                    if (n_next == GROUP) { /* a number that the compiler knows */                                      \
                        prepare_##name(x_next, GROUP, &prepared[turn ^ 1]);                                            \
                    } else {                                                                                           \
                        prepare_##name(x_next, n_next, &prepared[turn ^ 1]);                                           \
                    }                                                                                                  \
                    if (left < GROUP) {                                                                                \
                        sum = add_group_##name(sum, x + b, left, &prepared[turn], y, b);                               \
                    } else {                                                                                           \
                        sum = add_group_##name(sum, x + b, GROUP, &prepared[turn], y, b);                              \
                    }                                                                                                  \
                }                                                                                                      \
                out[r] = _mm_cvtss_f32(sum);                                                                           \
                sum    = _mm_setzero_ps();                                                                             \
            }                                                                                                          \
        }

#    define GEMV(NAME, name, bits, n_levels, length, has_z, number)                                                 \
        ITQ_INLINE __m128 add_group_##name(__m128 sum, const block_##name * x, int n, const prepared_##name * from, \
                                           const struct itq_columns * y, int64_t b) {                               \
            products p[GROUP];                                                                                      \
            multiply_8_##name(x, n, from, y->q + (length) * b, p);                                                  \
            return add_##has_z(sum, sum_8(p), (const char *) &x->d, sizeof(*x), n, y->d + b, y->sums + b);          \
        }                                                                                                           \
        GEMV_ROWS(name)
ITQ_TYPES(GEMV)

//
// TQ2_0: trit f of byte 32*h + i of a block is number 128*h + 32*f + i, plus one
//

// Products of trits plus one and the activations of a block; 16 bits hold the sums.
ITQ_INLINE __m256i multiply_tq2_0(const block_tq2_0 * x, const int8_t * q) {
    const __m256i mask = _mm256_set1_epi8(3);
    __m256i       p    = _mm256_setzero_si256();
    for (int h = 0; h < 2; ++h) {
        const __m256i   codes = _mm256_loadu_si256((const __m256i *) (x->qs + 32 * h));
        const __m256i * y     = (const __m256i *) (q + 128 * h);
        p = _mm256_add_epi16(p, _mm256_maddubs_epi16(_mm256_and_si256(codes, mask), _mm256_loadu_si256(y)));
        p = _mm256_add_epi16(
            p, _mm256_maddubs_epi16(_mm256_and_si256(_mm256_srli_epi16(codes, 2), mask), _mm256_loadu_si256(y + 1)));
        p = _mm256_add_epi16(
            p, _mm256_maddubs_epi16(_mm256_and_si256(_mm256_srli_epi16(codes, 4), mask), _mm256_loadu_si256(y + 2)));
        p = _mm256_add_epi16(
            p, _mm256_maddubs_epi16(_mm256_and_si256(_mm256_srli_epi16(codes, 6), mask), _mm256_loadu_si256(y + 3)));
    }
    return _mm256_madd_epi16(p, _mm256_set1_epi16(1));
}

ITQ_INLINE __m128 add_group_tq2_0(__m128 sum, const block_tq2_0 * x, int n, const struct itq_columns * y, int64_t at) {
    __m256i   p[GROUP];
    ggml_half h[GROUP];
    UNROLL_8
    for (int i = 0; i < GROUP; ++i) {
        const int b = i < n ? i : n - 1;
        p[i]        = multiply_tq2_0(&x[b], y->q + QK_K * (at + b));
        h[i]        = x[b].d;
    }
    const __m128i halves = _mm_setr_epi16((short) h[0], (short) h[1], (short) h[2], (short) h[3], (short) h[4],
                                          (short) h[5], (short) h[6], (short) h[7]);
    const __m256i dot    = _mm256_sub_epi32(sum_8_256(p), load_totals(y->sums + at, n));
    return add_in_order(sum, _mm256_mul_ps(_mm256_cvtepi32_ps(dot), itq_halves_to_floats(halves)), n, y->d + at);
}

void itq_gemv_tq2_0(int64_t nb, const void * rows, size_t row_size, int n_rows, const struct itq_columns * y,
                    float * out) {
    for (int r = 0; r < n_rows; ++r) {
        const block_tq2_0 * x   = (const void *) ((const char *) rows + (size_t) r * row_size);
        __m128              sum = _mm_setzero_ps();
        for (int64_t b = 0; b < nb; b += GROUP) {
            for (int line = 0; line < (int) (GROUP * sizeof(block_tq2_0)); line += 64) {
                ITQ_PREFETCH_BYTES((const char *) (x + b) + line);
            }
            sum = nb - b < GROUP ? add_group_tq2_0(sum, x + b, (int) (nb - b), y, b)
                                 : add_group_tq2_0(sum, x + b, GROUP, y, b);
        }
        out[r] = _mm_cvtss_f32(sum);
    }
}

#endif  // ITQ_HAS_GEMV

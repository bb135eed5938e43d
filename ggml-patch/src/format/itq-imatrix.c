// The trellis types: encoding with an importance matrix, and the function for callers that may or may not have one.
//
// The squares of the input columns, D, are the diagonal of their second moment; taken for the whole of it, the Hessian
// of the rotated row is H D H in every block, and the calibrated encoder does the rest. The Python form is
// gguf_itq3s/rounding/imatrix.py with hessian.from_diagonal and hessian.factorize.

#include "ggml-threading.h"
#include "itq-ldlq.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

// Factors of one importance matrix, shared by the threads that encode a tensor.
struct cached_factor {
    struct itq_factor factor;
    int               length;      // of a block
    float *           importance;  // what they were made from
    float *           feedback;
    float *           weight;
    int               users;
    bool              current;
};

static struct cached_factor * current_factor = NULL;

// Factor (H D H + damping) = U U^T of one block with U upper triangular: feedback = U / diag(U), weight = diag(U)^2.
static void factorize_block(int n, const float * importance, double damping, float * feedback, double * weight) {
    // H D H has the element fwht(D)[i ^ j] / n in row i and column j.
    double spectrum[QK_ITQ];
    for (int i = 0; i < n; ++i) {
        spectrum[i] = importance[i];
    }
    for (int h = 1; h < n; h *= 2) {
        for (int i = 0; i < n; ++i) {
            if (!(i & h)) {
                const double a  = spectrum[i];
                const double b  = spectrum[i + h];
                spectrum[i]     = a + b;
                spectrum[i + h] = a - b;
            }
        }
    }

    // Cholesky with rows and columns in reverse order; i ^ j does not change when both are reversed.
    double (*lower)[QK_ITQ] = malloc(sizeof(double[QK_ITQ][QK_ITQ]));
    GGML_ASSERT(lower != NULL);
    for (int i = 0; i < n; ++i) {
        for (int j = 0; j <= i; ++j) {
            double sum = spectrum[i ^ j] / n + (i == j ? damping : 0.0);
            for (int k = 0; k < j; ++k) {
                sum -= lower[i][k] * lower[j][k];
            }
            lower[i][j] = i == j ? sqrt(sum) : sum / lower[j][j];
        }
    }
    for (int j = 0; j < n; ++j) {
        for (int k = 0; k < n; ++k) {
            feedback[j * n + k] = k < j ? 0.0f : (float) (lower[n - 1 - j][n - 1 - k] / lower[n - 1 - k][n - 1 - k]);
        }
        weight[j] = lower[n - 1 - j][n - 1 - j] * lower[n - 1 - j][n - 1 - j];
    }
    free(lower);
}

static void free_factor(struct cached_factor * cached) {
    free(cached->importance);
    free(cached->feedback);
    free(cached->weight);
    free(cached);
}

static struct cached_factor * make_factor(int length, const float * importance, int64_t n, double mean) {
    struct cached_factor * cached  = malloc(sizeof(*cached));
    double *               weights = malloc((size_t) n * sizeof(double));
    GGML_ASSERT(cached != NULL && weights != NULL);
    cached->importance = malloc((size_t) n * sizeof(float));
    cached->feedback   = malloc((size_t) n * length * sizeof(float));
    cached->weight     = malloc((size_t) n * sizeof(float));
    GGML_ASSERT(cached->importance != NULL && cached->feedback != NULL && cached->weight != NULL);
    memcpy(cached->importance, importance, (size_t) n * sizeof(float));

    double total = 0.0;
    for (int64_t i = 0; i < n; i += length) {
        factorize_block(length, importance + i, ITQ_LDLQ_DAMPING * mean, cached->feedback + i * length, weights + i);
        for (int64_t j = i; j < i + length; ++j) {
            total += weights[j];
        }
    }
    for (int64_t i = 0; i < n; ++i) {
        cached->weight[i] = (float) (weights[i] / (total / (double) n));
    }
    free(weights);

    cached->factor  = (struct itq_factor){ cached->feedback, cached->weight, n, false };
    cached->length  = length;
    cached->users   = 0;
    cached->current = true;
    return cached;
}

static struct cached_factor * acquire_factor(int length, const float * importance, int64_t n, double mean) {
    ggml_critical_section_start();
    struct cached_factor * cached = current_factor;
    if (cached == NULL || cached->length != length || cached->factor.columns != n ||
        memcmp(cached->importance, importance, (size_t) n * sizeof(float)) != 0) {
        if (cached != NULL) {
            cached->current = false;
            if (cached->users == 0) {
                free_factor(cached);
            }
        }
        cached         = make_factor(length, importance, n, mean);
        current_factor = cached;
    }
    ++cached->users;
    ggml_critical_section_end();
    return cached;
}

static void release_factor(struct cached_factor * cached) {
    ggml_critical_section_start();
    --cached->users;
    if (cached->users == 0 && !cached->current) {
        free_factor(cached);
    }
    ggml_critical_section_end();
}

// Mean of the importance; 0 where it says nothing about the inputs, as of an expert that saw no token.
static double mean_importance(const float * imatrix, int64_t n) {
    double mean = 0.0;
    bool   bad  = false;
    for (int64_t i = 0; i < n; ++i) {
        mean += (double) imatrix[i] / (double) n;
        bad |= !(imatrix[i] >= 0.0f) || isinf(imatrix[i]);
    }
    return bad || !(mean > 0.0) ? 0.0 : mean;
}

#define DEFINE_IMATRIX(NAME, name, bits, n_levels, length, has_z, number)                                         \
    size_t quantize_##name##_imatrix(const float * GGML_RESTRICT src, void * GGML_RESTRICT dst, int64_t nrows,    \
                                     int64_t n_per_row, const float * imatrix) {                                  \
        GGML_ASSERT(n_per_row % (length) == 0);                                                                   \
        const double mean = mean_importance(imatrix, n_per_row);                                                  \
        if (mean == 0.0) {                                                                                        \
            return quantize_##name##_effort(src, dst, nrows, n_per_row, ITQ_CODEC_TRELLIS, ITQ_EFFORT_DEFAULT);   \
        }                                                                                                         \
        const struct itq_search search = { ITQ_LDLQ_SEGMENT, ITQ_LDLQ_LOOKAHEAD, ITQ_LDLQ_EFFORT(bits, length) }; \
        struct cached_factor *  cached = acquire_factor(length, imatrix, n_per_row, mean);                        \
        const size_t            size   = quantize_##name##_ldlq(src, dst, nrows, &cached->factor, search);        \
        release_factor(cached);                                                                                   \
        return size;                                                                                              \
    }                                                                                                             \
                                                                                                                  \
    size_t quantize_##name(const float * GGML_RESTRICT src, void * GGML_RESTRICT dst, int64_t nrows,              \
                           int64_t n_per_row, const float * imatrix) {                                            \
        if (imatrix != NULL) {                                                                                    \
            return quantize_##name##_imatrix(src, dst, nrows, n_per_row, imatrix);                                \
        }                                                                                                         \
        return quantize_##name##_effort(src, dst, nrows, n_per_row, ITQ_CODEC_TRELLIS, ITQ_EFFORT_DEFAULT);       \
    }

ITQ_TYPES(DEFINE_IMATRIX)

// ITQ3_S: encoding with an importance matrix, and the function for callers that may or may not have one.
//
// The squares of the input columns, D, are the diagonal of their second moment; taken for the whole of it, the Hessian
// of the rotated row is H D H in every block, and the calibrated encoder does the rest. The Python form is
// gguf_itq3s/rounding/imatrix.py with hessian.from_diagonal and hessian.factorize.

#include "ggml-threading.h"
#include "itq3s-ldlq.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

// Factors of one importance matrix, shared by the threads that encode a tensor.
struct cached_factor {
    struct itq3_s_factor factor;
    float *              importance;  // what they were made from
    float *              feedback;
    float *              weight;
    int                  users;
    bool                 current;
};

static struct cached_factor * current_factor = NULL;

// Factor (H D H + damping) = U U^T of one block with U upper triangular: feedback = U / diag(U), weight = diag(U)^2.
static void factorize_block(const float * importance, double damping, float * feedback, double * weight) {
    // H D H has the element fwht(D)[i ^ j] / 256 in row i and column j.
    double spectrum[QK_ITQ3_S];
    for (int i = 0; i < QK_ITQ3_S; ++i) {
        spectrum[i] = importance[i];
    }
    for (int h = 1; h < QK_ITQ3_S; h *= 2) {
        for (int i = 0; i < QK_ITQ3_S; ++i) {
            if (!(i & h)) {
                const double a  = spectrum[i];
                const double b  = spectrum[i + h];
                spectrum[i]     = a + b;
                spectrum[i + h] = a - b;
            }
        }
    }

    // Cholesky with rows and columns in reverse order; i ^ j does not change when both are reversed.
    double (*lower)[QK_ITQ3_S] = malloc(sizeof(double[QK_ITQ3_S][QK_ITQ3_S]));
    GGML_ASSERT(lower != NULL);
    for (int i = 0; i < QK_ITQ3_S; ++i) {
        for (int j = 0; j <= i; ++j) {
            double sum = spectrum[i ^ j] / QK_ITQ3_S + (i == j ? damping : 0.0);
            for (int k = 0; k < j; ++k) {
                sum -= lower[i][k] * lower[j][k];
            }
            lower[i][j] = i == j ? sqrt(sum) : sum / lower[j][j];
        }
    }
    for (int j = 0; j < QK_ITQ3_S; ++j) {
        for (int k = 0; k < QK_ITQ3_S; ++k) {
            feedback[j * QK_ITQ3_S + k] = k < j ? 0.0f
                                                : (float) (lower[QK_ITQ3_S - 1 - j][QK_ITQ3_S - 1 - k] /
                                                           lower[QK_ITQ3_S - 1 - k][QK_ITQ3_S - 1 - k]);
        }
        weight[j] = lower[QK_ITQ3_S - 1 - j][QK_ITQ3_S - 1 - j] * lower[QK_ITQ3_S - 1 - j][QK_ITQ3_S - 1 - j];
    }
    free(lower);
}

static void free_factor(struct cached_factor * cached) {
    free(cached->importance);
    free(cached->feedback);
    free(cached->weight);
    free(cached);
}

static struct cached_factor * make_factor(const float * importance, int64_t n, double mean) {
    struct cached_factor * cached  = malloc(sizeof(*cached));
    double *               weights = malloc((size_t) n * sizeof(double));
    GGML_ASSERT(cached != NULL && weights != NULL);
    cached->importance = malloc((size_t) n * sizeof(float));
    cached->feedback   = malloc((size_t) n * QK_ITQ3_S * sizeof(float));
    cached->weight     = malloc((size_t) n * sizeof(float));
    GGML_ASSERT(cached->importance != NULL && cached->feedback != NULL && cached->weight != NULL);
    memcpy(cached->importance, importance, (size_t) n * sizeof(float));

    double total = 0.0;
    for (int64_t i = 0; i < n; i += QK_ITQ3_S) {
        factorize_block(importance + i, ITQ3_S_LDLQ_DAMPING * mean, cached->feedback + i * QK_ITQ3_S, weights + i);
        for (int64_t j = i; j < i + QK_ITQ3_S; ++j) {
            total += weights[j];
        }
    }
    for (int64_t i = 0; i < n; ++i) {
        cached->weight[i] = (float) (weights[i] / (total / (double) n));
    }
    free(weights);

    cached->factor  = (struct itq3_s_factor){ cached->feedback, cached->weight, n, false };
    cached->users   = 0;
    cached->current = true;
    return cached;
}

static struct cached_factor * acquire_factor(const float * importance, int64_t n, double mean) {
    ggml_critical_section_start();
    struct cached_factor * cached = current_factor;
    if (cached == NULL || cached->factor.columns != n ||
        memcmp(cached->importance, importance, (size_t) n * sizeof(float)) != 0) {
        if (cached != NULL) {
            cached->current = false;
            if (cached->users == 0) {
                free_factor(cached);
            }
        }
        cached         = make_factor(importance, n, mean);
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

size_t quantize_itq3_s_imatrix(const float * GGML_RESTRICT src, void * GGML_RESTRICT dst, int64_t nrows,
                               int64_t n_per_row, const float * imatrix) {
    GGML_ASSERT(n_per_row % QK_ITQ3_S == 0);
    double mean = 0.0;
    bool   bad  = false;
    for (int64_t i = 0; i < n_per_row; ++i) {
        mean += (double) imatrix[i] / (double) n_per_row;
        bad |= !(imatrix[i] >= 0.0f) || isinf(imatrix[i]);
    }
    if (bad || !(mean > 0.0)) {
        // nothing is known about the inputs, as of an expert that saw no token
        return quantize_itq3_s_effort(src, dst, nrows, n_per_row, ITQ3_S_CODEC_TRELLIS, ITQ3_S_EFFORT_DEFAULT);
    }
    const struct itq3_s_search search = { ITQ3_S_LDLQ_SEGMENT, ITQ3_S_LDLQ_LOOKAHEAD, ITQ3_S_EFFORT_DEFAULT };
    struct cached_factor *     cached = acquire_factor(imatrix, n_per_row, mean);
    const size_t               size   = quantize_itq3_s_ldlq(src, dst, nrows, &cached->factor, search);
    release_factor(cached);
    return size;
}

size_t quantize_itq3_s(const float * GGML_RESTRICT src, void * GGML_RESTRICT dst, int64_t nrows, int64_t n_per_row,
                       const float * imatrix) {
    if (imatrix != NULL) {
        return quantize_itq3_s_imatrix(src, dst, nrows, n_per_row, imatrix);
    }
    return quantize_itq3_s_effort(src, dst, nrows, n_per_row, ITQ3_S_CODEC_TRELLIS, ITQ3_S_EFFORT_DEFAULT);
}

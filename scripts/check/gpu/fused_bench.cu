// Times the paper's kernel (ggml-patch/src/cuda/itq3s-fused.cuh) beside ggml's own product of ITQ3_S and prints JSON.
//
// Link it to libggml-cuda and libggml-base of a build without GGML_CUDA_ITQ3S_FUSED, otherwise both are the same.
// Times are medians of interleaved runs, measured by events on the backend's stream. A run goes over copies of the
// weights that together are several times the L2 cache. Both sides include what they do to the activations once a
// product: conversion to F16 here; rotation and quantization, to 8 bits, there.
//
//   fused_bench [--runs N]

#include "common.cuh"
#include "convert.cuh"
#include "ggml-alloc.h"
#include "ggml-backend-impl.h"
#include "ggml-backend.h"
#include "ggml-cuda.h"
#include "ggml.h"
#include "itq3s-fused.cuh"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <random>
#include <string>
#include <vector>

static constexpr int products_per_run = 32;

static double median(std::vector<double> v) {
    std::sort(v.begin(), v.end());
    const size_t n = v.size();
    return n % 2 ? v[n / 2] : (v[n / 2 - 1] + v[n / 2]) / 2;
}

static void require(const bool condition, const char * what) {
    if (!condition) {
        fprintf(stderr, "error: %s\n", what);
        exit(1);
    }
}

// Random symbols and selectors, scales of the size that weights have, no zero-point.
static std::vector<uint8_t> random_blocks(const size_t nbytes) {
    std::mt19937         rng(1);
    std::vector<uint8_t> data(nbytes);
    for (size_t at = 0; at < nbytes; at += 4 * ITQ3_S_WORDS) {
        for (int i = 0; i < 4 * ITQ3_S_WORD_DZ; i += 4) {
            const uint32_t word = rng();
            memcpy(&data[at + i], &word, sizeof(word));
        }
        const ggml_fp16_t dz[2] = { ggml_fp32_to_fp16(0.01f + 1e-6f * (rng() % 10000)), ggml_fp32_to_fp16(0.0f) };
        memcpy(&data[at + 4 * ITQ3_S_WORD_DZ], dz, sizeof(dz));
    }
    return data;
}

// Microseconds per product of run, which does products_per_run of them on stream.
static double timed(cudaStream_t stream, const std::function<void()> & run) {
    cudaEvent_t start, stop;
    CUDA_CHECK(cudaEventCreate(&start));
    CUDA_CHECK(cudaEventCreate(&stop));
    CUDA_CHECK(cudaStreamSynchronize(stream));
    CUDA_CHECK(cudaEventRecord(start, stream));
    run();
    CUDA_CHECK(cudaEventRecord(stop, stream));
    CUDA_CHECK(cudaEventSynchronize(stop));
    float milliseconds = 0.0f;
    CUDA_CHECK(cudaEventElapsedTime(&milliseconds, start, stop));
    CUDA_CHECK(cudaEventDestroy(start));
    CUDA_CHECK(cudaEventDestroy(stop));
    return 1e3 * milliseconds / products_per_run;
}

// One line of JSON: rows m, columns n, k values between them.
static void bench(ggml_backend_t backend, const int64_t m, const int64_t k, const int64_t n, const int runs,
                  const bool last) {
    cudaStream_t stream = ((ggml_backend_cuda_context *) backend->context)->stream();
    const size_t bytes  = ggml_row_size(GGML_TYPE_ITQ3_S, k) * m;
    int          l2     = 0;
    CUDA_CHECK(cudaDeviceGetAttribute(&l2, cudaDevAttrL2CacheSize, 0));
    const int copies = std::min<int>(products_per_run, std::max<int>(2, (3 * (size_t) l2 + bytes - 1) / bytes));

    const ggml_init_params params = {
        ggml_tensor_overhead() * (copies + products_per_run + 8) + ggml_graph_overhead() + (1 << 20), nullptr, true
    };
    ggml_context *             ctx_w = ggml_init(params);
    ggml_context *             ctx   = ggml_init(params);
    std::vector<ggml_tensor *> weights;
    for (int i = 0; i < copies; ++i) {
        weights.push_back(ggml_new_tensor_2d(ctx_w, GGML_TYPE_ITQ3_S, k, m));
    }
    ggml_tensor *              x     = ggml_new_tensor_2d(ctx, GGML_TYPE_F32, k, n);
    ggml_cgraph *              graph = ggml_new_graph(ctx);
    std::vector<ggml_tensor *> products;
    for (int i = 0; i < products_per_run; ++i) {
        products.push_back(ggml_mul_mat(ctx, weights[i % copies], x));
        ggml_build_forward_expand(graph, products.back());
    }
    ggml_backend_buffer_t buffer_w = ggml_backend_alloc_ctx_tensors(ctx_w, backend);
    ggml_backend_buffer_t buffer   = ggml_backend_alloc_ctx_tensors(ctx, backend);
    require(buffer && buffer_w, "no memory for the matrices");
    ggml_backend_buffer_set_usage(buffer_w, GGML_BACKEND_BUFFER_USAGE_WEIGHTS);

    const std::vector<uint8_t> blocks = random_blocks(bytes);
    for (ggml_tensor * w : weights) {
        ggml_backend_tensor_set(w, blocks.data(), 0, bytes);
    }
    std::mt19937                    rng(2);
    std::normal_distribution<float> normal;
    std::vector<float>              activations(k * n);
    for (float & v : activations) {
        v = normal(rng);
    }
    ggml_backend_tensor_set(x, activations.data(), 0, ggml_nbytes(x));

    half *  y   = nullptr;
    float * dst = nullptr;
    CUDA_CHECK(cudaMalloc(&y, k * n * sizeof(half)));
    CUDA_CHECK(cudaMalloc(&dst, m * n * sizeof(float)));
    itq3_s_fused_args args = {};
    args.nblocks           = k / ITQ3_S_BLOCK;
    args.nrows             = m;
    args.ncolumns          = n;
    args.stride_row_x      = args.nblocks;
    args.stride_column_y   = k;
    args.stride_column_dst = m;
    args.nchannels_x = args.nchannels = args.nsamples_x = args.nsamples = 1;

    const auto to_fp16 = [&] {
        ggml_get_to_fp16_nc_cuda(GGML_TYPE_F32)(x->data, y, k, n, 1, 1, k, k * n, k * n, stream);
    };
    const auto kernel = [&](const int i) { ggml_cuda_itq3_s_fused(weights[i % copies]->data, y, dst, args, stream); };
    const auto ours   = [&] {
        for (int i = 0; i < products_per_run; ++i) {
            to_fp16();
            kernel(i);
        }
    };
    const auto kernels = [&] {
        for (int i = 0; i < products_per_run; ++i) {
            kernel(i);
        }
    };
    const auto ggml = [&] {
        require(ggml_backend_graph_compute_async(backend, graph) == GGML_STATUS_SUCCESS,
                "the backend's products failed");
    };

    std::vector<double> times[3];
    for (int r = -3; r < runs; ++r) {  // the first ones warm up clocks and record CUDA graphs
        const double now[3] = { timed(stream, ours), timed(stream, kernels), timed(stream, ggml) };
        for (int i = 0; r >= 0 && i < 3; ++i) {
            times[i].push_back(now[i]);
        }
    }

    std::vector<float> a(m * n), b(m * n);
    CUDA_CHECK(cudaMemcpy(a.data(), dst, m * n * sizeof(float), cudaMemcpyDeviceToHost));
    ggml_backend_tensor_get(products.back(), b.data(), 0, m * n * sizeof(float));
    double difference = 0.0;
    double size       = 0.0;
    for (size_t i = 0; i < a.size(); ++i) {
        require(std::isfinite(a[i]) && std::isfinite(b[i]), "a result is not finite");
        difference = std::max(difference, std::fabs((double) a[i] - b[i]));
        size       = std::max(size, std::fabs((double) b[i]));
    }

    const double fused = median(times[0]);
    const double mmq   = median(times[2]);
    printf(
        "    {\"rows\": %lld, \"k\": %lld, \"columns\": %lld, \"fused_us\": %.2f, \"fused_kernel_us\": %.2f, "
        "\"ggml_us\": %.2f, \"fused_over_ggml\": %.3f, \"max_relative_difference\": %.3e}%s\n",
        (long long) m, (long long) k, (long long) n, fused, median(times[1]), mmq, fused / mmq, difference / size,
        last ? "" : ",");
    fflush(stdout);

    CUDA_CHECK(cudaFree(y));
    CUDA_CHECK(cudaFree(dst));
    ggml_backend_buffer_free(buffer);
    ggml_backend_buffer_free(buffer_w);
    ggml_free(ctx);
    ggml_free(ctx_w);
}

int main(int argc, char ** argv) {
    int runs = 21;
    if (argc == 3 && strcmp(argv[1], "--runs") == 0) {
        runs = std::max(1, atoi(argv[2]));
    } else if (argc != 1) {
        fprintf(stderr, "usage: fused_bench [--runs N]\n");
        return 1;
    }
    ggml_backend_t backend = ggml_backend_cuda_init(0);
    require(backend != nullptr, "no CUDA device");
    const int cc = ggml_cuda_info().devices[0].cc;
    require(GGML_CUDA_CC_IS_NVIDIA(cc) && cc >= GGML_CUDA_CC_AMPERE, "the kernel needs Ampere or newer");
    cudaDeviceProp device;
    CUDA_CHECK(cudaGetDeviceProperties(&device, 0));

    printf(
        "{\n  \"device\": \"%s\",\n  \"compute_capability\": %d,\n  \"runs\": %d,\n  \"products_per_run\": %d,\n"
        "  \"results\": [\n",
        device.name, cc, runs, products_per_run);
    for (const int64_t m : { 4096, 14336 }) {
        for (const int64_t n : { 16, 64, 512 }) {
            bench(backend, m, 4096, n, runs, m == 14336 && n == 512);
        }
    }
    printf("  ]\n}\n");
    ggml_backend_free(backend);
    return 0;
}

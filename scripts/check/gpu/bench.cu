// Times matrix products of the CUDA backend for scripts/check/gpu/gpu_check.sh and prints JSON.
//
// Every number is the median of interleaved runs; weights rotate over buffers that together are several times the L2
// cache, so that each product reads its weights from memory. Copy bandwidth is measured in the same process.
//
//   bench [--runs N]

#include "ggml-alloc.h"
#include "ggml-backend.h"
#include "ggml-cuda.h"
#include "ggml.h"

#include "itq3s-quantize.cuh"

#include <cublas_v2.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <vector>

#define CHECK(call)                                                                \
    do {                                                                           \
        const cudaError_t status = (call);                                         \
        if (status != cudaSuccess) {                                               \
            fprintf(stderr, "error: %s: %s\n", #call, cudaGetErrorString(status)); \
            exit(1);                                                               \
        }                                                                          \
    } while (0)

static size_t l2_bytes;

// Products in one measured run: enough to hide the end of the run, few enough to repeat it often.
static constexpr int products_per_run = 32;

static double median(std::vector<double> v) {
    std::sort(v.begin(), v.end());
    const size_t n = v.size();
    return n % 2 ? v[n / 2] : (v[n / 2 - 1] + v[n / 2]) / 2;
}

// Something to time: run() returns seconds per product.
struct contender {
    std::string             name;
    std::function<double()> run;
    std::vector<double>     seconds;
};

static void measure(std::vector<contender> & contenders, const int runs) {
    for (auto & c : contenders) {
        for (int i = 0; i < 3; ++i) {  // clocks, CUDA graph capture
            c.run();
        }
    }
    for (int r = 0; r < runs; ++r) {
        for (auto & c : contenders) {
            c.seconds.push_back(c.run());
        }
    }
}

// ggml weights of one type: a graph of products, each with the next of the rotated matrices.
struct product_graph {
    ggml_backend_t        backend;
    ggml_context *        ctx          = nullptr;
    ggml_context *        ctx_w        = nullptr;
    ggml_backend_buffer_t buffer       = nullptr;
    ggml_backend_buffer_t buffer_w     = nullptr;
    ggml_cgraph *         graph        = nullptr;
    size_t                weight_bytes = 0;

    product_graph(ggml_backend_t backend, const ggml_type type, const int64_t m, const int64_t k, const int64_t n) :
        backend(backend) {
        const size_t bytes  = ggml_row_size(type, k) * m;
        const int    copies = std::max<int>(2, (4 * l2_bytes + bytes - 1) / bytes);
        weight_bytes        = bytes;

        const ggml_init_params params = { ggml_tensor_overhead() * (copies + 2 * products_per_run + 8) +
                                              ggml_graph_overhead() + (1 << 20),
                                          nullptr, true };
        ctx_w                         = ggml_init(params);
        ctx                           = ggml_init(params);
        std::vector<ggml_tensor *> weights;
        for (int i = 0; i < copies; ++i) {
            weights.push_back(ggml_new_tensor_2d(ctx_w, type, k, m));
        }
        buffer_w = ggml_backend_alloc_ctx_tensors(ctx_w, backend);
        ggml_backend_buffer_set_usage(buffer_w, GGML_BACKEND_BUFFER_USAGE_WEIGHTS);
        ggml_tensor * x = ggml_new_tensor_2d(ctx, GGML_TYPE_F32, k, n);
        graph           = ggml_new_graph(ctx);
        for (int i = 0; i < products_per_run; ++i) {
            ggml_build_forward_expand(graph, ggml_mul_mat(ctx, weights[i % copies], x));
        }
        buffer = ggml_backend_alloc_ctx_tensors(ctx, backend);
        if (!buffer || !buffer_w) {
            fprintf(stderr, "error: no memory for %d matrices of %zu bytes\n", copies, bytes);
            exit(1);
        }

        // Real blocks of the type: some quantized Gaussian rows, repeated.
        std::mt19937                    rng(1);
        std::normal_distribution<float> normal(0.0f, 0.02f);
        const int64_t                   rows = std::min<int64_t>(m, 16);
        std::vector<float>              source(rows * k);
        for (float & v : source) {
            v = normal(rng);
        }
        std::vector<uint8_t> data(bytes);
        ggml_quantize_chunk(type, source.data(), data.data(), 0, rows, k, nullptr);
        const size_t period = ggml_row_size(type, k) * rows;
        for (size_t at = period; at < bytes; at += period) {
            memcpy(data.data() + at, data.data(), std::min(period, bytes - at));
        }
        for (ggml_tensor * w : weights) {
            ggml_backend_tensor_set(w, data.data(), 0, bytes);
        }
        std::vector<float> activations(k * n);
        for (float & v : activations) {
            v = 50.0f * normal(rng);
        }
        ggml_backend_tensor_set(x, activations.data(), 0, activations.size() * sizeof(float));
    }
    ~product_graph() {
        ggml_backend_buffer_free(buffer);
        ggml_backend_buffer_free(buffer_w);
        ggml_free(ctx);
        ggml_free(ctx_w);
    }
    product_graph(const product_graph &)             = delete;
    product_graph & operator=(const product_graph &) = delete;

    double run() {
        ggml_backend_synchronize(backend);
        const auto start = std::chrono::steady_clock::now();
        if (ggml_backend_graph_compute(backend, graph) != GGML_STATUS_SUCCESS) {
            fprintf(stderr, "error: the products of the backend failed\n");
            exit(1);
        }
        ggml_backend_synchronize(backend);
        return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count() / products_per_run;
    }
};

// cuBLAS on F16 weights: result = weights^T * x, float accumulation.
struct cublas_products {
    static constexpr int copies = 2;  // a matrix alone is larger than the L2 cache of any card
    cublasHandle_t       handle;
    cudaStream_t         stream;
    half *               weights[copies];
    half *               x;
    half *               y;
    int                  m, k, n;

    cublas_products(const int m, const int k, const int n) : m(m), k(k), n(n) {
        CHECK(cudaStreamCreate(&stream));
        if (cublasCreate(&handle) != CUBLAS_STATUS_SUCCESS ||
            cublasSetStream(handle, stream) != CUBLAS_STATUS_SUCCESS) {
            fprintf(stderr, "error: cuBLAS does not start\n");
            exit(1);
        }
        std::mt19937      rng(1);
        std::vector<half> row(1 << 20);
        for (half & v : row) {
            v = __float2half(std::normal_distribution<float>(0.0f, 0.02f)(rng));
        }
        const size_t count = (size_t) m * k;
        for (half *& w : weights) {
            CHECK(cudaMalloc(&w, count * sizeof(half)));
            for (size_t at = 0; at < count; at += row.size()) {
                CHECK(cudaMemcpy(w + at, row.data(), std::min(row.size(), count - at) * sizeof(half),
                                 cudaMemcpyHostToDevice));
            }
        }
        CHECK(cudaMalloc(&x, (size_t) k * n * sizeof(half)));
        CHECK(cudaMalloc(&y, (size_t) m * n * sizeof(half)));
        for (size_t at = 0; at < (size_t) k * n; at += row.size()) {
            CHECK(cudaMemcpy(x + at, row.data(), std::min(row.size(), (size_t) k * n - at) * sizeof(half),
                             cudaMemcpyHostToDevice));
        }
    }
    ~cublas_products() {
        for (half * w : weights) {
            cudaFree(w);
        }
        cudaFree(x);
        cudaFree(y);
        cublasDestroy(handle);
        cudaStreamDestroy(stream);
    }
    cublas_products(const cublas_products &)             = delete;
    cublas_products & operator=(const cublas_products &) = delete;

    double run() {
        const float one = 1.0f, zero = 0.0f;
        CHECK(cudaStreamSynchronize(stream));
        const auto start = std::chrono::steady_clock::now();
        for (int i = 0; i < products_per_run; ++i) {
            if (cublasGemmEx(handle, CUBLAS_OP_T, CUBLAS_OP_N, m, n, k, &one, weights[i % copies], CUDA_R_16F, k, x,
                             CUDA_R_16F, k, &zero, y, CUDA_R_16F, m, CUBLAS_COMPUTE_32F,
                             CUBLAS_GEMM_DEFAULT) != CUBLAS_STATUS_SUCCESS) {
                fprintf(stderr, "error: cublasGemmEx failed\n");
                exit(1);
            }
        }
        CHECK(cudaStreamSynchronize(stream));
        return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count() / products_per_run;
    }
};

// Our activation kernel with and without the rotation, launched as for a product with one column.
struct activation_kernels {
    cudaStream_t stream;
    float *      x;
    void *       y;
    int64_t      k;

    explicit activation_kernels(const int64_t k) : k(k) {
        CHECK(cudaStreamCreate(&stream));
        CHECK(cudaMalloc(&x, k * sizeof(float)));
        CHECK(cudaMalloc(&y, k / 128 * sizeof(block_q8_1x4)));
        std::vector<float> host(k);
        std::mt19937       rng(1);
        for (float & v : host) {
            v = std::normal_distribution<float>()(rng);
        }
        CHECK(cudaMemcpy(x, host.data(), k * sizeof(float), cudaMemcpyHostToDevice));
    }
    ~activation_kernels() {
        cudaFree(x);
        cudaFree(y);
        cudaStreamDestroy(stream);
    }
    activation_kernels(const activation_kernels &)             = delete;
    activation_kernels & operator=(const activation_kernels &) = delete;

    double run(const bool rotate) {
        // The kernel is short: many of them, in a graph, so that launching is not what is timed.
        constexpr int     count = 256;
        const dim3        grid((k / ITQ3_S_BLOCK + ITQ3_S_QUANTIZE_WARPS - 1) / ITQ3_S_QUANTIZE_WARPS, 1, 1);
        const dim3        block(ITQ3_S_LANES, ITQ3_S_QUANTIZE_WARPS, 1);
        cudaGraphExec_t & exec = rotate ? graph_rotate : graph_plain;
        if (!exec) {
            cudaGraph_t graph;
            CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
            for (int i = 0; i < count; ++i) {
                if (rotate) {
                    quantize_q8_1x4<true><<<grid, block, 0, stream>>>(x, y, k, 0, 0, 0, k, 1, make_uint3(0, 0, 1));
                } else {
                    quantize_q8_1x4<false><<<grid, block, 0, stream>>>(x, y, k, 0, 0, 0, k, 1, make_uint3(0, 0, 1));
                }
            }
            CHECK(cudaGetLastError());
            CHECK(cudaStreamEndCapture(stream, &graph));
            CHECK(cudaGraphInstantiate(&exec, graph, 0));
            CHECK(cudaGraphDestroy(graph));
        }
        CHECK(cudaStreamSynchronize(stream));
        const auto start = std::chrono::steady_clock::now();
        CHECK(cudaGraphLaunch(exec, stream));
        CHECK(cudaStreamSynchronize(stream));
        return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count() / count;
    }

    cudaGraphExec_t graph_rotate = nullptr;
    cudaGraphExec_t graph_plain  = nullptr;
};

static double copy_bandwidth(const int runs) {
    const size_t bytes = (size_t) 1 << 30;
    char *       a, *b;
    CHECK(cudaMalloc(&a, bytes));
    CHECK(cudaMalloc(&b, bytes));
    CHECK(cudaMemset(a, 1, bytes));
    cudaEvent_t start, stop;
    CHECK(cudaEventCreate(&start));
    CHECK(cudaEventCreate(&stop));
    std::vector<double> rates;
    for (int r = 0; r < runs + 3; ++r) {
        CHECK(cudaEventRecord(start));
        CHECK(cudaMemcpyAsync(b, a, bytes, cudaMemcpyDeviceToDevice));
        CHECK(cudaEventRecord(stop));
        CHECK(cudaEventSynchronize(stop));
        float ms;
        CHECK(cudaEventElapsedTime(&ms, start, stop));
        if (r >= 3) {
            rates.push_back(2.0 * bytes / (ms * 1e-3));  // read and written
        }
    }
    cudaFree(a);
    cudaFree(b);
    return median(rates);
}

static bool first_line = true;

static void print_result(const char * kind, const char * name, const int64_t m, const int64_t k, const int64_t n,
                         const size_t bytes, const std::vector<double> & seconds) {
    const auto range = std::minmax_element(seconds.begin(), seconds.end());
    printf(
        "%s\n    {\"kind\": \"%s\", \"name\": \"%s\", \"rows\": %lld, \"k\": %lld, \"columns\": %lld, "
        "\"weight_bytes\": %zu, \"runs\": %zu, "
        "\"median_us\": %.4f, \"min_us\": %.4f, \"max_us\": %.4f}",
        first_line ? "" : ",", kind, name, (long long) m, (long long) k, (long long) n, bytes, seconds.size(),
        1e6 * median(seconds), 1e6 * *range.first, 1e6 * *range.second);
    first_line = false;
    fflush(stdout);
    fprintf(stderr, "%-10s %-12s %6lld x %6lld, %3lld columns: %10.2f us\n", kind, name, (long long) m, (long long) k,
            (long long) n, 1e6 * median(seconds));
}

int main(int argc, char ** argv) {
    int runs = 31;
    for (int i = 1; i < argc; ++i) {
        if (!strcmp(argv[i], "--runs") && i + 1 < argc) {
            runs = atoi(argv[++i]);
        } else {
            fprintf(stderr, "usage: %s [--runs N]\n", argv[0]);
            return 1;
        }
    }
    if (runs < 20) {
        fprintf(stderr, "error: --runs %d: at least 20 are needed for a median\n", runs);
        return 1;
    }

    cudaDeviceProp device;
    CHECK(cudaGetDeviceProperties(&device, 0));
    l2_bytes               = device.l2CacheSize;
    ggml_backend_t backend = ggml_backend_cuda_init(0);
    if (!backend) {
        fprintf(stderr, "error: the CUDA backend does not start\n");
        return 1;
    }
    int driver = 0, runtime = 0;
    cudaDriverGetVersion(&driver);
    cudaRuntimeGetVersion(&runtime);
    printf(
        "{\n  \"device\": \"%s\", \"compute_capability\": \"%d.%d\", \"multiprocessors\": %d, \"l2_bytes\": %d, "
        "\"driver\": %d, \"cuda\": %d,\n",
        device.name, device.major, device.minor, device.multiProcessorCount, device.l2CacheSize, driver, runtime);
    printf("  \"copy_bytes_per_s\": %.6e,\n  \"results\": [", copy_bandwidth(runs));

    // The matrices of a layer of an 8B Llama.
    const int64_t llama[][2] = { { 4096, 4096 }, { 1024, 4096 }, { 14336, 4096 }, { 4096, 14336 } };
    struct group {
        const char *           kind;
        int64_t                n;
        std::vector<ggml_type> types;
    };
    const group groups[] = {
        { "mmvq", 1, { GGML_TYPE_ITQ3_S, GGML_TYPE_Q4_K, GGML_TYPE_IQ3_S, GGML_TYPE_Q3_K } },
        { "mmq", 512, { GGML_TYPE_ITQ3_S, GGML_TYPE_Q4_K, GGML_TYPE_IQ3_S } },
    };
    for (const group & g : groups) {
        for (const auto & shape : llama) {
            std::vector<std::unique_ptr<product_graph>> graphs;
            std::vector<contender>                      contenders;
            for (const ggml_type type : g.types) {
                graphs.push_back(std::make_unique<product_graph>(backend, type, shape[0], shape[1], g.n));
                product_graph * p = graphs.back().get();
                contenders.push_back({ ggml_type_name(type), [p] { return p->run(); }, {} });
            }
            measure(contenders, runs);
            for (size_t i = 0; i < contenders.size(); ++i) {
                print_result(g.kind, contenders[i].name.c_str(), shape[0], shape[1], g.n, graphs[i]->weight_bytes,
                             contenders[i].seconds);
            }
        }
    }

    for (const auto & shape : { llama[0], llama[3] }) {
        activation_kernels     kernels(shape[1]);
        std::vector<contender> contenders = {
            { "rotated", [&] { return kernels.run(true); }, {} },
            { "plain", [&] { return kernels.run(false); }, {} },
        };
        measure(contenders, runs);
        for (const contender & c : contenders) {
            print_result("activation", c.name.c_str(), 0, shape[1], 1, 0, c.seconds);
        }
    }

    for (const int64_t n : { 1, 16 }) {
        const int64_t          m = 8192, k = 28672;
        product_graph          tq1(backend, GGML_TYPE_TQ1_0, m, k, n);
        product_graph          tq2(backend, GGML_TYPE_TQ2_0, m, k, n);
        cublas_products        f16(m, k, n);
        std::vector<contender> contenders = {
            { "tq1_0", [&] { return tq1.run(); }, {} },
            { "tq2_0", [&] { return tq2.run(); }, {} },
            { "cublas_f16", [&] { return f16.run(); }, {} },
        };
        measure(contenders, runs);
        print_result("ternary", "tq1_0", m, k, n, tq1.weight_bytes, contenders[0].seconds);
        print_result("ternary", "tq2_0", m, k, n, tq2.weight_bytes, contenders[1].seconds);
        print_result("ternary", "cublas_f16", m, k, n, (size_t) m * k * 2, contenders[2].seconds);
    }
    printf("\n  ]\n}\n");
    ggml_backend_free(backend);
    return 0;
}

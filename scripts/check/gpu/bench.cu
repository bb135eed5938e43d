// Times matrix products of the CUDA backend for scripts/check/gpu/gpu_check.py and prints JSON, one object a line: the
// device, then a result each, then {"done": true}.
//
// Every number is the median of interleaved runs. A run goes over copies of the weights that together are at least four
// times the L2 cache, so that each product reads its weights from memory, and is repeated without a wait of the host
// until it is long against launching it. Both contenders, the backend and cuBLAS, run as CUDA graphs. The first and the
// last product of a contender are compared with the same product on the host. Copy bandwidth is measured in the same
// process.
//
//   gpu-bench [--runs N] [--quick] [--prompts]

#include "ggml-alloc.h"
#include "ggml-backend.h"
#include "ggml-cuda.h"
#include "ggml.h"

#include "itq3s-quantize.cuh"

#include <cublas_v2.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
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

#define CHECK_CUBLAS(call)                                                         \
    do {                                                                           \
        const cublasStatus_t status = (call);                                      \
        if (status != CUBLAS_STATUS_SUCCESS) {                                     \
            fprintf(stderr, "error: %s: cuBLAS status %d\n", #call, (int) status); \
            exit(1);                                                               \
        }                                                                          \
    } while (0)

static size_t l2_bytes;
static double least_run_seconds = 2e-3;  // launching and waiting take some 10 us

static constexpr int least_products = 16;  // in a graph, so that its launch does not count
static constexpr int different_rows = 16;  // of a matrix; they are repeated

static double seconds_now() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

static double median(std::vector<double> v) {
    std::sort(v.begin(), v.end());
    const size_t n = v.size();
    return n % 2 ? v[n / 2] : (v[n / 2 - 1] + v[n / 2]) / 2;
}

// Something to time. launch() starts `products` products and does not wait for them.
struct contender {
    std::string           name;
    size_t                weight_bytes;
    int                   products;
    std::function<void()> launch;
    std::function<void()> wait;
    std::function<void()> verify;
    int                   repeats = 1;
    std::vector<double>   seconds;

    double run() const {
        wait();
        const double start = seconds_now();
        for (int i = 0; i < repeats; ++i) {
            launch();
        }
        wait();
        return (seconds_now() - start) / repeats;
    }
};

static void measure(std::vector<contender> & contenders, const int runs) {
    for (auto & c : contenders) {
        for (int i = 0; i < 3; ++i) {  // clocks, CUDA graph capture
            c.run();
        }
        c.verify();
        c.repeats = std::min<int>(1000, 1 + (int) (least_run_seconds / c.run()));
        c.run();
    }
    for (int r = 0; r < runs; ++r) {
        for (auto & c : contenders) {
            c.seconds.push_back(c.run() / c.products);
        }
    }
}

static int copies_past_l2(const size_t bytes) {
    return std::max<int>(2, (4 * l2_bytes + bytes - 1) / bytes);
}

// A multiple of the copies, so that every run goes over all of them.
static int products_of(const int copies) {
    return copies * ((least_products + copies - 1) / copies);
}

static std::vector<float> gaussian(const size_t count, const float sigma, const int seed) {
    std::mt19937                    rng(seed);
    std::normal_distribution<float> normal(0.0f, sigma);
    std::vector<float>              v(count);
    for (float & f : v) {
        f = normal(rng);
    }
    return v;
}

// A matrix of different_rows rows of the type, repeated, and its rows as numbers.
struct matrix_data {
    std::vector<uint8_t> rows;
    std::vector<float>   values;

    static const matrix_data & of(const ggml_type type, const int64_t k) {
        static std::map<std::pair<int, int64_t>, matrix_data> known;
        matrix_data &                                         d = known[{ type, k }];
        if (d.rows.empty()) {
            const std::vector<float> source = gaussian(different_rows * k, 0.02f, 1);
            d.rows.resize(ggml_row_size(type, k) * different_rows);
            ggml_quantize_chunk(type, source.data(), d.rows.data(), 0, different_rows, k, nullptr);
            d.values.resize(source.size());
            ggml_get_type_traits(type)->to_float(d.rows.data(), d.values.data(), source.size());
        }
        return d;
    }

    std::vector<uint8_t> matrix(const int64_t m) const {
        const size_t         bytes = rows.size() / different_rows * m;
        std::vector<uint8_t> data(bytes);
        for (size_t at = 0; at < bytes; at += rows.size()) {
            memcpy(data.data() + at, rows.data(), std::min(rows.size(), bytes - at));
        }
        return data;
    }

    // Ends the program if a column of a product, of m values, is not what the host computes.
    void verify(const std::string & name, const float * x, const std::vector<float> & y, const int64_t k) const {
        double expected[different_rows], error = 0.0, norm = 0.0;
        for (int r = 0; r < different_rows; ++r) {
            expected[r] = 0.0;
            for (int64_t i = 0; i < k; ++i) {
                expected[r] += (double) values[r * k + i] * x[i];
            }
        }
        for (size_t r = 0; r < y.size(); ++r) {
            const double e = expected[r % different_rows];
            error += (y[r] - e) * (y[r] - e);
            norm += e * e;
        }
        if (!(error <= 0.05 * 0.05 * norm)) {  // also if there is a NaN
            fprintf(stderr, "error: %s, %zu x %lld: the product is wrong, relative error %g\n", name.c_str(), y.size(),
                    (long long) k, std::sqrt(error / norm));
            exit(1);
        }
    }
};

// Copies of a matrix of one type in the memory of the device.
struct weight_copies {
    ggml_backend_t             backend;
    ggml_type                  type;
    int64_t                    m, k;
    size_t                     bytes;
    ggml_context *             ctx;
    ggml_backend_buffer_t      buffer;
    std::vector<ggml_tensor *> tensors;

    weight_copies(ggml_backend_t backend, const ggml_type type, const int64_t m, const int64_t k) :
        backend(backend), type(type), m(m), k(k), bytes(ggml_row_size(type, k) * m) {
        const int copies = copies_past_l2(bytes);
        ctx              = ggml_init({ ggml_tensor_overhead() * (copies + 1), nullptr, true });
        for (int i = 0; i < copies; ++i) {
            tensors.push_back(ggml_new_tensor_2d(ctx, type, k, m));
        }
        buffer = ggml_backend_alloc_ctx_tensors(ctx, backend);
        if (!buffer) {
            fprintf(stderr, "error: no memory for %d matrices of %zu bytes\n", copies, bytes);
            exit(1);
        }
        ggml_backend_buffer_set_usage(buffer, GGML_BACKEND_BUFFER_USAGE_WEIGHTS);
        const std::vector<uint8_t> data = matrix_data::of(type, k).matrix(m);
        for (ggml_tensor * w : tensors) {
            ggml_backend_tensor_set(w, data.data(), 0, bytes);
        }
    }
    ~weight_copies() {
        ggml_backend_buffer_free(buffer);
        ggml_free(ctx);
    }
    weight_copies(const weight_copies &)             = delete;
    weight_copies & operator=(const weight_copies &) = delete;
};

// A graph of products of the backend, each with the next of the copies.
struct product_graph {
    const weight_copies &      weights;
    int64_t                    n;
    ggml_context *             ctx;
    ggml_backend_buffer_t      buffer;
    ggml_cgraph *              graph;
    std::vector<float>         x;
    std::vector<ggml_tensor *> results;

    product_graph(const weight_copies & weights, const int64_t n) :
        weights(weights), n(n), x(gaussian(weights.k * n, 1.0f, 2)) {
        const int products = products_of(weights.tensors.size());
        ctx = ggml_init({ ggml_tensor_overhead() * (products + 2) + ggml_graph_overhead_custom(4 * products, false),
                          nullptr, true });
        ggml_tensor * activations = ggml_new_tensor_2d(ctx, GGML_TYPE_F32, weights.k, n);
        graph                     = ggml_new_graph_custom(ctx, 4 * products, false);
        for (int i = 0; i < products; ++i) {
            results.push_back(ggml_mul_mat(ctx, weights.tensors[i % weights.tensors.size()], activations));
            ggml_build_forward_expand(graph, results.back());
        }
        buffer = ggml_backend_alloc_ctx_tensors(ctx, weights.backend);
        if (!buffer) {
            fprintf(stderr, "error: no memory for the results of %d products\n", products);
            exit(1);
        }
        ggml_backend_buffer_clear(buffer, 0xFF);  // NaN, so that a result that is not written is found
        ggml_backend_tensor_set(activations, x.data(), 0, x.size() * sizeof(float));
    }
    ~product_graph() {
        ggml_backend_buffer_free(buffer);
        ggml_free(ctx);
    }
    product_graph(const product_graph &)             = delete;
    product_graph & operator=(const product_graph &) = delete;

    void launch() const {
        if (ggml_backend_graph_compute_async(weights.backend, graph) != GGML_STATUS_SUCCESS) {
            fprintf(stderr, "error: the products of the backend failed\n");
            exit(1);
        }
    }
    void verify() const {
        std::vector<float> y(weights.m);
        for (const ggml_tensor * result : { results.front(), results.back() }) {
            for (const int64_t column : { (int64_t) 0, n - 1 }) {
                ggml_backend_tensor_get(result, y.data(), column * weights.m * sizeof(float),
                                        weights.m * sizeof(float));
                matrix_data::of(weights.type, weights.k)
                    .verify(ggml_type_name(weights.type), x.data() + column * weights.k, y, weights.k);
            }
        }
    }
    contender timed() const {
        return { ggml_type_name(weights.type),
                 weights.bytes,
                 (int) results.size(),
                 [this] { launch(); },
                 [this] { ggml_backend_synchronize(weights.backend); },
                 [this] { verify(); } };
    }
};

// cuBLAS on F16 weights: result = weights^T * x in F16, float accumulation.
struct cublas_products {
    int                 m, k, n, copies, products;
    cublasHandle_t      handle;
    cudaStream_t        stream;
    cudaGraphExec_t     exec;
    std::vector<half *> weights, results;
    std::vector<float>  x_host;
    half *              x;
    void *              workspace;

    cublas_products(const int m, const int k, const int n) :
        m(m), k(k), n(n), copies(copies_past_l2((size_t) m * k * sizeof(half))), products(products_of(copies)),
        weights(copies), results(copies) {
        constexpr size_t workspace_bytes = (size_t) 64 << 20;
        CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
        CHECK(cudaMalloc(&workspace, workspace_bytes));
        CHECK_CUBLAS(cublasCreate(&handle));
        CHECK_CUBLAS(cublasSetStream(handle, stream));
        CHECK_CUBLAS(cublasSetWorkspace(handle, workspace, workspace_bytes));
        const std::vector<uint8_t> data = matrix_data::of(GGML_TYPE_F16, k).matrix(m);
        for (int i = 0; i < copies; ++i) {
            CHECK(cudaMalloc(&weights[i], data.size()));
            CHECK(cudaMalloc(&results[i], (size_t) m * n * sizeof(half)));
            CHECK(cudaMemcpy(weights[i], data.data(), data.size(), cudaMemcpyHostToDevice));
            CHECK(cudaMemset(results[i], 0xFF, (size_t) m * n * sizeof(half)));  // NaN
        }
        x_host = gaussian((size_t) k * n, 1.0f, 2);
        std::vector<ggml_fp16_t> rounded(x_host.size());
        ggml_fp32_to_fp16_row(x_host.data(), rounded.data(), rounded.size());
        CHECK(cudaMalloc(&x, rounded.size() * sizeof(half)));
        CHECK(cudaMemcpy(x, rounded.data(), rounded.size() * sizeof(half), cudaMemcpyHostToDevice));
        multiply(0);  // loads what must not be loaded during a capture
        CHECK(cudaStreamSynchronize(stream));
        cudaGraph_t graph;
        CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
        for (int i = 0; i < products; ++i) {
            multiply(i % copies);
        }
        CHECK(cudaStreamEndCapture(stream, &graph));
        CHECK(cudaGraphInstantiate(&exec, graph, 0));
        CHECK(cudaGraphDestroy(graph));
    }
    ~cublas_products() {
        cudaGraphExecDestroy(exec);
        for (int i = 0; i < copies; ++i) {
            cudaFree(weights[i]);
            cudaFree(results[i]);
        }
        cudaFree(x);
        cublasDestroy(handle);
        cudaFree(workspace);
        cudaStreamDestroy(stream);
    }
    cublas_products(const cublas_products &)             = delete;
    cublas_products & operator=(const cublas_products &) = delete;

    void multiply(const int i) const {
        const float one = 1.0f, zero = 0.0f;
        CHECK_CUBLAS(cublasGemmEx(handle, CUBLAS_OP_T, CUBLAS_OP_N, m, n, k, &one, weights[i], CUDA_R_16F, k, x,
                                  CUDA_R_16F, k, &zero, results[i], CUDA_R_16F, m, CUBLAS_COMPUTE_32F,
                                  CUBLAS_GEMM_DEFAULT));
    }
    void verify() const {
        std::vector<ggml_fp16_t> y(m);
        std::vector<float>       values(m);
        for (const int i : { 0, copies - 1 }) {
            for (const int column : { 0, n - 1 }) {
                CHECK(cudaMemcpy(y.data(), results[i] + (size_t) column * m, m * sizeof(half), cudaMemcpyDeviceToHost));
                ggml_fp16_to_fp32_row(y.data(), values.data(), m);
                matrix_data::of(GGML_TYPE_F16, k).verify("cuBLAS", x_host.data() + (size_t) column * k, values, k);
            }
        }
    }
    contender timed() const {
        return { "cublas_f16",
                 (size_t) m * k * sizeof(half),
                 products,
                 [this] { CHECK(cudaGraphLaunch(exec, stream)); },
                 [this] { CHECK(cudaStreamSynchronize(stream)); },
                 [this] { verify(); } };
    }
};

// Our activation kernel with and without the rotation, launched as for a product with one column. All that this program
// knows of our kernels is here.
struct activation_kernels {
    static constexpr int count = 256;  // the kernel is short: many of them, in a graph
    cudaStream_t         stream;
    float *              x;
    void *               y;
    int64_t              k;
    cudaGraphExec_t      rotated, plain;

    explicit activation_kernels(const int64_t k) : k(k) {
        CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
        CHECK(cudaMalloc(&x, k * sizeof(float)));
        CHECK(cudaMalloc(&y, k / QK8_1 * sizeof(block_q8_1)));
        const std::vector<float> host = gaussian(k, 1.0f, 1);
        CHECK(cudaMemcpy(x, host.data(), k * sizeof(float), cudaMemcpyHostToDevice));
        rotated = capture<GGML_TYPE_ITQ3_S>();
        plain   = capture<GGML_TYPE_TQ2_0>();
    }
    ~activation_kernels() {
        cudaGraphExecDestroy(rotated);
        cudaGraphExecDestroy(plain);
        cudaFree(x);
        cudaFree(y);
        cudaStreamDestroy(stream);
    }
    activation_kernels(const activation_kernels &)             = delete;
    activation_kernels & operator=(const activation_kernels &) = delete;

    template <ggml_type type> cudaGraphExec_t capture() const {
        const dim3      grid((k / ITQ3_S_BLOCK + ITQ3_S_QUANTIZE_WARPS - 1) / ITQ3_S_QUANTIZE_WARPS, 1, 1);
        const dim3      block(ITQ3_S_LANES, ITQ3_S_QUANTIZE_WARPS, 1);
        cudaGraph_t     graph;
        cudaGraphExec_t exec;
        CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
        for (int i = 0; i < count; ++i) {
            quantize_fragments<type>
                <<<grid, block, 0, stream>>>(x, y, (int) (k / ITQ3_S_BLOCK), 0, 0, 0, 0, make_uint3(0, 0, 1));
        }
        CHECK(cudaGetLastError());
        CHECK(cudaStreamEndCapture(stream, &graph));
        CHECK(cudaGraphInstantiate(&exec, graph, 0));
        CHECK(cudaGraphDestroy(graph));
        return exec;
    }
    contender timed(const bool rotate) const {
        return { rotate ? "rotated" : "plain",
                 0,
                 count,
                 [this, rotate] { CHECK(cudaGraphLaunch(rotate ? rotated : plain, stream)); },
                 [this] { CHECK(cudaStreamSynchronize(stream)); },
                 [] {} };
    }
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

static void print_results(const char * kind, const int64_t m, const int64_t k, const int64_t n,
                          const std::vector<contender> & contenders) {
    for (const contender & c : contenders) {
        const auto   range = std::minmax_element(c.seconds.begin(), c.seconds.end());
        const double us    = 1e6 * median(c.seconds);
        printf(
            "{\"kind\": \"%s\", \"name\": \"%s\", \"rows\": %lld, \"k\": %lld, \"columns\": %lld, "
            "\"weight_bytes\": %zu, \"products\": %d, \"repeats\": %d, \"runs\": %zu, "
            "\"median_us\": %.4f, \"min_us\": %.4f, \"max_us\": %.4f}\n",
            kind, c.name.c_str(), (long long) m, (long long) k, (long long) n, c.weight_bytes, c.products, c.repeats,
            c.seconds.size(), us, 1e6 * *range.first, 1e6 * *range.second);
        fprintf(stderr, "%-10s %-12s %6lld x %6lld, %3lld columns: %10.2f us\n", kind, c.name.c_str(), (long long) m,
                (long long) k, (long long) n, us);
    }
    fflush(stdout);
}

int main(int argc, char ** argv) {
    int  runs  = 31;
    bool quick = false, prompts = false;
    for (int i = 1; i < argc; ++i) {
        if (!strcmp(argv[i], "--runs") && i + 1 < argc) {
            runs = atoi(argv[++i]);
        } else if (!strcmp(argv[i], "--quick")) {
            quick = true;
        } else if (!strcmp(argv[i], "--prompts")) {  // the columns where another way may be faster, of our types
            prompts = true;
        } else {
            fprintf(stderr, "usage: %s [--runs N] [--quick] [--prompts]\n", argv[0]);
            return 1;
        }
    }
    if (quick) {
        runs              = 21;
        least_run_seconds = 1e-3;
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
        "{\"device\": \"%s\", \"compute_capability\": \"%d.%d\", \"multiprocessors\": %d, \"l2_bytes\": %d, "
        "\"driver\": %d, \"cuda\": %d, \"quick\": %s, \"copy_bytes_per_s\": %.6e}\n",
        device.name, device.major, device.minor, device.multiProcessorCount, device.l2CacheSize, driver, runtime,
        quick ? "true" : "false", copy_bandwidth(runs));
    fflush(stdout);

    const std::vector<ggml_type> types   = { GGML_TYPE_ITQ3_S, GGML_TYPE_TQ2_0, GGML_TYPE_TQ1_0,
                                             GGML_TYPE_Q4_K,   GGML_TYPE_IQ3_S, GGML_TYPE_Q3_K };
    const std::vector<ggml_type> ternary = { GGML_TYPE_TQ2_0, GGML_TYPE_TQ1_0 };
    using columns                        = std::vector<int>;
    const columns every = quick ? columns{ 1, 16, 512 } : columns{ 1, 2, 4, 8, 16, 32, 64, 128, 256, 512 };
    const columns some  = quick ? columns{ 1, 512 } : columns{ 1, 8, 512 };
    struct group {
        int64_t                m, k;
        std::vector<ggml_type> types;
        columns                n;
    };
    // The matrices of a layer of an 8B Llama, and one of a larger model for the ternary types.
    const columns many = { 128, 256, 512 };
    const std::vector<group> groups = prompts ? std::vector<group>{
        { 14336, 4096, { GGML_TYPE_ITQ3_S, GGML_TYPE_TQ2_0, GGML_TYPE_TQ1_0 }, many },
        { 4096, 14336, { GGML_TYPE_ITQ3_S, GGML_TYPE_TQ2_0, GGML_TYPE_TQ1_0 }, many },
    } : std::vector<group>{
        { 14336, 4096, types, every }, { 4096, 14336, types, every },       { 4096, 4096, types, some },
        { 1024, 4096, types, some },   { 8192, 28672, ternary, { 1, 16 } },
    };
    for (const group & g : groups) {
        std::vector<std::unique_ptr<weight_copies>> weights;
        for (const ggml_type type : g.types) {
            weights.push_back(std::make_unique<weight_copies>(backend, type, g.m, g.k));
        }
        for (const int n : g.n) {
            std::vector<std::unique_ptr<product_graph>> graphs;
            std::vector<contender>                      contenders;
            for (const auto & w : weights) {
                graphs.push_back(std::make_unique<product_graph>(*w, n));
                contenders.push_back(graphs.back()->timed());
            }
            const cublas_products f16(g.m, g.k, n);
            contenders.push_back(f16.timed());
            measure(contenders, runs);
            print_results("product", g.m, g.k, n, contenders);
        }
    }
    for (const int64_t k : { 4096, 14336 }) {
        const activation_kernels kernels(k);
        std::vector<contender>   contenders = { kernels.timed(true), kernels.timed(false) };
        measure(contenders, runs);
        print_results("activation", 0, k, 1, contenders);
    }
    printf("{\"done\": true}\n");
    ggml_backend_free(backend);
    return 0;
}

// The emulated device, and the launchers of itq-quantize.cu behind a C interface: what every library of kernels has.

#include "device.h"

#include "ggml-backend.h"
#include "itq-launch.cuh"
#include "mma.cuh"

#include <cstdarg>

// For architectures before Ampere, where itq-mma.cu says the same.
__attribute__((weak)) int64_t ggml_cuda_itq_mma_max_columns(ggml_type) {
    return 0;
}
__attribute__((weak)) bool ggml_cuda_itq_mul_mat_vec_q(const void *, ggml_type, const void *, const int32_t *,
                                                       const ggml_cuda_mm_fusion_args_device &, float *, int64_t,
                                                       int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t,
                                                       int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t,
                                                       int64_t, int64_t, int64_t, cudaStream_t) {
    return false;
}
__attribute__((weak)) bool ggml_cuda_itq_prefers_cublas(ggml_type, int64_t) {
    return false;
}

// The device that the launchers see, and the order of the threads (launch.h).
extern "C" void emulate_configure(const int cc, const int nsm, const int64_t smpbo, const int64_t seed,
                                  const int64_t max_grid) {
    emulate::device = { cc, nsm, (size_t) smpbo, (uint64_t) seed, max_grid };
    emulate::shared_limits.clear();
    emulate::launches.clear();
    ++emulate::devices_seen;
}
// The number of launches since the device was set, and what launch n was: grid, block, bytes of shared memory.
extern "C" float emulate_launches(const int64_t n, int64_t * found) {
    if (n < (int64_t) emulate::launches.size()) {
        const auto & [grid, block, bytes] = emulate::launches[n];
        const int64_t numbers[]           = { grid.x, grid.y, grid.z, block.x, block.y, block.z, (int64_t) bytes };
        std::copy(std::begin(numbers), std::end(numbers), found);
    }
    return emulate::launches.size();
}
// The mistake that is made from now on, of those that were planted in the sources; 0: none.
extern "C" void emulate_plant(const int fault) {
    emulate::fault = fault;
}

// ---------------------------------------------------------------------------------------------------------------------
// What upstream's files take of ggml and of ggml-cuda.cu

void ggml_abort(const char * file, const int line, const char * format, ...) {
    char    text[512];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof(text), format, arguments);
    va_end(arguments);
    fprintf(stderr, "%s:%d: ", file, line);
    emulate::fail(text);
}
void ggml_log_internal(ggml_log_level, const char *, ...) {}

int64_t ggml_blck_size(const ggml_type type) {
    return ggml_cuda_is_itq_64(type) ? 64 : emulate_is_ours(type) ? QK_K : 1;
}
size_t ggml_type_size(const ggml_type type) {
    switch (type) {
#define EMULATE_SIZE(NAME, ...) \
    case GGML_TYPE_##NAME:      \
        return ggml_cuda_type_traits<GGML_TYPE_##NAME>::bs;
        ITQ_TYPES(EMULATE_SIZE)
#undef EMULATE_SIZE
        case GGML_TYPE_TQ1_0:
            return sizeof(block_tq1_0);
        case GGML_TYPE_TQ2_0:
            return sizeof(block_tq2_0);
        case GGML_TYPE_F32:
        case GGML_TYPE_I32:
            return 4;
        default:
            emulate::fail("the size of a type that is not ours");
    }
}
const char * ggml_type_name(ggml_type) {
    return "?";
}
bool ggml_is_quantized(const ggml_type type) {
    return emulate_is_ours(type);
}
size_t ggml_element_size(const ggml_tensor * tensor) {
    return ggml_type_size(tensor->type);
}
int64_t ggml_nelements(const ggml_tensor * tensor) {
    return tensor->ne[0] * tensor->ne[1] * tensor->ne[2] * tensor->ne[3];
}
int64_t ggml_nrows(const ggml_tensor * tensor) {
    return tensor->ne[1] * tensor->ne[2] * tensor->ne[3];
}
size_t ggml_nbytes(const ggml_tensor * tensor) {
    size_t bytes = tensor->ne[0] / ggml_blck_size(tensor->type) * tensor->nb[0];
    for (int i = 1; i < GGML_MAX_DIMS; ++i) {
        bytes += (tensor->ne[i] - 1) * tensor->nb[i];
    }
    return bytes;
}
bool ggml_are_same_stride(const ggml_tensor * a, const ggml_tensor * b) {
    return std::equal(a->nb, a->nb + GGML_MAX_DIMS, b->nb);
}
bool ggml_is_contiguous(const ggml_tensor * tensor) {
    return ggml_nbytes(tensor) * ggml_blck_size(tensor->type) == ggml_nelements(tensor) * ggml_type_size(tensor->type);
}
bool ggml_is_contiguously_allocated(const ggml_tensor * tensor) {
    return ggml_is_contiguous(tensor);
}
ggml_backend_buffer_usage ggml_backend_buffer_get_usage(ggml_backend_buffer_t) {
    return GGML_BACKEND_BUFFER_USAGE_WEIGHTS;
}
size_t ggml_backend_buffer_get_alloc_size(ggml_backend_buffer_t, const ggml_tensor * tensor) {
    return ggml_nbytes(tensor);
}

void ggml_cuda_error(const char * statement, const char *, const char *, int, const char *) {
    emulate::fail(statement);
}
int ggml_cuda_get_device() {
    return 0;
}
void ggml_cuda_set_device(int) {}

const ggml_cuda_device_info & ggml_cuda_info() {
    static ggml_cuda_device_info info;
    info.device_count         = 1;
    info.devices[0].cc        = emulate::device.cc;
    info.devices[0].nsm       = emulate::device.nsm;
    info.devices[0].smpb      = emulate::max_shared_static;
    info.devices[0].smpbo     = emulate::device.smpbo;
    info.devices[0].warp_size = emulate::warp_size;
    return info;
}

// Upstream's MMQ reads the activations of all columns of a tile, of which its buffer need not have more than the first
// half: on a device there is other memory behind it.
struct scratch_pool : guarded_pool {
    static constexpr size_t room = 16 * 1024;

    void * alloc(const size_t size, size_t * actual_size) override {
        return guarded_pool::alloc(size + room, actual_size);
    }
};

std::unique_ptr<ggml_cuda_pool> ggml_backend_cuda_context::new_pool_for_device(int, int) {
    return std::make_unique<scratch_pool>();
}
ggml_backend_cuda_context::~ggml_backend_cuda_context() {}

// ---------------------------------------------------------------------------------------------------------------------

extern "C" void emulate_quantize_mmvq(const int type, const float * x, void * y, const int64_t ne00, const int64_t s01,
                                      const int64_t s02, const int64_t s03, const int64_t ne0, const int64_t ne1,
                                      const int64_t ne2, const int64_t ne3) {
    GGML_ASSERT(
        ggml_cuda_itq_quantize_row_q8_1(x, y, emulate_types[type], ne00, s01, s02, s03, ne0, ne1, ne2, ne3, nullptr));
}

extern "C" void emulate_quantize_mmq(const int type, const float * x, const int32_t * ids, void * y, const int64_t ne00,
                                     const int64_t s01, const int64_t s02, const int64_t s03, const int64_t ne0,
                                     const int64_t ne1, const int64_t ne2, const int64_t ne3) {
    GGML_ASSERT(ggml_cuda_itq_quantize_mmq_q8_1(x, ids, y, emulate_types[type], ne00, s01, s02, s03, ne0, ne1, ne2, ne3,
                                                nullptr));
}

extern "C" void emulate_quantize_scatter_mmq(const int type, const float * x, const int32_t * ids, void * y,
                                             const int64_t ne00, const int64_t stride_token, const int64_t ne0,
                                             const int64_t n_tokens, const int64_t nrows_dst, const int n_expert_used) {
    GGML_ASSERT(ggml_cuda_itq_quantize_scatter_mmq_q8_1(x, ids, y, emulate_types[type], ne00, stride_token, ne0,
                                                        n_tokens, nrows_dst, n_expert_used, nullptr));
}

// One product of tiles: kind 0 int8, A 16 x 32 and B 8 x 32 bytes; 1 F16, A 16 x 16 and B 8 x 16. Added to C, 16 x 8.
template <typename tile_A, typename tile_B, typename tile_C, typename word_t, typename sum_t>
static void tile_product(const word_t * a, const word_t * b, sum_t * c) {
    word_t * tile = emulate::dynamic_shared<word_t>();
    for (int l = threadIdx.x; l < (tile_A::I + tile_B::I) * 8; l += emulate::warp_size) {
        tile[l] = l < tile_A::I * 8 ? a[l] : b[l - tile_A::I * 8];
    }
    __syncwarp();
    tile_A A;
    tile_B B;
    tile_C C;
    load_ldmatrix(A, tile, 8);
    load_ldmatrix(B, tile + tile_A::I * 8, 8);
    for (int l = 0; l < C.ne; ++l) {
        C.x[l] = c[C.get_i(l) * 8 + C.get_j(l)];
    }
    mma(C, A, B);
    for (int l = 0; l < C.ne; ++l) {
        c[C.get_i(l) * 8 + C.get_j(l)] = C.x[l];
    }
}
extern "C" void emulate_tile_product(const int kind, const void * a, const void * b, void * c) {
    using namespace ggml_cuda_mma;
    if (kind == 0) {
        emulate::launch_shared(dim3(1), dim3(32), 24 * 32,
                               tile_product<tile<16, 8, int>, tile<8, 8, int>, tile<16, 8, int>, int, int>,
                               (const int *) a, (const int *) b, (int *) c);
    } else {
        emulate::launch_shared(dim3(1), dim3(32), 24 * 32,
                               tile_product<tile<16, 8, half2>, tile<8, 8, half2>, tile<16, 8, float>, half2, float>,
                               (const half2 *) a, (const half2 *) b, (float *) c);
    }
}

// Damaged headers of GGUF files with our types, through ggml's reader and llama.cpp's loader: refused, or read.
//
// A case is one file: the input is its header, and zeros follow it, as many as its tensors say or a few. A file that
// ends in an assertion of llama.cpp counts as stopped: the program would end there, with nothing damaged.

#include "cases.h"
#include "ggml-cpu.h"
#include "ggml.h"
#include "gguf.h"
#include "llama.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cmath>
#include <new>
#include <stdexcept>
#include <string>
#include <vector>

static Count (&counts)[4] = Counts<4>::all;

//
// memory has an end: what a header asks beyond it is refused as it would be by the system, by an exception
//

static const size_t memory_limit = (size_t) 1 << 30;

void * operator new(size_t size) {
    void * p = size > memory_limit ? nullptr : malloc(size > 0 ? size : 1);
    if (!p) {
        throw std::bad_alloc();
    }
    return p;
}

void operator delete(void * p) noexcept {
    free(p);
}

void operator delete(void * p, size_t) noexcept {
    free(p);
}

struct Stopped : std::runtime_error {
    using std::runtime_error::runtime_error;
};

static void stopped(const char * message) {
    ++counts[3].n;
    throw Stopped(message);
}

// Runs what a program would call outside of every handler.
template <typename F> static void run(const F & call) {
    try {
        call();
    } catch (const Stopped &) {
    } catch (const std::exception &) {
        ++counts[3].n;
    }
}

extern "C" int LLVMFuzzerInitialize(int *, char ***) {
    static const char * const names[4] = { "files", "read", "loaded", "stopped" };
    for (int i = 0; i < 4; ++i) {
        counts[i].name = names[i];
    }
    ggml_log_set([](ggml_log_level, const char *, void *) {}, nullptr);
    llama_log_set([](ggml_log_level, const char *, void *) {}, nullptr);
    ggml_set_abort_callback(stopped);
    llama_backend_init();
    return atexit(report_counts<4>);
}

// Everything that can be asked of a header.
static void look(const gguf_context * file, const ggml_context * data) {
    volatile size_t sum = 0;
    for (int64_t i = 0; i < gguf_get_n_kv(file); ++i) {
        sum                  = sum + strlen(gguf_get_key(file, i));
        const gguf_type type = gguf_get_kv_type(file, i);
        if (type == GGUF_TYPE_STRING) {
            sum = sum + strlen(gguf_get_val_str(file, i));
        } else if (type == GGUF_TYPE_ARRAY) {
            const size_t n = gguf_get_arr_n(file, i);
            for (size_t j = 0; j < n && gguf_get_arr_type(file, i) == GGUF_TYPE_STRING; ++j) {
                sum = sum + strlen(gguf_get_arr_str(file, i, j));
            }
        }
    }
    for (int64_t i = 0; i < gguf_get_n_tensors(file); ++i) {
        const char *    name = gguf_get_tensor_name(file, i);
        const ggml_type type = gguf_get_tensor_type(file, i);
        if (!ggml_type_name(type) || ggml_blck_size(type) <= 0 || gguf_find_tensor(file, name) < 0) {
            wrong("the type of a tensor", "a file", (int) i, type, 0);
        }
        if (type == GGML_TYPE_Q8_1 || type == GGML_TYPE_Q8_K || type == GGML_TYPE_Q8_K_H || type == GGML_TYPE_Q8_N_H) {
            wrong("a type that no file has", "a file", (int) i, type, 0);
        }
        const ggml_tensor * tensor = data ? ggml_get_tensor(const_cast<ggml_context *>(data), name) : nullptr;
        if (tensor && tensor->data && type != GGML_TYPE_I64 && type != GGML_TYPE_F64) {
            sum                 = sum + ggml_validate_row_data(type, tensor->data, ggml_nbytes(tensor));
            const auto * traits = ggml_get_type_traits(type);
            if (traits->to_float && ggml_nelements(tensor) > 0) {
                // the first row and the last
                const int64_t n   = tensor->ne[0];
                const auto    row = exactly<float>((size_t) n);
                traits->to_float(tensor->data, row.get(), n);
                traits->to_float(static_cast<const char *>(tensor->data) +
                                     (size_t) (ggml_nrows(tensor) - 1) * tensor->nb[1],
                                 row.get(), n);
            }
        }
    }
}

static void read(const uint8_t * data, size_t size) {
    gguf_init_params params = { true, nullptr };
    if (gguf_context * file = gguf_init_from_buffer(data, size, params)) {
        ++counts[1].n;
        look(file, nullptr);
        gguf_free(file);
    }
    ggml_context * ctx = nullptr;
    params             = { false, &ctx };
    if (gguf_context * file = gguf_init_from_buffer(data, size, params)) {
        look(file, ctx);
        gguf_free(file);
        ggml_free(ctx);
    }
}

static void load(const uint8_t * data, size_t size, bool vocab_only) {
    const int fd = memfd_create("header", MFD_CLOEXEC);
    if (fd < 0 || write(fd, data, size) != (ssize_t) size || ftruncate(fd, (off_t) size + (1 << 18)) != 0) {
        perror("memfd");
        abort();
    }
    llama_model_params params = llama_model_default_params();
    params.vocab_only         = vocab_only;
    params.no_alloc           = !vocab_only;
    params.load_mode          = LLAMA_LOAD_MODE_NONE;
    params.progress_callback  = [](float, void *) { return true; };
    llama_model * model       = nullptr;
    run([&] { model = llama_model_load_from_file(("/proc/self/fd/" + std::to_string(fd)).c_str(), params); });
    if (model) {
        ++counts[2].n;
        const llama_vocab * vocab = llama_model_get_vocab(model);
        llama_token         tokens[64];
        run([&] {
            llama_tokenize(vocab, "ab a\n", 5, tokens, 64, true, true);
            char piece[64];
            for (llama_token i = 0; i < llama_vocab_n_tokens(vocab) && i < 64; ++i) {
                llama_token_to_piece(vocab, i, piece, sizeof(piece), 0, true);
            }
        });
        llama_model_free(model);
    }
    close(fd);
}

extern "C" int LLVMFuzzerTestOneInput(const uint8_t * data, size_t size) {
    ++counts[0].n;
    // what a file holds ends where the memory ends
    const auto file = exactly<uint8_t>(size + 4096);
    memcpy(file.get(), data, size);
    memset(file.get() + size, 0, 4096);
    run([&] { read(data, size); });
    run([&] { read(file.get(), size + 4096); });
    load(data, size, true);
    load(data, size, false);
    return 0;
}

//
// damage
//

// Where the numbers of a header are: counts, lengths, types, dimensions, offsets, values.
struct Fields {
    struct Field {
        size_t at;
        size_t size;
    };

    struct Tensor {
        std::vector<uint64_t> shape;
        size_t                type;
        size_t                offset;
    };

    std::vector<Field>  all;
    std::vector<Tensor> infos;
    const uint8_t *     data;
    size_t              size;
    size_t              at = 0;

    Fields(const uint8_t * data, size_t size) : data(data), size(size) {
        number(4);  // magic
        number(4);
        uint64_t tensors = number(8);
        uint64_t values  = number(8);
        for (; values > 0 && at < size; --values) {
            skip(number(8));
            value(number(4), 2);
        }
        for (; tensors > 0 && at < size; --tensors) {
            skip(number(8));
            Tensor   info;
            uint64_t dimensions = number(4);
            for (; dimensions > 0 && at < size; --dimensions) {
                info.shape.push_back(number(8));
            }
            info.type = at;
            number(4);
            info.offset = at;
            number(8);
            if (at < size) {
                infos.push_back(info);
            }
        }
    }

    uint64_t number(size_t n) {
        uint64_t value = 0;
        if (n > size - at) {
            at = size;
            return 0;
        }
        memcpy(&value, data + at, n);
        all.push_back({ at, n });
        at += n;
        return value;
    }

    void skip(uint64_t n) {
        // text is damaged byte by byte
        for (uint64_t i = 0; i < n && i < 2 && at + i < size; ++i) {
            all.push_back({ at + i, 1 });
        }
        at = n > size - at ? size : at + n;
    }

    // Let every tensor begin where the one before ends, so that the reader sees past the first that changed.
    void mend(uint8_t * out) const {
        uint64_t offset = 0;
        for (const Tensor & info : infos) {
            memcpy(out + info.offset, &offset, sizeof(offset));
            uint32_t type;
            memcpy(&type, out + info.type, sizeof(type));
            const bool known = type < GGML_TYPE_COUNT && ggml_blck_size((ggml_type) type) > 0;
            uint64_t   size  = known ? ggml_type_size((ggml_type) type) : 1;
            for (uint64_t n : info.shape) {
                size *= n;
            }
            offset += (size / (known ? (uint64_t) ggml_blck_size((ggml_type) type) : 1) + 31) / 32 * 32;
        }
    }

    void value(uint64_t type, int depth) {
        static const uint8_t sizes[] = { 1, 1, 2, 2, 4, 4, 4, 1, 0, 0, 8, 8, 8 };
        if (type == GGUF_TYPE_STRING) {
            skip(number(8));
        } else if (type == GGUF_TYPE_ARRAY && depth > 0) {
            const uint64_t of = number(4);
            uint64_t       n  = number(8);
            for (; n > 0 && at < size; --n) {
                value(of, depth - 1);
            }
        } else if (type < sizeof(sizes)) {
            number(sizes[type]);
        } else {
            at = size;
        }
    }
};

extern "C" size_t LLVMFuzzerMutate(uint8_t * data, size_t size, size_t max_size);

extern "C" size_t LLVMFuzzerCustomMutator(uint8_t * data, size_t size, size_t max_size, unsigned seed) {
    static const uint64_t odd[] = {
        0,
        1,
        2,
        3,
        4,
        7,
        8,
        9,
        15,
        31,
        32,
        33,
        43,
        64,
        127,
        128,
        255,
        256,
        257,
        499,
        500,
        506,
        509,
        510,
        511,
        512,
        513,
        514,
        515,
        516,
        0x7fff,
        0x8000,
        0xffff,
        0x10000,
        0x7fffffff,
        0x80000000,
        1 << 20,
        1 << 24,
        0xffffffff,
        0x100000000,
        0x3f800000,
        0x7f800000,
        0x7fc00000,
        (uint64_t) 1 << 40,
        ((uint64_t) 1 << 63) - 1,
        (uint64_t) 1 << 63,
        ~(uint64_t) 0,
        ~(uint64_t) 0 - 31,
        (uint64_t) 1 << 56,
    };
    uint8_t bytes[4];
    memcpy(bytes, &seed, sizeof(bytes));
    Input in(bytes, sizeof(bytes));
    if (in.random() % 4 == 0) {
        return LLVMFuzzerMutate(data, size, max_size);
    }
    const Fields fields(data, size);
    for (uint32_t n = 1 + in.random() % 3; n > 0 && !fields.all.empty(); --n) {
        const Fields::Field field = fields.all[in.random() % fields.all.size()];
        uint64_t            value = 0;
        memcpy(&value, data + field.at, field.size);
        switch (in.random() % 4) {
            case 0:
                value = odd[in.random() % (sizeof(odd) / sizeof(odd[0]))];
                break;
            case 1:
                value += in.random() % 7 - 3;
                break;
            case 2:
                value ^= (uint64_t) 1 << in.random() % (8 * (uint32_t) field.size);
                break;
            default:
                {  // that of another field, such as a type for a type
                    const Fields::Field other = fields.all[in.random() % fields.all.size()];
                    memcpy(&value, data + other.at, other.size < field.size ? other.size : field.size);
                }
        }
        memcpy(data + field.at, &value, field.size);
    }
    if (!fields.infos.empty() && in.random() % 4 == 0) {
        const uint32_t type = in.random() % 2 ? in.random() % 48 : 498 + in.random() % 10;
        memcpy(data + fields.infos[in.random() % fields.infos.size()].type, &type, sizeof(type));
    }
    if (in.random() % 2) {
        Fields(data, size).mend(data);
    }
    return size;
}

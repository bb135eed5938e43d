"""What other backends answer when they are asked to compute with ITQ3_S, without their SDKs.

The function that answers is taken out of a backend's source as text, compiled with stand-ins for what it calls, and
asked about operations of llama.cpp: upstream's and the one that our patches make of it.
"""

from __future__ import annotations

import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

import llama
from gguf_itq3s import upstream

#: Asks about a product, a product of experts and a look-up of rows, for each of these types of weights.
TYPES = ("F16", "Q4_0", "TQ1_0", "ITQ3_S")
ASK = """
int main(void) {
    const enum ggml_type types[] = { TYPES };
    struct ggml_init_params params = { (size_t) 1 << 24, NULL, true };
    struct ggml_context * ctx = ggml_init(params);
    struct ggml_tensor * x   = ggml_new_tensor_2d(ctx, GGML_TYPE_F32, 512, 4);
    struct ggml_tensor * e   = ggml_new_tensor_3d(ctx, GGML_TYPE_F32, 512, 2, 4);
    struct ggml_tensor * ids = ggml_new_tensor_2d(ctx, GGML_TYPE_I32, 2, 4);
    struct ggml_tensor * row = ggml_new_tensor_1d(ctx, GGML_TYPE_I32, 4);
    for (size_t i = 0; i < sizeof(types) / sizeof(types[0]); ++i) {
        struct ggml_tensor * w = ggml_new_tensor_2d(ctx, types[i], 512, 64);
        struct ggml_tensor * experts = ggml_new_tensor_3d(ctx, types[i], 512, 64, 4);
        printf("%s", ggml_type_name(types[i]));
        printf(" %d", ask(ggml_mul_mat(ctx, w, x)));
        printf(" %d", ask(ggml_mul_mat_id(ctx, experts, e, ids)));
        printf(" %d", ask(ggml_get_rows(ctx, w, row)));
        printf(" %d\\n", ask(ggml_view_2d(ctx, w, 512, 8, w->nb[1], 0)));
    }
    return 0;
}
""".replace("TYPES", ", ".join(f"GGML_TYPE_{name}" for name in TYPES))


@dataclass(frozen=True)
class Backend:
    """Where a backend answers.

    Attributes:
        file: its source, relative to ggml/src.
        functions: to be taken out of it, the one that is asked last. Of a function whose name ends in an ellipsis only
            the cases of the operations that we ask about are kept, for it calls too much.
        stubs: what stands in for what they need.
        ask: the body of ``bool ask(const struct ggml_tensor * op)``.
    """

    file: str
    functions: tuple[str, ...]
    stubs: str
    ask: str


METAL = Backend(
    "ggml-metal/ggml-metal-device.m",
    ("ggml_metal_supports_mul_mat_op", "ggml_metal_device_supports_op"),
    """
    typedef struct {
        struct { bool has_simdgroup_mm, has_simdgroup_reduction, has_bfloat; size_t max_theadgroup_memory_size; } props;
    } * ggml_metal_device_t;
    #define OP_LIGHTNING_INDEXER_DK 128
    #define OP_LIGHTNING_INDEXER_NH 64
    static bool ggml_metal_op_mul_mat_use_fwht(const struct ggml_tensor * op, size_t s) { return !op && s; }
    static bool ggml_metal_op_mul_mat_use_mm(const struct ggml_tensor * op, bool mm) { return op && mm; }
    static bool ggml_metal_op_mul_mat_id_use_mm(const struct ggml_tensor * op, bool mm) { return op && mm; }
    """,
    "static __typeof__(*(ggml_metal_device_t) 0) dev = { { true, true, true, 32768 } };"
    "return ggml_metal_device_supports_op(&dev, op);",
)
SYCL = Backend(
    "ggml-sycl/ggml-sycl.cpp",
    ("do_ggml_backend_sycl_device_supports_op",),
    """
    struct ggml_backend_sycl_device_context { int device; };
    #define WARP_SIZE 32
    #define SYCL_SOLVE_TRI_MAX_N 64
    #define SYCL_SOLVE_TRI_MAX_K 64
    static bool ggml_sycl_flash_attn_ext_supported(int, const ggml_tensor *) { return true; }
    """,
    "ggml_backend_sycl_device_context context = { 0 }; ggml_backend_device dev = {}; dev.context = &context;"
    "return do_ggml_backend_sycl_device_supports_op(&dev, op);",
)
VIRTGPU = Backend(
    "ggml-virtgpu/ggml-backend-device.cpp",
    ("ggml_backend_remoting_device_supports_op",),
    """
    #define USE_ALWAYS_TRUE_SUPPORTS_OP 1
    #define UNUSED GGML_UNUSED
    """,
    "return ggml_backend_remoting_device_supports_op(nullptr, op);",
)
CANN = Backend(
    "ggml-cann/ggml-cann.cpp",
    ("ggml_backend_cann_supports_op",),
    "",
    "return ggml_backend_cann_supports_op(nullptr, op);",
)
ZDNN = Backend(
    "ggml-zdnn/ggml-zdnn.cpp",
    ("ggml_zdnn_supports_op",),
    "struct ggml_backend_zdnn_device_context { size_t max_size; };",
    "const ggml_backend_zdnn_device_context dev = { 32768 }; return ggml_zdnn_supports_op(&dev, op);",
)
ZENDNN = Backend(
    "ggml-zendnn/ggml-zendnn.cpp",
    ("ggml_backend_zendnn_device_supports_op",),
    "static bool ggml_zendnn_adaptive_fallback_enabled() { return false; }",
    "return ggml_backend_zendnn_device_supports_op(nullptr, op);",
)
VULKAN = Backend(
    "ggml-vulkan/ggml-vulkan.cpp",
    ("ggml_backend_vk_device_supports_op...",),
    """
    struct { bool mul_mat_id_s[GGML_TYPE_COUNT], mul_mat_id_m[GGML_TYPE_COUNT], mul_mat_id_l[GGML_TYPE_COUNT]; } all;
    static auto * device = &all;
    static bool ggml_vk_dim01_contiguous(const ggml_tensor *) { return true; }
    static bool ggml_vk_itq_supports(const ggml_tensor *, const ggml_tensor *) { return true; }
    """,
    "memset(&all, 1, sizeof(all)); return cases(op);",
)
WEBGPU = Backend(
    "ggml-webgpu/ggml-webgpu.cpp",
    ("ggml_webgpu_supported_qtype", "ggml_backend_webgpu_device_supports_op..."),
    """
    static bool supports_op;
    #define src0 op->src[0]
    #define src1 op->src[1]
    """,
    "supports_op = false; const bool found = cases(op); return supports_op || found;",
)
OPENCL = Backend(
    "ggml-opencl/ggml-opencl.cpp",
    ("ggml_opencl_supports_op...",),
    """
    enum class ADRENO_GPU_GEN { A7X, A8X };
    struct context { ADRENO_GPU_GEN adreno_gen; } other = { ADRENO_GPU_GEN::A8X };
    static context * backend_ctx = &other;
    static bool use_adreno_kernels(context *, const ggml_tensor *) { return true; }
    """,
    "return cases(op);",
)
CUDA = Backend(
    "ggml-cuda/ggml-cuda.cu",
    ("ggml_backend_cuda_device_supports_op...",),
    """
    #define QK_K 256
    static bool ggml_cuda_op_mul_mat_use_fwht(const ggml_tensor *) { return false; }
    """,
    "return cases(op);",
)
ET = Backend(
    "ggml-et/ggml-et.cpp",
    ("ggml_backend_et_device_supports_op...",),
    WEBGPU.stubs.replace("supports_op", "supported"),
    WEBGPU.ask.replace("supports_op", "supported"),
)
#: Backends that would take what they cannot compute, with the patch that keeps them from it.
PATCHED = {"metal": METAL, "sycl": SYCL, "virtgpu": VIRTGPU}
#: Backends that list the types they know.
LISTING = {
    "cann": CANN, "cuda": CUDA, "et": ET, "opencl": OPENCL, "vulkan": VULKAN, "webgpu": WEBGPU, "zdnn": ZDNN,
    "zendnn": ZENDNN,
}  # fmt: skip


@pytest.fixture(scope="module")
def patched(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The patched source."""
    tree = tmp_path_factory.mktemp("patched") / "llama.cpp"
    script = llama.ROOT / "ggml-patch" / "cmake" / "patched-source.cmake"
    done = subprocess.run(["cmake", f"-DTREE={tree}", "-P", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return tree


def function(text: str, name: str) -> str:
    """The definition of a function that begins and ends in the first column."""
    (found,) = re.findall(rf"^(?:static )?bool {name}\((?:[^;{{]*)\) {{\n.*?^}}\n", text, re.MULTILINE | re.DOTALL)
    return str(found)


def cases(text: str, name: str) -> str:
    """A function with the cases of a function of the same name, of the operations that we ask about."""
    body = function(text, name)
    # What stands before the next label of the same depth: an operation's code, or of several that share it.
    groups = re.findall(
        r"(?:^        case GGML_OP_\w+:.*\n)+(?:(?!^        (?:case GGML_OP_|default:)).*\n)*", body, re.MULTILINE
    )
    asked = [group for group in groups if re.search(r"^        case GGML_OP_(MUL_MAT|GET_ROWS):", group, re.MULTILINE)]
    asked += [group for group in groups if "case GGML_OP_MUL_MAT_ID:" in group and group not in asked]
    assert sum(group.count("case GGML_OP_") for group in asked) == 3, (
        "a label is missing or shares its code with another"
    )
    inside = "".join(asked)
    return (
        f"static bool cases(const ggml_tensor * op) {{\n    switch (op->op) {{\n{inside}"
        "        default: return op->op == GGML_OP_VIEW;\n    }\n    return false;\n}\n"
    )


def answers(backend: Backend, source: Path, patched: Path, folder: Path) -> dict[str, list[bool]]:
    """Type of the weights -> product, product of experts, look-up, view of a weight."""
    text = (source / "ggml" / "src" / backend.file).read_text()
    functions = "\n".join(
        cases(text, name[:-3]) if name.endswith("...") else function(text, name) for name in backend.functions
    )
    plain_c = backend.file.endswith(".m")
    program = folder / ("ask.c" if plain_c else "ask.cpp")
    headers = [
        "ggml.h",
        "ggml-impl.h",
        "ggml-backend-impl.h",
        "stdio.h",
        "stdlib.h",
        "string.h",
        *re.findall(r'"(itq-op\.h)"', text),
        *(["ggml-itq-types.h"] if "itq-vulkan.h" in text else []),
    ]
    includes = "".join(f"#include <{name}>\n" for name in headers)
    ask = f"static bool ask(const struct ggml_tensor * op) {{ {backend.ask} }}\n"
    program.write_text(includes + backend.stubs + functions + ask + ASK)
    ggml = patched / "ggml"
    compiler = ["gcc", "-std=gnu11"] if plain_c else ["g++", "-std=gnu++17"]
    subprocess.run(
        [*compiler, "-w", f"-I{ggml / 'include'}", f"-I{ggml / 'src'}", program, "-o", folder / "ask",
         f"-L{llama.BIN}", f"-Wl,-rpath,{llama.BIN}", "-lggml-base"],
        check=True,
    )  # fmt: skip
    lines = llama.run_program(folder / "ask").stdout.split("\n")[:-1]
    return {line.split()[0]: [word == "1" for word in line.split()[1:]] for line in lines}


@pytest.mark.parametrize("name", PATCHED)
def test_patched_backends_refuse_what_they_cannot_compute(name: str, patched: Path, tmp_path: Path) -> None:
    before = answers(PATCHED[name], upstream.fetch_source(), patched, tmp_path)
    after = answers(PATCHED[name], patched, patched, tmp_path)
    assert list(after) == [name.lower() for name in TYPES]
    # Upstream takes the product of a type that it has no kernel for; the look-up is refused by SYCL alone.
    assert before["itq3_s"][:2] == [True, True]
    assert after["itq3_s"] == [False, False, False, True]
    # Nothing else has another answer.
    del before["itq3_s"], after["itq3_s"]
    assert before == after and before["f16"] == [True, True, True, True]


@pytest.mark.parametrize("name", LISTING)
def test_backends_that_list_their_types_need_no_patch(name: str, patched: Path, tmp_path: Path) -> None:
    found = answers(LISTING[name], upstream.fetch_source(), patched, tmp_path)
    assert found["itq3_s"] == [False, False, False, True]
    assert found["f16"][0] or name == "zendnn", "the question was not understood"


def test_vulkan_takes_the_trellis_types_with_its_patch(patched: Path, tmp_path: Path) -> None:
    before = answers(VULKAN, upstream.fetch_source(), patched, tmp_path)
    after = answers(VULKAN, patched, patched, tmp_path)
    assert before["itq3_s"] == [False, False, False, True]
    assert after["itq3_s"] == [True, True, True, True]
    del before["itq3_s"], after["itq3_s"]
    assert before == after

"""scripts/check/hip.py: what it says without a compiler, and what it finds with one."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from scripts.check import cuda as cuda_check
from scripts.check import hip


@pytest.fixture(scope="module")
def call() -> list[str]:
    try:
        return hip.find_compiler()[0]
    except hip.MissingError as reason:
        pytest.skip(f"{reason}; install {hip.PACKAGES}")


def test_without_a_compiler_it_is_skipped(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(hip, "compilers", list)
    monkeypatch.setattr(sys, "argv", ["hip.py", "--work", str(tmp_path / "work")])
    assert hip.main() == hip.SKIPPED
    assert capsys.readouterr().out == f"skipped: no clang 17 or newer with headers of HIP; install {hip.PACKAGES}\n"
    assert not (tmp_path / "work").exists()


@pytest.mark.slow
@pytest.mark.parametrize("target", [hip.HOST, *hip.ARCHITECTURES])
def test_what_upstream_includes_is_there(call: list[str], target: str, tmp_path: Path) -> None:
    """The headers of upstream's vendors/hip.h, from the machine or from tests/hip."""
    (tmp_path / "a.cu").write_text(
        """
        #include <hip/hip_runtime.h>
        #include <hipblas/hipblas.h>
        #include <hip/hip_fp16.h>
        #include <hip/hip_bf16.h>
        __global__ void kernel(__hip_bfloat16 * y, const float * x) { *y = __float2bfloat16(*x); }
        hipblasStatus_t create(hipblasHandle_t * handle) { return hipblasCreate(handle); }
        """
    )
    hip.compile_file(call, tmp_path, "a.cu", target, code=True)


@pytest.mark.slow
def test_a_device_function_at_class_scope_is_found(call: list[str], tmp_path: Path) -> None:
    """nvcc takes it; clang refuses it for the host, and only where the class is used."""
    (tmp_path / "a.cu").write_text(
        """
        #include <hip/hip_runtime.h>
        static constexpr __device__ int rows(int n) { return 2 * n; }
        template <int n> struct tile { static constexpr int I = rows(n); };
        template <int n> __global__ void kernel(int * x) { *x = tile<n>::I; }
        template __global__ void kernel<3>(int *);
        """
    )
    with pytest.raises(cuda_check.CheckError, match=r"a\.cu does not compile for host:\n.*__device__ function 'rows'"):
        hip.compile_file(call, tmp_path, "a.cu", hip.HOST, code=False)


@pytest.mark.slow
def test_an_unknown_name_in_code_for_the_device_is_found(call: list[str], tmp_path: Path) -> None:
    (tmp_path / "a.cu").write_text(
        "#include <hip/hip_runtime.h>\n__device__ int f(int x) { return __dp4a(x, x, x); }\n"
    )
    with pytest.raises(cuda_check.CheckError, match="__dp4a"):
        hip.compile_file(call, tmp_path, "a.cu", hip.ARCHITECTURES[0], code=True)


def test_a_file_is_compiled_again_when_what_it_includes_has_changed(tmp_path: Path) -> None:
    files = {
        "ggml/src/ggml-cuda/a.cu": '#include "a.cuh"\n',
        "ggml/src/ggml-cuda/b.cu": '#  include "ggml-cuda/b.cuh"\n#include <a.cuh>\n',
        "ggml/src/ggml-cuda/a.cuh": '#if 0\n#include "../c.h"\n#endif\n#include "absent.h"\n',
        "ggml/src/ggml-cuda/b.cuh": '#include "ggml.h"\n#include "b.cuh"\n',
        "ggml/src/c.h": "",
        "ggml/include/ggml.h": "",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)

    def keys() -> list[str]:
        return [cuda_check.source_key(tmp_path, name, ["-O3"], "13.0") for name in ("a.cu", "b.cu")]

    reached = {"a.cu": 0, "a.cuh": 0, "c.h": 0, "b.cu": 1, "b.cuh": 1, "ggml.h": 1}
    for name in files:
        before = keys()
        with (tmp_path / name).open("a") as file:
            file.write("// another line\n")
        changed = [old != new for old, new in zip(before, keys(), strict=True)]
        assert changed == [n == reached[Path(name).name] for n in range(2)], name
    assert cuda_check.source_key(tmp_path, "a.cu", ["-O2"], "13.0") != keys()[0]

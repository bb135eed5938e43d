"""Every SIMD path against the portable C: one compilation of the kernels per variant that this processor can run."""

from __future__ import annotations

import os
import platform
import subprocess
from pathlib import Path

import pytest

import ggml_library
import llama
import sanitizers
from gguf_itq3s.codec.family import FAMILY
from scripts.check import simd_program
from selection import some

AVX2 = ["-mavx2", "-mfma", "-mf16c"]
AVX512 = [*AVX2, "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq"]

# name: compiler flags, and the features of /proc/cpuinfo that the code needs
VARIANTS = {
    "portable": ([], []),
    "avx2": (AVX2, ["avx2", "fma", "f16c"]),
    "avx2-without-fma": (["-mavx2"], ["avx2"]),
    "avx-vnni": ([*AVX2, "-mavxvnni"], ["avx2", "fma", "f16c", "avx_vnni"]),
    "avx512": (AVX512, ["fma", "f16c", "avx512bw", "avx512vl", "avx512dq"]),
    "avx512-vnni": ([*AVX512, "-mavx512vnni"], ["fma", "f16c", "avx512bw", "avx512vl", "avx512dq", "avx512_vnni"]),
    "avx512-vbmi": ([*AVX512, "-mavx512vbmi"], ["fma", "f16c", "avx512bw", "avx512vl", "avx512dq", "avx512vbmi"]),
    "native": (["-march=native"], []),
}

pytestmark = pytest.mark.skipif(
    platform.machine() not in ("x86_64", "AMD64"), reason="the variants are those of x86; make test-arm has NEON"
)


def features() -> set[str]:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((set(line.split(":", 1)[1].split()) for line in lines if line.startswith("flags")), set())


def run(folder: Path, flags: list[str]) -> str:
    program = simd_program.compile_program(folder, os.environ.get("CC", "cc"), "x86", flags)
    vectors = simd_program.write_vectors(folder)
    done = subprocess.run([program, *vectors], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("variant", some(VARIANTS, lambda variant: variant in ("avx2", "native")))
def test_variant(variant: str, tmp_path: Path) -> None:
    flags, needs = VARIANTS[variant]
    missing = set(needs) - features()
    if missing:
        pytest.skip(f"this processor has no {', '.join(sorted(missing))}")
    text = run(tmp_path, flags)
    assert text.splitlines()[-1] == "0 failed" and text.count("reference blocks") == len(FAMILY)


@pytest.mark.long
@pytest.mark.parametrize("variant", ["avx2", "native"])
def test_variant_under_the_sanitizers(variant: str, tmp_path: Path) -> None:
    flags, needs = VARIANTS[variant]
    if set(needs) - features():
        pytest.skip("this processor cannot run it")
    avx2 = set(VARIANTS["avx2"][1])
    if variant == "native" and features() & {*avx2, "avx_vnni", "avx512bw"} == avx2:
        pytest.skip("to this processor it is another AVX2")
    sanitizers.require(os.environ.get("CC", "cc"), tmp_path)
    assert run(tmp_path, [*flags, *sanitizers.FLAGS]).splitlines()[-1] == "0 failed"


def test_products(tmp_path: Path) -> None:
    """mul_mat and mul_mat_id of the built library: vec_dot's result, and the same bits at any number of columns."""
    program = tmp_path / "test-mul-mat"
    subprocess.run(
        [
            os.environ.get("CC", "cc"), "-std=gnu11", "-O1", "-Wall", "-Wextra", "-Werror",
            f"-I{ggml_library.headers()}", llama.ROOT / "tests" / "c" / "test-mul-mat.c", "-o", program,
            "-L", llama.BIN, "-lggml-cpu", "-lggml-base", f"-Wl,-rpath,{llama.BIN}", "-lm",
        ],
        check=True,
    )  # fmt: skip
    done = subprocess.run([program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr

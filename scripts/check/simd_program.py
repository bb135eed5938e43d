"""Compiling tests/c/test-simd.c for one variant of the kernels."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import numpy as np

from gguf_itq3s import upstream

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ROOT / "ggml-patch" / "src"
VECTORS = ROOT / "tests" / "data" / "itq3_s_decode.npz"


def compile_program(folder: Path, compiler: str, arch: str, flags: list[str]) -> Path:
    """test-simd with the kernels of ``arch`` ("x86" or "arm"), compiled into ``folder`` with ``flags``.

    Raises:
        RuntimeError: the compiler refused; its words are the message.
    """
    ggml = upstream.fetch_source() / "ggml"
    include = folder / "include"
    include.mkdir(parents=True, exist_ok=True)
    # as in the patched tree: ggml-cpu/itq3s
    shutil.copytree(SOURCES / "cpu", include / "itq3s", dirs_exist_ok=True)
    program = folder / "test-simd"
    command = [
        compiler, "-std=gnu11", "-O2", "-g", "-Wall", "-Wextra", "-Werror", "-D_GNU_SOURCE",
        # GCC 12 warns about its own intrinsics
        "-Wno-uninitialized", "-Wno-maybe-uninitialized",
        "-ffunction-sections", "-Wl,--gc-sections", *flags, f"-I{include}", f"-I{SOURCES / 'format'}",
        *(part for path in ("include", "src", "src/ggml-cpu") for part in ("-isystem", str(ggml / path))),
        str(ROOT / "tests" / "c" / "test-simd.c"), *map(str, sorted((SOURCES / "cpu").glob("*.c"))),
        *map(str, sorted((SOURCES / "cpu" / "arch" / arch).glob("*.c"))), str(SOURCES / "format" / "itq3s-decode.c"),
        str(ggml / "src" / "ggml-cpu" / "quants.c"), "-o", str(program), "-lm",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}\n{done.stderr[-4000:]}")
    return program


def write_vectors(path: Path) -> Path:
    """The reference blocks and their rotated values as test-simd reads them."""
    vectors = np.load(VECTORS)
    path.write_bytes(
        b"".join(b.tobytes() + r.tobytes() for b, r in zip(vectors["blocks"], vectors["rotated"], strict=True))
    )
    return path

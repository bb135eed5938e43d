"""Compiling tests/c/test-simd.c for one variant of the kernels."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import numpy as np

from gguf_itq3s import upstream
from gguf_itq3s.codec.family import FAMILY

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ROOT / "ggml-patch" / "src"
DATA = ROOT / "tests" / "data"


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
        *map(str, sorted((SOURCES / "cpu" / "arch" / arch).glob("*.c"))), str(SOURCES / "format" / "itq-decode.c"),
        str(ggml / "src" / "ggml-cpu" / "quants.c"), "-o", str(program), "-lm",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}\n{done.stderr[-4000:]}")
    return program


def write_vectors(folder: Path) -> list[Path]:
    """The reference blocks of every trellis type and their rotated values, as test-simd reads them."""
    paths = []
    for row in FAMILY.values():
        vectors = np.load(DATA / f"{row.identifier}_decode.npz")
        records = zip(vectors["blocks"], vectors["rotated"], strict=True)
        paths.append(folder / f"{row.identifier}.bin")
        paths[-1].write_bytes(b"".join(block.tobytes() + rotated.tobytes() for block, rotated in records))
    return paths

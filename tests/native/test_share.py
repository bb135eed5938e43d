"""Activations that products share on the CUDA backend: what the header decides, in graphs that the CPU runs."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

import ggml_library
import llama
from gguf_itq3s import upstream

HEADER = llama.ROOT / "ggml-patch" / "src" / "cuda" / "itq-share.h"

#: Mistakes that the program has to find.
FAULTS = {
    "writes between the products are not seen": ("!is_written(graph, src1, use)", "true"),
    "a layout is as good as another": (" && holder_layout == layout", ""),
    "whatever lies there is taken": ("return there;", "return there || holder_layout == layout;"),
}


def run(folder: Path, text: str) -> subprocess.CompletedProcess[str]:
    (folder / HEADER.name).write_text(text)
    program = folder / "test-share"
    # ggml's own headers have functions that nobody here uses.
    subprocess.run(
        [
            os.environ.get("CXX", "c++"), "-std=c++17", "-O1", "-Wall", "-Wextra", "-Werror", f"-I{folder}",
            "-isystem", ggml_library.headers(), "-isystem", upstream.fetch_source() / "ggml" / "src",
            llama.ROOT / "tests" / "c" / "test-share.cpp", "-o", program, "-L", llama.BIN, "-lggml-cpu", "-lggml-base",
            f"-Wl,-rpath,{llama.BIN}", "-Wl,--allow-shlib-undefined",
        ],
        check=True,
    )  # fmt: skip
    return subprocess.run([program], capture_output=True, text=True, check=False)


def test_shared_activations_are_those_of_the_product(tmp_path: Path) -> None:
    done = run(tmp_path, HEADER.read_text())
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_found(fault: str, tmp_path: Path) -> None:
    right, wrong = FAULTS[fault]
    text = HEADER.read_text()
    assert right in text
    assert run(tmp_path, text.replace(right, wrong)).returncode == 1

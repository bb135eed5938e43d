"""Files of this project in a llama.cpp without the patch, built from the same source."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

import llama
from gguf_itq3s.cli import convert_main

SIMPLE = llama.BIN.parent / "stock" / "bin" / "llama-simple"


@pytest.fixture(scope="module", autouse=True)
def stock() -> None:
    """Build it, or take it from the cache: minutes the first time on a machine."""
    done = subprocess.run(
        ["cmake", "--build", llama.BIN.parent / "cmake", "--target", "stock"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]


def convert(out: Path, kind: str) -> Path:
    assert not convert_main([str(llama.MODEL), str(out), "--outtype", kind])
    return out


def test_stock_llama_cpp_refuses_itq3_s(tmp_path: Path) -> None:
    model = convert(tmp_path / "itq3_s.gguf", "itq3_s")
    done = llama.run_program(SIMPLE, "-m", model, "-n", "4", "The old house", check=False)
    assert done.returncode == 1, "refused, neither run nor crashed"
    assert "has invalid ggml type 500" in done.stderr


def test_stock_llama_cpp_reads_tq2_0(tmp_path: Path) -> None:
    model = convert(tmp_path / "tq2_0.gguf", "tq2_0")
    done = llama.run_program(SIMPLE, "-m", model, "-n", "4", "The old house")
    assert "The old house" in done.stdout and len(done.stdout.split()) > 4


@pytest.mark.parametrize("kind", ["q4_k_m", "iq4_xs", "q2_k"])
def test_stock_llama_cpp_reads_its_own_types_rounded_with_statistics(
    kind: str, calibrated: Callable[[str], tuple[Path, Path]], tmp_path: Path
) -> None:
    model, statistics = calibrated("llama")
    out = tmp_path / "out.gguf"
    assert not convert_main([str(model), str(out), "--outtype", kind, "--calibration", str(statistics)])
    done = llama.run_program(SIMPLE, "-m", out, "-n", "4", "The old house")
    assert "The old house" in done.stdout

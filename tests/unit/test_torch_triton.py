"""The Triton kernels: in Triton's interpreter against the numpy codec, and through Triton's compiler for three GPUs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import triton_shapes
from packed import TYPES

SUPPORT = Path(__file__).resolve().parents[1] / "support"
NAMES = [qtype.name for qtype in TYPES]
#: Of |x| |w|, from the exact product: what the layers promise. Half precision rounds inputs once they are rotated.
FLOAT32 = 1e-6
HALVES = {"float16": 2.0**-10, "bfloat16": 2.0**-7}

pytestmark = pytest.mark.slow

pytest.importorskip("triton", reason="Triton is not to be had on this platform")


def program(name: str, folder: Path) -> Any:
    """What a program of tests/support prints; a process of its own, because Triton reads its environment once."""
    environment = {**os.environ, "TRITON_CACHE_DIR": str(folder), "PYTHONPATH": str(SUPPORT)}
    command = [sys.executable, "-W", "ignore", str(SUPPORT / name)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The figures of ``triton_cases.py``: the largest differences from the numpy codec's product, of |x| |w|."""
    return program("triton_cases.py", tmp_path_factory.mktemp("triton"))


@pytest.mark.parametrize("case", triton_shapes.FORWARD, ids=triton_shapes.name)
def test_product(found: Any, case: triton_shapes.Case) -> None:
    assert found["forward"][triton_shapes.name(case)] <= FLOAT32


@pytest.mark.parametrize("rows", [1, 17])
@pytest.mark.parametrize("name", NAMES)
def test_gradient(found: Any, name: str, rows: int) -> None:
    assert found["backward"][f"{name}/{rows}"] <= FLOAT32


@pytest.mark.parametrize("dtype", list(HALVES))
@pytest.mark.parametrize("name", NAMES)
def test_half_precision(found: Any, name: str, dtype: str) -> None:
    """The gradient's inputs are scaled before they are rounded, and rounded once more when they are rotated back."""
    product, gradient = found["halves"][f"{name}/torch.{dtype}"]
    assert product <= HALVES[dtype]
    assert gradient <= 2 * HALVES[dtype]


@pytest.mark.parametrize("name", NAMES)
def test_experts(found: Any, name: str) -> None:
    """Each expert's products are those of a layer; the paths differ by rounding."""
    assert max(found["experts"][name]) < 1e-6


def test_kernels_compile_for_gpus(tmp_path: Path) -> None:
    """To machine code for two of NVIDIA's and one of AMD's, with tensor cores in use; nothing runs."""
    compiled = program("triton_compile.py", tmp_path)
    assert len(compiled) == 3 * (2 + 1 + 2 * len(TYPES))  # the rotations, the sum
    for name, kernel in compiled.items():
        assert kernel["bytes"] > 0, name
        if "product" in name or "transposed" in name:
            assert kernel["matrix instructions"] > 0, name

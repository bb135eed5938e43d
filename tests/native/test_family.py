"""The sources of the format with a registry of other types: wider tables and shorter blocks than any type there is."""

from __future__ import annotations

import ctypes
import os
import subprocess

import numpy as np
import pytest

import ggml_library
import llama
from gguf_itq3s import upstream
from gguf_itq3s.codec.blocks import decode_blocks, quantize
from gguf_itq3s.codec.family import FAMILY
from gguf_itq3s.codec.formats import EFFORTS, Format
from gguf_itq3s.rounding import ldlq
from gguf_itq3s.rounding.hessian import Factor
from other_formats import FOUR_BITS, SHORT

SOURCES = llama.ROOT / "ggml-patch" / "src" / "format"
#: The types of tests/c/private-family.h.
TYPES = {"itq4_x": FOUR_BITS, "itq3_x": SHORT[0], "itq2_x": SHORT[1]}
F32P = ctypes.POINTER(ctypes.c_float)


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    path = tmp_path_factory.mktemp("family") / "libfamily.so"
    command = [
        os.environ.get("CC", "cc"), "-std=gnu11", "-O2", "-Wall", "-Wextra", "-Werror", "-ffp-contract=off",
        "-Wno-psabi", "-shared", "-fPIC", f"-I{SOURCES}", f"-I{ggml_library.headers()}",
        "-isystem", upstream.fetch_source() / "ggml" / "src",
        "-include", llama.ROOT / "tests" / "c" / "private-family.h",
        *(SOURCES / f"{name}.c" for name in ("itq-decode", "itq-quantize", "itq-ldlq", "ldlq-avx2", "ldlq-avx512")),
        "-o", path, "-L", llama.BIN, "-lggml-base", f"-Wl,-rpath,{llama.BIN}", "-lm",
    ]  # fmt: skip
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return ctypes.CDLL(str(path))


def floats(array: np.ndarray) -> ctypes._Pointer[ctypes.c_float]:
    return array.ctypes.data_as(F32P)


@pytest.mark.parametrize("name", TYPES)
def test_bytes_and_weights_are_those_of_numpy(library: ctypes.CDLL, name: str) -> None:
    fmt: Format = TYPES[name]
    rows = np.random.default_rng(1).standard_normal((9, 1024)).astype(np.float32)
    rows[3] = 0
    encode, decode = library[f"quantize_{name}_effort"], library[f"dequantize_row_{name}"]
    encode.argtypes = [F32P, ctypes.c_void_p, *[ctypes.c_int64] * 2, *[ctypes.c_int] * 2]
    encode.restype = ctypes.c_size_t
    decode.argtypes, decode.restype = [ctypes.c_void_p, F32P, ctypes.c_int64], None
    for number, effort in enumerate(EFFORTS):
        expected = quantize(rows, fmt, effort=effort)
        got = np.empty_like(expected)
        assert encode(floats(rows), got.ctypes.data, *rows.shape, 0, number) == got.nbytes
        np.testing.assert_array_equal(got, expected)
    weights = np.empty_like(rows)
    decode(got.ctypes.data, floats(weights), rows.size)
    np.testing.assert_array_equal(weights.reshape(-1, fmt.block), decode_blocks(got.reshape(-1, fmt.block_bytes), fmt))


@pytest.mark.parametrize("name", TYPES)
def test_calibrated_bytes_are_those_of_numpy(library: ctypes.CDLL, name: str) -> None:
    fmt: Format = TYPES[name]
    rng = np.random.default_rng(2)
    n = 512
    rows = rng.standard_normal((5, n)).astype(np.float32)
    upper = np.triu(rng.standard_normal((n, n)) * 0.05, 1).astype(np.float32) + np.eye(n, dtype=np.float32)
    weight = rng.uniform(0.5, 2, n).astype(np.float32)
    encode = library[f"quantize_{name}_ldlq_flat"]
    encode.argtypes = [F32P, ctypes.c_void_p, *[ctypes.c_int64] * 2, F32P, F32P, *[ctypes.c_int] * 4]
    encode.restype = ctypes.c_size_t
    expected = ldlq._quantize_in_numpy(rows, Factor(upper, weight), ldlq.Search(8, 16), fmt)
    got = np.empty_like(expected)
    assert encode(floats(rows), got.ctypes.data, *rows.shape, floats(upper), floats(weight), 1, 8, 16, 1) == got.nbytes
    np.testing.assert_array_equal(got, expected)


def test_types_there_are_fit() -> None:
    """Three bits of a symbol and blocks of 64 are the widest and the shortest; every type is within."""
    assert all(row.format.symbol_bits <= 3 and row.format.block in (64, 256) for row in FAMILY.values())

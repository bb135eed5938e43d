"""The built ggml libraries through ctypes, as far as the tests of the C code need them."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

import llama
from gguf_itq3s.codec.native import library_name, library_path

ITQ3_S = 510
Q8_K_H = 511
Q8_N_H = 515
Q3_K = 11
Q8_K = 15


class TypeTraits(ctypes.Structure):
    """``struct ggml_type_traits`` of ggml.h."""

    _fields_ = [
        ("type_name", ctypes.c_char_p),
        ("blck_size", ctypes.c_int64),
        ("blck_size_interleave", ctypes.c_int64),
        ("type_size", ctypes.c_size_t),
        ("is_quantized", ctypes.c_bool),
        ("to_float", ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64)),
        ("from_float_ref", ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64)),
    ]


class CpuTraits(ctypes.Structure):
    """``struct ggml_type_traits_cpu`` of ggml-cpu.h."""

    _fields_ = [
        ("from_float", ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64)),
        (
            "vec_dot",
            ctypes.CFUNCTYPE(
                None, ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p, ctypes.c_size_t,
                ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int,
            ),
        ),
        ("vec_dot_type", ctypes.c_int),
        ("nrows", ctypes.c_int64),
    ]  # fmt: skip


class GgufInitParams(ctypes.Structure):
    """``struct gguf_init_params`` of gguf.h."""

    _fields_ = [("no_alloc", ctypes.c_bool), ("ctx", ctypes.c_void_p)]


@lru_cache(maxsize=1)
def base() -> Any:
    """libggml-base."""
    path = library_path()
    assert path is not None, "make build first"
    library = ctypes.CDLL(str(path))
    library.ggml_get_type_traits.restype = ctypes.POINTER(TypeTraits)
    library.ggml_row_size.restype = ctypes.c_size_t
    library.ggml_row_size.argtypes = [ctypes.c_int, ctypes.c_int64]
    library.ggml_validate_row_data.restype = ctypes.c_bool
    library.ggml_validate_row_data.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t]
    library.ggml_quantize_chunk.restype = ctypes.c_size_t
    library.ggml_quantize_chunk.argtypes = [
        ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p,
    ]  # fmt: skip
    library.gguf_init_from_file.restype = ctypes.c_void_p
    library.gguf_init_from_file.argtypes = [ctypes.c_char_p, GgufInitParams]
    library.gguf_free.argtypes = [ctypes.c_void_p]
    return library


@lru_cache(maxsize=1)
def cpu() -> Any:
    """libggml-cpu, initialised."""
    path = library_path()
    assert path is not None, "make build first"
    library = ctypes.CDLL(str(path.with_name(library_name().replace("base", "cpu"))))
    library.ggml_get_type_traits_cpu.restype = ctypes.POINTER(CpuTraits)
    library.ggml_cpu_init()
    return library


def traits(kind: int) -> TypeTraits:
    return base().ggml_get_type_traits(kind).contents


def cpu_traits(kind: int) -> CpuTraits:
    return cpu().ggml_get_type_traits_cpu(kind).contents


def row_bytes(kind: int, n: int) -> int:
    return int(base().ggml_row_size(kind, n))


def dequantize(kind: int, rows: np.ndarray, n: int) -> np.ndarray:
    """Rows of ``n`` weights by the type's to_float: uint8 (m, bytes) -> float32 (m, n)."""
    rows = np.ascontiguousarray(rows)
    out = np.empty((rows.shape[0], n), dtype=np.float32)
    traits(kind).to_float(rows.ctypes.data, out.ctypes.data, out.size)
    return out


def from_float(kind: int, x: np.ndarray) -> np.ndarray:
    """Rows by the CPU backend's from_float: float32 (m, n) -> uint8 (m, bytes)."""
    x = np.ascontiguousarray(x, dtype=np.float32)
    out = np.zeros((x.shape[0], row_bytes(kind, x.shape[1])), dtype=np.uint8)
    function = cpu_traits(kind).from_float
    for row, to in zip(x, out, strict=True):
        function(row.ctypes.data, to.ctypes.data, row.size)
    return out


def quantize_chunk(kind: int, x: np.ndarray) -> np.ndarray:
    """Rows by ggml_quantize_chunk: float32 (m, n) -> uint8 (m, bytes)."""
    x = np.ascontiguousarray(x, dtype=np.float32)
    out = np.zeros((x.shape[0], row_bytes(kind, x.shape[1])), dtype=np.uint8)
    base().ggml_quantize_chunk(kind, x.ctypes.data, out.ctypes.data, 0, x.shape[0], x.shape[1], None)
    return out


def vec_dot(kind: int, weights: np.ndarray, activations: np.ndarray, n: int) -> np.ndarray:
    """Dot products of rows of ``weights`` (type ``kind``) and ``activations`` (its vec_dot_type): float32 (m, k)."""
    function: Callable[..., None] = cpu_traits(kind).vec_dot
    out = np.empty((weights.shape[0], activations.shape[0]), dtype=np.float32)
    for i, w in enumerate(weights):
        for j, a in enumerate(activations):
            function(n, out[i, j:].ctypes.data, 0, w.ctypes.data, 0, a.ctypes.data, 0, 1)
    return out


def gguf_opens(path: Path, *, data: bool = False) -> bool:
    """Whether ggml's GGUF reader takes the file; with ``data`` it reads the tensors too."""
    holder = ctypes.c_void_p()
    params = GgufInitParams(not data, ctypes.cast(ctypes.pointer(holder), ctypes.c_void_p) if data else None)
    context = base().gguf_init_from_file(str(path).encode(), params)
    if context:
        base().gguf_free(context)
    return bool(context)


def headers() -> Path:
    """The headers that ``make build`` leaves beside the tools."""
    return llama.BIN.parent / "include"

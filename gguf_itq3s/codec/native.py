"""The C quantizer of the patched ggml, through ctypes: the same bytes as :mod:`gguf_itq3s.codec.blocks`, faster.

``make build`` leaves the libraries in ``build/bin``, ``gguf-itq3s build`` in the cache; ``GGUF_ITQ3S_LIBRARY`` names
another ``libggml-base``.
"""

from __future__ import annotations

import ctypes
import os
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

import gguf
import numpy as np
import numpy.typing as npt

from .. import upstream
from ..upstream import build_command as build_command
from ..upstream import library_name as library_name
from . import blocks
from .blocks import CODECS, EFFORTS, TOO_LARGE, ByteArray, check_rows
from .family import DEFAULT, FAMILY, trellis_type
from .formats import Format, check_effort
from .grids import CodeArray, Grid
from .transform import FloatArray

LIBRARY_VARIABLE: Final = "GGUF_ITQ3S_LIBRARY"

_F32P = ctypes.POINTER(ctypes.c_float)
# Weights a thread takes at a time: long enough to hide the call, short enough to share the work evenly.
_CHUNK_WEIGHTS = 1 << 18
# Rows that the calibrated encoder takes through the feedback matrix together.
_LDLQ_ROWS = 64
# Rows that lie side by side in it at most (ITQ_LANES).
_LANES = 16
#: Variants of the calibrated encoders, the best last.
VARIANTS: Final = ("generic", "avx2", "avx512")


class NativeLibrary:
    """A loaded ``libggml-base`` that knows the trellis types.

    Attributes:
        path: the file it was loaded from.
        variants: those of :data:`VARIANTS` that run on this processor.

    Raises:
        OSError: the file cannot be loaded, or was built without the patch (the message says which).
    """

    def __init__(self, path: Path, variant: str = "") -> None:
        """Load it; ``variant`` takes one of the calibrated encoders that is not the best, to test or measure it."""
        self.path = path
        ending = variant and f"_{variant}"
        library = ctypes.CDLL(str(path))
        try:
            self._plain = {t: library[f"quantize_{row.identifier}_effort"] for t, row in FAMILY.items()}
            self._ldlq = {t: library[f"quantize_{row.identifier}_ldlq_flat{ending}"] for t, row in FAMILY.items()}
            self._chunk = library.ggml_quantize_chunk
            self._row_size = library.ggml_row_size
            self._feed = library[f"grid_ldlq_feed{ending}"]
            self.variants = VARIANTS[: library.quantize_ldlq_variant() + 1]
            self._round = library.grid_ldlq_round
        except AttributeError as error:
            raise OSError(f"{path}: built without this version's patch ({error}); run {build_command()}") from None
        for plain, ldlq in zip(self._plain.values(), self._ldlq.values(), strict=True):
            plain.argtypes = [_F32P, ctypes.c_void_p, *[ctypes.c_int64] * 2, *[ctypes.c_int] * 2]
            ldlq.argtypes = [_F32P, ctypes.c_void_p, *[ctypes.c_int64] * 2, _F32P, _F32P, *[ctypes.c_int] * 4]
            plain.restype = ldlq.restype = ctypes.c_size_t
        self._chunk.argtypes = [ctypes.c_int, _F32P, ctypes.c_void_p, *[ctypes.c_int64] * 3, _F32P]
        self._chunk.restype = ctypes.c_size_t
        self._row_size.argtypes = [ctypes.c_int, ctypes.c_int64]
        self._row_size.restype = ctypes.c_size_t
        self._feed.argtypes = [_F32P, _F32P, *[ctypes.c_int64] * 2, _F32P, ctypes.c_int64]
        self._feed.restype = None
        self._round.argtypes = [
            ctypes.c_void_p, *[_F32P] * 4, ctypes.c_int64, _F32P, ctypes.c_int64, _F32P, _F32P, *[ctypes.c_int] * 3,
            _F32P,
        ]  # fmt: skip
        self._round.restype = None

    def quantize(
        self, array: npt.ArrayLike, *, qtype: gguf.GGMLQuantizationType = DEFAULT.type, effort: str = "default",
        codec: str = "trellis", threads: int = 1,
    ) -> ByteArray:  # fmt: skip
        """As :func:`gguf_itq3s.codec.blocks.quantize`, the same bytes and the same errors, on ``threads`` threads."""
        fmt, entry = trellis_type(qtype).format, self._plain[qtype]
        weights = np.asarray(array, dtype=np.float32)
        check_rows(weights, fmt)
        fmt.check_codec(codec)
        check_effort(effort)
        source = np.ascontiguousarray(weights).reshape(-1, fmt.block)
        out = np.empty((source.shape[0], fmt.block_bytes), dtype=np.uint8)

        def part(start: int, stop: int) -> None:
            entry(
                source[start:stop].ctypes.data_as(_F32P), out[start:stop].ctypes.data, stop - start, fmt.block,
                CODECS.index(codec), EFFORTS.index(effort),
            )  # fmt: skip

        _in_parts(part, source.shape[0], _CHUNK_WEIGHTS // fmt.block, threads)
        if refused(out, fmt):
            raise ValueError(TOO_LARGE)
        return out.reshape(*weights.shape[:-1], weights.shape[-1] // fmt.block * fmt.block_bytes)

    def quantize_calibrated(
        self, weights: FloatArray, feedback: FloatArray, weight: FloatArray, *, qtype: gguf.GGMLQuantizationType,
        segment: int, lookahead: int, effort: str, threads: int = 1,
    ) -> ByteArray:  # fmt: skip
        """The calibrated encoder alone; :func:`gguf_itq3s.rounding.ldlq.quantize` explains and checks the arguments.

        Args:
            weights: float32 (m, n), whole blocks of the type, of b weights.
            feedback: float32 (n, n), or (n / b, b, b): unit upper triangular.
            weight: float32 (n,), positive.

        Returns:
            uint8 (m, bytes of a row); a block that cannot be encoded has a NaN scale.
        """
        fmt, entry = trellis_type(qtype).format, self._ldlq[qtype]
        source, n = np.ascontiguousarray(weights), weights.shape[1]
        feedback, weight = np.ascontiguousarray(feedback), np.ascontiguousarray(weight)
        out = np.empty((source.shape[0], n // fmt.block * fmt.block_bytes), dtype=np.uint8)

        def part(start: int, stop: int) -> None:
            entry(
                source[start:stop].ctypes.data_as(_F32P), out[start:stop].ctypes.data, stop - start, n,
                feedback.ctypes.data_as(_F32P), weight.ctypes.data_as(_F32P), int(feedback.ndim == 2), segment,
                lookahead, EFFORTS.index(effort),
            )  # fmt: skip

        _in_parts(part, source.shape[0], _ldlq_rows(source.shape[0], threads), threads)
        return out

    def quantize_type(
        self, array: npt.ArrayLike, qtype: gguf.GGMLQuantizationType, *, importance: FloatArray | None = None,
        threads: int = 1,
    ) -> ByteArray:  # fmt: skip
        """Quantize rows (..., n) to any type of ggml, with ggml's own quantizer: uint8 (..., bytes of a row).

        ``importance``, float32 (n,), says how much each column counts; None where the type needs none.

        Raises:
            ValueError: the row length does not fit the type.
        """
        if qtype in FAMILY:
            return self.quantize(array, qtype=qtype, threads=threads)
        weights = np.ascontiguousarray(array, dtype=np.float32)
        length = weights.shape[-1]
        block = gguf.GGML_QUANT_SIZES[qtype][0]
        if length % block:
            raise ValueError(f"{qtype.name} rows must be a multiple of {block} long; the shape is {weights.shape}")
        rows = weights.reshape(-1, length)
        out = np.empty((rows.shape[0], self._row_size(qtype, length)), dtype=np.uint8)
        columns = None if importance is None else np.ascontiguousarray(importance, dtype=np.float32)
        if columns is not None and columns.shape != (length,):
            raise ValueError(f"the importance of {columns.size} columns does not match rows of {length}")
        counts = None if columns is None else columns.ctypes.data_as(_F32P)

        def part(start: int, stop: int) -> None:
            self._chunk(
                qtype, rows.ctypes.data_as(_F32P), out.ctypes.data, start * length, stop - start, length, counts
            )  # fmt: skip

        _in_parts(part, rows.shape[0], _CHUNK_WEIGHTS // length, threads)
        return out.reshape(*weights.shape[:-1], out.shape[-1])

    def feed_errors(
        self, target: FloatArray, errors: FloatArray, feedback: FloatArray, start: int, *, threads: int = 1
    ) -> None:
        """Take from a block of targets what the errors of the columns before it feed to it, in place.

        float32, C-contiguous: ``target`` (m, 256), from column ``start``; ``errors`` (m, n), ``feedback`` (n, n).
        """
        n = errors.shape[1]

        def part(first: int, last: int) -> None:
            self._feed(
                target[first:last].ctypes.data_as(_F32P), errors[first:last].ctypes.data_as(_F32P), last - first, n,
                feedback.ctypes.data_as(_F32P), start,
            )  # fmt: skip

        _in_parts(part, len(target), min(_LDLQ_ROWS, -(-len(target) // threads)), threads)

    def round_block(
        self, weights: FloatArray, target: FloatArray, feedback: FloatArray, scale: FloatArray, minimum: FloatArray,
        grid: Grid, *, threads: int = 1,
    ) -> tuple[CodeArray, FloatArray, FloatArray]:  # fmt: skip
        """As :func:`gguf_itq3s.rounding.grid.round_block`; of ``feedback``, rows are contiguous."""
        weights, target, scale, minimum = map(np.ascontiguousarray, (weights, target, scale, minimum))
        codes = np.empty(weights.shape, dtype=np.int8)
        errors, residual = np.empty_like(weights), np.empty_like(weights)
        table = None if grid.table is None else grid.table.ctypes.data_as(_F32P)

        def part(first: int, last: int) -> None:
            self._round(
                codes[first:last].ctypes.data,
                *(array[first:last].ctypes.data_as(_F32P) for array in (errors, residual, weights, target)),
                last - first, feedback.ctypes.data_as(_F32P), feedback.strides[0] // feedback.itemsize,
                *(array[first:last].ctypes.data_as(_F32P) for array in (scale, minimum)),
                grid.group, grid.low, grid.high, table,
            )  # fmt: skip

        _in_parts(part, len(weights), min(_LDLQ_ROWS, -(-len(weights) // threads)), threads)
        return codes, errors, residual


def _ldlq_rows(count: int, threads: int) -> int:
    """Rows that a thread takes at a time: as many as C has side by side, or fewer so that each thread has some."""
    share = -(-count // max(1, threads))
    return min(_LDLQ_ROWS, max(_LANES, -(-share // _LANES) * _LANES))


def _in_parts(part: Callable[[int, int], Any], count: int, step: int, threads: int) -> None:
    """Call ``part(start, stop)`` over ``range(count)`` in steps, on ``threads`` threads (ctypes releases the GIL)."""
    step = max(1, step)
    spans = [(start, min(start + step, count)) for start in range(0, count, step)]
    if threads <= 1 or len(spans) <= 1:
        for span in spans:
            part(*span)
        return
    with ThreadPoolExecutor(max_workers=threads) as pool:
        for _ in pool.map(lambda span: part(*span), spans):
            pass


def refused(blocks: ByteArray, fmt: Format) -> bool:
    """Whether C marked a block that it cannot encode by a NaN scale, as ggml_validate_row_data expects."""
    scales = slice(fmt.scale_offset, fmt.scale_offset + 2)
    return bool(np.isnan(blocks.reshape(-1, fmt.block_bytes)[:, scales].copy().view("<f2")).any())


def tools_folder() -> Path:
    """Where the build leaves libraries and tools: ``build/bin`` of the checkout, or a folder in the cache."""
    return upstream.build_folder() / "bin"


def library_path() -> Path | None:
    """The built library: ``GGUF_ITQ3S_LIBRARY``, else the one in :func:`tools_folder`, else None."""
    if named := os.environ.get(LIBRARY_VARIABLE):
        path = Path(named)
    else:
        try:
            path = tools_folder() / library_name()
        except upstream.FetchError:  # an install without the patch: numpy does
            return None
    return path if path.exists() else None


@lru_cache(maxsize=1)
def load() -> NativeLibrary | None:
    """The built library, loaded once; None where there is none.

    Raises:
        OSError: it is there and cannot be used.
    """
    path = library_path()
    return None if path is None else NativeLibrary(path)


@lru_cache(maxsize=1)
def _usable() -> NativeLibrary | None:
    """The library, or None with one warning where it is there and cannot be used."""
    try:
        return load()
    except OSError as error:
        warnings.warn(f"weights are quantized in numpy, the C library cannot be used: {error}", stacklevel=3)
        return None


def quantize(
    array: npt.ArrayLike, *, qtype: gguf.GGMLQuantizationType = DEFAULT.type, effort: str = "default",
    codec: str = "trellis", threads: int | None = None,
) -> ByteArray:  # fmt: skip
    """Quantize rows to a trellis type, in C where it is built and in numpy elsewhere; the bytes are the same.

    Args:
        array: (..., n) weights, n a multiple of the type's block; converted to float32.
        qtype: the type.
        effort: ``fast`` or ``default``.
        codec: ``trellis`` or ``ternary``.
        threads: of the C library; None for one a processor.

    Returns:
        uint8 (..., bytes of a row), C-contiguous, the layout of a GGUF tensor.

    Raises:
        ValueError: rows that are not whole blocks, unknown effort or codec, or a weight that is not finite; the type
            is not trellis-coded.
    """
    fmt = trellis_type(qtype).format
    library = _usable()
    if library is None:
        return blocks.quantize(array, fmt, effort=effort, codec=codec)
    threads = processors() if threads is None else threads
    return library.quantize(array, qtype=qtype, effort=effort, codec=codec, threads=threads)


def processors() -> int:
    """Processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1

"""One tensor from float weights to the bytes of its type, in pieces, with the error measured on the way."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Final

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Type

from ..codec import blocks
from ..codec.blocks import ByteArray
from ..codec.family import FAMILY
from ..codec.grids import GRIDS
from ..codec.native import NativeLibrary
from ..codec.transform import FloatArray
from ..codec.types import NUMPY_TYPES
from . import grid, ldlq
from .hessian import Factor

# Weights encoded at a time: 16 MiB of float32, enough for every thread to have work.
_PIECE: Final = 1 << 22
# Weights of one thread at a time in the numpy codec.
_NUMPY_PART: Final = 1 << 18
# Weights of a tensor that the error is measured on, spread over its rows.
_ERROR_SAMPLE: Final = 1 << 20

_FLOATS: Final = {Type.F32: np.float32, Type.F16: np.float16}

#: Types that are rounded with the Hessian of the inputs where it is known.
CALIBRATED_TYPES: Final = frozenset({*FAMILY, *GRIDS})


def takes_hessian(qtype: Type, columns: int) -> bool:
    """Whether rows of so many columns are rounded with a Hessian in a type: one of :data:`CALIBRATED_TYPES`, and whole
    blocks."""
    return qtype in CALIBRATED_TYPES and columns % gguf.GGML_QUANT_SIZES[qtype][0] == 0


#: Types that hold a matrix as it is: floats, and codes that are without loss or nothing.
KEPT_TYPES: Final = frozenset({Type.F32, Type.F16, Type.BF16, Type.TQ1_0, Type.TQ2_0})

#: The factor of the Hessian of a matrix of a tensor, by its number in the stack, or None where nothing is known.
FactorOf = Callable[[int], "Factor | None"]


#: Weights whose squares are in memory at a time.
_AT_ONCE: Final = 1 << 20


@dataclass(frozen=True)
class SquaredError:
    """Squared error and squared weights of (a sample of) a tensor."""

    error: float = 0.0
    energy: float = 0.0

    @classmethod
    def of(cls, decoded: FloatArray, weights: FloatArray) -> SquaredError:
        """That of a matrix (m, n), in float64, some rows at a time."""
        step = max(1, _AT_ONCE // weights.shape[-1])
        found = cls()
        for start in range(0, len(weights), step):
            here = weights[start : start + step]
            error = np.square(decoded[start : start + step] - here, dtype=np.float64).sum()
            found += cls(float(error), float(np.square(here, dtype=np.float64).sum()))
        return found

    def __add__(self, other: SquaredError) -> SquaredError:
        return SquaredError(self.error + other.error, self.energy + other.energy)

    @property
    def relative(self) -> float:
        """Relative squared error; 0 for an all-zero tensor."""
        return self.error / self.energy if self.energy else 0.0


@dataclass(frozen=True)
class Piece:
    """Some rows of a tensor, encoded: bytes, uint8 (n,); how many weights, 0 if copied; error of (a sample of) them."""

    data: ByteArray
    weights: int
    error: SquaredError = SquaredError()


@dataclass(frozen=True)
class Encoder:
    """How weights become bytes.

    Attributes:
        effort: of the trellis types, ``fast`` or ``default``, and codec, ``trellis`` or ``ternary``.
        threads: pieces encoded side by side.
        search: of the trellis types with calibration statistics.
        library: the built ggml, for the types gguf-py cannot quantize; None without a build.
        native: use ``library`` for every type (the bytes are the same).
    """

    effort: str = "default"
    codec: str = "trellis"
    threads: int = 1
    search: ldlq.Search = ldlq.Search()  # noqa: RUF009 (frozen)
    library: NativeLibrary | None = field(default=None, repr=False)
    native: bool = True

    @property
    def writable(self) -> frozenset[Type] | None:
        """The types this encoder can write, None for all."""
        return None if self.library is not None else NUMPY_TYPES

    def rows(self, weights: FloatArray, qtype: Type, factor: Factor | None = None) -> ByteArray:
        """Quantize float32 (rows, n) to uint8 (rows, bytes of a row), with ``factor`` if there is one.

        Args:
            factor: of the Hessian of the inputs, rotated in blocks as the type is
                (:func:`gguf_itq3s.codec.family.rotation`), not rotated for those with a fixed grid.

        Raises:
            ValueError: a weight is not finite or too large for the type, or rows are not whole blocks.
        """
        # Libraries write scales beyond F16 as infinite ones, or as zeros, without a word.
        most = float(np.abs(weights).max(initial=0))
        with np.errstate(over="ignore", invalid="ignore"):
            data = self._rows(weights, qtype, factor)
            if most > float(np.finfo(np.float16).max):
                written = float(np.abs(gguf.quants.dequantize(data, qtype)).max())
                if not most / 2 < written < np.inf:  # true for NaN
                    raise ValueError(f"a weight of {most:.2g} is larger than {qtype.name} can hold")
        return data

    def _rows(self, weights: FloatArray, qtype: Type, factor: Factor | None) -> ByteArray:
        library = self.library
        if factor is not None and qtype in GRIDS:
            return grid.quantize(weights, qtype, factor, library=library, native=self.native, threads=self.threads)
        if qtype in FAMILY:
            return self._trellis(weights, qtype, factor)
        if library is not None and (self.native or qtype not in NUMPY_TYPES):
            return library.quantize_type(weights, qtype, threads=self.threads)
        return self._in_parts(weights, lambda w: gguf.quants.quantize(w, qtype))

    def _trellis(self, weights: FloatArray, qtype: Type, factor: Factor | None) -> ByteArray:
        """The same of a trellis type."""
        library, fmt = self.library if self.native else None, FAMILY[qtype].format
        if library is None:
            if factor is not None:
                return self._in_parts(weights, lambda w: ldlq.quantize(w, factor, self.search, qtype=qtype))
            return self._in_parts(weights, lambda w: blocks.quantize(w, fmt, effort=self.effort, codec=self.codec))
        if factor is not None:
            return ldlq.quantize(weights, factor, self.search, qtype=qtype, library=library, threads=self.threads)
        return library.quantize(weights, qtype=qtype, effort=self.effort, codec=self.codec, threads=self.threads)

    def decoded(self, weights: FloatArray, qtype: Type) -> FloatArray:
        """Weights as a file gives them back, float32 (rows, n); in :data:`KEPT_TYPES` as they are."""
        return weights if qtype in KEPT_TYPES else np.concatenate(list(self.decoded_pieces(weights, qtype)))

    def decoded_pieces(self, weights: np.ndarray, qtype: Type) -> Iterator[FloatArray]:
        """As :meth:`decoded`, some rows after the others; not for :data:`KEPT_TYPES`."""
        step = max(1, _PIECE // weights.shape[1])
        for start in range(0, len(weights), step):
            rows = np.asarray(weights[start : start + step], dtype=np.float32)
            yield gguf.quants.dequantize(self.rows(rows, qtype), qtype)

    def _in_parts(self, weights: FloatArray, quantize: Callable[[FloatArray], ByteArray]) -> ByteArray:
        step = max(1, _NUMPY_PART // weights.shape[1])
        parts = [weights[start : start + step] for start in range(0, weights.shape[0], step)]
        if self.threads == 1 or len(parts) == 1:
            return np.concatenate([quantize(part) for part in parts])
        with ThreadPoolExecutor(self.threads) as pool:
            return np.concatenate(list(pool.map(quantize, parts)))

    def encode(
        self, parts: Iterable[np.ndarray], size: int, qtype: Type, factor_of: FactorOf | None = None
    ) -> Iterator[Piece]:
        """Encode a tensor piece by piece.

        Args:
            parts: the tensor's parts in order (:attr:`gguf_itq3s.checkpoint.source.SourceTensor.load`).
            qtype: the type to write; one that is neither float nor quantizable here is copied as it comes.
            factor_of: calibration statistics, as :meth:`rows` takes them.

        Yields:
            The pieces in order; the error is measured on about a million weights of a larger tensor.

        Raises:
            ValueError: a weight is NaN or infinite, or too large for the type; the message is the reason alone.
        """
        share = min(1.0, _ERROR_SAMPLE / max(size, 1))
        for number, matrix in _matrices(parts):
            if matrix.dtype == np.uint8 or matrix.dtype.kind in "iu":
                yield Piece(np.ascontiguousarray(matrix).reshape(-1).view(np.uint8), 0)
                continue
            factor = factor_of(number) if factor_of is not None else None
            step = max(1, _PIECE // matrix.shape[1])
            for start in range(0, matrix.shape[0], step):
                piece = np.ascontiguousarray(matrix[start : start + step], dtype=np.float32)
                _check_finite(piece)
                data = self._piece(piece, qtype, factor)
                yield Piece(data.reshape(-1).view(np.uint8), piece.size, _error(piece, data, qtype, share))

    def _piece(self, piece: FloatArray, qtype: Type, factor: Factor | None) -> np.ndarray:
        if (dtype := _FLOATS.get(qtype)) is None:
            return self.rows(piece, qtype, factor)
        with np.errstate(over="ignore"):
            data = piece.astype(dtype)
        if qtype == Type.F16 and not np.isfinite(data).all():
            raise ValueError("a weight is larger than F16 can hold")
        return data


def _matrices(parts: Iterable[np.ndarray]) -> Iterator[tuple[int, np.ndarray]]:
    """Each part as 2-D arrays of rows with their number in a stack; no copy but for a stack that is not contiguous."""
    number = 0
    for part in parts:
        if part.ndim < 2:
            yield 0, part.reshape(1, -1)
        elif part.ndim == 2:
            yield 0, part
        else:
            for matrix in part.reshape(-1, *part.shape[-2:]):
                yield number, matrix
                number += 1


def _check_finite(piece: FloatArray) -> None:
    finite = np.isfinite(piece)
    if finite.all():
        return
    bad = piece[~finite]
    kind = "NaN" if np.isnan(bad).all() else "infinite" if np.isinf(bad).all() else "NaN or infinite"
    raise ValueError(f"{bad.size} of its weights {'is' if bad.size == 1 else 'are'} {kind}")


def _error(piece: FloatArray, data: np.ndarray, qtype: Type, share: float) -> SquaredError:
    """The error of the first ``share`` of a piece's rows."""
    rows = max(1, round(piece.shape[0] * share))
    weights = piece[:rows]
    decoded = data[:rows].astype(np.float32) if qtype in _FLOATS else gguf.quants.dequantize(data[:rows], qtype)
    return SquaredError.of(decoded, weights)

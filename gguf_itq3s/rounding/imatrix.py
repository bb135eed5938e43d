"""Importance matrices of llama-imatrix as diagonal Hessians.

llama-imatrix writes, for every matrix, the sum of the squares of each input column: the diagonal of the second moment
in the basis that is not rotated. Taken for the whole of it, the rotated Hessian is ``H D H`` in each block
(:func:`gguf_itq3s.rounding.hessian.from_diagonal`), exact and not diagonal.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Final

import gguf
import numpy as np
import numpy.typing as npt

from ..base.errors import UserError
from . import hessian
from .factors import tensor_entry

_SUMS: Final = ".in_sum2"
_COUNTS: Final = ".counts"
_REMEDY: Final = "give a file that llama-imatrix wrote"
# Bytes of the name of a tensor, or of a text file.
_LONGEST_NAME: Final = 4096


@dataclass(frozen=True)
class ImportanceMatrix:
    """Mean squares of the input columns, as :class:`gguf_itq3s.rounding.factors.Statistics`.

    Attributes:
        moments: matrix -> float64 (experts, n), experts 1 for a plain matrix; a row of an expert without data is NaN.
        datasets: names of the texts it was made of.
        chunks: how many chunks of them were run, 0 where the file does not say.
    """

    path: Path
    moments: dict[str, npt.NDArray[np.float64]]
    datasets: tuple[str, ...] = ()
    chunks: int = 0

    def filtered(self, include: Sequence[str], exclude: Sequence[str]) -> ImportanceMatrix:
        """Without the entries that have one of ``exclude`` in their names, or, if it is given, none of ``include``.

        Raises:
            UserError: no entry is left.
        """
        moments = {
            name: rows
            for name, rows in self.moments.items()
            if not any(part in name for part in exclude) and (not include or any(part in name for part in include))
        }
        if not moments:
            what = "has no entry that --include-weights and --exclude-weights leave"
            raise UserError(self.path, what, "change these options")
        return replace(self, moments=moments)

    def known(self, name: str) -> bool:
        return name in self.moments

    def share(self, name: str) -> float:
        rows = self.moments.get(name)
        return 0.0 if rows is None else float(_uneven(rows).mean())

    def key(self, name: str, expert: int | None) -> str:
        return tensor_entry(name, expert)

    def tokens(self, name: str, expert: int | None) -> int | None:
        del name, expert
        return None  # each number is a mean, and few tokens tell it

    def left_out(self, name: str, expert: int | None) -> str | None:
        del name, expert
        return None  # llama-imatrix sees the inputs as they are

    def rotated(
        self, name: str, columns: int, expert: int | None, factor: npt.NDArray[np.floating] | None
    ) -> npt.NDArray[np.float64] | None:
        moments = self.diagonal(name, columns, expert)
        if moments is None:
            return None
        return hessian.from_diagonal(moments if factor is None else moments * np.square(factor))

    def diagonal(self, name: str, columns: int, expert: int | None = None) -> npt.NDArray[np.float64] | None:
        """Mean squares of the inputs of a matrix, float64 (columns,); None where the file has none.

        Raises:
            UserError: the file is of a model with other shapes.
        """
        rows = self.moments.get(name)
        if rows is None:
            return None
        if rows.shape[1] != columns or (expert or 0) >= rows.shape[0]:
            what = f"has {rows.shape[0]} x {rows.shape[1]} values for a matrix of {columns} columns, or a stack of such"
            raise UserError(self.path, what, "take the importance matrix of this model", name)
        number = expert or 0
        return rows[number] if _uneven(rows[number : number + 1])[0] else None


def _uneven(rows: npt.NDArray[np.float64]) -> npt.NDArray[np.bool_]:
    """Which rows tell columns apart: not all zero, not all the same, not without data (NaN)."""
    return np.isfinite(rows).all(axis=1) & (rows.max(axis=1) > rows.min(axis=1))


def read(path: Path, shapes: Mapping[str, tuple[int, ...]] = MappingProxyType({})) -> ImportanceMatrix:
    """Read an importance matrix of llama-imatrix, in its GGUF form or the older one (``.dat``).

    Args:
        shapes: of the model's tensors, rows last. The older form does not tell experts apart, and neither form the
            heads' matrices of multi-head latent attention, which are multiplied together.

    Raises:
        UserError: no such file, another format, or values that are not finite, negative, or all the same.
    """
    if not path.is_file():
        raise UserError(path, "is not there", _REMEDY)
    try:
        with path.open("rb") as file:
            is_gguf = file.read(4) == b"GGUF"
        matrix = _read_gguf(path) if is_gguf else _read_legacy(path)
    except OSError as error:
        raise UserError(path, f"cannot be read: {error.strerror or error}", _REMEDY) from error
    for name, rows in matrix.moments.items():
        if name in shapes:
            matrix.moments[name] = rows = _of_stack(rows, shapes[name])
        if not _uneven(rows).any():
            raise UserError(path, "has the same value for every column, or none", _REMEDY, name)
    if not matrix.moments:
        raise UserError(path, "holds no importance matrix", _REMEDY)
    return matrix


def _of_stack(rows: npt.NDArray[np.float64], shape: tuple[int, ...]) -> npt.NDArray[np.float64]:
    """Values with a row for each matrix of a tensor; in one row, where they are not as many as it has columns."""
    *count, _, columns = shape if len(shape) > 1 else (1, *shape)
    matrices = int(np.prod(count, dtype=np.int64))
    return rows.reshape(matrices, columns) if rows.size == matrices * columns else rows.reshape(1, -1)


def _means(
    path: Path, name: str, sums: npt.NDArray[np.float64], seen: npt.NDArray[np.float64]
) -> npt.NDArray[np.float64]:
    """Sums (experts, n) over counts (experts, 1); NaN where nothing was counted."""
    if not np.isfinite(sums).all() or (sums < 0).any():
        raise UserError(path, "has sums that are not finite, negative or without a count", _REMEDY, name)
    if not np.isfinite(seen).all() or (seen < 0).any():
        raise UserError(path, "has counts that are not finite or negative", _REMEDY, name)
    return np.divide(sums, seen, out=np.full_like(sums, np.nan), where=seen > 0)


def _read_gguf(path: Path) -> ImportanceMatrix:
    try:
        reader = gguf.GGUFReader(path)
        datasets = _contents(reader, "imatrix.datasets")
        chunks = _contents(reader, "imatrix.chunk_count")
    except Exception as error:  # gguf-py checks little of what it reads
        raise UserError(path, f"is not a GGUF file: {error}", _REMEDY) from error
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    moments: dict[str, npt.NDArray[np.float64]] = {}
    for name, tensor in tensors.items():
        if not name.endswith(_SUMS):
            continue
        matrix = name.removesuffix(_SUMS)
        if (counts := tensors.get(matrix + _COUNTS)) is None:
            raise UserError(path, "has sums without counts", _REMEDY, matrix)
        sums = np.atleast_2d(np.asarray(tensor.data, dtype=np.float64))
        seen = np.asarray(counts.data, dtype=np.float64).reshape(-1, 1)
        if sums.shape[0] != seen.size:
            raise UserError(path, "has sums that are not finite, negative or without a count", _REMEDY, matrix)
        moments[matrix] = _means(path, matrix, sums, seen)
    names = tuple(str(name) for name in datasets) if isinstance(datasets, list) else ()
    return ImportanceMatrix(path, moments, names, chunks if isinstance(chunks, int) and 0 < chunks < 1 << 31 else 0)


def _contents(reader: gguf.GGUFReader, key: str) -> object:
    field = reader.get_field(key)
    return None if field is None else field.contents()


def _read_legacy(path: Path) -> ImportanceMatrix:
    """The form before GGUF: for each matrix its name, a number of calls, and means times that number.

    Every number is held against what is left of the file before it is believed.
    """
    left = path.stat().st_size
    damaged = UserError(path, "is not a GGUF file, and not a whole importance matrix of the older form", _REMEDY)
    with path.open("rb") as file:

        def take(size: int, most: int) -> bytes:
            nonlocal left
            if not 0 <= size <= min(left, most):
                raise damaged
            left -= size
            return file.read(size)

        def number() -> int:
            return int.from_bytes(take(4, 4), "little", signed=True)

        moments: dict[str, npt.NDArray[np.float64]] = {}
        entries = number()
        if entries < 1:
            raise damaged
        for _ in range(entries):
            name = take(number(), _LONGEST_NAME).decode(errors="replace")
            calls, values = number(), number()
            if values < 1 or name in moments or not name.isprintable():
                raise damaged
            rows = np.frombuffer(take(4 * values, left), dtype="<f4").astype(np.float64).reshape(1, -1)
            # Without calls, the values are the means.
            moments[name] = _means(path, name, rows, np.full((1, 1), float(calls) if calls else 1.0))
        chunks = number() if left else 0
        dataset = take(number(), _LONGEST_NAME).decode(errors="replace") if left else ""
    return ImportanceMatrix(path, moments, (dataset,) if dataset else (), max(0, chunks))

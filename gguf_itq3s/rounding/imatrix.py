"""Importance matrices of llama-imatrix as diagonal Hessians.

llama-imatrix writes, for every matrix, the sum of the squares of each input column: the diagonal of the second moment
in the basis that is not rotated. Taken for the whole of it, the rotated Hessian is ``H D H`` in each block
(:func:`gguf_itq3s.rounding.hessian.from_diagonal`), exact and not diagonal.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

import gguf
import numpy as np
import numpy.typing as npt

from ..errors import UserError
from . import hessian
from .factors import GainOf, tensor_entry

_SUMS: Final = ".in_sum2"
_COUNTS: Final = ".counts"


@dataclass(frozen=True)
class ImportanceMatrix:
    """Mean squares of the input columns.

    Attributes:
        path: the file.
        moments: matrix -> float64 (experts, n), experts 1 for a plain matrix; a row of an expert without data is NaN.
    """

    path: Path
    moments: dict[str, npt.NDArray[np.float64]]

    def known(self, name: str) -> bool:
        """As :meth:`gguf_itq3s.rounding.factors.Statistics.known`."""
        return name in self.moments

    def share(self, name: str) -> float:
        """As :meth:`gguf_itq3s.rounding.factors.Statistics.share`."""
        rows = self.moments.get(name)
        return 0.0 if rows is None else float(_uneven(rows).mean())

    def key(self, name: str, expert: int | None) -> str:
        """As :meth:`gguf_itq3s.rounding.factors.Statistics.key`: no two matrices share a row."""
        return tensor_entry(name, expert)

    def rotated(
        self, name: str, columns: int, expert: int | None, folded: str | None, gain: GainOf
    ) -> npt.NDArray[np.float64] | None:
        """As :meth:`gguf_itq3s.rounding.factors.Statistics.rotated`."""
        moments = self.diagonal(name, columns, expert)
        if moments is None:
            return None
        return hessian.from_diagonal(moments if folded is None else _without_gain(moments, gain(folded)))

    def diagonal(self, name: str, columns: int, expert: int | None = None) -> npt.NDArray[np.float64] | None:
        """Mean squares of the inputs of a matrix.

        Args:
            name: GGUF name.
            columns: its row length.
            expert: which matrix of a stack.

        Returns:
            float64 (columns,); None where the file has none.

        Raises:
            UserError: the file is of a model with other shapes.
        """
        rows = self.moments.get(name)
        if rows is None:
            return None
        if rows.shape[1] != columns or (expert or 0) >= rows.shape[0]:
            what = f"has {rows.shape[0]} x {rows.shape[1]} values for a matrix of {columns} columns"
            raise UserError(self.path, what, "take the importance matrix of this model", name)
        number = expert or 0
        return rows[number] if _uneven(rows[number : number + 1])[0] else None


def _uneven(rows: npt.NDArray[np.float64]) -> npt.NDArray[np.bool_]:
    """Which rows tell columns apart: not all zero, not all the same, not without data (NaN)."""
    return np.isfinite(rows).all(axis=1) & (rows.max(axis=1) > rows.min(axis=1))


def _without_gain(moments: npt.NDArray[np.float64], gain: npt.NDArray[np.float32]) -> npt.NDArray[np.float64]:
    """Mean squares before the gain; a column whose gain is 0 counts as the mean of the others."""
    square = gain.astype(np.float64) ** 2
    result = np.divide(moments, square, out=np.full_like(moments, np.nan), where=square > 0)
    return np.where(np.isnan(result), np.nanmean(result) if (square > 0).any() else 1.0, result)


def read(path: Path) -> ImportanceMatrix:
    """Read an importance matrix in llama-imatrix's GGUF form.

    Raises:
        UserError: no such file, another format, or values that are not finite, negative, or all the same.
    """
    remedy = "give a file that llama-imatrix wrote (GGUF, its default)"
    if not path.is_file():
        raise UserError(path, "is not there", remedy)
    try:
        reader = gguf.GGUFReader(path)
    except Exception as error:  # gguf-py checks little of what it reads
        raise UserError(path, f"is not a GGUF file: {error}", remedy) from error
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    moments: dict[str, npt.NDArray[np.float64]] = {}
    for name, tensor in tensors.items():
        if not name.endswith(_SUMS):
            continue
        matrix = name.removesuffix(_SUMS)
        if (counts := tensors.get(matrix + _COUNTS)) is None:
            raise UserError(path, "has sums without counts", remedy, matrix)
        sums = np.atleast_2d(np.asarray(tensor.data, dtype=np.float64))
        seen = np.asarray(counts.data, dtype=np.float64).reshape(-1, 1)
        if sums.shape[0] != seen.size or not np.isfinite(sums).all() or (sums < 0).any():
            raise UserError(path, "has sums that are not finite, negative or without a count", remedy, matrix)
        if not np.isfinite(seen).all() or (seen < 0).any():
            raise UserError(path, "has counts that are not finite or negative", remedy, matrix)
        moments[matrix] = np.divide(sums, seen, out=np.full_like(sums, np.nan), where=seen > 0)
        if not _uneven(moments[matrix]).any():
            raise UserError(path, "has the same value for every column, or none", remedy, matrix)
    if not moments:
        raise UserError(path, "holds no importance matrix", remedy)
    return ImportanceMatrix(path, moments)

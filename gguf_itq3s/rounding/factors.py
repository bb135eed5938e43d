"""Which Hessian a tensor is rounded with in a conversion: from a calibration, an importance matrix, or none."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from ..calibration.store import Calibration, entry_name
from ..checkpoint.fold import Folding
from ..errors import UserError
from . import hessian
from .hessian import Factor
from .imatrix import ImportanceMatrix

# Matrices that share an input are written close to each other; a factor of 8192 columns is 256 MiB.
_KEPT: Final = 2


@dataclass
class Factors:
    """Factors of the Hessians of a model's matrices.

    Statistics may have been taken with or without a norm's gain, and the model may be written with the norm folded or
    not; one follows from the other.

    Attributes:
        source: the statistics.
        folding: the norms that are folded in the file.
        gain: gain of a norm by GGUF name, float32 (n,).
        damping: share of the mean diagonal.
    """

    source: Calibration | ImportanceMatrix
    folding: Folding
    gain: Callable[[str], npt.NDArray[np.float32]]
    damping: float = hessian.DAMPING
    _recent: OrderedDict[tuple[str, str | None], Factor] = field(default_factory=OrderedDict, repr=False)

    @property
    def path(self) -> Path:
        """The folder or file of the statistics."""
        return self.source.folder if isinstance(self.source, Calibration) else self.source.path

    def known(self, name: str) -> bool:
        """Whether there are statistics of a tensor, or of its first expert."""
        names: Mapping[str, object] = (
            self.source.entries if isinstance(self.source, Calibration) else self.source.moments
        )
        return name in names or entry_name(name, 0) in names

    def factor(self, name: str, shape: tuple[int, ...], number: int) -> Factor | None:
        """The factor for one matrix.

        Args:
            name: GGUF name of the tensor.
            shape: of the tensor, rows last; three axes for a stack of experts.
            number: which matrix of a stack.

        Returns:
            None where nothing is known of it, as of an expert that saw no token.

        Raises:
            UserError: the statistics are of another shape, damaged, or too far from positive semidefinite.
        """
        expert = number if len(shape) > 2 else None
        key = (self._key(name, expert), self.folding.gain_of(name))
        if key not in self._recent:
            try:
                rotated = self._rotated(name, shape[-1], expert)
                if rotated is None:
                    return None
                self._recent[key] = hessian.factorize(rotated, self.damping)
            except ValueError as error:
                raise UserError(
                    self.path, str(error), "raise --damping, or collect the statistics again", name
                ) from error
            while len(self._recent) > _KEPT:
                self._recent.popitem(last=False)
        return self._recent[key]

    def _key(self, name: str, expert: int | None) -> str:
        """Equal for matrices that share statistics."""
        if isinstance(self.source, Calibration) and (entry := self.source.entries.get(entry_name(name, expert))):
            return f"{entry.file}:{entry.key}"
        return entry_name(name, expert)

    def _rotated(self, name: str, columns: int, expert: int | None) -> npt.NDArray[np.floating] | None:
        wanted = self.folding.gain_of(name)
        if isinstance(self.source, ImportanceMatrix):
            moments = self.source.diagonal(name, columns, expert)
            if moments is None:
                return None
            if wanted is not None:
                moments = _without_gain(moments, self.gain(wanted))
            return hessian.from_diagonal(moments)
        found = self.source.hessian(name, expert)
        if found is None:
            return None
        if hessian.columns_of(found) != columns:
            raise ValueError(f"the statistics have {hessian.columns_of(found)} columns, the matrix {columns}")
        left_out = self.source.entries[entry_name(name, expert)].norm
        if left_out is not None and wanted is None:
            return hessian.scale_columns(found, self.gain(left_out))
        if left_out is None and wanted is not None:
            gain = self.gain(wanted).astype(np.float64)
            return hessian.scale_columns(found, np.divide(1.0, gain, out=np.zeros_like(gain), where=gain != 0))
        return found


def _without_gain(moments: npt.NDArray[np.float64], gain: npt.NDArray[np.float32]) -> npt.NDArray[np.float64]:
    """Mean squares before the gain; a column whose gain is 0 counts as the mean of the others."""
    square = gain.astype(np.float64) ** 2
    result = np.divide(moments, square, out=np.full_like(moments, np.nan), where=square > 0)
    return np.where(np.isnan(result), np.nanmean(result) if (square > 0).any() else 1.0, result)

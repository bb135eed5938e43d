"""Which Hessian a tensor is rounded with in a conversion: from a calibration, an importance matrix, or none."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt

from ..base.errors import UserError
from . import hessian
from .hessian import Factor

# Matrices that share an input are written close to each other; a factor of 8192 columns is 256 MiB.
_KEPT: Final = 2

#: The gain of a norm by its GGUF name: float32 (n,).
GainOf = Callable[[str], npt.NDArray[np.float32]]
#: What the columns of a matrix, or of one expert's, are multiplied by in the file: float32 (n,), None for ones.
ColumnsOf = Callable[[str, int | None], npt.NDArray[np.float32] | None]


class Energies(Protocol):
    """What is known of the sizes of the inputs of a model's matrices.

    Statistics may have been taken with or without a norm's gain; :class:`Inputs` brings them to the model's basis or
    the file's.
    """

    @property
    def path(self) -> Path:
        """The folder or file of the statistics."""

    def known(self, name: str) -> bool:
        """Whether there are statistics of a tensor, or of its first expert."""

    def left_out(self, name: str, expert: int | None) -> str | None:
        """The norm whose gain the statistics of a matrix leave out, by its GGUF name."""

    def diagonal(self, name: str, columns: int, expert: int | None) -> npt.NDArray[np.floating] | None:
        """Mean squares of a matrix's inputs as they were taken, arguments as for :meth:`Statistics.rotated`: (n,)."""


class Statistics(Energies, Protocol):
    """What is known of the inputs of a model's matrices: a calibration, or an importance matrix."""

    def share(self, name: str) -> float:
        """The share of a tensor's matrices that are rounded with them, 0 to 1: an expert may have seen no token."""

    def key(self, name: str, expert: int | None) -> str:
        """Equal for matrices that share statistics."""

    def tokens(self, name: str, expert: int | None) -> int | None:
        """How many the second moments of a matrix's inputs are of; None where there is nothing but their diagonal."""

    def rotated(
        self, name: str, columns: int, expert: int | None, factor: npt.NDArray[np.floating] | None
    ) -> npt.NDArray[np.floating] | None:
        """The rotated Hessian of a matrix's inputs, as they were taken or times a factor.

        Args:
            factor: (n,), of the inputs before the rotation; None for ones.

        Returns:
            (n, n) or (n / b, b, b), as :mod:`.hessian` says; None where nothing is known, as of an expert that saw no
            token.

        Raises:
            UserError: the statistics are damaged or of another model.
            ValueError: they are of another shape.
        """


@dataclass(frozen=True)
class Inputs:
    """Between the basis that statistics were taken in, the model's, and the file's.

    Attributes:
        columns: of the file; the inputs of a matrix are divided by what its columns are multiplied by.
    """

    source: Energies
    gain: GainOf
    columns: ColumnsOf = lambda name, expert: None

    def factor(self, name: str, expert: int | None) -> npt.NDArray[np.float64] | None:
        """What inputs as they were taken are multiplied by to be those that the file's matrix reads.

        Returns:
            float64 (n,), 0 where nothing comes through; None for ones.
        """
        norm = self.source.left_out(name, expert)
        return file_factor(None if norm is None else self.gain(norm), self.columns(name, expert))

    def energies(self, name: str, columns: int, expert: int | None) -> npt.NDArray[np.float64] | None:
        """Mean squares of the inputs that the file's matrix reads, float64 (n,); None where they are not known."""
        found = self.source.diagonal(name, columns, expert)
        if found is None:
            return None
        factor = self.factor(name, expert)
        wide = found.astype(np.float64)
        return wide if factor is None else wide * factor**2


def file_factor(
    gain: npt.NDArray[np.float32] | None, columns: npt.NDArray[np.float32] | None
) -> npt.NDArray[np.float64] | None:
    """What inputs as statistics have them are multiplied by to be those that a file's matrix reads.

    Args:
        gain: float32 (n,), of the norm whose gain the statistics leave out, if they do.
        columns: float32 (n,), what the matrix's columns are multiplied by in the file; None for ones.

    Returns:
        float64 (n,), 0 where nothing comes through; None for ones.
    """
    if columns is None:
        return None if gain is None else gain.astype(np.float64)
    if gain is not None and np.array_equal(gain, columns):
        return None
    wide = columns.astype(np.float64)
    inverse = np.divide(1.0, wide, out=np.zeros_like(wide), where=wide != 0)
    return inverse if gain is None else inverse * gain


def tensor_entry(name: str, expert: int | None = None) -> str:
    """The name of a matrix in statistics: the tensor's, or ``tensor[expert]`` for one expert of a stack."""
    return name if expert is None else f"{name}[{expert}]"


@dataclass
class HessianFactors:
    """Factors of the Hessians of a file's matrices.

    Attributes:
        inputs: the same, as the file's matrices read them.
        damping: share of the mean diagonal; None for :func:`gguf_itq3s.rounding.hessian.usual_damping`.
    """

    source: Statistics
    inputs: Inputs
    damping: float | None = None
    _recent: OrderedDict[tuple[str, bytes, int | None], Factor] = field(default_factory=OrderedDict, repr=False)

    def rotated(self, name: str, columns: int, expert: int | None) -> npt.NDArray[np.floating] | None:
        """The rotated Hessian of what the file's matrix reads; arguments and errors as :meth:`Statistics.rotated`."""
        return self.source.rotated(name, columns, expert, self.inputs.factor(name, expert))

    def factor(self, name: str, shape: tuple[int, ...], number: int, *, block: int | None = None) -> Factor | None:
        """The factor for one matrix.

        Args:
            shape: of the tensor, rows last; three axes for a stack of experts.
            number: which matrix of a stack.
            block: what the type rotates together (:func:`gguf_itq3s.codec.family.rotation`); None for what the
                statistics do.

        Returns:
            None where nothing is known of it, as of an expert that saw no token.

        Raises:
            UserError: the statistics are of another shape, damaged, or too far from positive semidefinite.
        """
        expert = number if len(shape) > 2 else None
        factor = self.inputs.factor(name, expert)
        key = (self.source.key(name, expert), b"" if factor is None else factor.tobytes(), block)
        if key not in self._recent:
            try:
                found = self.source.rotated(name, shape[-1], expert, factor)
                if found is None:
                    return None
                if block is not None:
                    found = hessian.in_basis(found, block)
                damping = self.damping
                if damping is None:
                    damping = hessian.usual_damping(found, self.source.tokens(name, expert))
                self._recent[key] = hessian.factorize(found, damping)
            except ValueError as error:
                remedy = "raise --damping, or collect the statistics again"
                raise UserError(self.source.path, str(error), remedy, name) from error
            while len(self._recent) > _KEPT:
                self._recent.popitem(last=False)
        return self._recent[key]

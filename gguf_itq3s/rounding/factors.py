"""Which Hessian a tensor is rounded with in a conversion: from a calibration, an importance matrix, or none."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt

from ..errors import UserError
from . import hessian
from .hessian import Factor

# Matrices that share an input are written close to each other; a factor of 8192 columns is 256 MiB.
_KEPT: Final = 2

#: The gain of a norm by its GGUF name: float32 (n,).
GainOf = Callable[[str], npt.NDArray[np.float32]]


class Statistics(Protocol):
    """What is known of the inputs of a model's matrices: a calibration, or an importance matrix."""

    @property
    def path(self) -> Path:
        """The folder or file of the statistics."""

    def known(self, name: str) -> bool:
        """Whether there are statistics of a tensor, or of its first expert."""

    def share(self, name: str) -> float:
        """The share of a tensor's matrices that are rounded with them, 0 to 1: an expert may have seen no token."""

    def key(self, name: str, expert: int | None) -> str:
        """Equal for matrices that share statistics."""

    def rotated(
        self, name: str, columns: int, expert: int | None, folded: str | None, gain: GainOf
    ) -> npt.NDArray[np.floating] | None:
        """The rotated Hessian of a matrix's inputs as the file has them.

        Statistics may have been taken with or without a norm's gain, and the model may be written with the norm folded
        or not; one follows from the other.

        Args:
            name: GGUF name of the tensor.
            columns: its row length.
            expert: which matrix of a stack.
            folded: the norm that the matrix reads, if it is folded in the file: its gain is then not in the inputs.
            gain: of a norm.

        Returns:
            (n, n) or (n / 256, 256, 256); None where nothing is known, as of an expert that saw no token.

        Raises:
            UserError: the statistics are damaged or of another model.
            ValueError: they are of another shape.
        """


def tensor_entry(name: str, expert: int | None = None) -> str:
    """The name of a matrix in statistics: the tensor's, or ``tensor[expert]`` for one expert of a stack."""
    return name if expert is None else f"{name}[{expert}]"


@dataclass
class HessianFactors:
    """Factors of the Hessians of a model's matrices.

    Attributes:
        source: the statistics.
        norm_of: the folded norm that a matrix reads, or None, by GGUF names.
        gain: gain of a norm.
        damping: share of the mean diagonal.
    """

    source: Statistics
    norm_of: Callable[[str], str | None]
    gain: GainOf
    damping: float = hessian.DAMPING
    _recent: OrderedDict[tuple[str, str | None, bool], Factor] = field(default_factory=OrderedDict, repr=False)

    def factor(self, name: str, shape: tuple[int, ...], number: int, *, rotated: bool = True) -> Factor | None:
        """The factor for one matrix.

        Args:
            name: GGUF name of the tensor.
            shape: of the tensor, rows last; three axes for a stack of experts.
            number: which matrix of a stack.
            rotated: of the Hessian of the rotated inputs, as ITQ3_S needs it, or of the inputs as they are.

        Returns:
            None where nothing is known of it, as of an expert that saw no token.

        Raises:
            UserError: the statistics are of another shape, damaged, or too far from positive semidefinite.
        """
        expert = number if len(shape) > 2 else None
        folded = self.norm_of(name)
        key = (self.source.key(name, expert), folded, rotated)
        if key not in self._recent:
            try:
                found = self.source.rotated(name, shape[-1], expert, folded, self.gain)
                if found is None:
                    return None
                self._recent[key] = hessian.factorize(found if rotated else hessian.rotate(found), self.damping)
            except ValueError as error:
                remedy = "raise --damping, or collect the statistics again"
                raise UserError(self.source.path, str(error), remedy, name) from error
            while len(self._recent) > _KEPT:
                self._recent.popitem(last=False)
        return self._recent[key]

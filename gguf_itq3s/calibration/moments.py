"""Sums of outer products of activations, in the rotated basis."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from ..codec.transform import BLOCK, hadamard_matrix

if TYPE_CHECKING:
    import torch


def rotated(x: torch.Tensor) -> torch.Tensor:
    """Activations (..., n) as float32 (tokens, n / 256, 256), each block through the Walsh-Hadamard transform."""
    return rotate(x.reshape(-1, x.shape[-1]).float()).reshape(-1, x.shape[-1] // BLOCK, BLOCK)


def rotate(x: torch.Tensor) -> torch.Tensor:
    """The Walsh-Hadamard transform of every 256 elements of the last axis, in the precision of ``x``."""
    import torch

    rows = x.reshape(-1, BLOCK)
    return (rows @ torch.from_numpy(hadamard_matrix()).to(rows)).reshape(x.shape)


def rotate_both(moment: torch.Tensor) -> torch.Tensor:
    """A second moment (n, n) or (n / 256, 256, 256) to the rotated basis, or back."""
    return rotate(rotate(moment).mT.contiguous()).mT


#: Rows of a sum that are computed at a time: a product in float32 beside it.
_PANEL: Final = 2048


@dataclass
class Moment:
    """A running sum of products of rotated activations: of a second moment, or of two inputs.

    Attributes:
        columns: n, a multiple of 256.
        full: (n, n), or the diagonal blocks (n / 256, 256, 256).
        total: float64 sum of the outer products.
        tokens: how many.
    """

    columns: int
    full: bool
    total: torch.Tensor | None = None
    tokens: int = 0

    def add(self, right: torch.Tensor, left: torch.Tensor | None = None) -> None:
        """Add ``left^T right`` of activations (tokens, n / 256, 256) that :func:`rotated` gave; left: right itself."""
        import torch

        shape = (self.columns, self.columns) if self.full else (self.columns // BLOCK, BLOCK, BLOCK)
        if self.total is None:
            self.total = torch.zeros(shape, dtype=torch.float64, device=right.device)
        if not self.full:
            self.total += (right if left is None else left).permute(1, 2, 0) @ right.transpose(0, 1)
        else:
            flat = right.reshape(-1, self.columns)
            other = flat if left is None else left.reshape(-1, self.columns)
            for start in range(0, self.columns, _PANEL):
                end = min(start + _PANEL, self.columns)
                # A second moment is symmetric: what is left of the panel is above it.
                first = start if left is None else 0
                product = other[:, start:end].T @ flat[:, first:]
                self.total[start:end, first:] += product
                if left is None:
                    self.total[end:, start:end] += product[:, end - start :].T
        self.tokens += right.shape[0]

    def mean(self) -> np.ndarray:
        """float32, the sum over the tokens; zeros where nothing was added."""
        if self.total is None:
            shape = (self.columns, self.columns) if self.full else (self.columns // BLOCK, BLOCK, BLOCK)
            return np.zeros(shape, dtype=np.float32)
        return (self.total / self.tokens).float().cpu().numpy()

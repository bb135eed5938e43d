"""Sums of outer products of activations, in the rotated basis."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ..codec.transform import BLOCK, hadamard_matrix

if TYPE_CHECKING:
    import torch


def rotated(x: torch.Tensor) -> torch.Tensor:
    """Activations (..., n) as float32 (tokens, n / 256, 256), each block through the Walsh-Hadamard transform."""
    import torch

    rows = x.reshape(-1, x.shape[-1] // BLOCK, BLOCK).float()
    return rows @ torch.from_numpy(hadamard_matrix()).to(rows)


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
        left = right if left is None else left
        if self.full:
            product = left.reshape(-1, self.columns).T @ right.reshape(-1, self.columns)
        else:
            product = left.transpose(0, 1).transpose(1, 2) @ right.transpose(0, 1)
        self.total = product.double() if self.total is None else self.total.add_(product)
        self.tokens += right.shape[0]

    def mean(self) -> np.ndarray:
        """float32, the sum over the tokens; zeros where nothing was added."""
        if self.total is None:
            shape = (self.columns, self.columns) if self.full else (self.columns // BLOCK, BLOCK, BLOCK)
            return np.zeros(shape, dtype=np.float32)
        return (self.total / self.tokens).float().cpu().numpy()

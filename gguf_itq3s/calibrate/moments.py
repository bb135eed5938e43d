"""Sums of outer products of activations, in the rotated basis."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import torch

from ..codec.transform import hadamard_matrix, rotation_block
from .ranks import Ranks


def rotated(x: torch.Tensor) -> torch.Tensor:
    """Activations (..., n) as float32 (tokens, n / b, b), each block through the Walsh-Hadamard transform; b is
    :func:`gguf_itq3s.codec.transform.rotation_block`."""
    return rotate(x.reshape(-1, x.shape[-1]).float()).reshape(-1, *_blocks(x.shape[-1]))


def rotate(x: torch.Tensor, block: int | None = None) -> torch.Tensor:
    """The Walsh-Hadamard transform of every block of the last axis, in the precision of ``x``.

    Args:
        x: (..., n), whole blocks.
        block: a power of two; None for that of rows of n columns.
    """
    block = block or rotation_block(x.shape[-1])
    rows = x.reshape(-1, block)
    return (rows @ torch.from_numpy(hadamard_matrix(block)).to(rows)).reshape(x.shape)


def rotate_both(moment: torch.Tensor, block: int | None = None) -> torch.Tensor:
    """A second moment (n, n) or (n / b, b, b) to the rotated basis, or back; ``block`` as :func:`rotate` takes it."""
    block = block or rotation_block(moment.shape[-1])
    return rotate(rotate(moment, block).mT.contiguous(), block).mT


def in_basis(moment: torch.Tensor, block: int) -> torch.Tensor:
    """As :func:`gguf_itq3s.rounding.hessian.in_basis`: the second moment of inputs in the basis of blocks so long."""
    plain = rotate_both(moment)
    if block == 1:
        return plain
    if plain.ndim == 3:
        parts = plain.shape[1] // block
        cut = plain.reshape(len(plain), parts, block, parts, block)
        plain = cut.diagonal(dim1=1, dim2=3).permute(0, 3, 1, 2).reshape(-1, block, block)
    return rotate_both(plain, block)


def _blocks(columns: int) -> tuple[int, int]:
    """How many blocks rows are rotated in, and their length."""
    block = rotation_block(columns)
    return columns // block, block


#: Rows of a sum that are computed at a time: a product in float32 beside it.
_PANEL: Final = 2048


@dataclass
class Moment:
    """A running sum of products of rotated activations: of a second moment, or of two inputs.

    Attributes:
        columns: n, a multiple of 64.
        total: float64 sum of the outer products.
    """

    columns: int
    full: bool
    total: torch.Tensor | None = None
    tokens: int = 0

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the sum."""
        count, block = _blocks(self.columns)
        return (self.columns, self.columns) if self.full else (count, block, block)

    def begun(self, device: torch.device) -> torch.Tensor:
        """The sum, zeros where nothing was added yet."""
        if self.total is None:
            self.total = torch.zeros(self.shape, dtype=torch.float64, device=device)
        return self.total

    def add(self, right: torch.Tensor, left: torch.Tensor | None = None) -> None:
        """Add ``left^T right`` of activations (tokens, n / b, b) that :func:`rotated` gave; left: right itself."""
        self.tokens += right.shape[0]
        total = self.begun(right.device)
        if not self.full:
            total += (right if left is None else left).permute(1, 2, 0) @ right.transpose(0, 1)
        else:
            flat = right.reshape(-1, self.columns)
            other = flat if left is None else left.reshape(-1, self.columns)
            for start in range(0, self.columns, _PANEL):
                end = min(start + _PANEL, self.columns)
                # A second moment is symmetric: what is left of the panel is above it.
                first = start if left is None else 0
                product = other[:, start:end].T @ flat[:, first:]
                total[start:end, first:] += product
                if left is None:
                    total[end:, start:end] += product[:, end - start :].T

    def reduce(self, ranks: Ranks, tokens: float, device: torch.device, owner: int | None = None) -> None:
        """Add up over all ranks, which have seen so many ``tokens``; ``owner`` gets it, None for all.

        Args:
            device: of the sum, where nothing was added here.
        """
        if tokens and not ranks.alone:
            ranks.reduce(self.begun(device), owner=owner)
        self.tokens = int(tokens)

    def mean(self) -> np.ndarray:
        """float32, the sum over the tokens; zeros where nothing was added."""
        if self.total is None:
            return np.zeros(self.shape, dtype=np.float32)
        return (self.total / self.tokens).float().cpu().numpy()

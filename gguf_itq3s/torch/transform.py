"""The rotation of :mod:`gguf_itq3s.codec.transform` in PyTorch.

A Walsh-Hadamard matrix of 256 is the Kronecker product of two of 16 (of 64: of two of 8), so that a block, seen as
16 x 16 numbers, is rotated by one product from the left and one from the right: two calls in place of eight butterfly
stages, 32 multiplications a number in place of 256.
"""

from __future__ import annotations

import functools
import math
from typing import Final

import numpy as np
import torch

from ..codec.transform import BLOCK, hadamard_matrix

#: Numbers rotated at a time: what is held besides the result does not grow with the input.
PIECE: Final = 1 << 18


@functools.lru_cache(maxsize=32)
def _side_matrices(block: int, device: torch.device, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """The two matrices that a block as a square of numbers is multiplied with, from the right and from the left.

    Signs times powers of two, whose product is the scale of the block: that of a matrix of 8 would be none.
    Made once a device: a CUDA graph that is being captured can copy nothing to it.
    """
    signs = np.sign(hadamard_matrix(math.isqrt(block)))
    halvings = math.isqrt(block).bit_length() - 1
    with torch.inference_mode(False):
        right, left = (
            torch.from_numpy(signs * 0.5**count).to(device, dtype) for count in (halvings // 2, (halvings + 1) // 2)
        )
    return right, left


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """What sums of products of ``dtype`` are kept in: float64 for itself, float32 for all others."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def fwht(x: torch.Tensor, block: int = BLOCK) -> torch.Tensor:
    """Rotate every block of the last axis by the normalised Walsh-Hadamard matrix (its own inverse, and transpose).

    Exact for integers below 2**16, whose sums float32 holds: entries are a power of two, twice.

    Args:
        x: (..., k * block) of a floating dtype, any strides.
        block: an even power of two.

    Returns:
        float32 (float64 for float64), contiguous, the shape of ``x``.

    Raises:
        ValueError: the last axis is not a multiple of the block.
    """
    check_blocks(x, block)
    dtype = accumulation_dtype(x.dtype)
    matrices = _side_matrices(block, x.device, dtype)
    if x.numel() <= PIECE:
        return _squares(x, *matrices).view(x.shape)
    out = x.new_empty(x.shape, dtype=dtype)
    blocks, count = x.reshape(-1, block), PIECE // block
    for piece, target in zip(blocks.split(count), out.view(-1, block).split(count), strict=True):
        target.copy_(_squares(piece, *matrices).view(-1, block))
    return out


def check_blocks(x: torch.Tensor, block: int) -> None:
    """Raise ValueError unless the last axis is a multiple of the block."""
    if not x.ndim or x.shape[-1] % block:
        raise ValueError(f"the last axis of shape {tuple(x.shape)} is not a multiple of {block}")


def _squares(x: torch.Tensor, right: torch.Tensor, left: torch.Tensor) -> torch.Tensor:
    """The blocks as side x side numbers, rotated: (blocks, side, side)."""
    side = left.shape[0]
    once = (x.to(right.dtype).reshape(-1, side) @ right).view(-1, side, side)
    return torch.matmul(left, once)

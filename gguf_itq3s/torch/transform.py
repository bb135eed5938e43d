"""The rotation of :mod:`gguf_itq3s.codec.transform` in PyTorch.

A Walsh-Hadamard matrix of 256 is the Kronecker product of two of 16, so that a block, seen as 16 x 16 numbers, is
rotated by one product from the left and one from the right: two calls in place of eight butterfly stages, 32
multiplications a number in place of 256.
"""

from __future__ import annotations

import functools
import math
from typing import Final

import torch

from ..codec.transform import BLOCK, hadamard_matrix

#: Numbers rotated at a time: what is held besides the result does not grow with the input.
PIECE: Final = 1 << 18
_SIDE: Final = math.isqrt(BLOCK)


@functools.lru_cache(maxsize=32)
def _side_matrix(device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """The normalised matrix of 16, made once a device: a CUDA graph that is being captured can copy nothing to it."""
    with torch.inference_mode(False):
        return torch.from_numpy(hadamard_matrix(_SIDE)).to(device, dtype)


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """What sums of products of ``dtype`` are kept in: float64 for itself, float32 for all others."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def fwht(x: torch.Tensor) -> torch.Tensor:
    """Rotate every block of the last axis by the normalised Walsh-Hadamard matrix (its own inverse, and transpose).

    Exact for integers below 2**16, whose sums float32 holds: entries are +-1/4, twice.

    Args:
        x: (..., k * 256) of a floating dtype, any strides.

    Returns:
        float32 (float64 for float64), contiguous, the shape of ``x``.

    Raises:
        ValueError: the last axis is not a multiple of 256.
    """
    if not x.ndim or x.shape[-1] % BLOCK:
        raise ValueError(f"the last axis of shape {tuple(x.shape)} is not a multiple of {BLOCK}")
    dtype = accumulation_dtype(x.dtype)
    matrix = _side_matrix(x.device, dtype)
    if x.numel() <= PIECE:
        return _squares(x, matrix).view(x.shape)
    out = x.new_empty(x.shape, dtype=dtype)
    blocks = x.reshape(-1, BLOCK)
    for piece, target in zip(blocks.split(PIECE // BLOCK), out.view(-1, BLOCK).split(PIECE // BLOCK), strict=True):
        target.copy_(_squares(piece, matrix).view(-1, BLOCK))
    return out


def _squares(x: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
    """The blocks as 16 x 16 numbers, rotated: (blocks, 16, 16)."""
    once = (x.to(matrix.dtype).reshape(-1, _SIDE) @ matrix).view(-1, _SIDE, _SIDE)
    return torch.matmul(matrix, once)

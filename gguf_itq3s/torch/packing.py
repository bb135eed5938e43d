"""Weights to packed blocks."""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from ..codec import native, ternary
from ..codec.family import DEFAULT, is_trellis
from . import decode
from .decode import QType

#: The type that is taken where none is named.
DEFAULT_TYPE: Final = DEFAULT.type
# Weights converted and coded at a time.
_PIECE: Final = 1 << 22


def quantize(
    weight: torch.Tensor | npt.ArrayLike, qtype: QType = DEFAULT_TYPE, *, effort: str = "default",
    threads: int | None = None,
) -> torch.Tensor:  # fmt: skip
    """Packed blocks of a matrix, by the C library where it is built and in numpy elsewhere; the bytes are the same.

    TQ1_0 and TQ2_0 take a ternary matrix without loss; any other is ternarized with the scale of the least squared
    error of each block.

    Args:
        weight: (rows, columns), a tensor on any device or an array; columns a multiple of 256, of 64 for types in
            blocks of 64.
        qtype: a trellis type, TQ1_0 or TQ2_0.
        effort: of the trellis encoder, ``fast`` or ``default``.
        threads: of the C library; None for one a processor.

    Returns:
        uint8 (rows, bytes of a row) on the device of ``weight``.

    Raises:
        ValueError: a shape, type or effort that does not fit, or a weight that is not finite.
    """
    kind = decode.layout(qtype)
    if isinstance(weight, torch.Tensor):
        matrix, device = weight.detach(), weight.device
    else:
        matrix, device = torch.from_numpy(np.asarray(weight, dtype=np.float32)), torch.device("cpu")
    if matrix.ndim != 2:
        raise ValueError(f"a matrix is needed; the shape is {tuple(matrix.shape)}")
    rows, columns = matrix.shape
    packed = torch.empty(rows, kind.row_bytes(columns), dtype=torch.uint8)
    step = max(1, _PIECE // columns)
    for start in range(0, rows, step):
        piece = matrix[start : start + step].to("cpu", torch.float32).numpy()
        packed[start : start + step] = _encode(piece, kind.qtype, effort, threads)
    return packed.to(device)


def _encode(weights: npt.NDArray[np.float32], qtype: QType, effort: str, threads: int | None) -> torch.Tensor:
    if is_trellis(qtype):
        return torch.from_numpy(native.quantize(weights, qtype=qtype, effort=effort, threads=threads))
    found = ternary.recognise(weights)
    if found is None:
        found = ternary.ternarize(weights, "optimal")
    return torch.from_numpy(found.encode(qtype))

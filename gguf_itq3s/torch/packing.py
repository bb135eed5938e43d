"""Weights to packed blocks, and the residual pass: a second code of the error of the first.

The residual pass codes the error without rotating it: the blocks of a residual pass stand for weights as they are, and
their product takes the input as it is. The error of a rotated block is Gaussian in the weights' own basis, where the
first rotation has mixed it, and is not in the rotated one, where it has the shape of the trellis. An ITQ3_S code of
the error leaves a relative squared error of 0.00048 in its own basis and 0.00087 in the rotated one, TQ2_0 0.0041 and
0.0046 (Gaussian weights); ITQ2_S, at the bits of TQ2_0, 0.0018 in its own basis.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import gguf
import numpy as np
import numpy.typing as npt
import torch

from ..codec import native, ternary
from ..codec.family import DEFAULT, FAMILY, is_trellis
from ..codec.ternary import TQ2_0
from ..codec.transform import fwht
from . import decode
from .decode import QType
from .products import dequantize

#: The type that is taken where none is named.
DEFAULT_TYPE: Final = DEFAULT.type
#: Names of the types of a residual pass; of two of one size, the first is meant where only the size is known.
RESIDUALS: Final = {
    DEFAULT.identifier: DEFAULT.type, "tq2_0": TQ2_0, **{row.identifier: row.type for row in FAMILY.values()}
}  # fmt: skip
# Weights converted and coded at a time.
_PIECE: Final = 1 << 22


class Packed(NamedTuple):
    """A packed matrix.

    Attributes:
        weight: uint8 (rows, bytes of a row).
        residual: uint8 (rows, bytes of a row) of the residual pass, or None.
    """

    weight: torch.Tensor
    residual: torch.Tensor | None = None


def residual_qtype(residual: bool | str | QType | None) -> QType | None:
    """The type of a residual pass as it is asked for: False or None for none, True for the default type, else its
    name.

    Raises:
        ValueError: an unknown one.
    """
    if residual is None or residual is False:
        return None
    if residual is True:
        return DEFAULT_TYPE
    name = residual.name.lower() if isinstance(residual, gguf.GGMLQuantizationType) else str(residual).lower()
    if name not in RESIDUALS:
        raise ValueError(f"unknown residual {residual!r}; use one of {', '.join(RESIDUALS)}")
    return RESIDUALS[name]


def check_residual(qtype: QType, residual: QType | None) -> None:
    """Raise ValueError for a residual pass of a type that has none: only the error of a trellis code is known to
    suit one.
    """
    if residual is not None and not is_trellis(qtype):
        names = ", ".join(row.name for row in FAMILY.values())
        raise ValueError(f"a residual pass follows one of {names}, not {qtype.name}")


def quantize(
    weight: torch.Tensor | npt.ArrayLike, qtype: QType = DEFAULT_TYPE, residual: bool | str | QType | None = False, *,
    effort: str = "default", threads: int | None = None,
) -> Packed:  # fmt: skip
    """Packed blocks of a matrix, by the C library where it is built and in numpy elsewhere; the bytes are the same.

    TQ1_0 and TQ2_0 take a ternary matrix without loss; any other is ternarized with the scale of the least squared
    error of each block, and so does a residual pass of TQ2_0.

    Args:
        weight: (rows, columns), a tensor on any device or an array; columns a multiple of 256, of 64 for ITQ3_N and
            ITQ2_N.
        qtype: a trellis type, TQ1_0 or TQ2_0.
        residual: False; True or ``"itq3_s"`` (after ITQ3_S 6.25 bits a weight in all), ``"itq2_s"`` or ``"tq2_0"``
            (5.1875), after trellis types only. Where blocks of 256 do not fit the columns, a trellis code is that in
            blocks of 64.
        effort: of the trellis encoder, ``fast`` or ``default``.
        threads: of the C library; None for one a processor.

    Returns:
        The blocks, on the device of ``weight``.

    Raises:
        ValueError: a shape, type, effort or residual that does not fit, or a weight that is not finite.
    """
    kind, second = decode.layout(qtype), residual_qtype(residual)
    check_residual(kind.qtype, second)
    if isinstance(weight, torch.Tensor):
        matrix, device = weight.detach(), weight.device
    else:
        matrix, device = torch.from_numpy(np.asarray(weight, dtype=np.float32)), torch.device("cpu")
    if matrix.ndim != 2:
        raise ValueError(f"a matrix is needed; the shape is {tuple(matrix.shape)}")
    rows, columns = matrix.shape
    packed = torch.empty(rows, kind.row_bytes(columns), dtype=torch.uint8)
    other = None if second is None else decode.layout_for(second, columns)
    extra = None if other is None else torch.empty(rows, other.row_bytes(columns), dtype=torch.uint8)
    step = max(1, _PIECE // columns)
    for start in range(0, rows, step):
        part = slice(start, start + step)
        piece = matrix[part].to("cpu", torch.float32).numpy()
        packed[part] = _encode(piece, kind.qtype, effort, threads)
        if extra is not None and other is not None:
            error = piece - dequantize(packed[part], kind.qtype).numpy()
            # The encoder of a trellis type rotates; rotated twice, the blocks stand for the error itself.
            turned = fwht(error, other.block) if other.rotated else error
            extra[part] = _encode(turned, other.qtype, effort, threads)
    return Packed(packed.to(device), None if extra is None else extra.to(device))


def _encode(weights: npt.NDArray[np.float32], qtype: QType, effort: str, threads: int | None) -> torch.Tensor:
    if is_trellis(qtype):
        return torch.from_numpy(native.quantize(weights, qtype=qtype, effort=effort, threads=threads))
    found = ternary.recognise(weights)
    if found is None:
        found = ternary.ternarize(weights, "optimal")
    return torch.from_numpy(found.encode(qtype))

"""The codec classes of the trellis types in gguf-py, one for each row of :data:`gguf_itq3s.codec.family.FAMILY`.

Importing this module makes ``gguf.quants.quantize`` and ``dequantize`` know the types.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType as Type
from gguf import quants
from gguf.lazy import LazyNumpyTensor

from . import blocks, native
from .family import DEFAULT, FAMILY, TrellisType, trellis_type
from .transform import FloatArray

_Quant: Any = quants.__Quant


def _codec_class(row: TrellisType) -> type:
    """The codec class of a type: trellis codec, default effort."""

    class TrellisQuant(_Quant, qtype=row.type):  # type: ignore[call-arg, misc]
        @classmethod
        def quantize(cls, tensor: Any) -> Any:
            """As the base class, without its groups of 16 rows: the trellis search wants many blocks at once."""
            if isinstance(tensor, LazyNumpyTensor):
                return super().quantize(tensor)
            return native.quantize(tensor, qtype=row.type)

        @classmethod
        def quantize_blocks(cls, blocks: np.ndarray) -> np.ndarray:
            """float32 (m, weights of a block) -> uint8 (m, bytes of a block)."""
            return native.quantize(blocks, qtype=row.type)

        @classmethod
        def dequantize_blocks(cls, encoded: np.ndarray) -> np.ndarray:
            """uint8 (m, bytes of a block) -> float32 (m, weights of a block)."""
            return blocks.decode_blocks(encoded, row.format)

    TrellisQuant.__name__ = TrellisQuant.__qualname__ = f"{row.name}_Quant"
    return TrellisQuant


CLASSES = {qtype: _codec_class(row) for qtype, row in FAMILY.items()}


def dequantize(data: npt.ArrayLike, shape: tuple[int, ...] | None = None, *, qtype: Type = DEFAULT.type) -> FloatArray:
    """Weights of rows of a trellis type.

    Args:
        data: uint8 (..., k * bytes of a block).
        shape: shape of the result; by default the rows of ``data``.
        qtype: the type.

    Returns:
        float32.

    Raises:
        ValueError: ``data`` is not whole blocks, or does not fill ``shape``; the type is not trellis-coded.
    """
    return blocks.dequantize(data, shape, trellis_type(qtype).format)

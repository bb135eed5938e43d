"""The codec class of ITQ3_S in gguf-py.

Importing this module makes ``gguf.quants.quantize`` and ``dequantize`` know the type.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from gguf import quants
from gguf.lazy import LazyNumpyTensor

from . import native
from .blocks import decode_blocks
from .types import ITQ3_S

_Quant: Any = quants.__Quant


class ITQ3_S_Quant(_Quant, qtype=ITQ3_S):  # type: ignore[call-arg, misc]  # noqa: N801
    """The codec class of ``gguf.quants``: trellis codec, default effort; see :mod:`gguf_itq3s.codec`."""

    @classmethod
    def quantize(cls, tensor: Any) -> Any:
        """As the base class, without its groups of 16 rows: the trellis search wants many blocks at once."""
        return super().quantize(tensor) if isinstance(tensor, LazyNumpyTensor) else native.quantize(tensor)

    @classmethod
    def quantize_blocks(cls, blocks: np.ndarray) -> np.ndarray:
        """float32 (m, 256) -> uint8 (m, 100)."""
        return native.quantize(blocks)

    @classmethod
    def dequantize_blocks(cls, blocks: np.ndarray) -> np.ndarray:
        """uint8 (m, 100) -> float32 (m, 256)."""
        return decode_blocks(blocks)

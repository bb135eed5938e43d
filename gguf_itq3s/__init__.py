"""GGUF quantization in trellis-coded types (ITQ3_S, 3.125 bits a weight; ITQ2_S, 2.0625; ITQ4_S, 4.0625; ITQ3_N, ITQ2_N
and ITQ4_N, 3.25, 2.25 and 4.25, for rows that are no multiple of 256) and ternary types.

``import gguf_itq3s`` makes gguf-py know the types: ``gguf.quants.quantize`` and ``dequantize``, ``GGUFWriter`` and
``GGUFReader`` then handle tensor types 510, 512, 513, 514, 516 and 517.
"""

from . import upstream

# Before anything imports gguf: the copy beside the pinned llama.cpp source is ahead of the released package.
upstream.prefer_vendored_gguf()

from .codec.native import quantize  # noqa: E402
from .codec.registry import dequantize  # noqa: E402
from .codec.types import (  # noqa: E402
    ITQ2_N,
    ITQ2_S,
    ITQ3_N,
    ITQ3_S,
    ITQ4_N,
    ITQ4_S,
    MOSTLY_ITQ2_N,
    MOSTLY_ITQ2_S,
    MOSTLY_ITQ3_N,
    MOSTLY_ITQ3_S,
    MOSTLY_ITQ4_N,
    MOSTLY_ITQ4_S,
)

__all__ = [
    "ITQ2_N", "ITQ2_S", "ITQ3_N", "ITQ3_S", "ITQ4_N", "ITQ4_S", "MOSTLY_ITQ2_N", "MOSTLY_ITQ2_S", "MOSTLY_ITQ3_N",
    "MOSTLY_ITQ3_S", "MOSTLY_ITQ4_N", "MOSTLY_ITQ4_S", "dequantize", "quantize",
]  # fmt: skip
__version__ = "0.1.0"

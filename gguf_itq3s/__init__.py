"""GGUF quantization in trellis-coded types (ITQ3_S, 3.125 bits a weight; ITQ2_S, 2.0625) and ternary types.

``import gguf_itq3s`` makes gguf-py know the types: ``gguf.quants.quantize`` and ``dequantize``, ``GGUFWriter`` and
``GGUFReader`` then handle tensor types 500 and 502.
"""

from . import upstream

# Before anything imports gguf: the copy beside the pinned llama.cpp source is ahead of the released package.
upstream.prefer_vendored_gguf()

from .codec.native import quantize  # noqa: E402
from .codec.registry import dequantize  # noqa: E402
from .codec.types import ITQ2_S, ITQ3_S, MOSTLY_ITQ2_S, MOSTLY_ITQ3_S  # noqa: E402

__all__ = ["ITQ2_S", "ITQ3_S", "MOSTLY_ITQ2_S", "MOSTLY_ITQ3_S", "dequantize", "quantize"]
__version__ = "0.1.0"

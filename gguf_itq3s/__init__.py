"""GGUF quantization in ITQ3_S (3.125 bits a weight) and ternary types.

``import gguf_itq3s`` makes gguf-py know the type: ``gguf.quants.quantize`` and ``dequantize``, ``GGUFWriter`` and
``GGUFReader`` then handle tensor type 500.
"""

from . import upstream

# Before anything imports gguf: the copy beside the pinned llama.cpp source is ahead of the released package.
upstream.prefer_vendored_gguf()

from .codec import registry as registry  # noqa: E402
from .codec.blocks import dequantize  # noqa: E402
from .codec.native import quantize  # noqa: E402
from .codec.types import ITQ3_S, MOSTLY_ITQ3_S  # noqa: E402

__all__ = ["ITQ3_S", "MOSTLY_ITQ3_S", "dequantize", "quantize"]
__version__ = "0.1.0"

"""Trellis-coded and ternary weights in PyTorch: linear layers whose weights stay packed, on any of its devices.

    from gguf_itq3s.torch import PackedLinear
    layer = PackedLinear.from_weight(weight, bias)      # 3.125 bits a weight
    y = layer(x)

Order of reading: ``transform`` (the rotation), ``decode`` (blocks to numbers, a slice at a time), ``products`` (the
products as PyTorch operators, with their gradients), ``paths`` (which implementation runs), ``linear`` (the layers),
``grouped``, ``experts`` and ``stacked`` (the experts of a layer), ``packing`` (weights to blocks), ``kernels``
(Triton); then models of Transformers: ``config``, ``quantizer``, ``stacking``, ``settings``, ``load_gguf``.

This room imports PyTorch at its head: ``import gguf_itq3s`` alone does not load it.
"""

from .experts import PackedExperts
from .linear import PackedLinear, TernaryLinear, replace_linears
from .packing import quantize
from .paths import PATHS, use_path
from .products import dequantize, rotate

__all__ = [
    "PATHS",
    "PackedExperts",
    "PackedLinear",
    "TernaryLinear",
    "dequantize",
    "quantize",
    "replace_linears",
    "rotate",
    "use_path",
]

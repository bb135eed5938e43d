"""Packed BitNet b1.58 checkpoints: uint8 weights of four trits a byte, read into ordinary matrices.

The layout is that of ``transformers.integrations.bitnet``: a matrix of r rows is stored as r / 4 rows of bytes, and
bits 2i, 2i + 1 of a byte in row j hold the trit + 1 of row ``i * r / 4 + j``. ``weight_scale`` is 1 / gamma for layers
of class ``bitlinear`` and gamma for ``autobitlinear``. llama.cpp's ``conversion`` reads the first kind alone, and its
unpacking mixes tensors that are evaluated later with ones that are there, which torch refuses.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    import torch

_SUFFIX: Final = ".weight_scale"

Loaders = dict[str, Callable[[], Any]]


def unpack(packed: torch.Tensor, scale: torch.Tensor, *, inverse: bool) -> torch.Tensor:
    """uint8 (rows / 4, n) and a scale to float32 (rows, n): ``trit * scale``, or ``trit / scale`` with ``inverse``."""
    import torch

    packed = packed.view(torch.uint8)
    trits = torch.cat([packed >> shift & 3 for shift in (0, 2, 4, 6)], dim=0).float() - 1
    # One magnitude for all: the quotient is taken once, so every weight is exactly -a, 0 or a.
    return trits * (1 / scale.float() if inverse else scale.float())


def is_packed(hparams: Mapping[str, Any], names: Mapping[str, Any]) -> bool:
    """Whether a checkpoint holds packed BitNet weights."""
    config = hparams.get("quantization_config")
    method = config.get("quant_method") if isinstance(config, Mapping) else None
    return method == "bitnet" and any(name.endswith(_SUFFIX) for name in names)


def unpack_all(hparams: Mapping[str, Any], tensors: Loaders) -> None:
    """Replace packed weights by their matrices and take the scales out, in place."""
    inverse = hparams["quantization_config"].get("linear_class", "bitlinear") != "autobitlinear"

    def load(weight: Callable[[], Any], scale: Callable[[], Any]) -> torch.Tensor:
        return unpack(weight(), scale(), inverse=inverse)

    for name in [n for n in tensors if n.endswith(_SUFFIX)]:
        scale = tensors.pop(name)
        weight = name.removesuffix("_scale")
        tensors[weight] = partial(load, tensors[weight], scale)

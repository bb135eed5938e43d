"""A weight as a file will hold it, in the forward pass of a model that is trained.

Between two encodings the error of the code is held fixed: with w the latent weight, w0 what it was when it was encoded
and C(w0) its code, the layer computes with ``s (w + C(w0) - w0)``, s the learned factors of the blocks' scales. The
gradient passes to w as if there were no code (straight-through estimation, Bengio et al. 2013).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from gguf import GGMLQuantizationType as Type

from ..codec import blocks, native, ternary
from ..codec.family import FAMILY
from ..codec.transform import BLOCK, FloatArray
from ..torch.decode import layout_for

#: Latent weights (rows, n) -> what their code decodes to, both float32.
Encode = Callable[[FloatArray], FloatArray]


def encoder(qtype: Type, effort: str, threads: int) -> Encode:
    """What a matrix is after it was written in a type, or in that of shorter blocks which its rows ask for.

    Args:
        qtype: trellis-coded, or TQ2_0 (the scale of a block that has the least error).
        effort: of trellis types.
        threads: of the C library.
    """
    return partial(_trellis, qtype=qtype, effort=effort, threads=threads) if qtype in FAMILY else _tq2_0


def _trellis(weights: FloatArray, qtype: Type, effort: str, threads: int) -> FloatArray:
    row = FAMILY[layout_for(qtype, weights.shape[-1]).qtype]
    data = native.quantize(weights, qtype=row.type, effort=effort, threads=threads)
    return blocks.dequantize(data, weights.shape, row.format)


def _tq2_0(weights: FloatArray) -> FloatArray:
    return ternary.ternarize(weights, "optimal").weights()


class Coded(torch.nn.Module):
    """A parametrization of a weight whose rows are whole blocks: (..., rows, n) -> (..., rows, n).

    Attributes:
        offset: what the code differs from the latent weight by, as of the last encoding, float32 (..., rows, n).
        factor: learned factors of the scales, float32 (..., rows, n / block).
    """

    offset: torch.Tensor

    def __init__(self, weight: torch.Tensor, block: int = BLOCK) -> None:
        super().__init__()
        self.register_buffer("offset", torch.zeros_like(weight), persistent=False)
        self.factor = torch.nn.Parameter(weight.new_ones(*weight.shape[:-1], weight.shape[-1] // block))

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return scaled(weight + self.offset, self.factor)

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def encode(self, weight: torch.Tensor, encode: Encode) -> None:
        """Encode the latent weight anew."""
        self.offset.copy_(codes_of(weight, encode) - weight.detach().float())


def scaled(code: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    """Blocks (..., rows, n) times the factors of their scales (..., rows, n / block)."""
    return (code.unflatten(-1, (factor.shape[-1], -1)) * factor[..., None]).flatten(-2)


def codes_of(weight: torch.Tensor, encode: Encode) -> torch.Tensor:
    """What the code of a weight decodes to, float32 (..., rows, n), one matrix of a stack after the other."""
    latent = weight.detach().float()
    found = torch.empty_like(latent)
    for target, rows in zip(matrices(found), matrices(latent), strict=True):
        target.copy_(torch.from_numpy(encode(np.ascontiguousarray(rows.cpu().numpy()))))
    return found


def matrices(weights: Any) -> Any:
    """A view of a matrix, or of a stack, tensor or array, as a stack: (matrices, rows, columns)."""
    return weights.reshape(-1, *weights.shape[-2:])


class CodedMatrix:
    """A layer that computes with coded weights: a linear one, or experts whose matrices are stacked.

    Attributes:
        name: GGUF name of its tensor.
        layer: the layer.
        parameter: its weight's name in the layer.
    """

    def __init__(
        self, name: str, layer: torch.nn.Module, parameter: str = "weight", block: int = BLOCK
    ) -> None:  # fmt: skip
        self.name, self.layer, self.parameter = name, layer, parameter
        weight = getattr(layer, parameter)
        weight.requires_grad_(True)
        torch.nn.utils.parametrize.register_parametrization(layer, parameter, Coded(weight.detach(), block))

    @property
    def _list(self) -> Any:
        return self.layer.parametrizations[self.parameter]

    @property
    def latent(self) -> torch.nn.Parameter:
        """The weight that is trained."""
        return self._list.original

    @property
    def coded(self) -> Coded:
        return self._list[0]

    def encode(self, encode: Encode) -> None:
        """Encode the latent weight anew."""
        self.coded.encode(self.latent, encode)

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def weights(self) -> torch.Tensor:
        """What the layer computes with, float32 (..., rows, n)."""
        found: torch.Tensor = getattr(self.layer, self.parameter)
        return found.detach()

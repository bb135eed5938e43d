"""Linear layers whose weights stay packed."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from ..codec.ternary import TQ2_0
from . import decode, packing, paths, products
from .decode import QType
from .packing import DEFAULT_TYPE


class PackedLinear(nn.Linear):
    """``y = x W^T + b`` with W in packed blocks, decoded a slice at a time within the product.

    A subclass of ``torch.nn.Linear``, so that what looks for linear layers finds it; ``weight`` holds the blocks.

    The paths agree, relative to ``|x| |w|``, the norms of the input's row and of the weights' row: in float32 they
    differ by at most 2e-6; in float16 each is within 2**-10, in bfloat16 within 2**-7 of the exact product.

    Attributes:
        weight: uint8 (out_features, bytes of a row), a parameter without gradient.
        bias: (out_features,) of a floating dtype, or None.
        qtype: the type of the blocks: a trellis type, TQ1_0 or TQ2_0. It is that of the width: where a type is asked
            for whose blocks of 256 do not fit it, the same code in blocks of 64 (ITQ3_N for ITQ3_S).
        path: ``reference``, ``triton``, or None for the device's own (:mod:`gguf_itq3s.torch.paths`).
    """

    #: The type where none is asked for.
    default_type: QType = DEFAULT_TYPE

    def __init__(
        self, in_features: int, out_features: int, bias: bool = True, *, qtype: QType | None = None,
        device: torch.device | str | None = None, dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        """A layer of zero blocks, to load a state into; ``device="meta"`` allocates nothing.

        ``in_features`` is a multiple of 64, of 256 for TQ1_0 and TQ2_0; ``dtype`` is that of the bias.

        Raises:
            ValueError: a width that is not whole blocks, or a type that does not fit.
        """
        kind = decode.layout_for(self.default_type if qtype is None else qtype, in_features)
        nn.Module.__init__(self)  # nn.Linear's own would allocate the matrix
        self.in_features, self.out_features, self.qtype = in_features, out_features, kind.qtype
        self.path: str | None = None
        blocks = torch.zeros(out_features, kind.row_bytes(in_features), dtype=torch.uint8, device=device)
        self.weight = nn.Parameter(blocks, requires_grad=False)
        zeros = nn.Parameter(torch.zeros(out_features, device=device, dtype=dtype)) if bias else None
        self.register_parameter("bias", zeros)

    @classmethod
    def from_weight(
        cls, weight: torch.Tensor, bias: torch.Tensor | None = None, *, qtype: QType | None = None,
        effort: str = "default", threads: int | None = None,
    ) -> PackedLinear:  # fmt: skip
        """Quantize a matrix (out_features, in_features); options and errors of :func:`gguf_itq3s.torch.quantize`."""
        kind = decode.layout_for(cls.default_type if qtype is None else qtype, weight.shape[-1]).qtype
        return cls.from_blocks(packing.quantize(weight, kind, effort=effort, threads=threads), bias, qtype=kind)

    @classmethod
    def from_blocks(
        cls, blocks: torch.Tensor, bias: torch.Tensor | None = None, *, qtype: QType | None = None
    ) -> PackedLinear:
        """A layer around blocks that are there, uint8 (out_features, bytes of a row), which it does not copy.

        Raises:
            ValueError: shapes or types that do not belong together.
        """
        kind = decode.layout(cls.default_type if qtype is None else qtype)
        layer = cls(kind.columns(blocks), blocks.shape[0], False, qtype=kind.qtype, device="meta")
        layer.weight = nn.Parameter(blocks, requires_grad=False)
        if bias is not None:
            if bias.shape != (blocks.shape[0],):
                raise ValueError(f"a bias of shape {tuple(bias.shape)} is not one of {blocks.shape[0]} rows")
            layer.bias = bias if isinstance(bias, nn.Parameter) else nn.Parameter(bias, requires_grad=False)
        return layer

    def forward(self, x: torch.Tensor, rotated: torch.Tensor | None = None, path: str | None = None) -> torch.Tensor:
        """The product.

        Args:
            x: (..., in_features) of a floating dtype; within ``torch.autocast`` it is cast as for nn.Linear.
            rotated: ``gguf_itq3s.torch.rotate(x)``, for several rotated layers of one length of blocks that read the
                same input; made here without it. ``x`` then only says the dtype.
            path: in place of the attribute.

        Returns:
            (..., out_features) in the dtype of ``x``.

        Raises:
            ValueError: the last axis is not ``in_features`` long, or there is no such path.
        """
        if x.shape[-1] != self.in_features:
            raise ValueError(f"the last axis of shape {tuple(x.shape)} is not {self.in_features} long")
        if torch.amp.is_autocast_available(x.device.type) and torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        path = paths.choose(x.device, path or self.path)
        source, kind = x, decode.layout(self.qtype)
        if kind.rotated:
            source = products.rotate(x, path, kind.block) if rotated is None else rotated
        out = products.product(source, self.weight, self.qtype, dtype=x.dtype, path=path)
        if self.bias is not None:
            out.add_(self.bias.to(out.dtype))
        return out

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """The whole matrix: (out_features, in_features) in ``dtype``."""
        return products.dequantize(self.weight, self.qtype, dtype=dtype)

    def reset_parameters(self) -> None:
        """Nothing: blocks are not initialised at random, and what calls this for nn.Linear means the float matrix."""

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}, "
            f"type={self.qtype.name}"
        )


class TernaryLinear(PackedLinear):
    """A layer of TQ2_0 (2.0625 bits a weight) or TQ1_0 (1.6875) blocks, for ternary matrices."""

    default_type = TQ2_0


def replace_linears(
    model: nn.Module, qtype: QType = DEFAULT_TYPE, *, wanted: Callable[[str, nn.Linear], bool] | None = None,
    effort: str = "default", threads: int | None = None,
) -> list[str]:  # fmt: skip
    """Quantize the linear layers of a model, in place.

    Layers that are packed already, whose width is not whole blocks (of 64; of 256 for TQ1_0 and TQ2_0), and subclasses
    of nn.Linear, of which only their makers know what else they do, stay as they are.

    Args:
        model: of any kind.
        qtype: the type of the blocks, of 64 weights in place of 256 where the width asks for it.
        wanted: which of them, by name and layer; by default all but the output head (``lm_head``).
        effort: as ``threads`` and errors of :func:`gguf_itq3s.torch.quantize`.
        threads: see there.

    Returns:
        The names of the layers replaced.
    """
    chosen = wanted or (lambda name, _: name.rpartition(".")[2] != "lm_head")
    found = {
        name: layer
        for name, layer in model.named_modules()
        if type(layer) is nn.Linear and decode.layout_for(qtype, layer.in_features).fits(layer.in_features)
    }
    found = {name: layer for name, layer in found.items() if chosen(name, layer)}
    for name, layer in found.items():
        packed = PackedLinear.from_weight(layer.weight, layer.bias, qtype=qtype, effort=effort, threads=threads)
        packed.train(layer.training)
        model.set_submodule(name, packed)
    return list(found)

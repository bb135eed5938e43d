"""Products with packed weights as PyTorch operators: they have gradients, and ``torch.compile`` does not look inside.

``y = x W^T`` with ``W = V H``, V the decoded blocks in the rotated basis, is ``(x H) V^T``: the input is rotated once
(``gguf_itq3s::rotate``) and multiplied with V (``gguf_itq3s::product``), whose slices are decoded as they are needed;
the gradient is ``(g V) H``. Packed weights have no gradient. Source: the pipeline of the TurboQuant model page, with
the Hadamard matrix as its rotation.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, Final

import torch

from ..codec.transform import BLOCK
from . import decode, paths, transform

#: Weights in a decoded slice of the reference path: so many columns, whole blocks, of so many rows at most.
SLICE_COLUMNS: Final = BLOCK
SLICE_ROWS: Final = 4096


def slices(packed: torch.Tensor, kind: decode.Layout) -> Iterator[tuple[slice, slice, torch.Tensor]]:
    """The matrix in slices of some columns: (rows, columns, float32 weights), one alive at a time."""
    count, step = packed.shape[1] // kind.block_bytes, SLICE_COLUMNS // kind.block
    for row in range(0, packed.shape[0], SLICE_ROWS):
        rows = slice(row, min(row + SLICE_ROWS, packed.shape[0]))
        for first in range(0, count, step):
            end = min(first + step, count)
            parts = packed[rows, first * kind.block_bytes : end * kind.block_bytes]
            values = decode.weights(parts.unflatten(-1, (end - first, kind.block_bytes)), kind)
            yield rows, slice(first * kind.block, end * kind.block), values.flatten(-2)
            del values


def without_autocast(x: torch.Tensor) -> Any:
    """Within an operator dtypes are chosen; autocast would choose others for the products inside."""
    return torch.autocast(x.device.type, enabled=False)


#: What the operators run, by their full names.
IMPLEMENTATIONS: Final[dict[str, Callable[..., torch.Tensor]]] = {}


def operator(function: Callable[..., torch.Tensor]) -> Any:
    """Make an operator of a function, by its name."""
    name = f"gguf_itq3s::{function.__name__.lstrip('_')}"
    IMPLEMENTATIONS[name] = function
    return torch.library.custom_op(name, function, mutates_args=())


@operator
def _rotate(x: torch.Tensor, block: int, triton: bool) -> torch.Tensor:
    with without_autocast(x):
        if triton:
            from . import kernels

            return kernels.rotate(x, block)
        return transform.fwht(x, block)


@_rotate.register_fake  # type: ignore[untyped-decorator]
def _(x: torch.Tensor, block: int, triton: bool) -> torch.Tensor:
    return x.new_empty(x.shape, dtype=x.dtype if triton else transform.accumulation_dtype(x.dtype))


def _rotate_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    x, ctx.block, ctx.triton = inputs
    ctx.dtype = x.dtype


def _rotate_backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
    return _rotate(gradient, ctx.block, ctx.triton).to(ctx.dtype), None, None


_rotate.register_autograd(_rotate_backward, setup_context=_rotate_context)


@operator
def _product(
    x: torch.Tensor, weight: torch.Tensor, qtype: int, dtype: torch.dtype, triton: bool, transposed: bool
) -> torch.Tensor:
    """``x V^T``, or transposed ``x V``."""
    kind = decode.layout(qtype)
    with without_autocast(x):
        if triton:
            from . import kernels

            return (kernels.product_transposed if transposed else kernels.product)(x, weight, kind, dtype)
        accumulated = transform.accumulation_dtype(x.dtype)
        outputs = kind.columns(weight) if transposed else weight.shape[0]
        out = x.new_zeros((x.shape[0], outputs), dtype=accumulated)
        for rows, columns, part in slices(weight, kind):
            if transposed:
                out[:, columns].addmm_(x[:, rows].to(accumulated), part.to(accumulated))
            else:
                out[:, rows].addmm_(x[:, columns].to(accumulated), part.to(accumulated).t())
            del part  # before the next slice is decoded
        return out.to(dtype)


@_product.register_fake  # type: ignore[untyped-decorator]
def _(
    x: torch.Tensor, weight: torch.Tensor, qtype: int, dtype: torch.dtype, triton: bool, transposed: bool
) -> torch.Tensor:
    outputs = decode.layout(qtype).columns(weight) if transposed else weight.shape[0]
    return x.new_empty((x.shape[0], outputs), dtype=dtype)


def _product_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    x, weight, ctx.qtype, _, ctx.triton, ctx.transposed = inputs
    ctx.save_for_backward(weight)
    ctx.dtype = x.dtype


def _product_backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    (weight,) = ctx.saved_tensors
    found = _product(gradient.contiguous(), weight, ctx.qtype, ctx.dtype, ctx.triton, not ctx.transposed)
    return found, *[None] * 5


_product.register_autograd(_product_backward, setup_context=_product_context)


@operator
def _dequantize(weight: torch.Tensor, qtype: int, dtype: torch.dtype) -> torch.Tensor:
    kind = decode.layout(qtype)
    rows, columns = weight.shape[0], kind.columns(weight)
    out = weight.new_empty((rows, columns), dtype=dtype)
    step = max(1, SLICE_ROWS * SLICE_COLUMNS // columns)
    with without_autocast(weight):
        for start in range(0, rows, step):
            blocks = weight[start : start + step].unflatten(-1, (-1, kind.block_bytes))
            values = kind.values(blocks)
            # Integers are rotated before they are scaled: that is exact.
            part = (transform.fwht(values, kind.block) if kind.rotated else values).mul_(kind.scales(blocks))
            out[start : start + step] = part.flatten(-2)
    return out


@_dequantize.register_fake  # type: ignore[untyped-decorator]
def _(weight: torch.Tensor, qtype: int, dtype: torch.dtype) -> torch.Tensor:
    return weight.new_empty((weight.shape[0], decode.layout(qtype).columns(weight)), dtype=dtype)


def uses_triton(x: torch.Tensor, path: str | None) -> bool:
    """Whether the kernels run; they add in float32, so float64 is left to the reference."""
    return paths.choose(x.device, path) == "triton" and x.dtype != torch.float64


def rotate(x: torch.Tensor, path: str | None = None, block: int = BLOCK) -> torch.Tensor:
    """The rotated input of layers of trellis types, for several that read the same: ``layer(x, rotated=rotate(x))``.

    Args:
        x: (..., k * block) of a floating dtype.
        path: as :func:`gguf_itq3s.torch.paths.choose` takes it.
        block: weights of a block of the layers: 256, of ITQ3_N and ITQ2_N 64.

    Returns:
        The shape of ``x``: float32 (float64 for float64) on the path ``reference``, the dtype of ``x`` on ``triton``.

    Raises:
        ValueError: the last axis is not a multiple of the block, or there is no such path.
    """
    transform.check_blocks(x, block)
    return _rotate(x, block, uses_triton(x, path))


def product(
    x: torch.Tensor, weight: torch.Tensor, qtype: int, *, dtype: torch.dtype | None = None, path: str | None = None
) -> torch.Tensor:
    """``x V^T``, V the decoded weights in the basis of their blocks.

    Args:
        x: (..., columns), rotated where the type is a trellis one; any floating dtype.
        weight: uint8 (rows, bytes of a row).
        qtype: its type.
        dtype: of the result; that of ``x`` by default. Sums are float32, or float64 for a float64 ``x``.
        path: ``reference`` or ``triton``, or None.

    Returns:
        (..., rows).

    Raises:
        ValueError: shapes or types that do not belong together.
    """
    columns = decode.layout(qtype).columns(weight)
    if x.shape[-1] != columns:
        raise ValueError(f"the last axis of shape {tuple(x.shape)} does not match rows of {columns} weights")
    flat = x.reshape(math.prod(x.shape[:-1]), columns)
    out = _product(flat, weight, int(qtype), dtype or x.dtype, uses_triton(x, path), False)
    return out.view(*x.shape[:-1], weight.shape[0])


def dequantize(weight: torch.Tensor, qtype: int, *, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """The matrix that packed blocks stand for.

    Without a zero-point, the float32 bits of :func:`gguf_itq3s.dequantize`.

    Args:
        weight: uint8 (rows, bytes of a row).
        qtype: its type.
        dtype: of the result, to which a slice at a time is rounded from float32.

    Returns:
        (rows, columns) on the device of ``weight``.

    Raises:
        ValueError: shapes or types that do not belong together.
    """
    return _dequantize(weight, int(qtype), dtype)

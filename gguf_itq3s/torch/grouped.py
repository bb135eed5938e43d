"""Products of groups of rows, each with a matrix of its own out of a stack, as one operator with a gradient.

Rows are sorted by matrix. One matrix of the stack after the other is multiplied as :mod:`.products` multiplies a single
one: no two of them are decoded at the same time, and one that has no rows is not decoded at all.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import torch

from . import decode, products, transform
from .products import IMPLEMENTATIONS, operator, without_autocast

_PRODUCT: Final = IMPLEMENTATIONS["gguf_itq3s::product"]


def parts_of(ends: torch.Tensor) -> Iterator[tuple[int, slice]]:
    """The matrices that have rows: (number in the stack, its rows)."""
    start = 0
    for number, end in enumerate(ends.tolist()):
        if end > start:
            yield number, slice(start, end)
            start = end


@operator
def _grouped(
    x: torch.Tensor, weight: torch.Tensor, tokens: torch.Tensor | None, ends: torch.Tensor, qtype: int,
    dtype: torch.dtype, triton: bool,
) -> torch.Tensor:  # fmt: skip
    count = x.shape[0] if tokens is None else tokens.shape[0]
    out = x.new_zeros((count, weight.shape[1]), dtype=dtype)
    with without_autocast(x):
        for number, rows in parts_of(ends):
            part = x[rows] if tokens is None else x[tokens[rows]]
            out[rows] = _PRODUCT(part, weight[number], qtype, dtype, triton, False)
    return out


@_grouped.register_fake  # type: ignore[untyped-decorator]
def _(
    x: torch.Tensor, weight: torch.Tensor, tokens: torch.Tensor | None, ends: torch.Tensor, qtype: int,
    dtype: torch.dtype, triton: bool,
) -> torch.Tensor:  # fmt: skip
    count = x.shape[0] if tokens is None else tokens.shape[0]
    return x.new_empty((count, weight.shape[1]), dtype=dtype)


@operator
def _grouped_transposed(
    x: torch.Tensor, weight: torch.Tensor, tokens: torch.Tensor | None, ends: torch.Tensor, count: int, qtype: int,
    dtype: torch.dtype, triton: bool,
) -> torch.Tensor:  # fmt: skip
    accumulated = transform.accumulation_dtype(x.dtype)
    out = x.new_zeros((count, decode.layout(qtype).columns(weight[0])), dtype=accumulated)
    with without_autocast(x):
        for number, rows in parts_of(ends):
            part = _PRODUCT(x[rows], weight[number], qtype, accumulated, triton, True)
            if tokens is None:
                out[rows] = part.to(accumulated)
            else:
                out.index_add_(0, tokens[rows], part.to(accumulated))
    return out.to(dtype)


@_grouped_transposed.register_fake  # type: ignore[untyped-decorator]
def _(
    x: torch.Tensor, weight: torch.Tensor, tokens: torch.Tensor | None, ends: torch.Tensor, count: int, qtype: int,
    dtype: torch.dtype, triton: bool,
) -> torch.Tensor:  # fmt: skip
    return x.new_empty((count, decode.layout(qtype).columns(weight[0])), dtype=dtype)


def _context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    x, weight, tokens, ends, ctx.qtype, _, ctx.triton = inputs
    ctx.save_for_backward(weight, tokens, ends)
    ctx.count, ctx.dtype = x.shape[0], x.dtype


def _backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    weight, tokens, ends = ctx.saved_tensors
    found = _grouped_transposed(
        gradient.contiguous(), weight, tokens, ends, ctx.count, ctx.qtype, ctx.dtype, ctx.triton
    )
    return found, *[None] * 6


_grouped.register_autograd(_backward, setup_context=_context)


def product(
    x: torch.Tensor, weight: torch.Tensor, qtype: int, ends: torch.Tensor, *, tokens: torch.Tensor | None = None,
    path: str | None = None,
) -> torch.Tensor:  # fmt: skip
    """``y[i] = W[e] x[tokens[i]]``, e the matrix in whose share of the rows i lies.

    Args:
        x: (t, columns) of a floating dtype, rotated for trellis types (:func:`.products.product`).
        weight: uint8 (experts, rows, bytes of a row).
        qtype: its type.
        ends: int64 (experts,): where the rows of each matrix end; those of the next begin there.
        tokens: int64 (s,): which row of ``x`` each row of the result reads; None for the same one.
        path: as :func:`.paths.choose` takes it.

    Returns:
        (s, rows); zeros behind the last end.

    Raises:
        ValueError: shapes or types that do not belong together.
    """
    columns = decode.layout(qtype).columns(weight[0])
    if x.ndim != 2 or x.shape[1] != columns or ends.shape != weight.shape[:1]:
        raise ValueError(
            f"inputs of shape {tuple(x.shape)} and {tuple(ends.shape)} ends do not match {len(weight)} matrices of "
            f"{columns} columns"
        )
    return _grouped(x, weight, tokens, ends, int(qtype), x.dtype, products.uses_triton(x, path))

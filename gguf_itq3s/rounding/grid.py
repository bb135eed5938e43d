"""Rounding to the fixed grid of one of ggml's types, with error feedback along the row (grid-ldlq.c does the same).

GPTQ (arXiv 2210.17323), or LDLQ (QuIP, arXiv 2307.13304), rounds columns left to right: with the Hessian of the inputs
as ``A diag(weight) A^T`` (:class:`gguf_itq3s.rounding.hessian.Factor`, here of inputs that are not rotated) the cost of
a row's errors e is ``sum_k weight[k] * (e[k] + sum_{j<k} A[j, k] e[j])^2``. Column k is rounded to the value of its
grid that is nearest to ::

    t[k] = x[k] - sum_{j<k} A[j, k] e[j]        e[k] = value[k] - x[k]

which makes its own term as small as the grid allows. Scales and minima come from ggml's own search
(``ggml_quantize_chunk``), made block by block of 256 columns on what the blocks before leave to be represented. Which
targets t a block has its columns' errors decide, so scales are looked for again on these, and of each row the try that
costs least is kept: on layers of a small model the second and the third take 2 to 8% and another 1% off the errors.
``weight`` takes the place of an importance matrix there: how much a column counts once the others have made up for it.
The diagonal of the Hessian, which an importance matrix holds, gave a Hessian-weighted error 0.8% higher.

The arithmetic is float32 with one fixed order of operations (sums over columns run in ascending order, products are
rounded before they are added), so the C code reproduces every byte.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Type

from ..codec.blocks import ByteArray
from ..codec.grids import GRIDS, CodeArray, Grid, put_codes, scales_of
from ..codec.native import NativeLibrary
from ..codec.transform import BLOCK, FloatArray
from .hessian import Factor
from .ldlq import check_shape

#: How often scales are looked for, of a block of columns.
SEARCHES: Final = 3
#: Encoded rows (m, 256), with ggml's search for scales, of float32 (m, 256) whose columns count as given (256,).
ScaleSearch = Callable[[FloatArray, FloatArray], ByteArray]


def round_block(
    weights: FloatArray, target: FloatArray, feedback: FloatArray, scale: FloatArray, minimum: FloatArray, grid: Grid
) -> tuple[CodeArray, FloatArray, FloatArray]:
    """Round a block of columns, each to the value nearest to its target after the errors of those before it.

    Args:
        weights: float32 (m, 256).
        target: float32 (m, 256): the weights less what the errors of the blocks before feed to them.
        feedback: float32 (256, 256), unit upper triangular.
        scale: float32 (m, groups).
        minimum: float32 (m, groups).
        grid: of the type. Half-way, the even code is taken, or the lower level of a table; a scale of 0 gives the code
            nearest to 0.

    Returns:
        Codes (m, 256); the errors ``value - weight``; the residuals ``value - t``, whose squares by
        ``Factor.weight`` are what the rounding costs.
    """
    left = target.T.copy()  # columns first: one is contiguous
    codes = np.empty(left.shape, dtype=np.int8)
    errors, residual = np.empty_like(left), np.empty_like(left)
    unit = np.divide(np.float32(1), scale, out=np.zeros_like(scale), where=scale != 0)
    low, high = np.float32(grid.low), np.float32(grid.high)
    for k in range(left.shape[0]):
        group = k // grid.group
        d, m = scale[:, group], minimum[:, group]
        x = (left[k] + m) * unit[:, group]
        if grid.table is None:
            x = np.where(x > low, x, low)  # what is not a number becomes the least code
            level = np.rint(np.where(x < high, x, high))
            codes[k] = level
        else:
            middles = (grid.table[:-1] + grid.table[1:]) * np.float32(0.5)
            codes[k] = (x > middles[:, None]).sum(axis=0)
            level = grid.table[codes[k]]
        value = d * level - m
        errors[k] = value - weights[:, k]
        residual[k] = value - left[k]
        left[k + 1 :] -= feedback[k, k + 1 :, None] * errors[k]
    return codes.T, errors.T, residual.T


def quantize(
    array: FloatArray, qtype: Type, factor: Factor, *, library: NativeLibrary | None, native: bool = True,
    threads: int = 1,
) -> ByteArray:  # fmt: skip
    """Quantize the rows of a matrix with the Hessian of their inputs.

    Args:
        array: (m, n) weights, converted to float32.
        qtype: one of :data:`gguf_itq3s.codec.grids.GRIDS`.
        library: the C library; without it only types that gguf-py quantizes are possible, scales not weighted.
        native: round in C too; the bytes are the same.

    Returns:
        uint8 (m, bytes of a row).

    Raises:
        ValueError: the shapes do not match.
    """
    weights = np.ascontiguousarray(array, dtype=np.float32)
    check_shape(weights, factor)
    length = weights.shape[1]
    if length % BLOCK:
        weights, factor = _padded(weights, factor)
    rows, n = weights.shape
    grid, (block, size) = GRIDS[qtype], gguf.GGML_QUANT_SIZES[qtype]
    in_c = library if native else None

    def search(block: FloatArray, importance: FloatArray) -> ByteArray:
        if library is None:
            return gguf.quants.quantize(block, qtype)
        return library.quantize_type(block, qtype, importance=importance, threads=threads)

    errors = np.zeros((rows, n), dtype=np.float32)
    out = []
    for number, start in enumerate(range(0, n, BLOCK)):
        part = slice(start, start + BLOCK)
        x = np.ascontiguousarray(weights[:, part])
        target = x.copy()
        if factor.full and start:
            _feed(target, errors, factor.feedback, start, in_c, threads)
        feedback = factor.feedback[part, part] if factor.full else factor.feedback[number]
        asked, least = target, np.full(rows, np.nan)
        data = np.empty((rows, BLOCK // block * size), dtype=np.uint8)
        for _ in range(SEARCHES):
            found = search(asked, factor.weight[part])
            scale, minimum = scales_of(found, qtype)
            if in_c is None:
                codes, own, residual = round_block(x, target, feedback, scale, minimum, grid)
            else:
                codes, own, residual = in_c.round_block(x, target, feedback, scale, minimum, grid, threads=threads)
            coded = put_codes(found, codes, qtype)
            cost = np.square(residual, dtype=np.float64) @ factor.weight[part].astype(np.float64)
            better = np.isnan(least) | (cost < least)
            least[better], data[better] = cost[better], coded[better]
            errors[better, part] = own[better]
            asked = x + own - residual
        out.append(data)
    return np.concatenate(out, axis=1)[:, : length // block * size]


def _padded(weights: FloatArray, factor: Factor) -> tuple[FloatArray, Factor]:
    """Rows and their factor with columns of zeros behind them, which feed nothing, to whole blocks of 256."""
    n = weights.shape[1]
    more = -n % BLOCK
    pad = ((0, 0), (0, more))
    if factor.full:
        feedback = np.pad(factor.feedback, ((0, more), (0, more)))
    else:
        short = factor.feedback.shape[-1]
        feedback = np.zeros(((n + more) // BLOCK, BLOCK, BLOCK), dtype=np.float32)
        for number, part in enumerate(factor.feedback):
            at, start = divmod(number * short, BLOCK)
            feedback[at, start : start + short, start : start + short] = part
    return np.pad(weights, pad), Factor(feedback, np.pad(factor.weight, (0, more), constant_values=1))


def _feed(
    target: FloatArray, errors: FloatArray, feedback: FloatArray, start: int, library: NativeLibrary | None,
    threads: int,
) -> None:  # fmt: skip
    """Take from the block of targets at ``start`` what the errors of all columns before it feed to it."""
    if library is not None:
        library.feed_errors(target, errors, feedback, start, threads=threads)
        return
    for j in range(start):
        target -= feedback[j, start : start + BLOCK] * errors[:, j, None]

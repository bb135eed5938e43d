"""The scale solver: find d, and with it the path, that gives a block the least squared error.

For each start scale the trellis is searched once, then d is refitted by least squares to the levels found and rounded
to what a block can store; the start whose block has the least error wins. The arithmetic is float32 in one fixed order
(sums fold the block in halves), so the C quantizer reproduces every byte.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from .formats import Format
from .transform import FloatArray
from .trellis import IndexArray, search

F16_MAX = np.float32(65504)
#: Bits of the start state, in the lowest of a block's last number.
STATE_MASK = np.uint16(0x3F)
# The largest scale whose lowest bits are zero.
_F16_MAX_STATE = np.float32(63488)


class Path(NamedTuple):
    """What is stored of m blocks of n weights, one a column.

    Attributes:
        indices: uint8 (n, m), level indices ``8 * symbol + subset``, of which only the symbols are stored.
        selectors: uint8 (n, m) of 0 and 1.
        start: uint8 (m,), the states before the first weights.
        d: float16 (m,), scales.
    """

    indices: IndexArray
    selectors: IndexArray
    start: IndexArray
    d: npt.NDArray[np.float16]


def fold_sum(x: FloatArray) -> FloatArray:
    """Sum down the first axis by folding halves: x[i] + x[i + n/2], then n/4, and so on (n a power of two)."""
    while x.shape[0] > 1:
        half = x.shape[0] // 2
        x = x[:half] + x[half:]
    return x[0]


def block_rms(x: FloatArray) -> FloatArray:
    """Root mean square of each column: float32 (n, m) -> (m,)."""
    return np.sqrt(fold_sum(x * x) * np.float32(1.0 / x.shape[0]))


def block_magnitude(x: FloatArray, fmt: Format) -> FloatArray:
    """What start scales are taken from: the RMS of each column, or its largest magnitude, as the format says.

    float32 (n, m) -> (m,), 0 where the RMS is: squares that underflow leave a block to zero.
    """
    rms = block_rms(x)
    if fmt.peak_in_levels is None:
        return rms
    return np.where(rms > 0, np.abs(x).max(axis=0), np.float32(0))


def storable(d: FloatArray, fmt: Format) -> npt.NDArray[np.float16]:
    """The nearest scale that a block can store: float16, its lowest bits zero where the start state takes them.

    float32 (m,) -> float16 (m,), within 0 and the largest such number; NaN stays.
    """
    half = np.clip(d, np.float32(0), F16_MAX if fmt.zero_point else _F16_MAX_STATE).astype(np.float16)
    if fmt.zero_point:
        return half
    return ((half.view(np.uint16) + (STATE_MASK // np.uint16(2) + np.uint16(1))) & ~STATE_MASK).view(np.float16)


def start_factors(magnitude: FloatArray, magnitude_in_levels: np.float32, fmt: Format) -> FloatArray:
    """What takes the weights of each block to level units at a start scale: float32 (m,), positive -> (m,).

    Where few scales can be stored, the search is at one of them.
    """
    factor = np.divide(magnitude_in_levels, magnitude, dtype=np.float32)
    if fmt.zero_point:
        return factor
    d = storable(np.divide(np.float32(32), factor, dtype=np.float32), fmt).astype(np.float32)
    return np.divide(np.float32(32), d, out=factor, where=d > 0)


def solve(x: FloatArray, effort: str, fmt: Format) -> Path:
    """Search path and scale of every column.

    Args:
        x: float32 (n, m) rotated weights, finite, one block a column; magnitudes below 2**56.
        effort: a key of ``fmt.starts``.
        fmt: levels, trellis and start scales.

    Returns:
        The paths. A block whose RMS is zero, or whose scale rounds to zero, is zero throughout.

    Raises:
        ValueError: unknown effort.
    """

    def searched(factor: FloatArray) -> tuple[Path, FloatArray]:
        indices, selectors, start = search(x * factor, fmt.trellis, fmt.levels)
        levels = fmt.level_values[indices]
        d = storable(np.float32(32) * (fold_sum(x * levels) / fold_sum(levels * levels)), fmt)
        residual = x - levels * (d.astype(np.float32) * np.float32(1 / 32))
        return Path(indices, selectors, start, d), fold_sum(residual * residual)

    return best_path(x, effort, fmt, searched)


def best_path(
    x: FloatArray, effort: str, fmt: Format, searched: Callable[[FloatArray], tuple[Path, FloatArray]]
) -> Path:
    """The path of each block that has the least error of those found at the start scales, the earlier on a tie.

    Args:
        x: float32 (n, m) rotated weights, one block a column.
        effort: a key of ``fmt.starts``.
        fmt: start scales, and what scales can be stored.
        searched: what takes weights to level units, float32 (m,), to the paths found there and their errors (m,).

    Raises:
        ValueError: unknown effort.
    """
    magnitude = block_magnitude(x, fmt)
    alive = magnitude > 0
    safe_magnitude = np.where(alive, magnitude, np.float32(1))
    first, *others = fmt.start_levels(effort)
    best, least = searched(start_factors(safe_magnitude, first, fmt))
    for magnitude_in_levels in others:
        found, error = searched(start_factors(safe_magnitude, magnitude_in_levels, fmt))
        better = error < least
        pairs: list[tuple[np.ndarray, np.ndarray]] = list(zip((*best, least), (*found, error), strict=True))
        for kept, new in pairs:
            np.copyto(kept, new, where=better)
    dead = ~alive | (best.d == 0)
    best.indices[:, dead] = 0
    best.selectors[:, dead] = 0
    best.start[dead] = 0
    best.d[dead] = 0
    return best

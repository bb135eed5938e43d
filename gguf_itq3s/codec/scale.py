"""The scale solver: find d, and with it the path, that gives a block the least squared error.

For each start scale the trellis is searched once, then d is refitted by least squares to the levels found and rounded
to float16; the start whose block has the least error wins. The arithmetic is float32 in one fixed order (sums fold
the block in halves), so the C quantizer reproduces every byte.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from .formats import Format
from .transform import FloatArray
from .trellis import IndexArray, search

F16_MAX = np.float32(65504)


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


def fit_scale(x: FloatArray, levels: FloatArray) -> npt.NDArray[np.float16]:
    """The least-squares scale d = 32 <x, L> / <L, L> of each column, L the levels of its path.

    float32 (n, m), twice -> float16 (m,), clamped to the largest finite one.
    """
    d = np.float32(32) * (fold_sum(x * levels) / fold_sum(levels * levels))
    return np.clip(d, -F16_MAX, F16_MAX).astype(np.float16)


def solve(x: FloatArray, effort: str, fmt: Format) -> tuple[IndexArray, IndexArray, npt.NDArray[np.float16]]:
    """Search path and scale of every column.

    Args:
        x: float32 (n, m) rotated weights, finite, one block a column; magnitudes below 2**56.
        effort: a key of ``fmt.starts``.
        fmt: levels, trellis and start scales.

    Returns:
        uint8 (n, m) level indices, uint8 (n, m) selector bits, float16 (m,) scales. A block whose RMS is zero,
        or whose scale rounds to zero, has scale 0 and index and selector 0 throughout.

    Raises:
        ValueError: unknown effort.
    """
    starts = fmt.start_levels(effort)
    magnitude = block_magnitude(x, fmt)
    alive = magnitude > 0
    safe_magnitude = np.where(alive, magnitude, np.float32(1))
    best_error = np.full(x.shape[1], np.inf, dtype=np.float32)
    best_indices, best_selectors = np.empty(x.shape, dtype=np.uint8), np.empty(x.shape, dtype=np.uint8)
    best_d = np.empty(x.shape[1], dtype=np.float16)
    for magnitude_in_levels in starts:
        scaled = np.multiply(x, magnitude_in_levels / safe_magnitude, dtype=np.float32)
        indices, selectors = search(scaled, fmt.trellis, fmt.levels)
        levels = fmt.level_values[indices]
        d = fit_scale(x, levels)
        residual = x - levels * (d.astype(np.float32) * np.float32(1 / 32))
        error = fold_sum(residual * residual)
        better = error < best_error
        np.copyto(best_indices, indices, where=better)
        np.copyto(best_selectors, selectors, where=better)
        np.copyto(best_d, d, where=better)
        np.copyto(best_error, error, where=better)
    dead = ~alive | (best_d == 0)
    best_indices[:, dead] = 0
    best_selectors[:, dead] = 0
    best_d[dead] = 0
    return best_indices, best_selectors, best_d

"""Second moments and weights that the tests of calibrated rounding share."""

from __future__ import annotations

import numpy as np

from gguf_itq3s.rounding import ldlq

#: Searches of every kind: default, which has the longest sight, short segments, several start scales, no sight.
SEARCHES = [
    ldlq.Search(),
    ldlq.Search(4, 16, "fast"),
    ldlq.Search(16, effort="default"),
    ldlq.Search(1, 0, "fast"),
    ldlq.Search(64, 0, "fast"),
    ldlq.Search(3, 7),
]


def second_moment(columns: int, rank: int, seed: int = 0) -> np.ndarray:
    """A random positive semidefinite matrix with uneven columns."""
    rng = np.random.default_rng(seed)
    inputs = rng.standard_normal((rank, columns)) @ np.diag(np.exp(rng.standard_normal(columns)))
    return inputs.T @ inputs / rank


def blocks_of(matrix: np.ndarray, block: int = 256) -> np.ndarray:
    """The diagonal blocks: (n, n) -> (n / block, block, block)."""
    return np.stack([matrix[i : i + block, i : i + block] for i in range(0, len(matrix), block)])


def rows(count: int, columns: int, seed: int = 0) -> np.ndarray:
    """Gaussian weights, float32 (count, columns)."""
    return np.random.default_rng(seed).standard_normal((count, columns)).astype(np.float32) * np.float32(0.02)

"""The trellis: the subset rule of the format, and the search against exhaustive search."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from gguf_itq3s.codec.family import FAMILY
from gguf_itq3s.codec.formats import Format
from gguf_itq3s.codec.trellis import TRELLIS, Trellis, nearest_symbols, search

FORMATS = [row.format for row in FAMILY.values()]
of_formats = pytest.mark.parametrize("fmt", FORMATS, ids=lambda fmt: fmt.name)


def test_subsets_follow_the_format() -> None:
    """docs/format.md: c2 = s[t]^s[t-5]^s[t-6], c1 = s[t-1]^s[t-3]^s[t-4]^s[t-5], c0 = s[t-2]^s[t-4]; s[-1-i] is bit i
    of the start state."""
    s = np.random.default_rng(0).integers(0, 2, (256, 5)).astype(np.uint8)
    start = np.array([0, 1, 32, 37, 63], dtype=np.uint8)
    got = TRELLIS.subsets(s, start)
    padded = np.concatenate([[start >> bit & 1 for bit in range(5, -1, -1)], s])
    for t in range(256):
        now = padded[t : t + 7][::-1]  # now[i] = s[t-i]
        c2, c1, c0 = now[0] ^ now[5] ^ now[6], now[1] ^ now[3] ^ now[4] ^ now[5], now[2] ^ now[4]
        np.testing.assert_array_equal(got[t], 4 * c2 + 2 * c1 + c0)


def least_cost(y: np.ndarray, start: int, trellis: Trellis, fmt: Format) -> float:
    """Least squared error of the paths from a state, in float64: all selectors at once."""
    selectors = np.array(list(itertools.product((0, 1), repeat=y.size)), dtype=np.uint8).T
    subsets = trellis.subsets(selectors, np.full(selectors.shape[1], start, dtype=np.uint8))
    levels = fmt.levels.reshape(-1, trellis.subset_count).astype(np.float64)
    nearest = np.min((y[:, None, None] - levels) ** 2, axis=1)  # of each weight and subset
    return float(np.take_along_axis(nearest, subsets, axis=1).sum(axis=0).min())


@of_formats
@pytest.mark.parametrize("trellis", [Trellis(2, (0b101, 0b010, 0b010)), TRELLIS], ids=["4 states", "64 states"])
def test_search_is_optimal(trellis: Trellis, fmt: Format) -> None:
    y = (np.random.default_rng(5).standard_normal((7, 4)) * fmt.rms_in_levels).astype(np.float32)
    indices, selectors, start = search(y, trellis, fmt.levels)
    np.testing.assert_array_equal(indices % trellis.subset_count, trellis.subsets(selectors, start))
    for column in range(y.shape[1]):
        values = y[:, column].astype(np.float64)
        best = min(least_cost(values, state, trellis, fmt) for state in range(trellis.states))
        got = float(np.sum((values - fmt.levels[indices[:, column]]) ** 2))
        assert got == pytest.approx(best, rel=1e-5)


@of_formats
def test_nearest_symbols_breaks_ties_downwards(fmt: Format) -> None:
    levels = fmt.level_values
    middle = (levels[0] + levels[8]) / 2
    y = np.array([[middle, np.nextafter(middle, np.float32(64))]], np.float32)
    metric, symbol = nearest_symbols(y, fmt.levels, 8)
    assert symbol[0, 0].tolist() == [0, 1]
    np.testing.assert_array_equal(metric[0, 0, 0], (middle - levels[0]) ** 2)


@pytest.mark.parametrize(
    ("memory", "checks"),
    [(6, (0o103, 0o025)), (6, (0o102, 0o024)), (6, (0o003, 0o024)), (6, (0o103, 0o024, 0o124)), (2, (0o105, 0o2))],
)  # fmt: skip
def test_checks_that_break_the_butterfly_are_refused(memory: int, checks: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="parity checks"):
        Trellis(memory, checks)

"""The trellis: the subset rule of the format, and the search against exhaustive search."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from gguf_itq3s.codec.family import FAMILY
from gguf_itq3s.codec.formats import Format
from gguf_itq3s.codec.trellis import TRELLIS, UNGERBOECK, Trellis, nearest_symbols, search
from selection import some

FORMATS = [row.format for row in FAMILY.values()]
of_formats = pytest.mark.parametrize("fmt", FORMATS, ids=lambda fmt: fmt.name)


def test_subsets_follow_the_format() -> None:
    """docs/format.md: c1 = s[t]^s[t-1]^s[t-6], c0 = s[t-2]^s[t-4], s = 0 before the block."""
    s = np.random.default_rng(0).integers(0, 2, (256, 5)).astype(np.uint8)
    got = TRELLIS.subsets(s)
    padded = np.concatenate([np.zeros((6, 5), np.uint8), s])
    for t in range(256):
        now = padded[t : t + 7][::-1]  # now[i] = s[t-i]
        np.testing.assert_array_equal(got[t], 2 * (now[0] ^ now[1] ^ now[6]) + (now[2] ^ now[4]))


def path_cost(y: np.ndarray, selectors: np.ndarray, trellis: Trellis, fmt: Format) -> float:
    """Least squared error of one selector sequence, in float64."""
    subsets = trellis.subsets(selectors[:, None].astype(np.uint8))[:, 0]
    return float(
        sum(np.min((value - fmt.levels[c::4].astype(np.float64)) ** 2) for value, c in zip(y, subsets, strict=True))
    )


@of_formats
@pytest.mark.parametrize("states", some(sorted(UNGERBOECK), lambda states: states in (4, 64), pytest.mark.slow))
def test_search_is_optimal(states: int, fmt: Format) -> None:
    trellis = UNGERBOECK[states]
    y = (np.random.default_rng(states).standard_normal((9, 6)) * fmt.rms_in_levels).astype(np.float32)
    indices, selectors = search(y, trellis, fmt.levels)
    np.testing.assert_array_equal(indices & 3, trellis.subsets(selectors))
    for column in range(y.shape[1]):
        values = y[:, column].astype(np.float64)
        best = min(path_cost(values, np.array(bits), trellis, fmt) for bits in itertools.product((0, 1), repeat=9))
        got = float(np.sum((values - fmt.levels[indices[:, column]]) ** 2))
        assert got == pytest.approx(best, rel=1e-5)


@of_formats
def test_nearest_symbols_breaks_ties_downwards(fmt: Format) -> None:
    levels = fmt.level_values
    middle = (levels[0] + levels[4]) / 2
    metric, symbol = nearest_symbols(np.array([[middle, np.nextafter(middle, np.float32(64))]], np.float32), fmt.levels)
    assert symbol[0, 0].tolist() == [0, 1]
    np.testing.assert_array_equal(metric[0, 0, 0], (middle - levels[0]) ** 2)


@pytest.mark.parametrize("checks", [(6, 0o103, 0o025), (6, 0o102, 0o024), (6, 0o003, 0o024), (2, 0o105, 0o2)])
def test_checks_that_break_the_butterfly_are_refused(checks: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match="parity checks"):
        Trellis(*checks)

"""Calibrated quantization: the numpy reference against its own promises, and C against numpy."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gguf_itq3s.codec import blocks
from gguf_itq3s.codec.transform import fwht
from gguf_itq3s.codec.trellis import ITQ3_S_TRELLIS, LEVELS, search
from gguf_itq3s.rounding import hessian, ldlq
from hessians import SEARCHES, rows, second_moment
from selection import some


def rotated_error(weights: np.ndarray, data: np.ndarray) -> np.ndarray:
    return fwht(blocks.dequantize(data) - weights)


@pytest.mark.slow
@settings(deadline=None, max_examples=8)
@given(st.integers(0, 1000), st.integers(40, 400), st.sampled_from([256, 512]))
def test_never_worse_than_rounding(seed: int, rank: int, columns: int) -> None:
    """On random positive-definite matrices the Hessian-weighted error does not increase."""
    weights, h = rows(24, columns, seed), second_moment(columns, rank, seed) + 0.01 * np.eye(columns)
    plain = hessian.cost(rotated_error(weights, blocks.quantize(weights)), h)
    calibrated = hessian.cost(rotated_error(weights, ldlq.quantize(weights, hessian.factorize(h))), h)
    assert calibrated <= plain


@pytest.mark.slow
def test_much_better_where_inputs_are_correlated() -> None:
    """The cost is that of one column less what later columns make up for."""
    weights, h = rows(64, 512), second_moment(512, 200) + 0.01 * np.eye(512)
    plain = hessian.cost(rotated_error(weights, blocks.quantize(weights)), h)
    costs = [
        hessian.cost(rotated_error(weights, ldlq.quantize(weights, hessian.factorize(h), options)), h)
        for options in (ldlq.Search(1, 0, "fast"), ldlq.Search(4, 16, "fast"), ldlq.Search())
    ]
    assert costs[2] < costs[1] < costs[0] < 0.6 * plain
    assert costs[2] < 0.4 * plain


@pytest.mark.parametrize("effort", some(blocks.EFFORTS, lambda effort: effort == "fast", pytest.mark.slow))
@pytest.mark.parametrize("h", [np.eye(512), np.stack([np.eye(256)] * 2) * 3, np.zeros((512, 512))])
def test_identity_is_plain_rounding(h: np.ndarray, effort: str) -> None:
    weights = rows(20, 512)
    data = ldlq.quantize(weights, hessian.factorize(h), ldlq.Search(effort=effort))
    np.testing.assert_array_equal(data, blocks.quantize(weights, effort=effort))


def test_search_of_an_uncoupled_block_is_the_viterbi_search() -> None:
    target = np.random.default_rng(3).standard_normal((256, 9)).astype(np.float32) * 25
    weight = np.ones(256, dtype=np.float32)
    found = ldlq.search(target, np.eye(256, dtype=np.float32), weight, ldlq.Search(4, 4))
    for got, expected in zip(found, search(target), strict=True):
        np.testing.assert_array_equal(got, expected)


@pytest.mark.slow
def test_levels_are_those_of_the_selectors() -> None:
    """Committing segment by segment leaves one path through the trellis."""
    weights, h = rows(40, 256), second_moment(256, 60)
    feedback = hessian.factorize(h)
    for options in SEARCHES:
        indices, selectors = ldlq.search(
            np.ascontiguousarray(fwht(weights).T) * 1200, feedback.feedback, feedback.weight, options
        )
        np.testing.assert_array_equal(ITQ3_S_TRELLIS.subsets(selectors), indices & 3)


def test_scale_is_the_best_for_its_levels() -> None:
    """Refitted under the Hessian: no other scale has less cost."""
    weights, h = rows(6, 256), second_moment(256, 100) + 0.01 * np.eye(256)
    factor = hessian.factorize(h, 1e-6)
    data = ldlq.quantize(weights, factor)
    indices, _, d, _ = blocks.unpack(data)
    for row in range(len(weights)):
        levels = LEVELS[indices[:, row]].astype(np.float64) / 32
        x = fwht(weights[row]).astype(np.float64)
        best = (levels @ h @ x) / (levels @ h @ levels)
        assert float(d[row]) == pytest.approx(best, rel=2e-3)


@pytest.mark.slow
def test_edge_rows() -> None:
    factor = hessian.factorize(second_moment(256, 100))
    zero = np.zeros((3, 256), dtype=np.float32)
    assert not ldlq.quantize(zero, factor).any()
    assert not ldlq.quantize(zero + np.float32(1e-12), factor).any()
    assert ldlq.quantize(np.zeros((0, 256)), factor).shape == (0, 100)
    for bad in (np.nan, np.inf, 1e30):
        with pytest.raises(ValueError, match="NaN, infinite"):
            ldlq.quantize(np.full((1, 256), bad), factor)
    with pytest.raises(ValueError, match="do not match"):
        ldlq.quantize(np.zeros((3, 512)), factor)


def test_bad_options_are_refused() -> None:
    for segment, lookahead in ((0, 8), (8, -1), (8, 26), (60, 8)):
        with pytest.raises(ValueError, match="segment"):
            ldlq.Search(segment, lookahead)
    with pytest.raises(ValueError, match="unknown effort"):
        ldlq.Search(effort="best")

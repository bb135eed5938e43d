"""Calibrated quantization: the numpy reference against its own promises, and C against numpy."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from gguf_itq3s.codec import blocks
from gguf_itq3s.codec.family import FAMILY, TrellisType
from gguf_itq3s.codec.transform import fwht
from gguf_itq3s.rounding import hessian, ldlq
from hessians import blocks_of, rows, second_moment
from selection import some

ROWS = list(FAMILY.values())
of_types = pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)


def rotated_error(weights: np.ndarray, data: np.ndarray, row: TrellisType) -> np.ndarray:
    return fwht(blocks.dequantize(data, fmt=row.format) - weights, row.format.block)


@pytest.mark.slow
@of_types
def test_much_better_where_inputs_are_correlated(row: TrellisType) -> None:
    """The cost is that of one column less what later columns make up for."""
    weights, h = rows(64, 512), second_moment(512, 200) + 0.01 * np.eye(512)
    plain = hessian.cost(rotated_error(weights, blocks.quantize(weights, row.format), row), h)
    costs = [
        hessian.cost(
            rotated_error(weights, ldlq.quantize(weights, hessian.factorize(h), options, qtype=row.type), row), h
        )
        for options in (ldlq.Search(1, 0, "fast"), ldlq.Search(4, 16, "fast"), ldlq.Search())
    ]
    # One survivor alone is hardly better than nearest rounding, 0.73 to 1.02 of it; all of them leave 0.07 to 0.11.
    assert costs[2] < costs[1] < 0.2 * costs[0]
    assert costs[2] < 0.13 * plain


@of_types
@pytest.mark.parametrize("effort", some(blocks.EFFORTS, lambda effort: effort == "fast", pytest.mark.slow))
@pytest.mark.parametrize(
    "form", [lambda eye, _: eye, lambda eye, block: blocks_of(eye, block) * 3, lambda eye, _: eye * 0],
    ids=["full", "block", "zero"],
)  # fmt: skip
def test_identity_is_plain_rounding(
    form: Callable[[np.ndarray, int], np.ndarray], effort: str, row: TrellisType
) -> None:
    weights, h = rows(20, 512), form(np.eye(512), row.format.block)
    data = ldlq.quantize(weights, hessian.factorize(h), ldlq.Search(effort=effort), qtype=row.type)
    np.testing.assert_array_equal(data, blocks.quantize(weights, row.format, effort=effort))


@pytest.mark.slow
@of_types
def test_edge_rows(row: TrellisType) -> None:
    factor = hessian.factorize(second_moment(256, 100))
    zero = np.zeros((3, 256), dtype=np.float32)
    assert not ldlq.quantize(zero, factor, qtype=row.type).any()
    assert not ldlq.quantize(zero + np.float32(1e-12), factor, qtype=row.type).any()
    assert ldlq.quantize(np.zeros((0, 256)), factor, qtype=row.type).shape == (
        0, 256 // row.format.block * row.format.block_bytes,
    )  # fmt: skip
    for bad in (np.nan, np.inf, 1e30):
        with pytest.raises(ValueError, match="NaN, infinite"):
            ldlq.quantize(np.full((1, 256), bad), factor, qtype=row.type)
    with pytest.raises(ValueError, match="do not match"):
        ldlq.quantize(np.zeros((3, 512)), factor, qtype=row.type)


def test_bad_options_are_refused() -> None:
    for segment, lookahead in ((0, 8), (8, -1), (8, 26), (60, 8)):
        with pytest.raises(ValueError, match="segment"):
            ldlq.Search(segment, lookahead)
    with pytest.raises(ValueError, match="unknown effort"):
        ldlq.Search(effort="best")

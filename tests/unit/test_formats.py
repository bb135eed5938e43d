"""Search, scale solver and block layout with another number of symbol bits: a format is an instance, not a copy."""

from __future__ import annotations

import numpy as np
import pytest

from distributions import smooth
from gguf_itq3s.codec import scale
from gguf_itq3s.codec.blocks import decode_blocks, encode_trellis, unpack
from gguf_itq3s.codec.formats import ITQ3_S_FORMAT, Format
from gguf_itq3s.codec.transform import fwht
from gguf_itq3s.codec.trellis import ITQ3_S_TRELLIS, search
from gguf_itq3s.rounding import ldlq

#: One symbol bit, eight levels, no zero-point: 66 bytes for 256 weights.
TWO_BITS = Format(
    name="two bits",
    symbol_bits=1,
    levels=np.array([-63, -36, -20, -6, 6, 20, 36, 63], dtype=np.int8),
    trellis=ITQ3_S_TRELLIS,
    rms_in_levels=33.5,
    starts={"fast": (1.0,), "default": (1.0, 0.94, 1.06)},
    zero_point=False,
)


def test_sizes() -> None:
    assert (ITQ3_S_FORMAT.block_bytes, ITQ3_S_FORMAT.bits_per_weight) == (100, 3.125)
    assert (TWO_BITS.block_bytes, TWO_BITS.bits_per_weight) == (66, 2.0625)


@pytest.mark.parametrize("kind", ["gaussian", "laplace", "student-t4"])
def test_two_bits(kind: str) -> None:
    """Blocks come back as they were coded, with the error that a rate of two bits has with this code."""
    weights = smooth(1 << 17)[kind].reshape(-1, 256)
    x = np.ascontiguousarray(fwht(weights).T)
    indices, selectors, d = scale.solve(x, "default", TWO_BITS)
    blocks = encode_trellis(x, "default", TWO_BITS)
    assert blocks.shape == (weights.shape[0], 66)
    again = unpack(blocks, TWO_BITS)
    np.testing.assert_array_equal(again[0], indices)
    np.testing.assert_array_equal(again[1], selectors)
    np.testing.assert_array_equal(again[2], d)
    assert not again[3].any()
    error = np.square(decode_blocks(blocks, TWO_BITS) - weights).sum() / np.square(weights).sum()
    assert 0.07 < error < 0.084  # Gaussian, simulated: 0.081


def test_feedback_of_another_format() -> None:
    """Without feedback the calibrated search is the plain one, for any format."""
    target = np.random.default_rng(0).standard_normal((256, 5)).astype(np.float32) * 33.5
    found = ldlq.search(target, np.eye(256, dtype=np.float32), np.ones(256, np.float32), ldlq.Search(4, 4), TWO_BITS)
    plain = search(target, TWO_BITS.trellis, TWO_BITS.levels)
    for got, expected in zip(found, plain, strict=True):
        np.testing.assert_array_equal(got, expected)


def test_a_level_table_has_to_fit_the_symbols() -> None:
    with pytest.raises(ValueError, match="8 levels are not four subsets of 4"):
        Format("wrong", 2, TWO_BITS.levels, ITQ3_S_TRELLIS, 25.5, {"fast": (1.0,)}, True)

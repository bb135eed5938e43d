"""Recognising ternary matrices, the scale solvers, and exactness of TQ1_0 and TQ2_0."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
from gguf import quants
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from gguf_itq3s.codec import ternary

Q = gguf.GGMLQuantizationType


def random_trits(shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(-1, 2, shape).astype(np.float32)


@pytest.mark.parametrize(
    ("granularity", "scale"),
    [
        ("tensor", np.full((6, 1), 0.0371)),
        ("row", np.linspace(0.01, 0.2, 6)[:, None]),
        ("block", np.linspace(0.01, 0.2, 18).reshape(6, 3).repeat(256, axis=1)),
    ],
)
def test_recognised_with_its_granularity(granularity: str, scale: np.ndarray) -> None:
    weights = random_trits((6, 768)) * scale.astype(np.float32)
    found = ternary.recognise(weights)
    assert found is not None and found.granularity == granularity
    assert (found.weights() == weights).all()


def test_zero_rows_and_blocks_do_not_refine_the_granularity() -> None:
    weights = random_trits((6, 768)) * np.float32(0.25)
    weights[2] = 0
    weights[4, 256:512] = 0
    found = ternary.recognise(weights)
    assert found is not None and found.granularity == "tensor"
    assert (found.weights() == weights).all()


@pytest.mark.parametrize("change", [1e-7, np.nan, np.inf])
def test_one_other_value_is_enough_to_refuse(change: float) -> None:
    weights = random_trits((6, 768)) * np.float32(0.5)
    assert ternary.recognise(weights) is not None
    row, column = np.argwhere(weights != 0)[-1]
    weights[row, column] += change
    assert ternary.recognise(weights) is None


def test_ordinary_weights_are_not_ternary() -> None:
    assert ternary.recognise(np.random.default_rng(0).standard_normal((4, 512))) is None


@settings(max_examples=30)
@given(
    hnp.arrays(np.int8, (2, 512), elements=st.integers(-1, 1)),
    hnp.arrays(np.float16, (2, 2), elements=st.floats(2.0**-14, 1000, width=16)),
    st.sampled_from([Q.TQ1_0, Q.TQ2_0]),
)
def test_recognised_weights_survive_encoding_exactly(
    trits: np.ndarray, scales: np.ndarray, qtype: gguf.GGMLQuantizationType
) -> None:
    weights = (trits * scales.astype(np.float32).repeat(256, axis=1)).astype(np.float32)
    found = ternary.recognise(weights)
    assert found is not None and found.in_float16
    assert (quants.dequantize(found.encode(qtype), qtype) == weights).all()


def test_scales_outside_float16_are_noticed() -> None:
    third = ternary.recognise(random_trits((2, 256)) * np.float32(1 / 3))
    tiny = ternary.recognise(random_trits((2, 256)) * np.float32(1.00001e-6))
    huge = ternary.recognise(random_trits((2, 256)) * np.float32(1e6))
    assert third is not None and tiny is not None and huge is not None
    assert not third.in_float16 and third.rounds_to_float16
    assert not tiny.rounds_to_float16 and not huge.rounds_to_float16


def test_absmean_is_the_scale_of_training() -> None:
    weights = np.random.default_rng(1).standard_normal((8, 512)).astype(np.float32) * 0.02
    gamma = 1e-5 + np.abs(weights).mean(dtype=np.float64)
    found = ternary.ternarize(weights, "absmean")
    assert found.granularity == "tensor"
    assert found.scales == pytest.approx(gamma)
    assert (found.trits == np.rint(np.clip(weights / np.float32(gamma), -1, 1))).all()
    # Ternarizing what is ternary already changes no trit: training's scale of the latent weight is not needed again.
    again = ternary.recognise(found.weights())
    assert again is not None and (again.trits == found.trits).all()


def test_bad_input() -> None:
    with pytest.raises(ValueError, match="unknown ternary scale 'median'"):
        ternary.ternarize(np.ones((2, 256)), "median")
    with pytest.raises(ValueError, match="NaN or infinite"):
        ternary.ternarize(np.full((2, 256), np.nan))
    with pytest.raises(ValueError, match="a matrix is needed"):
        ternary.recognise(np.ones(256))

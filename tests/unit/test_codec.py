"""The codec: shared vectors, error limits, packing, edge cases."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from checkpoints import DATA
from distributions import all_rows, at_the_limit, smooth
from gguf_itq3s.codec import scale
from gguf_itq3s.codec.blocks import CODECS, EFFORTS, decode_blocks, dequantize, pack, quantize, unpack
from gguf_itq3s.codec.transform import fwht
from gguf_itq3s.codec.trellis import ITQ3_S_TRELLIS, LEVELS
from selection import some

VECTORS = DATA / "itq3_s_decode.npz"


def relative_squared_error(x: np.ndarray, y: np.ndarray) -> float:
    return float(np.sum((x.astype(np.float64) - y) ** 2) / np.sum(x.astype(np.float64) ** 2))


def test_shared_vectors_decode() -> None:
    vectors = np.load(VECTORS)
    weights = decode_blocks(vectors["blocks"])
    assert vectors["blocks"].shape == (64, 100)
    np.testing.assert_allclose(weights, vectors["weights"], rtol=1e-6)
    indices, _, d, z = unpack(vectors["blocks"])
    rotated = (LEVELS[indices].astype(np.float64) - z) * (d.astype(np.float64) / 32)
    np.testing.assert_allclose(rotated.T, vectors["rotated"], rtol=1e-12)


def test_vectors_survive_packing() -> None:
    blocks = np.load(VECTORS)["blocks"]
    np.testing.assert_array_equal(pack(*unpack(blocks)), blocks)


@settings(deadline=None, max_examples=30)
@given(st.binary(min_size=96, max_size=96))
def test_any_code_bytes_survive_packing(code: bytes) -> None:
    block = np.frombuffer(code + b"\x00\x3c\x00\x40", dtype=np.uint8).reshape(1, 100)
    np.testing.assert_array_equal(pack(*unpack(block)), block)


@pytest.mark.parametrize(
    "effort,limit", some([("fast", 0.0228), ("default", 0.0223)], lambda effort, _: effort == "fast", pytest.mark.slow)
)
def test_relative_squared_error(effort: str, limit: float) -> None:
    for name, x in smooth(2**20).items():
        error = relative_squared_error(x, dequantize(quantize(x, effort=effort)))
        assert error <= limit, name


def test_literal_ternary_error_is_the_papers() -> None:
    x = smooth(2**20)["gaussian"]
    error = relative_squared_error(x, dequantize(quantize(x, codec="ternary")))
    assert error == pytest.approx(0.263, rel=0.01)


def test_literal_ternary_decodes_to_three_values() -> None:
    x = all_rows()["gaussian"]
    blocks = quantize(x, codec="ternary").reshape(-1, 100)
    assert not blocks[:, 64:96].any()
    rotated = fwht(decode_blocks(blocks))
    alpha = blocks[:, 96:98].copy().view("<f2").astype(np.float64) * 22 / 32
    nearest = np.round(rotated / alpha)
    assert set(np.unique(nearest)) == {-1, 0, 1}
    np.testing.assert_allclose(rotated, nearest * alpha, atol=2e-6 * float(alpha.max()))
    sigma = np.sqrt(np.mean(x.reshape(-1, 256).astype(np.float64) ** 2, axis=1, keepdims=True))
    np.testing.assert_allclose(alpha, 0.798 * sigma, rtol=1e-3)


def test_effort_default_is_never_worse_on_a_block() -> None:
    x = all_rows()["laplace"].reshape(-1, 256)
    errors = {e: np.sum((x - dequantize(quantize(x, effort=e))) ** 2, axis=1) for e in EFFORTS}
    assert np.all(errors["default"] <= errors["fast"] * (1 + 1e-5))
    assert errors["default"].sum() < errors["fast"].sum()


@pytest.mark.parametrize("name", sorted(all_rows()))
@pytest.mark.parametrize("codec_name", CODECS)
def test_edge_rows_are_finite_and_no_worse_than_zero(name: str, codec_name: str) -> None:
    x = all_rows()[name]
    y = dequantize(quantize(x, codec=codec_name))
    assert np.isfinite(y).all()
    assert np.sum((x.astype(np.float64) - y) ** 2) <= np.sum(x.astype(np.float64) ** 2)


@pytest.mark.parametrize("codec_name", CODECS)
def test_blocks_that_round_to_zero_are_zero_bytes(codec_name: str) -> None:
    for name in ("zero", "below-f16", "float32-denormal"):
        assert not quantize(all_rows()[name], codec=codec_name).any(), name


def test_a_scale_beyond_float16_is_clamped() -> None:
    blocks = quantize(all_rows()["huge"]).reshape(-1, 100)
    assert np.abs(blocks[:, 96:98].copy().view("<f2").astype(np.float32)).max() == 65504


def test_stored_selectors_name_the_decoded_subset() -> None:
    indices, selectors, _ = scale.solve(np.ascontiguousarray(fwht(all_rows()["spike"]).reshape(-1, 256).T))
    np.testing.assert_array_equal(indices & 3, ITQ3_S_TRELLIS.subsets(selectors))


def test_rows_and_chunks_do_not_change_the_bytes() -> None:
    x = np.random.default_rng(5).standard_normal((1100, 256)).astype(np.float32)
    whole = quantize(x.reshape(11, -1))
    assert whole.shape == (11, 100 * 100)
    np.testing.assert_array_equal(whole.reshape(-1, 100)[[0, 511, 512, 1099]], quantize(x[[0, 511, 512, 1099]]))
    np.testing.assert_array_equal(dequantize(whole, (1100, 256)), dequantize(whole).reshape(1100, 256))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 1e30])
def test_unusable_weights_are_refused(bad: float) -> None:
    x = np.zeros((2, 256), dtype=np.float32)
    x[1, 17] = bad
    for codec_name in CODECS:
        with pytest.raises(ValueError, match="NaN, infinite"):
            quantize(x, codec=codec_name)


@pytest.mark.parametrize("codec_name", CODECS)
def test_finite_weights_are_taken_up_to_the_limit_that_the_error_names(codec_name: str) -> None:
    taken, refused = at_the_limit()
    blocks = quantize(taken, codec=codec_name)
    assert np.isfinite(blocks[:, 96:98].copy().view("<f2").astype(np.float32)).all()
    assert np.isfinite(dequantize(blocks)).all()
    for row in refused:
        with pytest.raises(ValueError, match=r"too large: weights below 2\*\*52 are taken"):
            quantize(row[None], codec=codec_name)


def test_bad_arguments_are_refused() -> None:
    x = np.zeros((2, 256), dtype=np.float32)
    with pytest.raises(ValueError, match="multiple of 256"):
        quantize(x[:, :255])
    with pytest.raises(ValueError, match="unknown effort"):
        quantize(x, effort="best")
    with pytest.raises(ValueError, match="unknown codec"):
        quantize(x, codec="lattice")
    with pytest.raises(ValueError, match="unknown effort"):
        scale.solve(np.zeros((256, 1), dtype=np.float32), "best")
    with pytest.raises(ValueError, match="multiple of 100"):
        dequantize(np.zeros((2, 99), dtype=np.uint8))
    with pytest.raises(ValueError, match="do not fill"):
        dequantize(np.zeros((2, 100), dtype=np.uint8), (3, 256))
    with pytest.raises(ValueError, match="shape"):
        unpack(np.zeros((2, 99), dtype=np.uint8))


def test_other_dtypes_are_converted() -> None:
    x = np.random.default_rng(6).standard_normal((2, 256))
    for dtype in (np.float16, np.float64):
        converted = x.astype(dtype)
        np.testing.assert_array_equal(quantize(converted), quantize(converted.astype(np.float32)))


@pytest.mark.parametrize("rows", [1, 2])
def test_the_input_is_left_alone(rows: int) -> None:
    x = np.random.default_rng(0).standard_normal((rows, 256)).astype(np.float32)
    before = x.copy()
    data = quantize(x)
    np.testing.assert_array_equal(x, before)
    kept = data.copy()
    dequantize(data)
    np.testing.assert_array_equal(data, kept)


def test_no_blocks() -> None:
    assert quantize(np.zeros((0, 256))).shape == (0, 100)
    assert dequantize(np.zeros((0, 100), dtype=np.uint8)).shape == (0, 256)

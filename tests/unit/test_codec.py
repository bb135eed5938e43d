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
from gguf_itq3s.codec.family import FAMILY
from gguf_itq3s.codec.formats import ITQ3_S_FORMAT, Format
from gguf_itq3s.codec.transform import fwht
from selection import some

FORMATS = [row.format for row in FAMILY.values()]
of_formats = pytest.mark.parametrize("fmt", FORMATS, ids=lambda fmt: fmt.name)
of_codecs = pytest.mark.parametrize(
    "fmt,codec_name", [(fmt, codec) for fmt in FORMATS for codec in fmt.codecs], ids=lambda v: getattr(v, "name", v)
)
#: Of symbol bits and weights of a block: relative squared error of the efforts at most.
LIMITS = {
    (2, 256): {"fast": 0.0194, "default": 0.0188}, (1, 256): {"fast": 0.0738, "default": 0.073},
    (2, 64): {"fast": 0.0168, "default": 0.0162}, (1, 64): {"fast": 0.0674, "default": 0.0654},
    (3, 256): {"fast": 0.00505, "default": 0.0048}, (3, 64): {"fast": 0.0046, "default": 0.00423},
}  # fmt: skip


def relative_squared_error(x: np.ndarray, y: np.ndarray) -> float:
    return float(np.sum((x.astype(np.float64) - y) ** 2) / np.sum(x.astype(np.float64) ** 2))


def scales(blocks: np.ndarray, fmt: Format) -> np.ndarray:
    """float32 (m,) scales of rows."""
    return unpack(blocks.reshape(-1, fmt.block_bytes), fmt)[0].d.astype(np.float32)


@of_formats
def test_shared_vectors_decode(fmt: Format) -> None:
    vectors = np.load(DATA / f"{fmt.name.lower()}_decode.npz")
    weights = decode_blocks(vectors["blocks"], fmt)
    assert vectors["blocks"].shape == (64 if fmt.block == 256 else 128, fmt.block_bytes)
    np.testing.assert_allclose(weights, vectors["weights"], rtol=1e-6, atol=1e-7 * np.abs(weights).max())
    path, z = unpack(vectors["blocks"], fmt)
    rotated = (fmt.levels[path.indices].astype(np.float64) - z) * (path.d.astype(np.float64) / 32)
    np.testing.assert_allclose(rotated.T, vectors["rotated"], rtol=1e-12)


@of_formats
@settings(deadline=None, max_examples=30)
@given(code=st.data())
def test_any_code_bytes_survive_packing(code: st.DataObject, fmt: Format) -> None:
    parts = code.draw(st.binary(min_size=fmt.scale_offset, max_size=fmt.scale_offset))
    block = np.frombuffer(parts + b"\x15\x3c\x2a\x40", dtype=np.uint8)[: fmt.block_bytes].reshape(1, -1)
    np.testing.assert_array_equal(pack(*unpack(block, fmt), fmt), block)


@of_formats
@pytest.mark.parametrize("effort", some(EFFORTS, lambda effort: effort == "fast", pytest.mark.slow))
def test_relative_squared_error(effort: str, fmt: Format) -> None:
    for name, x in smooth(2**20).items():
        error = relative_squared_error(x, dequantize(quantize(x, fmt, effort=effort), fmt=fmt))
        assert error <= LIMITS[fmt.symbol_bits, fmt.block][effort], name


def test_literal_ternary_decodes_to_three_values() -> None:
    x = all_rows()["gaussian"]
    blocks = quantize(x, ITQ3_S_FORMAT, codec="ternary").reshape(-1, 100)
    assert not blocks[:, 64:96].any()
    rotated = fwht(decode_blocks(blocks))
    alpha = scales(blocks, ITQ3_S_FORMAT).astype(np.float64)[:, None] * 17 / 32
    nearest = np.round(rotated / alpha)
    assert set(np.unique(nearest)) == {-1, 0, 1}
    np.testing.assert_allclose(rotated, nearest * alpha, atol=2e-6 * float(alpha.max()))
    sigma = np.sqrt(np.mean(x.reshape(-1, 256).astype(np.float64) ** 2, axis=1, keepdims=True))
    np.testing.assert_allclose(alpha, 0.798 * sigma, rtol=1e-3)


@pytest.mark.parametrize("name", sorted(all_rows()))
@of_codecs
def test_edge_rows_are_finite_and_no_worse_than_zero(name: str, fmt: Format, codec_name: str) -> None:
    x = all_rows()[name]
    y = dequantize(quantize(x, fmt, codec=codec_name), fmt=fmt)
    assert np.isfinite(y).all()
    assert np.sum((x.astype(np.float64) - y) ** 2) <= np.sum(x.astype(np.float64) ** 2)


@of_codecs
def test_blocks_that_round_to_zero_are_zero_bytes(fmt: Format, codec_name: str) -> None:
    for name in ("zero", "below-f16", "float32-denormal"):
        assert not quantize(all_rows()[name], fmt, codec=codec_name).any(), name


@of_formats
def test_a_scale_beyond_float16_is_clamped(fmt: Format) -> None:
    assert np.abs(scales(quantize(all_rows()["huge"], fmt), fmt)).max() == (65504 if fmt.zero_point else 63488)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 1e30])
@of_codecs
def test_unusable_weights_are_refused(bad: float, fmt: Format, codec_name: str) -> None:
    x = np.zeros((2, 256), dtype=np.float32)
    x[1, 17] = bad
    with pytest.raises(ValueError, match="NaN, infinite"):
        quantize(x, fmt, codec=codec_name)


@of_codecs
def test_finite_weights_are_taken_up_to_the_limit_that_the_error_names(fmt: Format, codec_name: str) -> None:
    taken, refused = at_the_limit(fmt.block)
    blocks = quantize(taken, fmt, codec=codec_name)
    assert np.isfinite(scales(blocks, fmt)).all()
    assert np.isfinite(dequantize(blocks, fmt=fmt)).all()
    for row in refused:
        with pytest.raises(ValueError, match=r"too large: weights below 2\*\*52 are taken"):
            quantize(row[None], fmt, codec=codec_name)


@of_formats
def test_bad_arguments_are_refused(fmt: Format) -> None:
    x, size = np.zeros((2, fmt.block), dtype=np.float32), fmt.block_bytes
    with pytest.raises(ValueError, match=f"{fmt.name} rows must be a multiple of {fmt.block}"):
        quantize(x[:, 1:], fmt)
    with pytest.raises(ValueError, match="unknown effort"):
        quantize(x, fmt, effort="best")
    with pytest.raises(ValueError, match="unknown codec"):
        quantize(x, fmt, codec="lattice")
    with pytest.raises(ValueError, match="unknown effort"):
        scale.solve(np.zeros((fmt.block, 1), dtype=np.float32), "best", fmt)
    with pytest.raises(ValueError, match=f"multiple of {size}"):
        dequantize(np.zeros((2, size - 1), dtype=np.uint8), fmt=fmt)
    with pytest.raises(ValueError, match="do not fill"):
        dequantize(np.zeros((2, size), dtype=np.uint8), (3, fmt.block), fmt)
    with pytest.raises(ValueError, match="shape"):
        unpack(np.zeros((2, size - 1), dtype=np.uint8), fmt)


@of_formats
def test_a_codec_that_a_format_lacks_is_refused(fmt: Format) -> None:
    for codec in set(CODECS) - set(fmt.codecs):
        with pytest.raises(ValueError, match=f"{fmt.name} has no codec '{codec}'; use one of trellis"):
            quantize(np.zeros((2, 256)), fmt, codec=codec)

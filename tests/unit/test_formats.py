"""Formats of other widths and lengths: search, scale solver and block layout take a format, they are no copies."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type

from distributions import smooth
from gguf_itq3s.codec import scale
from gguf_itq3s.codec.blocks import decode_blocks, dequantize, encode_blocks, pack, quantize, unpack
from gguf_itq3s.codec.family import FAMILY, TrellisType
from gguf_itq3s.codec.formats import Format
from gguf_itq3s.codec.transform import fwht
from gguf_itq3s.codec.trellis import UNGERBOECK, search
from gguf_itq3s.rounding import ldlq
from gguf_itq3s.torch import decode
from other_formats import FOUR_BITS, SHORT

SOURCES = Path(__file__).parents[2] / "ggml-patch" / "src" / "format"

#: And the range of the relative squared error of Gaussian weights: 0.0211 and 0.0815 simulated for blocks of 64.
FORMATS = [
    (FOUR_BITS, 130, 4.0625, (0.0055, 0.0075)),
    (SHORT[0], 26, 3.25, (0.0195, 0.0225)),
    (SHORT[1], 18, 2.25, (0.07, 0.084)),
]  # fmt: skip


@pytest.mark.parametrize("fmt,size,bits,limits", FORMATS, ids=lambda value: getattr(value, "name", None))
def test_another_format(fmt: Format, size: int, bits: float, limits: tuple[float, float]) -> None:
    """Blocks come back as they were coded, with the error that such a rate has with this code."""
    assert (fmt.block_bytes, fmt.bits_per_weight) == (size, bits)
    weights = smooth(1 << 16)["gaussian"].reshape(-1, fmt.block)
    x = np.ascontiguousarray(fwht(weights, fmt.block).T)
    indices, selectors, d = scale.solve(x, "default", fmt)
    blocks = encode_blocks(weights, "default", fmt=fmt)
    assert blocks.shape == (len(weights), size)
    again = unpack(blocks, fmt)
    for got, expected in zip(again[:3], (indices, selectors, d), strict=True):
        np.testing.assert_array_equal(got, expected)
    assert not again[3].any()
    assert set(np.unique(indices)) == set(range(fmt.levels.size))
    np.testing.assert_array_equal(pack(*again, fmt), blocks)
    decoded = decode_blocks(blocks, fmt)
    rotated = fmt.level_values[indices] * d.astype(np.float32) / 32
    np.testing.assert_allclose(decoded, fwht(rotated.T, fmt.block), atol=1e-5)
    error = np.square(decoded - weights).sum() / np.square(weights).sum()
    assert limits[0] < error < limits[1]
    rows = quantize(weights.reshape(4, -1), fmt, effort="fast")
    assert rows.shape == (4, weights.size // 4 // fmt.block * size)
    assert dequantize(rows, fmt=fmt).shape == (4, weights.size // 4)


@pytest.mark.parametrize("fmt", [row[0] for row in FORMATS], ids=lambda fmt: fmt.name)
def test_feedback_of_another_format(fmt: Format) -> None:
    """Without feedback the calibrated search is the plain one, for any format."""
    n = fmt.block
    target = np.random.default_rng(0).standard_normal((n, 5)).astype(np.float32) * np.float32(fmt.rms_in_levels)
    found = ldlq.search(target, np.eye(n, dtype=np.float32), np.ones(n, np.float32), ldlq.Search(4, 4), fmt)
    plain = search(target, fmt.trellis, fmt.levels)
    for got, expected in zip(found, plain, strict=True):
        np.testing.assert_array_equal(got, expected)


def test_parts_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="32 levels are not four subsets of 4"):
        replace(FOUR_BITS, symbol_bits=2)
    with pytest.raises(ValueError, match="start scales are of the efforts fast, default, not of fast"):
        replace(FOUR_BITS, starts={"fast": (1.0,)})
    for block in (128, 8, 96, 1024):
        with pytest.raises(ValueError, match="its length is 16, 64 or 256"):
            replace(FOUR_BITS, block=block)
    with pytest.raises(ValueError, match="symbols of 4 bits: there are layouts for 1, 2 and 3"):
        replace(FOUR_BITS, symbol_bits=4, levels=np.arange(-32, 32, dtype=np.int8))
    with pytest.raises(ValueError, match="levels beyond 63"):
        replace(FOUR_BITS, levels=np.arange(-64, 64, 4, dtype=np.int8))
    with pytest.raises(ValueError, match="a trellis of 128 states: at most 64"):
        replace(FOUR_BITS, trellis=UNGERBOECK[128])
    with pytest.raises(ValueError, match="four bits: symbols of 3 bits cannot be unpacked here"):
        decode._symbol_words(torch.zeros((1, FOUR_BITS.block_bytes), dtype=torch.uint8), FOUR_BITS)
    with pytest.raises(ValueError, match="a ternary code without a zero-point"):
        replace(next(iter(FAMILY.values())).format, zero_point=False)


def test_c_has_the_same_types() -> None:
    """The list of types stands once in C, in ggml-itq-types.h, in the order of the table."""
    listed = re.findall(r"^ +X\((\w+(?:, \w+){6})\)", (SOURCES / "ggml-itq-types.h").read_text(), re.MULTILINE)
    expected = [
        (row.name, row.identifier, fmt.symbol_bits, fmt.levels.size, fmt.block, int(fmt.zero_point), int(row.type))
        for row in FAMILY.values() for fmt in [row.format]
    ]  # fmt: skip
    assert listed == [", ".join(map(str, row)) for row in expected]


def test_c_has_the_same_mixes() -> None:
    """Names of file types, mixes and fallbacks stand once in C, in itq-mix.h, in the order of the table."""
    listed = re.findall(r"^ +X\((.+)\)", (SOURCES.parent / "llama" / "itq-mix.h").read_text(), re.MULTILINE)
    expected = [
        f'{row.name}, "{row.format.bits_per_weight:g}", {row.follows.name.removeprefix("MOSTLY_")}, '
        f"{row.in_mix.get(Type.Q2_K, Type.Q2_K).name}, {row.fallback.name}"
        for row in FAMILY.values()
    ]
    assert listed == expected and all(set(row.in_mix) <= {Type.Q2_K} for row in FAMILY.values())


@pytest.mark.parametrize("row", FAMILY.values(), ids=lambda row: row.name)
def test_c_has_the_same_levels_and_start_scales(row: TrellisType) -> None:
    """They stand once in C, in ggml-itq.h and itq-lanes.h."""

    header, lanes = ((SOURCES / name).read_text() for name in ("ggml-itq.h", "itq-lanes.h"))
    # A type has those of another by its name.
    same = re.search(rf"^#define {row.name}_LEVELS (\w+)_LEVELS$", header, re.MULTILINE)
    of_levels = same[1] if same else row.name
    levels = re.search(rf"^#define {of_levels}_LEVELS {{ (.*) }}$", header, re.MULTILINE)
    assert levels and list(map(int, levels[1].split(", "))) == row.format.levels.tolist()
    # What they go by, how many each effort tries, and what that is in level units at each.
    starts = rf"^#define {row.name}_STARTS[\\\s]+(\w+), {{ (.*?) }}, {{(.*?)}}"
    defined = re.search(starts, lanes, re.MULTILINE | re.DOTALL)
    assert defined
    assert defined[1] == ("false" if row.format.peak_in_levels is None else "true")
    assert list(map(int, defined[2].split(", "))) == [len(starts) for starts in row.format.starts.values()]
    quotients = re.findall(r"\(float\) \(([\d.]+) / ([\d.]+)\)", defined[3])
    magnitudes = [np.float32(float(above) / float(below)) for above, below in quotients]
    assert magnitudes == list(row.format.start_levels("default"))
    assert magnitudes[:1] == list(row.format.start_levels("fast"))

"""Formats of other widths and lengths: search, scale solver and block layout take a format, they are no copies."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type

from gguf_itq3s.codec.family import FAMILY, TrellisType

SOURCES = Path(__file__).parents[2] / "ggml-patch" / "src" / "format"


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
        f"{', '.join(row.in_mix.get(t, t).name for t in (Type.Q2_K, Type.Q4_K))}, "
        f"{row.values.name}, {row.fallback.name}"
        for row in FAMILY.values()
    ]
    assert listed == expected and all(set(row.in_mix) <= {Type.Q2_K, Type.Q4_K} for row in FAMILY.values())


@pytest.mark.parametrize("row", FAMILY.values(), ids=lambda row: row.name)
def test_c_has_the_same_levels_and_start_scales(row: TrellisType) -> None:
    """They stand once in C, in ggml-itq.h and itq-lanes.h."""

    header, lanes = ((SOURCES / name).read_text() for name in ("ggml-itq.h", "itq-lanes.h"))
    # A type has those of another by its name.
    same = re.search(rf"^#define {row.name}_LEVELS (\w+)_LEVELS$", header, re.MULTILINE)
    of_levels = same[1] if same else row.name
    levels = re.search(rf"^#define {of_levels}_LEVELS\b[\s\\]*{{(.*?)}}", header, re.MULTILINE | re.DOTALL)
    assert levels
    values = re.sub(r"/\*.*?\*/", "", levels[1])
    assert list(map(int, re.findall(r"-?\d+", values))) == row.format.levels.tolist()
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

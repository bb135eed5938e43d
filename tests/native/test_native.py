"""The C encoders against the numpy ones: the same bytes."""

from __future__ import annotations

import numpy as np
import pytest

from distributions import all_rows, at_the_limit, smooth
from gguf_itq3s.codec import native
from gguf_itq3s.codec.blocks import EFFORTS, quantize
from gguf_itq3s.codec.family import FAMILY, TrellisType

of_types = pytest.mark.parametrize("row", FAMILY.values(), ids=lambda row: row.name)
of_codecs = pytest.mark.parametrize(
    "row,kind", [(row, codec) for row in FAMILY.values() for codec in row.format.codecs],
    ids=lambda value: getattr(value, "name", value),
)  # fmt: skip
of_efforts = pytest.mark.parametrize("effort", EFFORTS)


@pytest.fixture(scope="module")
def library() -> native.NativeLibrary:
    loaded = native.load()
    assert loaded is not None, "make build first"
    return loaded


@of_codecs
@of_efforts
@pytest.mark.parametrize("name", all_rows())
def test_numpy_and_c_give_the_same_bytes(
    library: native.NativeLibrary, name: str, row: TrellisType, kind: str, effort: str
) -> None:
    rows = all_rows()[name]
    ours = quantize(rows, row.format, effort=effort, codec=kind)
    np.testing.assert_array_equal(ours, library.quantize(rows, qtype=row.type, effort=effort, codec=kind))


@of_types
@of_efforts
def test_numpy_and_c_agree_on_many_blocks(library: native.NativeLibrary, effort: str, row: TrellisType) -> None:
    for name, rows in smooth(2**19, seed=7).items():
        ours = quantize(rows, row.format, effort=effort)
        theirs = library.quantize(rows, qtype=row.type, effort=effort, threads=2)
        np.testing.assert_array_equal(ours, theirs, err_msg=name)


@of_types
@pytest.mark.parametrize("blocks", [1, 2, 15, 16, 17, 31, 33])
def test_a_block_does_not_depend_on_its_neighbours(
    library: native.NativeLibrary, blocks: int, row: TrellisType
) -> None:
    """C encodes blocks side by side; the last group of a chunk is not full."""
    rows = smooth(2**14, seed=blocks)["laplace"].reshape(-1, 256)[:blocks]
    together = library.quantize(rows, qtype=row.type)
    alone = np.concatenate([library.quantize(part[None], qtype=row.type) for part in rows])
    np.testing.assert_array_equal(together, alone)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 3e38])
@of_codecs
def test_what_numpy_refuses_c_refuses(library: native.NativeLibrary, value: float, row: TrellisType, kind: str) -> None:
    rows = all_rows()["gaussian"].copy()
    rows[3, 100] = value
    with pytest.raises(ValueError, match="NaN, infinite or too large"):
        quantize(rows, row.format, codec=kind)
    with pytest.raises(ValueError, match="NaN, infinite or too large"):
        library.quantize(rows, qtype=row.type, codec=kind)


@of_codecs
@of_efforts
def test_the_limit_is_the_same(library: native.NativeLibrary, row: TrellisType, kind: str, effort: str) -> None:
    taken, refused = at_the_limit(row.format.block)
    np.testing.assert_array_equal(
        quantize(taken, row.format, effort=effort, codec=kind),
        library.quantize(taken, qtype=row.type, effort=effort, codec=kind),
    )
    for part in refused:
        with pytest.raises(ValueError, match=r"weights below 2\*\*52 are taken"):
            library.quantize(part[None], qtype=row.type, effort=effort, codec=kind)

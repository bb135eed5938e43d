"""The C encoders against the numpy ones: the same bytes."""

from __future__ import annotations

import numpy as np
import pytest

from distributions import all_rows, at_the_limit, smooth
from gguf_itq3s.codec import native
from gguf_itq3s.codec.blocks import CODECS, EFFORTS, quantize

CASES = [(kind, effort) for kind in CODECS for effort in EFFORTS]


@pytest.fixture(scope="module")
def library() -> native.NativeLibrary:
    loaded = native.load()
    assert loaded is not None, "make build first"
    return loaded


@pytest.mark.parametrize("kind,effort", CASES)
@pytest.mark.parametrize("name", all_rows())
def test_numpy_and_c_give_the_same_bytes(library: native.NativeLibrary, name: str, kind: str, effort: str) -> None:
    rows = all_rows()[name]
    ours = quantize(rows, effort=effort, codec=kind)
    np.testing.assert_array_equal(ours, library.quantize(rows, effort=effort, codec=kind))


@pytest.mark.parametrize("effort", EFFORTS)
def test_numpy_and_c_agree_on_many_blocks(library: native.NativeLibrary, effort: str) -> None:
    for name, rows in smooth(2**19, seed=7).items():
        ours = quantize(rows, effort=effort)
        np.testing.assert_array_equal(ours, library.quantize(rows, effort=effort, threads=2), err_msg=name)


@pytest.mark.parametrize("blocks", [1, 2, 15, 16, 17, 31, 33])
def test_a_block_does_not_depend_on_its_neighbours(library: native.NativeLibrary, blocks: int) -> None:
    """C encodes blocks side by side; the last group of a chunk is not full."""
    rows = smooth(2**14, seed=blocks)["laplace"].reshape(-1, 256)[:blocks]
    together = library.quantize(rows)
    alone = np.concatenate([library.quantize(row[None]) for row in rows])
    np.testing.assert_array_equal(together, alone)


def test_threads_do_not_change_the_bytes(library: native.NativeLibrary) -> None:
    rows = smooth(2**20, seed=3)["student-t4"]
    np.testing.assert_array_equal(
        library.quantize(rows, effort="fast"), library.quantize(rows, effort="fast", threads=3)
    )


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 3e38])
@pytest.mark.parametrize("kind", CODECS)
def test_what_numpy_refuses_c_refuses(library: native.NativeLibrary, value: float, kind: str) -> None:
    rows = all_rows()["gaussian"].copy()
    rows[3, 100] = value
    for encode in (quantize, library.quantize):
        with pytest.raises(ValueError, match="NaN, infinite or too large"):
            encode(rows, codec=kind)


@pytest.mark.parametrize("kind,effort", CASES)
def test_the_limit_is_the_same(library: native.NativeLibrary, kind: str, effort: str) -> None:
    taken, refused = at_the_limit()
    np.testing.assert_array_equal(
        quantize(taken, effort=effort, codec=kind), library.quantize(taken, effort=effort, codec=kind)
    )
    for row in refused:
        with pytest.raises(ValueError, match=r"weights below 2\*\*52 are taken"):
            library.quantize(row[None], effort=effort, codec=kind)

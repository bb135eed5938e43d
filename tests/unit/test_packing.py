"""The ternary packings: lossless, and the bytes of ggml's TQ1_0 and TQ2_0."""

from __future__ import annotations

import itertools

import gguf
import numpy as np
import pytest
from gguf import quants
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from gguf_itq3s.codec import packing

Q = gguf.GGMLQuantizationType


def trits(columns: int, rows: int = 3) -> st.SearchStrategy[np.ndarray]:
    return hnp.arrays(np.int8, (rows, columns), elements=st.integers(-1, 1))


def all_codes(k: int) -> np.ndarray:
    return np.array(list(itertools.product((-1, 0, 1), repeat=k)), dtype=np.int8)


def test_every_code_of_five_trits_is_lossless_and_distinct() -> None:
    codes = packing.pack_trits(all_codes(5))
    assert codes.max() < 256
    assert len(np.unique(codes)) == 3**5
    assert (packing.unpack_trits(codes) == all_codes(5)).all()


@pytest.mark.parametrize(("k", "p"), [(1, 2), (2, 4), (3, 5), (4, 7), (5, 8), (6, 10), (7, 12), (8, 13)])
def test_lossless_iff_two_to_p_exceeds_three_to_k(k: int, p: int) -> None:
    assert (packing.unpack_trits(packing.pack_trits(all_codes(k), k, p), k, p) == all_codes(k)).all()
    assert not packing.is_lossless(k, p - 1)
    with pytest.raises(ValueError, match="do not fit"):
        packing.pack_trits(all_codes(k), k, p - 1)


@given(st.integers(1, 20), st.data())
def test_round_trip_at_the_tightest_width(k: int, data: st.DataObject) -> None:
    p = (3**k).bit_length()
    values = data.draw(hnp.arrays(np.int8, (4 * k,), elements=st.integers(-1, 1)))
    assert packing.is_lossless(k, p) and not packing.is_lossless(k, p - 1)
    assert (packing.unpack_trits(packing.pack_trits(values, k, p), k, p) == values).all()


@given(trits(40))
def test_two_bits_round_trip(values: np.ndarray) -> None:
    codes = packing.pack_2bit(values)
    assert codes.shape == (3, 10)
    assert (packing.unpack_2bit(codes) == values).all()


def test_equations_of_the_paper() -> None:
    # b = sum (d_j + 1) 4^j and b = ceil(256 N / 243), by hand.
    assert packing.pack_2bit([-1, 0, 1, 1])[0] == 0 + 1 * 4 + 2 * 16 + 2 * 64
    number = 2 * 81 + 0 * 27 + 1 * 9 + 1 * 3 + 2
    assert packing.pack_trits([1, -1, 0, 0, 1])[0] == -(-256 * number // 243)


@pytest.mark.slow
@given(trits(256, rows=4), hnp.arrays(np.float16, 4, elements=st.floats(2.0**-10, 128, width=16)))
def test_blocks_equal_ggml(values: np.ndarray, scales: np.ndarray) -> None:
    scales = np.where((values != 0).any(axis=1), scales, np.float16(0))  # ggml's d is max|w|
    weights = values * scales.astype(np.float32)[:, None]
    for qtype, pack, parts in (
        (Q.TQ1_0, packing.tq1_0_blocks, packing.tq1_0_parts),
        (Q.TQ2_0, packing.tq2_0_blocks, packing.tq2_0_parts),
    ):
        blocks = pack(values, scales)
        assert (blocks == quants.quantize(weights.astype(np.float32), qtype)).all()
        assert (quants.dequantize(blocks, qtype) == weights).all()
        again, d = parts(blocks)
        assert (again == values).all() and (d == scales).all()


@pytest.mark.parametrize("bad", [[2, 0, 0, 0], [-2, 0, 0, 0], [0, 0, 0]])
def test_bad_trits_are_refused(bad: list[int]) -> None:
    with pytest.raises(ValueError, match=r"trits must be|not a multiple"):
        packing.pack_2bit(bad)


def test_digit_three_is_refused() -> None:
    with pytest.raises(ValueError, match="digit is 3"):
        packing.unpack_2bit([0b11])

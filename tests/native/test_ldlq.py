"""Calibrated quantization: the numpy reference against its own promises, and C against numpy."""

from __future__ import annotations

import numpy as np
import pytest

from gguf_itq3s.codec import native
from gguf_itq3s.codec.family import FAMILY, TrellisType
from gguf_itq3s.rounding import hessian, ldlq
from hessians import SEARCHES, blocks_of, rows, second_moment

of_types = pytest.mark.parametrize("row", FAMILY.values(), ids=lambda row: row.name)


@of_types
@pytest.mark.parametrize("options", SEARCHES, ids=lambda o: f"{o.segment}-{o.lookahead}-{o.effort}")
@pytest.mark.parametrize("columns,count", [(256, 40), (768, 70)])
def test_numpy_and_c_give_the_same_bytes(
    variants: list[native.NativeLibrary], columns: int, count: int, options: ldlq.Search, row: TrellisType
) -> None:
    weights, h = rows(count, columns), second_moment(columns, 90)
    weights[3] = 0
    weights[5] *= 1e-4
    for form in (h, blocks_of(h, row.format.block)):
        factor = hessian.factorize(form)
        expected = ldlq.quantize(weights, factor, options, qtype=row.type)
        for library in variants:
            got = ldlq.quantize(weights, factor, options, qtype=row.type, library=library)
            np.testing.assert_array_equal(got, expected)


@of_types
def test_what_numpy_refuses_c_refuses(library: native.NativeLibrary, row: TrellisType) -> None:
    factor = hessian.factorize(second_moment(256, 100))
    for bad in (np.nan, np.inf, 1e30):
        weights = rows(20, 256)
        weights[17, 3] = bad
        with pytest.raises(ValueError, match="NaN, infinite"):
            ldlq.quantize(weights, factor, qtype=row.type, library=library)
    with pytest.raises(ValueError, match="do not match"):
        ldlq.quantize(np.zeros((3, 512)), factor, qtype=row.type, library=library)

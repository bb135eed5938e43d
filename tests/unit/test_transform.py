"""The FWHT against the explicit matrix."""

from __future__ import annotations

import numpy as np
import pytest

from gguf_itq3s.codec.transform import fwht, hadamard_matrix, rotation_block


@pytest.mark.parametrize("block", [1, 2, 32, 256, 512])
@pytest.mark.parametrize("rows", [(), (1,), (3, 5)])
def test_fwht_equals_the_matrix_product(block: int, rows: tuple[int, ...]) -> None:
    x = np.random.default_rng(block).standard_normal((*rows, 3 * block))
    expected = (x.reshape(-1, block) @ hadamard_matrix(block)).reshape(x.shape)
    got = fwht(x, block)
    assert got.dtype == np.float32
    np.testing.assert_allclose(got, expected, atol=3e-6)


def test_order_of_operations_is_fixed() -> None:
    """The stages ascend and each rounds to float32: what C, SIMD and CUDA code reproduce bit for bit."""
    x = np.random.default_rng(0).standard_normal(256).astype(np.float32)
    expected = x.copy()
    h = 1
    while h < 256:
        for i in range(256):
            if not i & h:
                a, b = expected[i], expected[i + h]
                expected[i], expected[i + h] = a + b, a - b
        h *= 2
    np.testing.assert_array_equal(fwht(x), expected * np.float32(1 / 16))


@pytest.mark.parametrize("shape,block", [((255,), 256), ((4, 300), 256), ((), 256), ((9,), 3)])
def test_bad_shapes_are_refused(shape: tuple[int, ...], block: int) -> None:
    with pytest.raises(ValueError, match=r"multiple of|power of two"):
        fwht(np.zeros(shape), block)


def test_the_length_of_a_block_depends_on_the_row_alone() -> None:
    lengths = {0: 0, 32: 0, 64: 64, 100: 0, 192: 64, 256: 256, 320: 64, 576: 64, 1536: 256, 2880: 64, 4096: 256}
    assert {columns: rotation_block(columns) for columns in lengths} == lengths

"""Rotated Hessians and their factors against explicit matrices."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from gguf_itq3s.calibrate.moments import in_basis
from gguf_itq3s.codec.transform import fwht, hadamard_matrix
from gguf_itq3s.rounding import hessian
from hessians import blocks_of, second_moment

#: Multiples of 256, of which the blocks are that long, and of 64 alone.
of_lengths = pytest.mark.parametrize("columns,block", [(512, 256), (192, 64)])


def rotation(columns: int, block: int = 256) -> np.ndarray:
    return np.kron(np.eye(columns // block), hadamard_matrix(block))


@pytest.mark.parametrize("form", [lambda matrix: matrix, blocks_of], ids=["full", "block"])
@pytest.mark.parametrize("damping", [0.003, 0.3])
def test_factor_multiplies_back(form: object, damping: float) -> None:
    h = form(second_moment(512, 300))  # type: ignore[operator]
    factor = hessian.factorize(h, damping)
    dense = h if h.ndim == 2 else np.block([[h[0], np.zeros_like(h[0])], [np.zeros_like(h[0]), h[1]]])
    dense = dense + damping * np.mean(np.diag(dense)) * np.eye(512)
    a = factor.feedback.astype(np.float64)
    if a.ndim == 3:
        a = np.block([[a[0], np.zeros_like(a[0])], [np.zeros_like(a[0]), a[1]]])
    np.testing.assert_array_equal(np.tril(a, -1), 0)
    np.testing.assert_array_equal(np.diag(a), 1)
    back = a @ np.diag(factor.weight.astype(np.float64)) @ a.T
    np.testing.assert_allclose(back / back.max(), dense / dense.max(), atol=1e-6)
    assert factor.weight.mean() == pytest.approx(1, rel=1e-5)
    assert factor.weight.min() > 0


@of_lengths
def test_rotation_and_cost_are_those_of_explicit_matrices(columns: int, block: int) -> None:
    h, r = second_moment(columns, 600), rotation(columns, block)
    parts = blocks_of(h, block)
    assert hessian.columns_of(h) == hessian.columns_of(parts) == columns
    assert hessian.block_of(h) == hessian.block_of(parts) == block
    np.testing.assert_allclose(hessian.rotate(h), r @ h @ r, atol=1e-9 * h.max())
    np.testing.assert_allclose(hessian.rotate(parts), blocks_of(r @ h @ r, block), atol=1e-9 * h.max())
    np.testing.assert_allclose(hessian.rotate(hessian.rotate(h)), h, atol=1e-9 * h.max())
    np.testing.assert_allclose(hessian.diagonal(hessian.rotate(h)), np.diag(h), atol=1e-9 * h.max())
    np.testing.assert_allclose(hessian.diagonal(hessian.rotate(parts)), np.diag(h), atol=1e-9 * h.max())
    e = np.random.default_rng(1).standard_normal((7, columns)).astype(np.float32)
    expected = np.trace(e.astype(np.float64) @ h @ e.T.astype(np.float64))
    assert hessian.cost(e, h) == pytest.approx(expected)
    assert hessian.cost(fwht(e, block), hessian.rotate(h)) == pytest.approx(expected, rel=1e-5)
    np.testing.assert_allclose(hessian.rotate_rows(e), fwht(e, block), atol=1e-5)
    only_blocks = h * np.kron(np.eye(columns // block), np.ones((block, block)))
    assert hessian.cost(e, parts) == pytest.approx(hessian.cost(e, only_blocks))


@pytest.mark.parametrize("columns,own,block", [(512, 256, 64), (512, 256, 1), (192, 64, 1), (192, 64, 64)])
def test_another_basis_is_that_of_the_inputs_rotated_in_it(columns: int, own: int, block: int) -> None:
    """In numpy and in torch; of diagonal blocks, those within them."""
    x = np.random.default_rng(4).standard_normal((1000, columns)) * np.linspace(0.5, 2, columns)
    here, there = rotation(columns, own), rotation(columns, block) if block > 1 else np.eye(columns)
    h, wanted = ((x @ r).T @ (x @ r) for r in (here, there))
    size = own if block == 1 else block
    for found, expected in ((h, wanted), (blocks_of(h, own), blocks_of(wanted, size))):
        assert (hessian.in_basis(found, block) is found) == (own == block)
        np.testing.assert_allclose(hessian.in_basis(found, block), expected, atol=1e-9 * wanted.max())
        in_torch = in_basis(torch.from_numpy(found), block)
        np.testing.assert_allclose(in_torch.numpy(), expected, atol=1e-9 * wanted.max())


@of_lengths
def test_scaled_inputs_have_the_scaled_hessian(columns: int, block: int) -> None:
    rng = np.random.default_rng(2)
    x, factor = rng.standard_normal((2000, columns)), np.exp(rng.standard_normal(columns))
    r = rotation(columns, block)
    before, after = (x @ r).T @ (x @ r), (x * factor @ r).T @ (x * factor @ r)
    np.testing.assert_allclose(hessian.scale_columns(before, factor), after, atol=1e-9 * after.max())
    expected = blocks_of(after, block)
    found = hessian.scale_columns(blocks_of(before, block), factor)
    np.testing.assert_allclose(found, expected, atol=1e-9 * after.max())


@of_lengths
def test_diagonal_becomes_h_d_h(columns: int, block: int) -> None:
    diagonal = np.exp(np.random.default_rng(3).standard_normal(columns))
    r = rotation(columns, block)
    expected = blocks_of(r @ np.diag(diagonal) @ r, block)
    np.testing.assert_allclose(hessian.from_diagonal(diagonal), expected, atol=1e-12 * 512)


def test_bad_hessians_are_refused() -> None:
    with pytest.raises(ValueError, match="has shape"):
        hessian.factorize(np.eye(255))
    with pytest.raises(ValueError, match="has shape"):
        hessian.columns_of(np.zeros((3, 128, 128)))
    hessian.check_form(np.stack([np.eye(64)] * 3))
    with pytest.raises(ValueError, match="blocks of 64 for 256 columns, not of 256"):
        hessian.check_form(np.stack([np.eye(64)] * 4))
    with pytest.raises(ValueError, match="damping"):
        hessian.factorize(np.eye(256), 0)
    with pytest.raises(ValueError, match="NaN or infinite"):
        hessian.factorize(np.full((256, 256), np.nan))
    with pytest.raises(ValueError, match="positive semidefinite"):
        hessian.factorize(np.eye(256) - 2 * np.diag(np.arange(256) == 7))
    with pytest.raises(ValueError, match="whole blocks"):
        hessian.from_diagonal(np.ones(100))
    with pytest.raises(ValueError, match="factors for"):
        hessian.scale_columns(np.eye(256), np.ones(512))
    with pytest.raises(ValueError, match="do not match"):
        hessian.cost(np.ones((2, 512)), np.eye(256))


def test_flat_is_zero_or_a_multiple_of_the_identity() -> None:
    eye = np.eye(512, dtype=np.float32)
    blocks = np.stack([np.eye(256, dtype=np.float32)] * 2)
    for flat in (eye, 3 * eye, 0 * eye, blocks, 0 * blocks):
        assert hessian.is_flat(flat)
    beside, uneven = eye.copy(), blocks.copy()
    beside[3, 5] = 1e-9
    uneven[1, 7, 7] = 2
    assert not hessian.is_flat(beside) and not hessian.is_flat(uneven) and not hessian.is_flat(eye - 0.5 * beside)

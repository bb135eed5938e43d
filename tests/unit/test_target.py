"""Targets and output Fisher factors against direct computations on small matrices."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from gguf_itq3s.calibrate.gradients import GradientSums
from gguf_itq3s.rounding import fisher, target
from gguf_itq3s.rounding import hessian as hessians
from gguf_itq3s.rounding.target import Decomposition


def sums(rng: np.random.Generator, m: int = 6, n: int = 256, tokens: int = 900) -> dict[str, torch.Tensor]:
    """Weights, inputs of both streams, the residual stream of both, float64."""
    x = rng.standard_normal((tokens, n)) @ rng.standard_normal((n, n)) / 16
    arrays = {
        "w": rng.standard_normal((m, n)), "x": x, "now": x + 0.1 * rng.standard_normal((tokens, n)),
        "r": rng.standard_normal((tokens, m)), "r_now": rng.standard_normal((tokens, m)),
    }  # fmt: skip
    return {name: torch.from_numpy(array) for name, array in arrays.items()}


def missing(s: dict[str, torch.Tensor]) -> torch.Tensor:
    """What a matrix's outputs lack, (tokens, m)."""
    return (s["x"] - s["now"]) @ s["w"].T + s["r"] - s["r_now"]


def in_blocks(hessian: torch.Tensor) -> torch.Tensor:
    """The diagonal blocks of 256 of a Hessian."""
    return torch.stack([hessian[i : i + 256, i : i + 256] for i in range(0, len(hessian), 256)])


def test_the_correction_is_the_damped_least_squares_answer() -> None:
    s = sums(np.random.default_rng(0))
    h = s["now"].T @ s["now"]
    found = s["w"] + Decomposition.of(h, 0.02).solve(missing(s).T @ s["now"])
    # T minimises |W x + (r - r') - T x'|^2 + damping |T - W|^2 by the normal equations.
    wanted = s["x"] @ s["w"].T + s["r"] - s["r_now"]
    ridge = 0.02 * h.diagonal().mean()
    left = h + ridge * torch.eye(256, dtype=torch.float64)
    right = s["now"].T @ wanted + ridge * s["w"].T
    torch.testing.assert_close(found, torch.linalg.solve(left, right).T, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("form", ["full", "blocks"])
def test_a_decomposition_gives_the_factor_and_the_expected_error(form: str) -> None:
    s = sums(np.random.default_rng(1), n=512)
    h = s["now"].T @ s["now"]
    h = h if form == "full" else in_blocks(h)
    found = Decomposition.of(h, 0.03)
    factor, wanted = found.factor(), hessians.factorize(h.numpy(), 0.03)
    np.testing.assert_allclose(factor.feedback, wanted.feedback, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(factor.weight, wanted.weight, rtol=1e-5)
    assert factor.full == (form == "full")
    # LDLQ's errors are noise through the inverse of the feedback; in a mean over noise this is |A^-1 x|^2.
    a = wanted.feedback if form == "full" else block_diagonal(wanted.feedback)
    x = s["x"][:40]
    direct = np.square(np.linalg.solve(a.astype(np.float64), x.numpy().T)).sum() / float(x.square().sum())
    assert found.expected_error(x.float()) == pytest.approx(direct, rel=1e-4)


def block_diagonal(blocks: np.ndarray) -> np.ndarray:
    result = np.zeros((len(blocks) * 256, len(blocks) * 256))
    for number, block in enumerate(blocks):
        result[number * 256 : number * 256 + 256, number * 256 : number * 256 + 256] = block
    return result


@pytest.mark.parametrize("start", [target.DAMPINGS[0], target.DAMPINGS[-1]])
def test_the_damping_is_the_one_that_tokens_held_out_like_best(start: float) -> None:
    """With 300 tokens for 256 columns the sums say much that is chance, and a weak damping is worse than none."""
    rng = np.random.default_rng(2)
    mix = torch.from_numpy(rng.standard_normal((256, 256)) * np.linspace(0.1, 1, 256))
    few, held = (torch.from_numpy(rng.standard_normal((count, 256))) @ mix for count in (300, 2000))
    h = few.T @ few
    errors = [Decomposition.of(h, damping).expected_error(held.float()) for damping in target.DAMPINGS]
    best = int(np.argmin(errors))
    assert 0 < best < len(errors) - 1 and (np.diff(errors[: best + 1]) < 0).all() and (np.diff(errors[best:]) > 0).all()
    damping, decomposition = target.decompose(h, held.float(), start)
    assert damping == target.DAMPINGS[best]
    torch.testing.assert_close(decomposition.upper, Decomposition.of(h, damping).upper)
    assert target.decompose(h, None, start)[0] == start


def test_the_step_leaves_least_of_what_is_missing() -> None:
    rng = np.random.default_rng(3)
    wanted, direction = (torch.from_numpy(rng.standard_normal((50, 4))) for _ in range(2))
    assert target.line_search(wanted, wanted) == pytest.approx(1)
    assert target.line_search(wanted, 4 * wanted) == pytest.approx(0.25)
    assert target.line_search(wanted, 0.5 * wanted) == 1, "no further than the least squares answer"
    assert target.line_search(wanted, -wanted) == 0, "what makes it worse is left out"
    assert target.line_search(wanted, 0 * wanted) == 0
    mixed = wanted + direction
    step = target.line_search(wanted, mixed)
    left = [float((wanted - other * mixed).square().sum()) for other in (step - 0.01, step, step + 0.01)]
    assert left[1] < left[0] and left[1] < left[2]


def test_hessians_that_cannot_be_decomposed_are_refused() -> None:
    s = sums(np.random.default_rng(5))
    h = s["now"].T @ s["now"]
    with pytest.raises(ValueError, match="positive semidefinite"):
        Decomposition.of(-h, 0.01)
    h[3, 3] = float("nan")
    with pytest.raises(ValueError, match="NaN or infinite"):
        Decomposition.of(h, 0.01)
    assert Decomposition.of(torch.zeros(256, 256, dtype=torch.float64), 0.01).upper[0, 0, 0] == pytest.approx(0.1)


def test_output_fisher_matrices_are_drawn_to_the_identity_as_far_as_other_tokens_like() -> None:
    """80 tokens for 64 rows say too much; the trace stays, experts are shrunk elsewhere."""
    rng = np.random.default_rng(6)
    mix = torch.from_numpy(rng.standard_normal((64, 64)) * np.linspace(0.1, 1, 64)).float()
    few, held = (torch.from_numpy(rng.standard_normal((count, 64))).float() @ mix for count in (80, 400))
    names = ("blk.0.attn_q.weight", "blk.0.ffn_up_exps.weight[3]")
    sums = GradientSums(full=64, block=32)
    for part, place in ((few, 0), (held, 1)):
        if place:
            sums.hold_out()
        for name in names:
            sums.add(name, part)
    sums.shrink_to_identity()
    found = {name.rpartition("/")[0]: matrix for name, matrix in sums.means(1)}
    whole = (few.T @ few + held.T @ held).double()
    np.testing.assert_allclose(found[names[1]], whole, rtol=1e-4, atol=1e-3)
    assert np.trace(found[names[0]]) == pytest.approx(float(whole.trace()), rel=1e-5)
    errors = [Decomposition.of((few.T @ few).double(), damping).expected_error(held) for damping in target.DAMPINGS]
    damping = target.DAMPINGS[int(np.argmin(errors))]
    drawn = (whole + damping * whole.diagonal().mean() * torch.eye(64, dtype=torch.float64)) / (1 + damping)
    np.testing.assert_allclose(found[names[0]], drawn, rtol=1e-4, atol=1e-3)
    assert target.DAMPINGS[0] < damping < target.DAMPINGS[-1]


def fisher_matrix(m: int, seed: int = 0) -> np.ndarray:
    a = np.random.default_rng(seed).standard_normal((m, 3 * m))
    a[: m // 2] += a[m // 2 : 2 * (m // 2)]
    return a @ a.T / m


@pytest.mark.parametrize(("rows", "group"), [(50, 16), (5, 16)])
def test_the_output_factor_reproduces_the_matrix(rows: int, group: int) -> None:
    """What is left of errors that were fed forward couples no two groups: tr(G E E^T) is a sum over them."""
    g = fisher_matrix(rows)
    found = fisher.factorize(g, damping=1e-9, group=group)
    assert sorted(found.order.tolist()) == list(range(rows))
    assert [s.stop - s.start for s in found.groups] == [
        len(range(k, rows, len(found.groups))) for k in range(len(found.groups))
    ]
    ordered = g[np.ix_(found.order, found.order)]
    # e_b = u_b - F[:b, b]^T e[:b], u what rounding adds: e = (I + F^T)^-1 u.
    full = np.eye(rows) + found.feedback.astype(np.float64).T
    inverse = np.linalg.inv(full)
    inner = inverse.T @ ordered @ inverse
    for block in found.groups:
        inner[block, block] = 0
    assert np.abs(inner).max() < 1e-4 * np.abs(ordered).max()


@pytest.mark.parametrize("matrix", [np.zeros((3, 4)), np.full((4, 4), np.nan), -np.eye(4)])
def test_wrong_fisher_matrices_are_refused(matrix: np.ndarray) -> None:
    with pytest.raises(ValueError):
        fisher.factorize(matrix)

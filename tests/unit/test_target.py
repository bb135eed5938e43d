"""Targets and output Fisher factors against direct computations on small matrices."""

from __future__ import annotations

import numpy as np
import pytest

from gguf_itq3s.calibration.backward import _Sums
from gguf_itq3s.calibration.groups import Reader
from gguf_itq3s.rounding import fisher, hessian, target


def sums(rng: np.random.Generator, m: int = 6, n: int = 256, tokens: int = 900) -> dict[str, np.ndarray]:
    """Weights, inputs of both streams, the residual stream of both."""
    x = rng.standard_normal((tokens, n)) @ rng.standard_normal((n, n)) / 16
    return {
        "w": rng.standard_normal((m, n)),
        "x": x,
        "now": x + 0.1 * rng.standard_normal((tokens, n)),
        "r": rng.standard_normal((tokens, m)),
        "r_now": rng.standard_normal((tokens, m)),
    }


def test_the_target_is_the_damped_least_squares_answer() -> None:
    s = sums(np.random.default_rng(0))
    h, c = s["now"].T @ s["now"], (s["x"] - s["now"]).T @ s["now"]
    r = (s["r"] - s["r_now"]).T @ s["now"]
    found = target.corrected(s["w"], h, c, r, damping=0.02)
    # T minimises |W x + (r - r') - T x'|^2 + damping |T - W|^2 by the normal equations.
    wanted_out = s["x"] @ s["w"].T + s["r"] - s["r_now"]
    ridge = 0.02 * np.diagonal(h).mean()
    left = s["now"].T @ s["now"] + ridge * np.eye(256)
    right = s["now"].T @ wanted_out + ridge * s["w"].T
    np.testing.assert_allclose(found, np.linalg.solve(left, right).T, rtol=1e-5, atol=1e-6)


def test_the_target_makes_the_output_better() -> None:
    s = sums(np.random.default_rng(1))
    h, c = s["now"].T @ s["now"], (s["x"] - s["now"]).T @ s["now"]
    before = np.square((s["x"] - s["now"]) @ s["w"].T).sum()
    after = np.square(s["x"] @ s["w"].T - s["now"] @ target.corrected(s["w"], h, c).T.astype(np.float64)).sum()
    assert after < 0.9 * before


def test_without_a_difference_the_target_is_the_weights() -> None:
    s = sums(np.random.default_rng(2))
    h, zero = s["x"].T @ s["x"], np.zeros((256, 256))
    weights = s["w"].astype(np.float32)
    assert target.corrected(weights, h, zero).tobytes() == weights.tobytes()
    assert target.corrected(weights, h, zero, np.zeros(weights.shape)).tobytes() == weights.tobytes()


def test_blocks_are_solved_alone_and_rotation_does_not_matter() -> None:
    s = sums(np.random.default_rng(3), n=512)
    h, c = s["now"].T @ s["now"], (s["x"] - s["now"]).T @ s["now"]
    blocks = [slice(0, 256), slice(256, 512)]
    h_blocks, c_blocks = (np.stack([a[b, b] for b in blocks]) for a in (h, c))
    found = target.corrected(s["w"], h_blocks, c_blocks)
    for b in blocks:
        mean = np.mean([np.diagonal(h)[part].mean() for part in blocks])
        alone = target.corrected(
            s["w"][:, b], h[b, b], c[b, b], damping=target.DAMPING * mean / np.diagonal(h)[b].mean()
        )
        np.testing.assert_allclose(found[:, b], alone, rtol=1e-5, atol=1e-6)
    rotated = target.corrected(hessian.rotate_rows(s["w"]), hessian.rotate(h), hessian.rotate(c))
    assert np.allclose(hessian.rotate_rows(rotated), target.corrected(s["w"], h, c), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("wrong", ["shape", "residual", "definite"])
def test_wrong_sums_are_refused(wrong: str) -> None:
    s = sums(np.random.default_rng(4))
    h, c = s["x"].T @ s["x"], np.eye(256)
    with pytest.raises(ValueError):
        if wrong == "shape":
            target.corrected(s["w"], h, c[:, :255])
        elif wrong == "residual":
            target.corrected(s["w"], h, c, np.zeros((5, 256)))
        else:
            target.corrected(s["w"], -h, c)


def fisher_matrix(m: int, seed: int = 0) -> np.ndarray:
    a = np.random.default_rng(seed).standard_normal((m, 3 * m))
    a[: m // 2] += a[m // 2 : 2 * (m // 2)]
    return a @ a.T / m


@pytest.mark.parametrize(("rows", "group"), [(48, 16), (50, 16), (5, 16), (32, 1)])
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


def test_feedback_across_rows_lowers_the_cost() -> None:
    """Rounding to whole numbers: tr(G E E^T) with the errors of earlier groups made up for, and without."""
    rng = np.random.default_rng(5)
    g, w = fisher_matrix(64), 3 * rng.standard_normal((64, 200))
    found = fisher.factorize(g, group=4)
    errors = np.zeros_like(w)
    for group in found.groups:
        rows = found.order[group]
        wanted = w[rows] - found.feedback[: group.start, group].T @ errors[found.order[: group.start]]
        errors[rows] = np.round(wanted) - w[rows]
    plain = np.round(w) - w
    assert np.vdot(errors, g @ errors) < 0.9 * np.vdot(plain, g @ plain)


def test_no_fisher_information_is_no_feedback() -> None:
    assert not fisher.factorize(np.zeros((20, 20))).feedback.any()


@pytest.mark.parametrize("matrix", [np.zeros((3, 4)), np.full((4, 4), np.nan), -np.eye(4)])
def test_wrong_fisher_matrices_are_refused(matrix: np.ndarray) -> None:
    with pytest.raises(ValueError):
        fisher.factorize(matrix)


def test_matrices_of_experts_are_drawn_to_what_else_is_known() -> None:
    """The more, the fewer tokens came; one without any has the others' mean, or nothing where that says nothing."""
    import torch

    readers = [
        Reader(f"blk.0.ffn_{part}_exps.weight", expert, "mlp.experts", parameter)
        for part, parameter in (("gate", "gate_up_proj"), ("down", "down_proj"))
        for expert in range(3)
    ]
    generator = torch.Generator().manual_seed(0)
    counts = {0: 400, 1: 40}
    rows = {
        reader.entry: torch.randn(counts[reader.expert], 8, generator=generator) * (1 + reader.expert)
        for reader in readers
        if reader.expert in counts
    }
    sums = _Sums(full=8, block=4)
    for entry, gradients in rows.items():
        sums.add(entry, gradients)
    assert sums.shrink(readers, 500) == (4, 6)  # 40 tokens and none are fewer than 16 for each of 8 rows
    found = {name.removesuffix("/00000"): matrix for name, matrix in sums.means(500)}
    totals = {entry: (g.T @ g).double().numpy() for entry, g in rows.items()}
    assert len(found) == 5 and "blk.0.ffn_gate_exps.weight[2]" not in found
    for part in ("gate", "down"):
        name = f"blk.0.ffn_{part}_exps.weight"
        together = totals[f"{name}[0]"] + totals[f"{name}[1]"]
        for expert, count in counts.items():
            own = totals[f"{name}[{expert}]"]
            other = np.diag(np.diagonal(own)) if part == "gate" else together * np.trace(own) / np.trace(together)
            share = 128 / (count + 128)
            expected = ((1 - share) * own + share * other) / 500
            np.testing.assert_allclose(found[f"{name}[{expert}]"], expected, rtol=1e-4, atol=1e-5)
        if part == "down":
            np.testing.assert_allclose(found[f"{name}[2]"], together / 440 / 500, rtol=1e-4, atol=1e-7)

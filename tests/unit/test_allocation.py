"""Choosing types within a budget: against all choices on small cases."""

from __future__ import annotations

import numpy as np
import pytest

from gguf_itq3s.rounding import allocation
from gguf_itq3s.rounding.allocation import Candidates


def random_tensors(seed: int, count: int, kinds: int = 4) -> list[Candidates]:
    """Tensors of sizes that differ, scores that mostly, not always, fall with the bytes."""
    rng = np.random.default_rng(seed)
    weights = rng.integers(1, 12, count)
    bits = np.array([25, 34, 36, 44, 53, 68])[:kinds]
    noise = np.exp(rng.normal(0, 0.4, (count, kinds)))
    scores = rng.exponential(1, (count, 1)) * weights[:, None] * 2.0 ** (-bits / 4) * noise
    return [Candidates(int(w) * bits.astype(np.int64), row) for w, row in zip(weights, scores, strict=True)]


def every_choice(tensors: list[Candidates]) -> tuple[np.ndarray, np.ndarray]:
    """Sizes and scores of all choices."""
    sizes, scores = np.zeros(1, dtype=np.int64), np.zeros(1)
    for tensor in tensors:
        sizes = (sizes[:, None] + tensor.sizes).reshape(-1)
        scores = (scores[:, None] + tensor.scores).reshape(-1)
    return sizes, scores


def best(tensors: list[Candidates], budget: int) -> float:
    """The least score of all choices within the budget."""
    sizes, scores = every_choice(tensors)
    return float(scores[sizes <= budget].min())


def least_and_most(tensors: list[Candidates]) -> tuple[int, int]:
    return sum(int(t.sizes.min()) for t in tensors), sum(int(t.sizes.max()) for t in tensors)


@pytest.mark.parametrize("seed", range(6))
def test_it_is_as_good_as_trying_all(seed: int) -> None:
    """At most budgets the same score; where not, not much more."""
    tensors = random_tensors(seed, 6)
    least, most = least_and_most(tensors)
    same, ratios = 0, []
    budgets = np.linspace(least, most, 12).astype(int)
    for budget in budgets:
        choice = allocation.allocate(tensors, int(budget))
        assert allocation.size(tensors, choice) <= budget
        ratios.append(allocation.score(tensors, choice) / best(tensors, int(budget)))
        same += ratios[-1] < 1 + 1e-12
    assert min(ratios) > 1 - 1e-12 and max(ratios) < 1.1
    assert same >= 8


@pytest.mark.slow
def test_more_budget_is_never_worse_and_the_budget_is_used() -> None:
    tensors = random_tensors(7, 40, 6)
    least, most = least_and_most(tensors)
    last = np.inf
    for budget in range(least, most, (most - least) // 150):
        choice = allocation.allocate(tensors, budget)
        now = allocation.score(tensors, choice)
        assert now <= last * (1 + 1e-12)
        last, left = now, budget - allocation.size(tensors, choice)
        assert left >= 0
        for tensor, taken in zip(tensors, choice, strict=True):
            better = tensor.scores < tensor.scores[taken]
            assert (tensor.sizes[better] - tensor.sizes[taken] > left).all()
    assert allocation.allocate(tensors, most) == [int(t.scores.argmin()) for t in tensors]


def test_what_cannot_be_is_said() -> None:
    with pytest.raises(ValueError, match="fewer than the smallest candidates need, 10"):
        allocation.allocate([Candidates(np.array([10, 20]), np.array([1.0, 0.5]))], 9)
    with pytest.raises(ValueError, match="NaN"):
        Candidates(np.array([10]), np.array([np.nan]))
    with pytest.raises(ValueError, match="are not candidates"):
        Candidates(np.array([10, 20]), np.array([1.0]))
    assert allocation.allocate([], 0) == []

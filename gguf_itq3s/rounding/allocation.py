"""Which type each tensor of a file gets, so that the file's score is least among those of at most so many bytes.

Every tensor has candidates, each with its bytes and its score; scores add up. For a price of a byte lambda, each tensor
takes the candidate with the least ``score + lambda * bytes``, and what all of them take together is the best choice of
its total size (Everett's theorem). These choices are corners of the tensors' lower convex hulls, so lambda needs to be
looked for among the slopes of the hulls' edges alone, by bisection. What is left of the budget is filled greedily: of
all larger candidates that still fit, the one that lowers the score most for its bytes, until none fits.

The greedy filling is monotone: with more budget, the first step that differs is one that the smaller budget had no room
for, and it lowers the score by more than anything that fits in there could, being the steepest. The best over trials
that fix one of the largest tensors to one of its candidates is monotone then as well; these trials find what the steps
of large tensors, as a token embedding's, stand in the way of.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

#: How many of the largest tensors are tried in each of their candidates.
_TRIED: Final = 16


@dataclass(frozen=True)
class Candidates:
    """What a tensor can be.

    Attributes:
        sizes: int64 (k,), bytes.
        scores: float64 (k,), less is better.

    Raises:
        ValueError: none, not as many of both, or a score that is not finite.
    """

    sizes: npt.NDArray[np.int64]
    scores: npt.NDArray[np.float64]

    def __post_init__(self) -> None:
        if not self.sizes.size or self.sizes.shape != self.scores.shape or self.sizes.ndim != 1:
            raise ValueError(f"{self.sizes.shape} sizes and {self.scores.shape} scores are not candidates of a tensor")
        if not np.isfinite(self.scores).all():
            raise ValueError("a score is NaN or infinite")

    def least(self) -> int:
        """The candidate with the fewest bytes; the better of two."""
        return int(np.lexsort((self.scores, self.sizes))[0])

    def hull(self) -> list[int]:
        """The corners of the lower convex hull, from the fewest bytes to the least score."""
        corners = [self.least()]
        while True:
            steps = _slopes(self, corners[-1])
            if not (steps > 0).any():
                return corners
            # Of edges in one line the longest: the corners between are no better for any price.
            steepest = np.flatnonzero(steps == steps.max())
            corners.append(int(steepest[self.sizes[steepest].argmax()]))


def _slopes(tensor: Candidates, now: int) -> npt.NDArray[np.float64]:
    """How much each larger candidate lowers the score for a byte; 0 for the others."""
    sizes = tensor.sizes - tensor.sizes[now]
    gains = tensor.scores[now] - tensor.scores
    return np.where((sizes > 0) & (gains > 0), gains / np.maximum(sizes, 1), 0.0)


@dataclass(frozen=True)
class _Table:
    """All candidates side by side, and the edges of all hulls from the steepest on.

    Attributes:
        sizes: int64 (tensors, most candidates); filled up with the least size, which is never a step.
        scores: the same.
        start: (tensors,) the first corner of every hull.
        rows, ends, slopes, steps: of the edges: tensor, candidate, what a byte lowers the score by, bytes.
    """

    sizes: npt.NDArray[np.int64]
    scores: npt.NDArray[np.float64]
    start: npt.NDArray[np.int64]
    rows: npt.NDArray[np.int64]
    ends: npt.NDArray[np.int64]
    slopes: npt.NDArray[np.float64]
    steps: npt.NDArray[np.int64]


def _table(tensors: Sequence[Candidates]) -> _Table:
    width = max(tensor.sizes.size for tensor in tensors)
    sizes = np.array([np.pad(t.sizes, (0, width - t.sizes.size), constant_values=t.sizes.min()) for t in tensors])
    scores = np.array([np.pad(t.scores, (0, width - t.scores.size), constant_values=np.inf) for t in tensors])
    edges = []
    for row, tensor in enumerate(tensors):
        for begin, end in itertools.pairwise(tensor.hull()):
            edges.append((-_slopes(tensor, begin)[end], row, end, tensor.sizes[end] - tensor.sizes[begin]))
    edges.sort()
    slopes, rows, ends, steps = (np.array([edge[i] for edge in edges]) for i in range(4))
    start = np.array([tensor.least() for tensor in tensors])
    return _Table(sizes, scores, start, rows.astype(int), ends.astype(int), -slopes, steps.astype(np.int64))


def allocate(tensors: Sequence[Candidates], budget: int) -> list[int]:
    """A choice of candidates within a budget.

    Args:
        budget: bytes of all of them together.

    Returns:
        For every tensor the number of its candidate.

    Raises:
        ValueError: even the smallest candidates need more.
    """
    least = sum(int(tensor.sizes.min()) for tensor in tensors)
    if least > budget:
        raise ValueError(f"{budget} bytes are fewer than the smallest candidates need, {least}")
    if not tensors:
        return []
    table = _table(tensors)
    best = _greedy(table, budget)
    largest = sorted(range(len(tensors)), key=lambda i: (-int(tensors[i].sizes.max()), i))[:_TRIED]
    for row in largest:
        for candidate, own in enumerate(tensors[row].sizes):
            if least - int(tensors[row].sizes.min()) + int(own) <= budget:
                trial = _greedy(table, budget, row, candidate)
                if score(tensors, trial) < score(tensors, best):
                    best = trial
    return best


def _greedy(table: _Table, budget: int, fixed: int | None = None, candidate: int = 0) -> list[int]:
    """The best choice for some price of a byte, and what is left filled up; one tensor may be fixed."""
    everything = np.arange(len(table.sizes))
    choice = table.start.copy()
    edges = np.ones(len(table.rows), dtype=bool)
    if fixed is not None:
        choice[fixed] = candidate
        edges = table.rows != fixed
    left = budget - int(table.sizes[everything, choice].sum())
    # The price is the slope of the first edge that there is no room for.
    count = int(np.searchsorted(np.cumsum(table.steps[edges]), left, side="right"))
    left -= int(table.steps[edges][:count].sum())
    for row, end in zip(table.rows[edges][:count], table.ends[edges][:count], strict=True):
        choice[row] = end
    while True:
        steps = table.sizes - table.sizes[everything, choice][:, None]
        gains = table.scores[everything, choice][:, None] - table.scores
        slopes = np.where((steps > 0) & (steps <= left) & (gains > 0), gains / np.maximum(steps, 1), 0.0)
        if fixed is not None:
            slopes[fixed] = 0.0
        row, end = np.unravel_index(int(slopes.argmax()), slopes.shape)
        if not slopes[row, end]:
            return [int(number) for number in choice]
        left -= int(steps[row, end])
        choice[row] = end


def size(tensors: Sequence[Candidates], choice: Sequence[int]) -> int:
    """Bytes of a choice."""
    return sum(int(tensor.sizes[now]) for tensor, now in zip(tensors, choice, strict=True))


def score(tensors: Sequence[Candidates], choice: Sequence[int]) -> float:
    """Score of a choice."""
    return float(sum(tensor.scores[now] for tensor, now in zip(tensors, choice, strict=True)))

"""Feedback across rows: errors of some outputs of a matrix made up for by others.

With ``G = E[g g^T]``, g the gradient of the loss with respect to a matrix's outputs (labels sampled from the model: the
Fisher information), rounding W by E costs ``tr(G E H E^T) / 2`` to second order. LDLQ makes up for errors along a row,
by H; with ``G = A D A^T``, A unit upper triangular, the same is done across rows: the target of row i is
``T_i - sum_{j<i} A[j, i] E_j``. Rows are taken in groups, so that the encoder has several at a time, and a group has no
neighbours, which belong to one attention head: group b holds the rows b, b + k, b + 2 k, ... of k groups. The
correction of a whole group is exact with ``A_bb^-1`` applied to what comes from the groups before.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

#: Rows of a group at least, which the encoder has side by side; of a matrix with many rows a group has as many times
#: that as :data:`ROWS` goes into them, up to :data:`MOST` times, so that several threads have work.
GROUP: Final = 16
ROWS: Final = 512
MOST: Final = 4
#: Share of the mean diagonal of G that is added to its diagonal.
DAMPING: Final = 0.01


@dataclass(frozen=True)
class OutputFactor:
    """The factor of an output Fisher matrix, rows in groups.

    Attributes:
        order: (m,) the rows, group after group.
        groups: the slices of ``order``.
        feedback: float32 (m, m), block upper triangular in that order: what the errors of earlier rows take from the
            target of later ones.
        weight: float64 (m,), in the order of the matrix: what the squared error of each row costs once the later rows
            have made up for it; their mean over that of G's diagonal is what the feedback leaves.
    """

    order: npt.NDArray[np.int64]
    groups: tuple[slice, ...]
    feedback: npt.NDArray[np.float32]
    weight: npt.NDArray[np.float64]


def factorize(fisher: npt.NDArray[np.floating], damping: float = DAMPING, group: int | None = None) -> OutputFactor:
    """Factor an output Fisher matrix in float64.

    Args:
        fisher: (m, m), symmetric, positive semidefinite; an all-zero one is taken as the identity.
        damping: share of the mean diagonal that is added, more than 0.
        group: rows of a group, of which m need not be a multiple; None for as many as its size allows.

    Raises:
        ValueError: not square, not finite, or not positive semidefinite.
    """
    m = fisher.shape[0]
    if fisher.shape != (m, m) or not m:
        raise ValueError(f"an output Fisher matrix is square, not {fisher.shape}")
    if not np.isfinite(fisher).all():
        raise ValueError("a value of the output Fisher matrix is NaN or infinite")
    count = -(-m // (group or GROUP * min(MOST, max(1, m // ROWS))))
    parts = [np.arange(start, m, count) for start in range(count)]
    order = np.concatenate(parts)
    ends = np.cumsum([len(part) for part in parts])
    groups = tuple(slice(int(end) - len(part), int(end)) for part, end in zip(parts, ends, strict=True))
    matrix = fisher[np.ix_(order, order)].astype(np.float64)
    matrix[np.diag_indices(m)] += damping * (float(np.diagonal(matrix).mean()) or 1.0)
    try:
        lower = np.linalg.cholesky(matrix[::-1, ::-1])
    except np.linalg.LinAlgError:
        raise ValueError("the output Fisher matrix is not positive semidefinite; more damping may help") from None
    upper = (lower / np.diagonal(lower))[::-1, ::-1]
    feedback = np.zeros((m, m), dtype=np.float32)
    weight = np.empty(m)
    for rows in groups:
        # Within a group nothing is made up for: the diagonal of A_bb D_b A_bb^T.
        weight[order[rows]] = np.square(upper[rows, rows] * np.diagonal(lower)[::-1][rows]).sum(axis=1)
        if rows.start:
            feedback[: rows.start, rows] = np.linalg.solve(upper[rows, rows].T, upper[: rows.start, rows].T).T
    return OutputFactor(order, groups, feedback, weight)

"""Ratios of two rows that were scored on the same windows, with the standard error that the pairing leaves."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from ..base import report

#: A line of a table: what it is called, the row above the line, the row or rows (the best of them) below.
Ratio = tuple[str, str, tuple[str, ...]]


def paired(above: Sequence[float], below: Sequence[float]) -> tuple[float, float]:
    """The ratio of two means over the same windows and its standard error.

    Two rows share their text, so most of what makes a window hard is in both and cancels. The error is the delta
    method's for a ratio estimator: with r the ratio and e_i = above_i - r below_i, the root of n / (n - 1) sum e_i^2,
    over sum below_i (Cochran, Sampling Techniques, 6.3).

    Args:
        above: mean KL divergence of each window of 1 row, nats.
        below: of the other, the same windows.

    Returns:
        The ratio and its standard error; the error of a single window is not a number.

    Raises:
        ValueError: the windows are not as many, there are none, or the divisor is zero.
    """
    if len(above) != len(below) or not above:
        raise ValueError(f"{len(above)} and {len(below)} windows cannot be paired")
    total = math.fsum(below)
    if total == 0:
        raise ValueError("the divisor is zero")
    ratio = math.fsum(above) / total
    count = len(above)
    if count == 1:
        return ratio, math.nan
    squares = math.fsum((a - ratio * b) ** 2 for a, b in zip(above, below, strict=True))
    return ratio, math.sqrt(count / (count - 1) * squares) / abs(total)


def markdown(ratios: Sequence[Ratio], models: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> str:
    """A table of ratios of mean KL divergence.

    Args:
        ratios: its lines; one whose rows no model has is left out.
        models: title of a column -> key of a row -> the result, with ``windows``.
    """
    lines = []
    for label, above, below in ratios:
        cells = []
        for rows in models.values():
            known = [rows[key] for key in below if key in rows]
            if above in rows and len(known) == len(below):
                best = min(known, key=lambda row: row["mean_kld"])
                value, error = paired(rows[above]["windows"], best["windows"])
                cells.append(f"{value:.3f} ± {error:.3f}")
            else:
                cells.append("-")
        if any(cell != "-" for cell in cells):
            lines.append([label, *cells])
    return report.markdown(["mean KLD over that of another row", *models], lines)


def alike(labels: Mapping[str, str], models: Mapping[str, Mapping[str, Mapping[str, Any]]], first: str) -> str:
    """A table of the same rows on several models of one function, over those on one of them.

    Args:
        labels: key of a row -> what it is called.
        models: title -> key of a row -> the result, with ``windows``.
        first: title of the model that the others are compared with.
    """
    others = [title for title in models if title != first]
    lines = []
    for key, label in labels.items():
        pairs = [paired(models[title][key]["windows"], models[first][key]["windows"]) for title in others]
        lines.append([label, *(f"{value:.3f} ± {error:.3f}" for value, error in pairs)])
    return report.markdown([f"mean KLD over that on the {first}", *others], lines)

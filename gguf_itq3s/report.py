"""The closing table of a conversion, and numbers as a reader wants them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class TensorRow:
    """One tensor of a file.

    Attributes:
        name: GGUF name.
        type: name of its type.
        weights: number of weights.
        bytes: its size.
        error: relative squared error, None where there is none (copied, or not measured).
    """

    name: str
    type: str
    weights: int
    bytes: int
    error: float | None = None


def count(number: float) -> str:
    """A count with a decimal prefix: 1234567 -> ``1.23 M``."""
    for factor, prefix in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= factor:
            return f"{number / factor:.2f} {prefix}"
    return f"{number:.0f}"


def size(number: float) -> str:
    """A size in bytes with a binary prefix: 1234567 -> ``1.18 MiB``."""
    for factor, prefix in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if number >= factor:
            return f"{number / factor:.2f} {prefix}"
    return f"{number:.0f} B"


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Text in columns, the first flush left and the others flush right."""
    lines = [list(header), *map(list, rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(header))]
    return "\n".join(
        "  ".join(
            cell.ljust(w) if i == 0 else cell.rjust(w) for i, (cell, w) in enumerate(zip(line, widths, strict=True))
        )
        for line in lines
    )


def by_type(rows: Sequence[TensorRow]) -> str:
    """The table by type: tensors, weights, bits per weight, size, mean relative squared error (weighted by size)."""
    groups: dict[str, list[TensorRow]] = {}
    for row in sorted(rows, key=lambda row: -row.weights):
        groups.setdefault(row.type, []).append(row)
    lines = [_line(name, group) for name, group in groups.items()]
    return table(
        ["type", "tensors", "weights", "bits/weight", "size", "rel. sq. error"], [*lines, _line("total", rows)]
    )


def _line(name: str, rows: Sequence[TensorRow]) -> list[str]:
    weights = sum(row.weights for row in rows)
    total = sum(row.bytes for row in rows)
    measured = [row for row in rows if row.error is not None]
    error = sum(row.weights * (row.error or 0) for row in measured) / max(sum(row.weights for row in measured), 1)
    bits = f"{total * 8 / weights:.3f}" if weights else "-"
    return [name, str(len(rows)), count(weights), bits, size(total), f"{error:.3g}" if measured else "-"]

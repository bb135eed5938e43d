"""Numbers as a reader wants them, tables of text and of Markdown, and the sections of pages that commands write."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from tabulate import tabulate

from .errors import UserError
from .journal import write_text


@dataclass(frozen=True)
class TensorRow:
    """One tensor of a file; its relative squared error is None where it is copied, or not measured."""

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


def parse_size(text: str) -> int:
    """Bytes of ``32GiB``, ``4.5 GB`` or a plain number, for argparse; an i is for factors of 1024, else 1000."""
    match = re.fullmatch(r"\s*([0-9]{1,18}(?:\.[0-9]{0,9})?)\s*(?:([KMGT])(i?)B?|B)?\s*", text, re.IGNORECASE)
    if not match:
        raise argparse.ArgumentTypeError(f"{text!r:.40} is no size; write as 4.5GiB, 800MB or a number of bytes")
    power = " KMGT".index((match[2] or " ").upper())
    return int(float(match[1]) * (1024 if match[3] else 1000) ** power)


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Text in columns, the first flush left and the others flush right."""
    return _tabulate(header, rows, "plain", 1)


def markdown(header: Sequence[str], rows: Iterable[Sequence[str]], left: int = 1) -> str:
    """A Markdown table; the first ``left`` columns are left-aligned, the others right-aligned."""
    return _tabulate(header, rows, "pipe", left) + "\n"


def _tabulate(header: Sequence[str], rows: Iterable[Sequence[str]], form: str, left: int) -> str:
    align = ["left"] * left + ["right"] * (len(header) - left)
    # The cells are text already; tabulate would format again what looks like a number.
    return tabulate(
        list(rows), headers=list(header), tablefmt=form, colalign=align, disable_numparse=True, preserve_whitespace=True
    )


def replace_section(path: Path, name: str, text: str) -> None:
    """Put ``text`` between the marks ``<!-- begin name -->`` and ``<!-- end name -->`` of a file.

    Raises:
        UserError: the file has no such marks.
        OSError: the file cannot be read or written.
    """
    begin, end = f"<!-- begin {name} -->", f"<!-- end {name} -->"
    page = path.read_text(encoding="utf-8")
    if page.count(begin) != 1 or page.count(end) != 1 or page.index(begin) > page.index(end):
        raise UserError(path, f"has no {begin} ... {end}", "add the two lines, once each, where the section goes")
    head, tail = page.split(begin)[0], page.split(end)[1]
    write_text(path, f"{head}{begin}\n\n{text.rstrip()}\n\n{end}{tail}")


def require_matplotlib() -> None:
    """Find out whether plots can be drawn, before the work that they show.

    Raises:
        UserError: matplotlib is not installed.
    """
    if find_spec("matplotlib") is None:
        raise UserError("matplotlib", "is not installed", "pip install 'gguf-itq3s[eval]'")


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

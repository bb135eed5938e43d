"""Markdown tables, and the sections of ``docs/results.md`` that commands write."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path


def table(header: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1) -> str:
    """A Markdown table; the first ``left`` columns are left-aligned, the others right-aligned."""
    rule = ["---"] * left + ["---:"] * (len(header) - left)
    return "\n".join("| " + " | ".join(row) + " |" for row in [header, rule, *rows]) + "\n"


def bold_least(cells: Sequence[str], values: Sequence[float | None]) -> list[str]:
    """``cells`` with the one of the least value in bold; ties are all in bold."""
    known = [v for v in values if v is not None]
    return [f"**{c}**" if known and v == min(known) else c for c, v in zip(cells, values, strict=True)]


def replace_section(path: Path, name: str, text: str) -> None:
    """Put ``text`` between the marks ``<!-- begin name -->`` and ``<!-- end name -->`` of a file.

    Raises:
        ValueError: the file has no such marks.
        OSError: the file cannot be read or written.
    """
    begin, end = f"<!-- begin {name} -->", f"<!-- end {name} -->"
    page = path.read_text(encoding="utf-8")
    if page.count(begin) != 1 or page.count(end) != 1 or page.index(begin) > page.index(end):
        raise ValueError(f"{path}: needs the lines {begin} and {end}, once each and in this order")
    head, tail = page.split(begin)[0], page.split(end)[1]
    partial = path.with_suffix(".partial")
    partial.write_text(f"{head}{begin}\n{text.rstrip()}\n{end}{tail}", encoding="utf-8")
    partial.replace(path)

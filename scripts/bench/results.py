"""The results of the CPU benchmarks: a file a processor, to which every script adds.

A file, cpu/NAME.json in a folder of results, has the name, the model name, the number of cores and the last-level cache
of its processor, and a section a script: the state of the code, the rounds, and what was measured.
"""

from __future__ import annotations

import json
import statistics
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from gguf_itq3s.base.journal import write_text
from scripts.bench import processor

ROOT: Final = Path(__file__).resolve().parents[2]
FOLDER: Final = "cpu"
#: Scripts whose results a file holds. What two of them measure counts as the earlier name has it.
SECTIONS: Final = ("one_column", "kernels", "columns", "loading")

#: test -> what kind of thing -> measurements, one a round.
Samples = dict[str, dict[str, list[float]]]
File = Mapping[str, Any]


class BenchError(Exception):
    """The benchmark cannot go on; the message says why and what to do."""


def state() -> str:
    """The commit of the code that is measured, and whether it has been changed since."""

    def git(*arguments: str) -> str:
        done = subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=False)
        return done.stdout.strip()

    try:
        commit = git("rev-parse", "--short", "HEAD")
        changed = git("status", "--porcelain", "--untracked-files=no", "--", "ggml-patch", "gguf_itq3s", "scripts")
    except OSError:
        return "unknown"
    return f"{commit or 'unknown'}{' and changes' if changed else ''}"


def medians_of(samples: Samples) -> dict[str, dict[str, float]]:
    """The medians of two-level samples."""
    return {test: {name: statistics.median(v) for name, v in names.items()} for test, names in samples.items()}


def label(name: str, build: str) -> str:
    """What a type is called in a build: "" is the build as it is, else "AVX2" or "stock"."""
    return f"{name} ({build})" if build else name


def build_of(name: str) -> str:
    """The build of a label."""
    return name.partition(" (")[2].removesuffix(")")


def record(output: Path, section: str, data: Mapping[str, Any]) -> Path:
    """Put a section into the file of this processor, in place of an earlier one; returns the file.

    Raises:
        BenchError: what is there is no such file.
        OSError: it cannot be written.
    """
    this, path = processor.this(), output / FOLDER / f"{processor.this().name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    old = read(path) if path.exists() else {}
    sections = {**old.get("sections", {}), section: {"state": state(), **data}}
    ordered = {name: sections[name] for name in SECTIONS if name in sections}
    file = {
        "name": this.name, "model": this.model, "cores": processor.cores(),
        "cache": processor.last_level_cache(), "sections": ordered,
    }  # fmt: skip
    write_text(path, json.dumps(file, indent=1) + "\n")
    return path


def read(path: Path) -> dict[str, Any]:
    """A processor's file.

    Raises:
        BenchError: it is none.
    """
    try:
        file = json.loads(path.read_text())
    except ValueError as error:
        raise BenchError(f"{path}: is no JSON ({error}); remove it or take it from the repository") from error
    if not isinstance(file, dict) or not isinstance(file.get("sections"), dict) or file.get("name") != path.stem:
        raise BenchError(f"{path}: is no processor's results; remove it or take it from the repository")
    return file


def files(output: Path) -> list[dict[str, Any]]:
    """The files of all processors in a folder of results, by name.

    Raises:
        BenchError: one of them is no processor's file.
    """
    return [read(path) for path in sorted((output / FOLDER).glob("*.json"))]


def merged(file: File, what: str) -> dict[str, Any]:
    """``medians`` or ``samples`` by test, of the kernels and the products with one column."""
    sections = [file["sections"].get(name, {}) for name in ("kernels", "one_column")]
    return {test: found for section in sections for test, found in section.get(what, {}).items()}


def median(file: File, test: str, name: str) -> float | None:
    """The median of what a test measured, None if it has not."""
    return merged(file, "medians").get(test, {}).get(name)


def ratio(file: File, test: str, over: str, under: str) -> float | None:
    """The median of the ratios of two things in the same rounds, of the medians if one has fewer rounds."""
    samples = merged(file, "samples").get(test, {})
    if over not in samples or under not in samples:
        return None
    return ratio_of(samples[over], samples[under])


def ratio_of(over: Sequence[float], under: Sequence[float]) -> float:
    """The median of the ratios of measurements in pairs, of the medians if they are not as many."""
    if len(over) != len(under):
        return statistics.median(over) / statistics.median(under)
    return statistics.median(a / b for a, b in zip(over, under, strict=True))


def model_bytes(file: File, name: str) -> int | None:
    """The size of the model of a label's type."""
    sizes = [section.get("model_bytes", {}) for section in file["sections"].values()]
    return next((found[name.split()[0]] for found in sizes if name.split()[0] in found), None)

"""`make bench`: its model is one that llama.cpp runs, and what the programs print is what it reads. No time decides."""

from __future__ import annotations

import json
import math
import re
import subprocess
from collections import defaultdict
from pathlib import Path

import pytest

from gguf_itq3s.codec.native import NativeLibrary
from scripts.bench import cpu, random_model

TYPES = ("ITQ3_S", "TQ2_0", "Q4_K")


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, library: NativeLibrary) -> Path:
    """A folder for a model that is small, and the C program."""
    monkeypatch.setattr(cpu, "MODEL", random_model.Shape(2, 512, 768, 4, 2, 300, tied=True))
    for name, value in {"OUT": tmp_path, "TYPES": TYPES, "COLUMNS": (1, 4), "PRODUCTS": (1,)}.items():
        monkeypatch.setattr(cpu, name, value)
    cpu.build_program()
    return tmp_path


def test_a_round_measures_every_type_and_the_page_shows_it(small: Path) -> None:
    samples: cpu.Samples = defaultdict(lambda: defaultdict(list))
    cpu.Round(samples, {"": None}, cpu.models(TYPES), 2, 1 << 20).speed()
    tests = {"generation", "generation_all", "mapped", "mapped_all", "prompt_1", "prompt_4", "prompt_512_all"}
    assert set(samples) == tests | {"products_1", "share_of_memory"}
    for found in samples.values():
        assert set(found) == set(TYPES)
        assert all(len(values) == 1 and math.isfinite(values[0]) and values[0] > 0 for values in found.values())
    file = {"name": "x", "model": "the x", "cores": 2, "cache": 0, "state": "1", "rounds": 1, "samples": samples}
    (small / "cpu").mkdir()
    (small / "cpu" / "x.json").write_text(json.dumps(file))
    cpu.write_pages(small)
    text = re.sub(" +", " ", (small / "cpu" / "x.md").read_text())
    speed, base = samples["generation"]["ITQ3_S"][0], samples["generation"]["Q4_K"][0]
    assert f"| ITQ3_S | {speed:.1f} ({speed / base:.2f}) |" in text and "Of 1 targets" in text
    assert (small / "columns.png").stat().st_size > 1000


def test_ratios_are_those_of_the_same_rounds() -> None:
    file = {"samples": {"t": {"a": [1.0, 8.0, 3.0], "b": [1.0, 2.0, 1.0], "c": [2.0]}}}
    assert cpu.ratio(file, "t", "a", "b") == 3 and cpu.ratio(file, "t", "a", "c") == 1.5
    assert cpu.ratio(file, "t", "a", "d") is None


@pytest.mark.parametrize(
    ("said", "name"),
    [("znver4", "zen4"), ("rocketlake", "rocketlake"), ("rocketlake\n -mamx-tile [enabled]", "sapphirerapids"),
     ("graniterapids\n -mamx-tile [enabled]", "graniterapids")],
)  # fmt: skip
def test_a_processor_is_not_one_that_lacks_what_it_has(
    said: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (compiler := tmp_path / "cc").write_text(f"#!/bin/sh\necho '-march= {said}'\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CC", str(compiler))
    assert cpu.processor()["name"] == name


@pytest.mark.parametrize("text", ["", "[]", '{"name": "x"}'])
def test_what_is_no_file_of_results(text: str, tmp_path: Path) -> None:
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu" / "x.json").write_text(text)
    with pytest.raises(cpu.BenchError, match=r"x\.json: is no .*; remove it"):
        cpu.write_pages(tmp_path)


@pytest.mark.parametrize("arguments", ["", "memory 0 1 Q4_K=12", "memory 1 0 Q4_K=12", "nonsense Q4_K=12", "1 Q4_K"])
def test_arguments_that_are_wrong(arguments: str, small: Path) -> None:
    done = subprocess.run([small / "bench-kernels", *arguments.split()], capture_output=True, text=True)
    assert done.returncode == 1 and done.stdout == ""
    assert re.match(r"usage: |error: .* is not NAME=TYPE", done.stderr)


def test_the_committed_pages_are_those_of_the_committed_files() -> None:
    for path in sorted((cpu.ROOT / "docs" / "results" / "cpu").glob("*.json")):
        assert path.with_suffix(".md").read_text() == cpu.page(json.loads(path.read_text())), path.name

"""The benchmark's model is one that llama.cpp runs; what programs print is what scripts read. Times decide nothing."""

from __future__ import annotations

import json
import math
import re
import subprocess
from collections import Counter, defaultdict
from pathlib import Path

import gguf
import pytest

import llama
from gguf_itq3s.codec.native import NativeLibrary
from scripts.bench import columns, kernels, one_column, random_model, results

SHAPE = random_model.Shape(2, 512, 768, 4, 2, 300, tied=True)


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, library: NativeLibrary) -> Path:
    """A folder for models that are small."""
    monkeypatch.setattr(kernels, "MODEL", SHAPE)
    monkeypatch.setattr(kernels, "OUT", tmp_path)
    return tmp_path


@pytest.fixture
def programs(small: Path) -> Path:
    """The folder of the C programs."""
    kernels.build_programs()
    return small


@pytest.mark.parametrize("name", ["ITQ3_S", "TQ1_0", "F16"])
def test_model(name: str, small: Path) -> None:
    path = kernels.models([name])[name]
    assert [p.name for p in path.parent.iterdir()] == [f"{name}.gguf"]
    kinds = {t.name: t.tensor_type.name for t in gguf.GGUFReader(path).tensors}
    assert kinds["blk.1.ffn_down.weight"] == name and kinds["token_embd.weight"] == "Q6_K"
    done = llama.run("llama-bench", "-m", path, "-p", "16", "-n", "2", "-r", "1", "-t", "1", "-o", "json")
    assert {(r["n_prompt"], r["n_gen"]) for r in json.loads(done.stdout)} == {(16, 0), (0, 2)}


def test_products_out_of_memory(programs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(one_column, "STREAMED", ("ITQ3_S", "TQ1_0", "Q4_K"))
    samples: results.Samples = defaultdict(lambda: defaultdict(list))
    ways: Counter[str] = Counter()
    for threads in (1, 2):
        one_column.products(samples, ways, {"": None}, 1 << 20, threads)
    assert set(samples) == {f"{test}_{end}" for test in ("weights", "read", "limit", "share") for end in ("1", "all")}
    for found in samples.values():
        assert set(found) == {"ITQ3_S", "TQ1_0", "Q4_K"}
        assert all(value > 0 and math.isfinite(value) for values in found.values() for value in values)
    for end in ("1", "all"):
        for name, (read,) in samples[f"read_{end}"].items():
            # what a panel has beside the weights, and no more
            bytes_read = read / samples[f"weights_{end}"][name][0]
            block, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(kernels.TYPES[name])]
            assert bytes_read >= 0.999 * size / block
    assert sum(ways.values()) == 6
    assert all(re.fullmatch(r"[1248] places, (no prefetch|prefetch (16|64) lines ahead)", way) for way in ways)


def test_limits(programs: Path) -> None:
    done = subprocess.run([programs / "bench-kernels", "roofline", "1"], capture_output=True, text=True, check=True)
    found = dict(line.split() for line in done.stdout.splitlines())
    assert "memory_1" in found and found.keys() <= {"memory_1", "products"}
    assert all(float(value) > 0 for value in found.values())


@pytest.mark.parametrize(
    "arguments",
    [
        "",
        "memory",
        "memory 1 1",
        "memory 0 1 Q4_K=12",
        "memory 1 0 Q4_K=12",
        "nonsense Q4_K=12",
        "1 Q4_K",
        "roofline x",
    ],
)
def test_arguments_that_are_wrong(arguments: str, programs: Path) -> None:
    done = subprocess.run([programs / "bench-kernels", *arguments.split()], capture_output=True, text=True, check=False)
    assert done.returncode == 1 and done.stdout == ""
    assert re.match(r"usage: |error: .* is not NAME=TYPE", done.stderr)


@pytest.mark.parametrize("mapped", [False, True])
def test_generation(mapped: bool, small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(one_column, "GENERATED", {"": ("ITQ3_S", "Q4_K")})
    monkeypatch.setattr(one_column, "MAPPED", ("ITQ3_S",))
    samples: results.Samples = defaultdict(lambda: defaultdict(list))
    paths = kernels.models(["ITQ3_S", "Q4_K"])
    one_column.generation(samples, {"": None}, paths, "generation", 1, mapped=mapped)
    assert set(samples["generation"]) == ({"ITQ3_S"} if mapped else {"ITQ3_S", "Q4_K"})
    assert all(value > 0 for values in samples["generation"].values() for value in values)


def test_a_build_beside_itself(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(columns, "COLUMNS", (1, 4))
    samples: results.Samples = defaultdict(lambda: defaultdict(list))
    build = columns.build_in(kernels.BIN)
    columns.pair(samples, build, build, kernels.models(columns.PAIRED), swap=False)
    table = columns.paired_table(samples)
    assert table.count("\n| ITQ3_S") == table.count("\n| TQ2_0") == 2

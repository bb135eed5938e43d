"""Files of results, a processor each, and the page that puts them side by side. Nothing is timed."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from scripts.bench import columns, cpu_page, kernels, large, loading, one_column, processor, results, targets

NAMES = ("ITQ3_S", "Q3_K", "Q4_K", "IQ3_S", "TQ2_0", "TQ1_0", "TQ1_0 (stock)", "ITQ3_S (AVX2)", "Q3_K (AVX2)")


def samples_of(*tests: str) -> results.Samples:
    """10, 20, ... of the names in the first of two rounds, twice that in the second."""
    return {test: {name: [10.0 * (i + 1), 20.0 * (i + 1)] for i, name in enumerate(NAMES)} for test in tests}


def measured(samples: results.Samples, **more: Any) -> dict[str, Any]:
    return {"rounds": 2, "cores": 2, "medians": results.medians_of(samples), "samples": samples, **more}


def sections() -> dict[str, dict[str, Any]]:
    sizes = {name.split()[0]: 10**9 for name in NAMES}
    ends = ("generation", "generation_all", "mapped", "weights_1", "weights_all", "read_1", "read_all")
    one = samples_of(*ends)
    one |= {test: {"ITQ3_S": [0.5, 0.9], "Q4_K": [0.6, 0.8]} for test in ("share_1", "share_all")}
    one |= {test: {"ITQ3_S": [20.0, 22.0], "Q4_K": [21.0, 25.0]} for test in ("limit_1", "limit_all")}
    others = samples_of("products_1", "products_4", "products_512", "prompt", "prompt_all")
    others |= {"quantize": {"ITQ3_S": [29.0], "IQ3_S": [1.0], "ITQ3_S (numpy)": [2.0]}}
    others |= {"roofline": {"memory_1": [20.0], "memory_2": [40.0], "products": [500.0]}}
    speeds = {name: {str(n): [float(n * (20 - i))] for n in columns.COLUMNS} for i, name in enumerate(columns.TYPES)}
    speeds |= {"ITQ3_S (AVX2)": speeds["Q4_K"], "Q4_K (AVX2)": speeds["ITQ3_S"]}
    loads = {w: {n: [large.Run(2.0 + i, 1.0, 2**20)] for i, n in enumerate(loading.TYPES)} for w in loading.WAYS}
    threads = {"gguf-itq3s convert": {"1": [large.Run(6.0, 6.0, 1)], "2": [large.Run(4.0, 8.0, 1)]}}
    return {
        "one_column": measured(
            one, model_bytes=sizes, memory=2**28, readers={"1": "4 places, no prefetch", "2": "1 places, no prefetch"}
        ),
        "kernels": measured(others, model_bytes=sizes, instructions={"ITQ3_S": 49.1}),
        "columns": measured(speeds),
        "loading": {
            "rounds": 1, "cores": 2, "model_bytes": dict.fromkeys(loading.TYPES, 2**21),
            "loading": loading.medians_of(loads), "quantizing": loading.medians_of(threads),
        },
    }  # fmt: skip


@pytest.fixture
def recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the results of two processors; the second has no kernels."""
    for name in ("first", "second"):
        monkeypatch.setattr(processor, "this", lambda name=name: processor.Processor(name, f"the {name}"))
        for section, data in sections().items():
            if (name, section) != ("second", "kernels"):
                results.record(tmp_path, section, data)
    return tmp_path


def lines_of(text: str) -> str:
    """Without the padding of the columns."""
    return re.sub(" +", " ", text)


def test_a_file_keeps_the_sections_of_other_scripts(recorded: Path) -> None:
    path = recorded / "cpu" / "second.json"
    before = results.read(path)
    assert list(before["sections"]) == ["one_column", "columns", "loading"]
    assert before["model"] == "the second" and before["cores"] >= 1
    assert results.record(recorded, "columns", {"rounds": 9}) == path
    after = results.read(path)
    assert after["sections"].pop("columns") == {"state": results.state(), "rounds": 9}
    del before["sections"]["columns"]
    assert after == before
    assert [file["name"] for file in results.files(recorded)] == ["first", "second"]


@pytest.mark.parametrize("text", ["", '{"name": "other", "sections": {}}', '{"name": "x"}', "[]"])
def test_what_is_no_file_of_results(text: str, tmp_path: Path) -> None:
    path = tmp_path / "cpu" / "x.json"
    path.parent.mkdir()
    path.write_text(text)
    with pytest.raises(results.BenchError, match=r"x\.json: is no .*; remove it"):
        cpu_page.write(tmp_path)


def test_ratios_are_those_of_the_same_rounds() -> None:
    assert results.ratio_of([1.0, 8.0, 3.0], [1.0, 2.0, 1.0]) == 3
    assert results.ratio_of([1.0, 8.0, 3.0], [2.0]) == 1.5


def test_targets(recorded: Path) -> None:
    first, second = results.files(recorded)
    found = {(check.test, check.what): check for check in targets.checks(first)}
    assert len(found) == len(targets.RATIOS) + len(targets.VALUES)
    assert found["products_1", "ITQ3_S over Q3_K"].text == "0.50 (missed)"
    assert found["generation", "ITQ3_S (AVX2) over Q3_K (AVX2)"].got == 8 / 9
    assert found["share_1", "ITQ3_S, share of one core's memory speed"].text == "0.70 (missed)"
    assert found["quantize", "ITQ3_S over IQ3_S"].text == "29.00"
    assert found["generation", "TQ2_0 over TQ2_0 (stock)"].text == ""
    assert {check.got for check in targets.checks(second) if check.test == "products_1"} == {None}


def test_page(recorded: Path) -> None:
    text = lines_of(cpu_page.page(results.files(recorded)))
    state = results.state()
    assert f"| first | the first | {results.files(recorded)[0]['cores']} |" in text
    assert text.count(f"| {state}, rounds: 2 |") >= 2
    # medians 15 and 45, ratio to Q4_K's in the same round, both processors, one thread and all
    assert "| ITQ3_S | 0.391 | 15.0 | 0.33 | 15.0 | 0.33 | 15.0 | 0.33 | 15.0 | 0.33 |" in text
    # 70%: the median of both rounds' shares
    assert "| ITQ3_S | 15.0 | 15.0 | 70% | 15.0 | 15.0 | 70% |" in text
    assert "first: 256 MiB of weights; readers of them, medians by type: 1 thread 21.0 to 23.0 GB/s" in text
    assert "| products_1 | ITQ3_S over Q3_K | 2.8 | 0.50 (missed) | |" in text
    assert "| first | ITQ3_S | 20.0 | 40.0 | 80.0 |" in text
    speed = 20 - columns.TYPES.index("Q4_K")
    assert f"| second | Q4_K | {20 / speed:.2f} | {20 / speed:.2f} |" in text
    assert f"| second | Q4_K (AVX2) | {speed / 20:.2f} |" in text
    # 15 tokens/s of a model of 1 GB
    assert "| ITQ3_S | 3% | 3% | 75% | 38% |" in text and "| ITQ3_S | 49 |" in text
    assert "| default | ITQ3_S | 2 | 2.00 | 0.50 | 1 | 1.00 | 2.00 | 0.50 | 1 | 1.00 |" in text
    assert "| gguf-itq3s convert | 6.0 | 4.0 | 1.50 | 6.0 | 4.0 | 1.50 |" in text


@pytest.mark.slow
def test_pictures(recorded: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cpu_page.write(recorded)
    pictures = {name: (recorded / name).read_bytes() for name in ("bench.png", "columns.png")}
    assert all(len(picture) > 1000 for picture in pictures.values())
    cpu_page.add(recorded, "columns", sections()["columns"])
    assert pictures == {name: (recorded / name).read_bytes() for name in pictures}
    assert "tokens/s by columns" in capsys.readouterr().out


def test_the_committed_page_is_that_of_the_committed_files() -> None:
    files = results.files(cpu_page.RESULTS)
    assert files and (cpu_page.RESULTS / "cpu.md").read_text() == cpu_page.page(files)
    assert all(section["state"] for file in files for section in file["sections"].values())


def test_no_results(tmp_path: Path) -> None:
    command = [sys.executable, cpu_page.__file__, "--output", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1 and "has no results; run make bench" in done.stderr


def test_what_a_build_is_compared_with(tmp_path: Path) -> None:
    with pytest.raises(results.BenchError, match="neither llama-bench nor libggml-cpu"):
        columns.build_in(tmp_path)
    (tmp_path / "libggml-cpu.so").touch()
    assert columns.build_in(tmp_path) == columns.Build(kernels.BIN, tmp_path)
    (tmp_path / "llama-bench").touch()
    assert columns.build_in(tmp_path) == columns.Build(tmp_path)


def test_two_builds_in_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = columns.Build(Path("ours")), columns.Build(Path("theirs"))
    asked: list[columns.Build] = []

    def speeds(build: columns.Build, paths: list[Path], number: int, tokens: int) -> dict[str, float]:
        asked.append(build)
        drift = len(asked) // (2 * len(columns.PAIRED) * len(columns.COLUMNS)) + 1
        return {path.stem: number * drift * (3.0 if build == ours else 2.0) for path in paths}

    monkeypatch.setattr(columns, "speeds", speeds)
    samples: results.Samples = {f"{n}, {side}": {} for n in columns.PAIRED for side in ("this", "other")}
    for found in samples.values():
        found.update({str(number): [] for number in columns.COLUMNS})
    paths = {name: Path(f"{name}.gguf") for name in columns.PAIRED}
    columns.pair(samples, ours, theirs, paths, swap=False)
    first = len(asked)
    columns.pair(samples, ours, theirs, paths, swap=True)
    assert asked[:first] == [ours, theirs] * (first // 2) and asked[first:] == [theirs, ours] * (first // 2)
    text = lines_of(columns.paired_table(samples))
    assert f"| TQ2_0 | {columns.COLUMNS[1]} |" in text and "| 1.500 | 1.500 | 1.500 |" in text


def test_loading() -> None:
    run = loading.measured(["sh", "-c", "exit 0"])
    assert run.seconds > 0 and run.memory > 0
    with pytest.raises(results.BenchError, match="sh failed"):
        loading.measured(["sh", "-c", "echo no; exit 3"])


def test_one_column_has_what_the_targets_ask() -> None:
    for test, over, under, _ in targets.RATIOS:
        if test in ("generation", "mapped"):
            types = one_column.MAPPED if test == "mapped" else ()
            for name in (over, under):
                assert name.split()[0] in (types or one_column.GENERATED[results.build_of(name)])
    assert {name.split()[0] for test, name, *_ in targets.VALUES if test == "share_1"} <= set(one_column.STREAMED)


def test_state_outside_of_a_repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(results, "ROOT", tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert results.state() == "unknown"

"""Scripts that check what the tests cannot: the patches on releases of llama.cpp, other compilers."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from gguf_itq3s import upstream
from scripts.check import cuda as cuda_check
from scripts.check import hip, mingw, releases

PAGE = releases.ROOT / "docs" / "platforms.md"


def test_the_table_is_made_of_the_recorded_results() -> None:
    recorded = json.loads(releases.RESULTS.read_text())
    assert list(recorded) == [release.version for release in releases.RELEASES]
    assert recorded[upstream.VERSION]["left_out"] == {}
    outcomes = {name: releases.Outcome(**fields) for name, fields in recorded.items()}
    text = PAGE.read_text()
    section = text.split("<!-- begin releases -->")[1].split("<!-- end releases -->")[0]
    assert section.strip() == releases.table(outcomes).strip(), f"run scripts/check/releases.py --update {PAGE}"
    # Every patch has its row, and every release runs the demo.
    first = re.findall(r"^\| (\S[^|]*?) +\|", section, re.MULTILINE)[1:]
    assert first[1:-1] == releases.optional_patches() and first[0].startswith("required: 0001-ggml-type, ")
    assert all(outcome.demo for outcome in outcomes.values()) and not any(o.failed for o in outcomes.values())


def test_left_out_and_failed_patches_are_told_apart() -> None:
    names = releases.optional_patches()
    outcomes = {
        "1": releases.Outcome({names[0]: "Without it, this."}),
        "2": releases.Outcome(failed="0001-ggml-type.patch does not apply"),
    }
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in releases.table(outcomes).splitlines()]
    assert rows[0] == ["patch", "1", "2"] and rows[2][1:] == ["yes", "no"]
    assert rows[3] == [names[0], "-", "yes"] and rows[4] == [names[1], "yes", "yes"]
    assert len(rows) == 3 + len(names)  # no row of demos that were not run


def test_a_required_patch_that_does_not_apply_is_named(tmp_path: Path) -> None:
    source = tmp_path / "llama.cpp" / "ggml" / "src"
    source.mkdir(parents=True)
    (source / "ggml.c").write_text("int other;\n")
    outcome = releases.apply(tmp_path / "llama.cpp", tmp_path)
    assert "0001-ggml-type.patch does not apply" in outcome.failed and outcome.left_out == {}


def test_mingw_finds_warnings_in_our_files_alone() -> None:
    log = (
        "a/itq-quantize.c:12:3: warning: unused variable 'x' [-Wunused-variable]\n"
        "a/ggml.c:1:2: warning: unused variable 'y' [-Wunused-variable]\n"
        "a/itq-quantize.c:12:3: note: declared here\n"
    )
    assert mingw.complaints(log, {"itq-quantize.c"}) == [log.splitlines()[0]]


def test_without_a_compiler_it_is_skipped(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(hip, "compilers", list)
    monkeypatch.setattr(sys, "argv", ["hip.py", "--work", str(tmp_path / "work")])
    assert hip.main() == hip.SKIPPED
    assert capsys.readouterr().out == f"skipped: no clang 17 or newer with headers of HIP; install {hip.PACKAGES}\n"
    assert not (tmp_path / "work").exists()


def test_a_file_is_compiled_again_when_what_it_includes_has_changed(tmp_path: Path) -> None:
    files = {
        "ggml/src/ggml-cuda/a.cu": '#include "a.cuh"\n',
        "ggml/src/ggml-cuda/b.cu": '#  include "ggml-cuda/b.cuh"\n#include <a.cuh>\n',
        "ggml/src/ggml-cuda/a.cuh": '#if 0\n#include "../c.h"\n#endif\n#include "absent.h"\n',
        "ggml/src/ggml-cuda/b.cuh": '#include "ggml.h"\n#include "b.cuh"\n',
        "ggml/src/c.h": "",
        "ggml/include/ggml.h": "",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)

    def keys() -> list[str]:
        return [cuda_check.source_key(tmp_path, name, ["-O3"], "13.0") for name in ("a.cu", "b.cu")]

    reached = {"a.cu": 0, "a.cuh": 0, "c.h": 0, "b.cu": 1, "b.cuh": 1, "ggml.h": 1}
    for name in files:
        before = keys()
        with (tmp_path / name).open("a") as file:
            file.write("// another line\n")
        changed = [old != new for old, new in zip(before, keys(), strict=True)]
        assert changed == [n == reached[Path(name).name] for n in range(2)], name
    assert cuda_check.source_key(tmp_path, "a.cu", ["-O2"], "13.0") != keys()[0]

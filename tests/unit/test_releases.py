"""scripts/check/releases.py and mingw.py: what they print, and what they say where they cannot work."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from gguf_itq3s import upstream
from scripts.check import mingw, releases

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


@pytest.mark.parametrize(("ci", "code"), [("", releases.SKIPPED), ("true", 1)])
def test_without_the_sources(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], ci: str, code: int
) -> None:
    def refuse(release: upstream.Release) -> Path:
        raise upstream.FetchError(f"no {release.name}")

    monkeypatch.setattr(upstream, "fetch_release", refuse)
    monkeypatch.setenv("CI", ci)
    monkeypatch.setattr(sys, "argv", ["releases.py"])
    assert releases.main() == code
    assert capsys.readouterr().err == "0.3.34: no llama_cpp_python-0.3.34\n"


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


def test_mingw_without_a_compiler(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "argv", ["mingw.py", "--work", str(tmp_path / "work")])
    assert mingw.main() == mingw.SKIPPED
    assert capsys.readouterr().err.startswith("skipped: x86_64-w64-mingw32-gcc-posix, ")
    assert not (tmp_path / "work").exists()


def test_mingw_reports_what_does_not_compile() -> None:
    with pytest.raises(mingw.CheckError, match=r"failed:\nerror: here"):
        mingw.called([sys.executable, "-c", "print('fine\\nerror: here'); raise SystemExit(1)"])
    assert mingw.called([sys.executable, "-c", "print('fine')"]) == "fine\n"

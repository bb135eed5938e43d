"""ggml-patch/cmake/progress.py: a build's output goes to a file, and what a reader has to see to the screen."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PROGRESS = Path(__file__).resolve().parents[2] / "ggml-patch" / "cmake" / "progress.py"
THEIRS = "/tree/ggml-cpu/ops.cpp:12:3: warning: enumeration value not handled [-Wswitch]"
HEADER = "/usr/lib/avx512fintrin.h:206:11: warning: '__Y' is used uninitialized [-Wuninitialized]"
OURS = "/tree/ggml-cpu/itq3s/itq-quants.c:7:9: warning: unused variable 'x' [-Wunused-variable]"
STEPS = ["[1/3] Building C object a.c.o", "[2/3] Building CXX object b.cpp.o", "[3/3] Linking CXX executable c"]


def run(
    tmp_path: Path, lines: list[str], code: int = 0, ci: str = ""
) -> tuple[subprocess.CompletedProcess[str], list[str]]:
    """The program over a build that prints these lines, and the log."""
    program = f"import sys\nfor line in {lines!r}: print(line, file=sys.stderr)\nsys.exit({code})"
    log = tmp_path / "build.log"
    command: list[str | Path] = [
        sys.executable,
        PROGRESS,
        log,
        r"^(itq-quants\.c|itq-gemm\.c)$",
        sys.executable,
        "-c",
        program,
    ]
    done = subprocess.run(command, capture_output=True, text=True, env={"CI": ci})
    return done, log.read_text().splitlines()


def test_warnings_of_others_are_in_the_log_alone(tmp_path: Path) -> None:
    lines = [STEPS[0], THEIRS, STEPS[1], "In file included from /tree/itq-quants.c:3,", HEADER, STEPS[2]]
    done, log = run(tmp_path, lines, ci="true")
    assert done.returncode == 0 and done.stderr == "" and log == lines
    assert done.stdout.startswith("-- compiled 2 objects in ") and len(done.stdout.splitlines()) == 1


@pytest.mark.parametrize("ci", ["", "true"])
def test_warnings_of_our_files_are_printed_and_fail_where_it_is_checked(ci: str, tmp_path: Path) -> None:
    done, log = run(tmp_path, [STEPS[0], THEIRS, OURS], ci=ci)
    assert done.stderr.splitlines() == [OURS] and log == [STEPS[0], THEIRS, OURS]
    assert done.returncode == (1 if ci else 0)


def test_the_end_of_a_build_that_fails_is_printed(tmp_path: Path) -> None:
    lines = [f"[{n}/100] Building C object {n}.c.o" for n in range(100)] + ["x.c:1:1: error: expected ';'"]
    done, log = run(tmp_path, lines, code=2)
    assert done.returncode == 1 and log == lines
    assert done.stderr.splitlines()[:-1] == lines[-60:]
    assert done.stderr.splitlines()[-1] == f"-- the whole output: {tmp_path / 'build.log'}"

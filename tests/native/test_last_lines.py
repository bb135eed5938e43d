"""scripts/check/last_lines.py: it finds lost lines, and the built tools lose none."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import llama

SCRIPT = llama.ROOT / "scripts" / "check" / "last_lines.py"


def run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, SCRIPT, *arguments], capture_output=True, text=True, timeout=600)


def test_the_tools_lose_nothing() -> None:
    done = run("--runs", "10")
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [line.split() for line in done.stdout.splitlines()[-6:]]
    assert {row[0] for row in rows} >= {"llama-perplexity", "llama-completion", "llama-cli", "llama-imatrix"}
    assert all(row[1:] == ["10", "0", "0"] for row in rows)


def test_lost_lines_are_counted(tmp_path: Path) -> None:
    """A tool that sometimes loses the end of its text, the end of its log, or everything in a crash."""
    whole = "echo 'the text goes on'; echo 'common_perf_print:    graphs reused =          6' >&2"
    (tmp_path / "llama-completion").write_text(
        f"""#!/bin/sh
n=$(ls {tmp_path}/ran | wc -l)
touch {tmp_path}/ran/$n
case $n in
    3) echo 'the text'; echo 'common_perf_print:    graphs reused =          6' >&2 ;;
    5) echo 'the text goes on'; echo 'common_perf_print:  unaccounted time' >&2 ;;
    7) exit 3 ;;
    *) {whole} ;;
esac
"""
    )
    (tmp_path / "llama-completion").chmod(0o755)
    (tmp_path / "ran").mkdir()
    options: list[str | Path] = ["--bin", tmp_path, "--model", tmp_path, "--tool", "llama-completion", "--load", "0"]
    done = run("--runs", "12", "--jobs", "1", *options)
    assert done.returncode == 1 and "exit code 3" in done.stderr
    assert done.stdout.splitlines()[-1].split() == ["llama-completion", "12", "2", "1"]
    done = run("--runs", "4", "--jobs", "1", *options)  # from the 13th on all is well
    assert done.returncode == 0, done.stdout + done.stderr
    assert run("--bin", tmp_path / "none").stderr.endswith("is not built; run make build\n")

"""What the documents say is what the programs do."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from gguf_itq3s.codec.trellis import LEVELS

ROOT = Path(__file__).resolve().parents[2]


def script(name: str, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, ROOT / "scripts" / name, *arguments], capture_output=True, text=True)


def test_levels_in_the_format_description() -> None:
    rows = re.findall(r"^\| ([0-3]) \| (-[0-9 -]+) \|$", (ROOT / "docs" / "format.md").read_text(), re.MULTILINE)
    assert {int(grid): [int(n) for n in levels.split()] for grid, levels in rows} == {
        grid: LEVELS[grid::4].tolist() for grid in range(4)
    }


@pytest.mark.slow
def test_picture_is_drawn(tmp_path: Path) -> None:
    for name in ("first.svg", "second.svg"):
        done = script("tables/format_picture.py", "--out", tmp_path / name)
        assert done.returncode == 0, done.stderr
    first = (tmp_path / "first.svg").read_text()
    assert first == (tmp_path / "second.svg").read_text()
    assert "100 bytes for 256 weights" in first


def test_make_without_a_target_lists_the_targets() -> None:
    done = subprocess.run(["make", "-C", ROOT, "--no-print-directory"], capture_output=True, text=True, check=True)
    for target in ("demo", "test", "build", "lint", "clean"):
        assert re.search(rf"^ +make {target} ", done.stdout, re.MULTILINE)

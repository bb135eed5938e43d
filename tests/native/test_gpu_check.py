"""scripts/check/gpu.py: what is run, found, run again. Programs stand in for llama.cpp's, products are on the CPU."""

from __future__ import annotations

import json
import sys
import tarfile
from pathlib import Path

import pytest

import llama
from scripts.bench import random_model
from scripts.check import gpu

PROGRAM = """#!/bin/sh
echo "$0 $*" >> {calls}
case "$0 $*" in
  *test-backend-ops*GET_ROWS*) echo "  {rows}/7 tests passed" ;;
  *test-backend-ops*) echo "  7/7 tests passed" ;;
  *perplexity*-ub\\ 8*) echo "Final estimate: PPL = {batch8} +/- 0.1" ;;
  *perplexity*) echo "Final estimate: PPL = 8.0000 +/- 0.1" ;;
  *bench*) echo '[{{"avg_ts": 100.5}}, {{"avg_ts": 20.25}}]' ;;
esac
"""


def test_a_check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "source").mkdir()
    with tarfile.open(tmp_path / "source.tar.xz", "w:xz") as archive:
        archive.add(tmp_path / "source", "source")
    folder = tmp_path / "build-cuda" / "bin"
    folder.mkdir(parents=True)
    for library in llama.BIN.glob("libggml*"):
        (folder / library.name).symlink_to(library)

    def programs(rows: int, batch8: float) -> None:
        for path in (*(folder / name for name in gpu.PROGRAMS), tmp_path / "cmake"):
            path.write_text(PROGRAM.format(calls=tmp_path / "calls", rows=rows, batch8=batch8))
            path.chmod(0o755)

    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(random_model, "write_model", lambda path, *_: path.write_bytes(b""))
    monkeypatch.setattr(sys, "argv", ["gpu.py", "run", str(tmp_path)])
    monkeypatch.setitem(gpu.DEVICES, "cuda", "CPU")
    size = ["--rows", "64", "--length", "1024", "--columns", "1", "4", "--rounds", "1"]
    monkeypatch.setattr(gpu, "PRODUCTS", [*gpu.PRODUCTS, *size])

    programs(6, 8.1)
    assert gpu.main() == 1
    said = capsys.readouterr().out
    assert "GET_ROWS: 6 of 7" in said and "ppl-batch8: 8.1, the CPU's is 8.0" in said
    results = json.loads((tmp_path / "cuda.json").read_text())
    assert results["bench-q4_K"]["pp512_tg128"] == [100.5, 20.25]
    times = results["products"]["types"]
    assert times["q4_K"]["bytes"] == 64 * 1024 // 256 * 144 and set(times) == set(gpu.MEASURED)
    assert all(seconds > 0 for one in times.values() for seconds in one["seconds"].values())
    assert "| Q4_K |" in gpu.table(results)
    calls = (tmp_path / "calls").read_text()
    assert gpu.main() == 1 and (tmp_path / "calls").read_text() == calls  # all have ended well

    (tmp_path / "cuda.json").unlink()
    programs(7, 8.0)
    assert gpu.main() == 0 and "all tests passed" in capsys.readouterr().out

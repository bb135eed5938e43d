"""The benchmark of the PyTorch layers."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def bench(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, ROOT / "scripts" / "bench" / "torch_layers.py", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_the_benchmark_runs_on_the_cpu(tmp_path: Path) -> None:
    sizes = ["--shapes", "96x256", "96x320", "--rows", "1", "5", "--rounds", "1", "--count", "2"]
    done = bench("--device", "cpu", *sizes, "--results", tmp_path)
    assert done.returncode == 0, done.stderr
    layers = json.loads((tmp_path / "torch.json").read_text())["layers"]
    assert {(entry["columns"], entry["rows"], entry["layer"]) for entry in layers} == {
        (columns, rows, layer)
        for columns, names in (
            (256, ("nn.Linear", "ITQ3_S, reference", "TQ2_0, reference")),
            (320, ("nn.Linear", "ITQ3_N, reference")),
        )
        for rows in (1, 5)
        for layer in names
    }
    assert all(entry["seconds"] > 0 for entry in layers)
    page = (tmp_path / "torch.md").read_text()
    assert "(1.00)" in page and page.count(" - ") == 2 * (1 + 2)


@pytest.mark.slow
def test_the_pages_first_lines_run() -> None:
    code = re.findall(r"^```python\n(.*?)^```$", (ROOT / "docs" / "torch.md").read_text(), re.MULTILINE | re.DOTALL)[0]
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.strip() == "torch.Size([2, 7, 512])"

"""scripts/bench/sequential.py: what it makes of one layer's runs, and that the page shows the recorded ones."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

from gguf_itq3s.base import report
from scripts.bench import large, sequential

ROOT = Path(__file__).resolve().parents[2]


def test_the_whole_is_the_layers_and_the_tokens() -> None:
    shape = large.Shape(hidden=1024, feed_forward=2048, layers=10, vocabulary=64000, keys=512)

    def run(seconds: float) -> dict[str, float]:
        return {"processor": seconds, "memory": 3 << 30}

    # 7 s to start, 50 ms a token, 200 s to quantize; with --fisher twice the time for a token.
    runs = {
        name: {"few": run(7 + 512 * cost), "more": run(7 + 1536 * cost), "quantized": run(207 + 512 * cost)}
        for name, cost in (("--calibrate", 0.05), ("--calibrate --fisher", 0.1))
    }
    text = sequential.table({"shape": asdict(shape), "threads": 1, "tokens": 512, "runs": runs})
    lines = [line for line in text.splitlines() if line.startswith("|")][2:]
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]
    assert [row[0] for row in cells] == [
        f"`{name}`, {count} tokens" for name in runs for count in sequential.TOKENS
    ]  # fmt: skip
    whole = 10 * (200 + 0.05 * 131072)
    assert cells[0][1:5] == ["200 s", "50.0 ms", large.hours(whole), large.hours(whole / 2)]
    encoded, stream = 10 * shape.layer * 3.125 / 8, 4 * 1024 * 262144
    assert cells[1][5:] == [report.size(3 << 30), report.size(4 * stream + encoded)]
    assert cells[3][2] == "100.0 ms"
    assert cells[3][6] == report.size(17 * stream + encoded)  # the inputs of every layer, and three more


def test_the_page_shows_the_recorded_measurement() -> None:
    text = (ROOT / "docs" / "calibration.md").read_text()
    section = text.split("<!-- begin sequential -->")[1].split("<!-- end sequential -->")[0]
    recorded = json.loads(sequential.RESULTS.read_text())
    assert section.strip() == sequential.table(recorded).strip(), "run scripts/bench/sequential.py --update"

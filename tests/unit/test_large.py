"""scripts/bench/large.py: what it makes of one layer's measurements, and that the page shows the recorded ones."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

from gguf_itq3s.base import report
from scripts.bench import large

ROOT = Path(__file__).resolve().parents[2]


def cells(text: str) -> list[list[str]]:
    lines = [line for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines[2:]]


def test_the_whole_is_the_layers_and_the_vocabulary() -> None:
    shape = large.Shape(hidden=1024, feed_forward=2048, layers=10, vocabulary=64000, keys=512)
    assert shape.layer == 1024 * (1024 + 512 + 512 + 1024) + 3 * 1024 * 2048
    assert shape.weights == 10 * shape.layer + 2 * 64000 * 1024
    small, rate, word = 4000, 1e-6, 1e-3
    start, words = 5.0, small * (word + 1024 * rate)
    file = shape.layer * 100 // 256 + small * 1024 * 310 // 256
    results = {
        "shape": asdict(shape), "processors": 2, "vocabulary": small, "tokens": 2048, "q6_k_seconds_a_row": word,
        "idle": {"processor": start, "memory": 1},
        "plain": {"processor": start + words + shape.layer * rate, "memory": 3 << 30},
        "calibrated": {
            "none": {"processor": start + words + 5.0, "memory": 2 << 30},
            "attn_q": {"processor": start + words + 5.0 + 7.0 + 10.0, "memory": 4 << 30},
            "ffn_down": {"processor": start + words + 5.0 + 20.0, "memory": 3 << 30},
        },
        "factor_seconds": 7.0,
        "calibrations": [{"processor": start + 30.0 + n * 2048 * 0.01, "memory": 5 << 30} for n in (1, 2)],
        "files": {"plain": file, "statistics": 1 << 30},
    }  # fmt: skip
    plain, collected, calibrated = cells(large.table(results))
    whole = 10 * shape.layer * rate + 64000 * (word + 1024 * rate)
    assert plain[2:4] == [large.hours(whole), "3.00 GiB"]
    assert plain[4] == calibrated[4] == report.size(10 * shape.layer * 100 // 256 + 64000 * 1024 * 310 // 256)
    assert collected[2:4] == [large.hours(10 * (30.0 + 262144 * 0.01)), "5.00 GiB"]
    assert collected[4] == "10.00 GiB, while it runs 2.00 GiB more"
    # Reading, ffn_down, three factors, and what is as wide as the model at attn_q's rate.
    layer = 5.0 + 20.0 + 3 * 7.0 + 10.0 * (shape.layer - 1024 * 2048) / 1024**2
    assert calibrated[1] == f"{layer:.0f} s"
    assert calibrated[2:4] == [large.hours(10 * layer + 64000 * (word + 1024 * rate)), "4.00 GiB"]


def test_hours() -> None:
    assert [large.hours(s) for s in (90, 5400, 90000, 864000)] == ["2 min", "1.5 h", "25.0 h", "10.0 days"]


def test_the_pages_show_the_recorded_measurements() -> None:
    for name, page, table in (
        ("large", "distributed", large.table),
        ("sequential", "calibration", large.layerwise_table),
    ):
        text = (ROOT / "docs" / f"{page}.md").read_text()
        section = text.split(f"<!-- begin {name} -->")[1].split(f"<!-- end {name} -->")[0]
        recorded = json.loads((ROOT / "docs" / "results" / f"{name}.json").read_text())
        assert section.strip() == table(recorded).strip(), "run scripts/bench/large.py --update docs"

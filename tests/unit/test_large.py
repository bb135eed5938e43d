"""scripts/bench/large.py: what it makes of one layer's measurements, and that the page shows the recorded ones."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

from safetensors import safe_open

from gguf_itq3s.base import report
from scripts.bench import large, large_mixture

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


def test_the_page_shows_the_recorded_measurement() -> None:
    text = (ROOT / "docs" / "distributed.md").read_text()
    section = text.split("<!-- begin large -->")[1].split("<!-- end large -->")[0]
    recorded = json.loads((ROOT / "docs" / "results" / "large.json").read_text())
    assert section.strip() == large.table(recorded).strip(), "run scripts/bench/large.py --update docs/distributed.md"
    assert recorded["shape"]["hidden"] == 8192 and recorded["shape"]["layers"] == 80


# ------------------------------------------------------------------------------------------------------------ mixtures


def test_a_mixture_is_its_layers() -> None:
    shape = large_mixture.Shape(
        hidden=1024, feed_forward=512, experts=20, chosen=4, layers=10, queries=2048, keys=256
    )  # fmt: skip
    assert shape.layer == 20 * 3 * 1024 * 512 + 20 * 1024 + 2 * 1024 * (2048 + 256)
    run = {
        "options": ["--effort", "fast"], "tokens": 2048, "processors": 2, "seconds": 50.0, "processor": 90.0,
        "resident": 5 << 30, "own": 4 << 30, "disk": 3 << 30, "experts": 20,
    }  # fmt: skip
    runs = [run, {**run, "options": ["--fisher"], "processor": 120.0, "experts": 5}]
    text = large_mixture.table({"shape": asdict(shape), "runs": runs})
    whole, part = cells(text)
    sizes = ["5.00 GiB", "4.00 GiB", "3.00 GiB"]
    assert whole == ["--calibrate --effort fast", "2048", "20", "2 min", large.hours(900), *sizes]
    assert part == ["--calibrate --fisher", "2048", "5", "2 min", "-", *sizes], "a part says nothing of the whole"
    assert "20 experts of 512 columns, 4 for a token" in text


def test_the_files_of_a_mixture_hold_its_tensors(tmp_path: Path) -> None:
    shape = large_mixture.Shape(hidden=256, feed_forward=64, experts=18, chosen=2, layers=1, queries=256, keys=128)
    large_mixture.write_model(tmp_path / "model", shape, 300)
    index = json.loads((tmp_path / "model" / "model.safetensors.index.json").read_text())["weight_map"]
    weights = 0
    for file in sorted(set(index.values())):
        with safe_open(tmp_path / "model" / file, framework="pt") as tensors:
            weights += sum(tensors.get_tensor(name).numel() for name in tensors.keys() if "norm" not in name)  # noqa: SIM118
    assert weights == shape.layer + 2 * 300 * 256
    assert len(set(index.values())) == 3


def test_the_progress_tells_how_many_experts_were_rounded() -> None:
    said = "blk.0.attn_q.weight]\r 0%|   | blk.0.ffn_gate_exps.weight[0]]\r 0%| blk.0.ffn_down_exps.weight[0]]\r"
    assert large_mixture.rounded("blk.0.attn_q.weight]") == 0
    assert large_mixture.rounded(said) == 0
    assert large_mixture.rounded(f"{said} blk.0.ffn_gate_exps.weight[10]]\n^C") == 10


def test_the_page_shows_the_recorded_mixture() -> None:
    text = (ROOT / "docs" / "distributed.md").read_text()
    section = text.split("<!-- begin large-mixture -->")[1].split("<!-- end large-mixture -->")[0]
    recorded = json.loads((ROOT / "docs" / "results" / "large-mixture.json").read_text())
    remedy = "run scripts/bench/large_mixture.py --update docs/distributed.md"
    assert section.strip() == large_mixture.table(recorded).strip(), remedy
    assert recorded["shape"]["experts"] == 128 and recorded["shape"]["hidden"] == 4096
    assert all(run["resident"] < 16 << 30 for run in recorded["runs"])
    assert any(run["experts"] == 128 for run in recorded["runs"])

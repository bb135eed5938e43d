"""The benchmark's model is one that llama.cpp runs, and its table says what was measured. Nothing is timed."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from scripts.bench import columns, kernels, large, loading


def result() -> dict[str, Any]:
    names = ["ITQ3_S", "Q3_K", "Q4_K", "IQ3_S", "TQ1_0", "TQ1_0 (stock)", "ITQ3_S (AVX2)", "Q3_K (AVX2)"]
    speeds = {name: float(10 * (i + 1)) for i, name in enumerate(names)}
    medians = {
        **dict.fromkeys(("products_1", "products_4", "products_512", "generation", "prompt", "generation_all"), speeds),
        "quantize": {"ITQ3_S": 29.0, "IQ3_S": 1.0},
        "roofline": {"memory_1": 20.0, "memory_2": 40.0, "products": 500.0},
    }  # fmt: skip
    return {
        "processor": "a processor", "cores": 2, "rounds": 3, "medians": medians, "instructions": {"ITQ3_S": 49.1},
        "model_bytes": {name.split()[0]: 10**9 for name in names}, "targets": kernels.check_targets(medians),
    }  # fmt: skip


@pytest.mark.slow
def test_table_and_targets(tmp_path: Path) -> None:
    measured = result()
    got = {(c["test"], c["what"]): c["got"] for c in measured["targets"]}
    assert got["products_1", "ITQ3_S over Q3_K"] == 0.5
    assert got["products_1", "ITQ3_S (AVX2) over Q3_K (AVX2)"] == 70 / 80
    assert got["quantize", "ITQ3_S, M weights/s"] == 29
    text = re.sub(" +", " ", kernels.table(measured))  # without the padding of the columns
    assert "| ITQ3_S | 0.391 | 49 | 10.0 |" in text
    assert "| products_1 | ITQ3_S over Q3_K | 0.50 (missed) | 2.8 |" in text
    # 20 GB/s of 100-byte blocks; 10 tokens/s of a model of 1 GB
    assert "| ITQ3_S | 51.2 | 2% | 2% | 10.0 | 50% | 10.0 | 25% |" in text
    kernels.plot(measured, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 1000


@pytest.mark.slow
def test_columns(tmp_path: Path) -> None:
    speeds = {name: {str(c): float(c * (10 - i)) for c in columns.COLUMNS} for i, name in enumerate(columns.TYPES)}
    speeds |= {"ITQ3_S (AVX2)": speeds["Q4_K"], "Q4_K (AVX2)": speeds["ITQ3_S"]}
    measured = {"processor": "a processor", "rounds": 3, "medians": speeds}
    text = re.sub(" +", " ", columns.table(measured))
    assert "| ITQ3_S | 10.0 | 20.0 | 40.0 |" in text
    assert "| ITQ3_S over its 1 column | 1.00 | 2.00 | 4.00 |" in text
    assert "| ITQ3_S over Q4_K | 1.25 | 1.25 |" in text and "| ITQ3_S (AVX2) over Q4_K (AVX2) | 0.80 |" in text
    columns.plot(measured, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 1000


def test_loading(tmp_path: Path) -> None:
    run = loading.measured(["sh", "-c", "exit 0"])
    assert run.seconds > 0 and run.memory > 0
    samples = {
        way: {name: [large.Run(2.0 + i, 1.0, 2**20)] for i, name in enumerate(loading.TYPES)} for way in loading.WAYS
    }
    threads = {"gguf-itq3s convert": {"1": [large.Run(6.0, 6.0, 1)], "2": [large.Run(4.0, 8.0, 1)]}}
    result = {
        "processor": "a processor", "cores": 2, "rounds": 1, "model_bytes": dict.fromkeys(loading.TYPES, 2**21),
        "loading": loading.medians_of(samples), "quantizing": loading.medians_of(threads),
    }  # fmt: skip
    text = re.sub(" +", " ", loading.table(result))
    assert "| default | ITQ3_S | 2.00 | 0.50 | 1 | 2 |" in text
    assert "| gguf-itq3s convert | 6.0 | 4.0 | 1.50 |" in text


def test_loading_says_what_failed() -> None:
    with pytest.raises(kernels.BenchError, match="sh failed"):
        loading.measured(["sh", "-c", "echo no; exit 3"])

"""The tables of docs/calibration.md: rows, ratios, blocks of output Fisher matrices."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from gguf_itq3s.rounding.fisher import factorize
from scripts.tables import calibration, experts, fisher_blocks
from scripts.train.twins import TWINS


def _results(rows: Any, scale: float) -> dict[str, dict[str, Any]]:
    rng = np.random.default_rng(3)
    found = {}
    for row in rows:
        windows = (scale * rng.uniform(0.9, 1.1, 8)).tolist()
        mean = float(np.mean(windows))
        found[row.key] = {
            "mean_kld": mean, "mean_kld_error": mean / 100, "windows": windows, "tokens": 2040, "tensor_bits": 3.8,
        }  # fmt: skip
    return found


def test_tables_of_models_with_different_rows() -> None:
    """Twins have no stock types: their cells are empty."""
    models = {
        "model": _results(calibration.EVERY_ROW, 0.1),
        **{twin: _results(calibration.TWIN_ROWS, 0.1) for twin in TWINS},
        "held-out model": _results(calibration.EVERY_ROW, 0.002),
    }
    lines = calibration.tables({"wikitext": models}).splitlines()
    rows = {
        line.split("|")[1].strip(): [cell.strip() for cell in line.split("|")[2:-1]] for line in lines if "|" in line
    }
    q4 = rows["**Q4_K, `--calibrate`**"]
    assert q4[0] == "4.5" and q4[2:4] == ["-", "-"] and len(q4[1]) == 15 and len(q4[4]) == 17
    assert rows["Q4_K `--calibrate` / importance matrix"][1:3] == ["-", "-"]
    assert rows["**`--target-bpw 3.85 --calibrate --fisher`, all**"][0] == "3.80"
    kld = [models["model"][key]["mean_kld"] for key in ("sequential", "calibrated")]
    assert rows["`--calibrate` / `--calibration`"][0].startswith(f"{kld[0] / kld[1]:.3f} ± ")
    assert "mean KLD over that on the model" in rows


def test_rows_are_distinct() -> None:
    rows = calibration.EVERY_ROW
    keys = [row.key for row in rows]
    assert len(set(keys)) == len(keys)
    assert {name for _, above, below in calibration.RATIOS for name in (above, *below)} <= set(keys)
    assert set(calibration.ALIKE) <= {row.key for row in calibration.TWIN_ROWS}


def test_what_blocks_leave() -> None:
    """A matrix of independent heads loses nothing in blocks of a head, and nearly all when rows are taken astride."""
    rng = np.random.default_rng(5)
    heads = [rng.standard_normal((64, 96)) @ np.diag(rng.uniform(0, 4, 96)) for _ in range(4)]
    fisher = np.zeros((256, 256))
    for number, head in enumerate(heads):
        fisher[64 * number : 64 * number + 64, 64 * number : 64 * number + 64] = head @ head.T / 96
    found = fisher_blocks.shares(fisher)
    lost = found["64 neighbours"] - found["whole"]  # groups of 16 rows are a larger part of 64 than of 256
    assert 0 < lost < 0.3 * (found["64 strided"] - found["whole"]) and found["64 strided"] < 1.02
    whole = factorize(fisher).weight.mean() / np.diagonal(fisher).mean()
    assert found["whole"] == pytest.approx(whole)


def test_table_of_a_mixture() -> None:
    """Ratios are of means, their errors paired: a window that is hard for all says nothing."""
    base = torch.tensor([1.0, 2.0, 3.0])
    lines = experts.table({"nearest": 2 * base, "calibrate": base, "fisher": 0.9 * base + 0.0}).splitlines()
    rows = {line.split("|")[1].strip(): [cell.strip() for cell in line.split("|")[2:-1]] for line in lines[2:]}
    assert rows["`--calibrate`"] == ["2.00000 ± 0.57735", "1.000 ± 0.000"]
    assert rows["nearest codes"][1] == "2.000 ± 0.289" and rows["... `--fisher`"][1] == "0.900 ± 0.029"

"""The evaluation: reading llama-perplexity, rows, caching, report; and two rows on the bundled model."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import pytest

import llama
from gguf_itq3s.cli import main
from gguf_itq3s.evaluate import runner, tools


def test_pure_by_ggml_is_what_llama_quantize_writes(tmp_path: Path) -> None:
    f16, ours, theirs = (tmp_path / f"{name}.gguf" for name in ("f16", "ours", "theirs"))
    assert main(["convert", str(llama.MODEL), str(f16), "--outtype", "f16"]) == 0
    runner.quantize_pure(f16, ours, gguf.GGMLQuantizationType.IQ3_S, 2)
    llama.run("llama-quantize", "--pure", f16, theirs, "IQ3_S", "2")
    assert runner.describe(ours)["content"] == runner.describe(theirs)["content"]


def test_evaluation_of_the_bundled_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = tmp_path / "text.txt"
    text.write_bytes(llama.evaluation_text().read_bytes()[:20_000])
    monkeypatch.setenv("WIKITEXT2", str(text))
    keys = ["f16", "q8_0-pure", "itq3_s-pure", "convert-pure-unfolded", "kv-itq3_s-q4_0"]
    command = [
        "eval",
        str(llama.MODEL),
        "--chunks",
        "2",
        "--work-dir",
        str(tmp_path / "work"),
        "--out",
        str(tmp_path / "out"),
    ]
    assert main([*command, "--rows", *keys]) == 0
    tables = json.loads((tmp_path / "out" / "eval.json").read_text())["tables"]
    rows = {r["key"]: r for r in [*tables["weights"], *tables["KV cache"]]}
    assert set(rows) == set(keys)
    assert rows["f16"]["mean_kld"] < 1e-3 < rows["itq3_s-pure"]["mean_kld"]
    assert rows["q8_0-pure"]["mean_kld"] < rows["itq3_s-pure"]["mean_kld"]
    assert rows["itq3_s-pure"]["tensor_bits"] == 3.125
    # The converter and llama-quantize write the same blocks, so they are scored once.
    assert rows["itq3_s-pure"]["content"] == rows["convert-pure-unfolded"]["content"]
    assert (tmp_path / "out" / "eval_kld.png").stat().st_size > 1000
    assert not list((tmp_path / "work").rglob("*.kld"))

    # Cached: nothing is run again.
    monkeypatch.setattr(tools.Tools, "run", lambda *_: pytest.fail("a tool was run again"))
    assert main([*command, "--rows", *keys]) == 0
    assert json.loads((tmp_path / "out" / "eval.json").read_text())["tables"] == tables

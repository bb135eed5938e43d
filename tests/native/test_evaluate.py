"""The evaluation: reading llama-perplexity, rows, caching, report; and two rows on the bundled model."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import pytest

import llama
from checkpoints import NOVEL
from gguf_itq3s.cli import main
from gguf_itq3s.evaluate import runner, tools, wikitext


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


def test_any_text_without_wikitext(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A text of the user's own needs nothing else; rows that learn from a text want one for that."""
    monkeypatch.delenv("WIKITEXT2", raising=False)
    monkeypatch.setattr(wikitext, "cache_dir", lambda: tmp_path / "cache")

    def offline(*_: object, **__: object) -> str:
        raise ConnectionError("no route")

    monkeypatch.setattr("huggingface_hub.hf_hub_download", offline)
    model, text, training = tmp_path / "f16.gguf", tmp_path / "mine.md", tmp_path / "other.txt"
    assert main(["convert", str(llama.MODEL), str(model), "--outtype", "f16"]) == 0
    pages = NOVEL.read_text()
    text.write_text("<unk> " + pages[:20_000])
    training.write_text(pages[20_000:60_000])
    command = [
        "eval",
        str(model),
        "--chunks",
        "2",
        "--work-dir",
        str(tmp_path / "work"),
        "--out",
        str(tmp_path / "out"),
    ]
    rows = ["--rows", "f16", "iq3_s-pure", "iq3_s-pure-imatrix"]
    assert main([*command, *rows, "--text", str(text)]) == 0
    found = json.loads((tmp_path / "out" / "eval.json").read_text())
    assert found["text"] == "mine.md" and [row["key"] for row in found["tables"]["weights"]] == ["f16", "iq3_s-pure"]
    said = capsys.readouterr().err
    assert "left out, they need a text to learn from (--training-text): iq3_s-pure-imatrix" in said
    (scored,) = (tmp_path / "work").rglob("text.txt")
    assert scored.read_text() == text.read_text()
    assert main([*command, *rows, "--text", str(text), "--training-text", str(training)]) == 0
    found = json.loads((tmp_path / "out" / "eval.json").read_text())
    assert [row["key"] for row in found["tables"]["weights"]] == ["f16", "iq3_s-pure", "iq3_s-pure-imatrix"]
    # Without a text of the user's own, and with one that is not there, the reason is given.
    for arguments, reason in (
        ([], "no route"),
        (["--text", str(tmp_path / "none")], "none: cannot be read: No such file"),
    ):
        assert main([*command, *rows, *arguments]) == 1
        said = capsys.readouterr().err.splitlines()[-1]
        assert reason in said and "shared" not in said
    # A page is no evaluation.
    text.write_text(pages[:500])
    assert main([*command, *rows, "--text", str(text)]) == 1
    said = capsys.readouterr().err.splitlines()[-1]
    assert said == f"error: {text}: is too short: windows of 512 tokens want a text of 1024; " + (
        "give a longer text, or a smaller --ctx"
    )
    assert not list((tmp_path / "work").rglob("*.partial"))

"""The evaluation on the bundled model: rows made, scored, remembered; the real model's list on a folder."""

from __future__ import annotations

import json
import re
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest

import llama
from checkpoints import NOVEL
from gguf_itq3s.cli import main
from gguf_itq3s.evaluate import engine, tools, wikitext
from scripts.eval import real, texts


@pytest.fixture
def short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The text that is scored, some pages."""
    text = tmp_path / "text.txt"
    text.write_bytes(llama.evaluation_text().read_bytes()[:20_000])
    monkeypatch.setenv("WIKITEXT2", str(text))
    return text


def nothing_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tools.Tools, "run", lambda *_: pytest.fail("a tool was run again"))
    monkeypatch.setattr(engine.Evaluation, "_run", lambda *_: pytest.fail("a row was made again"))


def test_evaluation_of_the_bundled_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, short: Path) -> None:
    keys = ["f16", "q8_0-pure", "itq3_s-pure", "convert-pure-unfolded", "kv-itq3_s-q4_0"]
    folders = ["--work-dir", str(tmp_path / "work"), "--out", str(tmp_path / "out")]
    asked = ["eval", str(llama.MODEL), "--chunks", "2", *folders, "--training-text", str(NOVEL), "--rows", *keys]
    assert main(asked) == 0
    found = json.loads((tmp_path / "out" / "eval.json").read_text())["tables"]
    rows = {r["key"]: r for r in [*found["weights"], *found["KV cache"]]}
    assert set(rows) == set(keys)
    assert rows["f16"]["mean_kld"] < 1e-3 < rows["itq3_s-pure"]["mean_kld"]
    assert rows["q8_0-pure"]["mean_kld"] < rows["itq3_s-pure"]["mean_kld"]
    assert rows["itq3_s-pure"]["tensor_bits"] == 3.125
    # The converter and llama-quantize write the same blocks, so they are scored once.
    assert rows["itq3_s-pure"]["content"] == rows["convert-pure-unfolded"]["content"]
    assert (tmp_path / "out" / "eval_kld.png").stat().st_size > 1000
    assert not list((tmp_path / "work").rglob("*.kld")) and not list((tmp_path / "work").rglob("files/*"))
    nothing_runs(monkeypatch)
    assert main(asked) == 0
    assert json.loads((tmp_path / "out" / "eval.json").read_text())["tables"] == found


def test_divergence_text_by_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A file as good as the model has none on any; ratios are to the first file, on the same windows."""
    files = [tmp_path / f"{name}.gguf" for name in ("itq3_s", "again", "f16")]
    for path in files:
        assert main(["convert", str(llama.MODEL), str(path), "--outtype", path.stem.replace("again", "itq3_s")]) == 0
    words = tmp_path / "words.txt"
    words.write_text(" ".join(sorted(NOVEL.read_text().split())))
    arguments = [llama.MODEL, *files, "--texts", NOVEL, words]
    monkeypatch.setattr(sys, "argv", ["texts.py", *map(str, arguments)])
    monkeypatch.setattr(texts, "CONTEXT", 128)
    capsys.readouterr()
    assert texts.main() == 0
    lines = [line.split("|")[2:4] for line in capsys.readouterr().out.splitlines() if ".gguf" in line]
    # Divergence, ratio, error.
    found = np.array([[re.findall(r"[\d.]+", cell) for cell in line] for line in lines], dtype=float)
    assert found.shape == (3, 2, 3) and (found[0, :, 0] > 0.01).all() and found[0, 0, 0] != found[0, 1, 0]
    np.testing.assert_array_equal(found[0], found[1])
    assert (found[0, :, 1:] == (1, 0)).all() and (found[2, :, 1] < 0.01).all()


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
    folders = ["--work-dir", str(tmp_path / "work"), "--out", str(tmp_path / "out")]
    asked = ["eval", str(model), "--chunks", "2", *folders, "--rows", "f16", "iq3_s-pure", "iq3_s-pure-imatrix"]
    assert main([*asked, "--text", str(text)]) == 0
    found = json.loads((tmp_path / "out" / "eval.json").read_text())
    assert found["text"] == "mine.md" and [row["key"] for row in found["tables"]["weights"]] == ["f16", "iq3_s-pure"]
    said = capsys.readouterr().err
    assert "left out, they need a text to learn from (--training-text): iq3_s-pure-imatrix" in said
    assert main([*asked, "--text", str(text), "--training-text", str(training)]) == 0
    found = json.loads((tmp_path / "out" / "eval.json").read_text())
    assert len(found["tables"]["weights"]) == 3
    # Without a text of the user's own the reason is given.
    assert main(asked) == 1
    assert "no route" in capsys.readouterr().err.splitlines()[-1]
    # A page is no evaluation.
    text.write_text(pages[:500])
    assert main([*asked, "--text", str(text)]) == 1
    said = capsys.readouterr().err.splitlines()[-1]
    assert said == f"error: {text}: is too short: windows of 512 tokens want a text of 1024; " + (
        "give a longer text, or a smaller --ctx"
    )
    assert not list((tmp_path / "work").rglob("*.partial"))


def test_the_real_list_on_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], short: Path
) -> None:
    monkeypatch.setattr(real, "WINDOWS", {"wiki": 2, "code": 2})
    model, keys = tmp_path / "small", ["itq3_s", "q3_k-imatrix", "mix-q4_k_m-imatrix", "mix-like-q4_k_m"]
    shutil.copytree(llama.MODEL, model)
    folders = ["--work-dir", str(tmp_path / "work"), "--out", str(tmp_path / "out")]
    asked = ["real.py", str(model), *folders, "--training-text", str(NOVEL), "--tokens", "1024", "--rows", *keys]
    monkeypatch.setattr(sys, "argv", asked)
    assert real.main() == 0
    printed = capsys.readouterr().out
    facts = json.loads((tmp_path / "out" / "small" / "real.json").read_text())
    found = {row["key"]: row for row in facts["rows"]}
    assert set(found) == set(keys) and all(set(row["texts"]) == {"wiki", "code"} for row in found.values())
    assert all(row["made"]["memory"] > 10 << 20 and row["made"]["processor"] > 0 for row in found.values())
    assert found["itq3_s"]["made"]["layer_bits"] == 3.125 and found["q3_k-imatrix"]["made"]["layer_bits"] == 3.4375
    assert found["itq3_s"]["made"]["tensor_bits"] > 4 and "†" not in printed
    ((name, theirs, ours),) = real.pairs(facts)
    assert name == "Q4_K_M" and 0.98 < ours["made"]["bytes"] / theirs["made"]["bytes"] <= 1
    real.draw([facts], tmp_path / "sizes.png")
    assert (tmp_path / "sizes.png").read_bytes().startswith(b"\x89PNG")
    nothing_runs(monkeypatch)
    assert real.main() == 0
    assert capsys.readouterr().out == printed

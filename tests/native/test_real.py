"""`make real` on the bundled model: rows made, scored, remembered; and a chat with marks that are read as tokens."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import gguf
import pytest

import llama
from checkpoints import NOVEL
from gguf_itq3s.cli import main
from gguf_itq3s.evaluate.tools import Tools, base_chunks
from scripts.real import measure, texts
from scripts.tables import real


def test_rows_of_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(real, "WINDOWS", {"wiki": 2, "code": 2, "chat": 2})
    monkeypatch.setattr(real, "SPEED", {"ITQ3_S": "ITQ3_S", "Q3_K": "Q3_K_S", "Q4_K": "Q4_K_S"})
    monkeypatch.setattr(real, "ROUNDS", 1)
    monkeypatch.setenv("WIKITEXT2", str(llama.evaluation_text()))
    folders = ["--work-dir", str(tmp_path / "work"), "--out", str(tmp_path / "out")]
    rows = ["itq3_s", "q3_k-imatrix", "iq3_xxs", "mix-itq3_s-calibrate"]
    model = tmp_path / "small"
    shutil.copytree(llama.MODEL, model)
    tokenizer = json.loads((model / "tokenizer_config.json").read_text())
    del tokenizer["chat_template"]
    (model / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    command = ["real.py", str(model), *folders, "--training-text", str(NOVEL), "--tokens", "1024"]
    monkeypatch.setattr(sys, "argv", [*command, "--rows", *rows])
    assert real.main() == 0
    printed = capsys.readouterr()
    assert "left out, the model has no chat template" in printed.err
    out = tmp_path / "out" / "small"
    facts = json.loads((out / "real.json").read_text())
    found = {row["key"]: row for row in facts["rows"]}
    assert set(found) == set(rows) and set(facts["texts"]) == {"wiki", "code"}
    assert all(row["made"]["memory"] > 10 << 20 and row["made"]["processor"] > 0 for row in found.values())
    assert found["itq3_s"]["made"]["layer_bits"] == 3.125 and found["q3_k-imatrix"]["made"]["layer_bits"] == 3.4375
    assert found["iq3_xxs"]["made"]["layer_bits"] == 3.0625 and found["itq3_s"]["made"]["tensor_bits"] > 4
    assert 0 < found["itq3_s"]["texts"]["code"]["mean_kld"] < found["iq3_xxs"]["texts"]["code"]["mean_kld"]
    assert "generation / Q4_K" in printed.out and (out / "real_kld.png").is_file()
    assert not list((tmp_path / "work").rglob("files/*"))
    # Remembered: no tool is run again, whatever rows are asked for.
    monkeypatch.setattr(Tools, "run", lambda *_: pytest.fail("a tool was run again"))
    monkeypatch.setattr(measure.Measurement, "_run", lambda *_: pytest.fail("a row was made again"))
    monkeypatch.setattr(sys, "argv", [*command, "--rows", "itq3_s"])
    assert real.main() == 0
    assert capsys.readouterr().out == printed.out


def test_marks_are_scored_as_tokens(tmp_path: Path) -> None:
    f16, marked = tmp_path / "f16.gguf", tmp_path / "marked.gguf"
    assert main(["convert", str(llama.MODEL), str(f16), "--outtype", "f16"]) == 0
    names = texts.with_marks_read(f16, marked)
    content, text = "</s>" * 2000 + NOVEL.read_text()[:8000], tmp_path / "text.txt"
    tools, counts = Tools.find(1), []
    for model in (f16, marked):
        text.write_text(texts.renamed(content, names) if model == marked else content)
        base = tmp_path / f"{model.stem}.kld"
        tools.log_probabilities(model, text, base, -1, 128, tmp_path / "log")
        counts.append(base_chunks(base))
    end = gguf.GGUFReader(f16).fields["tokenizer.ggml.eos_token_id"].contents()
    tokens = (tmp_path / "marked.kld").read_bytes()[20 : 20 + 4 * 128 * 2]
    assert tokens.count(int(end).to_bytes(4, "little")) > 200
    # Unread, each mark is several tokens.
    assert counts[1] < 0.7 * counts[0]


def test_a_chat_is_answered_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    f16, kept = tmp_path / "f16.gguf", tmp_path / "answers.json"
    assert main(["convert", str(llama.MODEL), str(f16), "--outtype", "f16"]) == 0
    folder = tmp_path / "model"
    folder.mkdir()
    for path in llama.MODEL.iterdir():
        if path.suffix != ".safetensors":
            (folder / path.name).write_bytes(path.read_bytes())
    template = "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}"
    (folder / "chat_template.jinja").write_text(template)
    monkeypatch.setattr(texts, "questions", lambda: ["Where is the captain?", "Who came in?"])
    monkeypatch.setattr(texts, "_ANSWER", 8)
    server = llama.BIN / "llama-server"
    first = texts.chat(folder, f16, server, kept, 1)
    assert first is not None and first.startswith("[user] Where is the captain?\n[assistant] ")
    assert len(json.loads(kept.read_text())) == 2
    assert texts.chat(folder, f16, tmp_path / "no server", kept, 1) == first

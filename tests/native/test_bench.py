"""The benchmark's model is one that llama.cpp runs, and its table says what was measured. Nothing is timed."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import pytest

import llama
from gguf_itq3s.codec.native import NativeLibrary
from scripts.bench import kernels, random_model


@pytest.mark.parametrize("name", ["ITQ3_S", "TQ1_0", "F16"])
def test_model(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, library: NativeLibrary) -> None:
    monkeypatch.setattr(kernels, "MODEL", random_model.Shape(2, 512, 768, 4, 2, 300, tied=True))
    monkeypatch.setattr(kernels, "OUT", tmp_path)
    monkeypatch.setattr(kernels, "ROOT", tmp_path)
    path = kernels.models([name])[name]
    assert [p.name for p in path.parent.iterdir()] == [f"{name}.gguf"]
    kinds = {t.name: t.tensor_type.name for t in gguf.GGUFReader(path).tensors}
    assert kinds["blk.1.ffn_down.weight"] == name and kinds["token_embd.weight"] == "Q6_K"
    done = llama.run("llama-bench", "-m", path, "-p", "16", "-n", "2", "-r", "1", "-t", "1", "-o", "json")
    assert {(r["n_prompt"], r["n_gen"]) for r in json.loads(done.stdout)} == {(16, 0), (0, 2)}

"""The benchmark's model is one that llama.cpp runs, and its table says what was measured. Nothing is timed."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import pytest

import llama
from gguf_itq3s.codec.native import NativeLibrary
from scripts.bench import kernels, model


@pytest.mark.parametrize("name", ["ITQ3_S", "TQ1_0", "F16"])
def test_model(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, library: NativeLibrary) -> None:
    sizes = {"N_EMBD": 512, "N_FF": 768, "N_HEAD": 4, "N_HEAD_KV": 2, "N_LAYER": 2, "N_VOCAB": 300}
    for constant, value in sizes.items():
        monkeypatch.setattr(model, constant, value)
    shapes = {"attn_q": (512, 512), "attn_k": (256, 512), "attn_v": (256, 512), "attn_output": (512, 512)}
    shapes |= {"ffn_gate": (768, 512), "ffn_up": (768, 512), "ffn_down": (512, 768)}
    monkeypatch.setattr(model, "MATRICES", shapes)
    path = tmp_path / f"{name}.gguf"
    model.write(path, gguf.GGMLQuantizationType(kernels.TYPES[name]), library)
    assert [p.name for p in tmp_path.iterdir()] == [path.name]
    kinds = {t.name: t.tensor_type.name for t in gguf.GGUFReader(path).tensors}
    assert kinds["blk.1.ffn_down.weight"] == name and kinds["token_embd.weight"] == "Q6_K"
    done = llama.run("llama-bench", "-m", path, "-p", "16", "-n", "2", "-r", "1", "-t", "1", "-o", "json")
    assert {(r["n_prompt"], r["n_gen"]) for r in json.loads(done.stdout)} == {(16, 0), (0, 2)}

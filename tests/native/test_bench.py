"""The benchmark's model is one that llama.cpp runs, and its table says what was measured. Nothing is timed."""

from __future__ import annotations

import ctypes
import json
from pathlib import Path
from typing import Any

import gguf
import pytest

import llama
from gguf_itq3s.codec.native import library_path
from scripts.bench import kernels, model


@pytest.mark.parametrize("name", ["ITQ3_S", "TQ1_0", "F16"])
def test_model(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"N_EMBD": 512, "N_FF": 768, "N_HEAD": 4, "N_HEAD_KV": 2, "N_LAYER": 2, "N_VOCAB": 300}
    for constant, value in sizes.items():
        monkeypatch.setattr(model, constant, value)
    shapes = {"attn_q": (512, 512), "attn_k": (256, 512), "attn_v": (256, 512), "attn_output": (512, 512)}
    shapes |= {"ffn_gate": (768, 512), "ffn_up": (768, 512), "ffn_down": (512, 768)}
    monkeypatch.setattr(model, "MATRICES", shapes)
    library = ctypes.CDLL(str(library_path()))
    library.ggml_quantize_chunk.argtypes = [
        ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, *[ctypes.c_int64] * 3, ctypes.c_void_p,
    ]  # fmt: skip

    path = tmp_path / f"{name}.gguf"
    model.write(path, gguf.GGMLQuantizationType(kernels.TYPES[name]), library)
    assert [p.name for p in tmp_path.iterdir()] == [path.name]
    kinds = {t.name: t.tensor_type.name for t in gguf.GGUFReader(path).tensors}
    assert kinds["blk.1.ffn_down.weight"] == name and kinds["token_embd.weight"] == "Q6_K"
    done = llama.run("llama-bench", "-m", path, "-p", "16", "-n", "2", "-r", "1", "-t", "1", "-o", "json")
    assert {(r["n_prompt"], r["n_gen"]) for r in json.loads(done.stdout)} == {(16, 0), (0, 2)}


def result() -> dict[str, Any]:
    names = ["ITQ3_S", "Q3_K", "Q4_K", "IQ3_S", "TQ1_0", "TQ1_0 (stock)", "ITQ3_S (AVX2)", "Q3_K (AVX2)"]
    speeds = {name: float(10 * (i + 1)) for i, name in enumerate(names)}
    tokens = {name: speeds[name] for name in names if "AVX2" not in name}
    medians = {
        "dot": speeds, "tiled": tokens, "generation": tokens, "prompt": tokens,
        "quantize": {"ITQ3_S": 29.0, "IQ3_S": 1.0}, "roofline": {"memory_1": 20.0, "products": 500.0},
    }  # fmt: skip
    return {
        "processor": "a processor", "cores": 2, "rounds": 3, "medians": medians, "instructions": {"ITQ3_S": 49.1},
        "model_bytes": {name.split()[0]: 10**9 for name in names}, "targets": kernels.check_targets(medians),
    }  # fmt: skip


def test_table_and_targets(tmp_path: Path) -> None:
    measured = result()
    got = {(c["test"], c["what"]): c["got"] for c in measured["targets"]}
    assert got["dot", "ITQ3_S over Q3_K"] == 0.5
    assert got["dot", "ITQ3_S (AVX2) over Q3_K (AVX2)"] == 70 / 80
    assert got["quantize", "ITQ3_S, M weights/s"] == 29
    text = kernels.table(measured)
    assert "| ITQ3_S | 0.391 | 49 | 10.0 |" in text
    assert "| dot | ITQ3_S over Q3_K | 0.50 (missed) | 1.8 |" in text
    # 20 GB/s of 100-byte blocks; 10 tokens/s of a model of 1 GB
    assert "| ITQ3_S | 51.2 | 2% | 2% | 10.0 | 50% |" in text
    kernels.plot(measured, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 1000

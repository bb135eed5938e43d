"""PyTorch's packed model and llama.cpp's file of the same weights, with and without an adapter of PEFT's."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

import llama
from divergence import log_probabilities, read_log_probabilities
from gguf_itq3s.convert.options import ConvertOptions
from gguf_itq3s.convert.pipeline import convert
from gguf_itq3s.programs.lora import LoraOptions, convert_lora
from gguf_itq3s.transformers import ITQ3SConfig, load_gguf
from training import with_random_adapter


def log_softmax(model: Any, tokens: np.ndarray, scored: int) -> np.ndarray:
    """What PyTorch predicts for the positions that llama-perplexity scores."""
    with torch.no_grad():
        logits = model(torch.from_numpy(tokens.astype(np.int64))).logits.float()
    first = tokens.shape[1] // 2
    return torch.log_softmax(logits, -1)[:, first : first + scored].numpy()


def compare(model: Any, file: Path, out: Path, *arguments: str | Path) -> tuple[float, float]:
    """Mean KL divergence of llama.cpp's predictions from PyTorch's, and the mean difference of a log-probability."""
    tokens, theirs = read_log_probabilities(log_probabilities(file, out, *arguments))
    tokens = tokens.copy()
    tokens[:, 0] = model.config.bos_token_id  # llama-perplexity begins every window so
    ours = log_softmax(model, tokens, theirs.shape[1])
    p = np.exp(ours.astype(np.float64))
    return float((p * (ours - theirs)).sum(-1).mean()), float((p * np.abs(ours - theirs)).sum(-1).mean())


@pytest.mark.parametrize("name", ["bundled", "llama"])
def test_both_predict_the_same(name: str, uneven: Callable[[str], Path], tmp_path: Path) -> None:
    base = llama.MODEL if name == "bundled" else uneven(name)
    file = tmp_path / "model.gguf"
    plain = {"token_embedding_type": "f16", "output_tensor_type": "f16", "fold_norms": True}
    convert(ConvertOptions.of(base, file, pure=True, **plain), io.StringIO())  # type: ignore[arg-type]
    model = load_gguf(file, dtype=torch.float32)
    before = compare(model, file, tmp_path / "before")

    adapted = with_random_adapter(model, 0.06)
    adapted.save_pretrained(tmp_path / "adapter")
    lora, scaled = tmp_path / "adapter.gguf", tmp_path / "scaled.gguf"
    convert_lora(LoraOptions(tmp_path / "adapter", lora, base), io.StringIO())
    convert_lora(LoraOptions(tmp_path / "adapter", scaled, base, model=file, trained_folded=False), io.StringIO())
    after = compare(adapted, file, tmp_path / "after", "--lora", lora)
    without = compare(adapted, file, tmp_path / "without")
    wrong = compare(adapted, file, tmp_path / "wrong", "--lora", scaled)
    print(f"{name}, KL divergence and difference of log-probabilities: before {before}, with the adapter {after},")
    print(f"  without {without}, scaled by the gains {wrong}")
    # Activations of 8 bits, a cache of 16.
    for divergence, difference in (before, after):
        assert abs(divergence) < 1e-3 and difference < 0.03
    assert without[0] > 20 * after[0] and wrong[0] > 20 * after[0]


def test_the_bundled_model_has_the_bytes_of_the_c_encoder(tmp_path: Path) -> None:
    """By the library that is built here, on every core, and out of the file again."""
    file = tmp_path / "model.gguf"
    convert(ConvertOptions.of(llama.MODEL, file, pure=True), io.StringIO())
    quantized = AutoModelForCausalLM.from_pretrained(llama.MODEL, quantization_config=ITQ3SConfig()).state_dict()
    read = load_gguf(file).state_dict()
    packed = [name for name, tensor in quantized.items() if tensor.dtype == torch.uint8]
    assert len(packed) == 42
    assert all(torch.equal(quantized[name], read[name]) for name in packed)

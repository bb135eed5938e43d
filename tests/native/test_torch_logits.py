"""The bundled model in PyTorch, its linear layers packed, against llama.cpp on the same weights dequantized."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers

import binding
import llama
import upstream_files
from gguf_itq3s.torch import PackedLinear, replace_linears, use_path

PROMPT = "The old house stood at the end of the lane, and"
SUPPORT = llama.ROOT / "tests" / "support"
#: Tokens of greedy decoding.
COUNT = 64


def program(name: str, *arguments: object, **environment: str) -> None:
    command = [sys.executable, "-W", "ignore", str(SUPPORT / name), *map(str, arguments)]
    done = subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.fixture(scope="module")
def model() -> Any:
    built = transformers.AutoModelForCausalLM.from_pretrained(llama.MODEL, dtype=torch.float32).eval()
    assert len(replace_linears(built, threads=1)) == 7 * built.config.num_hidden_layers
    return built


@pytest.fixture(scope="module")
def prompt() -> torch.Tensor:
    return transformers.AutoTokenizer.from_pretrained(llama.MODEL)(PROMPT, return_tensors="pt")["input_ids"]


@pytest.fixture(scope="module")
def expected(model: Any, prompt: torch.Tensor, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What llama.cpp makes of the dequantized weights in an F32 file: logits of the prompt, 64 tokens after it."""
    folder = tmp_path_factory.mktemp("dequantized")
    plain = transformers.AutoModelForCausalLM.from_pretrained(llama.MODEL, dtype=torch.float32)
    for name, layer in model.named_modules():
        if isinstance(layer, PackedLinear):
            plain.get_submodule(name).weight = torch.nn.Parameter(layer.dequantize())
    plain.save_pretrained(folder / "model")
    for path in llama.MODEL.glob("tokenizer*"):
        shutil.copy(path, folder / "model")
    upstream_files.write(folder / "model", folder / "model.gguf", gguf.LlamaFileType.ALL_F32)
    np.save(folder / "prompt.npy", prompt[0].numpy())
    places = {"PYTHONPATH": str(binding.folder()), "LLAMA_CPP_LIB_PATH": str(llama.BIN)}
    program("llama_logits.py", folder / "model.gguf", folder / "prompt.npy", COUNT, folder / "out.npz", **places)
    with np.load(folder / "out.npz") as file:
        return {name: file[name] for name in file.files}


def difference(logits: np.ndarray, expected: np.ndarray) -> float:
    """The largest, relative to the largest logit."""
    return float(np.abs(logits - expected).max() / np.abs(expected).max())


@pytest.mark.parametrize("path", ["reference"])
def test_logits_and_text(model: Any, prompt: torch.Tensor, expected: Any, path: str) -> None:
    with torch.no_grad(), use_path(path):
        logits = model(prompt).logits[0].numpy()
        text = model.generate(
            prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=COUNT, min_new_tokens=COUNT,
            do_sample=False, pad_token_id=0, eos_token_id=None,
        )  # fmt: skip
    assert difference(logits, expected["logits"]) <= 1e-3
    assert text[0, prompt.shape[1] :].tolist() == expected["tokens"].tolist()


def test_logits_and_text_of_triton(prompt: torch.Tensor, expected: Any, tmp_path: Path) -> None:
    """All tokens in one pass, which the interpreter takes seconds for: each is the most likely one where it stands."""
    pytest.importorskip("triton")
    tokens = np.concatenate([prompt[0].numpy(), expected["tokens"]])
    np.save(tmp_path / "tokens.npy", tokens)
    program("triton_logits.py", llama.MODEL, tmp_path / "tokens.npy", tmp_path / "logits.npy", PYTHONPATH=str(SUPPORT))
    logits = np.load(tmp_path / "logits.npy")
    count = prompt.shape[1]
    assert difference(logits[:count], expected["logits"]) <= 1e-3
    assert logits[count - 1 : -1].argmax(-1).tolist() == expected["tokens"].tolist()

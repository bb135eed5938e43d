"""Ternary checkpoints through the converter: recognised and exact, latent weights, packed BitNet weights."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest

import llama
from checkpoints import NOVEL
from gguf_files import tensors, values
from gguf_itq3s.cli import convert_main
from gguf_itq3s.evaluate.tools import Tools

Q = gguf.GGMLQuantizationType


def convert(model: Path, out: Path, *options: str) -> dict[str, gguf.ReaderTensor]:
    assert convert_main([str(model), str(out), *options]) == 0
    return tensors(out)


def test_trained_ternary_model_from_checkpoint_to_perplexity(tokenizer: Path, tmp_path: Path) -> None:
    """A few steps of straight-through training: recognised, equal to its forced latent form, F16's perplexity."""
    text = tmp_path / "data" / "text.txt"
    text.parent.mkdir()
    shutil.copyfile(NOVEL, text)
    script = llama.ROOT / "scripts" / "train" / "ternary_model.py"
    command = [sys.executable, script, "--data", text.parent, "--tokenizer", tokenizer, "--out", tmp_path / "model"]
    sizes = ["--steps", "6", "--layers", "1", "--batch", "2", "--length", "64", "--characters", "60000"]
    done = subprocess.run([*map(str, command), *sizes], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]

    keep = ("--token-embedding-type", "f16")
    convert(tmp_path / "model" / "ternary", tmp_path / "f16.gguf", "--outtype", "f16")
    found = convert(tmp_path / "model" / "ternary", tmp_path / "found.gguf", *keep)
    forced = convert(tmp_path / "model" / "latent", tmp_path / "forced.gguf", *keep, "--ternary", "force")
    matrices = [name for name in found if name.startswith("blk.") and "norm" not in name]
    assert len(matrices) == 7
    for name in matrices:
        assert found[name].tensor_type == forced[name].tensor_type == Q.TQ2_0
        np.testing.assert_allclose(values(found[name]), values(forced[name]), rtol=2.0**-10, atol=0)

    tools = Tools(llama.BIN, 2)
    base, log = tmp_path / "base.kld", tmp_path / "log.txt"
    assert tools.log_probabilities(tmp_path / "f16.gguf", text, base, 4, 128, log) == 4
    exact, ternary_file = (
        tools.divergence(tmp_path / name, base, 4 * 63, 128, log)["perplexity"] for name in ("f16.gguf", "found.gguf")
    )
    assert ternary_file == pytest.approx(exact, rel=1e-3)
    assert llama.run("llama-cli", "-m", tmp_path / "found.gguf", "-p", "def", "-n", "4", "-st").returncode == 0

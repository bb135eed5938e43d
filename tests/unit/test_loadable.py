"""Checkpoints whose file llama.cpp could not load are refused before any work: by names, without a build."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from damaged import drop, dry_run
from gguf_itq3s.base.errors import UserError
from gguf_itq3s.checkpoint import loadable
from gguf_itq3s.cli import main


@pytest.mark.parametrize("name", ["model.layers.1.self_attn.q_proj.bias", "model.layers.0.self_attn.v_proj.bias"])
def test_a_bias_that_one_layer_lacks(checkpoint: Callable[[str], Path], tmp_path: Path, name: str) -> None:
    folder = Path(shutil.copytree(checkpoint("qwen2"), tmp_path / "qwen2"))
    drop(folder, name)
    with pytest.raises(UserError, match="is not there, unlike that of layer"):
        dry_run(folder)


def test_layers_beyond_those_of_the_config(llama_copy: Path) -> None:
    config = llama_copy / "config.json"
    config.write_text(config.read_text().replace('"num_hidden_layers": 2', '"num_hidden_layers": 1'))
    with pytest.raises(UserError, match=r"blk\.1\.|layers\.1\."):
        dry_run(llama_copy)


def test_a_head_of_its_own_that_is_missing_is_the_embedding_only_where_the_folder_says_so(llama_copy: Path) -> None:
    drop(llama_copy, "lm_head.weight")
    (llama_copy / "modules.json").write_text("[]")  # sentence-transformers: there is no head
    assert dry_run(llama_copy) == loadable.BY_NOBODY


def test_verify_looks_at_names(llama_copy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.gguf"
    assert main(["convert", str(llama_copy), str(out), "--outtype", "f16"]) == 0
    assert f"checked: {loadable.BY_NOBODY}" in capsys.readouterr().out
    assert main(["verify", str(out), "--against", str(out)]) == 0
    assert f"checked: {loadable.BY_NOBODY}" in capsys.readouterr().out
    # A digit of a name: the layer of that number is none of the model's.
    out.write_bytes(out.read_bytes().replace(b"blk.1.ffn_up.weight", b"blk.7.ffn_up.weight"))
    assert main(["verify", str(out), "--against", str(out)]) == 1
    assert f"error: {out}: blk.7.ffn_up.weight: is of a layer beyond the 2" in capsys.readouterr().err

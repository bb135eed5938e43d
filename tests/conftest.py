"""Fixtures that several test files share: small checkpoints in Hugging Face form."""

from __future__ import annotations

import gguf_itq3s  # noqa: F401  (before anything imports gguf)

# isort: split
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import sentencepiece
import torch
import transformers

from checkpoints import ARCHITECTURES, FAMILIES, NOVEL, SIZES, save_model
from gguf_itq3s.codec import native

transformers.utils.logging.disable_progress_bar()


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a SentencePiece tokenizer of 512 pieces in Llama style."""
    folder = tmp_path_factory.mktemp("tokenizer")
    sentencepiece.SentencePieceTrainer.train(
        input=str(NOVEL), model_prefix=str(folder / "tokenizer"), model_type="bpe", vocab_size=512, byte_fallback=True,
        unk_id=0, bos_id=1, eos_id=2, pad_id=-1, minloglevel=2,
    )  # fmt: skip
    config = {"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory, tokenizer: Path) -> Callable[[str], Path]:
    """``checkpoint(name)``: a folder with random weights of that architecture, made once; not to be changed."""
    made: dict[str, Path] = {}

    def make(name: str) -> Path:
        if name not in made:
            kind, changes = ARCHITECTURES[name]
            torch.manual_seed(0)
            config = getattr(transformers, kind)(**{**SIZES, **changes}, initializer_range=0.1)
            model = transformers.AutoModelForCausalLM.from_config(config).to(torch.bfloat16)
            made[name] = save_model(model, tmp_path_factory.mktemp(name) / name, tokenizer)
        return made[name]

    return make


@pytest.fixture(scope="session")
def uneven(tmp_path_factory: pytest.TempPathFactory, tokenizer: Path) -> Callable[[str], Path]:
    """``uneven(name)``: a small random model whose norm gains are far from one, in float16."""
    made: dict[str, Path] = {}

    def make(name: str) -> Path:
        if name not in made:
            kind, changes = FAMILIES[name]
            torch.manual_seed(0)
            config = getattr(transformers, kind)(**{**SIZES, **changes}, initializer_range=0.05)
            model = transformers.AutoModelForCausalLM.from_config(config)
            with torch.no_grad():
                for parameter_name, parameter in model.named_parameters():
                    if "norm" in parameter_name and parameter.ndim == 1:
                        parameter.add_(torch.randn_like(parameter) * 0.4)
            made[name] = save_model(model.half(), tmp_path_factory.mktemp(f"uneven-{name}") / name, tokenizer)
        return made[name]

    return make


@pytest.fixture
def llama_copy(checkpoint: Callable[[str], Path], tmp_path: Path) -> Path:
    """A copy of the small Llama that a test may damage."""
    return Path(shutil.copytree(checkpoint("llama"), tmp_path / "llama"))


@pytest.fixture(scope="session")
def library() -> native.NativeLibrary:
    """The built C library."""
    loaded = native.load()
    assert loaded is not None, "make build first"
    return loaded

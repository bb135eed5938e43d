"""Fixtures that several test files share: small checkpoints in Hugging Face form."""

from __future__ import annotations

import gguf_itq3s  # noqa: F401  (before anything imports gguf)

# isort: split
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
import torch
import transformers

from gguf_itq3s import native

transformers.utils.logging.disable_progress_bar()

SIZES: dict[str, Any] = {
    "vocab_size": 512, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "bos_token_id": 1, "eos_token_id": 2,
    "tie_word_embeddings": False,
}  # fmt: skip

#: Name -> (configuration class, what differs from SIZES).
ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    "llama-tied": ("LlamaConfig", {"tie_word_embeddings": True}),
    # Four query heads share a key/value head: attn_v gets more bits.
    "llama-gqa": ("LlamaConfig", {"num_attention_heads": 8, "num_key_value_heads": 2}),
    # 320 columns of ffn_down are blocks of 32 but not of 256.
    "llama-odd": ("LlamaConfig", {"intermediate_size": 320}),
    "llama-rope": ("LlamaConfig", {
        "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                         "original_max_position_embeddings": 64, "rope_theta": 10000.0},
    }),
    "qwen2": ("Qwen2Config", {}),
    "qwen3": ("Qwen3Config", {"head_dim": 64}),
    "mixtral": ("MixtralConfig", {"num_local_experts": 8, "num_experts_per_tok": 2}),
    "ernie-moe": ("Ernie4_5_MoeConfig", {
        "moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 256, "moe_num_shared_experts": 1,
        "moe_layer_start_index": 1, "head_dim": 64,
    }),
    "gemma": ("GemmaConfig", {"head_dim": 64, "tie_word_embeddings": True}),
}  # fmt: skip


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a SentencePiece tokenizer of 512 pieces in Llama style."""
    folder = tmp_path_factory.mktemp("tokenizer")
    text = folder / "text.txt"
    sources = sorted(Path(__file__).parent.glob("*.py"))
    text.write_text("\n".join(path.read_text() for path in sources))
    sentencepiece.SentencePieceTrainer.train(
        input=str(text), model_prefix=str(folder / "tokenizer"), model_type="bpe", vocab_size=512, byte_fallback=True,
        unk_id=0, bos_id=1, eos_id=2, pad_id=-1, minloglevel=2,
    )  # fmt: skip
    config = {"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def save_model(model: Any, folder: Path, tokenizer: Path, **options: Any) -> Path:
    """A model in Hugging Face form with the tokenizer beside it."""
    model.save_pretrained(folder, **options)
    for name in ("tokenizer.model", "tokenizer_config.json"):
        shutil.copyfile(tokenizer / name, folder / name)
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

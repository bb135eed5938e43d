"""Small random models in Hugging Face form: their sizes, their architectures, and how they are saved."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

DATA = Path(__file__).resolve().parents[1] / "data"
#: English prose that does not change: a tokenizer is trained on it, and models run on it.
NOVEL = DATA / "novel.txt"

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
    # 320 columns of ffn_down are blocks of 64 but not of 256.
    "llama-odd": ("LlamaConfig", {"intermediate_size": 320}),
    # No row is a multiple of 256, all are of 64, and heads share values.
    "llama-short": ("LlamaConfig", {
        "hidden_size": 192, "intermediate_size": 320, "num_attention_heads": 6, "num_key_value_heads": 3,
        "head_dim": 32,
    }),
    # Layers enough for rules of the first eighth and sixteenth, and of every third.
    "llama-deep": ("LlamaConfig", {"num_hidden_layers": 18, "intermediate_size": 256}),
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

#: Of these, and of those below, one of each kind.
ONE_OF_A_KIND = ("llama", "llama-tied", "qwen2", "mixtral", "ernie-moe", "gemma")

#: The architectures whose norms are folded, as :data:`ARCHITECTURES`.
FAMILIES: dict[str, tuple[str, dict[str, object]]] = {
    **{name: ARCHITECTURES[name] for name in ("llama", "llama-tied", "qwen2", "qwen3", "mixtral", "gemma")},
    "mistral": ("MistralConfig", {"sliding_window": None}),
}  # fmt: skip

#: More mixtures of experts, as :data:`ARCHITECTURES`; in those of the first five the converter folds norms.
_FEW: dict[str, object] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 256}
MIXTURES: dict[str, tuple[str, dict[str, object]]] = {
    "mixtral-few": ("MixtralConfig", {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 256}),
    "qwen2-moe": ("Qwen2MoeConfig", {**_FEW, "shared_expert_intermediate_size": 512}),
    "qwen3-moe": ("Qwen3MoeConfig", {**_FEW, "head_dim": 64, "norm_topk_prob": True}),
    "olmoe": ("OlmoeConfig", {**_FEW, "intermediate_size": 256}),
    "granite-moe": (
        "GraniteMoeConfig",
        {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 256},
    ),
    "ernie-moe": ARCHITECTURES["ernie-moe"],
}


def save_model(model: Any, folder: Path, tokenizer: Path, **options: Any) -> Path:
    """A model in Hugging Face form with the tokenizer beside it."""
    model.save_pretrained(folder, **options)
    for name in ("tokenizer.model", "tokenizer_config.json"):
        shutil.copyfile(tokenizer / name, folder / name)
    return folder

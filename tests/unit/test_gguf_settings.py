"""Settings of a model through a GGUF file and back: unusual ones in every architecture that is read."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM

from checkpoints import SIZES, save_model
from gguf_files import rewritten
from gguf_itq3s import upstream
from gguf_itq3s.base.errors import UserError
from gguf_itq3s.convert.options import ConvertOptions
from gguf_itq3s.convert.pipeline import convert
from gguf_itq3s.torch import settings
from gguf_itq3s.transformers import load_gguf
from loading import difference, logits


def rope(kind: str = "default", **more: Any) -> dict[str, Any]:
    """Positions as a config has them."""
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 5e5, **more}}


LLAMA3 = rope(
    "llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64
)  # fmt: skip
LINEAR = rope("linear", factor=4.0)
YARN = rope("yarn", factor=4.0, original_max_position_embeddings=64, beta_fast=24.0, beta_slow=2.0)
ATTENTION = rope("yarn", factor=4.0, original_max_position_embeddings=64, attention_factor=1.3)
PARTIAL = rope(partial_rotary_factor=0.5)
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 3, "moe_intermediate_size": 256}
GEMMA = {
    "head_dim": 32, "query_pre_attn_scalar": 32, "final_logit_softcapping": 3.0, "sliding_window": 8,
    "rms_norm_eps": 1e-3, "tie_word_embeddings": True, **rope(),
}  # fmt: skip
#: Architecture in the file, configuration class, what differs from the usual.
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("llama", "LlamaConfig", {"rms_norm_eps": 1e-3, "head_dim": 32, "attention_bias": True, "mlp_bias": True}),
    "llama3": ("llama", "LlamaConfig", LLAMA3),
    "llama-linear": ("llama", "LlamaConfig", LINEAR),
    "llama-yarn": ("llama", "LlamaConfig", YARN),
    "llama-yarn-attention": ("llama", "LlamaConfig", ATTENTION),
    "mistral": ("llama", "MistralConfig", {"sliding_window": None, "head_dim": 32, **YARN}),
    "mixtral": ("llama", "MixtralConfig", {
        "num_local_experts": 4, "num_experts_per_tok": 3, "rms_norm_eps": 1e-3, **rope(),
    }),
    "qwen2": ("qwen2", "Qwen2Config", {"rms_norm_eps": 1e-3, **YARN}),
    "qwen2-moe": ("qwen2moe", "Qwen2MoeConfig", {**EXPERTS, "shared_expert_intermediate_size": 512, **LINEAR}),
    "qwen3": ("qwen3", "Qwen3Config", {"rms_norm_eps": 1e-3, "head_dim": 32, **YARN}),
    "qwen3-moe": ("qwen3moe", "Qwen3MoeConfig", {**EXPERTS, "norm_topk_prob": True, "head_dim": 32, **LINEAR}),
    "gemma2": ("gemma2", "Gemma2Config", {**GEMMA, "attn_logit_softcapping": 5.0}),
    "gemma3": ("gemma3", "Gemma3TextConfig", {**GEMMA, "num_hidden_layers": 7, "rope_parameters": {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 5e5},
        "sliding_attention": {"rope_type": "default", "rope_theta": 2e4},
    }}),
    "phi3": ("phi3", "Phi3Config", {
        "num_key_value_heads": 4, "pad_token_id": 0, "rms_norm_eps": 1e-3, "sliding_window": 8, **PARTIAL,
    }),
    "phi3-long": ("phi3", "Phi3Config", {
        "num_key_value_heads": 4, "pad_token_id": 0, "original_max_position_embeddings": 64, **rope(
            "longrope", long_factor=[1.5 + i for i in range(32)], short_factor=[1 + i / 9 for i in range(32)],
            original_max_position_embeddings=64,
        ),
    }),
    "nemotron": ("nemotron", "NemotronConfig", {"norm_eps": 1e-3, **PARTIAL}),
    "stablelm": ("stablelm", "StableLmConfig", {"layer_norm_eps": 1e-3, "use_qkv_bias": True, **PARTIAL}),
    "stablelm-parallel": ("stablelm", "StableLmConfig", {"layer_norm_eps": 1e-3, "use_parallel_residual": True}),
    "starcoder2": ("starcoder2", "Starcoder2Config", {"norm_epsilon": 1e-3, "use_bias": False, **rope()}),
}  # fmt: skip


@pytest.fixture(scope="module")
def through_a_file(
    tokenizer: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], tuple[Path, torch.Tensor]]:
    """An F32 file of a model, and the model's logits; made once."""
    made: dict[str, tuple[Path, torch.Tensor]] = {}

    def make(name: str) -> tuple[Path, torch.Tensor]:
        if name not in made:
            _, kind, changes = MODELS[name]
            torch.manual_seed(0)
            config = getattr(transformers, kind)(**{**SIZES, **changes}, initializer_range=0.1)
            model = AutoModelForCausalLM.from_config(config).eval()
            with torch.no_grad():
                for parameter in model.parameters():
                    if parameter.ndim == 1:
                        parameter.add_(torch.randn_like(parameter) * 0.2)
            folder = tmp_path_factory.mktemp(name)
            save_model(model, folder / "model", tokenizer)
            conversion = upstream.load_conversion()
            reader = conversion.get_model_class(conversion.get_model_architecture(config.to_dict() | {
                "architectures": [type(model).__name__]}, conversion.ModelType.TEXT))  # fmt: skip
            with pytest.MonkeyPatch.context() as patch:  # whatever tokenizer its own is
                patch.setattr(reader, "set_vocab", lambda self: self._set_vocab_sentencepiece())
                convert(ConvertOptions.of(folder / "model", folder / "model.gguf", outtype="f32"), io.StringIO())
            made[name] = folder / "model.gguf", logits(model)
        return made[name]

    return make


@pytest.mark.parametrize("name", MODELS)
def test_settings_are_those_of_the_checkpoint(
    name: str, through_a_file: Callable[[str], tuple[Path, torch.Tensor]]
) -> None:
    path, expected = through_a_file(name)
    assert difference(logits(load_gguf(path, dtype=torch.float32)), expected) < 1e-5


def test_every_architecture_is_tried() -> None:
    assert {arch for arch, *_ in MODELS.values()} == set(settings.ARCHITECTURES)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("rope.scaling.yarn_log_multiplier", 0.1), ("attention.scale", 0.3), ("attention.value_length", 16),
        ("rope.dimension_count", 16), ("rope.scaling.type", "other"), ("logit_scale", 2.0),
        ("attention.sliding_window", 4), ("expert_weights_scale", 2.5),
    ],
)  # fmt: skip
def test_what_has_no_place_is_refused_by_name(
    key: str, value: Any, through_a_file: Callable[[str], tuple[Path, torch.Tensor]], tmp_path: Path
) -> None:
    path, _ = through_a_file("llama")

    def change(fields: dict[str, Any], tensors: dict[str, Any]) -> None:
        kind = {str: gguf.GGUFValueType.STRING, int: gguf.GGUFValueType.UINT32, float: gguf.GGUFValueType.FLOAT32}
        fields[f"llama.{key}"] = value, [kind[type(value)]]

    with pytest.raises(UserError, match=f"has llama.{key} .*, for which Transformers has no setting"):
        load_gguf(rewritten(path, tmp_path / "changed.gguf", change))


def test_a_tensor_without_a_place_is_refused(
    through_a_file: Callable[[str], tuple[Path, torch.Tensor]], tmp_path: Path
) -> None:
    def change(fields: dict[str, Any], tensors: dict[str, Any]) -> None:
        tensors["blk.0.attn_q_norm.weight"] = tensors["blk.0.attn_norm.weight"]

    with pytest.raises(UserError, match=r"attn_q_norm.weight: is a tensor that the model of Transformers has no place"):
        load_gguf(rewritten(through_a_file("llama3")[0], tmp_path / "changed.gguf", change))


def test_a_scale_of_queries_that_no_file_can_hold_is_said(tokenizer: Path, tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = transformers.Gemma2Config(**{**SIZES, **GEMMA, "query_pre_attn_scalar": 48})
    folder, said = save_model(AutoModelForCausalLM.from_config(config), tmp_path / "model", tokenizer), io.StringIO()
    convert(ConvertOptions.of(folder, tmp_path / "model.gguf", outtype="f16"), said)
    assert "scales the queries of gemma2 by 32, query_pre_attn_scalar 48 is lost" in said.getvalue()

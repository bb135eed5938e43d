"""Small random models of many architectures, in Hugging Face form, to try the converters on."""

from __future__ import annotations

import dataclasses
import inspect
import json
import shutil
from pathlib import Path
from typing import Any, Final

import torch
import transformers

#: What a configuration is given of these, as far as it has a parameter of the name.
SIZES: Final[dict[str, Any]] = {
    "vocab_size": 512, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 256, "tie_word_embeddings": False,
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": 256, "shared_expert_intermediate_size": 256, "n_shared_experts": 1,
    "n_embd": 256, "n_head": 4, "n_layer": 2, "n_positions": 256, "n_group": 1, "topk_group": 1,
    "mamba_chunk_size": 32, "chunk_size": 32, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 64, "linear_value_head_dim": 64,
    "q_lora_rank": 64, "kv_lora_rank": 64, "qk_rope_head_dim": 32, "qk_nope_head_dim": 32, "v_head_dim": 64,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip

#: Class of the model -> (class of its configuration, what differs from :data:`SIZES`).
MODELS: Final[dict[str, tuple[str, dict[str, Any]]]] = {
    "AfmoeForCausalLM": ("AfmoeConfig", {}),
    "ApertusForCausalLM": ("ApertusConfig", {}),
    "ArceeForCausalLM": ("ArceeConfig", {}),
    "BambaForCausalLM": ("BambaConfig", {"attn_layer_indices": [1]}),
    "BertModel": ("BertConfig", {}),
    "BloomForCausalLM": ("BloomConfig", {}),
    "CohereForCausalLM": ("CohereConfig", {"tie_word_embeddings": True}),
    "Cohere2ForCausalLM": ("Cohere2Config", {"tie_word_embeddings": True}),
    "Cohere2MoeForCausalLM": ("Cohere2MoeConfig", {"tie_word_embeddings": True}),
    "DeepseekV2ForCausalLM": ("DeepseekV2Config", {"first_k_dense_replace": 1, "num_key_value_heads": 4}),
    "DeepseekV3ForCausalLM": ("DeepseekV3Config", {"first_k_dense_replace": 1, "num_key_value_heads": 4}),
    "DeepseekV32ForCausalLM": ("DeepseekV32Config", {
        "index_n_heads": 2, "index_head_dim": 64, "num_key_value_heads": 4,
    }),
    "DistilBertModel": ("DistilBertConfig", {"dim": 256, "hidden_dim": 512, "n_heads": 4, "n_layers": 2}),
    "Dots1ForCausalLM": ("Dots1Config", {"first_k_dense_replace": 1, "num_key_value_heads": 4}),
    "Ernie4_5ForCausalLM": ("Ernie4_5Config", {}),
    "Ernie4_5_MoeForCausalLM": ("Ernie4_5_MoeConfig", {
        "moe_num_experts": 4, "moe_k": 2, "moe_num_shared_experts": 1, "moe_layer_start_index": 1,
    }),
    "Exaone4ForCausalLM": ("Exaone4Config", {}),
    "ExaoneMoeForCausalLM": ("ExaoneMoeConfig", {}),
    "FalconForCausalLM": ("FalconConfig", {"new_decoder_architecture": True, "num_kv_heads": 2}),
    "FalconH1ForCausalLM": ("FalconH1Config", {}),
    "FalconMambaForCausalLM": ("FalconMambaConfig", {}),
    "GemmaForCausalLM": ("GemmaConfig", {"tie_word_embeddings": True}),
    "Gemma2ForCausalLM": ("Gemma2Config", {"tie_word_embeddings": True}),
    "Gemma3ForCausalLM": ("Gemma3TextConfig", {"tie_word_embeddings": True}),
    "Gemma4ForCausalLM": ("Gemma4TextConfig", {
        "num_experts": None, "vocab_size_per_layer_input": 512, "tie_word_embeddings": True, "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2, "num_kv_shared_layers": 2,
    }),
    "GlmForCausalLM": ("GlmConfig", {}),
    "Glm4ForCausalLM": ("Glm4Config", {}),
    "Glm4MoeForCausalLM": ("Glm4MoeConfig", {"first_k_dense_replace": 1}),
    "Glm4MoeLiteForCausalLM": ("Glm4MoeLiteConfig", {"num_key_value_heads": 4}),
    "GlmMoeDsaForCausalLM": ("GlmMoeDsaConfig", {"index_n_heads": 2, "index_head_dim": 64, "num_key_value_heads": 4}),
    "GPT2LMHeadModel": ("GPT2Config", {"tie_word_embeddings": True}),
    "GPTBigCodeForCausalLM": ("GPTBigCodeConfig", {"tie_word_embeddings": True}),
    "GPTNeoXForCausalLM": ("GPTNeoXConfig", {}),
    "GptOssForCausalLM": ("GptOssConfig", {}),
    "GraniteForCausalLM": ("GraniteConfig", {}),
    "GraniteMoeForCausalLM": ("GraniteMoeConfig", {}),
    "GraniteMoeHybridForCausalLM": ("GraniteMoeHybridConfig", {}),
    "GraniteMoeSharedForCausalLM": ("GraniteMoeSharedConfig", {}),
    "HunYuanDenseV1ForCausalLM": ("HunYuanDenseV1Config", {}),
    "HunYuanMoEV1ForCausalLM": ("HunYuanMoEV1Config", {}),
    "HYV3ForCausalLM": ("HYV3Config", {}),
    "Jais2ForCausalLM": ("Jais2Config", {}),
    "JambaForCausalLM": ("JambaConfig", {
        "attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1,
    }),
    "LagunaForCausalLM": ("LagunaConfig", {}),
    "Lfm2ForCausalLM": ("Lfm2Config", {"layer_types": ["conv", "full_attention"], "tie_word_embeddings": True}),
    "Lfm2MoeForCausalLM": ("Lfm2MoeConfig", {
        "layer_types": ["conv", "full_attention"], "num_dense_layers": 1, "tie_word_embeddings": True,
    }),
    "LlamaForCausalLM": ("LlamaConfig", {}),
    "Llama4ForCausalLM": ("Llama4TextConfig", {"intermediate_size_mlp": 512}),
    "MambaForCausalLM": ("MambaConfig", {"tie_word_embeddings": True}),
    "Mamba2ForCausalLM": ("Mamba2Config", {"num_heads": 8, "state_size": 64, "tie_word_embeddings": True}),
    "MellumForCausalLM": ("MellumConfig", {"layer_types": ["sliding_attention", "full_attention"]}),
    "MiMoV2FlashForCausalLM": ("MiMoV2FlashConfig", {}),
    "MiniCPM3ForCausalLM": ("MiniCPM3Config", {}),
    "MiniMaxM2ForCausalLM": ("MiniMaxM2Config", {}),
    "Ministral3ForCausalLM": ("Ministral3Config", {}),
    "MistralForCausalLM": ("MistralConfig", {"sliding_window": None}),
    "Mistral3ForConditionalGeneration": ("Mistral3Config", {}),
    "MixtralForCausalLM": ("MixtralConfig", {}),
    "ModernBertModel": ("ModernBertConfig", {}),
    "NemotronForCausalLM": ("NemotronConfig", {}),
    "NemotronHForCausalLM": ("NemotronHConfig", {}),
    "OlmoForCausalLM": ("OlmoConfig", {}),
    "Olmo2ForCausalLM": ("Olmo2Config", {}),
    "Olmo3ForCausalLM": ("Olmo3Config", {}),
    "OlmoeForCausalLM": ("OlmoeConfig", {"num_key_value_heads": 4}),
    "PhiForCausalLM": ("PhiConfig", {"num_key_value_heads": 4, "intermediate_size": 1024}),
    "Phi3ForCausalLM": ("Phi3Config", {}),
    "Qwen2ForCausalLM": ("Qwen2Config", {}),
    "Qwen2MoeForCausalLM": ("Qwen2MoeConfig", {}),
    "Qwen3ForCausalLM": ("Qwen3Config", {}),
    "Qwen3MoeForCausalLM": ("Qwen3MoeConfig", {}),
    "Qwen3NextForCausalLM": ("Qwen3NextConfig", {"full_attention_interval": 2}),
    "Qwen3_5ForCausalLM": ("Qwen3_5TextConfig", {"full_attention_interval": 2}),
    "Qwen3_5MoeForCausalLM": ("Qwen3_5MoeTextConfig", {"full_attention_interval": 2}),
    "RobertaModel": ("RobertaConfig", {}),
    "SeedOssForCausalLM": ("SeedOssConfig", {}),
    "SmolLM3ForCausalLM": ("SmolLM3Config", {}),
    "SolarOpenForCausalLM": ("SolarOpenConfig", {}),
    "StableLmForCausalLM": ("StableLmConfig", {}),
    "Starcoder2ForCausalLM": ("Starcoder2Config", {}),
    "T5ForConditionalGeneration": ("T5Config", {
        "d_model": 256, "d_ff": 512, "d_kv": 64, "num_layers": 2, "num_heads": 4,
    }),
    "XLMRobertaModel": ("XLMRobertaConfig", {}),
    "YoutuForCausalLM": ("YoutuConfig", {"num_key_value_heads": 4}),
}  # fmt: skip

#: Those that Transformers saves without the layers for multi-token prediction that upstream expects.
WITHOUT_MTP: Final = ("Qwen3NextForCausalLM", "Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM")

#: What the config.json of such a model holds on the hub, and Transformers no longer writes.
_ON_THE_HUB: Final[dict[str, dict[str, Any]]] = {
    "Cohere2ForCausalLM": {"rotary_pct": 1.0},
    "DeepseekV32ForCausalLM": {"scoring_func": "sigmoid"},
    "Dots1ForCausalLM": {"scoring_func": "sigmoid"},
    "ExaoneMoeForCausalLM": {"scoring_func": "sigmoid"},
    "FalconH1ForCausalLM": {"head_dim": 64},
    "GPT2LMHeadModel": {"n_ctx": 256},
    "GPTNeoXForCausalLM": {"rotary_pct": 0.25},
    "Glm4MoeLiteForCausalLM": {"first_k_dense_replace": 1},
    "HunYuanMoEV1ForCausalLM": {"moe_intermediate_size": [512, 512], "moe_topk": [2, 2], "num_shared_expert": [1, 1]},
    "MiMoV2FlashForCausalLM": {
        "swa_head_dim": 64,
        "swa_num_attention_heads": 4,
        "swa_v_head_dim": 64,
        "swa_num_key_value_heads": 2,
        "topk_method": "noaux_tc",
        "hybrid_layer_pattern": [0, 1],
        "partial_rotary_factor": 0.5,
    },
    "MiniMaxM2ForCausalLM": {"rotary_dim": 32, "scoring_func": "sigmoid"},
    "ModernBertModel": {"layer_norm_eps": 1e-5},
    "NemotronHForCausalLM": {"hybrid_override_pattern": "ME*-"},
    "T5ForConditionalGeneration": {"decoder_start_token_id": 0},
}

_DENSE: Final = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "head_dim", "max_position_embeddings",
)  # fmt: skip

#: Those whose parts have configurations of their own: part -> what it is given.
_PARTS: Final[dict[str, dict[str, Any]]] = {
    "Mistral3ForConditionalGeneration": {
        "text_config": {"model_type": "ministral3", **{key: SIZES[key] for key in _DENSE}},
        "vision_config": {"model_type": "pixtral", "hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 1,
                          "num_attention_heads": 4, "image_size": 28, "patch_size": 14, "head_dim": 64},
    },
}  # fmt: skip


def _make_outliers(model: torch.nn.Module) -> None:
    """Give every norm of whole rows some channels that are ten times as large as the others, as real models have."""
    for module in model.modules():
        gain = getattr(module, "weight", None)
        if "norm" in type(module).__name__.lower() and gain is not None and gain.ndim == 1 and len(gain) >= 128:
            places = torch.randperm(len(gain))[: len(gain) // 32]
            # Some add one to what they hold.
            gain[places] += 9


def make(name: str, folder: Path, tokenizer: Path) -> Path:
    """Write a model with random weights in bfloat16.

    Args:
        name: a key of :data:`MODELS`.
        folder: where to.
        tokenizer: a folder with a SentencePiece tokenizer, which is put beside.

    Returns:
        ``folder``.
    """
    kind, changes = MODELS[name]
    config_class = getattr(transformers, kind)
    own = set(inspect.signature(config_class.__init__).parameters)
    if dataclasses.is_dataclass(config_class):
        own |= {field.name for field in dataclasses.fields(config_class)}
    sizes = {key: value for key, value in SIZES.items() if key in own}
    config = config_class(**{**sizes, **_PARTS.get(name, {}), **changes})
    torch.manual_seed(0)
    model = getattr(transformers, name)(config)
    with torch.no_grad():
        _make_outliers(model)
    model.to(torch.bfloat16).save_pretrained(folder)
    if name in _ON_THE_HUB:
        path = folder / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **_ON_THE_HUB[name]}))
    for file in tokenizer.iterdir():
        shutil.copyfile(file, folder / file.name)
    return folder

"""The settings of a model out of the metadata of its GGUF file, beyond those that Transformers reads of one.

Transformers reads sizes, and the class's default stands for the rest: rope scaling, soft caps, the scale of queries,
windows, partial rotations. Here every key of the architecture that a file has is carried over to the config or refused
by name, and what a file leaves out has the value that llama.cpp takes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import gguf
from torch import nn
from transformers.integrations.ggml import GGUF_CONFIG_MAPPING

from ..base.errors import UserError
from ..checkpoint.gguf_file import GGUFFile, contents_of
from ..checkpoint.reading import SCALED_BY_WIDTH

#: ``general.architecture`` of the files that are read, each tried with unusual settings.
ARCHITECTURES: Final = (
    "llama", "qwen2", "qwen2moe", "qwen3", "qwen3moe", "gemma2", "gemma3", "phi3", "nemotron", "stablelm", "starcoder2",
)  # fmt: skip
#: Tensors that are settings.
TENSORS: Final = frozenset({"rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"})
_REMEDY: Final = "run it with llama.cpp"
#: Names that configs have for the same thing, of which each has one.
_EPSILONS: Final = ("rms_norm_eps", "norm_eps", "layer_norm_eps", "norm_epsilon")
#: Key -> names in a config.
_NAMES: Final[Mapping[str, tuple[str, ...]]] = {
    "attention.layer_norm_rms_epsilon": _EPSILONS,
    "attention.layer_norm_epsilon": _EPSILONS,
    "attention.sliding_window": ("sliding_window",),
    "attn_logit_softcapping": ("attn_logit_softcapping",),
    "final_logit_softcapping": ("final_logit_softcapping",),
    "expert_count": ("num_experts", "num_local_experts"),
    "expert_used_count": ("num_experts_per_tok",),
    "expert_feed_forward_length": ("moe_intermediate_size",),
    "expert_shared_feed_forward_length": ("shared_expert_intermediate_size",),
    "expert_weights_norm": ("norm_topk_prob",),
    "use_parallel_residual": ("use_parallel_residual",),
}  # fmt: skip
#: Tensor -> names in a config that say whether there are such.
_BIASES: Final[Mapping[str, tuple[str, ...]]] = {
    "blk.0.attn_output.bias": ("attention_bias", "use_bias"),
    "blk.0.ffn_down.bias": ("mlp_bias",),
    "blk.0.attn_q_norm.weight": ("qk_layernorm",),
}


def apply(config: Any, file: GGUFFile, arch: str, path: Path) -> None:
    """Set what a file of one of :data:`ARCHITECTURES` says in a config that Transformers has made of it, in place.

    Raises:
        UserError: the file has a key that the config has no place for.
    """
    settings = {
        key.removeprefix(f"{arch}."): contents_of(file, key) for key in file.fields if key.startswith(f"{arch}.")
    }

    def take(key: str, default: Any = None) -> Any:
        found = settings.pop(key, default)
        # A value of each layer is one value where all have the same.
        return found[0] if isinstance(found, list) and found and all(x == found[0] for x in found) else found

    def refuse(key: str, value: Any) -> UserError:
        return UserError(path, f"has {arch}.{key} {value!r:.80}, for which Transformers has no setting", _REMEDY)

    head = take("attention.key_length", config.hidden_size // config.num_attention_heads)
    if hasattr(config, "head_dim"):
        config.head_dim = head
    elif head != config.hidden_size // config.num_attention_heads:
        raise refuse("attention.key_length", head)
    if (values := take("attention.value_length", head)) != head:
        raise refuse("attention.value_length", values)
    _set_rope(config, {tensor.name: tensor for tensor in file.tensors}, head, take, refuse)
    if not settings.get("attention.sliding_window"):
        settings.pop("attention.sliding_window", None)
        if arch == "gemma3":  # elsewhere classes and llama.cpp agree about what is not said
            config.layer_types = ["full_attention"] * len(config.layer_types)
    for key, names in _NAMES.items():
        if key in settings:
            name = next((name for name in names if hasattr(config, name)), None)
            if name is None:
                raise refuse(key, settings[key])
            setattr(config, name, take(key))
    if hasattr(config, "query_pre_attn_scalar"):
        by_width = config.num_hidden_layers == SCALED_BY_WIDTH.get(arch)
        config.query_pre_attn_scalar = config.hidden_size // config.num_attention_heads if by_width else head
    tensors = {tensor.name for tensor in file.tensors}
    for tensor, names in _BIASES.items():
        for name in names:
            if hasattr(config, name):
                setattr(config, name, tensor in tensors)
    read = GGUF_CONFIG_MAPPING[str(config.model_type).removesuffix("_text").replace("mixtral", "llama")]
    for key, value in settings.items():
        if read.get(key) is None:
            raise refuse(key, value)


def _set_rope(
    config: Any, tensors: Mapping[str, Any], head: int, take: Callable[..., Any],
    refuse: Callable[[str, Any], UserError],
) -> None:  # fmt: skip
    """Set how positions turn queries and keys.

    Factors of frequencies that a file has as a tensor, as those of Llama 3, are LongRoPE: the same for any length.
    """
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": take("rope.freq_base", 10000.0)}
    dimensions = take("rope.dimension_count", head)
    if dimensions != head or "partial_rotary_factor" in (config.rope_parameters or {}):
        rope["partial_rotary_factor"] = dimensions / head
    kind = take("rope.scaling.type", "linear")
    factor = take("rope.scaling.factor", take("rope.scale_linear", 0.0)) or 1.0
    context = take("rope.scaling.original_context_length", config.max_position_embeddings)
    attention = take("rope.scaling.attn_factor", 1.0)
    take("rope.scaling.finetuned")
    if kind == "yarn":
        if (extrapolation := take("rope.scaling.yarn_ext_factor", 1.0)) != 1:
            raise refuse("rope.scaling.yarn_ext_factor", extrapolation)
        rope |= {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": context}
        for key, name in (("attn_factor", "attention_factor"), ("beta_fast", "beta_fast"), ("beta_slow", "beta_slow")):
            if (value := take(f"rope.scaling.yarn_{key}")) is not None:
                rope[name] = value
    elif kind == "linear" and factor != 1:
        rope |= {"rope_type": "linear", "factor": factor}
    elif kind not in ("none", "linear", "longrope"):
        raise refuse("rope.scaling.type", kind)
    names = ["rope_freqs.weight"] * 2 if "rope_freqs.weight" in tensors else sorted(TENSORS - {"rope_freqs.weight"})
    if set(names) <= tensors.keys():
        if rope["rope_type"] != "default":
            raise refuse("rope.scaling.type", kind)
        long, short = (gguf.quants.dequantize(tensors[name].data, tensors[name].tensor_type).tolist() for name in names)
        rope |= {
            "rope_type": "longrope", "long_factor": long, "short_factor": short, "attention_factor": attention,
            "factor": config.max_position_embeddings / context, "original_max_position_embeddings": context,
        }  # fmt: skip
        if hasattr(config, "original_max_position_embeddings"):
            config.original_max_position_embeddings = context
    elif attention != 1:
        raise refuse("rope.scaling.attn_factor", attention)
    if "full_attention" in (config.rope_parameters or {}):
        local = {"rope_type": "default", "rope_theta": take("rope.freq_base_swa", 10000.0)}
        config.rope_parameters = {"full_attention": rope, "sliding_attention": local}
    else:
        if (base := take("rope.freq_base_swa", rope["rope_theta"])) != rope["rope_theta"]:
            raise refuse("rope.freq_base_swa", base)
        config.rope_parameters = rope


def check_rotations(model: nn.Module, file: GGUFFile, arch: str, path: Path) -> None:
    """Refuse a file whose model turns another number of dimensions than the file says.

    Raises:
        UserError: it does.
    """
    key = f"{arch}.rope.dimension_count"
    wanted = contents_of(file, key)
    for name, frequencies in model.named_buffers():
        if wanted is not None and name.endswith("inv_freq") and 2 * frequencies.numel() != wanted:
            raise UserError(path, f"has {key} {wanted!r:.80}, for which Transformers has no setting", _REMEDY)

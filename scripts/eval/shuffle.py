"""A model with its channels in another order: the same function, and a fair judge of every type.

The models that packages carry have been rounded to a llama.cpp type (:attr:`.models.Model.stored`): their weights lie
on the grid of that type's blocks, which finds them again without error. With the channels of the stream, of every
feed-forward network and of the values of every head in a random order, a block of 32 columns has weights of many of the
blocks of before, each with a scale and a minimum of its own, and there is no such grid. Outliers, importances and the
spectrum of every matrix stay what they were.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import torch
import transformers

from gguf_itq3s.base.errors import UserError
from scripts.eval.decode import save

_SEED: Final = 0
#: Tokens that the two models are compared on, and how far their logits may lie apart, of the largest.
_COMPARED, _TOLERANCE = 32, 1e-4


def shuffle(source: Path, folder: Path) -> None:
    """Write the model of a folder in another order of its channels; the new folder appears when it is whole.

    Args:
        source: Hugging Face folder of a decoder like Llama's, Qwen2's or Gemma's.
        folder: to be written, float16.

    Raises:
        UserError: the model is built otherwise: its logits are not the same any more.
    """
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    tokens = torch.arange(_COMPARED)[None] * 7 % model.config.vocab_size
    with torch.inference_mode():
        before = model(tokens).logits
        try:
            shuffle_in_place(model)
        except AttributeError as error:
            raise _other(source, str(error)) from error
        after = model(tokens).logits
    if (apart := float((after - before).abs().max() / before.abs().max())) > _TOLERANCE:
        raise _other(source, f"logits differ by {apart:.1e} of the largest")
    save(model.to(torch.float16), transformers.AutoTokenizer.from_pretrained(source), folder)


def _other(source: Path, reason: str) -> UserError:
    return UserError(source, f"cannot be shuffled ({reason})", "take one built like Llama's, Qwen2's or Gemma's")


def shuffle_in_place(model: Any) -> None:
    """The channels in another order: of the stream, of each network, of the values within each head.

    Heads keep their places, and so do the channels of queries and keys, which positions rotate in pairs.

    Raises:
        AttributeError: a part is missing.
    """
    draws = torch.Generator().manual_seed(_SEED)

    def order(n: int) -> torch.Tensor:
        return torch.randperm(n, generator=draws)

    def permute(parameter: Any, dim: int, by: torch.Tensor) -> None:
        if parameter is not None:
            parameter.data = parameter.data.index_select(dim, by).contiguous()

    config, body = model.config, model.model
    head = body.layers[0].self_attn.head_dim
    groups = config.num_attention_heads // config.num_key_value_heads
    stream = order(config.hidden_size)
    tied = model.lm_head.weight is body.embed_tokens.weight
    permute(body.embed_tokens.weight, 1, stream)
    permute(body.norm.weight, 0, stream)
    if not tied:
        permute(model.lm_head.weight, 1, stream)
    for layer in body.layers:
        attention, network = layer.self_attn, layer.mlp
        for norm in (part for part in layer.children() if part not in (attention, network)):
            permute(norm.weight, 0, stream)
        for reader in (attention.q_proj, attention.k_proj, attention.v_proj, network.gate_proj, network.up_proj):
            permute(reader.weight, 1, stream)
        for writer in (attention.o_proj, network.down_proj):
            permute(writer.weight, 0, stream)
            permute(writer.bias, 0, stream)
        inner = order(network.down_proj.in_features)
        permute(network.down_proj.weight, 1, inner)
        heads = [order(head) for _ in range(config.num_key_value_heads)]
        values = torch.cat([head * k + own for k, own in enumerate(heads)])
        read = torch.cat([head * (k * groups + g) + own for k, own in enumerate(heads) for g in range(groups)])
        permute(attention.o_proj.weight, 1, read)
        for part, by in ((network.gate_proj, inner), (network.up_proj, inner), (attention.v_proj, values)):
            permute(part.weight, 0, by)
            permute(part.bias, 0, by)

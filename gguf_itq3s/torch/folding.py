"""Norm folding of a Transformers model by the converter's rule, so that both give the same bytes.

:mod:`gguf_itq3s.checkpoint.channels` decides by the names that tensors have in a GGUF file; here they are those of a
model's parameters. Either every norm that the converter would fold is folded, or none: an adapter trained on the model
then fits either the folded file or, by ``convert-lora``, both.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from gguf import MODEL_ARCH, MODEL_ARCH_NAMES, get_tensor_name_map

from ..checkpoint import experts
from ..checkpoint.channels import plan_norms

#: ``model_type`` of a config -> ``general.architecture``, of models whose parameters are the matrices of the file.
ARCHITECTURES: Final = {
    "llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "gemma": "gemma", "gemma2": "gemma2",
    "gemma3_text": "gemma3", "phi3": "phi3", "granite": "granite", "smollm3": "smollm3", "mixtral": "llama",
    "qwen2_moe": "qwen2moe", "qwen3_moe": "qwen3moe", "olmoe": "olmoe", "granitemoe": "granitemoe",
}  # fmt: skip
#: Architectures whose norms multiply by one more than their weight.
_ONE_MORE: Final = frozenset({"gemma", "gemma2", "gemma3"})


@dataclass(frozen=True)
class Folding:
    """Which norms are folded.

    Attributes:
        norms: norm -> the matrices that read it, all by parameter name.
        one_more: whether the norms multiply by one more than their weight.
        note: why none is folded, or which are left alone; empty where all are.
    """

    norms: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    one_more: bool = False
    note: str = ""

    def gain(self, weight: torch.Tensor) -> torch.Tensor:
        """What a norm multiplies by, float32, as the converter computes it: in the dtype of float16 weights."""
        wide = weight if weight.dtype == torch.float16 else weight.float()
        return (wide + 1 if self.one_more else wide).float()

    def neutral(self, weight: torch.Tensor) -> torch.Tensor:
        """The weight of a norm that multiplies by one."""
        return torch.zeros_like(weight) if self.one_more else torch.ones_like(weight)


def plan(config: Any, names: Iterable[str]) -> Folding:
    """Which norms of a model are folded.

    Args:
        config: of the model.
        names: of its parameters.
    """
    arch = ARCHITECTURES.get(str(getattr(config, "model_type", None)))
    layers = getattr(config, "num_hidden_layers", None)
    if arch is None or not isinstance(layers, int):
        kind = getattr(config, "model_type", "unknown")
        return Folding(note=f"norms are not folded: of the model type {kind} it is not known who reads them")
    number: MODEL_ARCH = next(key for key, value in MODEL_ARCH_NAMES.items() if value == arch)
    by_gguf_name = get_tensor_name_map(number, layers)
    parameters: dict[str, str] = {}
    for name in names:
        gguf_name = by_gguf_name.get_name(name, try_suffixes=(".weight", ".bias"))
        if stack := experts.stack(name):  # gate and up are two tensors in a file, and read the same norm
            gguf_name = stack.tensors[0]
        if gguf_name is None and not any(part.isdigit() for part in name.split(".")):
            continue  # a head of its own: what is outside of the layers reads no norm of theirs
        if gguf_name is None:
            return Folding(note=f"norms are not folded: {name} is not known, it may read one")
        parameters[gguf_name] = name
    found = plan_norms(arch, parameters)
    norms = {parameters[norm]: tuple(parameters[name] for name in readers) for norm, readers in found.readers.items()}
    return Folding(norms, arch in _ONE_MORE, found.note)

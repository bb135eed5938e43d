"""Models of Transformers with packed layers, for the tests of loading them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from gguf_itq3s.transformers import ITQ3SConfig

#: Fast: what the encoder finds is not the subject there.
FAST: Final[dict[str, Any]] = {"effort": "fast", "threads": 1}
TOKENS: Final = torch.arange(3, 43).reshape(2, 20)


def load(folder: Path, config: ITQ3SConfig | None = None, **options: Any) -> Any:
    """The model of a folder, quantized where there is a config."""
    if config is not None:
        options["quantization_config"] = config  # Transformers takes None for an order to forget that of the folder
    return AutoModelForCausalLM.from_pretrained(folder, **options)


def logits(model: Any) -> torch.Tensor:
    """Of some tokens, float32."""
    with torch.no_grad():
        found: torch.Tensor = model(TOKENS).logits
    return found.float()


def difference(a: torch.Tensor, b: torch.Tensor) -> float:
    """Relative to the second."""
    return float((a.detach() - b.detach()).norm() / b.detach().norm())


def changed(folder: Path, out: Path, config: dict[str, Any] | None = None, **tensors: torch.Tensor | None) -> Path:
    """A copy of a folder with other fields in its quantization_config and other tensors; None takes one away."""
    shutil.copytree(folder, out)
    if config is not None:
        path = out / "config.json"
        fields = json.loads(path.read_text())
        fields["quantization_config"] |= config
        path.write_text(json.dumps(fields))
    if tensors:
        there = load_file(out / "model.safetensors") | tensors
        kept = {name: tensor for name, tensor in there.items() if tensor is not None}
        save_file(kept, out / "model.safetensors", metadata={"format": "pt"})
    return out

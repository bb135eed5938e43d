"""Models of Transformers with packed layers, for the tests of loading them."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import torch
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

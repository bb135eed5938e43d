"""Training a LoRA adapter beside a packed model with PEFT, as a user would, and what its gradient promises."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peft
import torch
from transformers import AutoTokenizer

from adapters import ALL_LINEAR
from checkpoints import NOVEL


def windows(folder: Path, count: int, length: int) -> torch.Tensor:
    """Tokens of the prose, (count, length)."""
    tokens = AutoTokenizer.from_pretrained(folder)(NOVEL.read_text()[: 16 * count * length]).input_ids
    return torch.tensor(tokens[: count * length]).reshape(count, length)


def with_adapter(model: Any, *, rank: int = 8, seed: int = 0) -> Any:
    """The model with an untrained adapter on every matrix of its layers."""
    torch.manual_seed(seed)
    config = peft.LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=list(ALL_LINEAR), task_type="CAUSAL_LM")
    return peft.get_peft_model(model, config)


def with_random_adapter(model: Any, size: float, *, rank: int = 8) -> Any:
    """The model with an adapter that no training made: B, which PEFT starts at zero, has random numbers of a size."""
    adapted = with_adapter(model, rank=rank)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if ".lora_B." in name:
                parameter.copy_(size * torch.randn(parameter.shape, generator=generator))
    return adapted


def train(model: Any, tokens: torch.Tensor, steps: int, rate: float = 3e-3) -> list[float]:
    """Losses of training on the same windows again and again."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=rate)
    model.train()
    losses = []
    for _ in range(steps):
        loss = model(input_ids=tokens, labels=tokens).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    model.eval()
    return losses

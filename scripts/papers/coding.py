"""Weights that compute with their codes while they are trained: for distillation and quantization-aware training.

Between two encodings the error of the code is held fixed: with w the latent weight, w0 what it was when it was encoded
and C(w0) its code, the layer computes with ``s (w + C(w0) - w0)``, s the learned factors of the blocks' scales. The
gradient passes to w as if there were no code (straight-through estimation, Bengio et al. 2013).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.functional import kl_div, log_softmax

from gguf_itq3s.codec import blocks, native, ternary
from gguf_itq3s.codec.transform import BLOCK, FloatArray


def encode(weights: FloatArray, kind: str) -> FloatArray:
    """What a matrix is after it was written in ``itq3_s`` or ``tq2_0`` (the scale of a block of the least error)."""
    if kind == "tq2_0":
        return ternary.ternarize(weights, "optimal").weights()
    return blocks.dequantize(native.quantize(weights), weights.shape)


class Coded(nn.Module):
    """A parametrization of a weight whose rows are whole blocks: (rows, n) -> (rows, n)."""

    offset: torch.Tensor

    def __init__(self, weight: torch.Tensor, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.register_buffer("offset", torch.zeros_like(weight), persistent=False)
        self.factor = nn.Parameter(weight.new_ones(weight.shape[0], weight.shape[1] // BLOCK, 1))

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return ((weight + self.offset).unflatten(1, (-1, BLOCK)) * self.factor).flatten(1)

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def encode(self, weight: torch.Tensor) -> None:
        """Encode the latent weight anew."""
        code = encode(np.ascontiguousarray(weight.detach().float().numpy()), self.kind)
        self.offset.copy_(torch.from_numpy(code) - weight.detach())


def adam(groups: Iterable[tuple[Iterable[nn.Parameter], float]], steps: int) -> tuple[Any, Any]:
    """Adam and its schedule over so many steps: up in the first twentieth, then down along a cosine to zero.

    Args:
        groups: parameters and their learning rate, in shares of each one's root mean square at the start.
        steps: to be taken.
    """
    each = [
        {"params": [parameter], "lr": rate * (float(parameter.detach().square().mean().sqrt()) or 1.0)}
        for parameters, rate in groups
        for parameter in parameters
    ]
    optimizer = torch.optim.Adam(each, betas=(0.9, 0.99), eps=1e-12)
    rising = max(1, steps // 20)

    def factor(step: int) -> float:
        if step < rising:
            return (step + 1) / (rising + 1)
        return 0.5 * (1 + math.cos(math.pi * (step - rising) / max(1, steps - rising)))

    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, factor)


def divergence(student: torch.Tensor, teacher: torch.Tensor, reverse: float = 0.0) -> torch.Tensor:
    """Mean over all positions of ``a KL(student || teacher) + (1 - a) KL(teacher || student)``, in nats.

    With a the teacher's confidence it is BitDistiller's CAKLD (arXiv 2402.10631).

    Args:
        student: logits (..., vocabulary).
        teacher: logits of the same shape.
        reverse: a.
    """
    own, wanted = log_softmax(student.float(), dim=-1), log_softmax(teacher.float(), dim=-1)
    total = (1 - reverse) * kl_div(own, wanted, reduction="sum", log_target=True)
    if reverse:
        total = total + reverse * kl_div(wanted, own, reduction="sum", log_target=True)
    return total / own.shape[:-1].numel()


def confidence_of(logits: torch.Tensor, ids: torch.Tensor) -> float:
    """The mean probability that a model's logits (windows, context, vocabulary) give to the tokens of a text."""
    return float(logits[:, :-1].float().softmax(-1).gather(-1, ids[:, 1:, None]).mean())


def layer_matrices(model: nn.Module) -> dict[str, nn.Linear]:
    """The linear layers within the blocks of a model of Transformers, by name."""
    return {name: m for name, m in model.named_modules() if isinstance(m, nn.Linear) and ".layers." in f".{name}"}

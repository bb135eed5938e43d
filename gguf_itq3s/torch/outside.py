"""What stands in a layer for experts that run outside it."""

from __future__ import annotations

from collections.abc import Callable

import torch


class Outside(torch.nn.Module):
    """Stands in a layer for its experts; no parameters.

    Attributes:
        answer: what it gives for (hidden, chosen experts, weights of their outputs); None for zeros.
    """

    def __init__(self) -> None:
        super().__init__()
        self.answer: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor] | None = None

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """As the experts: (..., hidden), (tokens, k), (tokens, k) -> the shape of the first."""
        if self.answer is None:
            return torch.zeros_like(hidden_states)
        return self.answer(hidden_states, top_k_index, top_k_weights)

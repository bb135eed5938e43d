"""The quantizers of RCP ("Rotate, Clip, and Partition", Choi, Song, Lim, Yoo), for the ablation: with W2A4KV4, W3A4KV4.

Weights are quantized in groups of 128 of a row. With learnable clipping (LWC) a group's range is from
``sigma(beta) min(W)`` to ``sigma(gamma) max(W)``; with learnable partition (LDP) the 2-bit thresholds and the centre of
the asymmetric NF3 move as well. Each is a module of the weight to the weight that comes back, differentiable by
straight-through estimation: a step counts as the identity.
"""

from __future__ import annotations

import math
from typing import Final

import torch
from torch import nn

from gguf_itq3s.codec.transform import BLOCK, hadamard_matrix

GROUP: Final = 128
#: Normal-float levels of 3 bits, asymmetric around 0 (BitDistiller, arXiv 2402.10631).
NF3: Final = (-1.0, -0.5350227, -0.2469314, 0.0, 0.1833375, 0.3819939, 0.6229857, 1.0)
#: Shares of a group's extremes that the grid search tries, for either end.
GRID: Final = (1.0, 0.85, 0.7, 0.55, 0.4)
# sigma of it is 1 in float32's eyes no more: the range can still learn to grow.
_WHOLE: Final = 0.98


def step(x: torch.Tensor) -> torch.Tensor:
    """1 where x is positive, else 0; its gradient is the identity's."""
    return (x > 0).to(x.dtype) + (x - x.detach())


def round_through(x: torch.Tensor) -> torch.Tensor:
    """Rounding whose gradient is the identity's."""
    return x + (x.round() - x).detach()


def logit(share: float | torch.Tensor) -> torch.Tensor:
    """The inverse of the logistic function, of shares within (0, 1)."""
    return torch.logit(torch.as_tensor(share, dtype=torch.float32).clamp(1 - _WHOLE, _WHOLE))


def groups(weight: torch.Tensor) -> torch.Tensor:
    """(rows, n) -> (rows, n / 128, 128)."""
    return weight.unflatten(1, (-1, GROUP))


def rotate(x: torch.Tensor) -> torch.Tensor:
    """The normalised Walsh-Hadamard transform of runs of 256 values of the last axis; its own inverse."""
    matrix = torch.from_numpy(hadamard_matrix(BLOCK)).to(x.dtype)
    return (x.unflatten(-1, (-1, BLOCK)) @ matrix).flatten(-2)


class Clipped(nn.Module):
    """The range of each group, learnable: beta and gamma, (rows, groups, 1) each, start at a share of the extremes.

    Args:
        weight: (rows, n), n a multiple of 128.
    """

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        shape = (*groups(weight).shape[:2], 1)
        self.beta = nn.Parameter(logit(_WHOLE).expand(shape).clone())
        self.gamma = nn.Parameter(logit(_WHOLE).expand(shape).clone())

    def ends(self, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Lower end and width of the range of each group, (rows, groups, 1); the width is positive."""
        low = self.beta.sigmoid() * weight.amin(-1, keepdim=True)
        high = self.gamma.sigmoid() * weight.amax(-1, keepdim=True)
        return low, (high - low).clamp_min(1e-12)

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def search(self, weight: torch.Tensor, moment: torch.Tensor) -> None:
        """Start at the shares of the extremes with the least error of the products, group by group.

        The paper's |Q(W_c) X - W_c X|^2 would be least where everything is clipped; here the error is that of the
        product with the weights themselves, |Q(W) X - W X|^2.

        Args:
            weight: (rows, n).
            moment: second moment of the inputs of each group, (n / 128, 128, 128).
        """
        best = torch.full(self.beta.shape, math.inf)
        found = [self.beta.clone(), self.gamma.clone()]
        for low in GRID:
            for high in GRID:
                self.beta.fill_(logit(low).item())
                self.gamma.fill_(logit(high).item())
                error = groups(self(weight) - weight).transpose(0, 1)  # groups first
                cost = ((error @ moment) * error).sum(-1).transpose(0, 1)[..., None]
                better = cost < best
                best = torch.where(better, cost, best)
                found = [
                    torch.where(better, own, kept) for own, kept in zip((self.beta, self.gamma), found, strict=True)
                ]
        self.beta.copy_(found[0])
        self.gamma.copy_(found[1])
        self.start(weight)

    def start(self, weight: torch.Tensor) -> None:
        """Set what depends on the range."""


class TwoBits(Clipped):
    """Four levels of each group, the thresholds between them learnable where ``partition`` says so."""

    def __init__(self, weight: torch.Tensor, partition: bool) -> None:
        super().__init__(weight)
        # Equal thirds: s1 = logit(1/3), s2 = 0.
        self.s1 = nn.Parameter(logit(1 / 3).expand(self.beta.shape).clone(), requires_grad=partition)
        self.s2 = nn.Parameter(torch.zeros_like(self.beta), requires_grad=partition)

    def partition(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """The three thresholds and the four points, as shares of the range."""
        p1 = self.s1.sigmoid()
        p2, p3 = (1 - p1) * self.s2.sigmoid(), (1 - p1) * (1 - self.s2.sigmoid())
        t1 = p1 / 2
        t2 = t1 + (p1 + p2) / 2
        t3 = t2 + (p2 + p3) / 2
        return [t1, t2, t3], [torch.zeros_like(t1), (t1 + t2) / 2, (t2 + t3) / 2, torch.ones_like(t1)]

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        grouped = groups(weight)
        low, width = self.ends(grouped)
        place = ((grouped - low) / width).clamp(0, 1)
        thresholds, points = self.partition()
        share = points[0]
        for index, threshold in enumerate(thresholds):
            share = share + (points[index + 1] - points[index]) * step(place - threshold)
        return (low + width * share).flatten(1)


class ThreeBits(Clipped):
    """Asymmetric NF3: eight levels around a centre, a scale for either side; the centre is learnable with partition.

    Without, it is 0, which the range of a group always holds (AFPQ, arXiv 2311.01792).
    """

    def __init__(self, weight: torch.Tensor, partition: bool) -> None:
        super().__init__(weight)
        self.s1 = nn.Parameter(torch.zeros_like(self.beta), requires_grad=partition)
        self.learns = partition
        self.start(weight)

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def start(self, weight: torch.Tensor) -> None:
        low, width = self.ends(groups(weight))
        self.s1.copy_(logit(-low / width))

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        grouped = groups(weight)
        low, width = self.ends(grouped)
        centre = low + width * self.s1.sigmoid() if self.learns else torch.zeros_like(low)
        below, above = (centre - low).abs().clamp_min(1e-12), (low + width - centre).abs().clamp_min(1e-12)
        offset = grouped - centre
        scale = torch.where(offset < 0, below, above)
        place = (offset / scale).clamp(-1, 1)
        levels = torch.tensor(NF3, dtype=weight.dtype)
        nearest = levels[torch.bucketize(place.detach(), (levels[1:] + levels[:-1]) / 2)]
        return (centre + scale * (place + (nearest - place).detach())).flatten(1)


def quantize_activation(x: torch.Tensor, bits: int = 4, clip: float = 0.9) -> torch.Tensor:
    """Symmetric uniform, one scale a token, clipped at a share of the largest magnitude; the gradient passes."""
    top = 2 ** (bits - 1) - 1
    scale = (clip * x.detach().abs().amax(-1, keepdim=True) / top).clamp_min(1e-12)
    return x + ((x / scale).round().clamp(-top - 1, top) * scale - x).detach()


def quantize_cache(x: torch.Tensor, bits: int = 4, clip: float = 0.95, group: int = GROUP) -> torch.Tensor:
    """Asymmetric uniform, groups of 128 of the last axis or all of a shorter one; the gradient passes."""
    size = min(group, x.shape[-1])
    parts = x.detach().unflatten(-1, (-1, size))
    low, high = clip * parts.amin(-1, keepdim=True), clip * parts.amax(-1, keepdim=True)
    scale = ((high - low) / (2**bits - 1)).clamp_min(1e-12)
    coded = ((parts - low) / scale).round().clamp(0, 2**bits - 1) * scale + low
    return x + (coded.flatten(-2) - x).detach()

"""What is added up over the tokens of two streams: sums of inputs, tokens held out, how far the streams are apart."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from .moments import Moment
from .ranks import ALONE, Ranks


@dataclass
class Sums:
    """Sums over the tokens of a group's inputs: x of the original model, x' of the quantized one, rotated.

    Tokens of a matrix that writes to the residual stream are weighted by the reciprocal of the stream's mean square
    behind it: the next norm divides by its root. A first token whose stream is a hundred times as large as the others'
    would decide everything otherwise.

    Attributes:
        hessian: of x' x'^T.
        cross: of (x - x') x'^T; without a value where ``missing`` says more.
        missing: by matrix, float64 (rows, columns), of what is missing in its outputs, W (x - x') x'^T; of one that
            writes to the residual stream of
            (W (x - x') + r - r') x'^T with the stream r before the addition.
        writes: whether it is of such a matrix.
        by_outputs: whether ``missing`` is summed.
        held: the tokens held out; None where there are none.
    """

    hessian: Moment
    cross: Moment
    missing: dict[str, torch.Tensor] = field(default_factory=dict)
    writes: bool = False
    by_outputs: bool = False
    held: Held | None = None

    def add_up(self, ranks: Ranks, tokens: int, held: int, owner: int | None = None) -> None:
        """Add up over all ranks, but for ``missing``, whose rows each rank asks for by itself.

        Args:
            ranks: who has sums.
            tokens: that all of them have seen.
            held: tokens that all of them hold out.
            owner: who gets everything, ``missing`` and the tokens held out too; None for all.
        """
        if ranks.alone or not tokens:
            return
        device = self.device
        for moment in (self.hessian, self.cross) if not self.missing else (self.hessian,):
            moment.add_up(ranks, tokens, device, owner)
        if owner is not None:
            ranks.add(*self.missing.values(), owner=owner)
        if held:
            self.held = self.held or Held.none(self, device)
            if owner is not None:
                self.held = self.held.gathered(ranks, owner)

    def forget(self) -> None:
        """Give back their memory."""
        self.hessian.total = self.hessian.panels = self.cross.total = self.held = None
        self.missing.clear()

    @property
    def device(self) -> torch.device:
        """Where they are."""
        held = None if self.held is None else self.held.inputs
        totals = (self.hessian.total, self.hessian.panels, *self.missing.values(), held)
        return next((total.device for total in totals if total is not None), torch.device("cpu"))

    @property
    def differs(self) -> bool:
        """Whether the two models give different inputs."""
        return self.cross.total is not None and bool(self.cross.total.any())


@dataclass
class Held:
    """Tokens held out, in the basis and with the weights of the sums.

    Attributes:
        inputs: float32 (tokens, n), x'.
        difference: of the same shape, x - x'.
        written: float32 (tokens, hidden), r - r' where a matrix writes to the residual stream; else None.
    """

    inputs: torch.Tensor
    difference: torch.Tensor
    written: torch.Tensor | None

    @classmethod
    def none(cls, of: Sums, device: torch.device) -> Held:
        """No tokens, of a rank that holds out none where others do."""
        empty = torch.empty((0, of.hessian.columns), device=device)
        (rows,) = [total.shape[0] for total in of.missing.values()] if of.writes else (0,)
        return cls(empty, empty, torch.empty((0, rows), device=device) if of.writes else None)

    def gathered(self, ranks: Ranks, owner: int) -> Held | None:
        """Those of all ranks on the owner, None on the others."""
        inputs, difference = ranks.gather(owner, self.inputs), ranks.gather(owner, self.difference)
        written = None if self.written is None else ranks.gather(owner, self.written)
        return None if inputs is None or difference is None else Held(inputs, difference, written)

    def and_also(self, other: Held) -> Held:
        """These tokens and others."""

        written = None
        if self.written is not None and other.written is not None:
            written = torch.cat([self.written, other.written])
        return Held(torch.cat([self.inputs, other.inputs]), torch.cat([self.difference, other.difference]), written)


@dataclass
class Drift:
    """How far the quantized layer's outputs are from the original's.

    Attributes:
        tokens: how many.
        ratios: the sum over tokens of |h' - h|^2 / |h|^2.
    """

    tokens: int = 0
    ratios: float = 0.0

    def add(self, original: npt.NDArray[np.float32], quantized: npt.NDArray[np.float32]) -> None:
        """Outputs (windows, context, hidden) of both."""
        difference = np.square(quantized - original, dtype=np.float64).sum(axis=-1)
        energy = np.square(original, dtype=np.float64).sum(axis=-1)
        self.tokens += energy.size
        self.ratios += float(np.divide(difference, energy, out=np.zeros_like(energy), where=energy > 0).sum())

    def mean(self, ranks: Ranks = ALONE) -> float:
        """The mean over the tokens of all ranks; infinity where it is none."""
        tokens, ratios = ranks.numbers(self.tokens, self.ratios)
        mean = ratios / max(1, tokens)
        return mean if np.isfinite(mean) else float("inf")

"""Second moments of the inputs of a layer's matrices, collected while the layer runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from .inputs import Seen, Watch
from .layers import LayeredModel
from .moments import Moment, rotated
from .options import CalibrationOptions
from .ranks import Ranks

if TYPE_CHECKING:
    import torch


def add_up(moments: Sequence[Moment], ranks: Ranks, device: torch.device) -> None:
    """Add up second moments over all ranks; only the first has the sums then.

    Args:
        moments: the same on all.
        ranks: those that have seen other tokens.
        device: of the sums.
    """
    counts = ranks.numbers(*(moment.tokens for moment in moments))
    for moment, tokens in zip(moments, counts, strict=True):
        moment.add_up(ranks, tokens, device, 0)


class Collector:
    """Adds up the inputs of the matrices of one layer.

    Matrices that read one of the two norms share its statistics, and where all its readers are known, those are of
    the normalised input without the gain. Experts have their own.
    """

    def __init__(self, model: LayeredModel, number: int, layer: torch.nn.Module, options: CalibrationOptions) -> None:
        self._groups = model.layout.groups(number, layer)
        self._moments = {group.key: Moment(group.columns, options.full(group.columns)) for group in self._groups}
        self._device = model.device
        self._watch = Watch(model, number, layer, self._groups, self._add)

    def _add(self, seen: Seen) -> None:
        for group in seen.groups:
            rows = seen.rows(group)
            if rows.shape[0]:
                self._moments[group.key].add(rotated(rows))

    def add_up(self, ranks: Ranks) -> None:
        """Add up over all ranks; only the first has the sums then."""
        import torch

        with torch.inference_mode():  # in which they were made
            add_up(list(self._moments.values()), ranks, self._device)

    def statistics(self) -> dict[str, np.ndarray]:
        """The second moments by key."""
        return {key: moment.mean() for key, moment in self._moments.items()}

    def entries(self) -> dict[str, tuple[str, int, str | None]]:
        """Matrix -> key, tokens, and the norm whose gain is left out."""
        return {
            reader.entry: (group.key, self._moments[group.key].tokens, group.norm)
            for group in self._groups
            for reader in group.readers
        }

    def close(self) -> None:
        """Take the hooks off."""
        self._watch.__exit__()

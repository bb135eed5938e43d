"""Which windows of a text run together, which are held out, and which are whose."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from .ranks import Ranks

#: Windows that are held out at most. A text has parts that are unlike each other, so a few windows say too little.
HELD_WINDOWS: Final = 32
#: Tokens of them that are kept in memory, about: what they decide is known well by then.
HELD_TOKENS: Final = 4096

#: Windows by number, int64.
Batch = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Batches:
    """Windows that run together.

    Attributes:
        train: those that statistics are taken from; ``held``: those that are held out.
        elsewhere: how many windows other ranks hold out.
    """

    train: tuple[Batch, ...]
    held: tuple[Batch, ...]
    elsewhere: int = 0

    @property
    def all(self) -> tuple[Batch, ...]:
        return self.train + self.held

    def kept(self, context: int) -> slice:
        """Which of the tokens held out are kept, so that about :data:`HELD_TOKENS` are.

        The step is odd: windows whose length is a power of two are met at other places each.
        """
        tokens = (sum(map(len, self.held)) + self.elsewhere) * context
        return slice(0, tokens, max(1, tokens // HELD_TOKENS) | 1)


@dataclass(frozen=True)
class Share:
    """The windows of one rank: which of the text's, ascending; those that run together, by their places in these."""

    numbers: Batch
    batches: Batches


def share(windows: int, batch: int, ranks: Ranks) -> Share:
    """The windows of this rank: neighbours, as many of those held out as evens out the others."""
    if ranks.alone:
        return Share(np.arange(windows), split(windows, batch))
    train, held = parts(windows)
    own = train[ranks.part(len(train))]
    own_held = held[ranks.parts(len(held))[ranks.size - 1 - ranks.rank]]
    numbers = np.sort(np.concatenate([own, own_held]))
    places, places_held = (_batches(np.searchsorted(numbers, part), batch) for part in (own, own_held))
    return Share(numbers, Batches(places, places_held, len(held) - len(own_held)))


def split(windows: int, batch: int) -> Batches:
    """The windows of a process alone."""
    train, held = parts(windows)
    return Batches(_batches(train, batch), _batches(held, batch))


def parts(windows: int) -> tuple[Batch, Batch]:
    """The numbers of the windows that statistics are taken from, and of those that are held out: a tenth, spread
    evenly, one (not of a single one) to :data:`HELD_WINDOWS`."""
    count = min(windows - 1, max(1, min(windows // 10, HELD_WINDOWS)))
    # From the middle of as many parts of the text.
    held = ((np.arange(count) + 0.5) * windows / count).astype(np.int64) if count else np.zeros(0, dtype=np.int64)
    return np.setdiff1d(np.arange(windows), held), held


def _batches(numbers: Batch, batch: int) -> tuple[Batch, ...]:
    return tuple(numbers[start : start + batch] for start in range(0, len(numbers), batch))

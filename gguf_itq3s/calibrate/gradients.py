"""Sums of the gradients at the outputs of a layer's matrices, and what they are shrunk to where tokens are few."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

import numpy as np
import torch

from ..base.errors import UserError
from ..rounding.target import DAMPING, decompose
from .inputs import LayerMatrix
from .ranks import Ranks

#: Tokens for each row of an expert's matrix that weigh as much as what is known of it otherwise. By the gradients of
#: other tokens, 4 to 64 leave the least.
PRIOR: Final = 16


class GradientSums:
    """Sums of ``g g^T`` by matrix, with how many tokens they are of.

    Args:
        full: most rows of a matrix that is kept whole.
        block: rows of the blocks that are kept of another.
        device: where gradients are.
    """

    def __init__(self, full: int, block: int, device: torch.device | None = None) -> None:
        self._full, self._block, self._device = full, block, device
        self._totals: dict[str, list[torch.Tensor]] = {}
        self._tokens: dict[str, int] = {}
        self._before: dict[str, list[torch.Tensor]] = {}

    def hold_out(self) -> None:
        """From here on tokens say how far those before them are trusted (:meth:`shrink_to_identity`)."""
        self._before = {
            entry: [total.clone() for total in parts] for entry, parts in self._totals.items() if not _is_expert(entry)
        }

    def shrink_to_identity(self) -> None:
        """Shrink every matrix to a multiple of the identity, as far as tokens that were held out like it.

        How far is decided as for Hessians (:func:`gguf_itq3s.rounding.target.decompose`): by what feedback by the other
        tokens leaves of the cost of errors on these. The traces stay. Experts are shrunk to
        more than that (:mod:`.backward`).
        """
        for entry, parts in self._before.items():
            for before, total in zip(parts, self._totals[entry], strict=True):
                held = total - before
                mean = float(held.diagonal().mean())
                if not mean > 0 or not float(before.diagonal().mean()) > 0:
                    continue
                # Rows whose second moment is that of the tokens held out, however many these are.
                held.diagonal().add_(1e-6 * mean)
                lower, failed = torch.linalg.cholesky_ex(held)
                if failed:
                    continue
                damping, _ = decompose(before, lower.T.contiguous(), DAMPING)
                total.diagonal().add_(damping * float(total.diagonal().mean()))
                total /= 1 + damping
        self._before = {}

    def finish(self, readers: Sequence[LayerMatrix], tokens: int, ranks: Ranks) -> dict[str, np.ndarray]:
        """Add up over all ranks, shrink the matrices, no expert's, and divide them by the tokens.

        Returns:
            On the first rank what :meth:`means` gives, by name.
        """
        owners = self.reduce(readers, ranks)
        self.shrink_to_identity()
        found = dict(self.means(tokens))
        for entry, (owner, count) in owners.items():
            for name in (_name(entry, place) for place in range(count if owner else 0)):
                block = ranks.broadcast_object(found.pop(name, None), owner)
                if ranks.first:
                    found[name] = block
        return found

    def reduce(self, readers: Sequence[LayerMatrix], ranks: Ranks) -> dict[str, tuple[int, int]]:
        """Add up over all ranks, each matrix on one of them; nothing is left of it on the others.

        Those of experts go to the first rank, as they are shrunk to each other; the others are dealt out.

        Returns:
            The matrices that a token came to, who has them, and how many blocks; of a process alone none.
        """
        if ranks.alone:
            return {}
        entries = [reader.entry for reader in readers]
        # Of an expert that no token of this rank came to, another knows the rows.
        own = {
            entry: (self._tokens.get(entry, 0), [len(part) for part in self._totals.get(entry, [])])
            for entry in entries
        }
        everyone = ranks.all_gather_objects(own)
        held = not ranks.all(not self._before)
        if held and not self._before:
            self.hold_out()
        sizes: dict[str, list[int]] = {}
        for of in everyone:
            sizes |= {entry: parts for entry, (_, parts) in of.items() if parts}
        owners = _owners(sizes, ranks)
        for entry in owners:
            # How far experts are trusted is decided without the tokens held out.
            for totals in (self._totals, self._before) if held and not _is_expert(entry) else (self._totals,):
                parts = totals.setdefault(
                    entry, [torch.zeros((s, s), dtype=torch.float64, device=self._device) for s in sizes[entry]]
                )
                ranks.reduce(*parts, owner=owners[entry])
                if ranks.rank != owners[entry]:
                    del totals[entry]
            self._tokens[entry] = sum(of[entry][0] for of in everyone)
        self._before = {entry: parts for entry, parts in self._before.items() if entry in self._totals}
        return {entry: (owner, len(sizes[entry])) for entry, owner in owners.items()}

    def add(self, entry: str, gradient: torch.Tensor) -> None:
        """Gradients (..., rows) at the outputs of a matrix."""
        rows = gradient.reshape(-1, gradient.shape[-1]).float()
        parts = [part.T @ part for part in rows.split(self._sizes(rows.shape[1]), dim=1)]
        before = self._totals.get(entry)
        self._totals[entry] = [part.double() for part in parts] if before is None else [
            total.add_(part) for total, part in zip(before, parts, strict=True)
        ]  # fmt: skip
        self._tokens[entry] = self._tokens.get(entry, 0) + len(rows)

    def _sizes(self, rows: int) -> list[int]:
        """Of the blocks of a matrix with so many rows."""
        size = max(1, rows if rows <= self._full else self._block)
        return [min(size, rows - start) for start in range(0, rows, size)]

    def take(self, entry: str) -> tuple[list[torch.Tensor], int]:
        """The sums of a matrix, block by block, and of how many tokens they are; they are forgotten here."""
        return self._totals.pop(entry, []), self._tokens.get(entry, 0)

    def shrink_to_diagonal(self, entry: str) -> bool:
        """Shrink the matrix of gate or up of an expert to its diagonal, the more the fewer its tokens are.

        The neurons of one expert are not those of another: nothing else is known of it.

        Returns:
            Whether these were so few that its own count for less.
        """
        totals, count = self._totals.get(entry, []), self._tokens.get(entry, 0)
        if not count:
            return True
        prior = PRIOR * len(totals[0])
        for own in totals:
            own.lerp_(own.diagonal().diag(), prior / (count + prior))
        return count < prior

    def means(self, tokens: int) -> Iterator[tuple[str, np.ndarray]]:
        """The sums over so many tokens, divided by them, by name; each is forgotten."""
        while self._totals:
            entry, parts = self._totals.popitem()
            for place, total in enumerate(parts):
                yield _name(entry, place), (total / tokens).float().cpu().numpy()


def check_finite(folder: Path, matrices: Mapping[str, np.ndarray]) -> None:
    """Raise UserError if a gradient is NaN or infinite."""
    for name, matrix in matrices.items():
        if not np.isfinite(matrix).all():
            what = "gives gradients that are NaN or infinite"
            raise UserError(folder, what, "leave --fisher out", name.rpartition("/")[0])


def _name(entry: str, place: int) -> str:
    """Of a block of a matrix."""
    return f"{entry}/{place:05d}"


def _is_expert(entry: str) -> bool:
    return entry.endswith("]")


def _owners(sizes: Mapping[str, Sequence[int]], ranks: Ranks) -> dict[str, int]:
    """Who works at each matrix: the first rank at experts, the others go where least is to be decomposed."""
    owners = {entry: 0 for entry in sizes if _is_expert(entry)}
    work = {entry: sum(size**3 for size in parts) for entry, parts in sizes.items() if entry not in owners}
    load = [0] * ranks.size
    for entry in sorted(work, key=lambda entry: -work[entry]):
        owners[entry] = load.index(min(load))
        load[owners[entry]] += work[entry]
    return owners

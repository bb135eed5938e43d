"""A wide Hessian whose columns are shared out over ranks, and its decomposition by all of them.

Of a symmetric matrix (n, n) the upper half is kept, in panels of neighbouring columns, in turn on one rank and the
next. With S ranks each has ``n^2 / 2 S`` numbers, and does a share of ``n^3 / 3`` multiplications to decompose it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from ..codec.transform import BLOCK
from .ranks import Ranks

if TYPE_CHECKING:
    import torch

#: Columns of a panel: whole blocks of every rotation, so that panels can be rotated one by one.
PANEL: Final = BLOCK


@dataclass(frozen=True)
class Panels:
    """The panels of one rank; of its own tokens all of them, after :meth:`share` a share of those of all tokens.

    Attributes:
        columns: n.
        own: number of a panel -> float64 (end, width), its columns, from ``PANEL * number`` on, down to the end of the
            block on the diagonal.
        ranks: those that have the others.
        device: where they are; of more ranks than panels some have none.
    """

    columns: int
    own: dict[int, torch.Tensor]
    ranks: Ranks
    device: torch.device

    @classmethod
    def begun(cls, columns: int, device: torch.device, ranks: Ranks) -> Panels:
        """The sum over no tokens."""
        import torch

        own = _room(columns, range(-(-columns // PANEL)), torch.float64, device)
        for panel in own.values():
            panel.zero_()
        return cls(columns, own, ranks, device)

    def add(self, inputs: torch.Tensor) -> None:
        """Add ``x^T x``.

        Args:
            inputs: float32 (tokens, n), x.
        """
        for number, panel in self.own.items():
            end = len(panel)
            panel += inputs[:, :end].T @ inputs[:, PANEL * number : end]

    def share(self) -> None:
        """Add up over all ranks, each panel on the rank that keeps it."""
        import torch

        before, count, size = self.ranks.summed, len(self.own), self.ranks.size
        kept = _room(self.columns, range(self.ranks.rank, count, size), torch.float64, self.device)
        for first in range(0, count, size):
            parts = [self.own.pop(number) for number in range(first, min(first + size, count))]
            parts += [parts[0].new_empty(0)] * (size - len(parts))
            mine = self.ranks.add_parts(parts)
            if mine.numel():
                kept[first + self.ranks.rank].copy_(mine)
        self.own.update(kept)
        self.ranks.summed = before + 8 * self.columns**2

    def __len__(self) -> int:
        return self.columns

    def changed(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Panels:
        """Each panel, through a function that treats blocks of :data:`PANEL` rows or columns alike."""
        return replace(self, own={number: change(panel) for number, panel in self.own.items()})

    def mean(self) -> float:
        """Of the diagonal; the same on every rank."""
        diagonals = (float(panel[number * PANEL :].diagonal().sum()) for number, panel in self.own.items())
        return self.ranks.numbers(sum(diagonals))[0] / self.columns

    def decomposed(self, added: float, dtype: torch.dtype) -> torch.Tensor | None:
        """``U U^T``, U upper triangular, of the matrix with a number added to its diagonal.

        From the last panel to the first: its rank decomposes the block on the diagonal and solves for what is above it,
        all get the result and take what it explains off their own panels. A rank begins with the panel that is next,
        and sends it while it is at work at the rest.

        Args:
            added: the number.
            dtype: of the computation.

        Returns:
            U, float32 (1, n, n), the same bits on every rank; None if the matrix is not positive definite.
        """
        import torch

        count = -(-self.columns // PANEL)
        left = _room(self.columns, self.own, dtype, self.device)
        for number, panel in left.items():
            panel.copy_(self.own[number])
            panel[number * PANEL :].diagonal().add_(added)
        upper = torch.zeros((self.columns, self.columns), dtype=torch.float32, device=self.device)

        def begin(number: int) -> tuple[torch.Tensor, Callable[[], None]]:
            """Finish a panel where it is, and send it to all."""
            start, end = number * PANEL, min((number + 1) * PANEL, self.columns)
            panel = left.pop(number, None)
            if panel is None:
                panel = torch.empty((end, end - start), dtype=dtype, device=self.device)
            else:
                _finish(panel, start)
            return panel, self.ranks.begin_sending(number % self.ranks.size, panel)

        coming = begin(count - 1)
        for number in reversed(range(count)):
            panel, arrived = coming
            arrived()
            if not panel.isfinite().all():
                return None
            if number:
                if (following := left.get(number - 1)) is not None:
                    _take_off(following, panel, (number - 1) * PANEL)
                coming = begin(number - 1)
            for other, rest in left.items():
                _take_off(rest, panel, other * PANEL)
            upper[: len(panel), number * PANEL : number * PANEL + panel.shape[1]] = panel
        return upper[None]


def _room(columns: int, numbers: Iterable[int], dtype: torch.dtype, device: torch.device) -> dict[int, torch.Tensor]:
    """Room for some panels in one piece, which the system gets back as a whole.

    Args:
        columns: n.
        numbers: of the panels.
        dtype: of their values.
        device: where they are.
    """
    import torch

    shapes = {}
    for number in numbers:
        end = min((number + 1) * PANEL, columns)
        shapes[number] = (end, end - number * PANEL)
    room = torch.empty(sum(rows * width for rows, width in shapes.values()), dtype=dtype, device=device)
    pieces = room.split([rows * width for rows, width in shapes.values()])
    return {number: piece.view(shapes[number]) for number, piece in zip(shapes, pieces, strict=True)}


def _finish(panel: torch.Tensor, start: int) -> None:
    """Columns of the matrix, of which all that later columns explain is taken off, to columns of U, in place.

    Args:
        panel: (end, width), the block on the diagonal from row ``start`` on; without a number where it is not positive
            definite.
        start: its first column.
    """
    import torch

    # U U^T with U upper triangular is the Cholesky factorization with rows and columns in reverse order.
    lower, failed = torch.linalg.cholesky_ex(panel[start:].flip(-2, -1))
    if failed:
        panel.fill_(float("nan"))
        return
    square = lower.flip(-2, -1)
    panel[start:] = square
    if start:
        # Above it X U^T = H.
        panel[:start] = torch.linalg.solve_triangular(square.mT, panel[:start], upper=False, left=False)


def _take_off(panel: torch.Tensor, later: torch.Tensor, start: int) -> None:
    """Take off a panel what a finished one of later columns explains of it, in place.

    Args:
        panel: (end, width), columns from ``start`` on.
        later: columns of U.
        start: first column of the panel.
    """
    end = len(panel)
    panel.addmm_(later[:end], later[start:end].mT, alpha=-1)

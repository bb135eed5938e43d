"""The processes of one run: sums over all of them, what one has for the others, and whose share is whose.

A run without torchrun is one process, for which nothing here does anything. With it every process (rank) makes the same
calls in the same order; between them it works on its own windows, rows or experts. Sums are in the precision of the
tensors, and every rank gets the same bits: what is decided by them is decided alike everywhere.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

from ..base.errors import UserError

if TYPE_CHECKING:
    import torch

    from .watch import Watch

#: Numbers that are sent at a time, 32 MiB in float64: what is copied for it, and for progress to be seen.
PIECE: Final = 1 << 22


class Ranks:
    """The processes of a run, seen by one of them.

    Args:
        rank: of this process, from 0.
        size: how many there are.
        watch: what knows whether the others live; None for a process alone.

    Attributes:
        rank: as given.
        size: as given.
        summed: bytes of the tensors that were added up over all ranks, once each, for benchmarks.
    """

    def __init__(self, rank: int = 0, size: int = 1, watch: Watch | None = None) -> None:
        self.rank, self.size, self._watch = rank, size, watch
        self.summed = 0

    @property
    def alone(self) -> bool:
        """Whether there is one process."""
        return self.size == 1

    @property
    def first(self) -> bool:
        """Whether this is the process that writes files and shows progress."""
        return self.rank == 0

    def name(self, rank: int) -> str:
        """What messages call a rank: its number, its machine and its process."""
        return f"rank {rank} of {self.size}" if self._watch is None else self._watch.name(rank)

    # ------------------------------------------------------------------------------------------------------- shares

    def parts(self, count: int) -> list[slice]:
        """So many things in shares of neighbours, one a rank, sizes apart by one at most."""
        ends = np.cumsum([(count + self.size - 1 - rank) // self.size for rank in range(self.size)])
        return [slice(int(a), int(b)) for a, b in zip([0, *ends[:-1]], ends, strict=True)]

    def part(self, count: int) -> slice:
        """The share of this rank."""
        return self.parts(count)[self.rank]

    # --------------------------------------------------------------------------------------------------------- sums

    def add(self, *totals: torch.Tensor, owner: int | None = None) -> None:
        """Add up tensors over all ranks, in place.

        Args:
            totals: on every rank.
            owner: who gets the sums, what the others have is of no use then; None for all.
        """
        for piece in self._pieces(totals):
            self._reduce(piece, owner)

    def add_symmetric(self, total: torch.Tensor, owner: int | None = None) -> None:
        """The same of a symmetric matrix (n, n), of which one half is sent."""
        for panel in self._panels(total):
            self._reduce(panel, owner)

    def _reduce(self, piece: torch.Tensor, owner: int | None) -> None:
        import torch.distributed as dist

        with self._together():
            if owner is None:
                dist.all_reduce(piece)
            else:
                dist.reduce(piece, dst=owner)

    def add_parts(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """Add up tensors over all ranks, each on one of them.

        Args:
            parts: one for each rank, of the same shapes on all.

        Returns:
            The sum of what all ranks have for this one.
        """
        import torch
        import torch.distributed as dist

        own = parts[self.rank]
        if self.alone:
            return own
        self.summed += sum(part.numel() * part.element_size() for part in parts)
        sent = torch.cat([part.reshape(-1) for part in parts])
        found = own.new_empty((self.size, *own.shape))
        with self._together():
            sizes = [part.numel() for part in parts]
            dist.all_to_all_single(found.reshape(-1), sent, [own.numel()] * self.size, sizes)
        total = found[0]
        for other in found[1:]:
            total += other
        return total.clone()

    def numbers(self, *values: float) -> list[float]:
        """The sums of some numbers over all ranks, in float64."""
        if self.alone:
            return list(values)
        import torch

        total = torch.tensor(values, dtype=torch.float64)
        before = self.summed
        self.add(total)
        self.summed = before
        return [float(value) for value in total]

    # ------------------------------------------------------------------------------------------------------ messages

    def send(self, owner: int, array: npt.NDArray[Any]) -> None:
        """Give all ranks what an array holds on its owner, in place; its shape and type are the same everywhere."""
        if self.alone or not array.size:
            return
        import torch
        import torch.distributed as dist

        own = np.ascontiguousarray(array)
        flat = torch.from_numpy(own.reshape(-1).view(np.uint8))
        for start in range(0, len(flat), 8 * PIECE):
            with self._together():
                dist.broadcast(flat[start : start + 8 * PIECE], src=owner)
        if own is not array and self.rank != owner:
            array[...] = own

    def begin_sending(self, owner: int, tensor: torch.Tensor) -> Callable[[], None]:
        """Begin to give all ranks what a contiguous tensor holds on its owner, in place.

        Returns:
            What waits until it is there; the tensor is not to be changed before.
        """
        import torch.distributed as dist

        with self._together():
            sending = dist.broadcast(tensor, src=owner, async_op=True)

        def wait() -> None:
            with self._together():
                sending.wait()

        return wait

    def send_parts(self, array: npt.NDArray[Any], parts: Sequence[slice]) -> None:
        """Give all ranks the rows that each of them has: ``parts[rank]``, in place."""
        for owner, part in enumerate(parts) if not self.alone else ():
            self.send(owner, array[part])

    def tell(self, value: Any, owner: int = 0) -> Any:
        """What the owner has for all: any value that JSON can hold."""
        if self.alone:
            return value
        data = np.frombuffer(json.dumps(value).encode() if self.rank == owner else b"", dtype=np.uint8).copy()
        length = np.array([len(data)], dtype=np.int64)
        self.send(owner, length)
        data = data if self.rank == owner else np.empty(int(length[0]), dtype=np.uint8)
        self.send(owner, data)
        return json.loads(data.tobytes())

    def gather(self, owner: int, rows: torch.Tensor) -> torch.Tensor | None:
        """The rows of all ranks on the owner, rank after rank; None on the others.

        Args:
            owner: who gets them.
            rows: (k, ...), k of each rank's own, the rest of the shape alike.
        """
        if self.alone:
            return rows
        import torch
        import torch.distributed as dist

        counts = torch.zeros(self.size, dtype=torch.int64)
        counts[self.rank] = len(rows)
        with self._together():
            dist.all_reduce(counts)
            if self.rank != owner:
                if len(rows):
                    dist.send(rows.contiguous(), dst=owner)
                return None
            found = []
            for rank, count in enumerate(counts.tolist()):
                if rank == owner:
                    found.append(rows)
                elif count:
                    found.append(rows.new_empty((count, *rows.shape[1:])))
                    dist.recv(found[-1], src=rank)
        return torch.cat(found)

    def hand(self, source: int, owner: int, array: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Give one rank what another has, in place; the others do nothing."""
        if source != owner and self.rank in (source, owner):
            import torch
            import torch.distributed as dist

            flat = torch.from_numpy(array.reshape(-1).view(np.uint8))
            with self._together():
                if self.rank == source:
                    dist.send(flat, dst=owner)
                else:
                    dist.recv(flat, src=source)
        return array

    def meet(self) -> None:
        """Wait for all."""
        self.numbers(0.0)

    def all(self, mine: bool) -> bool:
        """Whether something is so on every rank."""
        return self.numbers(float(mine))[0] == self.size

    def every(self, mine: bool) -> list[bool]:
        """What is so on each rank."""
        own = [float(mine and rank == self.rank) for rank in range(self.size)]
        return [value > 0 for value in self.numbers(*own)]

    def agree(self, place: Path, **what: str) -> None:
        """Refuse ranks that would do another piece of work.

        Args:
            place: for the message.
            what: by name, what has to be the same on all.

        Raises:
            UserError: on all ranks, that names one that differs from rank 0.
        """
        if self._watch is None:
            return
        every = self._watch.exchange(what)
        for rank, theirs in enumerate(every):
            for name, value in theirs.items():
                if value != every[0].get(name):
                    problem = f"{self.name(rank)} has another {name.replace('_', ' ')} than rank 0"
                    remedy = "start all with the same program, files and options"
                    raise of_all(UserError(place, problem, remedy))

    @contextmanager
    def _together(self) -> Iterator[None]:
        """A call that needs the others.

        Raises:
            UserError: one of them has ended.
        """
        try:
            yield
        except RuntimeError as error:
            assert self._watch is not None
            self._watch.explain(error)

    def _pieces(self, totals: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
        """Parts of tensors, as views or, of what is not contiguous, copies that are put back."""
        for total in totals if not self.alone else ():
            self.summed += total.numel() * total.element_size()
            flat = total.contiguous().reshape(-1)
            for start in range(0, flat.numel(), PIECE):
                yield flat[start : start + PIECE]
            if not total.is_contiguous():
                total.copy_(flat.reshape(total.shape))

    def _panels(self, total: torch.Tensor) -> Iterator[torch.Tensor]:
        """The upper half of a symmetric matrix, rows by rows; each panel is put back with its transpose."""
        if self.alone:
            return
        n = len(total)
        self.summed += total.numel() * total.element_size()
        step = max(1, PIECE // n)
        for start in range(0, n, step):
            end = min(start + step, n)
            panel = total[start:end, start:].contiguous()
            yield panel
            total[start:end, start:] = panel
            total[end:, start:end] = panel[:, end - start :].T


#: A process alone.
ALONE: Final = Ranks()


def of_all(error: UserError) -> UserError:
    """An error that is not one rank's: messages do not name who found it."""
    error.__dict__["of_all"] = True
    return error

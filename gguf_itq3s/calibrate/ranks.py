"""The processes of one run, as torchrun starts them: sums over all of them, what one has for the others, shares.

A run without torchrun is one process, for which nothing here does anything. With it every process (rank) makes the same
calls in the same order; between them it works on its own windows, rows or experts. Sums are in the precision of the
tensors, and every rank gets the same bits: what is decided by them is decided alike everywhere.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TextIO

import numpy as np
import numpy.typing as npt

from .. import __version__
from ..base.errors import UserError
from ..base.journal import sources, write_text
from ..codec.native import processors

if TYPE_CHECKING:
    import torch

#: What one rank does while the others wait may take hours; torchrun ends them where one has ended.
_TIMEOUT: Final = timedelta(hours=6)
_NEEDED: Final = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_REMEDY: Final = "what is finished is kept: the same command goes on, with any number of processes"
_OWN: Final = re.compile(r"rank-\d+-of-(\d+)")


class Ranks:
    """The processes of a run, seen by one of them.

    Args:
        place: for messages, what the run writes.
    """

    def __init__(self, rank: int = 0, size: int = 1, place: Path | None = None) -> None:
        self.rank, self.size, self._place = rank, size, place

    @property
    def alone(self) -> bool:
        """Whether there is one process."""
        return self.size == 1

    @property
    def first(self) -> bool:
        """Whether this is the process that writes files and shows progress."""
        return self.rank == 0

    def parts(self, count: int) -> list[slice]:
        """So many things in shares of neighbours, one a rank, sizes apart by one at most."""
        ends = np.cumsum([(count + self.size - 1 - rank) // self.size for rank in range(self.size)])
        return [slice(int(a), int(b)) for a, b in zip([0, *ends[:-1]], ends, strict=True)]

    def part(self, count: int) -> slice:
        """The share of this rank."""
        return self.parts(count)[self.rank]

    def reduce(self, *totals: torch.Tensor, owner: int | None = None) -> None:
        """Add up contiguous tensors over all ranks, in place; the owner gets the sums, without one all do."""
        for total in totals if not self.alone else ():
            with self._connected() as dist:
                if owner is None:
                    dist.all_reduce(total)
                else:
                    dist.reduce(total, dst=owner)

    def sums(self, *values: float) -> list[float]:
        """The sums of some numbers over all ranks, in float64."""
        if self.alone:
            return list(values)
        import torch

        total = torch.tensor(values, dtype=torch.float64)
        self.reduce(total)
        return [float(value) for value in total]

    def broadcast_object(self, value: Any, owner: int = 0) -> Any:
        """What the owner has for all."""
        if self.alone:
            return value
        found = [value]
        with self._connected() as dist:
            dist.broadcast_object_list(found, src=owner)
        return found[0]

    def all_gather_objects(self, value: Any) -> list[Any]:
        """What each rank has, on all of them."""
        found = [value] * self.size
        if not self.alone:
            with self._connected() as dist:
                dist.all_gather_object(found, value)
        return found

    def all_gather(self, rows: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """The rows (k, ...) of all ranks, rank after rank; k is each rank's own."""
        return rows if self.alone else np.concatenate(self.all_gather_objects(rows))

    def gather(self, rows: torch.Tensor, owner: int) -> torch.Tensor | None:
        """The rows (k, ...) of all ranks on the owner, rank after rank; None on the others."""
        import torch

        found = [None] * self.size if self.rank == owner else None
        with self._connected() as dist:
            dist.gather_object(rows.cpu(), found, dst=owner)
        return torch.cat(found).to(rows.device) if found else None

    def barrier(self) -> None:
        """Wait for all."""
        self.sums(0.0)

    def all(self, mine: bool) -> bool:
        """Whether something is so on every rank."""
        return self.sums(float(mine))[0] == self.size

    def agree(self, place: Path, **what: str) -> None:
        """Raise UserError on all ranks if one has another ``what`` than rank 0."""
        found = self.all_gather_objects(what)
        for rank, theirs in enumerate(found):
            for name, value in theirs.items():
                if value != found[0].get(name):
                    problem = f"rank {rank} of {self.size} has another {name.replace('_', ' ')} than rank 0"
                    remedy = "start all with the same program, files and options"
                    raise of_all(UserError(place, problem, remedy))

    @contextmanager
    def _connected(self) -> Iterator[Any]:
        """``torch.distributed``, for a call that needs the others; raises UserError if one of them has ended."""
        import torch.distributed as dist

        try:
            yield dist
        except RuntimeError as error:
            assert self._place is not None
            what = "another process of this run has ended, which says why, or cannot be reached"
            raise of_all(UserError(self._place, what, _REMEDY)) from error


#: A process alone.
ALONE: Final = Ranks()


def of_all(error: UserError) -> UserError:
    """An error that every rank finds: the first one says it."""
    error.__dict__["of_all"] = True
    return error


# ------------------------------------------------------------------------------------------------------------ torchrun


def world_size() -> int:
    """How many processes torchrun has started, 1 without it."""
    value = os.environ.get("WORLD_SIZE", "1")
    return int(value) if value.isdecimal() and all(name in os.environ for name in _NEEDED) else 1


def processes_here() -> int:
    """How many of them share this machine's processors."""
    value = os.environ.get("LOCAL_WORLD_SIZE", "1")
    return max(1, int(value)) if value.isdecimal() and world_size() > 1 else 1


def own_processors() -> int:
    """The share of this process in the processors that it may use."""
    return max(1, processors() // processes_here())


def own_batch(batch: int, device: str) -> int:
    """Windows that a process runs at a time: those of one machine share its memory, GPUs have their own."""
    return max(1, batch // processes_here()) if device == "cpu" else batch


@contextmanager
def joined(place: Path, device: str, messages: TextIO) -> Iterator[tuple[Ranks, TextIO]]:
    """The processes of this run, as long as the context lasts; without torchrun this one alone.

    Yields:
        The ranks, and where this one's progress goes: nowhere but on the first.

    Raises:
        UserError: the others cannot be reached, or the device cannot be shared.
        SystemExit: the first rank says why the run has ended.
    """
    if world_size() == 1:
        yield ALONE, messages
        return
    import torch
    import torch.distributed as dist

    kind = torch.device(device).type
    if kind not in ("cpu", "cuda"):
        raise UserError(place, f"cannot be calibrated by several processes on --device {device}", "give cpu or cuda")
    if kind == "cuda" and torch.cuda.is_available():
        torch.cuda.set_device(torch.device(device))
    # torchrun asks for one thread a process where nothing is said, whatever the machine has.
    if os.environ.get("OMP_NUM_THREADS", "1") == "1":
        torch.set_num_threads(own_processors())
    try:
        dist.init_process_group("cpu:gloo,cuda:nccl" if kind == "cuda" else "gloo", timeout=_TIMEOUT)
    except (RuntimeError, ValueError, OSError) as error:
        remedy = "check --master-addr and --rdzv-endpoint of torchrun, and that the machines reach each other"
        what = f"rank {os.environ['RANK']} of {world_size()} cannot reach the others: {error}"
        raise UserError(place, what, remedy) from error
    ranks = Ranks(dist.get_rank(), dist.get_world_size(), place)
    with open(os.devnull, "w", encoding="utf-8") as nowhere:
        try:
            ranks.agree(place, version=f"{__version__} {sources()}", torch=str(torch.__version__))
            yield ranks, messages if ranks.first else nowhere
            ranks.barrier()
        except (UserError, KeyboardInterrupt) as error:
            if error.__dict__.get("of_all") or isinstance(error, KeyboardInterrupt):
                if not ranks.first:
                    raise SystemExit(1) from None
            else:
                error.args = (f"rank {ranks.rank} of {ranks.size}: {error}",)
            raise
    dist.destroy_process_group()


# ---------------------------------------------------------------------------------- what each process keeps


def is_own(name: str) -> bool:
    """Whether a folder of that name is a rank's."""
    return _OWN.fullmatch(name) is not None


def own_folder(folder: Path, ranks: Ranks) -> Path:
    """Where a rank keeps what is its own, on its machine: a folder in the folder of work, or that itself of one alone.

    Whose share of the text a folder has follows from the number of processes, so its name has that.
    """
    return folder if ranks.alone else folder / f"rank-{ranks.rank:04d}-of-{ranks.size:04d}"


def keep_own(folder: Path, run: str, ranks: Ranks, kind: str, names: Sequence[str]) -> Path:
    """Make :func:`own_folder` with the folders ``names``: with what it has left of this run, or empty.

    Args:
        run: key of the run, which stands beside what is kept.
        ranks: who takes part; what is of another number is removed.
        kind: of what is kept, of which there may be several in one folder of work.

    Raises:
        OSError: it cannot be written.
    """
    if os.environ.get("LOCAL_RANK", "0") == "0" and folder.is_dir():
        for path in folder.iterdir():
            found = _OWN.fullmatch(path.name)
            if found and (ranks.alone or int(found[1]) != ranks.size):
                shutil.rmtree(path, ignore_errors=True)
    own = own_folder(folder, ranks)
    if ranks.alone:
        return own
    note = own / f"{kind}.key"
    if not (note.is_file() and note.read_text(encoding="utf-8", errors="replace") == run):
        for name in names:
            shutil.rmtree(own / name, ignore_errors=True)
        own.mkdir(parents=True, exist_ok=True)
        write_text(note, run)
    for name in names:
        (own / name).mkdir(exist_ok=True)
    return own


def leave_own(folder: Path, ranks: Ranks) -> None:
    """Take away what was this rank's own, once all are done."""
    ranks.barrier()
    if not ranks.alone:
        shutil.rmtree(own_folder(folder, ranks), ignore_errors=True)
        if not ranks.first:  # on a machine without the first's files the folder is empty now
            with contextlib.suppress(OSError):
                folder.rmdir()

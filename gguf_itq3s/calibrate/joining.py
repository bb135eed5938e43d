"""Becoming one of the processes that torchrun has started, and leaving them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Final, TextIO

from .. import __version__
from ..base.errors import UserError
from ..base.journal import sources
from ..codec.native import processors
from .ranks import ALONE, Ranks
from .watch import Watch

#: What one rank does while the others wait takes minutes; whether it lives is seen otherwise.
_TIMEOUT: Final = timedelta(hours=6)
_NEEDED: Final = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


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

    Args:
        place: what is written, for messages.
        device: torch device of the work.
        messages: where progress goes.

    Yields:
        The ranks, and where this one's progress goes: nowhere but on the first.

    Raises:
        UserError: the others cannot be reached, or the device cannot be shared.
        SystemExit: another rank says why the run has ended.
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
    rank, size = int(os.environ["RANK"]), world_size()
    # torchrun asks for one thread a process where nothing is said, whatever the machine has.
    if os.environ.get("OMP_NUM_THREADS", "1") == "1":
        torch.set_num_threads(own_processors())
    try:
        store, rank, size = next(dist.rendezvous("env://", rank, size, timeout=_TIMEOUT))
        watch = Watch(dist.PrefixStore("itq", store).clone(), rank, size, place)
        backend = "cpu:gloo,cuda:nccl" if kind == "cuda" else "gloo"
        dist.init_process_group(
            backend, store=dist.PrefixStore("group", store), rank=rank, world_size=size, timeout=_TIMEOUT
        )
    except (RuntimeError, ValueError, OSError) as error:
        remedy = "check --master-addr and --rdzv-endpoint of torchrun, and that the machines reach each other"
        raise UserError(place, f"rank {rank} of {size} cannot reach the others: {error}", remedy) from error
    ranks = Ranks(rank, size, watch)
    watch.begin()
    with open(os.devnull, "w", encoding="utf-8") as nowhere:
        try:
            ranks.agree(place, version=f"{__version__} {sources()}", torch=str(torch.__version__))
            yield ranks, messages if ranks.first else nowhere
            ranks.meet()
        except SystemExit:
            watch.leave()
            raise
        except BaseException as error:
            _leave(watch, ranks, error)
            raise
    watch.finish()
    dist.destroy_process_group()


def _leave(watch: Watch, ranks: Ranks, error: BaseException) -> None:
    """End with an error that one rank names.

    Raises:
        SystemExit: it is for another to speak.
        UserError: this rank was ended because another is gone.
    """
    problem = watch.lost(1.0) if isinstance(error, KeyboardInterrupt) else None
    if not watch.leave():
        raise SystemExit(1) from None
    if problem is not None:
        raise problem from None
    if isinstance(error, UserError) and not error.__dict__.get("of_all"):
        error.args = (f"{ranks.name(ranks.rank)}: {error}",)

"""Whether the other processes of a run live, and which of them says why the run has ended.

Every rank shows in torchrun's store that it lives, and looks for the others twice a second: a process of the same
machine that is gone is seen at once, one of another machine after :data:`SILENCE`. A rank that ends with an error says
so in the store before. The first to find out prints one line; all end.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, NoReturn

from ..base.errors import UserError
from .ranks import of_all

#: Seconds between two looks.
BEAT: Final = 0.5
#: Seconds without a sign of life after which a process of another machine counts as gone.
SILENCE: Final = 60.0
#: Seconds that the main thread has to notice by itself, and to leave in order.
GRACE: Final = 3.0
#: Seconds that are spent on finding out who is gone, where something has failed.
SEARCH: Final = 5.0

_REMEDY: Final = "what is finished is kept: the same command goes on, with any number of processes"


class Watch:
    """One rank's view of the others.

    Args:
        store: what torchrun's processes share, a ``torch.distributed.Store``.
        rank: of this process.
        size: how many there are.
        place: for messages, what the run writes.
        end: ends the process at once, with an exit code.
    """

    def __init__(self, store: Any, rank: int, size: int, place: Path, end: Callable[[int], object] = os._exit) -> None:
        self._store, self._rank, self._size, self._place, self._end = store, rank, size, place, end
        self._thread: threading.Thread | None = None
        self._over = threading.Event()
        self._rounds = 0
        self._seen = [("", time.monotonic())] * size  # the last sign of each, and when it came
        me = {"host": socket.gethostname(), "process": os.getpid()}
        self._every: list[dict[str, Any]] = [me] * size
        self._every = self.exchange(me)

    def name(self, rank: int) -> str:
        """A rank's number, machine and process."""
        there = self._every[rank]
        return f"rank {rank} of {self._size} ({there['host']}, process {there['process']})"

    def exchange(self, value: Any) -> list[Any]:
        """A small value of every rank, as JSON.

        Raises:
            UserError: a rank is gone.
            SystemExit: a rank has ended and says why.
        """
        self._rounds += 1
        key = f"exchange/{self._rounds}"
        try:
            self._store.set(f"{key}/{self._rank}", json.dumps(value))
            return [json.loads(self._store.get(f"{key}/{rank}")) for rank in range(self._size)]
        except RuntimeError as error:
            self.explain(error)

    def begin(self) -> None:
        """Look for the others from now on."""
        self._beat(0)
        self.exchange(None)  # all have begun
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()

    def finish(self) -> None:
        """The work is done, by all of them."""
        self._over.set()
        if self._thread is not None:
            self._thread.join()
        self._store.set(f"left/{self._rank}", "")

    def leave(self) -> bool:
        """This rank ends with an error, or is interrupted.

        Returns:
            Whether it is the one that speaks.
        """
        self._over.set()
        speaks = self._first()
        with contextlib.suppress(Exception):
            self._store.set(f"left/{self._rank}", "")
        if self._rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
            time.sleep(2 * BEAT)  # the store ends with this process: the others are to find out before
        return speaks

    def lost(self, seconds: float) -> UserError | None:
        """The error for a rank that has ended and said nothing.

        Args:
            seconds: how long to look for one.

        Raises:
            SystemExit: a rank has ended and does say why.
        """
        stop = time.monotonic() + seconds
        while True:
            problem = self._gone()
            if problem is not None or time.monotonic() >= stop:
                return problem
            time.sleep(BEAT / 5)

    def explain(self, error: RuntimeError) -> NoReturn:
        """Say why a call that needs the others has failed.

        Raises:
            UserError: a rank is gone, or cannot be reached.
            SystemExit: a rank has ended and says why.
        """
        problem = self.lost(SEARCH)
        if problem is None:
            what = f"a process of this run cannot be reached: {str(error).strip() or type(error).__name__}"
            problem = self._error(what)
        raise problem from error

    def _error(self, what: str) -> UserError:
        return of_all(UserError(self._place, what, _REMEDY))

    def _silence(self) -> UserError:
        """The error where the store is gone, which is where rank 0 is."""
        return self._error(f"{self.name(0)} has ended: nothing is heard of it")

    def _beat(self, number: int) -> None:
        self._store.set(f"beat/{self._rank}", str(number))

    def _first(self) -> bool:
        try:
            return bool(self._store.add("speaks", 1) == 1)
        except Exception:  # the store went with rank 0: one of the others speaks
            return self._rank == min(1, self._size - 1)

    def _gone(self) -> UserError | None:
        """The error for a rank that is gone.

        Raises:
            SystemExit: it has said why itself.
        """
        here = self._every[self._rank]["host"]
        others = [rank for rank in range(self._size) if rank != self._rank]
        try:
            if any(self._store.check([f"left/{rank}"]) for rank in others):
                raise SystemExit(1)
            beats = self._store.multi_get([f"beat/{rank}" for rank in others])
        except SystemExit:
            raise
        except Exception:
            return self._silence()
        now = time.monotonic()
        for rank, beat in zip(others, beats, strict=True):
            if beat != self._seen[rank][0]:
                self._seen[rank] = (beat, now)
            if self._every[rank]["host"] == here and not _lives(self._every[rank]["process"]):
                # It may have said so in between.
                if self._store.check([f"left/{rank}"]):
                    raise SystemExit(1)
                return self._error(f"{self.name(rank)} has ended without a word: it was killed, or had no memory left")
            if now - self._seen[rank][1] > SILENCE:
                return self._error(f"{self.name(rank)} has not been heard of for {SILENCE:.0f} seconds")
        return None

    def _look(self) -> None:
        """In a thread of its own: show that this rank lives, and end the process when another one does not."""
        number = 0
        while not self._over.wait(BEAT):
            number += 1
            line = None
            try:
                self._beat(number)
                problem = self._gone()
                if problem is None:
                    continue
                line = f"error: {problem}"
            except SystemExit:
                pass
            except Exception:
                line = f"error: {self._silence()}"
            # The main thread may be in a call that fails in a moment; it leaves in better order.
            if self._over.wait(GRACE):
                return
            if line is not None and self._first():
                print(line, file=sys.stderr, flush=True)
            self._end(1)
            return


def _lives(process: int) -> bool:
    """Whether a process of this machine is there and has not ended."""
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    # Ended, and not yet asked for by its parent.
    with contextlib.suppress(OSError, IndexError):
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return True

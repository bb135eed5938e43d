"""Several processes of one run, as torchrun would start them, forked from the process of the tests."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path

from gguf_itq3s.base.errors import report_errors
from gguf_itq3s.calibrate.ranks import Ranks, joined
from killing import Outcome, start

#: Seconds in which every process has to end once one of them has: on a quiet machine it is three to five.
BOUND = 60.0

#: What makes gloo meet on this machine, whose name need not be known to any server.
LOOPBACK = {"GLOO_SOCKET_IFNAME": "lo"} if sys.platform == "linux" else {}


def together(
    size: int, work: Callable[[Ranks], object], folder: Path, kill: tuple[int, float] | None = None
) -> list[Outcome]:
    """Run ``work`` in so many processes and wait for all.

    Args:
        size: how many.
        work: what each does with its ranks; an exception ends it as a command ends, with one line and code 1.
        folder: for logs.
        kill: a rank, and after how many seconds it is killed.

    Returns:
        How each ended.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]

    def of(rank: int) -> Callable[[], object]:
        environment = {
            "RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size,
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": 1, **LOOPBACK,
        }  # fmt: skip

        @report_errors
        def command() -> int:
            with joined(folder / "out", "cpu", sys.stderr) as (ranks, _):
                work(ranks)
            return 0

        def process() -> object:
            os.environ.update({name: str(value) for name, value in environment.items()})
            try:
                return command()
            except SystemExit as ended:
                return ended.code

        return process

    children = [start(of(rank), folder / f"log-{rank}") for rank in range(size)]
    if kill is not None:
        rank, after = kill
        time.sleep(max(0.0, after - (time.monotonic() - children[rank].started)))
        with contextlib.suppress(ProcessLookupError):
            os.killpg(children[rank].pid, signal.SIGKILL)
    return [child.wait() for child in children]


def errors(outcomes: list[Outcome]) -> list[str]:
    """The error lines of all processes."""
    return [line for outcome in outcomes for line in outcome.said.splitlines() if line.startswith("error: ")]

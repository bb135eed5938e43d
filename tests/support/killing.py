"""Work in a process of its own that is killed while it is at it.

The child is a fork of the tests' process, with everything imported, so that a kill hits the work and not the imports.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

Record = Callable[..., None]
#: Mostly the signal that leaves no time to tidy up, sometimes those that do.
SIGNALS = (signal.SIGKILL, signal.SIGKILL, signal.SIGKILL, signal.SIGINT)


def content(folder: Path) -> dict[str, str]:
    """Name -> hash of every file below a folder, or of a file."""
    files = [folder] if folder.is_file() else sorted(p for p in folder.rglob("*") if p.is_file())
    return {str(p.relative_to(folder)): hashlib.sha256(p.read_bytes()).hexdigest() for p in files}


@dataclass(frozen=True)
class Outcome:
    """How a child ended.

    Attributes:
        code: its exit code, negative for the signal that ended it.
        said: its stderr.
        seconds: how long it ran.
    """

    code: int
    said: str
    seconds: float


@dataclass(frozen=True)
class Child:
    """A child that was started, by its process id; ``log`` gets its output."""

    pid: int
    log: Path
    started: float

    def wait(self) -> Outcome:
        """Wait for its end."""
        _, status = os.waitpid(self.pid, 0)
        seconds = time.monotonic() - self.started
        return Outcome(os.waitstatus_to_exitcode(status), self.log.read_text(errors="replace"), seconds)


def start(work: Callable[[], object], log: Path) -> Child:
    """Run ``work`` in a child: its return value is the exit code, None and True for 0.

    To be called while there is one thread only: what another held would be held in the child for ever.
    """
    started = time.monotonic()
    pid = os.fork()
    if pid == 0:
        code = 70
        try:
            os.setsid()
            signal.alarm(900)  # a child that hangs is ended, and seen
            handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(handle, 1)
            os.dup2(handle, 2)
            sys.stdout, sys.stderr = os.fdopen(1, "w", closefd=False), os.fdopen(2, "w", closefd=False)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            result = work()
            code = int(result) if isinstance(result, int) and not isinstance(result, bool) else 0
        except BaseException as error:
            print(f"{type(error).__name__}: {error}", file=sys.stderr)
            code = 71
        finally:
            try:
                # An interrupt that comes as late as this must not let the child go on as the process of the tests.
                signal.signal(signal.SIGINT, signal.SIG_IGN)
                sys.stdout.flush()
                sys.stderr.flush()
            finally:
                os._exit(code)
    return Child(pid, log, started)


def child(work: Callable[[], object], log: Path, *, after: float | None = None, by: int = signal.SIGKILL) -> Outcome:
    """Run ``work`` in a child, as :func:`start` does, and wait for it.

    Args:
        work: what it does.
        log: file that gets its output.
        after: seconds until it is sent a signal.
        by: the signal.
    """
    running = start(work, log)
    if after is not None:
        time.sleep(max(0.0, after - (time.monotonic() - running.started)))
        with contextlib.suppress(ProcessLookupError):
            os.killpg(running.pid, by)
    return running.wait()


def kill_often(
    work: Callable[[], object],
    rounds: int,
    folder: Path,
    *,
    check: Callable[[Outcome], None],
    fresh: Callable[[], None],
) -> int:
    """Kill the work at random points, let the last try of each round finish, and check what is there after every try.

    Args:
        work: what a process does.
        rounds: kills in all; a round has one to three.
        folder: for logs.
        check: called after every try.
        fresh: takes away what an earlier round made.

    Returns:
        How many kills hit a process that was still at work.
    """
    chance = random.Random(rounds)
    fresh()
    whole = max(child(work, folder / "log").seconds for _ in range(2))
    hits = 0
    while hits < rounds:
        fresh()
        for _ in range(chance.randint(1, 3)):
            outcome = child(work, folder / "log", after=chance.uniform(0, whole), by=chance.choice(SIGNALS))
            hits += outcome.code != 0
            check(outcome)
        outcome = child(work, folder / "log")
        assert outcome.code == 0, outcome.said
        check(outcome)
    return hits


@contextlib.contextmanager
def small_disk(folder: Path, size: int) -> Iterator[bool]:
    """A file system of that many bytes at ``folder``; yields False where there is no right to mount one."""
    folder.mkdir(parents=True, exist_ok=True)
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
    with contextlib.suppress(OSError):
        if subprocess.run(mount, capture_output=True).returncode == 0:
            try:
                yield True
            finally:
                subprocess.run(["umount", "-l", str(folder)], capture_output=True)
            return
    yield False


@contextlib.contextmanager
def read_only(folder: Path) -> Iterator[None]:
    """The folder without the right to write in it, for root too where it may mount."""
    with contextlib.suppress(OSError):
        for command in (["mount", "--bind", folder, folder], ["mount", "-o", "remount,ro,bind", folder]):
            done = subprocess.run([str(part) for part in command], capture_output=True)
        if done.returncode == 0:
            try:
                yield
            finally:
                subprocess.run(["umount", "-l", str(folder)], capture_output=True)
            return
    folder.chmod(0o555)
    try:
        yield
    finally:
        folder.chmod(0o755)

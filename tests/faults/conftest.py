"""Faults from outside: how often each is tried, and the record of what came of them."""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import tqdm

# No thread of its own: the tests of this folder fork.
tqdm.tqdm.monitor_interval = 0
# Its default lock is one that processes share: a child that is killed while it holds it would stop the others.
tqdm.tqdm.set_lock(threading.RLock())

#: Kills of each kind where --rounds is not given: what continuous integration has time for.
ROUNDS = 6


@pytest.fixture(scope="session")
def rounds(pytestconfig: pytest.Config) -> int:
    """How often a process is killed in each test."""
    return int(pytestconfig.getoption("--rounds") or ROUNDS)


@pytest.fixture(scope="session")
def record(pytestconfig: pytest.Config) -> Iterator[Callable[..., None]]:
    """``record(test, key=count)`` adds to the counts that ``--record FILE`` writes as JSON."""
    counts: dict[str, Counter[str]] = {}

    def add(test: str, **values: int) -> None:
        counts.setdefault(test, Counter()).update(values)

    yield add
    if name := pytestconfig.getoption("--record"):
        found = {test: dict(values) for test, values in sorted(counts.items())}
        Path(name).write_text(json.dumps(found, indent=1) + "\n")

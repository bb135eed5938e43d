"""Kills of single processes of a run: the others end, nothing is left half-written, the run goes on to its bytes."""

from __future__ import annotations

import io
import random
import shutil
import time
from collections.abc import Callable
from pathlib import Path

from checkpoints import NOVEL
from gguf_itq3s.convert.options import ConvertOptions
from gguf_itq3s.convert.pipeline import convert_together
from killing import Record, content
from together import BOUND, errors, together


def test_kills_of_ranks(uneven: Callable[[str], Path], tmp_path: Path, rounds: int, record: Record) -> None:
    out = tmp_path / "out" / "x.gguf"
    options = ConvertOptions.of(
        uneven("llama"), out, calibrate=(NOVEL,), fisher=True, effort="fast", tokens=1280, context=64, batch=4,
    )  # fmt: skip

    def work(ranks: object) -> None:
        convert_together(options, io.StringIO(), ranks)  # type: ignore[arg-type]

    def fresh() -> None:
        shutil.rmtree(out.parent, ignore_errors=True)
        out.parent.mkdir()

    chance = random.Random(rounds)
    fresh()
    started = time.monotonic()
    assert [outcome.code for outcome in together(2, work, tmp_path)] == [0, 0]
    whole, seconds = content(out.parent), time.monotonic() - started
    hits = slowest = 0
    while hits < rounds:
        fresh()
        for _ in range(chance.randint(1, 2)):
            dead, after = chance.randrange(2), chance.uniform(0.2, seconds)
            outcomes = together(2, work, tmp_path, kill=(dead, after))
            killed = outcomes[dead].code == -9
            if not killed:  # it was done before
                break
            hits += 1
            # The other has ended too; or it was done with its part.
            other = outcomes[1 - dead]
            waited = round(other.seconds - min(after, other.seconds))
            slowest = max(slowest, waited)
            assert waited < BOUND and other.code in (0, 1)
            lines = errors(outcomes)
            said = ("another process of this run has ended", "cannot reach the others")
            assert len(lines) <= (other.code == 1) and all(any(what in line for what in said) for line in lines), lines
            assert "Traceback" not in other.said
        outcomes = together(2, work, tmp_path)
        assert [outcome.code for outcome in outcomes] == [0, 0], [outcome.said for outcome in outcomes]
        assert content(out.parent) == whole
    record("kills of one of two processes", kills=hits, other_bytes=0, slowest_end_seconds=slowest)

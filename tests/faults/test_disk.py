"""Disks that are full or read-only, and two processes at one output: one line, and nothing half-written."""

from __future__ import annotations

import contextlib
import random
import re
import resource
import shutil
import tarfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from calibrating import options
from gguf_itq3s import upstream
from gguf_itq3s.base.errors import report_errors
from gguf_itq3s.calibrate.statistics import calibrate
from gguf_itq3s.cli import main
from killing import Outcome, Record, child, content, read_only, small_disk, start


def command(*words: str | Path) -> Callable[[], int]:
    """A command line of the package as work for a child."""
    return lambda: main([str(word) for word in words])


def one_line(outcome: Outcome) -> str:
    """The one line of a command that failed."""
    lines = [line for line in outcome.said.splitlines() if line.startswith("error: ")]
    assert (outcome.code, len(lines)) == (1, 1), outcome.said
    assert "internal error" not in lines[0] and "Traceback" not in outcome.said
    return lines[0]


def unseen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the space look ample before the work, as it is when another program fills the disk meanwhile."""
    usage = shutil.disk_usage("/")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1 << 50))


def limited(size: int, work: Callable[[], int]) -> Callable[[], int]:
    """The work with a limit on the size of a file."""

    def run() -> int:
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
        return work()

    return run


@contextlib.contextmanager
def short_of_room(way: str, folder: Path, size: int) -> Iterator[Callable[[Callable[[], int]], Callable[[], int]]]:
    """A folder where files of so many bytes in all, or each, are too many; yields what the work goes through."""
    if way == "limit":
        folder.mkdir()
        yield lambda work: limited(size, work)
        return
    with small_disk(folder, size) as mounted:
        if not mounted:
            pytest.skip("no right to mount a small disk; the limit does the same")
        yield lambda work: work


@pytest.mark.parametrize("way", ["disk", "limit"])
@pytest.mark.parametrize("size", [8192, 300_000, 1_200_000])
def test_a_disk_that_fills_up_during_a_conversion(
    size: int, way: str, checkpoint: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    record: Record,
) -> None:  # fmt: skip
    """What is finished is kept, and with room the same command goes on from it; no file has a final name before."""
    unseen(monkeypatch)
    log, out = tmp_path / "log", tmp_path / "disk" / "x.gguf"
    words = ["--outtype", "f32"]  # 5.2 MB
    assert child(command("convert", checkpoint("llama"), tmp_path / "whole" / "x.gguf", *words), log).code == 1
    (tmp_path / "whole").mkdir()
    assert child(command("convert", checkpoint("llama"), tmp_path / "whole" / "x.gguf", *words), log).code == 0
    with short_of_room(way, out.parent, size) as through:
        for _ in range(2):  # again on the same full disk: what is kept stays
            said = one_line(child(through(command("convert", checkpoint("llama"), out, *words)), log))
            assert "cannot be written: " in said and str(out.with_suffix("")) in said
            assert not list(out.parent.glob("*.gguf"))
            kept = re.search(r"; (\d+) of 21 tensors are kept, the same command continues after them$", said)
            assert bool(kept) == bool(list(out.parent.iterdir()))
        shutil.copytree(out.parent, tmp_path / "left")
    outcome = child(command("convert", checkpoint("llama"), tmp_path / "left" / "x.gguf", *words), log)
    assert outcome.code == 0
    assert (f"continuing after {kept[1]} of 21 tensors" if kept else "\n") in outcome.said
    assert content(tmp_path / "left") == content(tmp_path / "whole")
    what = f"conversions onto a full disk ({way})"
    record(what, tried=1, one_line=1, resumed=int(bool(kept)), other_bytes_after_resuming=0)


@pytest.mark.parametrize(
    "way,size",
    [("disk", 4096), ("disk", 700_000), ("disk", 1_500_000), ("disk", 2_500_000), ("limit", 4096), ("limit", 700_000)],
)
def test_a_disk_that_fills_up_during_a_calibration(
    way: str, size: int, uneven: Callable[[str], Path], tmp_path: Path, record: Record
) -> None:
    """Also where the file is mapped: a hole without room for it would end the process by SIGBUS."""
    log, out = tmp_path / "log", tmp_path / "disk" / "out"
    model = uneven("llama")
    run = report_errors(lambda folder: 0 if calibrate(options(model), folder) else 1)
    assert child(lambda: run(tmp_path / "whole"), log).code == 0
    with short_of_room(way, out.parent, size) as through:
        said = one_line(child(through(lambda: run(out)), log))
        assert f"{out}: cannot be written: " in said
        shutil.copytree(out.parent, tmp_path / "left")
    # With room, the same call goes on from what is there.
    left = tmp_path / "left" / "out"
    assert child(lambda: run(left), log).code == 0
    assert content(left) == content(tmp_path / "whole")
    record(f"calibrations onto a full disk ({way})", tried=1, one_line=1, other_bytes_after_resuming=0)


def test_a_read_only_place(
    checkpoint: Callable[[str], Path], uneven: Callable[[str], Path], tmp_path: Path, record: Record
) -> None:
    place = tmp_path / "place"
    place.mkdir()
    (place / "old.gguf").write_bytes(b"GGUF old")
    model = uneven("llama")
    calibration = report_errors(lambda out: 0 if calibrate(options(model), out) else 1)
    with read_only(place):
        for name in ("new.gguf", "old.gguf"):
            said = one_line(child(command("convert", checkpoint("llama"), place / name), tmp_path / "log"))
            assert f"{place / name}: cannot be written: " in said
        said = one_line(child(lambda: calibration(place / "statistics"), tmp_path / "log"))
        assert f"{place / 'statistics'}: cannot be written: " in said
    assert [(p.name, p.read_bytes()) for p in place.iterdir()] == [("old.gguf", b"GGUF old")]
    record("outputs in a read-only place", tried=3, one_line=3, left_behind=0)


def test_two_writers(checkpoint: Callable[[str], Path], tmp_path: Path, rounds: int, record: Record) -> None:
    """At any distance in time: one at least succeeds, the other says why it does not, and the file is whole."""
    out = tmp_path / "out" / "x.gguf"
    out.parent.mkdir()
    run = command("convert", checkpoint("llama"), out, "--outtype", "f16")
    seconds = child(run, tmp_path / "log").seconds
    whole = content(out)
    chance, refused = random.Random(3), 0
    for _ in range(rounds):
        out.unlink()
        first = start(run, tmp_path / "first")
        time.sleep(chance.uniform(0, seconds))
        second = start(run, tmp_path / "second")
        outcomes = [first.wait(), second.wait()]
        failed = [outcome for outcome in outcomes if outcome.code]
        assert len(failed) < 2, [outcome.said for outcome in outcomes]
        for outcome in failed:
            assert "another conversion is writing it; wait for it to end" in one_line(outcome)
        refused += len(failed)
        assert content(out) == whole and [p.name for p in out.parent.iterdir()] == ["x.gguf"]
    record("pairs of writers", tried=rounds, refused=refused, damaged=0)


def test_a_truncated_download(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, record: Record) -> None:
    """pip compares the hash; what it would not have seen, the unpacking does, and nothing counts."""
    monkeypatch.setenv("GGUF_ITQ3S_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("LLAMA_CPP_DIR", raising=False)
    monkeypatch.setattr(upstream, "_checked", set())
    whole = tmp_path / "whole.tar.gz"
    with tarfile.open(whole, "w:gz") as tar:
        tar.add(Path(__file__), f"{upstream.SOURCE}/vendor/llama.cpp/conversion/base.py")
    data = whole.read_bytes()
    lengths = [0, 1, 10, len(data) // 2, len(data) - 9, len(data) - 1]
    for length in lengths:
        archive = tmp_path / "cut" / f"{upstream.SOURCE}.tar.gz"
        archive.parent.mkdir(exist_ok=True)
        archive.write_bytes(data[:length])
        with monkeypatch.context() as patch:
            patch.setenv("PIP_NO_INDEX", "1")
            patch.setenv("PIP_FIND_LINKS", str(archive.parent))
            if length == len(data) // 2:  # pip itself, once: it takes a second
                with pytest.raises(upstream.FetchError, match=r"sha256 is|pip download"):
                    upstream.fetch_source()
            patch.setattr(
                upstream, "_download", lambda folder, release, archive=archive: Path(shutil.copy(archive, folder))
            )
            with pytest.raises(upstream.FetchError, match=upstream.SOURCE):
                upstream.fetch_source()
        assert upstream.find_source() is None
        assert [path.suffix for path in (tmp_path / "cache").iterdir()] == [".lock"]
    record("truncated downloads", tried=len(lengths), refused=len(lengths))

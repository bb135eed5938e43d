"""Calibration by several processes: what they add up and hand over, what they write, and how they end."""

from __future__ import annotations

import io
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from calibrating import same_statistics, statistics
from checkpoints import NOVEL
from gguf_itq3s.base.errors import UserError
from gguf_itq3s.calibrate.options import CalibrationOptions
from gguf_itq3s.calibrate.ranks import Ranks
from gguf_itq3s.calibrate.run import Sequential
from gguf_itq3s.calibrate.shares import share, split
from gguf_itq3s.calibrate.statistics import calibrate
from gguf_itq3s.codec.family import is_trellis
from gguf_itq3s.convert.options import ConvertOptions
from gguf_itq3s.convert.pipeline import convert, convert_together
from killing import content
from together import BOUND, LOOPBACK, errors, together

ROOT = Path(__file__).resolve().parents[2]
SMALL: dict[str, Any] = {"tokens": 1280, "context": 64, "batch": 4}


def asked(model: Path, out: Path, **changes: Any) -> ConvertOptions:
    """A conversion that quantizes layer by layer, on twenty windows of 64 tokens."""
    return ConvertOptions.of(model, out, calibrate=(NOVEL,), **{"effort": "fast", **SMALL, **changes})


def done(size: int, work: Callable[[Ranks], object], folder: Path) -> None:
    """Have so many processes do it, all of them without an error."""
    outcomes = together(size, work, folder)
    assert [outcome.code for outcome in outcomes] == [0] * size, [outcome.said for outcome in outcomes]


def made(size: int, options: ConvertOptions, folder: Path) -> Path:
    """The file that so many processes write."""
    done(size, lambda ranks: convert_together(options, io.StringIO(), ranks), folder)
    assert options.out is not None
    assert sorted(path.name for path in options.out.parent.iterdir() if path.name.startswith("x.gguf")) == ["x.gguf"]
    return options.out


def weights(path: Path) -> dict[str, np.ndarray]:
    """Trellis-coded matrices of a file, decoded."""
    return {
        t.name: gguf.quants.dequantize(t.data, t.tensor_type)
        for t in gguf.GGUFReader(path).tensors if is_trellis(t.tensor_type)
    }  # fmt: skip


def test_windows_are_shared_out_once_each() -> None:
    for windows in (9, 411):
        for size in (2, 3):
            shares = [share(windows, 4, Ranks(rank, size)) for rank in range(size)]
            assert sorted(np.concatenate([one.numbers for one in shares]).tolist()) == list(range(windows))
            sizes = [len(one.numbers) for one in shares]
            assert max(sizes) - min(sizes) <= 1 or windows < 2 * size
            alone = split(windows, windows)
            for part in ("train", "held"):
                mine = [one.numbers[place] for one in shares for place in getattr(one.batches, part)]
                assert sorted(np.concatenate(mine).tolist()) == np.concatenate(getattr(alone, part)).tolist()
            for one in shares:
                assert one.batches.kept(64) == alone.kept(64)


def _messages(ranks: Ranks) -> None:
    def drawn(rank: int) -> torch.Tensor:
        return torch.randn((30, 7), generator=torch.Generator().manual_seed(rank), dtype=torch.float64)

    whole = sum(drawn(rank) for rank in range(ranks.size))
    total = drawn(ranks.rank)
    ranks.reduce(total)
    torch.testing.assert_close(total, whole)
    for owner in range(ranks.size):
        total = drawn(ranks.rank)
        ranks.reduce(total, owner=owner)
        assert ranks.rank != owner or torch.equal(total, whole) or torch.allclose(total, whole)
    assert ranks.sums(1.5, ranks.rank) == [1.5 * ranks.size, sum(range(ranks.size))]
    assert ranks.all(True) and not ranks.all(ranks.rank != 1)
    assert ranks.broadcast_object({"a": [1.25, "x"], "by": ranks.rank}, owner=1) == {"a": [1.25, "x"], "by": 1}
    assert ranks.all_gather(np.full((ranks.rank, 3), ranks.rank, dtype=np.int16))[:, 0].tolist() == [1, 2, 2]
    found = ranks.gather(torch.full((ranks.rank, 2), float(ranks.rank)), 1)
    assert (found is None) == (ranks.rank != 1)
    assert found is None or found[:, 0].tolist() == [1.0, 2.0, 2.0]


def test_sums_and_messages(tmp_path: Path) -> None:
    done(3, _messages, tmp_path)


@pytest.mark.parametrize(
    ("name", "changes"), [("llama", {}), ("mixtral-few", {"fisher": True}), ("llama-short", {"outtype": "itq3_n"})]
)
def test_two_processes_quantize_to_the_same_targets(
    name: str, changes: dict[str, Any], uneven: Callable[[str], Path], few: Callable[[int], None], tmp_path: Path
) -> None:
    """The first matrices have the bytes of one process; behind them a rounding that fell otherwise changes others.

    How far sums are trusted is one of a few steps, which a last bit can decide: it is given, and where the output
    Fisher matrices decide it too, codes are not compared. Experts are in two groups.
    """
    few(3)
    model, changes = uneven(name), {"damping": 0.03, **changes}
    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    convert(asked(model, tmp_path / "one" / "x.gguf", **changes), io.StringIO())
    two = made(2, asked(model, tmp_path / "two" / "x.gguf", **changes), tmp_path)
    one, other = weights(tmp_path / "one" / "x.gguf"), weights(two)
    assert one.keys() == other.keys()
    first = [f"blk.0.attn_{part}.weight" for part in ("q", "k", "v") if f"blk.0.attn_{part}.weight" in one]
    assert first
    for entry in first if "fisher" not in changes else ():
        assert (one[entry] == other[entry]).mean() > 0.9
    for entry, decoded in one.items():
        energy = float(np.square(decoded, dtype=np.float64).sum())
        assert float(np.square(decoded - other[entry], dtype=np.float64).sum()) < 0.25 * energy, entry


def test_the_same_processes_write_the_same_bytes_and_others_go_on(
    uneven: Callable[[str], Path], tmp_path: Path
) -> None:
    model = uneven("llama")
    options = asked(model, tmp_path / "out" / "x.gguf", fisher=True)
    (tmp_path / "out").mkdir()
    made(2, options, tmp_path)
    whole = content(tmp_path / "out")

    def interrupted(ranks: Ranks) -> None:
        own = Sequential._step

        def step(self: Sequential, number: int, *rest: Any) -> None:
            if number == 1:
                raise UserError(model, "is stopped here", "go on") if ranks.rank else KeyboardInterrupt
            own(self, number, *rest)

        setattr(Sequential, "_step", step)  # noqa: B010 (in a process of its own)
        convert_together(options, io.StringIO(), ranks)

    for size in (2, 1):  # one process alone goes on as well
        (tmp_path / "out" / "x.gguf").unlink()
        outcomes = together(2, interrupted, tmp_path)
        assert [outcome.code for outcome in outcomes] == [1, 1]
        assert (tmp_path / "out" / "x.gguf.calibrating" / "layer-0000.safetensors").is_file()
        if size == 1:
            convert(options, io.StringIO())
            assert content(tmp_path / "out").keys() == {"x.gguf"}
        else:
            made(size, options, tmp_path)
            assert content(tmp_path / "out") == whole


def test_statistics_of_several_processes_and_groups_are_those_of_one(
    uneven: Callable[[str], Path], few: Callable[[int], None], tmp_path: Path
) -> None:
    options = CalibrationOptions(uneven("mixtral-few"), [NOVEL], **SMALL)
    calibrate(options, tmp_path / "one", io.StringIO())
    few(3)
    done(3, lambda ranks: calibrate(options, tmp_path / "three", io.StringIO(), ranks), tmp_path)
    assert len(list((tmp_path / "three").glob("layer-*-experts-*"))) == 4
    assert not list((tmp_path / "three").glob("rank-*")) and not list((tmp_path / "three").glob("partial"))
    same_statistics(statistics(tmp_path / "three"), statistics(tmp_path / "one"))


def test_types_for_a_size_are_chosen_together(uneven: Callable[[str], Path], tmp_path: Path) -> None:
    model = uneven("llama")
    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    changes: dict[str, Any] = {"target_bpw": 4.0, "fisher": True}
    convert(asked(model, tmp_path / "one" / "x.gguf", **changes), io.StringIO())
    two = made(2, asked(model, tmp_path / "two" / "x.gguf", **changes), tmp_path)
    types = [
        {t.name: t.tensor_type for t in gguf.GGUFReader(path).tensors} for path in (tmp_path / "one" / "x.gguf", two)
    ]
    assert types[0].keys() == types[1].keys() and len(set(types[1].values())) > 2
    # Scores that are as good as equal may change places.
    assert sum(types[0][name] == types[1][name] for name in types[0]) >= 0.8 * len(types[0])


# ---------------------------------------------------------------------------------------------------------------- ends


def test_a_rank_that_is_killed_ends_all(tmp_path: Path) -> None:
    def work(ranks: Ranks) -> None:
        if ranks.rank == 1:
            os.kill(os.getpid(), 9)
        ranks.barrier()

    started = time.monotonic()
    outcomes = together(3, work, tmp_path)
    assert time.monotonic() - started < BOUND
    assert [outcome.code for outcome in outcomes] == [1, -9, 1]
    (line,) = errors(outcomes)
    assert "another process of this run has ended" in line and "the same command goes on" in line


def test_an_error_of_one_rank_is_said_by_its_name(tmp_path: Path) -> None:
    def work(ranks: Ranks) -> None:
        if ranks.rank == 0:
            raise UserError(tmp_path, "is full", "free some space")
        ranks.barrier()

    outcomes = together(3, work, tmp_path)
    assert [outcome.code for outcome in outcomes] == [1, 1, 1]
    assert errors(outcomes) == [f"error: rank 0 of 3: {tmp_path}: is full; free some space"]


def test_ranks_that_would_do_other_work_are_refused(uneven: Callable[[str], Path], tmp_path: Path) -> None:
    models = [uneven("llama"), tmp_path / "other"]
    shutil.copytree(models[0], models[1])
    path = models[1] / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(bytes(data))

    def checkpoint(ranks: Ranks) -> None:
        convert_together(asked(models[ranks.rank], tmp_path / "x.gguf"), io.StringIO(), ranks)

    def option(ranks: Ranks) -> None:
        convert_together(asked(models[0], tmp_path / "x.gguf", damping=0.01 * ranks.rank), io.StringIO(), ranks)

    for work, what in ((checkpoint, "checkpoint"), (option, "options")):
        outcomes = together(2, work, tmp_path)
        assert [outcome.code for outcome in outcomes] == [1, 1]
        (line,) = errors(outcomes)
        assert f": rank 1 of 2 has another {what} than rank 0; start all with the same" in line
    assert not (tmp_path / "x.gguf").exists()


def test_what_several_processes_cannot_do_is_refused(uneven: Callable[[str], Path], tmp_path: Path) -> None:
    for options, what in (
        (asked(uneven("llama"), tmp_path / "x.gguf", tokens=128), "by 3 processes with 2 windows of text; give more"),
        (ConvertOptions.of(uneven("llama"), tmp_path / "x.gguf"), "by one process, and 3 were started; leave torchrun"),
    ):
        outcomes = together(3, lambda ranks, of=options: convert_together(of, io.StringIO(), ranks), tmp_path)  # type: ignore[misc]
        (line,) = errors(outcomes)
        assert what in line


def test_torchrun_converts(uneven: Callable[[str], Path], tmp_path: Path) -> None:
    """The command of the documents."""
    arguments = [
        "convert", uneven("llama"), tmp_path / "x.gguf", "--calibrate", NOVEL, "--effort", "fast", "--tokens", "640",
        "--context", "64",
    ]  # fmt: skip
    launcher = ["torch.distributed.run", "--nproc-per-node", "2", "--standalone", "-m", "gguf_itq3s"]
    ran = subprocess.run(
        [sys.executable, "-m", *launcher, *map(str, arguments)],
        capture_output=True, text=True, cwd=ROOT, env={**os.environ, **LOOPBACK},
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.count("wrote ") == 1
    said = r"calibrating on 640 tokens through 2 layers in 2 processes: about .* of memory each"
    assert len(re.findall(said, ran.stderr)) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["x.gguf"]

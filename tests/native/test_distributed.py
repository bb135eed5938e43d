"""Calibration by several processes: what they add up and hand over, what they write, and how they end."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf_itq3s.rounding.panels import PANEL, Panels
from safetensors.numpy import load_file

from checkpoints import NOVEL
from gguf_itq3s.base.errors import UserError
from gguf_itq3s.calibrate import watch
from gguf_itq3s.calibrate.moments import in_basis
from gguf_itq3s.calibrate.options import CalibrationOptions
from gguf_itq3s.calibrate.pipeline import calibrate
from gguf_itq3s.calibrate.ranks import PIECE, Ranks
from gguf_itq3s.calibrate.run import Sequential
from gguf_itq3s.calibrate.shares import share, split
from gguf_itq3s.calibrate.streams import Streams
from gguf_itq3s.codec.family import is_trellis
from gguf_itq3s.codec.transform import rotation_block
from gguf_itq3s.convert.options import ConvertOptions
from gguf_itq3s.convert.pipeline import convert, convert_together
from gguf_itq3s.rounding import target
from gguf_itq3s.rounding.target import Decomposition
from killing import content
from together import BOUND, LOOPBACK, errors, together

ROOT = Path(__file__).resolve().parents[2]
SMALL: dict[str, Any] = {"tokens": 1280, "context": 64, "batch": 4}


def asked(model: Path, out: Path, **changes: Any) -> ConvertOptions:
    """A conversion that quantizes layer by layer, on twenty windows of 64 tokens."""
    return ConvertOptions.of(model, out, calibrate=(NOVEL,), **{"effort": "fast", **SMALL, **changes})


def made(size: int, options: ConvertOptions, folder: Path) -> Path:
    """The file that so many processes write."""
    outcomes = together(size, lambda ranks: convert_together(options, io.StringIO(), ranks), folder)
    assert [outcome.code for outcome in outcomes] == [0] * size, [outcome.said for outcome in outcomes]
    assert options.out is not None
    assert sorted(path.name for path in options.out.parent.iterdir() if path.name.startswith("x.gguf")) == ["x.gguf"]
    return options.out


def weights(path: Path) -> dict[str, np.ndarray]:
    """Trellis-coded matrices of a file, decoded."""
    return {
        t.name: gguf.quants.dequantize(t.data, t.tensor_type)
        for t in gguf.GGUFReader(path).tensors if is_trellis(t.tensor_type)
    }  # fmt: skip


# ------------------------------------------------------------------------------------------------------------- shares


def test_windows_are_shared_out_once_each() -> None:
    for windows in (4, 9, 40, 411):
        for size in (2, 3, 4):
            shares = [share(windows, 4, Ranks(rank, size)) for rank in range(size)]
            every = np.concatenate([one.numbers for one in shares])
            assert sorted(every.tolist()) == list(range(windows))
            sizes = [len(one.numbers) for one in shares]
            assert max(sizes) - min(sizes) <= 1 or windows < 2 * size
            alone = split(windows, windows)
            for part in ("train", "held"):
                mine = [one.numbers[place] for one in shares for place in getattr(one.batches, part)]
                assert sorted(np.concatenate(mine).tolist()) == np.concatenate(getattr(alone, part)).tolist()
            for one in shares:
                assert one.batches.kept(64) == alone.kept(64)


def test_things_are_dealt_out_evenly() -> None:
    ranks = Ranks(0, 3)
    assert [part.stop - part.start for part in ranks.parts(8)] == [3, 3, 2]
    assert [part.stop - part.start for part in ranks.parts(2)] == [1, 1, 0]


# --------------------------------------------------------------------------------------------------------------- sums


def _sums(ranks: Ranks) -> None:
    mine = torch.Generator().manual_seed(ranks.rank)
    every = [torch.Generator().manual_seed(rank) for rank in range(ranks.size)]

    def drawn(generator: torch.Generator, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    n = 300
    matrix = drawn(mine, n, n)
    matrix = matrix + matrix.T
    others = [drawn(generator, n, n) for generator in every]
    whole = sum(other + other.T for other in others)
    full, half, strided = matrix.clone(), matrix.clone(), torch.zeros(n, 2 * n, dtype=torch.float64)
    ranks.add(full)
    ranks.add_symmetric(half)
    strided[:, ::2] = matrix
    ranks.add(strided[:, ::2])
    for found in (full, half, strided[:, ::2]):
        torch.testing.assert_close(found, whole)
    assert not strided[:, 1::2].any()
    assert ranks.summed == 3 * 8 * n * n
    for owner in range(ranks.size):
        full, half = matrix.clone(), matrix.clone()
        ranks.add(full, owner=owner)
        ranks.add_symmetric(half, owner)
        if ranks.rank == owner:
            torch.testing.assert_close(full, whole)
            torch.testing.assert_close(half, whole)
    parts = [drawn(mine, 5 + rank, 3) for rank in range(ranks.size)]
    theirs = [[drawn(generator, 5 + rank, 3) for rank in range(ranks.size)] for generator in every]
    before = ranks.summed
    torch.testing.assert_close(ranks.add_parts(parts), sum(other[ranks.rank] for other in theirs))
    assert ranks.summed - before == 8 * 3 * sum(range(5, 5 + ranks.size))
    long = torch.full((PIECE + 7,), float(ranks.rank + 1), dtype=torch.float64)
    ranks.add(long)
    assert (long == sum(range(1, ranks.size + 1))).all()

    assert ranks.numbers(1.5, ranks.rank) == [1.5 * ranks.size, sum(range(ranks.size))]
    assert ranks.every(ranks.rank == 1) == [rank == 1 for rank in range(ranks.size)]
    assert ranks.all(True) and not ranks.all(ranks.rank != 1)
    assert ranks.tell({"a": [1.25, "x"], "by": ranks.rank}, owner=1) == {"a": [1.25, "x"], "by": 1}
    rows = np.full((7, 3), ranks.rank, dtype=np.int16)
    ranks.send_parts(rows, ranks.parts(7))
    assert rows[:, 0].tolist() == [rank for rank, part in enumerate(ranks.parts(7)) for _ in range(7)[part]]
    columns = np.full((4, 6), ranks.rank, dtype=np.float32)
    ranks.send(1, columns[:, ::2])
    assert (columns[:, ::2] == 1).all() and (columns[:, 1::2] == ranks.rank).all()
    handed = ranks.hand(0, 2, np.full(5, ranks.rank))
    assert (handed == (0 if ranks.rank == 2 else ranks.rank)).all()
    found_rows = ranks.gather(1, torch.full((ranks.rank, 2), float(ranks.rank)))
    if ranks.rank == 1:
        assert found_rows is not None and found_rows[:, 0].tolist() == [1.0, 2.0, 2.0]
    else:
        assert found_rows is None


def test_sums_and_messages(tmp_path: Path) -> None:
    outcomes = together(3, _sums, tmp_path)
    assert [outcome.code for outcome in outcomes] == [0, 0, 0], [outcome.said for outcome in outcomes]


def _panels(ranks: Ranks) -> None:
    every = [torch.Generator().manual_seed(rank) for rank in range(ranks.size)]
    for n in (3 * PANEL, 2 * PANEL + 64, PANEL, 192):
        inputs = [torch.randn((2 * n, n), generator=generator) for generator in every]
        whole = sum((x.double().T @ x.double() for x in inputs), torch.zeros((n, n), dtype=torch.float64))
        before = ranks.summed
        panels = Panels.begun(n, torch.device("cpu"), ranks)
        for part in inputs[ranks.rank].split(n):
            panels.add(part)
        panels.share()
        assert ranks.summed - before == 8 * n * n
        for number, panel in panels.own.items():
            torch.testing.assert_close(panel, whole[: len(panel), number * PANEL : len(panel)], rtol=0, atol=1e-5 * n)
        assert sorted(panels.own) == list(range(-(-n // PANEL)))[ranks.rank :: ranks.size]
        assert len(panels) == n
        assert panels.mean() == pytest.approx(float(whole.diagonal().mean()), rel=1e-5)
        for block in (1, 64):
            changed = panels.changed(partial(in_basis, block=block, own=rotation_block(n)))
            for number, panel in changed.own.items():
                wanted = in_basis(whole, block)[: len(panel), number * PANEL : len(panel)]
                torch.testing.assert_close(panel, wanted, rtol=0, atol=1e-4 * n)
        wanted = Decomposition.of(whole, 0.01).upper[0]
        for dtype in (torch.float32, torch.float64):
            upper = panels.decomposed(0.01 * panels.mean(), dtype)
            assert upper is not None
            upper = upper[0]
            error = float((upper - wanted).norm() / wanted.norm())
            assert error < 1e-5
            same = torch.from_numpy(upper.numpy().copy())
            for rank in range(ranks.size):
                ranks.send(rank, same.numpy())
                assert torch.equal(same, upper)  # every rank has the bits of every other
        assert panels.decomposed(-0.9 * panels.mean(), torch.float64) is None
        with pytest.raises(ValueError, match="NaN or infinite"):
            Decomposition.of(panels.changed(lambda panel: panel * float("inf")), 0.01)
        with pytest.raises(ValueError, match="not positive semidefinite; more damping may help"):
            Decomposition.of(panels.changed(lambda panel: -panel), 1e-6)
    # What float32 cannot decompose, float64 can.
    target.WIDE = 0  # type: ignore[misc] # in a process of its own
    n = 2 * PANEL
    flat = torch.full((n, n), 1e8 / ranks.size, dtype=torch.float64) + torch.eye(n, dtype=torch.float64) / ranks.size
    panels = Panels.begun(n, flat.device, ranks)
    for number, panel in panels.own.items():
        panel += flat[: len(panel), number * PANEL : len(panel)]
    panels.share()
    assert panels.decomposed(1e-9 * panels.mean(), torch.float32) is None
    found = Decomposition.of(panels, 1e-9)
    torch.testing.assert_close((found.upper[0].double() @ found.upper[0].double().T) / 1e8, flat * ranks.size / 1e8)


def test_a_hessian_in_panels_is_decomposed_as_whole(tmp_path: Path) -> None:
    outcomes = together(2, _panels, tmp_path)
    assert [outcome.code for outcome in outcomes] == [0, 0], [outcome.said for outcome in outcomes]
    outcomes = together(3, _panels, tmp_path)
    assert [outcome.code for outcome in outcomes] == [0, 0, 0], [outcome.said for outcome in outcomes]


# -------------------------------------------------------------------------------------------------------------- files


@pytest.mark.parametrize(
    ("name", "changes"),
    [("llama", {}), ("llama", {"fisher": True}), ("mixtral", {"fisher": True}), ("llama-short", {"outtype": "itq3_n"})],
)
def test_two_processes_quantize_to_the_same_targets(
    name: str, changes: dict[str, Any], uneven: Callable[[str], Path], tmp_path: Path
) -> None:
    """The first matrices have the bytes of one process; behind them a rounding that fell otherwise changes others.

    How far sums are trusted is one of a few steps, which a last bit can decide: it is given, and where the output
    Fisher matrices decide it too, codes are not compared.
    """
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
    plain = {t.name: t for t in gguf.GGUFReader(tmp_path / "one" / "x.gguf").tensors}
    assert plain.keys() == {t.name for t in gguf.GGUFReader(two).tensors}
    for entry, decoded in one.items():
        energy = float(np.square(decoded, dtype=np.float64).sum())
        assert float(np.square(decoded - other[entry], dtype=np.float64).sum()) < 0.25 * energy, entry


def test_wide_hessians_are_decomposed_by_all(uneven: Callable[[str], Path], tmp_path: Path) -> None:
    """As wide ones, small ones: the weights are those of one process, the bytes the same each time."""
    model = uneven("llama")
    names = ("one", "two", "again", "outputs")
    options = [asked(model, tmp_path / name / "x.gguf", damping=0.03) for name in names]
    for name in names:
        (tmp_path / name).mkdir()
    convert(options[0], io.StringIO())
    shared: list[int] = []

    def work(ranks: Ranks, which: int) -> None:
        target.WIDE = 0  # type: ignore[misc] # in a process of its own
        own = Panels.decomposed

        def decomposed(self: Panels, *rest: Any) -> Any:
            shared.append(len(self))
            return own(self, *rest)

        setattr(Panels, "decomposed", decomposed)  # noqa: B010
        if names[which] == "outputs":  # as of matrices with fewer rows than columns
            setattr(Streams, "_smaller_by_outputs", lambda *_: True)  # noqa: B010
        convert_together(options[which], io.StringIO(), ranks)
        assert shared

    for which in (1, 2, 3):
        outcomes = together(2, lambda ranks, which=which: work(ranks, which), tmp_path)  # type: ignore[misc]
        assert [outcome.code for outcome in outcomes] == [0, 0], [outcome.said for outcome in outcomes]
    one, two, outputs = (weights(tmp_path / name / "x.gguf") for name in ("one", "two", "outputs"))
    for entry in ("blk.0.attn_q.weight", "blk.0.attn_k.weight", "blk.0.attn_v.weight"):
        assert (one[entry] == two[entry]).mean() > 0.9
    for entry, decoded in outputs.items():
        energy = float(np.square(decoded, dtype=np.float64).sum())
        assert float(np.square(decoded - one[entry], dtype=np.float64).sum()) < 0.25 * energy, entry
    assert content(tmp_path / "two") == content(tmp_path / "again")


def test_the_same_processes_write_the_same_bytes_and_others_go_on(
    uneven: Callable[[str], Path], tmp_path: Path
) -> None:
    model = uneven("llama")
    options = asked(model, tmp_path / "out" / "x.gguf", fisher=True)
    (tmp_path / "out").mkdir()
    whole = content(made(2, options, tmp_path))
    (tmp_path / "out" / "x.gguf").unlink()

    def interrupted(ranks: Ranks) -> None:
        own = Sequential._step

        def step(self: Sequential, number: int, *rest: Any) -> None:
            if number == 1:
                raise UserError(model, "is stopped here", "go on") if ranks.rank else KeyboardInterrupt
            own(self, number, *rest)

        setattr(Sequential, "_step", step)  # noqa: B010 (in a process of its own)
        convert_together(options, io.StringIO(), ranks)

    for size in (2, 3):
        outcomes = together(2, interrupted, tmp_path)
        assert [outcome.code for outcome in outcomes] == [1, 1]
        assert len(errors(outcomes)) == 1
        kept = sorted(path.name for path in (tmp_path / "out" / "x.gguf.calibrating").iterdir())
        assert "layer-0000.safetensors" in kept
        stamp = (tmp_path / "out" / "x.gguf.calibrating" / "layer-0000.safetensors").stat().st_mtime_ns
        if size == 2:
            assert content(made(2, options, tmp_path)) == whole
            (tmp_path / "out" / "x.gguf").unlink()
        else:
            seen: list[int] = []

            def watched(ranks: Ranks, stamp: int = stamp, seen: list[int] = seen) -> None:
                convert_together(options, io.StringIO(), ranks)

            outcomes = together(size, watched, tmp_path)
            assert [outcome.code for outcome in outcomes] == [0] * size, [outcome.said for outcome in outcomes]
            first = {name: data for name, data in weights(tmp_path / "out" / "x.gguf").items() if "blk.0" in name}
            assert first.keys()
    # One process alone goes on as well.
    (tmp_path / "out" / "x.gguf").unlink()
    together(2, interrupted, tmp_path)
    convert(options, io.StringIO())
    assert content(tmp_path / "out").keys() == {"x.gguf"}


def test_statistics_of_several_processes_are_those_of_one(uneven: Callable[[str], Path], tmp_path: Path) -> None:
    options = CalibrationOptions(uneven("mixtral"), [NOVEL], **SMALL)
    one = calibrate(options, tmp_path / "one", io.StringIO())
    outcomes = together(3, lambda ranks: calibrate(options, tmp_path / "three", io.StringIO(), ranks), tmp_path)
    assert [outcome.code for outcome in outcomes] == [0, 0, 0], [outcome.said for outcome in outcomes]
    assert content(tmp_path / "one").keys() == content(tmp_path / "three").keys()
    manifests = [json.loads((tmp_path / name / "manifest.json").read_text()) for name in ("one", "three")]
    assert manifests[0] == manifests[1] and one.complete
    for file in sorted(path.name for path in (tmp_path / "one").glob("*.safetensors")):
        here, there = load_file(tmp_path / "one" / file), load_file(tmp_path / "three" / file)
        assert here.keys() == there.keys()
        for key, value in here.items():
            np.testing.assert_allclose(there[key], value, rtol=1e-4, atol=1e-5 * float(np.abs(value).max()))


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


@pytest.mark.parametrize("dead", [0, 1, 2])
def test_a_rank_that_is_killed_is_named_and_ends_all(dead: int, tmp_path: Path) -> None:
    def work(ranks: Ranks) -> None:
        if ranks.rank == dead:
            os.kill(os.getpid(), 9)
        if (ranks.rank - dead) % 3 == 1:
            time.sleep(60)  # busy with something of its own
        ranks.meet()

    started = time.monotonic()
    outcomes = together(3, work, tmp_path)
    assert time.monotonic() - started < BOUND
    assert [outcome.code for outcome in outcomes] == [-9 if rank == dead else 1 for rank in range(3)]
    (line,) = errors(outcomes)
    assert re.search(rf"out: rank {dead} of 3 \(.*, process \d+\) has ended.*the same command goes on", line)


def test_an_error_of_one_rank_is_said_once_and_by_its_name(tmp_path: Path) -> None:
    def work(ranks: Ranks) -> None:
        if ranks.rank == 2:
            raise UserError(tmp_path, "is full", "free some space")
        ranks.meet()

    outcomes = together(3, work, tmp_path)
    assert [outcome.code for outcome in outcomes] == [1, 1, 1]
    (line,) = errors(outcomes)
    assert re.fullmatch(rf"error: rank 2 of 3 \(.*\): {re.escape(str(tmp_path))}: is full; free some space", line)


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

    def version(ranks: Ranks) -> None:
        ranks.agree(tmp_path, version=str(ranks.rank))

    for work, what in ((checkpoint, "checkpoint"), (option, "options"), (version, "version")):
        outcomes = together(2, work, tmp_path)
        assert [outcome.code for outcome in outcomes] == [1, 1]
        (line,) = errors(outcomes)
        assert re.search(rf": rank 1 of 2 \(.*\) has another {what} than rank 0; start all with the same", line)
    assert not (tmp_path / "x.gguf").exists()


def test_more_processes_than_windows_are_refused(uneven: Callable[[str], Path], tmp_path: Path) -> None:
    options = asked(uneven("llama"), tmp_path / "x.gguf", tokens=128)
    outcomes = together(3, lambda ranks: convert_together(options, io.StringIO(), ranks), tmp_path)
    (line,) = errors(outcomes)
    assert "cannot be calibrated by 3 processes with 2 windows of text; give more --tokens, or start fewer" in line


def test_a_conversion_without_calibration_is_for_one_process(uneven: Callable[[str], Path], tmp_path: Path) -> None:
    options = ConvertOptions.of(uneven("llama"), tmp_path / "x.gguf")
    outcomes = together(2, lambda ranks: convert_together(options, io.StringIO(), ranks), tmp_path)
    (line,) = errors(outcomes)
    assert "is converted by one process, and 2 were started; leave torchrun out" in line


def test_a_rank_of_another_machine_that_falls_silent_is_seen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Of a process that cannot be looked for, the missing sign of life tells."""
    monkeypatch.setattr(watch, "SILENCE", 2.0)
    monkeypatch.setattr(watch, "_lives", lambda _: True)

    def work(ranks: Ranks) -> None:
        if ranks.rank == 1:
            os.kill(os.getpid(), 9)
        time.sleep(60)

    outcomes = together(2, work, tmp_path)
    (line,) = errors(outcomes)
    assert re.search(r"rank 1 of 2 \(.*\) has not been heard of for 2 seconds", line)


def test_torchrun_converts(uneven: Callable[[str], Path], tmp_path: Path) -> None:
    """The command of the documents."""
    arguments = [
        "convert", uneven("llama"), tmp_path / "x.gguf", "--calibrate", NOVEL, "--fisher", "--effort", "fast",
        "--tokens", "1280", "--context", "64",
    ]  # fmt: skip
    launcher = ["torch.distributed.run", "--nproc-per-node", "2", "--standalone", "-m", "gguf_itq3s"]
    done = subprocess.run(
        [sys.executable, "-m", *launcher, *map(str, arguments)],
        capture_output=True, text=True, cwd=ROOT, env={**os.environ, **LOOPBACK},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("wrote ") == 1
    assert (
        len(
            re.findall(
                r"calibrating on 1280 tokens through 2 layers in 2 processes: about .* of memory each", done.stderr
            )
        )
        == 1
    )
    assert [path.name for path in tmp_path.iterdir()] == ["x.gguf"]

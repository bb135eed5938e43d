"""Experts in groups in several processes, and groups that are begun anew."""

from __future__ import annotations

import io
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from calibrating import same_statistics, statistics
from checkpoints import NOVEL
from gguf_itq3s.base.errors import UserError
from gguf_itq3s.calibrate import gradients
from gguf_itq3s.calibrate.backward import OutputFisher
from gguf_itq3s.calibrate.expert_backward import GroupedFisher
from gguf_itq3s.calibrate.finished import Finished
from gguf_itq3s.calibrate.layers import LayeredModel
from gguf_itq3s.calibrate.mixture import Expert, Mixture
from gguf_itq3s.calibrate.options import CalibrationOptions
from gguf_itq3s.calibrate.pipeline import calibrate
from gguf_itq3s.calibrate.ranks import ALONE, Ranks
from gguf_itq3s.calibrate.store import read_manifest
from gguf_itq3s.calibrate.text import windows
from gguf_itq3s.checkpoint.reading import open_checkpoint
from gguf_itq3s.convert.options import ConvertOptions
from gguf_itq3s.convert.pipeline import convert, convert_together
from killing import content
from together import errors, together

SMALL: dict[str, Any] = {"tokens": 640, "context": 64, "batch": 4}


def same_everywhere(size: int, work: Callable[[Ranks], object], folder: Path) -> None:
    """Run ``work`` in so many processes, which all end well."""
    outcomes = together(size, work, folder)
    assert [outcome.code for outcome in outcomes] == [0] * size, [outcome.said for outcome in outcomes]


def test_statistics_of_groups_in_several_processes_are_those_of_one_with_all_experts(
    uneven: Callable[[str], Path], few: Callable[[int], None], tmp_path: Path
) -> None:
    options = CalibrationOptions(uneven("mixtral-few"), [NOVEL], **SMALL)
    calibrate(options, tmp_path / "one", io.StringIO())
    few(3)
    same_everywhere(2, lambda ranks: calibrate(options, tmp_path / "two", io.StringIO(), ranks), tmp_path)
    assert sorted(path.name for path in (tmp_path / "two").iterdir()) == [
        "ends.safetensors", *(f"layer-{number:04d}{rest}.safetensors" for number in range(2)
        for rest in ("-experts-0000", "-experts-0001", "")), "manifest.json",
    ]  # fmt: skip
    wanted, found = statistics(tmp_path / "one"), statistics(tmp_path / "two")
    assert found.keys() == wanted.keys() and read_manifest(tmp_path / "two").complete
    same_statistics(found, wanted)


def blocks_of(fisher: OutputFisher, model: LayeredModel) -> dict[str, list[np.ndarray]]:
    """All output Fisher matrices by matrix."""
    layers = [model.layout.groups(number, model.base.layers[number]) for number in range(model.layers)]
    return {
        reader.entry: fisher.blocks(reader, number)
        for number, groups in enumerate(layers) for group in groups for reader in group.readers
    }  # fmt: skip


@pytest.mark.parametrize(("name", "size"), [("llama", 3), ("mixtral-few", 2)])
def test_output_fisher_matrices_of_several_processes_are_those_of_one(
    name: str, size: int, uneven: Callable[[str], Path], few: Callable[[int], None], monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:  # fmt: skip
    """Each drawn to what is known otherwise by one of them, those of the mixture in groups of experts."""
    # How far is one of a few steps, which a last bit can decide.
    drawn = tmp_path / "drawn"
    drawn.mkdir()

    def decompose(hessian: Any, *_: Any) -> tuple[float, None]:
        (drawn / f"{of.rank}-{len(list(drawn.iterdir()))}").touch()
        assert len(hessian) <= 128
        return 0.03, None

    of = ALONE
    monkeypatch.setattr(gradients, "decompose", decompose)
    options = CalibrationOptions(uneven(name), [NOVEL], **SMALL)

    def collect(ranks: Ranks) -> None:
        nonlocal of
        of = ranks
        model = LayeredModel(options, open_checkpoint(uneven(name)), ranks)
        fisher = GroupedFisher(tmp_path / f"of {ranks.size}" / "fisher", full=128, block=64, ranks=ranks)
        fisher.collect(model, windows(options, model.context), 4, "key", said)

    said = io.StringIO()
    collect(ALONE)
    alone = len(list(drawn.iterdir()))
    if name != "llama":
        few(3)
    same_everywhere(size, collect, tmp_path)
    model = LayeredModel(options, open_checkpoint(uneven(name)))
    wanted, found = (
        blocks_of(GroupedFisher(tmp_path / f"of {count}" / "fisher", full=128, block=64), model) for count in (1, size)
    )
    assert found.keys() == wanted.keys()
    for key, blocks in wanted.items():
        assert len(found[key]) == len(blocks) > 0
        for own, other in zip(found[key], blocks, strict=True):
            np.testing.assert_allclose(own, other, atol=1e-4 * np.abs(other).max())
    by = [int(path.name.partition("-")[0]) for path in drawn.iterdir()]
    assert len(by) == 2 * alone > 0 and set(by) == set(range(size))
    files = sorted(path.name for path in (tmp_path / f"of {size}" / "fisher").iterdir())
    assert len([file for file in files if "experts" in file]) == (0 if name == "llama" else 2 * 2 * 2)
    kept = [path for path in (tmp_path / f"of {size}").glob("rank-*/fisher/*") if path.suffix != ".key"]
    assert not kept


@pytest.mark.parametrize("size", [1, 2])
def test_groups_that_were_interrupted_are_begun_anew(
    size: int, uneven: Callable[[str], Path], few: Callable[[int], None], tmp_path: Path
) -> None:
    """Anywhere: forward, backward or rounding; the file has the bytes of an undisturbed run of as many processes."""
    few(3)
    out = tmp_path / "out" / "x.gguf"
    out.parent.mkdir()
    # Types of little cost, but for one that is rounded with the Hessian.
    types = (("ffn_down_exps", "itq3_s"), ("blk", "q4_0"), ("output", "q4_0"), ("token_embd", "f16"))
    asked = {**SMALL, "effort": "fast", "calibrate": (NOVEL,), "tensor_types": types, "fisher": True}
    options = ConvertOptions.of(uneven("mixtral-few"), out, **asked)
    loads = tmp_path / "loads"

    def run(stop: int, monkeypatch: pytest.MonkeyPatch, ranks: Ranks) -> None:
        """Convert; with ``stop``, up to that time that a group is loaded."""
        own, count = Mixture.load, 0

        def load(self: Mixture, numbers: Sequence[int]) -> dict[int, Expert]:
            nonlocal count
            count += 1
            if count == stop and ranks.rank == ranks.size - 1:
                raise UserError(out, "is stopped here", "go on") if ranks.rank else KeyboardInterrupt
            return own(self, numbers)  # type: ignore[arg-type]

        monkeypatch.setattr(Mixture, "load", load)
        if ranks.alone:
            convert(options, io.StringIO())
        else:
            convert_together(options, io.StringIO(), ranks)
        loads.write_text(str(count))

    def all_of(stop: int, size: int = size) -> None:
        if size > 1:
            with pytest.MonkeyPatch.context() as patch:
                outcomes = together(size, lambda ranks: run(stop, patch, ranks), tmp_path)
            assert [outcome.code for outcome in outcomes] == [int(stop > 0)] * size, [o.said for o in outcomes]
            assert len(errors(outcomes)) == (stop > 0)
            return
        with pytest.MonkeyPatch.context() as patch:
            if stop:
                with pytest.raises(KeyboardInterrupt):
                    run(stop, patch, ALONE)
            else:
                run(stop, patch, ALONE)

    all_of(0)
    whole, count = content(out.parent), int(loads.read_text())
    assert whole.keys() == {"x.gguf"}
    assert {t.name for t in gguf.GGUFReader(out).tensors} >= {"blk.1.ffn_down_exps.weight"}
    out.unlink()
    assert count >= 2 * (2 + 2 + 2 + 2)
    for stop in range(3, count + 1, 5):
        all_of(stop)
        assert not out.exists() and (out.parent / "x.gguf.calibrating").is_dir()
        all_of(0)
        assert content(out.parent) == whole, stop
        out.unlink()
    # Another number goes on as well, and takes what is finished as it is: gradients of the last layer, the first layer.
    work = out.parent / "x.gguf.calibrating"
    for stop, kept in ((11, "fisher/fisher-0001-experts-0000.safetensors"), (count - 1, "layer-0000.safetensors")):
        all_of(stop)
        stamp = (work / kept).stat().st_mtime_ns
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Finished, "remove", lambda _: None)
            all_of(0, 3 - size)
        assert (work / kept).stat().st_mtime_ns == stamp
        shutil.rmtree(work)
        assert content(out.parent).keys() == {"x.gguf"}
        out.unlink()

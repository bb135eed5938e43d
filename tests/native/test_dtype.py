"""Activations of a calibration in bfloat16: the files, what may go on from what, and a model that runs in it."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from calibrating import options
from checkpoints import NOVEL
from gguf_itq3s.calibrate import backward, gradients, layers, store
from gguf_itq3s.calibrate.activations import activation_path, activations
from gguf_itq3s.calibrate.backward import OutputFisher
from gguf_itq3s.calibrate.layers import LayeredModel
from gguf_itq3s.calibrate.moments import Moment
from gguf_itq3s.calibrate.statistics import calibrate
from gguf_itq3s.calibrate.store import read_manifest
from gguf_itq3s.calibrate.text import windows
from gguf_itq3s.checkpoint.reading import open_checkpoint
from gguf_itq3s.convert.options import ConvertOptions
from gguf_itq3s.convert.pipeline import convert

Make = Callable[[str], Path]


def quantized(model: Path, out: Path, **changes: Any) -> str:
    """A conversion that quantizes layer by layer, on ten windows of 64 tokens; returns what it printed."""
    messages = io.StringIO()
    values = {"effort": "fast", "tokens": 640, "context": 64, "batch": 4, **changes}
    convert(ConvertOptions.of(model, out, calibrate=(NOVEL,), **values), messages)
    return messages.getvalue()


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU that is quick at bfloat16."""
    monkeypatch.setattr(layers, "quick_bfloat16", lambda device: True)


# ------------------------------------------------------------------------------------------------------------- files


def nearest(value: np.float32) -> list[float]:
    """Of the numbers with 8 binary digits, the one or the two that are nearest to a finite one."""
    exponent = np.frexp(np.float64(value))[1]
    step = np.ldexp(1.0, max(int(exponent), -125) - 8)
    below = np.floor(np.float64(value) / step) * step
    distances = {number: abs(float(value) - number) for number in (below, below + step)}
    return [number for number, distance in distances.items() if distance == min(distances.values())]


def test_what_is_written_is_the_nearest_and_even(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    values = (random.standard_normal((5, 7, 16)) * 10.0 ** random.integers(-40, 38, (5, 7, 16))).astype(np.float32)
    values[0, 0, :6] = [1 + 2**-8, 1 + 3 * 2**-8, -1 - 2**-8, 0.0, np.inf, -np.inf]
    array = activations(tmp_path, 3, values.shape, "w+", "bfloat16")
    array[:2] = values[:2]
    array[np.array([4, 2, 3])] = values[[4, 2, 3]]
    array.flush()
    path = activation_path(tmp_path, 3, "bfloat16")
    assert path.name == "activations-0003.bf16" and path.stat().st_size == 2 * values.size
    found = activations(tmp_path, 3, values.shape, "r", "bfloat16")
    assert found.shape == values.shape and found[:].dtype == np.float32
    assert found[0, 0, :6].tolist() == [1, 1 + 2**-6, -1, 0, np.inf, -np.inf]
    np.testing.assert_array_equal(found[np.array([1, 3])][:, [0, 6]], found[:][[1, 3]][:, [0, 6]])
    assert np.array_equal(found[:].view(np.uint32) & 0xFFFF, np.zeros(values.shape))
    for wanted, got in zip(values.ravel()[6:], found[:].ravel()[6:], strict=True):
        assert float(got) in nearest(wanted)


def test_what_is_no_number_stays_none(tmp_path: Path) -> None:
    """Also one whose upper half alone would be infinity."""
    patterns = np.array([0x7F800001, 0xFF800001, 0x7FC00000, 0x7FFFFFFF], dtype=np.uint32).view(np.float32)
    array = activations(tmp_path, 0, (4,), "w+", "bfloat16")
    array[:] = patterns
    assert np.isnan(array[:]).all()


# --------------------------------------------------------------------------------------------------------- processors


@pytest.mark.parametrize(("amx", "avx512"), [(False, False), (True, False), (False, True)])
def test_processors_that_are_quick_at_bfloat16(amx: bool, avx512: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: amx, raising=False)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: avx512, raising=False)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: not including_emulation)
    assert layers.quick_bfloat16(torch.device("cpu")) == (amx or avx512)
    assert layers.quick_bfloat16(torch.device("cuda", 0))
    assert not layers.quick_bfloat16(torch.device("meta"))


# -------------------------------------------------------------------------------------------------------- statistics


@pytest.mark.parametrize("name", ["llama", "mixtral-few"])
@pytest.mark.usefixtures("quick")
def test_statistics_of_a_model_in_bfloat16_are_sums_in_float32(
    name: str, calibrated: Callable[[str], tuple[Path, Path]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, before = calibrated(name)
    own, within = Moment.add, []
    kinds: set[tuple[bool, torch.dtype]] = set()

    def add(self: Moment, *parts: torch.Tensor) -> None:
        within.append(torch.is_autocast_enabled("cpu"))
        own(self, *parts)

    load = LayeredModel.load

    def loaded(self: LayeredModel, number: int) -> torch.nn.Module:
        layer = load(self, number)
        kinds.update((parameter.ndim > 1, parameter.dtype) for parameter in layer.parameters())
        return layer

    monkeypatch.setattr(Moment, "add", add)
    monkeypatch.setattr(LayeredModel, "load", loaded)
    calibrate(options(model, dtype="bfloat16"), tmp_path / "out")
    assert within and not any(within)
    assert kinds == {(True, torch.bfloat16), (False, torch.float32)}
    manifest = read_manifest(tmp_path / "out")
    assert manifest.options["dtype"] == manifest.options["products"] == "bfloat16"
    here, there = store.Calibration(tmp_path / "out", manifest), store.Calibration(before, read_manifest(before))
    off: dict[bool, list[float]] = {False: [], True: []}  # by whether it is behind a choice of experts
    chosen = any("_exps" in entry for entry in there.entries)
    for entry in there.entries:
        tensor, _, expert = entry.rstrip("]").partition("[")
        number = int(expert) if expert else None
        found, wanted = here.hessian(tensor, number), there.hessian(tensor, number)
        assert found is not None and wanted is not None
        off[bool(expert) or (chosen and "blk.0." not in entry)].append(
            float(np.linalg.norm(found - wanted) / np.linalg.norm(wanted))
        )
    assert 1e-5 < max(off[False]) < 0.02
    assert max(off[True], default=0) < 0.1, "a token near the border goes to another expert"


# -------------------------------------------------------------------------------------------------------- conversions


@pytest.mark.parametrize("name", ["llama", "mixtral-few"])
@pytest.mark.usefixtures("quick")
def test_gradients_through_a_model_in_bfloat16(
    name: str, uneven: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against those in float32, of the same labels, as they are before they are drawn to anything."""
    monkeypatch.setattr(backward, "sampled", lambda logits, chances: (chances * 200).long())
    monkeypatch.setattr(gradients.GradientSums, "shrink_to_identity", lambda _: None)
    model, found = uneven(name), {}
    for dtype in ("float32", "bfloat16"):
        chosen = options(model, dtype=dtype)
        layered = LayeredModel(chosen, open_checkpoint(model))
        fisher = OutputFisher(tmp_path / dtype, full=1 << 20, block=1)
        fisher.collect(layered, windows(chosen, layered.context), 4, "key", io.StringIO())
        readers = [r for g in layered.layout.groups(1, layered.blocks[1]) for r in g.readers]
        found[dtype] = {reader.entry: fisher.blocks(reader, 1)[0] for reader in readers}
        assert not list((tmp_path / dtype).glob("**/activations*"))
    off = [
        np.linalg.norm(here - found["float32"][entry]) / np.linalg.norm(found["float32"][entry])
        for entry, here in found["bfloat16"].items()
    ]
    assert len(off) == (7 if name == "llama" else 4 + 3 * 4)
    # A token near the border goes to another expert.
    assert np.median(off) > 1e-5 and max(off) < (0.02 if name == "llama" else 0.1)

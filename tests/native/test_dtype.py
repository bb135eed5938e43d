"""Activations of a calibration in bfloat16: the files, what may go on from what, and a model that runs in it."""

from __future__ import annotations

import io
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from calibrating import options
from checkpoints import NOVEL
from gguf_itq3s.base.errors import UserError
from gguf_itq3s.calibrate import backward, gradients, layers, store
from gguf_itq3s.calibrate.activations import Activations, activation_path, activations
from gguf_itq3s.calibrate.backward import OutputFisher
from gguf_itq3s.calibrate.layers import LayeredModel
from gguf_itq3s.calibrate.moments import Moment
from gguf_itq3s.calibrate.run import Sequential
from gguf_itq3s.calibrate.statistics import calibrate
from gguf_itq3s.calibrate.store import read_manifest
from gguf_itq3s.calibrate.text import windows
from gguf_itq3s.checkpoint.reading import open_checkpoint
from gguf_itq3s.codec.family import is_trellis
from gguf_itq3s.convert.options import ConvertOptions
from gguf_itq3s.convert.pipeline import convert
from selection import some

Make = Callable[[str], Path]


def quantized(model: Path, out: Path, **changes: Any) -> str:
    """A conversion that quantizes layer by layer, on ten windows of 64 tokens; returns what it printed."""
    messages = io.StringIO()
    values = {"effort": "fast", "tokens": 640, "context": 64, "batch": 4, **changes}
    convert(ConvertOptions.of(model, out, calibrate=(NOVEL,), **values), messages)
    return messages.getvalue()


def divergence(printed: str) -> float:
    """On the tokens that were held out."""
    found = re.search(r"mean KL divergence ([\d.]+)", printed)
    assert found
    return float(found[1])


def decoded(path: Path) -> dict[str, np.ndarray]:
    """Trellis-coded matrices of the layers of a file, float32."""
    tensors = [tensor for tensor in gguf.GGUFReader(path).tensors if tensor.name.startswith("blk.")]
    return {t.name: gguf.quants.dequantize(t.data, t.tensor_type) for t in tensors if is_trellis(t.tensor_type)}


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


def test_float32_is_mapped_as_it_is(tmp_path: Path) -> None:
    values = np.linspace(-1, 1, 24, dtype=np.float32).reshape(2, 3, 4)
    array: Activations = activations(tmp_path, 0, values.shape, "w+", partial=True)
    array[:] = values
    array.flush()
    path = activation_path(tmp_path, 0, partial=True)
    assert isinstance(array, np.memmap) and path.name == "activations-0000.f32.partial"
    assert path.read_bytes() == values.tobytes()


# --------------------------------------------------------------------------------------------------------- processors


@pytest.mark.parametrize(("amx", "avx512"), [(False, False), (True, False), (False, True)])
def test_processors_that_are_quick_at_bfloat16(amx: bool, avx512: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: amx, raising=False)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: avx512, raising=False)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: not including_emulation)
    assert layers.quick_bfloat16(torch.device("cpu")) == (amx or avx512)
    assert layers.quick_bfloat16(torch.device("cuda", 0))
    assert not layers.quick_bfloat16(torch.device("meta"))


def test_a_torch_that_does_not_say_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_is_amx_tile_supported", "_is_avx512_bf16_supported"):
        monkeypatch.delattr(torch.cpu, name, raising=False)
    assert not layers.quick_bfloat16(torch.device("cpu"))


# -------------------------------------------------------------------------------------------------------- statistics


@pytest.mark.parametrize("name", ["llama", "gemma", "mixtral-few"])
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


def test_a_folder_of_another_dtype_is_refused(
    calibrated: Callable[[str], tuple[Path, Path]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And one of float32 says what those of earlier versions said."""
    monkeypatch.setattr(layers, "quick_bfloat16", lambda device: False)
    model, before = calibrated("llama")
    assert set(read_manifest(before).options) == {"context", "hessian"}
    with pytest.raises(UserError, match="other options"):
        calibrate(options(model, dtype="bfloat16"), before)
    calibrate(options(model, dtype="bfloat16"), tmp_path / "out")
    assert read_manifest(tmp_path / "out").options["products"] == "float32"
    with pytest.raises(UserError, match="other options"):
        calibrate(options(model), tmp_path / "out")


@pytest.mark.usefixtures("quick")
def test_a_calibration_in_bfloat16_goes_on(
    calibrated: Callable[[str], tuple[Path, Path]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, _ = calibrated("llama")
    calibrate(options(model, dtype="bfloat16"), tmp_path / "whole")
    step, calls = LayeredModel.step, []

    def interrupted(self: LayeredModel, *args: Any) -> np.ndarray:
        calls.append(1)
        if len(calls) == 5:  # three batches a layer: in the middle of the second
            raise KeyboardInterrupt
        return step(self, *args)

    monkeypatch.setattr(LayeredModel, "step", interrupted)
    out = tmp_path / "broken"
    with pytest.raises(KeyboardInterrupt):
        calibrate(options(model, dtype="bfloat16"), out)
    assert (out / "activations-0001.bf16").stat().st_size == 2 * 640 * 256
    calibrate(options(model, dtype="bfloat16"), out)
    assert len(calls) == 8, "the first layer is not run again"
    assert {path.name: path.read_bytes() for path in out.iterdir()} == {
        path.name: path.read_bytes() for path in (tmp_path / "whole").iterdir()
    }


# -------------------------------------------------------------------------------------------------------- conversions


@pytest.mark.parametrize(
    ("name", "in_bfloat16"),
    some(
        [("llama", True), ("mixtral-few", True), ("gemma", True), ("llama", False)],
        lambda name, in_bfloat16: in_bfloat16 and name != "gemma",
    ),
)
def test_a_conversion_loses_no_more(
    name: str, in_bfloat16: bool, uneven: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the model in bfloat16, and with the files alone."""
    monkeypatch.setattr(layers, "quick_bfloat16", lambda device: in_bfloat16)
    lost, files = {}, {}
    for dtype in ("float32", "bfloat16"):
        printed = quantized(uneven(name), tmp_path / f"{dtype}.gguf", fisher=True, dtype=dtype)
        lost[dtype], files[dtype] = divergence(printed), decoded(tmp_path / f"{dtype}.gguf")
    assert 0 < lost["bfloat16"] < 1.25 * lost["float32"]
    assert files["bfloat16"].keys() == files["float32"].keys()
    for tensor, weights in files["float32"].items():
        # Rounding is chaotic: the two are as far apart as where inputs differ by 1e-5, up to 0.58.
        off = np.linalg.norm(files["bfloat16"][tensor] - weights) / np.linalg.norm(weights)
        assert 0 < off < 0.65, tensor


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
        readers = [r for g in layered.layout.groups(1, layered.base.layers[1]) for r in g.readers]
        found[dtype] = {reader.entry: fisher.blocks(reader, 1)[0] for reader in readers}
        assert not list((tmp_path / dtype).glob("**/activations*"))
    off = [
        np.linalg.norm(here - found["float32"][entry]) / np.linalg.norm(found["float32"][entry])
        for entry, here in found["bfloat16"].items()
    ]
    assert len(off) == (7 if name == "llama" else 4 + 3 * 4)
    # A token near the border goes to another expert.
    assert np.median(off) > 1e-5 and max(off) < (0.02 if name == "llama" else 0.1)


def test_gradients_of_another_precision_are_collected_anew(
    uneven: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = []

    def collect(self: Any, model: Any, windows: Any, batch: int, key: str, messages: Any) -> None:
        keys.append(key)
        raise KeyboardInterrupt

    monkeypatch.setattr(OutputFisher, "collect", collect)
    for dtype, answer in (("float32", False), ("float32", True), ("bfloat16", False), ("bfloat16", True)):
        monkeypatch.setattr(layers, "quick_bfloat16", lambda device, answer=answer: answer)
        with pytest.raises(KeyboardInterrupt):
            quantized(uneven("llama"), tmp_path / "x.gguf", fisher=True, dtype=dtype)
    assert keys[0] == keys[1] and len(set(keys)) == 3


def test_an_interrupted_conversion_goes_on_in_its_dtype_alone(
    uneven: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, out, other = uneven("llama"), tmp_path / "broken.gguf", tmp_path / "other.gguf"
    announced = {"bfloat16": quantized(model, tmp_path / "whole.gguf", dtype="bfloat16")}
    stages: list[int] = []
    own = Sequential._stage

    def stage(self: Any, number: int, *rest: Any) -> Any:
        stages.append(number)
        if len(stages) == 6:
            raise KeyboardInterrupt
        return own(self, number, *rest)

    monkeypatch.setattr(Sequential, "_stage", stage)
    with pytest.raises(KeyboardInterrupt):
        quantized(model, out, dtype="bfloat16")
    work = tmp_path / "broken.gguf.calibrating"
    assert {path.name for path in work.glob("original/*.*")} == {"activations-0001.bf16"}
    shutil.copytree(work, tmp_path / "other.gguf.calibrating")
    quantized(model, out, dtype="bfloat16")
    assert stages[6:] == [1, 1, 1, 1], "layer 0 was not done again"
    assert out.read_bytes() == (tmp_path / "whole.gguf").read_bytes()
    announced["float32"] = quantized(model, other, dtype="float32")
    assert stages[10:] == [0, 0, 0, 0, 1, 1, 1, 1], "of another dtype nothing is gone on with"
    assert other.read_bytes() != out.read_bytes()
    # What it takes of the disk is said: both streams twice, what is kept of both, and the file.
    sizes = {dtype: _size(re.search(r"memory, ([\d.]+) (\w+) of disk", text)) for dtype, text in announced.items()}
    assert sizes["float32"] - sizes["bfloat16"] == pytest.approx(2 * 640 * (4 * 256 + 2 * (256 + 512)), rel=0.02)


def _size(found: re.Match[str] | None) -> float:
    assert found
    return float(found[1]) * {"KiB": 1 << 10, "MiB": 1 << 20}[found[2]]


def test_what_decides_a_file_of_float32_is_what_it_was(tmp_path: Path) -> None:
    """Folders of work that earlier versions left go on."""
    assert "dtype" not in ConvertOptions.of(tmp_path).deciding()
    assert ConvertOptions.of(tmp_path, dtype="bfloat16").deciding()["dtype"] == "bfloat16"

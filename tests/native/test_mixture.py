"""Experts that are loaded, summed and rounded in groups: the sums of one group of all, and nearly the same file."""

from __future__ import annotations

import io
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from checkpoints import NOVEL
from gguf_itq3s.calibrate import experts
from gguf_itq3s.calibrate.activations import activations
from gguf_itq3s.calibrate.backward import OutputFisher
from gguf_itq3s.calibrate.layers import LayeredModel
from gguf_itq3s.calibrate.options import CalibrationOptions
from gguf_itq3s.calibrate.shares import split
from gguf_itq3s.calibrate.streams import Streams, Sums
from gguf_itq3s.calibrate.text import windows
from gguf_itq3s.checkpoint.reading import open_checkpoint
from gguf_itq3s.checkpoint.rescaling import fold
from selection import some

SMALL: dict[str, Any] = {"tokens": 640, "context": 64, "batch": 4}


@pytest.fixture
def any_tokenizer(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tokenizer of the tests is none that llama.cpp knows for Qwen."""
    from gguf_itq3s import upstream

    monkeypatch.setattr(upstream.load_conversion().base.TextModel, "get_vocab_base_pre", lambda *_: "qwen2")


def streams_of_layer_0(folder: Path, place: Path) -> Streams:
    """Both streams, with inputs that are not the same."""
    options = CalibrationOptions(folder, [NOVEL], **SMALL)
    model = LayeredModel(options, open_checkpoint(folder))
    ids = windows(options, model.context)
    batches = split(len(ids), 4)
    place.mkdir()
    keywords = model.start(place, ids, batches.all, 0)
    inputs = np.array(activations(place, 0, (*ids.shape, model.hidden), "r"))
    folders = (place / "original", place / "quantized")
    for part in folders:
        part.mkdir()
    noise = np.random.default_rng(0).standard_normal(inputs.shape).astype(np.float32)
    now = inputs + 0.2 * inputs.std() * noise
    return Streams(model, 0, options, (inputs, now), batches, keywords[0], lambda _: None, folders)


def gone_through(streams: Streams) -> tuple[dict[str, Sums], list[np.ndarray]]:
    """All sums, each stage disturbed behind its own, and the outputs."""
    found: dict[str, Sums] = {}
    for stage in streams.stages:
        found |= streams.sums(stage)
        for reader in [reader for group in stage for reader in group.readers]:
            weights = streams.weights(reader)
            noise = np.random.default_rng(len(reader.entry) + (reader.expert or 0)).standard_normal(weights.shape)
            streams.put(reader, weights + 0.3 * weights.std() * noise.astype(np.float32))
    outputs = [np.concatenate(part) for part in zip(*map(streams.step, streams._batches.all), strict=True)]
    streams.close()
    return found, outputs


def test_the_sums_of_groups_are_those_of_all_experts_together(
    uneven: Callable[[str], Path], few: Callable[[int], None], tmp_path: Path
) -> None:
    name, size = "mixtral", 3
    wanted, ends = gone_through(streams_of_layer_0(uneven(name), tmp_path / "together"))
    few(size)
    streams = streams_of_layer_0(uneven(name), tmp_path / "groups")
    sizes = [len(stage) for stage in streams.stages if stage[0].expert is not None]
    assert sizes == [3, 3, 3, 3, 2, 2]
    found, outputs = gone_through(streams)
    assert found.keys() == wanted.keys()
    for key, sums in wanted.items():
        for ours, theirs in ((found[key].hessian, sums.hessian), (found[key].cross, sums.cross)):
            assert ours.tokens == theirs.tokens
            if theirs.total is not None:
                torch.testing.assert_close(
                    ours.total, theirs.total, rtol=1e-6, atol=1e-6 * float(theirs.total.abs().max())
                )
        held, others = found[key].held, sums.held
        assert (held is None) == (others is None)
        if held is not None and others is not None:
            torch.testing.assert_close(held.inputs, others.inputs, rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(held.difference, others.difference, rtol=1e-5, atol=1e-5)
    for output, end in zip(outputs, ends, strict=True):
        np.testing.assert_allclose(output, end, atol=1e-5 * np.abs(end).max())
    assert np.abs(outputs[0] - outputs[1]).max() > 0.01
    assert not list((tmp_path / "groups").rglob("*/kept"))


@pytest.mark.parametrize(
    ("name", "size", "full"),
    some([("mixtral-few", 3, 1 << 20), ("qwen2-moe", 1, 64)], lambda name, *_: name == "qwen2-moe"),
)
def test_output_fisher_matrices_of_groups_are_those_of_all_experts_together(
    name: str, size: int, full: int, uneven: Callable[[str], Path], few: Callable[[int], None], any_tokenizer: None,
    tmp_path: Path,
) -> None:  # fmt: skip
    options = CalibrationOptions(uneven(name), [NOVEL], **SMALL)
    found, said = [], []
    for folder, large in (("together", False), ("groups", True)):
        if large:
            few(size)
        model = LayeredModel(options, open_checkpoint(uneven(name)))
        fisher, messages = OutputFisher(tmp_path / folder, full=full, block=64), io.StringIO()
        fisher.collect(model, windows(options, model.context), 4, "key", messages)
        layers = [model.layout.groups(number, model.blocks[number]) for number in range(2)]
        readers = [(number, reader) for number in range(2) for group in layers[number] for reader in group.readers]
        found.append({reader.entry: fisher.blocks(reader, number) for number, reader in readers})
        said.append([line for line in messages.getvalue().splitlines() if line.startswith("note: ")])
    wanted, ours = found
    assert said[0] == said[1] and len(said[0]) == 1
    assert ours.keys() == wanted.keys() and any("exps" in key for key in wanted)
    for key, blocks in wanted.items():
        assert len(ours[key]) == len(blocks) > 0
        for own, other in zip(ours[key], blocks, strict=True):
            np.testing.assert_allclose(own, other, atol=1e-4 * np.abs(other).max())
    files = list((tmp_path / "groups").iterdir())
    assert len([path for path in files if path.name.endswith("-down.safetensors")]) == 2 * -(-4 // size)
    assert all(path.suffix in (".safetensors", ".json") for path in files)


@pytest.mark.parametrize("stacked", [False, True])
def test_experts_are_read_one_at_a_time(
    stacked: bool, uneven: Callable[[str], Path], any_tokenizer: None, tmp_path: Path
) -> None:
    """From checkpoints that have them one by one and from those that stack them, for the model and for the file."""
    folder = uneven("qwen3-moe")
    if stacked:
        folder = shutil.copytree(folder, tmp_path / "stacked")
        tensors = load_file(folder / "model.safetensors")
        for layer in range(2):
            place = f"model.layers.{layer}.mlp.experts"
            parts = {
                part: torch.stack([tensors.pop(f"{place}.{number}.{part}_proj.weight") for number in range(4)])
                for part in ("gate", "up", "down")
            }
            tensors[f"{place}.gate_up_proj"] = torch.cat([parts["gate"], parts["up"]], dim=1)
            tensors[f"{place}.down_proj"] = parts["down"]
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    opened = open_checkpoint(folder)
    folded = fold(opened).apply(opened.tensors, folder)
    for tensors_of in (opened.tensors, folded):
        for tensor in tensors_of:
            if "exps" in tensor.name:
                whole = tensor.whole()
                for number in range(4):
                    np.testing.assert_array_equal(tensor.matrix(number), whole[number])
    found = experts.find(LayeredModel(CalibrationOptions(folder, [NOVEL], **SMALL), opened), 1)
    assert found is not None
    every, part = found.load(range(4)), found.load(range(1, 3))
    for number in part.numbers:
        for one, other in zip(part.matrices(number), every.matrices(number), strict=True):
            assert torch.equal(one, other) and one.any()

"""Quantizing layer by layer: the sums of two streams, Fisher matrices, resuming, what comes out."""

from __future__ import annotations

import io
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers

from checkpoints import FAMILIES, NOVEL, SIZES, save_model
from gguf_itq3s.base.errors import UserError
from gguf_itq3s.calibrate import backward, gradients, run
from gguf_itq3s.calibrate.activations import activations
from gguf_itq3s.calibrate.backward import OutputFisher, sampled
from gguf_itq3s.calibrate.layers import LayeredModel
from gguf_itq3s.calibrate.matrices import Matrix
from gguf_itq3s.calibrate.options import CalibrationOptions
from gguf_itq3s.calibrate.run import Sequential
from gguf_itq3s.calibrate.shares import Batches, Share, split
from gguf_itq3s.calibrate.statistics import calibrate
from gguf_itq3s.calibrate.streams import Streams
from gguf_itq3s.calibrate.text import windows
from gguf_itq3s.checkpoint.reading import open_checkpoint
from gguf_itq3s.cli import convert_main
from gguf_itq3s.codec.family import is_trellis
from gguf_itq3s.convert.options import ConvertOptions
from gguf_itq3s.convert.pipeline import convert
from gguf_itq3s.rounding import hessian
from quantized import quantized

SMALL: dict[str, Any] = {"tokens": 640, "context": 64, "batch": 4}


def calibration(model: Path, **changes: Any) -> CalibrationOptions:
    return CalibrationOptions(model, [NOVEL], **{**SMALL, **changes})


def asked(model: Path, out: Path, **changes: Any) -> ConvertOptions:
    """A conversion that quantizes layer by layer, on ten windows of 64 tokens."""
    return ConvertOptions.of(model, out, calibrate=(NOVEL,), **{"effort": "fast", **SMALL, **changes})


def matrices(path: Path) -> dict[str, bytes]:
    """Trellis-coded tensors of a file."""
    return {t.name: t.data.tobytes() for t in gguf.GGUFReader(path).tensors if is_trellis(t.tensor_type)}


def quiet(options: ConvertOptions) -> None:
    convert(options, io.StringIO())


# ------------------------------------------------------------------------------------------------------------- sums


class Full:
    """A whole model of Transformers in float32, and what its modules are called with."""

    def __init__(self, folder: Path) -> None:
        self.model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self.seen: dict[str, torch.Tensor] = {}
        for name, module in self.model.named_modules():
            module.register_forward_pre_hook(self._keep(name))

    def _keep(self, name: str) -> Callable[..., None]:
        def hook(_: Any, args: tuple[Any, ...]) -> None:
            if args and isinstance(args[0], torch.Tensor):
                self.seen[name] = args[0].detach()

        return hook

    def inputs(self, ids: np.ndarray, name: str) -> np.ndarray:
        """float64 (tokens, n): the input of a module over all windows."""
        with torch.no_grad():
            self.model(torch.from_numpy(ids))
        x = self.seen[name]
        return x.reshape(-1, x.shape[-1]).double().numpy()


def streams_of_layer_0(
    folder: Path, place: Path, scales: Callable[[Any], np.ndarray | None] = lambda _: None
) -> tuple[Streams, LayeredModel, np.ndarray]:
    """Both streams with the same inputs, layer 0."""
    options = calibration(folder)
    model = LayeredModel(options, open_checkpoint(folder))
    ids = windows(options, model.context)
    batches = split(len(ids), 4)
    place.mkdir()
    keywords = model.start(place, ids, batches.all, 0)
    inputs = activations(place, 0, (*ids.shape, model.hidden), "r")
    folders = (place / "original", place / "quantized")
    for part in folders:
        part.mkdir()
    return Streams(model, 0, options, (inputs, inputs), batches, keywords[0], scales, folders), model, ids


def disturb(streams: Streams, after: Full, stages: range) -> None:
    """Add noise to matrices of the quantized layer, and to those of a whole model."""
    noise = torch.Generator().manual_seed(0)
    for reader in [reader for number in stages for reader in streams.stages[number][0].readers]:
        weights = streams.weights(reader)
        weights += 0.3 * weights.std() * torch.randn(weights.shape, generator=noise).numpy()
        streams.put(reader, weights)
        after.model.model.layers[0].get_submodule(reader.path).weight.data.copy_(torch.from_numpy(weights))


@pytest.mark.parametrize(("name", "scaled"), [("llama", False), ("llama-short", True)])
def test_the_sums_are_those_of_two_whole_models(
    name: str, scaled: bool, uneven: Callable[[str], Path], tmp_path: Path
) -> None:
    """In the basis of the file, whose columns may be scaled, with and without the windows that are held out."""
    folder = uneven(name)
    hidden, inner = (256, 512) if name == "llama" else (192, 320)
    factors = {hidden: np.linspace(0.5, 2, hidden, dtype=np.float32), inner: np.linspace(3, 1, inner, dtype=np.float32)}
    streams, _, ids = streams_of_layer_0(
        folder,
        tmp_path / "work",
        lambda reader: factors[inner if "down" in reader.name else hidden] if scaled else None,
    )
    names = [[group.readers[0].name for group in stage] for stage in streams.stages]
    assert names == [[f"blk.0.{part}.weight"] for part in ("attn_q", "attn_output", "ffn_gate", "ffn_down")]
    before, after = Full(folder), Full(folder)
    numbers = split(len(ids), 4)
    train, held = (np.concatenate(part) for part in (numbers.train, numbers.held))
    assert len(train) == 9 and len(held) == 1

    modules = ("self_attn.q_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.down_proj")
    streams_before = {1: "input_layernorm", 3: "post_attention_layernorm"}
    for number, module in enumerate(modules):
        if number:
            disturb(streams, after, range(number - 1, number))
        (group,) = streams.stages[number]
        sums = streams.sums([group])[group.key]
        factor = factors[group.columns].astype(np.float64) if scaled else 1.0
        weights = before.model.model.layers[0].get_submodule(module).weight.detach().double().numpy()

        for windows_of, is_held in ((train, False), (held, True)):
            ids_of = ids[windows_of]

            def direct(model: Full, name: str, ids_of: np.ndarray = ids_of) -> np.ndarray:
                return model.inputs(ids_of, f"model.layers.0.{name}")

            x, now = direct(before, module), direct(after, module)
            lacking = (x - now) @ weights.T
            if number in streams_before:
                r, r_now = (direct(model, streams_before[number]) for model in (before, after))
                behind = r + x @ weights.T
                root = 1 / np.sqrt(np.square(behind).mean(axis=1, keepdims=True))
                x, now, lacking = x * root, now * root, (lacking + r - r_now) * root
            x, now = x / factor, now / factor
            if number:
                assert np.abs(x - now).max() > 1e-3
            if is_held:
                assert sums.held is not None
                for found, wanted in ((sums.held.inputs, now), (sums.held.difference, x - now)):
                    rotated = hessian.rotate_rows(found.numpy())
                    np.testing.assert_allclose(rotated, wanted, atol=1e-4 * np.abs(now).max())
                assert (sums.held.written is not None) == (number in streams_before)
                if sums.held.written is not None:
                    np.testing.assert_allclose(sums.held.written, (r - r_now) * root, atol=1e-4)
                continue
            scale = np.abs(now.T @ now).max()
            assert sums.hessian.total is not None
            np.testing.assert_allclose(hessian.rotate(sums.hessian.total.numpy()), now.T @ now, atol=1e-4 * scale)
            if number in streams_before:
                assert sums.missing is not None and sums.cross.total is None
                found = hessian.rotate_rows(sums.missing.numpy())
                wanted = lacking.T @ now
                np.testing.assert_allclose(found, wanted, atol=1e-4 * max(1.0, np.abs(wanted).max()))
            else:
                assert sums.cross.total is not None
                cross = hessian.rotate(sums.cross.total.numpy())
                np.testing.assert_allclose(cross, (x - now).T @ now, atol=1e-4 * scale)


def test_layers_that_run_from_what_was_kept_give_what_whole_ones_give(
    uneven: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = uneven("qwen3")
    streams, _, ids = streams_of_layer_0(folder, tmp_path / "work")
    assert set(streams._shortcuts) == {"self_attn.o_proj", "mlp.down_proj"}
    after = Full(folder)
    for number, stage in enumerate(streams.stages):
        streams.sums(stage)
        disturb(streams, after, range(number, number + 1))
    for batch in split(len(ids), 4).all:
        original, quantized = streams.step(batch)
        wanted = [model.inputs(ids[batch], "model.layers.1").reshape(original.shape) for model in (Full(folder), after)]
        np.testing.assert_allclose(original, wanted[0], atol=1e-4)
        np.testing.assert_allclose(quantized, wanted[1], atol=1e-4)
        assert np.abs(wanted[1] - wanted[0]).max() > 0.01
    streams.close()
    assert not list((tmp_path / "work").rglob("*/kept"))


def test_a_tenth_of_the_windows_is_held_out_and_some_of_their_tokens_are_kept() -> None:
    for count, held, tokens in ((1, 0, 0), (2, 1, 512), (25, 2, 1024), (400, 32, 3277)):
        found = split(count, 4)
        numbers = np.concatenate(found.all)
        assert sorted(numbers) == list(range(count)) and all(len(part) <= 4 for part in found.all)
        assert sum(map(len, found.held)) == held
        kept = np.arange(400 * 512)[found.kept(512)]
        # 16,384 at steps of 5, so that they stand at every place of a window.
        assert len(kept) == tokens and (tokens < 1024 or set(kept % 512) == set(range(512)))


# ----------------------------------------------------------------------------------------------------------- results


@pytest.mark.parametrize("name", ["llama-short", "mixtral"])
def test_where_nothing_changes_the_result_is_that_of_a_calibration(
    name: str, uneven: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With x' = x, nothing held out and all tokens alike, the codes are those of --calibration on the same text."""
    everything = Batches(tuple(np.arange(10)[i : i + 4] for i in range(0, 10, 4)), ())
    monkeypatch.setattr(run, "share", lambda *_: Share(np.arange(10), everything))
    monkeypatch.setattr(Streams, "put", lambda *_: None)
    monkeypatch.setattr(Streams, "_find_writers", lambda *_: ({}, {}))
    more: dict[str, Any] = {"damping": 0.01, "token_embedding_type": "f16"}
    quiet(asked(uneven(name), tmp_path / "sequential.gguf", **more))
    calibrate(calibration(uneven(name)), tmp_path / "hessians")
    options = ConvertOptions.of(
        uneven(name), tmp_path / "x.gguf", calibration=tmp_path / "hessians", effort="fast", **more
    )
    quiet(options)
    found, wanted = matrices(tmp_path / "sequential.gguf"), matrices(tmp_path / "x.gguf")
    assert found.keys() == wanted.keys() and any(".attn_q." in key for key in found)
    # Sums are rounded differently, and a code may lie between two paths.
    same = [np.mean(np.frombuffer(found[key], np.uint8) == np.frombuffer(wanted[key], np.uint8)) for key in found]
    assert min(same) > 0.98


def output_error(path: Path, folder: Path, ids: np.ndarray) -> float:
    """Mean KL divergence of the model with the matrices of a file from the model itself."""
    transformers.utils.logging.set_verbosity_error()
    original = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    quantized = transformers.AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    with torch.no_grad():
        p, q = (torch.log_softmax(model(torch.from_numpy(ids)).logits, -1) for model in (original, quantized))
    return float((p.exp() * (p - q)).sum(-1).mean())


@pytest.fixture(scope="module")
def massive(tmp_path_factory: pytest.TempPathFactory, tokenizer: Path) -> Path:
    """A model with 40 blocks of feed-forward columns, a few of whose tokens have a stream 300 times as large."""
    kind, changes = FAMILIES["llama"]
    torch.manual_seed(0)
    config = getattr(transformers, kind)(**{**SIZES, **changes, "intermediate_size": 10240}, initializer_range=0.05)
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        model.get_input_embeddings().weight[:40] *= 300
    return save_model(model.half(), tmp_path_factory.mktemp("massive") / "llama", tokenizer)


def test_wide_matrices_and_massive_tokens_do_not_diverge(massive: Path, tmp_path: Path) -> None:
    """Each of 40 blocks used to make up for the whole error of the stream, and massive tokens decided all else."""
    kept: dict[str, Any] = {"pure": True, "token_embedding_type": "f16", "output_tensor_type": "f16", "threads": 2}
    quiet(ConvertOptions.of(massive, tmp_path / "nearest.gguf", effort="fast", **kept))
    messages = io.StringIO()
    (tmp_path / "other.txt").write_text(NOVEL.read_text()[::-1])
    options = asked(massive, tmp_path / "x.gguf", hessian="block", **{**kept, "tokens": 1280})
    convert(replace(options, run=replace(options.run, text=(NOVEL, tmp_path / "other.txt"))), messages)
    ids = windows(calibration(massive, tokens=1280), 64)[1::2]
    nearest, found = (output_error(tmp_path / f"{name}.gguf", massive, ids) for name in ("nearest", "x"))
    assert found < 1.5 * nearest
    (line,) = [line for line in messages.getvalue().splitlines() if "held out" in line]
    said = re.fullmatch(r"on (\d+) tokens that were held out: perplexity (\S+), of the original (\S+); .* (\S+)", line)
    assert said and int(said[1]) == 62 and float(said[4]) < 1.5 * nearest
    (apart,) = re.findall(r"by text: novel.txt (\S+), other.txt (\S+)", messages.getvalue())
    assert np.mean([*map(float, apart)]) == pytest.approx(float(said[4]), abs=1e-4) and apart[0] != apart[1]


def test_what_is_lost_stops_and_leaves_no_file(
    uneven: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    own = Matrix.encode

    def broken(self: Any, *rest: Any) -> tuple[np.ndarray, np.ndarray]:
        data, decoded = own(self, *rest)
        return data, 30 * decoded if decoded.shape[1] == 512 else decoded  # ffn_down, the last one of a layer

    monkeypatch.setattr(Matrix, "encode", broken)
    out = tmp_path / "x.gguf"
    arguments = ["--calibrate", str(NOVEL), "--tokens", "640", "--context", "64", "--effort", "fast"]
    assert convert_main([str(uneven("llama")), str(out), *arguments]) == 1
    assert "is lost behind layer 0: its outputs are" in capsys.readouterr().err.splitlines()[-1]
    assert not out.exists()


def test_codes_are_quantized_as_what_they_mean(uneven: Callable[[str], Path], tmp_path: Path) -> None:
    """A checkpoint in FP8 gives the file that its weights in floats give."""
    files = []
    for folder in quantized(uneven("llama"), tmp_path, "fp8-blocks"):
        files.append(tmp_path / f"{folder.name}.gguf")
        quiet(asked(folder, files[-1]))
    coded, floats = map(matrices, files)
    assert coded == floats and len(coded) == 13


@pytest.mark.parametrize("fisher", [False, True])
def test_an_interrupted_run_goes_on_to_the_same_bytes(
    fisher: bool, uneven: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = uneven("llama")
    quiet(asked(folder, tmp_path / "whole.gguf", fisher=fisher))
    out = tmp_path / "broken.gguf"
    stages, backwards = [], []
    own, own_backward = Sequential._stage, OutputFisher._backward

    def stage(self: Any, number: int, *rest: Any) -> Any:
        stages.append(number)
        if len(stages) == 6:
            raise KeyboardInterrupt
        return own(self, number, *rest)

    def backward(self: Any, model: Any, number: int, *rest: Any, **more: Any) -> tuple[int, int]:
        backwards.append(number)
        if len(backwards) == 2:
            raise KeyboardInterrupt
        return own_backward(self, model, number, *rest, **more)

    monkeypatch.setattr(Sequential, "_stage", stage)
    monkeypatch.setattr(OutputFisher, "_backward", backward)
    for _ in range(1 + fisher):
        with pytest.raises(KeyboardInterrupt, match="the same command continues from"):
            quiet(asked(folder, out, fisher=fisher))
        assert not out.exists()
    quiet(asked(folder, out, fisher=fisher))
    assert stages == [0, 0, 0, 0, 1, 1, 1, 1, 1, 1]  # layer 0 was not done again
    assert matrices(out) == matrices(tmp_path / "whole.gguf")
    assert out.read_bytes() == (tmp_path / "whole.gguf").read_bytes()
    assert {path.name for path in tmp_path.iterdir()} == {"whole.gguf", "broken.gguf"}


def test_a_folder_of_somebody_elses_is_left_alone(uneven: Callable[[str], Path], tmp_path: Path) -> None:
    work = tmp_path / "x.gguf.calibrating"
    work.mkdir()
    (work / "thesis.txt").write_text("mine")
    with pytest.raises(UserError, match="in the way"):
        quiet(asked(uneven("llama"), tmp_path / "x.gguf"))
    assert (work / "thesis.txt").read_text() == "mine"


def test_a_disk_that_is_too_small_is_found_before(
    uneven: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = type(shutil.disk_usage(tmp_path))
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(1 << 20, 1 << 20, 1000))
    with pytest.raises(UserError, match=r"while it calibrates, \d+\.\d+ KiB are free"):
        quiet(asked(uneven("llama"), tmp_path / "x.gguf"))
    assert not list(tmp_path.iterdir())


# ------------------------------------------------------------------------------------------------------------ Fisher


def test_labels_follow_the_predictions_and_do_not_depend_on_their_company() -> None:
    logits = torch.tensor([0.0, 2.0, -1.0, 1.0, -torch.inf]).repeat(40000, 1)
    chances = torch.rand(40000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    labels = sampled(logits, chances)
    share = torch.bincount(labels, minlength=5) / 40000
    torch.testing.assert_close(share, torch.softmax(logits[0], -1), atol=0.01, rtol=0)
    assert torch.equal(labels[100:200], sampled(logits[100:200], chances[100:200]))
    assert not (labels == 4).any()


@pytest.mark.parametrize("block", [None, 64])
def test_output_fisher_matrices_are_those_of_autograd(
    block: int | None, uneven: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backward, "CHUNK", 100)  # no multiple of a window
    monkeypatch.setattr(gradients.GradientSums, "shrink_to_identity", lambda _: None)
    folder = uneven("llama")
    options = calibration(folder)
    model = LayeredModel(options, open_checkpoint(folder))
    ids = windows(options, model.context)
    fisher = OutputFisher(tmp_path / "fisher", full=1 << 20 if block is None else 1, block=block or 1)
    fisher.collect(model, ids, 4, "key", io.StringIO())
    whole = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    whole.requires_grad_(True)
    outputs: dict[str, torch.Tensor] = {}
    names = {"blk.0.attn_q.weight": "self_attn.q_proj", "blk.1.ffn_down.weight": "mlp.down_proj"}
    for name, path in names.items():
        module = whole.model.layers[int(name[4])].get_submodule(path)
        module.register_forward_hook(lambda _, __, out, name=name: outputs.__setitem__(name, out))
    generator, sums = torch.Generator().manual_seed(0), {name: np.zeros((0, 0)) for name in names}
    for numbers in split(len(ids), 4).all:
        logits = whole(torch.from_numpy(ids[numbers])).logits.flatten(0, 1)
        labels = sampled(logits.detach(), torch.rand(len(logits), generator=generator, dtype=torch.float64))
        loss = torch.nn.functional.cross_entropy(logits, labels, reduction="sum")
        for name, gradient in zip(names, torch.autograd.grad(loss, [outputs[name] for name in names]), strict=True):
            rows = gradient.reshape(-1, gradient.shape[-1]).double().numpy()
            sums[name] = rows.T @ rows / ids.size + (sums[name] if sums[name].size else 0)
    for name in names:
        readers = [r for g in model.layout.groups(int(name[4]), model.blocks[int(name[4])]) for r in g.readers]
        (reader,) = [reader for reader in readers if reader.name == name]
        parts = fisher.blocks(reader, int(name[4]))
        size = sums[name].shape[0] if block is None else block
        assert len(parts) == sums[name].shape[0] // size
        for number, part in enumerate(parts):
            rows = slice(number * size, (number + 1) * size)
            np.testing.assert_allclose(part, sums[name][rows, rows], atol=1e-3 * np.abs(sums[name]).max())


def test_output_fisher_matrices_of_experts_are_those_of_autograd(uneven: Callable[[str], Path], tmp_path: Path) -> None:
    """Of each expert over its own tokens, by all of them, drawn to the mean of all experts or to its diagonal."""
    folder = uneven("mixtral-few")
    options = calibration(folder)
    model = LayeredModel(options, open_checkpoint(folder))
    ids = windows(options, model.context)
    fisher = OutputFisher(tmp_path / "fisher", full=1 << 20, block=1)
    messages = io.StringIO()
    fisher.collect(model, ids, 4, "key", messages)
    whole: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    whole.requires_grad_(False).get_input_embeddings().requires_grad_(True)
    experts = whole.model.layers[1].mlp.experts
    calls: list[tuple[torch.Tensor, ...]] = []
    experts.register_forward_hook(lambda _, args, out: calls.append((*args, out)))
    generator = torch.Generator().manual_seed(0)
    parts = ("gate", "up", "down")
    sums = {(part, expert): np.zeros((256, 256)) for part in parts for expert in range(4)}
    seen = dict.fromkeys(range(4), 0)
    for numbers in split(len(ids), 4).all:
        logits = whole(torch.from_numpy(ids[numbers])).logits.flatten(0, 1)
        labels = sampled(logits.detach(), torch.rand(len(logits), generator=generator, dtype=torch.float64))
        loss = torch.nn.functional.cross_entropy(logits, labels, reduction="sum")
        x, index, weights, out = calls.pop()
        (behind,) = torch.autograd.grad(loss, out)
        for expert in range(4):
            tokens, places = torch.where(index == expert)
            first = (x[tokens].detach() @ experts.gate_up_proj[expert].T).requires_grad_()
            gate, up = first.chunk(2, -1)
            last = (torch.nn.functional.silu(gate) * up) @ experts.down_proj[expert].T
            gradient = behind[tokens] * weights[tokens, places, None].detach()
            (inner,) = torch.autograd.grad(last, first, gradient)
            for part, rows in zip(parts, (*inner.chunk(2, -1), gradient), strict=True):
                sums[part, expert] += (rows.double().T @ rows.double()).numpy() / ids.size
            seen[expert] += len(tokens)
    assert "note: 24 of 24 matrices of experts saw fewer than 16 tokens for each of their rows" in messages.getvalue()
    readers = {
        (reader.name[10:].partition("_")[0], reader.expert): reader
        for group in model.layout.groups(1, model.blocks[1]) for reader in group.readers
        if reader.expert is not None
    }  # fmt: skip
    for (part, expert), wanted in sums.items():
        if part == "down":
            together = np.sum([sums[part, other] for other in range(4)], axis=0)
            prior = together * np.trace(wanted) / np.trace(together)
        else:
            prior = np.diag(np.diagonal(wanted))
        share = 16 * 256 / (seen[expert] + 16 * 256)
        wanted = (1 - share) * wanted + share * prior
        (found,) = fisher.blocks(readers[part, expert], 1)
        np.testing.assert_allclose(found, wanted, atol=1e-3 * np.abs(wanted).max())

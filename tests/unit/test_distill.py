"""Self-distillation: losses, the optimizer, coded weights, and whole runs on small random models."""

from __future__ import annotations

import io
import itertools
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from checkpoints import NOVEL
from gguf_files import tensors as tensors_of
from gguf_itq3s import upstream
from gguf_itq3s.base.errors import UserError
from gguf_itq3s.checkpoint.reading import open_checkpoint
from gguf_itq3s.cli import main
from gguf_itq3s.codec import blocks, ternary
from gguf_itq3s.codec.formats import EFFORTS, ITQ3_N_FORMAT
from gguf_itq3s.codec.types import ITQ3_S
from gguf_itq3s.convert.options import ConvertOptions
from gguf_itq3s.convert.pipeline import convert
from gguf_itq3s.distill import pipeline
from gguf_itq3s.distill.codes import Coded, CodedMatrix, encoder
from gguf_itq3s.distill.losses import confidence_of, divergence
from gguf_itq3s.distill.model import Student
from gguf_itq3s.distill.optimizer import BETAS, Adam, Group, decode_moment, encode_moment
from gguf_itq3s.distill.options import TYPES, DistillOptions
from gguf_itq3s.distill.pipeline import Run, distill, rate
from quantized import quantized
from selection import some

Make = Callable[[str], Path]

#: A run of a second or two; unit tests encode in numpy.
QUICK: dict[str, Any] = {
    "text": (NOVEL,), "tokens": 1024, "context": 32, "steps": 4, "every": 2, "batch": 4, "effort": "fast",
    "lr": 1e-3, "scale_lr": 1e-3, "norm_lr": 1e-3, "checkpoint_minutes": 0,
}  # fmt: skip


def options(model: Path, out: Path, **changes: Any) -> DistillOptions:
    return DistillOptions(model, out=out, **{**QUICK, **changes})


def run(model: Path, out: Path, **changes: Any) -> pipeline.Distillation:
    return distill(options(model, out, **changes), io.StringIO())


# ------------------------------------------------------------------------------------------------------- losses


def test_losses_against_their_formulas() -> None:
    generator = torch.Generator().manual_seed(0)
    student, teacher = (size * torch.randn(2, 3, 11, generator=generator) for size in (1, 3))
    q, p = student.double().softmax(-1).numpy(), teacher.double().softmax(-1).numpy()
    forward, reverse = (p * np.log(p / q)).sum(-1).mean(), (q * np.log(q / p)).sum(-1).mean()
    assert abs(forward - reverse) > 0.05
    for loss, expected in (("kl", forward), ("reverse-kl", reverse), ("cakld", 0.3 * reverse + 0.7 * forward)):
        assert float(divergence(student, teacher, loss, 0.3)) == pytest.approx(expected, rel=1e-5)
        assert float(divergence(teacher, teacher, loss, 0.3)) == pytest.approx(0, abs=1e-6)
    with pytest.raises(ValueError, match="unknown loss"):
        divergence(student, teacher, "mse")


def test_confidence_is_the_probability_of_the_text() -> None:
    logits = torch.zeros(1, 3, 4)
    logits[0, 0, 2] = logits[0, 1, 1] = np.log(3)
    # After the first token the text goes on as is likely (3 of 6), after the second it does not (1 of 6).
    assert float(confidence_of(logits, torch.tensor([[0, 2, 3]]))) == pytest.approx((3 / 6 + 1 / 6) / 2)


def test_learning_rate_rises_and_falls() -> None:
    rates = [rate(step, 100) for step in range(100)]
    assert 0 < rates[0] < rates[4] <= rates[5] == 1 and max(rates) == 1
    assert all(a > b for a, b in itertools.pairwise(rates[5:])) and 0 < rates[-1] < 1e-3
    assert rate(0, 1) > 0


# ---------------------------------------------------------------------------------------------------- optimizer


def test_moments_in_8_bits_keep_small_values() -> None:
    values = torch.logspace(-8, 0, 700, dtype=torch.float32).reshape(7, 100)
    signs = torch.where(torch.arange(100) % 2 == 0, 1.0, -1.0)
    codes, scale = encode_moment(values.square(), signed=False)
    back = decode_moment(codes, scale, values)
    assert codes.dtype == torch.uint8 and codes.shape == (3, 256) and scale.shape == (3, 1)
    assert bool((back >= values.square() * (1 - 1e-5)).all()), "a second moment is never too small"
    large = values.square() > 1e-4 * values.square().max()
    assert float((back / values.square() - 1)[large].abs().max()) < 0.2
    codes, scale = encode_moment(values * signs, signed=True)
    back = decode_moment(codes, scale, values)
    assert codes.dtype == torch.int8
    assert float((back - values * signs).abs().max()) <= 1.001 / 127
    assert not bool(decode_moment(*encode_moment(torch.zeros(5), signed=True), torch.zeros(5)).any())


@pytest.mark.parametrize("state", ["float32", "cpu", "8bit"])
def test_adam_against_torch(state: str) -> None:
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(40, 30, generator=generator)
    own, theirs = torch.nn.Parameter(start.clone()), torch.nn.Parameter(start.clone())
    adam = Adam([Group({"w": own}, 0.01)], state)
    unit = float(start.square().mean().sqrt())
    reference = torch.optim.Adam([theirs], lr=0.01 * unit, betas=BETAS, eps=1e-12)
    for _ in range(20):
        gradient = torch.randn(40, 30, generator=generator) + start
        own.grad, theirs.grad = gradient.clone(), gradient.clone()
        adam.step(1.0)
        reference.step()
    moved = float((theirs - start).detach().square().mean().sqrt())
    difference = float((own - theirs).detach().square().mean().sqrt())
    assert own.grad is None
    assert difference < (0.05 if state == "8bit" else 1e-5) * moved
    assert adam.bytes < (0.3 if state == "8bit" else 1.1) * 8 * start.numel()


# ------------------------------------------------------------------------------------------------- coded weights


def test_forward_has_the_code_and_the_gradient_passes_it_by() -> None:
    generator = torch.Generator().manual_seed(0)
    layer = torch.nn.Linear(512, 8, bias=False)
    with torch.no_grad():
        layer.weight.copy_(torch.randn(8, 512, generator=generator))
    weight = layer.weight.detach().clone()
    matrix = CodedMatrix("blk.0.x.weight", layer)
    encode = encoder(ITQ3_S, "fast", 1)
    matrix.encode(encode)
    code = blocks.dequantize(blocks.quantize(weight.numpy(), effort="fast"), (8, 512))
    np.testing.assert_allclose(matrix.weights().numpy(), code, rtol=0, atol=1e-6)
    assert float((matrix.weights() - weight).square().sum() / weight.square().sum()) > 0.01

    with torch.no_grad():
        matrix.coded.factor.mul_(1.5)
        matrix.latent.add_(0.25)  # between two encodings the error of the code stays what it was
    np.testing.assert_allclose(matrix.weights().numpy(), 1.5 * (code + 0.25), rtol=1e-5, atol=1e-5)
    x = torch.randn(3, 512, generator=generator)
    layer(x).square().sum().backward()
    out = x @ matrix.weights().T
    g = 2 * out.T @ x  # by the weights that the layer computes with
    assert matrix.latent.grad is not None and matrix.coded.factor.grad is not None
    torch.testing.assert_close(matrix.latent.grad, 1.5 * g, rtol=1e-4, atol=1e-3)
    expected = (g * (matrix.latent.detach() + matrix.coded.offset)).unflatten(1, (2, 256)).sum(-1)
    torch.testing.assert_close(matrix.coded.factor.grad, expected, rtol=1e-4, atol=1e-2)


# The one start scale of ITQ3_N at effort fast is too far off where the largest level of a block is the second.
@pytest.mark.parametrize(
    "qtype,effort", [pair for pair in itertools.product(TYPES, EFFORTS) if pair != ("itq3_n", "fast")]
)
def test_codes_are_codes_of_themselves(qtype: str, effort: str) -> None:
    """What is trained from a file begins with its codes, and what is written converts to them."""
    weights = np.random.default_rng(0).laplace(size=(16, 512)).astype(np.float32)
    encode = encoder(TYPES[qtype], effort, 1)
    code = encode(weights)
    assert not np.array_equal(code, weights)
    factor = np.float32(1.07)
    np.testing.assert_allclose(encode(code * factor), code * factor, rtol=2e-3, atol=1e-5)
    half = (code * factor).astype(np.float16).astype(np.float32)
    relative = np.square(encode(half) - half).sum() / np.square(half).sum()
    assert relative < 1e-6


def test_rows_ask_for_shorter_blocks() -> None:
    """A type is asked for, and rows that its blocks do not fit have the same code in blocks of 64."""
    weights = np.random.default_rng(0).standard_normal((4, 320)).astype(np.float32)
    expected = blocks.dequantize(blocks.quantize(weights, ITQ3_N_FORMAT, effort="fast"), (4, 320), ITQ3_N_FORMAT)
    np.testing.assert_array_equal(encoder(ITQ3_S, "fast", 1)(weights), expected)


@pytest.mark.parametrize("block", [64, 256])
def test_coded_starts_without_a_change(block: int) -> None:
    weight = torch.randn(4, 256)
    coded = Coded(weight, block)
    assert torch.equal(coded(weight), weight) and coded.factor.shape == (4, 256 // block)


# --------------------------------------------------------------------------------------------------------- runs


@pytest.mark.slow
def test_a_run_writes_a_folder_that_converts_to_the_trained_codes(uneven: Make, tmp_path: Path) -> None:
    model, out = uneven("llama"), tmp_path / "out"
    done = run(model, out, steps=6)
    assert done.matrices == 14 and done.steps == 6 and not done.left
    # Which of the two is lower is the training's outcome; docs/training.md has what it reaches.
    assert done.before > 0 and done.after > 0 and done.after != done.before
    assert not (tmp_path / "out.distilling").exists()
    found, before = load_file(out / "model.safetensors"), load_file(model / "model.safetensors")
    assert found.keys() == before.keys()
    name = "model.layers.1.mlp.down_proj.weight"
    assert found[name].dtype == torch.float16 and not torch.equal(found[name], before[name])
    assert torch.equal(found["model.embed_tokens.weight"], before["model.embed_tokens.weight"])
    gain = found["model.layers.0.input_layernorm.weight"]
    moved = gain - before["model.layers.0.input_layernorm.weight"].float()
    assert gain.dtype == torch.float32 and 0 < float(moved.abs().max()) < 0.05, "trained a little"

    file = tmp_path / "out.gguf"
    convert(ConvertOptions.of(out, file, effort="fast"), io.StringIO())
    written = tensors_of(file)["blk.1.ffn_down.weight"]
    decoded = gguf.quants.dequantize(written.data, written.tensor_type)
    difference = np.square(decoded - found[name].float().numpy()).sum() / np.square(decoded).sum()
    assert written.tensor_type.name == "ITQ3_S" and difference < 1e-6


@pytest.mark.parametrize("loss", some(["kl", "reverse-kl", "cakld"], lambda loss: loss == "kl", pytest.mark.slow))
def test_the_gradient_of_a_step_is_that_of_its_loss(loss: str, uneven: Make, tmp_path: Path) -> None:
    """Between two encodings the loss is smooth: a small step along the gradient lowers it by what the gradient says."""
    model = uneven("llama")
    made = Run(options(model, tmp_path / "out", loss=loss), open_checkpoint(model), tmp_path, io.StringIO())
    made.student.encode(made.encode)
    made.facts["confidence"] = 0.3
    before = made._step(0)
    trained = [parameter for parameter in made.student.model.parameters() if parameter.grad is not None]
    gradients = [parameter.grad.clone() for parameter in trained if parameter.grad is not None]
    slope = sum(float(gradient.double().square().sum()) for gradient in gradients)
    assert len(trained) == 14 * 2 + 4 and slope > 0
    size = 0.02 * before / slope
    with torch.no_grad():
        for parameter, gradient in zip(trained, gradients, strict=True):
            parameter -= size * gradient
    assert made._step(0) - before == pytest.approx(-0.02 * before, rel=0.1)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gemma", "qwen2"])
def test_rescaling_changes_nothing_but_the_numbers(name: str, uneven: Make, tmp_path: Path, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    """Before it is coded the student is the teacher, also where a norm adds one to its gain or a matrix has a bias."""
    model, start = uneven(name), tmp_path / "start.gguf"
    checkpoint = open_checkpoint(model)
    for how in ({"fold_norms": True}, {"equalize": True, "context": 64, "tokens": 512}):
        convert(ConvertOptions.of(model, start, effort="fast", **how), io.StringIO())  # type: ignore[arg-type]
        with monkeypatch.context() as patch:
            patch.setattr(Student, "_codes", lambda *_: {})
            made = Run(options(model, tmp_path / "out", start=start), checkpoint, tmp_path, io.StringIO())
        assert made.student.norms and len(made.student.matrices) == 14
        assert made.student.rescaling.touches("blk.0.attn_q.weight")
        moved = (
            made.student.matrices["blk.0.attn_q.weight"].latent
            - Run(options(model, tmp_path / "out"), checkpoint, tmp_path, io.StringIO())
            .student.matrices["blk.0.attn_q.weight"]
            .latent
        )
        assert float(moved.abs().max()) > 1e-3
        assert made.measure() < 1e-6
        made.student.encode(made.encode)
        assert made.measure() > 1e-4


@pytest.mark.slow
def test_interrupted_at_any_step_gives_the_same_weights(uneven: Make, tmp_path: Path, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    model = uneven("llama")
    changes = {"steps": 6, "optimizer_state": "8bit", "loss": "cakld", "micro_batch": 2, "embedding_lr": 1e-3,
               "type": "tq2_0"}  # fmt: skip
    whole = run(model, tmp_path / "whole", **changes)
    own = Run._step
    stops = [5, 3]

    def step(self: Run, number: int) -> float:
        if stops and number == stops[-1]:
            stops.pop()
            raise KeyboardInterrupt
        return own(self, number)

    monkeypatch.setattr(Run, "_step", step)
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt, match="the same command continues"):
            run(model, tmp_path / "cut", **changes)
        assert not (tmp_path / "cut").exists()
        assert sorted(path.name for path in (tmp_path / "cut.distilling").iterdir()) == ["state.safetensors"]
    resumed = run(model, tmp_path / "cut", **changes)
    assert not stops and (resumed.before, resumed.after) == (whole.before, whole.after)
    assert (tmp_path / "cut" / "model.safetensors").read_bytes() == (
        tmp_path / "whole" / "model.safetensors"
    ).read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize(
    "how",
    [{}, {"fold_norms": True}, {"equalize": True, "context": 64, "tokens": 512}],
    ids=["plain", "folded", "equal"],
)
def test_a_start_from_a_file_begins_with_its_codes(how: dict[str, Any], uneven: Make, tmp_path: Path) -> None:
    """Rows that the conversion permutes go back to where they were; without steps the codes stay as they are.

    A rescaled file makes a student that is rescaled alike, and writes a checkpoint that predicts the same.
    """
    model, start = uneven("llama"), tmp_path / "start.gguf"
    convert(ConvertOptions.of(model, start, effort="default", **how), io.StringIO())
    made = Run(options(model, tmp_path / "out", start=start), open_checkpoint(model), tmp_path, io.StringIO())
    latent = {name: matrix.latent.detach().clone() for name, matrix in made.student.matrices.items()}
    made.student.encode(made.encode)
    for name, matrix in made.student.matrices.items():
        torch.testing.assert_close(matrix.weights(), latent[name], rtol=0, atol=1e-6)
    # A wrong order of rows would cost far more than the code.
    assert made.measure() < 2 * _nearest(model, tmp_path)
    assert not torch.equal(made.student.matrices["blk.0.attn_q.weight"].latent[:8], latent["blk.0.attn_k.weight"][:8])


def _nearest(model: Path, folder: Path) -> float:
    made = Run(options(model, folder / "nearest"), open_checkpoint(model), folder, io.StringIO())
    made.student.encode(made.encode)
    return made.measure()


@pytest.mark.slow
def test_ternary_codes_are_recognised_by_the_converter(uneven: Make, tmp_path: Path) -> None:
    out = tmp_path / "out"
    run(uneven("llama"), out, type="tq2_0", steps=4, lr=3e-3)
    matrix = load_file(out / "model.safetensors")["model.layers.0.mlp.down_proj.weight"].float().numpy()
    found = ternary.recognise(matrix)
    assert found is not None and found.granularity == "block"
    file = tmp_path / "out.gguf"
    convert(ConvertOptions.of(out, file), io.StringIO())
    assert {t.tensor_type.name for n, t in tensors_of(file).items() if "ffn" in n and "norm" not in n} == {"TQ2_0"}


@pytest.mark.slow
def test_gradient_checkpointing_gives_the_same_model(uneven: Make, tmp_path: Path) -> None:
    results = []
    for name, on in (("kept", False), ("again", True)):
        run(uneven("llama"), tmp_path / name, steps=2, type="tq2_0", gradient_checkpointing=on)
        results.append(load_file(tmp_path / name / "model.safetensors"))
    assert all(torch.equal(results[0][name], results[1][name]) for name in results[0])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mixtral-few", "qwen2-moe", "qwen3-moe", "olmoe", "granite-moe"])
def test_folding_norms_that_experts_read(
    name: str, uneven: Make, tmp_path: Path, any_tokenizer: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And routers, and shared experts with a gate."""
    model, start = uneven(name), tmp_path / "start.gguf"
    convert(ConvertOptions.of(model, start, effort="fast", fold_norms=True), io.StringIO())
    monkeypatch.setattr(Student, "_codes", lambda *_: {})
    made = Run(options(model, tmp_path / "out", start=start), open_checkpoint(model), tmp_path, io.StringIO())
    shared = 3 if name == "qwen2-moe" else 0
    assert len(made.student.norms) == 4 and made.student.count == 2 * (4 + 3 * 4 + shared)
    assert all("ffn_gate_inp" in left for left in made.student.left)
    assert made.measure() < 1e-6


@pytest.mark.slow
def test_rows_that_are_no_multiple_of_256_are_trained_too(checkpoint: Make, tmp_path: Path) -> None:
    """From a file, whose narrow matrices are ITQ3_N, to a folder that converts to the same types."""
    model, start, out = checkpoint("llama-odd"), tmp_path / "start.gguf", tmp_path / "out"
    convert(ConvertOptions.of(model, start, effort="fast"), io.StringIO())
    made = Run(options(model, out, start=start), open_checkpoint(model), tmp_path, io.StringIO())
    assert made.student.left == {}
    name = "blk.1.ffn_down.weight"
    assert made.student.matrices[name].coded.factor.shape == (256, 320 // 64)
    tensor = tensors_of(start)[name]
    decoded = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
    np.testing.assert_array_equal(made.student.matrices[name].latent.detach().numpy(), decoded)
    assert run(model, out, steps=2, start=start).matrices == 14
    convert(ConvertOptions.of(out, tmp_path / "out.gguf", effort="fast"), io.StringIO())
    written = tensors_of(tmp_path / "out.gguf")[name]
    trained = load_file(out / "model.safetensors")["model.layers.1.mlp.down_proj.weight"].float().numpy()
    difference = np.square(gguf.quants.dequantize(written.data, written.tensor_type) - trained).sum()
    assert written.tensor_type.name == "ITQ3_N" and difference / np.square(trained).sum() < 1e-6
    assert not np.array_equal(trained, decoded)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mixtral-few", "granite-moe"])
def test_experts_are_trained_as_other_matrices(name: str, uneven: Make, tmp_path: Path) -> None:
    """Stored one by one, or stacked with gate and up in one tensor."""
    model, out = uneven(name), tmp_path / "out"
    made = Run(options(model, out), open_checkpoint(model), tmp_path, io.StringIO())
    stack = made.student.matrices["blk.1.ffn_gate_up_exps.weight"]
    assert stack.latent.shape == (4, 512, 256) and stack.coded.factor.shape == (4, 512, 1)
    made.student.encode(made.encode)
    code = blocks.dequantize(blocks.quantize(stack.latent[3].detach().numpy(), effort="fast"), (512, 256))
    np.testing.assert_allclose(stack.weights()[3].numpy(), code, rtol=0, atol=1e-6)
    made.facts["confidence"] = 0.0
    assert made._step(0) > 0
    assert stack.latent.grad is not None and bool((stack.latent.grad.flatten(1).abs().sum(1) > 0).any())

    done = run(model, out, steps=2, every=1)
    assert done.matrices == made.student.count == 32 and done.before > 0 and done.after > 0
    found, before = load_file(out / "model.safetensors"), load_file(model / "model.safetensors")
    assert {key: tensor.shape for key, tensor in found.items()} == {key: tensor.shape for key, tensor in before.items()}
    convert(ConvertOptions.of(out, tmp_path / "out.gguf", pure=True, effort="fast"), io.StringIO())
    written = tensors_of(tmp_path / "out.gguf")
    key = {
        "mixtral-few": "model.layers.1.block_sparse_moe.experts.2.w3.weight",
        "granite-moe": "model.layers.1.block_sparse_moe.input_linear.weight",
    }[name]
    trained = found[key].float().numpy() if name != "granite-moe" else found[key][2, 256:].float().numpy()
    decoded = gguf.quants.dequantize(written["blk.1.ffn_up_exps.weight"].data, ITQ3_S)[2]
    assert np.square(decoded - trained).sum() / np.square(trained).sum() < 1e-6
    router = next(key for key in found if ".layers.0." in key and key.endswith(("gate.weight", "router.layer.weight")))
    assert torch.equal(found[router].float(), before[router].float()), "it is not trained"


@pytest.mark.slow
def test_experts_start_from_a_file(uneven: Make, tmp_path: Path) -> None:
    model, start = uneven("mixtral-few"), tmp_path / "start.gguf"
    convert(
        ConvertOptions.of(model, start, pure=True, effort="fast", equalize=True, context=64, tokens=512), io.StringIO()
    )
    made = Run(options(model, tmp_path / "out", start=start), open_checkpoint(model), tmp_path, io.StringIO())
    stack = made.student.matrices["blk.0.ffn_gate_up_exps.weight"]
    parts = [tensors_of(start)[f"blk.0.ffn_{part}_exps.weight"].data for part in ("gate", "up")]
    codes = np.concatenate([gguf.quants.dequantize(part, ITQ3_S) for part in parts], axis=1)
    np.testing.assert_array_equal(stack.latent.detach().numpy(), codes)


@pytest.fixture
def any_tokenizer(monkeypatch: pytest.MonkeyPatch) -> None:
    """The small tokenizer is none of those that upstream knows by their hash."""
    conversion = upstream.load_conversion()
    monkeypatch.setattr(conversion.base.TextModel, "get_vocab_base_pre", lambda *_: "default")


def test_matrices_stay_and_shards_stay_shards(checkpoint: Make, tmp_path: Path) -> None:
    model = Path(shutil.copytree(checkpoint("mixtral"), tmp_path / "model"))
    weights = list(load_file(model / "model.safetensors").items())
    (model / "model.safetensors").unlink()
    places: dict[str, str] = {}
    for number in range(2):
        name = f"model-{number + 1:05d}-of-00002.safetensors"
        save_file(dict(weights[number::2]), model / name, metadata={"format": "pt"})
        places |= dict.fromkeys(dict(weights[number::2]), name)
    (model / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    (model / "modeling_own.py").write_text("raise SystemExit\n")
    messages = io.StringIO()
    done = distill(options(model, tmp_path / "out", steps=1), messages)
    # Eight experts: the converter's mix has keys and values in Q8_0, attention's output in more bits.
    assert done.matrices % 8 == 2 and "Q8_0 in the converter's mix" in done.left.values()
    assert "matrices of the layers stay in floats" in messages.getvalue()
    written = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())["weight_map"]
    assert written == places and not (tmp_path / "out" / "modeling_own.py").exists()
    for name in set(places.values()):
        with safe_open(tmp_path / "out" / name, framework="pt") as file:
            assert {key: places[key] for key in file.keys()} == {k: v for k, v in places.items() if v == name}  # noqa: SIM118


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"steps": 0}, "--steps 0; give more than 0"),
        ({"lr": -1.0}, "--lr -1.0; give 0"),
        ({"lr": float("nan")}, "--lr nan; give 0"),
        ({"loss": "mse"}, "--loss mse; give one of kl"),
        ({"tokens": 32}, "gives 1 window of 32 tokens; give more --tokens"),
        ({"device": "nowhere"}, "--device nowhere"),
        ({"start": NOVEL}, "is not a complete GGUF file"),
    ],
)
def test_what_cannot_be_done_is_said(changes: dict[str, Any], said: str, checkpoint: Make, tmp_path: Path) -> None:
    with pytest.raises(UserError) as error:
        run(checkpoint("llama"), tmp_path / "out", **changes)
    assert said in str(error.value) and "\n" not in str(error.value)
    assert not (tmp_path / "out").exists() and not (tmp_path / "out.distilling").exists()


@pytest.mark.slow
def test_a_tokenizer_of_another_model_is_found_before_it_is_run(checkpoint: Make, tmp_path: Path, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setattr(pipeline, "windows", lambda *_: np.full((4, 32), 512))
    with pytest.raises(UserError, match="gives token 512, and an embedding of 512"):
        run(checkpoint("llama"), tmp_path / "out")


@pytest.mark.parametrize("key", ["quantization_config", "compression_config"])
def test_codes_are_not_distilled(key: str, uneven: Make, tmp_path: Path) -> None:
    """Under both names that ``config.json`` has for them, of which Transformers knows one."""
    folder, _ = quantized(uneven("llama"), tmp_path, "fp8-blocks")
    config = json.loads((folder / "config.json").read_text())
    config[key] = config.pop("quantization_config")
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="comes quantized"):
        run(folder, tmp_path / "out")


@pytest.mark.slow
def test_a_file_of_another_model_is_no_start(checkpoint: Make, uneven: Make, tmp_path: Path) -> None:
    for name, changes, said in (
        ("other", {}, "is of another model"),
        ("mixed", {"tensor_types": (("attn_q", "q8_0"),)}, "is not a ITQ3_S matrix of this model's shape"),
    ):
        start = tmp_path / f"{name}.gguf"
        model = checkpoint("llama") if name == "other" else uneven("llama")
        convert(ConvertOptions.of(model, start, **{"effort": "fast", **changes}), io.StringIO())  # type: ignore[arg-type]
        with pytest.raises(UserError, match=said):
            run(uneven("llama"), tmp_path / "out", start=start)


@pytest.mark.slow
def test_a_checkpoint_that_is_not_its_own_is_refused(uneven: Make, tmp_path: Path, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    model, out = uneven("llama"), tmp_path / "out"

    def stop(self: Run) -> None:
        raise UserError(out, "stopped", "go on")

    with monkeypatch.context() as patch:
        patch.setattr(Run, "finish", stop)
        with pytest.raises(UserError, match="stopped"):
            run(model, out, type="tq2_0")
    state = tmp_path / "out.distilling" / "state.safetensors"
    with pytest.raises(UserError, match="holds a training of another model, text or other options"):
        run(model, out, type="tq2_0", steps=5)
    with safe_open(state, framework="pt") as file:
        facts, tensors = file.metadata(), {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
    damages: dict[str, Callable[[], object]] = {
        "invalid": lambda: state.write_bytes(b"\xff" * 64),
        "other tensors": lambda: save_file({"x": torch.zeros(1)}, state, metadata=facts),
        "facts are not": lambda: save_file(tensors, state, metadata={"distill": json.dumps(
            {**json.loads(facts["distill"]), "step": -1})}),
        r"latent/blk.0.attn_q.weight is torch.float16": lambda: save_file(
            {**tensors, "latent/blk.0.attn_q.weight": torch.zeros(1, dtype=torch.float16)}, state, metadata=facts),
    }  # fmt: skip
    for said, damage in damages.items():
        damage()
        with pytest.raises(UserError, match="is not a checkpoint of this training") as error:
            run(model, out, type="tq2_0")
        assert said in str(error.value) or said == "invalid"
    save_file(tensors, state, metadata=facts)
    assert run(model, out, type="tq2_0").steps == 4
    assert out.is_dir() and not state.exists()


def test_an_output_that_is_there_is_left_alone(checkpoint: Make, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "letter.txt").write_text("dear")
    with pytest.raises(UserError, match="is there already"):
        run(checkpoint("llama"), tmp_path / "out")
    with pytest.raises(UserError, match="is the input itself"):
        run(checkpoint("llama"), checkpoint("llama"))


@pytest.mark.slow
def test_the_command(uneven: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["distill", uneven("llama"), tmp_path / "out", "--text", NOVEL, "--tokens", 512, "--context", 32]
    arguments += ["--steps", 2, "--batch", 2, "--effort", "fast", "--threads", 1, "--optimizer-state", "cpu"]
    assert main([str(argument) for argument in arguments]) == 0
    said = capsys.readouterr()
    assert (
        "KL divergence on windows that were not trained on: 0." in said.out
        and "convert it with: convert-hf-to-itq3s" in said.out
    )
    assert "of memory" in said.err and "of CPU memory for the optimizer" in said.err
    assert main([str(argument) for argument in arguments]) == 1
    assert "is there already" in capsys.readouterr().err

"""RCP's quantizers against a plain numpy reading of the paper's formulas, their gradients, and a row of the table."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from checkpoints import NOVEL
from gguf_itq3s.calibrate.options import CalibrationOptions
from gguf_itq3s.calibrate.text import windows
from scripts.ablation import rcp
from scripts.ablation.qat import ROWS, Row, Settings, cache_bits, measure, quantized, table, train
from scripts.papers.reference import Reference


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def weights(seed: int = 0) -> torch.Tensor:
    return torch.randn(6, 256, generator=torch.Generator().manual_seed(seed))


def disturbed(quantizer: rcp.Clipped) -> list[np.ndarray]:
    """The quantizer's parameters, moved off their start, as float64 (rows, groups)."""
    generator = torch.Generator().manual_seed(1)
    values = []
    for parameter in quantizer.parameters():
        with torch.no_grad():
            parameter.add_(0.5 * torch.randn(parameter.shape, generator=generator) - 0.7)
        values.append(parameter.detach().double().numpy()[..., 0])
    return values


def test_two_bits_are_the_formulas() -> None:
    weight = weights()
    quantizer = rcp.TwoBits(weight, partition=True)
    beta, gamma, s1, s2 = disturbed(quantizer)
    found = quantizer(weight).detach().numpy().reshape(6, 2, 128)
    symbols = np.zeros(4, int)
    for row in range(6):
        for group in range(2):
            w = weight[row, group * 128 : (group + 1) * 128].double().numpy()
            low = sigmoid(beta[row, group]) * w.min()
            h = sigmoid(gamma[row, group]) * w.max() - low
            p1 = sigmoid(s1[row, group])
            p2, p3 = (1 - p1) * sigmoid(s2[row, group]), (1 - p1) * (1 - sigmoid(s2[row, group]))
            t1 = p1 / 2
            t2 = t1 + (p1 + p2) / 2
            t3 = t2 + (p2 + p3) / 2
            points = [0, (t1 + t2) / 2, (t2 + t3) / 2, 1]
            for place, value in enumerate(w):
                symbol = sum((value - low) / h > t for t in (t1, t2, t3))
                symbols[symbol] += 1
                assert found[row, group, place] == pytest.approx(low + h * points[symbol], rel=1e-4, abs=1e-5)
    assert symbols.min() > 50


def test_three_bits_are_the_formulas() -> None:
    weight = weights(2)
    quantizer = rcp.ThreeBits(weight, partition=True)
    beta, gamma, s1 = disturbed(quantizer)
    found = quantizer(weight).detach().numpy().reshape(6, 2, 128)
    used = set()
    for row in range(6):
        for group in range(2):
            w = weight[row, group * 128 : (group + 1) * 128].double().numpy()
            low = sigmoid(beta[row, group]) * w.min()
            high = sigmoid(gamma[row, group]) * w.max()
            centre = low + (high - low) * sigmoid(s1[row, group])
            for place, value in enumerate(w):
                scale = abs(centre - low) if value < centre else abs(high - centre)
                level = min(rcp.NF3, key=lambda level: abs((value - centre) / scale - level))
                used.add(level)
                assert found[row, group, place] == pytest.approx(centre + scale * level, rel=1e-4, abs=1e-5)
    assert len(used) == 8


def test_the_partition_starts_where_it_is_not_learned() -> None:
    weight = weights(3)
    for kind in (rcp.TwoBits, rcp.ThreeBits):
        learned, fixed = kind(weight, partition=True), kind(weight, partition=False)
        torch.testing.assert_close(learned(weight), fixed(weight), rtol=1e-4, atol=1e-4)
    low, width = learned.ends(rcp.groups(weight))
    uniform = rcp.TwoBits(weight, partition=True)
    thresholds, points = uniform.partition()
    for found, expected in zip((*thresholds, *points), (1 / 6, 1 / 2, 5 / 6, 0, 1 / 3, 2 / 3, 1), strict=True):
        torch.testing.assert_close(found, torch.full_like(found, expected))
    grouped = rcp.groups(weight)
    expected = low + width / 3 * ((grouped - low) / width * 3).round().clamp(0, 3)
    torch.testing.assert_close(uniform(weight), expected.flatten(1), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", [rcp.TwoBits, rcp.ThreeBits])
def test_gradients_pass_steps(kind: type[rcp.TwoBits] | type[rcp.ThreeBits]) -> None:
    weight = weights(4).requires_grad_(True)
    quantizer = kind(weight.detach(), partition=True)
    out = quantizer(weight)
    out.sum().backward()
    assert weight.grad is not None
    low, width = quantizer.ends(rcp.groups(weight.detach()))
    grouped = rcp.groups(weight.detach())
    inside = ((grouped > low) & (grouped < low + width)).flatten(1)
    assert 0.95 < float(inside.float().mean()) < 1
    extremes = ((grouped == grouped.amin(-1, keepdim=True)) | (grouped == grouped.amax(-1, keepdim=True))).flatten(1)
    ordinary = inside & ~extremes  # the extremes move the range as well
    torch.testing.assert_close(weight.grad[ordinary], torch.ones_like(weight.grad[ordinary]), rtol=1e-3, atol=1e-3)
    assert all(p.grad is not None and float(p.grad.abs().min()) > 0 for p in (quantizer.beta, quantizer.gamma))
    moved = [p for name, p in quantizer.named_parameters() if name.startswith("s")]
    assert moved and all(p.grad is not None and float(p.grad.abs().mean()) > 0 for p in moved)


def test_learning_lowers_the_error() -> None:
    """Gradients that only look right would not. By how much is chance: from 4 to 20 per cent with other weights."""
    weight = weights(5)
    for kind in (rcp.TwoBits, rcp.ThreeBits):
        quantizer = kind(weight, partition=True)
        optimizer = torch.optim.Adam(quantizer.parameters(), lr=0.02)
        errors = []
        for _ in range(60):
            error = (quantizer(weight) - weight).square().mean()
            optimizer.zero_grad()
            error.backward()
            optimizer.step()
            errors.append(float(error.detach()))
        assert errors[-1] < errors[0], kind


def test_the_grid_search_finds_the_least_error_of_the_grid() -> None:
    weight = weights(6)
    x = torch.randn(500, 256, generator=torch.Generator().manual_seed(7)) * torch.linspace(0.1, 3, 256)
    grouped = x.unflatten(1, (2, 128)).transpose(0, 1)
    moment = grouped.transpose(1, 2) @ grouped
    quantizer = rcp.TwoBits(weight, partition=False)
    quantizer.search(weight, moment)

    def errors() -> torch.Tensor:
        difference = rcp.groups(quantizer(weight).detach() - weight)
        return torch.einsum("rgk,gnk->rgn", difference, grouped).square().sum(-1)

    best = errors()
    for low in rcp.GRID:
        for high in rcp.GRID:
            with torch.no_grad():
                quantizer.beta.fill_(rcp.logit(low).item())
                quantizer.gamma.fill_(rcp.logit(high).item())
            assert bool((best <= errors() * (1 + 1e-4)).all())


def test_activations_and_cache() -> None:
    x = torch.randn(3, 5, 64, generator=torch.Generator().manual_seed(8)).requires_grad_(True)
    found = rcp.quantize_activation(x)
    scale = 0.9 * x.detach().abs().amax(-1, keepdim=True) / 7
    expected = (x.detach() / scale).round().clamp(-8, 7) * scale
    torch.testing.assert_close(found.detach(), expected)
    found.sum().backward()
    assert x.grad is not None and bool((x.grad == 1).all())
    kept = rcp.quantize_cache(x.detach())
    low, high = 0.95 * x.detach().amin(-1, keepdim=True), 0.95 * x.detach().amax(-1, keepdim=True)
    assert bool((kept <= high + 1e-5).all()) and bool((kept >= low - 1e-5).all())
    inside = (x > low) & (x < high)
    assert float((kept - x.detach()).abs()[inside].max()) <= float(((high - low) / 15).max()) / 2 + 1e-5
    assert kept[0, 0].unique().numel() <= 16


def test_rotation_is_its_own_inverse_and_changes_no_product(uneven: Callable[[str], Path]) -> None:
    x = torch.randn(2, 512)
    torch.testing.assert_close(rcp.rotate(rcp.rotate(x)), x, rtol=1e-4, atol=1e-5)
    reference = Reference(uneven("llama"), NOVEL.read_text(), 2, 64)
    ids = reference.windows
    for rotated in (False, True):
        student, layers = quantized(reference.model, reference.norm_gains(), Row("float", rotated))
        assert len(layers) == 14
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(rcp, "quantize_activation", lambda x: x)
            torch.testing.assert_close(student(input_ids=ids).logits, reference.model(input_ids=ids).logits,
                                       rtol=1e-3, atol=1e-3)  # fmt: skip


@pytest.fixture
def study(
    uneven: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[Reference, torch.Tensor, Settings]:
    """A small model, windows of text, and how to train on them, with a coarser grid."""
    monkeypatch.setattr(rcp, "GRID", (1.0, 0.7))
    model = uneven("llama")
    settings = Settings(steps=3, batch=4, length=64, tokens=2048, chunks=2, lr=1e-3, clip_lr=5e-3)
    options = CalibrationOptions(model, [NOVEL], tokens=settings.tokens, context=settings.length)
    return Reference(model, NOVEL.read_text(), 2, 64), torch.from_numpy(windows(options, 256)), settings


@pytest.mark.slow
def test_rows_from_end_to_end(study: tuple[Reference, torch.Tensor, Settings]) -> None:
    reference, texts, settings = study
    rows = [Row("float", True), Row("rcp-3", True), Row("rcp-3", True, True, True), Row("rcp-2", True),
            Row("itq3_s", True, cache=16)]  # fmt: skip
    found = {row: measure(reference, row, texts, settings) for row in rows}
    assert all(values["mean_kld"] > 0 and np.isfinite(values["perplexity"]) for values in found.values())
    assert len({values["mean_kld"] for values in found.values()}) == len(rows)
    lines = table(found, reference.original.perplexity).splitlines()
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines[4:]]
    assert [row[:6] for row in cells[1:3]] == [
        ["RCP, 3 bits", "3.25", "yes", "", "PTQ", "4"], ["RCP, 3 bits", "3.375", "yes", "yes", "QAT", "4"]
    ]  # fmt: skip


@pytest.mark.slow
def test_training_without_a_step_is_none(study: tuple[Reference, torch.Tensor, Settings]) -> None:
    reference, texts, settings = study
    untrained = measure(reference, Row("rcp-3", True), texts, settings)
    trained = Row("rcp-3", True, False, True)
    assert measure(reference, trained, texts, replace(settings, steps=0)) == untrained
    assert measure(reference, trained, texts, replace(settings, steps=1)) != untrained


@pytest.mark.slow
@pytest.mark.parametrize("row", [Row("rcp-3", True, True, True), Row("tq2_0", False, False, True)])
def test_training_moves_every_weight_and_nothing_else(
    row: Row, study: tuple[Reference, torch.Tensor, Settings]
) -> None:
    reference, texts, settings = study
    teacher = reference.model.requires_grad_(False)
    student, layers = quantized(teacher, reference.norm_gains(), row)
    with torch.no_grad():
        for layer in layers:
            layer.collect()
        student(input_ids=texts[:4])
        for layer in layers:
            layer.start()
    before = {name: parameter.detach().clone() for name, parameter in student.named_parameters()}
    train(teacher, student, layers, row, texts, settings)
    moved = {name for name, parameter in student.named_parameters() if not torch.equal(parameter, before[name])}
    trained = {name for name, parameter in student.named_parameters() if parameter.requires_grad}
    assert moved == trained
    own = {"rcp-3": {"weight", "beta", "gamma", "s1"}, "tq2_0": {"weight", "factor"}}[row.weights]
    assert {name.rpartition(".")[2] for name in moved} == own and len(moved) == 14 * len(own)


def test_the_cache_has_its_bits(study: tuple[Reference, torch.Tensor, Settings]) -> None:
    """Keys and values of every layer go through the quantizer, and the model is itself again afterwards."""
    reference, texts, _ = study
    student, _ = quantized(reference.model, {}, Row("float", False))
    seen: list[int] = []
    own = rcp.quantize_cache

    def cached(x: torch.Tensor, bits: int) -> torch.Tensor:
        seen.append(bits)
        return own(x, bits)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rcp, "quantize_cache", cached)
        before = student(input_ids=texts[:1]).logits
        with cache_bits(student, 16):
            assert torch.equal(student(input_ids=texts[:1]).logits, before) and not seen
        with cache_bits(student, 4):
            assert not torch.equal(student(input_ids=texts[:1]).logits, before)
        assert seen == [4] * 2 * student.config.num_hidden_layers
        assert torch.equal(student(input_ids=texts[:1]).logits, before)
    assert len(seen) == 2 * student.config.num_hidden_layers


def test_the_study_has_every_comparison_once() -> None:
    assert len(set(ROWS)) == len(ROWS) == 18
    trained = {row for row in ROWS if row.trained and row.cache == 4}
    for row in trained:
        assert Row(row.weights, row.rotated) in ROWS, "its PTQ row"

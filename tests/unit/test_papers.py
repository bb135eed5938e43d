"""What repeats the papers' claims: variants against the format's own codec, RCP's formulas, coded weights, laws."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn.utils import parametrize
from transformers import AutoModelForCausalLM

import distributions
from checkpoints import NOVEL
from gguf_itq3s.calibrate.options import CalibrationOptions
from gguf_itq3s.calibrate.text import windows
from gguf_itq3s.codec import blocks
from gguf_itq3s.codec.ternary import TQ2_0
from gguf_itq3s.codec.types import ITQ3_S
from scripts.papers import ablation, coding, distill, qat, residual, scaling
from scripts.papers.ablation import TABLES, Variant, apply, relative_error
from scripts.papers.reference import Reference

GAUSSIAN = distributions.smooth(1 << 16)["gaussian"]
Make = Callable[[str], Path]


# ------------------------------------------------------------------------------------------------------ ablation


@pytest.mark.parametrize(
    ("variant", "kind"),
    [(Variant(), "trellis"), (Variant(code="ternary", scale="0.798"), "ternary")],
)
def test_the_format_is_one_of_the_variants(variant: Variant, kind: str) -> None:
    ours = blocks.dequantize(blocks.quantize(GAUSSIAN, codec=kind))
    assert relative_error(GAUSSIAN, apply(GAUSSIAN, variant)) == pytest.approx(relative_error(GAUSSIAN, ours), rel=1e-3)


@pytest.mark.parametrize(
    ("variant", "expected"),
    [
        (Variant(code="lloyd-max", scale="sigma"), 0.0345),  # Max 1960: 8 levels
        (Variant(code="ternary", scale="1.224"), 0.190),  # Max 1960: 3 levels
    ],
)
def test_error_on_gaussian_weights(variant: Variant, expected: float) -> None:
    assert relative_error(GAUSSIAN, apply(GAUSSIAN, variant)) == pytest.approx(expected, rel=0.02)


def test_every_variant_takes_awkward_blocks() -> None:
    weights = np.zeros((4, 512), dtype=np.float32)
    weights[1, 3], weights[2] = 5, 1e-30
    for variant in dict.fromkeys(variant for rows in TABLES.values() for _, variant in rows):
        restored = apply(weights, variant)
        assert np.isfinite(restored).all() and (restored[0] == 0).all(), variant


def test_rotation_is_its_own_inverse_and_makes_weights_gaussian() -> None:
    laplace = distributions.smooth(1 << 17)["laplace"].ravel()
    np.testing.assert_allclose(ablation.rotate(ablation.rotate(laplace, 512), 512), laplace, atol=1e-5)
    assert ablation.excess_kurtosis(laplace) == pytest.approx(3, abs=0.3)
    assert abs(ablation.excess_kurtosis(ablation.rotate(laplace, 256))) < 0.1


@pytest.mark.slow
def test_a_study_is_remembered(uneven: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ablation, "test_text", NOVEL.read_text)
    study = ablation.Study(uneven("llama"), 1, tmp_path)
    found = study.measure(Variant(), False)
    assert found["error"] == pytest.approx(0.0186, rel=0.05) and found["mean_kld"] > 0 and found["tokens"] == 255
    assert study.measure(Variant(), True)["mean_kld"] != found["mean_kld"]
    monkeypatch.setattr(study, "_measure", lambda *_: pytest.fail("measured again"))
    assert study.measure(Variant(), False) == found


# ----------------------------------------------------------------------------------------------------------- RCP


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def weights(seed: int = 0) -> torch.Tensor:
    return torch.randn(6, 256, generator=torch.Generator().manual_seed(seed))


def disturbed(quantizer: qat.Clipped) -> list[np.ndarray]:
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
    quantizer = qat.TwoBits(weight, partition=True)
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
    quantizer = qat.ThreeBits(weight, partition=True)
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
                level = min(qat.NF3, key=lambda level: abs((value - centre) / scale - level))
                used.add(level)
                assert found[row, group, place] == pytest.approx(centre + scale * level, rel=1e-4, abs=1e-5)
    assert len(used) == 8


def test_activations_and_cache() -> None:
    x = torch.randn(3, 5, 64, generator=torch.Generator().manual_seed(8)).requires_grad_(True)
    found = qat.quantize_activation(x)
    scale = 0.9 * x.detach().abs().amax(-1, keepdim=True) / 7
    expected = (x.detach() / scale).round().clamp(-8, 7) * scale
    torch.testing.assert_close(found.detach(), expected)
    found.sum().backward()
    assert x.grad is not None and bool((x.grad == 1).all())
    kept = qat.quantize_cache(x.detach())
    low, high = 0.95 * x.detach().amin(-1, keepdim=True), 0.95 * x.detach().amax(-1, keepdim=True)
    assert bool((kept <= high + 1e-5).all()) and bool((kept >= low - 1e-5).all())
    inside = (x > low) & (x < high)
    assert float((kept - x.detach()).abs()[inside].max()) <= float(((high - low) / 15).max()) / 2 + 1e-5
    assert kept[0, 0].unique().numel() <= 16


def test_rotation_is_its_own_inverse_and_changes_no_product(uneven: Callable[[str], Path]) -> None:
    x = torch.randn(2, 512)
    torch.testing.assert_close(qat.rotate(qat.rotate(x)), x, rtol=1e-4, atol=1e-5)
    reference = Reference(uneven("llama"), NOVEL.read_text(), 2, 64)
    ids = reference.windows
    for rotated in (False, True):
        student, layers = qat.quantized(reference.model, reference.norm_gains(), qat.Row("float", rotated))
        assert len(layers) == 14
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(qat, "quantize_activation", lambda x: x)
            torch.testing.assert_close(student(input_ids=ids).logits, reference.model(input_ids=ids).logits,
                                       rtol=1e-3, atol=1e-3)  # fmt: skip


@pytest.mark.slow
def test_rows_of_rcp(uneven: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(qat, "GRID", (1.0, 0.7))
    options = CalibrationOptions(uneven("llama"), [NOVEL], tokens=2048, context=64)
    texts = torch.from_numpy(windows(options, 256))
    reference = Reference(uneven("llama"), NOVEL.read_text(), 2, 64)
    rows = [qat.Row("float", True), qat.Row("rcp-3", True), qat.Row("rcp-3", True, True, True), qat.Row("itq3_s", True)]
    found = {row: qat.measure(reference, row, texts, qat.Settings(steps=3, batch=4, lr=1e-3)) for row in rows}
    assert len({values["mean_kld"] for values in found.values()}) == len(rows)
    lines = [line.split("|")[1:7] for line in qat.table(found, 10.0).splitlines()[4:]]
    assert [cell.strip() for cell in lines[2]] == ["RCP, 3 bits", "3.375", "yes", "yes", "QAT", "4"]


# --------------------------------------------------------------------------------------- distillation, residual, laws


def test_divergences_are_their_formulas() -> None:
    generator = torch.Generator().manual_seed(0)
    student, teacher = (size * torch.randn(2, 3, 11, generator=generator) for size in (1, 3))
    q, p = student.double().softmax(-1).numpy(), teacher.double().softmax(-1).numpy()
    forward, reverse = (p * np.log(p / q)).sum(-1).mean(), (q * np.log(q / p)).sum(-1).mean()
    assert float(coding.divergence(student, teacher)) == pytest.approx(forward, rel=1e-5)
    assert float(coding.divergence(student, teacher, 0.3)) == pytest.approx(0.3 * reverse + 0.7 * forward, rel=1e-5)


def test_forward_has_the_code_and_the_gradient_passes_it_by() -> None:
    layer = torch.nn.Linear(512, 8, bias=False)
    weight = layer.weight.detach().clone()
    parametrize.register_parametrization(layer, "weight", coding.Coded(weight, "itq3_s"))
    coded, latent = layer.parametrizations.weight[0], layer.parametrizations.weight.original
    coded.encode(latent)
    code = blocks.dequantize(blocks.quantize(weight.numpy()), (8, 512))
    np.testing.assert_allclose(layer.weight.detach().numpy(), code, rtol=0, atol=1e-6)
    layer.weight.sum().backward()
    assert torch.equal(latent.grad, torch.ones_like(latent))


@pytest.mark.slow
def test_a_trained_model_is_made_of_codes(uneven: Make) -> None:
    teacher = AutoModelForCausalLM.from_pretrained(uneven("llama"), dtype=torch.float32).requires_grad_(False)
    student = AutoModelForCausalLM.from_pretrained(uneven("llama"), dtype=torch.float32)
    options = CalibrationOptions(uneven("llama"), [NOVEL], tokens=1024, context=32)
    losses = distill.distill(teacher, student, torch.from_numpy(windows(options, 256)), distill.Row("x", "nearest", 3))
    assert len(losses) == 3 and all(np.isfinite(losses))
    for name, layer in coding.layer_matrices(student).items():
        weight = layer.weight.detach().numpy()
        again = blocks.dequantize(blocks.quantize(weight), weight.shape)
        # Scales are no halves once they have learned; the codes are what they were.
        np.testing.assert_allclose(again, weight, rtol=1e-2, atol=1e-3 * np.abs(weight).max(), err_msg=name)


def test_a_residual_pass_codes_the_error() -> None:
    weights = GAUSSIAN.reshape(-1, 1024)[:16]
    for second, most in ((ITQ3_S, 0.00055), (TQ2_0, 0.0045)):
        found = residual.two_passes(weights, second, 1)
        assert relative_error(weights, found) < most


def test_laws_and_their_inverses() -> None:
    for law in (scaling.TERNARY, scaling.FLOAT):
        loss = law.loss(1e9, 1e11)
        assert law.tokens(loss, 1e9) == pytest.approx(1e11) and law.tokens(law.best_loss(1e9), 1e9) is None
        n, d = law.optimum(1e21)
        assert 6 * n * d == pytest.approx(1e21)
        assert all(law.loss(n, d) < law.loss(n * factor, d / factor) for factor in (0.99, 1.01))
    # Of the paper: N in millions, D in billions.
    assert scaling.TERNARY.loss(1e6, 1e9) == pytest.approx(2.19 + 4.73 + 5.18)


def test_the_page_shows_the_laws() -> None:
    page = (Path(scaling.__file__).parent / "README.md").read_text()
    assert scaling.tables().strip() in page

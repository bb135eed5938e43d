"""The ablation codecs against the format's own codec, and a small study from end to end."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import distributions
from gguf_itq3s.codec import blocks
from scripts.ablation import study, variants
from scripts.ablation.variants import TABLES, Variant, apply, relative_error

GAUSSIAN = distributions.smooth(1 << 17)["gaussian"]


@pytest.mark.parametrize(
    ("variant", "kind"),
    [(Variant(), "trellis"), (Variant(code="ternary", states=0, scale="0.798"), "ternary")],
)
def test_the_format_is_one_of_the_variants(variant: Variant, kind: str) -> None:
    ours = blocks.dequantize(blocks.quantize(GAUSSIAN, codec=kind))
    assert relative_error(GAUSSIAN, apply(GAUSSIAN, variant)) == pytest.approx(relative_error(GAUSSIAN, ours), rel=1e-3)


@pytest.mark.parametrize(
    ("variant", "expected"),
    [
        (Variant(code="lloyd-max", states=0, scale="sigma"), 0.0345),  # Max 1960: 8 levels
        (Variant(code="ternary", states=0, scale="1.224"), 0.190),  # Max 1960: 3 levels
        (Variant(code="ternary", states=0, scale="0.798"), 0.262),
        (Variant(), 0.0219),
    ],
)
def test_error_on_gaussian_weights(variant: Variant, expected: float) -> None:
    assert relative_error(GAUSSIAN, apply(GAUSSIAN, variant)) == pytest.approx(expected, rel=0.02)


@pytest.mark.slow
def test_more_of_anything_is_less_error() -> None:
    errors = [relative_error(GAUSSIAN, apply(GAUSSIAN, Variant(states=n))) for n in (4, 8, 64, 256)]
    assert all(more > less for more, less in itertools.pairwise(errors))
    scales = [relative_error(GAUSSIAN, apply(GAUSSIAN, Variant(scale=s))) for s in ("sigma", "refitted", "searched")]
    assert all(more > less for more, less in itertools.pairwise(scales))
    assert relative_error(GAUSSIAN, apply(GAUSSIAN, Variant(sub_blocks=8))) < scales[-1]
    assert relative_error(GAUSSIAN, apply(GAUSSIAN, Variant(zero_point=True))) < scales[-1]


def test_zero_point_takes_an_offset() -> None:
    # The transform of a spike in the first place is a constant: only a zero-point can follow it.
    weights = 0.02 * GAUSSIAN.copy()
    weights[:, ::256] += 8
    off, on = (
        relative_error(weights, apply(weights, Variant(code="lloyd-max", states=0, zero_point=z)))
        for z in (False, True)
    )
    assert on < 1e-4 < off


def test_rotation_is_its_own_inverse_and_makes_weights_gaussian() -> None:
    laplace = distributions.smooth(1 << 17)["laplace"]
    for length in (1, 32, 512):
        once = variants.rotate(laplace.ravel(), length)
        np.testing.assert_allclose(variants.rotate(once, length), laplace.ravel(), atol=1e-5)
    assert variants.excess_kurtosis(laplace) == pytest.approx(3, abs=0.3)
    assert abs(variants.excess_kurtosis(variants.rotate(laplace.ravel(), 256))) < 0.1


@pytest.mark.parametrize("variant", [v for rows in TABLES.values() for _, v in rows], ids=lambda v: v.key)
def test_every_variant_takes_awkward_blocks(variant: Variant) -> None:
    weights = np.zeros((4, 512), dtype=np.float32)
    weights[1, 3], weights[2] = 5, 1e-30
    restored = apply(weights, variant)
    assert np.isfinite(restored).all() and (restored[0] == 0).all()


def test_bits() -> None:
    assert Variant().bits_per_weight == 100 * 8 / 256
    assert Variant(sub_blocks=8).bits_per_weight == 116 * 8 / 256


@pytest.mark.parametrize(
    ("variant", "message"),
    [(Variant(code="ternary", scale="2"), "unknown ternary scale"), (Variant(scale="best"), "unknown scale"),
     (replace(Variant(), code="huffman"), "unknown code"), (Variant(rotation=1024), "whole runs")],
)  # fmt: skip
def test_bad_variants(variant: Variant, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        apply(np.ones((1, 768), dtype=np.float32), variant)


@pytest.mark.slow
def test_study_resumes_and_reports(
    checkpoint: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    few = [(Variant(), False), (Variant(code="lloyd-max", states=0), False), (Variant(), True)]
    monkeypatch.setattr(study, "all_variants", lambda: few)
    models = {"model": checkpoint("llama"), "same": checkpoint("llama")}
    text = "The old house stood at the end of the lane, and nobody lived there. " * 80
    result = study.study(models, text, 2, tmp_path)
    rows = result["models"]["model"]["rows"]
    assert result["models"]["same"]["original"]["mean_kld"] == 0
    assert 0 < rows[few[0][0].key]["mean_kld"] < rows[few[1][0].key]["mean_kld"]
    assert rows[few[0][0].key]["weight_error"] == pytest.approx(0.022, rel=0.05)
    assert rows[few[0][0].key]["tokens"] == 2 * 255
    assert result["models"]["model"]["distribution"]["q_proj"]["kurtosis"][1] == pytest.approx(0, abs=0.1)

    monkeypatch.setattr(study, "_measure", lambda *_: pytest.fail("measured again"))
    assert study.study(models, text, 2, tmp_path) == result
    assert json.loads(json.dumps(result)) == result

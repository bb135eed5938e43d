"""Rows that are a multiple of 64 and not of 256: statistics, calibrated rounding, types for a size, in blocks of 64."""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
import transformers
from gguf import GGMLQuantizationType as Type

from calibrating import options
from checkpoints import NOVEL, SIZES, save_model
from gguf_files import metadata, types
from gguf_itq3s.calibrate import budget
from gguf_itq3s.calibrate.statistics import calibrate
from gguf_itq3s.codec import native
from gguf_itq3s.codec.transform import BLOCK, SHORT_BLOCK
from gguf_itq3s.codec.types import ITQ2_N, ITQ3_N, ITQ3_S, ITQ4_N
from gguf_itq3s.convert.options import ConvertOptions
from gguf_itq3s.convert.pipeline import Conversion, convert
from gguf_itq3s.inspect import verify


def made(model: Path, out: Path, **changes: Any) -> Conversion:
    return convert(ConvertOptions.of(model, out, **{"effort": "fast", "fold_norms": False, **changes}), io.StringIO())


def test_a_model_is_quantized_layer_by_layer(
    uneven: Callable[[str], Path], tmp_path: Path, library: native.NativeLibrary
) -> None:
    """Channels equalized, errors fed across rows, each layer on what the quantized ones before it give."""
    messages = io.StringIO()
    asked = ConvertOptions.of(
        uneven("llama-short"), tmp_path / "out.gguf", calibrate=(NOVEL,), fisher=True, effort="fast", tokens=640,
        context=64, batch=4,
    )  # fmt: skip
    done = convert(asked, messages)
    assert "13 matrices whose rows are no multiple of 256 are in ITQ3_N: 3.25 bits a weight" in messages.getvalue()
    assert "equalized 6 sets of channels" in messages.getvalue()
    facts, found = metadata(tmp_path / "out.gguf"), types(tmp_path / "out.gguf")
    assert facts["itq3s.version"] == 3 and facts["general.file_type"] == gguf.LlamaFileType["MOSTLY_ITQ3_S"]
    coded = {row.name: row.weights for row in done.rows if row.type == "ITQ3_N"}
    share = 1 - coded["token_embd.weight"] / sum(coded.values())
    assert facts["itq3s.calibrated_share"] == pytest.approx(share)
    assert found["output.weight"] == Type.Q8_0
    assert {qtype for name, qtype in found.items() if name.endswith("attn_v.weight")} == {Type.Q8_0}
    matrices = {t for name, t in found.items() if name.startswith("blk.") and not re.search("norm|attn_v", name)}
    assert matrices == {ITQ3_N}
    assert max(row.error or 0.0 for row in done.rows) < 0.2


def test_llama_cpps_types_are_calibrated_too(
    uneven: Callable[[str], Path], tmp_path: Path, library: native.NativeLibrary
) -> None:
    """The file holds what was encoded, whose errors follow the inputs: more of them, in other places."""
    model, run = uneven("llama-short"), {"tokens": 640, "context": 64, "batch": 4}
    made(model, tmp_path / "plain.gguf", outtype="iq4_nl", equalize=False)
    made(model, tmp_path / "x.gguf", outtype="iq4_nl", equalize=False, calibrate=(NOVEL,), **run)
    plain, found = (
        {r["name"]: r["error"] for r in verify.compare(tmp_path / f"{name}.gguf", model) if r["type"] == "IQ4_NL"}
        for name in ("plain", "x")
    )
    layers = [name for name in plain if name.startswith("blk.")]
    assert len(layers) > 10 and all(plain[name] < found[name] < 5 * plain[name] for name in layers)


def test_types_for_a_size_are_those_that_a_row_allows(
    calibrated: Callable[[str], tuple[Path, Path]], tmp_path: Path, library: native.NativeLibrary
) -> None:
    model, statistics = calibrated("llama-short")
    for bits in (2.6, 4.2):
        done = made(model, tmp_path / "x.gguf", calibration=statistics, target_bpw=bits, fold_norms=False)
        found = {qtype for name, qtype in types(tmp_path / "x.gguf").items() if "norm" not in name}
        assert found <= set(budget.TYPES[SHORT_BLOCK]) and len(found) > 1
        assert done.plan is not None and bits - 0.2 < done.plan.here[0] <= bits
    assert set(budget.TYPES[SHORT_BLOCK]) >= {ITQ2_N, ITQ3_N, ITQ4_N, Type.Q8_0}
    assert not {ITQ2_N, ITQ3_N} & set(budget.TYPES[BLOCK])


def test_experts_with_rows_of_two_kinds_have_a_type_for_each(
    tokenizer: Path, tmp_path: Path, library: native.NativeLibrary
) -> None:
    torch.manual_seed(0)
    changes = {"intermediate_size": 320, "num_local_experts": 4, "num_experts_per_tok": 2}
    config = transformers.MixtralConfig(**{**SIZES, **changes}, initializer_range=0.05)
    model = save_model(transformers.MixtralForCausalLM(config).half(), tmp_path / "mixture", tokenizer)
    calibrate(options(model), tmp_path / "hessians")
    made(model, tmp_path / "x.gguf", calibration=tmp_path / "hessians", target_bpw=3.4)
    found = types(tmp_path / "x.gguf")
    for layer in range(2):
        gate, up, down = (found[f"blk.{layer}.ffn_{part}_exps.weight"] for part in ("gate", "up", "down"))
        assert gate == up and gate in budget.TYPES[BLOCK] and down in budget.TYPES[SHORT_BLOCK]
    made(model, tmp_path / "y.gguf", calibration=tmp_path / "hessians", pure=True)
    found = types(tmp_path / "y.gguf")
    assert found["blk.0.ffn_down_exps.weight"] == ITQ3_N and found["blk.0.ffn_up_exps.weight"] == ITQ3_S
    assert metadata(tmp_path / "y.gguf")["itq3s.version"] == 3

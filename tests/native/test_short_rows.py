"""Rows that are a multiple of 64 and not of 256: statistics, calibrated rounding, types for a size, in blocks of 64."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers
from gguf import GGMLQuantizationType as Type

from calibrating import options
from checkpoints import NOVEL, SIZES, save_model
from gguf_files import metadata, tensors, types, values
from gguf_itq3s.calibrate import budget
from gguf_itq3s.calibrate.pipeline import calibrate
from gguf_itq3s.calibrate.store import Calibration, read_manifest
from gguf_itq3s.codec import native
from gguf_itq3s.codec.transform import BLOCK, SHORT_BLOCK
from gguf_itq3s.codec.types import ITQ2_N, ITQ3_N, ITQ3_S
from gguf_itq3s.convert.options import ConvertOptions
from gguf_itq3s.convert.pipeline import Conversion, convert
from gguf_itq3s.rounding import hessian
from importance import write

MATRICES = [f"blk.{n}.{part}.weight" for n in range(2) for part in ("attn_q", "attn_output", "ffn_up", "ffn_down")]


def made(model: Path, out: Path, **changes: Any) -> Conversion:
    return convert(ConvertOptions.of(model, out, **{"effort": "fast", "fold_norms": False, **changes}), io.StringIO())


def costs(model: Path, made_of: Path, statistics: Callable[[str], np.ndarray], folder: Path) -> dict[str, float]:
    """What the rounding of some matrices of a file costs by Hessians of their inputs, in the basis of statistics."""
    made(model, folder / "f16.gguf", outtype="f16")
    exact, found = tensors(folder / "f16.gguf"), tensors(made_of)
    return {
        name: hessian.cost(hessian.rotate_rows(values(found[name]) - values(exact[name])), statistics(name))
        for name in MATRICES
    }


@pytest.mark.parametrize("form", ["full", "block"])
@pytest.mark.parametrize(
    ("name", "outtype"), [("llama-short", "itq3_s"), ("llama-short", "itq2_s"), ("llama", "itq3_n")]
)
def test_rounding_by_hessians_costs_less(
    name: str, outtype: str, form: str, uneven: Callable[[str], Path], tmp_path: Path, library: native.NativeLibrary
) -> None:
    """Whether 256 divides the rows or not: what the statistics' basis is changes nothing of what they are worth."""
    model, out, gains = uneven(name), tmp_path / "hessians", dict[str, np.ndarray]()
    calibrate(options(model, hessian=form), out)
    opened = Calibration(out, read_manifest(out))
    pure: dict[str, Any] = {"outtype": outtype, "pure": True, "equalize": False}
    made(model, tmp_path / "plain.gguf", **pure)
    made(model, tmp_path / "calibrated.gguf", calibration=out, **pure)
    for key, tensor in tensors(tmp_path / "plain.gguf").items():
        if len(tensor.shape) == 1:
            gains[key] = np.array(tensor.data)

    def statistics(matrix: str) -> np.ndarray:
        found = opened.hessian(matrix)
        assert found is not None
        block = BLOCK if name == "llama" else SHORT_BLOCK
        assert hessian.block_of(found) == block and (found.ndim == 2 or found.shape[1:] == (block, block))
        norm = opened.entries[matrix].norm
        return np.asarray(hessian.scale_columns(found, gains[norm]) if norm else found)

    expected = ITQ2_N if outtype == "itq2_s" else ITQ3_N
    found = types(tmp_path / "calibrated.gguf")
    assert found == types(tmp_path / "plain.gguf")
    assert {qtype for key, qtype in found.items() if "norm" not in key} == {expected}
    plain, calibrated = (
        costs(model, tmp_path / f"{how}.gguf", statistics, tmp_path) for how in ("plain", "calibrated")
    )
    # 640 tokens: what few of them say of 320 columns is mostly chance, and damped.
    assert all(calibrated[key] < 0.85 * plain[key] for key in MATRICES), (plain, calibrated)
    facts = metadata(tmp_path / "calibrated.gguf")
    assert (facts["itq3s.version"], facts["itq3s.calibrated"]) == (2, True)


def test_an_importance_matrix_counts(
    uneven: Callable[[str], Path], tmp_path: Path, library: native.NativeLibrary
) -> None:
    model, rng = uneven("llama-short"), np.random.default_rng(0)
    made(model, tmp_path / "plain.gguf", pure=True)
    shapes = {name: int(tensor.shape[0]) for name, tensor in tensors(tmp_path / "plain.gguf").items()}
    moments = {name: np.exp(2 * rng.standard_normal((1, shapes[name]))) for name in MATRICES}
    matrix = write(tmp_path / "imatrix.gguf", moments)
    made(model, tmp_path / "weighted.gguf", pure=True, imatrix=matrix, equalize=False)
    plain, weighted = (
        costs(model, tmp_path / f"{how}.gguf", lambda name: hessian.from_diagonal(moments[name][0]), tmp_path)
        for how in ("plain", "weighted")
    )
    assert all(weighted[key] < 0.75 * plain[key] for key in MATRICES), (plain, weighted)


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
    assert "15 matrices whose rows are no multiple of 256 are in ITQ3_N: 3.25 bits a weight" in messages.getvalue()
    assert "equalized 6 sets of channels" in messages.getvalue()
    facts, found = metadata(tmp_path / "out.gguf"), types(tmp_path / "out.gguf")
    assert facts["itq3s.version"] == 2 and facts["general.file_type"] == gguf.LlamaFileType["MOSTLY_ITQ3_S"]
    coded = {row.name: row.weights for row in done.rows if row.type == "ITQ3_N"}
    share = 1 - coded["token_embd.weight"] / sum(coded.values())
    assert facts["itq3s.calibrated_share"] == pytest.approx(share)
    assert found["output.weight"] == Type.Q8_0
    assert {qtype for name, qtype in found.items() if name.startswith("blk.") and "norm" not in name} == {ITQ3_N}
    assert max(row.error or 0.0 for row in done.rows) < 0.2


def test_types_for_a_size_are_those_that_a_row_allows(
    calibrated: Callable[[str], tuple[Path, Path]], tmp_path: Path, library: native.NativeLibrary
) -> None:
    model, statistics = calibrated("llama-short")
    for bits in (2.6, 4.2):
        done = made(model, tmp_path / "x.gguf", calibration=statistics, target_bpw=bits, fold_norms=False)
        found = {qtype for name, qtype in types(tmp_path / "x.gguf").items() if "norm" not in name}
        assert found <= set(budget.TYPES[SHORT_BLOCK]) and len(found) > 1
        assert done.plan is not None and bits - 0.2 < done.plan.here[0] <= bits
    assert set(budget.TYPES[SHORT_BLOCK]) >= {ITQ2_N, ITQ3_N, Type.IQ4_NL, Type.Q8_0}
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
    assert metadata(tmp_path / "y.gguf")["itq3s.version"] == 2

"""Rescaling of channels: who reads them, folding, equalization, and what a file says of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from gguf_files import arrays, metadata
from gguf_itq3s.base.errors import UserError
from gguf_itq3s.checkpoint import rescaling
from gguf_itq3s.checkpoint.channels import plan_norms
from gguf_itq3s.checkpoint.reading import open_checkpoint
from gguf_itq3s.convert import header
from gguf_itq3s.convert.options import ConvertOptions
from gguf_itq3s.convert.pipeline import convert


def test_readers_are_multiplied_and_nothing_else_changes(uneven: Callable[[str], Path], tmp_path: Path) -> None:
    plain, folded = tmp_path / "plain.gguf", tmp_path / "folded.gguf"
    convert(ConvertOptions.of(uneven("mixtral"), plain, outtype="f16"))
    convert(ConvertOptions.of(uneven("mixtral"), folded, outtype="f16", fold_norms=True))
    before, after = arrays(plain), arrays(folded)
    plan = plan_norms("llama", before)
    assert set(plan.readers) == {f"blk.{i}.{norm}_norm.weight" for i in range(2) for norm in ("attn", "ffn")}
    assert "output.weight" in before and np.abs(before["output_norm.weight"] - 1).max() > 0.5
    assert set(plan.readers["blk.0.ffn_norm.weight"]) == {
        f"blk.0.ffn_{part}.weight" for part in ("gate_inp", "gate_exps", "up_exps")
    }
    assert set(plan.readers["blk.1.attn_norm.weight"]) == {f"blk.1.attn_{part}.weight" for part in "qkv"}
    for name, value in before.items():
        norm = plan.norm_of(name)
        if name in plan.readers:
            np.testing.assert_array_equal(after[name], 1)
        elif norm:
            expected = (value.astype(np.float32) * before[norm]).astype(value.dtype)
            np.testing.assert_array_equal(after[name], expected, err_msg=name)
        else:
            np.testing.assert_array_equal(after[name], value, err_msg=name)


LAYER = ["attn_norm", "attn_q", "attn_k", "attn_v", "attn_output", "ffn_norm", "ffn_gate", "ffn_up", "ffn_down"]
NAMES = ["token_embd.weight", "output_norm.weight", *(f"blk.0.{part}.weight" for part in LAYER)]


def test_what_is_not_proven_is_left_alone() -> None:
    """What :func:`gguf_itq3s.checkpoint.channels.plan` says of norms is tested with other channels."""
    plan = plan_norms("llama", [*NAMES, "output.weight"])
    assert set(plan.readers) == {"blk.0.attn_norm.weight", "blk.0.ffn_norm.weight"} and not plan.note
    plan = plan_norms("llama", [*NAMES, "blk.0.attn_norm.bias"])
    assert plan.left_alone == ["blk.0.attn_norm.weight: the norm has a bias"]
    plan = plan_norms("gpt-oss", [name.replace("ffn_norm", "post_attention_norm") for name in NAMES])
    assert plan.norm_of("blk.0.ffn_up.weight") == "blk.0.post_attention_norm.weight"
    plan = plan_norms("cohere2", [name for name in NAMES if "ffn_norm" not in name])
    assert {plan.norm_of(f"blk.0.{part}.weight") for part in ("attn_q", "ffn_gate")} == {"blk.0.attn_norm.weight"}
    unknown = plan_norms("falcon", NAMES)
    assert not unknown.readers and "falcon" in unknown.left_alone[0]
    assert unknown.note == f"note: norms that are not folded:\n  {unknown.left_alone[0]}"


def test_ternary_types_refuse_folding(uneven: Callable[[str], Path], tmp_path: Path) -> None:
    with pytest.raises(UserError, match="would not stay ternary with its channels rescaled; leave --fold-norms out"):
        convert(ConvertOptions.of(uneven("llama"), tmp_path / "x.gguf", outtype="tq2_0", fold_norms=True))


@pytest.mark.slow
@pytest.mark.parametrize("outtype", ["f16", "itq3_s", "tq2_0"])
def test_folded_files_say_so(outtype: str, uneven: Callable[[str], Path], tmp_path: Path) -> None:
    """The key stands in every folded file, whatever its types, and in every ITQ3_S file; F16 is else upstream's."""
    for folds in (False, True):
        if folds and outtype == "tq2_0":
            continue
        out = tmp_path / f"{folds}.gguf"
        convert(ConvertOptions.of(uneven("llama"), out, outtype=outtype, fold_norms=folds, effort="fast"))
        assert metadata(out).get(rescaling.NORMS_FOLDED) == (folds if folds or outtype == "itq3_s" else None)


def test_what_another_plan_began_is_not_continued(
    uneven: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half of the tensors folded by one plan and half by another would be a third model."""
    checkpoint = open_checkpoint(uneven("llama"))
    marks = []
    for version in (1, 2):
        monkeypatch.setattr(header, "PLAN_VERSION", version)
        options = [ConvertOptions.of(uneven("llama"), tmp_path, fold_norms=folds) for folds in (True, False)]
        marks += [header.fingerprint(b"", option, checkpoint) for option in options]
    assert marks[0] != marks[2] and marks[1] == marks[3]  # nothing is folded

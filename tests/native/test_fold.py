"""Norm folding: the plan, the folded tensors, and the folded model's predictions."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest

import llama
from checkpoints import FAMILIES, NOVEL
from gguf_itq3s.checkpoint import fold
from gguf_itq3s.convert.pipeline import Options, convert
from gguf_itq3s.errors import UserError


def tensors(path: Path) -> dict[str, np.ndarray]:
    return {tensor.name: np.array(tensor.data) for tensor in gguf.GGUFReader(path).tensors}


@pytest.mark.parametrize("name", FAMILIES)
def test_predictions_do_not_change(name: str, uneven: Callable[[str], Path], tmp_path: Path) -> None:
    """The folded F16 file predicts what the original predicts, to F16 rounding."""
    plain, folded = tmp_path / "plain.gguf", tmp_path / "folded.gguf"
    convert(Options(uneven(name), plain, outtype="f16"))
    convert(Options(uneven(name), folded, outtype="f16", fold_norms=True))
    before, after = tensors(plain), tensors(folded)
    norms = [key for key in before if re.fullmatch(r"blk\.\d+\.(attn|ffn)_norm\.weight", key)]
    assert len(norms) == 4
    for key in norms:
        assert np.abs(before[key] - 1).max() > 0.5
        np.testing.assert_array_equal(after[key], 1)
    text = tmp_path / "text.txt"
    text.write_text(NOVEL.read_text())
    args = ["-c", "128", "--chunks", "16", "-t", "1", "--kl-divergence-base", str(tmp_path / "base")]
    llama.run("llama-perplexity", "-m", plain, "-f", text, *args)
    found = []
    for path in (plain, folded):
        done = llama.run("llama-perplexity", "-m", path, "--kl-divergence", *args)
        match = re.search(r"^Mean    KLD:\s*(\S+)\s+±", done.stdout, re.M)
        assert match, done.stdout[-500:] + done.stderr[-500:]
        found.append(float(match[1]))
    # Rounding sends a token whose experts are nearly tied elsewhere.
    limit = 1e-3 if name == "mixtral" else 3e-5
    assert abs(found[1]) < limit + 2 * abs(found[0])


def test_readers_are_multiplied_and_nothing_else_changes(uneven: Callable[[str], Path], tmp_path: Path) -> None:
    plain, folded = tmp_path / "plain.gguf", tmp_path / "folded.gguf"
    convert(Options(uneven("mixtral"), plain, outtype="f16"))
    convert(Options(uneven("mixtral"), folded, outtype="f16", fold_norms=True))
    before, after = tensors(plain), tensors(folded)
    plan = fold.plan("llama", before)
    assert set(plan.norms) == {
        *(f"blk.{i}.{norm}_norm.weight" for i in range(2) for norm in ("attn", "ffn")), "output_norm.weight",
    }  # fmt: skip
    assert set(plan.norms["blk.0.ffn_norm.weight"]) == {
        f"blk.0.ffn_{part}.weight" for part in ("gate_inp", "gate_exps", "up_exps")
    }
    for name, value in before.items():
        norm = plan.norm_of(name)
        if name in plan.norms:
            np.testing.assert_array_equal(after[name], 1)
        elif norm:
            expected = (value.astype(np.float32) * before[norm]).astype(value.dtype)
            np.testing.assert_array_equal(after[name], expected, err_msg=name)
        else:
            np.testing.assert_array_equal(after[name], value, err_msg=name)


LAYER = ["attn_norm", "attn_q", "attn_k", "attn_v", "attn_output", "ffn_norm", "ffn_gate", "ffn_up", "ffn_down"]
NAMES = ["token_embd.weight", "output_norm.weight", *(f"blk.0.{part}.weight" for part in LAYER)]


def test_shared_experts_and_router_are_readers() -> None:
    parts = ["ffn_norm", "ffn_gate_inp", "ffn_gate_exps", "ffn_up_exps", "ffn_down_exps", "ffn_gate_inp_shexp"]
    parts += ["ffn_gate_shexp", "ffn_up_shexp", "ffn_down_shexp"]
    plan = fold.plan("qwen2moe", [f"blk.3.{part}.weight" for part in parts])
    down = {"blk.3.ffn_down_exps.weight", "blk.3.ffn_down_shexp.weight", "blk.3.ffn_norm.weight"}
    assert set(plan.norms["blk.3.ffn_norm.weight"]) == {f"blk.3.{part}.weight" for part in parts} - down


def test_what_is_not_proven_is_left_alone() -> None:
    assert set(fold.plan("llama", [*NAMES, "output.weight"]).norms) == {
        "blk.0.attn_norm.weight", "blk.0.ffn_norm.weight", "output_norm.weight",
    }  # fmt: skip
    tied = fold.plan("llama", NAMES)
    assert set(tied.norms) == {"blk.0.attn_norm.weight", "blk.0.ffn_norm.weight"}
    assert any("output_norm" in line for line in tied.left_alone)
    for extra, phrase in (("blk.0.attn_gate.weight", "not known"), ("blk.0.attn_norm.bias", "bias")):
        plan = fold.plan("llama", [*NAMES, extra])
        assert "blk.0.attn_norm.weight" not in plan.norms
        assert any(line.startswith("blk.0.attn_norm") and phrase in line for line in plan.left_alone)
    unknown = fold.plan("falcon", NAMES)
    assert not unknown.norms and "falcon" in unknown.left_alone[0]
    quantized = fold.plan("llama", NAMES, lambda name: name != "blk.0.attn_k.weight")
    assert set(quantized.norms) == {"blk.0.ffn_norm.weight"}


def test_ternary_types_refuse_folding(uneven: Callable[[str], Path], tmp_path: Path) -> None:
    with pytest.raises(UserError, match="ternary"):
        convert(Options(uneven("llama"), tmp_path / "x.gguf", outtype="tq2_0", fold_norms=True))

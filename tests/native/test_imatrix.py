"""Importance matrices: reading them, and rounding by them in both converters."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
import transformers

import llama
from checkpoints import NOVEL, SIZES, save_model
from gguf_itq3s import upstream
from gguf_itq3s.checkpoint.reading import open_checkpoint
from gguf_itq3s.codec import blocks
from gguf_itq3s.codec.transform import fwht
from gguf_itq3s.convert.options import ConvertOptions
from gguf_itq3s.convert.pipeline import convert
from gguf_itq3s.rounding import hessian, imatrix
from importance import write


def test_both_converters_round_by_it(uneven: Callable[[str], Path], tmp_path: Path) -> None:
    """--imatrix and llama-quantize --imatrix lower the weighted error of unfolded tensors by the same amount."""
    model, f16 = uneven("llama"), tmp_path / "f16.gguf"
    convert(ConvertOptions.of(model, f16, outtype="f16"))
    text = tmp_path / "text.txt"
    text.write_text(NOVEL.read_text())
    matrix = tmp_path / "imatrix.gguf"
    llama.run("llama-imatrix", "-m", f16, "-f", text, "-c", "128", "--chunks", "6", "-o", matrix, "-t", "1")
    made = {"plain": tmp_path / "plain.gguf", "ours": tmp_path / "ours.gguf", "theirs": tmp_path / "theirs.gguf"}
    convert(ConvertOptions.of(model, made["plain"], pure=True, fold_norms=False))
    convert(ConvertOptions.of(model, made["ours"], pure=True, equalize=False, imatrix=matrix))
    llama.run("llama-quantize", "--pure", "--imatrix", matrix, f16, made["theirs"], "ITQ3_S", "2")
    weights = {t.name: np.array(t.data) for t in gguf.GGUFReader(f16).tensors}
    found = {key: {t.name: t for t in gguf.GGUFReader(path).tensors} for key, path in made.items()}
    for key in ("ours", "theirs"):
        fields = gguf.GGUFReader(made[key]).fields
        assert fields["itq3s.calibrated"].contents() is True
        coded = {t.name: int(t.n_elements) for t in found[key].values() if t.tensor_type.name == "ITQ3_S"}
        shares = sum(coded[name] for name in imatrix.read(matrix).moments if name in coded) / sum(coded.values())
        share = fields["itq3s.calibrated_share"].contents()
        assert share < 1 and share == pytest.approx(shares)
    read, compared, totals = imatrix.read(matrix), 0, np.zeros(2)
    for name in read.moments:
        if not name.startswith("blk."):
            continue
        diagonal = read.diagonal(name, weights[name].shape[-1])
        assert diagonal is not None
        h = hessian.from_diagonal(diagonal)
        cost = {
            key: hessian.cost(fwht(blocks.dequantize(np.array(t[name].data)) - weights[name].astype(np.float32)), h)
            for key, t in found.items()
        }
        # Where columns hardly differ, the search that looks ahead only so far loses what there is to gain.
        assert cost["ours"] < 1.03 * cost["plain"], name
        totals += cost["ours"], cost["plain"]
        assert cost["theirs"] == pytest.approx(cost["ours"], rel=0.01), name
        compared += 1
    assert compared == 14 and totals[0] < totals[1]


@pytest.mark.parametrize("outtype", ["itq3_s", "q4_k_m", "q3_k_s", "iq4_xs", "q6_k"])
def test_missing_entries_are_named_in_every_type(
    outtype: str, uneven: Callable[[str], Path], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A matrix, an expert, and the output; rows of an embedding that is not the output too are looked up."""
    for name in ("mixtral-few", "llama-tied"):
        moments = {}
        for tensor in open_checkpoint(uneven(name)).tensors:
            if tensor.name.startswith("blk.") and len(tensor.shape) > 1 and "gate_inp" not in tensor.name:
                count = tensor.shape[0] if len(tensor.shape) == 3 else 1
                moments[tensor.name] = np.random.default_rng(0).random((count, tensor.shape[-1])) + 0.5
        del moments["blk.1.attn_k.weight"]
        expected = ["  blk.1.attn_k.weight", "  output.weight" if name == "mixtral-few" else "  token_embd.weight"]
        if name == "mixtral-few":
            moments["blk.0.ffn_up_exps.weight"][2] = 1  # nothing to tell its columns apart by
            expected.append("  blk.0.ffn_up_exps.weight: 25% of its matrices")
        matrix = write(tmp_path / "i.gguf", moments)
        capfd.readouterr()
        convert(ConvertOptions.of(uneven(name), tmp_path / "x.gguf", outtype=outtype, imatrix=matrix, dry_run=True))
        said = capfd.readouterr().err.splitlines()
        at = said.index(f"warning: {matrix} has nothing on {len(expected)} tensors, they are rounded without:")
        assert sorted(said[at + 1 : at + 1 + len(expected)]) == sorted(expected)


def test_latent_attention(
    tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """llama-imatrix writes one row for the matrices of all heads; both converters round each by its own part."""
    deepseek = importlib.import_module(f"{upstream.load_conversion().__name__}.deepseek")
    monkeypatch.setattr(deepseek.DeepseekV2Model, "set_vocab", lambda self: self._set_vocab_sentencepiece())
    torch.manual_seed(0)
    config = transformers.DeepseekV2Config(
        **{**SIZES, "num_key_value_heads": 4}, kv_lora_rank=256, q_lora_rank=256, qk_nope_head_dim=64, v_head_dim=64,
        qk_rope_head_dim=32, first_k_dense_replace=1, n_routed_experts=4, num_experts_per_tok=2, n_shared_experts=1,
        moe_intermediate_size=256, initializer_range=0.1,
    )  # fmt: skip
    model = transformers.DeepseekV2ForCausalLM(config).half()
    folder, f16 = save_model(model, tmp_path / "model", tokenizer), tmp_path / "f16.gguf"
    convert(ConvertOptions.of(folder, f16, outtype="f16"))
    (tmp_path / "text.txt").write_text(NOVEL.read_text())
    words: list[str | Path] = ["-m", f16, "-f", tmp_path / "text.txt", "-c", "128", "--chunks", "6", "-t", "1"]
    words += ["--no-repack"]  # with AMX llama.cpp finds no place for the matrices of the heads
    llama.run("llama-imatrix", *words, "-o", matrix := tmp_path / "imatrix.gguf")
    heads = [f"blk.{layer}.{part}.weight" for layer in range(2) for part in ("attn_k_b", "attn_v_b")]
    assert all(imatrix.read(matrix).moments[name].shape[0] == 1 for name in heads)
    made = {kind: tmp_path / f"{kind}.gguf" for kind in ("ours", "theirs", "plain")}
    convert(ConvertOptions.of(folder, made["ours"], pure=True, equalize=False, imatrix=matrix))
    convert(ConvertOptions.of(folder, made["plain"], pure=True))
    llama.run("llama-quantize", "--pure", "--imatrix", matrix, f16, made["theirs"], "ITQ3_S", "2")
    weights = {t.name: np.array(t.data).astype(np.float32) for t in gguf.GGUFReader(f16).tensors}
    found = {kind: {t.name: t for t in gguf.GGUFReader(path).tensors} for kind, path in made.items()}
    read = imatrix.read(matrix, {name: weight.shape for name, weight in weights.items()})
    for name in heads:
        assert not np.array_equal(found["ours"][name].data, found["plain"][name].data), name
        for head in range(4):
            diagonal, cost = read.diagonal(name, weights[name].shape[-1], head), {}
            for kind, tensors in found.items():
                decoded = gguf.quants.dequantize(tensors[name].data, tensors[name].tensor_type)
                cost[kind] = float((np.square(decoded[head] - weights[name][head]) * diagonal).sum())
            assert cost["theirs"] == pytest.approx(cost["ours"], rel=0.01), (name, head)
    capfd.readouterr()
    other = ((r"blk\.0\.ffn_gate", "iq3_s"),)
    convert(ConvertOptions.of(folder, made["ours"], outtype="q4_k_m", imatrix=matrix, tensor_types=other, dry_run=True))
    said = capfd.readouterr().err
    assert "imatrix.gguf has nothing on 1 tensors, they are rounded without:\n  output.weight\n" in said
    assert "note: 1 tensors are in IQ3_S, which is rounded without statistics\n" in said


Q = "blk.0.attn_q.weight"
EVEN = np.arange(1.0, 257, dtype=np.float32)
BAD: dict[str, tuple[dict[str, np.ndarray], str]] = {
    "zero": ({Q: np.zeros(256, np.float32)}, f"the same value for every column of {Q}"),
    "constant": ({Q: np.full(256, 3.0, np.float32)}, f"the same value for every column of {Q}"),
    "huge": ({Q: np.full(256, 3e38, np.float32)}, f"the same value for every column of {Q}"),
    "negative": ({Q: -EVEN}, f"negative values for {Q}"),
    "one negative": ({Q: np.where(EVEN == 9, -1, EVEN).astype(np.float32)}, f"negative values for {Q}"),
    "NaN": ({Q: np.where(EVEN == 9, np.nan, EVEN).astype(np.float32)}, "non-finite"),
    "infinite": ({Q: np.where(EVEN == 9, np.inf, EVEN).astype(np.float32)}, "non-finite"),
    "no token": ({Q: EVEN}, f"the same value for every column of {Q}"),
    "another model": ({"blk.9.attn_q.weight": EVEN}, "nothing on the trellis-coded tensors"),
}


def _imatrix(folder: Path, values: dict[str, np.ndarray], count: float) -> Path:
    """A file as llama-imatrix writes it, of sums over that many tokens."""
    writer = gguf.GGUFWriter(folder / "i.gguf", "", use_temp_file=False)
    writer.add_string("general.type", "imatrix")
    writer.add_array("imatrix.datasets", ["x"])
    writer.add_uint32("imatrix.chunk_count", 1)
    writer.add_uint32("imatrix.chunk_size", 512)
    for name, value in values.items():
        writer.add_tensor(f"{name}.in_sum2", value[None])
        writer.add_tensor(f"{name}.counts", np.full((1, 1), count, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return folder / "i.gguf"

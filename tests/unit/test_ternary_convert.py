"""Ternary checkpoints through the converter: recognised and exact, latent weights, packed BitNet weights."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from damaged import edit_json
from gguf_files import tensors, values
from gguf_itq3s.cli import convert_main
from gguf_itq3s.codec import ternary
from selection import some

Q = gguf.GGMLQuantizationType


def is_layer_matrix(name: str, tensor: torch.Tensor) -> bool:
    return ".layers." in name and tensor.ndim == 2


def edit(source: Path, target: Path, change: Callable[[str, torch.Tensor], torch.Tensor]) -> Path:
    """A copy of a checkpoint with its layer matrices changed."""
    shutil.copytree(source, target)
    path = target / "model.safetensors"
    tensors = load_file(path)
    save_file(
        {n: change(n, t.float()).contiguous() if is_layer_matrix(n, t) else t for n, t in tensors.items()},
        path, metadata={"format": "pt"},
    )  # fmt: skip
    return target


def ternary_of(weight: torch.Tensor) -> torch.Tensor:
    found = ternary.ternarize(weight.numpy())
    # A scale that float16 holds, so that the F16 file is exact as well.
    return torch.from_numpy(found.trits.astype(np.float32) * np.float32(np.float16(found.scales[0, 0])))


@pytest.fixture(scope="module")
def ternary_model(checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A ternary model; not to be changed."""
    return edit(checkpoint("llama"), tmp_path_factory.mktemp("ternary") / "model", lambda _, w: ternary_of(w))


def convert(model: Path, out: Path, *options: str) -> dict[str, gguf.ReaderTensor]:
    assert convert_main([str(model), str(out), "--effort", "fast", *options]) == 0
    return tensors(out)


@pytest.mark.parametrize("qtype", ["tq2_0", "tq1_0"])
def test_auto_is_exact(ternary_model: Path, tmp_path: Path, qtype: str) -> None:
    f16 = convert(ternary_model, tmp_path / "f16.gguf", "--outtype", "f16")
    found = convert(ternary_model, tmp_path / "t.gguf", "--ternary-type", qtype)
    layers = [n for n in found if n.startswith("blk.") and "norm" not in n]
    assert len(layers) == 14
    for name in layers:
        assert found[name].tensor_type == Q[qtype.upper()]
        assert (values(found[name]) == values(f16[name])).all()
    assert found["token_embd.weight"].tensor_type not in (Q.TQ1_0, Q.TQ2_0)
    fields = gguf.GGUFReader(tmp_path / "t.gguf").fields
    assert fields["itq3s.ternary"].contents() == "auto"
    assert fields["general.file_type"].contents() == gguf.LlamaFileType[f"MOSTLY_{qtype.upper()}"]


def test_one_ordinary_matrix_keeps_its_type(ternary_model: Path, tmp_path: Path) -> None:
    def change(name: str, weight: torch.Tensor) -> torch.Tensor:
        if "layers.1.mlp.up" in name:
            weight[3, 5] += 0.01
        return weight

    model = edit(ternary_model, tmp_path / "mixed", change)
    found = convert(model, tmp_path / "t.gguf")
    assert found["blk.1.ffn_up.weight"].tensor_type.name == "ITQ3_S"
    assert found["blk.0.ffn_up.weight"].tensor_type == Q.TQ2_0


@pytest.mark.parametrize(
    "scale", some(["absmean", "optimal", "maxabs"], lambda name: name == "optimal", pytest.mark.slow)
)
def test_force_ternarizes_latent_weights(checkpoint: Callable[[str], Path], tmp_path: Path, scale: str) -> None:
    f16 = convert(checkpoint("llama"), tmp_path / "f16.gguf", "--outtype", "f16")
    found = convert(checkpoint("llama"), tmp_path / "t.gguf", "--ternary", "force", "--ternary-scale", scale)
    for name in ("blk.0.attn_q.weight", "blk.1.ffn_down.weight"):
        assert found[name].tensor_type == Q.TQ2_0
        expected = ternary.ternarize(values(f16[name]), scale).weights()
        np.testing.assert_allclose(values(found[name]), expected, rtol=2.0**-10, atol=0)
    assert gguf.GGUFReader(tmp_path / "t.gguf").fields["itq3s.ternary"].contents() == f"force {scale}"


@pytest.mark.parametrize(
    "linear_class", some(["bitlinear", "autobitlinear"], lambda name: name == "bitlinear", pytest.mark.slow)
)
def test_packed_bitnet_weights(ternary_model: Path, tmp_path: Path, linear_class: str) -> None:
    """The uint8 form of BitNet b1.58: four trits a byte down the rows, a scale or its inverse beside it."""
    model = Path(shutil.copytree(ternary_model, tmp_path / "packed"))
    tensors, packed = load_file(model / "model.safetensors"), {}
    for name, tensor in tensors.items():
        if not is_layer_matrix(name, tensor):
            packed[name] = tensor
            continue
        found = ternary.recognise(tensor.numpy())
        assert found is not None
        digits = torch.from_numpy(found.trits.astype(np.uint8) + np.uint8(1)).reshape(4, -1, tensor.shape[1])
        packed[name] = digits[0] | digits[1] << 2 | digits[2] << 4 | digits[3] << 6
        scale = torch.tensor([found.scales.max()])
        packed[f"{name}_scale"] = scale if linear_class == "autobitlinear" else 1 / scale
    save_file(packed, model / "model.safetensors", metadata={"format": "pt"})
    entry = {"quant_method": "bitnet", "linear_class": linear_class}
    edit_json(model / "config.json", quantization_config=entry)
    found_packed = convert(model, tmp_path / "packed.gguf")
    found_plain = convert(ternary_model, tmp_path / "plain.gguf")
    for name in ("blk.0.attn_q.weight", "blk.0.attn_k.weight", "blk.1.ffn_gate.weight"):
        assert found_packed[name].tensor_type == Q.TQ2_0
        np.testing.assert_allclose(values(found_packed[name]), values(found_plain[name]), rtol=2.0**-10, atol=0)


def test_scale_that_float16_cannot_hold_is_reported(
    ternary_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = edit(ternary_model, tmp_path / "tiny", lambda n, w: w * 1.1e-6 if "layers.0.mlp.up" in n else w)
    found = convert(model, tmp_path / "t.gguf")
    assert found["blk.0.ffn_up.weight"].tensor_type.name == "ITQ3_S"
    assert "float16 cannot hold" in capsys.readouterr().err


def test_rows_that_are_not_whole_blocks_become_f16(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    model = edit(checkpoint("llama-odd"), tmp_path / "odd", lambda _, w: ternary_of(w))
    found = convert(model, tmp_path / "t.gguf")
    assert found["blk.0.ffn_down.weight"].tensor_type == Q.F16
    assert found["blk.0.ffn_up.weight"].tensor_type == Q.TQ2_0


def test_experts_have_a_scale_each(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    found = convert(checkpoint("mixtral"), tmp_path / "t.gguf", "--ternary", "force")
    experts = values(found["blk.0.ffn_up_exps.weight"])
    scales = [float(np.abs(expert).max()) for expert in experts]
    assert len(set(scales)) > 4
    assert [len(np.unique(np.abs(expert))) for expert in experts] == [2] * 8

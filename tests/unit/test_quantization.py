"""Quantized checkpoints that cannot be read are named; ``plan`` reads those that ``convert`` reads."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from damaged import edit_json
from gguf_itq3s.base.errors import UserError
from gguf_itq3s.checkpoint.reading import open_checkpoint
from gguf_itq3s.cli import main
from gguf_itq3s.inspect import plan
from quantized import PACKINGS, quantized

Make = Callable[[str], Path]
MATRIX = "model.layers.1.mlp.up_proj"
REMEDY = "; convert the model that it was made from, or what Transformers saves of it dequantized"


def in_place_of(folder: Path, tensors: dict[str, torch.Tensor], **entry: Any) -> None:
    """Other tensors for one matrix, by the ends of their names, and what config.json says of the quantization."""
    path = folder / "model.safetensors"
    weights = load_file(path)
    del weights[f"{MATRIX}.weight"]
    save_file({**weights, **{MATRIX + end: tensor for end, tensor in tensors.items()}}, path)
    edit_json(folder / "config.json", quantization_config=entry or None)


CODES = {".weight": torch.zeros(512, 256, dtype=torch.int8)}
FP8 = {".weight": torch.zeros(512, 256, dtype=torch.float8_e4m3fn)}
WORDS = {end: torch.zeros(shape, dtype=torch.int32) for end, shape in ((".qweight", (32, 512)), (".qzeros", (4, 64)))}
SCALES = {".scales": torch.ones(4, 512).half()}
PACKED = {
    ".weight_packed": torch.zeros(512, 32, dtype=torch.int32), ".weight_scale": torch.ones(512, 1),
    ".weight_shape": torch.tensor([512, 256]),
}  # fmt: skip


ROTATED = {"config_groups": {
    "R1": {"type": "hadamard", "apply": [{"targets": ["Linear"], "location": "weight_input"}]},
    "R4": {"type": "hadamard", "apply": [{"targets": ["re:.*down_proj$"], "location": "input"}]},
}}  # fmt: skip


def compressed(form: str, **weights: Any) -> dict[str, Any]:
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": {"weights": weights}}}


#: What a checkpoint holds, and what the line says of it.
REFUSED: dict[str, tuple[dict[str, torch.Tensor], dict[str, Any], str]] = {
    "bitsandbytes": (
        {".weight": torch.zeros(512 * 256 // 2, 1, dtype=torch.uint8), ".weight.absmax": torch.ones(2048)},
        {"quant_method": "bitsandbytes", "load_in_4bit": True}, "quantized (bitsandbytes) in a way that is not read: ",
    ),
    "awq": ({**WORDS, **SCALES}, {"quant_method": "awq", "bits": 4}, "quantized (awq) in a way that is not read: "),
    "gptq of 3 bits": (
        {**WORDS, **SCALES}, {"quant_method": "gptq", "bits": 3, "group_size": 64},
        "quantized (gptq) in a way that is not read: 3-bit gptq",
    ),
    "gptq of another group": (
        {**WORDS, **SCALES, ".g_idx": torch.zeros(100, dtype=torch.int32)}, {"quant_method": "gptq", "bits": 4},
        "quantized (gptq) in a way that is not read: ",
    ),
    "gptq without its scales": (
        WORDS, {"quant_method": "gptq", "bits": 4, "group_size": 64},
        f"quantized (gptq) in a way that is not read: '{MATRIX}.scales' is missing",
    ),
    "gptq of groups of another size": (
        {**WORDS, **SCALES}, {"quant_method": "gptq", "bits": 4, "group_size": 128},
        "quantized (gptq) in a way that is not read: 256 columns in groups of 128, and 4 scales of each row",
    ),
    "activations that are rotated": (
        {**CODES, ".weight_scale": torch.ones(512, 1)},
        compressed("int-quantized", num_bits=8, strategy="channel") | {"transform_config": ROTATED},
        "config.json: rotates activations while it runs (transform R4), which llama.cpp does not",
    ),
    "packed by channels": (
        PACKED, compressed("pack-quantized", num_bits=4, strategy="channel", group_size=None),
        'quantized (compressed-tensors) in a way that is not read: assert weight_config.get("strategy") == "group"',
    ),
    "a zero-point": (
        {**CODES, ".weight_scale": torch.ones(512, 1), ".weight_zero_point": torch.ones(512, 1, dtype=torch.int8)},
        compressed("int-quantized", num_bits=8, strategy="channel"),
        f"{MATRIX}.weight_zero_point: is quantized (compressed-tensors) in a way that is not read: no use is known",
    ),
    "a scale that is lost": (
        FP8, {"quant_method": "fp8"}, f"{MATRIX}.weight: is float8_e4m3fn codes, and nothing gives their scale",
    ),
    "codes without a word": (CODES, {}, f"{MATRIX}.weight: is int8 codes, and nothing gives their scale"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_read_is_named(
    name: str, llama_copy: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    tensors, entry, expected = REFUSED[name]
    in_place_of(llama_copy, tensors, **entry)
    for command in (["convert", str(llama_copy), str(tmp_path / "out.gguf")], ["plan", str(llama_copy)]):
        capfd.readouterr()
        assert main(command) == 1
        line = capfd.readouterr().err
        assert line.startswith(f"error: {llama_copy}") and expected in line and line.endswith(f"{REMEDY}\n"), line
    assert not list(tmp_path.glob("out.gguf*"))


def test_columns_in_another_order_need_their_order(llama_copy: Path) -> None:
    in_place_of(llama_copy, {**WORDS, **SCALES}, quant_method="gptq", bits=4, group_size=64, desc_act=True)
    with pytest.raises(UserError, match=r"qweight: has columns in another order \(desc_act\), and no g_idx"):
        open_checkpoint(llama_copy)


def test_eight_bits_of_a_float_are_weights_where_nothing_else_is_said(llama_copy: Path) -> None:
    in_place_of(llama_copy, {".weight": torch.full((512, 256), 1.5).to(torch.float8_e4m3fn)})
    tensors = {tensor.name: tensor for tensor in open_checkpoint(llama_copy).tensors}
    assert (tensors["blk.1.ffn_up.weight"].whole() == 1.5).all()


@pytest.mark.parametrize("packing", PACKINGS)
def test_a_plan_is_that_of_what_the_codes_mean(packing: str, uneven: Make, tmp_path: Path) -> None:
    """By the headers of the files, and of most by an index without them."""
    folder, meant = quantized(uneven("llama"), tmp_path, packing)
    sizes = plan.plan(meant, 128, None)
    assert plan.plan(folder, 128, None) == sizes
    names = list(load_file(folder / "model.safetensors"))
    (index := tmp_path / "index").mkdir()
    shutil.copy(folder / "config.json", index)
    (index / "model.safetensors.index.json").write_text(json.dumps({"weight_map": dict.fromkeys(names, "a")}))
    assert plan.plan(index, 128, None) == sizes

"""Checkpoints whose matrices come quantized, as the hub has them, and the same with the weights that the codes mean."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

#: Weights (m, n) -> the tensors that take their place, by the ending of their names, and the weights that these mean.
Packing = Callable[[torch.Tensor], tuple[dict[str, torch.Tensor], torch.Tensor]]

_FP8 = torch.float8_e4m3fn
_GROUP = 64


def _fp8(weights: torch.Tensor, scale: torch.Tensor, ending: str) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    codes = (weights / scale).to(_FP8)
    return {".weight": codes, ending: scale}, codes.float() * scale


def _fp8_blocks(weights: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    rows, columns = weights.shape
    padded = torch.nn.functional.pad(weights, (0, -columns % 128, 0, -rows % 128))
    blocks = padded.reshape(padded.shape[0] // 128, 128, padded.shape[1] // 128, 128)
    scale = blocks.abs().amax((1, 3)) / 448
    whole = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)[:rows, :columns]
    codes, meant = _fp8(weights, whole, "")
    return {".weight": codes[".weight"], ".weight_scale_inv": scale}, meant


def _fp8_tensor(weights: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    return _fp8(weights, weights.abs().max() / 448, ".weight_scale_inv")


def _fp8_channels(weights: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    return _fp8(weights, (weights.abs().amax(1, keepdim=True) / 448).bfloat16().float(), ".weight_scale")


def _modelopt(weights: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    packed, meant = _fp8(weights, weights.abs().max() / 448, ".weight_scale")
    return {**packed, ".input_scale": torch.tensor(0.5)}, meant


def _static(packing: Packing, scale: str) -> Packing:
    """FP8 with a scale for activations beside the weights' own, under another name."""

    def pack(weights: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        packed, meant = packing(weights)
        return {
            ".weight": packed[".weight"],
            scale: packed[".weight_scale_inv"],
            ".input_scale": torch.tensor(0.5),
        }, meant

    return pack


def _int8_groups(weights: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    parts = weights.unflatten(1, (-1, _GROUP))
    scale = parts.abs().amax(2) / 127
    codes = (parts / scale[..., None]).round().flatten(1).to(torch.int8)
    return {".weight": codes, ".weight_scale": scale}, codes.float() * scale.repeat_interleave(_GROUP, 1)


def _gptq_in_order(weights: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    packed, meant = _gptq(weights)
    del packed[".g_idx"]
    return packed, meant


def _plain(weights: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    return {".weight": weights.half()}, weights.half().float()


def _int8_channels(weights: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    scale = weights.abs().amax(1, keepdim=True) / 127
    codes = (weights / scale).round().to(torch.int8)
    return {".weight": codes, ".weight_scale": scale}, codes.float() * scale


def _groups(weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes 0 to 15 (m, n), float16 scales and zero-points 1 to 15 (m, n / group)."""
    parts = weights.unflatten(1, (-1, _GROUP))
    low, high = parts.amin(2).clamp(max=0), parts.amax(2).clamp(min=0)
    scale = ((high - low) / 15).half()
    zero = (-low / scale.float()).round().clamp(1, 15)
    codes = (parts / scale.float()[..., None] + zero[..., None]).round().clamp(0, 15)
    return codes.flatten(1).int(), scale, zero.int()


def _nibbles(codes: torch.Tensor, axis: int) -> torch.Tensor:
    """Eight codes of 4 bits along an axis in each int32, the first in the lowest bits."""
    parts = codes.movedim(axis, -1).long().unflatten(-1, (-1, 8))
    word = (parts << torch.arange(0, 32, 4)).sum(-1)
    return torch.where(word >= 1 << 31, word - (1 << 32), word).int().movedim(-1, axis).contiguous()


def _means(codes: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor) -> torch.Tensor:
    return ((codes.unflatten(1, (-1, _GROUP)) - zero[..., None]) * scale.float()[..., None]).flatten(1)


def _gptq(weights: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    codes, scale, zero = _groups(weights)
    packed = {
        ".qweight": _nibbles(codes.T.contiguous(), 0),
        ".qzeros": _nibbles(zero.T.contiguous() - 1, 1),
        ".scales": scale.T.contiguous(),
        ".g_idx": torch.arange(weights.shape[1], dtype=torch.int32) // _GROUP,
    }
    return packed, _means(codes, scale, zero)


def _packed(weights: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    codes, scale, zero = _groups(weights)
    packed = {
        ".weight_packed": _nibbles(codes, 1),
        ".weight_scale": scale,
        ".weight_shape": torch.tensor(weights.shape),
        ".weight_zero_point": _nibbles(zero, 0),
    }
    return packed, _means(codes, scale, zero)


def _bitnet(weights: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    scale = 1 / weights.abs().mean()
    trits = (weights * scale).round().clamp(-1, 1)
    parts = (trits + 1).to(torch.uint8).unflatten(0, (4, -1))
    packed = parts[0] | parts[1] << 2 | parts[2] << 4 | parts[3] << 6
    return {".weight": packed, ".weight_scale": scale.reshape(1)}, trits * (1 / scale)


def _compressed(form: str, **weights: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights}
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": group}}


#: Packing -> ``quantization_config`` and what it does to a matrix.
PACKINGS: dict[str, tuple[dict[str, Any], Packing]] = {
    "fp8-blocks": (
        {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]},
        _fp8_blocks,
    ),
    "fp8-tensor": (
        {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": None},
        _fp8_tensor,
    ),
    "modelopt-fp8": ({"quant_method": "modelopt", "quant_algo": "FP8"}, _modelopt),
    "compressed-float": (
        _compressed("float-quantized", type="float", num_bits=8, strategy="channel", symmetric=True),
        _fp8_channels,
    ),
    "compressed-int": (
        _compressed("int-quantized", type="int", num_bits=8, strategy="channel", symmetric=True),
        _int8_channels,
    ),
    "compressed-packed": (
        _compressed("pack-quantized", type="int", num_bits=4, strategy="group", group_size=_GROUP, symmetric=False),
        _packed,
    ),
    "fp8-static": ({"quant_method": "fp8", "activation_scheme": "static"}, _static(_fp8_tensor, ".weight_scale")),
    "fp8-deepseek": (
        {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]},
        _static(_fp8_blocks, ".scale"),
    ),
    "fbgemm": ({"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}, _fp8_channels),
    "compressed-tensor": (
        _compressed("float-quantized", type="float", num_bits=8, strategy="tensor", symmetric=True),
        _static(_fp8_tensor, ".weight_scale"),
    ),
    "compressed-groups": (
        _compressed("int-quantized", type="int", num_bits=8, strategy="group", group_size=_GROUP, symmetric=True),
        _int8_groups,
    ),
    "gptq-in-order": ({"quant_method": "gptq", "bits": 4, "group_size": _GROUP, "desc_act": False}, _gptq_in_order),
    "plain": ({"quant_method": "bitsandbytes", "load_in_4bit": True}, _plain),
    "gptq": ({"quant_method": "gptq", "bits": 4, "group_size": _GROUP, "desc_act": False, "sym": False}, _gptq),
    "bitnet": ({"quant_method": "bitnet", "linear_class": "bitlinear", "quantization_mode": "offline"}, _bitnet),
}


def quantized(source: Path, folder: Path, packing: str) -> tuple[Path, Path]:
    """Two folders of a model: its layers' matrices in a packing, and as float32 with the weights that the codes mean.

    Args:
        source: a checkpoint with one file of weights.
        folder: where the folders are made.
        packing: one of :data:`PACKINGS`.
    """
    config, pack = PACKINGS[packing]
    codes: dict[str, torch.Tensor] = {}
    floats: dict[str, torch.Tensor] = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        if "_proj" in name and name.endswith(".weight"):
            found, floats[name] = pack(tensor.float())
            codes |= {f"{name.removesuffix('.weight')}{ending}": part.contiguous() for ending, part in found.items()}
        else:
            codes[name] = floats[name] = tensor
    made = folder / packing, folder / f"{packing}-meant"
    for place, tensors in zip(made, (codes, floats), strict=True):
        shutil.copytree(source, place, ignore=shutil.ignore_patterns("*.safetensors"))
        save_file({name: part.contiguous() for name, part in tensors.items()}, place / "model.safetensors")
    path = made[0] / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "quantization_config": config}))
    return made

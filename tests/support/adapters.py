"""LoRA adapters in PEFT's form for small random models, and the models with them merged in."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

#: Suffixes of the matrices that an ordinary adapter changes.
ALL_LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def save_adapter(
    model: Path, folder: Path, targets: tuple[str, ...] = ALL_LINEAR, *, rank: int = 4, size: float = 0.03,
    dtype: torch.dtype = torch.float32, **config: object,
) -> Path:  # fmt: skip
    """A random adapter.

    Args:
        model: Hugging Face folder of one safetensors file.
        folder: to be made.
        targets: last parts of the names of the modules it changes.
        rank: of every update.
        size: standard deviation of the update's weights, about.
        dtype: of the saved matrices.
        config: further fields of adapter_config.json, in place of the usual ones too.
    """
    folder.mkdir(parents=True)
    generator = torch.Generator().manual_seed(1)
    tensors = {}
    for name, shape in shapes(model).items():
        module = name.removesuffix(".weight")
        if len(shape) == 2 and module.endswith(targets):
            a = torch.randn(rank, shape[1], generator=generator)
            b = torch.randn(shape[0], rank, generator=generator) * size / rank**0.5
            tensors[f"base_model.model.{module}.lora_A.weight"] = a.to(dtype).contiguous()
            tensors[f"base_model.model.{module}.lora_B.weight"] = b.to(dtype).contiguous()
    save_file(tensors, folder / "adapter_model.safetensors")
    fields = {
        "peft_type": "LORA", "base_model_name_or_path": "organisation/model", "task_type": "CAUSAL_LM",
        "r": rank, "lora_alpha": rank, "lora_dropout": 0.0, "bias": "none", "target_modules": sorted(targets),
        "use_dora": False, "use_rslora": False, "fan_in_fan_out": False, "init_lora_weights": True,
        "rank_pattern": {}, "alpha_pattern": {}, "modules_to_save": None,
    }  # fmt: skip
    (folder / "adapter_config.json").write_text(json.dumps({**fields, **config}))
    return folder


def shapes(model: Path) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in load_file(model / "model.safetensors").items()}


def change(adapter: Path, **config: object) -> None:
    """Other fields in an adapter's config."""
    path = adapter / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **config}))


def merged(model: Path, adapter: Path, folder: Path, scale: float) -> Path:
    """The model with ``scale * B A`` added to its weights, in float32: what the adapter means."""
    shutil.copytree(model, folder)
    weights = load_file(model / "model.safetensors")
    update = load_file(adapter / "adapter_model.safetensors")
    for name in [name for name in update if name.endswith(".lora_A.weight")]:
        module = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
        a, b = update[name].double(), update[name.replace("lora_A", "lora_B")].double()
        weight = weights[f"{module}.weight"]
        weights[f"{module}.weight"] = (weight.double() + scale * b @ a).float().contiguous()
    save_file({name: tensor.float() for name, tensor in weights.items()}, folder / "model.safetensors")
    return folder

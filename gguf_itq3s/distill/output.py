"""The folder of a trained model: the checkpoint's files with some of its tensors replaced."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from ..base.errors import UserError
from ..checkpoint.source import Checkpoint

#: What is copied of a model's folder besides its weights: nothing that runs, and nothing whose name is not known.
_COPIED: Final = (
    "config.json", "generation_config.json", "tokenizer.json", "tokenizer.model", "tokenizer_config.json",
    "special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt", "chat_template.jinja",
    "chat_template.json",
)  # fmt: skip
_INDEX: Final = "model.safetensors.index.json"


def write_model(checkpoint: Checkpoint, changed: Mapping[str, torch.Tensor], partial: Path, out: Path) -> int:
    """Write a model's folder, one of its weight files in memory at a time.

    Args:
        checkpoint: the model.
        changed: tensors that take the place of its own, by their names in it.
        partial: folder on the same disk that is written first.
        out: the folder, not there or empty.

    Returns:
        Bytes of the weights.

    Raises:
        UserError: a tensor is not in the checkpoint, or has another shape there.
        OSError: it cannot be written.
    """
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    places: dict[str, str] = {}
    names = [f"model-{n + 1:05d}-of-{len(checkpoint.files):05d}.safetensors" for n in range(len(checkpoint.files))]
    if len(names) == 1:
        names = ["model.safetensors"]
    left, size = dict(changed), 0
    for path, name in zip(checkpoint.files, names, strict=True):
        with safe_open(path, framework="pt") as file:
            tensors = {key: left.pop(key) if key in left else file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
            for key in tensors.keys() & changed.keys():
                if tensors[key].shape != torch.Size(file.get_slice(key).get_shape()):
                    raise UserError(
                        path, f"has another shape than the trained {tuple(tensors[key].shape)}", "update it", key
                    )
        save_file(
            {key: tensor.contiguous() for key, tensor in tensors.items()}, partial / name, metadata={"format": "pt"}
        )
        places |= dict.fromkeys(tensors, name)
        size += (partial / name).stat().st_size
    if left:
        raise UserError(checkpoint.folder, "has no such tensor among its weights", "update it", next(iter(left)))
    if len(names) > 1:
        index = {"metadata": {"total_size": size}, "weight_map": places}
        (partial / _INDEX).write_text(json.dumps(index, indent=1) + "\n")
    for name in _COPIED:
        if (checkpoint.folder / name).is_file():
            shutil.copyfile(checkpoint.folder / name, partial / name)
    if out.exists():
        out.rmdir()
    partial.replace(out)
    return size

#!/usr/bin/env python3
"""Make outlier twins of a Hugging Face model: the same function, harder to quantize.

    scripts/train/twins.py models/demo-llama --out twins

Some channels of every RMSNorm gain are rescaled by powers of two from 4 to 32, and the columns of the matrices that
read the norm are rescaled the other way, so that the function does not change:

* ``weight-twin``: gain divided, columns multiplied: outlier weights;
* ``activation-twin``: gain multiplied, columns divided: outlier activations, as large language models have.

Powers of two only move exponents, so the twins' F16 tensors are exact (but for weights that become F16 denormals).
The norm before the output head is rescaled too unless the head is tied to the embedding, which is read elsewhere.
Handles models with Llama's names: Llama, Mistral, Qwen2 and Qwen3 without experts.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import sys
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from gguf_itq3s.base.errors import UserError, report_errors
from gguf_itq3s.checkpoint import channels, shards

TWINS = ("weight-twin", "activation-twin")
MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3")
_REMEDY = "give a model with Llama's names, without fused or expert matrices"
FACTORS = (4.0, 8.0, 16.0, 32.0)

Tensors = dict[str, torch.Tensor]


def norm_readers(tensors: Tensors, tied: bool) -> dict[str, list[str]]:
    """Norm gain -> the weights that read it, by tensor name.

    Raises:
        UserError: a reader is missing, or no norm was found.
    """
    layers = {int(match[1]) for name in tensors if (match := re.match(r"model\.layers\.(\d+)\.", name))}
    readers = channels.readers_in_checkpoint(sorted(tensors), max(layers, default=-1) + 1)
    if not any("input_layernorm" in norm for norm in readers):
        raise UserError("model.layers.N.input_layernorm.weight", "is not there", _REMEDY)
    if tied:
        readers.pop("model.norm.weight", None)
    for norm, weights in readers.items():
        wanted = 3 if "input_layernorm" in norm else 2 if "post_attention_layernorm" in norm else 1
        if len(weights) != wanted:
            raise UserError(norm, "a matrix that reads it is missing", _REMEDY)
    return dict(sorted(readers.items()))  # the order in which channels are drawn


def make_twin(tensors: Tensors, twin: str, channels: int, seed: int, tied: bool) -> Tensors:
    """The tensors of a twin.

    Args:
        tensors: name -> tensor of the whole model.
        twin: a name of :data:`TWINS`.
        channels: how many channels of each norm are rescaled.
        seed: of the choice of channels and factors.
        tied: whether the output head is the embedding.

    Returns:
        A new dictionary; untouched tensors are shared with ``tensors``.

    Raises:
        UserError: as :func:`norm_readers`, or a rescaled tensor overflows its dtype.
    """
    rng = np.random.default_rng(seed)
    result = dict(tensors)
    for norm, weights in norm_readers(tensors, tied).items():
        gain = tensors[norm]
        where = torch.from_numpy(rng.choice(gain.numel(), size=channels, replace=False))
        factor = torch.ones(gain.numel(), dtype=torch.float32)
        factor[where] = torch.from_numpy(rng.choice(FACTORS, size=channels).astype(np.float32))
        if twin == "weight-twin":
            factor = 1 / factor
        result[norm] = (gain.float() * factor).to(gain.dtype)
        for weight in weights:
            result[weight] = (tensors[weight].float() / factor).to(tensors[weight].dtype)
            if not torch.isfinite(result[weight]).all():
                raise UserError(weight, f"a rescaled weight does not fit {tensors[weight].dtype}", _REMEDY)
    return result


def read_model(model_dir: Path) -> tuple[Tensors, bool]:
    """All tensors of a model folder, and whether its output head is tied to the embedding.

    Raises:
        UserError: no config, no weights, or a model type with other names.
    """
    config = model_dir / "config.json"
    if not config.is_file():
        raise UserError(config, "is not there", _REMEDY)
    settings = json.loads(config.read_text())
    if settings.get("model_type") not in MODEL_TYPES:
        raise UserError(
            config, f"model type {settings.get('model_type')!r} is not one of {', '.join(MODEL_TYPES)}", _REMEDY
        )
    tensors: Tensors = {}
    for path in shards.find(model_dir, settings).files:
        tensors.update(load_file(path))
    return tensors, bool(settings.get("tie_word_embeddings", False))


def write_model(tensors: Tensors, source: Path, out: Path) -> None:
    """Write a model folder: the small files of ``source`` and one safetensors file."""
    out.mkdir(parents=True, exist_ok=True)
    for path in sorted(source.iterdir()):
        if path.is_file() and not path.name.endswith((".safetensors", ".safetensors.index.json")):
            shutil.copyfile(path, out / path.name)
    partial = out / "model.safetensors.partial"
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, partial, metadata={"format": "pt"})
    partial.replace(out / "model.safetensors")


def make_twins(model_dir: Path, out: Path, channels: int = 6, seed: int = 0) -> list[Path]:
    """Write every twin of a model into a folder of its own below ``out``; returns the folders, as :data:`TWINS`.

    Raises:
        UserError: the model cannot be rescaled.
    """
    tensors, tied = read_model(model_dir)
    for twin in TWINS:
        write_model(make_twin(tensors, twin, channels, seed, tied), model_dir, out / twin)
    return [out / twin for twin in TWINS]


@report_errors
def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model_dir", type=Path, help="folder of a Hugging Face model")
    parser.add_argument("--out", type=Path, required=True, help=f"where {' and '.join(TWINS)} are written")
    parser.add_argument("--channels", type=int, default=6, help="rescaled channels of a norm (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the choice of channels (default: %(default)s)")
    args = parser.parse_args()
    for folder in make_twins(args.model_dir, args.out, args.channels, args.seed):
        print(folder)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

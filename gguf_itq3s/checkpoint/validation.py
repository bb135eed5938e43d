"""A Hugging Face folder before it is read: what has to be there is there, and its numbers are some that can be.

Nothing of a folder is believed: upstream's code makes lists as long as ``config.json`` says and follows every name.
"""

from __future__ import annotations

import json
import pickle
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

from safetensors import SafetensorError, safe_open

from ..base.errors import UserError
from .files import listed_file

_SAFETENSORS_INDEX: Final = "model.safetensors.index.json"
_BIN_INDEX: Final = "pytorch_model.bin.index.json"
_NUMBERED: Final = re.compile(r"-(\d+)-of-(\d+)\.")
# Counts in config.json, and those of which some architectures have a list, one for each layer.
_LISTS: Final = ("intermediate_size", "num_attention_heads", "num_key_value_heads", "n_head")
_LAYERS: Final = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_COUNTS: Final = (*_LAYERS, "hidden_size", "head_dim", "vocab_size", "n_embd", *_LISTS)
# Far beyond any model; upstream's code makes lists as long as these numbers say.
_MOST: Final = {**dict.fromkeys(_LAYERS, 1 << 12), "vocab_size": 1 << 23}
_MOST_COLUMNS: Final = 1 << 24
# What costs so little that it need not be compared with the weights that are there: seconds, and tens of megabytes.
_CHEAP: Final = {**dict.fromkeys(_LAYERS, 1 << 9), "vocab_size": 1 << 18}
# Added to a mean square before its root is taken.
_EPSILONS: Final = ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_eps", "norm_epsilon")
_UNREADABLE: Final = "the file is damaged; download it again"


def check_folder(folder: Path) -> dict[str, Any]:
    """The folder's ``config.json``, whose counts are counts.

    Raises:
        UserError: it is no folder, has no such file, or as :func:`check_counts`.
    """
    if not folder.exists():
        remedy = "give the folder of a Hugging Face checkpoint, or hf:organisation/name"
        raise UserError(folder, "no such folder", remedy)
    if not folder.is_dir():
        remedy = "give the folder of a Hugging Face checkpoint"
        if folder.suffix == ".gguf":
            remedy += "; llama-quantize converts a GGUF file"
        raise UserError(folder, "is a file, not a folder", remedy)
    config = folder / "config.json"
    if not config.is_file():
        raise UserError(config, "no such file", "give the folder of a Hugging Face checkpoint with its config.json")
    found = read_json(config)
    check_counts(config, found)
    return found


def check_counts(path: Path, config: Mapping[str, Any]) -> None:
    """Refuse a config whose numbers of layers, heads, columns are none; upstream's code takes them as they are.

    Raises:
        UserError: one is text, negative, or the like.
    """
    text = config.get("text_config")
    for part in (config, text) if isinstance(text, Mapping) else (config,):
        for name in _COUNTS:
            value = part.get(name)
            values = value if isinstance(value, list) and value and name in _LISTS else [value]
            if not all(v is None or (isinstance(v, int) and not isinstance(v, bool) and v >= 0) for v in values):
                raise UserError(
                    path, f"has {name} {value!r:.80}, which is no count", "take the config.json of the model"
                )
            if any(v is not None and v > _MOST.get(name, _MOST_COLUMNS) for v in values):
                what = f"has {name} {value!r:.80}, more than {_MOST.get(name, _MOST_COLUMNS)}"
                raise UserError(path, what, "take the config.json of the model")
        for name in _EPSILONS:
            value = part.get(name)
            if isinstance(value, (int, float)) and not 0 <= value < 1:  # false for NaN
                what = f"has {name} {value!r:.80}, which is no small number"
                raise UserError(path, what, "take the config.json of the model")


def check_counts_by_shapes(path: Path, config: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Refuse numbers of layers and tokens far beyond those of the weights, before upstream makes lists of that length.

    Numbers that cost little are left to the comparison with what the architecture needs, which names the tensor.

    Args:
        path: of the config, for the message.
        config: its content.
        shapes: of the checkpoint's tensors.

    Raises:
        UserError: there are more than the weights can be of.
    """
    numbers = (int(number) for name in shapes for number in re.findall(r"(?<=\.)\d+(?=\.)", name))
    layers = max(numbers, default=-1) + 1
    largest = max((size for shape in shapes.values() for size in shape), default=0)
    text = config.get("text_config")
    for part in (config, text) if isinstance(text, Mapping) else (config,):
        for name, cheap in _CHEAP.items():
            value, there = part.get(name), largest if name == "vocab_size" else layers
            if isinstance(value, int) and value > max(there, cheap):
                what = f"has {name} {value}, but no weight is of more than {there}"
                raise UserError(path, what, "take the config.json of the model")


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file.

    Raises:
        UserError: the file is not there, is not JSON, or holds something else.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError, RecursionError) as error:
        raise UserError(path, f"is not valid JSON: {error}", _UNREADABLE) from error
    if not isinstance(value, dict):
        raise UserError(path, "holds no JSON object", _UNREADABLE)
    return value


def read_weight_map(index: Path) -> dict[str, str]:
    """Tensor -> file of an index, names of files in its folder.

    Raises:
        UserError: it is damaged, or names anything else.
    """
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise UserError(index, "has no weight_map", _UNREADABLE)
    for name in weight_map.values():
        listed_file(index.parent, name, index)
    return weight_map


def stored_tensors(files: Iterable[Path]) -> dict[str, tuple[Path, tuple[int, ...]]]:
    """Name of every tensor in safetensors files -> its file and shape; no weights are read.

    Raises:
        UserError: a file is truncated or corrupt.
    """
    stored: dict[str, tuple[Path, tuple[int, ...]]] = {}
    for path in files:
        try:
            with safe_open(path, framework="numpy") as shard:
                stored |= {name: (path, tuple(shard.get_slice(name).get_shape())) for name in shard.keys()}  # noqa: SIM118
        except (SafetensorError, OSError, ValueError) as error:  # noqa: PERF203 - the error names the shard
            raise UserError(path, f"is truncated or corrupt ({error})", "download it again") from error
    return stored


def check_weights(folder: Path, config: Mapping[str, Any]) -> list[Path]:
    """The weight files; all that the index and the numbering promise are there, and readable as far as headers tell.

    The headers are compared with config.json as well; pickles have none.

    Raises:
        UserError: a file is missing, damaged, not named by the index, or holds other tensors than that says.
    """
    present = sorted(
        p for p in folder.iterdir() if re.fullmatch(r"(model.*\.safetensors|pytorch_model.*\.bin)", p.name)
    )
    # The choice of llama.cpp's converter: safetensors where there are any.
    safe = any(p.suffix == ".safetensors" for p in present) or (folder / _SAFETENSORS_INDEX).is_file()
    shards = [p for p in present if (p.suffix == ".safetensors") == safe]
    index = folder / (_SAFETENSORS_INDEX if safe else _BIN_INDEX)
    weight_map: dict[str, str] = {}
    if index.is_file():
        weight_map = read_weight_map(index)
        listed = set(weight_map.values())
        if missing := sorted(name for name in listed if not (folder / name).is_file()):
            count = f" ({len(missing)} shards are missing)" if len(missing) > 1 else ""
            raise UserError(folder / missing[0], f"is named in {index.name} but not there{count}", "download it")
        for path in shards:
            if path.name not in listed and _NUMBERED.search(path.name):
                raise UserError(path, f"is not listed in {index.name}", "take the index that belongs to the shards")
        shards = sorted(folder / name for name in listed)
    elif not shards:
        raise UserError(folder, "holds no model*.safetensors or pytorch_model*.bin", "download the weights")
    else:
        _check_numbering(shards)
    shapes: dict[str, tuple[int, ...]] = {}
    for path in shards:
        if path.suffix == ".safetensors":
            found = {name: shape for name, (_, shape) in stored_tensors([path]).items()}
            _check_index(path, {name for name, file in weight_map.items() if file == path.name}, set(found))
            shapes |= found
        else:
            _check_pickle(path)
    if all(path.suffix == ".safetensors" for path in shards):
        check_counts_by_shapes(folder / "config.json", config, shapes)
    return shards


def _check_numbering(shards: list[Path]) -> None:
    """Without an index, the names say how many shards there are."""
    names = {path.name for path in shards}
    for path in shards:
        match = _NUMBERED.search(path.name)
        for number in range(1, int(match[2]) + 1 if match else 0):
            assert match is not None
            wanted = path.name.replace(match[0], f"-{number:0{len(match[1])}d}-of-{match[2]}.")
            if wanted not in names:
                raise UserError(path.with_name(wanted), "this shard is not there", "download it")


def _check_index(path: Path, expected: set[str], names: set[str]) -> None:
    """The index names those tensors of a shard that are there, if there is one."""
    if lost := sorted(expected - names):
        raise UserError(path, "is listed in the index but not in this shard", "download the shard again", lost[0])
    if expected and (extra := sorted(names - expected)):
        raise UserError(path, "is in this shard but not in the index", "take the index of these shards", extra[0])


def _check_pickle(path: Path) -> None:
    import torch

    try:
        torch.load(str(path), map_location="cpu", mmap=True, weights_only=True)
    except pickle.UnpicklingError as error:
        what = "holds other things than weights, which are not loaded, or is corrupt"
        raise UserError(path, what, "convert it to safetensors where it may run its code") from error
    except Exception as error:  # pickles fail in many ways
        raise UserError(path, f"is truncated or corrupt ({type(error).__name__})", "download it again") from error

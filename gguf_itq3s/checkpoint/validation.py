"""A Hugging Face folder before it is read: what has to be there is there, and its numbers are some that can be.

Nothing of a folder is believed: upstream's code makes lists as long as ``config.json`` says and follows every name.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from ..base.errors import UserError

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
_OWN: Final = "take the config.json of the model"
#: What to do about a damaged file.
UNREADABLE: Final = "the file is damaged; download it again"
#: What PEFT calls the description of an adapter.
ADAPTER: Final = "adapter_config.json"


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
        check_no_adapter(folder)
        raise UserError(config, "no such file", "give the folder of a Hugging Face checkpoint with its config.json")
    found = read_json(config)
    check_counts(config, found)
    return found


def check_no_adapter(folder: Path) -> None:
    """Say of a folder that holds no model what it holds.

    Raises:
        UserError: an adapter.
    """
    if (folder / ADAPTER).is_file():
        remedy = "make a file of it by gguf-itq3s convert-lora, or merge it into its model (merge_and_unload of PEFT)"
        raise UserError(folder, "holds an adapter, no model", remedy)


def check_counts(path: Path, config: Mapping[str, Any]) -> None:
    """Refuse a config whose numbers of layers, heads, columns are none; upstream's code takes them as they are.

    Raises:
        UserError: one is text, negative, or the like.
    """
    text = config.get("text_config")
    for part in (config, text) if isinstance(text, Mapping) else (config,):
        for name in _COUNTS:
            value, most = part.get(name), _MOST.get(name, _MOST_COLUMNS)
            values = value if isinstance(value, list) and value and name in _LISTS else [value]
            if not all(v is None or (isinstance(v, int) and not isinstance(v, bool) and v >= 0) for v in values):
                raise UserError(path, f"has {name} {value!r:.80}, which is no count", _OWN)
            if any(v is not None and v > most for v in values):
                raise UserError(path, f"has {name} {value!r:.80}, more than {most}", _OWN)
        for name in _EPSILONS:
            value = part.get(name)
            if isinstance(value, (int, float)) and not 0 <= value < 1:  # false for NaN
                raise UserError(path, f"has {name} {value!r:.80}, which is no small number", _OWN)


def check_counts_by_shapes(path: Path, config: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Refuse numbers of layers and tokens far beyond those of the weights, before upstream makes lists of that length.

    Numbers that cost little are left to the comparison with what the architecture needs, which names the tensor.

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
                raise UserError(path, f"has {name} {value}, but no weight is of more than {there}", _OWN)


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file.

    Raises:
        UserError: the file is not there, is not JSON, or holds something else.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError, RecursionError) as error:
        raise UserError(path, f"is not valid JSON: {error}", UNREADABLE) from error
    if not isinstance(value, dict):
        raise UserError(path, "holds no JSON object", UNREADABLE)
    return value

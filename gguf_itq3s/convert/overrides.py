"""Options that name tensors, layers, sizes and metadata, many of them ``llama-quantize``'s, from the command line."""

from __future__ import annotations

import argparse
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from ..base.errors import UserError, positive
from ..checkpoint.source import Checkpoint, model_facts
from .options import TENSOR_TYPES

# Bytes of a file with patterns: far more than one for every tensor of any model.
_LONGEST_FILE: Final = 1 << 24
_LONGEST_KEY: Final = 127
_LONGEST_TEXT: Final = 127
_MOST: Final = (1 << 32) - 1
#: Keys that say where the bytes of the file are, or what they mean.
_OWN_KEYS: Final = ("general.alignment", "general.architecture", "general.file_type", "general.type", "GGUF.", "split.",
                    "itq3s.", "quantize.imatrix.")  # fmt: skip


def tensor_type(argument: str) -> tuple[str, str]:
    """``PATTERN=TYPE``, for argparse: a regular expression in lower case, as llama-quantize makes it, and a type."""
    pattern, separator, name = argument.partition("=")
    if not separator or not pattern or not name:
        raise argparse.ArgumentTypeError(f"{argument!r:.80} is not PATTERN=TYPE")
    if name.lower() not in TENSOR_TYPES:
        raise argparse.ArgumentTypeError(f"{name!r:.40} is not one of the types {', '.join(TENSOR_TYPES)}")
    pattern = pattern.lower()
    if "[[:" in pattern:
        raise argparse.ArgumentTypeError(f"{pattern!r:.80}: write a class such as [[:digit:]] as [0-9]")
    try:
        re.compile(pattern)
    except re.error as error:
        raise argparse.ArgumentTypeError(f"{pattern!r:.80} is not a regular expression: {error}") from None
    return pattern, name.lower()


def tensor_type_file(path: Path) -> list[tuple[str, str]]:
    """The patterns of a file, separated by spaces or line breaks.

    Raises:
        UserError: it cannot be read, or holds something else.
    """
    remedy = "give a file with PATTERN=TYPE, separated by spaces or line breaks"
    try:
        with path.open("rb") as file:
            data = file.read(_LONGEST_FILE + 1)
        if len(data) > _LONGEST_FILE:
            raise UserError(path, f"has more than {_LONGEST_FILE} bytes", remedy)
        return [tensor_type(word) for word in data.decode().split()]
    except OSError as error:
        raise UserError(path, f"cannot be read: {error.strerror or error}", remedy) from error
    except (argparse.ArgumentTypeError, ValueError) as error:
        raise UserError(path, str(error), remedy) from error


def layers(argument: str) -> tuple[int, ...]:
    """Layer numbers with commas between, for argparse."""
    try:
        numbers = sorted({int(word) for word in argument.split(",")})
    except ValueError:
        raise argparse.ArgumentTypeError(f"{argument!r:.80} is no list of layers as 0,1,5") from None
    if numbers[0] < 0:
        raise argparse.ArgumentTypeError(f"{numbers[0]} is no layer")
    return tuple(numbers)


def split_size(argument: str) -> int:
    """Bytes of ``2G``, ``500M``, ``10K`` or a plain number, for argparse; the factors are upstream's, of 1000."""
    match = re.fullmatch(r"([0-9]{1,18})([KMG]?)", argument)
    if not match:
        raise argparse.ArgumentTypeError(f"{argument!r:.40} is no size; write a number, perhaps with K, M or G behind")
    return int(match[1]) * 1000 ** " KMG".index(match[2] or " ")


def split_count(argument: str) -> int:
    """A number of tensors, for argparse; 0 is any number, as for upstream."""
    return 0 if argument == "0" else positive(argument)


def bits_per_weight(argument: str) -> float:
    """A number of bits, for argparse."""
    try:
        bits = float(argument)
    except ValueError:
        bits = math.nan
    if not 0 < bits < 64:
        raise argparse.ArgumentTypeError(f"{argument!r:.40} is no number of bits")
    return bits


def override_kv(argument: str) -> str:
    """``KEY=TYPE:VALUE``, for argparse: as it is, once it is known to be one."""
    try:
        _parsed(argument)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return argument


def _parsed(argument: str) -> tuple[str, str, Any]:
    """Key, kind (``int``, ``float``, ``bool``, ``str``) and value; ValueError says what is wrong."""
    key, separator, rest = argument.partition("=")
    kind, colon, text = rest.partition(":")
    if not separator or not colon or not key or len(key.encode()) > _LONGEST_KEY or not key.isprintable():
        raise ValueError(f"{argument!r:.80} is not KEY=TYPE:VALUE")
    if key.startswith(_OWN_KEYS):
        raise ValueError(f"{key} says how the file is made and cannot be overridden")
    if kind == "int":
        value = int(text) if re.fullmatch(r"[+-]?[0-9]{1,20}", text) else -1
        if not 0 <= value <= _MOST:
            raise ValueError(f"{key}: {text!r:.40} is not a whole number of 0 to {_MOST}")
        return key, kind, value
    if kind == "float":
        try:
            return key, kind, float(text)
        except ValueError:
            raise ValueError(f"{key}: {text!r:.40} is not a number") from None
    if kind == "bool":
        if text not in ("true", "false"):
            raise ValueError(f"{key}: {text!r:.40} is neither true nor false")
        return key, kind, text == "true"
    if kind == "str":
        if len(text.encode()) > _LONGEST_TEXT:
            raise ValueError(f"{key}: the text is longer than {_LONGEST_TEXT} bytes")
        return key, kind, text
    raise ValueError(f"{argument!r:.80}: the type is one of int, float, bool and str")


def apply(checkpoint: Checkpoint, overrides: tuple[str, ...]) -> Checkpoint:
    """Write metadata over the model's own, with the types that llama-quantize gives them.

    Args:
        checkpoint: its writer gets them.
        overrides: ``KEY=TYPE:VALUE`` each.

    Returns:
        The checkpoint, with what the type policy asks read again.

    Raises:
        UserError: one is not of that form.
    """
    if not overrides:
        return checkpoint
    writer = checkpoint.writer
    add = {"int": writer.add_uint32, "float": writer.add_float32, "bool": writer.add_bool, "str": writer.add_string}
    for argument in overrides:
        try:
            key, kind, value = _parsed(argument)
        except ValueError as error:
            raise UserError(checkpoint.folder, str(error), "correct --override-kv") from error
        writer.remove_key(key)
        add[kind](key, value)
    return replace(checkpoint, model=model_facts(checkpoint.folder, writer, checkpoint.tensors))

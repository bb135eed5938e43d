"""What is replaced in transformers, torch and gguf-py while they read a model: all of it here, within a context."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from ..base.errors import UserError
from . import trust

Function = Callable[..., Any]


@contextmanager
def patched(
    folder: Path | None, trusted: bool = False, *, reads: bool = False, quantize: Function | None = None
) -> Iterator[Any]:
    """Within, the libraries do with a model's folder what this package wants them to.

    Args:
        folder: the model's; None where transformers and torch are not used on one.
        trusted: whether code of the model may run.
        reads: whether gguf-py reads weights.
        quantize: what stands in for ``gguf.quants.quantize``.

    Yields:
        The module ``transformers``, None without a folder. Loading what needs code of the model raises
        :class:`UserError` without trust; where transformers has its own configuration or model class, that is taken
        instead. Pickles are loaded as weights alone, trusted or not.

    Raises:
        UserError: this version of transformers cannot be kept from running code.
    """
    with ExitStack() as stack:
        if reads:
            # Mapped pages count as memory until the file closes.
            stack.enter_context(replaced_in(gguf.utility.LocalTensor, "mmap_bytes", _read_bytes))
        if quantize is not None:
            # Types are chosen later, and weights converted one tensor at a time.
            stack.enter_context(replaced_in(gguf.quants, "quantize", quantize))
        if folder is None:
            yield None
            return
        import torch
        import transformers

        # Code of a model, or of a hub, runs only where the user says so.
        stack.enter_context(_replaced_everywhere("transformers", trust.replacements(folder, trusted)))
        # A pickle runs what it names, unless it is read as weights alone.
        stack.enter_context(replaced_in(torch, "load", functools.partial(trust.load_weights, torch.load)))
        yield transformers


def renaming(model: Any) -> tuple[Function, Function, list[Any]]:
    """How ``from_pretrained`` goes from the names of a checkpoint to those of a model.

    Returns:
        A function from a name to that of a parameter and to the pattern of the converter that makes it, None where it
        is as it is; by what names are sorted, numbers in them as such; the converters.
    """
    from transformers import conversion_mapping, core_model_loading

    rules = conversion_mapping.get_model_conversion_mapping(model)
    renamings = [rule for rule in rules if isinstance(rule, core_model_loading.WeightRenaming)]
    converters = [rule for rule in rules if isinstance(rule, core_model_loading.WeightConverter)]
    names, prefix = model.state_dict(), model.base_model_prefix

    def renamed(name: str) -> tuple[str, str | None]:
        found: tuple[str, str | None] = core_model_loading.rename_source_key(name, renamings, converters, prefix, names)
        if found[0] not in names and name in names:  # a rule took it for another's
            return name, None
        return found

    return renamed, core_model_loading.dot_natural_key, converters


def _read_bytes(tensor: Any) -> np.ndarray:
    """The bytes of a safetensors tensor: takes the place of ``gguf.utility.LocalTensor.mmap_bytes``."""
    span = tensor.data_range
    data = np.fromfile(span.filename, dtype=np.uint8, count=span.size, offset=span.offset)
    if data.size != span.size:
        raise UserError(span.filename, "ended early while it was read", "download it again")
    return data


@contextmanager
def _replaced_everywhere(package: str, replacements: Mapping[str, Function]) -> Iterator[None]:
    """Within, functions of a package are other ones, in every module that has imported them by name, or will."""
    own: dict[str, Function] = {}
    for module, name in _holders(package, replacements):
        if callable(function := vars(module)[name]):
            own.setdefault(name, function)
            setattr(module, name, replacements[name])
    try:
        yield
    finally:
        for module, name in _holders(package, replacements):  # those that were imported meanwhile too
            if vars(module)[name] is replacements[name]:
                setattr(module, name, own[name])


def _holders(package: str, names: Mapping[str, Any]) -> list[tuple[Any, str]]:
    """The modules of a package that have one of the names, with each that they have.

    Every module is looked at whenever this is called: one can be imported, or get a name, at any time between.
    """
    below = f"{package}."
    return [
        (module, name)
        for path in list(sys.modules)
        if (path == package or path.startswith(below)) and (module := sys.modules.get(path)) is not None
        for name in names.keys() & vars(module).keys()
    ]


@contextmanager
def replaced_in(module: Any, name: str, replacement: Any) -> Iterator[None]:
    """Within, an attribute of a module or class is another one."""
    before = getattr(module, name)
    setattr(module, name, replacement)
    try:
        yield
    finally:
        setattr(module, name, before)

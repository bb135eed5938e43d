"""The weights of a checkpoint by the names that a model of Transformers has for them.

They come from where the tensors of a file do: what upstream's ``conversion`` package has indexed and dequantized,
before it maps names and permutes rows. Which of them a parameter is made of, and how, Transformers says itself, by the
rules that its ``from_pretrained`` goes by.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..base.errors import UserError
from ..codec.blocks import TOO_LARGE, WEIGHT_LIMIT
from . import lazy, patches

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Weights:
    """Weights by the names of the checkpoint, read one at a time.

    Attributes:
        folder: of the checkpoint.
        tensors: name, without what encloses a text model -> a function that gives the tensor: lazy, or as it is.
        names: the same -> name in the files.
    """

    folder: Path
    tensors: Mapping[str, Callable[[], Any]] = field(default_factory=dict, repr=False)
    names: Mapping[str, str] = field(default_factory=dict, repr=False)

    def read(self, name: str, number: int | None = None) -> torch.Tensor:
        """A tensor of the checkpoint, or one matrix of a stack."""
        tensor = self.tensors[name]()
        with patches.patched(None, reads=True):
            found: torch.Tensor | None = None if number is None else lazy.part(tensor, number)
            if found is None:
                found = lazy.value(tensor)
                found = found if number is None else found[number]
        return found


@dataclass
class _Made:
    """How a parameter is made: ``first`` of those that ``converter`` makes together, None where it is one tensor as it
    is; pattern of the converter -> names in the checkpoint."""

    first: str
    converter: Any
    sources: dict[str, list[str]] = field(default_factory=dict)


class Parameters:
    """The weights of a checkpoint by the names of a model's parameters and persistent buffers.

    Args:
        model: of Transformers, on any device.
    """

    def __init__(self, weights: Weights, model: Any) -> None:
        self._weights, self._model = weights, model
        self._made: dict[str, _Made] = {}
        renamed, order, converters = patches.renaming(model)
        by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
        held = model.state_dict()
        # In the order of numbers in names: experts are stacked in it.
        for source in sorted(weights.tensors, key=order):
            found = (renamed(name) for name in (source, weights.names.get(source, source)))
            name, pattern = next((one for one in found if one[0] in held), ("", None))
            if not name:
                continue
            if pattern is None:
                self._made[name] = _Made(name, None, {"": [source]})
                continue
            converter = by_pattern[pattern]
            made = self._made.get(name) or _Made(name, converter)
            made.sources.setdefault(pattern, []).append(source)
            for target in converter.target_patterns:
                self._made[name.replace(converter.target_patterns[0], target)] = made

    def has(self, name: str) -> bool:
        """Whether the checkpoint holds a tensor of the model."""
        return name in self._made

    def sources(self, name: str) -> frozenset[str]:
        """The names in the checkpoint of what a tensor of the model is made of."""
        made = self._made.get(name)
        return frozenset(source for names in made.sources.values() for source in names) if made else frozenset()

    def get(self, name: str, shape: torch.Size, number: int | None = None) -> torch.Tensor:
        """A tensor of the model, in any floating type, or one matrix of a parameter that stacks those of the experts.

        Args:
            name: of the parameter.
            shape: of the tensor, or of the matrix, (rows, columns).
            number: of the expert.

        Raises:
            UserError: it is not in the checkpoint, is of another shape, or has weights that cannot be.
        """
        folder = self._weights.folder
        if (made := self._made.get(name)) is None:
            what = (
                "transformers wants this tensor, and the checkpoint has none of it, or in a type that is kept (NVFP4)"
            )
            remedy = "update it, or use an importance matrix of llama-imatrix (--imatrix)"
            raise UserError(folder, what, remedy, name)
        tensor = self._converted(name, made, number)
        if tensor.shape != shape:
            what = f"is {tuple(tensor.shape)}, and {tuple(shape)} in the model that its config.json describes"
            raise UserError(folder, what, "take the config.json that belongs to the weights", name)
        tensor = tensor.float() if tensor.dtype.itemsize == 1 else tensor  # FP8 has no arithmetic
        if not float(tensor.abs().amax()) < WEIGHT_LIMIT:  # true for NaN
            raise UserError(folder, TOO_LARGE, "repair the checkpoint or download it again", name)
        return tensor

    def _converted(self, name: str, made: _Made, number: int | None) -> torch.Tensor:
        if made.converter is None:
            return self._weights.read(made.sources[""][0], number)
        converter = copy.deepcopy(made.converter)
        # Of matrices that are stacked, first of all, one stands for all.
        alone = type(converter.operations[0]).__name__ == "MergeModulelist"
        for pattern, sources in made.sources.items():
            for source in sources if number is None or not alone else sources[number : number + 1]:
                converter.add_tensor(made.first, source, pattern, self._weights.read(source))
        try:
            found = converter.convert(made.first, model=self._model, config=self._model.config)[name]
        except (RuntimeError, ValueError, LookupError) as error:
            what = f"cannot be made as transformers makes it: {error}"
            raise UserError(self._weights.folder, what, "check that the download is complete", name) from error
        found = found[0] if isinstance(found, list) else found
        return found if number is None else found[0 if alone else number]

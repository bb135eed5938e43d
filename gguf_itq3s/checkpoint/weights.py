"""The weights of a checkpoint by the names that a model of Transformers has for them.

They come from where the tensors of a file do: what upstream's ``conversion`` package has indexed and dequantized,
before it maps names and permutes rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..base.errors import UserError
from ..codec.blocks import TOO_LARGE, WEIGHT_LIMIT
from . import experts, lazy, patches

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Weights:
    """Weights by name, read one at a time; experts are stacked as Transformers 5 wants them.

    Attributes:
        folder: of the checkpoint.
        tensors: name in the checkpoint, without what encloses a text model -> a function that gives the tensor: lazy,
            or as it is.
    """

    folder: Path
    tensors: Mapping[str, Callable[[], Any]] = field(default_factory=dict, repr=False)

    def has(self, name: str) -> bool:
        """Whether the checkpoint holds a tensor of the model."""
        return self._find(name) is not None

    def get(self, name: str, shape: torch.Size, number: int | None = None) -> torch.Tensor:
        """A tensor of the model, in any floating type, or one matrix of a parameter that stacks those of the experts.

        Args:
            name: of the parameter.
            shape: of the tensor, or of the matrix, (rows, columns).
            number: of the expert.

        Raises:
            UserError: it is not in the checkpoint, is of another shape, or has weights that cannot be.
        """
        import torch

        if found := self._find(name):
            return self._checked(name, self._read(found, number), shape)
        if stack := experts.stack(name):
            numbers = range(shape[0]) if number is None else (number,)
            singles = [self._find(single) for expert in numbers for single in stack.singles(expert)]
            if None not in singles:
                parts = torch.cat([self._read(single) for single in singles if single])
                return self._checked(name, parts.unflatten(0, (shape[0], -1)) if number is None else parts, shape)
        what = "transformers wants this tensor, and the checkpoint has none of it, or in a type that is kept (NVFP4)"
        remedy = "update it, or use an importance matrix of llama-imatrix (--imatrix)"
        raise UserError(self.folder, what, remedy, name)

    def _find(self, name: str) -> str | None:
        """The checkpoint's name for a tensor: the same, without the model's prefix, or Mixtral's."""
        here = (name, name.removeprefix("model."), experts.in_mixtral(name))
        return next((candidate for candidate in here if candidate in self.tensors), None)

    def _read(self, name: str, number: int | None = None) -> torch.Tensor:
        """A tensor of the checkpoint, or one matrix of a stack."""
        tensor = self.tensors[name]()
        with patches.patched(None, reads=True):
            found: torch.Tensor | None = None if number is None else lazy.part(tensor, number)
            if found is None:
                found = lazy.value(tensor)
                found = found if number is None else found[number]
        return found

    def _checked(self, name: str, tensor: torch.Tensor, shape: torch.Size) -> torch.Tensor:
        if tensor.shape != shape:
            what = f"is {tuple(tensor.shape)}, and {tuple(shape)} in the model that its config.json describes"
            raise UserError(self.folder, what, "take the config.json that belongs to the weights", name)
        tensor = tensor.float() if tensor.dtype.itemsize == 1 else tensor  # FP8 has no arithmetic
        if not float(tensor.abs().amax()) < WEIGHT_LIMIT:  # true for NaN
            raise UserError(self.folder, TOO_LARGE, "repair the checkpoint or download it again", name)
        return tensor

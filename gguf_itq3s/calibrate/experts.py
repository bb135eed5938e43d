"""The experts of a layer, which run outside it in groups that fit into memory together; a small layer is one group.

A layer of a mixture of hundreds of billions of weights takes tens of GB in float32, and its sums more. Its experts are
left out of the layer: what comes into them is kept in files, groups of them run over all windows, and what they put out
is given to the layer. How many are in a group follows from their sizes alone, the same on every machine.
"""

from __future__ import annotations

import copy
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch

from ..torch import stacked
from .activations import Activations, activations
from .inputs import LayerMatrix
from .layers import LayeredModel, Stop
from .shares import Batch

#: Bytes of the weights and sums of experts that are in memory together.
BOUND: Final = 4 << 30


class Outside(torch.nn.Module):
    """Stands in a layer for its experts: ``answer`` of (hidden, chosen experts, weights of their outputs), or zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.answer: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor] | None = None

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """As the experts: (..., hidden), (tokens, k), (tokens, k) -> the shape of the first."""
        if self.answer is None:
            return torch.zeros_like(hidden_states)
        return self.answer(hidden_states, top_k_index, top_k_weights)


@dataclass(frozen=True)
class LayerExperts:
    """The experts of a layer.

    Attributes:
        module: of Transformers, its parameters on the meta device.
        known: its two parameters, and what lies between them.
    """

    model: LayeredModel
    number: int
    path: str
    module: Any
    known: stacked.Experts

    @property
    def count(self) -> int:
        """How many experts."""
        return self.known.count

    @property
    def names(self) -> tuple[str, str]:
        """The parameters: of the first matrices, and of the second."""
        first, second = self.known.stacks
        return first, second

    @property
    def weights(self) -> int:
        """Weights of one of them."""
        return sum(rows * columns for rows, columns in self.shapes)

    @property
    def shapes(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """Rows and columns of an expert's first matrix, and of its second."""
        first, second = self.known.stacks.values()
        return (first.rows, first.columns), (second.rows, second.columns)

    @property
    def columns(self) -> tuple[int, int]:
        """Of the input of an expert's first matrices, and of its second."""
        (_, first), (_, second) = self.shapes
        return first, second

    def groups(self, each: int) -> list[range]:
        """The experts in groups, each of whom takes so many bytes for weights and sums."""
        size = max(1, BOUND // each)
        return [range(start, min(start + size, self.count)) for start in range(0, self.count, size)]

    def load(self, numbers: range) -> Loaded:
        """Some of the experts on the device: in float32, all of them together as the layer is.

        Raises:
            UserError: the checkpoint lacks a matrix.
        """
        stacks = {}
        for name, _ in self.module.named_parameters():
            whole, parameter = f"{self.model.prefix}.{self.number}.{self.path}.{name}", getattr(self.module, name)
            together = len(numbers) == self.count
            dtype = parameter.dtype if together else torch.float32
            stack = torch.empty((len(numbers), *parameter.shape[1:]), dtype=dtype, device=self.model.device)
            if together:
                stack.copy_(self.model.weights.get(whole, parameter.shape))
            for place, number in enumerate(() if together else numbers):
                stack[place].copy_(self.model.weights.get(whole, parameter.shape[1:], number))
            stacks[name] = stack
        return Loaded(self, numbers, stacks)

    @contextmanager
    def left_out(self) -> Iterator[torch.nn.Module]:
        """The layer with its weights; in place of the experts stands an :class:`Outside`."""
        layer = self.model.blocks[self.number]
        layer.set_submodule(self.path, Outside())
        try:
            self.model.load(self.number)
            yield layer
        finally:
            self.model.unload(self.number)
            layer.set_submodule(self.path, self.module)


def find(model: LayeredModel, number: int) -> LayerExperts | None:
    """The experts of a layer that is not loaded; None where it has none, or of a class that is not known."""
    for path, module in model.blocks[number].named_modules():
        if stacked.is_stacked(module) and not isinstance(known := stacked.find(module), str):
            return LayerExperts(model, number, path, module, known)
    return None


@dataclass
class Loaded:
    """Experts that are in memory, by parameter, as the module has them."""

    of: LayerExperts
    numbers: range
    stacks: dict[str, torch.Tensor]

    def copy(self) -> Loaded:
        """The same with weights of their own."""
        return Loaded(self.of, self.numbers, {name: stack.clone() for name, stack in self.stacks.items()})

    def matrices(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Of an expert, views: (rows, hidden), gate and up where there is a gate, and (hidden, inner)."""
        first, second = (self._matrix(name, number) for name in self.of.names)
        return first, second

    def _matrix(self, name: str, number: int) -> torch.Tensor:
        found = self.stacks[name][number - self.numbers.start]
        return found.mT if self.of.known.stacks[name].transposed else found

    def biases(self, number: int) -> tuple[torch.Tensor | float, torch.Tensor | float]:
        """Of the same, (rows,) and (hidden,), or zeros."""
        if not self.of.known.bias:
            return 0.0, 0.0
        first, second = (self.stacks[f"{name}_bias"][number - self.numbers.start] for name in self.of.names)
        return first, second

    def matrix(self, reader: LayerMatrix) -> torch.Tensor:
        """The parameter's matrix that has those of a reader, a view."""
        assert reader.expert is not None
        return self._matrix(reader.parameter, reader.expert)

    def inner(self, number: int, x: torch.Tensor) -> torch.Tensor:
        """(tokens, hidden) -> (tokens, inner), the input of an expert's second matrix."""
        first, _ = self.matrices(number)
        return self.of.known.gate(x.to(first.dtype) @ first.T + self.biases(number)[0])

    def add_outputs(
        self, total: torch.Tensor, hidden: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        """What they put out, added to what those before them have: (tokens, hidden)."""
        if len(self.numbers) == self.of.count:
            module = copy.copy(self.of.module)
            module._parameters = {name: torch.nn.Parameter(s, requires_grad=False) for name, s in self.stacks.items()}
            with self.of.model.products():
                return module(hidden, chosen, weights)
        for number in self.numbers:
            tokens, places = torch.where(chosen == number)
            if len(tokens):
                out = self.inner(number, hidden[tokens]) @ self.matrices(number)[1].T + self.biases(number)[1]
                total.index_add_(0, tokens, out * weights[tokens, places, None])
        return total


class Routed:
    """What comes into the experts of a layer and what they put out, for all windows, in files."""

    def __init__(self, layer: torch.nn.Module, found: LayerExperts, folder: Path, windows: int, context: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder, self._shape, self._device = folder, (windows, context), found.model.device
        outside = layer.get_submodule(found.path)
        assert isinstance(outside, Outside)
        self._outside = outside
        self._arrays: dict[str, Activations] = {}

    def keep(self, batch: Batch, run: Callable[[], object]) -> None:
        """Run the layer up to the experts, and keep what they are called with."""

        def answer(hidden: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
            # Numbers of experts are exact in float32.
            for name, values in (("hidden", hidden), ("chosen", chosen), ("weights", weights)):
                self.put(name, batch, values)
            raise Stop

        self._outside.answer = answer
        with suppress(Stop):
            run()

    def give(self, batch: Batch) -> None:
        """Let the layer have what the experts have put out."""
        self.answer(lambda hidden, *_: self.get("output", batch).reshape(hidden.shape))

    def answer(self, answer: Callable[..., torch.Tensor] | None) -> None:
        """Let the layer have something else in place of that; None for zeros."""
        self._outside.answer = answer

    def run(self, batches: Sequence[Batch], loaded: Loaded) -> None:
        """Add the outputs of some experts."""
        for batch in batches:
            hidden, weights = self.get("hidden", batch), self.get("weights", batch)
            with torch.inference_mode():
                total = self.get("output", batch) if "output" in self._arrays else torch.zeros_like(hidden)
                self.put("output", batch, loaded.add_outputs(total, hidden, self.chosen(batch), weights))

    def has(self, name: str) -> bool:
        """Whether something was put under a name."""
        return name in self._arrays

    def get(self, name: str, batch: Batch) -> torch.Tensor:
        """float32 (tokens, columns), what :meth:`put` has kept."""
        values = torch.from_numpy(self._arrays[name][batch]).to(self._device)
        return values.reshape(-1, values.shape[-1])

    def chosen(self, batch: Batch) -> torch.Tensor:
        """int64 (tokens, k)."""
        return self.get("chosen", batch).long()

    def put(self, name: str, batch: Batch, values: torch.Tensor) -> None:
        """Keep something of the tokens, (..., columns)."""
        if name not in self._arrays:
            folder = self._folder / name
            folder.mkdir(exist_ok=True)
            self._arrays[name] = activations(folder, 0, (*self._shape, values.shape[-1]), "w+")
        self._arrays[name][batch] = values.detach().float().cpu().numpy().reshape(len(batch), self._shape[1], -1)

    def close(self) -> None:
        """Take the files away."""
        self._arrays.clear()
        shutil.rmtree(self._folder, ignore_errors=True)

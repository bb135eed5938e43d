"""The experts of a layer that are too large to be in memory together.

A layer of a mixture of hundreds of billions of weights takes tens of GB in float32, and its sums more. Its experts are
left out of the layer then: what comes into them is kept in files (:class:`Routed`), the experts run outside the layer,
a group at a time, over all windows, and what they put out is given to the layer. Which layers are so large is decided
by their sizes alone, so that the same model takes the same way on every machine.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

from ..checkpoint import experts
from .activations import Activations, activations
from .groups import Reader
from .inputs import known_experts
from .layers import LayeredModel, Stop

if TYPE_CHECKING:
    import torch

    from ..torch.outside import Outside

#: Bytes of the weights and sums of experts that are in memory together; a layer whose experts take more is large.
BOUND: Final = 4 << 30

#: Windows by number, int64.
Batch = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Mixture:
    """Experts that are outside their layer.

    Attributes:
        model: the model.
        number: of the layer.
        path: of their module in it.
        module: of Transformers, its parameters on the meta device.
        gate: what lies between both matrices of an expert.
    """

    model: LayeredModel
    number: int
    path: str
    module: Any
    gate: Callable[[torch.Tensor], torch.Tensor]

    @property
    def count(self) -> int:
        """How many experts."""
        return len(self.module.down_proj)

    @property
    def weights(self) -> int:
        """Weights of one of them."""
        return sum(getattr(self.module, name)[0].numel() for name in (experts.GATE_UP, experts.DOWN))

    @property
    def columns(self) -> tuple[int, int]:
        """Of the input of an expert's first matrices, and of its second."""
        return self.module.gate_up_proj.shape[2], self.module.down_proj.shape[2]

    def groups(self, each: int) -> list[range]:
        """The experts in groups.

        Args:
            each: bytes of one expert's weights and sums.
        """
        size = max(1, BOUND // each)
        return [range(start, min(start + size, self.count)) for start in range(0, self.count, size)]

    def load(self, numbers: range) -> dict[int, Expert]:
        """Some of the experts, float32 on the device.

        Raises:
            UserError: the checkpoint lacks a matrix.
        """
        return {
            number: Expert(self._matrix(experts.GATE_UP, number), self._matrix(experts.DOWN, number), self.gate)
            for number in numbers
        }

    def _matrix(self, name: str, number: int) -> torch.Tensor:
        import torch

        whole = f"{self.model.prefix}.{self.number}.{self.path}.{name}"
        found = self.model.weights.expert(whole, number, getattr(self.module, name).shape[1:])
        # A copy: what is read may be pages of the file.
        return found.to(self.model.device, torch.float32, copy=True)

    def rows(self, reader: Reader) -> torch.Tensor:
        """The weights of a matrix of one of them, (rows, columns), as :meth:`Reader.rows` of a layer that has it."""
        assert reader.expert is not None
        weights = self._matrix(reader.parameter, reader.expert)
        return weights if reader.half is None else weights.chunk(2, dim=0)[reader.half]

    @contextmanager
    def loaded(self) -> Iterator[torch.nn.Module]:
        """The layer with its weights; in place of these stands a :class:`gguf_itq3s.torch.outside.Outside`."""
        from ..torch.outside import Outside

        layer = self.model.base.layers[self.number]
        layer.set_submodule(self.path, Outside())
        try:
            self.model.load(self.number)
            yield layer
        finally:
            self.model.unload(self.number)
            layer.set_submodule(self.path, self.module)

    def outside(self, layer: torch.nn.Module) -> Outside:
        """What stands in their place in a layer that :meth:`loaded` gave, or in a copy of it."""
        from ..torch.outside import Outside

        found = layer.get_submodule(self.path)
        assert isinstance(found, Outside)
        return found


@dataclass
class Expert:
    """The matrices of one expert.

    Attributes:
        gate_up: (2 inner, hidden), gate above up.
        down: (hidden, inner).
        gate: (tokens, 2 inner), what the first matrix gives -> (tokens, inner), the input of the second.
    """

    gate_up: torch.Tensor
    down: torch.Tensor
    gate: Callable[[torch.Tensor], torch.Tensor]

    def inner(self, x: torch.Tensor) -> torch.Tensor:
        """(tokens, hidden) -> (tokens, inner), the input of the second matrix."""
        return self.gate(x @ self.gate_up.T)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """(tokens, hidden) -> the same."""
        return self.inner(x) @ self.down.T


def inner_of(loaded: Mapping[int, Expert]) -> Callable[[int, torch.Tensor], torch.Tensor]:
    """As :attr:`gguf_itq3s.calibrate.inputs.Seen.inner`, of experts that are in memory."""
    return lambda number, x: loaded[number].inner(x)


def find(model: LayeredModel, number: int, each: Callable[[Mixture], int]) -> Mixture | None:
    """The experts of a layer, if they are to be outside it.

    Args:
        model: the model; the layer is not loaded.
        number: of the layer.
        each: bytes of one expert's weights and sums.

    Returns:
        None where they fit into memory together (:data:`BOUND`), or their class computes in another way than is known.
    """
    import torch

    for path, module in model.base.layers[number].named_modules():
        if not isinstance(getattr(module, experts.GATE_UP, None), torch.nn.Parameter):
            continue
        known = known_experts(module)
        if isinstance(known, str):
            return None
        found = Mixture(model, number, path, module, known.gate)
        return found if found.count * each(found) > BOUND else None
    return None


class Routed:
    """What comes into the experts of a layer and what they put out, for all windows, in files.

    Args:
        folder: of the files, made.
        windows: how many.
        context: length of a window.
    """

    def __init__(self, folder: Path, windows: int, context: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder, self._shape = folder, (windows, context)
        self._arrays: dict[str, Activations] = {}

    def keep(self, batch: Batch, hidden: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> None:
        """Keep what the module of the experts was called with."""
        # Numbers of experts are exact in float32.
        self.put("hidden", batch, hidden)
        self.put("chosen", batch, chosen)
        self.put("weights", batch, weights)

    def plain(self, batch: Batch, device: torch.device) -> torch.Tensor:
        """float32 (tokens, hidden), the inputs without the gain of their norm where these are kept; else those."""
        return self.values("plain" if "plain" in self._arrays else "hidden", batch, device)

    def hidden(self, batch: Batch, device: torch.device) -> torch.Tensor:
        """float32 (tokens, hidden)."""
        return self.values("hidden", batch, device)

    def chosen(self, batch: Batch, device: torch.device) -> torch.Tensor:
        """int64 (tokens, k)."""
        return self.values("chosen", batch, device).long()

    def weights(self, batch: Batch, device: torch.device) -> torch.Tensor:
        """float32 (tokens, k)."""
        return self.values("weights", batch, device)

    def output(self, batch: Batch, device: torch.device) -> torch.Tensor:
        """float32 (tokens, hidden), the sum over the experts that have run."""
        self._array("output", self._arrays["hidden"].shape[-1])
        return self.values("output", batch, device)

    def values(self, name: str, batch: Batch, device: torch.device) -> torch.Tensor:
        """float32 (tokens, columns), what :meth:`put` has kept."""
        import torch

        values = torch.from_numpy(self._arrays[name][batch]).to(device)
        return values.reshape(-1, values.shape[-1])

    def put(self, name: str, batch: Batch, values: torch.Tensor) -> None:
        """Keep something of the tokens, (tokens, columns)."""
        array = self._array(name, values.shape[-1])
        array[batch] = values.detach().float().cpu().numpy().reshape(len(batch), self._shape[1], -1)

    def run(self, batch: Batch, loaded: dict[int, Expert], device: torch.device) -> None:
        """Add the outputs of some experts."""
        import torch

        hidden, chosen = self.hidden(batch, device), self.chosen(batch, device)
        weights, total = self.weights(batch, device), self.output(batch, device)
        for number, expert in loaded.items():
            tokens, places = torch.where(chosen == number)
            if len(tokens):
                total.index_add_(0, tokens, expert(hidden[tokens]) * weights[tokens, places, None])
        self.put("output", batch, total)

    def close(self) -> None:
        """Take the files away."""
        self._arrays.clear()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _array(self, name: str, columns: int) -> Activations:
        if name not in self._arrays:
            folder = self._folder / name
            folder.mkdir(exist_ok=True)
            self._arrays[name] = activations(folder, 0, (*self._shape, columns), "w+")
        return self._arrays[name]


def run(
    found: Mixture,
    layer: torch.nn.Module,
    routed: Routed,
    source: Activations,
    batches: Sequence[Batch],
    keywords: Mapping[int, dict[str, Any]],
    size: int,
) -> None:
    """Run a layer up to its experts and these outside it: what comes into them and what they put out is kept then.

    Args:
        found: the experts.
        layer: without them, loaded.
        routed: where it is kept.
        source: inputs of the layer, float32 (windows, context, hidden).
        batches: windows that run together.
        keywords: batch size -> arguments of the layer.
        size: bytes of one expert that is at work.
    """
    import torch

    outside = found.outside(layer)
    for batch in batches:
        outside.answer = kept(routed, batch)
        with suppress(Stop):
            found.model.step(layer, source[batch], keywords[len(batch)])
    for numbers in found.groups(size):
        loaded = found.load(numbers)
        with torch.no_grad():
            for batch in batches:
                routed.run(batch, loaded, found.model.device)
        del loaded


def given(routed: Routed, batch: Batch) -> Callable[..., torch.Tensor]:
    """What :class:`gguf_itq3s.torch.outside.Outside` answers where the outputs of the experts are known."""
    return lambda hidden, *_: routed.output(batch, hidden.device).reshape(hidden.shape)


def kept(routed: Routed, batch: Batch) -> Callable[..., torch.Tensor]:
    """What it answers where what comes into the experts is kept, and the layer is run no further."""

    def keep(hidden: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        tokens = hidden.reshape(-1, hidden.shape[-1])
        routed.keep(batch, tokens, chosen.reshape(len(tokens), -1), weights.reshape(len(tokens), -1))
        raise Stop

    return keep

"""Layers left out of a model: ``--prune-layers`` of ``llama-quantize``."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from ..base.errors import UserError
from ..checkpoint.policy import first_downs
from ..checkpoint.source import Checkpoint
from ..rounding.factors import Statistics

_LAYER: Final = re.compile(r"(?<=blk\.)\d+(?=\.)")
#: A list that has nothing to do with layers, however many it has.
_NOT_EACH: Final = "rope.dimension_sections"


@dataclass(frozen=True)
class RenamedStatistics:
    """Statistics of a model whose tensors had other names when they were taken.

    Attributes:
        source: the statistics.
        names: name -> the name then; the same for what is not in it.
    """

    source: Statistics
    names: Mapping[str, str]

    def _then(self, name: str) -> str:
        return self.names.get(name, name)

    @property
    def path(self) -> Path:
        """As :attr:`gguf_itq3s.rounding.factors.Statistics.path`."""
        return self.source.path

    def known(self, name: str) -> bool:
        """As :meth:`gguf_itq3s.rounding.factors.Statistics.known`."""
        return self.source.known(self._then(name))

    def share(self, name: str) -> float:
        """As :meth:`gguf_itq3s.rounding.factors.Statistics.share`."""
        return self.source.share(self._then(name))

    def key(self, name: str, expert: int | None) -> str:
        """As :meth:`gguf_itq3s.rounding.factors.Statistics.key`."""
        return self.source.key(self._then(name), expert)

    def tokens(self, name: str, expert: int | None) -> int | None:
        """As :meth:`gguf_itq3s.rounding.factors.Statistics.tokens`."""
        return self.source.tokens(self._then(name), expert)

    def left_out(self, name: str, expert: int | None) -> str | None:
        """As :meth:`gguf_itq3s.rounding.factors.Energies.left_out`; the norm has the name that it had then."""
        return self.source.left_out(self._then(name), expert)

    def diagonal(self, name: str, columns: int, expert: int | None) -> npt.NDArray[np.floating] | None:
        """As :meth:`gguf_itq3s.rounding.factors.Energies.diagonal`."""
        return self.source.diagonal(self._then(name), columns, expert)

    def rotated(
        self, name: str, columns: int, expert: int | None, factor: npt.NDArray[np.floating] | None
    ) -> npt.NDArray[np.floating] | None:
        """As :meth:`gguf_itq3s.rounding.factors.Statistics.rotated`."""
        return self.source.rotated(self._then(name), columns, expert, factor)


def prune(checkpoint: Checkpoint, layers: Sequence[int]) -> tuple[Checkpoint, dict[str, str]]:
    """Leave layers out and number the others anew.

    Metadata that have a value for each layer lose those of the layers, too, unlike llama-quantize's.

    Args:
        checkpoint: its writer gets the number of layers that are left.
        layers: their numbers.

    Returns:
        The checkpoint, and the name of every tensor that is left -> its name before.

    Raises:
        UserError: there is no such layer, or none would be left.
    """
    if not layers:
        return checkpoint, {}
    writer = checkpoint.writer
    found = {tensor.name: _LAYER.search(tensor.name) for tensor in checkpoint.tensors}
    there = sorted({int(match[0]) for match in found.values() if match})
    if missing := sorted(set(layers) - set(there)):
        raise UserError(checkpoint.folder, f"has no layer {missing[0]} to prune", f"give layers of 0 to {there[-1]}")
    kept = [layer for layer in there if layer not in layers]
    if not kept:
        raise UserError(checkpoint.folder, "would have no layer left", "prune fewer of them")
    number = {layer: place for place, layer in enumerate(kept)}
    names, tensors = {}, []
    for tensor in checkpoint.tensors:
        if not (match := found[tensor.name]):
            tensors.append(tensor)
        elif int(match[0]) in number:
            name = _LAYER.sub(str(number[int(match[0])]), tensor.name, count=1)
            names[name] = tensor.name
            tensors.append(replace(tensor, name=name))
    for key, entry in writer.kv_data[0].items():
        each = isinstance(entry.value, (list, tuple)) and len(entry.value) == there[-1] + 1
        if each and key.startswith(f"{writer.arch}.") and not key.endswith(_NOT_EACH):
            entry.value = [entry.value[layer] for layer in kept]
    extra = f"{writer.arch}.nextn_predict_layers"
    if (entry := writer.kv_data[0].get(extra)) is not None:
        first = there[-1] + 1 - int(entry.value)
        writer.add_uint32(extra, sum(layer >= first for layer in kept))
    writer.add_block_count(len(kept))
    shapes = {tensor.name: tensor.shape for tensor in tensors}
    downs = first_downs(shapes, checkpoint.model.arch, checkpoint.model.layers)
    return replace(checkpoint, tensors=tensors, model=replace(checkpoint.model, first_downs=downs)), names

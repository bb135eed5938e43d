"""How much memory a computation in PyTorch takes, counted storage by storage."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from gguf_itq3s.torch import PackedLinear
from gguf_itq3s.torch.products import IMPLEMENTATIONS


class StorageTracker(TorchDispatchMode):
    """Counts the bytes of storages that are made within it and still alive, at every operator.

    Attributes:
        live: bytes alive now.
        peak: the most there were.
        largest: the largest single storage.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = self.largest = 0
        self._known: set[int] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = {
            leaf.untyped_storage()._cdata for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)
        }
        if (ours := IMPLEMENTATIONS.get(func.name())) is None:
            result = func(*args, **(kwargs or {}))
        else:
            with self:  # PyTorch does not look into an operator of ours
                result = ours(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self._add(leaf.untyped_storage(), given)
        return result

    def _add(self, storage: Any, given: set[int]) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self._known or key in given:
            return
        self._known.add(key)
        self.live += size
        self.peak, self.largest = max(self.peak, self.live), max(self.largest, size)
        weakref.finalize(storage, self._remove, key, size)

    def _remove(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.live -= size


def measure(layer: PackedLinear, x: torch.Tensor, path: str) -> StorageTracker:
    """What a forward pass makes, tables and the dense matrix made before."""
    with torch.no_grad():
        layer(x[:1], path=path)
        with StorageTracker() as tracker:
            layer(x, path=path)
    return tracker

"""Evaluation of gguf-py's lazy tensors without keeping intermediate results.

``LazyBase.to_eager`` stores the value of every node it passes, so the converted, permuted and stacked copies of a
tensor stay in memory together. Here a value lives only until its last use.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
from gguf.lazy import LazyBase


def evaluate(tensor: Any) -> np.ndarray:
    """The value of a lazy tensor; anything else is returned as it is.

    Args:
        tensor: a ``gguf.LazyNumpyTensor`` or an array.

    Returns:
        The array; nothing is cached in the graph, so the memory is the caller's to free.

    Raises:
        RuntimeError: an operation gave another shape or type than it gave on the meta tensors.
    """
    if not isinstance(tensor, LazyBase):
        return np.asarray(tensor)
    uses: Counter[int] = Counter()
    _count_uses(tensor, uses)
    return _Evaluation(uses).value(tensor)


def _count_uses(node: LazyBase, uses: Counter[int]) -> None:
    uses[id(node)] += 1
    if uses[id(node)] == 1 and node._data is None:
        LazyBase._recurse_apply(node._args, lambda arg: _count_uses(arg, uses))


class _Evaluation:
    """One walk over the graph; ``kept`` holds values that are still to be used."""

    def __init__(self, uses: Counter[int]) -> None:
        self.uses = uses
        self.kept: dict[int, Any] = {}

    def value(self, node: LazyBase) -> Any:
        if node._data is not None:
            return node._data
        key = id(node)
        self.uses[key] -= 1
        if key in self.kept:
            return self.kept[key] if self.uses[key] else self.kept.pop(key)
        assert node._func is not None
        result = node._func(*LazyBase._recurse_apply(node._args, self.value), **node._kwargs)
        if result.dtype != node._meta.dtype or result.shape != node._meta.shape:
            raise RuntimeError(
                f"expected {node._meta.dtype} {tuple(node._meta.shape)}, got {result.dtype} {tuple(result.shape)}"
            )
        if self.uses[key]:
            self.kept[key] = result
        return result

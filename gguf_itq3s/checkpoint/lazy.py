"""Evaluation of gguf-py's lazy tensors without keeping intermediate results.

``LazyBase.to_eager`` stores the value of every node it passes, so the converted, permuted and stacked copies of a
tensor stay in memory together. Here a value lives only until its last reader has used it.
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
    readers: Counter[int] = Counter()
    _count_readers(tensor, readers)
    return _Evaluation(readers).value(tensor)


def _count_readers(node: LazyBase, readers: Counter[int]) -> None:
    readers[id(node)] += 1
    if readers[id(node)] == 1 and node._data is None:
        LazyBase._recurse_apply(node._args, lambda arg: _count_readers(arg, readers))


class _Evaluation:
    """One walk over the graph; ``kept`` holds values that more readers are still to come for."""

    def __init__(self, readers: Counter[int]) -> None:
        self.readers = readers
        self.kept: dict[int, Any] = {}

    def value(self, node: LazyBase) -> Any:
        if node._data is not None:
            return node._data
        key = id(node)
        self.readers[key] -= 1
        if key in self.kept:
            return self.kept[key] if self.readers[key] else self.kept.pop(key)
        assert node._func is not None
        result = node._func(*LazyBase._recurse_apply(node._args, self.value), **node._kwargs)
        if result.dtype != node._meta.dtype or result.shape != node._meta.shape:
            raise RuntimeError(
                f"expected {node._meta.dtype} {tuple(node._meta.shape)}, got {result.dtype} {tuple(result.shape)}"
            )
        if self.readers[key]:
            self.kept[key] = result
        return result

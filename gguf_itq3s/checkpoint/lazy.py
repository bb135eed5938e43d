"""Evaluation of gguf-py's lazy tensors without keeping intermediate results.

``LazyBase.to_eager`` stores the value of every node it passes, so the converted, permuted and stacked copies of a
tensor stay in memory together. Here a value lives only until its last use.
"""

from __future__ import annotations

import inspect
from collections import Counter
from typing import Any, Final

from gguf.lazy import LazyBase
from gguf.utility import LocalTensor, LocalTensorRange

#: Operations that do the same to each number of a stack, which is their first argument, by the ends of their names.
_OF_EACH: Final = (
    "numpy.<locals>.<lambda>", "astype.<locals>.<lambda>", "to", "float", "contiguous", "TensorBase.__mul__",
)  # fmt: skip


def value(tensor: Any) -> Any:
    """The value of a lazy tensor of numpy or torch, as that library has it; anything else is returned as it is.

    Nothing is cached in the graph, so the memory is the caller's to free.

    Raises:
        RuntimeError: an operation gave another shape or type than it gave on the meta tensors.
    """
    if not isinstance(tensor, LazyBase):
        return tensor
    uses: Counter[int] = Counter()
    kept: dict[int, Any] = {}  # values that are still to be used

    def count(node: LazyBase) -> None:
        uses[id(node)] += 1
        if uses[id(node)] == 1 and node._data is None:
            LazyBase._recurse_apply(node._args, count)

    def walk(node: LazyBase) -> Any:
        if node._data is not None:
            return node._data
        key = id(node)
        uses[key] -= 1
        if key in kept:
            return kept[key] if uses[key] else kept.pop(key)
        assert node._func is not None
        result = node._func(*LazyBase._recurse_apply(node._args, walk), **node._kwargs)
        if result.dtype != node._meta.dtype or result.shape != node._meta.shape:
            raise RuntimeError(
                f"expected {node._meta.dtype} {tuple(node._meta.shape)}, got {result.dtype} {tuple(result.shape)}"
            )
        if uses[key]:
            kept[key] = result
        return result

    count(tensor)
    return walk(tensor)


def part(tensor: Any, number: int) -> Any:
    """One matrix of a lazy stack of matrices, of either library, without the others.

    Args:
        tensor: lazy, with three axes.
        number: of the matrix.

    Returns:
        None where an operation is met of which it is not known that it leaves the matrices apart.
    """
    if not isinstance(tensor, LazyBase) or len(tensor._meta.shape) != 3:
        return None
    found = _part(tensor, number)
    return None if found is None else found[0]


def _part(node: LazyBase, number: int) -> Any:
    """``value(node)[number : number + 1]``, or None."""
    if node._data is not None:
        return node._data[number : number + 1]
    name, arguments = _name(node._func), node._args
    assert node._func is not None
    if name.endswith("stack") and node._kwargs == {"dim": 0} and isinstance(arguments[0], (list, tuple)):
        return value(arguments[0][number])[None]
    if name.endswith("from_local_tensor.<locals>.<lambda>"):
        whole: LocalTensor = arguments[0]
        size = whole.data_range.size // whole.shape[0]
        here = LocalTensorRange(whole.data_range.filename, whole.data_range.offset + number * size, size)
        return node._func(LocalTensor(whole.dtype, (1, *whole.shape[1:]), here))
    if not _leaves_apart(name, node):
        return None
    parts = [_part(argument, number) if isinstance(argument, LazyBase) else argument for argument in arguments]
    if any(part is None for part, whole in zip(parts, arguments, strict=True) if isinstance(whole, LazyBase)):
        return None
    return node._func(*parts, **node._kwargs)


def _leaves_apart(name: str, node: LazyBase) -> bool:
    """Whether an operation, by its name, does to each matrix of stacks what it would do to that alone."""
    shape, arguments = node._meta.shape, node._args
    inputs = [argument._meta.shape for argument in arguments if isinstance(argument, LazyBase)]
    if not inputs or any(len(own) != len(shape) or own[0] != shape[0] for own in inputs):
        return False
    if name.endswith("__getitem__"):  # [..., rows, :], or slices of which the first is everything
        index = arguments[1]
        if not isinstance(index, tuple) or len(index) > len(shape):
            return False
        return index[0] is ... or (all(isinstance(axis, slice) for axis in index) and index[0] == slice(0, shape[0]))
    if name.endswith("repeat_interleave"):
        return len(arguments) == 3 and arguments[2] > 0
    return inputs[0] == shape and any(f".{name}".endswith(f".{end}") for end in _OF_EACH)


def _name(function: Any) -> str:
    """What a function of a lazy tensor is called; of a method that the library has wrapped, the method's name."""
    name = getattr(function, "__qualname__", "")
    if name.endswith("__getattr__.<locals>.<lambda>"):
        return str(inspect.getclosurevars(function).nonlocals.get("name", ""))
    return str(name)

"""What a product with packed weights takes besides its input and weights, as a formula and as measured.

The page of the pipeline (:mod:`.products`) names three: the rotated input, a slice of decoded weights, the output.
:func:`additional` is the peak of a path, to the byte; :class:`StorageTracker` measures it.
"""

from __future__ import annotations

import weakref
from typing import Any, Final

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ..codec.transform import BLOCK
from ..codec.types import ITQ3_S
from . import transform
from .decode import LAYOUTS, QType
from .products import IMPLEMENTATIONS, SLICE_ROWS

#: Bytes that a weight of a slice takes while it is decoded: its value in float32, and the index or digit of it.
DECODING: Final = {qtype: 8 if qtype == ITQ3_S else 5 for qtype in LAYOUTS}


def _sum(rows: int, columns: int, outputs: int, qtype: QType, half: bool) -> int:
    """Peak of one product of the reference: the sums, and a slice as it is decoded or as it is multiplied."""
    weights = min(outputs, SLICE_ROWS) * BLOCK
    converted = 4 * rows * BLOCK if half else 0
    return 4 * rows * outputs + max(DECODING[qtype] * weights, 4 * weights + converted)


def additional(
    rows: int, columns: int, outputs: int, *, path: str = "reference", qtype: QType = ITQ3_S,
    residual_type: QType | None = None, dtype: torch.dtype = torch.float32, split: int = 1,
) -> int:  # fmt: skip
    """The peak of a layer's forward pass without gradients, its output included, in bytes.

    The path ``dense`` is counted once its matrix is there; the matrix is ``outputs * columns`` numbers of ``dtype``.

    Args:
        rows: of the input.
        columns: of the matrix.
        outputs: its rows.
        path: ``reference``, ``triton`` or ``dense``.
        qtype: the type of the blocks.
        residual_type: that of the residual pass, or None.
        dtype: of the input and output; float32, float16 or bfloat16.
        split: among how many programs the path ``triton`` splits the columns.
    """
    size, output = dtype.itemsize, rows * outputs * dtype.itemsize
    if path == "dense":
        return output
    rotated = rows * columns if qtype == ITQ3_S else 0
    if path == "triton":
        shares = 4 * split * rows * outputs if split > 1 else 0
        if residual_type is None:
            return size * rotated + output + shares
        sums = 4 * rows * outputs
        return max(size * rotated + sums + shares, 2 * sums + shares, sums + output if size < 4 else 0)
    half = size < 4
    total, cast = 4 * rows * outputs, output if half else 0
    # Of several pieces, the result is there besides the two that a piece takes.
    pieces = rotated if rotated <= transform.PIECE else 0
    turning = 2 * 4 * min(rotated, transform.PIECE) + (4 * rotated if not pieces else 0)
    first = 4 * rotated + _sum(rows, columns, outputs, qtype, half and qtype != ITQ3_S)
    if residual_type is None:
        return max(turning, first, 4 * rotated + total + cast)
    second = total + _sum(rows, columns, outputs, residual_type, half)
    return max(turning, first, second, total + cast)


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

#!/usr/bin/env python3
"""What the PyTorch layers take besides input and weights, computed and measured, as a Markdown table.

    scripts/tables/torch_memory.py                          print it
    scripts/tables/torch_memory.py --update docs/torch.md   put it between the marks in the page

One matrix of 14336 x 4096, Llama 3 8B's gate. Measured is the peak of the storages that the operators of a forward
pass make, on the CPU; the path triton is computed for 1 share of the columns and, for few rows, for 4.
"""

from __future__ import annotations

import argparse
import weakref
from pathlib import Path
from typing import Any, Final

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from gguf_itq3s.base import report
from gguf_itq3s.base.errors import report_errors
from gguf_itq3s.codec.family import DEFAULT, is_rotated, is_trellis
from gguf_itq3s.codec.transform import BLOCK
from gguf_itq3s.torch import PackedLinear, transform
from gguf_itq3s.torch.decode import LAYOUTS, QType
from gguf_itq3s.torch.products import IMPLEMENTATIONS, SLICE_ROWS

OUTPUTS: Final = 14336
COLUMNS: Final = 4096


#: Bytes that a weight of a slice takes while it is decoded: its value in float32, and the index or digit of it.
DECODING: Final = {qtype: 8 if is_trellis(qtype) else 5 for qtype in LAYOUTS}


def _sum(rows: int, columns: int, outputs: int, qtype: QType, half: bool) -> int:
    """Peak of one product of the reference: the sums, and a slice as it is decoded or as it is multiplied."""
    weights = min(outputs, SLICE_ROWS) * BLOCK
    converted = 4 * rows * BLOCK if half else 0
    return 4 * rows * outputs + max(DECODING[qtype] * weights, 4 * weights + converted)


def additional(
    rows: int, columns: int, outputs: int, *, path: str = "reference", qtype: QType = DEFAULT.type,
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
    rotated = rows * columns if is_rotated(qtype) else 0
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
    first = 4 * rotated + _sum(rows, columns, outputs, qtype, half and not is_rotated(qtype))
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


def measure(layer: PackedLinear, x: torch.Tensor, path: str) -> StorageTracker:
    """What a forward pass makes, tables and the dense matrix made before."""
    with torch.no_grad():
        layer(x[:1], path=path)
        with StorageTracker() as tracker:
            layer(x, path=path)
    return tracker


def table() -> str:
    layer = PackedLinear(COLUMNS, OUTPUTS, bias=False)
    rows = []
    for path, dtype, count, split in (
        ("reference", torch.float32, 1, 1), ("reference", torch.float16, 1, 1), ("reference", torch.float16, 512, 1),
        ("triton", torch.float16, 1, 4), ("triton", torch.float16, 512, 1),
        ("dense", torch.float16, 1, 1), ("dense", torch.float16, 512, 1),
    ):  # fmt: skip
        computed = additional(count, COLUMNS, OUTPUTS, path=path, dtype=dtype, split=split)
        # float16 products on the dense path are PyTorch's own; on a CPU they convert the matrix.
        x = torch.ones(count, COLUMNS, dtype=dtype)
        measured = report.size(measure(layer, x, path).peak) if path == "reference" else "-"
        size = OUTPUTS * COLUMNS * dtype.itemsize if path == "dense" else layer.weight.nbytes
        name = str(dtype).removeprefix("torch.")
        rows.append([path, name, str(count), report.size(size), report.size(computed), measured])
    return report.markdown(["path", "dtype", "rows", "weights", "besides, computed", "measured"], rows, left=2)


@report_errors
def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--update", type=Path, metavar="FILE", help="put the table between the marks in the file")
    args = parser.parse_args()
    torch.set_num_threads(1)
    made = table()
    print(made)
    if args.update:
        report.replace_section(args.update, "torch memory", made)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

#!/usr/bin/env python3
"""What the PyTorch layers take besides input and weights, computed and measured, as a Markdown table.

    scripts/tables/torch_memory.py                          print it
    scripts/tables/torch_memory.py --update docs/torch.md   put it between the marks in the page

One matrix of 14336 x 4096, Llama 3 8B's gate. Measured is the peak of the storages that the operators of a forward
pass make (`gguf_itq3s.torch.memory`), on the CPU; the path triton is computed for 1 share of the columns and, for few
rows, for 4.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Final

import torch

from gguf_itq3s import report
from gguf_itq3s.errors import report_errors
from gguf_itq3s.torch import PackedLinear
from gguf_itq3s.torch.memory import StorageTracker, additional

OUTPUTS: Final = 14336
COLUMNS: Final = 4096


def measure(layer: PackedLinear, rows: int, path: str, dtype: torch.dtype) -> int:
    """Peak bytes of a forward pass, tables and the dense matrix made before."""
    x = torch.ones(rows, layer.in_features, dtype=dtype)
    with torch.no_grad():
        layer(x[:1], path=path)
        with StorageTracker() as tracker:
            layer(x, path=path)
    return tracker.peak


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
        measured = report.size(measure(layer, count, path, dtype)) if path == "reference" else "-"
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

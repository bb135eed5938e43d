#!/usr/bin/env python3
"""Times of matrix products on a device of ggml, one type beside another.

    products.py build/bin --device CUDA0 --types itq3_s q4_K f16

Every matrix is in the device's memory at once and larger than its caches; types run in turn, round after round, and the
median counts. A graph holds the same product several times over, so that starting it weighs little; for CUDA set
GGML_CUDA_ITQ3S_SHARE=0, or all of them use what the first made of the activations. Writes JSON. Only the standard
library is used: a machine with a GPU may have no more.
"""

from __future__ import annotations

import argparse
import array
import ctypes
import json
import random
import statistics
import sys
import time
from pathlib import Path
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from scripts.bench import random_model

#: Gate and up of a 70B Llama in one.
ROWS: Final = 57344
LENGTH: Final = 8192
COLUMNS: Final = (1, 2, 4, 8, 16, 32, 64, 128, 512)


class Parameters(ctypes.Structure):
    """ggml_init_params."""

    _fields_ = (("size", ctypes.c_size_t), ("buffer", ctypes.c_void_p), ("no_alloc", ctypes.c_bool))


class Device:
    """Graphs on a device; ``folder`` holds the shared libraries of a build. Raises OSError where one is missing."""

    def __init__(self, folder: Path, name: str) -> None:
        self.base = random_model.Ggml(folder / "libggml-base.so")
        self.lib, core = ctypes.CDLL(str(folder / "libggml.so")), self.base.lib
        pointer, number = ctypes.c_void_p, ctypes.c_int64
        takes: dict[str, tuple[type, ...]] = {
            "ggml_init": (Parameters,),
            "ggml_new_tensor_2d": (pointer, ctypes.c_int, number, number),
            "ggml_mul_mat": (pointer, pointer, pointer),
            "ggml_new_graph": (pointer,),
            "ggml_build_forward_expand": (pointer, pointer),
            "ggml_backend_alloc_ctx_tensors": (pointer, pointer),
            "ggml_backend_tensor_set": (pointer, pointer, ctypes.c_size_t, ctypes.c_size_t),
            "ggml_backend_graph_compute": (pointer, pointer),
            "ggml_backend_dev_init": (pointer, ctypes.c_char_p),
        }
        for function, types in takes.items():
            getattr(core, function).argtypes = types
            getattr(core, function).restype = pointer
        core.ggml_backend_graph_compute.restype = ctypes.c_int
        self.lib.ggml_backend_load_all()
        self.lib.ggml_backend_dev_by_name.restype = pointer
        device = self.lib.ggml_backend_dev_by_name(name.encode())
        if not device:
            raise OSError(f"{name}: ggml has no such device")
        self.core, self.backend = core, core.ggml_backend_dev_init(device, None)

    def products(self, kind: str, rows: int, length: int, columns: list[int], repeat: int) -> dict[int, Any]:
        """For every number of columns a graph of ``repeat`` products of one matrix of ``kind`` with random numbers."""
        core, number = self.core, self.base.type_number(kind)
        # ggml knows a tensor or the graphs by less than these many bytes
        context = core.ggml_init(Parameters(512 * len(columns) * (repeat + 4) + (len(columns) << 18), None, True))
        matrix = core.ggml_new_tensor_2d(context, number, length, rows)
        inputs, graphs = {}, {}
        for count in columns:
            inputs[count] = core.ggml_new_tensor_2d(context, 0, length, count)
            graphs[count] = core.ggml_new_graph(context)
            for _ in range(repeat):
                core.ggml_build_forward_expand(graphs[count], core.ggml_mul_mat(context, matrix, inputs[count]))
        if not core.ggml_backend_alloc_ctx_tensors(context, self.backend):
            raise MemoryError(f"{kind}: no room for the matrix and {repeat} products")
        size, sample = self.base.size(number, length) * rows, self.base.sample(number)
        self.fill(matrix, (sample * -(-size // len(sample)))[:size])
        rng = random.Random(1)
        column = array.array("f", (rng.gauss(0.0, 1.0) for _ in range(length))).tobytes()
        for count, tensor in inputs.items():
            self.fill(tensor, column * count)
        return graphs

    def fill(self, tensor: Any, data: bytes) -> None:
        self.core.ggml_backend_tensor_set(tensor, data, 0, len(data))

    def seconds(self, graph: Any) -> float:
        """Of one run of a graph; ggml waits for the device."""
        start = time.perf_counter()
        if self.core.ggml_backend_graph_compute(self.backend, graph):
            raise RuntimeError("the device did not compute the product")
        return time.perf_counter() - start


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="with the libraries of a build")
    parser.add_argument("--device", default="CUDA0", help="by ggml's name (default: %(default)s)")
    parser.add_argument("--types", nargs="+", default=["itq3_s", "q4_K", "f16"], help="default: %(default)s")
    parser.add_argument("--rows", type=int, default=ROWS, help="of the matrix (default: %(default)s)")
    parser.add_argument("--length", type=int, default=LENGTH, help="of its rows (default: %(default)s)")
    parser.add_argument("--columns", type=int, nargs="+", default=list(COLUMNS), help="default: %(default)s")
    parser.add_argument("--rounds", type=int, default=9, help="default: %(default)s")
    parser.add_argument("--repeat", type=int, default=10, help="products in a graph (default: %(default)s)")
    args = parser.parse_args()
    device = Device(args.folder, args.device)
    graphs = {kind: device.products(kind, args.rows, args.length, args.columns, args.repeat) for kind in args.types}
    found: dict[str, dict[int, list[float]]] = {kind: {count: [] for count in args.columns} for kind in args.types}
    for turn in range(args.rounds + 2):
        for count in args.columns:
            for kind in args.types:
                seconds = device.seconds(graphs[kind][count])
                if turn > 1:  # the first ones load code and record
                    found[kind][count].append(seconds / args.repeat)
    sizes = {kind: device.base.size(device.base.type_number(kind), args.length) * args.rows for kind in args.types}
    print(
        json.dumps(
            {
                kind: {"bytes": sizes[kind], "seconds": {n: statistics.median(all_) for n, all_ in times.items()}}
                for kind, times in found.items()
            }
        )
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

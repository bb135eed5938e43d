#!/usr/bin/env python3
"""Speed of the PyTorch layers with packed weights, beside float and 4-bit ones.

    scripts/bench/torch_layers.py --results docs/results     on a CUDA device: writes torch.json and torch.md there
    scripts/bench/torch_layers.py --device cpu               the paths that run on a CPU, printed

Shapes of Llama 3 8B, 1 to 512 rows; where columns are no multiple of 256, ITQ3_N in place of ITQ3_S and no TQ2_0.
Each contender has as many copies of its matrix as the second-level cache does not hold, taken in turn, so that weights
come from memory as they do in a model; medians over the rounds, contenders in turn. Before a time is taken, the output
is compared with the product of the decoded matrix. Named so and not `torch.py`, which the other scripts of this folder
would import in place of PyTorch.
"""

from __future__ import annotations

import argparse
import copy
import importlib.util
import itertools
import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import torch
from torch.utils.benchmark import Timer

ROOT: Final = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from gguf_itq3s.base import report  # noqa: E402
from gguf_itq3s.base.errors import UserError, positive, report_errors  # noqa: E402
from gguf_itq3s.codec.ternary import TQ2_0  # noqa: E402
from gguf_itq3s.codec.types import ITQ3_S  # noqa: E402
from gguf_itq3s.torch import PackedLinear, decode, paths  # noqa: E402

#: Outputs x columns: queries and outputs, keys and values, gate and up, down.
SHAPES: Final = ("4096x4096", "1024x4096", "14336x4096", "4096x14336")
ROWS: Final = (1, 4, 16, 64, 512)
FLOAT: Final = "nn.Linear"
#: Largest difference from the decoded matrix' product that passes, of the largest output.
TOLERANCE: Final = 0.02

Layer = Callable[[torch.Tensor], torch.Tensor]


def shape(text: str) -> tuple[int, int]:
    """OUTPUTSxCOLUMNS, for argparse."""
    outputs, _, columns = text.partition("x")
    try:
        found = int(outputs), int(columns)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not OUTPUTSxCOLUMNS") from None
    if found[0] <= 0 or not decode.layout_for(ITQ3_S, found[1]).fits(found[1]):
        least = decode.layout_for(ITQ3_S, 1).block
        raise argparse.ArgumentTypeError(f"{text!r}: columns are a multiple of {least}")
    return found


def contenders(weight: torch.Tensor, dtype: torch.dtype) -> dict[str, tuple[Layer, torch.Tensor, int]]:
    """Name -> layer, the matrix it stands for, bytes of its weights; all on the device of ``weight``."""
    outputs, columns = weight.shape
    device = weight.device
    plain = torch.nn.Linear(columns, outputs, bias=False, device=device, dtype=dtype)
    plain.weight.data.copy_(weight)
    found: dict[str, tuple[Layer, torch.Tensor, int]] = {FLOAT: (plain, plain.weight, plain.weight.nbytes)}
    default = paths.choose(device)
    for qtype, path in ((ITQ3_S, default), (ITQ3_S, "reference"), (TQ2_0, default)):
        if not decode.layout_for(qtype, columns).fits(columns):
            continue
        layer = PackedLinear.from_weight(weight, qtype=qtype, effort="fast").to(device)
        layer.path = path
        found[f"{layer.qtype.name}, {path}"] = (layer, layer.dequantize(dtype), layer.weight.nbytes)
    if device.type == "cuda" and importlib.util.find_spec("bitsandbytes"):
        import bitsandbytes  # type: ignore[import-not-found]

        layer = bitsandbytes.nn.Linear4bit(columns, outputs, bias=False, compute_dtype=dtype, quant_type="nf4")
        layer.weight.data.copy_(weight)
        layer = layer.to(device)
        decoded = bitsandbytes.functional.dequantize_4bit(layer.weight.data, layer.weight.quant_state).to(dtype)
        found["bitsandbytes nf4"] = (layer, decoded, layer.weight.nbytes)
    return found


def seconds(layers: list[Layer], x: torch.Tensor, count: int) -> float:
    """Time of one call, over ``count`` of them, the copies in turn; PyTorch's timer waits for the device."""
    with torch.no_grad():
        for layer in layers:  # tunes, makes tables
            layer(x)
        names = {"turn": itertools.cycle(layers), "x": x}
        return float(Timer("next(turn)(x)", globals=names, num_threads=torch.get_num_threads()).timeit(count).mean)


def check(name: str, layer: Layer, matrix: torch.Tensor, x: torch.Tensor) -> None:
    with torch.no_grad():
        expected = x.float() @ matrix.float().t()
        difference = float((layer(x).float() - expected).abs().max() / expected.abs().max())
    if not difference <= TOLERANCE:
        raise UserError(name, f"differs from its decoded matrix by {difference:.3g}", "its times mean nothing; mend it")


def measure(
    shapes: list[tuple[int, int]], rows: list[int], device: torch.device, rounds: int, count: int
) -> list[dict[str, Any]]:
    """Shape, rows, contender -> median seconds of a call."""
    dtype = torch.float16 if device.type == "cuda" else torch.float32
    cache = torch.cuda.get_device_properties(device).L2_cache_size if device.type == "cuda" else 1
    found = []
    for outputs, columns in shapes:
        weight = torch.randn(outputs, columns, generator=torch.Generator().manual_seed(0)).to(device) * 0.02
        made = {
            # With copies of it, together twice what the cache holds.
            name: (layer, matrix, size, [layer, *(copy.deepcopy(layer) for _ in range(2 * cache // size))])
            for name, (layer, matrix, size) in contenders(weight, dtype).items()
        }
        for count_of_rows in rows:
            x = torch.randn(count_of_rows, columns, generator=torch.Generator().manual_seed(1)).to(device, dtype)
            times: dict[str, list[float]] = {name: [] for name in made}
            for name, (layer, matrix, _, _) in made.items():
                check(name, layer, matrix, x)
            for _ in range(rounds):
                for name, (_, _, _, layers) in made.items():
                    times[name].append(seconds(layers, x, max(count, len(layers))))
            for name, values in times.items():
                found.append({
                    "outputs": outputs, "columns": columns, "rows": count_of_rows, "layer": name,
                    "seconds": statistics.median(values), "bytes": made[name][2],
                })  # fmt: skip
    return found


def table(found: list[dict[str, Any]]) -> str:
    """Microseconds, and in brackets how many times as fast as the float layer."""
    names = list(dict.fromkeys(entry["layer"] for entry in found))
    groups: dict[tuple[int, int, int], dict[str, float]] = {}
    for entry in found:
        key = (entry["outputs"], entry["columns"], entry["rows"])
        groups.setdefault(key, {})[entry["layer"]] = entry["seconds"]
    lines = []
    for (outputs, columns, rows), times in groups.items():
        cells = {name: f"{1e6 * time:.0f} ({times[FLOAT] / time:.2f})" for name, time in times.items()}
        lines.append([f"{outputs} x {columns}", str(rows), *(cells.get(name, "-") for name in names)])
    return report.markdown(["outputs x columns", "rows", *names], lines)


@report_errors
def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="default: %(default)s")
    parser.add_argument("--shapes", type=shape, nargs="+", default=[shape(text) for text in SHAPES], metavar="NxK")
    parser.add_argument("--rows", type=positive, nargs="+", default=list(ROWS), help="default: %(default)s")
    parser.add_argument("--rounds", type=positive, default=5, help="default: %(default)s")
    parser.add_argument("--count", type=positive, default=20, help="calls in a round (default: %(default)s)")
    parser.add_argument("--results", type=Path, metavar="FOLDER", help="write torch.json and torch.md there")
    args = parser.parse_args()
    if args.device == "cuda" and not torch.cuda.is_available():
        raise UserError("CUDA", "PyTorch sees no GPU, so no speed is measured", "take --device cpu, or a GPU")
    device = torch.device(args.device)
    machine = torch.cuda.get_device_name(device) if args.device == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    found = measure(args.shapes, args.rows, device, args.rounds, args.count)
    text = table(found)
    print(f"{machine}, PyTorch {torch.__version__}\n\n{text}")
    if args.results:
        record = {"device": machine, "torch": torch.__version__, "layers": found}
        (args.results / "torch.json").write_text(json.dumps(record, indent=1) + "\n")
        head = "Microseconds of a layer and, in brackets, how many times as fast as the float layer; "
        page = f"# PyTorch layers\n\n{head}{machine}, PyTorch {torch.__version__}.\n\n{text}"
        (args.results / "torch.md").write_text(page)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

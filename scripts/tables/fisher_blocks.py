#!/usr/bin/env python3
"""What blocks of an output Fisher matrix keep of the feedback across rows.

    scripts/tables/fisher_blocks.py models/demo-llama --text novels.txt
    ... --results docs    # and the section of docs/calibration.md

Feedback across rows leaves a share of the cost of rounding (`gguf_itq3s.rounding.fisher`: the mean weight of a row over
the mean of G's diagonal). Here that share is computed from the whole matrix, and from diagonal blocks of it: of
neighbouring rows, and of every n-th row. Means over the layers of a model.
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

import numpy as np
import numpy.typing as npt

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from gguf_itq3s.base import report  # noqa: E402
from gguf_itq3s.base.errors import positive, report_errors  # noqa: E402
from gguf_itq3s.calibrate.backward import OutputFisher  # noqa: E402
from gguf_itq3s.calibrate.layers import LayeredModel  # noqa: E402
from gguf_itq3s.calibrate.options import CalibrationOptions  # noqa: E402
from gguf_itq3s.calibrate.text import windows  # noqa: E402
from gguf_itq3s.checkpoint.reading import open_checkpoint  # noqa: E402
from gguf_itq3s.rounding.fisher import factorize  # noqa: E402

SIZES = (64, 128, 256)


def left(fisher: npt.NDArray[np.floating], parts: list[npt.NDArray[np.int64]]) -> float:
    """The share of the cost that feedback within parts of the rows leaves.

    Args:
        fisher: (m, m).
        parts: rows, each in one part.
    """
    weights = np.concatenate([factorize(fisher[np.ix_(part, part)]).weight for part in parts])
    return float(weights.mean() / np.diagonal(fisher).mean())


def shares(fisher: npt.NDArray[np.floating]) -> dict[str, float]:
    """What is left by the whole matrix and by blocks of it."""
    rows = np.arange(len(fisher))
    found = {"whole": left(fisher, [rows])}
    for size in SIZES:
        if size < len(rows):
            count = -(-len(rows) // size)
            found[f"{size} neighbours"] = left(fisher, np.array_split(rows, count))
            found[f"{size} strided"] = left(fisher, [rows[start::count] for start in range(count)])
    return found


@report_errors
def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="Hugging Face folder of a small model")
    parser.add_argument("--text", type=Path, required=True, help="what gradients are taken on")
    parser.add_argument("--tokens", type=positive, default=65536, help="default: %(default)s")
    parser.add_argument("--results", type=Path, help="folder of calibration.md to update")
    args = parser.parse_args()
    options = CalibrationOptions(args.model, [args.text], tokens=args.tokens)
    model = LayeredModel(options, open_checkpoint(args.model))
    found: dict[str, list[dict[str, float]]] = defaultdict(list)
    rows: dict[str, int] = {}
    with tempfile.TemporaryDirectory() as folder:
        fishers = OutputFisher(Path(folder), full=sys.maxsize, block=1)
        fishers.collect(model, windows(options, model.context), options.batch, "table", sys.stderr)
        for number in range(model.layers):
            for group in model.layout.groups(number, model.base.layers[number]):
                for reader in group.readers:
                    for fisher in fishers.blocks(reader, number):
                        kind = re.sub(r"^blk\.\d+\.|\.weight$", "", reader.entry)
                        found[kind].append(shares(fisher))
                        rows[kind] = len(fisher)
    columns = ["whole", *(f"{size} {how}" for size in SIZES for how in ("neighbours", "strided"))]
    cells = [
        [f"`{kind}`", str(rows[kind]), *(_mean([layer.get(column) for layer in layers]) for column in columns)]
        for kind, layers in found.items()
    ]
    table = report.markdown(["matrix", "rows", *columns], cells)
    print(table)
    if args.results:
        report.replace_section(args.results / "calibration.md", "fisher blocks", table)
    return 0


def _mean(values: list[float | None]) -> str:
    known = [value for value in values if value is not None]
    return f"{np.mean(known):.3f}" if known else "-"


if __name__ == "__main__":
    raise SystemExit(main())

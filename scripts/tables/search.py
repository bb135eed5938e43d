#!/usr/bin/env python3
"""How far the calibrated search should look: error and time by segment, lookahead and start scales.

    scripts/tables/search.py models/demo-llama --text novels.txt.xz                  # prints the table
    scripts/tables/search.py models/demo-llama --text novels.txt.xz --results docs   # and writes docs/calibration.md

For every matrix of the layers, norms folded: the Hessian-weighted squared error over the energy under the same Hessian,
geometric mean over the matrices, and the processor time of the C encoder relative to the first row, settings in turn.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import defaultdict
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from gguf_itq3s.base import report  # noqa: E402
from gguf_itq3s.base.errors import UserError, report_errors  # noqa: E402
from gguf_itq3s.calibrate.options import CalibrationOptions  # noqa: E402
from gguf_itq3s.calibrate.pipeline import calibrate  # noqa: E402
from gguf_itq3s.calibrate.store import open_calibration  # noqa: E402
from gguf_itq3s.checkpoint import rescaling  # noqa: E402
from gguf_itq3s.checkpoint.reading import open_checkpoint  # noqa: E402
from gguf_itq3s.codec import blocks, native  # noqa: E402
from gguf_itq3s.codec.transform import BLOCK, fwht  # noqa: E402
from gguf_itq3s.rounding import hessian, ldlq  # noqa: E402

#: None: the nearest codeword, without a Hessian.
SEARCHES: dict[str, ldlq.Search | None] = {
    "8, 24, one": ldlq.Search(8, 24, "fast"),
    "39, 25, one": ldlq.Search(39, 25, "fast"),
    "4, 16, three": ldlq.Search(4, 16),
    "**8, 16, three (default)**": ldlq.Search(),
    "12, 20, three": ldlq.Search(12, 20),
    "8, 24, three": ldlq.Search(8, 24),
    "16, 25, three": ldlq.Search(16, 25),
    "39, 25, three": ldlq.Search(39, 25),
    "nearest codeword, three": None,
}


@report_errors
def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="Hugging Face folder")
    parser.add_argument("--text", type=Path, nargs="+", required=True, help="calibration text, plain or .xz")
    parser.add_argument("--tokens", type=int, default=65536, help="calibration tokens (default: %(default)s)")
    parser.add_argument("--work-dir", type=Path, default=ROOT / "build" / "search", help="folder for the statistics")
    parser.add_argument("--results", type=Path, help="folder of calibration.md to update")
    args = parser.parse_args()
    library = native.load()
    if library is None:
        raise UserError(native.library_name(), "is not built", "run make build")
    statistics = args.work_dir / "hessians"
    calibrate(CalibrationOptions(args.model, args.text, tokens=args.tokens), statistics)
    checkpoint = open_checkpoint(args.model)
    opened = open_calibration(statistics, checkpoint.files)
    errors: dict[str, list[float]] = defaultdict(list)
    seconds: dict[str, float] = defaultdict(float)
    for tensor in rescaling.fold(checkpoint).apply(checkpoint.tensors, args.model):
        h = opened.hessian(tensor.name)
        if h is None or tensor.shape[-1] % BLOCK:
            continue
        weights = np.concatenate([np.asarray(part, dtype=np.float32) for part in tensor.load()])
        factor, energy = hessian.factorize(h), hessian.cost(fwht(weights), h)
        for label, search in SEARCHES.items():
            started = time.process_time()
            coded = (
                library.quantize(weights) if search is None else ldlq.quantize(weights, factor, search, library=library)
            )
            seconds[label] += time.process_time() - started
            errors[label].append(hessian.cost(fwht(blocks.dequantize(coded) - weights), h) / energy)
    first = seconds[next(iter(SEARCHES))]
    rows = [
        [label, f"{np.exp(np.mean(np.log(errors[label]))):.5f}", f"{seconds[label] / first:.2f}"] for label in SEARCHES
    ]
    count = len(errors[next(iter(SEARCHES))])
    table = report.markdown(["segment, lookahead, start scales", "error", "time"], rows)
    found = f"{count} matrices, statistics of {args.tokens} tokens:\n\n{table}"
    print(found)
    if args.results:
        report.replace_section(args.results / "calibration.md", "search", found)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

#!/usr/bin/env python3
"""What quantizing a large model while calibrating (`convert --calibrate`) takes, measured on one of its layers.

    scripts/bench/sequential.py --update docs/calibration.md
    scripts/bench/sequential.py --hidden 8192 --feed-forward 28672 --layers 80      a Llama of 70B

Writes a Llama of one layer with random weights in the large model's shapes and a small vocabulary, as
`scripts/bench/large.py` does, and runs the command on it in processes of their own. What a token costs is the
difference between two runs over few and more tokens with every matrix left in F16, where statistics are collected all
the same; what a layer costs besides, in targets, factors and rounding, is a run that quantizes it less one that does
not. Both are processor time, of one thread unless `--threads` says more. The vocabulary's matrices are left out: they
stay in F16 here and are rounded without statistics.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from gguf_itq3s.base import report  # noqa: E402
from gguf_itq3s.base.errors import positive, report_errors  # noqa: E402
from scripts.bench.large import DEMO, Run, Shape, add_shape, hours, run, shape_of, write_model  # noqa: E402

RESULTS: Final = ROOT / "docs" / "results" / "sequential.json"
TEXT: Final = ROOT / "tests" / "data" / "novel.txt"
#: Tokens that times are given for: 256 windows of 512, as in the tables of KL divergence, and the default.
TOKENS: Final = (131072, 262144)
#: Bits of a weight in ITQ3_S.
BITS: Final = 3.125
LLAMA_8B: Final = Shape(hidden=4096, feed_forward=14336, layers=32, vocabulary=128256, keys=1024)


def measure(shape: Shape, tokens: int, threads: int, work: Path) -> dict[str, Any]:
    """Run the command on one layer: with and without feedback across rows, kept in F16 and quantized."""
    model = work / "model"
    write_model(model, shape, json.loads((DEMO / "config.json").read_text())["vocab_size"])
    ends = ["--token-embedding-type", "f16", "--output-tensor-type", "f16", "--threads", str(threads)]

    def convert(count: int, *more: str) -> Run:
        text = ["--calibrate", str(TEXT), "--context", str(tokens), "--tokens", str(count)]
        result = run("convert", model, work / "out.gguf", *ends, *text, *more)
        (work / "out.gguf").unlink()
        return result

    kept = ("--tensor-type", "blk=f16")
    found = {}
    for name, more in (("--calibrate", ()), ("--calibrate --fisher", ("--fisher",))):
        runs = {"few": convert(tokens, *kept, *more), "more": convert(3 * tokens, *kept, *more)}
        found[name] = {key: asdict(value) for key, value in {**runs, "quantized": convert(tokens, *more)}.items()}
    return {"shape": asdict(shape), "threads": threads, "tokens": tokens, "runs": found}


def table(results: dict[str, Any]) -> str:
    """What the whole model takes, from what one layer took."""
    shape = Shape(**results["shape"])
    rows = []
    for name, runs in results["runs"].items():
        token = (runs["more"]["processor"] - runs["few"]["processor"]) / (2 * results["tokens"])
        layer = runs["quantized"]["processor"] - runs["few"]["processor"]
        streams = 4 + (shape.layers + 3 if "--fisher" in name else 0)
        for count in TOKENS:
            seconds = shape.layers * (layer + token * count)
            disk = streams * 4 * shape.hidden * count + shape.layers * shape.layer * BITS / 8
            memory = report.size(max(run["memory"] for run in runs.values()))
            cells = [f"{layer:.0f} s", f"{1000 * token:.1f} ms", hours(seconds), hours(seconds / 2)]
            rows.append([f"`{name}`, {count} tokens", *cells, memory, report.size(disk)])
    head = (
        f"{report.count(shape.weights)} weights, {shape.layers} layers of {shape.hidden} and {shape.feed_forward} "
        f"columns in the mix of ITQ3_S; one layer measured, {results['threads']} thread"
        f"{'s' * (results['threads'] > 1)}:\n\n"
    )
    titles = ["", "a layer", "and for each token", "all, one core", "half of it", "memory", "disk while it runs"]
    return head + report.markdown(titles, rows)


@report_errors
def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_shape(parser, LLAMA_8B, "Llama 3 8B")
    parser.add_argument("--tokens", type=positive, default=512, help="of the short runs (default: %(default)s)")
    parser.add_argument("--threads", type=positive, default=1, help="default: %(default)s")
    parser.add_argument("--work", type=Path, help="folder of the model (default: a temporary one)")
    parser.add_argument("--update", type=Path, metavar="FILE", help="put the table between the marks in the file")
    args = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = str(args.threads)  # of the commands, which are processes of their own
    shape = shape_of(args)
    with tempfile.TemporaryDirectory(dir=args.work) as folder:
        results = measure(shape, args.tokens, args.threads, Path(folder))
    print(table(results))
    if args.update:
        RESULTS.write_text(json.dumps(results, indent=1) + "\n")
        report.replace_section(args.update, "sequential", table(results))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

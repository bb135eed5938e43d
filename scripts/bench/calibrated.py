#!/usr/bin/env python3
"""Speed of the calibrated encoder on synthetic matrices of an 8B model's shapes.

    scripts/bench/calibrated.py --threads 2 --rows 1024

Prints weights a second by the clock and by processor time (what the threads would reach with the cores to themselves),
medians of interleaved repeats, and the time that factoring a Hessian takes.
"""

from __future__ import annotations

import argparse
import statistics
import time

import numpy as np

from gguf_itq3s.codec import native
from gguf_itq3s.rounding import hessian, ldlq

SHAPES = {"attn_q, attn_output, ffn_gate, ffn_up": (4096, "full"), "ffn_down": (14336, "block")}


def synthetic(columns: int, form: str, seed: int) -> np.ndarray:
    """A second moment of correlated inputs, float32."""
    rng = np.random.default_rng(seed)
    if form == "full":
        inputs = rng.standard_normal((columns // 4, columns), dtype=np.float32)
        return inputs.T @ inputs / len(inputs) + 0.1 * np.eye(columns, dtype=np.float32)
    inputs = rng.standard_normal((columns // 256, 64, 256), dtype=np.float32)
    return inputs.transpose(0, 2, 1) @ inputs / 64 + 0.1 * np.eye(256, dtype=np.float32)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rows", type=int, default=1024, help="rows of each matrix (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    library = native.load()
    if library is None:
        raise SystemExit("error: the C library is not built; run make build")
    options = {"default": ldlq.Search(), "one start scale": ldlq.Search(effort="fast"), "wide": ldlq.Search(39, 25)}
    for name, (columns, form) in SHAPES.items():
        h = synthetic(columns, form, 0)
        started, cpu = time.perf_counter(), time.process_time()
        factor = hessian.factorize(h)
        seconds, busy = time.perf_counter() - started, time.process_time() - cpu
        print(f"{name}: {columns} columns, {form}; factored in {seconds:.1f} s, {busy:.1f} s of processor time")
        weights = np.random.default_rng(1).standard_normal((args.rows, columns), dtype=np.float32)
        rates: dict[str, list[tuple[float, float]]] = {key: [] for key in options}
        for _ in range(args.repeats):
            for key, search in options.items():
                started, cpu = time.perf_counter(), time.process_time()
                ldlq.quantize(weights, factor, search, library=library, threads=args.threads)
                elapsed, busy = time.perf_counter() - started, time.process_time() - cpu
                rates[key].append((weights.size / elapsed / 1e6, weights.size * args.threads / busy / 1e6))
        for key, values in rates.items():
            clock, processor = (statistics.median(column) for column in zip(*values, strict=True))
            print(f"  {key}: {clock:.2f} M weights/s by the clock, {processor:.2f} by processor time")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

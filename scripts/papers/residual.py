#!/usr/bin/env python3
"""A second code of the error of the first: what a residual pass is worth, beside ggml's larger types.

    scripts/papers/residual.py models/demo-llama --update scripts/papers/README.md

The residual pass codes the error without rotating it: the error of a rotated block has the shape of the trellis in the
rotated basis and is Gaussian in the weights' own, where the first rotation has mixed it. Every matrix of the blocks is
in one type, without calibration or folded norms; the model runs in PyTorch on the decoded weights, in float32.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Final

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Type

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from gguf_itq3s.base import report
from gguf_itq3s.base.errors import UserError, positive, report_errors
from gguf_itq3s.codec import blocks, native, ternary
from gguf_itq3s.codec.transform import FloatArray, fwht
from gguf_itq3s.codec.types import ITQ3_S
from scripts.papers.reference import Reference, test_text
from scripts.tables import errors

Code = Callable[[FloatArray], FloatArray]
#: Type -> types of the first pass and the second.
PASSES: Final = {
    "ITQ3_S": (ITQ3_S,), "ITQ3_S + TQ2_0": (ITQ3_S, ternary.TQ2_0), "ITQ3_S + ITQ3_S": (ITQ3_S, ITQ3_S),
    **{qtype.name: (qtype,) for qtype in (Type.Q4_K, Type.Q5_K, Type.Q6_K, Type.Q8_0)},
}  # fmt: skip


def trellis(weights: FloatArray, threads: int) -> FloatArray:
    """What ITQ3_S makes of weights."""
    return blocks.dequantize(native.quantize(weights, threads=threads), weights.shape)


def two_passes(weights: FloatArray, second: Type, threads: int) -> FloatArray:
    """What ITQ3_S and a code of its error make of weights (rows, n)."""
    first = trellis(weights, threads)
    error = weights - first
    if second == ternary.TQ2_0:
        return first + ternary.ternarize(error, "optimal").weights()
    # The encoder rotates; rotated twice, the blocks stand for the error itself.
    return first + fwht(trellis(fwht(error), threads))


def code_of(types: tuple[Type, ...], library: native.NativeLibrary, threads: int) -> Code:
    """Weights -> what the passes make of them."""
    if len(types) == 2:
        return partial(two_passes, second=types[1], threads=threads)
    if types[0] == ITQ3_S:
        return partial(trellis, threads=threads)
    return lambda weights: gguf.quants.dequantize(library.quantize_type(weights, types[0], threads=threads), types[0])


def relative_error(code: Code, matrices: Iterable[FloatArray]) -> float:
    """Relative squared error over all matrices."""
    error = power = 0.0
    for weights in matrices:
        error += float(np.square(code(weights) - weights, dtype=np.float64).sum())
        power += float(np.square(weights, dtype=np.float64).sum())
    return error / power


def measure(model: Path, chunks: int, threads: int) -> str:
    """The table."""
    library = native.load()
    if library is None:
        raise UserError(native.library_name(), "is not built", "run make build")
    reference = Reference(model, test_text(), chunks)
    matrices, random = reference.matrices(), errors.distributions()
    rows = []
    for name, types in PASSES.items():
        code = code_of(types, library, threads)
        bits = sum(8 * size / block for block, size in (gguf.GGML_QUANT_SIZES[qtype] for qtype in types))
        reference.set_matrices({key: code(weights) for key, weights in matrices.items()})
        found = reference.divergence()
        parts = [relative_error(code, matrices.values()), *(relative_error(code, [w]) for w in random.values())]
        kld = f"{found['mean_kld']:#.3g} ± {found['mean_kld_error']:.1g}"
        rows.append((bits, [name, f"{bits:g}", *(f"{part:#.3g}" for part in parts), kld]))
        print(rows[-1], file=sys.stderr)
    header = ["type", "bits", "error, model", *random, "mean KLD"]
    return report.markdown(header, [row for _, row in sorted(rows)])


@report_errors
def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="Hugging Face folder with Llama's names")
    parser.add_argument("--chunks", type=positive, default=64, help="windows of 512 tokens (default: %(default)s)")
    parser.add_argument("--threads", type=positive, default=native.processors(), help="default: %(default)s")
    parser.add_argument("--update", type=Path, metavar="FILE", help="put the table between its marks in this file")
    args = parser.parse_args()
    table = measure(args.model, args.chunks, args.threads)
    print(table)
    if args.update:
        report.replace_section(args.update, "residual", table)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

#!/usr/bin/env python3
"""Relative squared error of types of 2 to 4 bits on random rows, as a Markdown table.

    scripts/tables/errors.py                         print it
    scripts/tables/errors.py --update docs/format.md put it between the marks in the file

Every type is coded by its own quantizer in the built library (``make build``), without an importance matrix (one of
equal values where a quantizer insists on it), and decoded by gguf-py; the rows are one million weights of each
distribution, the same for every type.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Type

from gguf_itq3s.base import report
from gguf_itq3s.base.errors import UserError, report_errors
from gguf_itq3s.codec import native
from gguf_itq3s.codec.family import FAMILY
from gguf_itq3s.codec.types import bits_per_weight

ROWS, COLUMNS = 1024, 1024
OTHERS = (Type.IQ2_XXS, Type.IQ2_XS, Type.Q2_K, Type.IQ3_XXS, Type.IQ3_S, Type.Q3_K, Type.IQ4_XS, Type.Q4_K)
#: Types that ggml does not quantize without an importance matrix.
WEIGHTED = (Type.IQ2_XXS, Type.IQ2_XS)


def distributions() -> dict[str, np.ndarray]:
    """float32 (ROWS, COLUMNS) of each distribution, reproducible."""
    rng = np.random.default_rng(0)
    shape = (ROWS, COLUMNS)
    return {
        "Gaussian": rng.standard_normal(shape, dtype=np.float32),
        "Laplace": rng.laplace(size=shape).astype(np.float32),
        "Student-t, 4 d.o.f.": rng.standard_t(4, size=shape).astype(np.float32),
    }


def codings(library: native.NativeLibrary, threads: int) -> dict[str, tuple[float, Callable[[np.ndarray], np.ndarray]]]:
    """Name -> (bits per weight, weights -> decoded weights)."""

    def ours(qtype: Type, effort: str, codec: str) -> Callable[[np.ndarray], np.ndarray]:
        return lambda w: gguf.quants.dequantize(
            library.quantize(w, qtype=qtype, effort=effort, codec=codec, threads=threads), qtype
        )

    def other(qtype: Type) -> Callable[[np.ndarray], np.ndarray]:
        even = np.ones(COLUMNS, dtype=np.float32) if qtype in WEIGHTED else None
        return lambda w: gguf.quants.dequantize(
            library.quantize_type(w, qtype, importance=even, threads=threads), qtype
        )

    found = {}
    for qtype, row in FAMILY.items():
        bits = row.format.bits_per_weight
        found[f"**{row.name}**"] = (bits, ours(qtype, "default", "trellis"))
        found[f"{row.name}, effort fast"] = (bits, ours(qtype, "fast", "trellis"))
        if row.format.ternary:
            found[f"{row.name}, literal ternary code"] = (bits, ours(qtype, "default", "ternary"))
    for qtype in OTHERS:
        found[qtype.name] = (bits_per_weight(qtype), other(qtype))
    return found


def table(library: native.NativeLibrary, threads: int) -> str:
    """The table."""
    data = distributions()
    lines = []
    for name, (bits, code) in codings(library, threads).items():
        errors = [
            np.square(code(w) - w, dtype=np.float64).sum() / np.square(w, dtype=np.float64).sum() for w in data.values()
        ]
        cells = [f"**{e:.4f}**" if name.startswith("**") else f"{e:.4f}" for e in errors]
        lines.append([name, f"{bits:g}", *cells])
    return report.markdown(["type", "bits/weight", *data], lines)


@report_errors
def main() -> int:
    parser = argparse.ArgumentParser(description="Relative squared error of types of 2 to 4 bits on random rows.")
    parser.add_argument("--update", type=Path, metavar="FILE", help="replace the table in this Markdown file")
    parser.add_argument("--threads", type=int, default=2, help="default: %(default)s")
    args = parser.parse_args()
    library = native.load()
    if library is None:
        raise UserError(native.library_name(), "is not built", "run make build")
    if args.update is None:
        print(table(library, args.threads))
        return 0
    report.replace_section(args.update, "error table", table(library, args.threads))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

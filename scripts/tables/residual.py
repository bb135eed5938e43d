#!/usr/bin/env python3
"""What a residual pass is worth: error and KL divergence of ITQ3_S with a second code, beside ggml's larger types.

    scripts/tables/residual.py models/demo-llama                         print the table
    scripts/tables/residual.py models/demo-llama --update docs/torch.md  put it between the marks in the page

Every matrix of the blocks in one type, without a calibration or an importance matrix and without folded norms; the
model runs in PyTorch on the decoded weights, in float32, over windows of WikiText-2's test split.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Type

ROOT: Final = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from gguf_itq3s.base import report  # noqa: E402
from gguf_itq3s.base.errors import UserError, positive, report_errors  # noqa: E402
from gguf_itq3s.codec import native  # noqa: E402
from gguf_itq3s.codec.ternary import TQ2_0  # noqa: E402
from gguf_itq3s.codec.types import ITQ3_S  # noqa: E402
from gguf_itq3s.evaluate import wikitext  # noqa: E402
from gguf_itq3s.torch import dequantize, quantize  # noqa: E402
from scripts.ablation.torch_evaluator import Reference  # noqa: E402
from scripts.tables import errors  # noqa: E402

RESULTS: Final = ROOT / "docs" / "results" / "residual.json"
#: The random weights.
KINDS: Final = ("Gaussian", "Laplace", "Student-t, 4 d.o.f.")
Array = np.ndarray


def packed(residual: Type | None, threads: int) -> Callable[[Array], Array]:
    """Weights -> what ITQ3_S with that residual pass makes of them."""

    def code(weights: Array) -> Array:
        found = quantize(weights, ITQ3_S, residual, threads=threads)
        return dequantize(found.weight, ITQ3_S, found.residual, residual).numpy()

    return code


def plain(library: native.NativeLibrary, qtype: Type, threads: int) -> Callable[[Array], Array]:
    """Weights -> what one of ggml's types makes of them, by its own quantizer."""
    return lambda weights: gguf.quants.dequantize(library.quantize_type(weights, qtype, threads=threads), qtype)


def relative_error(code: Callable[[Array], Array], matrices: Iterable[Array]) -> float:
    """Relative squared error over all matrices."""
    error = power = 0.0
    for weights in matrices:
        error += float(np.square(code(weights) - weights, dtype=np.float64).sum())
        power += float(np.square(weights, dtype=np.float64).sum())
    return error / power


def codings(threads: int) -> dict[str, tuple[float, Callable[[Array], Array]]]:
    """Type -> bits per weight, weights -> decoded weights."""
    library = native.load()
    if library is None:
        raise UserError(native.library_name(), "is not built", "run make build")
    size = {qtype: gguf.GGML_QUANT_SIZES[qtype] for qtype in Type}

    def bits(*types: Type) -> float:
        return sum(8 * size[qtype][1] / size[qtype][0] for qtype in types)

    return {
        "ITQ3_S": (bits(ITQ3_S), packed(None, threads)),
        "ITQ3_S + TQ2_0": (bits(ITQ3_S, TQ2_0), packed(TQ2_0, threads)),
        "ITQ3_S + ITQ3_S": (bits(ITQ3_S, ITQ3_S), packed(ITQ3_S, threads)),
        **{
            qtype.name: (bits(qtype), plain(library, qtype, threads))
            for qtype in (Type.Q4_K, Type.Q5_K, Type.Q6_K, Type.Q8_0)
        },
    }


def measure(model: Path, chunks: int, threads: int) -> dict[str, dict[str, float]]:
    """Type -> bits per weight, relative squared errors, KL divergence and its standard error."""
    reference = Reference(model, wikitext.read(wikitext.test_path()), chunks)
    matrices = reference.matrices()
    random = errors.distributions()
    found = {}
    for name, (bits, code) in codings(threads).items():
        decoded = {key: code(weights) for key, weights in matrices.items()}
        reference.set_matrices(decoded)
        result = reference.divergence()
        found[name] = {
            "bits": bits, "error": relative_error(code, matrices.values()),
            **{kind: relative_error(code, [weights]) for kind, weights in random.items()},
            "kld": result.mean_kld, "kld_error": result.mean_kld_error, "same_top": result.same_top,
            "tokens": result.tokens,
        }  # fmt: skip
        print(f"{name}: {found[name]}", file=sys.stderr)
    return dict(sorted(found.items(), key=lambda item: item[1]["bits"]))


def table(found: dict[str, dict[str, float]]) -> str:
    rows = []
    for name, row in found.items():
        divergence = f"{row['kld']:#.3g} ± {row['kld_error']:.1g}"
        cells = [f"{row[kind]:#.3g}" for kind in ("error", *KINDS)]
        rows.append([name, f"{row['bits']:.5g}", *cells, divergence, f"{100 * row['same_top']:.1f}%"])
    tokens = next(iter(found.values()))["tokens"]
    head = (
        f"Relative squared error on the bundled model's matrices and on a million random weights, and the model's\nKL "
        f"divergence, {tokens:.0f} tokens scored, every matrix of the blocks in the type:\n\n"
    )
    return head + report.markdown(["type", "bits/weight", "model", *KINDS, "KL divergence, nats", "same top"], rows)


@report_errors
def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="Hugging Face folder")
    parser.add_argument("--chunks", type=positive, default=64, help="windows of 512 tokens (default: %(default)s)")
    parser.add_argument("--threads", type=positive, default=1, help="default: %(default)s")
    parser.add_argument("--update", type=Path, metavar="FILE", help="put the table between the marks in the file")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    found = measure(args.model, args.chunks, args.threads)
    print(table(found))
    if args.update:
        RESULTS.write_text(json.dumps(found, indent=1) + "\n")
        report.replace_section(args.update, "residual", table(found))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

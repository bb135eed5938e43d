"""``gguf-itq3s ternary``: which matrices of a checkpoint are ternary, and what ternarizing the others would cost."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np

from ..base import report
from ..checkpoint import trust
from ..checkpoint.reading import open_checkpoint
from ..codec import ternary


def examine(folder: Path, *, trust_remote_code: bool = False) -> list[dict[str, Any]]:
    """Facts about every matrix of a checkpoint, a Hugging Face folder.

    Returns:
        ``name``, ``shape``, ``ternary`` (granularity of the scale, or None), ``exact`` (float16 holds its scales),
        ``gamma`` (eps + mean|W|), and ``errors`` (scale -> relative squared error of ternarizing by it).

    Raises:
        UserError: the folder is not a checkpoint of a supported architecture.
    """
    facts = []
    for tensor in open_checkpoint(folder, trust_remote_code=trust_remote_code).tensors:
        if len(tensor.shape) < 2:
            continue
        weights = np.concatenate([np.asarray(p, dtype=np.float32).reshape(-1, tensor.shape[-1]) for p in tensor.load()])
        found = ternary.recognise(weights)
        errors = {scale: ternary.relative_error(weights, ternary.ternarize(weights, scale)) for scale in ternary.SCALES}
        facts.append(
            {"name": tensor.name, "shape": list(tensor.shape), "ternary": found.granularity if found else None,
             "exact": found.in_float16 if found else None, "gamma": ternary.gamma(weights), "errors": errors}
        )  # fmt: skip
    return facts


def add_parser(subparsers: Any) -> None:
    """Add the subcommand ``ternary``."""
    parser = subparsers.add_parser("ternary", help="ternary matrices and ternarization errors", description=__doc__)
    parser.add_argument("model", type=Path, help="Hugging Face folder")
    parser.add_argument("--json", action="store_true", help="print JSON")
    trust.add_argument(parser)
    parser.set_defaults(run=run, needs_source=True)


def run(args: argparse.Namespace) -> int:
    """Run the command; returns the exit code."""
    facts = examine(args.model, trust_remote_code=args.trust_remote_code)
    if args.json:
        print(json.dumps(facts, indent=1))
        return 0
    rows = [
        [f["name"], f"a {f['ternary']}" if f["ternary"] else "no", f"{f['gamma']:.4g}",
         *(f"{f['errors'][scale]:.4f}" for scale in ternary.SCALES)]
        for f in facts
    ]  # fmt: skip
    print("relative squared error of ternarizing by absmean (gamma of training, a tensor), optimal, maxabs (a block)")
    print(report.table(["matrix", "ternary, scale for", "gamma", *ternary.SCALES], rows))
    return 0

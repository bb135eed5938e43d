"""The command ``gguf-itq3s collect-statistics``, or ``calibrate``: the rotated Hessians of a model's layers."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any, Final

from ..checkpoint import trust
from .options import FULL_COLUMNS, TEXTS, CalibrationOptions, add_arguments, text_of
from .ranks import joined

DESCRIPTION: Final = "Collect the second moments of a model's activations, for convert --statistics."


def add_parser(subparsers: Any) -> None:
    """Add the subcommand."""
    parser = subparsers.add_parser(
        "collect-statistics",
        aliases=["calibrate"],
        description=DESCRIPTION,
        help="statistics for many files of one model (convert --statistics); for one, convert --layerwise is better",
    )
    parser.add_argument("model", metavar="model_dir", type=Path, help="Hugging Face folder with safetensors weights")
    parser.add_argument("--text", type=text_of, nargs="+", required=True, metavar="TEXT", help=TEXTS)
    parser.add_argument("-o", "--out", type=Path, required=True, metavar="DIR", help="folder to write")
    add_arguments(parser, FULL_COLUMNS)
    trust.add_argument(parser)
    parser.set_defaults(run=run, needs_source=True)


def run(args: argparse.Namespace) -> int:
    """Run the command; returns the exit code."""
    from .statistics import calibrate  # torch runs the model

    values = {key: value for key, value in vars(args).items() if key in CalibrationOptions.__dataclass_fields__}
    values["text"], values["shares"] = zip(*args.text, strict=True)
    options = CalibrationOptions(**values)
    with joined(args.out, options.device, sys.stderr) as (ranks, messages):
        manifest = calibrate(options, args.out, messages, ranks)
    if not ranks.first:
        return 0
    matrices = len(manifest.entries)
    print(f"{args.out}: statistics of {matrices} matrices from {manifest.tokens} tokens", file=sys.stderr)
    return 0

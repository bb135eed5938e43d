"""The command ``gguf-itq3s distill``."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any, Final

from ..base import report
from ..base.errors import positive
from ..calibrate.options import BUNDLED, add_arguments
from ..checkpoint import trust
from ..checkpoint.hub import download
from ..codec.blocks import EFFORTS
from ..codec.native import processors
from .options import LOSSES, OPTIMIZER_STATES, PRECISIONS, TYPES, DistillOptions

DESCRIPTION: Final = (
    "Train a checkpoint so that its codes in a trellis type or TQ2_0 give the predictions that it gives itself, and "
    "write it as a Hugging Face folder, to be converted with --no-fold-norms."
)


def add_parser(subparsers: Any) -> None:
    """Add the subcommand ``distill``."""
    parser = subparsers.add_parser("distill", help="train a checkpoint to the codes of a file", description=DESCRIPTION)
    parser.add_argument("model", metavar="model_dir", help="Hugging Face folder, or hf:organisation/name to download")
    parser.add_argument("out", metavar="out_dir", type=Path, help="folder to write")
    parser.add_argument(
        "--text", type=Path, nargs="+", metavar="FILE", help="text, plain or .xz (default: a mix that comes along)"
    )
    parser.add_argument(
        "--start", type=Path, metavar="FILE.gguf",
        help="start from the codes of this file of the model, such as one of convert --calibrate --fisher "
        "(default: the nearest codes)",
    )  # fmt: skip
    for option, choices, what in (
        ("type", TYPES, "of the matrices"),
        ("loss", LOSSES, "divergence of student and teacher"),
        ("optimizer-state", OPTIMIZER_STATES, "in which form, or where, the optimizer's moments are kept"),
        ("precision", PRECISIONS, "of the products"),
        ("effort", EFFORTS, "of encoding anew"),
    ):
        default = getattr(DistillOptions, option.replace("-", "_"))
        parser.add_argument(f"--{option}", choices=choices, default=default, help=f"{what} (default: %(default)s)")
    for option, what in (("steps", "of the optimizer"), ("every", "steps between two encodings")):
        parser.add_argument(
            f"--{option}", type=positive, default=getattr(DistillOptions, option), metavar="N",
            help=f"{what} (default: %(default)s)",
        )  # fmt: skip
    add_arguments(parser, DistillOptions, tokens="taken from the text, about", batch="windows of a step")
    parser.add_argument("--micro-batch", type=positive, metavar="N", help="windows that are run together")
    for option, what in (
        ("lr", "of weights, in shares of their matrix's root mean square"),
        ("scale-lr", "of the scales of blocks"),
        ("norm-lr", "of norm gains; 0 leaves them"),
        ("embedding-lr", "of the token embedding and the output matrix, in shares of theirs; 0 leaves them"),
    ):
        parser.add_argument(
            f"--{option}", type=float, default=getattr(DistillOptions, option.replace("-", "_")), metavar="X",
            help=f"learning rate {what} (default: %(default)g)",
        )  # fmt: skip
    parser.add_argument(
        "--gradient-checkpointing", action="store_true", help="compute activations again instead of keeping them"
    )
    parser.add_argument("--threads", type=positive, default=processors(), metavar="N", help="default: %(default)s")
    parser.add_argument(
        "--seed", type=int, default=DistillOptions.seed, help="of the order of windows (default: %(default)s)"
    )
    parser.add_argument(
        "--checkpoint-minutes", type=float, default=DistillOptions.checkpoint_minutes, metavar="X",
        help="between two checkpoints (default: %(default)g)",
    )  # fmt: skip
    trust.add_argument(parser)
    parser.set_defaults(run=run, needs_source=True)


def run(args: argparse.Namespace) -> int:
    """Run the command; returns the exit code."""
    from .pipeline import distill  # torch takes seconds to import

    values = {key: value for key, value in vars(args).items() if key in DistillOptions.__dataclass_fields__}
    values["text"] = tuple(args.text or [BUNDLED])
    name = str(args.model)
    values["model"] = Path(name)
    if name.startswith("hf:"):
        values["model"] = download(name.removeprefix("hf:"), trust_remote_code=args.trust_remote_code)
    done = distill(DistillOptions(**values))
    print(f"KL divergence on windows that were not trained on: {done.before:.5f} before, {done.after:.5f} after")
    print(f"wrote {args.out}: {done.matrices} matrices in {args.type.upper()} codes, {report.size(done.size)}")
    print(f"convert it with: convert-hf-to-itq3s {args.out} OUT.gguf")
    return 0

"""The command ``convert-hf-to-itq3s``, and the subcommand ``gguf-itq3s convert``."""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any, Final

from .. import report
from ..checkpoint import trust
from ..checkpoint.reader import download
from ..codec.blocks import CODECS, EFFORTS
from ..codec.native import processors
from ..codec.ternary import SCALES
from ..errors import positive
from .options import OUTTYPES, TENSOR_TYPES, TERNARY_MODES, TERNARY_TYPES, ConvertOptions
from .pipeline import Conversion, convert

DESCRIPTION: Final = "Convert a Hugging Face checkpoint to GGUF with ITQ3_S, TQ1_0, TQ2_0 or F16 tensors."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command, on any parser."""
    defaults = ConvertOptions(Path(), Path())
    parser.add_argument("model", metavar="model_dir", help="Hugging Face folder, or hf:organisation/name to download")
    parser.add_argument("out", metavar="out.gguf", type=Path, help="file to write; {ftype} becomes the output type")
    parser.add_argument(
        "--outtype", choices=OUTTYPES, default=defaults.outtype, help="type of the matrices (default: %(default)s)"
    )
    parser.add_argument("--pure", action="store_true", help="every matrix in that type, embeddings and output too")
    parser.add_argument(
        "--token-embedding-type", choices=TENSOR_TYPES, help="of the token embedding, instead of the mix's"
    )
    parser.add_argument("--output-tensor-type", choices=TENSOR_TYPES, help="of the output matrix, instead of the mix's")
    parser.add_argument(
        "--codec", choices=CODECS, default=defaults.codec,
        help="of ITQ3_S; ternary is the literal code of the paper, for comparison (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--effort", choices=EFFORTS, default=defaults.effort,
        help="of ITQ3_S: start scales the search tries (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--fold-norms", action=argparse.BooleanOptionalAction, default=defaults.fold_norms,
        help="multiply norm gains into the matrices that read them, exact (default: for ITQ3_S)",
    )  # fmt: skip
    parser.add_argument(
        "--calibration", type=Path, metavar="DIR", help="what gguf-itq3s calibrate wrote; rounds ITQ3_S by its Hessians"
    )
    parser.add_argument("--imatrix", type=Path, metavar="FILE", help="what llama-imatrix wrote (GGUF), for the same")
    parser.add_argument("--damping", type=float, metavar="X", help="of the Hessians, share of the mean diagonal")
    parser.add_argument("--segment", type=int, metavar="N", help="columns the calibrated search commits at a time")
    parser.add_argument("--lookahead", type=int, metavar="N", help="columns it searches past them before")
    parser.add_argument("--threads", type=positive, default=processors(), metavar="N", help="default: %(default)s")
    parser.add_argument(
        "--native", action=argparse.BooleanOptionalAction, default=defaults.native,
        help="quantize with the built C library, or in numpy; the bytes are the same (default: C if it is built)",
    )  # fmt: skip
    parser.add_argument(
        "--ternary", choices=TERNARY_MODES, default=defaults.ternary,
        help="matrices that are ternary after a scale go to a ternary type without loss; force ternarizes the other "
        "matrices of the layers, as latent weights need (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--ternary-type", choices=TERNARY_TYPES, default=defaults.ternary_type, help="default: %(default)s"
    )
    parser.add_argument(
        "--ternary-scale", choices=tuple(SCALES), default=defaults.ternary_scale,
        help="of --ternary force: mean|W| as in training, least error, or max|W| (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument("--dry-run", action="store_true", help="print each tensor's type and size, write nothing")
    parser.add_argument("--model-name", metavar="NAME", help="general.name in the file")
    trust.add_argument(parser)
    parser.add_argument("--verbose", action="store_true", help="show what llama.cpp's converter logs")
    parser.set_defaults(run=run, needs_source=True)


def add_parser(subparsers: Any) -> None:
    """Add the subcommand ``convert``."""
    add_arguments(subparsers.add_parser("convert", help="Hugging Face checkpoint to GGUF", description=DESCRIPTION))


def run(args: argparse.Namespace) -> int:
    """Run the command; returns the exit code."""
    values = {key: value for key, value in vars(args).items() if key in ConvertOptions.__dataclass_fields__}
    name = str(values["model"])
    values["model"] = Path(name)
    if name.startswith("hf:"):
        values["model"] = download(name.removeprefix("hf:"), trust_remote_code=args.trust_remote_code)
    values["out"] = args.out.with_name(args.out.name.replace("{ftype}", args.outtype.upper()))
    started = time.monotonic()
    done = convert(ConvertOptions(**values))
    print(describe(done))
    verb = "would write" if args.dry_run else "wrote"
    print(f"{verb} {values['out']}: {report.size(done.size)}, {time.monotonic() - started:.1f} s")
    return 0


def describe(done: Conversion) -> str:
    """The tables of a conversion: every tensor of a dry run, then the types."""
    parts = [f"{report.by_type(done.rows)}\nchecked: {done.check}"]
    if done.shapes:
        lines = [
            [row.name, "x".join(map(str, reversed(shape))), row.type, report.size(row.bytes)]
            for row, shape in zip(done.rows, done.shapes, strict=True)
        ]
        parts.insert(0, report.table(["tensor", "shape", "type", "size"], lines) + "\n")
    return "\n".join(parts)

"""The command ``convert-hf-to-itq3s``, and the subcommand ``gguf-itq3s convert``."""

from __future__ import annotations

import argparse
import math
import re
import sys
import time
from pathlib import Path
from typing import Any, Final

from ..base import report
from ..base.errors import UserError, positive
from ..calibrate.options import FULL_COLUMNS_AT_ONCE, TEXTS, text_of
from ..calibrate.options import add_arguments as add_run_arguments
from ..calibrate.ranks import joined, own_processors
from ..checkpoint import converter, trust
from ..checkpoint.hub import download
from ..checkpoint.policy import FALLBACK_KINDS
from ..codec.family import FAMILY
from ..codec.formats import CODECS
from ..codec.ternary import SCALES
from .options import EFFORTS, OUTTYPES, PLAIN_OUTTYPES, TENSOR_TYPES, TERNARY_MODES, TERNARY_TYPES, ConvertOptions
from .pipeline import Conversion, convert_together

#: The trellis types, as help names them.
_TRELLIS: Final = ", ".join(row.name for row in FAMILY.values())
DESCRIPTION: Final = (
    f"Convert a Hugging Face checkpoint to GGUF with {_TRELLIS}, TQ1_0 or TQ2_0 tensors, or as llama.cpp's own "
    "converter. "
    "Options that convert_hf_to_gguf.py and llama-quantize have too mean the same here."
)
#: Arguments that are no options of a conversion, or other ones by then.
_COMMAND: Final = (
    "command", "run", "needs_source", "parser", "outfile", "tensor_type", "remote", "print_supported_models",
)  # fmt: skip

#: Options of llama.cpp's tools that these tools apply to a finished file, and the command that does it.
_ELSEWHERE: Final = {
    **dict.fromkeys(
        ("--split-max-size", "--split-max-tensors", "--no-tensor-first-split"),
        "write one file, then: llama-gguf-split --split {option} ... FILE.gguf NAME",
    ),
    "--prune-layers": "write --outtype f16, then: llama-quantize {option} ... F16.gguf OUT.gguf TYPE",
    "--override-kv": "write the file, then: llama-quantize {option} ... FILE.gguf OUT.gguf COPY",
}
# Bytes of a file with patterns: far more than one for every tensor of any model.
_LONGEST_FILE: Final = 1 << 24


class _Elsewhere(argparse.Action):
    """An option that another command has; giving it is an error that names the command."""

    def __call__(self, _parser: Any, _namespace: Any, _values: Any, option: str | None = None) -> None:
        assert option is not None
        raise UserError(option, "is for a file that is there", _ELSEWHERE[option].format(option=option))


def tensor_type(argument: str) -> tuple[str, str]:
    """``PATTERN=TYPE``, for argparse: a regular expression in lower case, as llama-quantize makes it, and a type."""
    pattern, separator, name = argument.partition("=")
    if not separator or not pattern or not name:
        raise argparse.ArgumentTypeError(f"{argument!r:.80} is not PATTERN=TYPE")
    if name.lower() not in TENSOR_TYPES:
        raise argparse.ArgumentTypeError(f"{name!r:.40} is not one of the types {', '.join(TENSOR_TYPES)}")
    pattern = pattern.lower()
    if "[[:" in pattern:
        raise argparse.ArgumentTypeError(f"{pattern!r:.80}: write a class such as [[:digit:]] as [0-9]")
    try:
        re.compile(pattern)
    except re.error as error:
        raise argparse.ArgumentTypeError(f"{pattern!r:.80} is not a regular expression: {error}") from None
    return pattern, name.lower()


def tensor_type_file(argument: str) -> list[tuple[str, str]]:
    """The patterns of a file, separated by spaces or line breaks, for argparse."""
    try:
        with Path(argument).open("rb") as file:
            data = file.read(_LONGEST_FILE + 1)
        if len(data) > _LONGEST_FILE:
            raise ValueError(f"has more than {_LONGEST_FILE} bytes")
        return [tensor_type(word) for word in data.decode().split()]
    except (OSError, ValueError) as error:
        raise argparse.ArgumentTypeError(f"{argument}: {error}") from None
    except argparse.ArgumentTypeError as error:
        raise argparse.ArgumentTypeError(f"{argument}: {error}") from None


def bits_per_weight(argument: str) -> float:
    """A number of bits, for argparse."""
    try:
        bits = float(argument)
    except ValueError:
        bits = math.nan
    if not 0 < bits < 64:
        raise argparse.ArgumentTypeError(f"{argument!r:.40} is no number of bits")
    return bits


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command, on any parser."""
    parser.add_argument(
        "model", metavar="model_dir", nargs="?", help="Hugging Face folder, or hf:organisation/name to download"
    )
    parser.add_argument(
        "out", metavar="out.gguf", type=Path, nargs="?",
        help="file to write; {ftype} becomes the type, {FTYPE} in capitals (default: a name by the GGUF naming "
        "convention, in the model's folder)",
    )  # fmt: skip
    _add_output(parser.add_argument_group("output"))
    _add_types(parser.add_argument_group("types of the tensors"))
    _add_encoder(parser.add_argument_group(f"{_TRELLIS} and their statistics"))
    _add_calibrate(parser.add_argument_group("calibrating while converting"))
    _add_ternary(parser.add_argument_group("ternary models"))
    _add_model(parser.add_argument_group("what is read of the model"))
    _add_metadata(parser.add_argument_group("metadata"))
    parser.add_argument(
        "--print-supported-models", action="store_true", help="print the architectures that can be read, and end"
    )
    parser.add_argument("--verbose", action="store_true", help="show what llama.cpp's converter logs")
    for option in _ELSEWHERE:
        parser.add_argument(option, action=_Elsewhere, nargs="?", dest=argparse.SUPPRESS, help=argparse.SUPPRESS)
    parser.set_defaults(run=run, needs_source=True, parser=parser)


def _add_output(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--outfile", type=Path, metavar="PATH", help="the same as out.gguf, or a folder for a file of the default name"
    )
    group.add_argument("--dry-run", action="store_true", help="print each tensor's type and size, write nothing")


def _add_types(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--outtype", choices=OUTTYPES, default="",
        help=f"type of the matrices (default: {ConvertOptions.outtype}); {', '.join(PLAIN_OUTTYPES)} write what "
        "convert_hf_to_gguf.py writes",
    )  # fmt: skip
    group.add_argument("--pure", action="store_true", help="every matrix in that type, embeddings and output too")
    budget = group.add_mutually_exclusive_group()
    budget.add_argument(
        "--target-bpw", type=bits_per_weight, metavar="X",
        help="choose each matrix's type so that the error is least with at most X bits per weight over all weights; "
        "needs --calibrate, --calibration or --imatrix",
    )  # fmt: skip
    budget.add_argument(
        "--target-size", type=report.parse_size, metavar="N[KiB|MiB|GiB]",
        help="the same with at most so many bytes of file",
    )  # fmt: skip
    for option, what in (("--token-embedding-type", "token embedding"), ("--output-tensor-type", "output matrix")):
        group.add_argument(
            option, type=str.lower, choices=TENSOR_TYPES, metavar="TYPE", help=f"of the {what}, instead of the mix's"
        )
    group.add_argument(
        "--tensor-type", type=tensor_type, action="append", default=[], metavar="PATTERN=TYPE",
        help="of tensors whose names the regular expression is found in; the first that fits counts; may be repeated. "
        f"Types: {', '.join(TENSOR_TYPES)}",
    )  # fmt: skip
    group.add_argument(
        "--tensor-type-file", type=tensor_type_file, action="extend", dest="tensor_type", metavar="FILE",
        help="with PATTERN=TYPE, separated by spaces or line breaks",
    )  # fmt: skip
    group.add_argument("--leave-output-tensor", action="store_true", help="output.weight is not quantized")
    group.add_argument(
        "--fallback", choices=FALLBACK_KINDS, default=ConvertOptions.fallback,
        help="in rows that are no multiple of 256: trellis types in blocks of 64 where these divide the row, or IQ4_NL "
        "(default: %(default)s)",
    )  # fmt: skip


def _add_encoder(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--codec", choices=CODECS, default=ConvertOptions.codec,
        help="ternary is the literal code of the paper, for comparison (default: %(default)s)",
    )  # fmt: skip
    group.add_argument(
        "--effort", choices=EFFORTS, default=ConvertOptions.effort,
        help="how far is searched: fast tries one start scale, default three; where statistics are given, auto and "
        "best look further, auto with one for types of 2 and 3 bits in blocks of 256 (default: %(default)s)",
    )  # fmt: skip
    group.add_argument(
        "--fold-norms", action=argparse.BooleanOptionalAction, default=ConvertOptions.fold_norms,
        help="multiply norm gains into the matrices that read them, exact (default: no)",
    )  # fmt: skip
    group.add_argument(
        "--equalize", action=argparse.BooleanOptionalAction, default=ConvertOptions.equalize,
        help="rescale channels so that rounding costs least, exact; for rounding without statistics, a short run of "
        "the model measures its inputs (default: for trellis types where statistics are given)",
    )  # fmt: skip
    group.add_argument(
        "--statistics", "--calibration", dest="calibration", type=Path, metavar="DIR",
        help="what gguf-itq3s collect-statistics wrote, for many files of one model; rounds matrices by its Hessians",
    )  # fmt: skip
    group.add_argument(
        "--imatrix", type=Path, metavar="FILE",
        help="what llama-imatrix wrote (GGUF or .dat): channels are equalized by it or, with --no-equalize, matrices "
        "are rounded by it as by a Hessian",
    )  # fmt: skip
    for option, what in (("--include-weights", "only its entries"), ("--exclude-weights", "none of its entries")):
        group.add_argument(
            option, action="append", default=[], metavar="NAME",
            help=f"use {what} with this in the name; may be repeated",
        )  # fmt: skip
    group.add_argument("--damping", type=float, metavar="X", help="of the Hessians, share of the mean diagonal")
    group.add_argument("--segment", type=int, metavar="N", help="columns the calibrated search commits at a time")
    group.add_argument("--lookahead", type=int, metavar="N", help="columns it searches past them before")
    group.add_argument("--threads", type=positive, default=own_processors(), metavar="N", help="default: %(default)s")
    group.add_argument(
        "--native", action=argparse.BooleanOptionalAction, default=ConvertOptions.native,
        help="quantize with the built C library, or in numpy; the bytes are the same (default: C if it is built)",
    )  # fmt: skip


def _add_calibrate(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--layerwise", "--calibrate", dest="calibrate", type=text_of, nargs="*", metavar="TEXT",
        help="quantize layer by layer, each on the inputs that the quantized layers before it give: the best for one "
        f"file, take it where there is torch and time, else --statistics or --imatrix; {TEXTS} "
        "(default: bundled)",
    )  # fmt: skip
    group.add_argument(
        "--fisher", action="store_true", help="make up for errors across rows too; needs a backward pass of the model"
    )
    group.add_argument(
        "--fisher-block", type=positive, metavar="ROWS",
        help="keep blocks of so many rows of the matrices it takes (default: whole ones up to 8192 rows)",
    )  # fmt: skip
    add_run_arguments(group, FULL_COLUMNS_AT_ONCE)


def _add_ternary(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--ternary", choices=TERNARY_MODES, default=ConvertOptions.ternary,
        help="matrices that are ternary after a scale go to a ternary type without loss; force ternarizes the other "
        "matrices of the layers, as latent weights need (default: %(default)s)",
    )  # fmt: skip
    group.add_argument(
        "--ternary-type", choices=TERNARY_TYPES, default=ConvertOptions.ternary_type, help="default: %(default)s"
    )
    group.add_argument(
        "--ternary-scale", choices=tuple(SCALES), default=ConvertOptions.ternary_scale,
        help="of --ternary force: mean|W| as in training, least error, or max|W| (default: %(default)s)",
    )  # fmt: skip


def _add_model(group: argparse._ArgumentGroup) -> None:
    part = group.add_mutually_exclusive_group()
    part.add_argument(
        "--mmproj", action="store_true", help="the projector of a multimodal model alone; --outtype auto by default"
    )
    part.add_argument("--mtp", action="store_true", help="the layers that predict several tokens alone, for a draft")
    part.add_argument(
        "--no-nextn", "--no-mtp", dest="no_nextn", action="store_true", help="everything but these layers"
    )
    group.add_argument("--vocab-only", action="store_true", help="metadata and tokenizer alone")
    group.add_argument("--fuse-qkv", action="store_true", help="one matrix of each layer's q, k and v")
    group.add_argument(
        "--fuse-gate-up-exps", action="store_true", help="one matrix of each layer's gate and up experts"
    )
    group.add_argument("--fp8-as-q8", action="store_true", help="weights in 8-bit floats become Q8_0 in an F16 file")
    group.add_argument(
        "--sentence-transformers-dense-modules", action="store_true", help="the dense layers of an embedding model too"
    )
    group.add_argument(
        "--target-model-dir", type=Path, metavar="DIR", help="the model that a draft model (EAGLE-3, DFlash) is for"
    )
    group.add_argument("--remote", action="store_true", help="model_dir is organisation/name on the hub, as after hf:")
    group.add_argument("--no-lazy", action="store_true", help="compute all tensors before any is written")
    trust.add_argument(group)


def _add_metadata(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--model-name", metavar="NAME", help="general.name in the file")
    group.add_argument("--quantized-by", metavar="NAME", help="general.quantized_by in the file")
    group.add_argument(
        "--metadata", type=Path, metavar="FILE", help="JSON with keys such as general.author, over the model card's"
    )


def add_parser(subparsers: Any) -> None:
    """Add the subcommand ``convert``."""
    add_arguments(subparsers.add_parser("convert", help="Hugging Face checkpoint to GGUF", description=DESCRIPTION))


def run(args: argparse.Namespace) -> int:
    """Run the command; returns the exit code."""
    if args.print_supported_models:
        print(converter.supported_models())
        return 0
    if args.model is None:
        args.parser.error("the following arguments are required: model_dir")
    if args.out and args.outfile:
        args.parser.error("argument --outfile: not allowed with out.gguf")
    started = time.monotonic()
    options = _options(args)
    with joined(options.out or options.model, options.run.device, sys.stderr) as (ranks, messages):
        done = convert_together(options, messages, ranks)
    if done is None:
        return 0
    print(describe(done))
    verb = "would write" if args.dry_run else "wrote"
    print(f"{verb} {done.path}: {report.size(done.size)}, {time.monotonic() - started:.1f} s")
    return 0


def _options(args: argparse.Namespace) -> ConvertOptions:
    """What the arguments ask for; a model of the hub is downloaded."""
    values = {key: value for key, value in vars(args).items() if key not in _COMMAND}
    values |= {key: tuple(value) for key, value in values.items() if isinstance(value, list)}
    values["tensor_types"] = tuple(args.tensor_type)
    if args.calibrate:
        values["calibrate"], values["shares"] = zip(*args.calibrate, strict=True)
    if args.outfile and args.outfile.is_dir():
        values["folder"] = args.outfile
    elif args.outfile:
        values["out"] = args.outfile
    name = str(args.model)
    if args.remote or name.startswith("hf:"):
        repository = name.removeprefix("hf:")
        values["repository"] = repository.partition("@")[0]
        values["model"] = download(repository, trust_remote_code=args.trust_remote_code)
    else:
        values["model"] = Path(name)
    return ConvertOptions.of(**values)


def describe(done: Conversion) -> str:
    """The tables of a conversion: every tensor of a dry run, then the types."""
    parts = [f"{report.by_type(done.rows)}\nchecked: {done.check}"] if done.rows else []
    if done.shapes:
        lines = [
            [row.name, "x".join(map(str, reversed(shape))), row.type, report.size(row.bytes)]
            for row, shape in zip(done.rows, done.shapes, strict=True)
        ]
        parts.insert(0, report.table(["tensor", "shape", "type", "size"], lines) + "\n")
    if done.plan is not None:
        parts.insert(0, done.plan.describe(curve=bool(done.shapes)) + "\n")
    return "\n".join(parts)

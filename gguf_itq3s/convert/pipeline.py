"""Convert a Hugging Face checkpoint to a GGUF file: the command ``convert-hf-to-itq3s`` and its Python form."""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    import numpy as np
    from gguf import GGUFWriter

    from ..checkpoint.fold import Folding
    from ..checkpoint.policy import Choice
    from ..checkpoint.reader import Checkpoint, SourceTensor
    from ..report import Row
    from ..rounding.factors import Factors
    from ..rounding.hessian import Factor
    from .encode import Encoder
    from .ternary import Ternaries

DESCRIPTION: Final = "Convert a Hugging Face checkpoint to GGUF with ITQ3_S, TQ1_0, TQ2_0 or F16 tensors."
OUTTYPES: Final = ("itq3_s", "tq1_0", "tq2_0", "f16")
FORMAT_VERSION: Final = 1


@dataclass(frozen=True)
class Options:
    """What to convert and how; the fields are the options of the command.

    Attributes:
        model: a local Hugging Face folder.
        out: the GGUF file to write.
        outtype: one of :data:`OUTTYPES`.
        pure: every matrix in that type, embeddings and output too.
        codec: of ITQ3_S, ``trellis`` or ``ternary``.
        effort: of ITQ3_S, ``fast`` or ``default``.
        threads: threads that quantize.
        native: quantize with the built C library (True), in numpy (False), or with what is there (None).
        ternary: ``auto`` (ternary matrices to ``ternary_type``), ``force`` (ternarize the others too) or ``off``.
        ternary_type: ``tq2_0`` or ``tq1_0``.
        ternary_scale: of ``force``, a key of ``ternary.SCALES``.
        dry_run: print the plan and write nothing.
        model_name: ``general.name`` in the file.
        verbose: show what llama.cpp's converter logs.
        fold_norms: multiply norm gains into the matrices that read them; None: yes for ITQ3_S, else no.
        calibration: folder of ``gguf-itq3s calibrate``; ITQ3_S tensors are rounded with its Hessians.
        imatrix: importance matrix of llama-imatrix, the same with diagonal ones.
        damping: of the Hessians, share of the mean diagonal.
        segment: columns that the calibrated search commits at a time.
        lookahead: columns it searches past them before.
        token_embedding_type: type of the token embedding, by its GGUF name, instead of the mix's.
        output_tensor_type: the same for the output matrix.
    """

    model: Path
    out: Path
    outtype: str = "itq3_s"
    pure: bool = False
    codec: str = "trellis"
    effort: str = "default"
    threads: int = 1
    native: bool | None = None
    ternary: str = "auto"
    ternary_type: str = "tq2_0"
    ternary_scale: str = "absmean"
    dry_run: bool = False
    model_name: str | None = None
    verbose: bool = False
    fold_norms: bool | None = None
    calibration: Path | None = None
    imatrix: Path | None = None
    damping: float | None = None
    segment: int | None = None
    lookahead: int | None = None
    token_embedding_type: str | None = None
    output_tensor_type: str | None = None

    @property
    def folds(self) -> bool:
        """Whether norms are folded."""
        return self.outtype == "itq3_s" if self.fold_norms is None else self.fold_norms


def convert(options: Options) -> list[Row]:
    """Convert a checkpoint.

    Returns:
        One row for every tensor of the file.

    Raises:
        UserError: the checkpoint cannot be read or the file cannot be written; nothing is left under its name.
        KeyboardInterrupt: interrupted; the message says whether the same call continues.
    """
    from .. import report
    from ..checkpoint.reader import open_checkpoint
    from .output import OutputFile

    started = time.monotonic()
    encoder = _encoder(options)
    checkpoint = open_checkpoint(options.model, model_name=options.model_name, verbose=options.verbose)
    ternaries = _find_ternaries(checkpoint, options)
    checkpoint, folding, factors = _prepare(checkpoint, options, ternaries)
    choices = ternaries.choose(checkpoint.tensors, _choose(checkpoint, options, encoder))
    _warn(checkpoint, choices, encoder)
    _warn_unknown(checkpoint, choices, factors)
    header, sizes = _header(checkpoint, choices, options, folding, ternaries)
    rows = [
        report.Row(tensor.name, choice.type.name, tensor.size, size)
        for tensor, choice, size in zip(checkpoint.tensors, choices, sizes, strict=True)
    ]
    output = OutputFile(options.out, header, sizes, _fingerprint(header, options, checkpoint))
    if options.dry_run:
        _print_plan(checkpoint, rows)
    else:
        with output:
            rows = _write(output, checkpoint, rows, choices, encoder, factors)
    print(report.by_type(rows))
    verb = "would write" if options.dry_run else "wrote"
    print(f"{verb} {options.out}: {report.size(output.size)}, {time.monotonic() - started:.1f} s")
    return rows


def _prepare(
    checkpoint: Checkpoint, options: Options, ternaries: Ternaries
) -> tuple[Checkpoint, Folding, Factors | None]:
    """Ternarize, fold norms and open the statistics, as far as the options ask for it."""
    from dataclasses import replace

    import numpy as np

    from ..calibration import store
    from ..checkpoint import fold
    from ..errors import UserError
    from ..rounding import hessian, imatrix
    from ..rounding.factors import Factors

    statistics = options.calibration or options.imatrix
    if options.calibration and options.imatrix:
        raise UserError(options.imatrix, "is given beside a calibration", "give --calibration or --imatrix, not both")
    if statistics and (options.outtype != "itq3_s" or options.codec != "trellis"):
        what = "is for the trellis code of ITQ3_S"
        raise UserError(statistics, what, "leave it out, or leave --outtype and --codec as they are by default")
    if options.folds and options.outtype in ("tq1_0", "tq2_0"):
        what = "would not stay ternary with its norms folded"
        raise UserError(options.model, what, "leave --fold-norms out")

    checkpoint = replace(checkpoint, tensors=ternaries.load(checkpoint.tensors))
    by_name = {tensor.name: tensor for tensor in checkpoint.tensors}
    folding = fold.Folding()
    if options.folds:
        floats = frozenset(name for name, tensor in by_name.items() if tensor.stored.name in ("F32", "F16", "BF16"))
        # With its norm folded, a ternary matrix would have more than three values.
        foldable = [name for name in by_name if name not in ternaries.norms]
        folding = fold.plan(checkpoint.model.arch, foldable, floats.__contains__)
        if folding.left_alone:
            lines = "\n".join(f"  {line}" for line in folding.left_alone)
            print(f"note: norms that are not folded:\n{lines}", file=sys.stderr)

    def gain(norm: str) -> np.ndarray:
        return np.concatenate([np.asarray(part, dtype=np.float32).reshape(-1) for part in by_name[norm].load()])

    factors = None
    if statistics:
        source = (
            store.open_calibration(options.calibration, checkpoint.files)
            if options.calibration
            else imatrix.read(statistics)
        )
        factors = Factors(source, folding, gain, hessian.DAMPING if options.damping is None else options.damping)
    tensors = fold.apply(checkpoint.tensors, folding, str(checkpoint.folder))
    return replace(checkpoint, tensors=tensors), folding, factors


def _encoder(options: Options) -> Encoder:
    from ..codec import native
    from ..errors import UserError
    from ..rounding import ldlq
    from .encode import Encoder

    changed = {key: getattr(options, key) for key in ("segment", "lookahead") if getattr(options, key) is not None}
    try:
        search = ldlq.Search(effort=options.effort, **changed)
        if options.damping is not None and not options.damping > 0:
            raise ValueError(f"damping {options.damping}: it must be more than 0")
    except ValueError as error:
        raise UserError(options.calibration or options.model, str(error), "change the option") from error
    try:
        library = native.load()
    except OSError as error:
        if options.native:
            path = native.library_path() or Path(native.library_name())
            raise UserError(path, f"cannot be loaded: {error}", "run make build, or leave --native out") from error
        print(f"warning: the C quantizer cannot be used: {error}", file=sys.stderr)
        library = None
    if options.native and library is None:
        raise UserError(native.library_name(), "is not built", "run make build, or leave --native out")
    return Encoder(
        options.effort, options.codec, max(1, options.threads), search, library, native=options.native is not False
    )


def _choose(checkpoint: Checkpoint, options: Options, encoder: Encoder) -> list[Choice]:
    from gguf import GGMLQuantizationType

    from ..checkpoint import policy
    from ..errors import UserError

    target = GGMLQuantizationType[options.outtype.upper()]
    choices = [
        policy.choose(
            tensor.name, tensor.shape, tensor.stored, target, checkpoint.model,
            pure=options.pure, writable=encoder.writable,
        )
        for tensor in checkpoint.tensors
    ]  # fmt: skip
    own = {"token_embd.weight": options.token_embedding_type, "output.weight": options.output_tensor_type}
    for number, tensor in enumerate(checkpoint.tensors):
        if name := own.get(tensor.name):
            wanted = GGMLQuantizationType[name.upper()]
            if encoder.writable is not None and wanted not in encoder.writable:
                raise UserError(options.model, f"{wanted.name} needs the built library", "run make build", tensor.label)
            choices[number] = policy.Choice(policy.fit(wanted, tensor.shape[-1]), wanted)
    return choices


def _find_ternaries(checkpoint: Checkpoint, options: Options) -> Ternaries:
    """The matrices that are, or are to be made, ternary; none in an F16 file, which holds them as they are."""
    from gguf import GGMLQuantizationType

    from . import ternary

    name = options.outtype if options.outtype in ternary.TYPES else options.ternary_type
    qtype, mode = GGMLQuantizationType[name.upper()], "off" if options.outtype == "f16" else options.ternary
    own = {"token_embd.weight": options.token_embedding_type, "output.weight": options.output_tensor_type}
    tensors = [tensor for tensor in checkpoint.tensors if not own.get(tensor.name)]  # a type that was asked for stays
    return ternary.find(tensors, mode, qtype, options.ternary_scale, checkpoint.model.arch)


def _warn(checkpoint: Checkpoint, choices: list[Choice], encoder: Encoder) -> None:
    """One warning for the rows that are not whole blocks, one notice for types that need the built library."""
    from ..checkpoint.policy import fit

    odd, unwritable = [], set()
    for tensor, choice in zip(checkpoint.tensors, choices, strict=True):
        fitted = fit(choice.wanted, tensor.shape[-1])
        if fitted != choice.wanted:
            odd.append(f"  {tensor.name}: {tensor.shape[-1]} columns, {choice.wanted.name} -> {choice.type.name}")
        if encoder.writable is not None and fitted not in encoder.writable:
            unwritable.add(f"{fitted.name} -> {choice.type.name}")
    if odd:
        lines = "\n".join(odd)
        print(
            f"warning: rows of {len(odd)} tensors are not whole blocks, another type is used:\n{lines}", file=sys.stderr
        )
    if unwritable:
        print(f"note: without the built library: {', '.join(sorted(unwritable))}; make build adds it", file=sys.stderr)


def _warn_unknown(checkpoint: Checkpoint, choices: list[Choice], factors: Factors | None) -> None:
    """One warning for the tensors that there are no statistics of."""
    from ..codec.types import ITQ3_S

    if factors is None:
        return
    # Rows of the embedding are looked up, not multiplied.
    unknown = [
        f"  {tensor.name}"
        for tensor, choice in zip(checkpoint.tensors, choices, strict=True)
        if choice.type == ITQ3_S and tensor.name != "token_embd.weight" and not factors.known(tensor.name)
    ]
    if unknown:
        lines = "\n".join(unknown)
        print(
            f"warning: {factors.path} has nothing on {len(unknown)} tensors, they are rounded without:\n{lines}",
            file=sys.stderr,
        )


def _header(
    checkpoint: Checkpoint, choices: list[Choice], options: Options, folding: Folding, ternaries: Ternaries
) -> tuple[bytes, list[int]]:
    """GGUF header, metadata and tensor infos as bytes, and the size of each tensor."""
    import numpy as np
    from gguf import GGML_QUANT_SIZES
    from gguf.gguf_writer import WriterState

    from ..codec.types import ITQ3_S

    writer = checkpoint.writer
    _set_metadata(writer, _file_type(checkpoint, choices, options), choices, options, folding, ITQ3_S)
    if ternaries.mode:
        writer.add_string("itq3s.ternary", ternaries.mode)
    writer.tensors = [{}]
    sizes = []
    for tensor, choice in zip(checkpoint.tensors, choices, strict=True):
        block, block_bytes = GGML_QUANT_SIZES[choice.type]
        sizes.append(tensor.size // block * block_bytes)
        writer.add_tensor_info(tensor.name, tensor.shape, np.dtype(np.float32), sizes[-1], raw_dtype=choice.type)
    buffer = io.BytesIO()
    writer.fout, writer.state = [buffer], WriterState.EMPTY
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    return buffer.getvalue(), sizes


def _file_type(checkpoint: Checkpoint, choices: list[Choice], options: Options) -> int:
    """``general.file_type``: of the output type, or of the ternary type that most matrices were found to be."""
    from collections import Counter

    from gguf import LlamaFileType

    from .ternary import TYPES

    weights: Counter[str] = Counter()
    for tensor, choice in zip(checkpoint.tensors, choices, strict=True):
        weights[choice.type.name.lower()] += tensor.size
    ternary = max(TYPES, key=lambda name: weights[name])
    name = ternary if weights[ternary] > weights[options.outtype] else options.outtype
    return LlamaFileType[f"MOSTLY_{name.upper()}"]


def _set_metadata(
    writer: GGUFWriter, file_type: int, choices: list[Choice], options: Options, folding: Folding, itq3_s: Any
) -> None:
    if options.outtype != "f16":  # what upstream wrote for an F16 file stands
        writer.remove_key("general.file_type")
        writer.add_file_type(file_type)
    if any(choice.type == itq3_s for choice in choices):
        writer.add_uint32("itq3s.version", FORMAT_VERSION)
        writer.add_string("itq3s.codec", options.codec)
        writer.add_string("itq3s.effort", options.effort)
        writer.add_bool("itq3s.calibrated", bool(options.calibration or options.imatrix))
        writer.add_bool("itq3s.norms_folded", bool(folding.norms))


def _fingerprint(header: bytes, options: Options, checkpoint: Checkpoint) -> str:
    """Equal for two runs that would write the same bytes."""
    from .. import __version__

    files = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in checkpoint.files]
    how: list[Any] = [__version__, options.codec, options.effort, options.folds, files]
    how += [
        options.token_embedding_type,
        options.output_tensor_type,
        options.damping,
        options.segment,
        options.lookahead,
    ]
    how += [options.ternary, options.ternary_scale]
    if options.calibration:
        how.append((options.calibration / "manifest.json").read_text())
    if options.imatrix:
        how.append(hashlib.sha256(options.imatrix.read_bytes()).hexdigest())
    return hashlib.sha256(header + json.dumps(how).encode()).hexdigest()


def _print_plan(checkpoint: Checkpoint, rows: list[Row]) -> None:
    from .. import report

    lines = [
        [row.name, "x".join(map(str, reversed(tensor.shape))), row.type, report.size(row.bytes)]
        for row, tensor in zip(rows, checkpoint.tensors, strict=True)
    ]
    print(report.table(["tensor", "shape", "type", "size"], lines), end="\n\n")


def _write(
    output: Any,
    checkpoint: Checkpoint,
    rows: list[Row],
    choices: list[Choice],
    encoder: Encoder,
    factors: Factors | None,
) -> list[Row]:
    """Write every tensor that is not there yet; returns the rows with their errors."""
    from dataclasses import replace

    from tqdm import tqdm

    from .encode import Error

    done = len(output.records)
    if done:
        print(f"continuing after {done} of {len(rows)} tensors", file=sys.stderr)
    total = sum(row.weights for row in rows)
    finished = sum(row.weights for row in rows[:done])
    with tqdm(total=total, initial=finished, unit=" weights", unit_scale=True, mininterval=0.5) as bar:
        for tensor, choice in list(zip(checkpoint.tensors, choices, strict=True))[done:]:
            error = Error()
            bar.set_postfix_str(tensor.name, refresh=False)
            pieces = _pieces(tensor, choice, encoder, factors, error, checkpoint.folder, bar)
            output.write(pieces, lambda name=tensor.name, error=error: {"name": name, "error": error.relative})
    return [replace(row, error=record["error"]) for row, record in zip(rows, output.records, strict=True)]


def _pieces(
    tensor: SourceTensor,
    choice: Choice,
    encoder: Encoder,
    factors: Factors | None,
    error: Any,
    folder: Path,
    bar: Any,
) -> Iterator[np.ndarray]:
    """The bytes of one tensor; errors name it."""
    from ..codec.types import ITQ3_S
    from ..errors import UserError

    of_matrix = None
    if factors is not None and choice.type == ITQ3_S and factors.known(tensor.name):
        source = factors

        def of_matrix(number: int) -> Factor | None:
            return source.factor(tensor.name, tensor.shape, number)

    left = tensor.size
    try:
        for data, weights in encoder.encode(tensor.load(), tensor.size, choice.type, error, of_matrix):
            yield data
            bar.update(weights)
            left -= weights
        bar.update(left)
    except ValueError as problem:
        remedy = "repair the checkpoint or download it again"
        raise UserError(folder, str(problem), remedy, tensor.label) from problem


# ------------------------------------------------------------------------------------------------ command line


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command, on any parser."""
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    parser.add_argument("model", metavar="model_dir", help="Hugging Face folder, or hf:organisation/name to download")
    parser.add_argument("out", metavar="out.gguf", type=Path, help="file to write; {ftype} becomes the output type")
    parser.add_argument(
        "--outtype", choices=OUTTYPES, default="itq3_s", help="type of the matrices (default: %(default)s)"
    )
    parser.add_argument("--pure", action="store_true", help="every matrix in that type, embeddings and output too")
    types = ("f32", "f16", "q8_0", "q6_k", "q5_k", "q4_k", "itq3_s", "tq2_0", "tq1_0")
    parser.add_argument("--token-embedding-type", choices=types, help="of the token embedding, instead of the mix's")
    parser.add_argument("--output-tensor-type", choices=types, help="of the output matrix, instead of the mix's")
    parser.add_argument(
        "--codec", choices=("trellis", "ternary"), default="trellis",
        help="of ITQ3_S; ternary is the literal code of the paper, for comparison (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--effort", choices=("fast", "default"), default="default",
        help="of ITQ3_S: start scales the search tries (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--fold-norms", action=argparse.BooleanOptionalAction, default=None,
        help="multiply norm gains into the matrices that read them, exact (default: for ITQ3_S)",
    )  # fmt: skip
    parser.add_argument(
        "--calibration", type=Path, metavar="DIR", help="what gguf-itq3s calibrate wrote; rounds ITQ3_S by its Hessians"
    )
    parser.add_argument("--imatrix", type=Path, metavar="FILE", help="what llama-imatrix wrote (GGUF), for the same")
    parser.add_argument("--damping", type=float, metavar="X", help="of the Hessians, share of the mean diagonal")
    parser.add_argument("--segment", type=int, metavar="N", help="columns the calibrated search commits at a time")
    parser.add_argument("--lookahead", type=int, metavar="N", help="columns it searches past them before")
    parser.add_argument("--threads", type=int, default=cpus, metavar="N", help="default: %(default)s")
    parser.add_argument(
        "--native", action=argparse.BooleanOptionalAction, default=None,
        help="quantize with the built C library, or in numpy; the bytes are the same (default: C if it is built)",
    )  # fmt: skip
    parser.add_argument(
        "--ternary", choices=("auto", "force", "off"), default="auto",
        help="matrices that are ternary after a scale go to a ternary type without loss; force ternarizes the other "
        "matrices of the layers, as latent weights need (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument("--ternary-type", choices=("tq2_0", "tq1_0"), default="tq2_0", help="default: %(default)s")
    parser.add_argument(
        "--ternary-scale", choices=("absmean", "optimal", "maxabs"), default="absmean",
        help="of --ternary force: mean|W| as in training, least error, or max|W| (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument("--dry-run", action="store_true", help="print each tensor's type and size, write nothing")
    parser.add_argument("--model-name", metavar="NAME", help="general.name in the file")
    parser.add_argument("--verbose", action="store_true", help="show what llama.cpp's converter logs")


def add_parser(subparsers: Any) -> None:
    """Add the subcommand ``convert``."""
    parser = subparsers.add_parser("convert", help="Hugging Face checkpoint to GGUF", description=DESCRIPTION)
    add_arguments(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run the command; returns the exit code."""
    from ..checkpoint.reader import download

    values = {key: value for key, value in vars(args).items() if key in Options.__dataclass_fields__}
    name = str(values["model"])
    values["model"] = download(name.removeprefix("hf:")) if name.startswith("hf:") else Path(name)
    values["out"] = args.out.with_name(args.out.name.replace("{ftype}", args.outtype.upper()))
    convert(Options(**values))
    return 0

"""Options that contradict each other, outputs that cannot be written, files that nothing could load: found before the
work."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, get_type_hints

import gguf

from ..base.errors import UserError
from ..checkpoint import loadable
from ..checkpoint.files import check_output
from ..checkpoint.validation import read_json
from ..codec.family import FAMILY
from .job import Job
from .naming import is_template
from .options import PLAIN_OUTTYPES, TERNARY_TYPES, TRELLIS_OUTTYPES, ConvertOptions
from .output import check_place, size_of

_TRELLIS: Final = " or ".join(TRELLIS_OUTTYPES)
_CALIBRATED: Final = "the trellis code and llama.cpp's own quantized types"


def check(options: ConvertOptions) -> None:
    """Refuse a conversion that cannot be.

    Raises:
        UserError: options contradict each other, or the output is an input or cannot be written.
    """
    _check_kind(options)
    _check_statistics(options)
    _check_layerwise(options)
    _check_budget(options)
    _check_rescaling(options)
    out = options.out
    check_file(options, out if out and not is_template(out) else None)


def check_file(options: ConvertOptions, out: Path | None) -> None:
    """Refuse an output that is an input or cannot be written; without a name, its folder is looked at."""
    if out is not None:
        check_output(out, (options.model, options.calibration, options.imatrix, options.request.metadata))
    if options.dry_run:
        return
    named = options.out.parent if options.out else options.folder
    folder = named or (Path() if options.request.repository else options.model)
    if out is not None or folder != options.model or folder.is_dir():  # that it is not there is said by the reader
        check_place(out or folder / ".gguf")


def check_loadable(job: Job, head: bytes) -> str:
    """Refuse a checkpoint that llama.cpp could not load once it is converted; returns which check was made, a sentence.

    Raises:
        UserError: it cannot.
    """
    request, checkpoint = job.options.request, job.checkpoint
    if request.mmproj or request.mtp or request.vocab_only or request.target_model_dir:
        return "not loaded: it is only a part of a model"
    shapes = {tensor.name: tensor.shape for tensor in checkpoint.tensors}
    size = size_of(head, [row.bytes for row in job.rows()])
    tied = loadable.may_be_tied(checkpoint.folder, checkpoint.model.arch)
    metadata = {key: entry.value for part in checkpoint.writer.kv_data for key, entry in part.items()}
    try:
        return loadable.check_head(head, size, shapes, metadata, tied=tied)
    except loadable.NotLoadableError as problem:
        label = next((tensor.label for tensor in checkpoint.tensors if tensor.name == problem.tensor), None)
        remedy = "repair the checkpoint or download it again"
        raise UserError(checkpoint.folder, str(problem), remedy, label or problem.tensor) from problem


def _check_kind(options: ConvertOptions) -> None:
    """Refuse what does not go with the kind of file."""
    outtype, request = options.outtype, options.request
    if (request.mmproj or request.vocab_only) and not options.plain:
        what = "a vocabulary has no tensors" if request.vocab_only else "a projector is small, its rows seldom fit"
        remedy = f"leave --outtype out, or take one of {', '.join(PLAIN_OUTTYPES)}"
        raise UserError(options.model, f"cannot be written as {outtype}: {what}", remedy)
    by_quantize = {"--tensor-type": options.tensor_types, "--leave-output-tensor": options.leave_output_tensor}
    if options.plain and (given := [name for name, value in by_quantize.items() if value]):
        what = f"{given[0]} is for quantized files, and {outtype} is what llama.cpp's converter writes"
        raise UserError(options.model, what, f"leave {given[0]} out, or take --outtype {_TRELLIS}")
    _check_codec(options)
    if request.fp8_as_q8 and outtype not in ("f16", "bf16", "auto"):
        remedy = "take --outtype auto, f16 or bf16, or leave it out"
        raise UserError(options.model, f"--fp8-as-q8 has no meaning for {outtype}", remedy)
    if request.vocab_only and (request.mmproj or request.mtp):
        raise UserError(options.model, "is asked for its vocabulary and more", "give --vocab-only alone")
    if request.metadata:
        check_metadata(request.metadata)


def _check_codec(options: ConvertOptions) -> None:
    """Refuse a codec that a trellis type of the file has not."""
    given = options.token_embedding_type, options.output_tensor_type, *(name for _, name in options.tensor_types)
    for row in FAMILY.values():
        if row.identifier in (options.outtype, *given) and options.codec not in row.format.codecs:
            what = f"{row.name} has no codec {options.codec}"
            raise UserError(options.model, what, "leave --codec out, or take another type")


def _check_statistics(options: ConvertOptions) -> None:
    """Refuse statistics that are of no use."""
    filters = bool(options.include_weights), bool(options.exclude_weights)
    if all(filters) or (any(filters) and not options.imatrix):
        what = "--include-weights and --exclude-weights are for an importance matrix"
        raise UserError(options.imatrix or options.model, what, "give one of them, beside --imatrix")
    if options.calibration and options.imatrix:
        raise UserError(options.imatrix, "is given beside a calibration", "give --calibration or --imatrix, not both")
    if options.statistics and not _can_calibrate(options) and not options.equalize:
        raise UserError(options.statistics, f"is for {_CALIBRATED}", "leave it out, or change --outtype or --codec")


def _check_layerwise(options: ConvertOptions) -> None:
    """Refuse what does not go with quantizing layer by layer."""
    request = options.request
    if options.fisher_block and not options.fisher:
        raise UserError(options.model, "--fisher-block is for --fisher", "give --fisher, or leave it out")
    if not options.calibrate:
        if options.fisher:
            raise UserError(options.model, "--fisher is for --calibrate", "give --calibrate, or leave it out")
        return
    others = {
        "--calibration": options.calibration, "--imatrix": options.imatrix, "--fuse-qkv": request.fuse_qkv,
        "--fuse-gate-up-exps": request.fuse_gate_up_exps, "--mtp": request.mtp, "--mmproj": request.mmproj,
        "--vocab-only": request.vocab_only,
    }  # fmt: skip
    if named := [name for name, value in others.items() if value]:
        raise UserError(options.model, f"{named[0]} does not go with --calibrate", "give one of them")
    if not _can_calibrate(options):
        what = f"--calibrate is for {_CALIBRATED}"
        raise UserError(options.model, what, "leave it out, or change --outtype or --codec")


def _can_calibrate(options: ConvertOptions) -> bool:
    """Whether the type of the file is one that is rounded with statistics."""
    return options.stock is not None or (options.trellis and options.codec == "trellis")


def _check_budget(options: ConvertOptions) -> None:
    """Refuse what does not go with types for a size."""
    if not options.budgeted:
        return
    name = "--target-bpw" if options.target_size is None else "--target-size"
    if options.target_bpw is not None and options.target_size is not None:
        raise UserError(options.model, "--target-bpw and --target-size are both given", "give one of them")
    if options.pure:
        raise UserError(options.model, f"--pure has one type, and {name} chooses among them", "give one of them")
    if not options.trellis:
        what = f"{name} chooses the types, and --outtype {options.outtype} names one"
        raise UserError(options.model, what, "leave --outtype out")
    if not options.calibrated:
        what = f"{name} needs to know the inputs of the matrices"
        raise UserError(options.model, what, "give --calibrate, --calibration or --imatrix")


def _check_rescaling(options: ConvertOptions) -> None:
    """Refuse rescalings that exclude each other."""
    rescales = {"--fold-norms": options.fold_norms, "--equalize": options.equalize}
    if given := [name for name, value in rescales.items() if value]:
        if len(given) > 1:
            what = "cannot be folded and equalized: folding is another choice of the same factors"
            raise UserError(options.model, what, "give --fold-norms or --equalize")
        if options.outtype in TERNARY_TYPES:
            raise UserError(options.model, "would not stay ternary with its channels rescaled", f"leave {given[0]} out")


def check_metadata(path: Path) -> None:
    """Refuse a file of ``--metadata`` that upstream would pass over, or stumble on after the work.

    Raises:
        UserError: it is not there, is no JSON object, or has a key that is not read or a value of another kind.
    """
    if not path.is_file():
        raise UserError(path, "no such file", "give a JSON file with keys such as general.author")
    kinds = {f"general.{name}": kind for name, kind in get_type_hints(gguf.Metadata).items()}
    for key, value in read_json(path).items():
        kind = kinds.get("general." + key.removeprefix("general.").replace(".", "_"))
        if kind is None or not key.startswith("general.") or key == "general.license":
            what, remedy = f"has the key {key!r:.80}, which is not read", "take it out, or correct it"
            raise UserError(path, what, remedy)
        found, fits = _KINDS[kind]
        if not fits(value):
            raise UserError(path, f"has {key} {value!r:.80}, which is not {found}", "correct it")


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _is_list(value: Any, kind: type) -> bool:
    return isinstance(value, list) and all(isinstance(entry, kind) for entry in value)


#: Kind of a field of upstream's metadata -> what a value of it is called, whether a value is one.
_KINDS: Final[dict[Any, tuple[str, Callable[[Any], bool]]]] = {
    str | None: ("a text", lambda value: isinstance(value, str)),
    int | None: ("a number", _is_number),
    float | None: ("a number", _is_number),
    list[str] | None: ("a list of texts", lambda value: _is_list(value, str)),
    list[dict] | None: (
        "a list of objects with texts",
        lambda value: _is_list(value, dict) and all(_is_list([*entry.values()], str) for entry in value),
    ),
}

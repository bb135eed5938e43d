"""The way of a checkpoint to a GGUF file: read, choose types, rescale, write tensor by tensor."""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, Final, TextIO

import numpy as np
from gguf import GGMLQuantizationType
from tqdm import tqdm

from ..calibration import energies, store
from ..calibration.options import FULL_COLUMNS_AT_ONCE, CalibrationOptions
from ..calibration.text import BUNDLED
from ..checkpoint import loadable, policy, rescaling
from ..checkpoint.channels import ARCHITECTURES
from ..checkpoint.files import check_output
from ..checkpoint.policy import Choice
from ..checkpoint.reading import Checkpoint, SourceTensor, open_checkpoint
from ..checkpoint.rescaling import Rescaling
from ..checkpoint.stock import F16File, f16_file
from ..codec import native
from ..codec.transform import BLOCK
from ..codec.types import ITQ3_S
from ..errors import UserError, output_error
from ..report import TensorRow
from ..rounding import imatrix, ldlq
from ..rounding.factors import HessianFactors, Inputs, Statistics
from ..rounding.hessian import Factor
from . import bits, equalize, overrides, prune, ternary
from .bits import Budget, Plan
from .encode import CALIBRATED_TYPES, Encoder, SquaredError
from .header import describe, file_type, fingerprint, header, render, set_share
from .metadata import check_metadata
from .naming import is_template, output_path, part_paths
from .options import PLAIN_OUTTYPES, TERNARY_TYPES, ConvertOptions
from .output import Output, Part, check_place, padded
from .sequential import Finished, Sequential, SequentialOptions
from .ternary import Ternaries

_CALIBRATED: Final = "the trellis code of ITQ3_S and llama.cpp's own quantized types"


@dataclass(frozen=True)
class Conversion:
    """What a conversion has written, or would write.

    Attributes:
        rows: one for every tensor of the file.
        size: bytes of all its parts.
        check: how it was found out that llama.cpp can load the file, a sentence.
        parts: the files, one unless it is split.
        shapes: of a dry run, the shape of every tensor, rows last; else empty.
        plan: how types were chosen for a size; None where the mix says them.
    """

    rows: list[TensorRow]
    size: int
    check: str
    parts: Sequence[Part]
    shapes: Sequence[tuple[int, ...]] = ()
    plan: Plan | None = None


def convert(options: ConvertOptions, messages: TextIO | None = None) -> Conversion:
    """Convert a checkpoint.

    Args:
        options: what and how.
        messages: where warnings and progress go; None for stderr.

    Returns:
        What was written.

    Raises:
        UserError: the checkpoint cannot be read or the file cannot be written; nothing is left under its name.
        KeyboardInterrupt: interrupted; the message says whether the same call continues.
    """
    messages = messages or sys.stderr
    _check(options)
    _check_output(options, options.out if options.out and not is_template(options.out) else None)
    encoder = _encoder(options, messages)
    checkpoint = open_checkpoint(
        options.model, model_name=options.model_name, verbose=options.verbose,
        trust_remote_code=options.trust_remote_code, request=options.request,
    )  # fmt: skip
    checkpoint = overrides.apply(checkpoint, options.override_kv)
    whole = checkpoint
    # Of an F16 file of all layers: llama-quantize counts by those too.
    stock = f16_file(checkpoint) if options.mixes_stock else None
    checkpoint, names = prune.prune(checkpoint, options.prune_layers)
    ternaries = _find_ternaries(checkpoint, options, messages)
    plain = checkpoint
    checkpoint = replace(checkpoint, tensors=ternaries.load(checkpoint.tensors))
    choices = ternaries.choose(checkpoint.tensors, _choose(checkpoint, options, encoder, stock))
    statistics = _statistics(checkpoint, options, names)
    # Of types for a size, not named after one that is not known yet.
    work = _work(output_path(options, checkpoint.described, file_type(checkpoint, choices, options)))
    kept = work.exists()
    rescaled = _rescaling(whole, checkpoint, options, ternaries, names, messages)
    factors = _factors(whole, checkpoint, options, rescaled, statistics)
    checkpoint = replace(checkpoint, tensors=rescaled.apply(checkpoint.tensors, checkpoint.folder))
    describe(checkpoint, rescaled)
    plan = None
    if options.budgeted:

        def factors_of(found: Statistics | None) -> HessianFactors | None:
            return factors if found is None else _factors(whole, checkpoint, options, rescaled, found)

        sequential = _sequential(plain, checkpoint, choices, options, rescaled, encoder, messages)
        plan = _plan(checkpoint, choices, options, encoder, factors_of, sequential, work, messages)
        choices = plan.choices
        if options.dry_run and not kept:
            shutil.rmtree(work, ignore_errors=True)
    _warn(checkpoint, choices, encoder, messages)
    if factors is not None:
        _warn_unknown(checkpoint, choices, factors, messages)
    out = output_path(options, checkpoint.described, file_type(checkpoint, choices, options))
    sequential = _sequential(plain, checkpoint, choices, options, rescaled, encoder, messages)
    share = _calibrated_share(checkpoint, choices, factors) if sequential is None else 1.0
    head = header(checkpoint, choices, options, rescaled, ternaries, share, statistics)
    sizes = [tensor.bytes_in(choice.type) for tensor, choice in zip(checkpoint.tensors, choices, strict=True)]
    rows = [
        TensorRow(tensor.name, choice.type.name, tensor.size, size)
        for tensor, choice, size in zip(checkpoint.tensors, choices, sizes, strict=True)
    ]
    left = iter(sizes)
    parts = [
        Part(path, part, tuple(islice(left, count)))
        for path, part, count in zip(part_paths(out, len(head.parts)), head.parts, head.counts, strict=True)
    ]
    for part in parts:
        _check_output(options, part.path)
    check = _check_loadable(checkpoint, head.whole, Part(out, head.whole, tuple(sizes)).size, options)
    finished = None
    if sequential is not None and not options.dry_run:
        finished = sequential.run(work if options.budgeted else _work(out), fingerprint(head, options, checkpoint))
        set_share(checkpoint, _finished_share(checkpoint, choices, finished))
        head = render(checkpoint, choices, options)
        parts = [replace(part, head=own) for part, own in zip(parts, head.parts, strict=True)]
    output = Output(parts, fingerprint(head, options, checkpoint))
    if options.dry_run:
        return Conversion(rows, output.size, check, parts, [tensor.shape for tensor in checkpoint.tensors], plan)
    with output:
        rows = _write(output, checkpoint, rows, choices, encoder, factors, messages, finished)
    if finished is not None:
        finished.remove()
    return Conversion(rows, output.size, check, parts, plan=plan)


def _work(out: Path) -> Path:
    """The folder in which a file is calibrated."""
    return out.with_name(f"{out.name}.calibrating")


def _plan(
    checkpoint: Checkpoint,
    choices: list[Choice],
    options: ConvertOptions,
    encoder: Encoder,
    factors_of: Callable[[Statistics | None], HessianFactors | None],
    sequential: Sequential | None,
    work: Path,
    messages: TextIO,
) -> Plan:
    """Types for the size that is asked for."""
    head = render(checkpoint, choices, options)
    bytes_of_heads = sum(padded(len(part) + bits.MORE_METADATA) for part in head.parts)
    given = frozenset(tensor.name for tensor in checkpoint.tensors if _is_given(tensor, checkpoint, options))
    budget = Budget(checkpoint, choices, options, encoder, given, bytes_of_heads)
    key = fingerprint(head, replace(options, target_bpw=None, target_size=None), checkpoint)
    return bits.choose(budget, checkpoint, factors_of, encoder, sequential, options, work, key, messages)


def _sequential(
    plain: Checkpoint,
    checkpoint: Checkpoint,
    choices: list[Choice],
    options: ConvertOptions,
    rescaled: Rescaling,
    encoder: Encoder,
    messages: TextIO,
) -> Sequential | None:
    """What quantizes layer by layer, if that is asked for; ``plain`` is not rescaled."""
    if options.calibrate is None:
        return None
    if checkpoint.model.arch not in ARCHITECTURES:
        what = f"its architecture, {checkpoint.model.arch}, cannot be calibrated"
        raise UserError(options.model, what, "use an importance matrix of llama-imatrix (--imatrix)")
    calibration = CalibrationOptions(
        options.model, options.calibrate or [BUNDLED], Path(), tokens=options.tokens, context=options.context,
        hessian=options.hessian, device=options.device, batch=options.batch,
        trust_remote_code=options.trust_remote_code, widest=FULL_COLUMNS_AT_ONCE,
    )  # fmt: skip
    rounding = SequentialOptions(
        damping=options.damping,
        fisher=options.fisher,
    )
    if options.fisher_block:
        rounding = replace(rounding, fisher_rows=options.fisher_block, fisher_block=options.fisher_block)
    tensors = {tensor.name: tensor for tensor in checkpoint.tensors}
    types = {tensor.name: choice.type for tensor, choice in zip(checkpoint.tensors, choices, strict=True)}
    return Sequential(calibration, rounding, plain, tensors, types, rescaled, encoder, messages)


def _finished_share(checkpoint: Checkpoint, choices: list[Choice], finished: Finished) -> float:
    """The share of the weights in ITQ3_S that were rounded layer by layer, with statistics."""
    pairs = [(t, c) for t, c in zip(checkpoint.tensors, choices, strict=True) if c.type == ITQ3_S]
    total = sum(tensor.size for tensor, _ in pairs)
    return sum(tensor.size * finished.share(tensor.name) for tensor, _ in pairs) / total if total else 0.0


def _check_output(options: ConvertOptions, out: Path | None) -> None:
    """Refuse an output that is an input or cannot be written; without a name, its folder is looked at."""
    if out is not None:
        check_output(out, (options.model, options.calibration, options.imatrix, options.metadata))
    if options.dry_run:
        return
    folder = options.out.parent if options.out else options.folder or (Path() if options.repository else options.model)
    if out is not None or folder != options.model or folder.is_dir():  # that it is not there is said by the reader
        check_place(out or folder / ".gguf")


def _check_loadable(checkpoint: Checkpoint, head: bytes, size: int, options: ConvertOptions) -> str:
    """Refuse a checkpoint that llama.cpp could not load once it is converted; returns which check was made."""
    if options.mmproj or options.mtp or options.vocab_only or options.target_model_dir:
        return "not loaded: it is only a part of a model"
    shapes = {tensor.name: tensor.shape for tensor in checkpoint.tensors}
    tied = loadable.may_be_tied(checkpoint.folder, checkpoint.model.arch)
    try:
        return loadable.check_head(head, size, shapes, loadable.metadata_of_writer(checkpoint.writer), tied=tied)
    except loadable.NotLoadableError as problem:
        label = next((tensor.label for tensor in checkpoint.tensors if tensor.name == problem.tensor), None)
        raise loadable.user_error(
            problem, checkpoint.folder, "repair the checkpoint or download it again", label
        ) from problem


def _check(options: ConvertOptions) -> None:
    """Refuse options that contradict each other."""
    if (options.mmproj or options.vocab_only) and not options.plain:
        what = "a vocabulary has no tensors" if options.vocab_only else "a projector is small, its rows seldom fit"
        remedy = f"leave --outtype out, or take one of {', '.join(PLAIN_OUTTYPES)}"
        raise UserError(options.model, f"cannot be written as {options.outtype}: {what}", remedy)
    by_quantize = {"--tensor-type": options.tensor_types, "--leave-output-tensor": options.leave_output_tensor}
    if options.plain and (given := [name for name, value in by_quantize.items() if value]):
        what = f"{given[0]} is for quantized files, and {options.outtype} is what llama.cpp's converter writes"
        raise UserError(options.model, what, f"leave {given[0]} out, or take --outtype itq3_s")
    if options.fp8_as_q8 and options.outtype not in ("f16", "bf16", "auto"):
        remedy = "take --outtype auto, f16 or bf16, or leave it out"
        raise UserError(options.model, f"--fp8-as-q8 has no meaning for {options.outtype}", remedy)
    if options.vocab_only and (options.splits or options.mmproj or options.mtp or options.prune_layers):
        raise UserError(options.model, "has a vocabulary that cannot be split or pruned", "give --vocab-only alone")
    filters = bool(options.include_weights), bool(options.exclude_weights)
    if all(filters) or (any(filters) and not options.imatrix):
        what = "--include-weights and --exclude-weights are for an importance matrix"
        raise UserError(options.imatrix or options.model, what, "give one of them, beside --imatrix")
    if options.metadata:
        check_metadata(options.metadata)
    _check_calibrate(options)
    _check_budget(options)
    if options.calibration and options.imatrix:
        raise UserError(options.imatrix, "is given beside a calibration", "give --calibration or --imatrix, not both")
    if options.statistics and not _can_calibrate(options) and not options.equalize:
        raise UserError(options.statistics, f"is for {_CALIBRATED}", "leave it out, or change --outtype or --codec")
    rescales = {"--fold-norms": options.fold_norms, "--equalize": options.equalize}
    if given := [name for name, value in rescales.items() if value]:
        if len(given) > 1:
            what = "cannot be folded and equalized: folding is another choice of the same factors"
            raise UserError(options.model, what, "give --fold-norms or --equalize")
        if options.outtype in TERNARY_TYPES:
            raise UserError(options.model, "would not stay ternary with its channels rescaled", f"leave {given[0]} out")


def _check_calibrate(options: ConvertOptions) -> None:
    """Refuse what does not go with quantizing layer by layer."""
    if options.fisher_block and not options.fisher:
        raise UserError(options.model, "--fisher-block is for --fisher", "give --fisher, or leave it out")
    if options.calibrate is None:
        if options.fisher:
            raise UserError(options.model, "--fisher is for --calibrate", "give --calibrate, or leave it out")
        return
    others = {
        "--calibration": options.calibration, "--imatrix": options.imatrix, "--prune-layers": options.prune_layers,
        "--fuse-qkv": options.fuse_qkv, "--fuse-gate-up-exps": options.fuse_gate_up_exps, "--mtp": options.mtp,
        "--mmproj": options.mmproj, "--vocab-only": options.vocab_only,
    }  # fmt: skip
    if given := [name for name, value in others.items() if value]:
        raise UserError(options.model, f"{given[0]} does not go with --calibrate", "give one of them")
    if not _can_calibrate(options):
        what = f"--calibrate is for {_CALIBRATED}"
        raise UserError(options.model, what, "leave it out, or change --outtype or --codec")


def _can_calibrate(options: ConvertOptions) -> bool:
    """Whether the type of the file is one that is rounded with statistics."""
    return options.stock is not None or (options.outtype == "itq3_s" and options.codec == "trellis")


def _check_budget(options: ConvertOptions) -> None:
    """Refuse what does not go with types for a size."""
    if not options.budgeted:
        return
    name = "--target-bpw" if options.target_size is None else "--target-size"
    if options.target_bpw is not None and options.target_size is not None:
        raise UserError(options.model, "--target-bpw and --target-size are both given", "give one of them")
    if options.pure:
        raise UserError(options.model, f"--pure has one type, and {name} chooses among them", "give one of them")
    if options.outtype != "itq3_s":
        what = f"{name} chooses the types, and --outtype {options.outtype} names one"
        raise UserError(options.model, what, "leave --outtype out")
    if options.calibrate is None and options.statistics is None:
        what = f"{name} needs to know the inputs of the matrices"
        raise UserError(options.model, what, "give --calibrate, --calibration or --imatrix")


def _encoder(options: ConvertOptions, messages: TextIO) -> Encoder:
    # With one start scale the widest search takes less time than the default's three with a narrow one, and loses less.
    quick = options.calibrate is not None and options.effort == "default"
    changed = dict(ldlq.WIDEST) if options.effort == "best" or quick else {}
    changed |= {key: getattr(options, key) for key in ("segment", "lookahead") if getattr(options, key) is not None}
    try:
        search = ldlq.Search(effort="fast" if quick else options.codec_effort, **changed)
        if options.damping is not None and not options.damping > 0:
            raise ValueError(f"damping {options.damping}: it must be more than 0")
    except ValueError as error:
        raise UserError(options.calibration or options.model, str(error), "change the option") from error
    try:
        library = native.load()
    except OSError as error:
        if options.native:
            path = native.library_path() or Path(native.library_name())
            raise UserError(
                path, f"cannot be loaded: {error}", f"run {native.build_command()}, or leave --native out"
            ) from error
        print(f"warning: the C quantizer cannot be used: {error}", file=messages)
        library = None
    if options.native and library is None:
        raise UserError(native.library_name(), "is not built", f"run {native.build_command()}, or leave --native out")
    return Encoder(
        options.codec_effort,
        options.codec,
        max(1, options.threads),
        search,
        library,
        native=options.native is not False,
    )


def _find_ternaries(checkpoint: Checkpoint, options: ConvertOptions, messages: TextIO) -> Ternaries:
    """The matrices that are, or are to be made, ternary; none in a file as upstream writes it."""
    name = options.outtype if options.outtype in TERNARY_TYPES else options.ternary_type
    mode = "off" if options.plain else options.ternary
    qtype = GGMLQuantizationType[name.upper()]
    given = {tensor.name for tensor in checkpoint.tensors if _is_given(tensor, checkpoint, options)}
    return ternary.find(checkpoint, mode, qtype, options.ternary_scale, messages, but=given)


def _is_given(tensor: SourceTensor, checkpoint: Checkpoint, options: ConvertOptions) -> bool:
    return options.overrides.touches(
        tensor.name, tied=checkpoint.model.tied, quantized=not options.plain, pure=options.pure
    )


def _rescaling(
    whole: Checkpoint,
    checkpoint: Checkpoint,
    options: ConvertOptions,
    ternaries: Ternaries,
    names: Mapping[str, str],
    messages: TextIO,
) -> Rescaling:
    """What tensors are multiplied by; what is left alone is said.

    Args:
        whole: the checkpoint as it was read.
        checkpoint: the same with its layers pruned.
        options: of the conversion.
        ternaries: matrices that are not rescaled.
        names: name of a tensor -> its name in ``whole``.
        messages: where it is said.
    """
    if options.fold_norms:
        folding = rescaling.fold(checkpoint, ternaries.kept)
        if folding.norms.note:
            print(folding.norms.note, file=messages)
        return folding
    if not options.equalizes:
        return Rescaling()
    plan = rescaling.plan_tensors(checkpoint, ternaries.kept)
    tensors = {tensor.name: tensor for tensor in checkpoint.tensors}
    if options.calibrated:
        powers = equalize.DIAGONAL if options.imatrix else equalize.FULL
        return equalize.equalize(plan, tensors, None, powers, messages)
    if options.dry_run or not plan.channels:
        return equalize.neutral(plan, equalize.NEAREST)  # as long as the one to come
    source = _measured(whole, options, messages).renamed(names)
    return equalize.equalize(plan, tensors, Inputs(source, _gain_of(whole, source.path)), equalize.NEAREST, messages)


def _measured(whole: Checkpoint, options: ConvertOptions, messages: TextIO) -> energies.MeasuredEnergies:
    """The statistics of a short run on the bundled text."""
    run = CalibrationOptions(
        options.model, [BUNDLED], Path(), tokens=min(options.tokens, equalize.TOKENS),
        context=min(options.context or equalize.CONTEXT, equalize.CONTEXT), device=options.device,
        batch=options.batch, trust_remote_code=options.trust_remote_code,
    )  # fmt: skip
    try:
        return energies.measure(run, whole, messages)
    except OSError as error:
        raise output_error(Path(tempfile.gettempdir()), error) from error


def _gain_of(whole: Checkpoint, path: Path) -> Callable[[str], np.ndarray]:
    """The gain of a norm that statistics leave out, by the name that it had when they were taken."""
    gain = rescaling.gains(whole.tensors, whole.folder)
    norms = {tensor.name for tensor in whole.tensors}

    def of(norm: str) -> np.ndarray:
        if norm not in norms:
            what = f"leaves out the norm {norm!r:.80}, which the model does not have"
            raise UserError(path, what, "take statistics of this model")
        return gain(norm)

    return of


def _statistics(checkpoint: Checkpoint, options: ConvertOptions, names: Mapping[str, str]) -> Statistics | None:
    """What is known of the inputs of the matrices; ``names``: of a tensor -> the one it had before."""
    found: Statistics
    if options.calibration:
        found = store.open_calibration(options.calibration, checkpoint.files)
    elif options.imatrix:
        shapes = {names.get(tensor.name, tensor.name): tensor.shape for tensor in checkpoint.tensors}
        found = imatrix.read(options.imatrix, shapes).filtered(options.include_weights, options.exclude_weights)
    else:
        return None
    source = prune.RenamedStatistics(found, names) if names else found
    if not any(source.known(tensor.name) for tensor in checkpoint.tensors):
        raise UserError(source.path, "has nothing on the matrices of this model", "take statistics of this model")
    return source


def _factors(
    whole: Checkpoint, checkpoint: Checkpoint, options: ConvertOptions, rescaled: Rescaling,
    statistics: Statistics | None,
) -> HessianFactors | None:  # fmt: skip
    """The factors of the Hessians, where statistics are given."""
    if statistics is None:
        return None
    if not any(statistics.known(tensor.name) for tensor in checkpoint.tensors):
        raise UserError(statistics.path, "has nothing on the matrices of this model", "take statistics of this model")
    inputs = Inputs(statistics, _gain_of(whole, statistics.path), rescaled.columns)
    return HessianFactors(statistics, inputs, options.damping)


def _calibrated_share(checkpoint: Checkpoint, choices: list[Choice], factors: HessianFactors | None) -> float:
    """The share of the weights in ITQ3_S that are rounded with statistics, 0 to 1."""
    total = known = 0.0
    for tensor, choice in zip(checkpoint.tensors, choices, strict=True):
        if choice.type == ITQ3_S:
            total += tensor.size
            known += tensor.size * (factors.source.share(tensor.name) if factors is not None else 0.0)
    return known / total if total else 0.0


def _choose(checkpoint: Checkpoint, options: ConvertOptions, encoder: Encoder, stock: F16File | None) -> list[Choice]:
    given, mixed = options.overrides, None
    if stock is not None and options.stock is not None:
        names = [tensor.name for tensor in checkpoint.tensors if given.pattern(tensor.name) is not None]
        mixed = stock.mixed_types(
            options.stock, statistics=options.calibrated, given=names, pruned=options.prune_layers
        )
    choices = [
        policy.choose(
            tensor.name, tensor.shape, tensor.stored, options.target, checkpoint.model,
            pure=options.pure, writable=encoder.writable, overrides=given, mixed=mixed,
        )
        for tensor in checkpoint.tensors
    ]  # fmt: skip
    for tensor, choice in zip(checkpoint.tensors, choices, strict=True):
        if encoder.writable is not None and choice.type not in encoder.writable and tensor.stored != choice.type:
            what = f"{choice.type.name} needs the built library"
            raise UserError(options.model, what, f"run {native.build_command()}", tensor.label)
    return choices


def _warn(checkpoint: Checkpoint, choices: list[Choice], encoder: Encoder, messages: TextIO) -> None:
    """One warning for the rows that are not whole blocks, one notice for types that need the built library."""
    odd, unwritable = [], set()
    for tensor, choice in zip(checkpoint.tensors, choices, strict=True):
        fitted = policy.fit(choice.wanted, tensor.shape[-1])
        if fitted != choice.wanted:
            odd.append(f"  {tensor.name}: {tensor.shape[-1]} columns, {choice.wanted.name} -> {choice.type.name}")
        if encoder.writable is not None and fitted not in encoder.writable and fitted != choice.type:
            unwritable.add(f"{fitted.name} -> {choice.type.name}")
    if odd:
        lines = "\n".join(odd)
        print(
            f"warning: rows of {len(odd)} tensors are not whole blocks, another type is used:\n{lines}", file=messages
        )
    if unwritable:
        changes = ", ".join(sorted(unwritable))
        print(f"note: without the built library: {changes}; {native.build_command()} adds it", file=messages)


def _warn_unknown(checkpoint: Checkpoint, choices: list[Choice], factors: HessianFactors, messages: TextIO) -> None:
    """One warning for the tensors that there are no statistics of."""
    # Rows of the embedding are looked up, not multiplied.
    unknown = [
        f"  {tensor.name}"
        for tensor, choice in zip(checkpoint.tensors, choices, strict=True)
        if choice.type == ITQ3_S and tensor.name != "token_embd.weight" and not factors.source.share(tensor.name)
    ]
    if unknown:
        lines, count = "\n".join(unknown), len(unknown)
        what = f"has nothing on {count} tensors, they are rounded without"
        print(f"warning: {factors.source.path} {what}:\n{lines}", file=messages)


def _write(
    output: Output,
    checkpoint: Checkpoint,
    rows: list[TensorRow],
    choices: list[Choice],
    encoder: Encoder,
    factors: HessianFactors | None,
    messages: TextIO,
    finished: Finished | None,
) -> list[TensorRow]:
    """Write every tensor that is not there yet; returns the rows with their errors."""
    done = len(output.records)
    if done:
        print(f"continuing after {done} of {len(rows)} tensors", file=messages)
    total = sum(row.weights for row in rows)
    written = sum(row.weights for row in rows[:done])
    progress = tqdm(
        total=total, initial=written, unit=" weights", unit_scale=True, mininterval=0.5, file=messages,
    )  # fmt: skip
    with progress as bar:
        for tensor, choice in list(zip(checkpoint.tensors, choices, strict=True))[done:]:
            bar.set_postfix_str(tensor.name, refresh=False)
            writer = _TensorWriter(tensor, choice, encoder, factors, checkpoint.folder, bar, finished)
            output.write(writer.pieces(), writer.record)
    return [replace(row, error=record["error"]) for row, record in zip(rows, output.records, strict=True)]


@dataclass
class _TensorWriter:
    """The bytes of one tensor, and what is noted of them; errors name the tensor."""

    tensor: SourceTensor
    choice: Choice
    encoder: Encoder
    factors: HessianFactors | None
    folder: Path
    bar: Any
    finished: Finished | None = None
    error: SquaredError = SquaredError()  # noqa: RUF009 (frozen)

    def factor(self, number: int) -> Factor | None:
        """The factor of one matrix of a stack, None where nothing is known."""
        tensor, qtype = self.tensor, self.choice.type
        whole = tensor.shape[-1] % BLOCK == 0
        if (
            self.factors is None
            or qtype not in CALIBRATED_TYPES
            or not whole
            or not self.factors.source.known(tensor.name)
        ):
            return None
        return self.factors.factor(tensor.name, tensor.shape, number, rotated=qtype == ITQ3_S)

    def pieces(self) -> Iterator[np.ndarray]:
        """The bytes in order."""
        left = self.tensor.size
        if self.finished is not None and self.finished.known(self.tensor.name):
            for data, error in self.finished.pieces(self.tensor.name):
                yield data
                self.error += error
            self.bar.update(left)
            return
        try:
            for piece in self.encoder.encode(self.tensor.load(), self.tensor.size, self.choice.type, self.factor):
                yield piece.data
                self.error += piece.error
                self.bar.update(piece.weights)
                left -= piece.weights
            self.bar.update(left)
        except ValueError as problem:
            remedy = "repair the checkpoint or download it again"
            raise UserError(self.folder, str(problem), remedy, self.tensor.label) from problem
        except OSError as problem:
            what = f"cannot be read: {problem.strerror or problem}"
            raise UserError(self.folder, what, "check the disk of the model", self.tensor.label) from problem

    def record(self) -> dict[str, Any]:
        """What the journal keeps."""
        return {"name": self.tensor.name, "error": self.error.relative}

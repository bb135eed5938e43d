"""The way of a checkpoint to a GGUF file: read, choose types, fold, write tensor by tensor."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TextIO

import numpy as np
from gguf import GGMLQuantizationType
from tqdm import tqdm

from ..calibration import store
from ..checkpoint import fold, loadable, policy
from ..checkpoint.files import check_output
from ..checkpoint.fold import Folding
from ..checkpoint.policy import Choice
from ..checkpoint.reader import Checkpoint, SourceTensor, open_checkpoint
from ..codec import native
from ..codec.types import ITQ3_S
from ..errors import UserError
from ..report import TensorRow
from ..rounding import hessian, imatrix, ldlq
from ..rounding.factors import HessianFactors, Statistics
from ..rounding.hessian import Factor
from . import ternary
from .encode import Encoder, SquaredError
from .header import fingerprint, header
from .options import TERNARY_TYPES, ConvertOptions
from .output import OutputFile
from .ternary import Ternaries


@dataclass(frozen=True)
class Conversion:
    """What a conversion has written, or would write.

    Attributes:
        rows: one for every tensor of the file.
        size: bytes of the file.
        check: how it was found out that llama.cpp can load the file, a sentence.
        shapes: of a dry run, the shape of every tensor, rows last; else empty.
    """

    rows: list[TensorRow]
    size: int
    check: str
    shapes: Sequence[tuple[int, ...]] = ()


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
    check_output(options.out, (options.model, options.calibration, options.imatrix))
    encoder = _encoder(options, messages)
    checkpoint = open_checkpoint(
        options.model, model_name=options.model_name, verbose=options.verbose,
        trust_remote_code=options.trust_remote_code,
    )  # fmt: skip
    ternaries = _find_ternaries(checkpoint, options, messages)
    _check(options)
    checkpoint = replace(checkpoint, tensors=ternaries.load(checkpoint.tensors))
    folding = _folding(checkpoint, options, ternaries, messages)
    factors = _factors(checkpoint, options, folding)
    checkpoint = replace(checkpoint, tensors=fold.apply(checkpoint.tensors, folding, str(checkpoint.folder)))
    choices = ternaries.choose(checkpoint.tensors, _choose(checkpoint, options, encoder))
    _warn(checkpoint, choices, encoder, messages)
    if factors is not None:
        _warn_unknown(checkpoint, choices, factors, messages)
    head = header(checkpoint, choices, options, folding, ternaries, _calibrated_share(checkpoint, choices, factors))
    sizes = [tensor.bytes_in(choice.type) for tensor, choice in zip(checkpoint.tensors, choices, strict=True)]
    rows = [
        TensorRow(tensor.name, choice.type.name, tensor.size, size)
        for tensor, choice, size in zip(checkpoint.tensors, choices, sizes, strict=True)
    ]
    output = OutputFile(options.out, head, sizes, fingerprint(head, options, checkpoint))
    check = _check_loadable(checkpoint, head, output.size)
    if options.dry_run:
        return Conversion(rows, output.size, check, [tensor.shape for tensor in checkpoint.tensors])
    with output:
        rows = _write(output, checkpoint, rows, choices, encoder, factors, messages)
    return Conversion(rows, output.size, check)


def _check_loadable(checkpoint: Checkpoint, head: bytes, size: int) -> str:
    """Refuse a checkpoint that llama.cpp could not load once it is converted; returns which check was made."""
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
    if options.calibration and options.imatrix:
        raise UserError(options.imatrix, "is given beside a calibration", "give --calibration or --imatrix, not both")
    if options.statistics and (options.outtype != "itq3_s" or options.codec != "trellis"):
        what = "is for the trellis code of ITQ3_S"
        raise UserError(options.statistics, what, "leave it out, or leave --outtype and --codec as they are by default")
    if options.folds and options.outtype in TERNARY_TYPES:
        what = "would not stay ternary with its norms folded"
        raise UserError(options.model, what, "leave --fold-norms out")


def _encoder(options: ConvertOptions, messages: TextIO) -> Encoder:
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
            raise UserError(
                path, f"cannot be loaded: {error}", f"run {native.build_command()}, or leave --native out"
            ) from error
        print(f"warning: the C quantizer cannot be used: {error}", file=messages)
        library = None
    if options.native and library is None:
        raise UserError(native.library_name(), "is not built", f"run {native.build_command()}, or leave --native out")
    return Encoder(
        options.effort, options.codec, max(1, options.threads), search, library, native=options.native is not False
    )


def _find_ternaries(checkpoint: Checkpoint, options: ConvertOptions, messages: TextIO) -> Ternaries:
    """The matrices that are, or are to be made, ternary; none in an F16 file, which holds them as they are."""
    name = options.outtype if options.outtype in TERNARY_TYPES else options.ternary_type
    mode = "off" if options.outtype == "f16" else options.ternary
    qtype = GGMLQuantizationType[name.upper()]
    return ternary.find(checkpoint, mode, qtype, options.ternary_scale, messages, but=options.own_types)


def _folding(checkpoint: Checkpoint, options: ConvertOptions, ternaries: Ternaries, messages: TextIO) -> Folding:
    """Which norms are folded; those that are left alone are said."""
    if not options.folds:
        return Folding()
    folding = fold.plan_tensors(checkpoint.model.arch, checkpoint.tensors, ternaries.norms)
    if folding.note:
        print(folding.note, file=messages)
    return folding


def _factors(checkpoint: Checkpoint, options: ConvertOptions, folding: Folding) -> HessianFactors | None:
    """The factors of the Hessians, where statistics are given; ``checkpoint`` is not folded yet."""
    source: Statistics
    if options.calibration:
        source = store.open_calibration(options.calibration, checkpoint.files)
    elif options.imatrix:
        source = imatrix.read(options.imatrix)
    else:
        return None
    by_name = {tensor.name: tensor for tensor in checkpoint.tensors}
    if not any(source.known(name) for name in by_name):
        raise UserError(source.path, "has nothing on the matrices of this model", "take statistics of this model")

    damping = hessian.DAMPING if options.damping is None else options.damping

    def gain(norm: str) -> np.ndarray:
        if norm not in by_name:
            what = f"leaves out the norm {norm!r:.80}, which the model does not have"
            raise UserError(source.path, what, "take statistics of this model")
        return by_name[norm].vector()

    return HessianFactors(source, folding.norm_of, gain, damping)


def _calibrated_share(checkpoint: Checkpoint, choices: list[Choice], factors: HessianFactors | None) -> float:
    """The share of the weights in ITQ3_S that are rounded with statistics, 0 to 1."""
    total = known = 0.0
    for tensor, choice in zip(checkpoint.tensors, choices, strict=True):
        if choice.type == ITQ3_S:
            total += tensor.size
            known += tensor.size * (factors.source.share(tensor.name) if factors is not None else 0.0)
    return known / total if total else 0.0


def _choose(checkpoint: Checkpoint, options: ConvertOptions, encoder: Encoder) -> list[Choice]:
    target = GGMLQuantizationType[options.outtype.upper()]
    choices = [
        policy.choose(
            tensor.name, tensor.shape, tensor.stored, target, checkpoint.model,
            pure=options.pure, writable=encoder.writable,
        )
        for tensor in checkpoint.tensors
    ]  # fmt: skip
    for number, tensor in enumerate(checkpoint.tensors):
        if name := options.own_types.get(tensor.name):
            wanted = GGMLQuantizationType[name.upper()]
            if encoder.writable is not None and wanted not in encoder.writable:
                remedy = f"run {native.build_command()}"
                raise UserError(options.model, f"{wanted.name} needs the built library", remedy, tensor.label)
            choices[number] = Choice(policy.fit(wanted, tensor.shape[-1]), wanted)
    return choices


def _warn(checkpoint: Checkpoint, choices: list[Choice], encoder: Encoder, messages: TextIO) -> None:
    """One warning for the rows that are not whole blocks, one notice for types that need the built library."""
    odd, unwritable = [], set()
    for tensor, choice in zip(checkpoint.tensors, choices, strict=True):
        fitted = policy.fit(choice.wanted, tensor.shape[-1])
        if fitted != choice.wanted:
            odd.append(f"  {tensor.name}: {tensor.shape[-1]} columns, {choice.wanted.name} -> {choice.type.name}")
        if encoder.writable is not None and fitted not in encoder.writable:
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
    output: OutputFile,
    checkpoint: Checkpoint,
    rows: list[TensorRow],
    choices: list[Choice],
    encoder: Encoder,
    factors: HessianFactors | None,
    messages: TextIO,
) -> list[TensorRow]:
    """Write every tensor that is not there yet; returns the rows with their errors."""
    done = len(output.records)
    if done:
        print(f"continuing after {done} of {len(rows)} tensors", file=messages)
    total = sum(row.weights for row in rows)
    finished = sum(row.weights for row in rows[:done])
    progress = tqdm(
        total=total, initial=finished, unit=" weights", unit_scale=True, mininterval=0.5, file=messages,
    )  # fmt: skip
    with progress as bar:
        for tensor, choice in list(zip(checkpoint.tensors, choices, strict=True))[done:]:
            bar.set_postfix_str(tensor.name, refresh=False)
            writer = _TensorWriter(tensor, choice, encoder, factors, checkpoint.folder, bar)
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
    error: SquaredError = SquaredError()  # noqa: RUF009 (frozen)

    def factor(self, number: int) -> Factor | None:
        """The factor of one matrix of a stack, None where nothing is known."""
        tensor = self.tensor
        if self.factors is None or self.choice.type != ITQ3_S or not self.factors.source.known(tensor.name):
            return None
        return self.factors.factor(tensor.name, tensor.shape, number)

    def pieces(self) -> Iterator[np.ndarray]:
        """The bytes in order."""
        left = self.tensor.size
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

    def record(self) -> dict[str, Any]:
        """What the journal keeps."""
        return {"name": self.tensor.name, "error": self.error.relative}

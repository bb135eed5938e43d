"""One conversion: what is known of the file before the work on its tensors."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from ..base.errors import UserError
from ..base.report import TensorRow
from ..calibrate.ranks import ALONE, Ranks
from ..checkpoint.reading import open_checkpoint
from ..checkpoint.source import Checkpoint
from ..checkpoint.stock import f16_file
from ..codec import native
from ..rounding import ldlq
from ..rounding.encode import Encoder
from ..rounding.factors import HessianFactors, Inputs, Statistics
from . import statistics, ternaries, types
from .naming import output_path
from .options import ConvertOptions

if TYPE_CHECKING:
    from ..calibrate.budget import Plan


class Job:
    """A checkpoint on its way to a file; each step asks it for what those before have found.

    Args:
        options: what and how.
        messages: where warnings and progress go.
        ranks: the processes that calibrate together.

    Attributes:
        encoder: weights to bytes.
        plain: the checkpoint as it was read.
        ternaries: its matrices that get a ternary type.
        rescaling: what the tensors are multiplied by.
        checkpoint: the tensors as they are written, and the metadata.
        choices: their types; by the mix until they are chosen for a size.
        plan: how they were chosen for a size, if that is asked for.
        statistics: those that are given, None without.
        factors: of the Hessians by these.

    Raises:
        UserError: the checkpoint or the statistics cannot be used.
    """

    def __init__(self, options: ConvertOptions, messages: TextIO, ranks: Ranks = ALONE) -> None:
        self.options, self.messages, self.ranks = options, messages, ranks
        self.encoder = encoder_of(options, messages)
        self.plain = open_checkpoint(
            options.model, model_name=options.model_name, verbose=options.verbose,
            trust_remote_code=options.run.trust_remote_code, request=options.request, messages=messages,
        )  # fmt: skip
        stock = f16_file(self.plain) if options.mixes_stock else None
        self.ternaries = ternaries.find(self.plain, options, messages)
        floats = replace(self.plain, tensors=self.ternaries.load(self.plain.tensors))
        self.choices = self.ternaries.choose(floats.tensors, types.choose(floats, options, self.encoder, stock))
        self.plan: Plan | None = None
        self.statistics = statistics.given(floats, options)
        # Of types for a size, not named after one that is not known yet.
        self._first = self._named(floats)
        kept = self.ternaries.kept
        self.rescaling = statistics.rescaling_of(self.plain, floats, options, kept, messages)
        self.checkpoint = replace(floats, tensors=self.rescaling.apply(floats.tensors, floats.folder))
        self.factors = None if self.statistics is None else self.factors_of(self.statistics)
        self.rescaling.describe(self.checkpoint.writer)

    @property
    def out(self) -> Path:
        """The file."""
        return self._named(self.checkpoint)

    @property
    def work(self) -> Path:
        """The folder in which the file is calibrated."""
        out = self._first if self.options.budgeted else self.out
        return out.with_name(f"{out.name}.calibrating")

    def _named(self, checkpoint: Checkpoint) -> Path:
        return output_path(self.options, checkpoint.described, types.file_type(checkpoint, self.choices, self.options))

    def factors_of(self, found: Statistics) -> HessianFactors:
        """Factors of Hessians by some statistics.

        Raises:
            UserError: they are of another model.
        """
        source = statistics.of_model(found, self.checkpoint)
        inputs = Inputs(source, statistics.gain_of(self.plain, source.path), self.rescaling.columns)
        return HessianFactors(source, inputs, self.options.damping)

    def head(self) -> bytes:
        """GGUF header, metadata that the checkpoint's writer has, and tensor infos.

        Raises:
            UserError: the model's metadata do not fit GGUF's types.
        """
        return self.checkpoint.head([choice.type for choice in self.choices])

    def rows(self) -> list[TensorRow]:
        """One for every tensor of the file, without errors."""
        return [
            TensorRow(tensor.name, choice.type.name, tensor.size, tensor.bytes_in(choice.type))
            for tensor, choice in zip(self.checkpoint.tensors, self.choices, strict=True)
        ]


def encoder_of(options: ConvertOptions, messages: TextIO) -> Encoder:
    """The encoder of a conversion.

    Raises:
        UserError: the search cannot be, or the library is asked for and cannot be used.
    """
    effort = "default" if options.effort in ("auto", "best") else options.effort
    changed = {key: getattr(options, key) for key in ("segment", "lookahead") if getattr(options, key) is not None}
    try:
        search = replace(ldlq.SEARCHES[options.effort], **changed)
        if options.damping is not None and not options.damping > 0:
            raise ValueError(f"damping {options.damping}: it must be more than 0")
    except ValueError as error:
        raise UserError(options.calibration or options.model, str(error), "change the option") from error
    remedy = f"run {native.build_command()}, or leave --native out"
    try:
        library = native.load()
    except OSError as error:
        if options.native:
            path = native.library_path() or Path(native.library_name())
            raise UserError(path, f"cannot be loaded: {error}", remedy) from error
        print(f"warning: the C quantizer cannot be used: {error}", file=messages)
        library = None
    if options.native and library is None:
        raise UserError(native.library_name(), "is not built", remedy)
    return Encoder(effort, options.codec, max(1, options.threads), search, library, native=options.native is not False)

"""The way of a checkpoint to a GGUF file: read, choose types, rescale, write tensor by tensor."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from gguf import GGUF_DEFAULT_ALIGNMENT, GGUFWriter

from ..calibration.options import FULL_COLUMNS_AT_ONCE
from ..checkpoint import loadable
from ..checkpoint.channels import ARCHITECTURES
from ..checkpoint.reader import Checkpoint, open_checkpoint
from ..errors import UserError
from ..report import TensorRow
from ..rounding.factors import HessianFactors, Statistics
from . import checks, overrides, prune, statistics, types
from .encoder import encoder_of
from .header import Head, describe, file_type, fingerprint, header, render, set_share
from .naming import output_path, part_paths
from .options import ConvertOptions
from .output import Output, Part
from .tensors import TensorWriter

if TYPE_CHECKING:
    from ..layerwise.budget import Plan
    from ..layerwise.finished import Finished
    from ..layerwise.run import Sequential

#: Room for the metadata that are not in the head yet when types are chosen, in each part of the file.
_MORE_METADATA = 1024


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
    checks.check(options)
    job = Job(options, messages or sys.stderr)
    job.choose_for_size()
    job.warn()
    head = job.head()
    parts = job.parts(head)
    loads = job.check_loadable(head)
    finished = None
    if options.layerwise.calibrate and not options.to.dry_run:
        finished = job.quantize_layers(head)
        head = render(job.checkpoint, job.choices, options)
        parts = [replace(part, head=own) for part, own in zip(parts, head.parts, strict=True)]
    output = Output(parts, job.fingerprint(head))
    if options.to.dry_run:
        shapes = [tensor.shape for tensor in job.checkpoint.tensors]
        return Conversion(job.rows(), output.size, loads, parts, shapes, job.plan)
    writer = TensorWriter(job.encoder, job.factors, finished, job.checkpoint.folder)
    with output:
        rows = writer.write(output, job.checkpoint, job.choices, job.rows(), job.messages)
    if finished is not None:
        finished.remove()
    return Conversion(rows, output.size, loads, parts, plan=job.plan)


class Job:
    """One conversion: what is known of the file before the work on its tensors.

    Args:
        options: what and how.
        messages: where warnings and progress go.

    Attributes:
        encoder: weights to bytes.
        whole: the checkpoint as it was read.
        plain: the same without the layers that are pruned; nothing is rescaled or ternarized.
        checkpoint: its tensors as they are written.
        choices: their types.
        statistics: those that are given, None without.
        rescaling: what the tensors are multiplied by.
        factors: of the Hessians of their inputs, where statistics are given.
        plan: how types were chosen for a size.

    Raises:
        UserError: the checkpoint or the statistics cannot be used.
    """

    def __init__(self, options: ConvertOptions, messages: TextIO) -> None:
        self.options, self.messages = options, messages
        self.encoder = encoder_of(options, messages)
        read = open_checkpoint(
            options.model, model_name=options.model_name, verbose=options.verbose,
            trust_remote_code=options.run.trust_remote_code, request=options.request,
        )  # fmt: skip
        self.whole = overrides.apply(read, options.override_kv)
        self.plain, names = prune.prune(self.whole, options.prune_layers)
        self.ternaries = types.find_ternaries(self.plain, options, messages)
        floats = replace(self.plain, tensors=self.ternaries.load(self.plain.tensors))
        self.choices = self.ternaries.choose(floats.tensors, types.choose(floats, options, self.encoder))
        self.statistics = statistics.given(floats, options, names)
        self.plan: Plan | None = None
        # Of types for a size, not named after one that is not known yet.
        self._early = self._out(floats)
        kept = self.ternaries.kept
        self.rescaling = statistics.rescaling_of(self.whole, floats, options, kept, names, messages)
        self.factors = None if self.statistics is None else self._factors_of(self.statistics, floats)
        self.checkpoint = replace(floats, tensors=self.rescaling.apply(floats.tensors, floats.folder))
        describe(self.checkpoint, self.rescaling)

    @property
    def out(self) -> Path:
        """The file; of a split one, what its parts are named after."""
        return self._out(self.checkpoint)

    def _out(self, checkpoint: Checkpoint) -> Path:
        return output_path(self.options, checkpoint.described, file_type(checkpoint, self.choices, self.options))

    @property
    def _work(self) -> Path:
        """The folder in which the file is calibrated."""
        out = self._early if self.options.types.budgeted else self.out
        return out.with_name(f"{out.name}.calibrating")

    def _factors_of(self, found: Statistics, checkpoint: Checkpoint | None = None) -> HessianFactors:
        damping = self.options.encoder.damping
        return statistics.factors(self.whole, checkpoint or self.checkpoint, self.rescaling, found, damping)

    def fingerprint(self, head: Head) -> str:
        """Of all that decides the content of the file."""
        return fingerprint(head, self.options, self.checkpoint)

    def choose_for_size(self) -> None:
        """Choose the types for a size, if that is asked for.

        Raises:
            UserError: the size cannot be had, or model, text or statistics cannot be used.
        """
        asked = self.options.types
        if not asked.budgeted:
            return
        from ..layerwise import budget

        kept = self._work.exists()
        head = render(self.checkpoint, self.choices, self.options)
        sizes = (GGUFWriter.ggml_pad(len(part) + _MORE_METADATA, GGUF_DEFAULT_ALIGNMENT) for part in head.parts)
        tensors = self.checkpoint.tensors
        given = frozenset(t.name for t in tensors if types.is_given(t, self.checkpoint, self.options))
        bytes_there = budget.Budget(
            self.checkpoint, self.choices, self.encoder, given,
            bits=asked.target_bpw, size=asked.target_size, head=sum(sizes),
        )  # fmt: skip
        if self.factors is not None:
            self.plan = budget.choose(bytes_there, self.factors, self.options.statistics.calibration, self.messages)
        else:
            key = fingerprint(
                head, replace(self.options, types=replace(asked, target_bpw=None, target_size=None)), self.checkpoint
            )
            self.plan = budget.choose_layerwise(bytes_there, self._sequential(), self._factors_of, self._work, key)
        self.choices = self.plan.choices
        if self.options.to.dry_run and not kept:
            shutil.rmtree(self._work, ignore_errors=True)

    def warn(self) -> None:
        """Say which tensors are in other types than was asked for, and which are rounded without statistics."""
        types.warn(self.checkpoint, self.choices, self.encoder, self.messages)
        if self.factors is not None:
            statistics.warn_unknown(self.checkpoint, self.choices, self.factors.source, self.messages)

    def head(self) -> Head:
        """The heads of the files, before layers are quantized."""
        share = 1.0
        if not self.options.layerwise.calibrate:
            known = self.factors.source.share if self.factors is not None else lambda _: 0.0
            share = statistics.share(self.checkpoint, self.choices, known)
        else:
            self._check_architecture()
        return header(
            self.checkpoint, self.choices, self.options, self.rescaling, self.ternaries, share, self.statistics
        )

    def rows(self) -> list[TensorRow]:
        """One for every tensor, without errors."""
        return [
            TensorRow(tensor.name, choice.type.name, tensor.size, tensor.bytes_in(choice.type))
            for tensor, choice in zip(self.checkpoint.tensors, self.choices, strict=True)
        ]

    def parts(self, head: Head) -> list[Part]:
        """The files.

        Raises:
            UserError: one is an input, or cannot be written.
        """
        left = iter(row.bytes for row in self.rows())
        parts = [
            Part(path, part, tuple(islice(left, count)))
            for path, part, count in zip(part_paths(self.out, len(head.parts)), head.parts, head.counts, strict=True)
        ]
        for part in parts:
            checks.check_file(self.options, part.path)
        return parts

    def check_loadable(self, head: Head) -> str:
        """Refuse a checkpoint that llama.cpp could not load once it is converted; returns which check was made."""
        request, checkpoint = self.options.request, self.checkpoint
        if request.mmproj or request.mtp or request.vocab_only or request.target_model_dir:
            return "not loaded: it is only a part of a model"
        shapes = {tensor.name: tensor.shape for tensor in checkpoint.tensors}
        size = Part(self.out, head.whole, tuple(row.bytes for row in self.rows())).size
        tied = loadable.may_be_tied(checkpoint.folder, checkpoint.model.arch)
        metadata = loadable.metadata_of_writer(checkpoint.writer)
        try:
            return loadable.check_head(head.whole, size, shapes, metadata, tied=tied)
        except loadable.NotLoadableError as problem:
            label = next((tensor.label for tensor in checkpoint.tensors if tensor.name == problem.tensor), None)
            remedy = "repair the checkpoint or download it again"
            raise loadable.user_error(problem, checkpoint.folder, remedy, label) from problem

    def quantize_layers(self, head: Head) -> Finished:
        """Quantize the matrices layer by layer; the metadata get the share of weights that this reached.

        Raises:
            UserError: model, text or folder cannot be used, or the model was lost.
        """
        finished = self._sequential().run(self._work, self.fingerprint(head))
        set_share(self.checkpoint, statistics.share(self.checkpoint, self.choices, finished.share))
        return finished

    def _sequential(self) -> Sequential:
        """What quantizes layer by layer, in the types that are chosen."""
        from ..layerwise.matrices import Source
        from ..layerwise.needs import FisherBlocks
        from ..layerwise.run import Sequential

        self._check_architecture()
        asked = self.options.layerwise
        tensors = {tensor.name: tensor for tensor in self.checkpoint.tensors}
        chosen = {name: choice.type for name, choice in zip(tensors, self.choices, strict=True)}
        source = Source(self.plain, tensors, chosen, self.rescaling, self.encoder)
        blocks = FisherBlocks(asked.fisher_block, asked.fisher_block) if asked.fisher_block else FisherBlocks()
        return Sequential(
            replace(self.options.run, widest=FULL_COLUMNS_AT_ONCE), source, self.options.encoder.damping,
            blocks if asked.fisher else None, self.messages,
        )  # fmt: skip

    def _check_architecture(self) -> None:
        if (arch := self.checkpoint.model.arch) not in ARCHITECTURES:
            what = f"its architecture, {arch}, cannot be calibrated"
            raise UserError(self.options.model, what, "use an importance matrix of llama-imatrix (--imatrix)")

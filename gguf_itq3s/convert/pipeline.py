"""The way of a checkpoint to a GGUF file: read, choose types, rescale, write tensor by tensor."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from ..base.errors import UserError
from ..base.report import TensorRow
from ..calibrate.ranks import ALONE, Ranks, of_all
from . import checks, header, notes
from .job import Job
from .options import ConvertOptions
from .output import Output
from .tensors import TensorWriter

if TYPE_CHECKING:
    from ..calibrate.budget import Plan


@dataclass(frozen=True)
class Conversion:
    """What a conversion has written, or would write.

    Attributes:
        rows: one for every tensor of the file.
        size: its bytes.
        check: how it was found out that llama.cpp can load the file, a sentence.
        path: of the file.
        shapes: of a dry run, the shape of every tensor, rows last; else empty.
        plan: how types were chosen for a size; None where the mix says them.
    """

    rows: list[TensorRow]
    size: int
    check: str
    path: Path
    shapes: Sequence[tuple[int, ...]] = ()
    plan: Plan | None = None


def convert(options: ConvertOptions, messages: TextIO | None = None) -> Conversion:
    """Convert a checkpoint in this process alone, as :func:`convert_together`."""
    done = convert_together(options, messages, ALONE)
    assert done is not None
    return done


def convert_together(options: ConvertOptions, messages: TextIO | None, ranks: Ranks) -> Conversion | None:
    """Convert a checkpoint, with the processes that calibrate together.

    Args:
        options: what and how.
        messages: where warnings and progress go; None for stderr.
        ranks: the processes that calibrate together; the first of them writes the file.

    Returns:
        What was written; None of a process that writes nothing.

    Raises:
        UserError: the checkpoint cannot be read or the file cannot be written; nothing is left under its name.
        KeyboardInterrupt: interrupted; the message says whether the same call continues.
    """
    dry, calibrate = options.dry_run, options.calibrate
    if not ranks.alone and not calibrate:
        what = f"is converted by one process, and {ranks.size} were started"
        raise of_all(UserError(options.model, what, "leave torchrun out, or quantize it with --calibrate"))
    if ranks.first:
        checks.check(options)
    ranks.agree(options.model, options=json.dumps(options.deciding(), sort_keys=True))
    job = Job(options, messages or sys.stderr, ranks)
    if calibrate or options.budgeted:
        from . import layers  # torch runs the model
    if options.budgeted:
        layers.choose_for_size(job)
    notes.say_types(job)
    notes.say_unknown(job)
    head = header.header(job)
    if not ranks.first:
        if not dry:
            layers.quantize(job, head)
        return None
    rows = job.rows()
    checks.check_file(options, job.out)
    loads = checks.check_loadable(job, head)
    finished = None
    if calibrate and not dry:
        finished = layers.quantize(job, head)
        head = job.head()
    key = header.fingerprint(head, options, job.checkpoint)
    output = Output(job.out, head, [row.bytes for row in rows], key)
    if dry:
        shapes = [tensor.shape for tensor in job.checkpoint.tensors]
        return Conversion(rows, output.size, loads, job.out, shapes, job.plan)
    with output:
        rows = TensorWriter(job, finished).write(output, rows)
    if finished is not None:
        finished.remove()
    return Conversion(rows, output.size, loads, job.out, plan=job.plan)

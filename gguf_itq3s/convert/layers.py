"""The steps of a conversion that run the model layer by layer: types for a size, and ``--calibrate``."""

from __future__ import annotations

import shutil
from dataclasses import replace
from typing import Final

from ..calibrate import budget
from ..calibrate.finished import Finished
from ..calibrate.matrices import Source
from ..calibrate.needs import FisherBlocks
from ..calibrate.options import FULL_COLUMNS_AT_ONCE
from ..calibrate.run import Sequential
from ..checkpoint.source import padded
from . import header, statistics
from .job import Job

#: Room for the metadata that are not in the head yet when types are chosen.
_MORE_METADATA: Final = 1024


def choose_for_size(job: Job) -> None:
    """Give a conversion the types that a size asks for.

    Raises:
        UserError: the size cannot be had, or model, text or statistics cannot be used.
    """
    asked, tensors = job.options, job.checkpoint.tensors
    kept = job.work.exists()
    head = job.head()
    given = frozenset(tensor.name for tensor in tensors if asked.gives(tensor.name, tied=job.checkpoint.model.tied))
    there = budget.Budget(
        job.checkpoint, job.choices, job.encoder, given,
        bits=asked.target_bpw, size=asked.target_size, head=padded(len(head) + _MORE_METADATA),
    )  # fmt: skip
    if job.factors is not None:
        job.plan = budget.choose(there, job.factors, job.options.calibration, job.messages)
    else:
        any_size = replace(asked, target_bpw=None, target_size=None)
        key = header.fingerprint(head, any_size, job.checkpoint)
        job.plan = budget.choose_layerwise(there, _sequential(job), job.factors_of, job.work, key)
    job.choices = job.plan.choices
    if job.options.dry_run and not kept and job.ranks.first:
        shutil.rmtree(job.work, ignore_errors=True)


def quantize(job: Job, head: bytes) -> Finished:
    """Quantize the matrices layer by layer; the metadata get the share of weights that this reached.

    Raises:
        UserError: model, text or folder cannot be used, or the model was lost.
    """
    finished = _sequential(job).run(job.work, header.fingerprint(head, job.options, job.checkpoint))
    header.set_share(job.checkpoint, statistics.share(job.checkpoint, job.choices, finished.share))
    return finished


def _sequential(job: Job) -> Sequential:
    """What quantizes layer by layer, in the types that are chosen."""
    asked = job.options
    tensors = {tensor.name: tensor for tensor in job.checkpoint.tensors}
    chosen = {name: choice.type for name, choice in zip(tensors, job.choices, strict=True)}
    source = Source(job.plain, tensors, chosen, job.rescaling, job.encoder)
    blocks = FisherBlocks(asked.fisher_block, asked.fisher_block) if asked.fisher_block else FisherBlocks()
    return Sequential(
        replace(job.options.run, widest=FULL_COLUMNS_AT_ONCE), source, job.options.damping,
        blocks if asked.fisher else None, job.messages, job.ranks,
    )  # fmt: skip

"""What a conversion knows of the inputs of the matrices, and what follows: factors of Hessians, of channels."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

import numpy as np

from ..base.errors import UserError, output_error
from ..calibrate import store
from ..calibrate.options import BUNDLED
from ..checkpoint import rescaling
from ..checkpoint.policy import Choice
from ..checkpoint.rescaling import Rescaling
from ..checkpoint.source import Checkpoint
from ..codec.family import is_trellis
from ..rounding import imatrix
from ..rounding.factors import Inputs, Statistics
from . import equalize
from .options import ConvertOptions

if TYPE_CHECKING:
    from ..calibrate.energies import MeasuredEnergies


def given(checkpoint: Checkpoint, options: ConvertOptions) -> Statistics | None:
    """The statistics that the options name, None where they name none.

    Raises:
        UserError: they cannot be read, or are of another model.
    """
    found: Statistics
    if options.calibration:
        found = store.open_calibration(options.calibration, checkpoint.files)
    elif options.imatrix:
        shapes = {tensor.name: tensor.shape for tensor in checkpoint.tensors}
        found = imatrix.read(options.imatrix, shapes).filtered(options.include_weights, options.exclude_weights)
    else:
        return None
    return of_model(found, checkpoint)


def of_model(found: Statistics, checkpoint: Checkpoint) -> Statistics:
    """Statistics, which are of some matrix of the model.

    Raises:
        UserError: they are of another.
    """
    if not any(found.known(tensor.name) for tensor in checkpoint.tensors):
        raise UserError(found.path, "has nothing on the matrices of this model", "take statistics of this model")
    return found


def rescaling_of(
    whole: Checkpoint, checkpoint: Checkpoint, options: ConvertOptions, kept: frozenset[str], messages: TextIO
) -> Rescaling:
    """What tensors are multiplied by, but for the matrices ``kept``; what is left alone is said.

    Args:
        whole: the checkpoint as it was read.
        checkpoint: the same with ternary matrices made so.
        options: of the conversion.
        kept: matrices that are not rescaled.
        messages: where it is said.
    """
    if options.fold_norms:
        folding = rescaling.fold(checkpoint, kept)
        if folding.norms.note:
            print(folding.norms.note, file=messages)
        return folding
    if not options.equalizes:
        return Rescaling()
    plan = rescaling.plan_tensors(checkpoint, kept)
    tensors = {tensor.name: tensor for tensor in checkpoint.tensors}
    if options.calibrated:
        powers = equalize.DIAGONAL if options.imatrix else equalize.FULL
        return equalize.equalize(plan, tensors, None, powers, messages)
    if options.dry_run or not plan.channels:
        return equalize.neutral(plan, equalize.NEAREST)  # as long as the one to come
    source = _measured(whole, options, messages)
    return equalize.equalize(plan, tensors, Inputs(source, gain_of(whole, source.path)), equalize.NEAREST, messages)


def _measured(whole: Checkpoint, options: ConvertOptions, messages: TextIO) -> MeasuredEnergies:
    """The statistics of a short run on the bundled text."""
    from ..calibrate import energies  # torch runs the model

    run = replace(
        options.run, text=(BUNDLED,), tokens=min(options.run.tokens, equalize.TOKENS),
        context=min(options.run.context or equalize.CONTEXT, equalize.CONTEXT), hessian=None,
    )  # fmt: skip
    try:
        return energies.measure(run, whole, messages)
    except OSError as error:
        raise output_error(Path(tempfile.gettempdir()), error) from error


def gain_of(whole: Checkpoint, path: Path) -> Callable[[str], np.ndarray]:
    """The gain of a norm that statistics leave out, by the name that it had when they were taken."""
    gain = rescaling.gains(whole.tensors, whole.folder)
    norms = {tensor.name for tensor in whole.tensors}

    def of(norm: str) -> np.ndarray:
        if norm not in norms:
            what = f"leaves out the norm {norm!r:.80}, which the model does not have"
            raise UserError(path, what, "take statistics of this model")
        return gain(norm)

    return of


def share(checkpoint: Checkpoint, choices: Sequence[Choice], known: Callable[[str], float]) -> float:
    """The share of the weights in trellis types that are rounded with statistics, 0 to 1.

    ``known`` is the share of a tensor's matrices that there are statistics of.
    """
    pairs = [(t, c) for t, c in zip(checkpoint.tensors, choices, strict=True) if is_trellis(c.type)]
    total = sum(tensor.size for tensor, _ in pairs)
    return sum(tensor.size * known(tensor.name) for tensor, _ in pairs) / total if total else 0.0

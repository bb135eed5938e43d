"""The type of every tensor of a file: the policy's choices for a checkpoint, and what is said of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, TextIO

from gguf import GGMLQuantizationType

from ..checkpoint import policy
from ..checkpoint.policy import Choice
from ..checkpoint.reading import Checkpoint, SourceTensor
from ..checkpoint.stock import F16File
from ..codec import native
from ..errors import UserError
from ..rounding.encode import Encoder
from . import ternaries
from .options import TERNARY_TYPES, ConvertOptions
from .ternaries import Ternaries

if TYPE_CHECKING:
    from .job import Job


def is_given(tensor: SourceTensor, checkpoint: Checkpoint, options: ConvertOptions) -> bool:
    """Whether the user has named the type of a tensor."""
    types = options.types
    return types.overrides.touches(
        tensor.name, tied=checkpoint.model.tied, quantized=not options.plain, pure=types.pure
    )


def find_ternaries(checkpoint: Checkpoint, options: ConvertOptions, messages: TextIO) -> Ternaries:
    """The matrices that are, or are to be made, ternary; none in a file as upstream writes it."""
    outtype, asked = options.types.outtype, options.ternary
    name = outtype if outtype in TERNARY_TYPES else asked.ternary_type
    mode = "off" if options.plain else asked.ternary
    qtype = GGMLQuantizationType[name.upper()]
    given = {tensor.name for tensor in checkpoint.tensors if is_given(tensor, checkpoint, options)}
    return ternaries.find(checkpoint, mode, qtype, asked.ternary_scale, messages, but=given)


def choose(checkpoint: Checkpoint, options: ConvertOptions, encoder: Encoder, stock: F16File | None) -> list[Choice]:
    """The type of every tensor by the mix, or as it is given.

    Args:
        checkpoint: the model, pruned.
        options: of the conversion.
        encoder: which types it writes.
        stock: what llama-quantize is asked about, where the file is a mix of llama.cpp's own types.

    Raises:
        UserError: a type needs the built library, which is not there.
    """
    given, mixed = options.types.overrides, None
    if stock is not None and options.stock is not None:
        names = [tensor.name for tensor in checkpoint.tensors if given.pattern(tensor.name) is not None]
        mixed = stock.mixed_types(
            options.stock, statistics=options.calibrated, given=names, pruned=options.prune_layers
        )
    choices = [
        policy.choose(
            tensor.name, tensor.shape, tensor.stored, options.target, checkpoint.model,
            pure=options.types.pure, writable=encoder.writable, overrides=given, mixed=mixed,
        )
        for tensor in checkpoint.tensors
    ]  # fmt: skip
    for tensor, choice in zip(checkpoint.tensors, choices, strict=True):
        if encoder.writable is not None and choice.type not in encoder.writable and tensor.stored != choice.type:
            what = f"{choice.type.name} needs the built library"
            raise UserError(options.model, what, f"run {native.build_command()}", tensor.label)
    return choices


def warn(job: Job) -> None:
    """One warning for the rows that are not whole blocks, one notice for types that need the built library."""
    odd, unwritable = [], set()
    writable = job.encoder.writable
    for tensor, choice in zip(job.checkpoint.tensors, job.choices, strict=True):
        fitted = policy.fit(choice.wanted, tensor.shape[-1])
        if fitted != choice.wanted:
            odd.append(f"  {tensor.name}: {tensor.shape[-1]} columns, {choice.wanted.name} -> {choice.type.name}")
        if writable is not None and fitted not in writable and fitted != choice.type:
            unwritable.add(f"{fitted.name} -> {choice.type.name}")
    if odd:
        what = f"rows of {len(odd)} tensors are not whole blocks, another type is used"
        print("\n".join([f"warning: {what}:", *odd]), file=job.messages)
    if unwritable:
        changes = ", ".join(sorted(unwritable))
        print(f"note: without the built library: {changes}; {native.build_command()} adds it", file=job.messages)

"""The type of every tensor of a file, by the policy's choices, and of the file."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from gguf import LlamaFileType

from ..base.errors import UserError
from ..checkpoint import policy
from ..checkpoint.policy import Choice
from ..checkpoint.source import Checkpoint
from ..checkpoint.stock import STOCK_TYPES, F16File
from ..codec import native
from ..rounding.encode import Encoder
from .options import TERNARY_TYPES, ConvertOptions


def choose(checkpoint: Checkpoint, options: ConvertOptions, encoder: Encoder, stock: F16File | None) -> list[Choice]:
    """The type of every tensor by the mix, of ``stock`` where it is one of llama.cpp's own types, or as it is given.

    Raises:
        UserError: a type needs the built library, which is not there.
    """
    given, mixed = options.overrides, None
    if stock is not None and options.stock is not None:
        names = [tensor.name for tensor in checkpoint.tensors if given.pattern(tensor.name) is not None]
        mixed = stock.mixed_types(options.stock, statistics=options.calibrated, given=names)
    choices = [
        policy.choose(
            tensor.name, tensor.shape, tensor.stored, options.target, checkpoint.model,
            pure=options.pure, writable=encoder.writable, overrides=given, mixed=mixed,
            fallback=options.fallback_kind,
        )
        for tensor in checkpoint.tensors
    ]  # fmt: skip
    for tensor, choice in zip(checkpoint.tensors, choices, strict=True):
        if encoder.writable is not None and choice.type not in encoder.writable and tensor.stored != choice.type:
            what = f"{choice.type.name} needs the built library"
            raise UserError(options.model, what, f"run {native.build_command()}", tensor.label)
    return choices


def file_type(checkpoint: Checkpoint, choices: Sequence[Choice], options: ConvertOptions) -> LlamaFileType:
    """``general.file_type``: of the output type, or of the ternary type that most matrices were found to be.

    Where types are chosen for a size, it is that of the type of most weights.
    """
    if options.plain or options.request.vocab_only:
        return checkpoint.ftype
    weights: Counter[str] = Counter()
    for tensor, choice in zip(checkpoint.tensors, choices, strict=True):
        weights[choice.type.name.lower()] += tensor.size
    if options.budgeted:
        name = max((name for name in weights if name != "f32"), key=weights.__getitem__)
        return STOCK_TYPES[name][1] if name in STOCK_TYPES else LlamaFileType[f"MOSTLY_{name.upper()}"]
    ternary = max(TERNARY_TYPES, key=lambda name: weights[name])
    if weights[ternary] > weights[options.target.name.lower()]:
        return LlamaFileType[f"MOSTLY_{ternary.upper()}"]
    return options.stock or LlamaFileType[f"MOSTLY_{options.outtype.upper()}"]

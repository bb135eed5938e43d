"""Ternary tensors in the converter: which matrices become TQ1_0 or TQ2_0, and latent weights ternarized on the way."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

import numpy as np
from gguf import GGMLQuantizationType as Type

from . import ternary
from .packing import BLOCK
from .policy import Choice, may_quantize

if TYPE_CHECKING:
    from .checkpoint import SourceTensor

MODES: Final = ("auto", "force", "off")
TYPES: Final = ("tq2_0", "tq1_0")


@dataclass(frozen=True)
class Outcome:
    """What was chosen.

    Attributes:
        tensors: the tensors, those ternarized with another ``load``.
        choices: the type of each.
        mode: ``auto`` or ``force`` if a tensor was found ternary or made so, else None.
    """

    tensors: list[SourceTensor]
    choices: list[Choice]
    mode: str | None


def apply(
    tensors: Sequence[SourceTensor], choices: Sequence[Choice], *, mode: str, qtype: Type, scale: str, arch: str
) -> Outcome:
    """Give ternary matrices a ternary type.

    ``auto`` takes every quantized matrix that is ternary already, whatever its name, and changes no value beyond
    rounding its scales to float16. ``force`` ternarizes the other matrices of the layers as training does. A matrix
    whose rows are not multiples of 256 becomes F16, which holds it exactly.

    Args:
        tensors: of the checkpoint.
        choices: what the type policy chose for each; F32 and F16 are left alone.
        mode: one of :data:`MODES`.
        qtype: TQ1_0 or TQ2_0.
        scale: of ``force``, a key of ``ternary.SCALES``.
        arch: ``general.architecture``.
    """
    if mode == "off":
        return Outcome(list(tensors), list(choices), None)
    new_tensors, new_choices, found, unfit = [], [], 0, []
    for tensor, old in zip(tensors, choices, strict=True):
        choice, source = old, tensor
        if old.type not in (Type.F32, Type.F16, Type.BF16) and may_quantize(tensor.name, tensor.shape, arch):
            fitting = qtype if tensor.shape[-1] % BLOCK == 0 else Type.F16
            if is_ternary(tensor):
                found += 1
                if scales_fit(tensor):
                    choice = Choice(fitting, fitting)
                else:
                    unfit.append(tensor.name)
            elif mode == "force" and tensor.name.startswith("blk."):
                found += 1
                choice, source = Choice(fitting, fitting), replace(tensor, load=ternarized(tensor.load, scale))
        new_tensors.append(source)
        new_choices.append(choice)
    if unfit:
        names = ", ".join(unfit)
        print(
            f"warning: ternary, but with scales that float16 cannot hold, so not {qtype.name}: {names}", file=sys.stderr
        )
    return Outcome(new_tensors, new_choices, mode if found else None)


def _matrices(parts: Iterator[np.ndarray]) -> Iterator[np.ndarray]:
    """Each part as matrices: experts come stacked, and each has its own scale."""
    for part in parts:
        array = np.asarray(part)
        yield from array.reshape(-1, *array.shape[-2:]) if array.ndim > 2 else (array,)


def is_ternary(tensor: SourceTensor) -> bool:
    """Whether every matrix of a tensor is ternary after its scales; stops at the first that is not."""
    return all(
        matrix.dtype.kind == "f" and ternary.recognise(matrix) is not None for matrix in _matrices(tensor.load())
    )


def scales_fit(tensor: SourceTensor) -> bool:
    """Whether float16 holds the scales of a ternary tensor to its own precision."""
    found = (ternary.recognise(matrix) for matrix in _matrices(tensor.load()))
    return all(value is not None and value.rounds_to_float16 for value in found)


def ternarized(load: Callable[[], Iterator[np.ndarray]], scale: str) -> Callable[[], Iterator[np.ndarray]]:
    """``load`` with every matrix replaced by its ternary form (float32)."""

    def load_ternary() -> Iterator[np.ndarray]:
        for matrix in _matrices(load()):
            yield ternary.ternarize(matrix, scale).weights()

    return load_ternary

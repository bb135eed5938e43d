"""Ternary tensors in the converter: which matrices become TQ1_0 or TQ2_0, and latent weights ternarized on the way."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TextIO

import numpy as np
from gguf import GGMLQuantizationType as Type

from ..checkpoint.policy import Choice, may_quantize
from ..checkpoint.source import Checkpoint, SourceTensor
from ..codec import ternary
from ..codec.transform import BLOCK
from .options import TERNARY_TYPES, ConvertOptions


@dataclass(frozen=True)
class Ternaries:
    """The matrices of a checkpoint that get a ternary type.

    Attributes:
        found: names of those that are ternary already.
        forced: names of those that are to be ternarized.
        qtype: TQ1_0 or TQ2_0.
        scale: how ``forced`` ones are ternarized, a key of ``ternary.SCALES``.
    """

    found: frozenset[str]
    forced: frozenset[str]
    qtype: Type
    scale: str

    @property
    def kept(self) -> frozenset[str]:
        """All of them; rescaled, they would have more than three values."""
        return self.found | self.forced

    @property
    def mode(self) -> str | None:
        """For the file's metadata: ``force`` and the scale, ``auto``, or None if no matrix is ternary."""
        return f"force {self.scale}" if self.forced else "auto" if self.found else None

    def choose(self, tensors: Sequence[SourceTensor], choices: Sequence[Choice]) -> list[Choice]:
        """The type policy's choices with the ternary type where it belongs, F16 where rows are no multiple of 256."""
        chosen = []
        for tensor, choice in zip(tensors, choices, strict=True):
            fitting = self.qtype if tensor.shape[-1] % BLOCK == 0 else Type.F16
            chosen.append(Choice(fitting, fitting) if tensor.name in self.kept else choice)
        return chosen

    def load(self, tensors: Sequence[SourceTensor]) -> list[SourceTensor]:
        """The tensors, those of ``forced`` with a ``load`` that ternarizes."""
        return [
            replace(tensor, load=partial(_ternarized, tensor.load, self.scale))
            if tensor.name in self.forced
            else tensor
            for tensor in tensors
        ]


def find(checkpoint: Checkpoint, options: ConvertOptions, messages: TextIO) -> Ternaries:
    """The matrices that get a ternary type; none in a file as upstream writes it.

    ``auto`` takes every matrix that may be quantized and is ternary already, whatever its name, and changes no value
    beyond rounding its scales to float16. ``force`` ternarizes the other matrices of the layers as training does.
    Ordinary matrices are told apart by their first row, where it can be read alone.

    Args:
        checkpoint: not rescaled.
        options: of the conversion; tensors whose type is given by name stay as they are.
        messages: where a warning goes.
    """
    qtype = Type[(options.outtype if options.outtype in TERNARY_TYPES else options.ternary_type).upper()]
    mode = "off" if options.plain else options.ternary
    found, forced, unfit, model = set(), set(), [], checkpoint.model
    for tensor in checkpoint.tensors if mode != "off" else ():
        if options.gives(tensor.name, tied=model.tied) or tensor.stored != Type.F16:
            continue
        if not may_quantize(tensor.name, tensor.shape, model.arch):
            continue
        rows = checkpoint.first_rows(tensor)
        may_be = rows is None or any(ternary.looks_ternary(row) for row in rows)
        if may_be and (fits := _scales_fit(tensor)) is not None:
            if fits:
                found.add(tensor.name)
            else:
                unfit.append(tensor.name)
        elif mode == "force" and tensor.name.startswith("blk."):
            forced.add(tensor.name)
    if unfit:
        names = ", ".join(unfit)
        print(f"warning: ternary, but float16 cannot hold the scales, so not {qtype.name}: {names}", file=messages)
    return Ternaries(frozenset(found), frozenset(forced), qtype, options.ternary_scale)


def _matrices(parts: Iterator[np.ndarray]) -> Iterator[np.ndarray]:
    """Each part as matrices: experts come stacked, and each has its own scale."""
    for part in parts:
        array = np.asarray(part)
        yield from array.reshape(-1, *array.shape[-2:]) if array.ndim > 2 else (array,)


def _scales_fit(tensor: SourceTensor) -> bool | None:
    """Whether float16 holds the scales of a ternary tensor to its own precision; None where a matrix is not ternary."""
    fits = True
    for matrix in _matrices(tensor.load()):
        found = ternary.recognise(matrix) if matrix.dtype.kind == "f" else None
        if found is None:
            return None
        fits = fits and found.rounds_to_float16
    return fits


def _ternarized(load: Callable[[], Iterator[np.ndarray]], scale: str) -> Iterator[np.ndarray]:
    """What a tensor's ``load`` yields, with every matrix replaced by its ternary form (float32)."""
    for matrix in _matrices(load()):
        yield ternary.ternarize(matrix, scale).weights()

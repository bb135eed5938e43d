"""Experts that a checkpoint holds one by one, read and packed one after the other.

Transformers would stack the floats of all experts first. :class:`Stacked` takes the place of that conversion: it reads
no tensor, and hands what reads them to the packing.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from concurrent.futures import Future
from typing import Any

import torch
from transformers.core_model_loading import Concatenate, ConversionOps, MergeModulelist, WeightConverter


class Pieces(list[list[Any]]):
    """A stack that is not made yet: for every expert what reads the pieces of its matrix, the first rows first."""


def read(piece: Any) -> torch.Tensor:
    """A tensor out of what Transformers reads it with, at once or beforehand in a thread."""
    found: torch.Tensor = piece.result() if isinstance(piece, Future) else piece()
    return found


class _Stack(ConversionOps):
    """In place of Transformers' operations that stack the floats of all experts: leaves packed ones in pieces."""

    def __init__(self, operations: Sequence[ConversionOps], packed: Collection[str]) -> None:
        self.operations, self.packed = operations, packed

    def __deepcopy__(self, _: Any) -> _Stack:
        return self  # of every parameter, by Transformers

    def convert(
        self, input_dict: dict[str, Any], source_patterns: list[str], target_patterns: list[str],
        full_layer_name: str = "", **options: Any,
    ) -> dict[str, Any]:  # fmt: skip
        if full_layer_name in self.packed:
            stacks = [input_dict[pattern] for pattern in source_patterns]
            return {target_patterns[0]: Pieces(list(parts) for parts in zip(*stacks, strict=True))}
        found: dict[str, Any] = {key: [read(piece) for piece in pieces] for key, pieces in input_dict.items()}
        for operation in self.operations:
            found = operation.convert(
                found, source_patterns=source_patterns, target_patterns=target_patterns,
                full_layer_name=full_layer_name, **options,
            )  # fmt: skip
        return found


class Stacked(WeightConverter):
    """A conversion that stacks experts, one that reads no tensor before its turn."""

    __slots__ = ()

    def materialize_tensors(self) -> dict[str, Any]:
        """What reads the tensors, by pattern of their names."""
        found = dict(self.collected_tensors)
        self.collected_tensors.clear()
        return found

    @classmethod
    def of(cls, converter: WeightConverter, packed: Collection[str]) -> Stacked | None:
        """The conversion in place of one of Transformers; None of one that does more than to stack."""
        merge, *rest = converter.operations
        needed = ("_original_source_patterns", "_original_target_patterns", "materialize_tensors", "force_cpu")
        if not all(hasattr(converter, name) for name in needed):
            return None  # another version of Transformers: it stacks the floats of all experts first
        if type(merge) is not MergeModulelist or merge.dim or len(converter.target_patterns) != 1:
            return None
        if [(type(operation), getattr(operation, "dim", None)) for operation in rest] not in ([], [(Concatenate, 1)]):
            return None
        made = cls(
            list(converter._original_source_patterns), list(converter._original_target_patterns),
            [_Stack(converter.operations, packed)], force_cpu=converter.force_cpu,
        )  # fmt: skip
        made.scope_prefix, made.base_model_prefix = converter.scope_prefix, converter.base_model_prefix
        return made

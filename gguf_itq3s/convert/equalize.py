"""Equalization in a conversion: the factors of channels that make rounding cheapest.

Rounding to the nearest codewords wants (w / a)^(1/4). Feedback (LDLQ) makes up for uneven inputs itself, and what it
leaves goes with the energy of the weights: it wants even columns, w^(1/2), whatever the inputs. docs/calibration.md has
the errors by which the powers were chosen, kind by kind.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, TextIO

import numpy as np
import numpy.typing as npt

from ..base.errors import UserError
from ..checkpoint.channels import ROUTERS, VALUES, Channels, Plan
from ..checkpoint.rescaling import LARGEST, STEPS, Equalization
from ..checkpoint.source import SourceTensor
from ..codec.transform import SHORT_BLOCK, rotation_block
from ..rounding import equalize as best
from ..rounding.factors import Inputs

#: Part of the source of channels -> powers of w and a in t^4; channels of others stay.
Powers = Mapping[str, tuple[float, float]]
_SECOND_NORMS: Final = ("ffn_norm", "post_attention_norm")
_UPS: Final = ("ffn_up", "ffn_up_exps", "ffn_up_shexp", "ffn_gate_up_exps")
#: For rounding to the nearest codewords.
NEAREST: Final[Powers] = dict.fromkeys(("attn_norm", *_SECOND_NORMS, *VALUES, *_UPS), (1.0, 1.0))
#: With feedback by an importance matrix, and by Hessians.
DIAGONAL: Final[Powers] = dict.fromkeys(("attn_norm", *_UPS), (2.0, 0.0))
FULL: Final[Powers] = dict.fromkeys(("attn_norm", *_SECOND_NORMS, *_UPS), (2.0, 0.0))

#: Tokens of the short run that takes statistics where none are given; measured in docs/calibration.md.
TOKENS: Final = 2048
#: The length of its windows.
CONTEXT: Final = 512
# Weights that are squared at a time.
_PIECE: Final = 1 << 22

Vector = npt.NDArray[np.float64]


def equalize(
    plan: Plan, tensors: Mapping[str, SourceTensor], inputs: Inputs | None, powers: Powers, messages: TextIO
) -> Equalization:
    """The best factors of a model's channels.

    Args:
        plan: which there are.
        tensors: of the model, by GGUF name.
        inputs: statistics, brought to the model's basis; None where no power asks for them.
        powers: for the way in which matrices are rounded.
        messages: where it is said what is done and what is left.

    Raises:
        UserError: the statistics are of another model.
    """
    exponents, left, costs = {}, [*plan.left_alone], dict[str, list[float]]()
    for source, channels in plan.channels.items():
        part = _part(source)
        if part not in powers:
            continue
        try:
            found = _exponents(channels, tensors, inputs, powers[part])
        except ValueError as problem:
            assert inputs is not None
            remedy = "take statistics of this model, or convert with --no-equalize"
            raise UserError(inputs.source.path, str(problem), remedy, source) from problem
        if isinstance(found, str):
            left.append(f"{source}: {found}")
            continue
        exponents[source], cost = found
        costs.setdefault(part, []).append(cost)
    if costs:
        parts = [f"{np.mean(found):.2f} by {part}" for part, found in costs.items()]
        print(f"equalized {len(exponents)} sets of channels; predicted cost of rounding: {', '.join(parts)}",
              file=messages)  # fmt: skip
    if left:
        print("\n  ".join(["note: channels that are not equalized:", *left]), file=messages)
    return Equalization(plan.channels.values(), exponents)


def _part(source: str) -> str:
    return source.split(".")[-2]


def neutral(plan: Plan, powers: Powers) -> Equalization:
    """One that changes nothing, of the size of the one that statistics would give."""
    exponents = {
        source: np.zeros(channels.shape, dtype=np.int8)
        for source, channels in plan.channels.items()
        if rotation_block(channels.count * channels.repeats) and _part(source) in powers
    }
    return Equalization(plan.channels.values(), exponents)


def _exponents(
    channels: Channels, tensors: Mapping[str, SourceTensor], inputs: Inputs | None, powers: tuple[float, float]
) -> tuple[npt.NDArray[np.int8], float] | str:
    """Exponents (experts or 1, count) of some channels and what share of the cost is left, or why there are none."""
    columns = channels.count * channels.repeats
    if not rotation_block(columns):
        return f"{columns} columns are not whole blocks of {SHORT_BLOCK}"
    experts = [*range(channels.experts)] if channels.experts else [None]
    known: list[Vector | None] = [np.ones(columns)] * len(experts)  # where their power is 0
    if inputs is not None:
        known = [_inputs(channels, tensors, inputs, columns, expert) for expert in experts]
    if all(values is None for values in known):
        return "nothing is known of what it reads" if len(channels.readers) > 1 else "its readers have no statistics"
    weights = _weights(channels, tensors, columns)
    if not np.isfinite(weights).all():
        return "there are weights that are NaN or infinite"
    tied = None if channels.repeats == 1 else channels.of_column
    exponents = np.zeros((len(experts), channels.count), dtype=np.int8)
    before = after = 0.0
    for number, (w, a) in enumerate(zip(weights, known, strict=True)):
        if a is None:  # an expert that saw no token
            continue
        eighths = best.logarithms(w, a, tied, powers) * STEPS / np.log(2)
        exponents[number] = np.clip(np.rint(eighths), -LARGEST, LARGEST)
        square = np.exp2(2 * exponents[number].astype(np.float64) / STEPS)[channels.of_column]
        before += best.cost(w, a)
        # With feedback, uneven inputs cost nothing: what counts are the weights, at factors whose product is 1.
        after += best.cost(w / square, a * square if powers[1] else a)
    return exponents, (after or 1.0) / (before or 1.0)


def _inputs(
    channels: Channels, tensors: Mapping[str, SourceTensor], inputs: Inputs, columns: int, expert: int | None
) -> Vector | None:
    """Mean squares of what reads the channels, (columns,); None where nothing is known."""
    found: list[Vector] = []
    for reader in channels.readers:
        stacked = len(tensors[reader].shape) == 3 and not channels.experts
        if not inputs.source.known(reader):
            continue
        if stacked and found:  # the router and shared experts have seen every token, experts few
            break
        count = tensors[reader].shape[0] if stacked else 1
        for number in range(count):
            energies = inputs.energies(reader, columns, number if stacked else expert)
            if energies is not None and energies.any():
                found.append(energies)
        if stacked:
            break
    return np.mean(found, axis=0) if found else None


def _weights(channels: Channels, tensors: Mapping[str, SourceTensor], columns: int) -> Vector:
    """Mean squares of the columns that read the channels, (experts or 1, columns), over all their readers alike."""
    readers = [reader for reader in channels.readers if reader.split(".")[-2] not in ROUTERS]
    found = [mean_squares(tensors[reader]) for reader in readers or channels.readers]
    return np.mean(found, axis=0) if channels.experts else np.concatenate(found).mean(axis=0, keepdims=True)


def mean_squares(tensor: SourceTensor) -> Vector:
    """Mean squares of the columns of a matrix, or of each of a stack: float64 (matrices, n)."""
    matrices = tensor.shape[0] if len(tensor.shape) == 3 else 1
    sums = np.zeros((matrices, tensor.shape[-1]))
    row, rows = 0, int(np.prod(tensor.shape[:-1])) // matrices
    for part in tensor.load():
        flat = np.asarray(part).reshape(-1, part.shape[-1])
        start = 0
        while start < len(flat):
            matrix = (row + start) // rows
            end = min(len(flat), (matrix + 1) * rows - row, start + max(1, _PIECE // flat.shape[1]))
            with np.errstate(over="ignore"):  # what is infinite is not equalized
                squares = np.square(flat[start:end].astype(np.float32))
            sums[matrix] += squares.sum(axis=0, dtype=np.float64)
            start = end
        row += len(flat)
    return sums / rows

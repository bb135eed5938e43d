"""Scores of types: what it costs a model to have a matrix in one of them (``--target-bpw``, ``--target-size``).

With E the error of the matrix W in a type and H the second moment of its inputs, the score is

* with ``--fisher``, ``tr(G E H E^T) / 2``: to second order the KL divergence, in nats per token, that this error alone
  costs. G is the Fisher matrix of the outputs, with what the feedback across rows makes up for taken off.
* without a backward pass, ``tr(E H E^T) / tr(W H W^T)``: the share of noise in the matrix's outputs. The absolute
  error says nothing, for a norm may follow that takes any scale away, and streams grow from layer to layer. What a
  layer's matrix puts out goes into one of the 2 L additions to the residual stream of L layers, so its share counts
  1 / (2 L); that of the embedding and the output matrix, which all goes through, counts in full. (On the bundled model
  nats per share are 0.01 to 0.13 in the layers, 0.06 in the middle, 1.8 at the ends, and 1 / (2 L) is 0.08.)

Rows of the token embedding are looked up: they are weighted by the frequency of their tokens, those of the output
matrix by the Fisher information of their logit, or by the same frequency. A tied matrix counts as both.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import gguf
import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType as Type

from ..base.errors import UserError, errors_of_weights
from ..checkpoint.source import Checkpoint, SourceTensor
from ..codec.family import rotation
from ..rounding import fisher, hessian
from ..rounding.encode import Encoder, takes_hessian
from ..rounding.factors import HessianFactors, tensor_entry
from .backward import OutputFisher
from .ends import Ends
from .layers import LayeredModel
from .matrices import EMBEDDING, OUTPUT, Source

#: Weights of a tensor that are rounded for its scores.
_SAMPLE: Final = 1 << 20

Vector = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Score:
    """The scores of a tensor, in each of its types.

    Attributes:
        relative: share of noise in what it puts out, or in the residual stream that it goes to.
        fisher: KL divergence in nats per token; None where the gradients of its outputs are not known.
    """

    relative: tuple[float, ...]
    fisher: tuple[float, ...] | None


@dataclass(frozen=True)
class _Use:
    """A way in which a matrix is used: weights of its rows (m,), None for ones; rotated Hessian, None for the identity;
    whether the two give nats."""

    rows: Vector | None
    hessian: npt.NDArray[np.floating] | None
    fisher: bool


class RowWeights:
    """How much the rows of the layers' matrices count, by their output Fisher matrices.

    Args:
        source: of the file: by the rows of its tensors the order of the conversion is found.
    """

    def __init__(self, model: LayeredModel, gradients: OutputFisher, source: Source) -> None:
        self.gradients, self._model, self._source = gradients, model, source
        self._number, self._weights = -1, dict[str, Vector]()

    def of(self, name: str, expert: int | None) -> Vector | None:
        """(m,) of a matrix, rows in GGUF's order; None where they are not known."""
        found = re.match(r"blk\.(\d+)\.", name)
        if not found or int(found[1]) >= self._model.layers:
            return None
        if int(found[1]) != self._number:
            self._number = int(found[1])
            self._weights = dict(self._layer())
        return self._weights.get(tensor_entry(name, expert))

    def _layer(self) -> Iterator[tuple[str, Vector]]:
        number = self._number
        for group in self._model.layout.groups(number, self._model.blocks[number]):
            for reader in group.readers:
                if blocks := self.gradients.blocks(reader, number):
                    weights = np.concatenate([fisher.factorize(block).weight for block in blocks])
                    rows = self._source.rescaling.rows(reader.name, reader.expert)
                    # Outputs times rows: gradients over rows, and these are squares.
                    scale = 1.0 if rows is None else np.square(rows, dtype=np.float64)
                    yield reader.entry, reader.in_order(weights) / scale


class Scores:
    """Scores of a model's tensors.

    Args:
        checkpoint: tensors as they are written, rescaled.
        factors: what tensors are rounded with.
        judges: the same of tokens that are not in ``factors``: H of the costs. Rounding fits the tokens that it knows,
            and costs on others 1.1 to 1.8 times as much. None where there are none.
        statistics_of_ends: of the embedding and the output matrix, if they are known.
        rows: how much rows count, with ``--fisher``.
    """

    def __init__(
        self, checkpoint: Checkpoint, factors: HessianFactors, judges: HessianFactors | None, encoder: Encoder,
        statistics_of_ends: Ends | None, rows: RowWeights | None,
    ) -> None:  # fmt: skip
        self._checkpoint, self._factors, self._judges, self._encoder = checkpoint, factors, judges, encoder
        self._ends, self._rows = statistics_of_ends, rows

    def of(self, tensor: SourceTensor, types: Sequence[Type]) -> Score:
        """The scores of a tensor in each of the types.

        Raises:
            UserError: its weights or statistics cannot be used.
        """
        weights = tensor.whole()
        if not np.isfinite(weights).all():
            what, remedy = "has weights that are NaN or infinite", "repair the checkpoint or download it again"
            raise UserError(self._checkpoint.folder, what, remedy, tensor.label)
        matrices = weights[None] if weights.ndim == 2 else weights.reshape(-1, *weights.shape[-2:])
        relative, nats = np.zeros(len(types)), np.zeros(len(types))
        known = True
        for number, matrix in enumerate(matrices):
            uses = self._uses(tensor, matrix, number if weights.ndim > 2 else None)
            costs, energies = self._costs(tensor, matrix, number, types, uses, _SAMPLE // len(matrices))
            relative += (costs / energies[:, None]).sum(axis=0) / len(matrices)
            nats += costs.sum(axis=0) / 2
            known = known and all(use.fisher for use in uses)
        if tensor.name not in (EMBEDDING, OUTPUT):
            relative /= 2 * max(1, self._checkpoint.model.layers)
        return Score(_rounded(relative), _rounded(nats) if known else None)

    def _costs(
        self, tensor: SourceTensor, matrix: npt.NDArray[np.float32], number: int, types: Sequence[Type], uses:
        Sequence[_Use], sample: int,
    ) -> tuple[Vector, Vector]:  # fmt: skip
        """(uses, types) costs of rounding a matrix, and (uses,) the same of its weights."""
        totals = [np.ones(len(matrix)) if use.rows is None else use.rows for use in uses]
        rows = _sample(
            np.sum([total / (total.sum() or 1.0) for total in totals], axis=0), max(1, sample // matrix.shape[1])
        )
        here = np.ascontiguousarray(matrix[rows.indices])
        shares = [np.sqrt(total[rows.indices] * rows.counts(total))[:, None] for total in totals]
        known = self._factors.source.known(tensor.name)

        def cost(errors: npt.NDArray[np.floating]) -> list[float]:
            turned = hessian.rotate_rows(errors)
            weighted = [(turned * share, use.hessian) for use, share in zip(uses, shares, strict=True)]
            return [float(np.square(e).sum()) if h is None else hessian.cost(e, h) for e, h in weighted]

        costs = []
        for qtype in types:
            factor = None
            if known and takes_hessian(qtype, tensor.shape[-1]):
                factor = self._factors.factor(tensor.name, tensor.shape, number, block=rotation(qtype))
            with errors_of_weights(self._checkpoint.folder, tensor.label):
                decoded = gguf.quants.dequantize(self._encoder.rows(here, qtype, factor), qtype)
            costs.append(cost(decoded - here))
        return np.array(costs).T, np.array([energy or 1.0 for energy in cost(here)])

    def _uses(self, tensor: SourceTensor, matrix: npt.NDArray[np.float32], expert: int | None) -> list[_Use]:
        if tensor.name == EMBEDDING:
            tied = [self._output(tensor, matrix)] if self._checkpoint.model.tied else []
            return [self._lookup(matrix), *tied]
        if tensor.name == OUTPUT:
            return [self._output(tensor, matrix)]
        rows = None if self._rows is None else self._rows.of(tensor.name, expert)
        found = self._hessian(tensor, expert)
        return [_Use(rows, found, rows is not None and found is not None)]

    def _lookup(self, matrix: npt.NDArray[np.float32]) -> _Use:
        frequency = None if self._ends is None else _of_length(self._ends.frequency, len(matrix))
        behind = None if self._rows is None else self._rows.gradients.input()
        if frequency is None or behind is None:
            return _Use(frequency, None, fisher=False)
        moment, square = behind
        # Some models multiply what they look up by a factor.
        own = float(frequency @ np.square(matrix, dtype=np.float64).mean(axis=1))
        return _Use(frequency * (square / own if own else 1.0), moment, fisher=True)

    def _output(self, tensor: SourceTensor, matrix: npt.NDArray[np.float32]) -> _Use:
        if self._ends is None or self._ends.output is None:
            return _Use(None, self._hessian(tensor, None), fisher=False)
        if self._rows is None:
            return _Use(_of_length(self._ends.frequency, len(matrix)), self._ends.output, fisher=False)
        weights = _of_length(self._rows.gradients.output().astype(np.float64), len(matrix))
        return _Use(weights, self._ends.output, fisher=True)

    def _hessian(self, tensor: SourceTensor, expert: int | None) -> npt.NDArray[np.floating] | None:
        if not self._factors.source.known(tensor.name):
            return None
        try:
            # Of experts, no token held out may have come to one.
            known = (of.rotated(tensor.name, tensor.shape[-1], expert) for of in (self._judges, self._factors) if of)
            return next((found for found in known if found is not None), None)
        except ValueError as error:
            path, remedy = self._factors.source.path, "collect the statistics again"
            raise UserError(path, str(error), remedy, tensor.name) from error


@dataclass(frozen=True)
class _Rows:
    """Rows of a matrix that stand for all: the heaviest, and others spread evenly over the rest.

    Attributes:
        indices: of all of them.
        heaviest: how many of them stand for themselves alone.
        others: indices of the rows that the others stand for.
    """

    indices: npt.NDArray[np.int64]
    heaviest: int
    others: npt.NDArray[np.int64]

    def counts(self, weights: Vector) -> Vector:
        """For how many rows, by weight, each of them stands."""
        counts = np.ones(len(self.indices))
        seen = float(weights[self.indices[self.heaviest :]].sum())
        if seen:
            counts[self.heaviest :] = float(weights[self.others].sum()) / seen
        return counts


def _sample(weights: Vector, count: int) -> _Rows:
    everything = np.arange(len(weights))
    if len(weights) <= count:
        return _Rows(everything, len(weights), everything[:0])
    order = np.argsort(-weights, kind="stable")
    heaviest, others = order[: count // 2], np.sort(order[count // 2 :])
    spread = others[np.linspace(0, len(others) - 1, count - count // 2).astype(int)]
    return _Rows(np.concatenate([heaviest, spread]), len(heaviest), others)


def _of_length(values: Vector, count: int) -> Vector:
    """As many values as a matrix has rows: a vocabulary may be padded."""
    result = np.zeros(count)
    result[: len(values)] = values[:count]
    return result


def _rounded(values: Vector) -> tuple[float, ...]:
    # The order in which threads add up must not change a choice.
    return tuple(max(0.0, float(f"{value:.6g}")) for value in values)

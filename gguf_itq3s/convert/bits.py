"""Types for a size: bits go where they lower the error of the model most (``--target-bpw``, ``--target-size``).

Each matrix gets a score in each type that it could have, and :mod:`gguf_itq3s.rounding.allocation` chooses. With E the
error of the matrix W in that type and H the second moment of its inputs, the score is

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

import argparse
import json
import math
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, TextIO

import gguf
import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType as Type
from tqdm import tqdm

from .. import report
from ..calibration import ends, store
from ..calibration.backward import OutputFisher
from ..calibration.ends import Ends
from ..calibration.layers import LayeredModel
from ..calibration.options import FULL_COLUMNS
from ..calibration.pipeline import calibrate
from ..calibration.streams import check_rows, row_order
from ..calibration.text import windows
from ..checkpoint.policy import Choice, may_quantize
from ..checkpoint.reading import Checkpoint, SourceTensor
from ..checkpoint.rescaling import Rescaling
from ..codec.types import ITQ3_S
from ..errors import UserError, output_error
from ..rounding import allocation, fisher, hessian
from ..rounding.allocation import Candidates
from ..rounding.factors import HessianFactors, Statistics, tensor_entry
from .encode import CALIBRATED_TYPES, Encoder
from .options import ConvertOptions
from .output import padded
from .sequential import SCORES, STATISTICS, Sequential, whole

#: What a matrix can be, with the fewest bits first.
TYPES: Final = (ITQ3_S, Type.IQ4_XS, Type.Q4_K, Type.Q5_K, Type.Q6_K, Type.Q8_0)
#: Weights of a tensor that are rounded for its scores.
_SAMPLE: Final = 1 << 20
#: Points of the curve.
_POINTS: Final = 10
#: Room for the metadata that are not in the head yet when types are chosen, in each part of the file.
MORE_METADATA: Final = 1024
_EMBEDDING, _OUTPUT = "token_embd.weight", "output.weight"

Vector = npt.NDArray[np.float64]


def bits_per_weight(argument: str) -> float:
    """A number of bits, for argparse."""
    try:
        bits = float(argument)
    except ValueError:
        bits = math.nan
    if not 0 < bits < 64:
        raise argparse.ArgumentTypeError(f"{argument!r:.40} is no number of bits")
    return bits


# ------------------------------------------------------------------------------------------------------------- scores


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
    """One way in which a matrix is used: its rows count by ``rows``, its columns by ``hessian``.

    Attributes:
        rows: (m,), None where all count alike.
        hessian: rotated; None for the identity.
        fisher: whether the two give nats.
    """

    rows: Vector | None
    hessian: npt.NDArray[np.floating] | None
    fisher: bool


class RowWeights:
    """How much the rows of the layers' matrices count, by their output Fisher matrices.

    Args:
        model: for the layers.
        source: the Fisher matrices.
        plain: tensors of the checkpoint, nothing rescaled: by their rows the order of the conversion is found.
        rescaling: of the file.
    """

    def __init__(
        self, model: LayeredModel, source: OutputFisher, plain: Mapping[str, SourceTensor], rescaling: Rescaling
    ) -> None:
        self.source, self._model, self._plain, self._rescaling = source, model, plain, rescaling
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
        layer = self._model.load(self._number)
        stacks: dict[str, np.ndarray] = {}
        for group in self._model.layout.groups(self._number, layer):
            for reader in group.readers:
                blocks = self.source.blocks(reader, self._number)
                if not blocks:
                    continue
                if reader.name not in stacks:
                    stacks[reader.name] = whole(self._plain[reader.name])
                tensor = stacks[reader.name]
                here = tensor if reader.expert is None else tensor[reader.expert]
                try:
                    order = row_order(reader.rows(layer).detach().float().cpu().numpy(), here)
                except ValueError as problem:
                    raise check_rows(self._model, reader, problem) from problem
                weights = np.concatenate([fisher.factorize(block).weight for block in blocks])
                rows = self._rescaling.rows(reader.name, reader.expert)
                # Outputs times rows: gradients over rows, and these are squares.
                yield reader.entry, weights[order] / (1.0 if rows is None else np.square(rows, dtype=np.float64))
        self._model.unload(self._number)


class Scores:
    """Scores of a model's tensors.

    Args:
        checkpoint: tensors as they are written, rescaled.
        factors: statistics of their inputs.
        encoder: weights to bytes.
        statistics_of_ends: of the embedding and the output matrix, if they are known.
        rows: how much rows count, with ``--fisher``.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        factors: HessianFactors,
        encoder: Encoder,
        statistics_of_ends: Ends | None,
        rows: RowWeights | None,
    ) -> None:
        self._checkpoint, self._factors, self._encoder = checkpoint, factors, encoder
        self._ends, self._rows = statistics_of_ends, rows

    def of(self, tensor: SourceTensor, types: Sequence[Type]) -> Score:
        """The scores of a tensor in each of the types.

        Raises:
            UserError: its weights or statistics cannot be used.
        """
        weights = whole(tensor)
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
        if tensor.name not in (_EMBEDDING, _OUTPUT):
            relative /= 2 * max(1, self._checkpoint.model.layers)
        return Score(_rounded(relative), _rounded(nats) if known else None)

    def _costs(
        self,
        tensor: SourceTensor,
        matrix: npt.NDArray[np.float32],
        number: int,
        types: Sequence[Type],
        uses: Sequence[_Use],
        sample: int,
    ) -> tuple[Vector, Vector]:
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
            return [_cost(turned * share, use.hessian) for use, share in zip(uses, shares, strict=True)]

        costs = []
        for qtype in types:
            factor = None
            if known and qtype in CALIBRATED_TYPES:
                factor = self._factors.factor(tensor.name, tensor.shape, number, rotated=qtype == ITQ3_S)
            decoded = gguf.quants.dequantize(self._encoder.rows(here, qtype, factor), qtype)
            costs.append(cost(decoded - here))
        return np.array(costs).T, np.array([energy or 1.0 for energy in cost(here)])

    def _uses(self, tensor: SourceTensor, matrix: npt.NDArray[np.float32], expert: int | None) -> list[_Use]:
        if tensor.name == _EMBEDDING:
            tied = [self._output(tensor, matrix)] if self._checkpoint.model.tied else []
            return [self._lookup(matrix), *tied]
        if tensor.name == _OUTPUT:
            return [self._output(tensor, matrix)]
        rows = None if self._rows is None else self._rows.of(tensor.name, expert)
        found = self._hessian(tensor, expert)
        return [_Use(rows, found, rows is not None and found is not None)]

    def _lookup(self, matrix: npt.NDArray[np.float32]) -> _Use:
        frequency = None if self._ends is None else _of_length(self._ends.frequency, len(matrix))
        behind = None if self._rows is None else self._rows.source.input()
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
        weights = _of_length(self._rows.source.output().astype(np.float64), len(matrix))
        return _Use(weights, self._ends.output, fisher=True)

    def _hessian(self, tensor: SourceTensor, expert: int | None) -> npt.NDArray[np.floating] | None:
        factors = self._factors
        if not factors.source.known(tensor.name):
            return None
        try:
            return factors.rotated(tensor.name, tensor.shape[-1], expert)
        except ValueError as error:
            raise UserError(factors.source.path, str(error), "collect the statistics again", tensor.name) from error


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


def _cost(errors: npt.NDArray[np.floating], found: npt.NDArray[np.floating] | None) -> float:
    return float(np.square(errors).sum()) if found is None else hessian.cost(errors, found)


def _of_length(values: Vector, count: int) -> Vector:
    """As many values as a matrix has rows: a vocabulary may be padded."""
    result = np.zeros(count)
    result[: len(values)] = values[:count]
    return result


def _rounded(values: Vector) -> tuple[float, ...]:
    # The order in which threads add up must not change a choice.
    return tuple(max(0.0, float(f"{value:.6g}")) for value in values)


# -------------------------------------------------------------------------------------------------------------- plans


@dataclass(frozen=True)
class Plan:
    """The types of all tensors.

    Attributes:
        choices: of every tensor of the checkpoint.
        lines: of every matrix: name, type, bits per weight, score ("-" where its type was not to be chosen).
        curve: bits per weight over all weights, bytes, score; from the least to the most.
        here: the same of the choice.
        unit: of the scores.
    """

    choices: list[Choice]
    lines: list[tuple[str, str, str, str]]
    curve: list[tuple[float, int, float]]
    here: tuple[float, int, float]
    unit: str

    def describe(self, *, curve: bool) -> str:
        """The table, and the curve if it is wanted."""
        bits, size, score = self.here
        parts = [
            report.table(["tensor", "type", "bits/weight", "score"], self.lines),
            f"{bits:.3f} bits/weight, {report.size(size)}, score {score:.4g} ({self.unit})",
        ]
        if curve:
            points = sorted([(point, "") for point in self.curve] + [(self.here, "<- chosen")])
            rows = [
                [f"{bits:.3f}", report.size(size), f"{score:.4g}", mark] for (bits, size, score), mark in points
            ]  # fmt: skip
            parts.append("\n" + report.table(["bits/weight", "size", "score", ""], rows))
        return "\n".join(parts)


class Budget:
    """The bytes there are, and the tensors that they can be spent on.

    Args:
        checkpoint: tensors as they are written.
        choices: the mix's, which stand where nothing is to be chosen.
        options: with the target.
        encoder: which types it writes.
        given: tensors whose type the user has named.
        head: bytes of the file that are no tensors.

    Raises:
        UserError: the target cannot be had.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        choices: Sequence[Choice],
        options: ConvertOptions,
        encoder: Encoder,
        given: frozenset[str],
        head: int,
    ) -> None:
        self._checkpoint, self._choices, self._by_size = checkpoint, choices, options.target_size is not None
        writable = [qtype for qtype in TYPES if encoder.writable is None or qtype in encoder.writable]
        self.types: dict[str, list[Type]] = {}
        fixed = head if self._by_size else 0
        for tensor, choice in zip(checkpoint.tensors, choices, strict=True):
            fits = [qtype for qtype in writable if tensor.shape[-1] % gguf.GGML_QUANT_SIZES[qtype][0] == 0]
            if tensor.name not in given and self._chosen(tensor, choice) and len(fits) == len(writable):
                self.types[tensor.name] = fits
            else:
                fixed += self._bytes(tensor, choice.type)
        self._fixed = fixed
        self._weights = sum(tensor.size for tensor in checkpoint.tensors)
        self._open = [tensor for tensor in checkpoint.tensors if tensor.name in self.types]
        sizes = [[self._bytes(tensor, qtype) for qtype in self.types[tensor.name]] for tensor in self._open]
        least, most = (fixed + sum(of(values) for values in sizes) for of in (min, max))
        if options.target_size is not None:
            self.total = options.target_size
        else:
            self.total = int((options.target_bpw or 0.0) * self._weights / 8)
        if not least <= self.total <= most:
            raise UserError(options.model, self._unreachable(options, least, most), "give a target between them")

    @property
    def tensors(self) -> Sequence[SourceTensor]:
        """Those whose type is to be chosen."""
        return self._open

    def plan(self, scores: Mapping[str, Score]) -> Plan:
        """The types, by the scores of all tensors that are to be chosen."""
        values = _comparable(scores)
        tensors = [
            Candidates(
                np.array([self._bytes(tensor, qtype) for qtype in self.types[tensor.name]], dtype=np.int64),
                np.array(values[tensor.name]),
            )
            for tensor in self._open
        ]
        taken = allocation.allocate(tensors, self.total - self._fixed)
        types = {t.name: self.types[t.name][number] for t, number in zip(self._open, taken, strict=True)}
        chosen = {t.name: values[t.name][number] for t, number in zip(self._open, taken, strict=True)}
        choices = [
            Choice(types[tensor.name], types[tensor.name]) if tensor.name in types else choice
            for tensor, choice in zip(self._checkpoint.tensors, self._choices, strict=True)
        ]
        lines = [
            (
                tensor.name, choice.type.name, f"{8 * tensor.bytes_in(choice.type) / tensor.size:.3f}",
                f"{chosen[tensor.name]:.3g}" if tensor.name in chosen else "-",
            )
            for tensor, choice in zip(self._checkpoint.tensors, choices, strict=True)
            if len(tensor.shape) > 1
        ]  # fmt: skip
        least, most = (sum(of(tensor.sizes.tolist()) for tensor in tensors) for of in (min, max))
        curve = [
            self._point(tensors, allocation.allocate(tensors, int(budget)))
            for budget in np.linspace(least, most, _POINTS)
        ]
        nats = any(score.fisher is not None for score in scores.values())
        unit = "estimated KL divergence, nats per token" if nats else "sum of the shares of noise"
        return Plan(choices, lines, curve, self._point(tensors, taken), unit)

    def _point(self, tensors: Sequence[Candidates], choice: Sequence[int]) -> tuple[float, int, float]:
        size = self._fixed + allocation.size(tensors, choice)
        return 8 * size / self._weights, size, allocation.score(tensors, choice)

    def _bytes(self, tensor: SourceTensor, qtype: Type) -> int:
        size = tensor.bytes_in(qtype)
        return padded(size) if self._by_size else size

    def _chosen(self, tensor: SourceTensor, choice: Choice) -> bool:
        """Whether it is a matrix of floats that the mix quantizes, and not to a type without loss."""
        return (
            may_quantize(tensor.name, tensor.shape, self._checkpoint.model.arch)
            and tensor.stored in (Type.F16, Type.BF16, Type.F32)
            and choice.type not in (tensor.stored, Type.TQ1_0, Type.TQ2_0)
        )

    def _unreachable(self, options: ConvertOptions, least: int, most: int) -> str:
        if not self._open:
            return "has no matrix whose type could be chosen"
        if self._by_size:
            asked, low, high = f"{self.total} bytes", f"{least} bytes", f"{most} bytes"
        else:
            # In the digits that are shown, both can be had.
            low = f"{math.ceil(8000 * least / self._weights) / 1000:.3f}"
            high = f"{math.floor(8000 * most / self._weights) / 1000:.3f} bits per weight"
            asked = f"{options.target_bpw:g} bits per weight"
        return f"cannot be written with {asked}: the least is {low}, the most {high}"


def _comparable(scores: Mapping[str, Score]) -> dict[str, tuple[float, ...]]:
    """Scores of all tensors in one unit: where gradients are known of some only, the others are scaled as those are."""
    ratios = [
        nats / share
        for score in scores.values() if score.fisher is not None
        for nats, share in zip(score.fisher[:1], score.relative[:1], strict=True) if share
    ]  # fmt: skip
    scale = float(np.median(ratios)) if ratios else 1.0
    return {
        name: score.fisher if score.fisher is not None else tuple(scale * share for share in score.relative)
        for name, score in scores.items()
    }


def choose(
    budget: Budget,
    checkpoint: Checkpoint,
    factors_of: Callable[[Statistics | None], HessianFactors | None],
    encoder: Encoder,
    sequential: Sequential | None,
    options: ConvertOptions,
    work: Path,
    fingerprint: str,
    messages: TextIO,
) -> Plan:
    """Score the tensors and choose their types.

    Args:
        budget: what there is.
        checkpoint: tensors as they are written.
        factors_of: factors of given statistics; of None, of those that the options name.
        encoder: weights to bytes.
        sequential: what will quantize layer by layer, if that is asked for; the statistics are then collected here,
            and with ``--fisher`` the gradients.
        options: of the conversion.
        work: folder for both and for the scores.
        fingerprint: of all that decides the scores; what another run has left there is thrown away.
        messages: where progress goes.

    Raises:
        UserError: model, text or folder cannot be used.
        KeyboardInterrupt: interrupted; the same run goes on where it was.
    """
    if sequential is None:
        factors = factors_of(None)
        assert factors is not None
        found = ends.read(options.calibration) if options.calibration else None
        scores = Scores(checkpoint, factors, encoder, found, None)
        return budget.plan(dict(_scored(budget, scores, {}, lambda *_: None, messages)))
    folder = work / STATISTICS
    try:
        journal = work / SCORES
        done = _resume(journal, folder, fingerprint)
        # One Hessian at a time may be wide in memory; all of them together are files.
        calibrate(replace(sequential.calibration, out=folder, widest=FULL_COLUMNS))
        factors = factors_of(store.open_calibration(folder, checkpoint.files))
        assert factors is not None
        rows = None
        if sequential.options.fisher:
            model = LayeredModel(sequential.calibration, sequential.checkpoint)
            inputs = windows(sequential.calibration, model.context)
            rows = RowWeights(
                model, sequential.collect_fisher(work, model, inputs), sequential.plain, sequential.rescaling
            )
        scores = Scores(checkpoint, factors, encoder, ends.read(folder), rows)
        with journal.open("a") as file:

            def note(name: str, score: Score) -> None:
                file.write(json.dumps({"name": name, "relative": score.relative, "fisher": score.fisher}) + "\n")
                file.flush()

            return budget.plan(dict(_scored(budget, scores, done, note, messages)))
    except OSError as error:
        raise output_error(work, error) from error
    except UserError:
        if not any(work.glob("*/*")):  # nothing is lost that took time
            shutil.rmtree(work, ignore_errors=True)
        raise
    except KeyboardInterrupt:
        raise KeyboardInterrupt(f"interrupted; the same command continues from {work}") from None


def _scored(
    budget: Budget,
    scores: Scores,
    done: Mapping[str, Score],
    note: Callable[[str, Score], None],
    messages: TextIO,
) -> Iterator[tuple[str, Score]]:
    with tqdm(budget.tensors, unit=" tensors", desc="scores", file=messages, mininterval=0.5) as bar:
        for tensor in bar:
            score = done.get(tensor.name)
            if score is None:
                score = scores.of(tensor, budget.types[tensor.name])
                note(tensor.name, score)
            yield tensor.name, score


def _resume(journal: Path, statistics: Path, fingerprint: str) -> dict[str, Score]:
    """The scores that an interrupted run of the same kind has left."""
    try:
        lines: list[dict[str, Any]] = [json.loads(line) for line in journal.read_text().splitlines()]
    except (OSError, ValueError):
        lines = []
    if not lines or lines[0] != {"run": fingerprint}:
        shutil.rmtree(statistics, ignore_errors=True)
        journal.parent.mkdir(parents=True, exist_ok=True)
        journal.write_text(json.dumps({"run": fingerprint}) + "\n")
        return {}
    return {
        line["name"]: Score(tuple(line["relative"]), None if line["fisher"] is None else tuple(line["fisher"]))
        for line in lines[1:]
    }

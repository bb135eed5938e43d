"""Types for a size: bits go where they lower the error of the model most (``--target-bpw``, ``--target-size``).

Each matrix gets a score in each type that it could have (:mod:`gguf_itq3s.calibrate.scores`), and
:mod:`gguf_itq3s.rounding.allocation` chooses. The matrices of the experts of a layer, nearly all of a large mixture,
get one type together.
"""

from __future__ import annotations

import math
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, TextIO

import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType as Type
from tqdm import tqdm

from ..base import report
from ..base.errors import UserError, output_error
from ..base.journal import Journal
from ..checkpoint.policy import Choice, may_quantize
from ..checkpoint.source import Checkpoint, SourceTensor, padded
from ..codec.family import FAMILY
from ..codec.transform import BLOCK, SHORT_BLOCK, rotation_block
from ..codec.types import bits_per_weight
from ..rounding import allocation
from ..rounding.allocation import Candidates
from ..rounding.encode import Encoder
from ..rounding.factors import HessianFactors, Statistics
from . import ends, store
from .finished import HELD, SCORES, STATISTICS
from .options import FULL_COLUMNS
from .ranks import ALONE, Ranks
from .run import Sequential
from .scores import RowWeights, Score, Scores
from .statistics import calibrate

#: What a matrix can be, with the fewest bits first, by the length of the blocks that its rows are rotated in. Of rows
#: that are multiples of 256 the types in blocks of 64 are left out: they have at most a twentieth less error than those
#: in blocks of 256, and for an eighth of a bit a larger type takes off more.
TYPES: Final[Mapping[int, tuple[Type, ...]]] = {
    block: tuple(
        sorted((*(qtype for qtype, kind in FAMILY.items() if kind.format.block == block), *others), key=bits_per_weight)
    )
    for block, others in (
        (BLOCK, (Type.Q5_K, Type.Q6_K, Type.Q8_0)),
        (SHORT_BLOCK, (Type.Q5_0, Type.Q5_1, Type.Q8_0)),
    )
}
#: A stack of experts' matrices, and the layer that it is of.
_EXPERTS: Final = re.compile(r"(blk\.\d+)\.ffn_\w+_exps\.weight")
_LAYER: Final = re.compile(r"blk\.\d+\.")
#: Points of the curve.
_POINTS: Final = 10


@dataclass(frozen=True)
class Plan:
    """The types of all tensors.

    Attributes:
        choices: of every tensor of the checkpoint.
        lines: of every matrix: name, type, bits per weight, score ("-" where its type was not to be chosen).
        curve: bits per weight over all weights, bytes, score; from the least to the most.
        here: the same of the choice.
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
        given: tensors whose type the user has named.
        bits: per weight over all tensors; of the tensors, heads and padding apart.
        size: bytes of the whole file, instead of ``bits``.
        head: bytes of the file that are no tensors.

    Raises:
        UserError: the target cannot be had.
    """

    def __init__(
        self, checkpoint: Checkpoint, choices: Sequence[Choice], encoder: Encoder, given: frozenset[str], *,
        bits: float | None, size: int | None, head: int,
    ) -> None:  # fmt: skip
        self.checkpoint, self.encoder = checkpoint, encoder
        self._choices, self._by_size = choices, size is not None
        self.types: dict[str, list[Type]] = {}
        fixed = head if self._by_size else 0
        for tensor, choice in zip(checkpoint.tensors, choices, strict=True):
            fits = TYPES.get(rotation_block(tensor.shape[-1]), ())
            if tensor.name not in given and self._chosen(tensor, choice) and fits:
                self.types[tensor.name] = [t for t in fits if encoder.writable is None or t in encoder.writable]
            else:
                fixed += self._bytes(tensor, choice.type)
        self._fixed = fixed
        self._weights = sum(tensor.size for tensor in checkpoint.tensors)
        #: Those whose type is to be chosen.
        self.tensors = [tensor for tensor in checkpoint.tensors if tensor.name in self.types]
        self._groups = _grouped(self.tensors, self.types)
        sizes = [self._sizes(group) for group in self._groups]
        least, most = (fixed + sum(int(of(values)) for values in sizes) for of in (np.min, np.max))
        self.total = size if size is not None else int((bits or 0.0) * self._weights / 8)
        if not least <= self.total <= most:
            raise UserError(checkpoint.folder, self._unreachable(bits, least, most), "give a target between them")

    def plan(self, scores: Mapping[str, Score]) -> Plan:
        """The types, by the scores of all tensors that are to be chosen."""
        values = _comparable(scores)
        tensors = [
            Candidates(self._sizes(group), np.sum([values[tensor.name] for tensor in group], axis=0))
            for group in self._groups
        ]
        taken = allocation.allocate(tensors, self.total - self._fixed)
        numbers = {t.name: number for group, number in zip(self._groups, taken, strict=True) for t in group}
        types = {name: self.types[name][number] for name, number in numbers.items()}
        chosen = {name: values[name][number] for name, number in numbers.items()}
        choices = [
            Choice(types[tensor.name], types[tensor.name]) if tensor.name in types else choice
            for tensor, choice in zip(self.checkpoint.tensors, self._choices, strict=True)
        ]
        lines = [
            (
                tensor.name, choice.type.name, f"{8 * tensor.bytes_in(choice.type) / tensor.size:.3f}",
                f"{chosen[tensor.name]:.3g}" if tensor.name in chosen else "-",
            )
            for tensor, choice in zip(self.checkpoint.tensors, choices, strict=True)
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

    def _sizes(self, group: Sequence[SourceTensor]) -> npt.NDArray[np.int64]:
        """Bytes of tensors that have one type together, in each that they can have."""
        sizes = [[self._bytes(tensor, qtype) for qtype in self.types[tensor.name]] for tensor in group]
        return np.sum(sizes, axis=0, dtype=np.int64)

    def _bytes(self, tensor: SourceTensor, qtype: Type) -> int:
        size = tensor.bytes_in(qtype)
        return padded(size) if self._by_size else size

    def _chosen(self, tensor: SourceTensor, choice: Choice) -> bool:
        """Whether it is a matrix of floats that the mix quantizes, and not to a type without loss."""
        return (
            may_quantize(tensor.name, tensor.shape, self.checkpoint.model.arch)
            and tensor.stored in (Type.F16, Type.BF16, Type.F32)
            and choice.type not in (tensor.stored, Type.TQ1_0, Type.TQ2_0)
        )

    def _unreachable(self, bits: float | None, least: int, most: int) -> str:
        if not self.tensors:
            return "has no matrix whose type could be chosen"
        if self._by_size:
            asked, low, high = f"{self.total} bytes", f"{least} bytes", f"{most} bytes"
        else:
            # In the digits that are shown, both can be had.
            low = f"{math.ceil(8000 * least / self._weights) / 1000:.3f}"
            high = f"{math.floor(8000 * most / self._weights) / 1000:.3f} bits per weight"
            asked = f"{bits:g} bits per weight"
        return f"cannot be written with {asked}: the least is {low}, the most {high}"


def _grouped(tensors: Sequence[SourceTensor], types: Mapping[str, Sequence[Type]]) -> list[list[SourceTensor]]:
    """Tensors that have one type together: the experts' of a layer that can have the same, every other one alone."""
    groups: dict[tuple[str, tuple[Type, ...]], list[SourceTensor]] = {}
    for tensor in tensors:
        found = _EXPERTS.fullmatch(tensor.name)
        key = (found[1] if found else tensor.name, tuple(types[tensor.name]))
        groups.setdefault(key, []).append(tensor)
    return list(groups.values())


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


def choose(budget: Budget, factors: HessianFactors, calibration: Path | None, messages: TextIO) -> Plan:
    """Choose types by statistics that are there.

    Args:
        calibration: their folder, which has more of the ends of the model; None of an importance matrix.

    Raises:
        UserError: weights or statistics cannot be used.
    """
    found = ends.read(calibration) if calibration else None
    scores = Scores(budget.checkpoint, factors, None, budget.encoder, found, None)
    return budget.plan(_scored(budget, scores, {}, lambda *_: None, messages))


def choose_layerwise(
    budget: Budget, sequential: Sequential, factors_of: Callable[[Statistics], HessianFactors], work: Path,
    fingerprint: str,
) -> Plan:  # fmt: skip
    """Choose types before a model is quantized layer by layer: its statistics are collected, those of the windows held
    out apart, and with ``--fisher`` the gradients.

    Args:
        sequential: what will quantize.
        work: folder for both and for the scores.
        fingerprint: of all that decides the scores; what another run has left there is thrown away.

    Raises:
        UserError: model, text or folder cannot be used.
        KeyboardInterrupt: interrupted; the same run goes on where it was.
    """
    folder, held, ranks = work / STATISTICS, work / HELD, sequential.ranks
    try:
        journal = Journal(work / SCORES, fingerprint)
        done = _resume(journal, folder, held) if ranks.first else {}
        ranks.barrier()
        # One Hessian at a time may be wide in memory; all of them together are files.
        options = replace(sequential.calibration, widest=FULL_COLUMNS)
        calibrate(options, folder, sequential.messages, ranks, held=False)
        calibrate(options, held, sequential.messages, ranks, held=True)
        gradients = sequential.collect_fisher(work)
        # Ranks that do not see the first one's files leave the scores to it.
        sees = ranks.all((folder / store.MANIFEST).exists() and (gradients is None or gradients.present))
        scores = None
        if sees or ranks.first:
            rows = None if gradients is None else RowWeights(sequential.model, gradients, sequential.source)
            files = budget.checkpoint.files
            factors = factors_of(store.open_calibration(folder, files))
            there = (held / store.MANIFEST).exists()
            judges = factors_of(store.open_calibration(held, files)) if there else None
            known, other = ends.read(folder), ends.read(held)
            if known is not None and other is not None:
                known = replace(known, output=other.output)
            scores = Scores(budget.checkpoint, factors, judges, budget.encoder, known, rows)

        def note(name: str, score: Score) -> None:
            if ranks.first:
                journal.note({"name": name, "relative": score.relative, "fisher": score.fisher})

        done = ranks.broadcast_object(done)
        return budget.plan(_scored(budget, scores, done, note, sequential.messages, ranks, shared=sees))
    except OSError as error:
        raise output_error(work, error) from error
    except UserError:
        if not any(work.glob("*/*")):  # nothing is lost that took time
            shutil.rmtree(work, ignore_errors=True)
        raise
    except KeyboardInterrupt:
        raise KeyboardInterrupt(f"interrupted; the same command continues from {work}") from None


def _scored(
    budget: Budget, scores: Scores | None, done: Mapping[str, Score], note: Callable[[str, Score], None],
    messages: TextIO, ranks: Ranks = ALONE, *, shared: bool = True,
) -> dict[str, Score]:  # fmt: skip
    """The scores of all tensors, a layer at a time on each rank; all on the first one where they are not shared."""
    layers: dict[str, list[SourceTensor]] = {}
    for tensor in budget.tensors:
        found = _LAYER.match(tensor.name)
        layers.setdefault(found[0] if found else tensor.name, []).append(tensor)
    result = dict(done)
    step = ranks.size if shared else 1
    with tqdm(total=len(budget.tensors), unit=" tensors", desc="scores", file=messages, mininterval=0.5) as bar:
        for start in range(0, len(layers), step):
            turn = list(layers.values())[start : start + step]
            own: dict[str, Score] = {}
            for tensor in turn[ranks.rank] if ranks.rank < len(turn) else ():
                if tensor.name not in result:
                    assert scores is not None
                    own[tensor.name] = scores.of(tensor, budget.types[tensor.name])
                    if ranks.alone:
                        note(tensor.name, own[tensor.name])
            for found_there in ranks.all_gather_objects(own):
                result |= found_there
                for name, score in found_there.items() if not ranks.alone else ():
                    note(name, score)
            bar.update(sum(map(len, turn)))
    return {tensor.name: result[tensor.name] for tensor in budget.tensors}


def _resume(journal: Journal, *statistics: Path) -> dict[str, Score]:
    """The scores that an interrupted run of the same kind has left."""
    records = journal.records()
    if records is None:
        for folder in statistics:
            shutil.rmtree(folder, ignore_errors=True)
        journal.path.parent.mkdir(parents=True, exist_ok=True)
    journal.begin(len(records or ()))
    return {
        line["name"]: Score(tuple(line["relative"]), None if line["fisher"] is None else tuple(line["fisher"]))
        for line in records or ()
    }

"""Quantizing while calibrating: layer after layer, each on the inputs that the quantized layers before it give.

Two streams of activations run through the model, the original's and the quantized one's
(:mod:`gguf_itq3s.calibrate.streams`). Each matrix is rounded to its target (:mod:`gguf_itq3s.rounding.target`) with the
Hessian of the inputs that it will have. The finished matrices are files in a folder of work
(:mod:`gguf_itq3s.calibrate.finished`), from which the writer takes them.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Final, NamedTuple, TextIO

import gguf
import numpy as np
from tqdm import tqdm

from ..base.errors import UserError, errors_of_weights, output_error
from ..base.journal import key_of, sources
from ..base.memory import give_back
from ..codec.family import rotation
from ..codec.transform import rotation_block
from ..rounding import target
from ..rounding.encode import SquaredError, takes_hessian
from ..rounding.hessian import Factor
from ..rounding.target import Decomposition
from . import needs, result
from .activations import activation_path, activations, complete
from .backward import OutputFisher
from .finished import FISHER, STREAMS, Finished
from .inputs import Group, LayerMatrix
from .layers import LayeredModel, quick_products
from .matrices import Matrix, Source
from .moments import in_basis
from .needs import FisherBlocks
from .options import CalibrationOptions
from .ranks import ALONE, Ranks, leave_own, of_all, own_batch, own_folder
from .shares import Batches, Share, share
from .store import model_hash
from .streams import Drift, Streams, Sums
from .text import Text, read

#: Layers from one search of the damping of a wide Hessian to the next: a decomposition takes seconds, and what one
#: layer likes the next ones do.
_SEARCHED: Final = 4


@dataclass
class Sequential:
    """One such run.

    Attributes:
        damping: of the Hessians, share of the mean diagonal; None for what tokens held out like best.
        fisher: the form of the output Fisher matrices by which errors are fed across rows; None for no such thing.
    """

    calibration: CalibrationOptions
    source: Source
    damping: float | None
    fisher: FisherBlocks | None
    messages: TextIO
    ranks: Ranks = ALONE
    _gradients: OutputFisher | None = field(default=None, init=False)

    @cached_property
    def model(self) -> LayeredModel:
        """The model, a layer at a time."""
        return LayeredModel(self.calibration, self.source.checkpoint, self.ranks)

    @cached_property
    def read(self) -> Text:
        """The whole text."""
        return read(self.calibration, self.model.context, self.messages)

    @property
    def text(self) -> np.ndarray:
        """Its tokens, int64 (windows, context)."""
        return self.read.tokens

    @cached_property
    def share(self) -> Share:
        """The windows of this rank.

        Raises:
            UserError: there is not one for every rank.
        """
        batch = own_batch(self.calibration.batch, self.calibration.device)
        found = share(len(self.text), batch, self.ranks)
        if not self.ranks.all(bool(found.batches.train)):
            what = f"cannot be calibrated by {self.ranks.size} processes with {len(self.text)} windows of text"
            remedy = "give more --tokens, or start fewer"
            raise of_all(UserError(self.calibration.model, what, remedy))
        return found

    @cached_property
    def inputs(self) -> np.ndarray:
        """The windows of this rank: tokens, int64 (windows, context)."""
        return self.text[self.share.numbers]

    @property
    def batches(self) -> Batches:
        """Those of them that run together, and those that are held out."""
        return self.share.batches

    @quick_products()
    def run(self, folder: Path, fingerprint: str) -> Finished:
        """Quantize every matrix of every layer whose rows are whole blocks.

        Args:
            fingerprint: of all that decides the result; what another run has left is thrown away.

        Raises:
            UserError: the model, the text or the folder cannot be used.
            KeyboardInterrupt: interrupted; the same run goes on after the last finished layer.
        """
        self.ranks.agree(folder, checkpoint=model_hash(self.source.checkpoint.files), text=key_of(self.text.tobytes()))
        key = self.ranks.broadcast_object(key_of(fingerprint, self.text.tobytes(), *self.model.form.values()))
        finished = Finished.resume_together(folder, key, self.ranks)
        try:
            own = own_folder(folder, self.ranks)
            needs.check(
                own, self.calibration, self.source, self.model, self.inputs, self.batches, self.fisher, self.messages,
                self.ranks,
            )  # fmt: skip
            self._gradients = self.collect_fisher(folder)
            self._layers(finished, own)
            if note := self.model.layout.note(self.source.quantized):
                print(f"note: {note}", file=self.messages)
            mine = replace(self.read, tokens=self.inputs, of=self.read.of[self.share.numbers])
            result.say(own, self.model, self.source, mine, self.batches, self.messages, self.ranks)
        except UserError:
            if not finished.layers and self.ranks.alone:
                finished.remove()
            raise
        except OSError as error:
            raise output_error(folder, error) from error
        except KeyboardInterrupt:
            raise KeyboardInterrupt(f"interrupted; the same command continues from {folder}") from None
        leave_own(folder, self.ranks)
        for stream in STREAMS:
            shutil.rmtree(own / stream, ignore_errors=True)
        return finished

    @quick_products()
    def collect_fisher(self, folder: Path) -> OutputFisher | None:
        """The output Fisher matrices, unless an earlier call with the same model, text and folder has them."""
        if self.fisher is None:
            return None
        found = OutputFisher(folder / FISHER, full=self.fisher.full, block=self.fisher.block, ranks=self.ranks)
        # Labels are drawn and sums are taken batch by batch; a device rounds in its own way.
        batch, device = self.calibration.batch, self.calibration.device
        files = self.source.checkpoint.files
        form = (model_hash(files), self.fisher.full, self.fisher.block, batch, device, "a tenth held out")
        key = key_of(sources(), form, self.text.shape, self.text.tobytes(), *self.model.form.values())
        found.collect(self.model, self.text, batch, key, self.messages)
        return found

    def _layers(self, finished: Finished, own: Path) -> None:
        """Every layer that is not finished; those before are run again where another number of processes left off."""
        model, inputs, batches, ranks = self.model, self.inputs, self.batches.all, self.ranks
        folders = (own / STREAMS[0], own / STREAMS[1])
        for folder in folders:
            folder.mkdir(parents=True, exist_ok=True)
        done = finished.layers
        # Behind the last layer nothing asks for them: only the file is to be written.
        there = done == model.layers or all(activation_path(folder, done, model.dtype).exists() for folder in folders)
        begin = done if ranks.all(there) else 0
        keywords = model.start(folders[0], inputs, batches, begin)
        if not begin:
            model.start(folders[1], inputs, batches, begin, self.source.embedded(inputs))
        with tqdm(total=model.layers, initial=begin, unit=" layers", file=self.messages, mininterval=0.5) as bar:
            for number in range(begin, model.layers):
                shape = (*inputs.shape, model.hidden)
                before = tuple(activations(folder, number, shape, "r", model.dtype) for folder in folders)
                streams = Streams(
                    model, number, self.calibration, before, self.batches, keywords[number], self.source.scale,
                    folders, ranks,
                )  # fmt: skip
                matrices: dict[str, np.ndarray] = {}
                if number < done:
                    self._again(number, streams, finished)
                for stage in streams.stages if number >= done else ():
                    bar.set_postfix_str(stage[0].readers[0].entry, refresh=True)
                    matrices |= self._stage(number, streams, stage, finished)
                self._step(number, streams, folders, shape)
                del before
                if number >= done:
                    ranks.barrier()  # all have written what comes behind it
                    finished.add(number, matrices)
                    ranks.barrier()  # until then the inputs of the layer may be asked for again
                for folder in folders:
                    activation_path(folder, number, model.dtype).unlink()
                bar.update()

    def _again(self, number: int, streams: Streams, finished: Finished) -> None:
        """Give the quantized layer the matrices that are finished."""
        for stage in streams.stages:
            streams.begin(stage)
            for reader in [reader for group in stage for reader in group.readers]:
                if self.source.quantized(reader.name):
                    matrix = Matrix(self.source, streams, reader)
                    data = self.ranks.broadcast_object(finished.matrix(reader.entry) if self.ranks.first else None)
                    matrix.put(gguf.quants.dequantize(data.reshape(matrix.empty().shape), matrix.type))

    def _step(self, number: int, streams: Streams, folders: tuple[Path, Path], shape: tuple[int, ...]) -> None:
        """Write what both layers put out, unless the quantized one has lost the original."""
        dtype = self.model.dtype
        targets = [activations(folder, number + 1, shape, "w+", dtype, partial=True) for folder in folders]
        drift = Drift()
        for part in self.batches.all:
            outputs = streams.step(part)
            drift.add(*outputs)
            for array, values in zip(targets, outputs, strict=True):
                array[part] = values
        streams.close()
        if (mean := drift.mean(self.ranks)) > 1:
            far = f"{mean**0.5:.2g} times as far off as they are large"
            remedy = (
                "give more --tokens, text that is more like the model's, or --calibration or --imatrix in its place"
            )
            what = f"is lost behind layer {number}: its outputs are {far}"
            raise of_all(UserError(self.calibration.model, what, remedy))
        for array, folder in zip(targets, folders, strict=True):
            complete(array, folder, number + 1, dtype)

    def _stage(self, number: int, streams: Streams, stage: list[Group], finished: Finished) -> dict[str, np.ndarray]:
        """Round the matrices of a stage; returns their bytes."""
        matrices: dict[str, np.ndarray] = {}
        groups = [group for group in stage if any(self.source.quantized(reader.name) for reader in group.readers)]
        if not groups:
            return matrices
        ranks = self.ranks
        # Of experts each rank has some for itself; what all tokens pass, all work at together.
        owners: list[int | None] = [None] * len(groups)
        if not ranks.alone and len(groups) >= ranks.size:
            owners = [place % ranks.size for place in range(len(groups))]
        sums = streams.sums(stage)
        counts = ranks.sums(*(count for group in groups for count in sums[group.key].counts))
        for place, (group, owner) in enumerate(zip(groups, owners, strict=True)):
            tokens, held = (int(count) for count in counts[2 * place : 2 * place + 2])
            of = sums[group.key] if owner in (None, ranks.rank) else sums.pop(group.key)
            of.reduce(ranks, tokens, held, self.source.tensors[group.readers[0].name].shape[-2], owner)
        stacks: dict[str, np.ndarray] = {}
        fishers = self._fisher_blocks(number, groups)
        results: dict[str, Rounded] = {}
        for group, owner in zip(groups, owners, strict=True):
            if owner in (None, ranks.rank):
                together = ranks if owner is None else ALONE
                results |= self._group(number, streams, group, sums.pop(group.key), finished, stacks, fishers, together)
        for group, owner in zip(groups, owners, strict=True):
            for reader in group.readers:
                if self.source.quantized(reader.name):
                    matrices[reader.entry] = self._take(streams, reader, owner, results, finished)
        if owners[-1] is not None:
            finished.dampings = ranks.broadcast_object(finished.dampings, owners[-1])
        return matrices

    def _fisher_blocks(self, number: int, groups: list[Group]) -> dict[str, list[np.ndarray]]:
        """The output Fisher matrices by matrix: of all, where one process works alone, when they are asked for."""
        if self._gradients is None or self.ranks.alone:
            return {}
        readers = [reader for group in groups for reader in group.readers if self.source.quantized(reader.name)]
        return {reader.entry: self._gradients.shared_blocks(reader, number) for reader in readers}

    def _group(
        self, number: int, streams: Streams, group: Group, of: Sums, finished: Finished,
        stacks: dict[str, np.ndarray], fishers: dict[str, list[np.ndarray]], ranks: Ranks,
    ) -> dict[str, Rounded]:  # fmt: skip
        """Round the matrices that read one input, this rank alone or all together."""
        results: dict[str, Rounded] = {}
        decomposition = self._decompose(number, group, of, finished, ranks)
        unseen = decomposition is None
        factors: dict[int, Factor] = {}  # by the length of the blocks that types rotate
        readers = [reader for reader in group.readers if self.source.quantized(reader.name)]
        for reader in readers:
            matrix = Matrix(self.source, streams, reader, stacks)
            weights = matrix.weights
            wanted = weights if decomposition is None else matrix.target(of, decomposition, ranks)
            block = rotation(matrix.type)
            calibrated = decomposition is not None and takes_hessian(matrix.type, group.columns)
            if decomposition is not None and calibrated and block not in factors:
                own, hessian = block == rotation_block(group.columns), of.hessian.total
                assert hessian is not None
                # A damping serves in every basis.
                found = (
                    decomposition
                    if own
                    else Decomposition.of(in_basis(hessian, block), finished.dampings[_kind(group)])
                )
                factors[block] = found.factor(spent=not own or reader is readers[-1])
            factor = factors[block] if calibrated else None
            if reader is readers[-1]:
                # A wide Hessian and its decomposition are most of what is in memory.
                of.forget()
                decomposition = None
            blocks = fishers.pop(reader.entry, None)
            if blocks is None:
                blocks = [] if self._gradients is None else self._gradients.blocks(reader, number)
            with errors_of_weights(self.calibration.model, reader.entry):
                data, decoded = matrix.encode(wanted, factor, blocks, ranks)
            results[reader.entry] = Rounded(data, SquaredError.of(decoded, weights), unseen)
            if self.ranks.alone or ranks is self.ranks:
                matrix.put(decoded)
        return results

    def _take(
        self, streams: Streams, reader: LayerMatrix, owner: int | None, results: dict[str, Rounded], finished: Finished
    ) -> np.ndarray:
        """The bytes of a matrix, which its owner gives to all, and what is to be known of it."""
        if owner is None:
            found = results.pop(reader.entry)
        else:
            found = self.ranks.broadcast_object(results.get(reader.entry), owner)
            matrix = Matrix(self.source, streams, reader)
            matrix.put(gguf.quants.dequantize(found.data, matrix.type))
        finished.errors[reader.entry] = found.error
        if found.unseen:
            finished.unseen.add(reader.entry)
        return found.data

    def _decompose(self, number: int, group: Group, of: Sums, finished: Finished, ranks: Ranks) -> Decomposition | None:
        """The Hessian of a group; None where no token came to it."""
        hessian = of.hessian.total
        if hessian is None:
            return None
        if target.is_wide(hessian):
            give_back()
        kind = _kind(group)
        try:
            if self.damping is not None:
                finished.dampings[kind] = self.damping
                return Decomposition.of(hessian, self.damping)
            settled = kind in finished.dampings and number % _SEARCHED and target.is_wide(hessian)
            held = None if of.held is None or settled else of.held.inputs
            start = finished.dampings.get(kind, target.DAMPING)
            finished.dampings[kind], found = target.decompose(hessian, held, start, ranks.sums)
        except ValueError as problem:
            entry = group.readers[0].entry
            raise UserError(self.calibration.model, str(problem), "raise --damping", entry) from problem
        return found


class Rounded(NamedTuple):
    """A matrix that is rounded: bytes (m, bytes of a row), error of its weights, whether no token came to it."""

    data: np.ndarray
    error: SquaredError
    unseen: bool


def _kind(group: Group) -> str:
    """Matrices of all layers that are alike: what is known of one says what to try for the next."""
    return group.readers[0].name.split(".")[2]

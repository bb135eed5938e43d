"""Quantizing while calibrating: layer after layer, each on the inputs that the quantized layers before it give.

Two streams of activations run through the model, the original's and the quantized one's
(:mod:`gguf_itq3s.layerwise.streams`). Each matrix is rounded to its target (:mod:`gguf_itq3s.rounding.target`) with the
Hessian of the inputs that it will have. The finished matrices are files in a folder of work
(:mod:`gguf_itq3s.layerwise.finished`), from which the writer takes them.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Final, TextIO

import numpy as np
from tqdm import tqdm

from ..base.errors import UserError, output_error
from ..base.journal import key_of
from ..calibration.activations import activation_path, activations
from ..calibration.groups import Group
from ..calibration.layers import LayeredModel
from ..calibration.moments import rotate_both
from ..calibration.options import CalibrationOptions
from ..calibration.products import quick_products
from ..calibration.store import model_hash
from ..calibration.text import windows
from ..codec.family import is_rotated
from ..rounding import target
from ..rounding.encode import CALIBRATED_TYPES, SquaredError
from ..rounding.hessian import Factor
from ..rounding.target import WIDE, Decomposition
from . import needs, result
from .backward import OutputFisher
from .finished import FISHER, STREAMS, Finished
from .matrices import Matrix, Source
from .needs import FisherBlocks
from .streams import Batches, Drift, Streams, Sums, split

#: Layers from one search of the damping of a wide Hessian to the next: a decomposition takes seconds, and what one
#: layer likes the next ones do.
_SEARCHED: Final = 4


@dataclass
class Sequential:
    """One such run.

    Attributes:
        calibration: model and text.
        source: what is quantized.
        damping: of the Hessians, share of the mean diagonal; None for what tokens held out like best.
        fisher: the form of the output Fisher matrices by which errors are fed across rows; None for no such thing.
        messages: where progress goes.
    """

    calibration: CalibrationOptions
    source: Source
    damping: float | None
    fisher: FisherBlocks | None
    messages: TextIO
    _gradients: OutputFisher | None = field(default=None, init=False)

    @cached_property
    def model(self) -> LayeredModel:
        """The model, a layer at a time."""
        return LayeredModel(self.calibration, self.source.checkpoint)

    @cached_property
    def inputs(self) -> np.ndarray:
        """The text: tokens, int64 (windows, context)."""
        return windows(self.calibration, self.model.context)

    @cached_property
    def batches(self) -> Batches:
        """The windows that run together, and those that are held out."""
        return split(len(self.inputs), self.calibration.batch)

    @quick_products()
    def run(self, folder: Path, fingerprint: str) -> Finished:
        """Quantize every matrix of every layer whose rows are whole blocks.

        Args:
            folder: of work.
            fingerprint: of all that decides the result; what another run has left is thrown away.

        Raises:
            UserError: the model, the text or the folder cannot be used.
            KeyboardInterrupt: interrupted; the same run goes on after the last finished layer.
        """
        finished = Finished.resume(folder, key_of(fingerprint, self.inputs.tobytes()))
        try:
            needs.check(folder, self.calibration, self.source, self.model, self.inputs, self.fisher, self.messages)
            self._gradients = self.collect_fisher(folder)
            self._layers(finished)
            result.say(folder, self.model, self.source, self.inputs, self.batches, self.messages)
        except UserError:
            if not finished.files:
                finished.remove()
            raise
        except OSError as error:
            raise output_error(folder, error) from error
        except KeyboardInterrupt:
            raise KeyboardInterrupt(f"interrupted; the same command continues from {folder}") from None
        for stream in STREAMS:
            shutil.rmtree(folder / stream, ignore_errors=True)
        return finished

    @quick_products()
    def collect_fisher(self, folder: Path) -> OutputFisher | None:
        """The output Fisher matrices, unless an earlier call with the same model, text and folder has them."""
        if self.fisher is None:
            return None
        found = OutputFisher(folder / FISHER, full=self.fisher.full, block=self.fisher.block)
        # Labels are drawn and sums are taken batch by batch; a device rounds in its own way.
        batch, device = self.calibration.batch, self.calibration.device
        files = self.source.checkpoint.files
        form = (model_hash(files), self.fisher.full, self.fisher.block, batch, device, "a tenth held out")
        key = key_of(form, self.inputs.shape, self.inputs.tobytes())
        found.collect(self.model, self.inputs, batch, key, self.messages)
        return found

    def _layers(self, finished: Finished) -> None:
        model, inputs, batches = self.model, self.inputs, self.batches.all
        done = finished.layers
        folders = (finished.folder / STREAMS[0], finished.folder / STREAMS[1])
        keywords = model.start(folders[0], inputs, batches, done)
        if not done:
            model.start(folders[1], inputs, batches, done, self.source.embedded(inputs))
        with tqdm(total=model.layers, initial=done, unit=" layers", file=self.messages, mininterval=0.5) as bar:
            for number in range(done, model.layers):
                shape = (*inputs.shape, model.hidden)
                before = (activations(folders[0], number, shape, "r"), activations(folders[1], number, shape, "r"))
                streams = Streams(
                    model, number, self.calibration, before, self.batches, keywords[number], self.source.scale, folders
                )
                matrices: dict[str, np.ndarray] = {}
                for passage in streams.passages:
                    bar.set_postfix_str(passage[0].readers[0].name, refresh=True)
                    matrices |= self._passage(number, streams, passage, finished)
                self._step(number, streams, folders, shape)
                del before
                finished.add(number, matrices)
                for folder in folders:
                    activation_path(folder, number).unlink()
                bar.update()

    def _step(self, number: int, streams: Streams, folders: tuple[Path, Path], shape: tuple[int, ...]) -> None:
        """Write what both layers put out, unless the quantized one has lost the original."""
        targets = [activations(folder, number + 1, shape, "w+", partial=True) for folder in folders]
        drift = Drift()
        for part in self.batches.all:
            outputs = streams.step(part)
            drift.add(*outputs)
            for array, values in zip(targets, outputs, strict=True):
                array[part] = values
        streams.close()
        if drift.mean > 1:
            far = f"{drift.mean**0.5:.2g} times as far off as they are large"
            remedy = (
                "give more --tokens, text that is more like the model's, or --calibration or --imatrix in its place"
            )
            raise UserError(self.calibration.model, f"is lost behind layer {number}: its outputs are {far}", remedy)
        for array, folder in zip(targets, folders, strict=True):
            array.flush()
            activation_path(folder, number + 1, partial=True).replace(activation_path(folder, number + 1))

    def _passage(
        self, number: int, streams: Streams, passage: list[Group], finished: Finished
    ) -> dict[str, np.ndarray]:
        """Round the matrices of a passage; returns their bytes."""
        matrices: dict[str, np.ndarray] = {}
        if not any(self.source.quantized(reader.name) for group in passage for reader in group.readers):
            return matrices
        sums = streams.sums(passage)
        stacks: dict[tuple[str, bool], np.ndarray] = {}
        for group in passage:
            of = sums.pop(group.key)
            readers = [reader for reader in group.readers if self.source.quantized(reader.name)]
            if not readers:
                continue
            decomposition = self._decompose(number, group, of, finished)
            factors: dict[bool, Factor] = {}  # of the rotated Hessian, and of the one that is not
            for reader in readers:
                matrix = Matrix(self.source, streams, reader, stacks)
                weights = matrix.weights
                wanted = weights if decomposition is None else matrix.target(of, decomposition)
                qtype = self.source.types[reader.name]
                rotated = is_rotated(qtype)
                if decomposition is not None and qtype in CALIBRATED_TYPES and rotated not in factors:
                    factors[rotated] = (decomposition if rotated else _unrotated(group, of, finished)).factor()
                factor = factors.get(rotated) if qtype in CALIBRATED_TYPES else None
                data, decoded = matrix.encode(wanted, factor, matrix.output_factors(self._gradients, number))
                matrices[reader.entry] = data
                if decomposition is None:
                    finished.unseen.add(reader.entry)
                finished.errors[reader.entry] = SquaredError(
                    float(np.square(decoded - weights, dtype=np.float64).sum()),
                    float(np.square(weights, dtype=np.float64).sum()),
                )
                matrix.put(decoded)
        return matrices

    def _decompose(self, number: int, group: Group, of: Sums, finished: Finished) -> Decomposition | None:
        """The Hessian of a group; None where no token came to it."""
        if of.hessian.total is None:
            return None
        kind = _kind(group)
        try:
            if self.damping is not None:
                finished.dampings[kind] = self.damping
                return Decomposition.of(of.hessian.total, self.damping)
            settled = kind in finished.dampings and number % _SEARCHED and len(of.hessian.total) > WIDE
            held = None if of.held is None or settled else of.held.inputs
            start = finished.dampings.get(kind, target.DAMPING)
            finished.dampings[kind], found = target.decompose(of.hessian.total, held, start)
        except ValueError as problem:
            entry = group.readers[0].entry
            raise UserError(self.calibration.model, str(problem), "raise --damping", entry) from problem
        return found


def _unrotated(group: Group, of: Sums, finished: Finished) -> Decomposition:
    """The same Hessian in the basis of types that do not rotate; the damping is the same in every basis."""
    assert of.hessian.total is not None
    return Decomposition.of(rotate_both(of.hessian.total), finished.dampings[_kind(group)])


def _kind(group: Group) -> str:
    """Matrices of all layers that are alike: what is known of one says what to try for the next."""
    return group.readers[0].name.split(".")[2]

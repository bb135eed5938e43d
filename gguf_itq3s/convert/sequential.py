"""Quantizing while calibrating: layer after layer, each on the inputs that the quantized layers before it give.

Two streams of activations run through the model, the original's and the quantized one's
(:mod:`gguf_itq3s.calibration.streams`). Each matrix is rounded to its target
(:mod:`gguf_itq3s.rounding.target`) with the Hessian of the inputs that it will have. The finished matrices are files in
a folder of work, where an interrupted run goes on, and from which the writer takes them.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Final, TextIO

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Type
from safetensors import safe_open
from tqdm import tqdm

from .. import report
from ..calibration.activations import activation_path, activations
from ..calibration.backward import CHUNK, OutputFisher
from ..calibration.groups import Group, Reader
from ..calibration.layers import LayeredModel
from ..calibration.moments import rotate, rotate_both
from ..calibration.options import CalibrationOptions
from ..calibration.pipeline import save
from ..calibration.products import quick_products
from ..calibration.store import model_hash
from ..calibration.streams import WRITERS, Batches, Drift, Streams, Sums, check_rows, row_order, split
from ..calibration.text import windows
from ..checkpoint.reading import Checkpoint, SourceTensor
from ..checkpoint.rescaling import Rescaling
from ..codec.transform import BLOCK
from ..codec.types import ITQ3_S
from ..errors import UserError, output_error
from ..rounding import fisher, target
from ..rounding.fisher import OutputFactor
from ..rounding.hessian import Factor
from ..rounding.target import WIDE, Decomposition
from .encode import CALIBRATED_TYPES, Encoder, SquaredError

_JOURNAL: Final = "journal.json"
#: In the folder of work: output Fisher matrices, and what chose the types, which outlast a change of types.
FISHER, STATISTICS, SCORES = "fisher", "statistics", "scores.jsonl"
_SHARED: Final = (FISHER, STATISTICS, SCORES)
_STREAMS: Final = ("original", "quantized")
#: Memory of Python and its libraries, torch and transformers among them, in bytes.
_LIBRARIES: Final = 600 << 20
#: Weights that are encoded and decoded at a time.
_PIECE: Final = 1 << 22
#: Tokens that the result is measured on at most: their logits are held twice.
_MEASURED: Final = 1024
#: Layers from one search of the damping of a wide Hessian to the next: a decomposition takes seconds, and what one
#: layer likes the next ones do.
_SEARCHED: Final = 4
#: Types that hold a matrix as it is: floats, and codes that are without loss or nothing.
_KEPT: Final = (Type.F32, Type.F16, Type.BF16, Type.TQ1_0, Type.TQ2_0)


@dataclass(frozen=True)
class SequentialOptions:
    """How matrices are rounded.

    Attributes:
        damping: of the Hessians, share of the mean diagonal; None for what tokens held out like best.
        fisher: whether errors are fed across rows, by output Fisher matrices.
        fisher_rows: most rows of a matrix whose Fisher matrix is kept whole.
        fisher_block: rows of the blocks that are kept of a larger one.
    """

    damping: float | None = None
    fisher: bool = False
    fisher_rows: int = 8192
    fisher_block: int = 1024


@dataclass
class Finished:
    """Matrices that are encoded.

    Attributes:
        folder: of work.
        errors: matrix -> squared error and energy of its weights, not of its target.
        files: matrix -> the file that holds it.
        unseen: the experts that no token came to.
        dampings: kind of matrix -> the damping that the last layer took.
    """

    folder: Path
    errors: dict[str, SquaredError] = field(default_factory=dict)
    files: dict[str, Path] = field(default_factory=dict)
    unseen: set[str] = field(default_factory=set)
    dampings: dict[str, float] = field(default_factory=dict)

    def known(self, name: str) -> bool:
        """Whether a tensor is among them."""
        return name in self.files or f"{name}[0]" in self.files

    def share(self, name: str) -> float:
        """The share of a tensor's matrices that were rounded with statistics: an expert may have seen no token."""
        entries = [name] if name in self.files else self._experts(name)
        return sum(entry not in self.unseen for entry in entries) / len(entries) if entries else 0.0

    def pieces(self, name: str) -> Iterator[tuple[np.ndarray, SquaredError]]:
        """The bytes of a tensor, matrix after matrix, with the error of each."""
        entries = [name] if name in self.files else self._experts(name)
        for entry in entries:
            with safe_open(self.files[entry], framework="numpy") as file:
                yield file.get_tensor(entry).reshape(-1), self.errors[entry]

    def _experts(self, name: str) -> list[str]:
        count = 0
        while f"{name}[{count}]" in self.files:
            count += 1
        return [f"{name}[{expert}]" for expert in range(count)]

    def remove(self) -> None:
        """Take the folder away."""
        shutil.rmtree(self.folder, ignore_errors=True)


@dataclass
class _Layer:
    """Sizes of a layer, or the largest of several.

    Attributes:
        weights: all of them.
        columns: of the widest input.
        kept: columns of the inputs that are kept while a layer is at work.
        solving: bytes of the sums of one passage, their decompositions and its targets.
        gradients: numbers in the output Fisher matrices.
    """

    weights: int = 0
    columns: int = 0
    kept: int = 0
    solving: int = 0
    gradients: int = 0

    def add(self, name: str, tensor: SourceTensor, calibration: CalibrationOptions, options: SequentialOptions) -> None:
        """Count a matrix, or a stack of them."""
        rows, columns = tensor.shape[-2:]
        self.weights += tensor.size
        self.columns = max(self.columns, columns)
        self.kept += columns if name.endswith(WRITERS) else 0
        n = columns if calibration.full(columns) else BLOCK
        # Sums in float64, two decompositions with a copy each, a factor; of narrow ones all in float64.
        square = (8 + 6 * 4 if n > WIDE else 2 * 8 + 6 * 8) * n * columns
        self.solving = max(self.solving, square + 8 * 7 * rows * columns)
        self.gradients += tensor.size // columns * (rows if rows <= options.fisher_rows else options.fisher_block)

    def or_larger(self, other: _Layer) -> _Layer:
        """The larger of each."""
        return _Layer(*(max(getattr(self, key.name), getattr(other, key.name)) for key in fields(self)))


class Sequential:
    """One such run.

    Args:
        calibration: model and text; its ``out`` does not count.
        options: of the rounding.
        checkpoint: as it was read, nothing rescaled.
        rescaled: the tensors as they are written.
        types: tensor -> the type it is written in.
        rescaling: from the one to the other.
        encoder: weights to bytes.
        messages: where progress goes.
    """

    def __init__(
        self,
        calibration: CalibrationOptions,
        options: SequentialOptions,
        checkpoint: Checkpoint,
        rescaled: Mapping[str, SourceTensor],
        types: Mapping[str, Type],
        rescaling: Rescaling,
        encoder: Encoder,
        messages: TextIO,
    ) -> None:
        self.calibration, self.options, self.checkpoint = calibration, options, checkpoint
        self.plain = {tensor.name: tensor for tensor in checkpoint.tensors}
        self.rescaled, self.types, self.rescaling, self.encoder = rescaled, types, rescaling, encoder
        self.messages = messages
        self.folder = Path()
        self._fisher: OutputFisher | None = None

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
        self.folder = folder
        model = LayeredModel(self.calibration, self.checkpoint)
        inputs = windows(self.calibration, model.context)
        key = hashlib.sha256(fingerprint.encode() + inputs.tobytes()).hexdigest()
        finished = self._resume(key)
        try:
            self._check_room(model, inputs)
            if self.options.fisher:
                self._fisher = self.collect_fisher(folder, model, inputs)
            self._layers(model, inputs, finished, len(set(finished.files.values())))
        except UserError:
            if not finished.files:
                finished.remove()
            raise
        except OSError as error:
            raise output_error(self.folder, error) from error
        except KeyboardInterrupt:
            raise KeyboardInterrupt(f"interrupted; the same command continues from {self.folder}") from None
        for stream in _STREAMS:
            shutil.rmtree(self.folder / stream, ignore_errors=True)
        return finished

    def _check_room(self, model: LayeredModel, inputs: np.ndarray) -> None:
        """Say what memory and disk it takes, and find a disk that is too small before the work."""
        layers: dict[str, _Layer] = {}
        for name, tensor in self.rescaled.items():
            if len(tensor.shape) >= 2 and name.startswith("blk."):
                size = layers.setdefault(name.split(".")[1], _Layer())
                size.add(name, tensor, self.calibration, self.options)
        largest = _Layer()
        for size in layers.values():
            largest = largest.or_larger(size)
        vocabulary, hidden = self.rescaled["token_embd.weight"].shape[-2:]
        batch = min(self.calibration.batch, len(inputs)) * inputs.shape[1]
        kept = self._split(inputs).kept(inputs.shape[1])
        held = len(range(kept.start, kept.stop, kept.step))
        rounding = 8 * largest.weights + largest.solving + 4 * (8 * batch + 3 * held) * largest.columns
        # The output matrix as it was and as it is, and logits of both.
        ends = 12 * vocabulary * hidden + 4 * 6 * _MEASURED * vocabulary
        stream = 4 * inputs.size * hidden
        encoded = sum(tensor.bytes_in(self.types[name]) for name, tensor in self.rescaled.items())
        disk = 4 * stream + 2 * 4 * inputs.size * largest.kept + encoded
        backward = 0
        if self.options.fisher:
            disk += (model.layers + 3) * stream + 4 * sum(size.gradients for size in layers.values())
            # A layer in float32, sums in float64 and what is written of them; before that the logits of a few tokens.
            backward = 4 * largest.weights + 12 * largest.gradients + 16 * batch * largest.columns
            ends = max(ends, 6 * vocabulary * hidden + 32 * CHUNK * vocabulary)
        memory = _LIBRARIES + max(rounding, ends, backward)
        text = f"{inputs.size} tokens through {model.layers} layers"
        print(
            f"calibrating on {text}: about {report.size(memory)} of memory, {report.size(disk)} of disk",
            file=self.messages,
        )
        present = sum(path.stat().st_size for path in self.folder.rglob("*") if path.is_file())
        if (free := shutil.disk_usage(self.folder).free + present) < disk:
            what = f"needs {report.size(disk)} while it calibrates, {report.size(free)} are free"
            raise UserError(self.folder, what, "free some space, give less --tokens, or choose another folder")

    @quick_products()
    def collect_fisher(self, folder: Path, model: LayeredModel, inputs: np.ndarray) -> OutputFisher:
        """The output Fisher matrices, unless an earlier call with the same model, text and folder has them."""
        found = OutputFisher(folder / FISHER, full=self.options.fisher_rows, block=self.options.fisher_block)
        # Labels are drawn and sums are taken batch by batch; a device rounds in its own way.
        batch, device = self.calibration.batch, self.calibration.device
        blocks = (self.options.fisher_rows, self.options.fisher_block)
        form = (model_hash(self.checkpoint.files), *blocks, batch, device, "a tenth held out")
        key = hashlib.sha256(f"{form} {inputs.shape} ".encode() + inputs.tobytes()).hexdigest()
        found.collect(model, inputs, batch, key, self.messages)
        return found

    def _resume(self, key: str) -> Finished:
        """What an earlier run of the same kind has finished."""
        finished = Finished(self.folder)
        journal = self.folder / _JOURNAL
        try:
            lines = [json.loads(line) for line in journal.read_text().splitlines()]
        except (OSError, ValueError):
            lines = []
        if not lines or lines[0] != {"run": key}:
            if (
                not lines
                and self.folder.exists()
                and (not self.folder.is_dir() or {path.name for path in self.folder.iterdir()} - {*_SHARED, *_STREAMS})
            ):
                what = "is in the way, and is not what an interrupted conversion has left"
                raise UserError(self.folder, what, "move it away, or choose another name for the output")
            try:
                _clear(self.folder)
                for stream in _STREAMS:
                    (self.folder / stream).mkdir()
                journal.write_text(json.dumps({"run": key}) + "\n")
            except OSError as error:
                raise output_error(self.folder, error) from error
            return finished
        for line in lines[1:]:
            if not (self.folder / line["file"]).is_file():
                break
            for entry, (squared, energy) in line["matrices"].items():
                finished.files[entry] = self.folder / line["file"]
                finished.errors[entry] = SquaredError(squared, energy)
            finished.unseen.update(line["unseen"])
            finished.dampings = line["dampings"]
        return finished

    def _layers(self, model: LayeredModel, inputs: np.ndarray, finished: Finished, done: int) -> None:
        batches = self._split(inputs)
        shape = (*inputs.shape, model.hidden)
        original, quantized = (self.folder / stream for stream in _STREAMS)
        keywords = model.start(original, inputs, batches.all, done)
        if not done:
            model.start(quantized, inputs, batches.all, done, self._embedded(inputs))
        with tqdm(total=model.layers, initial=done, unit=" layers", file=self.messages, mininterval=0.5) as bar:
            for number in range(done, model.layers):
                sources = (activations(original, number, shape, "r"), activations(quantized, number, shape, "r"))
                streams = Streams(
                    model,
                    number,
                    self.calibration,
                    sources,
                    batches,
                    keywords[number],
                    self._scale,
                    (original, quantized),
                )
                matrices: dict[str, np.ndarray] = {}
                for passage in streams.passages:
                    bar.set_postfix_str(passage[0].readers[0].name, refresh=True)
                    self._passage(model, number, streams, passage, matrices, finished)
                targets = [
                    activations(folder, number + 1, shape, "w+", partial=True) for folder in (original, quantized)
                ]
                drift = Drift()
                for part in batches.all:
                    outputs = streams.step(part)
                    drift.add(*outputs)
                    for array, values in zip(targets, outputs, strict=True):
                        array[part] = values
                streams.close()
                self._check_drift(number, drift)
                for array, folder in zip(targets, (original, quantized), strict=True):
                    array.flush()
                    activation_path(folder, number + 1, partial=True).replace(activation_path(folder, number + 1))
                del sources, targets
                file = f"layer-{number:04d}.safetensors"
                save(matrices, self.folder / file)
                errors = {entry: (finished.errors[entry].error, finished.errors[entry].energy) for entry in matrices}
                line = {
                    "file": file, "matrices": errors, "unseen": sorted(finished.unseen & set(matrices)),
                    "dampings": finished.dampings,
                }  # fmt: skip
                with (self.folder / _JOURNAL).open("a") as journal:
                    journal.write(json.dumps(line) + "\n")
                finished.files |= dict.fromkeys(matrices, self.folder / file)
                for folder in (original, quantized):
                    activation_path(folder, number).unlink()
                bar.update()
        self._say_result(model, inputs, batches)

    def _split(self, inputs: np.ndarray) -> Batches:
        return split(len(inputs), self.calibration.batch)

    def _scale(self, reader: Reader) -> np.ndarray | None:
        """What the file multiplies the columns of a matrix by."""
        return self.rescaling.columns(reader.name, reader.expert)

    def _check_drift(self, number: int, drift: Drift) -> None:
        """Stop where the quantized layer has lost the original."""
        if drift.mean <= 1:
            return
        what = (
            f"is lost behind layer {number}: its outputs are {drift.mean**0.5:.2g} times as far off as they are large"
        )
        remedy = "give more --tokens, text that is more like the model's, or --calibration or --imatrix in its place"
        raise UserError(self.calibration.model, what, remedy)

    def _embedded(self, inputs: np.ndarray) -> tuple[np.ndarray, np.ndarray] | None:
        """Tokens of the text and their rows of the embedding in the file; None where it has them as they are."""
        name = "token_embd.weight"
        tensor = self.rescaled.get(name)
        if tensor is None or self.types[name] in _KEPT:
            return None
        tokens = np.unique(inputs)
        weights = whole(tensor)
        return (tokens, self._stored(weights[tokens], self.types[name])) if tokens[-1] < len(weights) else None

    def _stored(self, weights: np.ndarray, qtype: Type) -> np.ndarray:
        """Weights as a file gives them back that has them in a type, float32 (rows, n)."""
        if qtype in _KEPT:
            return weights
        result = np.empty_like(weights)
        step = max(1, _PIECE // weights.shape[1])
        for start in range(0, len(weights), step):
            data = self.encoder.rows(weights[start : start + step], qtype)
            result[start : start + step] = gguf.quants.dequantize(data, qtype)
        return result

    def _say_result(self, model: LayeredModel, inputs: np.ndarray, batches: Batches) -> None:
        """Perplexity and KL divergence of the quantized model on windows that no sum has seen."""
        import torch

        behind_last = [activation_path(self.folder / stream, model.layers) for stream in _STREAMS]
        if not batches.held or not all(path.exists() for path in behind_last):
            return
        numbers = np.concatenate(batches.held)
        # The second half of a window has context, and its last token no successor.
        context = inputs.shape[1]
        count = min(context // 2 - 1, max(1, _MEASURED // len(numbers)))
        places = np.linspace(context // 2, context - 2, count).astype(np.int64)
        labels = torch.from_numpy(inputs[numbers][:, places + 1].reshape(-1))
        name = "output.weight" if "output.weight" in self.rescaled else "token_embd.weight"
        log_likely = []
        for stream in _STREAMS:
            behind = activations(self.folder / stream, model.layers, (*inputs.shape, model.hidden), "r")
            hidden = torch.from_numpy(behind[numbers][:, places].reshape(1, -1, model.hidden))
            weights = None
            if stream == "quantized" and self.types[name] not in _KEPT:
                weights = self._stored(whole(self.rescaled[name]), self.types[name])
            with torch.no_grad(), model.head(weights) as head:
                parts = [head(part.to(model.device))[0].float().cpu() for part in hidden.split(_MEASURED // 8, 1)]
            log_likely.append(torch.log_softmax(torch.cat(parts), -1))
        original, quantized = log_likely
        rows = torch.arange(len(labels))
        before, now = (float(torch.exp(-each[rows, labels].mean())) for each in log_likely)
        divergence = float((original.exp() * (original - quantized)).sum(-1).mean())
        print(
            f"on {len(labels)} tokens that were held out: perplexity {now:.4g}, of the original {before:.4g}; "
            f"mean KL divergence {divergence:.4f}",
            file=self.messages,
        )

    def _passage(
        self,
        model: LayeredModel,
        number: int,
        streams: Streams,
        passage: list[Group],
        matrices: dict[str, np.ndarray],
        finished: Finished,
    ) -> None:
        if not any(self._quantized(reader) for group in passage for reader in group.readers):
            return
        sums = streams.sums(passage)
        stacks: dict[str, np.ndarray] = {}
        for group in passage:
            of = sums.pop(group.key)
            readers = [reader for reader in group.readers if self._quantized(reader)]
            if not readers:
                continue
            decomposition = self._decompose(number, group, of, finished)
            factors: dict[bool, Factor] = {}  # of the rotated Hessian, and of the one that is not
            for reader in readers:
                weights = self._weights(reader, self.rescaled, stacks)
                order = self._order(model, streams, reader, stacks)
                wanted = weights
                if decomposition is not None:
                    wanted = self._target(reader, weights, of, order, decomposition)
                qtype = self.types[reader.name]
                rotated = qtype == ITQ3_S
                if decomposition is not None and qtype in CALIBRATED_TYPES and rotated not in factors:
                    factors[rotated] = (decomposition if rotated else self._unrotated(group, of, finished)).factor()
                factor = factors.get(rotated) if qtype in CALIBRATED_TYPES else None
                data, decoded = self._encode(wanted, qtype, factor, self._output_factors(reader, number, order))
                matrices[reader.entry] = data
                if decomposition is None:
                    finished.unseen.add(reader.entry)
                finished.errors[reader.entry] = SquaredError(
                    float(np.square(decoded - weights, dtype=np.float64).sum()),
                    float(np.square(weights, dtype=np.float64).sum()),
                )
                self._put(streams, reader, order, decoded)

    def _quantized(self, reader: Reader) -> bool:
        """Whether a matrix is written in a type that changes it."""
        return self.types.get(reader.name) not in (None, *_KEPT)

    def _decompose(self, number: int, group: Group, of: Sums, finished: Finished) -> Decomposition | None:
        """The Hessian of a group; None where no token came to it."""
        if of.hessian.total is None:
            return None
        kind = _kind(group)
        try:
            if self.options.damping is not None:
                finished.dampings[kind] = self.options.damping
                return Decomposition.of(of.hessian.total, self.options.damping)
            settled = kind in finished.dampings and number % _SEARCHED and len(of.hessian.total) > WIDE
            held = None if of.held is None or settled else of.held.inputs
            start = finished.dampings.get(kind, target.DAMPING)
            finished.dampings[kind], result = target.decompose(of.hessian.total, held, start)
        except ValueError as problem:
            raise UserError(
                self.calibration.model, str(problem), "raise --damping", group.readers[0].entry
            ) from problem
        return result

    def _unrotated(self, group: Group, of: Sums, finished: Finished) -> Decomposition:
        """The same Hessian in the basis of types that do not rotate; the damping is the same in every basis."""
        assert of.hessian.total is not None
        return Decomposition.of(rotate_both(of.hessian.total), finished.dampings[_kind(group)])

    def _target(
        self, reader: Reader, weights: np.ndarray, of: Sums, order: np.ndarray, decomposition: Decomposition
    ) -> np.ndarray:
        """What a matrix is rounded to: itself, or more where tokens that were held out speak for it."""
        import torch

        if of.held is None or of.hessian.total is None:
            return weights
        # In float32: damped as they are, these sums are far from singular.
        plain = rotate(torch.from_numpy(weights).to(of.hessian.total.device))
        missing = of.missing.get(reader.entry)
        if missing is not None:
            missing = missing[torch.from_numpy(order).to(missing.device)].float()
        elif of.cross.total is None or not of.cross.total.any():
            return weights
        elif of.cross.full:
            missing = plain @ of.cross.total.float()
        else:
            blocks = plain.reshape(len(plain), *of.cross.total.shape[:2])
            missing = torch.einsum("mbi,bij->mbj", blocks, of.cross.total.float()).reshape(plain.shape)
        correction = decomposition.solve(missing)
        held = of.held
        lacking = held.difference @ plain.T
        if held.written is not None:
            lacking = lacking + held.written[:, torch.from_numpy(order).to(held.written.device)]
        step = target.line_search(lacking, held.inputs @ correction.T)
        correction *= step
        if float(correction.square().sum()) > float(plain.square().sum()):
            what = "would be rounded to a target that is further from it than it is large"
            remedy = "give more --tokens, or --calibration or --imatrix in place of --calibrate"
            raise UserError(self.calibration.model, what, remedy, reader.entry)
        return weights if step == 0 else weights + rotate(correction).cpu().numpy()

    def _weights(
        self, reader: Reader, tensors: Mapping[str, SourceTensor], stacks: dict[str, np.ndarray]
    ) -> np.ndarray:
        """The weights of a matrix in GGUF's order, float32; stacks of experts are kept in ``stacks``."""
        if reader.expert is None:
            return whole(tensors[reader.name])
        key = f"{reader.name} {tensors is self.rescaled}"
        if key not in stacks:
            stacks[key] = whole(tensors[reader.name])
        return stacks[key][reader.expert]

    def _encode(
        self, wanted: np.ndarray, qtype: Type, factor: Factor | None, outputs: list[tuple[np.ndarray, OutputFactor]]
    ) -> tuple[np.ndarray, np.ndarray]:
        """Bytes and decoded weights of a matrix; rows that make up for others' errors come after them."""
        if not outputs:
            data = self.encoder.rows(wanted, qtype, factor)
            return data, gguf.quants.dequantize(data, qtype)
        decoded = np.empty_like(wanted)
        block, size = gguf.GGML_QUANT_SIZES[qtype]
        data = np.empty((wanted.shape[0], wanted.shape[1] // block * size), dtype=np.uint8)
        for rows, output in outputs:
            rows = rows[output.order]
            errors = np.empty((len(rows), wanted.shape[1]), dtype=np.float32)
            for group in output.groups:
                here = wanted[rows[group]]
                if group.start:
                    here = here - output.feedback[: group.start, group].T @ errors[: group.start]
                coded = self.encoder.rows(here, qtype, factor)
                data[rows[group]] = coded
                decoded[rows[group]] = gguf.quants.dequantize(coded, qtype)
                errors[group] = decoded[rows[group]] - wanted[rows[group]]
        return data, decoded

    def _output_factors(self, reader: Reader, number: int, order: np.ndarray) -> list[tuple[np.ndarray, OutputFactor]]:
        """Rows in GGUF's order with the factor of their Fisher matrix, block by block; empty where none is known."""
        if self._fisher is None:
            return []
        place = np.empty_like(order)  # row of the model -> row of the tensor
        place[order] = np.arange(len(order))
        found, start = [], 0
        rows = self.rescaling.rows(reader.name, reader.expert)
        for block in self._fisher.blocks(reader, number):
            here = place[start : start + len(block)]
            if rows is not None:  # outputs times rows: gradients over rows
                block = block / rows[here, None] / rows[here]
            found.append((here, fisher.factorize(block)))
            start += len(block)
        return found

    def _order(
        self, model: LayeredModel, streams: Streams, reader: Reader, stacks: dict[str, np.ndarray]
    ) -> np.ndarray:
        """Which row of the model each row of the tensor is."""
        try:
            return row_order(streams.weights(reader), self._weights(reader, self.plain, stacks))
        except ValueError as problem:
            raise check_rows(model, reader, problem) from problem

    def _put(self, streams: Streams, reader: Reader, order: np.ndarray, decoded: np.ndarray) -> None:
        """Give the quantized layer what the file will hold, in the basis of the model."""
        decoded = self.rescaling.unscale(reader.name, decoded, reader.expert)
        put = np.empty_like(decoded)
        put[order] = decoded
        streams.put(reader, put)


def _clear(folder: Path) -> None:
    """Make a folder of work, or take away what is in it, but for what has a key of its own."""
    folder.mkdir(parents=True, exist_ok=True)
    for path in folder.iterdir():
        if path.name in _SHARED:
            continue
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink()


def whole(tensor: SourceTensor) -> np.ndarray:
    """All of a tensor, float32."""
    parts = [np.asarray(part, dtype=np.float32) for part in tensor.load()]
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def _kind(group: Group) -> str:
    """Matrices of all layers that are alike: what is known of one says what to try for the next."""
    return group.readers[0].name.split(".")[2]

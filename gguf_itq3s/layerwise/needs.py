"""What quantizing layer by layer takes of memory and disk, said and looked for before the work."""

from __future__ import annotations

import shutil
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Final, TextIO

import numpy as np

from ..base import report
from ..base.errors import UserError
from ..calibration.layers import LayeredModel
from ..calibration.options import CalibrationOptions
from ..checkpoint.source import SourceTensor
from ..codec.transform import BLOCK
from ..rounding.target import WIDE
from .backward import CHUNK
from .matrices import EMBEDDING, Source
from .result import MEASURED
from .streams import WRITERS, split

#: Memory of Python and its libraries, torch and transformers among them, in bytes.
_LIBRARIES: Final = 600 << 20


@dataclass(frozen=True)
class FisherBlocks:
    """The form of output Fisher matrices.

    Attributes:
        full: most rows of a matrix whose Fisher matrix is kept whole.
        block: rows of the blocks that are kept of a larger one.
    """

    full: int = 8192
    block: int = 1024


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

    def add(self, name: str, tensor: SourceTensor, calibration: CalibrationOptions, fisher: FisherBlocks) -> None:
        """Count a matrix, or a stack of them."""
        rows, columns = tensor.shape[-2:]
        self.weights += tensor.size
        self.columns = max(self.columns, columns)
        self.kept += columns if name.endswith(WRITERS) else 0
        n = columns if calibration.full(columns) else BLOCK
        # Sums in float64, two decompositions with a copy each, a factor; of narrow ones all in float64.
        square = (8 + 6 * 4 if n > WIDE else 2 * 8 + 6 * 8) * n * columns
        self.solving = max(self.solving, square + 8 * 7 * rows * columns)
        self.gradients += tensor.size // columns * (rows if rows <= fisher.full else fisher.block)

    def or_larger(self, other: _Layer) -> _Layer:
        """The larger of each."""
        return _Layer(*(max(getattr(self, key.name), getattr(other, key.name)) for key in fields(self)))


def check(
    folder: Path, calibration: CalibrationOptions, source: Source, model: LayeredModel, inputs: np.ndarray,
    fisher: FisherBlocks | None, messages: TextIO,
) -> None:  # fmt: skip
    """Say what memory and disk a run takes, and find a disk that is too small before the work.

    Args:
        folder: of work.
        calibration: how the model is run.
        source: what is quantized.
        model: the model.
        inputs: its tokens, int64 (windows, context).
        fisher: the form of the output Fisher matrices, if there are some.
        messages: where it is said.

    Raises:
        UserError: the disk is too small.
    """
    layers: dict[str, _Layer] = {}
    for name, tensor in source.tensors.items():
        if len(tensor.shape) >= 2 and name.startswith("blk."):
            layers.setdefault(name.split(".")[1], _Layer()).add(name, tensor, calibration, fisher or FisherBlocks())
    largest = _Layer()
    for size in layers.values():
        largest = largest.or_larger(size)
    vocabulary, hidden = source.tensors[EMBEDDING].shape[-2:]
    batch = min(calibration.batch, len(inputs)) * inputs.shape[1]
    kept = split(len(inputs), calibration.batch).kept(inputs.shape[1])
    held = len(range(kept.start, kept.stop, kept.step))
    rounding = 8 * largest.weights + largest.solving + 4 * (8 * batch + 3 * held) * largest.columns
    # The output matrix as it was and as it is, and logits of both.
    ends = 12 * vocabulary * hidden + 4 * 6 * MEASURED * vocabulary
    stream = 4 * inputs.size * hidden
    encoded = sum(tensor.bytes_in(source.types[name]) for name, tensor in source.tensors.items())
    disk = 4 * stream + 2 * 4 * inputs.size * largest.kept + encoded
    backward = 0
    if fisher is not None:
        disk += (model.layers + 3) * stream + 4 * sum(size.gradients for size in layers.values())
        # A layer in float32, sums in float64 and what is written of them; before that the logits of a few tokens.
        backward = 4 * largest.weights + 12 * largest.gradients + 16 * batch * largest.columns
        ends = max(ends, 6 * vocabulary * hidden + 32 * CHUNK * vocabulary)
    memory = _LIBRARIES + max(rounding, ends, backward)
    text = f"{inputs.size} tokens through {model.layers} layers"
    print(f"calibrating on {text}: about {report.size(memory)} of memory, {report.size(disk)} of disk", file=messages)
    present = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    if (free := shutil.disk_usage(folder).free + present) < disk:
        what = f"needs {report.size(disk)} while it calibrates, {report.size(free)} are free"
        raise UserError(folder, what, "free some space, give less --tokens, or choose another folder")

"""The matrices of a layer between the model, where they run, and the file, where they are rounded.

In the file the rows of some have another order, and columns and rows are rescaled.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Type

from ..base.errors import UserError
from ..calibration.groups import Reader
from ..calibration.moments import rotate
from ..checkpoint.rescaling import Rescaling
from ..checkpoint.source import Checkpoint, SourceTensor
from ..rounding import fisher, target
from ..rounding.encode import KEPT_TYPES, Encoder
from ..rounding.fisher import OutputFactor
from ..rounding.hessian import Factor
from ..rounding.target import Decomposition
from .backward import OutputFisher
from .streams import Streams, Sums

EMBEDDING, OUTPUT = "token_embd.weight", "output.weight"


@dataclass(frozen=True)
class Source:
    """What is quantized.

    Attributes:
        checkpoint: as it was read, nothing rescaled.
        tensors: as they are written, by name.
        types: tensor -> the type it is written in.
        rescaling: from the one to the other.
        encoder: weights to bytes.
    """

    checkpoint: Checkpoint
    tensors: Mapping[str, SourceTensor]
    types: Mapping[str, Type]
    rescaling: Rescaling
    encoder: Encoder

    @cached_property
    def plain(self) -> dict[str, SourceTensor]:
        """The tensors of the checkpoint by name."""
        return {tensor.name: tensor for tensor in self.checkpoint.tensors}

    def quantized(self, name: str) -> bool:
        """Whether a tensor is written in a type that changes it."""
        return self.types.get(name) not in (None, *KEPT_TYPES)

    def scale(self, reader: Reader) -> np.ndarray | None:
        """What the file multiplies the columns of a matrix by."""
        return self.rescaling.columns(reader.name, reader.expert)

    def embedded(self, inputs: np.ndarray) -> tuple[np.ndarray, np.ndarray] | None:
        """Tokens of a text and their rows of the embedding in the file; None where it has them as they are."""
        if not self.quantized(EMBEDDING):
            return None
        tokens = np.unique(inputs)
        weights = self.tensors[EMBEDDING].whole()
        if tokens[-1] >= len(weights):
            return None
        return tokens, self.encoder.decoded(weights[tokens], self.types[EMBEDDING])

    def output(self) -> np.ndarray | None:
        """The output matrix as the file gives it back; None where it has it as it is."""
        name = OUTPUT if OUTPUT in self.tensors else EMBEDDING
        return self.encoder.decoded(self.tensors[name].whole(), self.types[name]) if self.quantized(name) else None


@dataclass
class Matrix:
    """One matrix of a layer while it is rounded.

    Attributes:
        source: of the file.
        streams: the layer in both models.
        reader: the matrix.
        stacks: of experts, tensors that are in memory.
    """

    source: Source
    streams: Streams
    reader: Reader
    stacks: dict[tuple[str, bool], np.ndarray] = field(default_factory=dict)

    @cached_property
    def weights(self) -> np.ndarray:
        """Its weights in the file before they are rounded, float32 (m, n)."""
        return self._of(self.source.tensors, rescaled=True)

    @cached_property
    def order(self) -> np.ndarray:
        """Which row of the model each row of the tensor is, int64 (m,)."""
        return self.streams.row_order(self.reader, self._of(self.source.plain, rescaled=False))

    def _of(self, tensors: Mapping[str, SourceTensor], *, rescaled: bool) -> np.ndarray:
        name, expert = self.reader.name, self.reader.expert
        if expert is None:
            return tensors[name].whole()
        key = (name, rescaled)
        if key not in self.stacks:
            self.stacks[key] = tensors[name].whole()
        return self.stacks[key][expert]

    def target(self, of: Sums, decomposition: Decomposition) -> np.ndarray:
        """What it is rounded to: itself, or more where tokens that were held out speak for it.

        Args:
            of: sums of its inputs.
            decomposition: of their Hessian.

        Raises:
            UserError: the correction is larger than the matrix.
        """
        held, total = of.held, of.hessian.total
        missing = of.missing.get(self.reader.entry)
        if held is None or total is None or (missing is None and not of.differs):
            return self.weights
        plain = rotate(torch.from_numpy(self.weights).to(total.device))
        order = torch.from_numpy(self.order).to(total.device)
        if missing is not None:
            asked = missing[order].float()
        else:
            assert of.cross.total is not None
            asked = target.explained(plain, of.cross.total)
        lacking = held.difference @ plain.T
        if held.written is not None:
            lacking = lacking + held.written[:, order]
        correction = target.correction(decomposition, asked, held.inputs, lacking)
        energy = float(correction.square().sum())
        if energy > float(plain.square().sum()):
            what = "would be rounded to a target that is further from it than it is large"
            remedy = "give more --tokens, or --calibration or --imatrix in place of --calibrate"
            raise UserError(self.source.checkpoint.folder, what, remedy, self.reader.entry)
        return self.weights + rotate(correction).cpu().numpy() if energy else self.weights

    def encode(
        self, wanted: np.ndarray, factor: Factor | None, outputs: list[tuple[np.ndarray, OutputFactor]]
    ) -> tuple[np.ndarray, np.ndarray]:
        """Bytes and decoded weights; rows that make up for others' errors come after them.

        Args:
            wanted: what it is rounded to, float32 (m, n).
            factor: of the Hessian of its inputs, if that is known.
            outputs: as :meth:`output_factors` gives them.
        """
        encoder, qtype = self.source.encoder, self.source.types[self.reader.name]
        if not outputs:
            data = encoder.rows(wanted, qtype, factor)
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
                coded = encoder.rows(here, qtype, factor)
                data[rows[group]] = coded
                decoded[rows[group]] = gguf.quants.dequantize(coded, qtype)
                errors[group] = decoded[rows[group]] - wanted[rows[group]]
        return data, decoded

    def output_factors(self, gradients: OutputFisher | None, number: int) -> list[tuple[np.ndarray, OutputFactor]]:
        """Rows in GGUF's order with the factor of their Fisher matrix, block by block; empty where none is known."""
        if gradients is None:
            return []
        place = np.empty_like(self.order)  # row of the model -> row of the tensor
        place[self.order] = np.arange(len(self.order))
        found, start = [], 0
        rows = self.source.rescaling.rows(self.reader.name, self.reader.expert)
        for block in gradients.blocks(self.reader, number):
            here = place[start : start + len(block)]
            if rows is not None:  # outputs times rows: gradients over rows
                block = block / rows[here, None] / rows[here]
            found.append((here, fisher.factorize(block)))
            start += len(block)
        return found

    def put(self, decoded: np.ndarray) -> None:
        """Give the quantized layer what the file will hold, in the basis of the model."""
        decoded = self.source.rescaling.unscale(self.reader.name, decoded, self.reader.expert)
        put = np.empty_like(decoded)
        put[self.order] = decoded
        self.streams.put(self.reader, put)

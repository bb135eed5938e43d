"""The matrices of a layer between the model, where they run, and the file, where they are rounded.

In the file the rows of some have another order, and columns and rows are rescaled.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Type

from ..base.errors import errors_of_weights
from ..checkpoint.rescaling import Rescaling
from ..checkpoint.source import Checkpoint, SourceTensor
from ..rounding import fisher, target
from ..rounding.encode import KEPT_TYPES, Encoder
from ..rounding.hessian import Factor
from ..rounding.target import Decomposition
from .inputs import LayerMatrix
from .moments import rotate
from .ranks import ALONE, Ranks
from .streams import Streams, Sums

EMBEDDING, OUTPUT = "token_embd.weight", "output.weight"


@dataclass(frozen=True)
class Source:
    """What is quantized.

    Attributes:
        checkpoint: as it was read, nothing rescaled.
        tensors: as they are written, by name.
        rescaling: from the one to the other.
    """

    checkpoint: Checkpoint
    tensors: Mapping[str, SourceTensor]
    types: Mapping[str, Type]
    rescaling: Rescaling
    encoder: Encoder

    def quantized(self, name: str) -> bool:
        """Whether a tensor is written in a type that changes it."""
        return self.types.get(name) not in (None, *KEPT_TYPES)

    def scale(self, reader: LayerMatrix) -> np.ndarray | None:
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
        with errors_of_weights(self.checkpoint.folder, self.tensors[EMBEDDING].label):
            return tokens, self.encoder.decoded(weights[tokens], self.types[EMBEDDING])

    def output(self) -> Iterator[np.ndarray] | None:
        """The output matrix as the file gives it back, some rows after the others; None where it has it as it is."""
        name = OUTPUT if OUTPUT in self.tensors else EMBEDDING
        return self._decoded(name) if self.quantized(name) else None

    def _decoded(self, name: str) -> Iterator[np.ndarray]:
        with errors_of_weights(self.checkpoint.folder, self.tensors[name].label):
            for part in self.tensors[name].load():
                yield from self.encoder.decoded_pieces(part, self.types[name])


@dataclass
class Matrix:
    """One matrix of a layer while it is rounded; ``stacks``: tensors of which single experts cannot be read."""

    source: Source
    streams: Streams
    reader: LayerMatrix
    stacks: dict[str, np.ndarray] = field(default_factory=dict)

    @property
    def type(self) -> Type:
        """The type it is written in."""
        return self.source.types[self.reader.name]

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns; those of heads that read the same are one matrix."""
        tensor = self.source.tensors[self.reader.name]
        rows, columns = tensor.shape[-2:]
        return rows if self.reader.expert is not None else tensor.size // columns, columns

    def empty(self) -> np.ndarray:
        """Room for its bytes, uint8 (m, bytes of a row)."""
        rows, columns = self.shape
        block, size = gguf.GGML_QUANT_SIZES[self.type]
        return np.empty((rows, columns // block * size), dtype=np.uint8)

    @cached_property
    def weights(self) -> np.ndarray:
        """Its weights in the file before they are rounded, float32 (m, n)."""
        name, expert, tensors = self.reader.name, self.reader.expert, self.source.tensors
        if expert is None:
            return tensors[name].whole().reshape(self.shape)
        alone = tensors[name].matrix(expert)
        if alone is not None:
            return alone
        if name not in self.stacks:
            self.stacks[name] = tensors[name].whole()
        return self.stacks[name][expert]

    @cached_property
    def order(self) -> np.ndarray:
        """Which row of the model's matrix each row of the tensor is, int64 (m,)."""
        return self.reader.in_order(np.arange(self.shape[0]))

    def target(self, of: Sums, decomposition: Decomposition, ranks: Ranks = ALONE) -> np.ndarray:
        """What it is rounded to: itself, or more where tokens that were held out speak for it.

        Args:
            ranks: those that have the same sums and hold out other tokens; each asks for its share of the rows.
        """
        held, total = of.held, of.hessian.total
        if held is None or total is None or (of.missing is None and not of.differs):
            return self.weights
        plain = rotate(torch.from_numpy(self.weights).to(total.device))
        order = torch.from_numpy(self.order).to(total.device)
        mine = ranks.part(len(plain))
        if of.missing is not None:
            asked = of.missing[order[mine]].float()
        else:
            assert of.cross.total is not None
            asked = target.explained(plain[mine], of.cross.total)
        correction = decomposition.solve(asked)
        if not ranks.alone:
            correction = torch.from_numpy(ranks.all_gather(correction.cpu().numpy())).to(total.device)
        lacking = held.difference @ plain.T
        if held.written is not None:
            lacking = lacking + held.written[:, order]
        correction *= target.line_search(lacking, held.inputs @ correction.T, ranks.sums)
        # Larger than the matrix it is where that hardly adds to its stream: the file should still have the model's.
        if not 0 < float(correction.square().sum()) <= float(plain.square().sum()):
            return self.weights
        return self.weights + rotate(correction).cpu().numpy()

    def encode(
        self, wanted: np.ndarray, factor: Factor | None, blocks: list[np.ndarray], ranks: Ranks = ALONE
    ) -> tuple[np.ndarray, np.ndarray]:
        """Bytes and decoded weights; rows that make up for others' errors come after them.

        Args:
            wanted: what it is rounded to, float32 (m, n).
            blocks: its output Fisher matrices, as :meth:`OutputFisher.blocks` gives them.
            ranks: those that share the work and have the same arguments: rows, or blocks and the rest of their rows.
        """
        qtype = self.type
        if not blocks:
            data = self._rows(wanted, factor, ranks)
            return data, gguf.quants.dequantize(data, qtype)
        data, decoded = self.empty(), np.empty_like(wanted)
        pieces = list(zip(self._places(blocks), blocks, strict=True))
        # Whole blocks as long as there is one for every rank, then all ranks at what is left.
        pieces.sort(key=lambda piece: -len(piece[0]))
        whole = len(pieces) // ranks.size * ranks.size if not ranks.alone else 0
        for place, (rows, found) in enumerate(pieces[:whole]):
            if place % ranks.size == ranks.rank:
                self._encode_block(wanted, factor, rows, found, data, decoded, ALONE)
        for place, (rows, _) in enumerate(pieces[:whole]):
            data[rows] = ranks.broadcast_object(data[rows], place % ranks.size)
            decoded[rows] = gguf.quants.dequantize(data[rows], qtype)
        for rows, found in pieces[whole:]:
            self._encode_block(wanted, factor, rows, found, data, decoded, ranks)
        return data, decoded

    def _encode_block(
        self, wanted: np.ndarray, factor: Factor | None, rows: np.ndarray, block: np.ndarray, data: np.ndarray,
        decoded: np.ndarray, ranks: Ranks,
    ) -> None:  # fmt: skip
        """The rows of one output Fisher matrix, group after group, into ``data`` and ``decoded``."""
        output = fisher.factorize(self._scaled(block, rows))
        rows = rows[output.order]
        errors = np.empty((len(rows), wanted.shape[1]), dtype=np.float32)
        for group in output.groups:
            here = wanted[rows[group]]
            if group.start:
                here = here - output.feedback[: group.start, group].T @ errors[: group.start]
            data[rows[group]] = coded = self._rows(here, factor, ranks)
            decoded[rows[group]] = gguf.quants.dequantize(coded, self.type)
            errors[group] = decoded[rows[group]] - wanted[rows[group]]

    def _rows(self, wanted: np.ndarray, factor: Factor | None, ranks: Ranks) -> np.ndarray:
        """Some rows encoded, by each rank a share, in as many at least as the encoder has side by side."""
        part = ranks.part(-(-len(wanted) // fisher.GROUP))
        own = wanted[part.start * fisher.GROUP : part.stop * fisher.GROUP]
        data = self.empty()[:0]
        if len(own):
            data = self.source.encoder.rows(np.ascontiguousarray(own), self.type, factor)
        return ranks.all_gather(data)

    def _places(self, blocks: list[np.ndarray]) -> list[np.ndarray]:
        """The rows in GGUF's order that each block of its output Fisher matrices is of."""
        place = np.empty_like(self.order)  # row of the model -> row of the tensor
        place[self.order] = np.arange(len(self.order))
        ends = np.cumsum([len(block) for block in blocks])
        return [place[end - len(block) : end] for block, end in zip(blocks, ends, strict=True)]

    def _scaled(self, block: np.ndarray, rows: np.ndarray) -> np.ndarray:
        """A block of its output Fisher matrices in the file, whose rows may be scaled."""
        scales = self.source.rescaling.rows(self.reader.name, self.reader.expert)
        # Outputs times rows: gradients over rows.
        return block if scales is None else block / scales[rows, None] / scales[rows]

    def put(self, decoded: np.ndarray) -> None:
        """Give the quantized layer what the file will hold, in the basis of the model."""
        decoded = self.source.rescaling.unscale(self.reader.name, decoded, self.reader.expert)
        self.streams.put(self.reader, self.reader.in_model(decoded))

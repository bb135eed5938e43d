"""A checkpoint that has been read: GGUF tensors whose weights are yielded when they are wanted, and metadata."""

from __future__ import annotations

import io
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Type
from gguf.gguf_writer import WriterState
from safetensors import safe_open

from ..base.errors import UserError
from .policy import Model, first_downs
from .shards import stored_tensors
from .weights import Weights


def padded(size: int) -> int:
    """A size, up to the next multiple of GGUF's alignment."""
    return gguf.GGUFWriter.ggml_pad(size, gguf.GGUF_DEFAULT_ALIGNMENT)


@dataclass(frozen=True)
class SourceTensor:
    """One tensor of the model under its GGUF name.

    Attributes:
        name: GGUF name.
        shape: shape in numpy order, rows last (of the weights, for tensors that come quantized).
        stored: the type an F16 file has it in.
        sources: names in the checkpoint that it is made from, in the order they are read; where several tensors come
            out together, each has all of them.
        load: yields the tensor's parts in order, arrays whose leading axis runs over the tensor's; parts of a tensor
            that comes quantized are uint8.
        load_matrix: one matrix of a stack, by its number, without the others; None where they come together only.
    """

    name: str
    shape: tuple[int, ...]
    stored: Type
    sources: tuple[str, ...]
    load: Callable[[], Iterator[np.ndarray]] = field(repr=False)
    load_matrix: Callable[[int], np.ndarray | None] = field(default=lambda _: None, repr=False)

    @property
    def label(self) -> str:
        """Its name for a message, with the checkpoint's own beside it."""
        own = self.sources[0] if len(self.sources) == 1 else self.name
        return self.name if own == self.name else f"{self.name} ({own})"

    @property
    def size(self) -> int:
        """Number of weights."""
        return int(np.prod(self.shape, dtype=np.int64))

    def bytes_in(self, qtype: Type) -> int:
        """Bytes of the tensor in a type that its rows are whole blocks of."""
        block, block_bytes = gguf.GGML_QUANT_SIZES[qtype]
        return self.size // block * block_bytes

    def whole(self) -> np.ndarray:
        """All of it, float32."""
        parts = [np.asarray(part, dtype=np.float32) for part in self.load()]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def matrix(self, number: int) -> np.ndarray | None:
        """One matrix of a stack, float32; None where it cannot be had without the others."""
        found = self.load_matrix(number)
        return None if found is None else np.asarray(found, dtype=np.float32)

    def vector(self) -> np.ndarray:
        """All weights in one float32 vector, for norms."""
        return np.concatenate([np.asarray(part, dtype=np.float32).reshape(-1) for part in self.load()])


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that is ready to be written.

    Attributes:
        folder: where it was read from.
        tensors: its tensors in the order of the file.
        model: what the type policy asks.
        writer: a GGUFWriter that holds the metadata, and no tensors yet.
        files: the weight files.
        ftype: the file that upstream would write: as asked for, or what it guessed.
        described: the model's name, its parts and its origin.
        weights: the same weights by the names of a model of Transformers.
    """

    folder: Path
    tensors: list[SourceTensor]
    model: Model
    writer: gguf.GGUFWriter
    files: list[Path]
    ftype: gguf.LlamaFileType
    described: gguf.Metadata
    weights: Weights

    def head(self, types: Sequence[Type]) -> bytes:
        """GGUF header, metadata and tensor infos.

        Args:
            types: of each tensor.

        Raises:
            UserError: the model's metadata do not fit GGUF's types.
        """
        writer = self.writer
        writer.tensors, writer.state = [{}], WriterState.NO_FILE
        for tensor, qtype in zip(self.tensors, types, strict=True):
            size = tensor.bytes_in(qtype)
            writer.add_tensor_info(tensor.name, tensor.shape, np.dtype(np.float32), size, raw_dtype=qtype)
        buffer = io.BytesIO()
        writer.fout, writer.state = [buffer], WriterState.EMPTY
        try:
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.write_ti_data_to_file()
        except (struct.error, ValueError, TypeError, AttributeError, OverflowError) as error:
            what = f"gives metadata that no GGUF file can hold: {error}"
            remedy = "take the config.json and the model card of the model"
            raise UserError(self.folder / "config.json", what, remedy) from error
        return buffer.getvalue()

    def first_rows(self, tensor: SourceTensor) -> list[np.ndarray] | None:
        """The first row of each matrix that a tensor may be made from, read alone.

        Rows may be permuted on the way to GGUF, so each is some row of the tensor, or of one that is made from the same
        matrices.

        Returns:
            float32 (1, n) each; None where they cannot be had: weights that are not safetensors, not floats, or
            transposed on the way.
        """
        if self._transposes:
            return None
        rows = []
        for name in tensor.sources:
            path, shape = self._stored.get(name, (None, ()))
            if path is None or len(shape) < 2 or shape[-1] != tensor.shape[-1]:
                continue
            with safe_open(path, framework="pt") as shard:
                values = shard.get_slice(name)[(slice(0, 1),) * (len(shape) - 1)]
            if not values.dtype.is_floating_point:
                return None
            rows.append(values.float().reshape(1, -1).numpy())
        return rows or None

    @cached_property
    def _stored(self) -> dict[str, tuple[Path, tuple[int, ...]]]:
        return stored_tensors(path for path in self.files if path.suffix == ".safetensors")

    @cached_property
    def _transposes(self) -> bool:
        """Whether the architecture keeps matrices the other way round (GPT-2): a square one would not show it."""
        for tensor in self.tensors:
            stored = self._stored.get(tensor.sources[0]) if len(tensor.sources) == 1 else None
            if stored is not None and stored[1] != tensor.shape and stored[1] == tensor.shape[::-1]:
                return True
        return False


def model_facts(folder: Path, writer: gguf.GGUFWriter, tensors: list[SourceTensor]) -> Model:
    """What the type policy asks, from the metadata of a writer.

    Raises:
        UserError: a value is no number.
    """

    def number(key: str, default: int) -> int:
        entry = writer.kv_data[0].get(f"{writer.arch}.{key}")
        value = default if entry is None else entry.value
        try:
            return int(value[0] if isinstance(value, (list, tuple, np.ndarray)) else value)
        except (TypeError, ValueError, IndexError, OverflowError) as error:
            what = f"gives {value!r:.80} for {key}"
            raise UserError(folder / "config.json", what, "take the file that belongs to the weights") from error

    heads, layers = number("attention.head_count", 0), number("block_count", 0)
    return Model(
        arch=writer.arch,
        layers=layers,
        heads=heads,
        kv_heads=number("attention.head_count_kv", heads),
        experts=number("expert_count", 0),
        tied=not any(tensor.name == "output.weight" for tensor in tensors),
        first_downs=first_downs({tensor.name: tensor.shape for tensor in tensors}, writer.arch, layers),
    )

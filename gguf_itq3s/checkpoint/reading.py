"""A Hugging Face checkpoint as a stream of GGUF tensors, read through llama.cpp's ``conversion`` package.

The package maps names, permutes, stacks experts and writes metadata for every architecture it knows. It runs here as
for an F16 file, but the conversion of the weights is held back: each tensor is kept as the lazy F32 (or F16) array
before that step, with the type that an F16 file would have it in.
"""

from __future__ import annotations

import io
import logging
import struct
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Final

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Type
from gguf import Keys
from gguf.gguf_writer import WriterState
from safetensors import safe_open

from .. import upstream
from ..errors import UserError
from . import bitnet, lazy, patches
from .policy import Model
from .request import Request
from .validation import check_counts_by_shapes, check_folder, check_weights, stored_tensors

_TOKENIZER_FILES: Final = (
    "tokenizer.model", "tokenizer.json", "vocab.json", "vocab.txt", "tekken.json", "spiece.model", "*.tiktoken",
    "sentencepiece*.model", "tokenizer.jsonl", "tokenization_*.py", "rwkv_vocab*.txt",
)  # fmt: skip
# The number of a part, and of all of them, is a uint16.
_MOST_PARTS: Final = (1 << 16) - 1


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
    """

    name: str
    shape: tuple[int, ...]
    stored: Type
    sources: tuple[str, ...]
    load: Callable[[], Iterator[np.ndarray]] = field(repr=False)

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
    """

    folder: Path
    tensors: list[SourceTensor]
    model: Model
    writer: gguf.GGUFWriter
    files: list[Path]
    ftype: gguf.LlamaFileType
    described: gguf.Metadata

    def heads(self, types: Sequence[Type]) -> list[bytes]:
        """GGUF header, metadata and tensor infos, of each part that the writer is set to split the file into.

        Args:
            types: of each tensor.

        Raises:
            UserError: the model's metadata do not fit GGUF's types, or there would be too many parts.
        """
        writer = self.writer
        writer.state = WriterState.NO_FILE
        for tensor, qtype in zip(self.tensors, types, strict=True):
            size = tensor.bytes_in(qtype)
            writer.add_tensor_info(tensor.name, tensor.shape, np.dtype(np.float32), size, raw_dtype=qtype)
        if len(writer.tensors) > _MOST_PARTS:
            what = f"would be written in {len(writer.tensors)} parts, more than {_MOST_PARTS}"
            raise UserError(self.folder, what, "raise --split-max-size or --split-max-tensors")
        buffers = [io.BytesIO() for _ in writer.tensors]
        writer.fout, writer.state = buffers, WriterState.EMPTY
        try:
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.write_ti_data_to_file()
        except (struct.error, ValueError, TypeError, AttributeError, OverflowError) as error:
            what = f"gives metadata that no GGUF file can hold: {error}"
            remedy = "take the config.json and the model card of the model"
            raise UserError(self.folder / "config.json", what, remedy) from error
        del writer.kv_data[1:]
        for key in (Keys.Split.LLM_KV_SPLIT_NO, Keys.Split.LLM_KV_SPLIT_COUNT, Keys.Split.LLM_KV_SPLIT_TENSORS_COUNT):
            writer.remove_key(key)
        return [buffer.getvalue() for buffer in buffers]

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


def open_checkpoint(
    folder: Path,
    *,
    model_name: str | None = None,
    verbose: bool = False,
    trust_remote_code: bool = False,
    request: Request = Request(),  # noqa: B008 (frozen)
) -> Checkpoint:
    """Read everything of a checkpoint but its weights.

    Args:
        folder: a local Hugging Face folder.
        model_name: ``general.name`` instead of the folder's or the model card's.
        verbose: let the libraries log.
        trust_remote_code: Python code of the folder may run.
        request: what of it is wanted.

    Raises:
        UserError: the folder is not a complete checkpoint of a supported architecture, or its code would have to run.
    """
    config = check_folder(folder)
    request.check(folder)
    if request.target_model_dir is not None:
        check_folder(request.target_model_dir)
    conversion = upstream.load_conversion()
    import torch

    logging.basicConfig(format="%(message)s")
    for name in ("hf-to-gguf", "gguf"):
        logging.getLogger(name).setLevel(logging.INFO if verbose else logging.ERROR)

    patched = patches.patched(folder, trust_remote_code, reads=True, quantize=_HeldBack)
    with patched as transformers, torch.inference_mode():
        if not verbose:
            transformers.logging.set_verbosity_error()
        model_class = _model_class(conversion, folder, mmproj=request.mmproj)
        files = [] if request.vocab_only else check_weights(folder, config)
        with _reading(folder), request.set_on(model_class, folder):
            converter = _working(
                model_class(folder, request.ftype, Path("model.gguf"), model_name=model_name, **request.arguments())
            )
            converter.remote_hf_model_id = None if model_name else request.repository
            tensors = [] if request.vocab_only else _collect(converter)
            converter.prepare_metadata(vocab_only=request.vocab_only)
    if request.quantized_by is not None:
        converter.gguf_writer.add_quantized_by(request.quantized_by)
    return _checkpoint(folder, converter, tensors, files, empty=request.vocab_only)


def open_shapes(folder: Path, shapes: Mapping[str, tuple[int, ...]], *, trust_remote_code: bool = False) -> Checkpoint:
    """What :func:`open_checkpoint` would give of a checkpoint whose weights, and tokenizer, are not there.

    Args:
        folder: with ``config.json``.
        shapes: of the checkpoint's tensors, numpy order, by their names in it.
        trust_remote_code: Python code of the folder may run.

    Returns:
        Tensors that cannot be loaded, and a writer without a tokenizer.

    Raises:
        UserError: the architecture is not supported, or its conversion asks for values of weights.
    """
    check_counts_by_shapes(folder / "config.json", check_folder(folder), shapes)
    conversion = upstream.load_conversion()
    import torch

    def tensor(name: str, shape: tuple[int, ...]) -> Any:
        def load() -> Any:
            raise UserError(folder, "is needed to know the tensors of this architecture", "download the weights", name)

        meta = torch.empty(shape, dtype=torch.float16, device="meta")
        return conversion.base.LazyTorchTensor(meta=meta, args=(), func=load)

    def index_tensors(self: Any, remote_hf_model_id: str | None = None) -> dict[str, Callable[[], Any]]:
        found = (self.filter_tensors((name, partial(tensor, name, shape))) for name, shape in shapes.items())
        return dict(item for item in found if item is not None)

    patched = patches.patched(folder, trust_remote_code, quantize=_HeldBack)
    with patched, torch.inference_mode(), _reading(folder):
        model_class = _model_class(conversion, folder)
        # In the base class: some architectures do something of their own before they call it.
        with patches.replaced_in(conversion.ModelBase, "index_tensors", index_tensors):
            converter = _working(model_class(folder, gguf.LlamaFileType.MOSTLY_F16, Path("model.gguf")))
        converter.set_vocab = lambda: None
        tensors = _collect(converter)
        converter.prepare_metadata(vocab_only=False)
    return _checkpoint(folder, converter, tensors, [])


def _checkpoint(
    folder: Path, converter: Any, tensors: list[SourceTensor], files: list[Path], *, empty: bool = False
) -> Checkpoint:
    if not tensors and not empty:
        raise UserError(folder, "holds no tensor that the architecture uses", "check that the download is complete")
    for tensor in tensors:
        if not tensor.shape or not tensor.size:
            what = f"has the shape {tensor.shape}, and no weights"
            raise UserError(folder, what, "repair the checkpoint or download it again", tensor.label)
    writer = converter.gguf_writer
    writer.tensors = [{}]
    facts = model_facts(folder, writer, tensors)
    return Checkpoint(folder, tensors, facts, writer, files, converter.ftype, converter.metadata)


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

    heads = number("attention.head_count", 0)
    return Model(
        arch=writer.arch,
        layers=number("block_count", 0),
        heads=heads,
        kv_heads=number("attention.head_count_kv", heads),
        experts=number("expert_count", 0),
        tied=not any(tensor.name == "output.weight" for tensor in tensors),
    )


def _model_class(conversion: Any, folder: Path, *, mmproj: bool = False) -> Any:
    """The class of the ``conversion`` package that reads the checkpoint's architecture."""
    config = folder / "config.json"
    with _reading(folder):
        hparams = conversion.ModelBase.load_hparams(folder, False)
    try:
        kind = conversion.ModelType.MMPROJ if mmproj else conversion.ModelType.TEXT
        architecture = conversion.get_model_architecture(hparams, kind)
    except (ValueError, TypeError, AttributeError, LookupError) as error:
        raise UserError(config, "names no architecture", "add the model's class under 'architectures'") from error
    try:
        return conversion.get_model_class(architecture, mmproj=mmproj)
    except (NotImplementedError, TypeError) as error:
        if mmproj:
            what, remedy = f"architecture {architecture} has no projector that can be read", "leave --mmproj out"
            raise UserError(config, what, remedy) from error
        remedy = "the pinned llama.cpp cannot read it; set LLAMA_CPP_DIR to a newer checkout if that can"
        raise UserError(config, f"architecture {architecture} is not supported", remedy) from error


@contextmanager
def _reading(folder: Path) -> Iterator[None]:
    """Give errors of the ``conversion`` package the form of a user error."""
    try:
        yield
    except (UserError, KeyboardInterrupt, MemoryError):
        raise
    except Exception as error:
        reason = f"{error} is missing" if isinstance(error, KeyError) else str(error) or type(error).__name__
        remedy = "check its config.json; --verbose shows more"
        if isinstance(error, AssertionError) and "mtp" in (line := _failed_line(error)):
            # Checkpoints that Transformers has saved lack these layers, whatever their config.json says.
            reason, remedy = f"{line} fails: the layers for multi-token prediction are not there", "give --no-nextn"
        raise UserError(folder, f"cannot be read: {reason}", remedy) from error


def _failed_line(error: BaseException) -> str:
    """The line of code that an error comes from."""
    frames = traceback.extract_tb(error.__traceback__)
    return (frames[-1].line or "") if frames else ""


def _working(converter: Any) -> Any:
    """The ``conversion`` object that does the work; it explains tokenizer errors and reads packed BitNet weights.

    That of Mistral 3 hands all of it to one of another class, with a writer of its own.
    """
    while hasattr(converter, "impl"):
        converter = converter.impl
    own_set_vocab: Any = getattr(converter, "set_vocab", None)  # a projector has no tokenizer
    own_dequant_model = converter.dequant_model

    def set_vocab() -> None:
        try:
            own_set_vocab()
        except (UserError, KeyboardInterrupt, MemoryError):
            raise
        except Exception as error:
            folder = converter.dir_model
            if not any(next(folder.glob(name), None) for name in _TOKENIZER_FILES):
                what, remedy = "has no tokenizer", "add the model's tokenizer.model or tokenizer.json"
            else:
                what, remedy = f"the tokenizer cannot be read: {error}", "take the tokenizer files of the model"
            raise UserError(folder, what, remedy) from error

    def dequant_model() -> None:
        if bitnet.is_packed(converter.hparams, converter.model_tensors):
            bitnet.unpack_all(converter.hparams, converter.model_tensors)
            converter.weight_quant = lambda weight: weight  # upstream would ternarize once more, by another scale
        own_dequant_model()

    converter.set_vocab, converter.dequant_model = set_vocab, dequant_model
    return converter


@dataclass
class _HeldBack:
    """A tensor that upstream believes it has converted to ``qtype``: takes the place of ``gguf.quants.quantize``."""

    data: Any
    qtype: Type

    def __post_init__(self) -> None:
        if self.shape[-1] % gguf.GGML_QUANT_SIZES[self.qtype][0]:
            raise gguf.QuantError(f"rows of {self.shape[-1]} are not whole blocks")  # as quantize would

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.data.shape)

    @property
    def dtype(self) -> np.dtype:
        return np.dtype(self.data.dtype)


def _collect(converter: Any) -> list[SourceTensor]:
    """Run upstream's tensor pass and keep what it would have written."""
    tensors: list[SourceTensor] = []
    writer = converter.gguf_writer
    read: list[str] = []  # names read since the last tensor was added
    get_tensors = converter.get_tensors

    def noted_tensors() -> Iterator[tuple[str, Any]]:
        for name, tensor in get_tensors():
            read.append(name)
            yield name, tensor

    def add_tensor(name: str, tensor: Any, raw_shape: Any = None, raw_dtype: Type | None = None, **_: Any) -> None:
        held = isinstance(tensor, _HeldBack)
        # The writer counts parameters from these entries; they are replaced once types are chosen.
        dtype = np.dtype(np.float32) if held else np.dtype(tensor.dtype)
        shape = raw_shape if raw_shape is not None else tuple(tensor.shape)
        writer.add_tensor_info(name, shape, dtype, 0, raw_dtype=raw_dtype)
        info = writer.tensors[-1][name]
        data = tensor.data if held else tensor
        # One reading may give several tensors: experts of three kinds, a fused matrix.
        sources = tuple(read) or (tensors[-1].sources if tensors else ())
        read.clear()
        shape = tuple(int(n) for n in info.shape)
        tensors.append(SourceTensor(name, shape, info.dtype, sources, lambda: _parts(data)))

    writer.add_tensor, converter.get_tensors = add_tensor, noted_tensors
    converter.prepare_tensors()
    return tensors


def _parts(data: Any) -> Iterator[np.ndarray]:
    """The parts of a tensor: one array, or the chunks of a ``LazyChunkedTensor``."""
    chunks = data._chunks if hasattr(data, "_chunks") else (partial(lazy.evaluate, data),)
    for chunk in chunks:
        with patches.patched(None, reads=True):
            part = np.asarray(chunk())
        yield part

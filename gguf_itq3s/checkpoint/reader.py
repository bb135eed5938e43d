"""A Hugging Face checkpoint as a stream of GGUF tensors, read through llama.cpp's ``conversion`` package.

The package maps names, permutes, stacks experts and writes metadata for every architecture it knows. It runs here as
for an F16 file, but the conversion of the weights is held back: each tensor is kept as the lazy F32 (or F16) array
before that step, with the type that an F16 file would have it in.
"""

from __future__ import annotations

import io
import json
import logging
import pickle
import re
import struct
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Final

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Type
from gguf import Keys
from gguf.gguf_writer import WriterState
from safetensors import SafetensorError, safe_open

from .. import upstream
from ..errors import UserError
from . import bitnet, lazy, trust
from .files import listed_file
from .policy import Model
from .request import Request

_SAFETENSORS_INDEX: Final = "model.safetensors.index.json"
_BIN_INDEX: Final = "pytorch_model.bin.index.json"
_NUMBERED: Final = re.compile(r"-(\d+)-of-(\d+)\.")
_TOKENIZER_FILES: Final = (
    "tokenizer.model", "tokenizer.json", "vocab.json", "vocab.txt", "tekken.json", "spiece.model", "*.tiktoken",
    "sentencepiece*.model", "tokenizer.jsonl", "tokenization_*.py", "rwkv_vocab*.txt",
)  # fmt: skip
# Counts in config.json, and those of which some architectures have a list, one for each layer.
_LISTS: Final = ("intermediate_size", "num_attention_heads", "num_key_value_heads", "n_head")
_LAYERS: Final = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_COUNTS: Final = (*_LAYERS, "hidden_size", "head_dim", "vocab_size", "n_embd", *_LISTS)
# Far beyond any model; upstream's code makes lists as long as these numbers say.
_MOST: Final = {**dict.fromkeys(_LAYERS, 1 << 12), "vocab_size": 1 << 23}
_MOST_COLUMNS: Final = 1 << 24
# What costs so little that it need not be compared with the weights that are there: seconds, and tens of megabytes.
_CHEAP: Final = {**dict.fromkeys(_LAYERS, 1 << 9), "vocab_size": 1 << 18}
# Added to a mean square before its root is taken.
_EPSILONS: Final = ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_eps", "norm_epsilon")
# The number of a part, and of all of them, is a uint16.
_MOST_PARTS: Final = (1 << 16) - 1
_UNREADABLE: Final = "the file is damaged; download it again"
# Of a repository of the hub: what the reader, the tokenizers and the model card are made from.
_FETCHED: Final = (
    "LICENSE", "*.json", "*.jinja", "*.md", "*.txt", "*.model", "*.tiktoken", "*.jsonl", "*.safetensors",
)  # fmt: skip
# The same weights once more, in a form of the publisher's own, for other programs or precisions: folders, but for the
# dense layers that Sentence Transformers numbers (2_Dense), and Mistral's and Meta's one large file.
_NOT_FETCHED: Final = ("consolidated*", "original/*", "[!0-9]*/*.safetensors")


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


def stored_tensors(files: Iterable[Path]) -> dict[str, tuple[Path, tuple[int, ...]]]:
    """Name of every tensor in safetensors files -> its file and shape; no weights are read.

    Raises:
        UserError: a file is truncated or corrupt.
    """
    stored: dict[str, tuple[Path, tuple[int, ...]]] = {}
    for path in files:
        try:
            with safe_open(path, framework="numpy") as shard:
                stored |= {name: (path, tuple(shard.get_slice(name).get_shape())) for name in shard.keys()}  # noqa: SIM118
        except (SafetensorError, OSError, ValueError) as error:  # noqa: PERF203 - the error names the shard
            raise UserError(path, f"is truncated or corrupt ({error})", "download it again") from error
    return stored


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
    config = _check_folder(folder)
    request.check(folder)
    if request.target_model_dir is not None:
        _check_folder(request.target_model_dir)
    conversion = upstream.load_conversion()
    import torch

    logging.basicConfig(format="%(message)s")
    for name in ("hf-to-gguf", "gguf"):
        logging.getLogger(name).setLevel(logging.INFO if verbose else logging.ERROR)

    gate = trust.transformers_for(folder, trust_remote_code)
    with gate as transformers, torch.inference_mode(), _read_not_mapped():
        if not verbose:
            transformers.logging.set_verbosity_error()
        model_class = _model_class(conversion, folder, mmproj=request.mmproj)
        files = [] if request.vocab_only else _check_weights(folder, config)
        with _reading(folder), request.set_on(model_class, folder):
            reader = _working(
                model_class(folder, request.ftype, Path("model.gguf"), model_name=model_name, **request.arguments())
            )
            reader.remote_hf_model_id = None if model_name else request.repository
            tensors = [] if request.vocab_only else _collect(reader)
            reader.prepare_metadata(vocab_only=request.vocab_only)
    if request.quantized_by is not None:
        reader.gguf_writer.add_quantized_by(request.quantized_by)
    return _checkpoint(folder, reader, tensors, files, empty=request.vocab_only)


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
    check_counts_by_shapes(folder / "config.json", _check_folder(folder), shapes)
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

    with trust.transformers_for(folder, trust_remote_code), torch.inference_mode(), _reading(folder):
        model_class = _model_class(conversion, folder)
        # In the base class: some architectures do something of their own before they call it.
        with trust.replaced_in(conversion.ModelBase, "index_tensors", index_tensors):
            reader = _working(model_class(folder, gguf.LlamaFileType.MOSTLY_F16, Path("model.gguf")))
        reader.set_vocab = lambda: None
        tensors = _collect(reader)
        reader.prepare_metadata(vocab_only=False)
    return _checkpoint(folder, reader, tensors, [])


def _checkpoint(
    folder: Path, reader: Any, tensors: list[SourceTensor], files: list[Path], *, empty: bool = False
) -> Checkpoint:
    if not tensors and not empty:
        raise UserError(folder, "holds no tensor that the architecture uses", "check that the download is complete")
    for tensor in tensors:
        if not tensor.shape or not tensor.size:
            what = f"has the shape {tensor.shape}, and no weights"
            raise UserError(folder, what, "repair the checkpoint or download it again", tensor.label)
    writer = reader.gguf_writer
    writer.tensors = [{}]
    facts = model_facts(folder, writer, tensors)
    return Checkpoint(folder, tensors, facts, writer, files, reader.ftype, reader.metadata)


def download(repository: str, *, trust_remote_code: bool = False) -> Path:
    """Fetch a model of the Hugging Face hub into its cache and return the folder.

    Args:
        repository: ``organisation/name``, with ``@revision`` if wanted.
        trust_remote_code: fetch its Python files too.

    Raises:
        UserError: no such model, no access, or no network.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    name, _, revision = repository.partition("@")
    patterns = [*_FETCHED, *(("*.py",) if trust_remote_code else ())]
    try:
        return Path(
            snapshot_download(
                name, revision=revision or None, allow_patterns=patterns, ignore_patterns=list(_NOT_FETCHED)
            )
        )
    except (HfHubHTTPError, LocalEntryNotFoundError, ValueError, OSError) as error:
        remedy = "check the name, the network, and HF_TOKEN for a gated model"
        raise UserError(f"hf:{repository}", str(error), remedy) from error


# ------------------------------------------------------------------------------------------------ before reading


def _check_folder(folder: Path) -> dict[str, Any]:
    """The folder's ``config.json``, whose counts are counts."""
    if not folder.exists():
        remedy = "give the folder of a Hugging Face checkpoint, or hf:organisation/name"
        raise UserError(folder, "no such folder", remedy)
    if not folder.is_dir():
        remedy = "give the folder of a Hugging Face checkpoint"
        if folder.suffix == ".gguf":
            remedy += "; llama-quantize converts a GGUF file"
        raise UserError(folder, "is a file, not a folder", remedy)
    config = folder / "config.json"
    if not config.is_file():
        raise UserError(config, "no such file", "give the folder of a Hugging Face checkpoint with its config.json")
    found = read_json(config)
    check_counts(config, found)
    return found


def check_counts(path: Path, config: Mapping[str, Any]) -> None:
    """Refuse a config whose numbers of layers, heads, columns are none; upstream's code takes them as they are.

    Raises:
        UserError: one is text, negative, or the like.
    """
    text = config.get("text_config")
    for part in (config, text) if isinstance(text, Mapping) else (config,):
        for name in _COUNTS:
            value = part.get(name)
            values = value if isinstance(value, list) and value and name in _LISTS else [value]
            if not all(v is None or (isinstance(v, int) and not isinstance(v, bool) and v >= 0) for v in values):
                raise UserError(
                    path, f"has {name} {value!r:.80}, which is no count", "take the config.json of the model"
                )
            if any(v is not None and v > _MOST.get(name, _MOST_COLUMNS) for v in values):
                what = f"has {name} {value!r:.80}, more than {_MOST.get(name, _MOST_COLUMNS)}"
                raise UserError(path, what, "take the config.json of the model")
        for name in _EPSILONS:
            value = part.get(name)
            if isinstance(value, (int, float)) and not 0 <= value < 1:  # false for NaN
                what = f"has {name} {value!r:.80}, which is no small number"
                raise UserError(path, what, "take the config.json of the model")


def check_counts_by_shapes(path: Path, config: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Refuse numbers of layers and tokens far beyond those of the weights, before upstream makes lists of that length.

    Numbers that cost little are left to the comparison with what the architecture needs, which names the tensor.

    Args:
        path: of the config, for the message.
        config: its content.
        shapes: of the checkpoint's tensors.

    Raises:
        UserError: there are more than the weights can be of.
    """
    numbers = (int(number) for name in shapes for number in re.findall(r"(?<=\.)\d+(?=\.)", name))
    layers = max(numbers, default=-1) + 1
    largest = max((size for shape in shapes.values() for size in shape), default=0)
    text = config.get("text_config")
    for part in (config, text) if isinstance(text, Mapping) else (config,):
        for name, cheap in _CHEAP.items():
            value, there = part.get(name), largest if name == "vocab_size" else layers
            if isinstance(value, int) and value > max(there, cheap):
                what = f"has {name} {value}, but no weight is of more than {there}"
                raise UserError(path, what, "take the config.json of the model")


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file.

    Raises:
        UserError: the file is not there, is not JSON, or holds something else.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError, RecursionError) as error:
        raise UserError(path, f"is not valid JSON: {error}", _UNREADABLE) from error
    if not isinstance(value, dict):
        raise UserError(path, "holds no JSON object", _UNREADABLE)
    return value


def read_weight_map(index: Path) -> dict[str, str]:
    """Tensor -> file of an index, names of files in its folder.

    Raises:
        UserError: it is damaged, or names anything else.
    """
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise UserError(index, "has no weight_map", _UNREADABLE)
    for name in weight_map.values():
        listed_file(index.parent, name, index)
    return weight_map


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


def _check_weights(folder: Path, config: Mapping[str, Any]) -> list[Path]:
    """The weight files; all that the index and the numbering promise are there, and readable as far as headers tell.

    The headers are compared with config.json as well; pickles have none.
    """
    present = sorted(
        p for p in folder.iterdir() if re.fullmatch(r"(model.*\.safetensors|pytorch_model.*\.bin)", p.name)
    )
    # The choice of llama.cpp's converter: safetensors where there are any.
    safe = any(p.suffix == ".safetensors" for p in present) or (folder / _SAFETENSORS_INDEX).is_file()
    shards = [p for p in present if (p.suffix == ".safetensors") == safe]
    index = folder / (_SAFETENSORS_INDEX if safe else _BIN_INDEX)
    weight_map: dict[str, str] = {}
    if index.is_file():
        weight_map = read_weight_map(index)
        listed = set(weight_map.values())
        if missing := sorted(name for name in listed if not (folder / name).is_file()):
            count = f" ({len(missing)} shards are missing)" if len(missing) > 1 else ""
            raise UserError(folder / missing[0], f"is named in {index.name} but not there{count}", "download it")
        for path in shards:
            if path.name not in listed and _NUMBERED.search(path.name):
                raise UserError(path, f"is not listed in {index.name}", "take the index that belongs to the shards")
        shards = sorted(folder / name for name in listed)
    elif not shards:
        raise UserError(folder, "holds no model*.safetensors or pytorch_model*.bin", "download the weights")
    else:
        _check_numbering(shards)
    shapes: dict[str, tuple[int, ...]] = {}
    for path in shards:
        if path.suffix == ".safetensors":
            found = {name: shape for name, (_, shape) in stored_tensors([path]).items()}
            _check_index(path, {name for name, file in weight_map.items() if file == path.name}, set(found))
            shapes |= found
        else:
            _check_pickle(path)
    if all(path.suffix == ".safetensors" for path in shards):
        check_counts_by_shapes(folder / "config.json", config, shapes)
    return shards


def _check_numbering(shards: list[Path]) -> None:
    """Without an index, the names say how many shards there are."""
    names = {path.name for path in shards}
    for path in shards:
        match = _NUMBERED.search(path.name)
        for number in range(1, int(match[2]) + 1 if match else 0):
            assert match is not None
            wanted = path.name.replace(match[0], f"-{number:0{len(match[1])}d}-of-{match[2]}.")
            if wanted not in names:
                raise UserError(path.with_name(wanted), "this shard is not there", "download it")


def _check_index(path: Path, expected: set[str], names: set[str]) -> None:
    """The index names those tensors of a shard that are there, if there is one."""
    if lost := sorted(expected - names):
        raise UserError(path, "is listed in the index but not in this shard", "download the shard again", lost[0])
    if expected and (extra := sorted(names - expected)):
        raise UserError(path, "is in this shard but not in the index", "take the index of these shards", extra[0])


def _check_pickle(path: Path) -> None:
    import torch

    try:
        torch.load(str(path), map_location="cpu", mmap=True, weights_only=True)
    except pickle.UnpicklingError as error:
        what = "holds other things than weights, which are not loaded, or is corrupt"
        raise UserError(path, what, "convert it to safetensors where it may run its code") from error
    except Exception as error:  # pickles fail in many ways
        raise UserError(path, f"is truncated or corrupt ({type(error).__name__})", "download it again") from error


# ---------------------------------------------------------------------------------------------------- reading


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


def _working(reader: Any) -> Any:
    """The ``conversion`` object that does the work; it explains tokenizer errors and reads packed BitNet weights.

    That of Mistral 3 hands all of it to one of another class, with a writer of its own.
    """
    while hasattr(reader, "impl"):
        reader = reader.impl
    own_set_vocab: Any = getattr(reader, "set_vocab", None)  # a projector has no tokenizer
    own_dequant_model = reader.dequant_model

    def set_vocab() -> None:
        try:
            own_set_vocab()
        except (UserError, KeyboardInterrupt, MemoryError):
            raise
        except Exception as error:
            folder = reader.dir_model
            if not any(next(folder.glob(name), None) for name in _TOKENIZER_FILES):
                what, remedy = "has no tokenizer", "add the model's tokenizer.model or tokenizer.json"
            else:
                what, remedy = f"the tokenizer cannot be read: {error}", "take the tokenizer files of the model"
            raise UserError(folder, what, remedy) from error

    def dequant_model() -> None:
        if bitnet.is_packed(reader.hparams, reader.model_tensors):
            bitnet.unpack_all(reader.hparams, reader.model_tensors)
            reader.weight_quant = lambda weight: weight  # upstream would ternarize once more, by another scale
        own_dequant_model()

    reader.set_vocab, reader.dequant_model = set_vocab, dequant_model
    return reader


@dataclass
class _HeldBack:
    """A tensor that upstream believes it has converted to ``qtype``."""

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


def _collect(reader: Any) -> list[SourceTensor]:
    """Run upstream's tensor pass and keep what it would have written."""
    tensors: list[SourceTensor] = []
    writer = reader.gguf_writer
    read: list[str] = []  # names read since the last tensor was added
    get_tensors = reader.get_tensors

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

    writer.add_tensor, reader.get_tensors = add_tensor, noted_tensors
    # The type that a tensor is to have is only noted.
    with trust.replaced_in(gguf.quants, "quantize", _HeldBack):
        reader.prepare_tensors()
    return tensors


def _read_not_mapped() -> AbstractContextManager[None]:
    """Within, gguf-py reads safetensors instead of mapping them: mapped pages count as memory until the file closes."""
    return trust.replaced_in(gguf.utility.LocalTensor, "mmap_bytes", _read_bytes)


def _read_bytes(tensor: Any) -> np.ndarray:
    """The bytes of a safetensors tensor: takes the place of ``gguf.utility.LocalTensor.mmap_bytes``."""
    span = tensor.data_range
    data = np.fromfile(span.filename, dtype=np.uint8, count=span.size, offset=span.offset)
    if data.size != span.size:
        raise UserError(span.filename, "ended early while it was read", "download it again")
    return data


def _parts(data: Any) -> Iterator[np.ndarray]:
    """The parts of a tensor: one array, or the chunks of a ``LazyChunkedTensor``."""
    chunks = data._chunks if hasattr(data, "_chunks") else (partial(lazy.evaluate, data),)
    for chunk in chunks:
        with _read_not_mapped():
            part = np.asarray(chunk())
        yield part


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

"""An object of llama.cpp's ``conversion`` package at work, whose conversion of weights is held back.

Each tensor is kept as the lazy F32 (or F16) array before that step, with the type that an F16 file would have it in.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Type

from .. import upstream
from ..base.errors import UserError, failed_line
from . import lazy, patches, quantization, tokens
from .source import SourceTensor
from .validation import read_json

_TOKENIZER_FILES: Final = (
    "tokenizer.model", "tokenizer.json", "vocab.json", "vocab.txt", "tekken.json", "spiece.model", "*.tiktoken",
    "sentencepiece*.model", "tokenizer.jsonl", "tokenization_*.py", "rwkv_vocab*.txt",
)  # fmt: skip


def upstreams(script: str) -> tuple[Any, Path]:
    """The ``conversion`` package and the path of a script beside it, the source fetched if need be."""
    return upstream.load_conversion(), upstream.fetch_source() / script


def supported_models() -> str:
    """The architectures that upstream's converter reads, a list for text models and one for projectors."""
    conversion: Any = upstream.load_conversion()
    lists = {"TEXT models:": conversion.TEXT_MODEL_MAP, "MMPROJ models:": conversion.MMPROJ_MODEL_MAP}
    lines = [line for title, names in lists.items() for line in (title, *(f"  - {name}" for name in sorted(names)))]
    return "\n".join(lines)


def model_class(conversion: Any, folder: Path, *, mmproj: bool = False) -> Any:
    """The class of the ``conversion`` package that reads the checkpoint's architecture."""
    config = folder / "config.json"
    with reading(folder):
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
def reading(folder: Path) -> Iterator[None]:
    """Give errors of the ``conversion`` package the form of a user error."""
    try:
        yield
    except (UserError, KeyboardInterrupt, MemoryError):
        raise
    except Exception as error:
        if explained := quantization.explain(error, folder, read_json(folder / "config.json")):
            raise explained from error
        reason = (
            f"{error} is missing"
            if isinstance(error, KeyError)
            else str(error) or failed_line(error) or type(error).__name__
        )
        remedy = "check its config.json; --verbose shows more"
        if isinstance(error, AssertionError) and "mtp" in (line := failed_line(error)):
            # Checkpoints that Transformers has saved lack these layers, whatever their config.json says.
            reason, remedy = f"{line} fails: the layers for multi-token prediction are not there", "give --no-nextn"
        raise UserError(folder, f"cannot be read: {reason}", remedy) from error


@contextmanager
def indexing(conversion: Any, tensors: Iterable[tuple[str, Any]]) -> Iterator[None]:
    """Within, a ``conversion`` object that is made has these tensors, whatever files its folder holds."""

    def index_tensors(self: Any, remote_hf_model_id: str | None = None) -> dict[str, Any]:
        found = {item[0]: self.filter_tensors(item) for item in tensors}
        # Upstream gives some tensors names of its own.
        self.names_of_files = {item[0]: name for name, item in found.items() if item is not None}
        return dict(item for item in found.values() if item is not None)

    # In the base class: some architectures do something of their own before they call it.
    with patches.replaced_in(conversion.ModelBase, "index_tensors", index_tensors):
        yield


def working(converter: Any) -> Any:
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
            rows = converter.hparams.get("vocab_size")
            if isinstance(error, AssertionError) and rows and (left := tokens.beyond(folder, rows)):
                what = f"its tokenizer has tokens that the model has no row for: {tokens.named(left)}"
            raise UserError(folder, what, remedy) from error

    def dequant_model() -> None:
        with quantization.dequantizing(converter):
            if quantization.unpack_bitnet(converter):
                converter.weight_quant = lambda weight: weight  # upstream would ternarize once more, by another scale
            own_dequant_model()

    converter.set_vocab, converter.dequant_model = set_vocab, dequant_model
    return converter


@dataclass
class HeldBack:
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


def collect(converter: Any) -> list[SourceTensor]:
    """Run upstream's tensor pass and keep what it would have written."""
    tensors: list[SourceTensor] = []
    quantization.prepare(converter)
    writer = converter.gguf_writer
    read: list[str] = []  # names read since the last tensor was added
    get_tensors = converter.get_tensors

    def noted_tensors() -> Iterator[tuple[str, Any]]:
        for name, tensor in get_tensors():
            read.append(name)
            yield name, tensor

    def add_tensor(name: str, tensor: Any, raw_shape: Any = None, raw_dtype: Type | None = None, **_: Any) -> None:
        held = isinstance(tensor, HeldBack)
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
        one = partial(_matrix, data)
        tensors.append(SourceTensor(name, shape, info.dtype, sources, lambda: _parts(data), one))

    writer.add_tensor, converter.get_tensors = add_tensor, noted_tensors
    converter.prepare_tensors()
    return tensors


def _parts(data: Any) -> Iterator[np.ndarray]:
    """The parts of a tensor: one array, or the chunks of a ``LazyChunkedTensor``."""
    chunks = data._chunks if hasattr(data, "_chunks") else (partial(lazy.value, data),)
    for chunk in chunks:
        with patches.patched(None, reads=True):
            part = np.asarray(chunk())
        yield part


def _matrix(data: Any, number: int) -> np.ndarray | None:
    with patches.patched(None, reads=True):
        found = lazy.part(data, number)
    return None if found is None else np.asarray(found)

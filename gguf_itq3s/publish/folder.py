"""What is in a folder that is to be published: models by their metadata, and what was measured of them."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import gguf
from gguf import LlamaFileType

from ..base.errors import UserError
from ..checkpoint.gguf_file import GGUFFile, open_gguf
from ..codec.family import FAMILY, TrellisType
from ..evaluate.runner import describe
from ..inspect.plan import Layer, cache_bytes, layers_of

#: What ``gguf-itq3s eval --out FOLDER`` leaves and a card shows.
RESULTS: Final = "eval.json"
PICTURE: Final = "eval_kld.png"
CARD: Final = "README.md"

#: Metadata of a GGUF file -> keys of a config.json, for the size of the cache.
_CONFIG: Final = {
    "block_count": "num_hidden_layers", "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads", "attention.key_length": "head_dim",
    "embedding_length": "hidden_size", "attention.sliding_window": "sliding_window",
}  # fmt: skip
_ROW: Final = ("type", "how", "file_bits", "tensor_bits", "bytes", "perplexity", "perplexity_error", "mean_kld",
               "mean_kld_error", "kld_99", "kld_99_error", "same_top", "same_top_error", "key")  # fmt: skip


@dataclass(frozen=True)
class Model:
    """One GGUF model of a folder.

    Attributes:
        files: its file, or its parts in order.
        metadata: key -> value, strings, numbers and short lists only.
        size: bytes of all files.
        weights: how many.
        type: name of ``general.file_type``.
        own: the trellis types that it holds, in the order of the table.
        content: hash of the tensors, as an evaluation notes it.
        layers: what each layer caches; None where the metadata do not say.
    """

    files: tuple[Path, ...]
    metadata: Mapping[str, Any]
    size: int
    weights: int
    type: str
    own: tuple[TrellisType, ...]
    content: str
    layers: tuple[Layer, ...] | None

    @property
    def name(self) -> str:
        """Name of the (first) file."""
        return self.files[0].name

    def needs(self, context: int) -> int | None:
        """Bytes of the weights and of the KV cache in F16 at a length of context; None where it is not known."""
        if self.layers is None:
            return None
        return self.size + cache_bytes(self.layers, context, gguf.GGMLQuantizationType.F16)


@dataclass(frozen=True)
class Content:
    """All of a folder that is published.

    Attributes:
        models: the GGUF models, by name.
        results: rows of the evaluation of weights; empty where none was made.
        context: tokens of a window of that evaluation.
        picture: the plot of the evaluation, if it is there.
        others: further files that belong to it: licence, projector, importance matrix.
    """

    models: tuple[Model, ...]
    results: tuple[Mapping[str, Any], ...] = ()
    context: int = 0
    picture: Path | None = None
    others: tuple[Path, ...] = field(default=())

    def measured(self, model: Model) -> Mapping[str, Any] | None:
        """The row of the evaluation with the very tensors of a model."""
        return next((row for row in self.results if row.get("content") == model.content), None)

    @property
    def files(self) -> list[Path]:
        """Everything but the card, in the order of an upload."""
        parts = [file for model in self.models for file in model.files]
        return [*parts, *([self.picture] if self.picture else []), *self.others]


def read(folder: Path) -> Content:
    """Look through a folder.

    Raises:
        UserError: there is no such folder, it holds no GGUF model, or a file of it is damaged.
    """
    if not folder.is_dir():
        raise UserError(folder, "no such folder", "give the folder that holds the GGUF files")
    found = sorted(path for path in folder.glob("*.gguf") if path.is_file())
    models = tuple(_model(path) for path in found if not _is_later_part(path) and not _is_companion(path))
    if not models:
        raise UserError(folder, "holds no GGUF model", "convert one into it first")
    results, context = _results(folder / RESULTS)
    picture = folder / PICTURE
    licences = sorted(
        path for path in folder.iterdir() if path.is_file() and path.stem.upper() in ("LICENSE", "NOTICE")
    )
    companions = [path for path in found if _is_companion(path)]
    return Content(models, results, context, picture if picture.is_file() else None, (*companions, *licences))


def _is_later_part(path: Path) -> bool:
    match = re.search(r"-(\d{5})-of-\d{5}\.gguf$", path.name)
    return match is not None and int(match[1]) > 1


def _is_companion(path: Path) -> bool:
    """A projector, or an importance matrix: no model by itself."""
    return path.name.startswith("mmproj-") or "imatrix" in path.name


def _model(path: Path) -> Model:
    reader = open_gguf(path)
    metadata = dict(_values(reader))
    arch = metadata.get("general.architecture")
    config = {ours: metadata.get(f"{arch}.{theirs}") for theirs, ours in _CONFIG.items()}
    layers: tuple[Layer, ...] | None
    try:
        layers = tuple(layers_of(config))
    except (KeyError, TypeError, ValueError, ZeroDivisionError):
        layers = None
    facts = describe(path)
    kind = metadata.get("general.file_type")
    known = kind in LlamaFileType._value2member_map_
    name = LlamaFileType(kind).name.removeprefix("MOSTLY_").removeprefix("ALL_") if known else "unknown"
    held = {tensor.tensor_type for tensor in reader.tensors}
    own = tuple(row for qtype, row in FAMILY.items() if qtype in held)
    weights = sum(int(tensor.n_elements) for tensor in reader.tensors)
    return Model(reader.paths, metadata, reader.size, weights, name, own, facts["content"], layers)


def _values(reader: GGUFFile) -> list[tuple[str, Any]]:
    """The metadata but for the long lists of a vocabulary."""
    short = (item for item in reader.fields.items() if len(item[1].data) <= 64)
    return [(name, field.contents()) for name, field in short if not name.startswith("GGUF.")]


def _results(path: Path) -> tuple[tuple[Mapping[str, Any], ...], int]:
    """Rows and context of an evaluation; nothing where there is none."""
    if not path.is_file():
        return (), 0
    remedy = "make it with gguf-itq3s eval, or remove it"
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
        rows, context = value["tables"]["weights"], int(value["context"])
        if not all(set(_ROW) <= set(row) for row in rows):
            raise ValueError("a row lacks a figure")
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise UserError(path, f"is not the result of an evaluation ({error})", remedy) from error
    return tuple(rows), context

"""What a GGUF file holds, by name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np

#: Fields of a file that says its architecture alone.
LLAMA: dict[str, tuple[object, list[gguf.GGUFValueType]]] = {
    "general.architecture": ("llama", [gguf.GGUFValueType.STRING])
}


def metadata(path: Path) -> dict[str, object]:
    reader = gguf.GGUFReader(path)
    return {name: field.contents() for name, field in reader.fields.items() if not name.startswith("GGUF.")}


def tensors(path: Path) -> dict[str, gguf.ReaderTensor]:
    return {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}


def types(path: Path) -> dict[str, gguf.GGMLQuantizationType]:
    return {name: tensor.tensor_type for name, tensor in tensors(path).items()}


def arrays(path: Path) -> dict[str, np.ndarray]:
    """The stored numbers, copied out of the file."""
    return {name: np.array(tensor.data) for name, tensor in tensors(path).items()}


def values(tensor: gguf.ReaderTensor) -> np.ndarray:
    """The weights, decoded by gguf-py."""
    return gguf.quants.dequantize(tensor.data, tensor.tensor_type)


def rewritten(source: Path, out: Path, change: Callable[[dict[str, Any], dict[str, Any]], None], **split: Any) -> Path:
    """A copy of a file with other metadata or tensors, perhaps split."""
    reader = gguf.GGUFReader(source)
    fields = {key: field for key, field in reader.fields.items() if not key.startswith("GGUF.")}
    tensors = {tensor.name: (tensor.data, tensor.tensor_type) for tensor in reader.tensors}
    values = {key: (field.contents(), field.types) for key, field in fields.items()}
    change(values, tensors)
    return write_gguf(out, values, tensors, **split)


def write_gguf(
    out: Path, fields: dict[str, tuple[object, list[gguf.GGUFValueType]]], tensors: dict[str, tuple], **split: Any
) -> Path:
    """A file of fields (value, types as a reader has them) and tensors (data, type); ``split`` is gguf-py's."""
    architecture = str(fields["general.architecture"][0])
    writer = gguf.GGUFWriter(out, architecture, **split)
    for name, (value, kinds) in fields.items():
        if name != "general.architecture":
            writer.add_key_value(name, value, kinds[0], kinds[-1] if len(kinds) > 1 else None)
    for name, (data, qtype) in tensors.items():
        writer.add_tensor(name, np.ascontiguousarray(data), raw_dtype=qtype)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return out

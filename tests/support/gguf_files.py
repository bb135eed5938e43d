"""What a GGUF file holds, by name."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np


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

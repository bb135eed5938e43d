"""Write a Llama of random weights as a GGUF file, to time llama.cpp on shapes of a model that is not at hand.

All matrices of the layers have the given type; token embedding and output are Q6_K. There is no tokenizer: the file is
for llama-bench, which needs none. Some Gaussian weights are quantized by ggml itself (the built libggml-base.so) and
repeated. Only the standard library is used: a machine with a GPU may have no more.
"""

from __future__ import annotations

import array
import ctypes
import dataclasses
import math
import random
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Final

WEIGHTS: Final = 2**18  # different ones
SIGMA: Final = 0.02
ALIGNMENT: Final = 32

UINT32, FLOAT32, STRING = 4, 6, 8  # types of metadata


class Ggml:
    """What is needed of libggml-base.so. Raises OSError where it cannot be loaded."""

    def __init__(self, path: Path) -> None:
        self.lib = ctypes.CDLL(str(path))
        self.lib.ggml_type_name.restype = ctypes.c_char_p
        self.lib.ggml_row_size.restype = self.lib.ggml_quantize_chunk.restype = ctypes.c_size_t
        self.lib.ggml_row_size.argtypes = [ctypes.c_int, ctypes.c_int64]
        self.lib.ggml_quantize_requires_imatrix.restype = ctypes.c_bool
        number, pointer = ctypes.c_int64, ctypes.c_void_p
        self.lib.ggml_quantize_chunk.argtypes = [ctypes.c_int, pointer, pointer, number, number, number, pointer]

    def type_number(self, name: str) -> int:
        for number in [*range(64), *range(510, 518)]:
            found = self.lib.ggml_type_name(number)
            if found and found.decode().lower() == name.lower():
                return number
        raise ValueError(f"{name}: ggml has no such type")

    def size(self, kind: int, weights: int) -> int:
        return int(self.lib.ggml_row_size(kind, weights))

    def sample(self, kind: int) -> bytes:
        """WEIGHTS Gaussian weights in the type ``kind``."""
        rng = random.Random(0)
        values = array.array("f", (rng.gauss(0.0, SIGMA) for _ in range(WEIGHTS)))
        target = ctypes.create_string_buffer(self.size(kind, WEIGHTS))
        # types that ask for an importance matrix get one of ones
        ones = array.array("f", [1.0]) * WEIGHTS if self.lib.ggml_quantize_requires_imatrix(kind) else None
        importance = ones.buffer_info()[0] if ones else None
        self.lib.ggml_quantize_chunk(kind, values.buffer_info()[0], target, 0, 1, WEIGHTS, importance)
        return target.raw


@dataclasses.dataclass(frozen=True)
class Shape:
    """By default that of an 8B Llama."""

    layers: int = 32
    hidden: int = 4096
    ffn: int = 14336
    heads: int = 32
    kv_heads: int = 8
    vocabulary: int = 32000
    tied: bool = dataclasses.field(default=False, kw_only=True)  # the output matrix is the token embedding

    @property
    def weights(self) -> int:
        """Of all matrices."""
        return sum(math.prod(dims) for _, dims, _ in tensors_of(self, 0, 0) if len(dims) == 2)


def tensors_of(shape: Shape, kind: int, embedding: int) -> Iterator[tuple[str, tuple[int, ...], int]]:
    """Name, columns and rows, and type of every tensor; vectors are F32."""
    hidden, kv = shape.hidden, shape.hidden // shape.heads * shape.kv_heads
    yield "token_embd.weight", (hidden, shape.vocabulary), embedding
    yield "output_norm.weight", (hidden,), 0
    if not shape.tied:
        yield "output.weight", (hidden, shape.vocabulary), embedding
    matrices = {
        "attn_q": (hidden, hidden), "attn_k": (hidden, kv), "attn_v": (hidden, kv), "attn_output": (hidden, hidden),
        "ffn_gate": (hidden, shape.ffn), "ffn_up": (hidden, shape.ffn), "ffn_down": (shape.ffn, hidden),
    }  # fmt: skip
    for i in range(shape.layers):
        for name in ("attn_norm", "ffn_norm"):
            yield f"blk.{i}.{name}.weight", (hidden,), 0
        for name, dims in matrices.items():
            yield f"blk.{i}.{name}.weight", dims, kind


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


def metadata(shape: Shape, name: str) -> list[bytes]:
    numbers = {
        "context_length": 4096,
        "embedding_length": shape.hidden,
        "block_count": shape.layers,
        "feed_forward_length": shape.ffn,
        "rope.dimension_count": shape.hidden // shape.heads,
        "attention.head_count": shape.heads,
        "attention.head_count_kv": shape.kv_heads,
        "vocab_size": shape.vocabulary,
    }
    strings = {"general.architecture": "llama", "general.name": name, "tokenizer.ggml.model": "no_vocab"}
    return [
        *(text(key) + struct.pack("<I", STRING) + text(value) for key, value in strings.items()),
        *(text(f"llama.{key}") + struct.pack("<II", UINT32, value) for key, value in numbers.items()),
        text("llama.attention.layer_norm_rms_epsilon") + struct.pack("<If", FLOAT32, 1e-5),
    ]


def padded(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def bytes_of(ggml: Ggml, dims: tuple[int, ...], kind: int) -> int:
    return ggml.size(kind, dims[0]) * (dims[1] if len(dims) == 2 else 1)


def size_of(ggml: Ggml, shape: Shape, kind: str, embedding: str = "q6_K") -> int:
    """Bytes of the tensors that write_model writes."""
    tensors = tensors_of(shape, ggml.type_number(kind), ggml.type_number(embedding))
    return sum(padded(bytes_of(ggml, dims, type_)) for _, dims, type_ in tensors)


def write_model(path: Path, ggml: Ggml, shape: Shape, kind: str, embedding: str = "q6_K") -> None:
    tensors = list(tensors_of(shape, ggml.type_number(kind), ggml.type_number(embedding)))
    samples = {type_: ggml.sample(type_) for type_ in {type_ for _, _, type_ in tensors} - {0}}
    samples[0] = struct.pack("<f", 1.0)
    entries = metadata(shape, f"random {kind}")
    infos, offset = b"", 0
    for name, dims, type_ in tensors:
        infos += text(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, type_, offset)
        offset += padded(bytes_of(ggml, dims, type_))
    with path.open("wb") as file:
        header = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(entries)) + b"".join(entries) + infos
        file.write(header.ljust(padded(len(header)), b"\0"))
        for _, dims, type_ in tensors:
            size, sample = bytes_of(ggml, dims, type_), samples[type_]
            for _ in range(size // len(sample)):
                file.write(sample)
            file.write(sample[: size % len(sample)].ljust(padded(size) - size // len(sample) * len(sample), b"\0"))

#!/usr/bin/env python3
"""Write a Llama of random weights as a GGUF file, to time llama.cpp on shapes of a model that is not at hand.

All matrices of the layers have the given type; token embedding and output are Q6_K. There is no tokenizer: the file is
for llama-bench, which needs none. A few Gaussian rows are quantized by ggml itself (``--ggml-base``, the built
libggml-base.so) and repeated, every tensor beginning at another row. Only the standard library is used.
"""

from __future__ import annotations

import argparse
import array
import ctypes
import dataclasses
import random
import struct
import sys
from pathlib import Path
from typing import BinaryIO, Final

ROWS: Final = 16  # different rows of a length
SIGMA: Final = 0.02
ALIGNMENT: Final = 32
CHUNK: Final = 8 * 2**20

UINT32, FLOAT32, STRING = 4, 6, 8  # types of metadata


class ModelError(RuntimeError):
    """The model cannot be written; the message is one line."""


class Ggml:
    """What is needed of libggml-base.so."""

    def __init__(self, path: Path) -> None:
        try:
            self.lib = ctypes.CDLL(str(path))
        except OSError as error:
            raise ModelError(f"{path}: cannot be loaded: {error}") from error
        self.lib.ggml_type_name.restype = ctypes.c_char_p
        self.lib.ggml_row_size.restype = ctypes.c_size_t
        self.lib.ggml_row_size.argtypes = [ctypes.c_int, ctypes.c_int64]
        self.lib.ggml_blck_size.restype = ctypes.c_int64
        self.lib.ggml_quantize_chunk.restype = ctypes.c_size_t
        self.lib.ggml_quantize_chunk.argtypes = [
            ctypes.c_int,
            ctypes.c_void_p,
            ctypes.c_void_p,
            ctypes.c_int64,
            ctypes.c_int64,
            ctypes.c_int64,
            ctypes.c_void_p,
        ]
        self.known: dict[tuple[int, int], bytes] = {}

    def type_number(self, name: str) -> int:
        for number in [*range(64), *range(500, 516)]:
            found = self.lib.ggml_type_name(number)
            if found and found.decode().lower() == name.lower():
                return number
        raise ModelError(f"{name}: ggml has no such type")

    def row_size(self, kind: int, length: int) -> int:
        block = self.lib.ggml_blck_size(kind)
        if length % block:
            raise ModelError(f"rows of {length} weights are not whole blocks of {block}")
        return int(self.lib.ggml_row_size(kind, length))

    def rows(self, kind: int, length: int) -> bytes:
        """ROWS rows of Gaussian weights in the type ``kind``."""
        if (kind, length) not in self.known:
            rng = random.Random(length)
            values = array.array("f", (rng.gauss(0.0, SIGMA) for _ in range(ROWS * length)))
            target = ctypes.create_string_buffer(ROWS * self.row_size(kind, length))
            address, _ = values.buffer_info()
            written = self.lib.ggml_quantize_chunk(kind, address, target, 0, ROWS, length, None)
            if written != len(target.raw):
                raise ModelError(f"ggml wrote {written} bytes of {len(target.raw)}")
            self.known[kind, length] = target.raw
        return self.known[kind, length]


@dataclasses.dataclass(frozen=True)
class Shape:
    layers: int = 32
    hidden: int = 4096
    ffn: int = 14336
    heads: int = 32
    kv_heads: int = 8
    vocabulary: int = 32000
    context: int = 4096


@dataclasses.dataclass(frozen=True)
class Tensor:
    """``rows`` is 0 for a vector, which is F32 and all ones."""

    name: str
    length: int
    rows: int
    kind: int


def tensors_of(shape: Shape, kind: int, embedding: int) -> list[Tensor]:
    kv = shape.hidden // shape.heads * shape.kv_heads
    found = [
        Tensor("token_embd.weight", shape.hidden, shape.vocabulary, embedding),
        Tensor("output_norm.weight", shape.hidden, 0, 0),
        Tensor("output.weight", shape.hidden, shape.vocabulary, embedding),
    ]
    for i in range(shape.layers):
        for name, length, rows in (
            ("attn_norm", shape.hidden, 0),
            ("attn_q", shape.hidden, shape.hidden),
            ("attn_k", shape.hidden, kv),
            ("attn_v", shape.hidden, kv),
            ("attn_output", shape.hidden, shape.hidden),
            ("ffn_norm", shape.hidden, 0),
            ("ffn_gate", shape.hidden, shape.ffn),
            ("ffn_up", shape.hidden, shape.ffn),
            ("ffn_down", shape.ffn, shape.hidden),
        ):
            found.append(Tensor(f"blk.{i}.{name}.weight", length, rows, kind if rows else 0))
    return found


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


def metadata(shape: Shape, name: str) -> list[bytes]:
    numbers = {
        "context_length": shape.context,
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


def bytes_of(ggml: Ggml, tensor: Tensor) -> int:
    return tensor.rows * ggml.row_size(tensor.kind, tensor.length) if tensor.rows else 4 * tensor.length


def padded(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def write_rows(file: BinaryIO, ggml: Ggml, tensor: Tensor, first: int) -> None:
    rows = ggml.rows(tensor.kind, tensor.length)
    size = len(rows) // ROWS
    start = first % ROWS * size
    period = (rows[start:] + rows[:start]) * max(1, CHUNK // len(rows))
    left = tensor.rows * size
    while left:
        left -= file.write(memoryview(period)[: min(left, len(period))])


def write_model(path: Path, ggml: Ggml, shape: Shape, kind: str, embedding: str = "q6_K") -> int:
    """Write the model and return its size in bytes."""
    if shape.hidden % shape.heads or shape.heads % shape.kv_heads:
        raise ModelError("hidden must be a multiple of heads, and heads of kv-heads")
    tensors = tensors_of(shape, ggml.type_number(kind), ggml.type_number(embedding))
    entries = metadata(shape, f"random {kind}")
    infos, offset = [], 0
    for tensor in tensors:
        dims = [tensor.length, tensor.rows] if tensor.rows else [tensor.length]
        infos.append(
            text(tensor.name)
            + struct.pack(f"<I{len(dims)}Q", len(dims), *dims)
            + struct.pack("<IQ", tensor.kind, offset)
        )
        offset += padded(bytes_of(ggml, tensor))
    with path.open("wb") as file:
        header = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(entries)) + b"".join(entries) + b"".join(infos)
        file.write(header.ljust(padded(len(header)), b"\0"))
        for number, tensor in enumerate(tensors):
            if tensor.rows:
                write_rows(file, ggml, tensor, number)
            else:
                file.write(struct.pack("<f", 1.0) * tensor.length)
            file.write(bytes(padded(bytes_of(ggml, tensor)) - bytes_of(ggml, tensor)))
        return file.tell()


def size_of(ggml: Ggml, shape: Shape, kind: str, embedding: str = "q6_K") -> int:
    """About the bytes that write_model writes."""
    tensors = tensors_of(shape, ggml.type_number(kind), ggml.type_number(embedding))
    return sum(padded(bytes_of(ggml, t)) for t in tensors) + 2**20


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("out", type=Path, help="the GGUF file")
    parser.add_argument("--type", required=True, help="type of the layers' matrices: itq3_s, q4_K, f16, ...")
    parser.add_argument("--ggml-base", type=Path, required=True, help="libggml-base.so of the build")
    for field in dataclasses.fields(Shape):
        parser.add_argument(f"--{field.name.replace('_', '-')}", type=int, default=field.default)
    args = parser.parse_args()
    shape = Shape(**{field.name: getattr(args, field.name) for field in dataclasses.fields(Shape)})
    try:
        size = write_model(args.out, Ggml(args.ggml_base), shape, args.type)
    except (ModelError, OSError) as error:
        args.out.unlink(missing_ok=True)
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"{args.out}: {size / 2**30:.2f} GiB")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

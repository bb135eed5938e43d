"""The family of trellis types, and its types in gguf-py: enum members, codec classes, writer and reader."""

from __future__ import annotations

from enum import IntEnum
from pathlib import Path

import gguf
import numpy as np
import pytest

import gguf_itq3s
from gguf_itq3s.codec import blocks
from gguf_itq3s.codec.family import DEFAULT, FAMILY, FILE_VERSION, FORMER, TrellisType, add_member

of_types = pytest.mark.parametrize("row", FAMILY.values(), ids=lambda row: row.name)


def test_the_table() -> None:
    """docs/format.md: numbers, names and sizes; they stand in files."""
    facts = {
        row.name: (row.type.value, row.file_type.value, row.file_type_name, row.format.block, row.format.block_bytes)
        for row in FAMILY.values()
    }
    assert facts == {
        "ITQ3_S": (510, 510, "ITQ3_S - 3.125 bpw", 256, 100),
        "ITQ2_S": (512, 512, "ITQ2_S - 2.0625 bpw", 256, 66),
        "ITQ4_S": (516, 516, "ITQ4_S - 4.0625 bpw", 256, 130),
        "ITQ3_N": (513, 513, "ITQ3_N - 3.25 bpw", 64, 26),
        "ITQ2_N": (514, 514, "ITQ2_N - 2.25 bpw", 64, 18),
        "ITQ4_N": (517, 517, "ITQ4_N - 4.25 bpw", 64, 34),
    }
    assert DEFAULT.name == "ITQ3_S" and FILE_VERSION == 3
    assert not set(FORMER) & {row.type.value for row in FAMILY.values()}


@of_types
def test_gguf_quants_uses_the_codec(row: TrellisType) -> None:
    x = np.random.default_rng(0).standard_normal((40, 512)).astype(np.float32)
    data = gguf.quants.quantize(x, row.type)
    np.testing.assert_array_equal(data, blocks.quantize(x, row.format))
    np.testing.assert_array_equal(data, gguf_itq3s.quantize(x, qtype=row.type))
    decoded = blocks.dequantize(data, fmt=row.format)
    np.testing.assert_array_equal(gguf.quants.dequantize(data, row.type), decoded)
    np.testing.assert_array_equal(gguf_itq3s.dequantize(data, qtype=row.type), decoded)


@of_types
def test_writer_and_reader(row: TrellisType, tmp_path: Path) -> None:
    x = np.random.default_rng(1).standard_normal((3, 5, 256)).astype(np.float32)
    path = tmp_path / "one.gguf"
    data = blocks.quantize(x, row.format)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tensor("blk.0.ffn_up_exps.weight", data, raw_dtype=row.type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    tensor = gguf.GGUFReader(path).tensors[0]
    assert tensor.tensor_type is row.type
    assert tensor.shape.tolist() == [256, 5, 3]
    np.testing.assert_array_equal(
        gguf.quants.dequantize(tensor.data, tensor.tensor_type), blocks.dequantize(data, fmt=row.format)
    )


def test_a_taken_number_is_an_error() -> None:
    class Taken(IntEnum):
        OTHER = 500

    with pytest.raises(RuntimeError, match="500 is OTHER"):
        add_member(Taken, "ITQ3_S", 500)

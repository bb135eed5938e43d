"""ITQ3_S in gguf-py: enum members, codec class, writer and reader."""

from __future__ import annotations

from enum import IntEnum
from pathlib import Path

import gguf
import numpy as np
import pytest

from gguf_itq3s.codec import blocks
from gguf_itq3s.codec.types import ITQ3_S, MOSTLY_ITQ3_S, _add_member


def test_members_are_found_by_name_and_number() -> None:
    assert gguf.GGMLQuantizationType(500) is ITQ3_S is gguf.GGMLQuantizationType["ITQ3_S"]
    assert gguf.LlamaFileType(500) is MOSTLY_ITQ3_S
    assert ITQ3_S in list(gguf.GGMLQuantizationType) and ITQ3_S.name == "ITQ3_S"
    assert gguf.GGML_QUANT_SIZES[ITQ3_S] == (256, 100)


def test_gguf_quants_uses_the_codec() -> None:
    x = np.random.default_rng(0).standard_normal((40, 512)).astype(np.float32)
    data = gguf.quants.quantize(x, ITQ3_S)
    np.testing.assert_array_equal(data, blocks.quantize(x))
    np.testing.assert_array_equal(gguf.quants.dequantize(data, ITQ3_S), blocks.dequantize(data))


def test_lazy_tensors_are_quantized_on_demand() -> None:
    x = np.random.default_rng(0).standard_normal((40, 512)).astype(np.float32)
    lazy = gguf.quants.quantize(gguf.LazyNumpyTensor.from_eager(x), ITQ3_S)
    assert lazy.shape == (40, 200)
    np.testing.assert_array_equal(gguf.LazyNumpyTensor.to_eager(lazy), blocks.quantize(x))


def test_writer_and_reader(tmp_path: Path) -> None:
    x = np.random.default_rng(1).standard_normal((3, 5, 256)).astype(np.float32)
    path = tmp_path / "one.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tensor("blk.0.ffn_up_exps.weight", blocks.quantize(x), raw_dtype=ITQ3_S)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    tensor = gguf.GGUFReader(path).tensors[0]
    assert tensor.tensor_type is ITQ3_S
    assert tensor.shape.tolist() == [256, 5, 3]
    np.testing.assert_array_equal(
        gguf.quants.dequantize(tensor.data, tensor.tensor_type), blocks.dequantize(blocks.quantize(x))
    )


def test_a_taken_number_is_an_error() -> None:
    class Taken(IntEnum):
        OTHER = 500

    with pytest.raises(RuntimeError, match="500 is OTHER"):
        _add_member(Taken, "ITQ3_S", 500)

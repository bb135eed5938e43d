"""Encoding in pieces gives what encoding at once gives, whatever the parts, the threads and the layout in memory."""

from __future__ import annotations

from collections.abc import Iterator

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type

from encoding import encoded, weights
from gguf_itq3s.checkpoint import converter
from gguf_itq3s.codec import blocks
from gguf_itq3s.codec.types import ITQ3_S
from gguf_itq3s.rounding import encode


@pytest.mark.slow
@pytest.mark.parametrize("qtype", [ITQ3_S, Type.Q8_0, Type.TQ2_0, Type.F16, Type.F32])
@pytest.mark.parametrize("threads", [1, 3])
def test_pieces_make_the_whole(qtype: Type, threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encode, "_PIECE", 3000)
    monkeypatch.setattr(encode, "_NUMPY_PART", 1000)
    array = weights(23, 512)
    expected = gguf.quants.quantize(array, qtype)
    encoder = encode.Encoder(threads=threads)
    for parts in ([array], [array[:7], array[7:]], [array.reshape(1, 23, 512)]):
        np.testing.assert_array_equal(encoded(encoder, parts, qtype), expected.view(np.uint8).ravel())


def test_what_comes_quantized_is_copied() -> None:
    data = np.arange(2 * 3 * 34, dtype=np.uint8).reshape(2, 3, 34)
    numbers = np.arange(10, dtype=np.int64)
    for array, qtype in ((data, Type.Q8_0), (numbers, Type.I64)):
        pieces = list(encode.Encoder().encode([array], array.size, qtype))
        assert pieces and all(piece.weights == 0 for piece in pieces)
        copied = np.concatenate([piece.data for piece in pieces]).view(array.dtype)
        np.testing.assert_array_equal(copied, array.ravel())


def test_chunked_tensors_of_gguf_py_are_read_chunk_by_chunk() -> None:
    array = weights(12, 256)
    alive: list[int] = []

    def chunk(start: int) -> np.ndarray:
        alive.append(start)
        return array[start : start + 4]

    chunked = gguf.LazyChunkedTensor([lambda s=s: chunk(s) for s in (0, 4, 8)], array.shape, np.float32)
    held = converter._parts(chunked.quantize(Type.F16))
    assert isinstance(held, Iterator) and alive == []
    np.testing.assert_array_equal(next(held), array[:4])
    assert alive == [0]
    np.testing.assert_array_equal(
        encoded(encode.Encoder(), list(converter._parts(chunked)), ITQ3_S), blocks.quantize(array).ravel()
    )


@pytest.mark.parametrize(
    "bad,kind",
    [([np.nan], "1 of its weights is NaN"), ([np.inf], "1 of its weights is infinite"),
     ([np.nan, -np.inf], "2 of its weights are NaN or infinite")],
)  # fmt: skip
@pytest.mark.parametrize("qtype", [ITQ3_S, Type.F16])
def test_weights_that_are_not_finite(bad: list[float], kind: str, qtype: Type) -> None:
    array = weights(4, 256)
    array.ravel()[300 : 300 + len(bad)] = bad
    with pytest.raises(ValueError, match=f"^{kind}$"):
        encoded(encode.Encoder(), [array], qtype)


@pytest.mark.parametrize("qtype", [Type.Q8_0, Type.Q4_0])
def test_a_weight_that_a_type_cannot_hold_is_refused(qtype: Type) -> None:
    """Scales end at 65504: libraries write infinite ones, or zeros, without a word."""
    encoder = encode.Encoder()
    array = weights(2, 256)
    array[1, 3] = 6e4
    encoder.rows(array, qtype)
    array[1, 3] = 3e38
    with pytest.raises(ValueError, match=f"^a weight of 3e\\+38 is larger than {qtype.name} can hold$"):
        encoder.rows(array, qtype)

"""Encoding in pieces gives what encoding at once gives, whatever the parts, the threads and the layout in memory."""

from __future__ import annotations

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type

from encoding import encoded, weights
from gguf_itq3s.codec import native
from gguf_itq3s.codec.family import FAMILY
from gguf_itq3s.rounding import encode


@pytest.mark.parametrize("qtype", [*FAMILY, Type.Q6_K, Type.IQ4_NL, Type.TQ1_0])
def test_library_and_pieces(qtype: Type, library: native.NativeLibrary, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encode, "_PIECE", 3000)
    array = weights(23, 512)
    expected = library.quantize_type(array, qtype).ravel()
    for encoder in (encode.Encoder(library=library, threads=2), encode.Encoder(library=library, native=False)):
        np.testing.assert_array_equal(encoded(encoder, [array], qtype), expected)


@pytest.mark.parametrize("qtype", [Type.Q8_0, Type.Q4_K, Type.Q6_K, Type.IQ4_XS])
def test_a_weight_that_a_type_cannot_hold_is_refused(qtype: Type, library: native.NativeLibrary) -> None:
    """Scales end at 65504: libraries write infinite ones, or zeros, without a word."""
    encoder = encode.Encoder(library=library)
    array = weights(2, 256)
    array[1, 3] = 6e4
    encoder.rows(array, qtype)
    array[1, 3] = 3e38
    with pytest.raises(ValueError, match=f"^a weight of 3e\\+38 is larger than {qtype.name} can hold$"):
        encoder.rows(array, qtype)

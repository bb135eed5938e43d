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

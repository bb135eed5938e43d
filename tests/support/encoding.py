"""Running the piecewise encoder as a whole."""

from __future__ import annotations

import numpy as np
from gguf import GGMLQuantizationType as Type

from gguf_itq3s.rounding import encode


def weights(*shape: int) -> np.ndarray:
    return np.random.default_rng(3).standard_normal(shape, dtype=np.float32)


def encoded(encoder: encode.Encoder, parts: list[np.ndarray], qtype: Type) -> np.ndarray:
    """All pieces of the parts together: uint8 (n,)."""
    size = sum(part.size for part in parts)
    pieces = list(encoder.encode(parts, size, qtype))
    assert sum(piece.weights for piece in pieces) == size
    return np.concatenate([piece.data for piece in pieces])


def error_of(encoder: encode.Encoder, array: np.ndarray, qtype: Type) -> encode.SquaredError:
    """What the pieces of an array say of their error."""
    return sum((piece.error for piece in encoder.encode([array], array.size, qtype)), encode.SquaredError())

"""Running the piecewise encoder as a whole."""

from __future__ import annotations

import numpy as np
from gguf import GGMLQuantizationType as Type

from gguf_itq3s.convert import encode


def weights(*shape: int) -> np.ndarray:
    return np.random.default_rng(3).standard_normal(shape, dtype=np.float32)


def encoded(
    encoder: encode.Encoder, parts: list[np.ndarray], qtype: Type, error: encode.Error | None = None
) -> np.ndarray:
    """All pieces of the parts together: uint8 (n,)."""
    size = sum(part.size for part in parts)
    pieces = list(encoder.encode(parts, size, qtype, error or encode.Error()))
    assert sum(count for _, count in pieces) == size
    return np.concatenate([data for data, _ in pieces])

"""Random packed matrices and inputs for the tests of the PyTorch layers."""

from __future__ import annotations

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Type

from gguf_itq3s.codec.family import FAMILY
from gguf_itq3s.codec.scale import STATE_MASK
from gguf_itq3s.codec.ternary import TQ1_0, TQ2_0, Ternary

TYPES = (*FAMILY, TQ1_0, TQ2_0)


def matrix(rows: int, columns: int, seed: int = 0) -> torch.Tensor:
    """float32 (rows, columns), Gaussian, reproducible."""
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))


def packed_rows(qtype: Type, rows: int, columns: int, seed: int = 0) -> np.ndarray:
    """Valid random blocks: every code and start state, scales that are numbers, zero-points where there are."""
    rng = np.random.default_rng(seed)
    count = rows * columns // gguf.GGML_QUANT_SIZES[qtype][0]
    if (row := FAMILY.get(qtype)) is not None:
        fmt = row.format
        data = rng.integers(0, 256, (count, fmt.block_bytes), dtype=np.uint8)
        scales = np.stack([rng.uniform(0.01, 2, count), rng.choice([0, 0, 2, -1.5], count)], axis=1)
        numbers = scales[:, : 1 + fmt.zero_point].astype("<f2").view("<u2")
        numbers[:, -1] = numbers[:, -1] & ~STATE_MASK | rng.integers(0, STATE_MASK + 1, count, dtype=np.uint16)
        data[:, fmt.scale_offset :] = numbers.view(np.uint8)
    else:
        trits, scales = rng.integers(-1, 2, (count, 256)), rng.uniform(0.01, 2, (count, 1)).astype(np.float32)
        data = Ternary(trits.astype(np.int8), scales, "block").encode(qtype)
    return data.reshape(rows, -1)


def deviation(y: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> float:
    """The largest difference of ``y`` from ``x W^T``, summed in float64, relative to ``|x| |w|`` of its output."""
    if not y.numel():
        return 0.0
    x, weight = x.double(), weight.double()
    scale = x.norm(dim=-1)[..., None] * weight.norm(dim=-1)
    return float(((y.double() - x @ weight.t()).abs() / scale).max())

"""ITQ3_S blocks: packing, decoding and the two encoders (``trellis``, and ``ternary`` for reproduction).

A block holds 256 consecutive weights of a row in 100 bytes (docs/format.md)::

    offset  0  uint8 qs[64]   2-bit symbols    q[t] = (qs[t % 64] >> 2*(t / 64)) & 3
    offset 64  uint8 sel[32]  selector bits    s[t] = (sel[t / 8] >> (t % 8)) & 1
    offset 96  fp16  d        scale
    offset 98  fp16  z        zero-point in level units
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final

import numpy as np
import numpy.typing as npt

from . import scale
from .transform import BLOCK, FloatArray, fwht_columns
from .trellis import ITQ3_S_TRELLIS, LEVELS, IndexArray

BLOCK_BYTES: Final = 100
BITS_PER_WEIGHT: Final = BLOCK_BYTES * 8 / BLOCK
CODECS: Final = ("trellis", "ternary")
EFFORTS: Final = tuple(scale.STARTS)

#: Largest magnitude of a rotated weight the encoders accept; squares and sums of 256 of them stay finite in float32.
MAGNITUDE_LIMIT = np.float32(2.0**56)

#: The literal ternary code (design section 2.4): symbols 1, 2, 3 read levels 2 + 22 * {-1, 0, 1}.
TERNARY_STEP: Final = 22
TERNARY_ZERO_POINT: Final = 2
#: alpha = 0.798 sigma, arXiv 2603.27914.
PAPER_TERNARY_SCALE = np.float32(0.798)

# Blocks encoded or decoded at a time: metrics and survivors of one chunk stay in the second-level cache.
_CHUNK = 512

ByteArray = npt.NDArray[np.uint8]


def pack(
    indices: IndexArray, selectors: IndexArray, d: npt.NDArray[np.float16], z: npt.NDArray[np.float16]
) -> ByteArray:
    """Blocks from their parts.

    Args:
        indices: uint8 (256, m) level indices ``4 * symbol + subset`` (only the symbol is stored).
        selectors: uint8 (256, m) of 0 and 1.
        d: float16 (m,) scales.
        z: float16 (m,) zero-points.

    Returns:
        uint8 (m, 100).
    """
    blocks = np.empty((indices.shape[1], BLOCK_BYTES), dtype=np.uint8)
    planes = (indices >> 2).reshape(4, 64, -1)
    blocks[:, :64] = (planes[0] | planes[1] << 2 | planes[2] << 4 | planes[3] << 6).T
    blocks[:, 64:96] = np.packbits(selectors, axis=0, bitorder="little").T
    blocks[:, 96:98] = d.astype("<f2").view(np.uint8).reshape(-1, 2)
    blocks[:, 98:100] = z.astype("<f2").view(np.uint8).reshape(-1, 2)
    return blocks


def unpack(blocks: ByteArray) -> tuple[IndexArray, IndexArray, npt.NDArray[np.float16], npt.NDArray[np.float16]]:
    """The inverse of :func:`pack`.

    Args:
        blocks: uint8 (m, 100).

    Returns:
        uint8 (256, m) level indices ``4 * symbol + subset``, uint8 (256, m) selector bits, float16 (m,) d and z.

    Raises:
        ValueError: wrong shape.
    """
    if blocks.ndim != 2 or blocks.shape[1] != BLOCK_BYTES:
        raise ValueError(f"ITQ3_S blocks have shape (m, {BLOCK_BYTES}), not {blocks.shape}")
    shifts = np.arange(0, 8, 2, dtype=np.uint8).reshape(4, 1, 1)
    symbols = ((blocks[:, :64].T >> shifts) & np.uint8(3)).reshape(BLOCK, -1)
    selectors = np.unpackbits(np.ascontiguousarray(blocks[:, 64:96].T), axis=0, bitorder="little")
    indices = (symbols << np.uint8(2)) + ITQ3_S_TRELLIS.subsets(selectors)
    scales = np.ascontiguousarray(blocks[:, 96:100]).view("<f2").astype(np.float16)
    return indices, selectors, scales[:, 0], scales[:, 1]


def decode_blocks(blocks: ByteArray) -> FloatArray:
    """Weights of the blocks: ``w = (d * 2**-9) * FWHT(LEVELS[...] - z)``, the FWHT unnormalised.

    For z = 0 the transform adds small integers and is exact, so each weight carries one rounding.

    Args:
        blocks: uint8 (m, 100).

    Returns:
        float32 (m, 256).
    """
    indices, _, d, z = unpack(blocks)
    levels = LEVELS.astype(np.float32)[indices] - z.astype(np.float32)
    return np.ascontiguousarray((fwht_columns(levels) * (d.astype(np.float32) * np.float32(2.0**-9))).T)


def encode_trellis(x: FloatArray, effort: str) -> ByteArray:
    """Trellis-coded blocks of rotated weights: float32 (256, m) -> uint8 (m, 100)."""
    indices, selectors, d = scale.solve(x, effort)
    return pack(indices, selectors, d, np.zeros_like(d))


def encode_ternary(x: FloatArray, effort: str) -> ByteArray:
    """The literal ternary code of arXiv 2603.27914: alpha * {-1, 0, 1} with alpha = 0.798 rms (``effort`` is unused).

    Args:
        x: float32 (256, m) rotated weights.
        effort: accepted for symmetry with :func:`encode_trellis`.

    Returns:
        uint8 (m, 100); a block whose scale is zero is all zero bytes.
    """
    alpha = PAPER_TERNARY_SCALE * scale.block_rms(x)
    d = np.minimum(alpha * np.float32(32 / TERNARY_STEP), scale.F16_MAX).astype(np.float16)
    threshold = alpha * np.float32(0.5)
    symbols = np.uint8(2) + (x > threshold).astype(np.uint8) - (x < -threshold).astype(np.uint8)
    z = np.full_like(d, TERNARY_ZERO_POINT)
    dead = d == 0
    symbols[:, dead] = 0
    z[dead] = 0
    return pack(symbols << np.uint8(2), np.zeros_like(symbols), d, z)


_ENCODERS: Final[dict[str, Callable[[FloatArray, str], ByteArray]]] = {
    "trellis": encode_trellis,
    "ternary": encode_ternary,
}


def _chunks(count: int) -> Iterator[slice]:
    return (slice(start, min(start + _CHUNK, count)) for start in range(0, count, _CHUNK))


def encode_blocks(weights: FloatArray, effort: str = "default", codec: str = "trellis") -> ByteArray:
    """Encode blocks of weights.

    Args:
        weights: float32 (m, 256).
        effort: ``fast`` (one start scale) or ``default`` (three).
        codec: ``trellis``, or ``ternary`` (the literal ternary code, for reproduction).

    Returns:
        uint8 (m, 100).

    Raises:
        ValueError: unknown effort or codec; a weight is NaN, infinite or beyond the range of the format.
    """
    if codec not in _ENCODERS:
        raise ValueError(f"unknown codec {codec!r}; use one of {', '.join(CODECS)}")
    if effort not in EFFORTS:
        raise ValueError(f"unknown effort {effort!r}; use one of {', '.join(EFFORTS)}")
    blocks = np.empty((weights.shape[0], BLOCK_BYTES), dtype=np.uint8)
    for part in _chunks(weights.shape[0]):
        with np.errstate(over="ignore", invalid="ignore"):
            x = fwht_columns(weights[part].T.copy()) * np.float32(1 / 16)
        if not np.abs(x).max(initial=0) < MAGNITUDE_LIMIT:
            raise ValueError("a weight is NaN, infinite or larger than 2**56")
        blocks[part] = _ENCODERS[codec](x, effort)
    return blocks


def quantize(array: npt.ArrayLike, *, effort: str = "default", codec: str = "trellis") -> ByteArray:
    """Quantize rows to ITQ3_S.

    Args:
        array: (..., n) weights, n a multiple of 256; converted to float32.
        effort: ``fast`` or ``default``.
        codec: ``trellis`` or ``ternary``.

    Returns:
        uint8 (..., n / 256 * 100), C-contiguous, the layout of a GGUF tensor.

    Raises:
        ValueError: row length not a multiple of 256, unknown effort or codec, or a weight that is not finite.
    """
    weights = np.asarray(array, dtype=np.float32)
    if weights.ndim == 0 or weights.shape[-1] % BLOCK:
        raise ValueError(f"ITQ3_S rows must be a multiple of {BLOCK} long; the shape is {weights.shape}")
    blocks = encode_blocks(weights.reshape(-1, BLOCK), effort, codec)
    return blocks.reshape(*weights.shape[:-1], weights.shape[-1] // BLOCK * BLOCK_BYTES)


def dequantize(data: npt.ArrayLike, shape: tuple[int, ...] | None = None) -> FloatArray:
    """Weights of ITQ3_S rows.

    Args:
        data: uint8 (..., k * 100).
        shape: shape of the result; by default the rows of ``data`` with k * 256 weights each.

    Returns:
        float32.

    Raises:
        ValueError: ``data`` is not whole blocks, or does not fill ``shape``.
    """
    rows = np.asarray(data, dtype=np.uint8)
    if rows.ndim == 0 or rows.shape[-1] % BLOCK_BYTES:
        raise ValueError(f"ITQ3_S rows are a multiple of {BLOCK_BYTES} bytes; the shape is {rows.shape}")
    blocks = rows.reshape(-1, BLOCK_BYTES)
    if shape is None:
        shape = (*rows.shape[:-1], rows.shape[-1] // BLOCK_BYTES * BLOCK)
    if np.prod(shape, dtype=np.int64) != blocks.shape[0] * BLOCK or shape[-1] % BLOCK:
        raise ValueError(f"{blocks.shape[0]} ITQ3_S blocks do not fill the shape {shape}")
    weights = np.empty((blocks.shape[0], BLOCK), dtype=np.float32)
    for part in _chunks(blocks.shape[0]):
        weights[part] = decode_blocks(blocks[part])
    return weights.reshape(shape)

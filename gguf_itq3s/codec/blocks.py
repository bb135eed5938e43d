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
from .formats import ITQ3_S_FORMAT, Format
from .transform import BLOCK, FloatArray, fwht_columns
from .trellis import IndexArray

BLOCK_BYTES: Final = ITQ3_S_FORMAT.block_bytes
BITS_PER_WEIGHT: Final = ITQ3_S_FORMAT.bits_per_weight
CODECS: Final = ("trellis", "ternary")
EFFORTS: Final = ITQ3_S_FORMAT.efforts

#: Largest magnitude of a rotated weight the encoders accept; squares and sums of 256 of them stay finite in float32.
MAGNITUDE_LIMIT = np.float32(2.0**56)
#: What is said of a weight beyond it.
TOO_LARGE: Final = "a weight is NaN, infinite or too large: weights below 2**52 are taken, scales end at 65504"

#: The literal ternary code (docs/format.md): symbols 1, 2, 3 read levels 2 + 22 * {-1, 0, 1}.
TERNARY_STEP: Final = 22
TERNARY_ZERO_POINT: Final = 2
#: alpha = 0.798 sigma, arXiv 2603.27914.
PAPER_TERNARY_SCALE = np.float32(0.798)

# Blocks encoded or decoded at a time: metrics and survivors of one chunk stay in the second-level cache.
_CHUNK = 512

ByteArray = npt.NDArray[np.uint8]


def _pack_planes(symbols: IndexArray) -> ByteArray:
    """2-bit symbols, four planes of 64 weights: uint8 (256, m) -> (64, m)."""
    planes = symbols.reshape(4, 64, -1)
    return planes[0] | planes[1] << 2 | planes[2] << 4 | planes[3] << 6


def _unpack_planes(packed: ByteArray) -> IndexArray:
    """The inverse of :func:`_pack_planes`: uint8 (64, m) -> (256, m)."""
    shifts = np.arange(0, 8, 2, dtype=np.uint8).reshape(4, 1, 1)
    return ((packed >> shifts) & np.uint8(3)).reshape(BLOCK, -1)


def _pack_bits(bits: IndexArray) -> ByteArray:
    """Bits of consecutive weights: uint8 (256, m) -> (32, m)."""
    return np.packbits(bits, axis=0, bitorder="little")


def _unpack_bits(packed: ByteArray) -> IndexArray:
    """The inverse of :func:`_pack_bits`: uint8 (32, m) -> (256, m)."""
    return np.unpackbits(np.ascontiguousarray(packed), axis=0, bitorder="little")


#: How symbols are laid out, by their bits: (pack, unpack).
_SYMBOLS: Final = {1: (_pack_bits, _unpack_bits), 2: (_pack_planes, _unpack_planes)}


def pack(
    indices: IndexArray,
    selectors: IndexArray,
    d: npt.NDArray[np.float16],
    z: npt.NDArray[np.float16],
    fmt: Format = ITQ3_S_FORMAT,
) -> ByteArray:
    """Blocks from their parts.

    Args:
        indices: uint8 (256, m) level indices ``4 * symbol + subset`` (only the symbol is stored).
        selectors: uint8 (256, m) of 0 and 1.
        d: float16 (m,) scales.
        z: float16 (m,) zero-points; not stored where the format has none.
        fmt: the layout.

    Returns:
        uint8 (m, 100), or as many bytes as the format's blocks have.
    """
    blocks = np.empty((indices.shape[1], fmt.block_bytes), dtype=np.uint8)
    pack_symbols, _ = _SYMBOLS[fmt.symbol_bits]
    blocks[:, : fmt.symbol_bytes] = pack_symbols(indices >> np.uint8(2)).T
    blocks[:, fmt.symbol_bytes : fmt.scale_offset] = _pack_bits(selectors).T
    scales = [d, z] if fmt.zero_point else [d]
    blocks[:, fmt.scale_offset :] = np.stack(scales, axis=1).astype("<f2").view(np.uint8)
    return blocks


def unpack(
    blocks: ByteArray, fmt: Format = ITQ3_S_FORMAT
) -> tuple[IndexArray, IndexArray, npt.NDArray[np.float16], npt.NDArray[np.float16]]:
    """The inverse of :func:`pack`.

    Args:
        blocks: uint8 (m, 100).
        fmt: the layout.

    Returns:
        uint8 (256, m) level indices ``4 * symbol + subset``, uint8 (256, m) selector bits, float16 (m,) d and z (0
        where the format has none).

    Raises:
        ValueError: wrong shape.
    """
    if blocks.ndim != 2 or blocks.shape[1] != fmt.block_bytes:
        raise ValueError(f"{fmt.name} blocks have shape (m, {fmt.block_bytes}), not {blocks.shape}")
    _, unpack_symbols = _SYMBOLS[fmt.symbol_bits]
    symbols = unpack_symbols(blocks[:, : fmt.symbol_bytes].T)
    selectors = _unpack_bits(blocks[:, fmt.symbol_bytes : fmt.scale_offset].T)
    indices = (symbols << np.uint8(2)) + fmt.trellis.subsets(selectors)
    scales = np.ascontiguousarray(blocks[:, fmt.scale_offset :]).view("<f2").astype(np.float16)
    return indices, selectors, scales[:, 0], scales[:, 1] if fmt.zero_point else np.zeros_like(scales[:, 0])


def decode_blocks(blocks: ByteArray, fmt: Format = ITQ3_S_FORMAT) -> FloatArray:
    """Weights of the blocks: ``w = (d * 2**-9) * FWHT(LEVELS[...] - z)``, the FWHT unnormalised.

    For z = 0 the transform adds small integers and is exact, so each weight carries one rounding.

    Args:
        blocks: uint8 (m, 100).
        fmt: levels and layout.

    Returns:
        float32 (m, 256).
    """
    indices, _, d, z = unpack(blocks, fmt)
    levels = fmt.level_values[indices] - z.astype(np.float32)
    return np.ascontiguousarray((fwht_columns(levels) * (d.astype(np.float32) * np.float32(2.0**-9))).T)


def encode_trellis(x: FloatArray, effort: str, fmt: Format = ITQ3_S_FORMAT) -> ByteArray:
    """Trellis-coded blocks of rotated weights: float32 (256, m) -> uint8 (m, 100)."""
    indices, selectors, d = scale.solve(x, effort, fmt)
    return pack(indices, selectors, d, np.zeros_like(d), fmt)


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
    check_choice(codec, effort)
    blocks = np.empty((weights.shape[0], BLOCK_BYTES), dtype=np.uint8)
    for part in _chunks(weights.shape[0]):
        with np.errstate(over="ignore", invalid="ignore"):
            x = fwht_columns(weights[part].T.copy()) * np.float32(1 / 16)
        check_magnitude(x)
        blocks[part] = _ENCODERS[codec](x, effort)
    return blocks


def check_choice(codec: str, effort: str) -> None:
    """Raise ValueError unless ``codec`` is one of :data:`CODECS` and ``effort`` one of :data:`EFFORTS`."""
    if codec not in CODECS:
        raise ValueError(f"unknown codec {codec!r}; use one of {', '.join(CODECS)}")
    ITQ3_S_FORMAT.check_effort(effort)


def check_magnitude(x: FloatArray) -> None:
    """Raise ValueError unless every rotated weight is below :data:`MAGNITUDE_LIMIT`."""
    if not np.abs(x).max(initial=0) < MAGNITUDE_LIMIT:
        raise ValueError(TOO_LARGE)


def check_rows(weights: FloatArray) -> None:
    """Raise ValueError unless the last axis is whole blocks."""
    if weights.ndim == 0 or weights.shape[-1] % BLOCK:
        raise ValueError(f"ITQ3_S rows must be a multiple of {BLOCK} long; the shape is {weights.shape}")


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
    check_rows(weights)
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

"""Blocks of a trellis-coded format: packing, decoding and the two encoders (``trellis``, and ``ternary`` for
reproduction).

A block holds n consecutive weights of a row (docs/format.md)::

    uint8 qs[n * b / 8]   symbols of b bits    2: q[t] = (qs[t % (n/4)] >> 2*(t / (n/4))) & 3
                                               1: q[t] = (qs[t / 8] >> (t % 8)) & 1
                                               3: the two lower bits as of 2, then the third ones as of 1
    uint8 sel[n / 8]      selector bits        s[t] = (sel[t / 8] >> (t % 8)) & 1
    fp16  d               scale
    fp16  z               zero-point in level units, where the format has one

The six lowest bits of the last number are the start state; the number itself is read with these bits zero.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np
import numpy.typing as npt

from . import scale
from .family import DEFAULT
from .formats import CODECS as CODECS
from .formats import EFFORTS as EFFORTS
from .formats import Format, check_effort
from .scale import STATE_MASK, Path
from .transform import FloatArray, fwht_columns
from .trellis import IndexArray

#: The format that is taken where none is named.
FORMAT: Final = DEFAULT.format

#: Largest magnitude of a rotated weight the encoders accept; squares and sums of 256 of them stay finite in float32.
MAGNITUDE_LIMIT = np.float32(2.0**56)
#: Weights below it are within that limit after any rotation.
WEIGHT_LIMIT: Final = 2.0**52
#: What is said of a weight beyond it.
TOO_LARGE: Final = "a weight is NaN, infinite or too large: weights below 2**52 are taken, scales end at 65504"

#: alpha = 0.798 sigma, arXiv 2603.27914.
PAPER_TERNARY_SCALE = np.float32(0.798)

# Blocks encoded or decoded at a time: metrics and survivors of one chunk stay in the second-level cache.
_CHUNK = 512

ByteArray = npt.NDArray[np.uint8]


def _pack_planes(symbols: IndexArray) -> ByteArray:
    """2-bit symbols, four planes of a quarter of the weights: uint8 (n, m) -> (n / 4, m)."""
    planes = symbols.reshape(4, symbols.shape[0] // 4, -1)
    return planes[0] | planes[1] << 2 | planes[2] << 4 | planes[3] << 6


def _unpack_planes(packed: ByteArray) -> IndexArray:
    """The inverse of :func:`_pack_planes`: uint8 (n / 4, m) -> (n, m)."""
    shifts = np.arange(0, 8, 2, dtype=np.uint8).reshape(4, 1, 1)
    return ((packed >> shifts) & np.uint8(3)).reshape(4 * packed.shape[0], -1)


def _pack_bits(bits: IndexArray) -> ByteArray:
    """Bits of consecutive weights: uint8 (n, m) -> (n / 8, m)."""
    return np.packbits(bits, axis=0, bitorder="little")


def _unpack_bits(packed: ByteArray) -> IndexArray:
    """The inverse of :func:`_pack_bits`: uint8 (n / 8, m) -> (n, m)."""
    return np.unpackbits(np.ascontiguousarray(packed), axis=0, bitorder="little")


def _pack_symbols(symbols: IndexArray, bits: int) -> ByteArray:
    """uint8 (n, m) of so many bits -> (n * bits / 8, m)."""
    if bits == 1:
        return _pack_bits(symbols)
    low = _pack_planes(symbols & np.uint8(3))
    return low if bits == 2 else np.concatenate([low, _pack_bits(symbols >> np.uint8(2))])


def _unpack_symbols(packed: ByteArray, bits: int) -> IndexArray:
    """The inverse of :func:`_pack_symbols`: uint8 (n * bits / 8, m) -> (n, m)."""
    if bits == 1:
        return _unpack_bits(packed)
    if bits == 2:
        return _unpack_planes(packed)
    low, high = np.split(packed, [2 * packed.shape[0] // 3])
    return _unpack_planes(low) | _unpack_bits(high) << np.uint8(2)


def pack(path: Path, z: npt.NDArray[np.float16], fmt: Format = FORMAT) -> ByteArray:
    """Blocks from their parts.

    Args:
        path: of m blocks; scales as :func:`gguf_itq3s.codec.scale.storable` returns them.
        z: float16 (m,) zero-points whose lowest bits are zero; not stored where the format has none.
        fmt: the layout.

    Returns:
        uint8 (m, bytes of a block).
    """
    blocks = np.empty((path.indices.shape[1], fmt.block_bytes), dtype=np.uint8)
    blocks[:, : fmt.symbol_bytes] = _pack_symbols(path.indices >> np.uint8(3), fmt.symbol_bits).T
    blocks[:, fmt.symbol_bytes : fmt.scale_offset] = _pack_bits(path.selectors).T
    numbers = np.stack([path.d, z] if fmt.zero_point else [path.d], axis=1).astype("<f2").view("<u2")
    numbers[:, -1] |= path.start
    blocks[:, fmt.scale_offset :] = numbers.view(np.uint8)
    return blocks


def unpack(blocks: ByteArray, fmt: Format = FORMAT) -> tuple[Path, npt.NDArray[np.float16]]:
    """The inverse of :func:`pack`.

    Args:
        blocks: uint8 (m, bytes of a block).
        fmt: the layout.

    Returns:
        The paths, and float16 (m,) zero-points (0 where the format has none).

    Raises:
        ValueError: wrong shape.
    """
    if blocks.ndim != 2 or blocks.shape[1] != fmt.block_bytes:
        raise ValueError(f"{fmt.name} blocks have shape (m, {fmt.block_bytes}), not {blocks.shape}")
    symbols = _unpack_symbols(blocks[:, : fmt.symbol_bytes].T, fmt.symbol_bits)
    selectors = _unpack_bits(blocks[:, fmt.symbol_bytes : fmt.scale_offset].T)
    numbers = np.ascontiguousarray(blocks[:, fmt.scale_offset :]).view("<u2").astype(np.uint16)
    start = (numbers[:, -1] & STATE_MASK).astype(np.uint8)
    numbers[:, -1] &= ~STATE_MASK
    scales = numbers.view(np.float16)
    indices = (symbols << np.uint8(3)) + fmt.trellis.subsets(selectors, start)
    z = scales[:, 1] if fmt.zero_point else np.zeros_like(scales[:, 0])
    return Path(indices, selectors, start, scales[:, 0]), z


def decode_blocks(blocks: ByteArray, fmt: Format = FORMAT) -> FloatArray:
    """Weights of the blocks: ``w = (d / 32 / sqrt(n)) * FWHT(levels[...] - z)``, the FWHT unnormalised.

    For z = 0 the transform adds small integers and is exact, so each weight carries one rounding.

    Args:
        blocks: uint8 (m, bytes of a block).
        fmt: levels and layout.

    Returns:
        float32 (m, n).
    """
    path, z = unpack(blocks, fmt)
    levels = fmt.level_values[path.indices] - z.astype(np.float32)
    step = fmt.rotation * np.float32(1 / 32)
    return np.ascontiguousarray((fwht_columns(levels) * (path.d.astype(np.float32) * step)).T)


def _encode_ternary(x: FloatArray, fmt: Format) -> ByteArray:
    """The literal ternary code of arXiv 2603.27914: alpha * {-1, 0, 1} with alpha = 0.798 rms.

    Args:
        x: float32 (n, m) rotated weights.
        fmt: a format that has such a code.

    Returns:
        uint8 (m, bytes of a block); a block whose scale is zero is all zero bytes.
    """
    assert fmt.ternary is not None
    alpha = PAPER_TERNARY_SCALE * scale.block_rms(x)
    d = scale.storable(alpha * np.float32(32 / fmt.ternary.step), fmt)
    threshold = alpha * np.float32(0.5)
    symbols = np.uint8(2) + (x > threshold).astype(np.uint8) - (x < -threshold).astype(np.uint8)
    z = np.full_like(d, fmt.ternary.zero_point)
    dead = d == 0
    symbols[:, dead] = 0
    z[dead] = 0
    return pack(Path(symbols << np.uint8(3), np.zeros_like(symbols), np.zeros(d.shape, np.uint8), d), z, fmt)


def _chunks(count: int) -> Iterator[slice]:
    return (slice(start, min(start + _CHUNK, count)) for start in range(0, count, _CHUNK))


def encode_blocks(
    weights: FloatArray, effort: str = "default", codec: str = "trellis", fmt: Format = FORMAT
) -> ByteArray:
    """Encode blocks of weights: float32 (m, n) -> uint8 (m, bytes of a block); options as of :func:`quantize`."""
    fmt.check_codec(codec)
    check_effort(effort)
    blocks = np.empty((weights.shape[0], fmt.block_bytes), dtype=np.uint8)
    for part in _chunks(weights.shape[0]):
        with np.errstate(over="ignore", invalid="ignore"):
            x = fwht_columns(weights[part].T.copy()) * fmt.rotation
        check_magnitude(x)
        if codec == "ternary":
            blocks[part] = _encode_ternary(x, fmt)
        else:
            path = scale.solve(x, effort, fmt)
            blocks[part] = pack(path, np.zeros_like(path.d), fmt)
    return blocks


def check_magnitude(x: FloatArray) -> None:
    """Raise ValueError unless every rotated weight is below :data:`MAGNITUDE_LIMIT`."""
    if not np.abs(x).max(initial=0) < MAGNITUDE_LIMIT:
        raise ValueError(TOO_LARGE)


def check_rows(weights: FloatArray, fmt: Format = FORMAT) -> None:
    """Raise ValueError unless the last axis is whole blocks."""
    if weights.ndim == 0 or weights.shape[-1] % fmt.block:
        raise ValueError(f"{fmt.name} rows must be a multiple of {fmt.block} long; the shape is {weights.shape}")


def quantize(
    array: npt.ArrayLike, fmt: Format = FORMAT, *, effort: str = "default", codec: str = "trellis"
) -> ByteArray:
    """Quantize rows.

    Args:
        array: (..., n) weights, n a multiple of the block; converted to float32.
        fmt: what blocks are made of.
        effort: ``fast`` (one start scale) or ``default`` (three).
        codec: ``trellis``, or ``ternary`` (the literal ternary code, for reproduction).

    Returns:
        uint8 (..., blocks * bytes of a block), C-contiguous, the layout of a GGUF tensor.

    Raises:
        ValueError: rows that are not whole blocks, unknown effort or codec, or a weight that is not finite or too large
            for the format.
    """
    weights = np.asarray(array, dtype=np.float32)
    check_rows(weights, fmt)
    blocks = encode_blocks(weights.reshape(-1, fmt.block), effort, codec, fmt)
    return blocks.reshape(*weights.shape[:-1], weights.shape[-1] // fmt.block * fmt.block_bytes)


def dequantize(data: npt.ArrayLike, shape: tuple[int, ...] | None = None, fmt: Format = FORMAT) -> FloatArray:
    """Weights of rows.

    Args:
        data: uint8 (..., k * bytes of a block).
        shape: shape of the result; by default the rows of ``data``.
        fmt: what blocks are made of.

    Returns:
        float32.

    Raises:
        ValueError: ``data`` is not whole blocks, or does not fill ``shape``.
    """
    rows = np.asarray(data, dtype=np.uint8)
    if rows.ndim == 0 or rows.shape[-1] % fmt.block_bytes:
        raise ValueError(f"{fmt.name} rows are a multiple of {fmt.block_bytes} bytes; the shape is {rows.shape}")
    blocks = rows.reshape(-1, fmt.block_bytes)
    if shape is None:
        shape = (*rows.shape[:-1], rows.shape[-1] // fmt.block_bytes * fmt.block)
    if np.prod(shape, dtype=np.int64) != blocks.shape[0] * fmt.block or shape[-1] % fmt.block:
        raise ValueError(f"{blocks.shape[0]} {fmt.name} blocks do not fill the shape {shape}")
    weights = np.empty((blocks.shape[0], fmt.block), dtype=np.float32)
    for part in _chunks(blocks.shape[0]):
        weights[part] = decode_blocks(blocks[part], fmt)
    return weights.reshape(shape)

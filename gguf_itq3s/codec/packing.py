"""Packings of ternary digits (trits): 2 bits each, and five in a byte; and the blocks of TQ1_0 and TQ2_0 made of them.

Source: "Scaling Laws and Efficient Inference for Ternary Language Models" (TriTera, TriRun). With digits
d_j in {-1, 0, 1}:

* 2 bits: ``b = sum_j (d_j + 1) 4^j``.
* p bits for k trits: ``N = sum_j (d_j + 1) 3^(k-1-j)`` and ``b = floor((N 2^p + 3^k - 1) / 3^k)``, the fraction
  N / 3^k rounded up to p binary places. Decoding multiplies by three k times and reads the digit that overflows:
  ``d_j + 1 = (3 b) >> p``, ``b = (3 b) mod 2^p``. Rounding up adds less than 2^-p, so the first k digits survive
  iff 2^p > 3^k; k = 5, p = 8 (243 < 256) is the densest that fits a byte: 1.6 bits a trit.

ggml stores the same bytes in another order of weights, chosen for SIMD: the digits of a byte are 32 (or 16, or 4)
weights apart instead of adjacent. :func:`tq2_0_blocks` and :func:`tq1_0_blocks` are these packings of permuted trits.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from .transform import BLOCK

Trits = npt.NDArray[np.int8]
ByteArray = npt.NDArray[np.uint8]

# Weight numbers in the order the bytes take them, (bytes, digits in a byte). TQ2_0: two halves of 128 weights.
_TQ2_0_ORDER = np.arange(BLOCK).reshape(2, 4, 32).transpose(0, 2, 1).reshape(64, 4)
# TQ1_0: 32 bytes and 16 bytes of five digits, 4 bytes of four.
_TQ1_0_ORDER_5 = np.concatenate([np.arange(160).reshape(5, 32).T, np.arange(160, 240).reshape(5, 16).T])
_TQ1_0_ORDER_4 = np.arange(240, 256).reshape(4, 4).T


def _digits(trits: npt.ArrayLike, per_code: int) -> npt.NDArray[np.int64]:
    """Digits d + 1 in {0, 1, 2}, int64 (..., codes, per_code); ValueError for other values or lengths."""
    values = np.asarray(trits)
    if values.ndim == 0 or values.shape[-1] % per_code:
        raise ValueError(f"the last axis of shape {values.shape} is not a multiple of {per_code}")
    digits = values.astype(np.int64) + 1
    if values.size and (digits.min() < 0 or digits.max() > 2):
        raise ValueError("trits must be -1, 0 or 1")
    return digits.reshape(*values.shape[:-1], -1, per_code)


def pack_2bit(trits: npt.ArrayLike) -> ByteArray:
    """Four trits a byte: ``b = sum_j (d_j + 1) 4^j``.

    Args:
        trits: (..., 4 m) of -1, 0, 1.

    Returns:
        uint8 (..., m).

    Raises:
        ValueError: other values, or a last axis that is not a multiple of 4.
    """
    return (_digits(trits, 4) << np.array([0, 2, 4, 6])).sum(axis=-1).astype(np.uint8)


def unpack_2bit(codes: npt.ArrayLike) -> Trits:
    """The inverse of :func:`pack_2bit`: uint8 (..., m) -> int8 (..., 4 m).

    Raises:
        ValueError: a byte holds the digit 3, which no trit has.
    """
    packed = np.asarray(codes, dtype=np.uint8)
    digits = (packed[..., None] >> np.array([0, 2, 4, 6], dtype=np.uint8)) & 3
    if digits.size and digits.max() > 2:
        raise ValueError("a 2-bit digit is 3; these are not packed trits")
    return digits.astype(np.int8).reshape(*packed.shape[:-1], -1) - np.int8(1)


def is_lossless(k: int, p: int) -> bool:
    """Whether k trits in p bits decode exactly: 2^p > 3^k."""
    return 2**p > 3**k


def pack_trits(trits: npt.ArrayLike, k: int = 5, p: int = 8) -> npt.NDArray[np.uint32]:
    """k trits in p bits: ``b = floor((N 2^p + 3^k - 1) / 3^k)``, ``N = sum_j (d_j + 1) 3^(k-1-j)``.

    Args:
        trits: (..., k m) of -1, 0, 1.
        k: trits in a code.
        p: bits of a code, at most 32.

    Returns:
        uint32 (..., m), each below 2^p.

    Raises:
        ValueError: the packing would lose digits (2^p <= 3^k), p is out of range, or as :func:`pack_2bit`.
    """
    if k < 1 or not 1 <= p <= 32:
        raise ValueError(f"k must be at least 1 and p between 1 and 32, not {k} and {p}")
    if not is_lossless(k, p):
        raise ValueError(f"{k} trits do not fit {p} bits: 3^{k} = {3**k} is not below 2^{p} = {2**p}")
    # Unsigned: N 2^p passes 2^63 at k = 20, p = 32, the largest case, and stays below 2^64.
    number = (_digits(trits, k) * 3 ** np.arange(k - 1, -1, -1, dtype=np.int64)).sum(axis=-1).astype(np.uint64)
    return ((number * np.uint64(2**p) + np.uint64(3**k - 1)) // np.uint64(3**k)).astype(np.uint32)


def unpack_trits(codes: npt.ArrayLike, k: int = 5, p: int = 8) -> Trits:
    """The inverse of :func:`pack_trits` by repeated multiplication: ``digit = (3 b) >> p``, ``b = (3 b) mod 2^p``.

    Args:
        codes: integers (..., m) below 2^p.
        k: trits in a code.
        p: bits of a code, at most 32.

    Returns:
        int8 (..., k m).
    """
    b = np.asarray(codes).astype(np.uint64)
    out = np.empty((*b.shape, k), dtype=np.int8)
    for j in range(k):
        b = b * np.uint64(3)
        out[..., j] = (b >> np.uint64(p)).astype(np.int8) - 1
        b &= np.uint64(2**p - 1)
    return out.reshape(*b.shape[:-1], -1)


def _with_scales(codes: ByteArray, scales: npt.ArrayLike) -> ByteArray:
    d = np.asarray(scales, dtype="<f2").reshape(-1, 1).view(np.uint8)
    return np.concatenate([codes, d], axis=1)


def _check_blocks(trits: npt.ArrayLike) -> Trits:
    values = np.asarray(trits, dtype=np.int8)
    if values.ndim != 2 or values.shape[1] != BLOCK:
        raise ValueError(f"blocks of trits have shape (m, {BLOCK}), not {values.shape}")
    return values


def tq2_0_blocks(trits: npt.ArrayLike, scales: npt.ArrayLike) -> ByteArray:
    """TQ2_0 blocks: 64 bytes of :func:`pack_2bit` codes and a float16 scale.

    Args:
        trits: (m, 256) of -1, 0, 1.
        scales: (m,), rounded to float16.

    Returns:
        uint8 (m, 66), the bytes ggml writes for ``scale * trit``.
    """
    values = _check_blocks(trits)
    return _with_scales(pack_2bit(values[:, _TQ2_0_ORDER]).reshape(-1, 64), scales)


def tq1_0_blocks(trits: npt.ArrayLike, scales: npt.ArrayLike) -> ByteArray:
    """TQ1_0 blocks: 48 bytes of five trits, 4 bytes of four (padded with a digit 0), and a float16 scale.

    Args:
        trits: (m, 256) of -1, 0, 1.
        scales: (m,), rounded to float16.

    Returns:
        uint8 (m, 54), the bytes ggml writes for ``scale * trit``.
    """
    values = _check_blocks(trits)
    five = pack_trits(values[:, _TQ1_0_ORDER_5]).reshape(-1, 48)
    last = np.pad(values[:, _TQ1_0_ORDER_4], ((0, 0), (0, 0), (0, 1)), constant_values=-1)
    four = pack_trits(last).reshape(-1, 4)
    return _with_scales(np.concatenate([five, four], axis=1).astype(np.uint8), scales)


def tq2_0_parts(blocks: ByteArray) -> tuple[Trits, npt.NDArray[np.float16]]:
    """The inverse of :func:`tq2_0_blocks`: uint8 (m, 66) -> int8 (m, 256) trits, float16 (m,) scales."""
    trits = np.empty((blocks.shape[0], BLOCK), dtype=np.int8)
    trits[:, _TQ2_0_ORDER.ravel()] = unpack_2bit(blocks[:, :64])
    return trits, np.ascontiguousarray(blocks[:, 64:66]).view("<f2").astype(np.float16).ravel()


def tq1_0_parts(blocks: ByteArray) -> tuple[Trits, npt.NDArray[np.float16]]:
    """The inverse of :func:`tq1_0_blocks`: uint8 (m, 54) -> int8 (m, 256) trits, float16 (m,) scales."""
    trits = np.empty((blocks.shape[0], BLOCK), dtype=np.int8)
    trits[:, _TQ1_0_ORDER_5.ravel()] = unpack_trits(blocks[:, :48])
    trits[:, _TQ1_0_ORDER_4.ravel()] = unpack_trits(blocks[:, 48:52], k=4)
    return trits, np.ascontiguousarray(blocks[:, 52:54]).view("<f2").astype(np.float16).ravel()

"""The blocks of ggml's types with a fixed grid, taken apart: scales and minima out of them, codes into them.

A group of weights shares a scale and a minimum, and a weight is ``scale * code - minimum``, or ``scale * table[code]``.
The layouts are those of ``ggml-common.h`` of llama.cpp; gguf-py (:mod:`gguf.quants`) decodes the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

import gguf
import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType as Type

from .blocks import ByteArray
from .transform import FloatArray

#: int8 codes: what a weight is in units of its scale, or the place in the table.
CodeArray = npt.NDArray[np.int8]

#: The levels of IQ4_NL and IQ4_XS.
IQ4_LEVELS: Final = gguf.quants.IQ4_NL.kvalues


@dataclass(frozen=True)
class Grid:
    """What a weight of a type may be.

    Attributes:
        group: weights that share a scale.
        low: least code.
        high: greatest code.
        table: float32, ascending: the level of each code; None where a code is its own level.
        scales: uint8 (m, bytes of a block) to scales and minima, float32 (m, groups of a block) each.
        put: the same blocks and codes (m, weights of a block) to the blocks with these codes.
    """

    group: int
    low: int
    high: int
    table: FloatArray | None
    scales: Callable[[ByteArray], tuple[FloatArray, FloatArray]]
    put: Callable[[ByteArray, CodeArray], ByteArray]


def scales_of(blocks: ByteArray, qtype: Type) -> tuple[FloatArray, FloatArray]:
    """Scales and minima of encoded rows, uint8 (m, bytes of a row): float32 (m, groups of a row) each."""
    size = gguf.GGML_QUANT_SIZES[qtype][1]
    scale, minimum = GRIDS[qtype].scales(blocks.reshape(-1, size))
    return scale.reshape(blocks.shape[0], -1), minimum.reshape(blocks.shape[0], -1)


def put_codes(blocks: ByteArray, codes: CodeArray, qtype: Type) -> ByteArray:
    """Encoded rows, uint8 (m, bytes of a row), with other codes (m, n) within the grid; their scales stay."""
    block, size = gguf.GGML_QUANT_SIZES[qtype]
    return GRIDS[qtype].put(blocks.reshape(-1, size).copy(), codes.reshape(-1, block)).reshape(blocks.shape)


def _halves(blocks: ByteArray, start: int, stop: int | None = None) -> FloatArray:
    """The float16 in bytes ``start`` to ``stop`` (by default one), as float32 (m, count)."""
    return blocks[:, start : start + 2 if stop is None else stop].copy().view("<f2").astype(np.float32)


def _planes(values: npt.NDArray[np.integer], count: int, width: int) -> ByteArray:
    """Pack ``count`` values a byte, 8 / ``count`` bits each; those of one byte are ``width`` apart."""
    shifts = (np.arange(count, dtype=np.uint8) * (8 // count))[:, None]
    parts = values.reshape(len(values), -1, count, width) << shifts
    return np.bitwise_or.reduce(parts, axis=-2).reshape(len(values), -1).astype(np.uint8, copy=False)


def _unsigned(codes: CodeArray, zero: int) -> npt.NDArray[np.uint8]:
    return (codes + np.int8(zero)).astype(np.uint8)


def _no_minimum(scale: FloatArray) -> tuple[FloatArray, FloatArray]:
    return scale, np.zeros_like(scale)


def _k_scales(blocks: ByteArray) -> tuple[FloatArray, FloatArray]:
    scale, minimum = gguf.quants.Q4_K.get_scale_min(blocks[:, 4:16])
    return _halves(blocks, 0) * scale.astype(np.float32), _halves(blocks, 2) * minimum.astype(np.float32)


def _put(start: int, stop: int, count: int, width: int, zero: int = 0) -> Callable[[ByteArray, CodeArray], ByteArray]:
    """Codes plus ``zero``, packed into bytes ``start`` to ``stop`` as :func:`_planes` does."""

    def put(blocks: ByteArray, codes: CodeArray) -> ByteArray:
        blocks[:, start:stop] = _planes(_unsigned(codes, zero), count, width)
        return blocks

    return put


def _put_q5_k(blocks: ByteArray, codes: CodeArray) -> ByteArray:
    values = _unsigned(codes, 0)
    blocks[:, 16:48] = _planes(values >> 4, 8, 32)
    blocks[:, 48:] = _planes(values & 15, 2, 32)
    return blocks


def _q6_k_scales(blocks: ByteArray) -> tuple[FloatArray, FloatArray]:
    return _no_minimum(_halves(blocks, 208) * blocks[:, 192:208].view(np.int8).astype(np.float32))


def _put_q6_k(blocks: ByteArray, codes: CodeArray) -> ByteArray:
    values = _unsigned(codes, 32)
    blocks[:, :128] = _planes(values & 15, 2, 64)
    blocks[:, 128:192] = _planes(values >> 4, 4, 32)
    return blocks


def _q3_k_scales(blocks: ByteArray) -> tuple[FloatArray, FloatArray]:
    packed = blocks[:, 96:108]
    low = np.concatenate([packed[:, :8] & 15, packed[:, :8] >> 4], axis=1)
    high = np.concatenate([packed[:, 8:] >> shift & 3 for shift in (0, 2, 4, 6)], axis=1)
    scale = (low | high << 4).astype(np.int8) - np.int8(32)
    return _no_minimum(_halves(blocks, 108) * scale.astype(np.float32))


def _put_q3_k(blocks: ByteArray, codes: CodeArray) -> ByteArray:
    values = _unsigned(codes, 4)
    blocks[:, :32] = _planes(values >> 2, 8, 32)
    blocks[:, 32:96] = _planes(values & 3, 4, 32)
    return blocks


def _q2_k_scales(blocks: ByteArray) -> tuple[FloatArray, FloatArray]:
    packed = blocks[:, :16]
    return (
        _halves(blocks, 80) * (packed & 15).astype(np.float32),
        _halves(blocks, 82) * (packed >> 4).astype(np.float32),
    )


def _first_half(blocks: ByteArray) -> tuple[FloatArray, FloatArray]:
    return _no_minimum(_halves(blocks, 0))


def _put_q8_0(blocks: ByteArray, codes: CodeArray) -> ByteArray:
    blocks[:, 2:] = codes.view(np.uint8)
    return blocks


def _q5_1_scales(blocks: ByteArray) -> tuple[FloatArray, FloatArray]:
    return _halves(blocks, 0), -_halves(blocks, 2)


def _put_q5(start: int, zero: int) -> Callable[[ByteArray, CodeArray], ByteArray]:
    """Fifth bits from byte ``start`` on, then the other four."""

    def put(blocks: ByteArray, codes: CodeArray) -> ByteArray:
        values = _unsigned(codes, zero)
        blocks[:, start : start + 4] = np.packbits(values >> 4, axis=1, bitorder="little")
        blocks[:, start + 4 :] = _planes(values & 15, 2, 16)
        return blocks

    return put


def _iq4_xs_scales(blocks: ByteArray) -> tuple[FloatArray, FloatArray]:
    high = blocks[:, 2:4].copy().view("<u2") >> np.arange(0, 16, 2, dtype=np.uint16) & 3
    low = blocks[:, 4:8, None] >> np.array([0, 4], dtype=np.uint8) & 15
    scale = (low.reshape(len(blocks), 8) | high.astype(np.uint8) << 4).astype(np.int8) - np.int8(32)
    return _no_minimum(_halves(blocks, 0) * scale.astype(np.float32))


_IQ4: Final = np.array(IQ4_LEVELS, dtype=np.float32)

#: The types, and how each is taken apart.
GRIDS: Final[Mapping[Type, Grid]] = {
    Type.Q2_K: Grid(16, 0, 3, None, _q2_k_scales, _put(16, 80, 4, 32)),
    Type.Q3_K: Grid(16, -4, 3, None, _q3_k_scales, _put_q3_k),
    Type.Q4_K: Grid(32, 0, 15, None, _k_scales, _put(16, 144, 2, 32)),
    Type.Q5_K: Grid(32, 0, 31, None, _k_scales, _put_q5_k),
    Type.Q6_K: Grid(16, -32, 31, None, _q6_k_scales, _put_q6_k),
    Type.IQ4_XS: Grid(32, 0, 15, _IQ4, _iq4_xs_scales, _put(8, 136, 2, 16)),
    Type.IQ4_NL: Grid(32, 0, 15, _IQ4, _first_half, _put(2, 18, 2, 16)),
    Type.Q4_0: Grid(32, -8, 7, None, _first_half, _put(2, 18, 2, 16, zero=8)),
    Type.Q5_0: Grid(32, -16, 15, None, _first_half, _put_q5(2, 16)),
    Type.Q5_1: Grid(32, 0, 31, None, _q5_1_scales, _put_q5(4, 0)),
    # -128 would overflow in kernels that take absolute values.
    Type.Q8_0: Grid(32, -127, 127, None, _first_half, _put_q8_0),
}

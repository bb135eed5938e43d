"""Blocks of the trellis types, of TQ1_0 and of TQ2_0 to numbers, in plain PyTorch.

The bytes are those of :mod:`gguf_itq3s.codec.blocks` and of gguf-py; level table, parity checks
and offsets are taken from there. A decoded block is integers, the zero-point taken off, and a scale; blocks of the
trellis types are left in the rotated basis, where the products use them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, TypeAlias

import gguf
import torch

from ..codec.family import FAMILY
from ..codec.formats import Format
from ..codec.scale import STATE_MASK
from ..codec.ternary import TQ1_0, TQ2_0
from ..codec.transform import BLOCK

QType: TypeAlias = gguf.GGMLQuantizationType

#: What is kept of a number that has the start state in its lowest bits.
_WITHOUT_STATE: Final = ~int(STATE_MASK)


@functools.lru_cache(maxsize=32)
def level_table(fmt: Format, device: torch.device) -> torch.Tensor:
    """The level table of a format, float32 (levels,), made once a device (see :mod:`.transform`)."""
    with torch.inference_mode(False):
        return torch.from_numpy(fmt.level_values).to(device)


def _parity_plane(selectors: torch.Tensor, before: torch.Tensor, check: int) -> torch.Tensor:
    """Bytes of a parity check of the selector bits; bit i of ``check`` taps ``s[t - i]``, i < 8."""
    taps = [tap for tap in range(check.bit_length()) if check >> tap & 1]
    bits = ((selectors << tap) | (before >> (8 - tap)) if tap else selectors for tap in taps)
    return functools.reduce(torch.bitwise_xor, bits)


@functools.lru_cache(maxsize=32)
def _spread(device: torch.device) -> torch.Tensor:
    """The bits of a byte in the bytes of a 64-bit word, lowest first: int64 (256,), made once a device."""
    with torch.inference_mode(False):
        bits = torch.arange(256)[:, None] >> torch.arange(8) & 1
        return (bits << 8 * torch.arange(8)).sum(-1).to(device)


def _spread_bits(planes: torch.Tensor) -> torch.Tensor:
    """The bits of bytes in the bytes of 64-bit words: uint8 (..., m) -> int64 (..., m)."""
    places = planes.int()
    return _spread(planes.device).index_select(0, places.view(-1)).view(places.shape)


def _symbol_words(blocks: torch.Tensor, fmt: Format) -> torch.Tensor:
    """Symbols, eight at a time in the bytes of 64-bit words: uint8 (..., bytes) -> int64 (..., block / 8)."""
    if fmt.symbol_bits == 1:
        return _spread_bits(blocks[..., : fmt.symbol_bytes].contiguous())
    # A copy in any case: one block alone is contiguous where it stands, between others, and there no words begin.
    planes = blocks[..., : fmt.block // 4].clone(memory_format=torch.contiguous_format).view(torch.int64)
    words = torch.stack([planes >> shift & 0x0303030303030303 for shift in range(0, 8, 2)], dim=-2).flatten(-2)
    if fmt.symbol_bits == 3:
        words |= _spread_bits(blocks[..., fmt.block // 4 : fmt.symbol_bytes].contiguous()) << 2
    return words


@functools.lru_cache(maxsize=32)
def _reversed(device: torch.device) -> torch.Tensor:
    """Bytes with their bits in reverse: uint8 (256,), made once a device."""
    with torch.inference_mode(False):
        bits = torch.arange(256)[:, None] >> torch.arange(8) & 1
        return (bits << torch.arange(7, -1, -1)).sum(-1).to(device, torch.uint8)


def _selectors_before(blocks: torch.Tensor) -> torch.Tensor:
    """The start states as the byte of selectors before the first: uint8 (..., bytes) -> (..., 1).

    Bit ``7 - i`` is bit i of the state; what is below them reaches no weight.
    """
    last = blocks[..., -2].int()
    return _reversed(blocks.device).index_select(0, last.view(-1)).view(*last.shape, 1)


def _trellis_indices(blocks: torch.Tensor, fmt: Format) -> torch.Tensor:
    """Level indices ``8 * symbol + subset``: uint8 (..., bytes) -> (..., block), eight at a time in 64-bit words."""
    words = _symbol_words(blocks, fmt)
    selectors = blocks[..., fmt.symbol_bytes : fmt.scale_offset]
    before = torch.cat([_selectors_before(blocks), selectors[..., :-1]], dim=-1)
    for check in fmt.trellis.checks:
        words <<= 1
        words |= _spread_bits(_parity_plane(selectors, before, check))
    return words.view(torch.uint8)


def _half(blocks: torch.Tensor, offset: int, mask: int = -1) -> torch.Tensor:
    """The float16 at a byte offset of every block, little endian: uint8 (..., bytes) -> float32 (..., 1)."""
    bits = blocks[..., offset : offset + 2].contiguous().view(torch.int16)
    return (bits & mask).view(torch.float16).float()


def _trellis_values(blocks: torch.Tensor, fmt: Format) -> torch.Tensor:
    indices = _trellis_indices(blocks, fmt).int()
    values = level_table(fmt, blocks.device).index_select(0, indices.view(-1)).view(indices.shape)
    del indices
    return values.sub_(_half(blocks, fmt.scale_offset + 2, _WITHOUT_STATE)) if fmt.zero_point else values


def _tq2_0_values(blocks: torch.Tensor) -> torch.Tensor:
    """Two halves of 128 weights, each four planes of 32."""
    halves = blocks[..., : BLOCK // 4].unflatten(-1, (2, BLOCK // 8))
    return torch.stack([halves >> shift & 3 for shift in range(0, 8, 2)], dim=-2).flatten(-3).float().sub_(1)


def _trits(codes: torch.Tensor, count: int) -> torch.Tensor:
    """Digits by repeated multiplication by three, in planes: uint8 (..., m) -> (..., count * m) of 0, 1, 2."""
    planes = []
    for _ in range(count):
        tripled = codes.short() * 3
        planes.append((tripled >> 8).to(torch.uint8))
        codes = tripled.to(torch.uint8)
    return torch.cat(planes, dim=-1)


def _tq1_0_values(blocks: torch.Tensor) -> torch.Tensor:
    """Five planes of 32 weights, five of 16, four of 4."""
    digits = torch.cat([_trits(blocks[..., :32], 5), _trits(blocks[..., 32:48], 5), _trits(blocks[..., 48:52], 4)], -1)
    return digits.float().sub_(1)


@dataclass(frozen=True)
class Layout:
    """How the blocks of a type are read: ``block`` weights in ``block_bytes``, perhaps in the rotated basis.

    ``values`` makes integers, the zero-point subtracted: uint8 (..., bytes) -> float32 (..., block). A weight is
    value * scale * unit. ``fmt`` says what a trellis type's blocks are made of; None of other types.
    """

    qtype: QType
    values: Callable[[torch.Tensor], torch.Tensor]
    block: int
    block_bytes: int
    scale_offset: int
    unit: float
    rotated: bool
    fmt: Format | None = None

    def scales(self, blocks: torch.Tensor) -> torch.Tensor:
        """What the values are multiplied with: uint8 (..., bytes) -> float32 (..., 1)."""
        mask = -1 if self.fmt is None or self.fmt.zero_point else _WITHOUT_STATE
        return _half(blocks, self.scale_offset, mask).mul_(self.unit)

    def fits(self, columns: int) -> bool:
        """Whether a row of so many weights is whole blocks."""
        return columns > 0 and columns % self.block == 0

    def row_bytes(self, columns: int) -> int:
        """Bytes of a row.

        Raises:
            ValueError: the row is not whole blocks.
        """
        if not self.fits(columns):
            raise ValueError(f"{self.qtype.name} rows must be a multiple of {self.block} long, not {columns}")
        return columns // self.block * self.block_bytes

    def columns(self, packed: torch.Tensor) -> int:
        """Weights in a row of packed rows: uint8 (rows, bytes of a row).

        Raises:
            ValueError: it is no matrix of whole blocks.
        """
        if packed.dtype != torch.uint8 or packed.ndim != 2 or packed.shape[1] % self.block_bytes or not packed.shape[1]:
            raise ValueError(
                f"packed {self.qtype.name} rows are uint8 (rows, k * {self.block_bytes}), not {packed.dtype} "
                f"{tuple(packed.shape)}"
            )
        return packed.shape[1] // self.block_bytes * self.block


def _ternary(qtype: QType, values: Callable[[torch.Tensor], torch.Tensor]) -> Layout:
    size = gguf.GGML_QUANT_SIZES[qtype][1]
    return Layout(qtype, values, BLOCK, size, size - 2, 1.0, rotated=False)


def _trellis(qtype: QType) -> Layout:
    """The unit of the levels is d/32."""
    fmt = FAMILY[qtype].format
    values = functools.partial(_trellis_values, fmt=fmt)
    return Layout(qtype, values, fmt.block, fmt.block_bytes, fmt.scale_offset, 2.0**-5, rotated=True, fmt=fmt)


#: The types a layer can have.
LAYOUTS: Final = {
    **{qtype: _trellis(qtype) for qtype in FAMILY},
    TQ1_0: _ternary(TQ1_0, _tq1_0_values),
    TQ2_0: _ternary(TQ2_0, _tq2_0_values),
}


def layout(qtype: int) -> Layout:
    """The layout of a type, given by its member or number.

    Raises:
        ValueError: a type without one.
    """
    if found := LAYOUTS.get(QType(qtype)):
        return found
    raise ValueError(
        f"{QType(qtype).name} weights cannot stay packed in PyTorch; use {', '.join(t.name for t in LAYOUTS)}"
    )


def layout_for(qtype: int, columns: int) -> Layout:
    """The layout that a matrix of so many columns has where a type is asked for.

    That of the type; where its blocks do not fit the columns, that of the type of shorter blocks in its place, as in a
    file that the converter writes (ITQ3_N for ITQ3_S). Where none fits, the last of them, which then refuses the rows.

    Raises:
        ValueError: a type without a layout.
    """
    kind = layout(qtype)
    while not kind.fits(columns) and kind.qtype in FAMILY and FAMILY[kind.qtype].fallback in LAYOUTS:
        kind = LAYOUTS[FAMILY[kind.qtype].fallback]
    return kind


def weights(blocks: torch.Tensor, kind: Layout) -> torch.Tensor:
    """Values times scales, in the basis of the block: uint8 (..., bytes) -> float32 (..., block)."""
    values = kind.values(blocks)
    return values.mul_(kind.scales(blocks))

"""What a trellis-coded format is made of: symbol bits, level table, code, scales. ITQ3_S is one.

Search, scale solver and block layout take a :class:`Format`, so that another width is another instance and not another
copy of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Final

import numpy as np
import numpy.typing as npt

from .transform import BLOCK, FloatArray
from .trellis import ITQ3_S_TRELLIS, LEVELS, Trellis


@dataclass(frozen=True, eq=False)
class Format:
    """A block of 256 weights: a symbol and a selector bit a weight, a scale in float16, perhaps a zero-point.

    Attributes:
        name: as in messages.
        symbol_bits: bits of a symbol; the four subsets have ``2 ** symbol_bits`` levels each.
        levels: int8 (4 * 2 ** symbol_bits,), ascending, in units of d/32; index ``4 * symbol + subset``.
        trellis: which subset a weight is read from.
        rms_in_levels: RMS of a block in level units at the start scale 1.
        starts: effort -> start scales relative to the first, in the order they are tried.
        zero_point: whether a float16 zero-point follows the scale.

    Raises:
        ValueError: the level table is not of the size that the symbol bits ask for.
    """

    name: str
    symbol_bits: int
    levels: npt.NDArray[np.int8] = field(repr=False)
    trellis: Trellis
    rms_in_levels: float
    starts: Mapping[str, tuple[float, ...]]
    zero_point: bool

    def __post_init__(self) -> None:
        if self.levels.size != 4 << self.symbol_bits:
            raise ValueError(f"{self.levels.size} levels are not four subsets of {1 << self.symbol_bits}")

    @property
    def symbol_bytes(self) -> int:
        """Bytes of the symbols of a block, in front of the selector bits."""
        return BLOCK * self.symbol_bits // 8

    @property
    def scale_offset(self) -> int:
        """Where the scale stands, behind the 32 bytes of selector bits."""
        return self.symbol_bytes + BLOCK // 8

    @property
    def block_bytes(self) -> int:
        """Bytes of a block."""
        return self.scale_offset + (4 if self.zero_point else 2)

    @property
    def bits_per_weight(self) -> float:
        return self.block_bytes * 8 / BLOCK

    @property
    def efforts(self) -> tuple[str, ...]:
        """The names of :attr:`starts`; an effort's place is its number in the C library."""
        return tuple(self.starts)

    def start_rms(self, effort: str) -> tuple[np.float32, ...]:
        """float32(rms_in_levels / start): the block's RMS in level units at each start scale.

        Raises:
            ValueError: unknown effort.
        """
        self.check_effort(effort)
        return tuple(np.float32(self.rms_in_levels / start) for start in self.starts[effort])

    def check_effort(self, effort: str) -> None:
        """Raise ValueError unless ``effort`` is one of :attr:`efforts`."""
        if effort not in self.starts:
            raise ValueError(f"unknown effort {effort!r}; use one of {', '.join(self.starts)}")

    @cached_property
    def level_values(self) -> FloatArray:
        """The levels as float32."""
        return self.levels.astype(np.float32)


#: Start scales: relative squared error on one million Gaussian weights 0.0226 with one, 0.0219 with three, 0.0218 with
#: four.
ITQ3_S_FORMAT: Final = Format(
    name="ITQ3_S",
    symbol_bits=2,
    levels=LEVELS,
    trellis=ITQ3_S_TRELLIS,
    rms_in_levels=25.5,
    starts={"fast": (1.0,), "default": (1.0, 0.91, 1.09)},
    zero_point=True,
)

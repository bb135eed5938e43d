"""What a trellis-coded format is made of: symbol bits, level table, code, scales, length of a block.

Search, scale solver and block layout take a :class:`Format`, so that another width is another instance and not another
copy of them. :mod:`gguf_itq3s.codec.family` says which of them are types of a file.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Final

import numpy as np
import numpy.typing as npt

from .transform import BLOCK, FloatArray
from .trellis import TRELLIS, Trellis

#: How many start scales the scale solver tries; an effort's place is its number in the C library.
EFFORTS: Final = ("fast", "default")
#: How blocks are encoded; a codec's place is its number in the C library.
CODECS: Final = ("trellis", "ternary")


@dataclass(frozen=True)
class TernaryCode:
    """The literal ternary code within a format: selectors 0, symbols 1, 2, 3 read ``zero_point + step * {-1, 0, 1}``.

    Attributes:
        step: between two of these levels.
        zero_point: the level in the middle.
    """

    step: int
    zero_point: int


@dataclass(frozen=True, eq=False)
class Format:
    """A block of weights: a symbol and a selector bit a weight, a scale in float16, perhaps a zero-point.

    Attributes:
        name: as in messages.
        symbol_bits: bits of a symbol, 1 to 3; the eight subsets have ``2 ** symbol_bits`` levels each.
        levels: int8 (8 * 2 ** symbol_bits,), ascending, at most 63, in units of d/32; index ``8 * symbol + subset``.
        trellis: which subset a weight is read from; 64 states at most, as searches keep 31 bits of a path.
        rms_in_levels: RMS of a block in level units at the start scale 1.
        starts: effort -> start scales relative to the first, in the order they are tried.
        zero_point: whether a float16 zero-point follows the scale. The start state is in the lowest bits of the last
            number of a block, so a scale that is the last has fewer of them to itself.
        block: weights of a block, 64 or 256 (so that the rotation's scale is exact in float32).
        ternary: the literal ternary code, where the levels have one.
        peak_in_levels: the largest magnitude of a block in level units at the start scale 1; None where the RMS says
            where to start.
    """

    name: str
    symbol_bits: int
    levels: npt.NDArray[np.int8] = field(repr=False)
    trellis: Trellis
    rms_in_levels: float
    starts: Mapping[str, tuple[float, ...]]
    zero_point: bool
    block: int = BLOCK
    ternary: TernaryCode | None = None
    peak_in_levels: float | None = None

    @property
    def symbol_bytes(self) -> int:
        """Bytes of the symbols of a block, in front of the selector bits."""
        return self.block * self.symbol_bits // 8

    @property
    def scale_offset(self) -> int:
        """Where the scale stands, behind the selector bits."""
        return self.symbol_bytes + self.block // 8

    @property
    def block_bytes(self) -> int:
        """Bytes of a block."""
        return self.scale_offset + (4 if self.zero_point else 2)

    @property
    def bits_per_weight(self) -> float:
        return self.block_bytes * 8 / self.block

    @property
    def rotation(self) -> np.float32:
        """float32(1 / sqrt(block)), exact: what the unnormalised Walsh-Hadamard transform is multiplied by."""
        return np.float32(1 / np.sqrt(self.block))

    @property
    def calibrated_effort(self) -> str:
        """Of a search with feedback, unless one is asked for: more start scales where they take off 3% of the error."""
        return "default" if self.block < BLOCK or self.symbol_bits == 3 else "fast"

    @property
    def codecs(self) -> tuple[str, ...]:
        """Those of :data:`CODECS` that the format has."""
        return CODECS if self.ternary else CODECS[:1]

    def start_levels(self, effort: str) -> tuple[np.float32, ...]:
        """float32: the block's RMS, or its largest magnitude, in level units at each start scale.

        Raises:
            ValueError: unknown effort.
        """
        check_effort(effort)
        size = self.rms_in_levels if self.peak_in_levels is None else self.peak_in_levels
        return tuple(np.float32(size / start) for start in self.starts[effort])

    def check_codec(self, codec: str) -> None:
        """Raise ValueError unless ``codec`` is one of :attr:`codecs`."""
        if codec not in CODECS:
            raise ValueError(f"unknown codec {codec!r}; use one of {', '.join(CODECS)}")
        if codec not in self.codecs:
            raise ValueError(f"{self.name} has no codec {codec!r}; use one of {', '.join(self.codecs)}")

    @cached_property
    def level_values(self) -> FloatArray:
        """The levels as float32."""
        return self.levels.astype(np.float32)


def check_effort(effort: str) -> None:
    """Raise ValueError unless ``effort`` is one of :data:`EFFORTS`."""
    if effort not in EFFORTS:
        raise ValueError(f"unknown effort {effort!r}; use one of {', '.join(EFFORTS)}")


def _levels(*positive: int) -> npt.NDArray[np.int8]:
    """A read-only table from its positive half: the levels that suit a Gaussian, rounded to integers."""
    levels = np.array([*(-level for level in reversed(positive)), *positive], dtype=np.int8)
    levels.setflags(write=False)
    return levels


ITQ3_S_LEVELS: Final = _levels(1, 3, 5, 7, 9, 11, 14, 16, 18, 21, 25, 27, 32, 37, 45, 59)
ITQ2_S_LEVELS: Final = _levels(3, 7, 13, 18, 25, 32, 41, 61)
ITQ4_S_LEVELS: Final = _levels(
    1, 1, 2, 3, 4, 5, 5, 7, 8, 8, 9, 11, 11, 12, 13, 15, 15, 17, 18, 19, 21, 22, 24, 25, 27, 29, 31, 34, 38, 43, 50, 61
)

# On Gaussian weights the relative squared error of ITQ3_S is 0.0191 with one start scale, 0.0186 with three; that of
# ITQ2_S 0.0733 with one, 0.0727 with two, 0.0725 with three, which take half as much time again; that of ITQ4_S 0.0050
# with one, 0.0048 with three.

ITQ3_S_FORMAT: Final = Format(
    name="ITQ3_S", symbol_bits=2, levels=ITQ3_S_LEVELS, trellis=TRELLIS, rms_in_levels=21.97,
    starts={"fast": (1.0,), "default": (1.0, 0.93, 1.08)}, zero_point=True,
    ternary=TernaryCode(step=17, zero_point=1),
)  # fmt: skip
ITQ2_S_FORMAT: Final = Format(
    name="ITQ2_S", symbol_bits=1, levels=ITQ2_S_LEVELS, trellis=TRELLIS, rms_in_levels=28.69,
    starts={"fast": (0.97,), "default": (0.97, 1.05)}, zero_point=False,
)  # fmt: skip
ITQ4_S_FORMAT: Final = Format(
    name="ITQ4_S", symbol_bits=3, levels=ITQ4_S_LEVELS, trellis=TRELLIS, rms_in_levels=19.26,
    starts={"fast": (1.0,), "default": (1.0, 0.93, 1.07)}, zero_point=False,
)  # fmt: skip

# For rows that are no multiple of 256: the same codes in blocks of 64. The RMS of 64 weights says less about the scale
# that suits them than that of 256 does; the largest of them, which the outermost levels have to reach, says more. On
# Gaussian weights one start scale gives ITQ3_N an error of 0.0175 from the RMS and 0.0166 from the largest, three give
# 0.0166 and 0.0160. ITQ2_N, whose few levels cut the tails off, has 0.0668 and 0.0663 with one, 0.0649 and 0.0648 with
# three; ITQ4_N, whose many levels reach them, 0.0046 and 0.0045 with one, 0.0042 and 0.0043 with three.
ITQ3_N_FORMAT: Final = replace(
    ITQ3_S_FORMAT, name="ITQ3_N", peak_in_levels=59.0, starts={"fast": (0.95,), "default": (0.95, 1.0, 0.9)},
    zero_point=False, block=64, ternary=None,
)  # fmt: skip
ITQ2_N_FORMAT: Final = replace(
    ITQ2_S_FORMAT, name="ITQ2_N", starts={"fast": (1.0,), "default": (1.0, 0.9, 1.1)}, block=64
)
ITQ4_N_FORMAT: Final = replace(
    ITQ4_S_FORMAT, name="ITQ4_N", starts={"fast": (1.0,), "default": (1.0, 0.9, 1.1)}, block=64
)

"""Formats that no type has: wider, and of shorter blocks."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from gguf_itq3s.codec.family import FAMILY
from gguf_itq3s.codec.formats import Format
from gguf_itq3s.codec.trellis import TRELLIS

#: Three symbol bits, 32 levels, about the Lloyd-Max levels of a Gaussian: wider than any type there is.
FOUR_BITS = Format(
    name="four bits",
    symbol_bits=3,
    levels=np.array(
        [-63, -52, -45, -39, -35, -30, -27, -23, -20, -17, -14, -12, -9, -6, -4, -1, 1, 4, 6, 9, 12, 14, 17, 20, 23, 27,
         30, 35, 39, 45, 52, 63], dtype=np.int8,
    ),
    trellis=TRELLIS,
    rms_in_levels=19.3,
    starts={"fast": (1.0,), "default": (1.0, 0.92, 1.08)},
    zero_point=False,
)  # fmt: skip
#: The types there are in blocks of 64 without a zero-point, for short rows.
SHORT = [
    replace(row.format, name=f"{row.name} of 64", block=64, zero_point=False, ternary=None) for row in FAMILY.values()
]

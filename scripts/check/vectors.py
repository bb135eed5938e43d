#!/usr/bin/env python3
"""Reference blocks of the types with blocks of 64, by an implementation that shares no code with the codec.

Every block is decoded weight by weight from the formulas of docs/format.md, in Python's integers and in float64 with
the Walsh-Hadamard matrix written out by the parity of ``i & j``. Blocks are random bytes with scales of both signs,
the first of them extreme: all bits clear, all set, a zero, a subnormal and the largest scale.

    python3 scripts/check/vectors.py FOLDER    writes itq3_n_decode.npz and itq2_n_decode.npz

tests/data has what it wrote; tests/unit/test_vectors.py compares.
"""

from __future__ import annotations

import argparse
import struct
from pathlib import Path

import numpy as np
import numpy.typing as npt

BLOCKS = 64
LENGTH = 64
#: Type -> bits of a symbol, levels.
TYPES = {
    "itq3_n": (2, (-63, -44, -33, -24, -20, -12, -7, -2, 2, 7, 12, 20, 24, 33, 44, 63)),
    "itq2_n": (1, (-63, -36, -20, -6, 6, 20, 36, 63)),
}


def symbol(qs: bytes, bits: int, t: int) -> int:
    """Symbol of weight t."""
    return qs[t // 8] >> t % 8 & 1 if bits == 1 else qs[t % 16] >> 2 * (t // 16) & 3


def rotated_values(block: bytes, bits: int, levels: tuple[int, ...]) -> list[float]:
    """v[t] of a block."""
    qs, sel = block[: 8 * bits], block[8 * bits : 8 * bits + 8]
    (scale,) = struct.unpack("<e", block[8 * bits + 8 :])
    selectors = [sel[t // 8] >> t % 8 & 1 for t in range(LENGTH)]

    def s(t: int) -> int:
        return selectors[t] if t >= 0 else 0

    values = []
    for t in range(LENGTH):
        c1 = s(t) ^ s(t - 1) ^ s(t - 6)
        c0 = s(t - 2) ^ s(t - 4)
        values.append(scale / 32 * levels[4 * symbol(qs, bits, t) + 2 * c1 + c0])
    return values


def weights_of(values: list[float]) -> list[float]:
    """w = H v; H[i, j] is 1/8 or -1/8 by the parity of the common bits of i and j."""
    return [
        sum(-v if (i & j).bit_count() % 2 else v for j, v in enumerate(values)) / LENGTH**0.5 for i in range(LENGTH)
    ]


def blocks_of(bits: int, rng: np.random.Generator) -> list[bytes]:
    """Bytes of the blocks of a type."""
    codes = [rng.bytes(8 * bits + 8) for _ in range(BLOCKS)]
    codes[0], codes[1] = bytes(8 * bits + 8), b"\xff" * (8 * bits + 8)
    scales = [float(x) for x in rng.normal(0, 0.05, BLOCKS)]
    scales[2], scales[3], scales[4] = 0.0, 2.0**-24, 65504.0
    return [code + struct.pack("<e", scale) for code, scale in zip(codes, scales, strict=True)]


def vectors(name: str) -> dict[str, npt.NDArray[np.generic]]:
    """Blocks uint8 (64, bytes), rotated values and weights float64 (64, 64) of a type."""
    bits, levels = TYPES[name]
    blocks = blocks_of(bits, np.random.default_rng(29 + bits))
    values = [rotated_values(block, bits, levels) for block in blocks]
    return {
        "blocks": np.array([list(block) for block in blocks], dtype=np.uint8),
        "rotated": np.array(values),
        "weights": np.array([weights_of(v) for v in values]),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where the files go")
    args = parser.parse_args()
    for name in TYPES:
        found = vectors(name)
        np.savez_compressed(
            args.folder / f"{name}_decode.npz",
            blocks=found["blocks"], rotated=found["rotated"], weights=found["weights"],
        )  # fmt: skip
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

"""The trellis: which of four interleaved grids a weight is read from, and the search for the best path.

Trellis-coded quantization (Marcellin and Fischer, IEEE Trans. Commun. 38(1), 1990): the levels are split into four
interleaved subsets; one *selector* bit a weight drives a shift register, and two parity checks of the register
(Ungerboeck, IEEE Trans. Inf. Theory 28(1), 1982, table I) name the subset, while a *symbol* of b bits names the level
in it. b + 1 bits a weight therefore reach a quantizer of 2**(b + 2) levels, restricted to paths through the trellis.

States are integers: ``state = sum(s[t-1-i] << i)``, so ``next = ((state << 1) | s[t]) & (states - 1)`` and the two
predecessors of the states ``2k`` and ``2k + 1`` are ``k`` and ``k + states/2``.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from .transform import FloatArray

IndexArray = npt.NDArray[np.uint8]

# Larger than any path metric of a block and far below float32's end: marks states that state 0 cannot have reached.
UNREACHED = np.float32(1e30)


def parity(x: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """XOR of the bits of each element (int64, any shape; up to 16 bits)."""
    for shift in (8, 4, 2, 1):
        x = x ^ (x >> shift)
    return x & 1


@dataclass(frozen=True)
class Trellis:
    """A rate-1/2 Ungerboeck code over the four subsets.

    Attributes:
        memory: length of the shift register; there are ``2 ** memory`` states.
        check1: parity check of the high subset bit; bit i taps ``s[t-i]``. Taps 0 and ``memory`` must be set.
        check0: parity check of the low subset bit. Taps 0 and ``memory`` must be clear.
    """

    memory: int
    check1: int
    check0: int

    def __post_init__(self) -> None:
        ends = 1 | 1 << self.memory
        if self.check1 & ends != ends or self.check0 & ends or (self.check1 | self.check0) >> (self.memory + 1):
            raise ValueError(f"parity checks {self.check1:o} and {self.check0:o} do not fit a memory of {self.memory}")

    @property
    def states(self) -> int:
        return 1 << self.memory

    @cached_property
    def butterfly_subsets(self) -> npt.NDArray[np.int64]:
        """int64 (states/2,): subset of the transition from state k < states/2 with s[t] = 0.

        Taking s[t] = 1, or starting from ``k + states/2``, flips its high bit; doing both flips it back.
        """
        k = np.arange(self.states // 2)
        return 2 * parity(k & (self.check1 >> 1)) + parity(k & (self.check0 >> 1))

    def subsets(self, selectors: npt.NDArray[np.bool_ | np.uint8]) -> IndexArray:
        """Subset of every weight from the selector bits; ``s[t] = 0`` for t < 0.

        Args:
            selectors: (n, m), the bits s[t] of one block a column.

        Returns:
            uint8 (n, m), ``2 * c1 + c0``.
        """
        s = selectors.astype(np.uint8, copy=False)
        c1, c0 = np.zeros_like(s), np.zeros_like(s)
        for tap in range(self.memory + 1):
            for check, out in ((self.check1, c1), (self.check0, c0)):
                if check >> tap & 1:
                    out[tap:] ^= s[: s.shape[0] - tap]
        return 2 * c1 + c0


#: Ungerboeck's codes by number of states (1982, table I; checks in octal).
UNGERBOECK = {
    4: Trellis(2, 0o5, 0o2),
    8: Trellis(3, 0o13, 0o04),
    16: Trellis(4, 0o23, 0o04),
    32: Trellis(5, 0o45, 0o10),
    64: Trellis(6, 0o103, 0o024),
    128: Trellis(7, 0o235, 0o126),
    256: Trellis(8, 0o515, 0o362),
}
#: The code of the formats.
TRELLIS = UNGERBOECK[64]


def nearest_symbols(
    y: FloatArray, levels: npt.NDArray[np.int8]
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.uint8]]:
    """Branch metrics: for every weight and subset the nearest level and its squared distance.

    A weight half-way between two levels takes the lower one.

    Args:
        y: float32 (n, m), weights in level units.
        levels: int8, a multiple of four, ascending, index ``4 * symbol + subset``.

    Returns:
        float32 (n, 4, m) squared distances ``(y - level)^2`` and uint8 (n, 4, m) symbols.
    """
    n, m = y.shape
    metric = np.empty((n, 4, m), dtype=np.float32)
    symbol = np.empty((n, 4, m), dtype=np.uint8)
    for subset in range(4):
        grid = levels[subset::4].astype(np.float32)
        middle = (grid[:-1] + grid[1:]) * np.float32(0.5)
        s = symbol[:, subset]
        np.greater(y, middle[0], out=s)
        for threshold in middle[1:]:
            s += y > threshold
        distance = y - grid[s]
        np.multiply(distance, distance, out=metric[:, subset])
    return metric, symbol


def search(y: FloatArray, trellis: Trellis, levels: npt.NDArray[np.int8]) -> tuple[IndexArray, IndexArray]:
    """Viterbi search for the path with the least squared error, all columns at once, from state 0 to any state.

    Path metrics are float32, ``metric(next) = min(metric(k) + branch, metric(k + states/2) + branch)``; a tie keeps
    the survivor from ``k``, and the best final state with the lowest number wins.

    Args:
        y: float32 (n, m), finite; one block a column, in level units (weight * 32 / d).
        trellis: the code.
        levels: as :func:`nearest_symbols` takes them.

    Returns:
        uint8 (n, m) level indices ``4 * symbol + subset`` and uint8 (n, m) selector bits.
    """
    n, m = y.shape
    half = trellis.states // 2
    branch, symbol = nearest_symbols(y, levels)
    same, flipped = trellis.butterfly_subsets, trellis.butterfly_subsets ^ 2

    metrics = np.full((trellis.states, m), UNREACHED, dtype=np.float32)
    metrics[0] = 0
    following = np.empty_like(metrics)
    survivor = np.empty((n, half, 2, m), dtype=np.bool_)
    from_low, from_high = np.empty((half, m), dtype=np.float32), np.empty((half, m), dtype=np.float32)
    for t in range(n):
        branch_same, branch_flipped = branch[t].take(same, axis=0), branch[t].take(flipped, axis=0)
        pairs = following.reshape(half, 2, m)
        for bit, low, high in ((0, branch_same, branch_flipped), (1, branch_flipped, branch_same)):
            np.add(metrics[:half], low, out=from_low)
            np.add(metrics[half:], high, out=from_high)
            np.less(from_high, from_low, out=survivor[t, :, bit])
            np.minimum(from_low, from_high, out=pairs[:, bit])
        metrics, following = following, metrics

    state = metrics.argmin(axis=0)
    indices = np.empty((n, m), dtype=np.uint8)
    selectors = np.empty((n, m), dtype=np.uint8)
    columns = np.arange(m)
    flat_survivor = survivor.reshape(n, trellis.states * m)
    flat_symbol = symbol.reshape(n, 4 * m)
    for t in range(n - 1, -1, -1):
        high = flat_survivor[t].take(state * m + columns)
        bit = state & 1
        k = state >> 1
        subset = same[k] ^ ((bit ^ high) << 1)
        indices[t] = 4 * flat_symbol[t].take(subset * m + columns) + subset
        selectors[t] = bit
        state = k + high * half
    return indices, selectors

"""The trellis: which of eight interleaved subsets a weight is read from, and the search for the best path.

Trellis-coded quantization (Marcellin and Fischer, IEEE Trans. Commun. 38(1), 1990): the levels are split into
interleaved subsets; one *selector* bit a weight drives a shift register, and parity checks of the register (Ungerboeck,
IEEE Trans. Inf. Theory 28(1), 1982) name the subset, while a *symbol* of b bits names the level in it. With the three
checks of the formats, b + 1 bits a weight reach a quantizer of 2**(b + 3) levels, restricted to paths through the
trellis.

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


def parity(x: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """XOR of the bits of each element (int64, any shape; up to 16 bits)."""
    for shift in (8, 4, 2, 1):
        x = x ^ (x >> shift)
    return x & 1


@dataclass(frozen=True)
class Trellis:
    """A code of one bit a weight over ``2 ** len(checks)`` subsets.

    Attributes:
        memory: length of the shift register; there are ``2 ** memory`` states.
        checks: parity checks of the bits of a subset, the highest first; bit i taps ``s[t-i]``. The first has taps 0
            and ``memory``, the others neither, so that a new or an oldest selector flips the highest bit alone.

    Raises:
        ValueError: other taps than that.
    """

    memory: int
    checks: tuple[int, ...]

    def __post_init__(self) -> None:
        ends = 1 | 1 << self.memory
        high, *others = self.checks
        if high & ends != ends or any(check & ends for check in others) or max(self.checks) >> (self.memory + 1):
            raise ValueError(f"parity checks {self.checks} do not fit a memory of {self.memory}")

    @property
    def states(self) -> int:
        return 1 << self.memory

    @property
    def subset_count(self) -> int:
        return 1 << len(self.checks)

    @cached_property
    def butterfly_subsets(self) -> npt.NDArray[np.int64]:
        """int64 (states/2,): subset of the transition from state k < states/2 with s[t] = 0.

        Taking s[t] = 1, or starting from ``k + states/2``, flips its high bit; doing both flips it back.
        """
        k = np.arange(self.states // 2)
        subset = np.zeros_like(k)
        for check in self.checks:
            subset = 2 * subset + parity(k & (check >> 1))
        return subset

    @property
    def flip(self) -> int:
        """The highest bit of a subset."""
        return self.subset_count // 2

    def subsets(self, selectors: npt.NDArray[np.bool_ | np.uint8], start: npt.NDArray[np.uint8]) -> IndexArray:
        """Subset of every weight from the selector bits.

        Args:
            selectors: (n, m), the bits s[t] of one block a column.
            start: uint8 (m,), the states before the first weights: ``s[-1-i]`` is bit i.

        Returns:
            uint8 (n, m).
        """
        before = start >> np.arange(self.memory - 1, -1, -1, dtype=np.uint8)[:, None] & np.uint8(1)
        s = np.concatenate([before, selectors.astype(np.uint8, copy=False)])
        n = selectors.shape[0]
        subset = np.zeros(selectors.shape, dtype=np.uint8)
        for check in self.checks:
            subset <<= np.uint8(1)
            for tap in range(self.memory + 1):
                if check >> tap & 1:
                    subset ^= s[self.memory - tap : self.memory - tap + n]
        return subset


#: The code of the formats: one of the best forty of the 29,760 whose selectors flip the highest bit of a subset alone.
TRELLIS = Trellis(6, (0b1100001, 0b0111010, 0b0010100))


def nearest_symbols(
    y: FloatArray, levels: npt.NDArray[np.int8], subsets: int
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.uint8]]:
    """Branch metrics: for every weight and subset the nearest level and its squared distance.

    A weight half-way between two levels takes the lower one.

    Args:
        y: float32 (n, m), weights in level units.
        levels: int8, ascending, index ``subsets * symbol + subset``.
        subsets: how many there are.

    Returns:
        float32 (n, subsets, m) squared distances ``(y - level)^2`` and uint8 (n, subsets, m) symbols.
    """
    n, m = y.shape
    metric = np.empty((n, subsets, m), dtype=np.float32)
    symbol = np.empty((n, subsets, m), dtype=np.uint8)
    for subset in range(subsets):
        values = levels[subset::subsets].astype(np.float32)
        middle = (values[:-1] + values[1:]) * np.float32(0.5)
        s = symbol[:, subset]
        np.greater(y, middle[0], out=s)
        for threshold in middle[1:]:
            s += y > threshold
        distance = y - values[s]
        np.multiply(distance, distance, out=metric[:, subset])
    return metric, symbol


def search(y: FloatArray, trellis: Trellis, levels: npt.NDArray[np.int8]) -> tuple[IndexArray, IndexArray, IndexArray]:
    """Viterbi search for the path with the least squared error, all columns at once, from any state to any state.

    Path metrics are float32, ``metric(next) = min(metric(k) + branch, metric(k + states/2) + branch)``; a tie keeps
    the survivor from ``k``, and the best final state with the lowest number wins.

    Args:
        y: float32 (n, m), finite; one block a column, in level units (weight * 32 / d).
        trellis: the code.
        levels: as :func:`nearest_symbols` takes them.

    Returns:
        uint8 (n, m) level indices ``subsets * symbol + subset``, uint8 (n, m) selector bits and uint8 (m,) states that
        the paths start from.
    """
    n, m = y.shape
    half = trellis.states // 2
    branch, symbol = nearest_symbols(y, levels, trellis.subset_count)
    same, flipped = trellis.butterfly_subsets, trellis.butterfly_subsets ^ trellis.flip

    metrics = np.zeros((trellis.states, m), dtype=np.float32)
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
    flat_symbol = symbol.reshape(n, -1)
    for t in range(n - 1, -1, -1):
        high = flat_survivor[t].take(state * m + columns)
        bit = state & 1
        k = state >> 1
        subset = same[k] ^ (bit ^ high) * trellis.flip
        indices[t] = trellis.subset_count * flat_symbol[t].take(subset * m + columns) + subset
        selectors[t] = bit
        state = k + high * half
    return indices, selectors, state.astype(np.uint8)

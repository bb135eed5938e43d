"""Which factors of channels make rounding cheapest.

A rotation spreads the error of a block of weights (of 256, or of 64 where 256 does not divide the row) evenly over its
columns, so rounding a block to the nearest codewords costs (energy of its weights) x (energy of its inputs). With
``w_j`` the mean square of column j and ``a_j`` that of its input, dividing column j by ``t_j`` and multiplying its
input by ``t_j`` makes that ::

    sum over blocks of  (sum_j w_j / t_j^2) (sum_j a_j t_j^2)

which is least at ``t_j = (w_j / a_j)^(1/4)``, by Cauchy's inequality: the scale of a block is free. Where several
columns have to share a factor, as those of query heads that read the same value, the sum is convex in ``log t`` and its
minimum is where ``t^4 = sum_j w_j A_b / sum_j a_j B_b``, ``B_b`` and ``A_b`` the two sums of the block of column j.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from ..codec.transform import SHORT_BLOCK, rotation_block

Vector = npt.NDArray[np.float64]

#: Shares of the mean that a column's weights and its inputs count at least: nothing is learnt of a column of zeros.
_LEAST_WEIGHT: Final = 1e-6
_LEAST_INPUT: Final = 1e-8
#: Steps of the fixed point for shared factors; half of each is taken, so it does not swing.
_STEPS: Final = 40


def logarithms(
    weights: Vector, inputs: Vector, channel: npt.NDArray[np.int64] | None = None, powers: tuple[float, float] = (1, 1)
) -> Vector:
    """The natural logarithms of the best factors.

    Args:
        weights: (n,), mean squares of the columns, n a multiple of 64.
        inputs: (n,), mean squares of their inputs.
        channel: (n,), which factor each column has; None for one of its own.
        powers: of ``weights`` and ``inputs``, before the minimum is taken: 1, 1 for the minimum itself.

    Returns:
        float64 (channels,), of mean 0 over those whose common scale is free.

    Raises:
        ValueError: values that are not finite or negative, or not whole blocks.
    """
    w, a = (_positive(x, least) ** power for x, least, power in zip(
        (weights, inputs), (_LEAST_WEIGHT, _LEAST_INPUT), powers, strict=True))  # fmt: skip
    if channel is None:
        return _centred(np.log(w / a) / 4, np.arange(w.size))
    result, block = np.zeros(int(channel.max()) + 1), rotation_block(w.size)
    for _ in range(_STEPS):
        u = result[channel]
        left, right = _blocks(w * np.exp(-2 * u)), _blocks(a * np.exp(2 * u))
        up = np.bincount(channel, w * np.repeat(right, block))
        down = np.bincount(channel, a * np.repeat(left, block))
        result += (np.log(up / down) / 4 - result) / 2
    return _centred(result, channel)


def cost(weights: Vector, inputs: Vector) -> float:
    """What rounding costs, up to a factor that does not matter: float, arguments as for :func:`logarithms`."""
    return float(_blocks(weights) @ _blocks(inputs))


def _positive(x: Vector, least: float) -> Vector:
    if x.ndim != 1 or not rotation_block(x.size):
        raise ValueError(f"{x.size} values are not whole blocks of {SHORT_BLOCK}")
    if not np.isfinite(x).all() or (x < 0).any():
        raise ValueError("mean squares that are not finite, or negative")
    mean = float(x.mean()) or 1.0
    return np.maximum(x / mean, least)


def _blocks(x: Vector) -> Vector:
    return x.reshape(-1, rotation_block(x.size)).sum(axis=1)


def _centred(u: Vector, channel: npt.NDArray[np.int64]) -> Vector:
    """Logarithms less their mean over all channels that share blocks, directly or through others."""
    group, block = np.arange(u.size), rotation_block(channel.size)
    while True:
        least = np.repeat(group[channel].reshape(-1, block).min(axis=1), block)
        after = group.copy()
        np.minimum.at(after, channel, least)
        if np.array_equal(after, group):
            break
        group = after
    means = np.bincount(group, u, u.size) / np.maximum(np.bincount(group, minlength=u.size), 1)
    return u - means[group]

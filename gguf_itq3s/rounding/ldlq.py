"""Calibrated trellis quantization: LDLQ with one trellis search a block (the numpy reference of itq-ldlq-search.h).

LDLQ (QuIP, arXiv 2307.13304; GPTQ, arXiv 2210.17323, is the same procedure) rounds columns left to right and lets
each column make up for the errors of those before it: with the Hessian as ``A diag(weight) A^T``
(:class:`gguf_itq3s.rounding.hessian.Factor`), the cost of a row is
``sum_k weight[k] * (e[k] + sum_{j<k} A[j, k] e[j])^2``. For the block that starts at column s, with the errors of the
blocks before it fixed, that is ::

    sum_k weight[k] * (d/32 * z[k] - y[k])^2
    z[k] = L[k] + sum_{s<=j<k} A[j, k] L[j]                    the levels, through the feedback
    y[k] = x[k] + sum_{s<=j<k} A[j, k] x[j] - sum_{j<s} A[j, k] e[j]

A trellis code cannot be rounded a column at a time. Each survivor of the Viterbi search therefore carries the
feedback of its own levels (per-survivor processing: Raheli, Polydoros and Tzou, IEEE Trans. Commun. 43(2), 1995).
Whenever the search is ``lookahead`` columns past the end of a segment, the best survivor's levels of that segment are
committed, survivors that went through another state there are dropped, and the committed levels reach the columns
beyond by plain feedback, so a survivor's own feedback never spans more than ``segment + lookahead``. The scale is then
refitted by least squares in the same metric, a few start scales are tried, and the one with the least cost wins.

The arithmetic is float32 with one fixed order of operations (sums over columns run in ascending order, products are
rounded before they are added), so the C quantizer reproduces every byte.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Final

import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType as Type

from ..codec import native
from ..codec.blocks import TOO_LARGE, ByteArray, check_magnitude, pack
from ..codec.family import DEFAULT, trellis_type
from ..codec.formats import Format, check_effort
from ..codec.native import NativeLibrary
from ..codec.scale import Path, best_path, fold_sum, storable
from ..codec.transform import FloatArray, fwht_columns
from ..codec.trellis import IndexArray
from .hessian import Factor

#: Limits of the C implementation: columns that a survivor's own feedback spans, and how far back its state is known.
WINDOW: Final = 64
LOOKAHEAD: Final = 25

# Path metric of a dropped survivor: larger than any, and far below float32's end.
_DROPPED: Final = np.float32(1e30)
# What is said of a search whose numbers overflow.
_GREW: Final = "the errors fed forward grew beyond float32; use more damping"


@dataclass(frozen=True)
class _Tables:
    """What the search looks up of a format.

    Attributes:
        predecessor: int (2, states): the state before, by where the survivor comes from (k, or k + states / 2).
        subset: uint8 (2, states): the subset read on the way.
        bit: uint32 (states,): the selector bit that leads to a state.
        values: float32 (subsets, symbols): levels of each subset.
        middles: float32 (subsets, symbols - 1): half-way between them.
    """

    predecessor: npt.NDArray[np.int64]
    subset: IndexArray
    bit: npt.NDArray[np.uint32]
    values: FloatArray
    middles: FloatArray


@lru_cache
def _tables(fmt: Format) -> _Tables:
    states = np.arange(fmt.trellis.states)
    subset = fmt.trellis.butterfly_subsets[states >> 1] ^ (np.arange(2)[:, None] ^ (states & 1)) * fmt.trellis.flip
    values = fmt.level_values.reshape(-1, fmt.trellis.subset_count).T
    return _Tables(
        np.stack([states >> 1, (states >> 1) + states.size // 2]), subset.astype(np.uint8),
        (states & 1).astype(np.uint32), values, (values[:, :-1] + values[:, 1:]) * np.float32(0.5),
    )  # fmt: skip


@dataclass(frozen=True)
class Search:
    """How far the search looks; measured in docs/calibration.md.

    Attributes:
        lookahead: columns searched past a segment before it is committed.
        effort: start scales, one of :data:`gguf_itq3s.codec.formats.EFFORTS`, or ``auto``, by the format.

    Raises:
        ValueError: a length is out of range, or the effort unknown.
    """

    segment: int = WINDOW - LOOKAHEAD
    lookahead: int = LOOKAHEAD
    effort: str = "auto"

    def __post_init__(self) -> None:
        if self.segment < 1 or not 0 <= self.lookahead <= LOOKAHEAD or self.segment + self.lookahead > WINDOW:
            raise ValueError(
                f"segment {self.segment}, lookahead {self.lookahead}: the segment must be 1 or more, the lookahead "
                f"0 to {LOOKAHEAD}, and both at most {WINDOW} in all"
            )
        if self.effort != "auto":
            check_effort(self.effort)


#: Searches by what a user asks for. One start scale and the widest search take 0.6 to 0.9 of the time of three and a
#: segment of 8 with a lookahead of 16, and lose 1 to 2% less (docs/calibration.md).
SEARCHES: Final = {
    "auto": Search(), "fast": Search(8, 16, "fast"), "default": Search(16, effort="default"),
    "best": Search(effort="default"),
}  # fmt: skip


def search(
    target: FloatArray, feedback: FloatArray, weight: FloatArray, options: Search, fmt: Format
) -> tuple[IndexArray, IndexArray, IndexArray]:
    """Search the path of one block with a small ``sum_k weight[k] * (z[k] - target[k])^2``, all columns at once.

    Without feedback within the block this is the Viterbi search of :func:`gguf_itq3s.codec.trellis.search`, and exact.

    Args:
        target: float32 (b, m), one block of b weights a column, in level units.
        feedback: float32 (b, b), unit upper triangular.
        weight: float32 (b,).

    Returns:
        uint8 (b, m) level indices ``8 * symbol + subset``, uint8 (b, m) selector bits and uint8 (m,) states that the
        paths start from.
    """
    n, m = target.shape
    tables, states = _tables(fmt), fmt.trellis.states
    columns = np.arange(m)
    target = target.copy()
    coupled = bool(np.triu(feedback, 1).any())
    segment, lookahead = (options.segment, options.lookahead) if coupled else (n, 0)

    metric = np.zeros((states, m), dtype=np.float32)
    # what a survivor's uncommitted levels add to the columns from t on, as far as they reach
    pending = np.zeros((1, states, m), dtype=np.float32)
    history = np.repeat(np.arange(states, dtype=np.uint32)[:, None], m, axis=1)
    survivor = np.empty((n, states, m), dtype=np.bool_)
    index = np.empty((n, states, m), dtype=np.uint8)
    indices = np.empty((n, m), dtype=np.uint8)
    selectors = np.empty((n, m), dtype=np.uint8)
    origin_state = np.empty(m, dtype=np.uint8)
    committed = 0

    def commit(start: int, stop: int, last: int, state: npt.NDArray[np.int64]) -> None:
        """Trace back from ``state`` after column ``last``; keep the columns from ``start`` to ``stop``, and the state
        before the first."""
        for t in range(last, start - 1, -1):
            if t < stop:
                indices[t] = index[t, state, columns]
                selectors[t] = state & 1
            state = (state >> 1) + states // 2 * survivor[t, state, columns]
        if start == 0:
            origin_state[:] = state

    for t in range(n):
        wanted = target[t] - pending[0]
        candidates, chosen = [], []
        for origin in range(2):
            subset = tables.subset[origin]
            y = wanted[tables.predecessor[origin]]
            symbol = np.zeros(y.shape, dtype=np.uint8)
            for middle in tables.middles.T:
                symbol += y > middle[subset, None]
            distance = y - tables.values[subset[:, None], symbol]
            candidates.append(metric[tables.predecessor[origin]] + distance * distance * weight[t])
            chosen.append(fmt.trellis.subset_count * symbol + subset[:, None])
        high = candidates[1] < candidates[0]
        metric = np.where(high, candidates[1], candidates[0])
        survivor[t], index[t] = high, np.where(high, chosen[1], chosen[0])
        history = (
            np.where(high, history[tables.predecessor[1]], history[tables.predecessor[0]]) << np.uint32(1)
            | tables.bit[:, None]
        )

        # the levels of a segment reach beyond its commitment only then
        reach = min((t // segment + 1) * segment + lookahead, n) - (t + 1) if coupled else 0
        following = np.zeros((max(reach, 1), states, m), dtype=np.float32)
        following[: len(pending) - 1] = np.where(
            high, pending[1:, tables.predecessor[1]], pending[1:, tables.predecessor[0]]
        )
        following[:reach] += feedback[t, t + 1 : t + 1 + reach, None, None] * fmt.level_values[index[t]]
        pending = following

        if t + 1 == committed + segment + lookahead and t + 1 < n:
            best = metric.argmin(axis=0)
            commit(committed, committed + segment, t, best)
            through = history >> np.uint32(lookahead) & np.uint32(states - 1)
            metric = np.where(through == through[best, columns], metric, _DROPPED)
            for j in range(committed, committed + segment):
                target[t + 1 :] -= feedback[j, t + 1 :, None] * fmt.level_values[indices[j]]
            committed += segment
    commit(committed, n, n - 1, metric.argmin(axis=0))
    return indices, selectors, origin_state


def through_feedback(x: FloatArray, feedback: FloatArray) -> FloatArray:
    """``x[k] + sum_{j<k} feedback[j, k] x[j]``, j ascending: float32 (b, m), (b, b) -> (b, m)."""
    result = x.copy()
    for j in range(x.shape[0] - 1):
        result[j + 1 :] += feedback[j, j + 1 :, None] * x[j]
    return result


def solve(x: FloatArray, y: FloatArray, feedback: FloatArray, weight: FloatArray, options: Search, fmt: Format) -> Path:
    """Path and scale of one block.

    Args:
        x: float32 (b, m) rotated weights; their RMS or their largest is where start scales are taken from.
        y: float32 (b, m), what the levels through the feedback should come to (see the module).
        feedback: float32 (b, b), unit upper triangular.
        weight: float32 (b,).

    Returns:
        The paths; a block whose RMS is zero, or whose scale rounds to zero, is zero throughout.
    """
    column_weight = weight[:, None]

    def searched(factor: FloatArray) -> tuple[Path, FloatArray]:
        indices, selectors, start = search(y * factor, feedback, weight, options, fmt)
        z = through_feedback(fmt.level_values[indices], feedback)
        weighted = column_weight * z
        d = storable(np.float32(32) * (fold_sum(weighted * y) / fold_sum(weighted * z)), fmt)
        residual = y - z * (d.astype(np.float32) * np.float32(1 / 32))
        return Path(indices, selectors, start, d), fold_sum(residual * residual * column_weight)

    return best_path(x, options.effort, fmt, searched)


def quantize(
    array: npt.ArrayLike, factor: Factor, options: Search | None = None, *, qtype: Type = DEFAULT.type, library:
    NativeLibrary | None = None, threads: int = 1,
) -> ByteArray:  # fmt: skip
    """Quantize the rows of a matrix to a trellis type with the Hessian of their inputs.

    Args:
        array: (m, n) weights, converted to float32.
        factor: of the rotated Hessian, n columns.
        library: the C library, which writes the same bytes; None for numpy.

    Returns:
        uint8 (m, bytes of a row), the layout of a GGUF tensor.

    Raises:
        ValueError: the shapes do not match, or a weight is NaN, infinite or beyond the range of the format.
    """
    options, fmt = options or Search(), trellis_type(qtype).format
    if options.effort == "auto":
        options = replace(options, effort=fmt.calibrated_effort)
    weights = np.asarray(array, dtype=np.float32)
    check_shape(weights, factor)
    if library is None:
        return _quantize_in_numpy(weights, factor, options, fmt)
    out = library.quantize_calibrated(
        weights, factor.feedback, factor.weight, qtype=qtype, segment=options.segment, lookahead=options.lookahead,
        effort=options.effort, threads=threads,
    )  # fmt: skip
    if native.refused(out, fmt):
        if not np.isfinite(weights).all() or np.abs(weights).max() >= 2.0**52:
            raise ValueError(TOO_LARGE)
        raise ValueError(_GREW)
    return out


def _quantize_in_numpy(weights: FloatArray, factor: Factor, options: Search, fmt: Format) -> ByteArray:
    rows, n = weights.shape
    blocks = np.empty((n // fmt.block, rows, fmt.block_bytes), dtype=np.uint8)
    error = np.zeros((n, rows), dtype=np.float32)
    for number, start in enumerate(range(0, n, fmt.block)):
        part = slice(start, start + fmt.block)
        with np.errstate(over="ignore", invalid="ignore"):
            x = fwht_columns(weights[:, part].T.copy()) * fmt.rotation
        check_magnitude(x)
        feedback = factor.feedback[part, part] if factor.full else factor.feedback[number]
        y = through_feedback(x, feedback)
        if factor.full:
            for j in range(start):
                y -= factor.feedback[j, part, None] * error[j]
        with np.errstate(over="ignore", invalid="ignore"):
            path = solve(x, y, feedback, factor.weight[part], options, fmt)
        if not np.isfinite(path.d).all():
            raise ValueError(_GREW)
        error[part] = fmt.level_values[path.indices] * (path.d.astype(np.float32) * np.float32(1 / 32)) - x
        blocks[number] = pack(path, np.zeros_like(path.d), fmt)
    return np.ascontiguousarray(blocks.transpose(1, 0, 2)).reshape(rows, n // fmt.block * fmt.block_bytes)


def check_shape(weights: FloatArray, factor: Factor) -> None:
    """Raise ValueError unless ``weights`` is a matrix with the columns of ``factor``."""
    if weights.ndim != 2 or weights.shape[1] != factor.columns:
        raise ValueError(f"a matrix of shape {weights.shape} and a Hessian of {factor.columns} columns do not match")

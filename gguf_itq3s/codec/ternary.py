"""Ternary tensors: recognising them, their scales, and ternarizing ordinary or latent weights.

A tensor is ternary when every weight is -a, 0 or a, with one a for the tensor, for each row, or for each block of 256
weights. TriLM, TriTera and BitNet b1.58 checkpoints hold such tensors once their scale is multiplied in. TQ1_0 and
TQ2_0 store them exactly, up to the rounding of the scale to float16 that an F16 file has as well.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Literal

import gguf
import numpy as np
import numpy.typing as npt

from .transform import BLOCK, FloatArray

Trits = npt.NDArray[np.int8]
Granularity = Literal["tensor", "row", "block"]

TQ1_0: Final = gguf.GGMLQuantizationType.TQ1_0
TQ2_0: Final = gguf.GGMLQuantizationType.TQ2_0
TERNARY_TYPES: Final = (TQ1_0, TQ2_0)

#: epsilon of gamma = eps + mean|W| in BitNet b1.58 and TriTera; it only keeps the division finite.
GAMMA_EPSILON: Final = 1e-5

# Blocks looked at before a whole tensor is; ordinary weights are told apart here.
_SAMPLE = 16


@dataclass(frozen=True)
class Ternary:
    """A matrix that is ternary after its scales.

    Attributes:
        trits: int8 (rows, n) of -1, 0, 1.
        scales: float32 (rows, n / 256), or (rows, 1) when n is not a multiple of 256; not negative.
        granularity: the coarsest unit that has one scale.
    """

    trits: Trits
    scales: FloatArray
    granularity: Granularity

    @property
    def in_float16(self) -> bool:
        """Whether float16 holds every scale exactly."""
        with np.errstate(over="ignore"):
            return bool((self.scales.astype(np.float16).astype(np.float32) == self.scales).all())

    @property
    def rounds_to_float16(self) -> bool:
        """Whether float16 holds every scale to half a unit in its last place (no overflow, no loss to subnormals)."""
        with np.errstate(over="ignore"):
            half = self.scales.astype(np.float16).astype(np.float32)
        return bool((np.abs(half - self.scales) <= self.scales * np.float32(2.0**-11)).all())

    def weights(self) -> FloatArray:
        """The matrix: float32 (rows, n)."""
        rows, columns = self.trits.shape
        blocks = self.trits.reshape(rows, self.scales.shape[1], -1).astype(np.float32)
        return (blocks * self.scales[:, :, None]).reshape(rows, columns)

    def encode(self, qtype: gguf.GGMLQuantizationType) -> npt.NDArray[np.uint8]:
        """TQ1_0 or TQ2_0 rows, the scales rounded to float16.

        Returns:
            uint8 (rows, bytes of a row).

        Raises:
            ValueError: the rows are not multiples of 256, or the type is not ternary.
        """
        rows, columns = self.trits.shape
        if columns % BLOCK:
            raise ValueError(f"{qtype.name} rows must be a multiple of {BLOCK} long, not {columns}")
        if qtype not in TERNARY_TYPES:
            raise ValueError(f"{qtype.name} is not a ternary type; use TQ1_0 or TQ2_0")
        # gguf-py's scale of a block of zeros is 0; here every block has its own.
        blocks = gguf.quants.quantize(self.trits.reshape(-1, BLOCK).astype(np.float32), qtype)
        blocks[:, -2:] = self.scales.reshape(-1, 1).astype("<f2").view(np.uint8)
        return blocks.reshape(rows, -1)


def trits_of(blocks: npt.NDArray[np.uint8], qtype: gguf.GGMLQuantizationType) -> Trits:
    """The trits of TQ1_0 or TQ2_0 blocks: uint8 (m, bytes of a block) -> int8 (m, 256).

    Raises:
        ValueError: a digit is none of a trit, as damaged blocks of TQ2_0 have.
    """
    plain = blocks.copy()
    plain[:, -2:] = np.array([1], dtype="<f2").view(np.uint8)
    trits = gguf.quants.dequantize(plain, qtype).astype(np.int8)
    if trits.max(initial=0) > 1:
        raise ValueError("a 2-bit digit is 3; these are not packed trits")
    return trits


def _groups(weights: npt.ArrayLike) -> FloatArray:
    """float32 (rows, groups, group length): groups are blocks of 256, or whole rows where 256 does not divide them."""
    matrix = np.asarray(weights, dtype=np.float32)
    if matrix.ndim < 2:
        raise ValueError(f"a matrix is needed; the shape is {matrix.shape}")
    columns = matrix.shape[-1]
    matrix = matrix.reshape(-1, columns)
    length = columns if columns % BLOCK else BLOCK
    return matrix.reshape(matrix.shape[0], -1, length)


def _two_valued(groups: FloatArray) -> tuple[bool, FloatArray, FloatArray]:
    magnitudes = np.abs(groups)
    top = magnitudes.max(axis=-1)
    return bool(((magnitudes == 0) | (magnitudes == top[..., None])).all()), magnitudes, top


def looks_ternary(rows: npt.ArrayLike) -> bool:
    """Whether the first 16 blocks of a matrix are each -a, 0 and a: what ordinary weights are told apart by.

    Args:
        rows: (..., n), converted to float32; only the first row is looked at.
    """
    groups = _groups(rows)
    return bool(groups.size) and _two_valued(groups[:1, :_SAMPLE])[0]


def recognise(weights: npt.ArrayLike) -> Ternary | None:
    """The ternary form of a matrix, if it has one; the comparison of magnitudes is exact.

    Args:
        weights: (..., n), converted to float32; leading axes are joined into rows.

    Returns:
        The trits and scales, or None when some block has two magnitudes, or a value is not finite.

    Raises:
        ValueError: fewer than two axes.
    """
    groups = _groups(weights)
    if not looks_ternary(weights):
        return None
    fits, _, top = _two_valued(groups)
    if not fits or not np.isfinite(top).all():
        return None
    trits = np.sign(groups).astype(np.int8).reshape(groups.shape[0], -1)
    # An all-zero block fits any scale, so it must not make the granularity finer.
    lows = np.where(top > 0, top, np.float32(np.inf))
    if lows.min() >= top.max():
        granularity: Granularity = "tensor"
    elif (lows.min(axis=1) >= top.max(axis=1)).all():
        granularity = "row"
    else:
        granularity = "block"
    return Ternary(trits, top, granularity)


def gamma(weights: npt.ArrayLike) -> float:
    """The absolute-mean scale of ternary training: ``gamma = eps + mean|W|`` over the whole tensor."""
    return GAMMA_EPSILON + float(np.abs(np.asarray(weights, dtype=np.float32)).mean(dtype=np.float64))


def optimal_scales(groups: FloatArray) -> FloatArray:
    """The scale that minimises ``|w - a t|^2`` over a and trits t together, for each group.

    With magnitudes sorted in descending order and k of them kept, the best a is their mean S_k / k and the error is
    ``|w|^2 - S_k^2 / k``; the k with the largest ``S_k^2 / k`` wins. No search over a is needed.
    """
    ordered = -np.sort(-np.abs(groups), axis=-1)
    sums = ordered.cumsum(axis=-1, dtype=np.float64)
    kept = np.arange(1, groups.shape[-1] + 1)
    best = (sums * sums / kept).argmax(axis=-1)[..., None]
    return (np.take_along_axis(sums, best, axis=-1) / (best + 1))[..., 0].astype(np.float32)


#: Scales of groups: float32 (rows, groups, length) -> (rows, groups); ``maxabs`` is that of TQ1_0 and TQ2_0 packing.
SCALES: Final[dict[str, Callable[[FloatArray], FloatArray]]] = {
    "absmean": lambda groups: np.full(groups.shape[:2], gamma(groups), dtype=np.float32),
    "optimal": optimal_scales,
    "maxabs": lambda groups: np.abs(groups).max(axis=-1),
}


def ternarize(weights: npt.ArrayLike, scale: str = "absmean") -> Ternary:
    """Ternarize ordinary or latent weights: ``t = round(clip(w / a, -1, 1))``.

    Args:
        weights: (..., n), converted to float32, finite; leading axes are joined into rows.
        scale: ``absmean`` (one a = gamma for the tensor, as in training), ``optimal`` (least squared error, a block)
            or ``maxabs`` (a block, the ternary packing's own).

    Returns:
        The trits and scales.

    Raises:
        ValueError: unknown scale, fewer than two axes, or a value that is not finite.
    """
    if scale not in SCALES:
        raise ValueError(f"unknown ternary scale {scale!r}; use one of {', '.join(SCALES)}")
    groups = _groups(weights)
    if not np.isfinite(groups).all():
        raise ValueError("a weight is NaN or infinite")
    scales = SCALES[scale](groups)
    safe = np.where(scales > 0, scales, np.float32(1))[..., None]
    trits = np.rint(np.clip(groups / safe, -1, 1)).astype(np.int8)
    return Ternary(trits.reshape(groups.shape[0], -1), scales, "tensor" if scale == "absmean" else "block")


def relative_error(weights: npt.ArrayLike, ternary: Ternary) -> float:
    """Relative squared error ``|W - W'|^2 / |W|^2``, summed in float64; 0 for a zero matrix."""
    matrix = np.asarray(weights, dtype=np.float64).reshape(ternary.trits.shape)
    power = float((matrix**2).sum())
    return float(((matrix - ternary.weights()) ** 2).sum()) / power if power else 0.0

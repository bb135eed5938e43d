"""The Hessian of a layer's rounding error in the rotated basis, and its factors.

For a matrix W read by inputs x, rounding W by E costs ``E[|E x|^2] = tr(E H E^T)`` with the second moment
``H = E[x x^T]`` (GPTQ, arXiv 2210.17323; QuIP, arXiv 2307.13304). The trellis types round ``W R`` with R the
block-diagonal Walsh-Hadamard rotation, so the Hessian that counts is ``R H R``, the second moment of the rotated
inputs. It is kept in full, (n, n), or as its diagonal blocks, (n / b, b, b), b being the length of the rotation's
blocks: 256 where that divides n, else 64 (:func:`gguf_itq3s.codec.transform.rotation_block`). Types with other
blocks, or none, are rounded in their own basis (:func:`in_basis`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from ..codec.transform import BLOCK, SHORT_BLOCK, FloatArray, rotation_block

#: Share of the mean diagonal added to the diagonal where tokens are many; measured in docs/calibration.md, as the next.
DAMPING: Final = 0.003
#: What is added to it, times columns over tokens.
_CHANCE: Final = 0.4

Hessian = npt.NDArray[np.floating]


@dataclass(frozen=True)
class Factor:
    """A damped Hessian as ``A diag(weight) A^T``, up to a positive factor that does not matter.

    The cost of rounding errors e is then ``sum_k weight[k] * (e[k] + sum_{j<k} A[j, k] e[j])^2``: what the error of
    column j adds to a later column k, and how much column k counts once it has been made up for.

    Attributes:
        feedback: float32 (n, n), or (n / b, b, b) for the diagonal blocks alone: A, unit upper triangular.
        weight: float32 (n,), positive, mean 1.
    """

    feedback: FloatArray
    weight: FloatArray

    @property
    def columns(self) -> int:
        return int(self.weight.size)

    @property
    def full(self) -> bool:
        """Whether errors are fed across blocks."""
        return self.feedback.ndim == 2


def columns_of(hessian: Hessian) -> int:
    """Number of columns n of a Hessian in either form.

    Raises:
        ValueError: neither (n, n) with n a multiple of 64, nor (n / b, b, b) with b 256 or 64.
    """
    shape = hessian.shape
    if hessian.ndim == 2 and shape[0] == shape[1] and rotation_block(shape[0]):
        return int(shape[0])
    if hessian.ndim == 3 and shape[1] == shape[2] and shape[1] in (BLOCK, SHORT_BLOCK) and shape[0]:
        return int(shape[0]) * int(shape[1])
    raise ValueError(f"a Hessian has shape (n, n) or (n / b, b, b), b {BLOCK} or {SHORT_BLOCK}, not {shape}")


def block_of(hessian: Hessian) -> int:
    """Length of the blocks that a Hessian in the basis of statistics is rotated in.

    Raises:
        ValueError: as :func:`columns_of`.
    """
    return rotation_block(columns_of(hessian)) if hessian.ndim == 2 else int(hessian.shape[1])


def check_form(hessian: Hessian) -> None:
    """Raise ValueError unless a Hessian has one of the forms of statistics: diagonal blocks are the rotation's."""
    columns = columns_of(hessian)
    if block_of(hessian) != rotation_block(columns):
        raise ValueError(f"blocks of {block_of(hessian)} for {columns} columns, not of {rotation_block(columns)}")


def usual_damping(hessian: Hessian, tokens: int | None) -> float:
    """The damping where none is asked for: with n columns and N tokens, about n / N of what a Hessian says is chance.

    Args:
        hessian: (n, n), or (n / b, b, b), each block of b columns.
        tokens: N; None for very many, and where there is a diagonal alone.
    """
    return DAMPING if not tokens else DAMPING + _CHANCE * hessian.shape[-1] / tokens


def factorize(hessian: Hessian, damping: float = DAMPING) -> Factor:
    """Factor a rotated Hessian in float64.

    Args:
        hessian: (n, n) or (n / b, b, b), symmetric, positive semidefinite.
        damping: share of the mean diagonal that is added to the diagonal, more than 0. An all-zero Hessian is taken
            as the identity.

    Raises:
        ValueError: wrong shape, a value that is not finite, damping that is not positive, or a Hessian so far from
            positive semidefinite that the damping does not make up for it.
    """
    columns = columns_of(hessian)
    if not damping > 0:
        raise ValueError(f"the damping must be more than 0, not {damping}")
    blocks = np.atleast_3d(hessian) if hessian.ndim == 3 else hessian[None]
    diagonal = np.diagonal(blocks, axis1=1, axis2=2).astype(np.float64)
    if not np.isfinite(blocks).all():
        raise ValueError("a value of the Hessian is NaN or infinite")
    mean = float(diagonal.mean()) or 1.0
    feedback = np.empty(blocks.shape, dtype=np.float32)
    weight = np.empty(diagonal.shape, dtype=np.float64)
    for i, block in enumerate(blocks):
        # U U^T with U upper triangular is the Cholesky factorization with rows and columns in reverse order.
        reverse = block[::-1, ::-1].astype(np.float64)
        reverse[np.diag_indices_from(reverse)] += damping * mean
        try:
            lower = np.linalg.cholesky(reverse)
        except np.linalg.LinAlgError:
            raise ValueError("the Hessian is not positive semidefinite; more damping may help") from None
        scale = np.diagonal(lower).copy()
        feedback[i] = (lower / scale)[::-1, ::-1]
        weight[i] = scale[::-1] ** 2
    weight /= weight.mean()
    return Factor(
        feedback[0] if hessian.ndim == 2 else feedback, np.ascontiguousarray(weight.reshape(columns), dtype=np.float32)
    )


def is_flat(hessian: Hessian) -> bool:
    """Whether a Hessian in either form is zero, or a multiple of the identity: rounding with it is rounding without."""
    diagonal = np.diagonal(hessian, axis1=-2, axis2=-1)
    # As many values as the diagonal has are not zero: none is beside it.
    return bool((diagonal == diagonal.flat[0]).all()) and np.count_nonzero(hessian) == np.count_nonzero(diagonal)


def cost(error: npt.NDArray[np.floating], hessian: Hessian) -> float:
    """``tr(E H E^T)`` in float64: the Hessian-weighted squared error of a matrix.

    Args:
        error: (m, n), rotated rows.
        hessian: (n, n) or (n / b, b, b), in the same basis.
    """
    columns = columns_of(hessian)
    if error.ndim != 2 or error.shape[1] != columns:
        raise ValueError(f"errors of shape {error.shape} do not match a Hessian of {columns} columns")
    e = error.astype(np.float64)
    if hessian.ndim == 2:
        return float(np.vdot(e @ hessian.astype(np.float64), e))
    blocks = e.reshape(e.shape[0], *hessian.shape[:2])
    return float(np.einsum("mbi,bij,mbj->", blocks, hessian.astype(np.float64), blocks, optimize=True))


def rotate(hessian: Hessian, block: int | None = None) -> npt.NDArray[np.float64]:
    """``R H R`` in float64, R the Walsh-Hadamard matrix in blocks: to the rotated basis and back."""
    block = block or block_of(hessian)
    result = hessian.astype(np.float64)
    for _ in range(2):
        result = rotate_rows(result, block)
        result = result.swapaxes(-1, -2)
    return np.ascontiguousarray(result)


def in_basis(hessian: Hessian, block: int) -> Hessian:
    """The Hessian of inputs that are rotated in blocks of another length.

    Args:
        hessian: in the basis of statistics, (n, n) or (n / b, b, b).
        block: the length, a divisor of b; 1 for inputs as they are.

    Returns:
        ``hessian`` itself where ``block`` is b; else float64, of the same shape, but that diagonal blocks that are
        rotated in shorter ones become these: (n / block, block, block), what couples them left out.

    Raises:
        ValueError: ``block`` does not divide b.
    """
    own = block_of(hessian)
    if block == own:
        return hessian
    if own % block:
        raise ValueError(f"statistics in blocks of {own} say too little of blocks of {block}")
    plain = rotate(hessian)
    if block == 1:
        return plain
    if plain.ndim == 3:
        parts = np.arange(own // block)
        cut = plain.reshape(len(plain), parts.size, block, parts.size, block)
        plain = cut[:, parts, :, parts].swapaxes(0, 1).reshape(-1, block, block)
    return rotate(plain, block)


def diagonal(hessian: Hessian) -> npt.NDArray[np.float64]:
    """Mean squares of the inputs before the rotation, float64 (n,), of a rotated Hessian in either form."""
    block = block_of(hessian)
    if hessian.ndim == 2:
        parts = [slice(start, start + block) for start in range(0, len(hessian), block)]
        hessian = np.stack([hessian[part, part] for part in parts])
    return np.ascontiguousarray(np.diagonal(rotate(hessian), axis1=1, axis2=2)).reshape(-1)


def scale_columns(hessian: Hessian, factor: npt.NDArray[np.floating]) -> npt.NDArray[np.float64]:
    """The rotated Hessian of inputs whose columns are multiplied by ``factor`` before the rotation.

    Exact in both forms, float64 of the same shape: a diagonal matrix does not couple blocks.

    Raises:
        ValueError: ``factor`` is not (n,).
    """
    columns = columns_of(hessian)
    f = factor.astype(np.float64)
    if f.shape != (columns,):
        raise ValueError(f"{f.size} factors for {columns} columns")
    if hessian.ndim == 3:
        f = f.reshape(hessian.shape[:2])
        return rotate(rotate(hessian) * f[:, :, None] * f[:, None, :])
    return rotate(rotate(hessian) * f[:, None] * f[None, :])


def from_diagonal(diagonal: npt.NDArray[np.floating]) -> npt.NDArray[np.float64]:
    """The rotated Hessian ``R D R`` of a diagonal one: block-diagonal, and not diagonal.

    Args:
        diagonal: (n,) second moments of unrotated inputs.

    Returns:
        float64 (n / b, b, b).

    Raises:
        ValueError: n is not a multiple of 64.
    """
    block = rotation_block(diagonal.size)
    if diagonal.ndim != 1 or not block:
        raise ValueError(f"{diagonal.size} values are not whole blocks of {SHORT_BLOCK}")
    blocks = np.zeros((diagonal.size // block, block, block))
    blocks[:, np.arange(block), np.arange(block)] = diagonal.reshape(-1, block)
    return rotate(blocks)


def rotate_rows(x: npt.NDArray[np.floating], block: int | None = None) -> npt.NDArray[np.float64]:
    """The Walsh-Hadamard transform of every block of the last axis, in float64.

    Statistics need no fixed order of operations; weights go through :mod:`gguf_itq3s.codec.transform`.

    Args:
        x: (..., n).
        block: a power of two; None for that of rows of n columns.

    Raises:
        ValueError: rows of n columns are not rotated, or are not whole blocks.
    """
    shape = x.shape
    block = block or rotation_block(shape[-1])
    if not block or shape[-1] % block:
        raise ValueError(f"{shape[-1]} values are not whole blocks of {block or SHORT_BLOCK}")
    x = x.astype(np.float64).reshape(-1, block)
    h = 1
    while h < block:
        pairs = x.reshape(-1, 2, h)
        x = np.concatenate([pairs[:, :1] + pairs[:, 1:], pairs[:, :1] - pairs[:, 1:]], axis=1)
        h *= 2
    return x.reshape(shape) / np.sqrt(block)

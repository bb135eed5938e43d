"""The rotation: a fast Walsh-Hadamard transform (FWHT) over blocks of 256, or of 64.

``H`` is the normalised Walsh-Hadamard matrix in natural (Sylvester) order; it is symmetric and orthogonal, so it is
its own inverse and ``dot(H v, x) == dot(v, H x)``. The arithmetic is float32 with one fixed order of operations
(butterfly stages h = 1, 2, 4, ..., n/2 in ascending order, then one product with the scale), so that C, SIMD and
CUDA implementations can reproduce it bit for bit.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

BLOCK = 256
#: Where 256 does not divide a row.
SHORT_BLOCK = 64

FloatArray = npt.NDArray[np.float32]


def rotation_block(columns: int) -> int:
    """The length of the blocks that rows of so many columns, and the statistics of their inputs, are rotated in.

    It depends on the row length alone, so that statistics serve every type: 256 where that divides it, else 64, else 0
    for rows that are not rotated.
    """
    return next((block for block in (BLOCK, SHORT_BLOCK) if columns and columns % block == 0), 0)


def hadamard_matrix(n: int = BLOCK) -> npt.NDArray[np.float64]:
    """The normalised Walsh-Hadamard matrix, Sylvester's construction: H(2n) = [[H, H], [H, -H]] / sqrt(2).

    Args:
        n: size, a power of two.

    Returns:
        float64 (n, n).

    Raises:
        ValueError: ``n`` is not a power of two.
    """
    if n < 1 or n & (n - 1):
        raise ValueError(f"the Hadamard matrix needs a power of two, not {n}")
    matrix = np.ones((1, 1))
    while matrix.shape[0] < n:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return matrix / np.sqrt(n)


def fwht_columns(x: FloatArray) -> FloatArray:
    """Unnormalised FWHT down the first axis of an array that holds one block a column.

    Each butterfly is ``(a, b) -> (a + b, a - b)`` in float32. Columns are contiguous in memory for every stage, which
    is what makes it fast in numpy.

    Args:
        x: float32 (n, m), n a power of two, C-contiguous; overwritten.

    Returns:
        float32 (n, m), either ``x`` or a new array.
    """
    n, m = x.shape
    out = np.empty_like(x)
    h = 1
    while h < n:
        pairs = x.reshape(n // (2 * h), 2, h, m)
        result = out.reshape(n // (2 * h), 2, h, m)
        np.add(pairs[:, 0], pairs[:, 1], out=result[:, 0])
        np.subtract(pairs[:, 0], pairs[:, 1], out=result[:, 1])
        x, out = out, x
        h *= 2
    return x


def fwht(x: npt.ArrayLike, block: int = BLOCK) -> FloatArray:
    """Rotate every block of the last axis by the normalised Walsh-Hadamard matrix (its own inverse).

    Args:
        x: (..., k * block), converted to float32.
        block: power of two; the scale is float32(1 / sqrt(block)), exact for even powers.

    Returns:
        float32, the shape of ``x``.

    Raises:
        ValueError: the last axis is not a multiple of ``block``, or ``block`` is not a power of two.
    """
    array = np.asarray(x, dtype=np.float32)
    if block < 1 or block & (block - 1):
        raise ValueError(f"the FWHT needs a power of two, not {block}")
    if array.ndim == 0 or array.shape[-1] % block:
        raise ValueError(f"the last axis of shape {array.shape} is not a multiple of {block}")
    rotated = fwht_columns(array.reshape(-1, block).T.copy()) * np.float32(1.0 / np.sqrt(block))
    return np.ascontiguousarray(rotated.T).reshape(array.shape)

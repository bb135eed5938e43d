"""What a matrix is rounded to when the layers before it are rounded already: its target.

The quantized model gives a matrix the inputs ``x'`` where the original gave ``x``. What the matrix should put out is
``W x`` then, and of a matrix that writes to the residual stream the stream's own error ``r - r'`` can be made up for as
well. The least squares answer, damped, is the target ::

    T = W + (W C + R) (H + damping mean(diag H) I)^-1
    H = sum x' x'^T    C = sum (x - x') x'^T    R = sum (r - r') x'^T

and rounding T by the Hessian H minimises ``sum |W x + (r - r') - Q x'|^2`` over codewords Q as far as LDLQ does.
Without R this is the asymmetric calibration of GPTAQ (arXiv 2504.02692); R is the residual stream's part of it.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from . import hessian as hessians

#: Share of the mean diagonal of H that is added to its diagonal: the target may lean on few tokens less than the
#: rounding may (:data:`gguf_itq3s.rounding.hessian.DAMPING`).
DAMPING: Final = 0.01

Matrix = npt.NDArray[np.floating]


def corrected(
    weights: Matrix, hessian: Matrix, cross: Matrix, residual: Matrix | None = None, damping: float = DAMPING
) -> npt.NDArray[np.float32]:
    """The target of a matrix, solved in float64.

    Sums over tokens and means serve alike, if they are of the same tokens.

    Args:
        weights: (m, n), W; rotated or not, as all others.
        hessian: (n, n), or its diagonal blocks (n / 256, 256, 256): H.
        cross: of the same shape: C.
        residual: (m, n): R; None where the matrix does not write to the residual stream.
        damping: more than 0.

    Returns:
        float32 (m, n); the weights themselves, to the bit, where C and R are zero.

    Raises:
        ValueError: shapes that do not match, or a Hessian that is not positive semidefinite.
    """
    columns = hessians.columns_of(hessian)
    if weights.ndim != 2 or weights.shape[1] != columns or cross.shape != hessian.shape:
        raise ValueError(f"weights {weights.shape} and sums {cross.shape} do not match a Hessian {hessian.shape}")
    if residual is not None and residual.shape != weights.shape:
        raise ValueError(f"a residual term {residual.shape} does not match weights {weights.shape}")
    if not cross.any() and (residual is None or not residual.any()):
        return weights.astype(np.float32)
    size = hessian.shape[-1]
    mean = float(np.diagonal(hessian, axis1=-2, axis2=-1).mean()) or 1.0
    result = np.empty(weights.shape, dtype=np.float32)
    for number, start in enumerate(range(0, columns, size)):
        part = slice(start, start + size)
        w = weights[:, part].astype(np.float64)
        h, c = (array if array.ndim == 2 else array[number] for array in (hessian, cross))
        missing = w @ c
        if residual is not None:
            missing += residual[:, part]
        damped = h.astype(np.float64)
        damped[np.diag_indices_from(damped)] += damping * mean
        try:
            np.linalg.cholesky(damped)
        except np.linalg.LinAlgError:
            raise ValueError("the Hessian is not positive semidefinite; more damping may help") from None
        result[:, part] = w + np.linalg.solve(damped, missing.T).T
    return result

"""What a matrix is rounded to when the layers before it are rounded already: its target, and how far to trust it.

The quantized model gives a matrix the inputs ``x'`` where the original gave ``x``. What the matrix should put out is
``W x`` then, and of a matrix that writes to the residual stream the stream's own error ``r - r'`` can be made up for as
well. The least squares answer, damped, is the target ::

    T = W + step * B (H + damping mean(diag H) I)^-1
    H = sum x' x'^T    B = sum (W (x - x') + r - r') x'^T

and rounding T by the Hessian H minimises ``sum |W x + (r - r') - Q x'|^2`` over codewords Q as far as LDLQ does.
Without r this is the asymmetric calibration of GPTAQ (arXiv 2504.02692); r is the residual stream's part of it.

Sums over few tokens say more than is true: with n columns and N tokens, about n / N of what the least squares answer
explains is chance. So both numbers come from tokens that are in no sum. The damping is that with the least expected
error of rounding on them (:meth:`Decomposition.expected_error`), the step the one that leaves least of what is missing
in their outputs, 0 where the target makes it worse. Where the Hessian is kept in blocks, every block explains the whole
of what is missing, and the step is what shares it out among them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from .hessian import Factor

if TYPE_CHECKING:
    import torch

#: Sums of some numbers over all processes that hold out tokens.
Sums = Callable[..., Sequence[float]]
#: What is tried for the damping: shares of the mean diagonal.
DAMPINGS: Final = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0)
#: Columns from which on a full Hessian is decomposed in float32, in half the time and memory.
WIDE: Final = 4096
#: Tokens held out that decide the damping of one so wide: each costs n^2 products.
_FEW: Final = 1024
#: Where the search begins, and what is taken where nothing is held out.
DAMPING: Final = 0.1


def _alone(*values: float) -> Sequence[float]:
    return values


@dataclass(frozen=True)
class Decomposition:
    """A damped Hessian as ``U U^T``, U upper triangular; of a Hessian in blocks, block by block.

    Attributes:
        upper: (blocks, s, s), one block for a full Hessian; float64, or float32 of one that is wider than
            :data:`WIDE` where that suffices.
    """

    upper: torch.Tensor
    full: bool

    @classmethod
    def of(cls, hessian: torch.Tensor, damping: float) -> Decomposition:
        """Decompose a Hessian.

        Args:
            hessian: float64 (n, n) or (n / b, b, b), symmetric, positive semidefinite. An all-zero one is taken as the
                identity.
            damping: share of the mean diagonal that is added to the diagonal, more than 0.

        Raises:
            ValueError: a value is not finite, or it is not positive semidefinite.
        """
        import torch

        mean = float(hessian.diagonal(dim1=-2, dim2=-1).mean())
        if not np.isfinite(mean):
            raise ValueError("a value of the Hessian is NaN or infinite")
        added = damping * (mean or 1.0)
        for dtype in (torch.float32, torch.float64) if is_wide(hessian) else (torch.float64,):
            if (upper := _decomposed(hessian, added, dtype)) is not None:
                return cls(upper, hessian.ndim == 2)
        raise ValueError("the Hessian is not positive semidefinite; more damping may help")

    def factor(self, *, spent: bool = False) -> Factor:
        """For rounding, as :func:`gguf_itq3s.rounding.hessian.factorize` gives it.

        Args:
            spent: the decomposition is not needed any more, and the factor may take its memory.
        """
        scale = self.upper.diagonal(dim1=-2, dim2=-1).clone()
        feedback = self.upper.div_(scale[:, None, :]) if spent else self.upper / scale[:, None, :]
        feedback = feedback.float().cpu().numpy()
        weight = scale.square().flatten()
        weight = (weight / weight.mean()).float().cpu().numpy()
        return Factor(np.ascontiguousarray(feedback[0] if self.full else feedback), weight)

    def expected_error(self, inputs: torch.Tensor, sums: Sums = _alone) -> float:
        """What rounding with this factor costs on some inputs, but for a factor that no Hessian changes.

        With ``H = A D A^T``, A unit upper triangular, LDLQ leaves errors ``E = N A^-1``, N as large in every column as
        the codebook makes it: ``E[|E x|^2]`` is proportional to ``|A^-1 x|^2``.

        Args:
            inputs: float32 (tokens, n), rotated.

        Returns:
            The sum over tokens, over that of rounding to the nearest codewords, which has A = 1.
        """
        import torch

        blocks, size = self.upper.shape[:2]
        x = inputs.reshape(len(inputs), blocks, size).permute(1, 2, 0).to(self.upper)
        solved = torch.linalg.solve_triangular(self.upper, x, upper=True)
        solved *= self.upper.diagonal(dim1=-2, dim2=-1)[..., None]
        left, energy = sums(float(solved.square().sum()), float(x.square().sum()))
        return left / energy if energy else 1.0

    def solve(self, right: torch.Tensor) -> torch.Tensor:
        """``right (U U^T)^-1`` of (m, n), in the precision of ``right``."""
        import torch

        blocks, size = self.upper.shape[:2]
        upper = self.upper.to(right)
        columns = right.reshape(len(right), blocks, size).permute(1, 2, 0)
        # U U^T X^T = right^T: U first, its transpose then.
        half = torch.linalg.solve_triangular(upper, columns, upper=True)
        whole = torch.linalg.solve_triangular(upper.mT, half, upper=False)
        return whole.permute(2, 0, 1).reshape(right.shape)


def is_wide(hessian: torch.Tensor) -> bool:
    """Whether a Hessian is full and wider than :data:`WIDE`."""
    return hessian.ndim == 2 and len(hessian) > WIDE


def _decomposed(hessian: torch.Tensor, added: float, dtype: torch.dtype) -> torch.Tensor | None:
    """U (blocks, s, s) of a Hessian with a number added to its diagonal; None if it is not positive definite."""
    import torch

    # U U^T with U upper triangular is the Cholesky factorization with rows and columns in reverse order.
    reverse = (hessian[None] if hessian.ndim == 2 else hessian).to(dtype).flip(-2, -1)
    reverse.diagonal(dim1=-2, dim2=-1).add_(added)
    lower, failed = torch.linalg.cholesky_ex(reverse)
    if failed.any():
        return None
    del reverse
    return lower.flip(-2, -1)


def decompose(
    hessian: torch.Tensor, held: torch.Tensor | None, start: float, sums: Sums = _alone
) -> tuple[float, Decomposition]:
    """Decompose a Hessian with the damping that tokens held out like best.

    Args:
        hessian: as :meth:`Decomposition.of` takes it.
        held: float32 (tokens, n), rotated; None where there are none: the damping is ``start``.
        start: one of :data:`DAMPINGS`, from which the search goes on while the error falls.
        sums: over those that hold out other tokens, and have the same Hessian.

    Returns:
        The damping and the decomposition.
    """
    best = Decomposition.of(hessian, start)
    if held is None:
        return start, best
    if is_wide(hessian):
        (tokens,) = sums(len(held))
        held = held[:: max(1, -(-int(tokens) // _FEW))]
    place, least = DAMPINGS.index(start), best.expected_error(held, sums)
    for direction in (1, -1):
        moved = False
        while 0 <= place + direction < len(DAMPINGS):
            found = Decomposition.of(hessian, DAMPINGS[place + direction])
            error = found.expected_error(held, sums)
            if error >= least:
                break
            best, least, place, moved = found, error, place + direction, True
        if moved:
            break
    return DAMPINGS[place], best


def explained(weights: torch.Tensor, cross: torch.Tensor) -> torch.Tensor:
    """``W sum (x - x') x'^T``, what the difference of the inputs asks of a matrix: (m, n) like W, which is rotated.

    Args:
        cross: (n, n) or (n / b, b, b).
    """
    if cross.ndim == 2:
        return weights @ cross.to(weights)
    import torch

    blocks = weights.reshape(len(weights), *cross.shape[:2])
    return torch.einsum("mbi,bij->mbj", blocks, cross.to(weights)).reshape(weights.shape)


def line_search(missing: torch.Tensor, explained: torch.Tensor, sums: Sums = _alone) -> float:
    """How much of a correction leaves least of what is missing: ``argmin |missing - step explained|^2`` in [0, 1].

    Args:
        missing: (tokens, m): what is missing in the outputs of tokens held out.
        explained: (tokens, m): what the whole correction would add to them.
    """
    energy, product = sums(float(explained.square().sum()), float((missing * explained).sum()))
    step = product / energy if energy else 0.0
    return min(1.0, max(0.0, step)) if np.isfinite(step) else 0.0

"""Scaling laws of ternary and of 16-bit language models: loss from parameters and tokens, and its inverses.

The laws are those of "Scaling Laws and Efficient Inference for Ternary Language Models" (TriTera), fitted there and
only quoted here: ``L(N, D) = floor + A / N^a + B / D^b``, with N in millions of parameters without embeddings and D in
billions of tokens; L in nats a token on that paper's text and tokenizer, so losses compare with one another and with
nothing else. Everything here has a closed form. Training is counted as 6 FLOPs a parameter and token.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

#: Sizes of the models that the laws were fitted on, parameters without embeddings, and the most tokens they saw.
FITTED_PARAMETERS: Final = (99e6, 1.1e9)
FITTED_TOKENS: Final = 150e9
#: FLOPs of training for each parameter and token, forward and backward.
FLOPS: Final = 6.0

#: What the functions take; beyond is a slip of the pen. The optimum of every budget lies within the other two.
PARAMETERS: Final = (1e3, 1e16)
TOKENS: Final = (1e3, 1e18)
BUDGET: Final = (1e15, 1e28)


@dataclass(frozen=True)
class Law:
    """``L(N, D) = floor + of_parameters / N^a + of_tokens / D^b``, N in millions and D in billions.

    Attributes:
        name: what kind of model it describes.
        floor: loss of an endless model on endless text.
        of_parameters: A.
        a: exponent of N.
        of_tokens: B.
        b: exponent of D.
        r_squared: of the fit, as the paper gives it.
    """

    name: str
    floor: float
    of_parameters: float
    a: float
    of_tokens: float
    b: float
    r_squared: float

    def __str__(self) -> str:
        return f"L = {self.floor} + {self.of_parameters}/N^{self.a} + {self.of_tokens}/D^{self.b}"

    def loss(self, parameters: float, tokens: float) -> float:
        """Loss in nats a token.

        Raises:
            ValueError: a count is not a number within :data:`PARAMETERS` or :data:`TOKENS`.
        """
        _check("parameters", parameters, PARAMETERS)
        _check("tokens", tokens, TOKENS)
        return self.floor + self._size_term(parameters) + self.of_tokens / (tokens / 1e9) ** self.b

    def tokens(self, loss: float, parameters: float) -> float | None:
        """Tokens that a model of so many parameters needs for a loss; None where no number of tokens gives it.

        Raises:
            ValueError: as :meth:`loss`.
        """
        _check("parameters", parameters, PARAMETERS)
        return _invert(loss - self.floor - self._size_term(parameters), self.of_tokens, self.b, 1e9)

    def parameters(self, loss: float, tokens: float) -> float | None:
        """Parameters that give a loss with so many tokens; None where no number of parameters does.

        Raises:
            ValueError: as :meth:`loss`.
        """
        _check("tokens", tokens, TOKENS)
        return _invert(loss - self.floor - self.of_tokens / (tokens / 1e9) ** self.b, self.of_parameters, self.a, 1e6)

    def best_loss(self, parameters: float) -> float:
        """What the loss of a model of so many parameters approaches with ever more tokens."""
        _check("parameters", parameters, PARAMETERS)
        return self.floor + self._size_term(parameters)

    def optimum(self, flops: float) -> tuple[float, float]:
        """Parameters and tokens of the least loss within a budget of training.

        With ``N D = P`` fixed, the derivative of the loss by N is zero where ``N^(a + b) = (a A) / (b B) P^b``. The
        loss falls before and rises after, so this is the one minimum.

        Args:
            flops: of the whole training, ``6 N D``.

        Returns:
            parameters, tokens.

        Raises:
            ValueError: the budget is not a number within :data:`BUDGET`.
        """
        _check("FLOPs", flops, BUDGET)
        product = flops / FLOPS / 1e15  # millions times billions
        ratio = self.a * self.of_parameters / (self.b * self.of_tokens)
        millions = (ratio * product**self.b) ** (1 / (self.a + self.b))
        return millions * 1e6, product / millions * 1e9

    def _size_term(self, parameters: float) -> float:
        return self.of_parameters / (parameters / 1e6) ** self.a


TERNARY: Final = Law("ternary", 2.19, 4.73, 0.32, 5.18, 0.81, 0.992)
FLOAT: Final = Law("16 bits", 2.17, 7.86, 0.56, 3.42, 0.53, 0.996)


def fitted(parameters: float, tokens: float) -> bool:
    """Whether the paper fitted its laws on models like this; what they say of others is an extrapolation."""
    least, most = FITTED_PARAMETERS
    return least <= parameters <= most and tokens <= FITTED_TOKENS


def _check(what: str, value: float, bounds: tuple[float, float]) -> None:
    if not bounds[0] <= value <= bounds[1]:  # refuses nan
        raise ValueError(f"{value:g} {what}: not a number from {bounds[0]:g} to {bounds[1]:g}")


def _invert(gap: float, factor: float, exponent: float, unit: float) -> float | None:
    """``x`` with ``factor / (x / unit)^exponent == gap``; None where there is no gap to fill."""
    if not gap > 1e-12:  # what is left of an equality in double precision
        return None
    return float((factor / gap) ** (1 / exponent) * unit)

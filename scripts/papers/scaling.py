#!/usr/bin/env python3
"""Scaling laws of ternary and of 16-bit language models: loss from parameters and tokens, and the inverses.

    scripts/papers/scaling.py --update scripts/papers/README.md

The laws are those of "Scaling Laws and Efficient Inference for Ternary Language Models" (TriTera), fitted there and
only quoted here: ``L(N, D) = floor + A / N^a + B / D^b``, with N in millions of parameters without embeddings and D in
billions of tokens; L in nats a token on that paper's text and tokenizer, so losses compare with one another and with
nothing else. Training is counted as 6 FLOPs a parameter and token.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Final

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from gguf_itq3s.base import report
from gguf_itq3s.base.errors import report_errors

#: Parameters of the models that the laws were fitted on, and the most tokens that they saw.
FITTED_PARAMETERS: Final = (99e6, 1.1e9)
FITTED_TOKENS: Final = 150e9
#: The lines of the tables.
SIZES: Final = (99e6, 390e6, 1.1e9, 3.9e9, 8e9)
TOKENS: Final = (10e9, 50e9, 150e9, 1.2e12)
BUDGETS: Final = (1e19, 1e20, 1e21, 1e22, 1e23)
#: 16-bit models to be matched, parameters and tokens; bits a weight of TQ2_0.
MATCHED: Final = ((99e6, 150e9), (1.1e9, 150e9), (8e9, 1.2e12), (70e9, 15e12))
TQ2_0_BITS: Final = 2.0625


@dataclass(frozen=True)
class Law:
    """``L(N, D) = floor + of_parameters / N^a + of_tokens / D^b``, N in millions and D in billions."""

    name: str
    floor: float
    of_parameters: float
    a: float
    of_tokens: float
    b: float

    def loss(self, parameters: float, tokens: float) -> float:
        """Loss in nats a token."""
        return self.best_loss(parameters) + self.of_tokens / (tokens / 1e9) ** self.b

    def best_loss(self, parameters: float) -> float:
        """What the loss of a model of so many parameters approaches with ever more tokens."""
        return self.floor + self.of_parameters / (parameters / 1e6) ** self.a

    def tokens(self, loss: float, parameters: float) -> float | None:
        """Tokens that a model of so many parameters needs for a loss; None where no number of tokens gives it."""
        gap = loss - self.best_loss(parameters)
        return (self.of_tokens / gap) ** (1 / self.b) * 1e9 if gap > 1e-12 else None

    def optimum(self, flops: float) -> tuple[float, float]:
        """Parameters and tokens of the least loss within a budget of ``6 N D`` FLOPs.

        With ``N D = P`` fixed, the derivative of the loss by N is zero where ``N^(a + b) = (a A) / (b B) P^b``.
        """
        product = flops / 6 / 1e15  # millions times billions
        ratio = self.a * self.of_parameters / (self.b * self.of_tokens)
        millions = (ratio * product**self.b) ** (1 / (self.a + self.b))
        return millions * 1e6, product / millions * 1e9


TERNARY: Final = Law("ternary", 2.19, 4.73, 0.32, 5.18, 0.81)
FLOAT: Final = Law("16 bits", 2.17, 7.86, 0.56, 3.42, 0.53)


def marked(text: str, parameters: float, tokens: float) -> str:
    """A text with a star where parameters and tokens are outside of what was fitted."""
    least, most = FITTED_PARAMETERS
    return text if least <= parameters <= most and tokens <= FITTED_TOKENS else text + "*"


def count(value: float) -> str:
    """1.1e9 -> ``1.1 B``."""
    factor, prefix = next(pair for pair in ((1e12, "T"), (1e9, "B"), (1e6, "M")) if value >= pair[0])
    return f"{value / factor:.3g} {prefix}"


def tables() -> str:
    """Losses; the best split of budgets; ternary models of the bytes of 16-bit ones."""
    losses = [
        [count(n), *(marked(f"{TERNARY.loss(n, d):.3f} / {FLOAT.loss(n, d):.3f}", n, d) for d in TOKENS)]
        for n in SIZES
    ]  # fmt: skip
    splits = []
    for flops in BUDGETS:
        for law in (TERNARY, FLOAT):
            n, d = law.optimum(flops)
            splits.append([f"{flops:g}", law.name, count(n), count(d), marked(f"{law.loss(n, d):.3f}", n, d)])
    matches = []
    for n, d in MATCHED:
        loss, larger = FLOAT.loss(n, d), n * 16 / TQ2_0_BITS
        needed = TERNARY.tokens(loss, larger)
        said = (
            f"none: not below {TERNARY.best_loss(larger):.3f}"
            if needed is None
            else marked(count(needed), larger, needed)
        )
        matches.append([f"{count(n)}, {count(d)}", f"{loss:.3f}", count(larger), said])
    return "\n".join([
        "Loss, ternary / 16 bits (* outside of what was fitted: an extrapolation):\n",
        report.markdown(["parameters", *(f"{count(d)} tokens" for d in TOKENS)], losses),
        "The best split of a budget:\n",
        report.markdown(["FLOPs", "model", "parameters", "tokens", "loss"], splits, left=2),
        "Ternary models of the bytes of a 16-bit one (TQ2_0), and the tokens that they need for its loss:\n",
        report.markdown(["16 bits: parameters, tokens", "loss", "ternary parameters", "tokens"], matches),
    ])  # fmt: skip


@report_errors
def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--update", type=Path, metavar="FILE", help="put the tables between their marks in this file")
    args = parser.parse_args()
    print(tables())
    if args.update:
        report.replace_section(args.update, "scaling", tables())
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

"""``gguf-itq3s plan --scaling``: what the scaling laws of :mod:`.scaling` say of a model, a text or a budget."""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from gguf import GGML_QUANT_SIZES
from gguf import GGMLQuantizationType as Type

from ..base import report
from ..base.errors import UserError, output_error
from . import scaling
from .scaling import FLOAT, TERNARY, Law

#: What a ternary model is stored in, for comparisons at equal bytes; the float one takes 16 bits a weight.
_TYPES: Final = (Type.TQ2_0, Type.TQ1_0)
_FLOAT_BITS: Final = 16.0
#: The table of a command that is given nothing: sizes and texts within what was fitted, and somewhat beyond.
GRID_PARAMETERS: Final = (99e6, 390e6, 1.1e9, 3.9e9, 8e9)
GRID_TOKENS: Final = (10e9, 50e9, 150e9, 1.2e12)
#: Stands behind what is outside of the fit.
MARK: Final = "*"


def bits(qtype: Type) -> float:
    """Bits a weight takes in a type."""
    block, size = GGML_QUANT_SIZES[qtype]
    return 8 * size / block


def parse_count(text: str) -> float:
    """The number that ``1.1B``, ``99M``, ``1.2T``, ``3e9`` or a plain number stands for.

    Raises:
        ValueError: it is none of these.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d*)?|\.\d+)(e[+-]?\d{1,3})?\s*([kMGBT]?)\s*", text, re.IGNORECASE)
    if not match:
        raise ValueError(f"{text!r} is not a number; write 1.1B, 150M or 3e9")
    factors = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "b": 1e9, "t": 1e12}
    return float(match[1] + (match[2] or "")) * factors[match[3].lower()]


def _between(bounds: tuple[float, float]) -> Callable[[str], float]:
    def parse(argument: str) -> float:
        try:
            value = parse_count(argument)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None
        if not bounds[0] <= value <= bounds[1]:
            raise argparse.ArgumentTypeError(f"{argument!r} is not within {bounds[0]:g} to {bounds[1]:g}")
        return value

    return parse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``plan --scaling``."""
    group = parser.add_argument_group(
        "scaling law",
        "Loss of ternary and 16-bit models by the fits of the TriTera paper. Give two of --params (or a folder), "
        "--tokens and --flops; --flops alone gives the best split; nothing gives a table.",
    )
    group.add_argument("--scaling", action="store_true", help="ask the scaling law; the folder may be left out")
    # Ternary models of equal bytes have ten times the parameters, which have to be within the law's bounds too.
    least, most = scaling.PARAMETERS
    group.add_argument("--params", type=_between((least, most / 100)), metavar="N", help="parameters: 1.1B, 99M")
    group.add_argument("--tokens", type=_between(scaling.TOKENS), metavar="D", help="tokens of training: 150B, 1.2T")
    group.add_argument("--flops", type=_between(scaling.BUDGET), metavar="C", help="budget of training, 6 N D: 1e21")
    group.add_argument("--plot", type=Path, metavar="PNG", help="draw a picture of the laws (needs matplotlib)")


def consult(parameters: float | None, tokens: float | None, flops: float | None) -> dict[str, Any]:
    """What the laws say.

    Args:
        parameters: of the model, without embeddings.
        tokens: of its training.
        flops: of its training, ``6 N D``; gives the third where one of the other two is there.

    Returns:
        ``laws`` and ``fitted`` (the range); ``optimum`` (law -> parameters, tokens, loss, fitted) if there is a budget;
        ``parameters``, ``tokens``, ``losses`` (law -> loss), ``fitted_there`` and ``matches`` (see :func:`matches`) if
        parameters and tokens are known; ``grid`` (see :func:`grid`) if nothing is given.

    Raises:
        UserError: one number alone, all three, or numbers beyond what the laws take.
    """
    laws = (TERNARY, FLOAT)
    least, most = scaling.FITTED_PARAMETERS
    result: dict[str, Any] = {
        "laws": {law.name: {"formula": str(law), "r_squared": law.r_squared} for law in laws},
        "fitted": {"parameters": [least, most], "tokens": scaling.FITTED_TOKENS},
    }
    if parameters is None and tokens is None and flops is None:
        return result | {"grid": grid()}
    if flops is not None and parameters is not None and tokens is not None:
        raise UserError("--flops", "contradicts --params and --tokens, which give it", "leave one of the three out")
    if flops is None and (parameters is None or tokens is None):
        missing = "--params" if parameters is None else "--tokens"
        raise UserError(missing, "is not given", "give two of --params, --tokens and --flops, or --flops alone")
    try:
        if flops is not None:
            result |= {"flops": flops, "optimum": {law.name: _optimum(law, flops) for law in laws}}
            if parameters is not None:
                tokens = flops / scaling.FLOPS / parameters
            elif tokens is not None:
                parameters = flops / scaling.FLOPS / tokens
        if parameters is not None and tokens is not None:
            result |= {
                "parameters": parameters,
                "tokens": tokens,
                "flops": scaling.FLOPS * parameters * tokens,
                "losses": {law.name: law.loss(parameters, tokens) for law in laws},
                "fitted_there": scaling.fitted(parameters, tokens),
                "matches": matches(parameters, tokens),
            }
    except ValueError as error:
        raise UserError("--scaling", str(error), "give other numbers") from None
    return result


def grid() -> list[dict[str, Any]]:
    """Losses over :data:`GRID_PARAMETERS` and :data:`GRID_TOKENS`: parameters, tokens, losses (by law), fitted."""
    return [
        {
            "parameters": n, "tokens": d, "losses": {law.name: law.loss(n, d) for law in (TERNARY, FLOAT)},
            "fitted": scaling.fitted(n, d),
        }
        for n in GRID_PARAMETERS
        for d in GRID_TOKENS
    ]  # fmt: skip


def _optimum(law: Law, flops: float) -> dict[str, Any]:
    parameters, tokens = law.optimum(flops)
    return {
        "parameters": parameters, "tokens": tokens, "loss": law.loss(parameters, tokens),
        "fitted": scaling.fitted(parameters, tokens),
    }  # fmt: skip


def matches(parameters: float, tokens: float) -> list[dict[str, Any]]:
    """Ternary models with the loss of a 16-bit one.

    Args:
        parameters: of the 16-bit model.
        tokens: of its training.

    Returns:
        for each way to choose them: ``how``, ``parameters`` and ``tokens`` of the ternary model (None: no number of
        them is enough), ``floor`` (the loss it approaches with ever more of what was asked for), ``fitted``, and
        ``bytes`` (type -> bytes of its weights over those of the 16-bit model's).
    """
    loss = FLOAT.loss(parameters, tokens)

    def row(how: str, n: float | None, d: float | None, floor: float) -> dict[str, Any]:
        known = n is not None and d is not None
        return {
            "how": how, "parameters": n, "tokens": d, "floor": floor,
            "fitted": scaling.fitted(n, d) if n is not None and d is not None else None,
            "bytes": {q.name: n / parameters * bits(q) / _FLOAT_BITS for q in _TYPES} if known and n else None,
        }  # fmt: skip

    sizes = {"equal parameters": parameters}
    sizes |= {f"equal bytes, {q.name}": parameters * _FLOAT_BITS / bits(q) for q in _TYPES}
    rows = [row(how, n, TERNARY.tokens(loss, n), TERNARY.best_loss(n)) for how, n in sizes.items()]
    n = TERNARY.parameters(loss, tokens)
    return [*rows, row("equal tokens", n, tokens, TERNARY.floor + TERNARY.of_tokens / (tokens / 1e9) ** TERNARY.b)]


def number(value: float) -> str:
    """A count in three digits: 1.1e9 -> ``1.1 B``."""
    for factor, prefix in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if value >= factor:
            scaled = value / factor
            return f"{scaled:.3g} {prefix}" if scaled < 1000 else f"{scaled:.2g} {prefix}"
    return f"{value:.3g}"


def _marked(text: str, within: bool) -> str:
    return text if within else text + MARK


def grid_rows(rows: Sequence[Mapping[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """Header and rows of the table of :func:`grid`: a row for each size, loss of ternary / 16 bits by tokens."""
    tokens = list(dict.fromkeys(row["tokens"] for row in rows))
    lines = []
    for n in dict.fromkeys(row["parameters"] for row in rows):
        cells = [
            _marked(f"{row['losses'][TERNARY.name]:.3f} / {row['losses'][FLOAT.name]:.3f}", row["fitted"])
            for row in rows
            if row["parameters"] == n
        ]
        lines.append([number(n), *cells])
    return ["parameters", *(f"{number(d)} tokens" for d in tokens)], lines


def optimum_rows(flops: float, optimum: Mapping[str, Mapping[str, Any]]) -> list[list[str]]:
    """Rows of budget, model, parameters, tokens, tokens a parameter, loss."""
    return [
        [
            f"{flops:.3g}", name, number(best["parameters"]), number(best["tokens"]),
            f"{best['tokens'] / best['parameters']:.3g}", _marked(f"{best['loss']:.3f}", best["fitted"]),
        ]
        for name, best in optimum.items()
    ]  # fmt: skip


OPTIMUM_HEADER: Final = ("FLOPs", "model", "parameters", "tokens", "tokens/parameter", "loss")
MATCH_HEADER: Final = ("ternary model with", "parameters", "tokens", *(f"bytes, {q.name}" for q in _TYPES))


def match_rows(rows: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """Rows of what :func:`matches` gives."""
    lines = []
    for row in rows:
        if row["bytes"] is None:
            missing = f"none: not below {row['floor']:.3f}"
            n = number(row["parameters"]) if row["parameters"] is not None else missing
            d = number(row["tokens"]) if row["tokens"] is not None else missing
            lines.append([row["how"], n, d, *("-" for _ in _TYPES)])
        else:
            shares = [f"{row['bytes'][q.name]:.2f}" for q in _TYPES]
            lines.append(
                [row["how"], number(row["parameters"]), _marked(number(row["tokens"]), row["fitted"]), *shares]
            )
    return lines


def text(result: Mapping[str, Any]) -> str:
    """What :func:`consult` returned, as tables."""
    least, most = result["fitted"]["parameters"]
    lines = [f"{name}: {law['formula']}, R^2 {law['r_squared']}" for name, law in result["laws"].items()]
    lines += [
        "N in millions of parameters without embeddings, D in billions of tokens; the TriTera paper's fits",
        f"{MARK} outside of what was fitted ({number(least)} to {number(most)} parameters, up to "
        f"{number(result['fitted']['tokens'])} tokens): an extrapolation",
    ]
    if "grid" in result:
        lines += ["", "loss, ternary / 16 bits", report.table(*grid_rows(result["grid"]))]
    if "losses" in result:
        n, d = number(result["parameters"]), number(result["tokens"])
        lines += ["", f"{n} parameters, {d} tokens, {result['flops']:.3g} FLOPs: loss"]
        within = result["fitted_there"]
        lines += [f"  {name} {_marked(f'{loss:.3f}', within)}" for name, loss in result["losses"].items()]
        lines += [
            "", f"as good as the 16-bit model ({result['losses'][FLOAT.name]:.3f}), its bytes as 1",
            report.table(MATCH_HEADER, match_rows(result["matches"])),
        ]  # fmt: skip
    if "optimum" in result:
        lines += ["", "least loss of the budget"]
        lines += [report.table(OPTIMUM_HEADER, optimum_rows(result["flops"], result["optimum"]))]
    return "\n".join(lines)


def plot(path: Path, result: Mapping[str, Any] | None = None) -> None:
    """Draw loss over bytes and loss over the budget; dashed where the laws are extrapolated.

    Args:
        path: PNG file to write.
        result: of :func:`consult`; what it has of a model or a budget is marked.

    Raises:
        UserError: matplotlib is not installed, or the file cannot be written.
    """
    report.require_matplotlib()
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (by_bytes, by_flops) = plt.subplots(1, 2, figsize=(11, 4.5))
    stored = {
        TERNARY: ("crimson", bits(Type.TQ2_0), "ternary (TQ2_0)"), FLOAT: ("steelblue", _FLOAT_BITS, "16 bits"),
    }  # fmt: skip

    def draw(axis: Any, xs: Sequence[float], ys: Sequence[float], within: Sequence[bool], **style: Any) -> None:
        axis.plot(xs, ys, linestyle="--", linewidth=1, alpha=0.7, color=style["color"])
        axis.plot(xs, [y if w else math.nan for y, w in zip(ys, within, strict=True)], linewidth=2.5, **style)

    stored_bytes = [10 ** (7.4 + 0.05 * i) for i in range(71)]
    for law, (colour, width, label) in stored.items():
        sizes = [8 * size / width for size in stored_bytes]
        for tokens in (15e9, scaling.FITTED_TOKENS):
            losses = [law.loss(n, tokens) for n in sizes]
            draw(
                by_bytes, stored_bytes, losses, [scaling.fitted(n, tokens) for n in sizes], color=colour,
                label=label if tokens == scaling.FITTED_TOKENS else None,
            )  # fmt: skip
            by_bytes.annotate(
                f"{number(tokens)} tokens", (stored_bytes[-1], losses[-1]), color=colour, fontsize=7, ha="right",
                xytext=(0, -10 if law is TERNARY else 4), textcoords="offset points",
            )  # fmt: skip
    by_bytes.set(xscale="log", xlabel="bytes of the matrices", ylabel="loss (nats a token)")
    by_bytes.set_title("equal bytes, by tokens of training", fontsize=10)
    budgets = [10 ** (18 + 0.05 * i) for i in range(121)]
    for law, (colour, _, _) in stored.items():
        best = [_optimum(law, c) for c in budgets]
        draw(
            by_flops, budgets, [b["loss"] for b in best], [b["fitted"] for b in best], color=colour, label=law.name
        )  # fmt: skip
        for c in (1e20, 1e21, 1e22, 1e23):
            n, d = law.optimum(c)
            by_flops.plot(c, law.loss(n, d), "|", color=colour, markersize=10)
            by_flops.annotate(
                f"{number(n)} / {number(d)}", (c, law.loss(n, d)), color=colour, fontsize=7,
                xytext=(4, 8) if law is TERNARY else (-4, -14), textcoords="offset points",
                ha="left" if law is TERNARY else "right",
            )  # fmt: skip
    by_flops.set(xscale="log", xlabel="FLOPs of training", ylabel="loss (nats a token)")
    by_flops.set_title("best split of a budget: parameters / tokens", fontsize=10)
    if result and "losses" in result:
        for law, (colour, width, _) in stored.items():
            by_bytes.plot(result["parameters"] * width / 8, result["losses"][law.name], "o", color=colour)
    if result and "optimum" in result:
        for law, (colour, _, _) in stored.items():
            by_flops.plot(result["flops"], result["optimum"][law.name]["loss"], "o", color=colour)
    for axis in (by_bytes, by_flops):
        axis.plot([], [], "--", linewidth=1, color="grey", label="extrapolated")
        axis.grid(alpha=0.3)
        axis.legend(fontsize=8)
    figure.tight_layout()
    try:
        figure.savefig(path, dpi=110, metadata={"Software": None})
    except OSError as error:
        raise output_error(path, error) from None
    except ValueError as error:  # a suffix that matplotlib does not know
        raise UserError(path, str(error), "give the picture a name that ends with .png") from None
    finally:
        plt.close(figure)

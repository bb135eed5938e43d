"""Plots of the evaluation: a measure against bits per weight, with the Pareto front."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from ..codec.family import FAMILY

#: Colours of the trellis types.
OURS: Final = ("crimson", "darkmagenta", "orangered", "hotpink")
_NAMES: Final = {"mean_kld": "mean KL divergence from F16 (nats)", "perplexity": "perplexity"}
#: Types far from the choice that the plots are for, which would squeeze the others: codes for models that were trained
#: ternary, and eight bits.
_LEFT_OUT: Final = ("F16", "TQ1_0", "TQ2_0", "Q8_0")
#: How a file was made -> marker and filling; the first word that the row's description holds.
_MARKERS: Final = (
    ("Fisher", "P", "full"), ("in sequence", "D", "full"), ("calibrated", "*", "full"), ("imatrix", "o", "none"),
    ("mix", "s", "full"), ("pure", "o", "full"),
)  # fmt: skip


def pareto_front(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """The points that no other beats in one coordinate and equals or beats in the other, by ascending first one."""
    front: list[tuple[float, float]] = []
    for x, y in sorted(points):
        if not front or y < front[-1][1]:
            front.append((x, y))
    return front


def shown(results: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows that a plot shows: all but F16, eight bits, the ternary types and the literal ternary code."""
    return [r for r in results if r["type"] not in _LEFT_OUT and "literal" not in r["how"]]


def pareto(results: Sequence[dict[str, Any]], measure: str, path: Path) -> None:
    """Plot a measure of every row against the bits per weight of its file; a legend names the points.

    Args:
        results: rows of the evaluation; F16 is drawn as a line, not a point.
        measure: ``mean_kld`` or ``perplexity``.
        path: PNG file to write.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rows = shown(results)
    if not rows:
        return
    figure, axis = plt.subplots(figsize=(9, 5))
    types = list(dict.fromkeys(r["type"] for r in sorted(rows, key=lambda r: r["file_bits"])))
    palette = [c for i, c in enumerate(plt.get_cmap("tab20").colors) if i not in (6, 7)]  # without the reds: ours
    ours = {row.name: colour for row, colour in zip(FAMILY.values(), OURS, strict=False)}
    others = [name for name in types if name not in ours]
    colours = ours | {name: palette[i % len(palette)] for i, name in enumerate(others)}
    for r in rows:
        _, marker, fill = next(m for m in _MARKERS if m[0] in r["how"])
        axis.errorbar(
            r["file_bits"], r[measure], yerr=r[f"{measure}_error"], fmt=marker, color=colours[r["type"]],
            markersize=10 if marker == "*" else 6, fillstyle=fill,
        )  # fmt: skip
    front = pareto_front([(r["file_bits"], r[measure]) for r in rows])
    axis.step(*zip(*front, strict=True), where="post", color="grey", linewidth=1, zorder=0)
    names = [
        *(axis.plot([], [], "s", color=colours[name], label=name)[0] for name in types),
        *(axis.plot([], [], marker, color="k", fillstyle=fill, label=how)[0] for how, marker, fill in _MARKERS),
        axis.plot([], [], color="grey", linewidth=1, label="Pareto front")[0],
    ]
    if measure == "perplexity" and (f16 := [r for r in results if r["type"] == "F16"]):
        names.append(axis.axhline(f16[0][measure], color="k", linestyle=":", linewidth=1, label="F16"))
    axis.set(xlabel="bits per weight of the file", ylabel=_NAMES[measure], yscale="log", xscale="log")
    ticks = [2, 2.5, 3, 3.5, 4, 4.5, 5]
    axis.set_xticks(ticks, [f"{t:g}" for t in ticks])
    axis.xaxis.minorticks_off()
    axis.grid(alpha=0.3)
    axis.legend(handles=names, fontsize=8, loc="upper left", bbox_to_anchor=(1.01, 1), borderaxespad=0)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)

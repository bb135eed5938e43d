"""Plots of the evaluation: a measure against bits per weight, with the Pareto front."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

_NAMES: Final = {"mean_kld": "mean KL divergence from F16 (nats)", "perplexity": "perplexity, WikiText-2 test"}


def pareto_front(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """The points that no other beats in one coordinate and equals or beats in the other, by ascending first one."""
    front: list[tuple[float, float]] = []
    for x, y in sorted(points):
        if not front or y < front[-1][1]:
            front.append((x, y))
    return front


def pareto(results: Sequence[dict[str, Any]], measure: str, path: Path) -> None:
    """Plot a measure of every row against the bits per weight of its file.

    Args:
        results: rows of the evaluation; F16 is drawn as a line, not a point.
        measure: ``mean_kld`` or ``perplexity``.
        path: PNG file to write.
    """
    rows = [r for r in results if r["type"] != "F16"]
    if not rows:
        return
    figure, axis = plt.subplots(figsize=(8.5, 5.2))
    colours = plt.get_cmap("tab20").colors
    types = list(dict.fromkeys(r["type"] for r in rows))
    front = pareto_front([(r["file_bits"], r[measure]) for r in rows])
    named: set[str] = set()
    for r in rows:
        ours = r["type"] == "ITQ3_S"
        point = (r["file_bits"], r[measure])
        colour = "crimson" if ours else colours[types.index(r["type"]) % len(colours)]
        axis.errorbar(
            *point, yerr=r[f"{measure}_error"], fmt="*" if ours else "o" if r["how"].startswith("pure") else "s",
            markersize=11 if ours else 6, color=colour, markerfacecolor="none" if "imatrix" in r["how"] else None,
            label=None if r["type"] in named else r["type"],
        )  # fmt: skip
        named.add(r["type"])
        if point in front:
            axis.annotate(r["how"], point, fontsize=7, xytext=(6, 3), textcoords="offset points")
    axis.step(*zip(*front, strict=True), where="post", color="grey", linewidth=1, zorder=0, label="Pareto front")
    if measure == "perplexity" and (f16 := [r for r in results if r["type"] == "F16"]):
        axis.axhline(f16[0][measure], color="k", linestyle=":", linewidth=1, label="F16")
    axis.set(xlabel="bits per weight of the file", ylabel=_NAMES[measure], yscale="log", xscale="log")
    ticks = [1.7, 2, 2.5, 3, 3.5, 4, 5, 6, 8]
    axis.set_xticks(ticks, [f"{t:g}" for t in ticks])
    axis.minorticks_off()
    axis.grid(alpha=0.3)
    axis.legend(fontsize=7, title="round: pure, square: mix, hollow: imatrix", title_fontsize=7, ncols=2)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)

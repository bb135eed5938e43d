"""Tables and pictures of measured rows (:meth:`.engine.Evaluation.measure`)."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from ..base import report
from ..codec.family import FAMILY

Result = Mapping[str, Any]
#: A line of a table of ratios: what it is called, the key above the line, the key below.
Ratio = tuple[str, str, str]

#: Colours of the trellis types.
OURS: Final = ("crimson", "darkmagenta", "orangered", "hotpink")
#: How a file was made -> marker; the first that the row's description holds.
_MARKERS: Final = (
    ("Fisher", "P", "--layerwise --fisher"), ("in sequence", "D", "--layerwise"), ("calibrated", "*", "--statistics"),
    ("imatrix", "o", "importance matrix"), ("", "s", "no data"),
)  # fmt: skip
#: Types far from the choice that pictures are for: codes for models that were trained ternary, and eight bits.
_LEFT_OUT: Final = ("F16", "TQ1_0", "TQ2_0", "Q8_0")
DAGGER: Final = "†"


def label(row: Result, older: bool = False) -> str:
    """Type and making, the type in bold where the converter made the file."""
    name = f"**{row['type']}**" if row["command"].startswith("convert") else row["type"]
    return ", ".join(filter(None, (name, row["how"]))) + DAGGER * older


def bits_of(row: Result) -> float:
    """What a row is to be compared by: bits of the layers where the rest stays in F16, else of all matrices."""
    return float(row["made"]["layer_bits" if row["how"].startswith("layers") else "tensor_bits"])


def quality(rows: Sequence[Result], older: Callable[[Result], bool] = lambda row: False) -> str:
    """KL divergence, agreement and perplexity on every text, sizes, time and memory of making, the fewest bits last.

    Args:
        rows: of the same texts.
        older: whether a row gets a dagger, for having been made otherwise than it would be now.
    """
    texts = list(rows[0]["texts"])
    several = len(texts) > 1
    columns = [(f"{name} {text}" if several else name) for name in ("KLD", "same top, %", "PPL") for text in texts]
    lines = []
    for row in sorted(rows, key=lambda r: (-round(bits_of(r), 3), -r["texts"][texts[0]]["mean_kld"])):
        figures, made = [row["texts"][text] for text in texts], row["made"]
        lines.append([
            label(row, older(row)),
            f"{bits_of(row):.3f}", f"{made['bytes'] / 2**20:.1f}",
            *(f"{f['mean_kld'] + 0.0:.4f} ± {f['mean_kld_error']:.4f}" for f in figures),
            *(f"{100 * f['same_top']:.1f}" for f in figures), *(f"{f['perplexity']:.2f}" for f in figures),
            f"{made['processor'] / 60:.1f}" if "processor" in made else "-",
            f"{made['memory'] / 2**30:.2f}" if "memory" in made else "-", f"`{row['key']}`",
        ])  # fmt: skip
    table = report.markdown(["", "bits", "MiB", *columns, "core minutes", "GiB", "row"], lines)
    dagger = any(DAGGER in line[0] for line in lines)
    return table + f"\n{DAGGER} made by an earlier state of the converter, or with other texts.\n" * dagger


def paired(above: Sequence[float], below: Sequence[float]) -> tuple[float, float]:
    """The ratio of two means over the same windows and its standard error.

    Two rows share their text, so most of what makes a window hard is in both and cancels. The error is the delta
    method's for a ratio estimator: with r the ratio and e_i = above_i - r below_i, the root of n / (n - 1) sum e_i^2,
    over sum below_i (Cochran, Sampling Techniques, 6.3).

    Args:
        above: mean KL divergence of each window of 1 row, nats.
        below: of the other, the same windows.

    Returns:
        The ratio and its standard error; the error of a single window is not a number.

    Raises:
        ValueError: the windows are not as many, there are none, or the divisor is zero.
    """
    if len(above) != len(below) or not above:
        raise ValueError(f"{len(above)} and {len(below)} windows cannot be paired")
    total = math.fsum(below)
    if total == 0:
        raise ValueError("the divisor is zero")
    ratio, count = math.fsum(above) / total, len(above)
    squares = math.fsum((a - ratio * b) ** 2 for a, b in zip(above, below, strict=True))
    return ratio, math.sqrt(count / (count - 1) * squares) / abs(total) if count > 1 else math.nan


def ratios(wanted: Sequence[Ratio], rows: Sequence[Result]) -> str:
    """A table of ratios of mean KL divergence on every text, of the rows that are there; empty without a line."""
    by_key = {row["key"]: row["texts"] for row in rows}
    texts = list(rows[0]["texts"])
    lines = []
    for name, above, below in wanted:
        if above in by_key and below in by_key:
            pairs = [paired(*(by_key[key][text]["windows"] for key in (above, below))) for text in texts]
            lines.append([name, *(f"{value:.3f} ± {error:.3f}" for value, error in pairs)])
    header = texts if len(texts) > 1 else ["ratio"]
    return report.markdown(["mean KLD over that of another row", *header], lines) if lines else ""


def pareto_front(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """The points that no other beats in one coordinate and equals or beats in the other, by ascending first one."""
    front: list[tuple[float, float]] = []
    for x, y in sorted(points):
        if not front or y < front[-1][1]:
            front.append((x, y))
    return front


def picture(panels: Mapping[str, Sequence[Result]], title: str, path: Path) -> None:
    """Plot mean KL divergence on the first text over bits a weight to a PNG file; a legend names the points.

    ``panels`` are rows by the label of their axis; one without rows to show is left out.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    shown = {
        name: [row for row in rows if row["type"] not in _LEFT_OUT and "literal" not in row["how"]]
        for name, rows in panels.items()
    }
    shown = {name: rows for name, rows in shown.items() if rows}
    if not shown:
        return
    every = [row for rows in shown.values() for row in rows]
    text = next(iter(every[0]["texts"]))
    colours = {row.name: colour for row, colour in zip(FAMILY.values(), OURS, strict=False)} | {"mix": "darkorange"}
    palette = [c for i, c in enumerate(plt.get_cmap("tab20").colors) if i not in (6, 7)]  # without the reds: ours
    types = list(dict.fromkeys(row["type"] for row in sorted(every, key=bits_of)))
    others = [name for name in types if name not in colours]
    colours |= {name: palette[i % len(palette)] for i, name in enumerate(others)}
    figure, axes = plt.subplots(1, len(shown), figsize=(4.6 * len(shown) + 2.6, 4.8), squeeze=False)
    used = {}
    for axis, (name, rows) in zip(axes[0], shown.items(), strict=True):
        points = [(bits_of(row), row["texts"][text]["mean_kld"]) for row in rows]
        for row, point in zip(rows, points, strict=True):
            _, marker, how = next(m for m in _MARKERS if m[0] in row["how"])
            used[how] = marker
            error = row["texts"][text]["mean_kld_error"]
            axis.errorbar(*point, yerr=error, fmt=marker, color=colours[row["type"]], markersize=7)
        axis.step(*zip(*pareto_front(points), strict=True), where="post", color="grey", linewidth=1, zorder=0)
        axis.set(xlabel=name, yscale="log")
        axis.grid(alpha=0.3, which="both")
    axes[0][0].set(ylabel=f"mean KL divergence from F16, {text} (nats)")
    names = [axes[0][0].plot([], [], "s", color=colours[name], label="types chosen" if name == "mix" else name)[0]
             for name in types]  # fmt: skip
    names += [axes[0][0].plot([], [], marker, color="k", label=how)[0] for how, marker in used.items()]
    axes[0][-1].legend(handles=names, fontsize=8, loc="upper left", bbox_to_anchor=(1.01, 1), borderaxespad=0)
    figure.suptitle(title, fontsize=11)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)

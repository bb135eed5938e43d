"""Tables and the picture of a real model's rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any, Final

from gguf_itq3s.base import report
from gguf_itq3s.codec.family import FAMILY
from gguf_itq3s.evaluate import ratio
from gguf_itq3s.evaluate.plots import OURS, pareto_front

Result = dict[str, Any]

#: What was to be shown, as ratios of mean KL divergence over the same windows.
RATIOS: Final[tuple[ratio.Ratio, ...]] = (
    ("ITQ3_S / IQ3_S, both without data", "itq3_s", ("iq3_s",)),
    ("ITQ3_S / Q3_K, both without data", "itq3_s", ("q3_k",)),
    ("ITQ3_S, norms folded / as they are", "itq3_s-folded", ("itq3_s",)),
    ("ITQ3_S, `--equalize` without text / no data", "itq3_s-equalize", ("itq3_s",)),
    ("ITQ3_S `--imatrix`, equalized / not", "itq3_s-imatrix", ("itq3_s-imatrix-plain",)),
    ("ITQ3_S `--imatrix` / IQ3_S, imatrix", "itq3_s-imatrix", ("iq3_s-imatrix",)),
    ("ITQ3_S `--imatrix` / Q3_K, imatrix", "itq3_s-imatrix", ("q3_k-imatrix",)),
    ("ITQ3_S `--calibrate` / ITQ3_S, no data", "itq3_s-calibrate", ("itq3_s",)),
    ("ITQ3_S `--calibrate` / IQ3_S, imatrix", "itq3_s-calibrate", ("iq3_s-imatrix",)),
    ("ITQ3_S `--calibrate --fisher` / IQ3_S, imatrix", "itq3_s-fisher", ("iq3_s-imatrix",)),
    ("mix of ITQ3_S `--calibrate --fisher` / mix of IQ3_S, imatrix", "mix-itq3_s-fisher", ("mix-iq3_s-imatrix",)),
    ("ITQ2_S `--imatrix` / IQ2_XXS, imatrix", "itq2_s-imatrix", ("iq2_xxs-imatrix",)),
    ("ITQ2_S `--calibrate --fisher` / IQ2_XXS, imatrix", "itq2_s-fisher", ("iq2_xxs-imatrix",)),
    ("ITQ2_S `--calibrate --fisher` / Q2_K, imatrix", "itq2_s-fisher", ("q2_k-imatrix",)),
    ("ITQ3_N `--calibrate --fisher` / Q3_K_S, imatrix", "itq3_n-fisher", ("q3_k-imatrix",)),
    ("ITQ3_N `--calibrate --fisher` / IQ4_NL, imatrix", "itq3_n-fisher", ("iq4_nl-imatrix",)),
    ("mix of ITQ3_N `--calibrate --fisher` / mix of Q3_K_S, imatrix", "mix-itq3_n-fisher", ("mix-q3_k_s-imatrix",)),
    ("mix of ITQ3_N `--calibrate --fisher` / mix of IQ4_NL, imatrix", "mix-itq3_n-fisher", ("mix-iq4_nl-imatrix",)),
    ("`--target-bpw 2.7 --calibrate --fisher` / mix of Q2_K, imatrix", "mix-bpw-2.7", ("mix-q2_k-imatrix",)),
    *(
        (
            f"`--target-bpw {bits:g} --calibrate --fisher` / mix of IQ4_XS, imatrix",
            f"mix-bpw-{bits:g}",
            ("mix-iq4_xs-imatrix",),
        )
        for bits in (3.85, 4.3)
    ),
)
#: Marker of a point by what its row was made with; the first that the row's key holds.
_MARKERS: Final = (
    ("fisher", "P", "--calibrate --fisher"), ("bpw", "P", "--calibrate --fisher"), ("calibrate", "D", "--calibrate"),
    ("imatrix", "o", "importance matrix"), ("", "s", "no data"),
)  # fmt: skip
_DAGGER: Final = "†"


def _whole(row: Result) -> bool:
    """Whether embedding and output are quantized too."""
    return str(row["key"]).startswith("mix-")


def _bits(row: Result) -> float:
    """What the row is to be compared by: bits of the layers, or of all matrices where all are quantized."""
    return float(row["made"]["tensor_bits" if _whole(row) else "layer_bits"])


def _label(row: Result) -> str:
    made = row["how"] + _DAGGER * row["older"]
    return f"**{row['type']}**, {made}" if row["maker"] == "package" else f"{row['type']}, {made}"


def older(rows: Sequence[Result]) -> str:
    """What a dagger in a table of these rows says; empty where none has one."""
    return f"{_DAGGER} made by an earlier state of the converter.\n" if any(row["older"] for row in rows) else ""


def quality(rows: Sequence[Result]) -> str:
    """KL divergence, agreement and perplexity on every text, the fewest bits last."""
    if not rows:
        return ""
    texts = list(rows[0]["texts"])
    header = ["", "bits", *(f"KLD {text}" for text in texts), *(f"same top {text}, %" for text in texts),
              *(f"PPL {text}" for text in texts), "row"]  # fmt: skip
    lines = []
    for row in sorted(rows, key=lambda r: (-round(_bits(r), 3), -r["texts"][texts[0]]["mean_kld"])):
        figures = [row["texts"][text] for text in texts]
        lines.append(
            [
                _label(row),
                f"{_bits(row):.3f}",
                *(f"{f['mean_kld']:.4f} ± {f['mean_kld_error']:.4f}" for f in figures),
                *(f"{100 * f['same_top']:.1f}" for f in figures),
                *(f"{f['perplexity']:.3f}" for f in figures),
                f"`{row['key']}`",
            ]
        )
    return report.markdown(header, lines)


def making(rows: Sequence[Result]) -> str:
    """Size of every file, and what making it took."""

    def minutes(row: Result, key: str) -> str:
        return f"{row['made'][key] / 60:.1f}" if key in row["made"] else "-"

    lines = [
        [
            _label(row), f"{row['made']['bytes'] / 2**20:.0f}", f"{row['made']['file_bits']:.3f}",
            minutes(row, "processor"), minutes(row, "seconds"),
            f"{row['made']['memory'] / 2**30:.2f}" if "memory" in row["made"] else "-", f"`{row['key']}`",
        ]
        for row in rows
    ]  # fmt: skip
    header = ["", "MiB", "bits a weight, file", "core minutes", "minutes", "peak memory, GiB", "row"]
    return report.markdown(header, lines)


def ratios(rows: Sequence[Result]) -> str:
    """Ratios of rows on every text, with paired errors; empty if no two rows of one are there."""
    if not rows:
        return ""
    by_text = {text: {row["key"]: row["texts"][text] for row in rows} for text in rows[0]["texts"]}
    return ratio.markdown(RATIOS, by_text)


def speed(taken: Mapping[str, Mapping[str, Sequence[float]]], over: Sequence[str]) -> str:
    """Median of the ratios within a round, with their range.

    Args:
        taken: ``prompt`` and ``generation`` -> label -> tokens a second of each round.
        over: labels of the types that are divided by.
    """
    kinds = list(taken)
    lines = []
    for label in taken[kinds[0]]:
        cells = []
        for kind in kinds:
            for base in over:
                each = [a / b for a, b in zip(taken[kind][label], taken[kind][base], strict=True)]
                cells.append(f"{median(each):.2f} ({min(each):.2f} to {max(each):.2f})")
        lines.append([label, *cells])
    return report.markdown(["layers in", *(f"{kind} / {base}" for kind in kinds for base in over)], lines)


def summary(rows: Sequence[Result], keys: Sequence[str]) -> str:
    """The short table of the README: rows that are there, of ``keys``, the best last."""
    if not (chosen := [row for row in rows if row["key"] in keys]):
        return ""
    texts = list(chosen[0]["texts"])
    chosen.sort(key=lambda row: -row["texts"][texts[0]]["mean_kld"])
    lines = [
        [_label(row), f"{_bits(row):.3f}", *(f"{row['texts'][text]['mean_kld']:.3f}" for text in texts),
         f"{100 * row['texts'][texts[0]]['same_top']:.1f}"]
        for row in chosen
    ]  # fmt: skip
    return report.markdown(["", "bits", *(f"KLD {text}" for text in texts), f"same top {texts[0]}, %"], lines)


def picture(rows: Sequence[Result], title: str, path: Path) -> None:
    """Two panels, mean KL divergence on the first text over bits a weight: layers alone, and whole files.

    Args:
        rows: at least one.
        title: of the model.
        path: PNG file to write.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    text = next(iter(rows[0]["texts"]))
    groups = [
        ("the layers' bits (embedding and output in F16)", [row for row in rows if not _whole(row)]),
        ("bits of all matrices (mixes, as whole files)", [row for row in rows if _whole(row)]),
    ]
    # A panel of one point compares nothing.
    groups = [group for group in groups if len(group[1]) > 1] or [group for group in groups if group[1]]
    rows = [row for _, members in groups for row in members]
    figure, axes = plt.subplots(1, len(groups), figsize=(4.6 * len(groups) + 1.8, 4.6), squeeze=False)
    ours = {row.name: colour for row, colour in zip(FAMILY.values(), OURS, strict=False)}
    types = list(dict.fromkeys(row["type"] for row in sorted(rows, key=lambda r: (r["type"] not in ours, r["type"]))))
    palette = [c for i, c in enumerate(plt.get_cmap("tab20").colors) if i not in (6, 7)]  # without the reds: ours
    colours = {**ours, "mix": "darkorange"}
    others = [name for name in types if name not in colours]
    colours |= {name: palette[i % len(palette)] for i, name in enumerate(others)}
    used = {}
    for axis, (label, members) in zip(axes[0], groups, strict=True):
        points = []
        for row in members:
            _, marker, how = next(m for m in _MARKERS if m[0] in row["key"])
            used[how] = marker
            figures = row["texts"][text]
            points.append((_bits(row), figures["mean_kld"]))
            axis.errorbar(
                *points[-1], yerr=figures["mean_kld_error"], fmt=marker, color=colours[row["type"]], markersize=7,
                fillstyle="none" if "folded" in row["key"] or "plain" in row["key"] else "full",
            )  # fmt: skip
        axis.step(*zip(*pareto_front(points), strict=True), where="post", color="grey", linewidth=1, zorder=0)
        axis.set(xlabel=label, yscale="log")
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

#!/usr/bin/env python3
"""Draw docs/format.svg: what happens to a block of weights, from real ones of the bundled model."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from safetensors import safe_open

matplotlib.use("svg")
import matplotlib.pyplot as plt
from matplotlib.patches import FancyArrow, Rectangle

from gguf_itq3s.codec.blocks import decode_blocks, encode_blocks, unpack
from gguf_itq3s.codec.formats import ITQ3_S_LEVELS as LEVELS
from gguf_itq3s.codec.transform import fwht_columns

ROOT = Path(__file__).resolve().parents[2]
GRIDS = ["#1b6ca8", "#d1495b", "#3a7d44", "#c98a00"]
INK, PALE = "#333333", "#9aa5b1"


def block_with_an_outlier(model: Path) -> np.ndarray:
    """float32 (256,): the block of the model's largest weight relative to its block's RMS."""
    best, chosen = 0.0, np.zeros(256, dtype=np.float32)
    with safe_open(model / "model.safetensors", framework="np") as tensors:
        for name in tensors.keys():  # noqa: SIM118 (not a mapping)
            weights = tensors.get_tensor(name).astype(np.float32)
            if weights.ndim != 2 or weights.shape[1] % 256 or "embed" in name:
                continue
            blocks = weights.reshape(-1, 256)
            peaks = np.abs(blocks).max(axis=1) / np.sqrt(np.square(blocks).mean(axis=1))
            if peaks.max() > best:
                best, chosen = float(peaks.max()), blocks[peaks.argmax()]
    return chosen


def stems(axes: Any, values: np.ndarray, title: str, colours: list[str], limit: float) -> None:
    """One vertical line for each value, in its colour."""
    positions = np.arange(values.size)
    for colour in dict.fromkeys(colours):
        chosen = np.array([c == colour for c in colours])
        # One path for all bars of a colour.
        x, y = np.repeat(positions[chosen], 3), np.zeros(3 * chosen.sum())
        y[1::3] = values[chosen]
        axes.plot(x, y, color=colour, linewidth=0.9)
    axes.set_title(title, fontsize=9, color=INK)
    axes.set_ylim(-limit, limit)
    axes.set_xlim(-1, values.size)
    axes.set_xticks([])
    axes.set_yticks([])
    for side in ("top", "right", "bottom", "left"):
        axes.spines[side].set_color(PALE)


def draw_levels(axes: Any) -> None:
    """The sixteen levels on a line, one height for each grid."""
    for level, grid in zip(LEVELS.tolist(), list(range(4)) * 4, strict=True):
        axes.plot([level], [-grid], "o", color=GRIDS[grid], markersize=7)
        axes.text(level, -grid + 0.28, str(level), ha="center", va="bottom", fontsize=7, color=GRIDS[grid])
    for grid, colour in enumerate(GRIDS):
        axes.plot([-66, 66], [-grid, -grid], color=colour, linewidth=0.6, zorder=0)
        axes.text(-70, -grid, f"c1 c0 = {grid >> 1} {grid & 1}", ha="right", va="center", fontsize=8, color=colour)
    axes.set_xlim(-92, 68)
    axes.set_ylim(-3.5, 1.0)
    axes.axis("off")
    axes.set_title(
        "16 levels in 4 grids: selector bits choose the grid, the symbol the level in it", fontsize=9, color=INK
    )


def draw_layout(axes: Any) -> None:
    """The 100 bytes to scale."""
    start = 0
    for size, text, colour in (
        (64, "qs: 256 symbols of 2 bits\n64 bytes", "#dbe7f3"),
        (32, "sel: 256 selector bits\n32 bytes", "#f6dfe2"),
        (2, "d", "#dcebdd"),
        (2, "z", "#f5e8cc"),
    ):
        axes.add_patch(Rectangle((start, 0), size, 1, facecolor=colour, edgecolor=INK, linewidth=0.8))
        axes.text(start + size / 2, 0.5, text, ha="center", va="center", fontsize=8 if size > 2 else 7, color=INK)
        start += size
    axes.set_xlim(-0.5, 100.5)
    axes.set_ylim(-0.1, 1.1)
    axes.axis("off")
    axes.set_title("one block: 100 bytes for 256 weights, 3.125 bits each", fontsize=9, color=INK)


def draw(weights: np.ndarray) -> plt.Figure:
    """The figure, for float32 (256,) weights."""
    rotated = fwht_columns(weights[:, None].copy())[:, 0] / np.float32(16)
    blocks = encode_blocks(weights[None])
    indices, _, d, _ = unpack(blocks)
    coded = LEVELS.astype(np.float32)[indices[:, 0]] * np.float32(d[0]) / 32
    decoded = decode_blocks(blocks)[0]
    limit = float(np.abs(weights).max()) * 1.08

    figure = plt.figure(figsize=(10, 5.6))
    grid = figure.add_gridspec(3, 4, height_ratios=[1.25, 1.35, 0.55], hspace=0.42, wspace=0.34)
    panels = [figure.add_subplot(grid[0, column]) for column in range(4)]
    stems(panels[0], weights, "256 weights w of a row", [INK] * 256, limit)
    stems(panels[1], rotated, "rotated: x = H w", [INK] * 256, limit)
    stems(panels[2], coded, "coded: a path through the trellis", [GRIDS[i] for i in indices[:, 0] & 3], limit)
    stems(panels[3], decoded, "decoded: H v", [INK] * 256, limit)
    for left in panels[:3]:
        box = left.get_position()
        arrow = FancyArrow(
            box.x1 + 0.008, (box.y0 + box.y1) / 2, 0.026, 0, width=0.004, head_width=0.022, head_length=0.009,
            length_includes_head=True, color=INK, transform=figure.transFigure,
        )  # fmt: skip
        figure.add_artist(arrow)
    draw_levels(figure.add_subplot(grid[1, :]))
    draw_layout(figure.add_subplot(grid[2, :]))
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=ROOT / "models" / "demo-llama")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "format.svg")
    args = parser.parse_args()
    # The same file from the same input.
    plt.rcParams.update({"svg.hashsalt": "format", "svg.fonttype": "none", "font.family": "sans-serif"})
    figure = draw(block_with_an_outlier(args.model))
    metadata = {"Date": None} if args.out.suffix == ".svg" else {}
    figure.savefig(args.out, bbox_inches="tight", metadata=metadata, facecolor="white")


if __name__ == "__main__":
    main()

"""Plots of the ablations: weight distributions before and after the rotation, KL divergence by FWHT block and code."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from safetensors.numpy import load_file

from gguf_itq3s.checkpoint import shards
from gguf_itq3s.checkpoint.validation import check_folder
from gguf_itq3s.codec.transform import BLOCK
from scripts.ablation import variants
from scripts.ablation.study import row_key
from scripts.ablation.variants import TABLES


def _block_matrices(folder: Path) -> list[np.ndarray]:
    """float32 matrices of the blocks of a Hugging Face folder with Llama's names."""
    found = []
    for path in shards.find(folder, check_folder(folder)).files:
        for name, tensor in load_file(path).items():
            if ".layers." in name and tensor.ndim == 2:
                found.append(tensor.astype(np.float32))
    return found


def distributions(models: dict[str, Path], path: Path) -> None:
    """Histograms of weights over the RMS of their block of 256, before and after the FWHT, one panel a model."""
    figure, axes = plt.subplots(1, len(models), figsize=(4.2 * len(models), 3.4), sharey=True, squeeze=False)
    edges = np.linspace(-10, 10, 161)
    middle = (edges[1:] + edges[:-1]) / 2
    for axis, (name, folder) in zip(axes[0], models.items(), strict=True):
        weights = np.concatenate([m.ravel() for m in _block_matrices(folder)])
        rotated = variants.rotate(weights, BLOCK)
        for label, values in (("before", weights), ("after FWHT", rotated)):
            blocks = values.reshape(-1, BLOCK)
            rms = np.sqrt((blocks**2).mean(axis=1, keepdims=True))
            density, _ = np.histogram((blocks / np.where(rms > 0, rms, 1)).ravel(), bins=edges, density=True)
            axis.step(middle, np.where(density > 0, density, np.nan), where="mid", label=label)
        axis.plot(middle, np.exp(-(middle**2) / 2) / np.sqrt(2 * np.pi), "k:", linewidth=1, label="Gaussian")
        axis.set(title=name, xlabel="weight / RMS of its block", yscale="log", ylim=(1e-6, 1))
        axis.grid(alpha=0.3)
    axes[0][0].set_ylabel("density")
    axes[0][0].legend(fontsize=8)
    _save(figure, path)


def divergences(result: dict[str, Any], path: Path) -> None:
    """Mean KL divergence by FWHT block (trellis and literal ternary) and by code."""
    figure, axes = plt.subplots(1, 2, figsize=(11, 3.8))
    colours = plt.rcParams["axes.prop_cycle"].by_key()["color"]
    for colour, (name, model) in zip(colours, result["models"].items(), strict=False):
        for title, style in (("FWHT block, trellis code", "o-"), ("FWHT block, literal ternary code", "s--")):
            rows = TABLES[title]
            values = [model["rows"][row_key(v, False)]["mean_kld"] for _, v in rows]
            code = "trellis" if "trellis" in title else "literal ternary"
            axes[0].plot(range(len(rows)), values, style, color=colour, label=f"{name}, {code}", markersize=4)
    axes[0].set_xticks(range(len(rows)), [label for label, _ in rows])
    axes[0].set(xlabel="FWHT block", ylabel="mean KLD (nats)", yscale="log")
    axes[0].legend(fontsize=7)
    codes = TABLES["Code"]
    width = 0.8 / len(result["models"])
    for index, (name, model) in enumerate(result["models"].items()):
        rows_of = [model["rows"][row_key(v, False)] for _, v in codes]
        axes[1].bar(
            np.arange(len(codes)) + index * width, [r["mean_kld"] for r in rows_of], width, label=name,
            yerr=[r["mean_kld_error"] for r in rows_of],
        )  # fmt: skip
    axes[1].set_xticks(
        np.arange(len(codes)) + 0.4 - width / 2, [textwrap.fill(label, 12) for label, _ in codes], fontsize=7
    )
    axes[1].set(ylabel="mean KLD (nats)", yscale="log")
    axes[1].legend(fontsize=7)
    for axis in axes:
        axis.grid(alpha=0.3, axis="y")
    _save(figure, path)


def _save(figure: Any, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)

#!/usr/bin/env python3
"""Ablations of the ITQ3_S paper (arXiv 2603.27914) on a model and its two outlier twins.

    scripts/papers/ablation.py models/demo-llama --update scripts/papers/README.md

Rotation, code, scale, zero-point and sub-blocks: each variant is a function of weights to the weights that come back.
Scales and zero-points are rounded to float16 as a file would hold them, so the error of a variant is the error of its
bytes; only the bytes themselves are not made. Every matrix of the blocks is replaced, embedding and output head stay.
Results are remembered, so an interrupted study goes on where it was.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import pairwise
from math import erf, exp, pi, sqrt
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from gguf_itq3s.base import report
from gguf_itq3s.base.errors import positive, report_errors
from gguf_itq3s.codec.formats import ITQ3_S_FORMAT
from gguf_itq3s.codec.ternary import optimal_scales
from gguf_itq3s.codec.transform import BLOCK, FloatArray, fwht_columns
from gguf_itq3s.codec.trellis import Trellis, search
from scripts.papers.reference import Reference, remembered, test_text
from scripts.train.twins import make_twins

#: Scale of the ternary code in units of sigma. The paper names three; the optimum of a Gaussian is the fourth.
TERNARY_SCALES: Final = {"0.798": 0.798, "0.532": 0.532, "0.967": 0.967, "1.224": 1.224}

#: Codes of four subsets by number of states (Ungerboeck 1982, table I; checks in octal), and levels that suit them.
UNGERBOECK: Final = {
    4: Trellis(2, (0o5, 0o2)), 8: Trellis(3, (0o13, 0o04)), 64: Trellis(6, (0o103, 0o024)),
    256: Trellis(8, (0o515, 0o362)),
}  # fmt: skip
_FOUR_SUBSETS: Final = np.array([-63, -44, -33, -24, -20, -12, -7, -2, 2, 7, 12, 20, 24, 33, 44, 63], dtype=np.int8)
_FOUR_RMS: Final = 25.5

_F16_TINY = np.float32(2.0**-24)
_CHUNK = 1024


@dataclass(frozen=True)
class Variant:
    """One way to quantize.

    Attributes:
        rotation: FWHT length, a power of two, or 1 for none. Beyond a row, consecutive rows are joined.
        code: ``ternary``, ``lloyd-max`` (8 levels) or ``trellis``.
        states: states of the trellis, 64 where it has eight subsets; a key of :data:`UNGERBOECK` where it has four.
        subsets: of the trellis, 8 (ITQ3_S) or 4.
        scale: ``ternary``: a key of :data:`TERNARY_SCALES`, or ``searched`` (the least error of each block).
            Others: ``sigma`` (in proportion to the RMS), ``refitted`` (then least squares), ``searched`` (3 starts).
        zero_point: whether the block has a zero-point besides its scale.
        sub_blocks: number of scales in a block: 1 (100 bytes), or 8 (116 bytes).
    """

    rotation: int = BLOCK
    code: str = "trellis"
    states: int = 64
    subsets: int = 8
    scale: str = "searched"
    zero_point: bool = False
    sub_blocks: int = 1

    @property
    def bits_per_weight(self) -> float:
        """3 bits, and float16 scale, zero-point and sub-block scales (the field is there whether or not it is used)."""
        return 3 + 16 * (2 + (self.sub_blocks if self.sub_blocks > 1 else 0)) / BLOCK


@cache
def lloyd_max_levels(count: int) -> tuple[float, ...]:
    """Levels of the Lloyd-Max quantizer of a standard Gaussian (Max 1960, Lloyd 1982), by Lloyd's iteration."""

    def density(x: float) -> float:
        return exp(-x * x / 2) / sqrt(2 * pi)

    levels = np.linspace(-2, 2, count)
    for _ in range(2000):
        edges = [-40.0, *((levels[1:] + levels[:-1]) / 2), 40.0]
        levels = np.array(
            [(density(a) - density(b)) / ((erf(b / sqrt(2)) - erf(a / sqrt(2))) / 2) for a, b in pairwise(edges)]
        )
    return tuple(float(level) for level in levels)


def rotate(flat: FloatArray, length: int) -> FloatArray:
    """Normalised FWHT of consecutive runs of ``length`` weights: float32 (count,) -> (count,); its own inverse."""
    if length <= 1:
        return flat
    columns = fwht_columns(np.ascontiguousarray(flat.reshape(-1, length).T)) * np.float32(1 / np.sqrt(length))
    return np.ascontiguousarray(columns.T).ravel()


def _round_f16(x: FloatArray) -> FloatArray:
    return np.clip(x, -65504, 65504).astype(np.float16).astype(np.float32)


def _group_sum(x: FloatArray, groups: int) -> FloatArray:
    """Sums over the weights of each sub-block: (256, m) -> (groups, m)."""
    return x.reshape(groups, BLOCK // groups, -1).sum(axis=1)


def _spread(x: FloatArray, groups: int) -> FloatArray:
    """A value of each sub-block for every weight: (groups, m) -> (256, m)."""
    return x.repeat(BLOCK // groups, axis=0)


def _scalar_code(y: FloatArray, levels: npt.NDArray[np.float32]) -> FloatArray:
    middle = (levels[1:] + levels[:-1]) / 2
    return levels[np.searchsorted(middle, y)]


def _code(y: FloatArray, variant: Variant) -> FloatArray:
    """Nearest levels of weights in units of sigma; levels in units of sigma too."""
    if variant.code == "lloyd-max":
        return _scalar_code(y, np.array(lloyd_max_levels(8), dtype=np.float32))
    code, levels, rms = ITQ3_S_FORMAT.trellis, ITQ3_S_FORMAT.levels, ITQ3_S_FORMAT.rms_in_levels
    if variant.subsets == 4:
        code, levels, rms = UNGERBOECK[variant.states], _FOUR_SUBSETS, _FOUR_RMS
    unit = np.float32(rms)
    indices, *_ = search(y * unit, code, levels)
    return levels.astype(np.float32)[indices] / unit


def _optimal_ternary_scale(x: FloatArray, groups: int) -> FloatArray:
    """The error-minimising ternary scale of each sub-block, exactly (see ``ternary.optimal_scales``)."""
    length = BLOCK // groups
    return optimal_scales(x.reshape(groups, length, -1).transpose(0, 2, 1))


def _fit(
    x: FloatArray, levels: FloatArray, start: FloatArray, variant: Variant, refit: bool
) -> tuple[FloatArray, FloatArray]:
    """Reconstruction and squared error of the block with levels chosen: float32 (256, m), (m,)."""
    groups = variant.sub_blocks
    scales = start
    offset = np.zeros((1, x.shape[1]), dtype=np.float32)
    for _ in range(2 if variant.zero_point else 1):  # alternate scale and offset: both are least-squares steps
        if refit:
            power = _group_sum(levels * levels, groups)
            fitted = _group_sum((x - offset) * levels, groups) / np.where(power > 0, power, np.float32(1))
            scales = np.where(power > 0, fitted, start)
        if variant.zero_point:
            offset = (x - _spread(scales, groups) * levels).mean(axis=0, keepdims=True)
    scales = _round_f16(scales)
    if variant.zero_point:
        # Stored in units of the block's scale, as ITQ3_S stores z.
        unit = np.maximum(np.abs(scales).max(axis=0, keepdims=True), _F16_TINY)
        offset = _round_f16(offset / unit) * unit
    result = _spread(scales, groups) * levels + offset
    return result, ((x - result) ** 2).sum(axis=0)


def _quantize_columns(x: FloatArray, variant: Variant) -> FloatArray:
    """Blocks of rotated weights to what comes back: float32 (256, m) -> (256, m)."""
    groups = variant.sub_blocks
    mean = x.mean(axis=0, keepdims=True) if variant.zero_point else np.float32(0)
    centred = x - mean
    sigma = np.sqrt(_group_sum(centred * centred, groups) / (BLOCK // groups))
    safe = np.where(sigma > 0, sigma, np.float32(1))
    if variant.code == "ternary":
        if variant.scale == "searched":
            alpha = _optimal_ternary_scale(centred, groups)
        else:
            alpha = sigma * np.float32(TERNARY_SCALES[variant.scale])
        step = _spread(np.where(alpha > 0, alpha, np.float32(1)), groups)
        levels = np.clip(np.rint(centred / step), -1, 1)
        return _fit(x, levels, alpha, variant, refit=False)[0]
    starts = ITQ3_S_FORMAT.starts["default" if variant.scale == "searched" else "fast"]
    best: FloatArray | None = None
    best_error = np.full(x.shape[1], np.inf, dtype=np.float32)
    for start in starts:
        scales = safe * np.float32(start)
        levels = _code((centred / _spread(scales, groups)).astype(np.float32, copy=False), variant)
        result, error = _fit(x, levels, np.where(sigma > 0, scales, np.float32(0)), variant, variant.scale != "sigma")
        better = error < best_error
        best = result if best is None else np.where(better, result, best)
        best_error = np.where(better, error, best_error)
    assert best is not None
    return best


def apply(weights: npt.ArrayLike, variant: Variant) -> FloatArray:
    """Quantize and dequantize a matrix.

    Args:
        weights: (rows, n), converted to float32; its size a multiple of 256 and of ``variant.rotation``.
        variant: how.

    Returns:
        float32 (rows, n).
    """
    matrix = np.ascontiguousarray(weights, dtype=np.float32)
    blocks = rotate(matrix.ravel(), variant.rotation).reshape(-1, BLOCK)
    out = np.empty_like(blocks)
    for start in range(0, blocks.shape[0], _CHUNK):
        part = slice(start, start + _CHUNK)
        out[part] = _quantize_columns(np.ascontiguousarray(blocks[part].T), variant).T
    return rotate(out.ravel(), variant.rotation).reshape(matrix.shape)


def relative_error(weights: npt.ArrayLike, restored: npt.ArrayLike) -> float:
    """Relative squared error ``|W - W'|^2 / |W|^2`` in float64; 0 for a zero matrix."""
    w = np.asarray(weights, dtype=np.float64)
    power = float((w**2).sum())
    return float(((w - np.asarray(restored, dtype=np.float64)) ** 2).sum()) / power if power else 0.0


def excess_kurtosis(x: npt.ArrayLike) -> float:
    """``E[(x - m)^4] / E[(x - m)^2]^2 - 3``; 0 for a Gaussian, and for a constant."""
    centred = np.asarray(x, dtype=np.float64).ravel()
    centred = centred - centred.mean()
    variance = float((centred**2).mean())
    return float((centred**4).mean()) / variance**2 - 3 if variance else 0.0


#: The variants of each table of the study, title -> rows (label, variant).
TABLES: Final[dict[str, tuple[tuple[str, Variant], ...]]] = {
    "FWHT block, trellis code": tuple(
        ("none" if n == 1 else str(n), Variant(rotation=n)) for n in (1, 32, 64, 128, 256, 512)
    ),
    "FWHT block, literal ternary code": tuple(
        ("none" if n == 1 else str(n), Variant(n, "ternary", scale="0.798")) for n in (1, 32, 64, 128, 256, 512)
    ),
    "Code": (
        ("literal ternary", Variant(code="ternary", scale="0.798")),
        ("8 Lloyd-Max levels", Variant(code="lloyd-max")),
        *((f"trellis of four subsets, {n} states", Variant(states=n, subsets=4)) for n in UNGERBOECK),
        ("trellis of eight subsets, 64 states", Variant()),
    ),
    "Scale": (
        *((f"ternary, {s} sigma", Variant(code="ternary", scale=s)) for s in ("0.532", "0.798", "0.967")),
        ("ternary, 1.224 sigma (optimum of a Gaussian)", Variant(code="ternary", scale="1.224")),
        ("ternary, searched for each block", Variant(code="ternary")),
        ("trellis, in proportion to sigma", Variant(scale="sigma")),
        ("trellis, refitted", Variant(scale="refitted")),
        ("trellis, searched", Variant()),
    ),
    "Zero-point and sub-block scales": (
        ("literal ternary", Variant(code="ternary", scale="0.798")),
        ("literal ternary, zero-point", Variant(code="ternary", scale="0.798", zero_point=True)),
        ("literal ternary, 8 sub-blocks", Variant(code="ternary", scale="0.798", sub_blocks=8)),
        ("8 Lloyd-Max levels", Variant(code="lloyd-max")),
        ("8 Lloyd-Max levels, zero-point", Variant(code="lloyd-max", zero_point=True)),
        ("8 Lloyd-Max levels, 8 sub-blocks", Variant(code="lloyd-max", sub_blocks=8)),
        ("trellis", Variant()),
        ("trellis, zero-point", Variant(zero_point=True)),
        ("trellis, 8 sub-blocks", Variant(sub_blocks=8)),
    ),
}
#: The same codes with the RMSNorm gains multiplied into the matrices first.
FOLDED: Final = (
    ("literal ternary", Variant(code="ternary", scale="0.798")),
    ("8 Lloyd-Max levels", Variant(code="lloyd-max")),
    ("trellis, no rotation", Variant(rotation=1)),
    ("trellis", Variant()),
)


def distribution(matrices: dict[str, FloatArray]) -> dict[str, list[float]]:
    """Means over the matrices of each kind: excess kurtosis, then largest magnitude over RMS, before and after FWHT."""
    kinds: dict[str, list[list[float]]] = {}
    for name, weights in matrices.items():
        pair = weights.ravel(), rotate(weights.ravel(), BLOCK)
        largest = [float(np.abs(x).max() / np.sqrt((x.astype(np.float64) ** 2).mean())) for x in pair]
        kinds.setdefault(name.rpartition(".")[2], []).append([*map(excess_kurtosis, pair), *largest])
    return {kind: np.mean(rows, axis=0).tolist() for kind, rows in kinds.items()}


class Study:
    """The variants on one model.

    Args:
        folder: of the model.
        chunks: windows of 512 tokens to score.
        cache: folder of results that are there.
    """

    def __init__(self, folder: Path, chunks: int, cache: Path) -> None:
        self.reference, self.cache = Reference(folder, test_text(), chunks), cache
        self.own = self.reference.matrices()
        self.digest = (chunks, *(path.read_bytes() for path in sorted(folder.glob("*.safetensors"))))

    def measure(self, variant: Variant, folded: bool) -> dict[str, float]:
        """Figures of :meth:`Reference.divergence`, and ``error``, the mean over the matrices of |W - W'|^2 / |W|^2."""
        return dict(remembered(self.cache, partial(self._measure, variant, folded), *self.digest, variant, folded))

    def _measure(self, variant: Variant, folded: bool) -> dict[str, float]:
        gains = self.reference.norm_gains() if folded else {}
        changed, errors = {}, []
        for name, weights in self.own.items():
            # A zero gain would lose its column; such a channel is dead either way.
            gain = np.where(gains[name] == 0, np.float32(1), gains[name]) if name in gains else np.float32(1)
            restored = apply(weights * gain, variant)
            errors.append(relative_error(weights * gain, restored))
            changed[name] = restored / gain
        self.reference.set_matrices(changed)
        return {"error": float(np.mean(errors)), **self.reference.divergence()}


def table(studies: dict[str, Study], rows: Sequence[tuple[str, Variant]], folded: bool = False) -> str:
    """Error, mean KL divergence and perplexity of each variant on each model."""
    measures = (("error", "error", ".4f"), ("mean_kld", "KLD", ".4f"), ("perplexity", "PPL", ".2f"))
    header = ["", "bits", *(f"{name}: {label}" for name in studies for _, label, _ in measures)]
    lines = []
    for label, variant in tqdm(rows, unit="row"):
        found: list[dict[str, Any]] = [study.measure(variant, folded) for study in studies.values()]
        cells = [format(figures[key], style) for figures in found for key, _, style in measures]
        lines.append([label, f"{variant.bits_per_weight:g}", *cells])
    return report.markdown(header, lines)


def tables(models: dict[str, Path], chunks: int, cache: Path) -> str:
    """Everything, as Markdown."""
    studies = {name: Study(folder, chunks, cache) for name, folder in models.items()}
    parts = [f"#### {title}\n\n{table(studies, rows)}" for title, rows in TABLES.items()]
    parts.append(f"#### RMSNorm gains folded into the matrices first\n\n{table(studies, FOLDED, folded=True)}")
    found = [distribution(study.own) for study in studies.values()]
    fields = ("kurtosis before", "kurtosis after", "max/RMS before", "max/RMS after")
    lines = [[kind, *(f"{value:.2f}" for model in found for value in model[kind])] for kind in found[0]]
    header = ["", *(f"{name}: {field}" for name in models for field in fields)]
    parts.append("#### Before and after the FWHT of 256\n\n" + report.markdown(header, lines))
    return "\n".join(parts)


@report_errors
def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="Hugging Face folder of a model with Llama's names")
    parser.add_argument("--chunks", type=positive, default=8, help="windows of 512 tokens (default: %(default)s)")
    parser.add_argument("--work-dir", type=Path, default=Path("build/ablation"), help="twins, results that are there")
    parser.add_argument("--update", type=Path, metavar="FILE", help="put the tables between their marks in this file")
    args = parser.parse_args()
    twins = make_twins(args.model, args.work_dir / "twins")
    models = {"model": args.model, "weight twin": twins[0], "activation twin": twins[1]}
    text = tables(models, args.chunks, args.work_dir / "cache")
    print(text)
    if args.update:
        report.replace_section(args.update, "ablation", text)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

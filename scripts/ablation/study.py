"""The ablations of arXiv 2603.27914 on Hugging Face models: weight error, KL divergence and perplexity of each variant.

Every matrix of the blocks is replaced by what a variant makes of it; embedding and output head stay. Results are
cached by the hash of everything they depend on, so an interrupted study goes on where it was.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

import numpy as np
from tqdm import tqdm

import gguf_itq3s.codec
from gguf_itq3s.base import report
from gguf_itq3s.codec.transform import BLOCK, FloatArray
from scripts.ablation import variants
from scripts.ablation.variants import TABLES, Variant
from scripts.papers.reference import Reference

#: Rows beyond the paper: the same code with the RMSNorm gains multiplied into the matrices first.
FOLDED: Final = (
    ("literal ternary", Variant(code="ternary", states=0, scale="0.798")),
    ("8 Lloyd-Max levels", Variant(code="lloyd-max", states=0)),
    ("trellis, no rotation", Variant(rotation=1)),
    ("trellis", Variant()),
)

Result = dict[str, Any]


def all_variants() -> list[tuple[Variant, bool]]:
    """Every (variant, norms folded) of the study, once."""
    plain = dict.fromkeys(v for rows in TABLES.values() for _, v in rows)
    return [*((v, False) for v in plain), *((v, True) for _, v in FOLDED)]


def row_key(variant: Variant, folded: bool) -> str:
    return variant.key + " folded" * folded


def distribution(matrices: dict[str, FloatArray]) -> Result:
    """Kurtosis and l-infinity norm before and after the FWHT of 256, means over the matrices of each kind.

    Returns:
        kind (the last part of the module name) -> ``kurtosis`` and ``linf`` (largest magnitude over RMS), each a pair
        of before and after.
    """
    kinds: dict[str, list[tuple[FloatArray, FloatArray]]] = {}
    for name, weights in matrices.items():
        rotated = variants.rotate(weights.ravel(), BLOCK)
        kinds.setdefault(name.rpartition(".")[2], []).append((weights.ravel(), rotated))

    def means(pairs: list[tuple[FloatArray, FloatArray]]) -> Result:
        kurtosis = [[variants.excess_kurtosis(x) for x in pair] for pair in pairs]
        linf = [[float(np.abs(x).max() / np.sqrt((x.astype(np.float64) ** 2).mean())) for x in pair] for pair in pairs]
        return {"kurtosis": np.mean(kurtosis, axis=0).tolist(), "linf": np.mean(linf, axis=0).tolist()}

    return {kind: means(pairs) for kind, pairs in kinds.items()}


def digest(*parts: str | bytes) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part.encode() if isinstance(part, str) else part)
        digest.update(b"\0")
    return digest.hexdigest()[:20]


def model_digest(model_dir: Path) -> str:
    """Hash of the weights and the config of a Hugging Face folder."""
    files = sorted([*model_dir.glob("*.safetensors"), model_dir / "config.json"])
    return digest(*(path.read_bytes() for path in files))


def code_digest() -> str:
    """Hash of the sources that a result depends on."""
    here, codec = Path(__file__).resolve().parent, Path(gguf_itq3s.codec.__file__).resolve().parent
    sources = [*sorted(here.glob("*.py")), *sorted(codec.glob("*.py"))]
    return digest(*(path.read_bytes() for path in sources))


def _measure(reference: Reference, matrices: dict[str, FloatArray], variant: Variant, folded: bool) -> Result:
    gains = reference.norm_gains() if folded else {}
    changed, errors = {}, []
    for name, weights in matrices.items():
        # A zero gain would lose its column; such a channel is dead either way.
        gain = np.where(gains[name] == 0, np.float32(1), gains[name]) if name in gains else np.float32(1)
        restored = variants.apply(weights * gain, variant)
        errors.append(variants.relative_error(weights * gain, restored))
        changed[name] = restored / gain
    reference.set_matrices(changed)
    result = {"weight_error": float(np.mean(errors)), "bits_per_weight": variant.bits_per_weight}
    return {**result, **reference.divergence().to_json()}


def study(models: dict[str, Path], text: str, chunks: int, cache: Path) -> Result:
    """Measure every variant on every model.

    Args:
        models: name -> Hugging Face folder; the first is the original of the others.
        text: evaluation text.
        chunks: windows of 512 tokens of it to take.
        cache: folder for results that are done.

    Returns:
        JSON: ``models`` -> name -> ``original`` (its own divergence from the first model), ``distribution``, ``rows``
        (key of the variant -> measures).
    """
    cache.mkdir(parents=True, exist_ok=True)
    common = digest(text, str(chunks), code_digest())
    todo = all_variants()
    results: Result = {}
    first: Reference | None = None
    first_digest = model_digest(next(iter(models.values())))
    with tqdm(total=len(models) * (len(todo) + 1), desc="ablation", unit="variant") as bar:
        for name, folder in models.items():
            own = model_digest(folder)
            paths = {row_key(v, f): cache / f"{digest(common, own, row_key(v, f))}.json" for v, f in todo}
            base = cache / f"{digest(common, own, first_digest, 'original')}.json"
            reference: Reference | None = None
            if not base.is_file() or not all(path.is_file() for path in paths.values()):
                reference = Reference(folder, text, chunks)
                first = first or (
                    reference if own == first_digest else Reference(models[next(iter(models))], text, chunks)
                )
                if not base.is_file():
                    entry = {
                        "vocabulary": reference.vocabulary,
                        "original": (
                            first.divergence(reference) if first is not reference else reference.original
                        ).to_json(),
                        "distribution": distribution(reference.matrices()),
                    }
                    write(base, entry)
                matrices = reference.matrices()
            bar.update()
            rows = {}
            for variant, folded in todo:
                key = row_key(variant, folded)
                bar.set_postfix_str(f"{name}: {key}")
                if not paths[key].is_file():
                    assert reference is not None
                    write(paths[key], _measure(reference, matrices, variant, folded))
                rows[key] = json.loads(paths[key].read_text())
                bar.update()
            if reference is not None:
                reference.set_matrices(matrices)  # the first model is compared with its twins
            results[name] = {**json.loads(base.read_text()), "rows": rows}
    return {"chunks": chunks, "context": 512, "models": results}


def write(path: Path, value: Result) -> None:
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(value))
    partial.replace(path)


def _rows(result: Result, rows: Iterable[tuple[str, Variant]], folded: bool = False) -> str:
    names = list(result["models"])
    measures = (("weight_error", "error", ".4f"), ("mean_kld", "KLD", ".4f"), ("perplexity", "PPL", ".2f"))
    header = ["", "bits", *(f"{name}: {label}" for name in names for _, label, _ in measures)]
    found = [(label, v, [result["models"][name]["rows"][row_key(v, folded)] for name in names]) for label, v in rows]
    columns = []
    for index in range(len(names)):
        for field, _, style in measures:
            values = [r[index][field] for _, _, r in found]
            columns.append(report.bold_least([format(v, style) for v in values], values))
    lines = [[label, f"{v.bits_per_weight:g}", *(c[i] for c in columns)] for i, (label, v, _) in enumerate(found)]
    return report.markdown(header, lines)


def tables(result: Result) -> str:
    """The tables as Markdown."""
    models: Result = result["models"]
    any_row = next(iter(next(iter(models.values()))["rows"].values()))
    parts = [
        f"{result['chunks']} windows of {result['context']} tokens of the test split, {any_row['tokens']} scored;"
        " error: mean over the matrices of |W - W'|^2 / |W|^2; KLD: mean against the same model's F16 weights, in nats;"
        " the least of each column in bold.\n",
        report.markdown(
            ["F16", "PPL", "KLD from the original", "same top token"],
            [
                [n, f"{m['original']['perplexity']:.2f} ± {m['original']['perplexity_error']:.2f}",
                 f"{m['original']['mean_kld']:.1e}", f"{100 * m['original']['same_top']:.2f}%"]
                for n, m in models.items()
            ],
        ),
    ]  # fmt: skip
    for title, rows in TABLES.items():
        parts.append(f"#### {title}\n\n{_rows(result, rows)}")
    parts.append(f"#### RMSNorm gains folded into the matrices first\n\n{_rows(result, FOLDED, folded=True)}")
    kinds = list(next(iter(models.values()))["distribution"])
    lines = [
        [kind, *(f"{m['distribution'][kind][field][when]:.2f}" for m in models.values()
                 for field in ("kurtosis", "linf") for when in (0, 1))]
        for kind in kinds
    ]  # fmt: skip
    header = [
        "",
        *(f"{n}: {field} {when}" for n in models for field in ("kurtosis", "max/RMS") for when in ("before", "after")),
    ]
    parts.append("#### Excess kurtosis and l-infinity norm before and after the FWHT of 256\n\n"
                 + report.markdown(header, lines))  # fmt: skip
    return "\n".join(parts)

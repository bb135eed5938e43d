#!/usr/bin/env python3
"""What norm folding, importance matrices and calibration are worth, on a model and its outlier twins.

    scripts/tables/calibration.py models/demo-llama --novels novels.txt.xz --valid wiki.valid.tokens.txt
    ... --results docs    # and the section of docs/calibration.md, docs/results/calibration.json

For each model: mean KL divergence of each quantized file's predictions from those of its F16 file, every matrix of a
layer in the named type, the token embedding in F16. Importance matrix and calibration come from the same text, half
from the novels and half from the validation split; the test split is only evaluated on. A second text, the reference
topics in Python's own library (technical prose, another domain than the calibration text), is a held-out check.

Interrupt it at any time; the same command goes on from the rows that are done.
"""

from __future__ import annotations

import argparse
import pydoc_data.topics
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from gguf_itq3s import report  # noqa: E402
from gguf_itq3s.calibration.text import read_text  # noqa: E402
from gguf_itq3s.codec.native import processors  # noqa: E402
from gguf_itq3s.errors import report_errors  # noqa: E402
from gguf_itq3s.evaluate import wikitext  # noqa: E402
from gguf_itq3s.evaluate.rows import Row  # noqa: E402
from gguf_itq3s.evaluate.runner import Result, Settings, evaluate, write_json  # noqa: E402
from scripts.train.twins import TWINS, make_twins  # noqa: E402

# After the package, which sees to it that gguf-py is the one of the llama.cpp source.
# isort: split
import gguf  # noqa: E402

TEXTS = {"wikitext": "WikiText-2 test", "topics": "Python reference topics (held out)"}
# Characters of an excerpt; excerpts are spread evenly over a text.
EXCERPT = 6000


def ours(
    key: str,
    how: str,
    *,
    imatrix: bool = False,
    calibrated: bool = False,
    sequential: bool = False,
    fisher: bool = False,
    fold: bool = True,
) -> Row:
    """A row of the converter."""
    options = (("pure", True), ("token_embedding_type", "f16"), ("output_tensor_type", "f16"), ("fold_norms", fold))
    return Row(key, "ITQ3_S", how, "package", imatrix=imatrix, calibrated=calibrated, sequential=sequential,
               options=(*options, *((("fisher", True),) * fisher)))  # fmt: skip


def upstreams(key: str, how: str, qtype: str, *, imatrix: bool = False) -> Row:
    """A row of llama-quantize."""
    name = {"Q3_K": "Q3_K_S"}.get(qtype, qtype)
    kept = ("--token-embedding-type", "f16", "--output-tensor-type", "f16")
    return Row(key, qtype, how, "llama-quantize", ("--pure", *kept, name), imatrix)


ROWS = (
    ours("plain", "ITQ3_S, nearest codeword, not folded", fold=False),
    ours("default", "**ITQ3_S, default: norms folded, no data**"),
    ours("imatrix-unfolded", "ITQ3_S, importance matrix, not folded", imatrix=True, fold=False),
    ours("imatrix", "**ITQ3_S, `--imatrix`, folded**", imatrix=True),
    ours("calibrated-unfolded", "ITQ3_S, full Hessian, not folded", calibrated=True, fold=False),
    ours("calibrated", "**ITQ3_S, `--calibration`, folded**", calibrated=True),
    ours("sequential", "**ITQ3_S, `--calibrate`, folded**", sequential=True),
    ours("fisher", "**ITQ3_S, `--calibrate --fisher`, folded**", sequential=True, fisher=True),
    upstreams("quantize-imatrix", "ITQ3_S, `llama-quantize --imatrix`", "ITQ3_S", imatrix=True),
    upstreams("iq3_s", "IQ3_S", "IQ3_S"),
    upstreams("iq3_s-imatrix", "IQ3_S, importance matrix", "IQ3_S", imatrix=True),
    upstreams("q3_k", "Q3_K", "Q3_K"),
    upstreams("q3_k-imatrix", "Q3_K, importance matrix", "Q3_K", imatrix=True),
)
#: Label -> row, and the rows of which the better is its measure.
RATIOS = {
    "default / better of IQ3_S and Q3_K": ("default", ("iq3_s", "q3_k")),
    "calibrated / IQ3_S": ("calibrated", ("iq3_s",)),
    "calibrated / better of both with importance matrix": ("calibrated", ("iq3_s-imatrix", "q3_k-imatrix")),
    "`--imatrix` / default": ("imatrix", ("default",)),
    "`--calibrate` / `--calibration`": ("sequential", ("calibrated",)),
    "`--calibrate --fisher` / `--calibration`": ("fisher", ("calibrated",)),
    "`--calibrate --fisher` / IQ3_S with importance matrix": ("fisher", ("iq3_s-imatrix",)),
}

#: Text -> model -> row -> its result.
Results = dict[str, dict[str, dict[str, Result]]]


def plain_split(path: Path) -> str:
    """A split of WikiText in its ``.tokens`` form without the marks of the tokenisation."""
    return re.sub(r" @([-,.])@ ", r"\1", read_text(path)).replace("<unk>", "")


def calibration_text(novels: Path, valid: Path, tokens: int, out: Path) -> Path:
    """Half novels, half validation split, excerpts spread evenly over both."""
    plain = plain_split(valid)
    count = max(1, tokens * 5 // 2 // EXCERPT)
    pieces = []
    for text in (read_text(novels), plain):
        starts = np.linspace(0, max(0, len(text) - EXCERPT), count).astype(int)
        pieces += [text[text.find(" ", start) + 1 : start + EXCERPT] for start in starts]
    out.write_text("\n".join(pieces), encoding="utf-8")
    return out


def tables(results: Results) -> str:
    """The table of every text, and the ratios."""
    parts = []
    for text, models in results.items():
        any_result = next(iter(next(iter(models.values())).values()))
        cells = [[row.how, f"{_bits(row):g}", *_errors(models, row.key)] for row in ROWS]
        parts += [f"Mean KLD, {TEXTS[text]}, {any_result['tokens']} scored tokens:\n"]
        parts += [report.markdown(["", "bits", *models], cells)]
        lines = []
        for label, (key, others) in RATIOS.items():
            values = [m[key]["mean_kld"] / min(m[other]["mean_kld"] for other in others) for m in models.values()]
            lines.append([label, *(f"{value:.3f}" for value in values)])
        parts += [report.markdown(["ratio", *models], lines)]
    return "\n".join(parts)


def _bits(row: Row) -> float:
    """Bits a weight of the type that the matrices of the layers are in."""
    block, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[row.label]]
    return 8 * size / block


def _errors(models: dict[str, dict[str, Result]], key: str) -> list[str]:
    return [f"{m[key]['mean_kld']:.4f} ± {m[key]['mean_kld_error']:.4f}" for m in models.values()]


@report_errors
def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="Hugging Face folder of a small model with Llama's names")
    parser.add_argument("--novels", type=Path, required=True, help="calibration text, plain or .xz")
    parser.add_argument("--valid", type=Path, required=True, help="calibration text: WikiText's validation split")
    parser.add_argument("--work-dir", type=Path, default=ROOT / "build" / "calibration", help="cached results")
    parser.add_argument("--tokens", type=int, default=131072, help="calibration tokens (default: %(default)s)")
    parser.add_argument("--chunks", type=int, default=64, help="windows of 512 to score (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=processors(), help="default: %(default)s")
    parser.add_argument("--results", type=Path, help="folder of calibration.md to update")
    args = parser.parse_args()
    args.work_dir.mkdir(parents=True, exist_ok=True)
    models = {"model": args.model} | dict(zip(TWINS, make_twins(args.model, args.work_dir / "twins"), strict=True))
    training = calibration_text(args.novels, args.valid, args.tokens, args.work_dir / "calibration.txt")
    topics = args.work_dir / "topics.txt"
    topics.write_text("\n".join(text for _, text in sorted(pydoc_data.topics.topics.items())), encoding="utf-8")
    results: Results = {}
    for text, path in {"wikitext": wikitext.test_path(), "topics": topics}.items():
        for name, folder in models.items():
            settings = Settings(
                folder, args.work_dir / name, chunks=args.chunks, threads=args.threads, text=path,
                training=training, calibration_tokens=args.tokens, imatrix_tokens=args.tokens,
            )  # fmt: skip
            rows = evaluate(settings, {"": ROWS})[""]
            results.setdefault(text, {})[name] = {row["key"]: row for row in rows}
    found = tables(results)
    print(found)
    if args.results:
        facts: dict[str, Any] = {"tokens": args.tokens, "chunks": args.chunks, "results": results}
        write_json(args.results / "results" / "calibration.json", facts)
        report.replace_section(args.results / "calibration.md", "calibration", found)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

#!/usr/bin/env python3
"""What norm folding, importance matrices and calibration are worth, on a model and its outlier twins.

    scripts/tables/calibration.py models/demo-llama --novels novels.txt.xz --valid wiki.valid.tokens.txt
    ... --held-out DIR    # and on a model that nothing was tuned on
    ... --results docs    # and the section of docs/calibration.md, docs/results/calibration.json

For each model: mean KL divergence of each quantized file's predictions from those of its F16 file, every matrix of a
layer in the named type, the token embedding in F16 but where the row says "all". Importance matrix and calibration
come from the same text, half from the novels and half from the validation split; the test split is only evaluated on.
A second text, the reference topics in Python's own library (technical prose, another domain than the calibration
text), is a held-out check. The ratios have paired errors: both rows are scored on the same windows.

Interrupt it at any time; the same command goes on from the rows that are done.
"""

from __future__ import annotations

import argparse
import dataclasses
import pydoc_data.topics
import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from gguf_itq3s.base import report  # noqa: E402
from gguf_itq3s.base.errors import report_errors  # noqa: E402
from gguf_itq3s.calibrate.text import excerpts, read_text  # noqa: E402
from gguf_itq3s.codec.family import DEFAULT, TrellisType, trellis_type  # noqa: E402
from gguf_itq3s.codec.native import processors  # noqa: E402
from gguf_itq3s.evaluate import ratio, wikitext  # noqa: E402
from gguf_itq3s.evaluate.rows import Row  # noqa: E402
from gguf_itq3s.evaluate.runner import Result, Settings, evaluate, write_json  # noqa: E402
from scripts.train.twins import TWINS, make_twins  # noqa: E402

# After the package, which sees to it that gguf-py is the one of the llama.cpp source.
# isort: split
import gguf  # noqa: E402

TEXTS = {
    "wikitext": "WikiText-2 test, the domain of half of the calibration text",
    "topics": "Python reference topics, a domain of no part of it",
}
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
    row: TrellisType = DEFAULT,
) -> Row:
    """A row of the converter, in a trellis type."""
    options = (("pure", True), ("token_embedding_type", "f16"), ("output_tensor_type", "f16"), ("fold_norms", fold))
    named = () if row is DEFAULT else (("outtype", row.identifier),)
    return Row(key, row.name, how, "package", imatrix=imatrix, calibrated=calibrated, sequential=sequential,
               options=(*options, *((("fisher", True),) * fisher), *named))  # fmt: skip


def upstreams(key: str, how: str, qtype: str, *, imatrix: bool = False) -> Row:
    """A row of llama-quantize."""
    name = {"Q3_K": "Q3_K_S"}.get(qtype, qtype)
    kept = ("--token-embedding-type", "f16", "--output-tensor-type", "f16")
    return Row(key, qtype, how, "llama-quantize", ("--pure", *kept, name), imatrix)


def stock(key: str, how: str, *, calibrated: bool = False, fisher: bool = False) -> Row:
    """A row of the converter in a type of llama.cpp's own, for any llama.cpp; norms are not folded."""
    options = (("outtype", "q4_k_s"), ("pure", True), ("token_embedding_type", "f16"), ("output_tensor_type", "f16"))
    return Row(key, "Q4_K", how, "package", calibrated=calibrated, sequential=not calibrated,
               options=(*options, *((("fisher", True),) * fisher)))  # fmt: skip


#: On every model.
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
#: Not on the twins: outliers are for types that fold norms.
STOCK_ROWS = (
    upstreams("q4_k", "Q4_K", "Q4_K"),
    upstreams("q4_k-imatrix", "Q4_K, importance matrix", "Q4_K", imatrix=True),
    stock("q4_k-calibrated", "**Q4_K, `--calibration`**", calibrated=True),
    stock("q4_k-sequential", "**Q4_K, `--calibrate`**"),
    stock("q4_k-fisher", "**Q4_K, `--calibrate --fisher`**", fisher=True),
    Row("q4_k-all-imatrix", "Q4_K", "Q4_K, all, importance matrix", "llama-quantize", ("--pure", "Q4_K_S"),
        imatrix=True),
    Row("bpw", "mix", "**`--target-bpw 3.85 --calibrate --fisher`, all**", "package", sequential=True,
        options=(("target_bpw", 3.85), ("fisher", True), ("fold_norms", True))),
)  # fmt: skip
#: Two bits, not on the twins either.
_SMALL = trellis_type(gguf.GGMLQuantizationType["ITQ2_S"])
SMALL_ROWS = (
    ours("itq2_s", "**ITQ2_S, norms folded, no data**", row=_SMALL),
    ours("itq2_s-imatrix", "**ITQ2_S, `--imatrix`, folded**", imatrix=True, row=_SMALL),
    ours("itq2_s-calibrated", "**ITQ2_S, `--calibration`, folded**", calibrated=True, row=_SMALL),
    ours("itq2_s-sequential", "**ITQ2_S, `--calibrate`, folded**", sequential=True, row=_SMALL),
    ours("itq2_s-fisher", "**ITQ2_S, `--calibrate --fisher`, folded**", sequential=True, fisher=True, row=_SMALL),
    upstreams("iq2_xxs-imatrix", "IQ2_XXS, importance matrix", "IQ2_XXS", imatrix=True),
    upstreams("q2_k-imatrix", "Q2_K, importance matrix", "Q2_K", imatrix=True),
)
#: On the model and on the held-out one.
EVERY_ROW = (*ROWS, *STOCK_ROWS, *SMALL_ROWS)
RATIOS: tuple[ratio.Ratio, ...] = (
    ("default / better of IQ3_S and Q3_K", "default", ("iq3_s", "q3_k")),
    ("calibrated / IQ3_S", "calibrated", ("iq3_s",)),
    ("calibrated / better of both with importance matrix", "calibrated", ("iq3_s-imatrix", "q3_k-imatrix")),
    ("`--imatrix` / default", "imatrix", ("default",)),
    ("`--calibrate` / `--calibration`", "sequential", ("calibrated",)),
    ("`--calibrate --fisher` / `--calibration`", "fisher", ("calibrated",)),
    ("`--calibrate --fisher` / IQ3_S with importance matrix", "fisher", ("iq3_s-imatrix",)),
    ("ITQ2_S `--calibrate --fisher` / IQ2_XXS with importance matrix", "itq2_s-fisher", ("iq2_xxs-imatrix",)),
    ("ITQ2_S `--calibrate --fisher` / Q2_K with importance matrix", "itq2_s-fisher", ("q2_k-imatrix",)),
    ("Q4_K `--calibration` / importance matrix", "q4_k-calibrated", ("q4_k-imatrix",)),
    ("Q4_K `--calibrate` / importance matrix", "q4_k-sequential", ("q4_k-imatrix",)),
    ("Q4_K `--calibrate --fisher` / importance matrix", "q4_k-fisher", ("q4_k-imatrix",)),
    ("3.85 bits `--calibrate --fisher` / Q4_K all, importance matrix", "bpw", ("q4_k-all-imatrix",)),
)
#: Rows whose twins ought to be as good as the model: the functions are the same.
ALIKE = ("default", "imatrix", "calibrated")
#: `make eval` has those on the twins that are quantized while they are calibrated.
TWIN_ROWS = tuple(row for row in ROWS if not row.sequential)

#: Text -> model -> row -> its result.
Results = dict[str, dict[str, dict[str, Result]]]


def plain_split(path: Path) -> str:
    """A split of WikiText in its ``.tokens`` form without the marks of the tokenisation."""
    return re.sub(r" @([-,.])@ ", r"\1", read_text(path)).replace("<unk>", "")


def calibration_text(novels: Path, valid: Path, tokens: int, out: Path) -> Path:
    """Half novels, half validation split, excerpts spread evenly over both."""
    count = max(1, tokens * 5 // 2 // EXCERPT)
    pieces = [
        piece[piece.find(" ") + 1 :]
        for text in (read_text(novels), plain_split(valid)) for piece in excerpts(text, count, EXCERPT)
    ]  # fmt: skip
    out.write_text("\n".join(pieces), encoding="utf-8")
    return out


def tables(results: Results) -> str:
    """The table of every text, and the ratios."""
    parts = []
    for text, models in results.items():
        first = next(iter(models.values()))
        tokens = next(iter(first.values()))["tokens"]
        cells = [
            [row.how, f"{first[row.key]['tensor_bits']:.2f}" if row.label == "mix" else f"{_bits(row):g}",
             *_errors(models, row.key)]
            for row in EVERY_ROW
        ]  # fmt: skip
        parts += [f"Mean KLD, {TEXTS[text]}, {tokens} scored tokens:\n"]
        parts += [report.markdown(["", "bits", *models], cells)]
        parts += [ratio.markdown(RATIOS, models)]
        if TWINS[0] in models:
            labels = {row.key: row.how for row in TWIN_ROWS if row.key in ALIKE}
            parts += [ratio.alike(labels, {name: models[name] for name in ("model", *TWINS)}, "model")]
    return "\n".join(parts)


def _bits(row: Row) -> float:
    """Bits a weight of the type that the matrices of the layers are in."""
    block, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[row.label]]
    return 8 * size / block


def _errors(models: dict[str, dict[str, Result]], key: str) -> list[str]:
    """Cells of a row; five digits where a model is so easily quantized that four say little."""
    cells = []
    for rows in models.values():
        digits = 5 if rows["calibrated"]["mean_kld"] < 0.01 else 4
        if value := rows.get(key):
            cells.append(f"{value['mean_kld']:.{digits}f} ± {value['mean_kld_error']:.{digits}f}")
        else:
            cells.append("-")
    return cells


@report_errors
def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="Hugging Face folder of a small model with Llama's names")
    parser.add_argument("--novels", type=Path, required=True, help="calibration text, plain or .xz")
    parser.add_argument("--valid", type=Path, required=True, help="calibration text: WikiText's validation split")
    parser.add_argument("--held-out", type=Path, help="folder of another model, scored without twins")
    parser.add_argument("--work-dir", type=Path, default=ROOT / "build" / "calibration", help="cached results")
    parser.add_argument("--tokens", type=int, default=131072, help="calibration tokens (default: %(default)s)")
    parser.add_argument("--chunks", type=int, default=128, help="windows of 512 to score (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=processors(), help="default: %(default)s")
    parser.add_argument("--results", type=Path, help="folder of calibration.md to update")
    args = parser.parse_args()
    args.work_dir.mkdir(parents=True, exist_ok=True)
    models = {"model": args.model, **({"held-out model": args.held_out} if args.held_out else {})}
    models |= dict(zip(TWINS, make_twins(args.model, args.work_dir / "twins"), strict=True))
    training = calibration_text(args.novels, args.valid, args.tokens, args.work_dir / "calibration.txt")
    topics = args.work_dir / "topics.txt"
    topics.write_text("\n".join(text for _, text in sorted(pydoc_data.topics.topics.items())), encoding="utf-8")
    results: Results = {text: {} for text in TEXTS}
    for name, folder in models.items():
        rows = TWIN_ROWS if name in TWINS else EVERY_ROW
        settings = Settings(
            folder, args.work_dir / name.replace(" ", "-"), chunks=args.chunks, threads=args.threads, keep=True,
            training=training, calibration_tokens=args.tokens, imatrix_tokens=args.tokens,
        )  # fmt: skip
        for text, path in {"wikitext": wikitext.test_path(), "topics": topics}.items():
            found = evaluate(dataclasses.replace(settings, text=path), {"": rows})[""]
            results[text][name] = {row["key"]: row for row in found}
        for large in settings.work.glob("base-*.kld"):
            large.unlink()
    page = tables(results)
    print(page)
    if args.results:
        facts: dict[str, Any] = {"tokens": args.tokens, "chunks": args.chunks, "results": results}
        write_json(args.results / "results" / "calibration.json", facts)
        report.replace_section(args.results / "calibration.md", "calibration", page)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

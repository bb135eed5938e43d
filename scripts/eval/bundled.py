#!/usr/bin/env python3
"""Everything that `make eval` measures: all types on the bundled model, quantized KV caches, and two outlier twins.

    scripts/eval/bundled.py models/demo-llama                 # writes build/eval
    scripts/eval/bundled.py models/demo-llama --results docs  # and the sections of docs/results.md, its picture

Interrupt it at any time; the same command goes on from the rows that are done.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from gguf_itq3s.base import report
from gguf_itq3s.base.errors import report_errors
from gguf_itq3s.evaluate import command, tables
from gguf_itq3s.evaluate.engine import Evaluation, write_json
from gguf_itq3s.evaluate.rows import weight_rows
from scripts.train.twins import TWINS, make_twins

ROOT: Final = Path(__file__).resolve().parents[2]
#: Rows that the twins are measured on: what the rotation is for.
TWIN_ROWS: Final = (
    "q3_k-pure", "iq3_s-pure", "iq3_s-pure-imatrix", "itq3_s-pure", "convert-pure", "convert-pure-calibrated",
    "convert-pure-sequential", "convert-pure-fisher",
)  # fmt: skip
#: What calibrating while quantizing is worth.
RATIOS: Final[tuple[tables.Ratio, ...]] = (
    ("ITQ3_S `--layerwise` / `--statistics`", "convert-pure-sequential", "convert-pure-calibrated"),
    ("ITQ3_S `--layerwise --fisher` / `--statistics`", "convert-pure-fisher", "convert-pure-calibrated"),
    ("ITQ3_S `--layerwise --fisher` / IQ3_S, imatrix", "convert-pure-fisher", "iq3_s-pure-imatrix"),
    ("mix of ITQ3_S, `--layerwise` / no data", "convert-sequential", "convert"),
    ("mix of ITQ3_S, `--layerwise --fisher` / mix of IQ3_S, imatrix", "convert-fisher", "iq3_s-imatrix"),
    ("ITQ2_S `--layerwise --fisher` / IQ2_XXS, imatrix", "convert-itq2_s-pure-fisher", "iq2_xxs-pure-imatrix"),
    ("ITQ2_S `--layerwise --fisher` / Q2_K, imatrix", "convert-itq2_s-pure-fisher", "q2_k-pure-imatrix"),
    ("`--target-bpw 2.7 --layerwise --fisher` / Q2_K mix, imatrix", "convert-bpw-2.7-fisher", "q2_k-imatrix"),
    ("Q4_K `--statistics` / imatrix", "convert-q4_k-pure-calibrated", "q4_k-pure-imatrix"),
    ("Q4_K `--layerwise --fisher` / imatrix", "convert-q4_k-pure-fisher", "q4_k-pure-imatrix"),
    ("Q4_K_M `--layerwise --fisher` / imatrix", "convert-q4_k_m-fisher", "q4_k_m-imatrix"),
    ("`--target-bpw 3.85 --layerwise --fisher` / Q4_K_M mix, imatrix", "convert-bpw-3.85-fisher", "q4_k_m-imatrix"),
    ("`--target-bpw 3.85 --statistics` / Q3_K_S mix, imatrix", "convert-bpw-3.85", "q3_k_s-imatrix"),
    ("`--target-bpw 4.3 --statistics` / Q3_K_M mix, imatrix", "convert-bpw-4.3", "q3_k_m-imatrix"),
    ("`--target-bpw 4.65 --statistics` / IQ4_XS mix, imatrix", "convert-bpw-4.65", "iq4_xs-imatrix"),
    ("`--target-bpw 5 --statistics` / Q4_K_M mix, imatrix", "convert-bpw-5", "q4_k_m-imatrix"),
)
Rows = Sequence[Mapping[str, Any]]


def twin_table(models: Mapping[str, Rows]) -> str:
    """Mean KL divergence of the same rows on several models."""
    by_model = [{row["key"]: next(iter(row["texts"].values())) for row in rows} for rows in models.values()]
    labels = {row["key"]: tables.label(row) for row in next(iter(models.values()))}
    lines = [
        [label, *(f"{rows[key]['mean_kld']:.4f} ± {rows[key]['mean_kld_error']:.4f}" for rows in by_model)]
        for key, label in labels.items()
    ]
    return report.markdown(["mean KLD", *models], lines)


def sections(results: Mapping[str, Rows], twins: Mapping[str, Rows]) -> dict[str, str]:
    """The parts of the page, by the names of their marks."""
    found = {f"eval {name}": tables.quality(rows) for name, rows in results.items()}
    if "weights" in results:
        found["eval ratios"] = tables.ratios(RATIOS, results["weights"])
    found |= {"eval twins": twin_table(twins)} if twins else {}
    return {name: text for name, text in found.items() if text}


@report_errors
def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    command.add_arguments(parser)
    parser.set_defaults(work_dir=ROOT / "build" / "eval")
    parser.add_argument("--results", type=Path, help="folder of results.md to update, with its picture")
    args = parser.parse_args()
    if args.list_rows:
        return command.run(args)
    report.require_matplotlib()
    settings, results = command.evaluate(args)
    whole, twins = not args.rows and not args.quick, {}
    if whole:
        twins["model"] = [row for row in results["weights"] if row["key"] in TWIN_ROWS]
        few = [row for row in weight_rows() if row.key in TWIN_ROWS]
        for name, folder in zip(TWINS, make_twins(args.model, args.work_dir / "twins"), strict=True):
            twin = Evaluation(replace(settings, model=folder, work=args.work_dir / name))
            twins[name.replace("-", " ")] = twin.run(few)
    out = args.out or args.work_dir
    out.mkdir(parents=True, exist_ok=True)
    write_json(out / "eval.json", {**command.facts_of(settings, results), "twins": twins})
    pictures = args.results / "results" if args.results else out
    panels = {"bits per weight of the matrices": results.get("weights", [])}
    tables.picture(panels, args.model.name, pictures / "eval_kld.png")
    for name, text in sections(results, twins).items():
        print(f"### {name}\n\n{text}")
        if args.results and whole:
            report.replace_section(args.results / "results.md", name, text)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

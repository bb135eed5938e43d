#!/usr/bin/env python3
"""Everything that `make eval` measures: all types on a model, quantized KV caches, and the two outlier twins.

    scripts/tables/evaluation.py models/demo-llama                 # writes build/eval
    scripts/tables/evaluation.py models/demo-llama --results docs  # and the sections of docs/results.md, docs/results/*

Interrupt it at any time; the same command goes on from the rows that are done. One row:

    gguf-itq3s eval models/demo-llama --rows iq3_s-pure
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from gguf_itq3s.base import report  # noqa: E402
from gguf_itq3s.base.errors import report_errors  # noqa: E402
from gguf_itq3s.evaluate import command, plots, ratio  # noqa: E402
from gguf_itq3s.evaluate.rows import kv_rows, weight_rows  # noqa: E402
from gguf_itq3s.evaluate.runner import Result, evaluate  # noqa: E402
from scripts.train.twins import make_twins  # noqa: E402

#: Rows that the twins are measured on: what the rotation is for.
TWIN_ROWS = (
    "f16", "q3_k-pure", "iq3_s-pure", "iq3_s-pure-imatrix", "iq3_xxs-pure", "itq3_s-pure", "convert-pure",
    "convert-pure-calibrated", "convert-pure-sequential", "convert-pure-fisher",
)  # fmt: skip
#: Those that are to be as good on a twin as on the model.
ALIKE = {
    "convert-pure": "ITQ3_S, folded", "convert-pure-calibrated": "`--calibration`",
    "convert-pure-sequential": "`--calibrate`", "convert-pure-fisher": "`--calibrate --fisher`",
}  # fmt: skip
TWINS = {"weight twin": "weight-twin", "activation twin": "activation-twin"}

#: What calibrating while quantizing is worth.
RATIOS: tuple[ratio.Ratio, ...] = (
    ("ITQ3_S `--calibrate` / `--calibration`", "convert-pure-sequential", ("convert-pure-calibrated",)),
    ("ITQ3_S `--calibrate --fisher` / `--calibration`", "convert-pure-fisher", ("convert-pure-calibrated",)),
    ("ITQ3_S `--calibrate --fisher` / IQ3_S, imatrix", "convert-pure-fisher", ("iq3_s-pure-imatrix",)),
    ("mix of ITQ3_S, `--calibrate` / `--calibration`", "convert-sequential", ("convert-calibrated",)),
    ("mix of ITQ3_S, `--calibrate --fisher` / `--calibration`", "convert-fisher", ("convert-calibrated",)),
    ("mix of ITQ3_S, `--calibrate --fisher` / mix of IQ3_S, imatrix", "convert-fisher", ("iq3_s-imatrix",)),
    ("ITQ2_S `--calibrate --fisher` / IQ2_XXS, imatrix", "convert-itq2_s-pure-fisher", ("iq2_xxs-pure-imatrix",)),
    ("ITQ2_S `--calibrate --fisher` / Q2_K, imatrix", "convert-itq2_s-pure-fisher", ("q2_k-pure-imatrix",)),
    ("mix of ITQ2_S, `--calibrate --fisher` / mix of IQ2_XXS, imatrix", "convert-itq2_s-fisher", ("iq2_xxs-imatrix",)),
    (
        "`--target-bpw 2.7 --calibrate --fisher` / Q2_K mix, imatrix",
        "convert-bpw-2.7-fisher",
        ("q2_k-imatrix",),
    ),
    ("Q4_K `--calibration` / imatrix", "convert-q4_k-pure-calibrated", ("q4_k-pure-imatrix",)),
    ("Q4_K `--calibrate --fisher` / imatrix", "convert-q4_k-pure-fisher", ("q4_k-pure-imatrix",)),
    ("Q4_K_M `--calibrate --fisher` / imatrix", "convert-q4_k_m-fisher", ("q4_k_m-imatrix",)),
    (
        "`--target-bpw 3.85 --calibrate --fisher` / Q4_K pure, imatrix",
        "convert-bpw-3.85-fisher",
        ("q4_k-pure-imatrix",),
    ),
    ("`--target-bpw 3.85 --calibrate --fisher` / Q4_K_M mix, imatrix", "convert-bpw-3.85-fisher", ("q4_k_m-imatrix",)),
    ("`--target-bpw 3.85 --calibration` / Q3_K_S mix, imatrix", "convert-bpw-3.85", ("q3_k_s-imatrix",)),
    ("`--target-bpw 4.3 --calibration` / Q3_K_M mix, imatrix", "convert-bpw-4.3", ("q3_k_m-imatrix",)),
    ("`--target-bpw 4.65 --calibration` / IQ4_XS mix, imatrix", "convert-bpw-4.65", ("iq4_xs-imatrix",)),
    ("`--target-bpw 5 --calibration` / Q4_K_M mix, imatrix", "convert-bpw-5", ("q4_k_m-imatrix",)),
)

Rows = list[Result]


def ratios(tables: dict[str, Rows]) -> str:
    """Mean KLD over that of IQ3_S (pure, no importance matrix), for each model: what the project promises."""
    keys = list(dict.fromkeys(r["key"] for rows in tables.values() for r in rows if r["key"] != "f16"))
    lines = []
    for key in keys:
        cells = []
        for rows in tables.values():
            by_key = {r["key"]: r for r in rows}
            known = key in by_key
            cells.append(f"{by_key[key]['mean_kld'] / by_key['iq3_s-pure']['mean_kld']:.3f}" if known else "-")
        lines.append([f"`{key}`", *cells])
    return report.markdown(["mean KLD / IQ3_S (pure)", *tables], lines)


@report_errors
def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    command.add_arguments(parser)
    parser.set_defaults(work_dir=ROOT / "build" / "eval")
    parser.add_argument("--results", type=Path, help="folder of results.md to update (sections, results/*.json, *.png)")
    args = parser.parse_args()
    report.require_matplotlib()
    settings = command.settings_of(args)
    twins_dir = args.work_dir / "twins"
    make_twins(args.model, twins_dir)

    weights, caches = weight_rows(), kv_rows()
    tables = evaluate(settings, {"weights": weights, "KV cache": caches})
    twin_tables: dict[str, Rows] = {}
    if not args.rows:
        few = [row for row in weights if row.key in TWIN_ROWS]
        twin_tables["model"] = [r for r in tables["weights"] if r["key"] in TWIN_ROWS]
        for name, folder in TWINS.items():
            twin = replace(settings, model=twins_dir / folder, work=args.work_dir / folder)
            twin_tables[name] = evaluate(twin, {"weights": few})["weights"]

    out = args.results / "results" if args.results else args.out or args.work_dir
    out.mkdir(parents=True, exist_ok=True)
    result = {"model": args.model.name, "context": settings.context, "tables": tables, "twins": twin_tables}
    (out / "eval.json").write_text(json.dumps(result, indent=1) + "\n")
    sections = {f"eval {name}": command.results_table(rows) for name, rows in tables.items()}
    if tables.get("weights"):
        sections["eval ratios"] = ratio.markdown(RATIOS, {"model": {r["key"]: r for r in tables["weights"]}})
    if twin_tables:
        parts = [
            f"#### {name}\n\n{command.results_table(rows)}" for name, rows in twin_tables.items() if name != "model"
        ]
        by_key = {name: {r["key"]: r for r in rows} for name, rows in twin_tables.items()}
        sections["eval twins"] = "\n".join([ratios(twin_tables), ratio.alike(ALIKE, by_key, "model"), *parts])
    if tables.get("weights"):
        plots.pareto(tables["weights"], "mean_kld", out / "eval_kld.png")
        plots.pareto(tables["weights"], "perplexity", out / "eval_perplexity.png")
    (args.work_dir / "eval.md").write_text("\n".join(f"### {name}\n\n{text}" for name, text in sections.items()))
    for name, text in sections.items():
        print(f"### {name}\n\n{text}")
        if args.results and not args.rows:
            report.replace_section(args.results / "results.md", name, text)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

#!/usr/bin/env python3
"""The tables and the picture of docs/scaling.md: the TriTera paper's scaling laws, and its speeds beside ours.

    scripts/tables/scaling.py --results docs   rewrite docs/scaling.md and docs/results/scaling.png
    scripts/tables/scaling.py                  print the tables

The laws and the paper's speeds are quoted; ours are read from a processor's file in docs/results/cpu, which `make
bench` writes.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from gguf_itq3s.base import report  # noqa: E402
from gguf_itq3s.base.errors import report_errors  # noqa: E402
from gguf_itq3s.inspect import scaling, scaling_plan  # noqa: E402
from scripts.bench import results  # noqa: E402

BENCH: Final = ROOT / "docs" / "results" / "cpu" / "emerald-rapids.json"

BUDGETS: Final = (1e19, 1e20, 1e21, 1e22, 1e23)
#: 16-bit models to be matched: parameters and tokens.
MATCHED: Final = ((99e6, 150e9), (1.1e9, 150e9), (8e9, 1.2e12), (70e9, 15e12))

#: Tokens/s of a model of 3.9 B parameters on a CPU, from the paper: machine and work -> type -> figure.
PAPER_CPU: Final[Mapping[str, Mapping[str, float]]] = {
    "EPYC 7502, generation": {"F16": 5.4, "Q4": 15, "TQ2": 29, "TQ1": 21},
    "EPYC 7502, prompt of 256": {"F16": 31, "Q4": 27, "TQ2": 50, "TQ1": 25},
    "M4 Max, generation": {"F16": 28, "Q4": 43, "TQ2": 57, "TQ1": 40},
}
#: Speedup of ternary layers of a 70B over FP16 on a GPU (TriRun), from the paper: card -> batch -> factor.
PAPER_GPU: Final[Mapping[str, Mapping[int, float]]] = {
    "L40": {1: 7.9, 16: 7.6, 32: 6.9, 64: 3.8},
    "A100 SXM": {1: 4.7, 16: 4.0, 32: 2.9, 64: 2.0},
    "RTX 4090": {1: 5.0, 16: 7.2, 32: 5.0, 64: 2.6},
}
#: Rows of ours: what -> the measurement's name in the file.
MEASURED: Final = {
    "generation, one thread": "generation", "generation, all cores": "generation_all",
    "prompt of 512, one thread": "prompt", "prompt of 512, all cores": "prompt_all",
}  # fmt: skip
#: Columns, in the paper's words -> ours, with the patch and as llama.cpp has it.
PATCHED: Final = {"Q4": "Q4_K", "TQ2": "TQ2_0", "TQ1": "TQ1_0"}
STOCK: Final = {"Q4": "Q4_K", "TQ2": "TQ2_0 (stock)", "TQ1": "TQ1_0 (stock)"}


def laws() -> str:
    """The tables of the laws: losses, the best split of budgets, ternary models that match 16-bit ones."""
    parts = ["Loss, ternary / 16 bits:\n", report.markdown(*scaling_plan.grid_rows(scaling_plan.grid()))]
    best = [
        row
        for budget in BUDGETS
        for row in scaling_plan.optimum_rows(budget, scaling_plan.consult(None, None, budget)["optimum"])
    ]
    parts += ["The best split of a budget:\n", report.markdown(scaling_plan.OPTIMUM_HEADER, best, left=2)]
    rows = []
    for parameters, tokens in MATCHED:
        name = f"{scaling_plan.number(parameters)}, {scaling_plan.number(tokens)}"
        loss = f"{scaling.FLOAT.loss(parameters, tokens):.3f}"
        matches = scaling_plan.match_rows(scaling_plan.matches(parameters, tokens))
        rows += [[name if i == 0 else "", loss if i == 0 else "", *row] for i, row in enumerate(matches)]
    header = ["16 bits: parameters, tokens", "loss", *scaling_plan.MATCH_HEADER]
    parts += [
        "A ternary model as good as one of 16 bits; bytes of its matrices, those of the 16-bit model as 1:\n",
        report.markdown(header, rows, left=3),
        f"\\{scaling_plan.MARK} outside of what was fitted: an extrapolation.",
    ]
    return "\n".join(parts)


def speeds(bench: Mapping[str, Any]) -> str:
    """The tables of speeds: the paper's on CPUs and ours, and the paper's on GPUs.

    Args:
        bench: the file of a processor in docs/results/cpu.
    """

    def row(source: str, what: str, base: float, speeds: Mapping[str, float]) -> list[str]:
        return [
            source,
            what,
            *(f"{speed / base:.2f}" for speed in speeds.values()),
            f"{speeds['TQ2'] / speeds['Q4']:.2f}",
        ]

    medians, kernels = results.merged(bench, "medians"), bench["sections"]["kernels"]
    rows = [
        row("the paper", what, found["F16"], {name: found[name] for name in PATCHED})
        for what, found in PAPER_CPU.items()
    ]
    for source, names in (("llama.cpp, here", STOCK), ("this patch, here", PATCHED)):
        for what, key in MEASURED.items():
            found = medians[key]
            rows.append(row(source, what, found["F16"], {name: found[ours] for name, ours in names.items()}))
    batches = next(iter(PAPER_GPU.values()))
    cards = [[card, *(f"{factor}" for factor in found.values())] for card, found in PAPER_GPU.items()]
    return "\n".join([
        "Speed on a CPU, that of F16 as 1:\n",
        report.markdown(["", "work", "Q4", "TQ2", "TQ1", "TQ2 over Q4"], rows, left=2),
        f"Here: {bench['name']}, {kernels['cores']} cores, a model of {kernels['weights'] / 1e6:.0f} M weights; Q4 is "
        "Q4_K. The paper: 3.9 B parameters.\n",
        "Speed of ternary layers on a GPU, that of FP16 as 1, by columns of the product (the paper's TriRun, 70B):\n",
        report.markdown(["card", *(str(batch) for batch in batches)], cards),
    ])  # fmt: skip


@report_errors
def main() -> int:
    parser = argparse.ArgumentParser(description="Tables and picture of docs/scaling.md.")
    parser.add_argument(
        "--results", type=Path, metavar="DIR", help="the folder docs, whose page and picture to rewrite"
    )
    args = parser.parse_args()
    sections = {"scaling": laws(), "speeds": speeds(json.loads(BENCH.read_text()))}
    if args.results is None:
        print("\n".join(sections.values()))
        return 0
    for name, text in sections.items():
        report.replace_section(args.results / "scaling.md", name, text)
    scaling_plan.plot(args.results / "results" / "scaling.png")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

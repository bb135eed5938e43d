#!/usr/bin/env python3
"""Ablations of the ITQ3_S paper on a model and its two outlier twins: tables, JSON and plots.

    scripts/ablation/ablate.py models/demo-llama                    # writes build/ablation
    scripts/ablation/ablate.py models/demo-llama --results docs     # and the section of docs/results.md, docs/results/*

Interrupt it at any time; the same command goes on from the results that are done.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from gguf_itq3s.base import report  # noqa: E402
from gguf_itq3s.base.errors import UserError  # noqa: E402
from gguf_itq3s.evaluate import wikitext  # noqa: E402
from scripts.ablation import plots, study  # noqa: E402
from scripts.train.twins import make_twins  # noqa: E402


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model_dir", type=Path, help="Hugging Face folder of a model with Llama's names")
    parser.add_argument("--chunks", type=int, default=8, help="windows of 512 tokens to score (default: %(default)s)")
    parser.add_argument("--work-dir", type=Path, default=ROOT / "build" / "ablation", help="twins and cached results")
    parser.add_argument("--results", type=Path, help="folder of results.md to update (tables, results/*.json, *.png)")
    args = parser.parse_args()
    try:
        twins = args.work_dir / "twins"
        make_twins(args.model_dir, twins)
        names = ("model", "weight twin", "activation twin")
        models = dict(zip(names, (args.model_dir, twins / "weight-twin", twins / "activation-twin"), strict=True))
        text = wikitext.read(wikitext.test_path())
        result = study.study(models, text, args.chunks, args.work_dir / "cache")
        out = args.results / "results" if args.results else args.work_dir
        out.mkdir(parents=True, exist_ok=True)
        (out / "ablation.json").write_text(json.dumps(result, indent=1) + "\n")
        plots.distributions(models, out / "ablation_distributions.png")
        plots.divergences(result, out / "ablation_kld.png")
        tables = study.tables(result)
        (args.work_dir / "ablation.md").write_text(tables)
        print(tables)
        if args.results:
            report.replace_section(args.results / "results.md", "ablation", tables)
    except (UserError, OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted; the same command goes on from here", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

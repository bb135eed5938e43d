"""The command ``gguf-itq3s eval``: compare quantization types on a text, with a table, JSON and plots."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from .. import upstream
from ..base import report
from ..base.errors import positive
from ..checkpoint import trust
from ..codec import native
from . import plots
from .rows import kv_rows, weight_rows
from .runner import Settings, evaluate, hash_of, write_json

DESCRIPTION: Final = (
    "Quantize a model to every type and compare each file with F16: KL divergence, which is the main figure, and "
    "perplexity. Results are cached by all that decides them; an interrupted evaluation goes on where it was."
)


def add_parser(subparsers: Any) -> None:
    """Add the subcommand ``eval``."""
    parser = subparsers.add_parser("eval", help="compare quantization types on a text", description=DESCRIPTION)
    add_arguments(parser)
    parser.set_defaults(run=run, needs_source=True)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command, on any parser."""
    parser.add_argument("model", type=Path, help="Hugging Face folder, or an F16 GGUF file")
    parser.add_argument("--out", type=Path, help="folder for table, JSON and plots (default: the work folder)")
    parser.add_argument(
        "--work-dir", type=Path, default=upstream.cache_dir() / "eval", help="cached results (default: %(default)s)"
    )
    parser.add_argument("--rows", nargs="+", default=[], metavar="KEY", help="only these rows; wildcards are allowed")
    parser.add_argument("--list-rows", action="store_true", help="print the keys of all rows and stop")
    parser.add_argument(
        "--chunks", type=int, default=Settings.chunks,
        help="windows to score, -1 for the whole text (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--ctx", type=positive, default=Settings.context, help="tokens of a window (default: %(default)s)"
    )
    parser.add_argument("--threads", type=positive, default=native.processors(), help="default: %(default)s")
    parser.add_argument(
        "--text", type=Path, metavar="FILE",
        help="what is scored: any text file in UTF-8, of some pages (default: WikiText-2's test split)",
    )  # fmt: skip
    parser.add_argument(
        "--training-text", type=Path, metavar="FILE",
        help="what importance matrix and calibration learn from: any text file, not the one that is scored (default: "
        "another split of WikiText-2)",
    )  # fmt: skip
    trust.add_argument(parser)
    parser.add_argument("--keep", action="store_true", help="keep quantized files and log-probabilities")


def settings_of(args: argparse.Namespace) -> Settings:
    """Settings from parsed options; every model has its own folder for files, named by its path."""
    work = args.work_dir / f"{args.model.name}-{hash_of(str(args.model.resolve()))[:8]}"
    return Settings(
        args.model, work, tuple(args.rows), args.chunks, args.ctx, args.threads, args.keep, args.text,
        args.training_text, trust_remote_code=args.trust_remote_code,
    )  # fmt: skip


def run(args: argparse.Namespace) -> int:
    """Run the command; returns the exit code."""
    weights, caches = weight_rows(), kv_rows()
    if args.list_rows:
        for row in [*weights, *caches]:
            print(f"{row.key:32} {row.label:8} {row.how}")
        return 0
    report.require_matplotlib()
    settings = settings_of(args)
    results = evaluate(settings, {"weights": weights, "KV cache": caches})
    out = args.out or settings.work
    out.mkdir(parents=True, exist_ok=True)
    tables = "\n".join(f"#### {title}\n\n{results_table(rows)}" for title, rows in results.items())
    (out / "eval.md").write_text(tables, encoding="utf-8")
    text = settings.text.name if settings.text else "WikiText-2 test"
    facts = {"model": settings.model.name, "text": text, "context": settings.context, "tables": results}
    write_json(out / "eval.json", facts)
    if results.get("weights"):
        plots.pareto(results["weights"], "mean_kld", out / "eval_kld.png")
        plots.pareto(results["weights"], "perplexity", out / "eval_perplexity.png")
    print(tables)
    print(f"table, JSON and plots are in {out}", file=sys.stderr)
    return 0


def results_table(results: Sequence[Mapping[str, Any]]) -> str:
    """The table of a group of rows, by descending size of the file, then by KL divergence."""
    columns = [
        "type", "made", "bits/w, file", "bits/w, matrices", "MiB", "PPL", "mean KLD", "99% KLD", "same top, %", "row",
    ]  # fmt: skip
    lines = [
        [r["type"], r["how"], f"{r['file_bits']:.3f}", f"{r['tensor_bits']:.3f}", f"{r['bytes'] / 2**20:.2f}",
         f"{r['perplexity']:.2f} ± {r['perplexity_error']:.2f}",
         f"{round(r['mean_kld'], 5) + 0.0:.5f} ± {r['mean_kld_error']:.5f}",  # no minus before a zero
         f"{r['kld_99']:.4f} ± {r['kld_99_error']:.4f}",
         f"{100 * r['same_top']:.2f} ± {100 * r['same_top_error']:.2f}", f"`{r['key']}`"]
        for r in sorted(results, key=lambda r: (-r["file_bits"], r["mean_kld"]))
    ]  # fmt: skip
    return report.markdown(columns, lines, left=2)

"""The command ``gguf-itq3s eval``: compare quantization types on a text, with a table, JSON and a picture."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from .. import upstream
from ..base import report
from ..base.errors import UserError, positive
from ..checkpoint import trust
from ..codec import native
from . import tables, wikitext
from .engine import Evaluation, Result, Settings, Text, chosen, hash_of, write_json
from .rows import Row, kv_rows, weight_rows

DESCRIPTION: Final = (
    "Quantize a model to every type and compare each file with F16: KL divergence, which is the main figure, and "
    "perplexity. Results are cached by all that decides them; an interrupted evaluation goes on where it was."
)
#: What ``--quick`` takes.
QUICK: Final = ("f16", "q4_k_m-imatrix", "q3_k-pure", "iq3_s-pure", "itq3_s-pure", "convert-pure-sequential")
WINDOWS: Final = 32


def add_parser(subparsers: Any) -> None:
    """Add the subcommand ``eval``."""
    parser = subparsers.add_parser("eval", help="compare quantization types on a text", description=DESCRIPTION)
    add_arguments(parser)
    parser.set_defaults(run=run, needs_source=True)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command, on any parser."""
    parser.add_argument("model", type=Path, help="Hugging Face folder, or an F16 GGUF file")
    parser.add_argument("--out", type=Path, help="folder for table, JSON and picture (default: the work folder)")
    parser.add_argument(
        "--work-dir", type=Path, default=upstream.cache_dir() / "eval", help="cached results (default: %(default)s)"
    )
    parser.add_argument("--rows", nargs="+", default=[], metavar="KEY", help="only these rows; wildcards are allowed")
    parser.add_argument("--quick", action="store_true", help=f"six rows: {' '.join(QUICK)}")
    parser.add_argument("--list-rows", action="store_true", help="print the keys of all rows and stop")
    parser.add_argument(
        "--chunks", type=int, default=WINDOWS, help="windows to score, -1 for the whole text (default: %(default)s)"
    )
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
    text = Text(wikitext.read(args.text or wikitext.test_path()), args.chunks, args.text)
    try:
        training: str | None = wikitext.read(args.training_text or wikitext.training_path())
    except UserError:  # without WikiText-2, a text of the user's own is scored all the same
        if args.text is None or args.training_text is not None:
            raise
        training = None
    return Settings(
        args.model, work, {args.text.name if args.text else "WikiText-2 test": text}, training, context=args.ctx,
        threads=args.threads, keep=args.keep, trust_remote_code=args.trust_remote_code,
    )  # fmt: skip


def evaluate(args: argparse.Namespace) -> tuple[Settings, dict[str, list[Result]]]:
    """The two tables, or of them the rows that were asked for."""
    groups: Mapping[str, Sequence[Row]] = {"weights": weight_rows(), "KV cache": kv_rows()}
    wanted = chosen([row for rows in groups.values() for row in rows], args.rows or (QUICK if args.quick else ()))
    settings = settings_of(args)  # texts may have to be downloaded
    results = {row["key"]: row for row in Evaluation(settings).run(wanted)}
    found = {title: [results[row.key] for row in rows if row.key in results] for title, rows in groups.items()}
    return settings, {title: rows for title, rows in found.items() if rows}


def facts_of(settings: Settings, results: Mapping[str, Sequence[Result]]) -> dict[str, Any]:
    """What ``eval.json`` holds: the figures of a row beside what it is."""
    (text,) = settings.texts
    flat = {
        title: [
            {**{k: v for k, v in row.items() if k not in ("made", "texts")}, **row["made"], **row["texts"][text]}
            for row in rows
        ]
        for title, rows in results.items()
    }
    return {"model": settings.model.name, "text": text, "context": settings.context, "tables": flat}


def run(args: argparse.Namespace) -> int:
    """Run the command; returns the exit code."""
    if args.list_rows:
        for row in [*weight_rows(), *kv_rows()]:
            print(f"{row.key:32} {row.type:8} {row.how}")
        return 0
    report.require_matplotlib()
    settings, results = evaluate(args)
    out = args.out or settings.work
    out.mkdir(parents=True, exist_ok=True)
    page = "\n".join(f"#### {title}\n\n{tables.quality(rows)}" for title, rows in results.items())
    (out / "eval.md").write_text(page, encoding="utf-8")
    write_json(out / "eval.json", facts_of(settings, results))
    tables.picture(
        {"bits per weight of the matrices": results.get("weights", [])}, args.model.name, out / "eval_kld.png"
    )
    print(page)
    print(f"table, JSON and picture are in {out}", file=sys.stderr)
    return 0

#!/usr/bin/env python3
"""Everything that `make real` measures: quantization of a real language model, on three texts.

    scripts/tables/real.py                             # Qwen2.5-Coder-1.5B; writes build/real
    scripts/tables/real.py --quick                     # six rows on two texts
    scripts/tables/real.py smollm2                     # a model of 135 million weights whose rows are 576 long
    scripts/tables/real.py FOLDER                      # any Hugging Face folder, or hf:organisation/name
    scripts/tables/real.py --rows itq3_s 'q3_k*'       # some rows; --list-rows prints them all
    scripts/tables/real.py --results docs              # and the sections of docs/real.md, README.md, docs/results/*

Interrupt it at any time; the same command goes on from the rows that are done. The tables show every row that has been
measured with the same model, texts and tools, whatever rows are asked for now.
"""

from __future__ import annotations

import argparse
import fnmatch
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tqdm import tqdm  # noqa: E402

from gguf_itq3s import upstream  # noqa: E402
from gguf_itq3s.base import report  # noqa: E402
from gguf_itq3s.base.errors import UserError, positive, report_errors  # noqa: E402
from gguf_itq3s.checkpoint.hub import download  # noqa: E402
from gguf_itq3s.codec import native  # noqa: E402
from gguf_itq3s.codec.transform import BLOCK  # noqa: E402
from gguf_itq3s.evaluate.rows import Row, layer_rows, mix_rows  # noqa: E402
from gguf_itq3s.evaluate.runner import Result, hash_of, write_json  # noqa: E402
from gguf_itq3s.evaluate.tools import Tools  # noqa: E402
from scripts.real import models, texts  # noqa: E402
from scripts.real import report as pages  # noqa: E402
from scripts.real.measure import Measurement, Setup, Text  # noqa: E402

# After the package, which sees to it that gguf-py is the one of the llama.cpp source.
# isort: split
import gguf  # noqa: E402

#: Text -> windows that are scored.
WINDOWS: Final = {"wiki": 12, "code": 8, "chat": 8}
CONTEXT: Final = 512
#: Of the training text, for importance matrix and calibration alike.
TOKENS: Final = 20480
#: The quick form: no chat, which has to be written first, and less to learn from.
QUICK_TEXTS: Final = ("wiki", "code")
QUICK_TOKENS: Final = 8192
QUICK_ROWS: Final = (
    "itq3_s", "itq3_s-imatrix", "itq3_s-calibrate", "q3_k-imatrix", "iq3_s-imatrix", "mix-iq4_xs-imatrix",
)  # fmt: skip
#: Label -> name for llama-quantize, and which the others are compared with.
SPEED: Final = {
    "ITQ3_S": "ITQ3_S", "ITQ2_S": "ITQ2_S", "IQ2_XXS": "IQ2_XXS", "Q2_K": "Q2_K", "IQ3_S": "IQ3_S", "Q3_K": "Q3_K_S",
    "IQ4_XS": "IQ4_XS", "Q4_K": "Q4_K_S",
}  # fmt: skip
#: With rows that are no multiple of 256.
SHORT_SPEED: Final = {"ITQ3_N": "ITQ3_N", "ITQ2_N": "ITQ2_N", "IQ4_NL": "IQ4_NL"}
OVER: Final = ("IQ2_XXS", "Q2_K", "Q3_K", "Q4_K", "IQ4_NL")
ROUNDS: Final = 5
PROMPT: Final = 256
GENERATED: Final = 32
#: The README's table.
SUMMARY: Final = (
    "itq3_s", "itq3_s-imatrix", "itq3_s-calibrate", "itq3_s-fisher", "q3_k", "q3_k-imatrix", "iq3_s", "iq3_s-imatrix",
    "iq3_xxs-imatrix", "itq2_s-imatrix", "itq2_s-fisher", "iq2_xxs-imatrix", "q2_k-imatrix",
)  # fmt: skip
RESULTS: Final = "real.json"
PICTURE: Final = "real_kld.png"


@dataclass(frozen=True)
class Source:
    """A model, ready to be measured.

    Attributes:
        name: short, for folders and marks of sections.
        title: for pages.
        folder: Hugging Face folder.
        f16: F16 file of it.
        work: cache of everything else.
        fetched: where it is from, None of a model of the user's own.
    """

    name: str
    title: str
    folder: Path
    f16: Path
    work: Path
    fetched: models.Model | None


def prepare(asked: str, cache: Path) -> Source:
    """The model as a Hugging Face folder and an F16 file, fetched and decoded if that has not been done.

    Args:
        asked: a name of :data:`scripts.real.models.MODELS`, a folder, or ``hf:organisation/name``.
        cache: what is fetched and made goes below it.

    Raises:
        UserError: there is no such model, it cannot be had, or it does not decode to what was published.
    """
    if (known := models.MODELS.get(asked)) is not None:
        work = cache / asked
        folder, published = work / "hf", work / f"{asked}.gguf"
        if not folder.is_dir():
            published = models.fetch(asked, known, work)
            _child(ROOT / "scripts" / "real" / "decode.py", published, folder)
        f16 = _f16(folder, work, published)
        return Source(asked, known.title, folder, f16, work, known)
    if asked.startswith("hf:"):
        folder, title = download(asked.removeprefix("hf:")), asked.removeprefix("hf:").partition("@")[0]
    else:
        folder = Path(asked).expanduser()
        title = folder.resolve().name
    if not (folder / "config.json").is_file():
        raise UserError(
            folder, "is no Hugging Face folder", f"give one, hf:organisation/name, or {' or '.join(models.MODELS)}"
        )
    name = title.rpartition("/")[2]
    work = cache / f"{name}-{hash_of(str(folder.resolve()))[:8]}"
    return Source(name, title, folder, _f16(folder, work, None), work, None)


def _f16(folder: Path, work: Path, published: Path | None) -> Path:
    """The F16 file of a folder; of a decoded one it is compared with what was published."""
    files = [(p.name, p.stat().st_size, p.stat().st_mtime_ns) for p in sorted(folder.iterdir()) if p.is_file()]
    path = work / f"f16-{hash_of(files)}.gguf"
    if not path.is_file():
        work.mkdir(parents=True, exist_ok=True)
        made = work / f"unchecked-{path.name}"
        _child("-m", "gguf_itq3s.cli", "convert", folder, made, "--outtype", "f16")
        if published is not None and published.is_file():
            from scripts.real import decode

            decode.check(published, made)
        made.replace(path)
    return path


def _child(*arguments: str | Path) -> None:
    """Run Python on something large, whose memory is given back by its end.

    Raises:
        SystemExit: it failed, and has said why.
    """
    done = subprocess.run([sys.executable, *map(str, arguments)], cwd=ROOT, stdout=2, check=False)  # fd 2: as messages
    if done.returncode:
        raise SystemExit(1)


def texts_of(source: Source, names: Sequence[str], code: Path | None, threads: int) -> tuple[Text, ...]:
    """The texts to score; the chat is left out, and said, of a model without a template."""
    found = []
    for name in names:
        if name == "wiki":
            found.append(Text(name, texts.wiki(), WINDOWS[name]))
        elif name == "code":
            found.append(Text(name, texts.code(code), WINDOWS[name]))
        else:
            tools = Tools.find(threads)
            kept = source.work / f"answers-{hash_of(source.f16.name)[:8]}.json"
            content = texts.chat(source.folder, source.f16, tools.folder / "llama-server", kept, threads)
            if content is None:
                print("note: left out, the model has no chat template: chat", file=sys.stderr)
            else:
                found.append(Text(name, content, WINDOWS[name], marked=True))
    return tuple(found)


def chosen(rows: Sequence[Row], patterns: Sequence[str]) -> list[Row]:
    """The rows that some pattern fits.

    Raises:
        UserError: none is.
    """
    found = [row for row in rows if not patterns or any(fnmatch.fnmatch(row.key, p) for p in patterns)]
    if not found:
        known = ", ".join(row.key for row in rows)
        raise UserError("--rows", f"no row is called {' or '.join(patterns)}", f"take some of: {known}")
    return found


def has_short_rows(path: Path) -> bool:
    """Whether a matrix of the layers of a file has rows that are no multiple of 256."""
    tensors = [tensor for tensor in gguf.GGUFReader(path).tensors if tensor.name.startswith("blk.")]
    return any(len(tensor.shape) > 1 and int(tensor.shape[0]) % BLOCK for tensor in tensors)


def measured(measurement: Measurement, rows: Sequence[Row], *, older: bool) -> None:
    """Measure rows in order, with a progress bar; what this version cannot make is left out, and said."""
    lacks = {row.key: measurement.lacks(row) for row in rows}
    for what in dict.fromkeys(filter(None, lacks.values())):
        left = ", ".join(key for key, lack in lacks.items() if lack == what)
        print(f"note: left out, this version of the converter has no {what}: {left}", file=sys.stderr)
    possible = [row for row in rows if not lacks[row.key]]
    with tqdm(total=len(possible), unit="row", desc="real") as bar:
        for row in possible:
            bar.set_postfix_str(row.key)
            measurement.measure(row, older=older)
            bar.update()


def facts_of(source: Source, setup: Setup, rows: Sequence[Result], speed: Result | None) -> dict[str, Any]:
    """All that the pages say, as JSON keeps it."""
    first = rows[0]["texts"] if rows else {}
    return {
        "model": source.title, "weights": rows[0]["made"]["weights"] if rows else 0, "context": setup.context,
        "training_tokens": setup.tokens,
        "texts": {
            text.name: {
                "sha256": text.sha256, "characters": len(text.content),
                **{key: first[text.name][key] for key in ("chunks", "tokens", "f16", "f16_error") if first},
            }
            for text in setup.texts
        },
        "speed": speed, "rows": list(rows),
    }  # fmt: skip


def page_of(facts: dict[str, Any]) -> str:
    """The section of a model."""
    rows = facts["rows"]
    parts = [_introduction(facts)]
    for title, members in (
        ("Layers in one type, embedding and output in F16; bits are those of the layers:",
         [row for row in rows if not row["key"].startswith("mix-")]),
        ("Whole files as a user makes them; bits are those of all matrices:",
         [row for row in rows if row["key"].startswith("mix-")]),
    ):  # fmt: skip
        if members:
            parts += [title + "\n", pages.quality(members)]
    if note := pages.older(rows):
        parts.append(note)
    parts += ["Mean KL divergence over that of another row, the same windows, paired errors:\n", pages.ratios(rows)]
    parts += ["What making the files took (core minutes are those of all threads together):\n", pages.making(rows)]
    if facts["speed"]:
        parts += [
            "Speed by llama-bench, two threads, over other types in the same round; layers in the type, embedding and "
            "output in Q6_K, median and range of the rounds:\n",
            pages.speed(facts["speed"], [base for base in OVER if base in facts["speed"]["prompt"]]),
        ]
    return "\n".join(parts)


def _introduction(facts: dict[str, Any]) -> str:
    scored = ", ".join(
        f"{name} {text['chunks']} windows, F16 has perplexity {text['f16']:.3f}"
        for name, text in facts["texts"].items() if "f16" in text
    )  # fmt: skip
    return (
        f"{facts['model']}, {report.count(facts['weights'])} weights; windows of {facts['context']} tokens, the second "
        f"halves are scored: {scored}. Importance matrix and calibration: {facts['training_tokens']} tokens of one "
        "text.\n"
    )


def write_results(source: Source, facts: dict[str, Any], rows: Sequence[Result], docs: Path) -> None:
    """The sections of the pages; the README's and the picture are of the first model alone."""
    suffix = "" if source.name == models.FIRST else f"_{source.name}"
    drawn = PICTURE.replace(".png", f"{suffix}.png")
    pages.picture(rows, f"{source.title}, {report.count(facts['weights'])} weights", docs / "results" / drawn)
    link = f"\n![KL divergence from F16 over bits per weight, {source.title}](results/{drawn})\n"
    report.replace_section(docs / "real.md", f"real {source.name}", page_of(facts) + link)
    write_json(docs / "results" / RESULTS.replace(".json", f"{suffix}.json"), facts)
    if source.name == models.FIRST:
        report.replace_section(docs.parent / "README.md", "real", readme_section(source, rows))


def readme_section(source: Source, rows: Sequence[Result]) -> str:
    """The pictures and the short table that the README begins with."""
    pictures = (
        f"![KL divergence from F16 over bits per weight, {source.title}](docs/results/{PICTURE})",
        "![tokens per second over the tokens evaluated together](docs/results/columns.png)",
    )
    head = report.markdown(["how much is lost (lower is better)", "how fast (higher is better)"], [pictures], left=2)
    said = f"Mean KL divergence from F16 of {source.title}, the matrices of its layers in the type ([docs/real.md]"
    parts = [pages.summary(rows, SUMMARY), pages.older([row for row in rows if row["key"] in SUMMARY])]
    return f"{head}\n{said}(docs/real.md)):\n\n" + "\n".join(filter(None, parts))


@report_errors
def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "model", nargs="?", default=models.FIRST,
        help=f"{', '.join(models.MODELS)}, a Hugging Face folder, or hf:organisation/name (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--rows", nargs="+", default=[], metavar="KEY", help="only these rows; wildcards are allowed (default: "
        "all, those in blocks of 64 where the model has rows that are no multiple of 256)",
    )  # fmt: skip
    parser.add_argument("--list-rows", action="store_true", help="print the keys of all rows and stop")
    parser.add_argument("--quick", action="store_true", help="six rows on two texts, with less to learn from")
    parser.add_argument(
        "--texts", nargs="+", choices=WINDOWS, metavar="TEXT", help=f"what is scored (default: {' '.join(WINDOWS)})"
    )
    parser.add_argument("--code-text", type=Path, metavar="FILE", help=f"source code (default: {texts.CODE})")
    parser.add_argument("--training-text", type=Path, metavar="FILE", help=f"to learn from (default: {texts.TRAINING})")
    parser.add_argument("--tokens", type=positive, help=f"of it (default: {TOKENS}, quick {QUICK_TOKENS})")
    parser.add_argument("--threads", type=positive, default=native.processors(), help="default: %(default)s")
    parser.add_argument("--no-speed", action="store_true", help="leave out llama-bench")
    parser.add_argument(
        "--older", action="store_true", help="take files that were made by an earlier state of the converter; marked †"
    )
    parser.add_argument("--keep", action="store_true", help="keep quantized files; a file serves every text")
    parser.add_argument("--prepare", action="store_true", help="fetch and decode the model, and stop")
    parser.add_argument("--no-measure", action="store_true", help="only write the tables of what has been measured")
    parser.add_argument(
        "--work-dir", type=Path, default=upstream.cache_dir() / "real", help="models and results (default: %(default)s)"
    )
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "real", help="tables (default: build/real)")
    parser.add_argument("--results", type=Path, metavar="DOCS", help="folder of real.md to update, with its results")
    args = parser.parse_args()
    every = [*layer_rows(short=True), *mix_rows(short=True)]
    if args.list_rows:
        for row in every:
            print(f"{row.key:24} {row.label:8} {row.how}")
        return 0
    if args.results and args.quick:
        raise UserError(args.results, "is not for the quick form", "leave --quick or --results out")
    report.require_matplotlib()
    wanted = chosen(every, args.rows or (QUICK_ROWS if args.quick else ()))
    # The tools are asked for first: the model takes minutes to come.
    Tools.find(args.threads)
    source = prepare(args.model, args.work_dir)
    print(f"{source.title}: {source.folder} and {source.f16.name}", file=sys.stderr)
    if args.prepare:
        return 0
    short = has_short_rows(source.f16)
    if not args.rows and not args.quick:
        # ggml itself takes no other type where rows are not whole blocks.
        wanted = [row for row in every if row.maker != "ggml"] if short else [*layer_rows(), *mix_rows()]
    setup = Setup(
        source.folder, source.f16, source.work,
        texts_of(source, args.texts or (QUICK_TEXTS if args.quick else tuple(WINDOWS)), args.code_text, args.threads),
        texts.training(args.training_text), args.tokens or (QUICK_TOKENS if args.quick else TOKENS), CONTEXT,
        args.threads, args.keep,
    )  # fmt: skip
    measurement = Measurement(setup)
    if not args.no_measure:
        measured(measurement, wanted, older=args.older)
    rows = [result for row in every if (result := measurement.found(row)) is not None]
    if not rows:
        raise UserError(source.work, "holds no measured row of this model and these texts", "leave --no-measure out")
    speed = (
        None
        if args.no_speed or args.quick
        else measurement.speed(
            SPEED | SHORT_SPEED if short else SPEED, ROUNDS, PROMPT, GENERATED, known=args.no_measure
        )
    )
    facts = facts_of(source, setup, rows, speed)
    out = args.out / source.name
    out.mkdir(parents=True, exist_ok=True)
    (out / "real.md").write_text(page_of(facts), encoding="utf-8")
    write_json(out / RESULTS, facts)
    pages.picture(rows, source.title, out / PICTURE)
    print(page_of(facts))
    print(f"tables, JSON and picture are in {os.path.relpath(out)}", file=sys.stderr)
    if args.results:
        write_results(source, facts, rows, args.results)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

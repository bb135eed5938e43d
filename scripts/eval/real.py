#!/usr/bin/env python3
"""Everything that `make real` measures: quantization of a real language model, on prose and on code.

    scripts/eval/real.py                             # Qwen2.5-Coder-1.5B; writes build/real
    scripts/eval/real.py --quick                     # six rows, with less to learn from
    scripts/eval/real.py smollm2                     # a model of 135 million weights whose rows are 576 long
    scripts/eval/real.py gemma-3-270m                # rows of 640, a vocabulary of 262144
    scripts/eval/real.py qwen2.5-coder-1.5b-shuffled # its channels in another order: a judge for Q4_K too
    scripts/eval/real.py FOLDER                      # any Hugging Face folder, or hf:organisation/name
    scripts/eval/real.py --rows itq3_s 'q3_k*'       # some rows; --list-rows prints them all
    scripts/eval/real.py --results docs              # and the sections of docs/real.md, README.md, docs/results/*

Interrupt it at any time; the same command goes on from the rows that are done. With --results, rows that are not
measured now stay in the pages as docs/results has them, with a mark where another state of the package made them;
--no-measure only writes the pages anew.

--speed also times the files of llama.cpp's sizes that are measured now, beside Q4_K_M's, in the build as it is and in
one for AVX2.

=========  =====================================  =================================================================
text       where it is looked for                 else
=========  =====================================  =================================================================
wiki       ``WIKITEXT2``                          downloaded, as by ``gguf-itq3s eval``
code       ``--code-text``, ``REAL_CODE``         files of Python's own library
training   ``--training-text``, ``REAL_TRAINING``  the text that comes with the package
=========  =====================================  =================================================================
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from gguf_itq3s import upstream
from gguf_itq3s.base import report
from gguf_itq3s.base.errors import UserError, positive, report_errors
from gguf_itq3s.base.journal import sources
from gguf_itq3s.calibrate.text import bundled_text
from gguf_itq3s.checkpoint.hub import download
from gguf_itq3s.codec import native
from gguf_itq3s.codec.family import DEFAULT, FAMILY
from gguf_itq3s.codec.transform import BLOCK
from gguf_itq3s.evaluate import tables, wikitext
from gguf_itq3s.evaluate.engine import ABOVE, Evaluation, Settings, Text, chosen, hash_of, write_json
from gguf_itq3s.evaluate.rows import FISHER, IMATRIX, LAYERWISE, Row, converted, quantized
from gguf_itq3s.evaluate.tools import Tools
from scripts.bench import cpu
from scripts.eval import decode, models
from scripts.eval.shuffle import shuffle

# After the package, which sees to it that gguf-py is the one of the llama.cpp source.
# isort: split
import gguf

Result = Mapping[str, Any]
ROOT: Final = Path(__file__).resolve().parents[2]
#: Text -> windows that are scored.
WINDOWS: Final = {"wiki": 12, "code": 8}
#: Of the training text, for importance matrix and calibration alike; of the quick form.
TOKENS, QUICK_TOKENS = 20480, 8192
QUICK_ROWS: Final = (
    "itq3_s", "itq3_s-imatrix", "itq3_s-calibrate", "q3_k-imatrix", "iq3_s-imatrix", "mix-iq4_xs-imatrix",
)  # fmt: skip
#: llama.cpp's files that ours are compared with at their own sizes -> their rows and ours.
BY_SIZE: Final = {
    name: (f"mix-{name.lower()}-imatrix", f"mix-like-{name.lower()}")
    for name in ("Q4_K_M", "IQ4_XS", "Q3_K_M", "IQ3_M", "IQ3_XXS", "Q2_K", "IQ2_M", "IQ2_XS")
}
RATIOS: Final[tuple[tables.Ratio, ...]] = (
    ("ITQ3_S / IQ3_S, both without data", "itq3_s", "iq3_s"),
    ("ITQ3_S / Q3_K, both without data", "itq3_s", "q3_k"),
    ("ITQ3_S, norms folded / as they are", "itq3_s-folded", "itq3_s"),
    ("ITQ3_S, `--equalize` without text / no data", "itq3_s-equalize", "itq3_s"),
    ("ITQ3_S `--imatrix`, equalized / not", "itq3_s-imatrix", "itq3_s-imatrix-plain"),
    ("ITQ3_S `--imatrix` / IQ3_S, imatrix", "itq3_s-imatrix", "iq3_s-imatrix"),
    ("ITQ3_S `--layerwise` / ITQ3_S, no data", "itq3_s-calibrate", "itq3_s"),
    ("ITQ3_S `--layerwise --fisher` / IQ3_S, imatrix", "itq3_s-fisher", "iq3_s-imatrix"),
    ("ITQ2_S `--layerwise --fisher` / IQ2_XXS, imatrix", "itq2_s-fisher", "iq2_xxs-imatrix"),
    ("ITQ2_S `--layerwise --fisher` / Q2_K, imatrix", "itq2_s-fisher", "q2_k-imatrix"),
    ("ITQ4_S, no data / IQ4_XS, imatrix", "itq4_s", "iq4_xs-imatrix"),
    ("ITQ4_S `--layerwise --fisher` / Q4_K, imatrix", "itq4_s-fisher", "q4_k-imatrix"),
    ("ITQ4_N `--layerwise` / IQ4_NL, imatrix", "itq4_n-calibrate", "iq4_nl-imatrix"),
    ("ITQ4_N `--layerwise --fisher` / IQ4_NL, imatrix", "itq4_n-fisher", "iq4_nl-imatrix"),
    ("ITQ4_N `--layerwise --fisher` / ITQ4_N, no data", "itq4_n-fisher", "itq4_n"),
    ("Q4_K_M `--layerwise` / Q4_K_M, imatrix", "mix-q4_k_m-calibrate", "mix-q4_k_m-imatrix"),
    ("IQ4_XS `--layerwise` / IQ4_XS, imatrix", "mix-iq4_xs-calibrate", "mix-iq4_xs-imatrix"),
    ("IQ4_NL `--layerwise` / IQ4_NL, imatrix", "mix-iq4_nl-calibrate", "mix-iq4_nl-imatrix"),
    ("Q3_K_M `--layerwise` / Q3_K_M, imatrix", "mix-q3_k_m-calibrate", "mix-q3_k_m-imatrix"),
    ("mix of ITQ4_S `--layerwise` / mix of Q4_K_M, imatrix", "mix-itq4_s-calibrate", "mix-q4_k_m-imatrix"),
    ("ITQ3_N `--layerwise --fisher` / Q3_K_S, imatrix", "itq3_n-fisher", "q3_k-imatrix"),
    ("ITQ3_N `--layerwise --fisher` / IQ4_NL, imatrix", "itq3_n-fisher", "iq4_nl-imatrix"),
    ("mix of ITQ3_S `--layerwise --fisher` / mix of IQ3_S, imatrix", "mix-itq3_s-fisher", "mix-iq3_s-imatrix"),
    *(
        (f"size of {name}, `--layerwise --fisher` / {name}, imatrix", ours, theirs)
        for name, (theirs, ours) in BY_SIZE.items()
    ),
)
PICTURE: Final = "sizes.png"
#: The row whose speed others are compared with, rounds of timing, and what is timed in each.
TIMED: Final = BY_SIZE["Q4_K_M"][0]
ROUNDS: Final = 5
GENERATION: Final = ("-p", "0", "-n", "32", "-r", "1")


# ------------------------------------------------------------------------------------------------------------ rows


def every_row() -> list[Row]:
    """The matrices of the layers in one type, embedding and output in F16; then whole files as a user makes them."""
    outer = ("--token-embedding-type", "f16", "--output-tensor-type", "f16")
    plain = ("--no-fold-norms", "--no-equalize")
    ways = (
        ("", "no data", ("--no-fold-norms",)), ("-imatrix", "imatrix, equalized", ("--equalize", *IMATRIX)),
        ("-calibrate", "calibrated in sequence", LAYERWISE), ("-fisher", "calibrated in sequence, Fisher", FISHER),
    )  # fmt: skip
    # What equalization and folding are worth is shown of one type.
    more = (
        ("-folded", "no data, folded", ("--fold-norms",)), ("-equalize", "equalized, no text given", ("--equalize",)),
        ("-imatrix-plain", "imatrix, not equalized", (*plain, *IMATRIX)),
        ("-calibrate-plain", "calibrated in sequence, not equalized", (*plain, *LAYERWISE)),
    )  # fmt: skip
    rows = []
    for own in FAMILY.values():
        options = ("--outtype", own.identifier, "--pure", *outer)
        found = (*ways, *more) if own is DEFAULT else ways
        rows += converted(own.identifier, own.name, "layers, ", found, *options)
    for qtype in ("Q3_K", "IQ3_S", "IQ3_XXS", "IQ4_XS", "Q4_K", "Q2_K", "IQ2_XXS", "IQ4_NL"):
        name = {"Q3_K": "Q3_K_S", "Q4_K": "Q4_K_S"}.get(qtype, qtype)
        rows += quantized(qtype.lower(), qtype, "layers", "--pure", *outer, name)
    mixes = (("", ", no data", ()), ("-imatrix", ", imatrix", IMATRIX), *((e, f", {h}", o) for e, h, o in ways[2:]))
    for own in FAMILY.values():
        rows += converted(f"mix-{own.identifier}", own.name, "mix", mixes, "--outtype", own.identifier)
    for name in ("Q3_K_M", "IQ4_XS", "IQ4_NL", "Q4_K_M"):  # ours, for any llama.cpp
        rows += converted(f"mix-{name.lower()}", name, "mix", mixes[2:], "--outtype", name.lower())
    for name in ("IQ3_S", "Q3_K_S", "IQ4_NL", "IQ2_XXS", *BY_SIZE):
        stock = [row for row in quantized(f"mix-{name.lower()}", name, "mix", name) if row.learns]
        rows += stock
        if name in BY_SIZE:
            how, command = f"types for the size of {name}, calibrated in sequence, Fisher", ("--target-size", "{size}")
            rows.append(Row(BY_SIZE[name][1], "mix", how, ("convert", *command, *FISHER), like=stock[0]))
    return rows


def is_short(row: Row) -> bool:
    """Whether a row is for models with rows that are no multiple of 256."""
    ours = (own.identifier for own in FAMILY.values() if own.format.block < BLOCK)
    return row.key.removeprefix("mix-").startswith((*ours, "iq4_nl", "q3_k_s"))


def has_short_rows(path: Path) -> bool:
    """Whether a matrix of the layers of a file has rows that are no multiple of 256."""
    tensors = [tensor for tensor in gguf.GGUFReader(path).tensors if tensor.name.startswith("blk.")]
    return any(len(tensor.shape) > 1 and int(tensor.shape[0]) % BLOCK for tensor in tensors)


# ------------------------------------------------------------------------------------------------ model and texts


def prepare(asked: str, cache: Path) -> tuple[str, str, Path, Path]:
    """A model as a Hugging Face folder, fetched and decoded if that has not been done.

    Args:
        asked: a name of :data:`.models.MODELS`, a folder, or ``hf:organisation/name``.
        cache: what is fetched and made goes below it.

    Returns:
        Its short name, its title, the folder, and the folder of everything else.

    Raises:
        UserError: there is no such model, or it cannot be had.
    """
    if (known := models.MODELS.get(plain := asked.removesuffix(models.SHUFFLED))) is not None:
        folder = cache / plain / "hf"
        if not folder.is_dir():
            decode.decode(models.fetch(plain, known, cache / plain), folder)
        if plain == asked:
            return asked, known.title, folder, cache / asked
        if not (shuffled := cache / asked / "hf").is_dir():
            shuffle(folder, shuffled)
        return asked, f"{known.title}, shuffled", shuffled, cache / asked
    if asked.startswith("hf:"):
        folder, title = download(asked.removeprefix("hf:")), asked.removeprefix("hf:").partition("@")[0]
    else:
        folder = Path(asked).expanduser()
        title = folder.resolve().name
    if not (folder / "config.json").is_file():
        remedy = f"give one, hf:organisation/name, or {' or '.join(models.MODELS)}"
        raise UserError(folder, "is no Hugging Face folder", remedy)
    name = title.rpartition("/")[2]
    return name, title, folder, cache / f"{name}-{hash_of(str(folder.resolve()))[:8]}"


def given(option: Path | None, variable: str) -> Path | None:
    """A file by an option or a variable of the environment, None if neither names one.

    Raises:
        UserError: there is no such file.
    """
    value = option or (Path(os.environ[variable]).expanduser() if os.environ.get(variable) else None)
    if value is not None and not value.is_file():
        raise UserError(value, "no such file", f"give a text file, or unset {variable}")
    return value


def code(option: Path | None) -> str:
    """Source code: of Python's library, for who has none of the kind that the model is for."""
    if path := given(option, "REAL_CODE"):
        return wikitext.read(path)
    found = [importlib.util.find_spec(name) for name in ("tarfile", "argparse", "heapq", "difflib")]
    return "\n".join(Path(str(spec.origin)).read_text(encoding="utf-8") for spec in found if spec)[:90_000]


# ----------------------------------------------------------------------------------------------------------- speed


def time_files(files: Mapping[str, Path], threads: int, builds: cpu.Builds) -> dict[str, dict[str, float]]:
    """Tokens/s of files over the first one's in every build: medians of the ratios in rounds that run all in turn.

    Args:
        files: by the keys of their rows.
        threads: of the processor.
        builds: as of :func:`scripts.bench.cpu.build`.
    """
    samples: cpu.Samples = {build: {key: [] for key in files} for build in builds}
    for _ in range(ROUNDS):
        for build, library in builds.items():
            for key, speed in cpu.llama_bench(files, threads, *GENERATION, library=library).items():
                samples[build][key].append(speed)
    first, *_ = files
    found = {build: {key: cpu.ratio({"samples": samples}, build, key, first) for key in files} for build in builds}
    return {build: {key: round(over, 3) for key, over in by.items() if over} for build, by in found.items()}


def speeds(evaluation: Evaluation, rows: Sequence[Row]) -> dict[str, dict[str, float]]:
    """What :func:`time_files` says of rows of llama.cpp's sizes and their partners, by processor and build."""
    known = {key for keys in BY_SIZE.values() for key in keys}
    order = sorted((row for row in rows if row.key in known), key=lambda row: row.key != TIMED)
    files = {row.key: evaluation.file(row) for row in order}
    this, builds = cpu.processor()["name"], cpu.build(["AVX2"])
    found = time_files(files, evaluation.settings.threads, builds)
    return {cpu.label(this, build): ratios for build, ratios in found.items()}


# ----------------------------------------------------------------------------------------------------------- pages


def page_of(facts: Mapping[str, Any]) -> str:
    """The section of a model."""
    rows, now = facts["rows"], sources(*ABOVE)

    def older(row: Result) -> bool:
        made = row["command"].startswith("convert") and row["sources"] != now
        return made or row.get("setup") != facts.get("setup")

    scored = ", ".join(f"{name} {WINDOWS[name]} windows" for name in rows[0]["texts"])
    parts = [
        f"{facts['model']}, {report.count(rows[0]['made']['weights'])} weights; windows of {facts['context']} tokens, "
        f"the second halves are scored: {scored}. Importance matrix and calibration: {facts['training_tokens']} tokens "
        "of one text.\n"
    ]
    for title, whole in (("Layers in one type, embedding and output in F16; bits are those of the layers:\n", False),
                         ("Whole files as a user makes them; bits are those of all matrices:\n", True)):  # fmt: skip
        if members := [row for row in rows if row["key"].startswith("mix-") == whole]:
            parts += [title, tables.quality(members, older)]
    if found := tables.ratios(RATIOS, rows):
        parts += ["Mean KL divergence over that of another row, the same windows, paired errors:\n", found]
    return "\n".join(parts)


def pairs(facts: Mapping[str, Any]) -> list[tuple[str, Result, Result]]:
    """llama.cpp's files with an importance matrix beside ours of their sizes, the largest first: name, theirs, ours."""
    rows = {row["key"]: row for row in facts["rows"]}
    found = [(name, *(rows[key] for key in keys)) for name, keys in BY_SIZE.items() if rows.keys() >= set(keys)]
    return sorted(found, key=lambda pair: -pair[1]["made"]["bytes"])


def draw(every: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Plot KL divergence on the first text over the size of files, llama.cpp's and ours, a panel for each model."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    def place(row: Result) -> tuple[float, float]:
        return row["made"]["bytes"] / 2**20, row["texts"]["wiki"]["mean_kld"]

    figure, axes = plt.subplots(1, len(every), figsize=(4.4 * len(every), 4.2), squeeze=False)
    for axis, facts in zip(axes[0], every, strict=True):
        rows = {row["key"]: row for row in facts["rows"]}
        theirs = {name: rows[key] for name, (key, _) in BY_SIZE.items() if key in rows}
        for shown, colour, who in (
            (theirs.values(), "tab:blue", "llama.cpp, importance matrix"),
            ([ours for _, _, ours in pairs(facts)], "crimson", "ours, calibrated"),
        ):
            points = [place(row) for row in shown]
            axis.plot(*zip(*tables.pareto_front(points), strict=True), color=colour, label=who)
            axis.plot(*zip(*points, strict=True), "o", color=colour)
        for name, row in theirs.items():
            axis.annotate(name, place(row), textcoords="offset points", xytext=(4, 4), fontsize=7)
        axis.set(xlabel="size of the file, MiB", yscale="log", title=facts["model"])
        axis.grid(alpha=0.3, which="both")
        axis.legend(fontsize=8)
    axes[0][0].set(ylabel="mean KL divergence from F16, wiki (nats)")
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)


def readme_section(every: Sequence[Mapping[str, Any]]) -> str:
    """The picture and the table that the README begins with."""
    picture = f"![KL divergence from F16 over the size of the file, llama.cpp's and ours](docs/results/{PICTURE})"
    lines, timed = [], sorted({where for facts in every for where in facts.get("speed", {})})
    for facts in every:
        speed = [facts.get("speed", {}).get(where, {}) for where in timed]
        for name, theirs, ours in pairs(facts):
            rates = [[found.get(row["key"]) for row in (theirs, ours)] for found in speed]
            both = [(theirs["texts"][text], ours["texts"][text]) for text in WINDOWS]
            lines.append([
                facts["model"], f"{theirs['made']['bytes'] / 2**20:.0f}", name,
                *(f"{a['mean_kld']:.4f} → {b['mean_kld']:.4f}" for a, b in both),
                *(f"{tables.paired(b['windows'], a['windows'])[0]:.2f}" for a, b in both),
                f"{100 * both[0][0]['same_top']:.1f} → {100 * both[0][1]['same_top']:.1f}",
                *(" → ".join(f"{rate:.2f}" for rate in found) if all(found) else "" for found in rates),
            ])  # fmt: skip
    said = (
        "Files of the same size, llama.cpp's with an importance matrix → ours calibrated (`--target-size SIZE "
        "--layerwise --fisher`): KL divergence from the 16-bit model on WikiText-2 and on Python source, ours over "
        f"theirs, {'and ' * (not timed)}how often the most likely word stays the same"
        + ", and tokens/s over those of llama.cpp's Q4_K_M" * bool(timed)
        + " ([docs/real.md](docs/real.md)):"
    )
    header = ["", "MiB", "beside", "KLD, prose", "KLD, code", "ratio, prose", "ratio, code", "same word, %"]
    header += [f"tokens/s, {where}" for where in timed]
    return f"{picture}\n\n{said}\n\n{report.markdown(header, lines)}"


def write_pages(name: str, facts: Mapping[str, Any], docs: Path) -> None:
    """The section of a page, and the README's of all models that have files of llama.cpp's sizes."""
    report.replace_section(docs / "real.md", f"real {name}", page_of(facts))
    write_json(recorded(name, docs), facts)
    if every := with_sizes(docs):
        draw(every, docs / "results" / PICTURE)
        report.replace_section(docs.parent / "README.md", "real", readme_section(every))


def with_sizes(docs: Path) -> list[dict[str, Any]]:
    """The recorded results of the models that have files of llama.cpp's sizes, the largest model first.

    A model that has been rounded before makes way for its shuffled twin.
    """
    paths = {path: json.loads(path.read_text()) for path in sorted((docs / "results").glob("real*.json"))}
    found = {path: facts for path, facts in paths.items() if pairs(facts)}
    for name in models.MODELS:
        if recorded(name + models.SHUFFLED, docs) in found:
            found.pop(recorded(name, docs), None)
    return sorted(found.values(), key=lambda facts: -facts["rows"][0]["made"]["weights"])


def recorded(name: str, docs: Path) -> Path:
    """The file of results of a model."""
    return docs / "results" / f"real{'' if name == models.FIRST else f'_{name}'}.json"


def merged(rows: Sequence[Result], older: Sequence[Result]) -> list[Result]:
    """What was measured now, and beside it what was measured before of the other rows, in order."""
    found = {row["key"]: row for row in (*older, *rows)}
    return [found[row.key] for row in every_row() if row.key in found]


@report_errors
def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "model", nargs="?", default=models.FIRST,
        help=f"{', '.join(models.MODELS)} or one of them with {models.SHUFFLED}, a Hugging Face folder, or "
        "hf:organisation/name (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument("--rows", nargs="+", default=[], metavar="KEY", help="only these rows; wildcards are allowed")
    parser.add_argument("--list-rows", action="store_true", help="print the keys of all rows and stop")
    parser.add_argument("--quick", action="store_true", help="six rows, with less to learn from")
    parser.add_argument("--code-text", type=Path, metavar="FILE", help="source code (default: REAL_CODE)")
    parser.add_argument("--training-text", type=Path, metavar="FILE", help="to learn from (default: REAL_TRAINING)")
    parser.add_argument("--tokens", type=positive, help=f"of it (default: {TOKENS}, quick {QUICK_TOKENS})")
    parser.add_argument("--threads", type=positive, default=native.processors(), help="default: %(default)s")
    parser.add_argument("--keep", action="store_true", help="keep quantized files")
    parser.add_argument("--speed", action="store_true", help="time files of llama.cpp's sizes, too; keeps them")
    parser.add_argument("--no-measure", action="store_true", help="with --results: only write the pages anew")
    parser.add_argument(
        "--work-dir", type=Path, default=upstream.cache_dir() / "real", help="models and results (default: %(default)s)"
    )
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "real", help="tables (default: build/real)")
    parser.add_argument("--results", type=Path, metavar="DOCS", help="folder of real.md to update, with its results")
    args = parser.parse_args()
    every = every_row()
    if args.list_rows:
        for row in every:
            print(f"{row.key:24} {row.type:8} {row.how}")
        return 0
    if args.results and args.quick:
        raise UserError(args.results, "is not for the quick form", "leave --quick or --results out")
    if args.results:
        report.require_matplotlib()
    asked = chosen(every, args.rows or (QUICK_ROWS if args.quick else ()))
    if args.speed and not any(row.key == TIMED for row in asked):
        raise UserError("--speed", f"compares with {TIMED}", "let --rows name it, too")
    Tools.find(args.threads)  # first: the model takes minutes to come
    older = recorded(args.model, args.results) if args.results else Path("none")
    if args.no_measure:
        facts = json.loads(older.read_text())
        write_pages(args.model, facts, args.results)
        return 0
    name, title, folder, work = prepare(args.model, args.work_dir)
    training = given(args.training_text, "REAL_TRAINING")
    tokens = args.tokens or (QUICK_TOKENS if args.quick else TOKENS)
    texts = {"wiki": wikitext.read(wikitext.test_path()), "code": code(args.code_text)}
    learnt = bundled_text() if training is None else wikitext.read(training)
    setup = hash_of(learnt, tokens, texts)
    evaluation = Evaluation(Settings(
        folder, work, {text: Text(content, WINDOWS[text]) for text, content in texts.items()}, learnt, tokens, tokens,
        threads=args.threads, keep=args.keep or args.speed,
    ))  # fmt: skip
    if (published := work / f"{name}.gguf").is_file():
        decode.check(published, evaluation.f16)
    short = has_short_rows(evaluation.f16)
    wanted = [row for row in asked if args.rows or short or not is_short(row)]
    rows = [{**row, "setup": setup} for row in evaluation.run(wanted)]
    timed = speeds(evaluation, wanted) if args.speed else {}
    known = json.loads(older.read_text()) if older.is_file() else {}  # now: another run may have written it
    speed = known.get("speed", {})
    speed |= {where: speed.get(where, {}) | found for where, found in timed.items()}
    facts = {
        "model": title, "context": 512, "training_tokens": tokens, "setup": setup,
        "rows": merged(rows, known.get("rows", [])), "speed": speed,
    }  # fmt: skip
    out = args.out / name
    out.mkdir(parents=True, exist_ok=True)
    (out / "real.md").write_text(page_of(facts), encoding="utf-8")
    write_json(out / "real.json", facts)
    print(page_of(facts))
    print(f"tables and JSON are in {os.path.relpath(out)}", file=sys.stderr)
    if args.results:
        write_pages(name, facts, args.results)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

#!/usr/bin/env python3
"""AutoRound's GGUF files beside ours and llama-quantize's: the same mix, the same calibration text.

    python -m venv autoround && autoround/bin/pip install 'auto-round==0.16.*' gguf sentencepiece
    scripts/tables/autoround.py models/demo-llama --text mix.txt --auto-round autoround/bin/auto-round
    ... --results docs    # and the section of docs/calibration.md

AutoRound (Intel, PyPI `auto-round`) tunes the rounding of every layer by signed gradient descent and writes GGUF. It is
no dependency of this project and wants an environment of its own. Every tool gets the same windows of text: AutoRound
as a JSON file, the others as the converter takes them (`gguf_itq3s.calibrate.text.windows`). Files that are there
are not made again; what is measured is mean KL divergence from the F16 file, by llama-perplexity.
"""

from __future__ import annotations

import argparse
import json
import os
import pydoc_data.topics
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from gguf_itq3s.base import report  # noqa: E402
from gguf_itq3s.base.errors import UserError, positive, report_errors  # noqa: E402
from gguf_itq3s.calibrate.options import CalibrationOptions  # noqa: E402
from gguf_itq3s.calibrate.text import windows  # noqa: E402
from gguf_itq3s.codec.native import processors  # noqa: E402
from gguf_itq3s.convert.options import ConvertOptions  # noqa: E402
from gguf_itq3s.convert.pipeline import convert  # noqa: E402
from gguf_itq3s.evaluate import wikitext  # noqa: E402
from gguf_itq3s.evaluate.runner import describe  # noqa: E402
from gguf_itq3s.evaluate.tools import Tools  # noqa: E402

# After the package, which sees to it that gguf-py is the one of the llama.cpp source.
# isort: split
import gguf  # noqa: E402
from transformers import AutoTokenizer  # noqa: E402

CONTEXT = 512
_PROGRAM = "auto-round"


class Makers:
    """What makes the files.

    Args:
        args: of the command line.
        tools: llama.cpp's.
        work: folder of files and logs.
    """

    def __init__(self, args: argparse.Namespace, tools: Tools, work: Path) -> None:
        self.args, self.tools, self.work = args, tools, work
        self.f16 = work / "f16.gguf"
        self.count = max(1, args.tokens // CONTEXT)

    def convert(self, out: Path, **options: object) -> None:
        """The converter; its messages go to a log."""
        with (self.work / "convert.log").open("w") as log:
            convert(ConvertOptions.of(self.args.model, out, threads=self.args.threads, **options), log)  # type: ignore[arg-type]

    def calibrated(self, out: Path, **options: object) -> None:
        """The converter, calibrating while it quantizes."""
        self.convert(
            out,
            outtype=self.args.type,
            calibrate=(self.args.text,),
            tokens=self.args.tokens,
            context=CONTEXT,
            **options,
        )

    def quantize(self, out: Path, *more: object) -> None:
        """llama-quantize."""
        arguments = [*more, self.f16, out, self.args.type.upper(), self.args.threads]
        self.tools.run("llama-quantize", arguments, self.work / "quantize.log")

    def with_imatrix(self, out: Path) -> None:
        """llama-quantize with an importance matrix."""
        matrix = self.work / "imatrix.gguf"
        if not matrix.is_file():
            arguments = ["-m", self.f16, "-f", self.args.text, "-o", matrix, "-c", CONTEXT, "--chunks", self.count]
            self.tools.run("llama-imatrix", [*arguments, "-t", self.args.threads], self.work / "imatrix.log")
        self.quantize(out, "--imatrix", matrix)

    def autoround(self, out: Path) -> None:
        """AutoRound, offline, on the CPU.

        Raises:
            UserError: it failed, or wrote no file or several.
        """
        texts = self.work / "texts.json"
        options = CalibrationOptions(self.args.model, (self.args.text,), self.count * CONTEXT, CONTEXT)
        tokenizer = AutoTokenizer.from_pretrained(self.args.model)
        pieces = tokenizer.batch_decode(windows(options, CONTEXT), skip_special_tokens=True)
        texts.write_text(json.dumps([{"text": piece} for piece in pieces]))
        folder = self.work / "autoround"
        shutil.rmtree(folder, ignore_errors=True)
        scheme = f"gguf:{self.args.type}"
        command = [
            self.args.auto_round, "--model", self.args.model.resolve(), "--scheme", scheme, "--format", scheme,
            "--iters", self.args.iters, "--dataset", texts.resolve(), "--seqlen", CONTEXT, "--nsamples", self.count,
            "--output_dir", folder, "--device", "cpu",
        ]  # fmt: skip
        log = self.work / "autoround.log"
        environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": str(self.args.threads)}
        with log.open("w") as file:
            code = subprocess.run([*map(str, command)], stdout=file, stderr=file, env=environment).returncode
        found = list(folder.rglob("*.gguf"))
        if code or len(found) != 1:
            what = f"{_PROGRAM} ended with code {code} and {len(found)} GGUF files"
            raise UserError(log, what, "the file holds all it printed")
        found[0].rename(out)


def differing(one: Path, other: Path) -> list[str]:
    """The tensors whose type is not the same in two files."""
    types = [
        {tensor.name: tensor.tensor_type.name for tensor in gguf.GGUFReader(path).tensors} for path in (one, other)
    ]
    return [f"{name} ({a} and {types[1].get(name, 'none')})" for name, a in types[0].items() if types[1].get(name) != a]


def program(given: str) -> str:
    """The path of AutoRound's program.

    Raises:
        UserError: it is not installed.
    """
    if found := shutil.which(given):
        return found
    raise UserError(given, "is not installed", "pip install 'auto-round==0.16.*' gguf sentencepiece, see --help")


@report_errors
def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="Hugging Face folder of a small model")
    parser.add_argument("--text", type=Path, required=True, help="calibration text")
    parser.add_argument("--auto-round", default=_PROGRAM, help="its program (default: the one in the PATH)")
    parser.add_argument("--type", default="q4_k_s", help="mix, as all tools call it (default: %(default)s)")
    parser.add_argument("--iters", type=positive, default=200, help="AutoRound's steps (default: %(default)s)")
    parser.add_argument("--tokens", type=positive, default=131072, help="calibration tokens (default: %(default)s)")
    parser.add_argument("--chunks", type=positive, default=64, help="windows of 512 to score (default: %(default)s)")
    parser.add_argument("--threads", type=positive, default=processors(), help="default: %(default)s")
    parser.add_argument("--work-dir", type=Path, default=ROOT / "build" / "autoround", help="files and logs")
    parser.add_argument("--results", type=Path, help="folder of calibration.md to update")
    args = parser.parse_args()
    args.auto_round = program(args.auto_round)
    work: Path = args.work_dir
    work.mkdir(parents=True, exist_ok=True)
    tools = Tools.find(args.threads)
    makers = Makers(args, tools, work)
    if not makers.f16.is_file():
        makers.convert(makers.f16, outtype="f16")
    files: dict[str, tuple[str, Callable[[Path], None]]] = {
        "`llama-quantize`, no statistics": ("nearest", makers.quantize),
        "`llama-quantize --imatrix`": ("imatrix", makers.with_imatrix),
        f"AutoRound, {args.iters} steps": ("autoround", makers.autoround),
        "`--calibrate`": ("calibrate", makers.calibrated),
        "`--calibrate --fisher`": ("fisher", lambda out: makers.calibrated(out, fisher=True)),
    }
    texts = {"WikiText-2 test": work / "wiki.txt", "Python reference topics": work / "topics.txt"}
    topics = "\n".join(text for _, text in sorted(pydoc_data.topics.topics.items()))
    for path, text in zip(texts.values(), (wikitext.read(wikitext.test_path()), topics), strict=True):
        path.write_text(text, encoding="utf-8", newline="\n")
    for name, make in files.values():
        if not (work / f"{name}.gguf").is_file():
            make(work / f"{name}.partial.gguf")
            (work / f"{name}.partial.gguf").rename(work / f"{name}.gguf")
    values: dict[str, list[dict[str, float]]] = {how: [] for how in files}
    for path in texts.values():
        base, log = path.with_suffix(".kld"), path.with_suffix(".log")
        chunks = tools.log_probabilities(makers.f16, path, base, args.chunks, CONTEXT, log)
        tokens = chunks * (CONTEXT - 1 - CONTEXT // 2)
        for how, (name, _) in files.items():
            values[how].append(tools.divergence(work / f"{name}.gguf", base, tokens, CONTEXT, log))
        base.unlink()
    measure = values[f"AutoRound, {args.iters} steps"]
    rows = []
    for how, (name, _) in files.items():
        cells = [
            f"{value['mean_kld']:.4f} ± {value['mean_kld_error']:.4f} ({value['mean_kld'] / of['mean_kld']:.2f})"
            for value, of in zip(values[how], measure, strict=True)
        ]
        rows.append([how, f"{describe(work / f'{name}.gguf')['tensor_bits']:.3f}", *cells])
    table = report.markdown([f"{args.type.upper()}, mean KLD (over AutoRound's)", "bits/w", *texts], rows)
    print(table)
    if others := differing(work / "autoround.gguf", work / "fisher.gguf"):
        print("types that differ between AutoRound's file and ours:", ", ".join(others))
    if args.results:
        report.replace_section(args.results / "calibration.md", "autoround", table)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

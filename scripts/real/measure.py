"""Rows of a real model: each file made in a process of its own, timed, scored on several texts, remembered, removed.

Everything is remembered by what decides it. What a row's file is like and what making it took: by the tensors of the
F16 file, the row's options, the training text and the built tools. Its scores: by the file's tensors and the text. The
sources of the converter are no part of the name but stand in the record, so that a table made of older files can say so
where making them again takes hours.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Final

from gguf_itq3s.base.errors import UserError
from gguf_itq3s.base.journal import sources
from gguf_itq3s.convert.command import add_arguments
from gguf_itq3s.evaluate.rows import NEED_MATRIX, Row
from gguf_itq3s.evaluate.runner import Result, describe, hash_of, write_json
from gguf_itq3s.evaluate.tools import Tools, base_chunks
from scripts.bench.large import TIMER

from .texts import renamed, with_marks_read

# After the package, which sees to it that gguf-py is the one of the llama.cpp source.
# isort: split
import gguf

PACKAGE: Final = Path(__file__).resolve().parents[2] / "gguf_itq3s"
#: Perplexity of the F16 file, that llama-perplexity prints while it writes log-probabilities.
_PERPLEXITY: Final = re.compile(r"Final estimate: PPL = ([\d.]+) \+/- ([\d.]+)")
_QUANTIZE: Final = (
    "import sys, gguf; from pathlib import Path; from gguf_itq3s.evaluate.runner import quantize_pure; "
    "quantize_pure(Path(sys.argv[1]), Path(sys.argv[2]), gguf.GGMLQuantizationType[sys.argv[3]], int(sys.argv[4]), "
    "keep=('token_embd.weight', 'output.weight'))"
)


@dataclass(frozen=True)
class Text:
    """What is scored.

    Attributes:
        name: short, for columns of tables.
        content: the text.
        windows: at most so many are scored.
        marked: whether control tokens are to be read in it.
    """

    name: str
    content: str
    windows: int
    marked: bool = False

    @property
    def sha256(self) -> str:
        """Of the content."""
        return hashlib.sha256(self.content.encode()).hexdigest()


@dataclass(frozen=True)
class Setup:
    """The model under measurement.

    Attributes:
        folder: Hugging Face folder.
        f16: F16 file of it.
        work: where files, records and logs go.
        texts: what is scored.
        training: what importance matrix and calibration learn from.
        tokens: of it, for both.
        context: tokens of a window.
        threads: of every tool.
        keep: quantized files stay.
    """

    folder: Path
    f16: Path
    work: Path
    texts: tuple[Text, ...]
    training: str
    tokens: int
    context: int
    threads: int
    keep: bool = False


def build_digest(tools: Tools) -> str:
    """Hash of what the tools were built from; of their own bytes where the build does not say."""
    said = tools.folder / "build.txt"
    return hashlib.sha256(said.read_bytes()).hexdigest() if said.is_file() else tools.digest()


def flags(options: Sequence[tuple[str, Any]]) -> list[str]:
    """Options of a row as the converter's command has them."""
    arguments = []
    for name, value in options:
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            arguments.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            arguments += [f"--{flag}", str(value)]
    return arguments


def known_flags() -> frozenset[str]:
    """The options that the converter has."""
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return frozenset(parser._option_string_actions)


class Measurement:
    """All rows of one model.

    Args:
        setup: what and where.

    Raises:
        UserError: the tools are not built.
    """

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.tools = Tools.find(setup.threads)
        self.work = setup.work
        for folder in ("records", "logs", "files"):
            (self.work / folder).mkdir(parents=True, exist_ok=True)
        self.build = build_digest(self.tools)
        self.sources = sources("evaluate")

    # ---------------------------------------------------------------------------------------------------- names

    @cached_property
    def model(self) -> str:
        """Hash of the F16 file's tensors; remembered by the file's size and time."""
        state = self.setup.f16.stat()
        path = self.work / "records" / f"f16-{hash_of(str(self.setup.f16), state.st_size, state.st_mtime_ns)}.json"
        if not path.is_file():
            write_json(path, describe(self.setup.f16))
        return str(json.loads(path.read_text())["content"])

    @cached_property
    def training(self) -> Path:
        """The text to learn from, as a file."""
        # Two runs may share the folder and not the text.
        path = self.work / f"training-{self._training_digest[:8]}.txt"
        path.write_text(self.setup.training, encoding="utf-8", newline="\n")
        return path

    @cached_property
    def _training_digest(self) -> str:
        return hashlib.sha256(self.setup.training.encode()).hexdigest()

    def making(self, row: Row) -> str:
        """Hash of all that decides a row's file but for the sources of the converter."""
        taught = (self._training_digest, self.setup.tokens, self.setup.context) if row.learns else ()
        fields = {k: v for k, v in asdict(row).items() if k not in ("key", "label", "how")}
        return hash_of(self.model, self.build, fields, taught)

    def text_key(self, text: Text) -> str:
        """Hash of all that decides the log-probabilities of the F16 file."""
        return hash_of(self.model, self.build, text.sha256, text.windows, text.marked, self.setup.context)

    def record(self, row: Row) -> Path:
        """Where it is remembered what a row's file is like."""
        return self.work / "records" / f"made-{row.key}-{self.making(row)}.json"

    def score(self, content: str, text: Text) -> Path:
        """Where the figures of a file are."""
        return self.work / "records" / f"score-{hash_of(content, self.text_key(text))}.json"

    # -------------------------------------------------------------------------------------------------- results

    def found(self, row: Row, *, older: bool = True) -> Result | None:
        """What is remembered of a row, whole; None if something is missing.

        Args:
            row: the row.
            older: whether a file by other sources of the converter counts.

        Returns:
            What :meth:`measure` returns.
        """
        path = self.record(row)
        if not path.is_file():
            return None
        made = json.loads(path.read_text())
        if row.maker == "package" and made["sources"] != self.sources and not older:
            return None
        texts = {}
        for text in self.setup.texts:
            scored, base = self.score(made["content"], text), self._base_record(text)
            if not (scored.is_file() and base.is_file()):
                return None
            texts[text.name] = {**json.loads(scored.read_text()), **json.loads(base.read_text())}
        facts = {"key": row.key, "type": row.label, "how": row.how, "maker": row.maker, "options": dict(row.options)}
        older_made = row.maker == "package" and made["sources"] != self.sources
        return {**facts, "older": older_made, "made": made, "texts": texts}

    def lacks(self, row: Row) -> str:
        """What a row needs that this version has not; empty if it can be made."""
        if row.maker != "package":
            return ""
        return ", ".join(flag for flag in flags(row.options) if flag.startswith("--") and flag not in known_flags())

    def measure(self, row: Row, *, older: bool = False) -> Result:
        """A row's figures: remembered, or made and scored now.

        Returns:
            ``made``: sizes in bytes and bits a weight, core seconds, peak memory in bytes; ``texts``: name -> figures
            of :func:`gguf_itq3s.evaluate.tools.parse_divergence`; ``older``: made by other sources of the converter.

        Raises:
            UserError: a tool or the converter failed.
        """
        if (result := self.found(row, older=older)) is not None:
            return result
        file = self._file(row)
        try:
            for text in self.setup.texts:
                self._score(file, row, text)
        finally:
            if not self.setup.keep:
                file.unlink(missing_ok=True)
        result = self.found(row)
        assert result is not None
        return result

    # --------------------------------------------------------------------------------------------------- making

    def _file(self, row: Row) -> Path:
        """The row's file, and the record of how it was made."""
        stem = f"{row.key}-{hash_of(self.making(row), self.sources)[:8]}"
        file = self.work / "files" / f"{stem}.gguf"
        if not (file.is_file() and self.record(row).is_file()):
            # What the converter left when it was interrupted: it goes on from there, but the time is not the whole.
            resumed = any(file.parent.glob(f"*{stem}*"))
            # The converter lets a file appear when it is whole; the others write as they go.
            out = file if row.maker == "package" else file.with_name(f"partial-{row.key}.gguf")
            times = self._run(self._command(row, out), self.work / "logs" / f"make-{row.key}.log")
            out.replace(file)
            write_json(
                self.record(row),
                {**describe(file), **layers(file), **({} if resumed else times), "sources": self.sources},
            )
        return file

    def _command(self, row: Row, file: Path) -> list[str]:
        threads = str(self.setup.threads)
        if row.maker == "llama-quantize":
            *options, name = row.arguments
            matrix = ["--imatrix", str(self.imatrix())] if row.imatrix else []
            tool = str(self.tools.folder / "llama-quantize")
            return [tool, *options, *matrix, str(self.setup.f16), str(file), name, threads]
        if row.maker == "ggml":
            return [sys.executable, "-c", _QUANTIZE, str(self.setup.f16), str(file), row.arguments[0], threads]
        command = [sys.executable, "-m", "gguf_itq3s.cli", "convert", str(self.setup.folder), str(file)]
        command += [*flags(row.options), "--threads", threads]
        if row.imatrix:
            command += ["--imatrix", str(self.imatrix())]
        if row.sequential:
            command += ["--calibrate", str(self.training), "--tokens", str(self.setup.tokens)]
        return command

    def _run(self, command: list[str], log: Path) -> Result:
        """Run a program; its seconds by the clock, those of all cores, and its largest resident set in bytes.

        Raises:
            UserError: it failed.
        """
        times = log.with_suffix(".json")
        times.unlink(missing_ok=True)
        with log.open("w", encoding="utf-8") as out:
            out.write(" ".join(command) + "\n")
            out.flush()
            # A session of its own: an interruption has to end what the timer started, too.
            process = subprocess.Popen(
                [sys.executable, "-S", "-c", TIMER, str(times), *command], stdout=out, stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL, start_new_session=True, cwd=PACKAGE.parent,
            )  # fmt: skip
            try:
                code = process.wait()
            except BaseException:
                os.killpg(process.pid, signal.SIGTERM)
                process.wait()
                raise
        if code or not times.is_file():
            last = (log.read_text(encoding="utf-8", errors="replace").strip().splitlines() or ["no output"])[-1]
            raise UserError(log, f"the row could not be made: {last[:300]}", "the file holds all that was printed")
        seconds, processor, memory = json.loads(times.read_text())
        return {"seconds": seconds, "processor": processor, "memory": memory}

    def imatrix(self) -> Path:
        """The importance matrix of the F16 model, made if it is not there."""
        name = hash_of(self.model, self.build, self._training_digest, self.setup.tokens, self.setup.context)
        path = self.work / f"imatrix-{name}.gguf"
        if not path.is_file():
            partial = path.with_name(f"partial-{path.name}")  # the tool chooses its format by the suffix
            windows = max(1, self.setup.tokens // self.setup.context)
            command = [self.tools.folder / "llama-imatrix", "-m", self.setup.f16, "-f", self.training, "-o", partial,
                       "--chunks", windows, "-c", self.setup.context, "-t", self.setup.threads, "--no-ppl"]  # fmt: skip
            print(f"importance matrix on {windows * self.setup.context} tokens ...", file=sys.stderr, flush=True)
            write_json(path.with_suffix(".json"), self._run([*map(str, command)], self.work / "logs" / "imatrix.log"))
            partial.replace(path)
        return path

    # -------------------------------------------------------------------------------------------------- scoring

    def _base_record(self, text: Text) -> Path:
        return self.work / "records" / f"base-{self.text_key(text)}.json"

    def base(self, text: Text) -> Path:
        """Log-probabilities of the F16 file on a text, written if they are not there."""
        path, record = self.work / f"base-{text.name}-{self.text_key(text)}.kld", self._base_record(text)
        if path.is_file() and record.is_file():
            return path
        source, content = self.work / f"text-{text.name}-{text.sha256[:8]}.txt", text.content
        print(f"log-probabilities of the F16 file: {text.name} ...", file=sys.stderr, flush=True)
        log = self.work / "logs" / f"base-{text.name}.log"
        model = self.setup.f16
        try:
            if text.marked:
                model = self.work / "files" / "marks-read.gguf"
                content = renamed(content, with_marks_read(self.setup.f16, model))
            source.write_text(content, encoding="utf-8", newline="\n")
            self.tools.log_probabilities(model, source, path, text.windows, self.setup.context, log)
        finally:
            if model != self.setup.f16:
                model.unlink(missing_ok=True)
        windows = base_chunks(path)
        printed = _PERPLEXITY.search(log.read_text(encoding="utf-8", errors="replace"))
        if printed is None:
            raise UserError(log, "llama-perplexity printed no perplexity", "the file holds all it printed")
        scored = windows * (self.setup.context - 1 - self.setup.context // 2)
        facts = {"chunks": windows, "tokens": scored, "f16": float(printed[1]), "f16_error": float(printed[2])}
        write_json(record, facts)
        return path

    def _score(self, file: Path, row: Row, text: Text) -> None:
        content = json.loads(self.record(row).read_text())["content"]
        scored = self.score(content, text)
        if scored.is_file():
            return
        base = self.base(text)
        tokens = json.loads(self._base_record(text).read_text())["tokens"]
        log = self.work / "logs" / f"score-{row.key}-{text.name}.log"
        write_json(scored, self.tools.divergence(file, base, tokens, self.setup.context, log))

    # ---------------------------------------------------------------------------------------------------- speed

    def speed(
        self, types: Mapping[str, str], rounds: int, prompt: int, generated: int, *, known: bool = False
    ) -> Result | None:
        """Tokens a second by llama-bench, of files that differ in the type of their layers alone.

        All have embedding and output in Q6_K. They are timed in turn, round after round, so that what else the machine
        does falls on all of them; a ratio is taken within a round.

        Args:
            types: label -> name for llama-quantize.
            rounds: how often each is timed.
            prompt: tokens of a prompt.
            generated: tokens that are generated.
            known: only say what is remembered.

        Returns:
            ``prompt`` and ``generation``: label -> tokens a second of each round; None if that is not known.
        """
        name = hash_of(self.model, self.build, dict(types), rounds, prompt, generated, self.setup.threads)
        path = self.work / "records" / f"speed-{name}.json"
        if path.is_file():
            return dict(json.loads(path.read_text()))
        if known:
            return None
        files = {label: self.work / "files" / f"speed-{kind}.gguf" for label, kind in types.items()}
        outer = ["--token-embedding-type", "q6_k", "--output-tensor-type", "q6_k"]
        taken: dict[str, dict[str, list[float]]] = {"prompt": {}, "generation": {}}
        try:
            for label, file in files.items():
                if not file.is_file():
                    partial = file.with_name(f"partial-{file.name}")
                    matrix = ["--imatrix", self.imatrix()] if types[label] in NEED_MATRIX else []
                    arguments = ["--pure", *matrix, *outer, self.setup.f16, partial, types[label], self.setup.threads]
                    print(f"quantizing for the speed of {label} ...", file=sys.stderr, flush=True)
                    self.tools.run("llama-quantize", arguments, self.work / "logs" / "speed-quantize.log")
                    partial.replace(file)
            labels = list(files)
            for turn in range(rounds):
                print(f"speed, round {turn + 1} of {rounds} ...", file=sys.stderr, flush=True)
                first = turn % len(labels)
                for label in labels[first:] + labels[:first]:
                    for kind, tokens in (("prompt", prompt), ("generation", generated)):
                        taken[kind].setdefault(label, []).append(self._bench(files[label], kind, tokens))
        finally:
            if not self.setup.keep:
                for file in files.values():
                    file.unlink(missing_ok=True)
        write_json(path, taken)
        return dict(taken)

    def _bench(self, file: Path, kind: str, tokens: int) -> float:
        log = self.work / "logs" / "bench.log"
        counts = ["-p", tokens, "-n", 0] if kind == "prompt" else ["-p", 0, "-n", tokens]
        arguments = ["-m", file, *counts, "-r", 1, "-t", self.setup.threads, "-o", "json"]
        printed = self.tools.run("llama-bench", arguments, log)
        try:
            # The tool's messages come before the list.
            return float(json.loads(printed[printed.index("\n[") :])[0]["avg_ts"])
        except (ValueError, LookupError, TypeError) as error:
            raise UserError(log, f"llama-bench printed no speed ({error})", "the file holds all it printed") from error

    def clean(self) -> None:
        """Remove what is large and can be made again: files and log-probabilities."""
        shutil.rmtree(self.work / "files", ignore_errors=True)
        for path in self.work.glob("base-*.kld"):
            path.unlink()


def layers(path: Path) -> Result:
    """Bits a weight of the matrices of the layers, embedding and output left out: ``layer_bits``."""
    weights = bits = 0
    for tensor in gguf.GGUFReader(path).tensors:
        if tensor.name.startswith("blk.") and len(tensor.shape) > 1:
            weights += int(tensor.n_elements)
            bits += 8 * int(tensor.n_bytes)
    return {"layer_bits": bits / max(weights, 1)}

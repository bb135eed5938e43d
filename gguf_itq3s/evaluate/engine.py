"""The engine of every evaluation: files made by commands, scored on texts, remembered.

KL divergence against the F16 model is the main figure; on small models perplexity hardly moves. Whatever is made is
remembered by the hash of all that decides it: the tensors of the F16 file, the row's command, the text, the build of
llama.cpp and every source of this package that the converter may run. An interrupted evaluation goes on where it was.
"""

from __future__ import annotations

import fnmatch
import hashlib
import json
import os
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import gguf
import numpy as np
from tqdm import tqdm

from ..base.errors import UserError
from ..base.journal import sources, write_text
from .rows import Row
from .tools import Tools, run_program

Result = dict[str, Any]
#: What no file depends on: the rooms above the converter, and what multiplies by tensors of a file.
ABOVE: Final = (
    "cli.py", "evaluate", "inspect", "publish", "programs", "torch/decode.py", "torch/kernels.py", "torch/linear.py",
    "torch/load_gguf.py", "torch/packing.py", "torch/products.py",
)  # fmt: skip


@dataclass(frozen=True)
class Text:
    """What is scored: so many windows of it, -1 for all; errors name its source."""

    content: str
    windows: int
    source: Path | None = None


@dataclass(frozen=True)
class Settings:
    """What to evaluate, a Hugging Face folder or an F16 GGUF file, on which texts by name; ``work`` keeps all.

    Importance matrix and calibration learn from ``training``, so many tokens of it; without it no row learns.
    """

    model: Path
    work: Path
    texts: Mapping[str, Text] = field(default_factory=dict)
    training: str | None = None
    calibration_tokens: int = 65536
    imatrix_tokens: int = 16384
    context: int = 512
    threads: int = 2
    keep: bool = False
    trust_remote_code: bool = False


def hash_of(*parts: object) -> str:
    """A short name for anything that JSON can write."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()[:24]


def write_json(path: Path, value: Any) -> None:
    """Replace a file by JSON in one step."""
    write_text(path, json.dumps(value, indent=1) + "\n")


class Evaluation:
    """One model under evaluation; making one raises UserError where the model or the tools are missing."""

    def __init__(self, settings: Settings) -> None:
        self.settings, self.work = settings, settings.work
        self.tools = Tools.find(settings.threads)
        for folder in ("records", "logs", "files"):
            (self.work / folder).mkdir(parents=True, exist_ok=True)
        self.build, self.sources = self.tools.digest(), sources(*ABOVE)
        self.f16 = self._f16_file()
        state = self.f16.stat()
        facts = self._remember("f16", lambda: describe(self.f16), str(self.f16), state.st_size, state.st_mtime_ns)
        self.model = hash_of(facts["content"], self.build)

    def _remember(self, kind: str, make: Callable[[], Result], *parts: object) -> Result:
        """What ``make`` gives, kept under the hash of ``parts``."""
        path = self._record(kind, *parts)
        if not path.is_file():
            write_json(path, make())
        return dict(json.loads(path.read_text()))

    def _record(self, kind: str, *parts: object) -> Path:
        return self.work / "records" / f"{kind}-{hash_of(*parts)}.json"

    # ------------------------------------------------------------------------------------------------- statistics

    def _f16_file(self) -> Path:
        model = self.settings.model
        if model.is_file():
            return model
        if not model.is_dir():
            raise UserError(model, "no such file or folder", "give a Hugging Face folder or an F16 GGUF file")
        files = [(p.name, p.stat().st_size, p.stat().st_mtime_ns) for p in sorted(model.iterdir()) if p.is_file()]
        path = self.work / f"f16-{hash_of(str(model.resolve()), files, self.sources)}.gguf"
        if not path.is_file():
            for older in self.work.glob("f16-*.gguf"):
                older.unlink()
            self._run([*self._package("convert"), model, path, "--outtype", "f16"], "f16")
        return path

    def _package(self, command: str) -> list[object]:
        trusted = ["--trust-remote-code"] if self.settings.trust_remote_code else []
        return [sys.executable, "-m", "gguf_itq3s.cli", command, *trusted]

    @cached_property
    def training(self) -> Path:
        """The text to learn from, as a file that is named by what is in it."""
        content = self.settings.training or ""
        path = self.work / f"training-{hash_of(content)}.txt"
        path.write_text(content, encoding="utf-8", newline="\n")
        return path

    @cached_property
    def imatrix(self) -> Path:
        """The importance matrix of the F16 model, made if it is not there."""
        settings = self.settings
        path = self.work / f"imatrix-{hash_of(self.model, self.training.name, settings.imatrix_tokens)}.gguf"
        if not path.is_file():
            partial = path.with_name(f"partial-{path.name}")  # the tool chooses its format by the suffix
            windows = max(1, settings.imatrix_tokens // settings.context)
            arguments = ["-m", self.f16, "-f", self.training, "-o", partial, "-t", settings.threads]
            arguments += ["--chunks", windows, "-c", settings.context]
            self.tools.run("llama-imatrix", arguments, self.work / "logs" / "imatrix.log")
            partial.replace(path)
        return path

    @cached_property
    def statistics(self) -> Path:
        """Second moments of the model's activations, collected if they are not there."""
        tokens = self.settings.calibration_tokens
        path = self.work / f"statistics-{hash_of(self.model, self.sources, self.training.name, tokens)}"
        command = [*self._package("collect-statistics"), self.settings.model, "--text", self.training]
        self._run([*command, "-o", path, "--tokens", tokens], "statistics")  # ends at once if the folder is complete
        return path

    # -------------------------------------------------------------------------------------------------- one row

    def making(self, row: Row) -> str:
        """Hash of all that decides a row's file."""
        settings = self.settings
        taught = (self.training.name, settings.imatrix_tokens, settings.calibration_tokens) if row.learns else ()
        like = () if row.like is None else (self.making(row.like),)
        return hash_of(self.model, row.command, taught, self.sources if row.maker == "convert" else "", *like)

    def lacks(self, row: Row) -> str:
        """What a row needs that is not there; empty if it can run. The converter reads checkpoints, not GGUF files."""
        if row.maker == "convert" and not self.settings.model.is_dir():
            return "the Hugging Face folder"
        if row.learns and self.settings.training is None:
            return "a text to learn from (--training-text)"
        return ""

    def measure(self, row: Row) -> Result:
        """A row's figures, remembered or found now.

        Returns:
            ``key``, ``type``, ``how``, ``command``; ``sources``, the hash of the package; ``made``: what
            :func:`describe` says, seconds by the clock and of all cores, peak memory in bytes; ``texts``: name ->
            figures of :func:`.tools.parse_divergence`, ``chunks`` and ``tokens`` that were scored.

        Raises:
            UserError: a tool or the converter failed.
        """
        try:
            made = self._remember("made", lambda: self._make(row), self.making(row))
            texts = {name: self._scored(row, made["content"], text) for name, text in self.settings.texts.items()}
        finally:
            if row.command and not self.settings.keep:
                self._place(row).unlink(missing_ok=True)
        facts = {"key": row.key, "type": row.type, "how": row.how, "command": " ".join(row.command)}
        return {**facts, "sources": self.sources, "made": made, "texts": texts}

    def file(self, row: Row) -> Path:
        """A row's file, made if it is not there."""
        self._write(row)
        return self._place(row)

    def _place(self, row: Row) -> Path:
        return self.work / "files" / f"{row.key}-{self.making(row)[:8]}.gguf" if row.command else self.f16

    def _make(self, row: Row) -> Result:
        """Make a row's file, unless it is there, and say what it is like."""
        taken = self._write(row)
        return {**describe(self._place(row)), **taken}

    def _write(self, row: Row) -> Result:
        """Make a row's file, unless it is there, and say what it took."""
        if (file := self._place(row)).is_file():
            return {}
        settings, threads, like = self.settings, str(self.settings.threads), row.like
        known = {"{text}": lambda: self.training, "{tokens}": lambda: settings.calibration_tokens,
                 "{imatrix}": lambda: self.imatrix, "{statistics}": lambda: self.statistics,
                 "{size}": lambda: self.measure(like)["made"]["bytes"] if like else None}  # fmt: skip
        program, *options = [known[word]() if word in known else word for word in row.command]
        # The converter lets a file appear when it is whole; llama-quantize writes as it goes.
        out, taken = file if row.maker == "convert" else file.with_name(f"partial-{file.name}"), dict[str, Any]()
        if row.maker == "convert":
            command = [*self._package("convert"), settings.model, out, *options, "--threads", threads]
            taken = self._begin_size(row, command, out) if like else {}
        else:
            *flags, name = options
            command = [self.tools.folder / str(program), *flags, self.f16, out, name, threads]
        for name, value in self._run(command, row.key).items():
            taken[name] = max(taken.get(name, 0), value) if name == "memory" else taken.get(name, 0) + value
        out.replace(file)
        return taken

    def _begin_size(self, row: Row, command: Sequence[object], out: Path) -> Result:
        """Lay beside a file what those of every size begin with, made once: statistics, gradients, scores of types.

        Returns:
            What it took when it was made.
        """
        # The converter goes on only from what all of its present sources have begun.
        parts = (self.model, row.command, self.training.name, self.settings.calibration_tokens, sources())
        first = self.work / f"size-{hash_of(*parts)}" / "any.gguf"
        folder, own = (path.with_name(f"{path.name}.calibrating") for path in (first, out))
        if not (facts := first.with_name("taken.json")).is_file():
            folder.mkdir(parents=True, exist_ok=True)  # a dry run leaves what it finds
            write_json(facts, self._run([*(first if part == out else part for part in command), "--dry-run"], "size"))

        def taken_over(source: str, target: str) -> str:
            os.link(source, target) if source.endswith(".safetensors") else shutil.copy2(source, target)
            return target

        if not own.exists():
            shutil.copytree(folder, own, copy_function=taken_over)
        return dict(json.loads(facts.read_text()))

    def _scored(self, row: Row, content: str, text: Text) -> Result:
        # Two ways to the same bytes, llama-quantize and the converter say, are scored once.
        key = (self.model, text.content, text.windows, self.settings.context)
        base = self.work / f"base-{hash_of(*key)}.kld"
        path = self._record("score", content, *key, row.runtime, row.environment)
        if path.is_file():
            return dict(json.loads(path.read_text()))
        file, counted = self.file(row), self._record("base", *key)
        log = self.work / "logs"
        if not (base.is_file() and counted.is_file()):
            source = self.work / "text.txt"
            source.write_text(text.content, encoding="utf-8", newline="\n")
            chunks = self.tools.log_probabilities(
                self.f16, source, base, text.windows, self.settings.context, log / "base.log", text.source
            )
            context = self.settings.context
            write_json(counted, {"chunks": chunks, "tokens": chunks * (context - 1 - context // 2)})
        facts = json.loads(counted.read_text())
        log = log / f"score-{row.key}.log"
        figures = self.tools.divergence(file, base, self.settings.context, log, row.runtime, dict(row.environment))
        write_json(path, {**figures, **facts})
        return {**figures, **facts}

    def _run(self, command: Sequence[object], name: str) -> Result:
        return dict(run_program(command, self.work / "logs" / f"{name}.log"))

    # ------------------------------------------------------------------------------------------------- all rows

    def run(self, rows: Sequence[Row]) -> list[Result]:
        """Measure rows in order, with a progress bar; rows for which something is missing are left out, and said."""
        lacks = {row.key: self.lacks(row) for row in rows}
        for what in dict.fromkeys(filter(None, lacks.values())):
            left = ", ".join(key for key, lack in lacks.items() if lack == what)
            print(f"note: left out, they need {what}: {left}", file=sys.stderr)
        results = []
        with tqdm([row for row in rows if not lacks[row.key]], unit="row", desc="eval") as bar:
            for row in bar:
                bar.set_postfix_str(row.key)
                results.append(self.measure(row))
        if not self.settings.keep:  # log-probabilities are large
            for base in self.work.glob("base-*.kld"):
                base.unlink()
            for folder in self.work.glob("size-*"):
                shutil.rmtree(folder)
        return results


def chosen(rows: Sequence[Row], patterns: Sequence[str]) -> list[Row]:
    """The rows that some pattern fits, all of them without patterns.

    Raises:
        UserError: none is.
    """
    found = [row for row in rows if not patterns or any(fnmatch.fnmatch(row.key, p) for p in patterns)]
    if not found:
        known = ", ".join(row.key for row in rows)
        raise UserError("--rows", f"no row is called {' or '.join(patterns)}", f"take some of: {known}")
    return found


def describe(path: Path) -> Result:
    """Bytes and weights of a GGUF file; bits of it, of its matrices and of its layers'; a hash of its tensors."""
    reader = gguf.GGUFReader(path)
    content = hashlib.sha256()
    counted = {"file": (0, 0), "tensor": (0, 0), "layer": (0, 0)}
    for tensor in sorted(reader.tensors, key=lambda t: t.name):  # llama-quantize writes them in another order
        content.update(f"{tensor.name} {tensor.tensor_type}".encode())
        content.update(np.ascontiguousarray(tensor.data).data)
        parts = ["file", *["tensor"] * (len(tensor.shape) > 1)]
        parts += ["layer"] * (len(tensor.shape) > 1 and tensor.name.startswith("blk."))
        for part in parts:
            weights, size = counted[part]
            counted[part] = weights + int(tensor.n_elements), size + int(tensor.n_bytes)
    counted["file"] = counted["file"][0], path.stat().st_size
    bits = {f"{part}_bits": 8 * size / max(weights, 1) for part, (weights, size) in counted.items()}
    return {"bytes": path.stat().st_size, "weights": counted["file"][0], **bits, "content": content.hexdigest()}

"""Running llama.cpp's tools for the evaluation, and reading what they print."""

from __future__ import annotations

import hashlib
import json
import os
import re
import signal
import struct
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from ..base.errors import UserError
from ..codec import native

_NUMBER = r"(-?(?:[\d.]+(?:e[+-]?\d+)?|nan|inf))"
_PAIRS = {
    "perplexity": re.compile(rf"^Mean PPL\(Q\)\s*:\s*{_NUMBER} ±\s*{_NUMBER}", re.M),
    "mean_kld": re.compile(rf"^Mean    KLD:\s*{_NUMBER} ±\s*{_NUMBER}", re.M),
    "same_top": re.compile(rf"^Same top p:\s*{_NUMBER} ±\s*{_NUMBER} %", re.M),
}
#: A line for each window: its number, perplexity, its logarithm over the base's, then the mean KLD so far.
_WINDOW = re.compile(rf"^ *(\d+) +{_NUMBER} ±\s*{_NUMBER} +{_NUMBER} ±\s*{_NUMBER} +{_NUMBER} ±", re.M)
_TOO_SHORT = re.compile(r"you need at least (\d+) tokens")


#: Runs a program and writes what it took. It is small: what a fork inherits counts as memory of the program.
_TIMER = """\
import resource, subprocess, sys, time
began = time.monotonic()
code = subprocess.call(sys.argv[2:])
used = resource.getrusage(resource.RUSAGE_CHILDREN)
seconds, processor = time.monotonic() - began, used.ru_utime + used.ru_stime
with open(sys.argv[1], "w") as file:
    print([round(seconds, 1), round(processor, 1), used.ru_maxrss << 10], file=file)
sys.exit(code if code >= 0 else 128 - code)
"""


def run_program(command: Sequence[object], log: Path, environment: Mapping[str, str] | None = None) -> dict[str, float]:
    """Run a program with its output in a log; its end is waited for, and an interruption ends it.

    Returns:
        ``seconds`` by the clock, ``processor``, those of all cores, ``memory``, its largest resident set in bytes.

    Raises:
        UserError: it failed; the message names the log.
    """
    words, times = [str(word) for word in command], log.with_suffix(".json")
    with log.open("w", encoding="utf-8") as out:
        print(*words, file=out, flush=True)
        # A session of its own: an interruption has to end what the timer started, too.
        process = subprocess.Popen(
            [sys.executable, "-S", "-c", _TIMER, str(times), *words], stdout=out, stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL, start_new_session=True, env={**os.environ, **(environment or {})},
        )  # fmt: skip
        try:
            code = process.wait()
        except BaseException:
            os.killpg(process.pid, signal.SIGTERM)
            process.wait()
            raise
    if code:
        last = (log.read_text(encoding="utf-8", errors="replace").strip().splitlines() or ["no output"])[-1]
        what = f"{Path(words[0]).name} ended with code {code}: {last.removeprefix('error: ')[:300]}"
        raise UserError(log, what, "the file holds all it printed")
    return dict(zip(("seconds", "processor", "memory"), json.loads(times.read_text()), strict=True))


@dataclass(frozen=True)
class Tools:
    """The built tools, each of which may use so many threads."""

    folder: Path
    threads: int

    @classmethod
    def find(cls, threads: int) -> Tools:
        """The tools beside the library that :mod:`gguf_itq3s.codec.native` loads.

        Raises:
            UserError: they are not built.
        """
        library = native.library_path()
        folder = library.parent if library else native.tools_folder()
        for name in ("llama-quantize", "llama-perplexity", "llama-imatrix"):
            if not (folder / name).is_file():
                raise UserError(folder / name, "is not built", f"run {native.build_command()}")
        return cls(folder, threads)

    def digest(self) -> str:
        """Hash of what the tools were built from, or of their own bytes: results made with others are not reused."""
        if (said := self.folder / "build.txt").is_file():
            return hashlib.sha256(said.read_bytes()).hexdigest()
        digest = hashlib.sha256()
        for path in sorted(self.folder.iterdir()):
            if path.is_file() and (path.name.startswith("llama-") or ".so" in path.name or ".dylib" in path.name):
                digest.update(path.name.encode() + path.read_bytes())
        return digest.hexdigest()

    def run(
        self, name: str, arguments: Sequence[object], log: Path, environment: Mapping[str, str] | None = None
    ) -> str:
        """Run a tool and return what it printed; it is in ``log`` too.

        Raises:
            UserError: it failed; the message names the log.
        """
        run_program([self.folder / name, *arguments], log, environment)
        return log.read_text(encoding="utf-8", errors="replace")

    def log_probabilities(
        self, model: Path, text: Path, base: Path, chunks: int, context: int, log: Path, source: Path | None = None
    ) -> int:
        """Score the unquantized model; its log-probabilities go to ``base``. Returns the number of windows.

        Raises:
            UserError: a tool failed, or the text is too short; it is called ``source`` where it is a copy of that.
        """
        partial = base.with_suffix(".partial")
        limit = ["--chunks", str(chunks)] if chunks > 0 else []
        arguments = ["-m", model, "-f", text, "-c", context, "-t", self.threads, *limit]
        arguments += ["--kl-divergence-base", partial]
        printed = self.run("llama-perplexity", arguments, log)
        if found := _TOO_SHORT.search(printed):  # it ends with code 0
            partial.unlink(missing_ok=True)
            what = f"is too short: windows of {context} tokens want a text of {found[1]}"
            raise UserError(source or text, what, "give a longer text, or a smaller --ctx")
        count = base_chunks(partial)
        partial.replace(base)
        return count

    def divergence(
        self, model: Path, base: Path, context: int, log: Path,
        runtime: Sequence[str] = (), environment: Mapping[str, str] | None = None,
    ) -> dict[str, Any]:  # fmt: skip
        """KL divergence of a model from the log-probabilities in ``base``; see :func:`parse_divergence`."""
        arguments = ["-m", model, "-c", context, "-t", self.threads, "--kl-divergence", "--kl-divergence-base", base]
        printed = self.run("llama-perplexity", [*arguments, *runtime], log, environment)
        try:
            return parse_divergence(printed)
        except ValueError as error:
            remedy = "run the command again; the file holds all it printed"
            raise UserError(log, f"llama-perplexity: {error}", remedy) from error


def parse_divergence(text: str) -> dict[str, Any]:
    """Figures out of what ``llama-perplexity --kl-divergence`` printed.

    Returns:
        ``perplexity``, the quantized model's own, ``mean_kld`` (nats), ``same_top`` (a share), each with ``_error``;
        ``windows``, the mean KLD of each window, out of the running means that the tool prints.

    Raises:
        ValueError: a figure or a window is missing.
    """
    result: dict[str, Any] = {}
    for key, pattern in _PAIRS.items():
        if not (found := pattern.search(text)):
            raise ValueError(f"printed no {key}")
        unit = 0.01 if key == "same_top" else 1.0
        result[key], result[f"{key}_error"] = unit * float(found[1]), unit * float(found[2])
    sums = [0.0]
    for number, found in enumerate(_WINDOW.finditer(text), 1):
        if int(found[1]) != number:
            raise ValueError(f"printed window {found[1]} where {number} was to come")
        sums.append(number * float(found[6]))
    if len(sums) == 1:
        raise ValueError("printed no windows")
    result["windows"] = [round(after - before, 5) for before, after in pairwise(sums)]
    return result


def base_chunks(base: Path) -> int:
    """How many windows a file of log-probabilities holds.

    The format is llama-perplexity's: ``_logits_``, int32 context, vocabulary and windows, int32 tokens, then for each
    scored token two float32 and the vocabulary as uint16, rounded up to an even number.

    Raises:
        UserError: it is no such file, or not complete.
    """
    with base.open("rb") as file:
        head = file.read(20)
    if len(head) == 20 and head[:8] == b"_logits_":
        context, vocabulary, windows = struct.unpack("<iii", head[8:])
        scored = windows * (context - 1 - context // 2)
        if base.stat().st_size == 20 + 4 * windows * context + scored * 2 * (2 * ((vocabulary + 1) // 2) + 4):
            return windows
    raise UserError(base, "is no complete file of log-probabilities", "delete it and run the command again")

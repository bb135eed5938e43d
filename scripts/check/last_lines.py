#!/usr/bin/env python3
"""Run each llama.cpp tool many times and count the runs in which the end of what it prints is missing.

    scripts/check/last_lines.py --runs 200

The log of llama.cpp's tools is printed by a thread of its own, so a tool can end before its last lines are out
(ggml-patch/patches/optional/0020-log-at-exit.patch). More runs at a time than there are cores, and busy processes
beside them, let the loss show. Exit code 1 when anything was lost or a tool failed.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from gguf_itq3s.base.errors import UserError, report_errors
from gguf_itq3s.convert.options import ConvertOptions
from gguf_itq3s.convert.pipeline import convert

ROOT: Final = Path(__file__).resolve().parents[2]
BIN: Final = ROOT / "build" / "bin"
MODEL: Final = ROOT / "models" / "demo-llama"
PROMPT: Final = "The old house stood at the end of the lane, and"
#: A run takes a fraction of a second; one that waits for its log forever is ended.
SECONDS: Final = 120.0


@dataclass(frozen=True)
class Tool:
    """How to run a tool, and what it prints last.

    Attributes:
        name: of the program.
        arguments: MODEL, TEXT and OUT stand for the model, a text and a file of the run's own.
        stdout: regular expression that ends in the end of stdout; its first group, if any, is text that does not
            depend on the time and has to be the same in every run.
        stderr: the same for stderr.
    """

    name: str
    arguments: tuple[str, ...]
    stdout: str = ""
    stderr: str = ""


_ESTIMATE: Final = r"Final estimate: PPL = [\d.]+ \+/- [\d.]+\s*\Z"
TOOLS: Final = (
    Tool("llama-perplexity", ("-m", "MODEL", "-f", "TEXT", "-c", "128", "--chunks", "2", "-t", "1"), stderr=_ESTIMATE),
    Tool(
        "llama-completion",
        ("-m", "MODEL", "-p", PROMPT, "-n", "24", "--temp", "0", "-t", "1", "-no-cnv", "--no-warmup"),
        stdout=r"\A(.+)\Z",
        stderr=r"common_perf_print:\s+graphs reused =\s+\d+\n\Z",
    ),
    Tool(
        "llama-cli",
        ("-m", "MODEL", "-p", PROMPT, "-n", "24", "--temp", "0", "-t", "1", "--single-turn", "--simple-io",
         "--no-warmup"),
        stdout=rf"> {PROMPT}\n(.+)\[ Prompt: [^]]+\]\s+Exiting\.\.\.\n\Z",
    ),
    Tool("llama-bench", ("-m", "MODEL", "-p", "16", "-n", "4", "-r", "1", "-t", "1"), stdout=r"\nbuild: .+\n\Z"),
    Tool(
        "llama-quantize",
        ("MODEL", "OUT", "Q8_0", "1"),
        stdout=r"llama_quantize:\s+total time =\s+[\d.]+ ms\n\Z",
        stderr=r"quant size  = .+\n\Z",
    ),
    Tool(
        "llama-imatrix",
        ("-m", "MODEL", "-f", "TEXT", "-c", "128", "--chunks", "2", "-t", "1", "-o", "OUT"),
        stdout=_ESTIMATE,
    ),
)  # fmt: skip


@dataclass
class Count:
    """What became of the runs of one tool.

    Attributes:
        runs: how many there were.
        failed: those that ended with an error or not at all, and the last one's words.
        ends: of each other run the text that has to be the same, or None when the end was missing.
    """

    runs: int = 0
    failed: list[str] = field(default_factory=list)
    ends: list[str | None] = field(default_factory=list)

    @property
    def lost(self) -> int:
        """Runs in which something is missing: the longest text counts as whole."""
        whole = max((end for end in self.ends if end is not None), key=len, default=None)
        return sum(end is None or end != whole for end in self.ends)


def end_of(tool: Tool, stdout: str, stderr: str) -> str | None:
    """The text of a run that has to be the same in all, or None when an end is missing."""
    texts: list[str] = []
    for pattern, printed in ((tool.stdout, stdout), (tool.stderr, stderr)):
        found = re.search(pattern, printed, re.DOTALL)
        if found is None:
            return None
        texts += found.groups()
    return "".join(texts)


def run(tool: Tool, folder: Path, files: dict[str, str], count: Count) -> None:
    """Run a tool once and enter it in ``count``."""
    with tempfile.NamedTemporaryFile(dir=folder, suffix=".gguf") as out:
        given = {**files, "OUT": out.name}
        command = [given["BIN"] + "/" + tool.name, *(given.get(part, part) for part in tool.arguments)]
        try:
            done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=SECONDS)
        except subprocess.TimeoutExpired:
            count.failed.append(f"no end after {SECONDS:.0f} s")
            return
    if done.returncode:
        count.failed.append(f"exit code {done.returncode}: {done.stderr.decode(errors='replace')[-300:]}")
        return
    count.ends.append(end_of(tool, done.stdout.decode(errors="replace"), done.stderr.decode(errors="replace")))


def check(tools: Sequence[Tool], bin_dir: Path, model: Path, runs: int, jobs: int, load: int) -> dict[str, Count]:
    """Run every tool ``runs`` times, ``jobs`` at a time, beside ``load`` busy processes."""
    counts = {tool.name: Count(runs) for tool in tools}
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(load)]
    try:
        with tempfile.TemporaryDirectory() as scratch, concurrent.futures.ThreadPoolExecutor(jobs) as pool:
            text = Path(scratch) / "text.txt"
            text.write_text("\n".join(f"{PROMPT} this is line {i}." for i in range(64)))
            files = {"BIN": str(bin_dir), "MODEL": str(model), "TEXT": str(text)}
            pending = [
                pool.submit(run, tool, Path(scratch), files, counts[tool.name]) for _ in range(runs) for tool in tools
            ]
            try:
                for task in pending:
                    task.result()
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise
    finally:
        for process in busy:
            process.kill()
            process.wait()
    return counts


@report_errors
def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--runs", type=int, default=200, help="of each tool (default: %(default)s)")
    parser.add_argument(
        "--jobs", type=int, default=2 * (os.cpu_count() or 1), help="runs at a time (default: %(default)s)"
    )
    parser.add_argument("--load", type=int, default=os.cpu_count() or 1, help="busy processes (default: %(default)s)")
    parser.add_argument("--bin", type=Path, default=BIN, help="folder of the tools (default: build/bin)")
    parser.add_argument("--model", type=Path, help="F16 GGUF file (default: models/demo-llama, converted)")
    parser.add_argument("--tool", nargs="+", choices=[tool.name for tool in TOOLS], help="only these")
    args = parser.parse_args()
    tools = [tool for tool in TOOLS if not args.tool or tool.name in args.tool]
    for tool in tools:
        if not (args.bin / tool.name).is_file():
            raise UserError(args.bin / tool.name, "is not built", "run make build")
    with tempfile.TemporaryDirectory() as scratch:
        model = args.model
        if model is None:
            model = Path(scratch) / "model.gguf"
            convert(ConvertOptions.of(MODEL, model, outtype="f16"))
        counts = check(tools, args.bin.resolve(), model.resolve(), args.runs, args.jobs, args.load)
    print(f"{'tool':18} {'runs':>6} {'lost':>6} {'failed':>6}")
    for name, count in counts.items():
        print(f"{name:18} {count.runs:6} {count.lost:6} {len(count.failed):6}")
    for name, count in counts.items():
        if count.failed:
            print(f"{name}: {count.failed[-1]}", file=sys.stderr)
    return int(any(count.lost or count.failed for count in counts.values()))


if __name__ == "__main__":
    raise SystemExit(main())

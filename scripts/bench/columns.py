#!/usr/bin/env python3
"""Speed over the columns of a product: tokens/s of llama-bench where so many tokens are evaluated together.

One column is generation, a few are speculative drafts and the slots of a server, many are prompts. The types are timed
in turn, round after round, on the random Llama of scripts/bench/kernels.py, one thread; medians are taken, and only
ratios inside one run mean something. Some types are timed again in a build for AVX2 only. Writes a section of the
processor's file, the page and its pictures.

    scripts/bench/columns.py --against FOLDER [--types TYPE ...]      this build beside another one

FOLDER is the build/bin of another state of the code; or it holds another libggml-cpu, as build/bench/avx2-lib does, and
--library then names ours. The two run in turn, pair after pair, the first of a pair second in the next; the median of
the pairs' ratios says what a change has cost or gained.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from gguf_itq3s.base import report  # noqa: E402
from gguf_itq3s.base.errors import positive  # noqa: E402
from scripts.bench import cpu_page, kernels  # noqa: E402
from scripts.bench.results import BenchError, Samples, label, medians_of, ratio_of  # noqa: E402

COLUMNS: Final = (1, 2, 4, 7, 8, 16, 32, 64, 256, 512)
TYPES: Final = (*kernels.TRELLIS, "TQ2_0", "Q4_K", "Q3_K", "Q2_K", "IQ4_XS", "IQ3_S", "IQ3_XXS", "IQ2_XXS")
#: Types that two builds are compared by.
PAIRED: Final = (*kernels.TRELLIS, "TQ2_0")
#: Tokens of a test, at least: short ones are repeated. Two builds are closer to each other than two types.
TOKENS: Final = 16
TOKENS_PAIRED: Final = 128


@dataclass(frozen=True)
class Build:
    """A build of llama.cpp.

    Attributes:
        bin: folder with llama-bench and its libraries.
        library: folder with a libggml-cpu that takes the place of that one, None for none.
    """

    bin: Path
    library: Path | None = None


def build_in(folder: Path) -> Build:
    """The build in a folder: its own llama-bench, or a libggml-cpu for that of build/bin.

    Raises:
        BenchError: there is neither.
    """
    if (folder / "llama-bench").exists():
        return Build(folder.resolve())
    if any(folder.glob("libggml-cpu.*")):
        return Build(kernels.BIN, folder.resolve())
    raise BenchError(f"{folder}: has neither llama-bench nor libggml-cpu; give the build/bin of another checkout")


def speeds(build: Build, paths: Iterable[Path], columns: int, tokens: int) -> dict[str, float]:
    """Tokens/s of models, by their names, with so many columns and one thread; the median of the repeats.

    Raises:
        BenchError: llama-bench failed.
    """
    command: list[str | Path] = [*kernels.pin(), build.bin / "llama-bench", "-o", "json", "-t", "1", "-n", "0"]
    command += ["-p", str(columns), "-b", "512", "-ub", "512", "-r", str(max(1, tokens // columns))]
    for path in paths:
        command += ["-m", path]
    found = json.loads(kernels.run(command, library=build.library))
    return {Path(result["model_filename"]).stem: statistics.median(result["samples_ts"]) for result in found}


def one_round(samples: Samples, libraries: Mapping[str, Path | None], paths: Mapping[str, Path]) -> None:
    """One measurement of every type and number of columns, a number of columns after the other."""
    for columns in COLUMNS:
        for build, library in libraries.items():
            names = kernels.AVX2_TYPES if build else TYPES
            models = [paths[name] for name in names]
            for name, speed in speeds(Build(kernels.BIN, library), models, columns, TOKENS).items():
                samples[label(name, build)][str(columns)].append(speed)


def pair(samples: Samples, ours: Build, theirs: Build, paths: Mapping[str, Path], swap: bool) -> None:
    """One measurement of both builds for every model and number of columns, one right after the other.

    Args:
        samples: "TYPE, this" and "TYPE, other" -> columns -> tokens/s.
        swap: the other one first, so that what drifts favours neither.
    """
    order = [("this", ours), ("other", theirs)]
    for columns in COLUMNS:
        for name, path in paths.items():
            for side, build in reversed(order) if swap else order:
                speed = speeds(build, [path], columns, TOKENS_PAIRED)[name]
                samples[f"{name}, {side}"][str(columns)].append(speed)


def paired_table(samples: Samples) -> str:
    """This build over the other one: the median of the pairs' ratios, and the least and the largest of them."""
    header = ["type", "columns", "this, tokens/s", "other, tokens/s", "this over other", "least", "largest"]
    medians, rows = medians_of(samples), []
    for name in dict.fromkeys(side.rpartition(", ")[0] for side in samples):
        this, other = samples[f"{name}, this"], samples[f"{name}, other"]
        for columns in this:
            ratios = [a / b for a, b in zip(this[columns], other[columns], strict=True)]
            shown = [f"{medians[f'{name}, {side}'][columns]:.1f}" for side in ("this", "other")]
            ends = [f"{value:.3f}" for value in (ratio_of(this[columns], other[columns]), min(ratios), max(ratios))]
            rows.append([name, columns, *shown, *ends])
    return report.markdown(header, rows)


def compare(arguments: argparse.Namespace) -> None:
    """Run this build and another one in turn and print how they compare.

    Raises:
        BenchError: a build is missing or failed.
    """
    theirs = build_in(arguments.against)
    ours = build_in(arguments.library) if arguments.library else build_in(kernels.BIN)
    paths = kernels.models(arguments.types)
    samples: Samples = defaultdict(lambda: defaultdict(list))
    for number in range(arguments.rounds):
        print(f"pair {number + 1} of {arguments.rounds}", file=sys.stderr)
        pair(samples, ours, theirs, paths, swap=number % 2 == 1)
    print(paired_table(samples))


def measure(arguments: argparse.Namespace) -> None:
    """Measure all types and write them down.

    Raises:
        BenchError: a build is missing or failed.
    """
    libraries = kernels.build(stock=False)
    paths = kernels.models(TYPES)
    samples: Samples = defaultdict(lambda: defaultdict(list))
    for number in range(arguments.rounds):
        print(f"round {number + 1} of {arguments.rounds}", file=sys.stderr)
        one_round(samples, libraries, paths)
    result = {"rounds": arguments.rounds, "medians": medians_of(samples), "samples": samples}
    cpu_page.add(arguments.output, "columns", result)


def main() -> int:
    """Run the command; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=positive, default=3, help="rounds or pairs, interleaved (default %(default)s)")
    parser.add_argument("--output", type=Path, default=kernels.OUT, help="folder of the results (default build/bench)")
    parser.add_argument(
        "--against", type=Path, metavar="FOLDER", help="compare with the build in a folder, write nothing"
    )
    parser.add_argument(
        "--library", type=Path, metavar="FOLDER", help="with --against: our libggml-cpu, not build/bin's"
    )
    parser.add_argument(
        "--types", nargs="+", default=PAIRED, choices=tuple(kernels.TYPES), metavar="TYPE",
        help=f"with --against: types that both builds have (default {' '.join(PAIRED)})",
    )  # fmt: skip
    arguments = parser.parse_args()
    if arguments.library and not arguments.against:
        parser.error("--library is for --against")
    try:
        if not (kernels.BIN / "llama-bench").exists():
            raise BenchError("build/bin/llama-bench is missing; run make build")
        if arguments.against:
            compare(arguments)
        else:
            measure(arguments)
    except BenchError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

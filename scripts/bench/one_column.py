#!/usr/bin/env python3
"""One token at a time, one column: what most people do with a model, and how near to the memory's speed it is.

Generation by llama-bench on the random Llama of scripts/bench/kernels.py, on one core and on all: weights as
llama.cpp lays them out when it loads them, and as the file has them, mapped (--repack 0). Products of one column with
so many matrices in turn that no cache holds them, and beside each the speed at which as many threads do nothing but
read the same memory. Types and builds run in turn, round after round; only ratios inside one run mean something.
Writes a section of the processor's file, the page and its pictures.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from gguf_itq3s.base.errors import positive  # noqa: E402
from scripts.bench import cpu_page, kernels, processor  # noqa: E402
from scripts.bench.results import BenchError, Samples, label, medians_of  # noqa: E402

TYPES: Final = (
    *kernels.TRELLIS, "TQ2_0", "TQ1_0", "Q4_K", "Q3_K", "Q2_K", "IQ3_S", "IQ3_XXS", "IQ2_XXS", "IQ4_XS",
)  # fmt: skip
#: Types of a build: the build as it is also has those with which ours are compared elsewhere.
GENERATED: Final[Mapping[str, Sequence[str]]] = {
    "": (*TYPES, "Q8_0", "F16"), "AVX2": TYPES, "stock": kernels.STOCK_TYPES,
}  # fmt: skip
MAPPED: Final = (*kernels.TRELLIS, "TQ2_0", "Q4_K", "Q3_K", "Q2_K", "IQ2_XXS")
STREAMED: Final = (*kernels.TRELLIS, "TQ2_0", "TQ1_0", "Q4_K", "Q3_K", "Q2_K", "IQ3_S", "IQ2_XXS")
#: Builds that the mapped files and the products out of memory are for.
BUILDS: Final = ("", "AVX2")

Libraries = Mapping[str, Path | None]


def suffix(threads: int) -> str:
    """What ends the name of a test with so many threads, one or all."""
    return "_1" if threads == 1 else "_all"


def generation(
    samples: Samples, libraries: Libraries, paths: Mapping[str, Path], test: str, threads: int, *, mapped: bool
) -> None:
    """Generate tokens once with every type of every build.

    Raises:
        BenchError: llama-bench failed.
    """
    for build, library in libraries.items():
        names = GENERATED[build] if not mapped else MAPPED if build in BUILDS else ()
        if not names:
            continue
        command: list[str | Path] = [
            *(kernels.pin() if threads == 1 else []),
            kernels.BIN / "llama-bench",
            "-o",
            "json",
        ]
        command += ["-r", "1", "-p", "0", "-n", "32", "-t", str(threads), *(("--repack", "0") if mapped else ())]
        for name in names:
            command += ["-m", paths[name]]
        for result in json.loads(kernels.run(command, library=library)):
            samples[test][label(Path(result["model_filename"]).stem, build)].append(float(result["avg_ts"]))


def products(samples: Samples, ways: Counter[str], libraries: Libraries, memory: int, threads: int) -> None:
    """Products out of memory once with every type; ``ways``: counts how the fastest readers read.

    Args:
        memory: bytes of weights.

    Raises:
        BenchError: bench-kernels failed.
    """
    end = suffix(threads)
    for build in BUILDS:
        if build not in libraries:
            continue
        command: list[str | Path] = [*(kernels.pin() if threads == 1 else []), kernels.OUT / "bench-kernels", "memory"]
        command += [str(memory >> 20), str(threads), *(f"{name}={kernels.TYPES[name]}" for name in STREAMED)]
        for line in kernels.run(command, library=libraries[build]).splitlines():
            name, weights, read, limit, places, ahead = line.split()
            of = label(name, build)
            samples[f"weights{end}"][of].append(float(weights))
            samples[f"read{end}"][of].append(float(read))
            samples[f"limit{end}"][of].append(float(limit))
            samples[f"share{end}"][of].append(float(read) / float(limit))
            ways[f"{places} places, " + (f"prefetch {ahead} lines ahead" if ahead != "0" else "no prefetch")] += 1


def main() -> int:
    """Run the command; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=positive, default=5, help="interleaved rounds (default %(default)s)")
    parser.add_argument("--output", type=Path, default=kernels.OUT, help="folder of the results (default build/bench)")
    arguments = parser.parse_args()
    cores = processor.cores()
    memory = processor.memory_beyond_caches(processor.last_level_cache())
    samples: Samples = defaultdict(lambda: defaultdict(list))
    ways: dict[int, Counter[str]] = defaultdict(Counter)
    try:
        if not (kernels.BIN / "llama-bench").exists():
            raise BenchError("build/bin/llama-bench is missing; run make build")
        libraries = kernels.build()
        paths = kernels.models(GENERATED[""])
        for number in range(arguments.rounds):
            print(f"round {number + 1} of {arguments.rounds}", file=sys.stderr)
            for threads in dict.fromkeys((1, cores)):
                end = "" if threads == 1 else "_all"
                generation(samples, libraries, paths, f"generation{end}", threads, mapped=False)
                generation(samples, libraries, paths, f"mapped{end}", threads, mapped=True)
                products(samples, ways[threads], libraries, memory, threads)
        result = {
            "cores": cores,
            "rounds": arguments.rounds,
            "weights": kernels.MODEL.weights,
            "memory": memory,
            "model_bytes": {name: path.stat().st_size for name, path in paths.items()},
            "readers": {str(threads): found.most_common(1)[0][0] for threads, found in ways.items()},
            "medians": medians_of(samples),
            "samples": samples,
        }
        cpu_page.add(arguments.output, "one_column", result)
    except BenchError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

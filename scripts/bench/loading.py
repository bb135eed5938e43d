#!/usr/bin/env python3
"""Loading a model beside Q4_K, and quantizing with one thread and with all of them.

Loading is llama-bench with one token of the random Llama of scripts/bench/kernels.py, its file in the page cache: by
default (weights repacked into a buffer of their own), as the file has them (mapped), and without mapping. Quantizing is
llama-quantize from F16, and the converter on one layer of random weights. The programs run in turn, round after round;
medians are taken. Writes a section of the processor's file and the page.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Final

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from scripts.bench import cpu_page, kernels, large, processor  # noqa: E402
from scripts.bench.results import BenchError  # noqa: E402

TYPES: Final = ("ITQ3_S", "TQ2_0", "Q4_K")
WAYS: Final[Mapping[str, tuple[str, ...]]] = {
    "default": (),
    "mapped, --repack 0": ("--repack", "0"),
    "not mapped": ("-lm", "none"),
    "not mapped, --repack 0": ("-lm", "none", "--repack", "0"),
}
LAYER: Final = large.Shape(hidden=2048, feed_forward=8192, layers=1, vocabulary=4096, keys=512)


def measured(command: list[str | Path]) -> large.Run:
    """A program that must succeed; what it prints goes to a file of its own.

    Raises:
        BenchError: it failed.
    """
    log = kernels.OUT / "loading.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    # exec makes the program the process that is measured
    run = large.timed(["sh", "-c", 'exec "$@" > "$0" 2>&1', str(log), *map(str, command)])
    if run is None:
        raise BenchError(f"{Path(command[0]).name} failed (all of it: {log}):\n{log.read_text()[-2000:]}")
    return run


def loading_round(samples: dict[str, dict[str, list[large.Run]]], paths: Mapping[str, Path]) -> None:
    """One load of every type, every way."""
    for way, options in WAYS.items():
        for name in TYPES:
            path = paths[name]
            measured(["cat", path])  # into the page cache
            command: list[str | Path] = [
                kernels.BIN / "llama-bench",
                "-m",
                path,
                "-p",
                "0",
                "-n",
                "1",
                "-r",
                "1",
                "-t",
                "1",
            ]
            samples[way][name].append(measured([*command, "--no-warmup", *options]))


def quantizing_round(samples: dict[str, dict[str, list[large.Run]]], f16: Path, folder: Path, cores: int) -> None:
    """One quantization with one thread and one with all, of both programs."""
    for threads in (1, cores):
        out = folder / "out.gguf"
        command: list[str | Path] = [
            kernels.BIN / "llama-quantize",
            "--pure",
            "--allow-requantize",
            "--token-embedding-type",
            "q6_k",
        ]
        samples["llama-quantize"][str(threads)].append(measured([*command, f16, out, "ITQ3_S", str(threads)]))
        out.unlink()
        command = [sys.executable, "-m", "gguf_itq3s.cli", "convert", folder / "layer", out, "--threads", str(threads)]
        samples["gguf-itq3s convert"][str(threads)].append(measured(command))
        out.unlink()


def medians_of(samples: Mapping[str, Mapping[str, list[large.Run]]]) -> dict[str, dict[str, dict[str, float]]]:
    """Median seconds and memory of runs."""
    return {
        test: {
            name: {
                "seconds": statistics.median(run.seconds for run in runs),
                "memory": statistics.median(run.memory for run in runs),
            }
            for name, runs in names.items()
        }
        for test, names in samples.items()
    }


def main() -> int:
    """Run the command; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="rounds (default %(default)s)")
    parser.add_argument("--output", type=Path, default=kernels.OUT, help="folder of the results (default build/bench)")
    arguments = parser.parse_args()
    loading: dict[str, dict[str, list[large.Run]]] = defaultdict(lambda: defaultdict(list))
    quantizing: dict[str, dict[str, list[large.Run]]] = defaultdict(lambda: defaultdict(list))
    cores = processor.cores()
    try:
        if not (kernels.BIN / "llama-bench").exists():
            raise BenchError("build/bin/llama-bench is missing; run make build")
        kernels.OUT.mkdir(parents=True, exist_ok=True)
        paths = kernels.models([*TYPES, "F16"])
        with tempfile.TemporaryDirectory(dir=kernels.OUT) as name:
            folder = Path(name)
            large.write_model(folder / "layer", LAYER, LAYER.vocabulary)
            for number in range(arguments.rounds):
                print(f"round {number + 1} of {arguments.rounds}", file=sys.stderr)
                loading_round(loading, paths)
                quantizing_round(quantizing, paths["F16"], folder, cores)
        result = {
            "cores": cores,
            "rounds": arguments.rounds,
            "model_bytes": {name: paths[name].stat().st_size for name in TYPES},
            "loading": medians_of(loading),
            "quantizing": medians_of(quantizing),
        }
        cpu_page.add(arguments.output, "loading", result)
    except BenchError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

#!/usr/bin/env python3
"""Speed over the columns of a product: tokens/s of llama-bench where so many tokens are evaluated together.

One column is generation, a few are speculative drafts and the slots of a server, many are prompts. The types are timed
in turn, round after round, on the random Llama of scripts/bench/kernels.py, one thread; medians are taken, and only
ratios inside one run mean something. Some types are timed again in a build for AVX2 only. Writes columns.json,
columns.md and columns.png.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from gguf_itq3s.base import report  # noqa: E402
from scripts.bench import kernels  # noqa: E402

COLUMNS: Final = (1, 2, 4, 7, 8, 16, 32, 64, 256, 512)
TYPES: Final = ("ITQ3_S", "TQ2_0", "Q4_K", "Q3_K", "IQ4_XS", "IQ3_S", "IQ3_XXS")
#: Runs of a test, by its columns: short tests are repeated.
REPEATS: Final = {columns: max(1, 16 // columns) for columns in COLUMNS}


def one_round(samples: kernels.Samples, libraries: Mapping[str, Path | None], paths: Mapping[str, Path]) -> None:
    """One measurement of every type and number of columns, a number of columns after the other."""
    for columns in COLUMNS:
        for build, library in libraries.items():
            command: list[str | Path] = [
                *kernels.pin(),
                kernels.BIN / "llama-bench",
                "-o",
                "json",
                "-t",
                "1",
                "-n",
                "0",
            ]
            command += ["-p", str(columns), "-b", "512", "-ub", "512", "-r", str(REPEATS[columns])]
            for name in kernels.AVX2_TYPES if build else TYPES:
                command += ["-m", paths[name]]
            for result in json.loads(kernels.run(command, library=library)):
                name = kernels.label(Path(result["model_filename"]).stem, build)
                samples[name][str(columns)].append(float(result["avg_ts"]))


def table(result: Mapping[str, Any]) -> str:
    """Tokens/s of every type, and of ours over the others."""
    speeds: dict[str, dict[str, float]] = result["medians"]
    head = f"{result['processor']}, one thread, {result['rounds']} interleaved rounds, medians.\n\n"
    columns = [str(number) for number in COLUMNS]
    rows = [[name, *(f"{speeds[name][number]:.1f}" for number in columns)] for name in speeds]
    ratios = [["ITQ3_S over its 1 column", *(f"{speeds['ITQ3_S'][n] / speeds['ITQ3_S']['1']:.2f}" for n in columns)]]
    for name in speeds:
        ours = kernels.label("ITQ3_S", "AVX2" if "AVX2" in name else "")
        if name != ours:
            ratios.append([f"{ours} over {name}", *(f"{speeds[ours][n] / speeds[name][n]:.2f}" for n in columns)])
    return (
        f"{head}{report.markdown(['tokens/s by columns', *columns], rows)}\n{report.markdown(['', *columns], ratios)}"
    )


def plot(result: Mapping[str, Any], path: Path) -> None:
    """Tokens/s over columns, both logarithmic."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axis = plt.subplots(figsize=(8, 4.6))
    for name, speeds in result["medians"].items():
        if "AVX2" in name:
            continue
        own = name == "ITQ3_S"
        axis.plot(
            [int(number) for number in speeds], list(speeds.values()), marker="o", markersize=4, label=name,
            color="crimson" if own else None, linewidth=2.5 if own else 1.2,
        )  # fmt: skip
    axis.set(
        xscale="log", yscale="log", xlabel="tokens evaluated together", ylabel="tokens/s, one thread",
        title=f"0.6 billion weights, {result['processor']}",
    )  # fmt: skip
    axis.set_xticks(COLUMNS, [str(number) for number in COLUMNS])
    axis.xaxis.minorticks_off()
    axis.grid(alpha=0.3)
    axis.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1.01, 1), borderaxespad=0)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main() -> int:
    """Run the command; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="interleaved rounds (default %(default)s)")
    parser.add_argument("--output", type=Path, default=kernels.OUT, help="folder of the results (default build/bench)")
    arguments = parser.parse_args()
    try:
        if not (kernels.BIN / "llama-bench").exists():
            raise kernels.BenchError("build/bin/llama-bench is missing; run make build")
        libraries = kernels.build(stock=False)
        paths = kernels.models(TYPES)
        samples: kernels.Samples = defaultdict(lambda: defaultdict(list))
        for number in range(arguments.rounds):
            print(f"round {number + 1} of {arguments.rounds}", file=sys.stderr)
            one_round(samples, libraries, paths)
    except kernels.BenchError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    result = {
        "processor": kernels.processor(),
        "rounds": arguments.rounds,
        "medians": kernels.medians_of(samples),
        "samples": samples,
    }
    kernels.write(result, arguments.output / "columns", table, plot)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

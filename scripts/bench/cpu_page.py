#!/usr/bin/env python3
"""The page and the pictures of the CPU's speed: the results of all processors side by side.

Reads cpu/*.json in a folder of results, as scripts/bench/results.py describes them, and writes cpu.md, bench.png and
columns.png beside it. Run it after a file has been added or removed.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import gguf  # noqa: E402

from gguf_itq3s.base import report  # noqa: E402
from gguf_itq3s.base.journal import write_text  # noqa: E402
from gguf_itq3s.codec.family import DEFAULT, FAMILY  # noqa: E402
from scripts.bench import results, targets  # noqa: E402
from scripts.bench.results import File  # noqa: E402

RESULTS: Final = ROOT / "docs" / "results"
#: The type that others are compared with.
BASE: Final = "Q4_K"

ONE_COLUMN: Final = {"generation": "1 thread", "generation_all": "all cores"}
MAPPED: Final = {"mapped": "1 thread", "mapped_all": "all cores"}
PRODUCTS: Final = {
    "products_1": "Product with 1 column, weights in the cache, G/s, one thread",
    "products_4": "Product with 4 columns, weights in the cache, G/s, one thread",
    "products_512": "Product with 512 columns, G/s, one thread",
    "prompt": "Prompt of 512, tokens/s, one thread",
    "prompt_all": "Prompt of 512, tokens/s, all cores",
}
PICTURED: Final = {
    "generation": "generation, tokens/s",
    "products_1": "product with 1 column,\nweights in the cache, G/s",
    "products_4": "product with 4 columns,\nweights in the cache, G/s",
    "prompt": "prompt of 512, tokens/s",
}
HEAD: Final = f"""\
# Speed on CPUs

`make bench` measures, and writes a file a processor, `cpu/NAME.json`; this page puts them side by side. Only ratios
inside one run mean something: builds and types run in turn, round after round; speeds are medians, ratios the medians
of the rounds' ratios. "over {BASE}" is over {BASE} in the same build. "AVX2" is a build for AVX2 only, "stock" is
llama.cpp without the patch. [kernels.md](../kernels.md) explains the kernels.

To add a processor, or to measure one again: `make bench BENCH_ARGS="--output docs/results"` on a machine with nothing
else to do, and commit `docs/results`. Or `make bench`, which leaves them alone, and send the file in `build/bench/cpu`;
`scripts/bench/cpu_page.py` makes this page anew when it has been put into `docs/results/cpu`.
"""
MEMORY: Final = """\
Products with one column of different matrices in turn, which no cache holds: GB/s of the weights' bytes in memory, and
their share of the speed at which as many threads do nothing but read the same memory:
"""
LIMITS: Final = """\
Shares of the limits: 8-bit products of one core on registers, and GB/s of memory with as many threads. The weights of
the product with 1 column are in the cache; generation reads the model once a token, of which the last-level cache may
hold a part:
"""


#: Lines of the trellis types in the picture of columns.
OWN_COLOURS: Final = dict(zip((row.name for row in FAMILY.values()), ("crimson", "darkorange", "gold"), strict=False))


def bytes_per_weight(name: str) -> float:
    """Bytes of a weight in the type of a label."""
    kind = name.split()[0]
    block, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    return size / block


def number(value: float | None, digits: int = 1) -> str:
    """A figure of a table, nothing where there is none."""
    return "" if value is None else f"{value:.{digits}f}"


def percent(value: float | None) -> str:
    """A share."""
    return "" if value is None else f"{value:.0%}"


def names_of(files: Iterable[File], tests: Iterable[str]) -> list[str]:
    """The labels that any of the files has for any of the tests, the build as it is before the others."""
    tests = list(tests)
    found = [name for file in files for test in tests for name in results.merged(file, "medians").get(test, {})]
    order = {"": 0, "AVX2": 1}
    return sorted(dict.fromkeys(found), key=lambda name: order.get(results.build_of(name), len(order)))


def base_of(file: File, test: str, name: str) -> str:
    """Q4_K in the build of a label, in the build as it is where that has none."""
    base = results.label(BASE, results.build_of(name))
    return base if results.median(file, test, base) is not None else BASE


def speeds(files: Sequence[File], tests: Mapping[str, str]) -> str:
    """A row a type; for every processor and test the speed and its ratio to Q4_K's."""
    header, rows = ["type", "bytes/weight"], []
    for file in files:
        for what in tests.values():
            header += [f"{file['name']}, {what}" if what else file["name"], f"over {BASE}"]
    for name in names_of(files, tests):
        row = [name, f"{bytes_per_weight(name):.3f}"]
        for file in files:
            for test in tests:
                row.append(number(results.median(file, test, name)))
                row.append(number(results.ratio(file, test, name, base_of(file, test, name)), 2))
        rows.append(row)
    return report.markdown(header, rows)


def having(files: Sequence[File], tests: Iterable[str]) -> list[File]:
    """The files that have any of the tests."""
    tests = set(tests)
    return [file for file in files if tests & results.merged(file, "medians").keys()]


def processors(files: Sequence[File]) -> str:
    """What was measured where: the state of the code, and rounds."""
    header = ["processor", "the system's name", "cores", "last-level cache, MiB", *results.SECTIONS]
    rows = []
    for file in files:
        cache = f"{file['cache'] / 2**20:.0f}" if file.get("cache") else ""
        sections = [file["sections"].get(name) for name in results.SECTIONS]
        states = [f"{section['state']}, rounds: {section['rounds']}" if section else "" for section in sections]
        rows.append([file["name"], file["model"], str(file["cores"]), cache, *states])
    notes = [
        f"{file['name']}, {name}: {section['note']}\n"
        for file in files
        for name, section in file["sections"].items()
        if section.get("note")
    ]
    return "\n".join([report.markdown(header, rows, left=2), *notes])


def memory(files: Sequence[File]) -> Iterator[str]:
    """Products with one column whose weights are out of memory, beside readers of the same memory."""
    header, rows = ["type"], []
    for file in files:
        for threads in ("1 thread", "all cores"):
            header += [f"{file['name']}, {threads}, G weights/s", "GB/s", "share"]
    for name in names_of(files, ("share_1", "share_all")):
        row = [name]
        for file in files:
            for end in ("1", "all"):
                row += [number(results.median(file, f"{test}_{end}", name)) for test in ("weights", "read")]
                row.append(percent(results.median(file, f"share_{end}", name)))
        rows.append(row)
    yield report.markdown(header, rows)
    for file in files:
        section = file["sections"]["one_column"]
        readers = []
        for threads, way in section["readers"].items():
            speed = section["medians"]["limit_1" if threads == "1" else "limit_all"].values()
            who = "1 thread" if threads == "1" else f"{threads} threads"
            readers.append(f"{who} {min(speed):.1f} to {max(speed):.1f} GB/s (most often the fastest: {way})")
        said = f"{file['name']}: {section['memory'] >> 20} MiB of weights; readers of them, medians by type"
        yield f"{said}: {'; '.join(readers)}.\n"


def limits(files: Sequence[File]) -> str:
    """How far each type is from what a core can multiply and the memory feed."""
    header = ["type"]
    for file in files:
        header += [f"{file['name']}: 1 column", "512 columns", "generation", "all cores"]
    rows = []
    names = [name for name in names_of(files, ("products_1",)) if results.build_of(name) != "AVX2"]
    for name in names:
        row = [name]
        for file in files:
            bound = results.merged(file, "medians").get("roofline", {})
            for test in ("products_1", "products_512"):
                found = results.median(file, test, name)
                row.append(percent(found / bound["products"] if found and "products" in bound else None))
            cores = file["sections"]["kernels"]["cores"]
            for test, threads in (("generation", 1), ("generation_all", cores)):
                tokens, size = results.median(file, test, name), results.model_bytes(file, name)
                feeds = bound.get(f"memory_{threads}")
                row.append(percent(tokens * size * 1e-9 / feeds if tokens and size and feeds else None))
        rows.append(row)
    said = [
        f"{file['name']}: " + ", ".join(f"{what} {value:.1f}" for what, value in found["roofline"].items()) + ".\n"
        for file in files
        for found in [results.merged(file, "medians")]
        if "roofline" in found
    ]
    return "\n".join([report.markdown(header, rows), *said])


def instructions(files: Sequence[File]) -> str:
    """Instructions of a product with one column."""
    counts = {file["name"]: file["sections"]["kernels"].get("instructions", {}) for file in files}
    names = dict.fromkeys(name for found in counts.values() for name in found)
    rows = [[name, *(number(found.get(name), 0) for found in counts.values())] for name in names]
    return report.markdown(["type", *counts], rows)


def columns(files: Sequence[File]) -> Iterator[str]:
    """Tokens/s over the tokens evaluated together, and the first trellis type over the others."""
    found = {file["name"]: file["sections"]["columns"]["medians"] for file in files}
    numbers = sorted({int(n) for speeds in found.values() for by in speeds.values() for n in by})
    rows, ratios = [], []
    for processor, speeds in found.items():
        for name, by in speeds.items():
            rows.append([processor, name, *(number(by.get(str(n))) for n in numbers)])
            ours = speeds[results.label(DEFAULT.name, results.build_of(name))]
            if name != DEFAULT.name and ours is not by:
                of = [ours[str(n)] / by[str(n)] if str(n) in ours and str(n) in by else None for n in numbers]
                ratios.append([processor, name, *(number(value, 2) for value in of)])
    heads = [str(n) for n in numbers]
    yield report.markdown(["processor", "tokens/s by columns", *heads], rows, left=2)
    yield report.markdown(["processor", f"{DEFAULT.name} over", *heads], ratios, left=2)


def loading(files: Sequence[File]) -> Iterator[str]:
    """Seconds and memory of loads, beside Q4_K's, and quantizing with one thread and with all."""
    found = {file["name"]: file["sections"]["loading"] for file in files}
    header = ["load and one token", "type", "file, MiB"]
    for processor in found:
        header += [f"{processor}, s", f"over {BASE}", "memory, MiB", f"over {BASE}"]
    rows = []
    keys = dict.fromkeys(
        (way, name) for section in found.values() for way in section["loading"] for name in section["loading"][way]
    )
    for way, name in keys:
        size = next(section["model_bytes"][name] for section in found.values() if name in section["model_bytes"])
        row = [way, name, f"{size / 2**20:.0f}"]
        for section in found.values():
            types = section["loading"].get(way, {})
            if name not in types or BASE not in types:
                row += [""] * 4
                continue
            run, base = types[name], types[BASE]
            row += [f"{run['seconds']:.2f}", f"{run['seconds'] / base['seconds']:.2f}"]
            row += [f"{run['memory'] / 2**20:.0f}", f"{run['memory'] / base['memory']:.2f}"]
        rows.append(row)
    yield report.markdown(header, rows, left=2)
    header, rows = ["ITQ3_S by"], []
    for processor in found:
        header += [f"{processor}, 1 thread, s", "all cores, s", "times as fast"]
    for program in dict.fromkeys(program for section in found.values() for program in section["quantizing"]):
        row = [program]
        for section in found.values():
            runs = section["quantizing"].get(program)
            one, many = (runs[threads]["seconds"] if runs else None for threads in ("1", str(section["cores"])))
            row += [number(one), number(many), number(one / many if one and many else None, 2)]
        rows.append(row)
    yield report.markdown(header, rows)


def quantizing(files: Sequence[File]) -> str:
    """M weights/s of the quantizers."""
    names = names_of(files, ("quantize",))
    rows = [[name, *(number(results.median(file, "quantize", name)) for file in files)] for name in names]
    return report.markdown(["quantization, M weights/s, one thread", *(file["name"] for file in files)], rows)


def target_table(files: Sequence[File]) -> str:
    """Every target beside what each processor has; a missed one says so."""
    checks = [targets.checks(file) for file in files]
    rows = [
        [same[0].test, same[0].what, str(same[0].least), *(check.text for check in same)]
        for same in zip(*checks, strict=True)
        if any(check.got is not None for check in same)
    ]
    return report.markdown(["test", "what", "at least", *(file["name"] for file in files)], rows, left=2)


def page(files: Sequence[File]) -> str:
    """The page of all processors."""
    parts = [
        HEAD,
        processors(files),
    ]  # fmt: skip
    if found := having(files, ONE_COLUMN):
        parts += [
            "## One column\n",
            "Generation of 32 tokens by llama-bench, tokens/s, a random Llama of 0.6 billion weights:\n",
            speeds(found, ONE_COLUMN),
        ]
    if found := having(files, MAPPED):
        parts += ["The same from mapped files, no copy (`--repack 0`):\n", speeds(found, MAPPED)]
    if found := having(files, ("share_1",)):
        parts += [
            MEMORY,
            *memory(found),
        ]  # fmt: skip
    if having(files, {test for test, *_ in (*targets.RATIOS, *targets.VALUES)}):
        parts += ["## Targets\n", "What may not be lost, and whether it is met:\n", target_table(files)]
    if found := [file for file in files if "columns" in file["sections"]]:
        parts += ["## Columns\n", "Tokens evaluated together by llama-bench, one thread:\n", *columns(found)]
    if found := [file for file in files if "kernels" in file["sections"]]:
        parts.append("## Kernels and prompts\n")
        for test, title in PRODUCTS.items():
            if measured := having(found, (test,)):
                parts += [f"{title}:\n", speeds(measured, {test: ""})]
        parts += [
            "Instructions of a product with one column, of 256 weights:\n",
            instructions(found),
            LIMITS,
            limits(found),
            quantizing(found),
        ]  # fmt: skip
    if found := [file for file in files if "loading" in file["sections"]]:
        parts += ["## Loading and quantizing\n", *loading(found)]
    return "\n".join(parts)


def plot_bench(files: Sequence[File], path: Path) -> None:
    """Bars of the types, a row of pictures a processor."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(
        len(files), len(PICTURED), figsize=(4.2 * len(PICTURED), 5.2 * len(files)), squeeze=False
    )
    for row, file in zip(axes, files, strict=True):
        medians = results.merged(file, "medians")
        for axis, (test, title) in zip(row, PICTURED.items(), strict=True):
            values = dict(sorted(medians.get(test, {}).items(), key=lambda item: item[1]))
            colours = ["#d95f02" if name.startswith(("ITQ", "TQ")) else "#7570b3" for name in values]
            colours = ["#cccccc" if "stock" in name else c for name, c in zip(values, colours, strict=True)]
            axis.barh(list(values), list(values.values()), color=colours)
            axis.set_title(f"{file['name']}: {title}", fontsize=9)
            axis.tick_params(labelsize=8)
    figure.suptitle("one thread; grey: without the patch", fontsize=10)
    save(figure, path)


def plot_columns(files: Sequence[File], path: Path) -> None:
    """Tokens/s over columns, both logarithmic, the processors one below the other."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(len(files), 1, figsize=(8, 4.6 * len(files)), squeeze=False)
    for (axis,), file in zip(axes, files, strict=True):
        speeds = file["sections"]["columns"]["medians"]
        for name, by in speeds.items():
            if results.build_of(name):
                continue
            own = name in OWN_COLOURS
            axis.plot(
                [int(n) for n in by], list(by.values()), marker="o", markersize=4, label=name,
                color=OWN_COLOURS.get(name), linewidth=2.5 if own else 1.2,
            )  # fmt: skip
        axis.set(
            xscale="log", yscale="log", xlabel="tokens evaluated together", ylabel="tokens/s, one thread",
            title=f"0.6 billion weights, {file['name']} ({file['model']})",
        )  # fmt: skip
        ticks = [int(n) for n in speeds[DEFAULT.name]]
        axis.set_xticks(ticks, [str(n) for n in ticks])
        axis.xaxis.minorticks_off()
        axis.grid(alpha=0.3)
    axes[0][0].legend(fontsize=8, loc="upper left", bbox_to_anchor=(1.01, 1), borderaxespad=0)
    save(figure, path)


def save(figure: Any, path: Path) -> None:
    """Write a picture that is the same whenever it is written."""
    import matplotlib.pyplot as plt

    figure.tight_layout()
    figure.savefig(path, dpi=110, metadata={"Software": None})
    plt.close(figure)


def write(output: Path) -> None:
    """Write page and pictures of all files in a folder of results.

    Raises:
        BenchError: a file is no processor's file.
        OSError: they cannot be written.
    """
    files = results.files(output)
    write_text(output / "cpu.md", page(files))
    if found := having(files, PICTURED):
        plot_bench(found, output / "bench.png")
    if found := [file for file in files if "columns" in file["sections"]]:
        plot_columns(found, output / "columns.png")


def add(output: Path, section: str, data: Mapping[str, Any]) -> None:
    """Put a section into this processor's file, write the page anew and print the file's part of it.

    Raises:
        BenchError: a file is no processor's file.
        OSError: they cannot be written.
    """
    path = results.record(output, section, data)
    write(output)
    only = {**results.read(path), "sections": {section: results.read(path)["sections"][section]}}
    print(page([only]).partition("\n## ")[2])
    print(f"written: {path}, {output / 'cpu.md'}", file=sys.stderr)


def main() -> int:
    """Run the command; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder of the results (default docs/results)")
    arguments = parser.parse_args()
    try:
        if not any((arguments.output / results.FOLDER).glob("*.json")):
            raise results.BenchError(f"{arguments.output / results.FOLDER}: has no results; run make bench")
        write(arguments.output)
    except results.BenchError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

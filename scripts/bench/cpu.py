#!/usr/bin/env python3
"""Speed of the CPU kernels beside llama.cpp's types: `make bench`.

Generation, prompts and few columns by llama-bench on a random Llama of 0.6 billion weights; products with weights in
the cache, and with so many matrices in turn that no cache holds them, beside the speed of reading the same memory;
quantization. The builds under comparison (this one, this one compiled for AVX2 only, llama.cpp without the patch) and
the types run in turn, round after round: machines drift, and only ratios inside one run mean something. Speeds are
medians, ratios the medians of the rounds' ratios.

Writes cpu/NAME.json and cpu/NAME.md, a file and a page of this processor, and with --results docs/results the picture
columns.png of all processors there. --page writes pages and picture anew and measures nothing. --against FOLDER
compares with another build, a build/bin or a folder with a libggml-cpu, and writes nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shutil
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import gguf
import numpy as np

ROOT: Final = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from gguf_itq3s.base import report  # noqa: E402
from gguf_itq3s.base.errors import positive  # noqa: E402
from gguf_itq3s.base.journal import write_text  # noqa: E402
from gguf_itq3s.codec import blocks  # noqa: E402
from gguf_itq3s.codec.family import DEFAULT, FAMILY  # noqa: E402
from gguf_itq3s.codec.native import NativeLibrary, library_name  # noqa: E402
from gguf_itq3s.rounding import ldlq  # noqa: E402
from gguf_itq3s.rounding.hessian import Factor  # noqa: E402
from scripts.bench import random_model  # noqa: E402

BIN: Final = ROOT / "build" / "bin"
OUT = ROOT / "build" / "bench"
#: The random Llama, with matrices of the layers in the type that is measured.
MODEL = random_model.Shape(12, 2048, 5632, 16, 4, tied=True)
#: The type that others are compared with.
BASE: Final = "Q4_K"
TRELLIS: Final = tuple(row.name for row in FAMILY.values())
TYPES = (
    *TRELLIS, "TQ2_0", "TQ1_0", "Q2_K", "Q3_K", "Q4_K", "IQ2_XXS", "IQ3_XXS", "IQ3_S", "IQ4_XS", "IQ4_NL", "F16",
)  # fmt: skip
#: Types of the other builds.
OTHERS: Final = {"AVX2": (*TRELLIS, "Q2_K", "IQ2_XXS", "Q3_K", "Q4_K", "IQ3_S", "IQ4_NL"), "stock": ("TQ1_0", "TQ2_0")}
QUANTIZED: Final = (*TRELLIS, "Q2_K", "IQ2_XXS", "Q3_K", "IQ3_S")
#: Tokens that llama-bench evaluates together, and columns of products with weights in the cache.
COLUMNS = (1, 2, 4, 8, 16, 32, 64, 256, 512)
PRODUCTS = (1, 4, 512)
AVX2: Final = ["-DGGML_NATIVE=OFF", *(f"-DGGML_{name}=ON" for name in ("SSE42", "AVX", "AVX2", "BMI2", "FMA", "F16C"))]
#: Bytes of weights that are in no cache: at least so many, and so many times the largest cache.
MEMORY: Final = 256 << 20, 4
#: Columns of the page's table: tests, and what they measure.
SHOWN: Final = {
    "generation": "generation, tokens/s", "generation_all": "all cores", "mapped": "mapped, --repack 0",
    "prompt_4": "4 tokens together", "prompt_512": "prompt of 512", "products_1": "product, 1 column, G/s",
}  # fmt: skip
#: Measured, and not in the table.
UNSHOWN: Final = {"F16", "Q8_0"} | {
    f"{name} (AVX2)" for name in ("TQ2_0", "TQ1_0", "IQ3_XXS", "IQ4_XS", "IQ4_NL", "Q2_K")
}
#: What may not be lost: test, numerator, denominator, least ratio; in the build as it is and in that for AVX2.
TARGETS: Final = (
    ("generation", "ITQ3_S", "Q4_K", 1.25, 1.25), ("generation", "ITQ3_S", "Q3_K", 1.6, 1.8),
    ("generation", "ITQ3_S", "IQ3_S", 3.5, 3.5), ("generation", "ITQ2_S", "ITQ3_S", 1.25, 1.25),
    ("mapped", "ITQ3_S", "Q3_K", 1.0, 1.0), ("products_1", "ITQ3_S", "Q3_K", 2.8, 1.3),
    ("products_1", "ITQ2_S", "ITQ3_S", 1.05, 1.05), ("products_1", "ITQ3_N", "ITQ3_S", 0.9, 0.9),
    ("products_1", "ITQ3_N", "IQ4_NL", 1.2, 1.2), ("products_4", "ITQ3_S", "Q4_K", 1.8, 1.2),
    ("generation", "ITQ4_S", "Q4_K", 1.15, 0.9), ("generation", "ITQ4_S", "IQ4_XS", 1.3, None),
    ("prompt_512", "ITQ4_S", "Q4_K", 1.2, 1.2),
    ("prompt_512", "ITQ3_S", "Q4_K", 1.6, 1.7), ("prompt_512", "ITQ3_S", "Q3_K", 1.1, 1.3),
    ("prompt_512", "ITQ2_S", "IQ2_XXS", 1.5, 1.5), ("quantize", "ITQ3_S", "IQ3_S", 1.0, None),
    ("quantize", "ITQ3_S (calibrated, avx512)", "ITQ3_S", 0.067, None),
    ("quantize", "ITQ3_S (calibrated, avx2)", "ITQ3_S", 0.067, None),
    ("generation", "TQ2_0", "TQ2_0 (stock)", 1.05, None), ("prompt_512", "TQ2_0", "TQ2_0 (stock)", 2.5, None),
    ("generation", "TQ1_0", "TQ1_0 (stock)", 1.5, None), ("prompt_512", "TQ1_0", "TQ1_0 (stock)", 4.0, None),
)  # fmt: skip

#: test -> type, and build in brackets -> measurements, one a round.
Samples = dict[str, dict[str, list[float]]]
Builds = Mapping[str, Path | None]


class BenchError(Exception):
    """The benchmark cannot go on; the message says why and what to do."""


def run(command: Sequence[str | Path], *, library: Path | None = None) -> str:
    """Output of a command that must succeed; ``library``: a folder whose libraries come before its own."""
    paths = {} if library is None else dict.fromkeys(("LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH"), str(library))
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, env={**os.environ, **paths})
    if done.returncode:
        raise BenchError(f"{Path(command[0]).name} failed:\n{(done.stdout + done.stderr)[-2000:]}")
    return done.stdout


def label(name: str, build: str) -> str:
    """What a type is called in a build: "" is the build as it is."""
    return f"{name} ({build})" if build else name


# What is measured: builds, programs, models


def build_library(name: str, source: Path, options: Sequence[str]) -> Path:
    """Folder with libggml-cpu built from ``source``, and nothing that would hide the other libraries."""
    work, folder = OUT / name, OUT / f"{name}-lib"
    print(f"building libggml-cpu ({name})", file=sys.stderr)
    generator = ["-G", "Ninja"] if shutil.which("ninja") and not (work / "CMakeCache.txt").exists() else []
    off = ("UI", "TOOLS", "TESTS", "EXAMPLES", "SERVER", "APP")
    common = ["-DCMAKE_BUILD_TYPE=Release", "-DBUILD_SHARED_LIBS=ON", "-DLLAMA_OPENSSL=OFF", "-DGIT_EXE=OFF"]
    run(["cmake", "-S", source, "-B", work, *generator, *common, *(f"-DLLAMA_BUILD_{n}=OFF" for n in off), *options])
    run(["cmake", "--build", work, "--target", "ggml-cpu", "--parallel", str(os.cpu_count() or 1)])
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    for file in (work / "bin").glob("libggml-cpu.*"):
        shutil.copy(file, folder, follow_symlinks=False)
    return folder


def build(others: Iterable[str] = OTHERS) -> dict[str, Path | None]:
    """Library folder of every build under comparison: "" is build/bin itself, "stock" has no patch."""
    OUT.mkdir(parents=True, exist_ok=True)
    script = ROOT / "ggml-patch" / "cmake" / "patched-source.cmake"
    command = ["cmake", f"-DTREE={OUT / 'patched'}", f"-DPython3_EXECUTABLE={sys.executable}", "-P", str(script)]
    done = subprocess.run(command, capture_output=True, text=True)
    found = re.search(r"upstream (.*)", done.stdout + done.stderr)
    if done.returncode or not found:
        raise BenchError(f"the source of llama.cpp could not be prepared:\n{done.stdout}{done.stderr}")
    libraries: dict[str, Path | None] = {"": None}
    if "stock" in others:
        libraries["stock"] = build_library("stock", Path(found[1].strip()), [])
    if "AVX2" in others and platform.machine() in ("x86_64", "AMD64"):
        libraries["AVX2"] = build_library("avx2", OUT / "patched", AVX2)
    return libraries


def build_program() -> None:
    """Compile bench-kernels against build/bin."""
    run([
        os.environ.get("CC", "cc"), "-std=gnu11", "-O3", "-march=native", f"-I{ROOT / 'build' / 'include'}",
        ROOT / "ggml-patch" / "bench" / "bench-kernels.c", "-o", OUT / "bench-kernels", f"-L{BIN}", "-lggml-cpu",
        "-lggml-base", "-lm", "-lpthread", f"-Wl,-rpath,{BIN}",
    ])  # fmt: skip


def models(names: Iterable[str]) -> dict[str, Path]:
    """The random Llama in every type, written where it is missing."""
    ggml, folder = random_model.Ggml(BIN / library_name()), OUT / "models"
    folder.mkdir(parents=True, exist_ok=True)
    paths = {name: folder / f"{name}.gguf" for name in names}
    for name, path in paths.items():
        if not path.exists():
            partial = path.with_suffix(".partial")
            random_model.write_model(partial, ggml, MODEL, name)
            partial.rename(path)
    return paths


def pin() -> list[str]:
    """Keeps a one-thread program on one core, the last of the fastest."""
    if not shutil.which("taskset"):
        return []

    def frequency(core: int) -> int:
        path = Path(f"/sys/devices/system/cpu/cpu{core}/cpufreq/cpuinfo_max_freq")
        return int(path.read_text()) if path.exists() else 0

    return ["taskset", "-c", str(max(os.sched_getaffinity(0), key=lambda core: (frequency(core), core)))]


def processor() -> dict[str, Any]:
    """Name of this processor (the compiler's word for -march=native), the system's, cores, last-level cache in bytes.

    A virtual processor may bear the model number of another, and the compiler may be older than the processor: --name
    says what it is then.
    """
    command = [os.environ.get("CC", "cc"), "-march=native", "-Q", "--help=target"]
    options = subprocess.run(command, capture_output=True, text=True).stdout
    found = re.search(r"-march=\s+(\S+)", options)
    text = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    title = re.search(r"model name\s*: (.*)", text)
    siblings = [Path(f"/sys/devices/system/cpu/cpu{n}/topology/thread_siblings_list") for n in os.sched_getaffinity(0)]
    cores = len({path.read_text() if path.exists() else str(path) for path in siblings})
    sizes = [path.read_text().strip() for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")]
    cache = max((int(size[:-1]) << {"K": 10, "M": 20}[size[-1]] for size in sizes), default=0)
    name = found[1].replace("znver", "zen") if found else platform.machine()
    if re.search(r"-mamx-tile\s+\[enabled\]", options) and not name.endswith("rapids"):
        name = "sapphirerapids"  # the oldest that has it, as the compiler says of numbers that it does not know
    return {"name": name, "model": title[1] if title else platform.processor(), "cores": cores, "cache": cache}


# Measuring


def llama_bench(paths: Mapping[str, Path], threads: int, *options: str, library: Path | None) -> dict[str, float]:
    """Tokens/s of files by name, one after the other; ``library`` as for :func:`run`."""
    command: list[str | Path] = [*(pin() if threads == 1 else []), BIN / "llama-bench", "-o", "json"]
    command += ["-t", str(threads), *options, *(word for path in paths.values() for word in ("-m", path))]
    results = json.loads(run(command, library=library))
    found = {result["model_filename"]: statistics.median(result["samples_ts"]) for result in results}
    return {name: found[str(path)] for name, path in paths.items()}


class Round:
    """Measures everything once, and adds what it finds to the samples."""

    def __init__(self, samples: Samples, libraries: Builds, paths: Mapping[str, Path], cores: int, memory: int) -> None:
        self.samples, self.libraries, self.paths, self.cores, self.memory = samples, libraries, paths, cores, memory

    def types(self) -> Iterator[tuple[str, Path | None, Sequence[str]]]:
        """Every build, its libraries and its types."""
        for name, library in self.libraries.items():
            yield name, library, OTHERS.get(name, TYPES)

    def llama_bench(self, test: str, threads: int, *options: str) -> None:
        """Tokens/s of every type in every build."""
        for build_name, library, names in self.types():
            paths = {name: self.paths[name] for name in names}
            for name, speed in llama_bench(paths, threads, *options, library=library).items():
                self.samples[test][label(name, build_name)].append(speed)

    def kernels(self, *mode: str, names: Sequence[str] = ()) -> Iterator[tuple[str, list[float]]]:
        """What bench-kernels prints of every type in every build, by one thread."""
        for build_name, library, types in self.types():
            of = [f"{name}={int(gguf.GGMLQuantizationType[name])}" for name in types if not names or name in names]
            program: list[str | Path] = [*pin(), OUT / "bench-kernels", *mode, *of]
            for line in run(program, library=library).splitlines() if of else ():
                name, *values = line.split()
                yield label(name, build_name), [float(value) for value in values]

    def speed(self) -> None:
        """Generation, prompts, products."""
        for columns in COLUMNS:
            repeat = str(max(1, 16 // columns))
            self.llama_bench(f"prompt_{columns}", 1, "-n", "0", "-p", str(columns), "-r", repeat)
        for threads, end in {self.cores: "_all", 1: ""}.items():  # where there is one core, one way
            self.llama_bench(f"generation{end}", threads, "-p", "0", "-n", "32", "-r", "1")
            self.llama_bench(f"mapped{end}", threads, "-p", "0", "-n", "32", "-r", "1", "--repack", "0")
            if end:
                self.llama_bench(f"prompt_512{end}", threads, "-n", "0", "-p", "512", "-r", "1")
        for columns in PRODUCTS:
            for name, (value,) in self.kernels(str(columns)):
                self.samples[f"products_{columns}"][name].append(value)
        mode = ("memory", str(self.memory >> 20), "1")
        for name, (_, read, limit, *_) in self.kernels(*mode, names=(*TRELLIS, "TQ2_0", "Q4_K", "Q3_K", "IQ3_S")):
            self.samples["share_of_memory"][name].append(read / limit)

    def quantization(self) -> None:
        """M weights/s of one thread: ggml's types, ours in numpy, the calibrated encoder in each of its variants."""
        for name, (value,) in self.kernels("quantize", names=QUANTIZED):
            self.samples["quantize"][name].append(value)
        x = np.random.default_rng(1).standard_normal((1024, 256)).astype(np.float32)
        matrix = np.triu(np.random.default_rng(2).standard_normal((4096, 4096), dtype=np.float32) * 0.01, 1)
        factor = Factor(matrix + np.eye(4096, dtype=np.float32), np.ones(4096, dtype=np.float32))

        def timed(what: str, quantize: Any) -> None:
            start = time.perf_counter()
            quantize()
            self.samples["quantize"][label(DEFAULT.name, what)].append(x.size / (time.perf_counter() - start) * 1e-6)

        timed("numpy", lambda: blocks.quantize(x))
        for variant in NativeLibrary(BIN / library_name()).variants:
            library = NativeLibrary(BIN / library_name(), variant)
            timed(f"calibrated, {variant}", lambda: ldlq.quantize(x.reshape(64, -1), factor, library=library))  # noqa: B023


def state() -> str:
    """The commit of the code that is measured, and whether it has been changed since."""
    git = ["git", "-C", str(ROOT)]
    commit = subprocess.run([*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    changed = subprocess.run(
        [*git, "status", "--porcelain", "-uno", "ggml-patch"], capture_output=True, text=True
    ).stdout
    return f"{commit or 'unknown'}{' and changes' if changed else ''}"


# Results


def ratio(file: Mapping[str, Any], test: str, over: str, under: str) -> float | None:
    """The median of the ratios of two things in the same rounds, of the medians if one has fewer rounds."""
    found = file["samples"].get(test, {})
    if over not in found or under not in found:
        return None
    if len(found[over]) != len(found[under]):
        return statistics.median(found[over]) / statistics.median(found[under])
    return statistics.median(a / b for a, b in zip(found[over], found[under], strict=True))


def median(file: Mapping[str, Any], test: str, name: str) -> float | None:
    """The median of what a test measured, None if it has not."""
    found = file["samples"].get(test, {}).get(name)
    return statistics.median(found) if found else None


def speeds(file: Mapping[str, Any], tests: Mapping[str, str]) -> str:
    """A row a type, in brackets its build: speeds, and the ratios to Q4_K in the same build."""
    names = dict.fromkeys(name for test in tests for name in file["samples"].get(test, {}) if name not in UNSHOWN)
    rows = []
    for name in sorted(names, key=lambda name: name.partition(" (")[2]):
        row = [name]
        base = label(BASE, name.partition(" (")[2].removesuffix(")"))
        for test in tests:
            speed, over = median(file, test, name), ratio(file, test, name, base) or ratio(file, test, name, BASE)
            row.append("" if speed is None else f"{speed:.1f}" + (f" ({over:.2f})" if over else ""))
        rows.append(row)
    return report.markdown(["type", *tests.values()], rows)


def targets(file: Mapping[str, Any]) -> Iterator[tuple[str, float, float]]:
    """What is compared, what was measured and what is asked, of every target that was measured."""
    for test, over, under, least, avx2 in TARGETS:
        for build_name, asked in (("", least), ("AVX2", avx2)):
            got = ratio(file, test, label(over, build_name), label(under, build_name))
            if asked is not None and got is not None:
                yield f"{test}: {label(over, build_name)} over {label(under, build_name)}", got, asked


def page(file: Mapping[str, Any]) -> str:
    """The page of a processor."""
    checks = list(targets(file))
    missed = [f"- {what}: {got:.2f}, asked {asked}" for what, got, asked in checks if got < asked]
    memory = [
        f"{name} {median(file, 'share_of_memory', name):.0%}" for name in file["samples"].get("share_of_memory", {})
    ]
    quantized = [f"{name} {median(file, 'quantize', name):.1f}" for name in file["samples"].get("quantize", {})]
    parts = [
        f"# Speed on {file['name']}\n",
        f"{file['model']}, {file['cores']} cores, state {file['state']}. By `make bench`; in brackets over {BASE} in "
        "the same build, one thread where no more is said. [kernels.md](../../kernels.md) explains the kernels.\n",
        speeds(file, SHOWN),
    ]
    if memory:
        parts.append(f"Share of the memory's speed, products with one column out of memory: {', '.join(memory)}.\n")
    if quantized:
        parts.append(f"Quantization, M weights/s: {', '.join(quantized)}.\n")
    parts += [f"Of {len(checks)} targets {len(missed)} are missed{':' if missed else '.'}\n", *missed]
    return "\n".join(parts).rstrip() + "\n"


def plot_columns(files: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Tokens/s over the tokens evaluated together, a processor each."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(len(files), 1, figsize=(8, 4.6 * len(files)), squeeze=False)
    for (axis,), file in zip(axes, files, strict=True):
        tests = {n: f"prompt_{n}" for n in COLUMNS if DEFAULT.name in file["samples"].get(f"prompt_{n}", {})}
        for name in dict.fromkeys(name for test in tests.values() for name in file["samples"][test]):
            found = {n: value for n, test in tests.items() if (value := median(file, test, name))}
            if " (" in name or len(found) < len(tests):
                continue
            width = 2.5 if name in TRELLIS else 1.2
            axis.plot(list(found), list(found.values()), marker="o", markersize=4, label=name, linewidth=width)
        axis.set(xscale="log", yscale="log", xlabel="tokens evaluated together", ylabel="tokens/s, one thread")
        axis.set_title(f"0.6 billion weights, {file['name']} ({file['model']})")
        axis.set_xticks(list(tests), [str(n) for n in tests])
        axis.xaxis.minorticks_off()
        axis.grid(alpha=0.3)
        axis.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1.01, 1), borderaxespad=0)
    figure.tight_layout()
    figure.savefig(path, dpi=110, metadata={"Software": None})
    plt.close(figure)


def write_pages(results: Path) -> None:
    """Pages and picture of all processors' files in a folder of results.

    Raises:
        BenchError: there is none, or one is no processor's file.
    """
    files = []
    try:
        for path in sorted((results / "cpu").glob("*.json")):
            files.append(json.loads(path.read_text()))
            write_text(path.with_suffix(".md"), page(files[-1]))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise BenchError(f"{path}: is no processor's results ({error!r}); remove it") from error
    if not files:
        raise BenchError(f"{results / 'cpu'}: has no results; run make bench")
    plot_columns(files, results / "columns.png")


def compare(samples: Samples) -> str:
    """This build over another one, test by test."""
    rows, file = [], {"samples": samples}
    for test, found in samples.items():
        for name in found:
            if (over := ratio(file, test, name, label(name, "other"))) is not None:
                pairs = zip(found[name], found[label(name, "other")], strict=True)
                ratios = [a / b for a, b in pairs]
                rows.append([test, name, f"{over:.3f}", f"{min(ratios):.3f}", f"{max(ratios):.3f}"])
    return report.markdown(["test", "type", "this over other", "least", "largest"], rows, left=2)


def main() -> int:
    """Run the command; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=positive, default=5, help="interleaved rounds (default %(default)s)")
    parser.add_argument("--results", type=Path, help="folder of the results (default build/bench)")
    parser.add_argument("--name", help="the processor's name (default: what the compiler calls it)")
    parser.add_argument("--page", action="store_true", help="write the pages and the picture, measure nothing")
    parser.add_argument("--against", type=Path, metavar="FOLDER", help="compare with the build in a folder")
    arguments = parser.parse_args()
    results = arguments.results or OUT
    try:
        if arguments.page:
            write_pages(results)
            return 0
        if not (BIN / "llama-bench").exists():
            raise BenchError("build/bin/llama-bench is missing; run make build")
        if arguments.against and not any(arguments.against.glob("libggml-cpu.*")):
            raise BenchError(f"{arguments.against}: has no libggml-cpu; give the build/bin of another checkout")
        OUT.mkdir(parents=True, exist_ok=True)
        libraries = {"": None, "other": arguments.against.resolve()} if arguments.against else build()
        build_program()
        this = processor() | ({"name": arguments.name} if arguments.name else {})
        samples: Samples = defaultdict(lambda: defaultdict(list))
        paths, memory = models(TYPES), max(MEMORY[0], MEMORY[1] * this["cache"])
        for number in range(arguments.rounds):
            print(f"round {number + 1} of {arguments.rounds}", file=sys.stderr)
            # of two builds the second is first in every other round: what drifts favours neither
            order = dict(reversed(libraries.items())) if arguments.against and number % 2 else libraries
            one = Round(samples, order, paths, this["cores"], memory)
            one.speed()
            if not arguments.against:
                one.quantization()
        if arguments.against:
            print(compare(samples))
            return 0
        rounded = {t: {n: [float(f"{v:.4g}") for v in values] for n, values in by.items()} for t, by in samples.items()}
        file = {**this, "state": state(), "rounds": arguments.rounds, "samples": rounded}
        (results / "cpu").mkdir(parents=True, exist_ok=True)
        write_text(results / "cpu" / f"{this['name']}.json", json.dumps(file) + "\n")
        write_pages(results)
        print(page(file))
    except BenchError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

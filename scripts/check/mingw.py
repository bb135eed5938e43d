#!/usr/bin/env python3
"""Cross-compile the patched ggml with its CPU backend for Windows on x86-64, and our files for three processors.

    scripts/check/mingw.py [--work FOLDER]

Nothing is run: this shows that the sources compile and link with MinGW-w64, that our files do so without a warning, and
that the library exports what the Python package calls. Where the compiler is missing the exit status is 77, as for a
skipped test. --work keeps what was compiled.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Final

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from scripts.check import cuda as cuda_check

ROOT: Final = Path(__file__).resolve().parents[2]
TRIPLET: Final = "x86_64-w64-mingw32"
COMPILERS: Final = {"C": f"{TRIPLET}-gcc-posix", "CXX": f"{TRIPLET}-g++-posix"}
PACKAGES: Final = "gcc-mingw-w64-x86-64-posix g++-mingw-w64-x86-64-posix"
SKIPPED: Final = 77

#: Older headers of MinGW-w64 lack what llama.cpp calls on Windows 8 and newer.
DEFINES: Final = "-D_WIN32_WINNT=0x0601"
OPTIONS: Final = (
    "-DCMAKE_SYSTEM_NAME=Windows", "-DCMAKE_SYSTEM_PROCESSOR=x86_64", "-DCMAKE_BUILD_TYPE=Release",
    "-DBUILD_SHARED_LIBS=ON", "-DGGML_NATIVE=OFF", "-DGGML_AVX2=ON", "-DGGML_FMA=ON", "-DGGML_F16C=ON",
    "-DGGML_OPENMP=OFF", "-DLLAMA_BUILD_COMMON=OFF", "-DLLAMA_BUILD_TESTS=OFF", "-DLLAMA_BUILD_TOOLS=OFF",
    "-DLLAMA_BUILD_EXAMPLES=OFF", "-DLLAMA_BUILD_SERVER=OFF", "-DLLAMA_BUILD_APP=OFF", "-DLLAMA_BUILD_UI=OFF",
    "-DLLAMA_USE_PREBUILT_UI=OFF", "-DLLAMA_OPENSSL=OFF", "-DGIT_EXE=OFF",
)  # fmt: skip
#: Processors that our own files are compiled for.
PROCESSORS: Final = {
    "x86-64": [],
    "AVX2": ["-mavx2", "-mfma", "-mf16c"],
    "AVX-512 VNNI": ["-march=icelake-server"],
}
WARNINGS: Final = ["-Wall", "-Wextra", "-Wpedantic", "-Wno-psabi"]


class CheckError(RuntimeError):
    """Something does not compile or is missing; the message is what to print."""


def called(command: list[str], **options: object) -> str:
    """Output of a program that has to succeed."""
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **options)  # type: ignore[call-overload]
    if done.returncode:
        lines = [line for line in done.stdout.splitlines() if "error" in line.lower()] or done.stdout.splitlines()
        raise CheckError(f"{' '.join(command[:4])} ... failed:\n" + "\n".join(lines[:20]))
    return str(done.stdout)


def complaints(log: str, ours: set[str]) -> list[str]:
    """Warnings about our files."""
    places = (re.match(r"(\S+?):\d+:\d+: warning", line) for line in log.splitlines())
    return [place.string for place in places if place and Path(place[1]).name in ours]


def build(tree: Path, work: Path) -> str:
    """Compile and link ggml-base and the CPU backend as DLLs; returns the compiler's output."""
    configure = ["cmake", "-S", str(tree), "-B", str(work), *OPTIONS]
    configure += [f"-DCMAKE_{name}_COMPILER={compiler}" for name, compiler in COMPILERS.items()]
    configure += [f"-DCMAKE_{name}_FLAGS={DEFINES}" for name in COMPILERS]
    if shutil.which("ninja"):
        configure += ["-G", "Ninja"]
    called(configure)
    jobs = str(os.cpu_count() or 2)
    return called(["cmake", "--build", str(work), "--parallel", jobs, "--target", "ggml-base", "ggml-cpu"])


def compile_ours(tree: Path, ours: set[str]) -> tuple[int, list[str]]:
    """Compile each of our C and C++ files for each processor; how many, and what the compiler complained about."""
    ggml = tree / "ggml" / "src"
    names = {path.name for path in (ROOT / "ggml-patch" / "src" / "format").glob("*.c")}
    files = [*sorted(ggml / name for name in names), *sorted((ggml / "ggml-cpu" / "itq3s").rglob("*.c*"))]
    files = [path for path in files if path.suffix in (".c", ".cpp") and "arm" not in path.parts]
    includes = [f"-I{folder}" for folder in (ggml, ggml / "ggml-cpu", tree / "ggml" / "include")]
    by_name = {str(path.relative_to(ggml)): path for path in files}

    def compile_one(processor: str, name: str) -> tuple[str, float]:
        compiler, standard = ("C", "-std=gnu11") if name.endswith(".c") else ("CXX", "-std=gnu++17")
        command = [COMPILERS[compiler], standard, "-O2", *WARNINGS, DEFINES, *PROCESSORS[processor], *includes]
        start = time.monotonic()
        log = called([*command, "-c", str(by_name[name]), "-o", os.devnull])
        return log, time.monotonic() - start

    jobs = [(processor, name) for processor in PROCESSORS for name in by_name]
    logs = cuda_check.compile_all(jobs, compile_one, os.cpu_count() or 1)
    return len(jobs), [warning for _, log in logs for warning in complaints(log, ours)]


def exported(library: Path) -> set[str]:
    """Names that a DLL exports."""
    text = called([f"{TRIPLET}-objdump", "-p", str(library)])
    return set(re.findall(r"^\s*\[ *\d+\](?: \+base\[ *\d+\]\s+[0-9a-f]+)? (\w+)$", text, re.MULTILINE))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, help="folder that keeps the source and what was compiled")
    args = parser.parse_args()
    missing = [tool for tool in (*COMPILERS.values(), f"{TRIPLET}-objdump") if shutil.which(tool) is None]
    if missing:
        print(f"skipped: {', '.join(missing)} not found; on Debian: apt-get install {PACKAGES}", file=sys.stderr)
        return SKIPPED
    with tempfile.TemporaryDirectory() as scratch:
        work = args.work or Path(scratch)
        tree = work / "llama.cpp"
        work.mkdir(parents=True, exist_ok=True)
        try:
            script = ROOT / "ggml-patch" / "cmake" / "patched-source.cmake"
            called(["cmake", f"-DTREE={tree}", "-P", str(script)])
            ours = {path.name for path in (ROOT / "ggml-patch" / "src").rglob("*.[ch]*")}
            found = complaints(build(tree, work / "build"), ours)
            compiled, more = compile_ours(tree, ours)
            names = exported(work / "build" / "bin" / "ggml-base.dll")
            native = (ROOT / "gguf_itq3s" / "codec" / "native.py").read_text()
            wanted = set(re.findall(r"= library\.(\w+)$", native, re.MULTILINE))
            if not wanted or wanted - names:
                raise CheckError(
                    f"ggml-base.dll does not export {', '.join(sorted(wanted - names)) or 'anything known'}"
                )
            if found or more:
                raise CheckError("warnings in our files:\n" + "\n".join([*found, *more]))
        except CheckError as error:
            print(f"error: {error}", file=sys.stderr)
            return 1
    print(f"ggml-base.dll and ggml-cpu.dll link, {len(wanted)} functions are exported")
    print(f"{compiled} compilations of our files for {', '.join(PROCESSORS)} without a warning")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

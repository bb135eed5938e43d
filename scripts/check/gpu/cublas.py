"""Find cuBLAS for a build with CMake and for running it: in the CUDA toolkit, else in a Python package.

The package ``nvidia-cublas`` has the library as libcublas.so.13 only, without the link that a linker looks for, and
its headers among others; so a folder is made that holds links to exactly what is needed. Only the standard library is
used.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

LIBRARIES = ("libcublas", "libcublasLt")


@dataclasses.dataclass(frozen=True)
class Cublas:
    """Where the libraries and the headers are; no headers are needed to run."""

    libraries: Path
    headers: Path | None
    is_toolkit: bool = False


@functools.cache
def toolkit_of(nvcc: str) -> Path:
    """The folder of the CUDA toolkit that ``nvcc``, a path, belongs to."""
    done = subprocess.run([nvcc, "--dryrun", "-x", "cu", "-c", os.devnull], capture_output=True, text=True)
    found = re.search(r"^#\$ TOP=(.+)$", done.stderr, re.MULTILINE)
    return Path(found[1]).resolve() if found else Path(nvcc).resolve().parents[1]


def library_folders(toolkit: Path) -> list[Path]:
    folders = [toolkit / "lib64", toolkit / "lib", *sorted(toolkit.glob("targets/*/lib"))]
    return [f for f in folders if f.is_dir()]


def library_in(folder: Path, name: str, major: str | None) -> Path | None:
    """The library of that major version, or of any."""
    found = sorted(folder.glob(f"{name}.so.{major or '*'}"))
    return found[-1] if found else None


def cublas_below(folder: Path, major: str | None) -> Cublas | None:
    """cuBLAS in a folder that someone named, or in a Python's site-packages."""
    parts = ["", "cublas", "nvidia/cublas", *(f"{p}cu{major or '*'}" for p in ("", "nvidia/"))]
    for part in parts:
        for base in sorted(folder.glob(part)) if part else [folder]:
            for libraries in (base / "lib", base / "lib64", base):
                if all(library_in(libraries, name, major) for name in LIBRARIES):
                    headers = [p / "include" for p in (base, base.parent)]
                    return Cublas(libraries, next((h for h in headers if (h / "cublas_v2.h").exists()), None))
    return None


def cublas_of_toolkit(toolkit: Path, major: str | None, for_build: bool) -> Cublas | None:
    headers = [toolkit / "include", *sorted(toolkit.glob("targets/*/include"))]
    found = next((h for h in headers if (h / "cublas_v2.h").exists()), None)
    for folder in library_folders(toolkit):
        complete = all((folder / f"{name}.so").exists() for name in LIBRARIES) if for_build else True
        if complete and library_in(folder, "libcublas", major) and (found or not for_build):
            return Cublas(folder, found, is_toolkit=True)
    return None


@functools.cache
def site_packages() -> list[Path]:
    """The import paths of every python3 on PATH."""
    pythons = []
    for folder in os.environ.get("PATH", "").split(os.pathsep):
        python3 = Path(folder) / "python3"
        if folder and os.access(python3, os.X_OK):
            pythons.append(str(python3))
    found = [Path(p) for p in sys.path if Path(p).is_dir()]
    for python in dict.fromkeys(pythons):
        try:
            done = subprocess.run(
                [python, "-c", "import sys; print(*sys.path, sep='\\n')"], capture_output=True, text=True, timeout=30
            )
        except (OSError, subprocess.SubprocessError):
            continue
        found += [Path(line) for line in done.stdout.splitlines() if line and Path(line).is_dir()]
    return list(dict.fromkeys(found))


def find(named: Path | None, carried: Path, toolkit: Path | None, major: str | None, for_build: bool) -> Cublas | None:
    """cuBLAS of the folder ``named``, of the toolkit, of a Python, or of ``carried``. A build needs headers."""
    if named is not None:
        return cublas_below(named, major)
    if toolkit is not None and (found := cublas_of_toolkit(toolkit, major, for_build)):
        return found
    for folder in [*site_packages(), carried]:
        found = cublas_below(folder, major)
        if found and (found.headers or not for_build):
            return found
    return None


def make_shim(found: Cublas, folder: Path, major: str | None) -> Cublas:
    """Links in ``folder`` to the libraries, under the names a linker and a program want, and to the headers."""
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "lib").mkdir(parents=True)
    (folder / "include").mkdir()
    for name in LIBRARIES:
        library = library_in(found.libraries, name, major)
        if library:
            (folder / "lib" / f"{name}.so").symlink_to(library.resolve())
            (folder / "lib" / library.name).symlink_to(library.resolve())
    if found.headers:
        for header in found.headers.glob("cublas*.h"):
            (folder / "include" / header.name).symlink_to(header.resolve())
    return Cublas(folder / "lib", folder / "include")


def major_of(program_folders: list[Path]) -> str | None:
    """The major version of cuBLAS that a built libggml-cuda.so needs."""
    for folder in program_folders:
        library = folder / "libggml-cuda.so"
        if library.exists() and (found := re.search(rb"libcublas\.so\.(\d+)", library.read_bytes())):
            return found[1].decode()
    return None

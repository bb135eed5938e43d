"""Find cuBLAS for a build with CMake and for running it: in the CUDA toolkit, else in a Python package.

The package ``nvidia-cublas`` has the library as libcublas.so.13 only, without the link that a linker looks for, and
its headers among others; so a folder is made that holds links to exactly what is needed. Only the standard library is
used.
"""

from __future__ import annotations

import functools
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

LIBRARIES = ("libcublas", "libcublasLt")


@functools.cache
def toolkit_of(nvcc: str) -> Path:
    """The folder of the CUDA toolkit that ``nvcc``, a path, belongs to."""
    done = subprocess.run([nvcc, "--dryrun", "-x", "cu", "-c", os.devnull], capture_output=True, text=True)
    found = re.search(r"^#\$ TOP=(.+)$", done.stderr, re.MULTILINE)
    return Path(found[1]).resolve() if found else Path(nvcc).resolve().parents[1]


def library_folders(nvcc: str) -> list[Path]:
    """Where the toolkit has its libraries."""
    toolkit = toolkit_of(nvcc)
    return [f for f in (toolkit / "lib64", toolkit / "lib", *sorted(toolkit.glob("targets/*/lib"))) if f.is_dir()]


def is_in_toolkit(nvcc: str) -> bool:
    toolkit = toolkit_of(nvcc)
    headers = [toolkit / "include", *toolkit.glob("targets/*/include")]
    return any((h / "cublas_v2.h").exists() for h in headers) and any(
        all((f / f"{name}.so").exists() for name in LIBRARIES) for f in library_folders(nvcc)
    )


def packages(places: list[Path]) -> list[Path]:
    """Folders with cuBLAS's libraries: below ``places``, and where pip puts its package for the running Python."""
    parts = ("", "lib", "lib64", "cublas/lib", "cu*/lib", "nvidia/cublas/lib", "nvidia/cu*/lib")
    places = [*places, *(Path(p) for p in sys.path if Path(p).is_dir())]
    found = [f for place in places for part in parts for f in (sorted(place.glob(part)) if part else [place])]
    return [f for f in found if all(any(f.glob(f"{name}.so.*")) for name in LIBRARIES)]


def link_package(places: list[Path], major: str, folder: Path) -> bool:
    """Make ``folder`` with links to a package's libraries of a major version and its headers, for a compiler.

    Returns:
        whether there is such a package.
    """
    for libraries in packages(places):
        headers = next((p / "include" for p in (libraries, *libraries.parents[:2]) if (p / "include").is_dir()), None)
        linked = {f"{name}.so": libraries / f"{name}.so.{major}" for name in LIBRARIES}
        if headers is None or not (headers / "cublas_v2.h").exists() or not all(p.exists() for p in linked.values()):
            continue
        shutil.rmtree(folder, ignore_errors=True)
        for part in ("lib", "include"):
            (folder / part).mkdir(parents=True)
        for name, library in linked.items():
            for link in (name, library.name):
                (folder / "lib" / link).symlink_to(library.resolve())
        for header in headers.glob("cublas*.h"):
            (folder / "include" / header.name).symlink_to(header.resolve())
        return True
    return False

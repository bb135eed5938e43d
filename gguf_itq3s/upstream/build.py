"""Fetch, patch and build llama.cpp with the trellis types: ``gguf-itq3s build``.

In a checkout this is ``make build``. An installed package brings the patch along and builds below the cache; the
converter, ``eval`` and the other commands find library and tools there.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any, Final

from . import FetchError, build_folder, cache_dir, checkout, fetch_source, library_name, patch_folder

#: The command's options: options of llama.cpp's CMake, and what they are for.
BACKENDS: Final = {
    "cuda": ("-DGGML_CUDA=ON", "kernels for NVIDIA GPUs; needs the CUDA toolkit"),
    "hip": ("-DGGML_HIP=ON", "the same kernels for AMD GPUs; needs ROCm"),
    "metal": ("-DGGML_METAL=ON", "Apple's GPUs (the default on a Mac); the trellis types stay on the CPU"),
    "vulkan": ("-DGGML_VULKAN=ON", "GPUs by Vulkan"),
    "rpc": ("-DGGML_RPC=ON", "layers on other machines: --rpc of the tools, and ggml-rpc-server"),
    "portable": (
        "-DGGML_NATIVE=OFF -DGGML_BACKEND_DL=ON -DGGML_CPU_ALL_VARIANTS=ON",
        "every variant of the CPU kernels, chosen when a tool starts, for other machines than this one",
    ),
}


def build(options: list[str], targets: list[str], jobs: int | None) -> Path:
    """Build llama.cpp, or take it from the cache, and return the folder of tools and libraries.

    ``options`` are those of llama.cpp's CMake, ``targets`` programs beside the tools that are always built.

    Raises:
        FetchError: CMake is missing, the build failed (it has printed why), the source cannot be had, or the package
            was installed without the patch.
    """
    cmake = shutil.which("cmake")
    if cmake is None:
        raise FetchError("cmake: is not installed; install CMake 3.21 or newer (pip install cmake has it as well)")
    folder, out = patch_folder(), build_folder()
    environment = {
        **os.environ,
        "GGML_OPTIONS": " ".join(filter(None, [os.environ.get("GGML_OPTIONS"), *options])),
        "ITQ3S_TARGETS": " ".join(filter(None, [os.environ.get("ITQ3S_TARGETS"), *targets])),
        "GGUF_ITQ3S_OUT": str(out),
        "GGUF_ITQ3S_CACHE": str(cache_dir()),
    }
    if checkout() is None and not os.environ.get("LLAMA_CPP_DIR"):
        environment["ITQ3S_SOURCE"] = str(fetch_source(whole=True))
    if jobs:
        environment["CMAKE_BUILD_PARALLEL_LEVEL"] = str(jobs)
    configure = [cmake, "-S", str(folder), "-B", str(out / "cmake"), "-DCMAKE_BUILD_TYPE=Release"]
    for command in (configure, [cmake, "--build", str(out / "cmake")]):
        if subprocess.run(command, env=environment).returncode:
            raise FetchError(f"{out}: llama.cpp was not built; the reason stands above")
    return out / "bin"


def add_parser(subparsers: Any) -> None:
    """Add the subcommand ``build``."""
    parser = subparsers.add_parser("build", help="fetch, patch and build llama.cpp", description=__doc__)
    for name, (_, text) in BACKENDS.items():
        parser.add_argument(f"--{name}", action="store_true", help=text)
    parser.add_argument(
        "--targets", default="", metavar="NAMES", help='more programs of llama.cpp, such as "llama-mtmd-cli llama-tts"'
    )
    parser.add_argument(
        "-D", dest="options", action="append", default=[], metavar="NAME=VALUE",
        help="option of llama.cpp's CMake, such as -DCMAKE_CUDA_ARCHITECTURES=90; repeatable",
    )  # fmt: skip
    parser.add_argument("--jobs", type=int, metavar="N", help="compilers at a time (default: one a processor)")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run the command; returns the exit code."""
    options = [option for name, (option, _) in BACKENDS.items() if getattr(args, name)]
    options += [shlex.quote(f"-D{option}") for option in args.options]
    folder = build(options, args.targets.replace(",", " ").split(), args.jobs)
    try:
        ctypes.CDLL(str(folder / library_name()))
    except OSError as error:
        raise FetchError(f"{folder}: the library cannot be loaded: {error}; see what the build printed") from error
    print(f"llama.cpp with the trellis types is in {folder}")
    return 0

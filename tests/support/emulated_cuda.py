"""The emulated device: CUDA sources, ours and upstream's, as C++ that tests/cuda/emulate runs on the CPU.

Nothing of upstream's is replaced: its files are those of the patched tree, with the syntax of CUDA turned into C++, and
include the headers of the CUDA toolkit from tests/cuda/emulate/toolkit.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import hashlib
import operator
import os
import platform
import re
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from gguf_itq3s import upstream
from gguf_itq3s.codec.family import FAMILY
from scripts.check import cuda as cuda_check

ROOT = Path(__file__).resolve().parents[2]
EMULATE = ROOT / "tests" / "cuda" / "emulate"
SOURCES = ROOT / "ggml-patch" / "src" / "cuda"

#: Our types; their places are their numbers in the C interfaces (emulate/device.h).
TYPES = (*(row.identifier for row in FAMILY.values()), "tq1_0", "tq2_0")
#: Weights of a block.
LENGTHS = dict.fromkeys(TYPES, 256) | {row.identifier: row.format.block for row in FAMILY.values()}
#: Those whose blocks are rotated.
ROTATED = tuple(row.identifier for row in FAMILY.values())
#: Those with blocks of 256, and the others.
LONG_BLOCKS = tuple(name for name in TYPES if LENGTHS[name] == 256)
SHORT_BLOCKS = tuple(name for name in TYPES if LENGTHS[name] != 256)
#: Architectures: asynchronous copies and dependent launches; the first tensor cores for int8; tiles of 128 rows without
#: tensor cores; those of 64 rows.
HOPPER, TURING, VOLTA, PASCAL = 900, 750, 700, 610
#: Widths of upstream's tiles in MMQ, with a fallback for missing rows and without, and those that the others are like.
SOME_WIDTHS = (16, 64)
ALL_WIDTHS = {True: (8, 16, 32, 64, 128), False: (8, 16, 24, 32, 40, 48, 64, 80, 96, 112, 128)}


def widths(architecture: int, name: str, fallback: bool) -> tuple[int, ...]:
    """The widths that are compiled: all for ITQ3_S on two architectures."""
    if architecture in (HOPPER, VOLTA):
        return ALL_WIDTHS[fallback] if name == "itq3_s" else (*SOME_WIDTHS, 128)
    return SOME_WIDTHS


#: Files of upstream's that are compiled beside ours.
UPSTREAM = ("mmq.cu", "mmvq.cu", "mmid.cu", "quantize.cu")
#: What is compiled together: our files and the C interfaces; upstream's with our functions inside; upstream's of which
#: only what is called on the host runs, for the kernels are ours.
OURS = [("device.cpp", "itq-quantize.cu", "drivers.cpp")]
OURS_NEWEST = [("itq-mma.cu", "products.cpp"), ("kernels.cpp", "faults.cpp", "fused.cpp")]
INSTANCES = [f"template-instances/mmq-instance-{name}.cu" for name in TYPES]

#: The PTX instructions of emulate/ptx.h.
PTX = frozenset(re.findall(r"^inline void (\w+)\(", (EMULATE / "ptx.h").read_text(), re.M))


def closing(text: str, start: int) -> int:
    """Where the parenthesis that opens at ``start`` closes; those in strings do not count."""
    depth = 0
    for found in re.finditer(r'"[^"]*"|[()]', text[start:]):
        depth += {"(": 1, ")": -1}.get(found[0], 0)
        if depth == 0:
            return start + found.start()
    raise ValueError(f"a parenthesis does not close: {text[start : start + 80]}")


def ptx_call(statement: str) -> str:
    """What stands in the parentheses of an asm statement, as a call of the function of that instruction."""
    strings = re.match(r'\s*(?:"[^"]*"\s*)+', statement)
    assert strings is not None
    text = "".join(re.findall(r'"([^"]*)"', strings[0]))
    if not text:
        return "(void) 0"  # only hides a value from the compiler
    operands = []
    position = strings.end()
    for found in re.finditer(r'"[+=]?\w"\s*\(', statement):
        if found.start() >= position:
            position = closing(statement, found.end() - 1)
            operands.append(statement[found.end() : position])
    name, _, rest = text.strip("\\n ;").partition(" ")
    function = re.sub(r"\W", "_", name.partition("::")[0])
    if function not in PTX:
        shown = re.sub(r"[^\w.:]", " ", name)
        return f'emulate::fail("{shown} is not emulated")'
    rest = re.sub(r"\[(%\d+)\]", r"\1", rest)
    rest = re.sub(r"%(\d+)", lambda found: f"({operands[int(found[1])]})", rest)
    return f"emulate::ptx::{function}({rest})"


def without_asm(source: str) -> str:
    parts = []
    position = 0
    for found in re.finditer(r"\basm(?:\s+volatile)?\s*\(", source):
        if found.start() >= position:
            end = closing(source, found.end() - 1)
            parts += [source[position : found.start()], ptx_call(source[found.end() : end])]
            position = end + 1
    return "".join(parts) + source[position:]


def as_cpp(source: str) -> str:
    """CUDA source whose launches, shared memory, PTX and largest grid are launch.h's."""
    source = re.sub(r"extern\s+__shared__\s+(\w+)\s+(\w+)\[\]", r"\1 * \2 = emulate::dynamic_shared<\1>()", source)
    source = re.sub(
        r"__shared__\s+([^;]+?)\s(\w+)((?:\[[^\]]*\])*);", r"static \1 \2\3; emulate::begin_shared(\2);", source
    )
    source = re.sub(
        r"(\w+(?:<[^<>;]*>)?)\s*<<<([^;]*?)>>>\s*\(",
        r"emulate::launch_configured(\1, emulate::configuration(\2), ",
        source,
    )
    source = source.replace(
        "static bool shared_memory_limit_raised[GGML_CUDA_MAX_DEVICES] = { false }",
        "static emulate::once_a_device shared_memory_limit_raised",
    )
    return without_asm(source).replace("(int64_t) 65535", "emulate::device.max_grid")


def only_ours(source: str) -> str:
    """Upstream's source without kernels that are never launched: to compile those takes minutes.

    The cases of other types are left out where kernels are chosen, and widths of tiles that a type has none of, or that
    are not in EMULATE_WIDTHS, where one is launched.
    """
    others = rf"case GGML_TYPE_(?!{'|'.join(TYPES).upper()})\w+:"
    same_case = r"(?:(?!case GGML_TYPE_|ITQ_CUDA_|default:).)*"
    chosen = rf"{others}{same_case}?(?:mul_mat_q_case|mul_mat_vec_q_switch_ncols_dst)<{same_case}"
    source = re.sub(chosen, "", source, flags=re.S)
    launched = re.compile(r"launch_mul_mat_q<type,\s*(\d+), fallback, prec_src1>\(ctx, args, stream\);")
    has_tiles = r"EMULATE_WIDTHS(type, \1) && ggml_cuda_mmq_get_type(type, \1, fallback, prec_src1) != GGML_TYPE_COUNT"
    missing = 'emulate::fail("a tile of this width is not compiled");'
    return launched.sub(rf"if constexpr ({has_tiles}) {{ \g<0> }} else {{ {missing} }}", source)


@functools.cache
def patched_tree() -> Path:
    """The patched source of llama.cpp, made as for the build."""
    folder = Path(tempfile.mkdtemp(prefix="emulated-cuda-"))
    atexit.register(shutil.rmtree, folder, True)
    return cuda_check.prepare_tree(folder)


def write_sources(folder: Path, faults: Sequence[tuple[str, str, str]] = ()) -> None:
    """Upstream's sources to ``folder/upstream``, ours and the C interfaces to ``folder/ours``, as C++.

    Args:
        folder: an empty one.
        faults: mistakes, in the order of their numbers from 1 on: a file, what stands there once, what takes its place.
    """
    tree = patched_tree() / "ggml" / "src" / "ggml-cuda"
    ours = {path.name: path for path in (*SOURCES.glob("*.[ch]*"), *EMULATE.glob("*.cpp"))}
    theirs = [path for path in (*tree.glob("*.cuh"), *map(tree.joinpath, UPSTREAM)) if path.name not in ours]
    for name in ("upstream/vendors", "upstream/template-instances", "ours"):
        (folder / name).mkdir(parents=True)
    shutil.copy(tree / "vendors" / "cuda.h", folder / "upstream" / "vendors")
    for name in TYPES:
        shutil.copy(tree / "template-instances" / f"mmq-instance-{name}.cu", folder / "upstream" / "template-instances")
    (folder / "tree").symlink_to(patched_tree())
    (folder / "emulate").symlink_to(EMULATE)

    planted = 0
    for path in (*theirs, *ours.values()):
        text = path.read_text()
        for name, right, wrong in faults:
            if name == path.name:
                assert text.count(right) == 1, f"{name}: stands {text.count(right)} times, not once: {right}"
                text = text.replace(right, wrong)
                planted += 1
        text = as_cpp(text)
        if path.name in ours:
            (folder / "ours" / path.name).write_text(text)
        else:  # upstream's warnings are upstream's
            header = text.replace("#pragma once", "#pragma once\n#pragma GCC system_header", 1)
            (folder / "upstream" / path.name).write_text(only_ours(header))
    assert planted == len(faults), "mistakes in files that are not there"


def build(folder: Path, architecture: int) -> Path:
    """A shared library of what :func:`write_sources` has written to ``folder``.

    It is kept beside the builds of llama.cpp, under the hash of all that decides it. Paths are relative, so that
    ccache, where it is installed, finds what an earlier run has compiled.
    """
    compiler = shutil.which("g++") or shutil.which("c++")
    assert compiler is not None, "a C++ compiler is needed"
    cached = [ccache] if (ccache := shutil.which("ccache")) else []
    compiled = " || ".join(
        f"(type == GGML_TYPE_{name.upper()} && J == {width})"
        for name in TYPES
        for width in sorted({*widths(architecture, name, True), *widths(architecture, name, False)})
    )
    flags = [f"-D__CUDA_ARCH__={architecture}", f"-D__CUDA_ARCH_LIST__={architecture}", "-DGGML_CUDA_NO_VMM"]
    flags += [f"-DEMULATE_WIDTHS(type, J)=({compiled})", "-std=c++17", "-fPIC", "-fno-strict-aliasing"]
    flags += ["-fno-exceptions", "-Iours", "-Iupstream", "-Iemulate/toolkit", "-Iemulate"]
    flags += ["-isystem", "tree/ggml/src", "-isystem", "tree/ggml/include"]
    checks = ["-O1", "-fno-sanitize-recover=all"]  # among others misaligned vector accesses end the test
    strict = [*checks, "-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas", "-fsanitize=undefined"]
    with_ours = [*checks, "-w", "-fsanitize=alignment,bounds,shift,signed-integer-overflow"]
    on_host = ["-w"]
    newest = architecture == HOPPER
    units: list[tuple[list[str], str, Sequence[str]]]
    units = [(strict, "ours", unit) for unit in (*(OURS_NEWEST if newest else []), *OURS)]
    # ITQ3_S has more widths than the others.
    instances = (INSTANCES[:1], INSTANCES[1:]) if newest else (INSTANCES,)
    units += [(with_ours, "upstream", unit) for unit in (*instances, ["mmvq.cu", "mmid.cu"])]
    units += [(on_host, "upstream", ["mmq.cu", "quantize.cu"])]

    library = kept_library(folder, architecture, compiler, repr((flags, units)))
    if library.exists():
        library.touch()  # the last used stay
        return library

    def compile_unit(unit: tuple[Sequence[str], str, Sequence[str]]) -> str:
        own, part, files = unit
        name = f"{Path(files[0]).stem}-{architecture}"
        (folder / f"{name}.cpp").write_text("".join(f'#include "{part}/{file}"\n' for file in files))
        command = [*cached, compiler, *flags, *own, "-c", f"{name}.cpp", "-o", f"{name}.o"]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return f"{name}.o"

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = list(pool.map(compile_unit, units))
    made = f"emulated-{architecture}.so"
    link = [compiler, "-shared", "-fsanitize=undefined", "-Wl,-z,defs", *objects, "-o", made]
    done = subprocess.run(link, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    library.parent.mkdir(parents=True, exist_ok=True)
    partial = library.with_name(f"{library.name}.{os.getpid()}")
    shutil.copy(folder / made, partial)
    partial.replace(library)
    for old in sorted(library.parent.glob("*.so"), key=lambda path: path.stat().st_mtime)[:-KEPT]:
        old.unlink(missing_ok=True)
    return library


def kept_library(folder: Path, architecture: int, compiler: str, command: str) -> Path:
    """Where the library of these sources, made by this compiler with these arguments, is kept."""
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True).stdout
    headers = [patched_tree() / "ggml" / "include", patched_tree() / "ggml" / "src"]
    files = [
        path for part in (folder / "ours", folder / "upstream", EMULATE) for path in part.rglob("*") if path.is_file()
    ]
    files += [path for part in headers for path in part.glob("*.h")]
    content = hashlib.sha256(f"{version}{platform.machine()}{command}".encode())
    for path in sorted(files):
        content.update(path.name.encode() + hashlib.sha256(path.read_bytes()).digest())
    return upstream.cache_dir() / "emulated-cuda" / f"{content.hexdigest()[:20]}-{architecture}.so"


#: Libraries in the cache: two states of the sources on all architectures.
KEPT = 8


class Device:
    """The emulated device: a library of the kernels for one architecture."""

    def __init__(self, library: Path, architecture: int) -> None:
        self.architecture = architecture
        self.path = library
        self.library = ctypes.CDLL(str(library))
        for name in ("vec_dot", "choice", "launches"):
            if hasattr(self.library, "emulate_" + name):
                getattr(self.library, "emulate_" + name).restype = ctypes.c_float

    def __call__(self, name: str, *args: npt.NDArray[Any] | int | np.integer[Any] | None) -> float:
        """``extern "C" void emulate_name(...)``: arrays are passed as pointers, None as a null pointer."""
        converted = [
            a.ctypes.data_as(ctypes.c_void_p)
            if isinstance(a, np.ndarray)
            else ctypes.c_int64(operator.index(a))
            if a is not None
            else None
            for a in args
        ]
        return float(getattr(self.library, "emulate_" + name)(*converted) or 0.0)

    def configure(
        self,
        *,
        cc: int | None = None,
        nsm: int = 2,
        smpbo: int = 227 * 1024,
        seed: int = 0,
        max_grid: int = 65535,
    ) -> None:
        """The device that the launchers see, by default one of the architecture, and the order of the threads."""
        self("configure", self.architecture if cc is None else cc, nsm, smpbo, seed, max_grid)

    def launches(self) -> list[tuple[int, ...]]:
        """Grid and block, x, y and z of each, and the bytes of shared memory of every launch since ``configure``."""
        found = np.zeros(7, np.int64)
        count = int(self("launches", 0, found))
        return [tuple(found.tolist()) for n in range(count) if self("launches", n, found)]

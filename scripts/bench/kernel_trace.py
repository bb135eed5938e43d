"""The instructions that a kernel of a matrix product executes, one after the other, compiled for any processor.

``ggml-patch/bench/kernel-loop.c`` and the kernels become a static program with the flags of a native build on that
processor. The program traces itself by single-stepping on x86-64; for aarch64 qemu-aarch64 logs what it executes. No
loop has to be found and no trip count to be known.
"""

from __future__ import annotations

import hashlib
import re
import shutil
import struct
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from gguf_itq3s import upstream

ROOT: Final = Path(__file__).resolve().parents[2]
SOURCES: Final = ROOT / "ggml-patch" / "src"
OUT: Final = ROOT / "build" / "bench" / "model"
LOOP: Final = ROOT / "ggml-patch" / "bench" / "kernel-loop.c"
#: As CMake's Release and ggml compile the CPU backend.
FLAGS: Final = ("-O3", "-DNDEBUG", "-D_GNU_SOURCE", "-fPIC", "-ffunction-sections", "-fdata-sections", "-g0")


class ModelError(Exception):
    """The model cannot be made; the message says why and what to do."""


def run(command: Sequence[str | Path], what: str) -> str:
    """Standard output of a command that must succeed.

    Raises:
        ModelError: it failed, or there is no such program; ``what`` says what it was for.
    """
    try:
        done = subprocess.run([str(c) for c in command], capture_output=True, text=True, check=False)
    except FileNotFoundError as error:
        raise ModelError(f"{what}: {command[0]} not found") from error
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if "error" in line] or done.stderr.splitlines()
        raise ModelError(f"{what}: {lines[0].removeprefix('error: ') if lines else f'exit code {done.returncode}'}")
    return done.stdout


@dataclass(frozen=True)
class Target:
    """What a program of kernels is compiled for.

    Attributes:
        name: name of its folder.
        architecture: "x86" or "arm", as the folders of the kernels are called.
        flags: alternatives of compiler flags, of which the first that the compiler knows is taken.
        emulated: the processor that qemu-aarch64 shall be (arm only).
    """

    name: str
    architecture: str
    flags: tuple[tuple[str, ...], ...]
    emulated: str = "max"

    @property
    def compilers(self) -> tuple[str, str]:
        """The C and the C++ compiler."""
        prefix = "aarch64-linux-gnu-" if self.architecture == "arm" else ""
        return f"{prefix}gcc", f"{prefix}g++"


@dataclass
class Program:
    """A compiled ``kernel-loop``.

    Attributes:
        target: what it was compiled for.
        path: the program.
        flags: the flags of that processor which the compiler knew.
        listing: its instructions by address, see `disassemble`.
    """

    target: Target
    path: Path
    flags: tuple[str, ...]
    listing: dict[int, str] = field(default_factory=dict)


def known_flags(target: Target) -> tuple[str, ...]:
    """The first of the alternatives that the compiler takes.

    Raises:
        ModelError: there is no compiler, or it takes none of them.
    """
    compiler = target.compilers[0]
    if shutil.which(compiler) is None:
        package = "gcc-aarch64-linux-gnu g++-aarch64-linux-gnu libc6-dev-arm64-cross" if "-" in compiler else "gcc g++"
        raise ModelError(f"{compiler} not found; on Debian: apt-get install {package}")
    for flags in target.flags:
        command = [compiler, *flags, "-x", "c", "-E", "-", "-o", "-"]
        if not subprocess.run(command, input="", capture_output=True, text=True, check=False).returncode:
            return flags
    raise ModelError(f"{compiler} knows none of {' | '.join(' '.join(flags) for flags in target.flags)}")


def sources(architecture: str) -> dict[str, Path]:
    """The files of a program by the name of their object."""
    ggml = upstream.fetch_source() / "ggml" / "src" / "ggml-cpu"
    arch = SOURCES / "cpu" / "arch" / architecture
    return {
        "loop": LOOP,
        "gemm": arch / "itq-gemm.c",
        "gemv": arch / "itq-gemv.c",
        "gemm-portable": SOURCES / "cpu" / "itq-gemm.c",
        "repack": ggml / "arch" / architecture / "repack.cpp",
        "quants": ggml / "arch" / architecture / "quants.c",
    }


def compile_program(target: Target) -> Program:
    """The program for a target; objects whose preprocessed source and flags are as before are kept.

    Raises:
        ModelError: the compiler is missing or refused.
    """
    flags = known_flags(target)
    ggml = upstream.fetch_source() / "ggml"
    folder = OUT / target.name
    folder.mkdir(parents=True, exist_ok=True)
    includes = [f"-I{SOURCES / part}" for part in ("cpu", "format")]
    includes += [f"-I{ggml / part}" for part in ("include", "src", "src/ggml-cpu")]
    objects, changed = [], False
    for name, source in sources(target.architecture).items():
        language = ["-std=gnu++17"] if source.suffix == ".cpp" else ["-std=gnu11"]
        compiler = target.compilers[source.suffix == ".cpp"]
        options = [compiler, *language, *FLAGS, *flags, "-DGGML_COMMON_DECL_C", *includes]
        what = f"compiling {source.name} for {target.name}"
        text = run([*options, "-E", "-P", source], what)
        key = hashlib.sha256("\0".join([text, *options]).encode()).hexdigest()[:16]
        path = folder / f"{name}-{key}.o"
        if not path.exists():
            for old in folder.glob(f"{name}-????????????????.o"):
                old.unlink()
            run([*options, "-c", source, "-o", path.with_suffix(".new")], what)
            path.with_suffix(".new").replace(path)
            changed = True
        objects.append(path)
    program = folder / "kernel-loop"
    if changed or not program.exists():
        # most of the library is missing, and nothing that runs here asks for it
        link = ["-static", "-no-pie", "-Wl,--gc-sections", "-Wl,--unresolved-symbols=ignore-all", "-Wl,-w"]
        run([target.compilers[0], *objects, *link, "-o", program, "-lm"], f"linking for {target.name}")
    return Program(target, program, flags)


#
# traces
#


def disassemble(program: Program, objdump: str) -> dict[int, str]:
    """The instructions of a program by address, in AT&T's syntax on x86, without comments and names of targets.

    Raises:
        ModelError: the disassembler is missing or failed.
    """
    everything = ["--mattr=+all"] if program.target.architecture == "arm" else []
    text = run([objdump, "-d", "--no-show-raw-insn", *everything, program.path], f"disassembling {program.target.name}")
    listing = {}
    for line in text.splitlines():
        found = re.match(r"\s*([0-9a-f]+):\s+(\S.*)", line)
        if found:
            comment = "//" if program.target.architecture == "arm" else "#"
            words = re.sub(r"<[^>]*>", "", found[2]).split(f" {comment} ")[0].split(f"\t{comment} ")[0]
            listing[int(found[1], 16)] = " ".join(words.split())
    return listing


def symbols(program: Program, nm: str) -> dict[str, tuple[int, int]]:
    """Address and size of the functions of a program."""
    text = run([nm, "-S", "--defined-only", program.path], f"symbols of {program.target.name}")
    rows = [line.split() for line in text.splitlines()]
    return {row[3]: (int(row[0], 16), int(row[1], 16)) for row in rows if len(row) == 4}


def emulated_addresses(
    program: Program, arguments: Sequence[str], functions: Mapping[str, tuple[int, int]]
) -> list[int]:
    """The addresses that ``product`` executes under qemu-aarch64.

    Raises:
        ModelError: qemu is missing or failed, or its log has no product.
    """
    emulator = shutil.which("qemu-aarch64")
    if emulator is None:
        raise ModelError("qemu-aarch64 not found; on Debian: apt-get install qemu-user")
    single = "-one-insn-per-tb" if "-one-insn-per-tb" in run([emulator, "-h"], "qemu-aarch64") else "-singlestep"
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        options = ["-cpu", program.target.emulated, single, "-d", "exec,nochain", "-D", str(log)]
        run([emulator, *options, program.path, "run", *arguments], f"{program.target.name}: {' '.join(arguments)}")
        begin = functions["product"][0]
        main, size = functions["main"]
        addresses: list[int] = []
        with log.open() as lines:
            for line in lines:
                found = re.search(r"\[[0-9a-f]+/([0-9a-f]+)/", line)
                if not found:
                    continue
                address = int(found[1], 16)
                if addresses and main <= address < main + size:
                    break
                if addresses or address == begin:
                    addresses.append(address)
    if not addresses:
        raise ModelError(f"{program.target.name}: the log of qemu-aarch64 does not show the product")
    return addresses


def stepped_addresses(program: Program, arguments: Sequence[str]) -> list[int]:
    """The addresses that ``product`` executes, by single-stepping on this machine.

    Raises:
        ModelError: this machine cannot execute the program.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "addresses"
        run([program.path, "trace", *arguments, path], f"{program.target.name}: {' '.join(arguments)}")
        data = path.read_bytes()
    return list(struct.unpack(f"<{len(data) // 8}Q", data))


@dataclass(frozen=True)
class Tools:
    """Programs of LLVM of one version.

    Attributes:
        mca: llvm-mca.
        objdump: llvm-objdump.
        nm: llvm-nm.
        version: the number of the version.
    """

    mca: str
    objdump: str
    nm: str
    version: str


def versions(names: Sequence[str]) -> Iterator[str]:
    """Suffixes under which llvm-mca may be installed, newest first: 21, 20, ..., none."""
    numbers = [int(found[1]) for name in names if (found := re.fullmatch(r"llvm-mca-(\d+)", name))]
    yield from (f"-{n}" for n in sorted(set(numbers), reverse=True))
    if "llvm-mca" in names:
        yield ""


def find_tools(names: Sequence[str]) -> Tools:
    """The newest LLVM of which all three programs are among the names of programs on PATH.

    Raises:
        ModelError: there is none.
    """
    for suffix in versions(names):
        mca, objdump, nm = (f"llvm-{tool}{suffix}" for tool in ("mca", "objdump", "nm"))
        if objdump in names and nm in names:
            found = re.search(r"LLVM version (\S+)", run([mca, "--version"], "llvm-mca"))
            return Tools(mca, objdump, nm, found[1] if found else "unknown")
    raise ModelError(
        "llvm-mca not found, or no llvm-objdump and llvm-nm of its version; on Debian: apt-get install llvm-19"
    )


def trace(program: Program, tools: Tools, kernel: str, columns: int, blocks: int) -> list[str]:
    """The instructions of one product, as they were executed.

    Raises:
        ModelError: the program cannot be executed or disassembled here.
    """
    if not program.listing:
        program.listing.update(disassemble(program, tools.objdump))
    arguments = [kernel, str(columns), str(blocks)]
    if program.target.architecture == "arm":
        addresses = emulated_addresses(program, arguments, symbols(program, tools.nm))
    else:
        addresses = stepped_addresses(program, arguments)
    try:
        return [program.listing[address] for address in addresses]
    except KeyError as error:
        raise ModelError(f"{program.target.name}: no instruction at {error.args[0]:#x} of the program") from error

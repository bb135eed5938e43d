"""Traces of instructions through llvm-mca: cycles, and the ports of the processor that bind.

llvm-mca knows how long instructions take and which ports they take, for the processors that LLVM has a table of. It
takes every load for a hit of the first-level cache and every jump for a predicted one.
"""

from __future__ import annotations

import json
import re
import subprocess
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from scripts.bench.kernel_trace import ModelError

#: Ports whose pressure is within this share of the highest bind too.
BINDING: Final = 0.05
#: Calls and returns, of which llvm-mca assumes 100 cycles; instructions that only mark a place.
LEFT_OUT: Final = re.compile(r"(call|ret|leave|bl |blr|endbr|bti|hint|notrack|data16)")

# Instructions that change the width of a register, in AT&T's syntax: what they are with half the width.
NARROW: Final = (
    (re.compile(r"^vextract[if]64x4 \S+ %zmm(\d+), %ymm(\d+)"), r"vextracti32x4 $1, %ymm\1, %xmm\2"),
    (re.compile(r"^vinsert[if]64x4 \S+ (%ymm(\d+)|.*\)), %zmm(\d+), %zmm(\d+)"), None),
    (re.compile(r"^vbroadcast[if](64x4|32x8) (.*\)), %zmm(\d+)"), r"vmovdqu64 \2, %ymm\3"),
)


def once(instruction: str) -> str:
    """An instruction of 512 bits as the same one of 256, which a table that splits 512 bits counts once; else as it is.

    Registers that an instruction narrows or widens go one step down too; broadcasts of memory fill half the lanes.
    """
    if "%zmm" not in instruction:
        return instruction
    for pattern, replacement in NARROW:
        if pattern.match(instruction):
            if replacement is not None:
                return pattern.sub(replacement, instruction)
            instruction = re.sub(r"^vinsert[if]64x4", "vinserti32x4", instruction)
    instruction = instruction.replace("%ymm", "%xmm").replace("%zmm", "%ymm")
    return re.sub(r"\{1to(16|8|32)\}", lambda found: f"{{1to{int(found[1]) // 2}}}", instruction)


@dataclass(frozen=True)
class Correction:
    """An instruction that a table of LLVM has wrong, and one that it has right and that takes as much.

    Attributes:
        pattern: instructions in AT&T's syntax.
        replacement: the other instruction, as in `re.sub`; it reads and writes the same registers.
        why: what is wrong.
    """

    pattern: str
    replacement: str
    why: str

    def apply(self, line: str) -> str:
        """The line, corrected where the pattern matches."""
        return re.sub(self.pattern, self.replacement, line)


ZEN4: Final = (
    Correction(
        r"^vpshufb (?!.*%zmm)",
        "vpunpcklbw ",
        "vpshufb of 256 bits costs what that of 512 costs in the table; it costs half (llvm-project #221032)",
    ),
    Correction(
        r"^vpdp(busd|wssd)s? (%[yz])",
        r"vfmadd231ps \2",
        "dot products of registers in EVEX's encoding cost twice what those with memory cost in the table",
    ),
)
#: By the processor whose table it is.
CORRECTIONS: Final[Mapping[str, tuple[Correction, ...]]] = {
    "znver4": ZEN4,
    "znver5": (
        *ZEN4,
        Correction(r"^vperm[bw] (?!.*%zmm)", "vpunpcklbw ", "vpermb takes half a cycle (measured), not a whole one"),
        Correction(
            r"^v(?:pbroadcast[dq]|broadcast(?:s[sd]|[fi]\w+)) (.*\)), (%[xyz]mm\d+)$",
            r"vmovdqu64 \1, \2",
            "a broadcast from memory is a load and takes no other pipe (measured)",
        ),
        Correction(
            r"^vpinsr[dq] \S+ (?=.*\()",
            "vpunpckldq ",
            "vpinsrd from memory takes half a cycle (measured), not one and a half",
        ),
    ),
    "sapphirerapids": (
        Correction(
            r"^vpdpbusd (?=.*%zmm)",
            "vpternlogd $0x96, ",
            "dot products of 512 bits are on port 0 alone in the table, as in clients; servers have port 5 too",
        ),
    ),
}


def correct(lines: Iterable[str], table: str) -> list[str]:
    """Lines with what the table of a processor has wrong replaced."""
    corrections = CORRECTIONS.get(table, ())
    out = []
    for line in lines:
        for correction in corrections:
            line = correction.apply(line)
        out.append(line)
    return out


def assembly(trace: Iterable[str], architecture: str) -> list[str]:
    """The lines that an assembler takes for the instructions of a trace; jumps go anywhere, calls are left out."""
    lines = []
    for instruction in trace:
        if LEFT_OUT.match(instruction):
            continue
        if instruction.startswith("nop"):
            instruction = "nop"
        elif architecture == "arm":
            if instruction.startswith("adrp"):
                instruction = re.sub(r"0x[0-9a-f]+$", "0", instruction)
            elif re.match(r"(b\.|b |cbn?z|tbn?z|adr )|ldr \w+, 0x", instruction):
                instruction = re.sub(r"0x[0-9a-f]+$", "8", instruction)
        lines.append(instruction)
    return lines


@dataclass(frozen=True)
class Run:
    """What llvm-mca says about one trace.

    Attributes:
        cycles: simulated, from the first instruction to the last that retires.
        instructions: number of instructions.
        dispatch: cycles that the front end takes to dispatch all of them.
        ports: cycles that each of the processor's resources is taken, by name.
        left_out: instructions that the table does not have, by mnemonic, and how many.
    """

    cycles: float
    instructions: int
    dispatch: float
    ports: Mapping[str, float]
    left_out: Mapping[str, int]


def port_names(resources: Sequence[str]) -> list[str]:
    """Names of resources for readers: ``SKXPort5`` -> ``p5``, ``Zn4FP1`` -> ``FP1``; members of a group share one."""
    names = []
    for resource in resources:
        name = re.sub(r"^(SKX|SKL|ICX|HW|ADLP|SPR|Zn\d|N1Unit|V1Unit|N2Unit|V2Unit|CyUnit)", "", resource.split(".")[0])
        found = re.fullmatch(r"Port(\d+)", name)
        names.append(f"p{int(found[1])}" if found else name)
    return names


def parse(result: Mapping[str, Any], lines: Sequence[str], no_port_1: bool) -> Run:
    """A run from llvm-mca's JSON.

    Args:
        result: the JSON.
        lines: the instructions that were given.
        no_port_1: the vector unit of port 1 does not work on its own while 512 bits are in use, as on Intel's servers;
            tables of LLVM before Sapphire Rapids let it. What they put there of 512 bits goes to ports 0 and 5.
    """
    region = result["CodeRegions"][0]
    summary = region["SummaryView"]
    names = port_names(result["TargetInfo"]["Resources"])
    members = Counter(names)
    last = len(region["Instructions"])
    ports: dict[str, float] = defaultdict(float)
    for entry in region["ResourcePressureView"]["ResourcePressureInfo"]:
        index = entry["InstructionIndex"]
        if index == last:  # the sum
            continue
        name, usage = names[entry["ResourceIndex"]], entry["ResourceUsage"]
        if no_port_1 and name == "p1" and "%zmm" in region["Instructions"][index]:
            ports["p0"] += usage / 2
            ports["p5"] += usage / 2
        else:
            ports[name] += usage / members[name]
    given = Counter(line.split()[0] for line in lines)
    taken = Counter(str(text).split()[0] for text in region["Instructions"])
    left_out = given - taken if len(region["Instructions"]) < len(lines) else Counter()
    return Run(
        summary["TotalCycles"],
        summary["Instructions"],
        summary["TotaluOps"] / summary["DispatchWidth"],
        dict(ports),
        dict(left_out),
    )


def simulate(mca: str, options: Sequence[str], lines: Sequence[str], no_port_1: bool = False) -> Run:
    """Run one trace once.

    Args:
        mca: the program.
        options: which processor.
        lines: instructions, as `assembly` makes them.
        no_port_1: see `parse`.

    Raises:
        ModelError: llvm-mca does not take an instruction.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.s"
        path.write_text("\n".join(lines) + "\n")
        command = [mca, *options, "-iterations=1", "-json", str(path)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode and "unsupported instruction" in done.stderr:
            command.insert(-1, "-skip-unsupported-instructions=lack-sched")
            done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        said = re.findall(r"error: .*\n.*", done.stderr) or [done.stderr[-200:]]
        raise ModelError(f"llvm-mca {' '.join(options)}: {' '.join(said[0].split())}")
    return parse(json.loads(done.stdout), lines, no_port_1)


@dataclass(frozen=True)
class Cost:
    """What a kernel costs for 256 weights, all columns together.

    Attributes:
        cycles: simulated, never fewer than ``bound``.
        bound: the fewest that the ports and the front end allow.
        binding: the ports that set the bound, or "dispatch".
        instructions: number executed.
        left_out: share of instructions that the table does not have.
    """

    cycles: float
    bound: float
    binding: tuple[str, ...]
    instructions: float
    left_out: float


def difference(few: Run, many: Run, weights: float) -> Cost:
    """The cost of 256 weights from runs of two lengths, so that what comes before and after the blocks cancels out.

    Args:
        few: the shorter run.
        many: the longer one.
        weights: by how many 256 weights it is longer.
    """
    ports = {name: (many.ports[name] - few.ports.get(name, 0.0)) / weights for name in many.ports}
    ports["dispatch"] = (many.dispatch - few.dispatch) / weights
    bound = max(ports.values())
    binding = sorted(name for name, value in ports.items() if value >= (1 - BINDING) * bound)
    skipped = sum(many.left_out.values()) - sum(few.left_out.values())
    instructions = many.instructions - few.instructions
    return Cost(
        max((many.cycles - few.cycles) / weights, bound),
        bound,
        tuple(binding),
        (instructions + skipped) / weights,
        skipped / max(instructions + skipped, 1),
    )

#!/usr/bin/env python3
"""A model of the product kernels for processors that are not at hand: cycles for 256 weights, and what binds.

For every processor the kernels of the trellis types and TQ2_0, and those that llama.cpp runs with one column of
Q4_K, Q3_K, Q2_K, IQ3_S and IQ2_XXS, are compiled as a native build there does. The instructions that they execute
are recorded (single-stepped on this machine; by qemu-aarch64 for ARM) and given to llvm-mca. What the model says of
this machine is compared with measured cycles, weights in the cache. Writes cpu-model.json and cpu-model.md.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from gguf_itq3s.base import report  # noqa: E402
from gguf_itq3s.base.errors import UserError  # noqa: E402
from scripts.bench import kernel_trace, kernels, mca  # noqa: E402
from scripts.bench import processor as host_processor  # noqa: E402
from scripts.bench.kernel_trace import ModelError, Program, Target, Tools  # noqa: E402


@dataclass(frozen=True)
class Kernel:
    """A kernel of ``kernel-loop``.

    Attributes:
        name: what ``kernel-loop`` calls it.
        label: what the tables call it.
        columns: columns of the product.
        rows: rows of weights that it multiplies at once.
        group: blocks of a row that it makes side by side.
    """

    name: str
    label: str
    columns: int
    rows: int
    group: int = 4

    @property
    def key(self) -> str:
        """Type and number of columns."""
        return f"{self.label}, {self.columns}"

    @property
    def blocks(self) -> tuple[int, int]:
        """Blocks of a row in the shorter and the longer trace; activations of both stay in the first-level cache."""
        return (1, 3) if self.columns > 8 else (self.group, 2 * self.group)


KERNELS: Final = (
    *(Kernel(name.lower(), name, columns, 16) for name in kernels.TRELLIS for columns in (1, 4, 8, 32)),
    Kernel("tq2_0", "TQ2_0", 1, 16),
    *(Kernel(f"{name.lower()}_row", f"{name} mapped", 1, 1, group=8) for name in kernels.TRELLIS),
    Kernel("tq2_0_row", "TQ2_0 mapped", 1, 1, group=8),
    Kernel("q4_K", "Q4_K", 1, 8),
    Kernel("q3_K", "Q3_K", 1, 1),
    Kernel("q2_K", "Q2_K", 1, 1),
    Kernel("iq3_s", "IQ3_S", 1, 1),
    Kernel("iq2_xxs", "IQ2_XXS", 1, 1),
)

AVX2: Final = ("-msse4.2", "-mavx", "-mavx2", "-mbmi2", "-mfma", "-mf16c")
#: What Zen 4 has beside Zen 3, for compilers that know only that.
ZEN4: Final = (
    "-march=znver3",
    *(
        f"-m{name}"
        for name in (
            "avx512f", "avx512dq", "avx512ifma", "avx512cd", "avx512bw", "avx512vl", "avx512bf16", "avx512vbmi",
            "avx512vbmi2", "gfni", "avx512vnni", "avx512bitalg", "avx512vpopcntdq",
        )
    ),
)  # fmt: skip
ZEN5: Final = (*ZEN4, "-mavxvnni", "-mavx512vp2intersect", "-mmovdiri", "-mmovdir64b")


@dataclass(frozen=True)
class Processor:
    """A processor that LLVM has a table of, or a likeness.

    Attributes:
        target: how its kernels are compiled and executed.
        table: the processor whose table llvm-mca takes.
        once: the table splits 512 bits and the processor does not: see `mca.once`.
        no_port_1: see `mca.parse`.
        dispatch: instructions that the front end dispatches in a cycle; 0: what the table says.
        note: what a reader must know of it.
    """

    target: Target
    table: str
    once: bool = False
    no_port_1: bool = False
    dispatch: int = 0
    note: str = ""

    @property
    def options(self) -> list[str]:
        """Arguments of llvm-mca."""
        triple = "aarch64" if self.target.architecture == "arm" else "x86_64"
        width = [f"-dispatch={self.dispatch}"] if self.dispatch else []
        return [f"-mtriple={triple}", f"-mcpu={self.table}", *width]


def x86(name: str, *flags: tuple[str, ...], table: str = "", **rest: Any) -> Processor:
    return Processor(Target(name, "x86", ((f"-march={name}",), *flags)), table or name, **rest)


NO_PORT_1: Final = (
    "LLVM's table starts 512-bit operations on ports 0, 1 and 5, the processor on 0 and 5: the bound counts them so"
)
SVE_256: Final = "max,sve-max-vq=2,sve-default-vector-length=32"
PROCESSORS: Final = {
    p.target.name: p
    for p in (
        x86("haswell"),
        x86("skylake"),
        x86("alderlake", note="the P core; LLVM has no table of the E core (Gracemont) and takes that of the P core"),
        x86("skylake-avx512", no_port_1=True, note=NO_PORT_1),
        x86("icelake-server", no_port_1=True, note=NO_PORT_1),
        x86("sapphirerapids", note="Q4_K is the repacked kernel; a build with AMX has another, not in this model"),
        x86("znver3"),
        x86("znver4", ZEN4, note="operations of 512 bits run as two halves, and the table says so"),
        Processor(
            Target("znver4-avx2", "x86", (AVX2,)), "znver4", note="the kernels for AVX2 without VNNI on Zen 4"
        ),
        x86(
            "znver5", ZEN5, once=True, dispatch=8,
            note="LLVM's table is that of Zen 4; as a server's Zen 5 has pipes of 512 bits, every 512-bit operation is "
            "counted as one of 256, and 8 instructions are dispatched in a cycle, not 6",
        ),
        Processor(Target("neoverse-n1", "arm", (("-mcpu=neoverse-n1",),), "max,sve=off"), "neoverse-n1"),
        Processor(Target("neoverse-v1", "arm", (("-mcpu=neoverse-v1",),), SVE_256), "neoverse-v1"),
        Processor(
            Target("apple-m1", "arm", (("-mcpu=apple-m1",), ("-march=armv8.4-a+fp16",)), "max,sve=off"), "apple-m1",
            note="LLVM's table is that of Cyclone (2013): three vector pipes, the M1 has four",
        ),
        Processor(
            Target("apple-m1-by-v1", "arm", (("-mcpu=apple-m1",), ("-march=armv8.4-a+fp16",)), "max,sve=off"),
            "neoverse-v1", note="the same code by the table of Neoverse V1, which has as many vector pipes as the M1",
        ),
    )
}  # fmt: skip

#: Model and measurement further apart are marked.
TOLERANCE: Final = 0.25
#: Blocks of the shorter and the longer product that are timed, by columns up to so many.
TIMED: Final = ((1, (4, 12)), (8, (2, 6)), (64, (1, 3)))


def cost(processor: Processor, program: Program, tools: Tools, kernel: Kernel) -> mca.Cost:
    """What the model says of one kernel on one processor.

    Raises:
        ModelError: it cannot be executed here, or LLVM does not know its instructions.
    """

    def product(blocks: int) -> mca.Run:
        trace = kernel_trace.trace(program, tools, kernel.name, kernel.columns, blocks)
        lines = mca.assembly(trace, processor.target.architecture)
        if processor.once:
            lines = [mca.once(line) for line in lines]
        return mca.simulate(tools.mca, processor.options, mca.correct(lines, processor.table), processor.no_port_1)

    few, many = kernel.blocks
    return mca.difference(product(few), product(many), kernel.rows * (many - few))


def cost_or_error(processor: Processor, program: Program, tools: Tools, kernel: Kernel) -> mca.Cost | str:
    """The cost, or one line that says why there is none."""
    try:
        return cost(processor, program, tools, kernel)
    except ModelError as error:
        return str(error)


def modelled(processor: Processor, tools: Tools) -> dict[str, Any]:
    """Every kernel on one processor; what cannot be had is an error line in its place."""
    out: dict[str, Any] = {"table": processor.table, "note": processor.note, "kernels": {}, "errors": []}
    out["way"] = "qemu-aarch64" if processor.target.architecture == "arm" else "single-stepped"
    try:
        program = kernel_trace.compile_program(processor.target)
        out["flags"] = list(program.flags)
    except ModelError as error:
        out["errors"].append(str(error))
        return out
    for kernel in KERNELS:
        found = cost_or_error(processor, program, tools, kernel)
        if isinstance(found, str):
            out["errors"].append(found)
        else:
            out["kernels"][kernel.key] = asdict(found)
    return out


def host(tools: Tools) -> Processor:
    """The processor of this machine, as LLVM calls it.

    Raises:
        ModelError: it is not among those of the model.
    """
    found = re.search(r"Host CPU: (\S+)", kernel_trace.run([tools.mca, "--version"], "llvm-mca"))
    name = found[1] if found else "unknown"
    if name not in PROCESSORS:
        raise ModelError(f"this machine's processor ({name}) is not in the model, so that it is not checked")
    return PROCESSORS[name]


def measured(program: Program, kernel: Kernel) -> float:
    """Core cycles of 256 weights on this machine, data in the cache.

    Raises:
        ModelError: this machine cannot run the program.
    """
    few, many = next(blocks for columns, blocks in TIMED if kernel.columns <= columns)
    few, many = (kernel.group * blocks // 4 for blocks in (few, many))
    arguments = ["time", kernel.name, str(kernel.columns), str(few), str(many)]
    return float(kernel_trace.run([program.path, *arguments], f"timing {kernel.key}")) / kernel.rows


def checked(tools: Tools) -> list[dict[str, Any]]:
    """Model and measurement of this machine, for the build of this machine and the one for AVX2.

    Raises:
        ModelError: this machine is not in the model, or something failed.
    """
    processor = host(tools)
    builds: dict[str, tuple[str, ...]] = {"native": ("-march=native",)}
    if processor.target.architecture == "x86":
        builds["AVX2"] = AVX2
    rows = []
    for build, flags in builds.items():
        program = kernel_trace.compile_program(Target(f"host-{build}", processor.target.architecture, (flags,)))
        for kernel in KERNELS:
            model = cost(processor, program, tools, kernel)
            row = {"build": build, "kernel": kernel.key, "model": model.cycles, "bound": model.bound}
            rows.append({**row, "measured": measured(program, kernel)})
    return rows


#
# tables
#


def cell(costs: Mapping[str, Any], key: str, field: str = "cycles") -> str:
    return f"{costs[key][field]:.1f}" if key in costs else "-"


def table(result: Mapping[str, Any]) -> str:
    """The tables of a result, and what has to be known of them."""
    cycles, limits, counts, errors = [], [], [], []
    notes: dict[str, list[str]] = defaultdict(list)
    # a kernel that no processor has came after this result
    modelled_keys = {key for model in result["processors"].values() for key in model["kernels"]}
    kernels_of = [kernel for kernel in KERNELS if kernel.key in modelled_keys]
    one = [kernel.key for kernel in kernels_of if kernel.columns == 1]
    for name, model in result["processors"].items():
        costs = model["kernels"]
        errors += [f"- {name}: {error}" for error in model["errors"]]
        if model["note"]:
            notes[model["note"]].append(name)
        for key, values in costs.items():
            if values["left_out"]:
                share = f"{100 * values['left_out']:.1f}% of the instructions of {key}"
                notes[f"{share} are not in LLVM's table and left out"].append(name)
        if not costs:
            continue
        pair = [costs.get(key, {}).get("cycles") for key in ("Q4_K, 1", "ITQ3_S, 1")]
        ratio = f"{pair[0] / pair[1]:.2f}" if pair[0] and pair[1] else "-"
        cycles.append([name, *(cell(costs, kernel.key) for kernel in kernels_of), ratio])
        counts.append([name, *(cell(costs, kernel.key, "instructions") for kernel in kernels_of)])
        bounds = [
            f"{cell(costs, key, 'bound')} {' '.join(costs[key]['binding'])}" if key in costs else "-" for key in one
        ]
        limits.append([name, *bounds])
    keys = [kernel.key for kernel in kernels_of]
    compiler, llvm = result["compiler"], result["llvm"]
    parts = [
        f"Cycles for 256 weights, all columns together (type, columns); LLVM {llvm}, {compiler}.\n",
        report.markdown(["processor", *keys, "Q4_K over ITQ3_S"], cycles),
        "The fewest cycles that the ports and the front end allow at one column, and which of them bind:\n",
        report.markdown(["processor", *one], limits, left=1 + len(one)),
        "Instructions executed for 256 weights:\n",
        report.markdown(["processor", *keys], counts),
    ]
    if result["check"]:
        rows = []
        for row in result["check"]:
            ratio = row["model"] / row["measured"]
            far = " (further apart than 25%)" if abs(ratio - 1) > TOLERANCE else ""
            values = [f"{row[field]:.1f}" for field in ("bound", "model", "measured")]
            rows.append([row["build"], row["kernel"], *values, f"{ratio:.2f}{far}"])
        parts.append(f"Checked on {result['processor']}, cycles for 256 weights, weights in the cache:\n")
        parts.append(
            report.markdown(["build", "kernel", "bound", "model", "measured", "model / measured"], rows, left=2)
        )
    tables = {model["table"] for model in result["processors"].values()}
    for which, corrections in mca.CORRECTIONS.items():
        for correction in corrections if which in tables else ():
            notes[f"LLVM's table is corrected: {correction.why}"].append(which)
    lines = [f"- {', '.join(names)}: {note}." for note, names in notes.items()]
    if lines or errors:
        parts.append("\n".join([*lines, *errors]) + "\n")
    return "\n".join(parts)


def programs_on_path() -> list[str]:
    """Names of LLVM's programs in the folders of PATH."""
    folders = [Path(folder) for folder in os.environ.get("PATH", "").split(os.pathsep) if folder]
    return [path.name for folder in folders if folder.is_dir() for path in folder.glob("llvm-*")]


def model(names: Sequence[str], check: bool) -> dict[str, Any]:
    """Model the named processors, and check this machine.

    Raises:
        ModelError: LLVM is missing.
    """
    tools = kernel_trace.find_tools(programs_on_path())
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        models = list(pool.map(partial(modelled, tools=tools), (PROCESSORS[name] for name in names)))
    rows: list[dict[str, Any]] = []
    if check:
        try:
            rows = checked(tools)
        except ModelError as error:
            print(f"error: {error}", file=sys.stderr)
    return {
        "processor": host_processor.this().name,
        "llvm": tools.version,
        "compiler": f"GCC {kernel_trace.run(['gcc', '-dumpfullversion'], 'gcc').strip()}",
        "processors": dict(zip(names, models, strict=True)),
        "check": rows,
    }


def write(result: Mapping[str, Any], path: Path) -> None:
    """Write a result to ``path`` with .json and its tables with .md; print them."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.with_suffix(".json").write_text(json.dumps(result, indent=1) + "\n")
    text = table(result)
    path.with_suffix(".md").write_text(text)
    print(text)


def main() -> int:
    """Run the command; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("processors", nargs="*", metavar="PROCESSOR", help=f"of {', '.join(PROCESSORS)} (default all)")
    parser.add_argument("--no-check", action="store_true", help="measure nothing on this machine")
    parser.add_argument("--output", type=Path, default=kernels.OUT, help="folder of the results (default build/bench)")
    parser.add_argument("--write", type=Path, metavar="DOCS", help="also update kernels.md and results/ in this folder")
    arguments = parser.parse_args()
    unknown = sorted(set(arguments.processors) - set(PROCESSORS))
    if unknown:
        print(f"error: {', '.join(unknown)} not in the model; it has {', '.join(PROCESSORS)}", file=sys.stderr)
        return 1
    try:
        result = model(arguments.processors or list(PROCESSORS), not arguments.no_check)
        write(result, arguments.output / "cpu-model")
        if arguments.write:
            write(result, arguments.write / "results" / "cpu-model")
            report.replace_section(arguments.write / "kernels.md", "cpu-model", table(result))
    except (ModelError, UserError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return int(any(entry["errors"] for entry in result["processors"].values()))


if __name__ == "__main__":
    raise SystemExit(main())

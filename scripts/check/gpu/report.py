"""Judge what scripts/check/gpu/gpu_check.py found and collect it into gpu_check.json and gpu_check.md.

A number that was not measured stays "not measured"; nothing is derived from anything but measurements of the same run.
The ``*_problems`` functions are what the stages of gpu_check.py are judged by. Every program of a stage has left
STAGE-RUN.out, its standard output, and STAGE-RUN.txt, the rest. Only the standard library is used.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
import sqlite3
import statistics
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

TYPES: Final = ("itq3_s", "itq2_s", "itq3_n", "itq2_n", "tq1_0", "tq2_0")

#: For every operation the least cases of a type that must have passed; the suite has more.
OPERATIONS: Final = {"MUL_MAT": 24, "MUL_MAT_ID": 6, "MUL_MAT_VEC_FUSION": 4, "GET_ROWS": 1}
#: Runs of test-backend-ops and their operations.
OPERATION_RUNS: Final = {"all": tuple(OPERATIONS), "nopdl": ("MUL_MAT",)}

SANITIZERS: Final = ("memcheck", "racecheck", "synccheck")
#: Operations whose cases run under each sanitizer.
SANITIZED: Final = ("MUL_MAT", "MUL_MAT_ID", "MUL_MAT_VEC_FUSION")

#: Runs of llama-perplexity. All but the CPU's must come within TOLERANCE of it.
PERPLEXITIES: Final = (
    "cpu", "gpu", "partial", "layer", "tensor", "batch1", "batch2", "batch4", "batch8", "batch24", "batch64",
    "nographs", "nopdl", "nopdl8", "noshare", "noshare8",
)  # fmt: skip
#: Runs that must give the very same perplexity: with activations quantized for every product, and once for several.
SAME: Final = {"noshare": "gpu", "noshare8": "batch8"}
TOLERANCE: Final = 0.002

#: Models of llama-bench, by the type of their layers.
MODELS: Final = ("itq3_s", "itq2_s", "tq2_0", "tq1_0", "q4_K", "iq3_s", "q2_K", "f16")
#: Runs of llama-bench: the name of the run and its model.
BENCH_RUNS: Final = {"itq3_s": "itq3_s", "itq3_s-noshare": "itq3_s", **{name: name for name in MODELS}}

#: The timed product: gate and up of a 70B Llama in one, past the L2 cache of any card, its types and columns.
ROWS, LENGTH = 57344, 8192
PERF_TYPES: Final = (
    "itq3_s", "itq2_s", "itq3_n", "itq2_n", "tq2_0", "tq1_0", "q4_K", "iq3_s", "q3_K", "q2_K", "iq2_xxs", "f16",
)  # fmt: skip
COLUMNS: Final = (1, 4, 8, 16, 64, 128, 512)
#: Names of their times.
PRODUCTS: Final = tuple(f"{name} {name}.{n}" for name in PERF_TYPES for n in COLUMNS)
#: Columns at which our types are also multiplied by cuBLAS, as F16.
CUBLAS_COLUMNS: Final = (128, 512)
#: Runs of test-backend-ops perf: a type's products; copies; a small product with and without its own activations.
PERF_RUNS: Final = (*PERF_TYPES, "copy", "small", "shared", "cublas")
#: With the Vulkan backend.
VULKAN_OPERATIONS: Final = {"MUL_MAT": 24, "MUL_MAT_ID": 6, "GET_ROWS": 1}
VULKAN_PERF_RUNS: Final = (*PERF_TYPES, "copy")
VULKAN_BENCH_RUNS: Final = {name: name for name in MODELS}
COPIED: Final = 2**28  # numbers of 4 bytes
#: Of 256 weights.
BLOCK_BYTES: Final = {"itq3_s": 100, "itq2_s": 66, "itq3_n": 104, "itq2_n": 72, "tq1_0": 54, "tq2_0": 66}

NOT_MEASURED: Final = "not measured"


def finished(work: Path, name: str) -> bool:
    """Whether a program ran to its end with status 0."""
    return ended(work, name) == "exit 0"


def ended(work: Path, name: str) -> str:
    """How a program ended, by the last line that gpu_check.py adds to its log."""
    path = work / f"{name}.txt"
    if not path.exists():
        return "not run"
    found = re.search(r"\[(exit -?\d+|stopped), \d+ s\]\s*$", path.read_text(errors="replace"))
    return found[1] if found else "broken off"


def endings(work: Path, stage: str, runs: Iterator[str] | tuple[str, ...]) -> list[str]:
    """A line for every run of a stage that has not ended well."""
    return [f"{run}: {end}" for run in runs if (end := ended(work, f"{stage}-{run}")) != "exit 0"]


def text_of(work: Path, name: str) -> str:
    """All that a program printed."""
    paths = [work / f"{name}.{suffix}" for suffix in ("out", "txt")]
    return "\n".join(path.read_text(errors="replace") for path in paths if path.exists())


def cases_of(work: Path, name: str) -> list[dict[str, Any]]:
    """Rows of the table that test-backend-ops prints as SQL; what else is printed, or cut off, is left out."""
    path = work / f"{name}.out"
    text = path.read_text(errors="replace") if path.exists() else ""
    statements = re.findall(r"^(?:CREATE TABLE .*?|INSERT INTO [^\n]*)\);$", text, re.MULTILINE | re.DOTALL)
    database = sqlite3.connect(":memory:")
    database.row_factory = sqlite3.Row
    try:
        database.executescript("\n".join(statements))
        return [dict(row) for row in database.execute("SELECT * FROM test_backend_ops")]
    except sqlite3.Error:
        return []
    finally:
        database.close()


def count_cases(work: Path, name: str) -> dict[str, dict[str, dict[str, int]]]:
    """Cases of test-backend-ops: operation, type, outcome."""
    counts: dict[str, dict[str, dict[str, int]]] = {}
    for case in cases_of(work, name):
        found = re.search(rf"\btype(?:_a)?=({'|'.join(TYPES)})\b", case["op_params"])
        if found:
            of_type = counts.setdefault(case["op_name"], {}).setdefault(found[1], dict.fromkeys(OUTCOMES, 0))
            of_type[OUTCOMES[0 if case["passed"] else 1 if case["supported"] else 2]] += 1
    return counts


OUTCOMES: Final = ("passed", "failed", "not_supported")


def case_problems(work: Path, name: str, least: dict[str, int]) -> list[str]:
    """Cases that failed, and operations of which not that many cases of every type passed."""
    counts, problems = count_cases(work, name), []
    for op, number in least.items():
        for kind in TYPES:
            found = counts.get(op, {}).get(kind, dict.fromkeys(OUTCOMES, 0))
            if found["failed"]:
                problems.append(f"{op} of {kind}: {found['failed']} cases failed")
            if found["passed"] < number:
                problems.append(f"{op} of {kind}: {found['passed']} cases passed, {number} or more expected")
    return problems


def build_problems(work: Path) -> list[str]:
    problems = endings(work, "build", ("configure", "compile"))
    return [p + ("; run this again, it goes on" if p.endswith("stopped") else "") for p in problems]


def ops_problems(work: Path) -> list[str]:
    problems = endings(work, "ops", tuple(OPERATION_RUNS))
    for run, names in OPERATION_RUNS.items():
        if (work / f"ops-{run}.txt").exists():
            problems += [f"{run}: {p}" for p in case_problems(work, f"ops-{run}", {op: OPERATIONS[op] for op in names})]
    return problems


def sanitizer_errors(text: str) -> int | None:
    """Errors and hazards by the summary of compute-sanitizer."""
    found = re.findall(r"(?:ERROR SUMMARY: (\d+) error|RACECHECK SUMMARY: (\d+) hazard)", text)
    return sum(int(a or b) for a, b in found) if found else None


def read_sanitizer(work: Path) -> dict[str, dict[str, int | None]]:
    return {
        tool: {
            "errors": sanitizer_errors(text_of(work, f"sanitizer-{tool}")),
            "cases": len(cases_of(work, f"sanitizer-{tool}")),
        }
        for tool in SANITIZERS
        if (work / f"sanitizer-{tool}.txt").exists()
    }


def sanitizer_problems(work: Path) -> list[str]:
    problems = endings(work, "sanitizer", SANITIZERS)
    for tool, found in read_sanitizer(work).items():
        if found["errors"] != 0:
            problems.append(f"{tool}: {'no summary' if found['errors'] is None else str(found['errors']) + ' errors'}")
        problems += [f"{tool}: {p}" for p in case_problems(work, f"sanitizer-{tool}", dict.fromkeys(SANITIZED, 1))]
    return problems


def read_perplexity(work: Path) -> dict[str, float]:
    result = {}
    for name in PERPLEXITIES:
        found = re.search(r"Final estimate: PPL = ([0-9.]+)", text_of(work, f"perplexity-{name}"))
        if found and finished(work, f"perplexity-{name}"):
            result[name] = float(found[1])
    return result


def perplexity_problems(work: Path) -> list[str]:
    measured, problems = read_perplexity(work), endings(work, "perplexity", PERPLEXITIES)
    cpu = measured.get("cpu")
    for name in PERPLEXITIES:
        if name not in measured:
            problems += [f"{name}: no perplexity"] if finished(work, f"perplexity-{name}") else []
            continue
        log = text_of(work, f"perplexity-{name}")
        if name != "cpu" and not re.search(r"offloaded [1-9]\d*/\d+ layers to GPU", log):
            problems.append(f"{name}: no layer was on the GPU")
        if cpu and not abs(measured[name] / cpu - 1) <= TOLERANCE:
            change = 100 * (measured[name] / cpu - 1)
            problems.append(f"{name}: {measured[name]:.4f} is {change:+.3f}% from the CPU's, at most 0.2% allowed")
        same = measured.get(SAME.get(name, name), measured[name])
        if measured[name] != same:
            problems.append(f"{name}: {measured[name]:.4f} is not the {same:.4f} of {SAME[name]}")
    return problems


def read_perf(work: Path, stage: str = "perf", runs: tuple[str, ...] = PERF_RUNS) -> dict[str, float]:
    """Seconds a product by "RUN TYPE.COLUMNS"; under "copy" the bytes a second that a copy reads and writes."""
    result = {}
    for run in runs:
        for case in cases_of(work, f"{stage}-{run}"):
            found = re.match(r"name=([\w.]+),", case["op_params"])
            key = "copy" if run == "copy" else f"{run} {found[1] if found else ''}"
            value = float(case["bandwidth_gb_s"]) * 2**30 if run == "copy" else float(case["time_us"]) * 1e-6
            if found and 0 < value < math.inf:
                result[key] = value
    return result


def perf_problems(work: Path) -> list[str]:
    measured, problems = read_perf(work), endings(work, "perf", PERF_RUNS)
    expected = list(PRODUCTS)
    expected += [f"cublas {name}.{n}" for name in TYPES for n in CUBLAS_COLUMNS]
    missing = [name for name in (*expected, "copy", "small small.1", "shared small.1") if name not in measured]
    return problems + ([f"not measured: {', '.join(missing)}"] if missing else [])


def bench_entries(work: Path, name: str) -> list[dict[str, Any]]:
    """What llama-bench wrote; nothing if it was broken off."""
    try:
        entries = json.loads((work / f"{name}.out").read_text())
    except (OSError, ValueError):
        return []
    return entries if isinstance(entries, list) else []


def read_llama_bench(
    work: Path, stage: str = "llama_bench", runs: Mapping[str, str] = BENCH_RUNS, backend: str = "CUDA"
) -> dict[str, dict[str, float]]:
    """Tokens a second of every run: medians of tg128 and pp512. Only what ran on the backend counts."""
    result: dict[str, dict[str, float]] = {}
    for name in runs:
        for entry in bench_entries(work, f"{stage}-{name}"):
            if backend not in entry.get("backends", "") or not entry.get("samples_ts"):
                continue
            prompt, generated = entry["n_prompt"], entry["n_gen"]
            key = f"pp{prompt}" if not generated else f"tg{generated}"
            value = statistics.median(entry["samples_ts"])
            if 0 < value < math.inf:
                result.setdefault(name, {})[key] = value
    return result


def llama_bench_problems(work: Path) -> list[str]:
    measured, problems = read_llama_bench(work), endings(work, "llama_bench", tuple(BENCH_RUNS))
    for name in BENCH_RUNS:
        if finished(work, f"llama_bench-{name}") and set(measured.get(name, {})) != {"pp512", "tg128"}:
            problems.append(f"{name}: pp512 and tg128 on CUDA are not both there")
    return problems


def vulkan_problems(work: Path) -> list[str]:
    builds = [name for name in ("configure", "compile") if (work / f"vulkan-{name}.txt").exists()]
    problems = endings(work, "vulkan", tuple(builds))
    if problems:
        return problems
    perfs, benches = (f"perf-{run}" for run in VULKAN_PERF_RUNS), (f"bench-{run}" for run in VULKAN_BENCH_RUNS)
    problems = endings(work, "vulkan", ("ops", *perfs, *benches))
    if (work / "vulkan-ops.txt").exists():
        problems += case_problems(work, "vulkan-ops", VULKAN_OPERATIONS)
    found = vulkan_of(work)
    missing = [name for name in (*PRODUCTS, "copy") if name not in found["perf"]]
    missing += [f"llama-bench {name}" for name in VULKAN_BENCH_RUNS if len(found["llama_bench"].get(name, {})) != 2]
    return problems + ([f"not measured: {', '.join(missing)}"] if missing else [])


def vulkan_of(work: Path) -> dict[str, Any]:
    """What was measured with the Vulkan backend: device, cases of test-backend-ops, products, tokens a second."""
    entries = [e for run in VULKAN_BENCH_RUNS for e in bench_entries(work, f"vulkan-bench-{run}")]
    devices = [str(e["gpu_info"]) for e in entries if e.get("gpu_info")]
    return {
        "device": devices[0] if devices else NOT_MEASURED,
        "test_backend_ops": count_cases(work, "vulkan-ops"),
        "perf": read_perf(work, "vulkan-perf", VULKAN_PERF_RUNS),
        "llama_bench": read_llama_bench(work, "vulkan-bench", VULKAN_BENCH_RUNS, "Vulkan"),
    }


PROBLEMS: Final = {
    "build": build_problems, "ops": ops_problems, "sanitizer": sanitizer_problems, "perplexity": perplexity_problems,
    "perf": perf_problems, "llama_bench": llama_bench_problems, "vulkan": vulkan_problems,
}  # fmt: skip


def stage_of(work: Path, name: str) -> dict[str, Any]:
    """Status (done, failed, skipped, not run), seconds and problems of a stage."""
    if (reason := work / f"{name}.skipped").exists():
        return {"status": "skipped", "seconds": 0, "problems": [reason.read_text()]}
    error, logs = work / f"{name}.error", sorted(work.glob(f"{name}-*.txt"))
    if not error.exists() and not logs:
        return {"status": "not run", "seconds": 0, "problems": []}
    problems = ([error.read_text()] if error.exists() else []) + (PROBLEMS[name](work) if logs else [])
    seconds = [re.search(r", (\d+) s\]\s*$", path.read_text(errors="replace")) for path in logs]
    return {
        "status": "failed" if problems else "done", "seconds": sum(int(s[1]) for s in seconds if s),
        "problems": problems,
    }  # fmt: skip


@dataclasses.dataclass
class Cell:
    """One line of the table: what, the least (or most) it should be, what was measured, and whether that is enough."""

    what: str
    target: str
    value: str = NOT_MEASURED
    met: bool | None = None


class Table:
    """Cells made of times that :func:`read_perf` found; those without a target are information."""

    def __init__(self, measured: dict[str, float]) -> None:
        self.measured = measured
        self.cells: list[Cell] = []

    def add(self, what: str, value: float | None, unit: str, target: float | None = None, most: bool = False) -> None:
        scale = 100 if unit == "%" else 1
        cell = Cell(what, "" if target is None else f"{'at most ' if most else ''}{target * scale:g}{unit}")
        if value is not None:
            cell.value = f"{value * scale:.3g}{unit}"
            if target is not None:
                cell.met = value <= target if most else value >= target
        self.cells.append(cell)

    def ratio(self, numerator: str, denominator: str) -> float | None:
        a, b = self.measured.get(numerator), self.measured.get(denominator)
        return a / b if a and b else None

    def over(self, columns: int, name: str, other: str, target: float | None = None) -> None:
        """How much faster a type's product is than another's."""
        what = f"{columns} column{'s' if columns > 1 else ''}, {name.upper()} over {other.upper()}"
        self.add(what, self.ratio(f"{other} {other}.{columns}", f"{name} {name}.{columns}"), "x", target)

    def bandwidth(self, name: str, target: float | None = None) -> None:
        """Bytes of weights that a product of one column reads, of what a copy reads and writes in the time."""
        seconds, copied = self.measured.get(f"{name} {name}.1"), self.measured.get("copy")
        size = ROWS * LENGTH // 256 * BLOCK_BYTES[name]
        fraction = size / seconds / copied if seconds and copied else None
        self.add(f"1 column, {name.upper()}, fraction of measured copy bandwidth", fraction, "", target)


def table(measured: dict[str, float]) -> list[Cell]:
    """The performance table; cells whose measurement is missing say so."""
    found = Table(measured)
    for name in ("itq3_s", "itq2_s", "itq3_n", "itq2_n", "tq2_0", "tq1_0"):
        found.bandwidth(name, 0.8 if name == "itq3_s" else None)
    found.over(1, "itq3_s", "q4_K", 1.3)
    found.over(1, "itq3_s", "iq3_s", 1.2)
    found.over(1, "itq3_s", "q3_K")
    found.over(1, "itq2_s", "itq3_s", 1.25)
    found.over(1, "itq2_s", "q2_K")
    found.over(1, "itq2_s", "iq2_xxs")
    kept = found.ratio("shared small.1", "small small.1")
    share = None if kept is None else 1 - kept
    what = "1 column, 4096 x 4096, rotating and rounding the activations, share of the time"
    found.add(what, share, "%", 0.05, most=True)
    found.over(1, "tq2_0", "f16", 6.0)
    found.over(1, "tq1_0", "f16", 6.0)
    found.over(16, "tq2_0", "f16", 4.0)
    found.over(16, "itq3_s", "f16", 3.0)
    times = found.ratio("itq3_s itq3_s.512", "f16 f16.512")
    found.add("512 columns, time of ITQ3_S over F16", times, "x", 1.5, most=True)
    found.over(512, "itq3_s", "q4_K", 1.0)
    found.over(512, "itq3_s", "iq3_s")
    found.over(512, "itq2_s", "iq2_xxs")
    found.over(512, "itq2_s", "q2_K")
    for n in (4, 8, 64, 128):
        for other in ("q4_K", "iq3_s", "f16"):
            found.over(n, "itq3_s", other)
    # Where this is under 1, GGML_CUDA_ITQ3S_CUBLAS_COLUMNS is worth setting.
    for n in CUBLAS_COLUMNS:
        for name in TYPES:
            gain = found.ratio(f"cublas {name}.{n}", f"{name} {name}.{n}")
            found.add(f"{n} columns, {name.upper()} by MMQ over F16 by cuBLAS", gain, "x")
    return found.cells


def vulkan_table(measured: dict[str, float]) -> list[Cell]:
    """The same of the Vulkan backend; nothing was promised of a card there."""
    found = Table(measured)
    for name in TYPES:
        found.bandwidth(name)
    for n in (1, 4, 8, 64, 512):
        for name, others in (("itq3_s", ("q4_K", "iq3_s", "q3_K", "f16")), ("itq2_s", ("itq3_s", "iq2_xxs", "q2_K"))):
            for other in others:
                found.over(n, name, other)
    return found.cells


def rows_of(header: list[str], rows: list[list[str]]) -> list[str]:
    """A Markdown table and an empty line before it."""
    return ["", *(f"| {' | '.join(row)} |" for row in (header, ["---"] * len(header), *rows))]


def cells_of(cells: list[dict[str, Any]]) -> list[str]:
    """The cells of a table as Markdown."""
    verdict = {None: "", True: "yes", False: "no"}
    rows = [[c["what"], c["target"], c["value"], verdict[c["met"]]] for c in cells]
    return rows_of(["what", "at least", "measured", "met"], rows)


def times_of(perf: dict[str, float]) -> list[str]:
    """Microseconds of every product as Markdown."""

    def microseconds(name: str) -> str:
        return f"{1e6 * perf[name]:.2f}" if name in perf else ""

    rows = [[f"columns {n}", *(microseconds(f"{name} {name}.{n}") for name in PERF_TYPES)] for n in COLUMNS]
    return rows_of(["microseconds", *PERF_TYPES], rows)


def speeds_of(found: dict[str, dict[str, float]], runs: Mapping[str, str]) -> list[str]:
    """Tokens a second as Markdown."""

    def tokens(run: str, key: str) -> str:
        speed = found.get(run, {}).get(key)
        return f"{speed:.1f}" if speed else NOT_MEASURED

    rows = [[run, tokens(run, "tg128"), tokens(run, "pp512")] for run in runs]
    return rows_of(["llama-bench, type of the layers", "tg128, tokens/s", "pp512, tokens/s"], rows)


def cases_row(counts: dict[str, int] | None) -> list[str]:
    """Cases of a type and operation by outcome."""
    return [str(n) for n in counts.values()] if counts else ["not run", "", ""]


def markdown(result: dict[str, Any]) -> str:
    lines = [f"# GPU check: {result['gpu']}"]
    stages = [[name, "; ".join([s["status"], *s["problems"]]), str(s["seconds"])]
              for name, s in result["stages"].items()]  # fmt: skip
    lines += rows_of(["stage", "result", "seconds"], [[cell.replace("\n", " ") for cell in row] for row in stages])
    perf: dict[str, float] = result["perf"]

    def copied(perf: dict[str, float]) -> str:
        return f"{perf['copy'] / 1e9:.0f} GB/s" if "copy" in perf else NOT_MEASURED

    lines += [
        "",
        f"Products of {ROWS} x {LENGTH} weights, gate and up of a 70B Llama, by test-backend-ops perf; F16 is "
        "llama.cpp's, by cuBLAS where it has many columns. Every product rotates and rounds its activations. Copy "
        f"bandwidth (read and written): {copied(perf)}.",
    ]
    lines += [*cells_of(result["table"]), *times_of(perf), *speeds_of(result["llama_bench"], BENCH_RUNS)]
    lines += [
        "",
        "A Llama of 8B shapes (32 layers of 4096, feed-forward 14336, 8 of 32 heads for keys and values, 32000 tokens) "
        "with random weights; embedding and output are Q6_K. q4_K has Q4_K everywhere, unlike Q4_K_M. noshare: every "
        "product quantizes its activations, though several have the same.",
    ]
    rows = []
    for run, names in OPERATION_RUNS.items():
        for op in names:
            for name in TYPES:
                counts = result["test_backend_ops"].get(run, {}).get(op, {}).get(name)
                rows.append([op if run == "all" else f"{op}-{run}", name, *cases_row(counts)])
    lines += rows_of(["test-backend-ops", "type", "passed", "failed", "not supported"], rows)
    rows = []
    for tool in SANITIZERS:
        found = result["sanitizer"].get(tool, {"errors": "not run", "cases": ""})
        rows.append([tool, *("no summary" if v is None else str(v) for v in found.values())])
    lines += rows_of(["compute-sanitizer", "errors", "cases"], rows)
    ppl, rows = result["perplexity"], []
    for name in PERPLEXITIES:
        change = f"{100 * (ppl[name] / ppl['cpu'] - 1):+.3f}%" if name in ppl and "cpu" in ppl else ""
        rows.append([name, f"{ppl[name]:.4f}" if name in ppl else NOT_MEASURED, change])
    lines += rows_of(["perplexity of the bundled model", "PPL", "against the CPU"], rows)
    found = result["vulkan"]
    lines += ["", f"## Vulkan: {found['device']}", ""]
    lines.append(f"The same products by Vulkan. Copy bandwidth (read and written): {copied(found['perf'])}.")
    lines += [*cells_of(found["table"]), *times_of(found["perf"]), *speeds_of(found["llama_bench"], VULKAN_BENCH_RUNS)]
    counts = found["test_backend_ops"]
    rows = [[op, name, *cases_row(counts.get(op, {}).get(name))] for op in VULKAN_OPERATIONS for name in TYPES]
    lines += rows_of(["test-backend-ops", "type", "passed", "failed", "not supported"], rows)
    return "\n".join(lines) + "\n"


def write_report(work: Path, out: Path, gpu: str, stages: list[str]) -> dict[str, dict[str, Any]]:
    """Write both files and the logs of the stages into ``out``.

    Args:
        work: folder with what the stages' programs printed.
        out: folder for the report.
        gpu: name of the GPU.
        stages: those that the report is about.

    Returns:
        what :func:`stage_of` gives, by stage.
    """
    vulkan = vulkan_of(work)
    result: dict[str, Any] = {
        "gpu": gpu,
        "stages": {name: stage_of(work, name) for name in stages},
        "table": [dataclasses.asdict(cell) for cell in table(read_perf(work))],
        "test_backend_ops": {run: count_cases(work, f"ops-{run}") for run in OPERATION_RUNS},
        "sanitizer": read_sanitizer(work),
        "perplexity": read_perplexity(work),
        "perf": read_perf(work),
        "llama_bench": read_llama_bench(work),
        "vulkan": {**vulkan, "table": [dataclasses.asdict(cell) for cell in vulkan_table(vulkan["perf"])]},
    }
    (out / "logs").mkdir(parents=True, exist_ok=True)
    files = {"gpu_check.json": json.dumps(result, indent=1) + "\n", "gpu_check.md": markdown(result)}
    for name in stages:
        logs = sorted(path for path in work.glob(f"{name}-*") if path.suffix in (".out", ".txt"))
        text = "".join(f"==> {path.name} <==\n{path.read_text(errors='replace')}\n" for path in logs)
        if text:
            files[f"logs/{name}.log"] = text[-(2**20) :]
    for name, content in files.items():
        partial = out / (name + ".partial")
        partial.write_text(content)
        partial.rename(out / name)
    stages_found: dict[str, dict[str, Any]] = result["stages"]
    return stages_found

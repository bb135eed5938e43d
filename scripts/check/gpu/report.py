#!/usr/bin/env python3
"""Judge what scripts/check/gpu/gpu_check.py found and collect it into gpu_check.json and gpu_check.md.

A number that was not measured stays "not measured"; nothing is derived from anything but measurements of the same run.
The ``*_problems`` functions are what the stages of gpu_check.py are judged by. Only the standard library is used.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import re
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

TYPES: Final = ("itq3_s", "tq1_0", "tq2_0")

#: For every operation the least cases of a type that must have passed; the suite has more.
OPERATIONS: Final = {"MUL_MAT": 24, "MUL_MAT_ID": 6, "MUL_MAT_VEC_FUSION": 4, "GET_ROWS": 1}
#: Runs of test-backend-ops: the name of the run and its operation.
OPERATION_RUNS: Final = {**{op: op for op in OPERATIONS}, "MUL_MAT-nopdl": "MUL_MAT"}

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
MODELS: Final = ("itq3_s", "tq2_0", "tq1_0", "q4_K", "iq3_s", "f16")
#: Runs of llama-bench: the name of the run and its model.
BENCH_RUNS: Final = {"itq3_s": "itq3_s", "itq3_s-noshare": "itq3_s", **{name: name for name in MODELS}}

#: Products of one layer of an 8B Llama as (rows, columns of the weights): how many matrices have that shape.
LAYER: Final = {(4096, 4096): 2, (1024, 4096): 2, (14336, 4096): 2, (4096, 14336): 1}
#: The shapes that were measured for every number of columns.
PAIR: Final = {(14336, 4096): 1, (4096, 14336): 1}
LARGE: Final = {(8192, 28672): 1}

NOT_MEASURED: Final = "not measured"
PERCENT: Final = "%"


@dataclasses.dataclass
class Cell:
    """One line of the table: what, the least (or most) it should be, what was measured, and whether that is enough."""

    what: str
    target: str
    value: str = NOT_MEASURED
    met: bool | None = None


class Bench:
    """Medians of bench.cu; a lookup of something that was not measured raises KeyError."""

    def __init__(self, lines: list[dict[str, Any]]) -> None:
        self.device = lines[0]
        self.results = [r for r in lines if "kind" in r]
        self.complete = any(r.get("done") for r in lines)
        self.by_key = {(r["kind"], r["name"], r["rows"], r["k"], r["columns"]): r for r in self.results}
        for key in [k for k, r in self.by_key.items() if r["runs"] < 20 or not 0 < r["median_us"] < math.inf]:
            del self.by_key[key]

    @classmethod
    def read(cls, path: Path) -> Bench | None:
        """What the file holds, without a line that was cut off."""
        text = path.read_text(errors="replace") if path.exists() else ""
        lines = [json.loads(line) for line in text.splitlines() if re.fullmatch(r"\{.*\}", line)]
        return cls(lines) if lines and "device" in lines[0] else None

    def seconds(self, name: str, columns: int, shapes: dict[tuple[int, int], int]) -> float:
        """Seconds of the products of all the shapes."""
        return sum(
            n * float(self.by_key[("product", name, *shape, columns)]["median_us"]) * 1e-6
            for shape, n in shapes.items()
        )

    def ratio(self, name: str, other: str, columns: int, shapes: dict[tuple[int, int], int]) -> float:
        """How many times faster ``name`` is than ``other``."""
        return self.seconds(other, columns, shapes) / self.seconds(name, columns, shapes)

    def bandwidth_fraction(self, name: str) -> float:
        size = sum(n * float(self.by_key[("product", name, *shape, 1)]["weight_bytes"]) for shape, n in LAYER.items())
        return size / self.seconds(name, 1, LAYER) / float(self.device["copy_bytes_per_s"])

    def rotation_share(self) -> float:
        """What the rotation adds to the activation kernel, over the time of a product; the larger of two widths."""
        shares = []
        for k in (4096, 14336):
            rotated, plain = (float(self.by_key["activation", n, 0, k, 1]["median_us"]) for n in ("rotated", "plain"))
            shares.append((rotated - plain) / float(self.by_key["product", "itq3_s", 4096, k, 1]["median_us"]))
        return max(shares)


def table(bench: Bench | None, by_cublas: Bench | None = None) -> list[Cell]:
    """The performance table; cells whose measurement is missing say so, and a target of None is information."""

    def cell(what: str, target: float | None, value: Callable[[Bench], float], unit: str, most: bool = False) -> Cell:
        scale = 100 if unit == PERCENT else 1
        result = Cell(what, "" if target is None else f"{'at most ' if most else ''}{target * scale:g}{unit}")
        if bench is not None:
            try:
                measured = value(bench)
            except KeyError:
                return result
            result.value = f"{measured * scale:.3g}{unit}"
            if target is not None:
                result.met = measured <= target if most else measured >= target
        return result

    def fraction(name: str) -> Callable[[Bench], float]:
        return lambda b: b.bandwidth_fraction(name)

    def over(
        name: str, other: str, columns: int, shapes: dict[tuple[int, int], int] = LAYER
    ) -> Callable[[Bench], float]:
        return lambda b: b.ratio(name, other, columns, shapes)

    f16 = "cublas_f16"
    cells = [
        cell("1 column, ITQ3_S, fraction of measured copy bandwidth", 0.8, fraction("itq3_s"), ""),
        cell("1 column, TQ2_0, fraction of measured copy bandwidth", None, fraction("tq2_0"), ""),
        cell("1 column, TQ1_0, fraction of measured copy bandwidth", None, fraction("tq1_0"), ""),
        cell("1 column, ITQ3_S over Q4_K", 1.3, over("itq3_s", "q4_K", 1), "x"),
        cell("1 column, ITQ3_S over IQ3_S", 1.2, over("itq3_s", "iq3_s", 1), "x"),
        cell("1 column, ITQ3_S over Q3_K", None, over("itq3_s", "q3_K", 1), "x"),
        cell("1 column, rotation, share of the time", 0.05, Bench.rotation_share, PERCENT, most=True),
        cell("1 column, TQ2_0 over cuBLAS F16, 8192 x 28672", 6.0, over("tq2_0", f16, 1, LARGE), "x"),
        cell("1 column, TQ1_0 over cuBLAS F16, 8192 x 28672", 6.0, over("tq1_0", f16, 1, LARGE), "x"),
        cell("16 columns, TQ2_0 over cuBLAS F16, 8192 x 28672", 4.0, over("tq2_0", f16, 16, LARGE), "x"),
        cell("16 columns, TQ2_0 over cuBLAS F16, feed-forward", 4.0, over("tq2_0", f16, 16, PAIR), "x"),
        cell("16 columns, ITQ3_S over cuBLAS F16, feed-forward", 3.0, over("itq3_s", f16, 16, PAIR), "x"),
        cell("512 columns, time of ITQ3_S over cuBLAS F16", 1.5, over(f16, "itq3_s", 512), "x", most=True),
        cell("512 columns, ITQ3_S over Q4_K", 1.0, over("itq3_s", "q4_K", 512), "x"),
        cell("512 columns, ITQ3_S over IQ3_S", None, over("itq3_s", "iq3_s", 512), "x"),
    ]
    for n in (2, 4, 8, 32, 64, 128, 256):
        for other, label in (("q4_K", "Q4_K"), ("iq3_s", "IQ3_S"), (f16, "cuBLAS F16")):
            what = f"{n} columns, ITQ3_S over {label}, feed-forward"
            cells.append(cell(what, None, over("itq3_s", other, n, PAIR), "x"))
    # Where this is under 1, GGML_CUDA_ITQ3S_CUBLAS_COLUMNS is worth setting.
    for n in (128, 256, 512):
        for name, label in (("itq3_s", "ITQ3_S"), ("tq2_0", "TQ2_0"), ("tq1_0", "TQ1_0")):

            def gain(b: Bench, name: str = name, n: int = n) -> float:
                if by_cublas is None:
                    raise KeyError(n)
                return by_cublas.seconds(name, n, PAIR) / b.seconds(name, n, PAIR)

            cells.append(cell(f"{n} columns, {label} by MMQ over F16 by cuBLAS, feed-forward", None, gain, "x"))
    return cells


def plain(path: Path) -> str:
    """A log without colours."""
    return re.sub(r"\x1b\[[0-9;]*m", "", path.read_text(errors="replace"))


def finished(path: Path) -> bool:
    """Whether a step ran to its end with status 0, by the last line that gpu_check.py adds to its output."""
    return path.exists() and path.read_text(errors="replace").rstrip().endswith("[exit 0]")


def ended(path: Path) -> str:
    """How a step ended, for a message."""
    if not path.exists():
        return "not run"
    found = re.search(r"\[(exit -?\d+|stopped after \d+ s)\]\s*$", path.read_text(errors="replace"))
    return found[1] if found else "broken off"


def count_cases(text: str) -> dict[str, dict[str, dict[str, int]]]:
    """Cases in the output of test-backend-ops: operation, type, outcome."""
    counts: dict[str, dict[str, dict[str, int]]] = {}
    for line in text.splitlines():
        found = re.search(r"\b([A-Z][A-Z_]+)\([^)]*?\btype(?:_a)?=(itq3_s|tq1_0|tq2_0)\b", line)
        if found is None:
            continue
        rest = line[found.end() :]
        outcome = (
            "not_supported"
            if "not supported" in rest
            else "failed"
            if re.search(r"\bFAIL\b", rest)
            else "passed"
            if re.search(r"\bOK\b", rest)
            else None
        )
        if outcome:
            of_op = counts.setdefault(found[1], {})
            of_type = of_op.setdefault(found[2], {"passed": 0, "failed": 0, "not_supported": 0})
            of_type[outcome] += 1
    return counts


def summary_of(text: str) -> tuple[int, int] | None:
    """Passed and run cases by the summary of test-backend-ops."""
    found = re.findall(r"^\s*(\d+)/(\d+) tests passed", text, re.MULTILINE)
    return (int(found[-1][0]), int(found[-1][1])) if found else None


def case_problems(text: str, least: dict[str, int]) -> list[str]:
    """What is wrong with the output of test-backend-ops; of ``least`` operations that many cases a type must pass."""
    counts, summary = count_cases(text), summary_of(text)
    if summary is None:
        return ['no line "N/M tests passed"']
    problems = []
    passed, failed = (sum(t[k] for op in counts.values() for t in op.values()) for k in ("passed", "failed"))
    if summary[1] == 0 or summary[0] != summary[1]:
        problems.append(f"{summary[0]}/{summary[1]} tests passed")
    if (passed, passed + failed) != summary:
        problems.append(f"{passed} passed and {failed} failed in the lines, {summary[0]}/{summary[1]} in the summary")
    for op, number in least.items():
        for name in TYPES:
            found = counts.get(op, {}).get(name, {}).get("passed", 0)
            if found < number:
                problems.append(f"{op} of {name}: {found} cases passed, {number} or more expected")
    return problems


def operation_problems(work: Path) -> list[str]:
    problems = []
    for run, op in OPERATION_RUNS.items():
        path = work / f"ops-{run}.txt"
        if not finished(path):
            problems.append(f"{run}: {ended(path)}")
        if path.exists():
            problems += [f"{run}: {p}" for p in case_problems(plain(path), {op: OPERATIONS[op]})]
    return problems


def read_operations(work: Path) -> dict[str, dict[str, dict[str, int]]]:
    """Cases of every run of test-backend-ops by type."""
    result = {}
    for run, op in OPERATION_RUNS.items():
        path = work / f"ops-{run}.txt"
        if path.exists():
            found = count_cases(plain(path)).get(op, {})
            nothing = {"passed": 0, "failed": 0, "not_supported": 0}
            result[run] = {name: found.get(name, dict(nothing)) for name in TYPES}
    return result


def sanitizer_errors(text: str) -> int | None:
    """Errors and hazards by the summary of compute-sanitizer."""
    found = re.findall(r"(?:ERROR SUMMARY: (\d+) error|RACECHECK SUMMARY: (\d+) hazard)", text)
    return sum(int(a or b) for a, b in found) if found else None


def sanitizer_problems(work: Path) -> list[str]:
    problems = []
    for tool in SANITIZERS:
        path = work / f"sanitizer-{tool}.txt"
        if not finished(path):
            problems.append(f"{tool}: {ended(path)}")
        if path.exists():
            text = plain(path)
            errors = sanitizer_errors(text)
            if errors != 0:
                problems.append(f"{tool}: {'no summary' if errors is None else f'{errors} errors'}")
            problems += [f"{tool}: {p}" for p in case_problems(text, dict.fromkeys(SANITIZED, 1))]
    return problems


def read_sanitizer(work: Path) -> dict[str, dict[str, int | None]]:
    result: dict[str, dict[str, int | None]] = {}
    for tool in SANITIZERS:
        path = work / f"sanitizer-{tool}.txt"
        if path.exists():
            text = plain(path)
            result[tool] = {"errors": sanitizer_errors(text), "cases": (summary_of(text) or (None, None))[1]}
    return result


def read_perplexity(work: Path) -> dict[str, float]:
    result = {}
    for name in PERPLEXITIES:
        path = work / f"ppl-{name}.txt"
        if finished(path) and (found := re.search(r"Final estimate: PPL = ([0-9.]+)", plain(path))):
            result[name] = float(found[1])
    return result


def perplexity_problems(work: Path) -> list[str]:
    measured, problems = read_perplexity(work), []
    cpu = measured.get("cpu")
    for name in PERPLEXITIES:
        path = work / f"ppl-{name}.txt"
        if name not in measured:
            problems.append(f"{name}: {'no perplexity' if finished(path) else ended(path)}")
            continue
        if name != "cpu" and not re.search(r"offloaded [1-9]\d*/\d+ layers to GPU", plain(path)):
            problems.append(f"{name}: no layer was on the GPU")
        if cpu and not abs(measured[name] / cpu - 1) <= TOLERANCE:
            change = 100 * (measured[name] / cpu - 1)
            problems.append(f"{name}: {measured[name]:.4f} is {change:+.3f}% from the CPU's, at most 0.2% allowed")
        same = measured.get(SAME.get(name, name), measured[name])
        if measured[name] != same:
            problems.append(f"{name}: {measured[name]:.4f} is not the {same:.4f} of {SAME[name]}")
    return problems


def read_llama_bench(work: Path) -> dict[str, dict[str, float]]:
    """Tokens a second of every run: medians of tg128 and pp512. Only what ran on CUDA counts."""
    result: dict[str, dict[str, float]] = {}
    for name in BENCH_RUNS:
        path = work / f"llama-bench-{name}.json"
        try:
            entries = json.loads(path.read_text())
        except (OSError, ValueError):
            continue
        for entry in entries:
            if "CUDA" not in entry.get("backends", "") or not entry.get("samples_ts"):
                continue
            prompt, generated = entry["n_prompt"], entry["n_gen"]
            key = f"pp{prompt}" if not generated else f"tg{generated}"
            value = statistics.median(entry["samples_ts"])
            if 0 < value < math.inf:
                result.setdefault(name, {})[key] = value
    return result


def llama_bench_problems(work: Path) -> list[str]:
    measured, problems = read_llama_bench(work), []
    for name in BENCH_RUNS:
        path = work / f"llama-bench-{name}.txt"
        if not finished(path):
            problems.append(f"{name}: {ended(path)}")
        elif set(measured.get(name, {})) != {"pp512", "tg128"}:
            problems.append(f"{name}: pp512 and tg128 on CUDA are not both there")
    return problems


def bench_problems(work: Path) -> list[str]:
    bench, path = Bench.read(work / "bench.jsonl"), work / "bench.txt"
    problems = [] if finished(path) else [f"gpu-bench: {ended(path)}"]
    prompts = work / "bench-cublas.txt"
    if prompts.exists() and not finished(prompts):
        problems.append(f"gpu-bench --prompts: {ended(prompts)}")
    if bench is None or not bench.complete:
        problems.append("the measurements are not complete")
    if bench is not None and len(bench.by_key) != len(bench.results):
        problems.append("a measurement has fewer than 20 runs or no time")
    return problems


def bench_lines(bench: Bench) -> list[str]:
    """Every median, a line for each shape and number of columns."""
    names = list(dict.fromkeys(r["name"] for r in bench.results if r["kind"] == "product"))
    lines = ["", "| microseconds, median | " + " | ".join(names) + " |", "| --- |" + " --- |" * len(names)]
    places = dict.fromkeys((r["rows"], r["k"], r["columns"]) for r in bench.results if r["kind"] == "product")
    for rows, k, columns in places:
        found = [bench.by_key.get(("product", name, rows, k, columns)) for name in names]
        cells = [f"{r['median_us']:.2f}" if r else "" for r in found]
        lines.append(f"| {rows} x {k}, columns {columns} | " + " | ".join(cells) + " |")
    return lines


def markdown(work: Path, bench: Bench | None, cells: list[Cell], stages: dict[str, dict[str, Any]]) -> str:
    lines = [f"# GPU check: {bench.device['device'] if bench else 'no measurement'}", ""]
    lines += ["| stage | result | seconds |", "| --- | --- | --- |"]
    for name, stage in stages.items():
        note = f": {'; '.join(stage['problems'])}" if stage.get("problems") else ""
        lines.append(f"| {name} | {stage['status']}{note} | {stage.get('seconds', '')} |".replace("\n", " "))
    lines.append("")
    if bench:
        runs = min((r["runs"] for r in bench.results), default=0)
        lines += [
            f"Medians of {runs} or more interleaved runs over weights of at least four times the L2 cache. Copy "
            f"bandwidth (read and written): {float(bench.device['copy_bytes_per_s']) / 1e9:.0f} GB/s. Where nothing "
            "else is said the products are those of a layer; feed-forward is one product of 14336 x 4096 and one of "
            "4096 x 14336." + ("" if bench.complete else " **The measurements are not complete.**"),
            "",
        ]
    lines += ["| what, shapes of an 8B Llama | at least | measured | met |", "| --- | --- | --- | --- |"]
    verdict = {None: "", True: "yes", False: "no"}
    lines += [f"| {c.what} | {c.target} | {c.value} | {verdict[c.met]} |" for c in cells]
    if bench:
        lines += bench_lines(bench)
    speeds = read_llama_bench(work)
    lines += ["", "| llama-bench, type of the layers | tg128, tokens/s | pp512, tokens/s |", "| --- | --- | --- |"]
    for run in BENCH_RUNS:
        of = speeds.get(run, {})
        lines.append(
            f"| {run} | " + " | ".join(f"{of[k]:.1f}" if k in of else NOT_MEASURED for k in ("tg128", "pp512")) + " |"
        )
    lines += [
        "",
        "A Llama of 8B shapes (32 layers of 4096, feed-forward 14336, 8 of 32 heads for keys and values, 32000 tokens) "
        "with random weights; embedding and output are Q6_K. q4_K has Q4_K everywhere, unlike Q4_K_M. noshare: every "
        "product quantizes its activations, though several have the same.",
        "",
        "| test-backend-ops | type | passed | failed | not supported |",
        "| --- | --- | --- | --- | --- |",
    ]
    operations = read_operations(work)
    for run in OPERATION_RUNS:
        for name in TYPES:
            counts = operations.get(run, {}).get(name)
            numbers = " | ".join(str(n) for n in counts.values()) if counts else "not run | |"
            lines.append(f"| {run} | {name} | {numbers} |")
    sanitizer = read_sanitizer(work)
    lines += ["", "| compute-sanitizer | errors | cases |", "| --- | --- | --- |"]
    reason = stages.get("sanitizer", {})
    for tool in SANITIZERS:
        found = sanitizer.get(tool)
        if found:
            values = ["no summary" if v is None else str(v) for v in found.values()]
            lines.append(f"| {tool} | {' | '.join(values)} |")
        else:
            why = f": {'; '.join(reason['problems'])}" if reason.get("status") == "not run" else ""
            lines.append(f"| {tool} | not run{why} | |")
    ppl = read_perplexity(work)
    cpu = ppl.get("cpu")
    lines += ["", "| perplexity of the bundled model | PPL | against the CPU |", "| --- | --- | --- |"]
    for name in PERPLEXITIES:
        if name in ppl:
            change = f"{100 * (ppl[name] / cpu - 1):+.3f}%" if cpu else NOT_MEASURED
            lines.append(f"| {name} | {ppl[name]:.4f} | {change} |")
        else:
            lines.append(f"| {name} | {NOT_MEASURED} | |")
    return "\n".join(lines) + "\n"


def write_report(work: Path, out: Path) -> str:
    """Write both files and return the text of gpu_check.md. ``work`` holds the results of the stages."""
    try:
        stages = json.loads((work / "stages.json").read_text())
    except (OSError, ValueError):
        stages = {}
    bench = Bench.read(work / "bench.jsonl")
    cells = table(bench, Bench.read(work / "bench-cublas.jsonl"))
    result = {
        "stages": stages,
        "table": [dataclasses.asdict(c) for c in cells],
        "test_backend_ops": read_operations(work),
        "sanitizer": read_sanitizer(work),
        "perplexity": read_perplexity(work),
        "llama_bench": read_llama_bench(work),
        "bench": {**bench.device, "complete": bench.complete, "results": bench.results} if bench else None,
    }
    text = markdown(work, bench, cells, stages)
    out.mkdir(parents=True, exist_ok=True)
    for name, content in (("gpu_check.json", json.dumps(result, indent=1) + "\n"), ("gpu_check.md", text)):
        partial = out / (name + ".partial")
        partial.write_text(content)
        partial.rename(out / name)
    return text


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--work", type=Path, required=True, help="folder with what the stages wrote")
    parser.add_argument("--out", type=Path, required=True, help="folder for gpu_check.json and gpu_check.md")
    args = parser.parse_args()
    write_report(args.work, args.out)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

#!/usr/bin/env python3
"""Collect what scripts/check/gpu/gpu_check.sh found into gpu_check.json and gpu_check.md.

A number that was not measured stays "not measured"; nothing is derived from anything but measurements of the same run.
Only the standard library is used.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

TYPES = ("itq3_s", "tq1_0", "tq2_0")

#: Products of one layer of an 8B Llama as (rows, columns of the weights): how many matrices have that shape.
LAYER = {(4096, 4096): 2, (1024, 4096): 2, (14336, 4096): 2, (4096, 14336): 1}


@dataclasses.dataclass
class Cell:
    """One line of the table: what, the least (or most) it should be, what was measured, and whether that is enough."""

    what: str
    target: str
    value: str = "not measured"
    met: bool | None = None


class Bench:
    """Medians of bench.cu; a lookup of something that was not measured raises KeyError."""

    def __init__(self, data: dict[str, Any]) -> None:
        self.data = data
        self.by_key = {
            (r["kind"], r["name"], r["rows"], r["k"], r["columns"]): r for r in data["results"] if r["runs"] >= 20
        }

    def seconds(self, kind: str, name: str, rows: int, k: int, columns: int) -> float:
        return float(self.by_key[kind, name, rows, k, columns]["median_us"]) * 1e-6

    def layer(self, kind: str, name: str, columns: int) -> float:
        """Seconds for the products of one layer."""
        return sum(count * self.seconds(kind, name, *shape, columns) for shape, count in LAYER.items())

    def layer_bytes(self, kind: str, name: str, columns: int) -> float:
        return sum(
            count * float(self.by_key[(kind, name, *shape, columns)]["weight_bytes"]) for shape, count in LAYER.items()
        )

    def bandwidth_fraction(self) -> float:
        rate = self.layer_bytes("mmvq", "itq3_s", 1) / self.layer("mmvq", "itq3_s", 1)
        return rate / float(self.data["copy_bytes_per_s"])

    def rotation_share(self) -> float:
        """What the rotation adds to the activation kernel, over the time of a product; the larger of two widths."""
        shares = []
        for rows, k in ((4096, 4096), (4096, 14336)):
            extra = self.seconds("activation", "rotated", 0, k, 1) - self.seconds("activation", "plain", 0, k, 1)
            shares.append(extra / self.seconds("mmvq", "itq3_s", rows, k, 1))
        return max(shares)


def table(bench: Bench | None) -> list[Cell]:
    """The performance table; cells whose measurement is missing say so."""

    def cell(what: str, target: float, value: Callable[[Bench], float], unit: str, at_most: bool = False) -> Cell:
        scale, suffix = (100, "%") if unit == "%" else (1, unit)
        sign = "at most " if at_most else ""
        result = Cell(what, f"{sign}{target * scale:g}{suffix}")
        if bench is not None:
            try:
                measured = value(bench)
            except KeyError:
                return result
            result.value = f"{measured * scale:.3g}{suffix}"
            result.met = measured <= target if at_most else measured >= target
        return result

    def over(kind: str, columns: int, other: str) -> Callable[[Bench], float]:
        return lambda b: b.layer(kind, other, columns) / b.layer(kind, "itq3_s", columns)

    def ternary(name: str, columns: int) -> Callable[[Bench], float]:
        shape = (8192, 28672, columns)
        return lambda b: b.seconds("ternary", "cublas_f16", *shape) / b.seconds("ternary", name, *shape)

    return [
        cell("MMVQ ITQ3_S, fraction of measured copy bandwidth", 0.6, Bench.bandwidth_fraction, ""),
        cell("MMVQ ITQ3_S over Q4_K", 1.2, over("mmvq", 1, "q4_K"), "x"),
        cell("MMVQ ITQ3_S over IQ3_S", 1.1, over("mmvq", 1, "iq3_s"), "x"),
        cell("MMVQ ITQ3_S over Q3_K", 1.15, over("mmvq", 1, "q3_K"), "x"),
        cell("rotation, share of MMVQ time", 0.05, Bench.rotation_share, "%", at_most=True),
        cell("MMQ ITQ3_S at 512 columns over Q4_K", 0.95, over("mmq", 512, "q4_K"), "x"),
        cell("MMQ ITQ3_S at 512 columns over IQ3_S", 1.0, over("mmq", 512, "iq3_s"), "x"),
        cell("TQ2_0 at 1 column over cuBLAS F16", 6.0, ternary("tq2_0", 1), "x"),
        cell("TQ2_0 at 16 columns over cuBLAS F16", 4.0, ternary("tq2_0", 16), "x"),
        cell("TQ1_0 at 1 column over cuBLAS F16", 6.0, ternary("tq1_0", 1), "x"),
    ]


def read_ops(work: Path) -> dict[str, dict[str, Any]]:
    """Cases of test-backend-ops for every operation and type: passed, failed, not supported."""
    result: dict[str, dict[str, Any]] = {}
    for path in sorted(work.glob("ops-*.txt")):
        counts = {name: {"passed": 0, "failed": 0, "not_supported": 0} for name in TYPES}
        for line in re.sub(r"\x1b\[[0-9;]*m", "", path.read_text(errors="replace")).splitlines():
            found = re.search(r"\btype(?:_a)?=(itq3_s|tq1_0|tq2_0)\b", line)
            if found is None:
                continue
            if "not supported" in line:
                counts[found[1]]["not_supported"] += 1
            elif "FAIL" in line:
                counts[found[1]]["failed"] += 1
            elif re.search(r"\bOK\b", line):
                counts[found[1]]["passed"] += 1
        result[path.stem.removeprefix("ops-")] = counts
    return result


def read_perplexity(work: Path) -> dict[str, float]:
    result = {}
    for path in sorted(work.glob("ppl-*.txt")):
        if found := re.search(r"Final estimate: PPL = ([0-9.]+)", path.read_text(errors="replace")):
            result[path.stem.removeprefix("ppl-")] = float(found[1])
    return result


def markdown(bench: Bench | None, cells: list[Cell], ops: dict[str, dict[str, Any]], ppl: dict[str, float]) -> str:
    device = bench.data["device"] if bench else "no measurement"
    lines = [f"# GPU check: {device}", ""]
    if bench:
        lines += [
            f"Medians of at least 20 interleaved runs, weights rotated past the L2 cache. Copy bandwidth (read and "
            f"written): {float(bench.data['copy_bytes_per_s']) / 1e9:.0f} GB/s.",
            "",
        ]
    lines += ["| what, shapes of an 8B Llama | at least | measured | met |", "| --- | --- | --- | --- |"]
    verdict = {None: "", True: "yes", False: "no"}
    lines += [f"| {c.what} | {c.target} | {c.value} | {verdict[c.met]} |" for c in cells]
    lines += ["", "| test-backend-ops | type | passed | failed | not supported |", "| --- | --- | --- | --- | --- |"]
    for op in ("MUL_MAT", "MUL_MAT_ID", "MUL_MAT_VEC_FUSION", "GET_ROWS"):
        for name in TYPES:
            counts = ops.get(op, {}).get(name)
            numbers = (
                " | ".join(str(counts[k]) for k in ("passed", "failed", "not_supported")) if counts else "not run | |"
            )
            lines.append(f"| {op} | {name} | {numbers} |")
    lines += ["", "| perplexity of the bundled model | PPL | against the CPU |", "| --- | --- | --- |"]
    cpu = ppl.get("cpu")
    for name, value in ppl.items():
        change = f"{100 * (value / cpu - 1):+.3f}%" if cpu else "not measured"
        lines.append(f"| {name} | {value:.4f} | {change} |")
    if not ppl:
        lines.append("| not measured | | |")
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--work", type=Path, required=True, help="folder with bench.json, ops-*.txt and ppl-*.txt")
    parser.add_argument("--out", type=Path, required=True, help="folder for gpu_check.json and gpu_check.md")
    args = parser.parse_args()
    path = args.work / "bench.json"
    bench = Bench(json.loads(path.read_text())) if path.exists() else None
    cells, ops, ppl = table(bench), read_ops(args.work), read_perplexity(args.work)
    result = {
        "table": [dataclasses.asdict(c) for c in cells],
        "test_backend_ops": ops,
        "perplexity": ppl,
        "bench": bench.data if bench else None,
    }
    for name, text in (
        ("gpu_check.json", json.dumps(result, indent=2) + "\n"),
        ("gpu_check.md", markdown(bench, cells, ops, ppl)),
    ):
        partial = args.out / (name + ".partial")
        partial.write_text(text)
        partial.rename(args.out / name)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

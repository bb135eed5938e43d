"""The report of scripts/check/gpu/gpu_check.sh and the parsers of scripts/check/cuda.py, on made-up input."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from scripts.check import cuda
from scripts.check.gpu import gpu_check, report

HEADER = (
    "CREATE TABLE test_backend_ops (\n  op_name TEXT,\n  op_params TEXT,\n  supported INTEGER,\n  passed INTEGER,\n\
  error_message TEXT,\n  time_us REAL,\n  bandwidth_gb_s REAL\n);\n\n"
)


def insert(op: str, params: str, supported: int = 1, passed: int = 1, us: float = 0.0, speed: float = 0.0) -> str:
    """A case as test-backend-ops prints it."""
    values = ", ".join(f"'{v}'" for v in (op, params, supported, passed, "", us, speed))
    columns = "op_name, op_params, supported, passed, error_message, time_us, bandwidth_gb_s"
    return f"INSERT INTO test_backend_ops ({columns}) VALUES ({values});\n"


def case(op: str, name: str, supported: int = 1, passed: int = 1) -> str:
    return insert(op, f"type_a={name},type_b=f32,m=16,n=1", supported, passed)


def write(work: Path, name: str, out: str, end: str | None = "exit 0", log: str = "") -> None:
    (work / f"{name}.out").write_text(out)
    (work / f"{name}.txt").write_text(f"$ {name}\n{log}\n" + (f"[{end}, 7 s]\n" if end else ""))


def run(work: Path) -> tuple[dict[str, Any], str]:
    report.write_report(work, work, "Made Up", list(gpu_check.STAGES))
    return json.loads((work / "gpu_check.json").read_text()), (work / "gpu_check.md").read_text()


def test_every_stage_is_judged() -> None:
    assert list(gpu_check.STAGES) == list(report.PROBLEMS)
    assert tuple(gpu_check.PERPLEXITY_RUNS) == report.PERPLEXITIES


def test_nothing_measured_says_so(tmp_path: Path) -> None:
    data, text = run(tmp_path)
    assert all(cell["value"] == "not measured" and cell["met"] is None for cell in data["table"])
    cells = [*data["table"], *data["vulkan"]["table"]]
    runs = [*report.BENCH_RUNS, *report.VULKAN_BENCH_RUNS]
    assert text.count("not measured") == 3 + len(cells) + len(report.PERPLEXITIES) + 2 * len(runs)
    operations = sum(len(names) for names in (*report.OPERATION_RUNS.values(), report.VULKAN_OPERATIONS))
    assert text.count("not run") == len(report.TYPES) * operations + len(report.SANITIZERS) + len(gpu_check.STAGES)


def write_perf(work: Path, run: str, times: dict[str, float]) -> None:
    write(
        work, f"perf-{run}", HEADER + "".join(insert("MUL_MAT", f"name={n},type=f32", us=t) for n, t in times.items())
    )


def test_cells_are_ratios_of_times(tmp_path: Path) -> None:
    for name, us in {"itq3_s": 100.0, "q4_K": 130.0, "iq3_s": 105.0, "f16": 60.0}.items():
        write_perf(tmp_path, name, {f"{name}.{n}": us for n in (1, 512)})
    write_perf(tmp_path, "tq2_0", {"tq2_0.16": 14.0, "tq2_0.128": 50.0})
    write_perf(tmp_path, "cublas", {"tq2_0.128": 40.0})
    with (tmp_path / "perf-f16.out").open("a") as file:
        file.write(insert("MUL_MAT", "name=f16.16,type=f32", us=60.0) + "INSERT INTO test_backend_ops (op_na")
    write_perf(tmp_path, "small", {"small.1": 10.0})
    write_perf(tmp_path, "shared", {"small.1": 9.6})
    write(tmp_path, "perf-copy", HEADER + insert("CONT", "name=copy.1,type=f32", us=1.0, speed=1e12 / 2**30))
    data, text = run(tmp_path)
    cells = {cell.pop("what"): cell for cell in data["table"]}
    assert cells["1 column, ITQ3_S over Q4_K"] == {"target": "1.3x", "value": "1.3x", "met": True}
    assert cells["1 column, ITQ3_S over IQ3_S"]["met"] is False
    assert cells["1 column, ITQ3_S over Q3_K"]["met"] is None  # information, and not measured
    share = cells["1 column, 4096 x 4096, rotating and rounding the activations, share of the time"]
    assert share == {"target": "at most 5%", "value": "4%", "met": True}
    assert cells["16 columns, TQ2_0 over F16"]["value"] == "4.29x"
    assert cells["16 columns, ITQ3_S over F16"]["value"] == "not measured"
    assert cells["512 columns, time of ITQ3_S over F16"] == {"target": "at most 1.5x", "value": "1.67x", "met": False}
    assert cells["128 columns, TQ2_0 by MMQ over F16 by cuBLAS"]["value"] == "0.8x"
    # bytes of the matrix over their time, against 1e12
    assert float(cells["1 column, ITQ3_S, fraction of measured copy bandwidth"]["value"]) == pytest.approx(
        57344 * 8192 * 100 / 256 / 100e-6 / 1e12, rel=0.01
    )
    assert "Made Up" in text and "(read and written): 1000 GB/s" in text
    assert "| columns 1 | 100.00 |  |  |  |  |  | 130.00 | 105.00 |  |  |  | 60.00 |" in text


@pytest.mark.parametrize("time", [0.0, math.nan, math.inf])
def test_a_bad_measurement_counts_for_nothing(tmp_path: Path, time: float) -> None:
    for name in report.PERF_TYPES:
        write_perf(tmp_path, name, {f"{name}.{n}": 1.0 for n in report.COLUMNS})
    write_perf(tmp_path, "cublas", {f"{name}.{n}": 1.0 for name in report.TYPES for n in report.CUBLAS_COLUMNS})
    write(tmp_path, "perf-copy", HEADER + insert("CONT", "name=copy.1,type=f32", us=1.0, speed=1.0))
    for run in ("small", "shared"):
        write_perf(tmp_path, run, {"small.1": 1.0})
    assert report.perf_problems(tmp_path) == []
    write_perf(tmp_path, "small", {"small.1": time})
    assert report.perf_problems(tmp_path) == ["not measured: small small.1"]


def test_measurements_that_were_broken_off_are_kept_and_said_to_be(tmp_path: Path) -> None:
    write(tmp_path, "perf-tq2_0", HEADER + insert("MUL_MAT", "name=tq2_0.1,type=f32", us=2.0), end=None)
    assert report.read_perf(tmp_path) == {"tq2_0 tq2_0.1": pytest.approx(2e-6)}
    assert "tq2_0: broken off" in report.perf_problems(tmp_path)


def test_vulkan_is_reported_beside(tmp_path: Path) -> None:
    for stage, us in (("perf", 100.0), ("vulkan-perf", 50.0)):
        for name, factor in (("itq3_s", 1.0), ("q4_K", 1.5)):
            write(tmp_path, f"{stage}-{name}", HEADER + insert("MUL_MAT", f"name={name}.1,type=f32", us=us * factor))
    entry = {"backends": "Vulkan", "gpu_info": "A Card", "samples_ts": [9.0, 10.0, 11.0], "n_gen": 128, "n_prompt": 0}
    write(tmp_path, "vulkan-bench-itq3_s", json.dumps([entry]))
    data, text = run(tmp_path)
    found = data["vulkan"]
    assert found["device"] == "A Card" and found["llama_bench"] == {"itq3_s": {"tg128": 10.0}}
    assert found["perf"] == {"itq3_s itq3_s.1": pytest.approx(50e-6), "q4_K q4_K.1": pytest.approx(75e-6)}
    assert "1 column, ITQ3_S over Q4_K |  | 1.5x" in text and "| itq3_s | 10.0 | not measured |" in text
    assert "ops: not run" in report.vulkan_problems(tmp_path)


def test_operations_are_read(tmp_path: Path) -> None:
    cases = case("MUL_MAT", "itq3_s") + case("MUL_MAT", "itq3_s", supported=0, passed=0)
    write(tmp_path, "ops-all", HEADER + cases + case("MUL_MAT", "tq1_0", passed=0), "exit 1")
    data, text = run(tmp_path)
    counts = data["test_backend_ops"]["all"]["MUL_MAT"]
    assert counts["itq3_s"] == {"passed": 1, "failed": 0, "not_supported": 1}
    assert counts["tq1_0"] == {"passed": 0, "failed": 1, "not_supported": 0}
    assert "| MUL_MAT | itq3_s | 1 | 0 | 1 |" in text
    assert data["stages"]["ops"]["status"] == "failed" and data["stages"]["ops"]["seconds"] == 7
    assert "all: exit 1" in data["stages"]["ops"]["problems"]
    assert "all: MUL_MAT of tq1_0: 1 cases failed" in data["stages"]["ops"]["problems"]


def test_operations_that_are_missing_are_problems(tmp_path: Path) -> None:
    least = {"MUL_MAT": 2}
    write(tmp_path, "x", HEADER + "".join(case("MUL_MAT", name) * 2 for name in report.TYPES))
    assert report.case_problems(tmp_path, "x", least) == []
    write(tmp_path, "x", HEADER + "".join(case("MUL_MAT", name) * 3 for name in report.TYPES[:-1]))
    assert report.case_problems(tmp_path, "x", least) == ["MUL_MAT of tq2_0: 0 cases passed, 2 or more expected"]
    for nothing in (HEADER, "", case("MUL_MAT", "itq3_s"), HEADER + "INSERT INTO test_backend_ops VALUES ('it's');\n"):
        write(tmp_path, "x", nothing)
        assert len(report.case_problems(tmp_path, "x", least)) == len(report.TYPES)


def write_perplexities(work: Path, **values: float) -> None:
    for name in report.PERPLEXITIES:
        estimate = f"Final estimate: PPL = {values.get(name, 10.0):.4f} +/- 0.1\n"
        write(work, f"perplexity-{name}", estimate, log="I load_tensors: offloaded 5/5 layers to GPU")


def test_perplexity_may_differ_by_a_fifth_of_a_percent(tmp_path: Path) -> None:
    write_perplexities(tmp_path, gpu=10.019, noshare=10.019, tensor=9.981)
    assert report.perplexity_problems(tmp_path) == []
    assert "| gpu | 10.0190 | +0.190% |" in run(tmp_path)[1]
    write_perplexities(tmp_path, batch4=10.03)
    assert [p.split(":")[0] for p in report.perplexity_problems(tmp_path)] == ["batch4"]
    write_perplexities(tmp_path, batch4=9.97)
    assert [p.split(":")[0] for p in report.perplexity_problems(tmp_path)] == ["batch4"]


def test_shared_activations_change_nothing(tmp_path: Path) -> None:
    write_perplexities(tmp_path, batch8=10.001, noshare8=10.0011)
    assert report.perplexity_problems(tmp_path) == ["noshare8: 10.0011 is not the 10.0010 of batch8"]


def test_perplexity_must_be_there_and_of_the_gpu(tmp_path: Path) -> None:
    write_perplexities(tmp_path)
    write(tmp_path, "perplexity-layer", "Final estimate: PPL = nan +/- nan\n")
    write(tmp_path, "perplexity-tensor", "", "exit 1")
    write(tmp_path, "perplexity-batch2", "Final estimate: PPL = 10.0000 +/- 0.1\n")
    (tmp_path / "perplexity-batch4.txt").unlink()
    assert sorted(report.perplexity_problems(tmp_path)) == [
        "batch2: no layer was on the GPU",
        "batch4: not run",
        "layer: no perplexity",
        "tensor: exit 1",
    ]


def test_sanitizer_needs_a_summary_without_errors_and_cases(tmp_path: Path) -> None:
    cases = HEADER + "".join(case(op, name) for op in report.SANITIZED for name in report.TYPES)
    write(tmp_path, "sanitizer-memcheck", f"{cases}========= ERROR SUMMARY: 0 errors\n")
    hazards = "========= RACECHECK SUMMARY: 2 hazards displayed (0 errors, 2 warnings)\n"
    write(tmp_path, "sanitizer-racecheck", cases + hazards)
    write(tmp_path, "sanitizer-synccheck", cases)
    assert report.sanitizer_problems(tmp_path) == ["racecheck: 2 errors", "synccheck: no summary"]
    text = run(tmp_path)[1]
    for row in ("| memcheck | 0 | 18 |", "| racecheck | 2 | 18 |", "| synccheck | no summary | 18 |"):
        assert row in text


def test_llama_bench_counts_only_what_ran_on_cuda(tmp_path: Path) -> None:
    def entries(backends: str) -> str:
        common = {"backends": backends, "samples_ts": [90.0, 100.0, 500.0]}
        return json.dumps([{**common, "n_prompt": 512, "n_gen": 0}, {**common, "n_prompt": 0, "n_gen": 128}])

    for name in report.BENCH_RUNS:
        write(tmp_path, f"llama_bench-{name}", entries("CPU" if name == "f16" else "CUDA"))
    assert report.llama_bench_problems(tmp_path) == ["f16: pp512 and tg128 on CUDA are not both there"]
    text = run(tmp_path)[1]
    assert "| itq3_s | 100.0 | 100.0 |" in text and "| f16 | not measured | not measured |" in text


PTXAS = """\
ptxas info    : Compiling entry function '_Z15quantize_q8_1x4ILb1EEvPKfPvlllllj5uint3' for 'sm_90'
ptxas info    : Function properties for _Z15quantize_q8_1x4ILb1EEvPKfPvlllllj5uint3
    8 bytes stack frame, 4 bytes spill stores, 12 bytes spill loads
ptxas info    : Used 25 registers, used 0 barriers
ptxas info    : Compiling entry function '_Z9mul_mat_qIL9ggml_type500ELi16ELb0EL9ggml_prec30EEvPKc' for 'sm_90'
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 112 registers, used 1 barriers
ptxas info    : Compiling entry function '_Z9mul_mat_qIL9ggml_type12ELi16ELb0EL9ggml_prec30EEvPKc' for 'sm_90'
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 100 registers, used 1 barriers
"""


def test_cuda_check_reads_ptxas() -> None:
    kernels = {k.name: k for k in cuda.kernels_of(PTXAS)}
    assert set(kernels) == {"quantize_q8_1x4", "mul_mat_q ITQ3_S"}  # not upstream's own
    assert kernels["quantize_q8_1x4"].spills == 16
    assert kernels["mul_mat_q ITQ3_S"].registers == 112


def test_cuda_check_finds_warnings_in_our_files_only() -> None:
    log = (
        'itq-decode.cuh(10): warning #177-D: variable "x" was declared but never referenced\n'
        "../ggml-impl.h:312:15: warning: defined but not used\n"
        "itq-vecdot.cuh:7:1: warning: unused parameter\n"
    )
    assert len(cuda.warnings_of(log, {"itq-decode.cuh", "itq-vecdot.cuh"})) == 2


def test_cuda_check_compiles_what_is_touched() -> None:
    files = cuda.touched_files()
    assert {"mmvq.cu", "convert.cu", "itq-quantize.cu", "template-instances/mmq-instance-itq3_s.cu"} <= set(files)

"""The report of scripts/check/gpu/gpu_check.sh and the parsers of scripts/check/cuda.py, on made-up input."""

from __future__ import annotations

import importlib.util
import json
import math
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from selection import some

ROOT = Path(__file__).resolve().parents[2]
REPORT = ROOT / "scripts" / "check" / "gpu" / "report.py"


def load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


report = load(REPORT)


def result(name: str, rows: int, k: int, columns: int, us: float, weight_bytes: int = 0) -> dict[str, Any]:
    kind = "product" if rows else "activation"
    keys = ("kind", "name", "rows", "k", "columns", "median_us", "weight_bytes")
    return {**dict(zip(keys, (kind, name, rows, k, columns, us, weight_bytes), strict=True)), "runs": 31}


def write_bench(work: Path, results: list[dict[str, Any]], done: bool = True) -> None:
    header = {"device": "made up", "copy_bytes_per_s": 1e12}
    lines = [header, *results, *([{"done": True}] if done else [])]
    (work / "bench.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def run(work: Path) -> tuple[dict[str, Any], str]:
    subprocess.run([sys.executable, str(REPORT), "--work", str(work), "--out", str(work)], check=True)
    return json.loads((work / "gpu_check.json").read_text()), (work / "gpu_check.md").read_text()


def cells_of(data: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {cell["what"]: cell for cell in data["table"]}


def test_nothing_measured_says_so(tmp_path: Path) -> None:
    data, text = run(tmp_path)
    assert all(cell["value"] == "not measured" and cell["met"] is None for cell in data["table"])
    assert text.count("not measured") >= len(data["table"]) + len(report.PERPLEXITIES) + 2 * len(report.BENCH_RUNS)
    assert text.count("not run") == 3 * len(report.OPERATION_RUNS) + len(report.SANITIZERS)


def test_cells_are_ratios_of_medians(tmp_path: Path) -> None:
    times = {"itq3_s": 10.0, "q4_K": 13.0, "iq3_s": 10.5, "q3_K": 12.0, "cublas_f16": 6.0}
    results = [
        result(name, rows, k, columns, us, rows * k * 100 // 256)
        for rows, k in report.LAYER
        for columns in (1, 512)
        for name, us in times.items()
    ]
    results += [result("cublas_f16", rows, k, 16, 42.0) for rows, k in report.PAIR]
    results += [result("tq2_0", rows, k, 16, 10.0) for rows, k in report.PAIR]
    results += [result(n, 0, k, 1, us) for k in (4096, 14336) for n, us in (("rotated", 2), ("plain", 1.6))]
    write_bench(tmp_path, results)
    data, text = run(tmp_path)
    cells = cells_of(data)
    assert cells["1 column, ITQ3_S over Q4_K"] == {
        "what": "1 column, ITQ3_S over Q4_K",
        "target": "1.3x",
        "value": "1.3x",
        "met": True,
    }
    assert cells["1 column, ITQ3_S over IQ3_S"]["met"] is False
    assert cells["1 column, ITQ3_S over Q3_K"]["met"] is None  # information
    assert cells["1 column, rotation, share of the time"]["value"] == "4%"
    assert cells["16 columns, TQ2_0 over cuBLAS F16, feed-forward"]["value"] == "4.2x"
    assert cells["16 columns, ITQ3_S over cuBLAS F16, feed-forward"]["value"] == "not measured"
    assert cells["512 columns, time of ITQ3_S over cuBLAS F16"]["value"] == "1.67x"
    assert cells["512 columns, time of ITQ3_S over cuBLAS F16"]["met"] is False
    # bytes of the seven matrices over their time, against 1e12
    weights = 2 * 4096 * 4096 + 2 * 1024 * 4096 + 3 * 14336 * 4096
    assert float(cells["1 column, ITQ3_S, fraction of measured copy bandwidth"]["value"]) == pytest.approx(
        weights * 100 / 256 / 70e-6 / 1e12, rel=0.01
    )
    assert "made up" in text and "not complete" not in text
    assert "| 4096 x 4096, columns 1 | 10.00 | 13.00 | 10.50 | 12.00 | 6.00 |" in text


@pytest.mark.parametrize(
    "change",
    some(
        [{"runs": 19}, {"median_us": 0.0}, {"median_us": math.nan}], lambda change: "runs" in change, pytest.mark.slow
    ),
)
def test_a_bad_measurement_counts_for_nothing(tmp_path: Path, change: dict[str, float]) -> None:
    good = [result(n, 8192, 28672, 1, 10.0) for n in ("tq2_0", "cublas_f16")]
    write_bench(tmp_path, good)
    assert cells_of(run(tmp_path)[0])["1 column, TQ2_0 over cuBLAS F16, 8192 x 28672"]["value"] == "1x"
    write_bench(tmp_path, [{**good[0], **change}, good[1]])
    (tmp_path / "bench.txt").write_text("[exit 0]\n")
    assert all(cell["value"] == "not measured" for cell in run(tmp_path)[0]["table"])
    assert report.bench_problems(tmp_path) == ["a measurement has fewer than 20 runs or no time"]


def test_measurements_that_were_broken_off_are_kept_and_said_to_be(tmp_path: Path) -> None:
    write_bench(tmp_path, [result(n, 8192, 28672, 1, 10.0) for n in ("tq2_0", "cublas_f16")], done=False)
    with (tmp_path / "bench.jsonl").open("a") as file:
        file.write('{"kind": "product", "na')
    data, text = run(tmp_path)
    assert cells_of(data)["1 column, TQ2_0 over cuBLAS F16, 8192 x 28672"]["value"] == "1x"
    assert "not complete" in text
    assert report.bench_problems(tmp_path) == ["gpu-bench: not run", "the measurements are not complete"]


def case(op: str, name: str, outcome: str = "\x1b[1;32mOK\x1b[0m") -> str:
    return f"  {op}(type_a={name},type_b=f32,m=16): {outcome}\n"


def test_operations_are_read(tmp_path: Path) -> None:
    (tmp_path / "ops-MUL_MAT.txt").write_text(
        case("MUL_MAT", "itq3_s")
        + case("MUL_MAT", "itq3_s", "not supported [CUDA0] ")
        + "[MUL_MAT] ERR = 0.1 > 0.0005 "
        + case("MUL_MAT", "tq1_0", "\x1b[1;31mFAIL\x1b[0m")
        + "  1/2 tests passed\n\nFailing tests:\n  MUL_MAT(type_a=tq1_0,type_b=f32,m=16)\n[exit 1]\n"
    )
    counts = run(tmp_path)[0]["test_backend_ops"]["MUL_MAT"]
    assert counts["itq3_s"] == {"passed": 1, "failed": 0, "not_supported": 1}
    assert counts["tq1_0"] == {"passed": 0, "failed": 1, "not_supported": 0}


def test_operations_that_are_missing_are_problems() -> None:
    enough = "".join(case("MUL_MAT", name, "OK") * 2 for name in report.TYPES)
    least = {"MUL_MAT": 2}
    assert report.case_problems(enough + "  6/6 tests passed\n", least) == []
    assert report.case_problems(enough, least) == ['no line "N/M tests passed"']
    assert report.case_problems("  0/0 tests passed\n", least)[0] == "0/0 tests passed"
    assert report.case_problems(enough + "  7/7 tests passed\n", least) != []  # a case without a line
    assert report.case_problems(enough + "  5/6 tests passed\n", least) != []
    two_types = "".join(case("MUL_MAT", name, "OK") * 3 for name in report.TYPES[:2])
    assert report.case_problems(two_types + "  6/6 tests passed\n", least) == [
        "MUL_MAT of tq2_0: 0 cases passed, 2 or more expected"
    ]


def write_perplexities(work: Path, **values: float) -> None:
    for name in report.PERPLEXITIES:
        (work / f"ppl-{name}.txt").write_text(
            "I load_tensors: offloaded 5/5 layers to GPU\n"
            f"Final estimate: PPL = {values.get(name, 10.0):.4f} +/- 0.1\n[exit 0]\n"
        )


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
    (tmp_path / "ppl-layer.txt").write_text("Final estimate: PPL = nan +/- nan\n[exit 0]\n")
    (tmp_path / "ppl-tensor.txt").write_text("[exit 1]\n")
    (tmp_path / "ppl-batch2.txt").write_text("Final estimate: PPL = 10.0000 +/- 0.1\n[exit 0]\n")
    (tmp_path / "ppl-batch4.txt").unlink()
    assert report.perplexity_problems(tmp_path) == [
        "layer: no perplexity",
        "tensor: exit 1",
        "batch2: no layer was on the GPU",
        "batch4: not run",
    ]


def test_sanitizer_needs_a_summary_without_errors_and_cases(tmp_path: Path) -> None:
    cases = "".join(case(op, name) for op in report.SANITIZED for name in report.TYPES) + "  9/9 tests passed\n"
    for tool, summary in (
        ("memcheck", "ERROR SUMMARY: 0 errors"),
        ("racecheck", "RACECHECK SUMMARY: 2 hazards displayed (0 errors, 2 warnings)"),
    ):
        (tmp_path / f"sanitizer-{tool}.txt").write_text(f"{cases}========= {summary}\n[exit 0]\n")
    (tmp_path / "sanitizer-synccheck.txt").write_text(f"{cases}[exit 0]\n")
    assert report.sanitizer_problems(tmp_path) == ["racecheck: 2 errors", "synccheck: no summary"]
    text = run(tmp_path)[1]
    assert (
        "| memcheck | 0 | 9 |" in text and "| racecheck | 2 | 9 |" in text and "| synccheck | no summary | 9 |" in text
    )


def test_llama_bench_counts_only_what_ran_on_cuda(tmp_path: Path) -> None:
    def entries(backends: str) -> str:
        common = {"backends": backends, "samples_ts": [90.0, 100.0, 500.0]}
        return json.dumps([{**common, "n_prompt": 512, "n_gen": 0}, {**common, "n_prompt": 0, "n_gen": 128}])

    for name in report.BENCH_RUNS:
        (tmp_path / f"llama-bench-{name}.txt").write_text("[exit 0]\n")
        (tmp_path / f"llama-bench-{name}.json").write_text(entries("CPU" if name == "f16" else "CUDA"))
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
    cuda_check = load(ROOT / "scripts" / "check" / "cuda.py")
    kernels = {k.name: k for k in cuda_check.kernels_of(PTXAS)}
    assert set(kernels) == {"quantize_q8_1x4", "mul_mat_q ITQ3_S"}  # not upstream's own
    assert kernels["quantize_q8_1x4"].spills == 16
    assert kernels["mul_mat_q ITQ3_S"].registers == 112


def test_cuda_check_finds_warnings_in_our_files_only() -> None:
    cuda_check = load(ROOT / "scripts" / "check" / "cuda.py")
    log = (
        'itq3s-decode.cuh(10): warning #177-D: variable "x" was declared but never referenced\n'
        "../ggml-impl.h:312:15: warning: defined but not used\n"
        "itq3s-vecdot.cuh:7:1: warning: unused parameter\n"
    )
    assert len(cuda_check.warnings_of(log, {"itq3s-decode.cuh", "itq3s-vecdot.cuh"})) == 2


def test_cuda_check_compiles_what_is_touched() -> None:
    cuda_check = load(ROOT / "scripts" / "check" / "cuda.py")
    files = cuda_check.touched_files()
    assert {"mmvq.cu", "convert.cu", "itq3s-quantize.cu", "template-instances/mmq-instance-itq3_s.cu"} <= set(files)

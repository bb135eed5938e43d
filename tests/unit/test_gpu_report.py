"""The report of scripts/check/gpu/gpu_check.sh and the parsers of scripts/check/cuda.py, on made-up input."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
REPORT = ROOT / "scripts" / "check" / "gpu" / "report.py"


def load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def result(kind: str, name: str, rows: int, k: int, columns: int, us: float, weight_bytes: int = 0) -> dict[str, Any]:
    keys = ("kind", "name", "rows", "k", "columns", "median_us", "weight_bytes")
    return {**dict(zip(keys, (kind, name, rows, k, columns, us, weight_bytes), strict=True)), "runs": 31}


def run(work: Path) -> tuple[dict[str, Any], str]:
    subprocess.run([sys.executable, str(REPORT), "--work", str(work), "--out", str(work)], check=True)
    return json.loads((work / "gpu_check.json").read_text()), (work / "gpu_check.md").read_text()


def test_nothing_measured_says_so(tmp_path: Path) -> None:
    data, text = run(tmp_path)
    assert len(data["table"]) == 10
    assert all(cell["value"] == "not measured" and cell["met"] is None for cell in data["table"])
    assert text.count("not measured") >= 10
    assert "not run" in text


def test_cells_are_ratios_of_medians(tmp_path: Path) -> None:
    shapes = [(4096, 4096), (1024, 4096), (14336, 4096), (4096, 14336)]
    times = {"itq3_s": 10.0, "q4_K": 13.0, "iq3_s": 10.5, "q3_K": 12.0}
    results = [
        result("mmvq", name, *shape, 1, us, shape[0] * shape[1] * 100 // 256)
        for shape in shapes
        for name, us in times.items()
    ]
    results += [
        result("activation", n, 0, k, 1, us) for k in (4096, 14336) for n, us in (("rotated", 2), ("plain", 1.6))
    ]
    results += [result("ternary", "cublas_f16", 8192, 28672, 1, 70.0), result("ternary", "tq2_0", 8192, 28672, 1, 10.0)]
    bench = {"device": "made up", "copy_bytes_per_s": 1e12, "results": results}
    (tmp_path / "bench.json").write_text(json.dumps(bench))
    data, text = run(tmp_path)
    cells = {cell["what"]: cell for cell in data["table"]}
    assert cells["MMVQ ITQ3_S over Q4_K"]["value"] == "1.3x"
    assert cells["MMVQ ITQ3_S over Q4_K"]["met"] is True
    assert cells["MMVQ ITQ3_S over IQ3_S"]["met"] is False
    assert cells["rotation, share of MMVQ time"]["value"] == "4%"
    assert cells["TQ2_0 at 1 column over cuBLAS F16"]["value"] == "7x"
    assert cells["TQ1_0 at 1 column over cuBLAS F16"]["value"] == "not measured"
    # bytes of the seven matrices over their time, against 1e12
    weights = 2 * 4096 * 4096 + 2 * 1024 * 4096 + 3 * 14336 * 4096
    assert float(cells["MMVQ ITQ3_S, fraction of measured copy bandwidth"]["value"]) == pytest.approx(
        weights * 100 / 256 / 70e-6 / 1e12, rel=0.01
    )
    assert "made up" in text


def test_too_few_runs_count_for_nothing(tmp_path: Path) -> None:
    few = {**result("ternary", "tq2_0", 8192, 28672, 1, 10.0), "runs": 19}
    bench = {"device": "made up", "copy_bytes_per_s": 1e12, "results": [few]}
    (tmp_path / "bench.json").write_text(json.dumps(bench))
    data, _ = run(tmp_path)
    assert [cell["value"] for cell in data["table"]] == ["not measured"] * 10


def test_operations_and_perplexity_are_read(tmp_path: Path) -> None:
    (tmp_path / "ops-MUL_MAT.txt").write_text(
        "  MUL_MAT(type_a=itq3_s,type_b=f32,m=16): \x1b[1;32mOK\x1b[0m\n"
        "  MUL_MAT(type_a=itq3_s,type_b=f16,m=16): not supported [CUDA0]\n"
        "[MUL_MAT] NMSE = 0.1 > 0.0005   MUL_MAT(type_a=tq1_0,type_b=f32,m=16): \x1b[1;31mFAIL\x1b[0m\n"
    )
    (tmp_path / "ppl-cpu.txt").write_text("Final estimate: PPL = 10.0000 +/- 0.1\n")
    (tmp_path / "ppl-gpu.txt").write_text("Final estimate: PPL = 10.0100 +/- 0.1\n")
    data, text = run(tmp_path)
    assert data["test_backend_ops"]["MUL_MAT"]["itq3_s"] == {"passed": 1, "failed": 0, "not_supported": 1}
    assert data["test_backend_ops"]["MUL_MAT"]["tq1_0"]["failed"] == 1
    assert "| gpu | 10.0100 | +0.100% |" in text


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

"""scripts/check/gpu/gpu_check.sh without a GPU: made-up programs on PATH stand for the driver, the tools and the build.

The programs write down their calls; what they print is what the real ones print when all is well, unless the file
FAULTS says otherwise.
"""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest

from scripts.bench import random_model
from scripts.check.gpu import report

ROOT = Path(__file__).resolve().parents[2]
GPU = ROOT / "scripts" / "check" / "gpu"

#: Cases of an operation and a type that the made-up test-backend-ops passes.
CASES = 30

#: One program that plays all of them, by the name it is called by. FAULTS holds lines "WORD VALUE".
PROGRAM = r"""#!PYTHON -IS
import os, re, sys

HERE = "HERE_FOLDER"
name, args = os.path.basename(sys.argv[0]), sys.argv[1:]
with open(f"{HERE}/calls", "a") as calls:
    calls.write(" ".join([name, *args]) + "\n")
with open(f"{HERE}/FAULTS") as file:
    faults = dict(line.rstrip().split(" ", 1) for line in file)


def after(option):
    return args[args.index(option) + 1] if option in args else ""


def copy(name, target):
    if os.path.exists(f"{HERE}/programs/{name}") and name != faults.get("not-built"):
        with open(f"{HERE}/programs/{name}", "rb") as source, open(target, "wb") as copy:
            copy.write(source.read())
        os.chmod(target, 0o755)


if name == "nvidia-smi":
    print("9.0, Made Up")
elif name == "nvcc":
    if "--version" in args:
        print("Cuda compilation tools, release 13.0, V13.0.1")
    elif "--dryrun" in args:
        print(f"#$ TOP={HERE}/toolkit", file=sys.stderr)
elif name == "cmake":
    target = (after("--build") or after("-B")) + "/bin"
    os.makedirs(target, exist_ok=True)
    if "--build" in args:
        if "slow-build" in faults:
            import time
            time.sleep(float(faults["slow-build"]))
        for program in ("test-backend-ops", "llama-perplexity", "llama-bench", "libggml-base.so", "libggml-cuda.so"):
            copy(program, f"{target}/{program}")
        sys.exit("not-built" in faults)
elif name == "compute-sanitizer":
    tool = after("--tool")
    code = os.spawnv(os.P_WAIT, args[2], args[2:])
    errors = faults.get(tool, "0")
    hazards = tool == "racecheck"
    print("=========", f"RACECHECK SUMMARY: {errors} hazards" if hazards else f"ERROR SUMMARY: {errors} errors")
    sys.exit(code != 0)
elif name == "test-backend-ops":
    if not any(os.path.exists(f"{d}/libcublas.so.13") for d in os.environ["LD_LIBRARY_PATH"].split(":")):
        sys.exit("error: libcublas.so.13: cannot open shared object file")
    columns = "op_name, op_params, supported, passed, time_us, bandwidth_gb_s"
    print("CREATE TABLE IF NOT EXISTS test_backend_ops (\n  op_name TEXT,\n  op_params TEXT,\n  supported INTEGER,\n"
          "  passed INTEGER,\n  time_us REAL,\n  bandwidth_gb_s REAL\n);\n")

    def row(*values):
        print(f"INSERT INTO test_backend_ops ({columns}) VALUES ({', '.join(map(repr, map(str, values)))});")

    if args[0] == "perf":
        if "perf" in faults:
            sys.exit("error: made up")
        with open(after("--test-file")) as file:
            cases = [line.split()[-1] for line in file]
        for case in cases:
            if re.search(after("-p"), f"name={case},type=f32"):
                row("OP", f"name={case},type=f32", 1, 1, 10.0, 3000.0)
    else:
        for op in after("-o").split(","):
            for kind in ("itq3_s", "itq2_s", "itq3_n", "itq2_n", "tq1_0", "tq2_0"):
                for n in range(0 if faults.get("no-cases") in (op, f"{op}:{kind}") else CASES_OF_A_TYPE):
                    row(op, f"type_a={kind},type_b=f32,m=67,n={n},k=768", 1, 1, 0.0, 0.0)
elif name == "llama-perplexity":
    key = " ".join(args[args.index("-t") + 2:])
    if faults.get("no-ppl") == key:
        sys.exit("error: made up")
    if key != "-dev none":
        print("I load_tensors: offloaded 5/5 layers to GPU")
    off = float(faults.get("ppl", 0)) if key.endswith("-ub 24") else 0
    print(f"Final estimate: PPL = {80 * (1 + off):.4f} +/- 5.7")
elif name == "llama-bench":
    with open(after("-m"), "rb") as model:
        if model.read(4) != b"GGUF":
            sys.exit("error: not a model")
    backend = "Vulkan" if "vulkan" in sys.argv[0] else "CUDA"
    entry = f'{{"backends": "{backend}", "gpu_info": "Made Up by {backend}", '
    entry += '"n_prompt": %d, "n_gen": %d, "samples_ts": [100.5, 99.5, 100.0]}'
    print(f"[{entry % (512, 0)}, {entry % (0, 128)}]")
else:  # git, make, patch, xz, tar, or anything that was not thought of
    sys.exit(99)
"""

#: What of libggml-base.so a model is made with.
GGML = r"""
#include <stdint.h>
#include <stddef.h>
#include <string.h>
static const char * names[] = { "f32", "f16", "itq3_s", "itq2_s", "tq2_0", "tq1_0", "q4_K", "iq3_s",
    "q6_K", "q3_K", "q2_K", "iq2_xxs", "itq3_n", "itq2_n" };
const char * ggml_type_name(int type) { return type < 14 ? names[type] : NULL; }
const char * ggml_op_name(int op) { return op == 7 ? "MUL_MAT" : op == 9 ? "CONT" : "OTHER"; }
size_t ggml_row_size(int type, int64_t n) { return type == 0 ? 4 * n : type == 1 ? 2 * n : 100 * n / 256; }
_Bool ggml_quantize_requires_imatrix(int type) { return type < 0; }
size_t ggml_quantize_chunk(int type, const float * x, void * y, int64_t start, int64_t rows, int64_t n, void * m) {
    memset(y, type, rows * ggml_row_size(type, n));
    return x && !start && !m ? rows * ggml_row_size(type, n) : 0;
}
"""

BUILT = ("test-backend-ops", "llama-perplexity", "llama-bench")
FORBIDDEN = ("git", "make", "patch", "xz", "tar")


class Machine:
    """A made-up machine below ``folder``."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.path = folder / "path"
        self.out = folder / "out"
        self.packed = folder / "packed"
        for part in ("path", "programs", "packed", "toolkit"):
            (folder / part).mkdir()
        self.set_faults()
        # a Python without the packages of this one, with the folder where pip would put nvidia-cublas
        site = folder / "site-packages"
        for part in ("lib", "include"):
            (site / "nvidia" / "cu13" / part).mkdir(parents=True)
        for name in ("lib/libcublas.so.13", "lib/libcublasLt.so.13", "include/cublas_v2.h"):
            (site / "nvidia" / "cu13" / name).write_text("made up")
        self.script("path/python3", f'#!{self.find("bash")}\nPYTHONPATH={site} exec {sys.executable} -S "$@"\n')
        for name in ("bash", "env"):
            (self.path / name).symlink_to(self.find(name))
        text = PROGRAM.replace("PYTHON", sys.executable, 1).replace("HERE_FOLDER", str(folder))
        text = text.replace("CASES_OF_A_TYPE", str(CASES))
        for name in ("nvidia-smi", "nvcc", "cmake", "ninja", "glslc", "compute-sanitizer", *FORBIDDEN):
            self.script(f"path/{name}", text)
        for name in BUILT:
            self.script(f"programs/{name}", text)
        (folder / "programs" / "libggml-cuda.so").write_bytes(b"\0libcublas.so.13\0")
        self.pack("itq-quantize.cuh")
        (self.packed / "demo-itq3_s.gguf").write_text("made up")
        (self.packed / "text.txt").write_text("made up")

    @staticmethod
    def find(name: str) -> str:
        return next(str(p) for d in os.get_exec_path() if (p := Path(d) / name).exists())

    def script(self, name: str, text: str) -> None:
        (self.folder / name).write_text(text)
        (self.folder / name).chmod(0o755)

    def pack(self, name: str) -> None:
        with tarfile.open(self.packed / "llama.cpp.tar.xz", "w:xz") as archive:
            info = tarfile.TarInfo(f"llama.cpp/ggml/src/ggml-cuda/{name}")
            info.size = 7
            archive.addfile(info, io.BytesIO(b"made up"))

    def set_faults(self, **faults: str) -> None:
        text = "".join(f"{word.replace('_', '-')} {value}\n" for word, value in faults.items())
        (self.folder / "FAULTS").write_text(text)

    def run(self, *options: str) -> subprocess.CompletedProcess[str]:
        (self.folder / "calls").write_text("")
        common = ["--packed", str(self.packed), "--out", str(self.out), "--work", str(self.folder / "work")]
        return subprocess.run(
            [str(GPU / "gpu_check.sh"), *common, "--shape", "1,256,256,4,2,512", *options],
            env={"PATH": str(self.path)},
            capture_output=True,
            text=True,
            timeout=600,
        )

    def calls(self) -> list[str]:
        """Names of the programs that were called for their work, in order."""
        lines = (self.folder / "calls").read_text().splitlines()
        names = [line.split()[0] for line in lines if "--version" not in line and "--dryrun" not in line]
        return [n for i, n in enumerate(names) if i == 0 or names[i - 1] != n]

    def arguments(self, name: str) -> list[str]:
        return [c for c in (self.folder / "calls").read_text().splitlines() if c.split()[0] == name]

    def stages(self) -> dict[str, str]:
        stages: dict[str, dict[str, str]] = self.report()["stages"]
        return {name: stage["status"] for name, stage in stages.items()}

    def problems(self, stage: str) -> list[str]:
        found: list[str] = self.report()["stages"][stage]["problems"]
        return found

    def report(self) -> Any:
        return json.loads((self.out / "gpu_check.json").read_text())


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


@pytest.fixture(scope="module")
def ggml_base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = shutil.which("cc") or shutil.which("c++")
    if compiler is None:
        pytest.skip("no C compiler")
    folder = tmp_path_factory.mktemp("ggml")
    (folder / "ggml.c").write_text(GGML)
    library = folder / "libggml-base.so"
    subprocess.run([compiler, "-x", "c", "-shared", "-fPIC", str(folder / "ggml.c"), "-o", str(library)], check=True)
    return library


ALL = ("build", "ops", "sanitizer", "perplexity", "perf", "llama_bench", "vulkan")


@pytest.mark.slow
def test_everything_in_order(machine: Machine, ggml_base: Path) -> None:
    shutil.copy(ggml_base, machine.folder / "programs")
    done = machine.run()
    assert machine.stages() == dict.fromkeys(ALL, "done"), done.stdout + done.stderr
    assert done.returncode == 0
    assert list(machine.stages()) == list(ALL)
    calls = machine.calls()
    assert not set(calls) & set(FORBIDDEN)
    inside = ("cmake", "test-backend-ops", "compute-sanitizer", "llama-perplexity", "llama-bench")
    order = [calls.index(name) for name in inside]
    assert order == sorted(order)
    assert {p.name for p in (machine.out / "logs").iterdir()} == {f"{name}.log" for name in ALL}
    text = (machine.out / "gpu_check.md").read_text()
    assert "Made Up" in text and "| MUL_MAT-nopdl | tq2_0 | 30 | 0 | 0 |" in text
    assert f"| racecheck | 0 | {CASES * len(report.SANITIZED) * len(report.TYPES)} |" in text
    assert "| batch24 | 80.0000 | +0.000% |" in text and "| 1 column, ITQ3_S over Q4_K | 1.3x | 1x | no |" in text
    assert "| tq1_0 | 100.0 | 100.0 |" in text and "| itq3_s-noshare | 100.0 | 100.0 |" in text
    assert not list((machine.folder / "work").glob("*.gguf"))
    calls_of = machine.arguments("llama-perplexity")
    assert sum("-sm row" in c for c in calls_of) == 0
    for options in ("-sm layer", "-sm tensor -fa on", *(f"-b 512 -ub {n}" for n in (1, 2, 4, 8, 24, 64))):
        assert any(c.endswith(options) for c in calls_of), options

    # products and a copy, by the numbers that ggml gives types and operations
    (cases,) = (machine.folder / "work").glob("results-*/cases")
    lines = cases.read_text().splitlines()
    assert lines[0].startswith("9 0 ") and lines[0].endswith(" copy.1")
    assert "7 0 57344 16 1 1 0 2 2 8192 57344 1 1 0 0 0 0 0 8192 16 1 1 0 0 0 0 itq3_s.16" in lines

    # cuBLAS of the package, under the names that a linker looks for
    configure, compiled = machine.arguments("cmake")[:2]
    links = machine.folder / "work" / "cublas"
    assert f"-DCMAKE_LIBRARY_PATH={links / 'lib'}" in configure and f"-isystem={links / 'include'}" in configure
    assert (links / "lib" / "libcublas.so").read_text() == "made up"
    assert (links / "lib" / "libcublasLt.so").exists() and (links / "include" / "cublas_v2.h").exists()
    assert "-G Ninja" in configure and "-DGGML_CUDA_FA=ON" in configure and "ARCHITECTURES=90-real" in configure
    assert all(name in compiled for name in BUILT)

    # the Vulkan backend, built beside
    configure, compiled = machine.arguments("cmake")[2:]
    assert "-DGGML_VULKAN=ON" in configure and "CUDA" not in configure and "build-vulkan" in compiled
    assert "## Vulkan: Made Up by Vulkan" in text and "| 1 column, ITQ2_S over IQ2_XXS |  | 1x |  |" in text
    tests = machine.arguments("test-backend-ops")
    assert sum("-b Vulkan0" in call for call in tests) == 2 + len(report.PERF_TYPES)

    # nothing that is done is done again
    again = machine.run()
    assert machine.calls() == ["nvidia-smi"], again.stdout
    assert machine.stages() == dict.fromkeys(ALL, "done")


@pytest.mark.slow
def test_programs_built_elsewhere(machine: Machine) -> None:
    for name in ("cmake", "nvcc", "ninja", "compute-sanitizer"):
        (machine.path / name).unlink()
    done = machine.run("--build", str(machine.folder / "programs"))
    assert machine.stages() == {
        "ops": "done", "sanitizer": "skipped", "perplexity": "done", "perf": "failed", "llama_bench": "failed",
        "vulkan": "skipped",
    }, done.stdout + done.stderr  # fmt: skip
    assert "| sanitizer | skipped; compute-sanitizer not found |" in (machine.out / "gpu_check.md").read_text()
    assert machine.problems("perf") == ["libggml-base.so: not there; look at --build"]


@pytest.mark.slow
def test_vulkan_needs_no_tool_of_nvidias(machine: Machine, ggml_base: Path) -> None:
    shutil.copy(ggml_base, machine.folder / "programs")
    for name in ("nvidia-smi", "nvcc"):
        (machine.path / name).unlink()
    done = machine.run("--only", "vulkan")
    assert done.returncode == 0, done.stdout + done.stderr
    assert machine.stages() == {**dict.fromkeys(ALL, "not run"), "vulkan": "done"}
    machine.set_faults(no_cases="GET_ROWS:itq2_s", perf="1")
    machine.run("--only", "vulkan")
    problems = machine.problems("vulkan")
    assert "GET_ROWS of itq2_s: 0 cases passed, 1 or more expected" in problems and "perf-itq3_s: exit 1" in problems
    assert problems[-1].startswith("not measured: itq3_s itq3_s.1, ")
    (machine.path / "glslc").unlink()
    machine.run("--only", "vulkan")
    assert machine.stages()["vulkan"] == "skipped"


@pytest.mark.slow
def test_a_build_that_fails_keeps_nothing_from_running_that_can(machine: Machine) -> None:
    machine.set_faults(not_built="llama-perplexity")
    done = machine.run()
    assert done.returncode == 1
    stages = machine.stages()
    assert stages["build"] == "failed" and machine.problems("build") == ["compile: exit 1"]
    assert stages["perplexity"] == "failed" and "llama-perplexity: not there" in machine.problems("perplexity")[0]
    assert stages["ops"] == stages["sanitizer"] == "done"


@pytest.mark.slow
def test_a_build_that_runs_out_of_time_goes_on(machine: Machine) -> None:
    machine.set_faults(slow_build="30")
    done = machine.run("--time", "3")
    assert done.returncode == 1
    assert machine.problems("build") == ["compile: stopped; run this again, it goes on"]
    assert machine.stages() == {"build": "failed", **dict.fromkeys(ALL[1:], "not run")}
    machine.set_faults()
    machine.run("--only", "build")
    assert machine.stages()["build"] == "done"


@pytest.mark.slow
def test_a_stage_that_fails_stops_no_other_and_is_run_again(machine: Machine, ggml_base: Path) -> None:
    shutil.copy(ggml_base, machine.folder / "programs")
    prebuilt = ("--build", str(machine.folder / "programs"))
    machine.set_faults(
        no_cases="GET_ROWS:tq1_0", racecheck="3", no_ppl="-ngl 99 -sm tensor -fa on", ppl="0.003", perf="1"
    )
    done = machine.run(*prebuilt)
    assert done.returncode == 1
    assert machine.stages() == {**dict.fromkeys(ALL[1:5], "failed"), "llama_bench": "done", "vulkan": "skipped"}
    assert machine.problems("ops") == ["all: GET_ROWS of tq1_0: 0 cases passed, 1 or more expected"]
    assert machine.problems("sanitizer") == ["racecheck: 3 errors"]
    assert machine.problems("perplexity") == [
        "tensor: exit 1",
        "batch24: 80.2400 is +0.300% from the CPU's, at most 0.2% allowed",
    ]
    assert machine.problems("perf")[0] == "itq3_s: exit 1"
    assert machine.problems("perf")[-1].startswith("not measured: itq3_s itq3_s.1, ")
    # only the programs that did not end well are run again
    machine.set_faults()
    machine.run(*prebuilt)
    assert [c.split(" -t ")[1][2:] for c in machine.arguments("llama-perplexity")] == ["-ngl 99 -sm tensor -fa on"]
    assert machine.stages()["perf"] == "done"
    assert machine.stages()["perplexity"] == "failed"  # batch24 ended
    machine.run(*prebuilt, "--only", "perplexity")
    assert machine.stages()["perplexity"] == "done"


def test_an_operation_without_a_case_fails(machine: Machine) -> None:
    machine.set_faults(no_cases="MUL_MAT_ID")
    machine.run("--build", str(machine.folder / "programs"), "--only", "ops")
    assert machine.problems("ops")[0] == "all: MUL_MAT_ID of itq3_s: 0 cases passed, 6 or more expected"


def test_no_stage_is_begun_when_the_time_is_over(machine: Machine) -> None:
    assert machine.run("--time", "0").returncode == 1
    assert machine.stages() == dict.fromkeys(ALL, "not run")
    assert not set(machine.calls()) & {"cmake"}


@pytest.mark.slow
@pytest.mark.parametrize("place", ["carried", "named", "missing"])
def test_cublas_is_found(machine: Machine, place: str) -> None:
    package = machine.folder / "site-packages" / "nvidia" / "cu13"
    target = machine.packed / "cublas" if place == "carried" else machine.folder / "elsewhere"
    package.rename(target)
    machine.run("--only", "build", *(["--cublas", str(target)] if place == "named" else []))
    if place == "missing":
        assert "cuBLAS 13: not found" in machine.problems("build")[0]
    else:
        assert machine.stages()["build"] == "done"


def test_a_source_without_the_patches_is_refused(machine: Machine) -> None:
    machine.pack("ggml-cuda.cu")
    machine.run("--only", "build")
    assert "not the patched source" in machine.problems("build")[0]


def test_a_path_out_of_the_folder_is_refused(machine: Machine) -> None:
    machine.pack("../../../../../../outside")
    machine.run("--only", "build")
    assert "cannot be unpacked" in machine.problems("build")[0] and not (machine.folder / "outside").exists()


@pytest.mark.slow
def test_a_changed_source_compiles_only_what_changed(machine: Machine) -> None:
    machine.run("--only", "build")
    file = machine.folder / "work/llama.cpp/ggml/src/ggml-cuda/itq-quantize.cuh"
    os.utime(file, (1, 1))
    machine.run("--only", "build")
    assert file.stat().st_mtime == 1
    file.write_text("other")
    (file.parent / "old.cu").write_text("")
    machine.run("--only", "build")
    assert file.read_text() == "made up" and file.stat().st_mtime > 1
    assert not (file.parent / "old.cu").exists()


def test_a_random_model_is_a_gguf_file(ggml_base: Path, tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf")
    ggml = random_model.Ggml(ggml_base)
    shape = random_model.Shape(2, 256, 512, 4, 2, 48)
    # the made-up library numbers Q6_K as it likes; F16 everywhere can be read
    random_model.write_model(tmp_path / "f16.gguf", ggml, shape, "f16", "f16")
    assert (tmp_path / "f16.gguf").read_bytes()[:9] == b"GGUF\3\0\0\0" + bytes([3 + 9 * 2])
    assert (tmp_path / "f16.gguf").stat().st_size > random_model.size_of(ggml, shape, "f16", "f16")
    reader = gguf.GGUFReader(tmp_path / "f16.gguf")
    shapes = {t.name: [int(n) for n in t.shape] for t in reader.tensors}
    assert shapes["blk.1.ffn_down.weight"] == [512, 256] and shapes["blk.0.attn_v.weight"] == [256, 128]
    assert shapes["token_embd.weight"] == [256, 48] and shapes["output_norm.weight"] == [256]
    assert reader.fields["tokenizer.ggml.model"].contents() == "no_vocab"
    data = {t.name: t.data for t in reader.tensors}
    assert set(data["blk.0.attn_q.weight"].view("uint8").ravel()) == {1}
    assert set(data["blk.1.ffn_norm.weight"].ravel()) == {1.0}
    with pytest.raises(ValueError, match="ggml has no such type"):
        random_model.write_model(tmp_path / "x.gguf", ggml, shape, "q9_9")

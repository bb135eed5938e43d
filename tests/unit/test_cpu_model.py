"""The model of the kernels on other processors: what is given to llvm-mca, and what is made of its answers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from scripts.bench import cpu_model, kernel_trace, mca
from scripts.bench.kernel_trace import ModelError

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("line", "narrow"),
    [
        ("vpaddd %zmm0, %zmm1, %zmm2", "vpaddd %ymm0, %ymm1, %ymm2"),
        ("vpdpbusd 0x10(%rax){1to16}, %zmm1, %zmm2", "vpdpbusd 0x10(%rax){1to8}, %ymm1, %ymm2"),
        ("vcvtph2ps %ymm1, %zmm2", "vcvtph2ps %xmm1, %ymm2"),
        ("vextracti64x4 $0x1, %zmm17, %ymm3", "vextracti32x4 $1, %ymm17, %xmm3"),
        ("vinserti64x4 $0x1, %ymm3, %zmm4, %zmm5", "vinserti32x4 $0x1, %xmm3, %ymm4, %ymm5"),
        ("vbroadcasti64x4 (%rdi), %zmm5", "vmovdqu64 (%rdi), %ymm5"),
        ("vbroadcasti32x4 (%rdi), %zmm5", "vbroadcasti32x4 (%rdi), %ymm5"),
        ("vpaddd %ymm0, %ymm1, %ymm2", "vpaddd %ymm0, %ymm1, %ymm2"),
        ("addq $0x40, %rax", "addq $0x40, %rax"),
    ],
)
def test_512_bits_once(line: str, narrow: str) -> None:
    assert mca.once(line) == narrow


def test_assembly_of_arm() -> None:
    trace = ["adrp x0, 0x49f000", "b.le 0x4047b0", "tbnz w2, #0x6, 0x422940", "bl 0x4012", "add x1, x1, #0x20", "ret"]
    assert mca.assembly(trace, "arm") == ["adrp x0, 0", "b.le 8", "tbnz w2, #0x6, 8", "add x1, x1, #0x20"]


def test_assembly_of_x86() -> None:
    trace = ["endbr64", "callq 0x401000", "nopw %cs:(%rax,%rax)", "jne 0x401234", "movl $0x1, %eax", "retq"]
    assert mca.assembly(trace, "x86") == ["nop", "jne 0x401234", "movl $0x1, %eax"]


@pytest.mark.parametrize(
    ("table", "line", "corrected"),
    [
        ("znver4", "vpshufb %ymm1, %ymm2, %ymm3", "vpunpcklbw %ymm1, %ymm2, %ymm3"),
        ("znver4", "vpshufb %zmm1, %zmm2, %zmm3", "vpshufb %zmm1, %zmm2, %zmm3"),
        ("znver4", "vpdpbusd %zmm1, %zmm2, %zmm3", "vfmadd231ps %zmm1, %zmm2, %zmm3"),
        ("znver4", "vpdpbusd (%rax){1to16}, %zmm2, %zmm3", "vpdpbusd (%rax){1to16}, %zmm2, %zmm3"),
        ("znver4", "{vex} vpdpbusd %ymm1, %ymm2, %ymm3", "{vex} vpdpbusd %ymm1, %ymm2, %ymm3"),
        ("znver5", "vpermb %ymm1, %ymm2, %ymm3", "vpunpcklbw %ymm1, %ymm2, %ymm3"),
        ("znver5", "vpinsrd $0x1, (%rax,%r13,4), %xmm1, %xmm2", "vpunpckldq (%rax,%r13,4), %xmm1, %xmm2"),
        ("znver5", "vpinsrd $0x1, %eax, %xmm1, %xmm2", "vpinsrd $0x1, %eax, %xmm1, %xmm2"),
        ("znver5", "vpbroadcastd 0x28(%rdx), %ymm5", "vmovdqu64 0x28(%rdx), %ymm5"),
        ("znver5", "vpbroadcastd %xmm1, %ymm5", "vpbroadcastd %xmm1, %ymm5"),
        ("sapphirerapids", "vpdpbusd (%rax){1to16}, %zmm2, %zmm3", "vpternlogd $0x96, (%rax){1to16}, %zmm2, %zmm3"),
        ("skylake", "vpshufb %ymm1, %ymm2, %ymm3", "vpshufb %ymm1, %ymm2, %ymm3"),
    ],
)
def test_corrections(table: str, line: str, corrected: str) -> None:
    assert mca.correct([line], table) == [corrected]


def answer(instructions: list[str], usage: list[tuple[int, int, float]], cycles: int = 10) -> dict[str, Any]:
    """llvm-mca's JSON with five resources, of which two are one group."""
    entries = [{"InstructionIndex": i, "ResourceIndex": r, "ResourceUsage": u} for i, r, u in usage]
    return {
        "CodeRegions": [
            {
                "Instructions": instructions,
                "ResourcePressureView": {"ResourcePressureInfo": entries},
                "SummaryView": {
                    "TotalCycles": cycles,
                    "Instructions": len(instructions),
                    "TotaluOps": 2 * len(instructions),
                    "DispatchWidth": 4,
                },
            }
        ],
        "TargetInfo": {"Resources": ["ICXPort0", "ICXPort1", "ICXPort5", "Zn4FP45.\x00", "Zn4FP45.\x01"]},
    }


def test_ports_are_added_up_and_a_group_is_one() -> None:
    lines = ["vpaddd %ymm0, %ymm1, %ymm2", "vmovdqa (%rax), %ymm3"]
    # the sum of all, behind the last instruction, is not counted again
    usage = [(0, 0, 1.0), (1, 3, 1.0), (1, 4, 2.0), (2, 0, 1.0)]
    run = mca.parse(answer(lines, usage), lines, no_port_1=False)
    assert run.ports == {"p0": 1.0, "FP45": 1.5}
    assert run.dispatch == 1.0
    assert run.left_out == {}


def test_port_1_takes_no_512_bits() -> None:
    lines = ["vpaddd %zmm0, %zmm1, %zmm2", "vpaddd %ymm0, %ymm1, %ymm2", "addq %rax, %rbx"]
    run = mca.parse(answer(lines, [(0, 1, 1.0), (1, 1, 1.0), (2, 1, 1.0)]), lines, no_port_1=True)
    assert run.ports == {"p0": 0.5, "p5": 0.5, "p1": 2.0}


def test_instructions_without_an_entry_are_told() -> None:
    lines = ["vpaddd %ymm0, %ymm1, %ymm2", "frob %ymm3", "frob %ymm3"]
    run = mca.parse(answer(lines[:1], []), lines, no_port_1=False)
    assert run.left_out == {"frob": 2}


def test_difference_of_two_lengths() -> None:
    few = mca.Run(100, 50, 20.0, {"p0": 30.0, "p5": 10.0}, {"frob": 1})
    many = mca.Run(180, 90, 30.0, {"p0": 70.0, "p5": 49.0}, {"frob": 11})
    cost = mca.difference(few, many, 4)
    assert cost == mca.Cost(20.0, 10.0, ("p0", "p5"), 12.5, 0.2)
    # simulated faster than the corrected ports allow
    assert mca.difference(few, mca.Run(120, 90, 30.0, {"p0": 70.0}, {}), 4).cycles == 10.0


def test_newest_llvm_first() -> None:
    names = ["llvm-mca", "llvm-mca-14", "llvm-mca-19", "llvm-mca-9", "llvm-objdump-19"]
    assert list(kernel_trace.versions(names)) == ["-19", "-14", "-9", ""]


def test_no_llvm() -> None:
    with pytest.raises(ModelError, match="apt-get install llvm-19"):
        kernel_trace.find_tools(["llvm-mca-19", "llvm-nm-19"])


def test_a_program_that_is_missing() -> None:
    with pytest.raises(ModelError, match=r"a test: .*no-such-program not found"):
        kernel_trace.run(["./no-such-program"], "a test")


def test_flags_that_the_compiler_does_not_know(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = tmp_path / "gcc"
    compiler.write_text('#!/bin/sh\ncase "$*" in *new*) exit 1;; esac\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    old, new = ("-march=old",), ("-march=new",)
    assert kernel_trace.known_flags(kernel_trace.Target("a", "x86", (new, old))) == old
    with pytest.raises(ModelError, match="gcc knows none of -march=new"):
        kernel_trace.known_flags(kernel_trace.Target("a", "x86", (new,)))


def test_a_processor_that_is_not_in_the_model(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["cpu_model.py", "i386"])
    assert cpu_model.main() == 1
    assert capsys.readouterr().err.startswith("error: i386 not in the model; it has haswell, ")


def test_a_failure_is_a_line_of_the_table() -> None:
    result = {
        "processor": "this one",
        "llvm": "19",
        "compiler": "GCC 12",
        "processors": {
            "good": {
                "table": "znver3",
                "note": "",
                "errors": [],
                "kernels": {
                    key: {"cycles": cycles, "bound": 2.0, "binding": ["p0"], "instructions": 3.0, "left_out": 0.0}
                    for key, cycles in (("ITQ3_S, 1", 2.0), ("Q4_K, 1", 3.0))
                },
            },
            "bad": {"table": "znver3", "note": "", "errors": ["an instruction that is not there"], "kernels": {}},
        },
        "check": [{"build": "native", "kernel": "ITQ3_S, 1", "bound": 2.0, "model": 3.0, "measured": 2.0}],
    }
    text = cpu_model.table(result)
    assert "- bad: an instruction that is not there\n" in text
    assert "1.50 (further apart than 25%)" in text
    row = next(line for line in text.splitlines() if line.startswith("| good"))
    known = {"ITQ3_S, 1": "2.0", "Q4_K, 1": "3.0"}
    expected = [*known.values(), "1.50"]
    assert [cell.strip() for cell in row.split("|")[2:-1]] == expected


def test_the_page_has_the_committed_result() -> None:
    result = json.loads((ROOT / "docs" / "results" / "cpu-model.json").read_text())
    text = cpu_model.table(result)
    assert text == (ROOT / "docs" / "results" / "cpu-model.md").read_text()
    page = (ROOT / "docs" / "kernels.md").read_text()
    assert page.split("<!-- begin cpu-model -->")[1].split("<!-- end cpu-model -->")[0].strip() == text.strip()
    assert set(result["processors"]) == set(cpu_model.PROCESSORS)

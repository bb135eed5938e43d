"""The instructions of a kernel, recorded, and what llvm-mca says of them."""

from __future__ import annotations

import platform

import pytest

from scripts.bench import cpu_model, kernel_trace
from scripts.bench.kernel_trace import ModelError, Program, Target, Tools


@pytest.fixture(scope="module")
def tools() -> Tools:
    try:
        return kernel_trace.find_tools(cpu_model.programs_on_path())
    except ModelError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def program() -> Program:
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        pytest.skip("single-stepping needs Linux on x86-64")
    return kernel_trace.compile_program(Target("znver4-avx2", "x86", (cpu_model.AVX2,)))


def lengths(program: Program, tools: Tools, kernel: str) -> list[int]:
    """Instructions of products of 2, 4 and 6 blocks."""
    try:
        return [len(kernel_trace.trace(program, tools, kernel, 1, blocks)) for blocks in (2, 4, 6)]
    except ModelError as error:
        if "does not have" in str(error):
            pytest.skip(str(error))
        raise


@pytest.mark.parametrize("kernel", ["itq3_s", "q4_K", "q3_K", "iq3_s"])
def test_blocks_cost_the_same(program: Program, tools: Tools, kernel: str) -> None:
    two, four, six = lengths(program, tools, kernel)
    assert six - four == four - two > 0


def test_the_model_of_a_kernel(program: Program, tools: Tools) -> None:
    lengths(program, tools, "q3_K")
    kernel = next(kernel for kernel in cpu_model.KERNELS if kernel.name == "q3_K")
    cost = cpu_model.cost(cpu_model.PROCESSORS["haswell"], program, tools, kernel)
    # four instructions a cycle at most, as Haswell dispatches them
    assert cost.instructions / 4 <= cost.bound + 1e-6
    assert cost.bound <= cost.cycles
    assert cost.left_out == 0

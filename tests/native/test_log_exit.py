"""llama.cpp's log at the end of a process: nothing is lost, and no way to end hangs."""

from __future__ import annotations

import os
import platform
import subprocess
import time
from pathlib import Path

import pytest

import llama
from gguf_itq3s import upstream

LINES = [f"{i:04d}" for i in range(400)]

pytestmark = pytest.mark.skipif(platform.system() != "Linux", reason="signals a thread by its number, as Linux does")


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """tests/c/log-exit.cpp, with the library that the tools were built with."""
    out = tmp_path_factory.mktemp("log-exit") / "log-exit"
    source = upstream.fetch_source()
    command: list[str | Path] = [
        os.environ.get("CXX", "c++"), "-std=c++17", "-O1", "-Wall", "-Wextra", "-Werror", f"-I{source / 'common'}",
        f"-I{source / 'ggml' / 'include'}", llama.ROOT / "tests" / "c" / "log-exit.cpp", "-o", out, "-pthread",
        f"-L{llama.BIN}", "-lllama-common", f"-Wl,-rpath,{llama.BIN}", "-Wl,--allow-shlib-undefined",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return out


def run(program: Path, *arguments: str | Path, code: int = 0, wait: float = 0) -> list[str]:
    """The lines, without their filler, of a process that ends by itself; nobody reads them for ``wait`` seconds."""
    process = subprocess.Popen([program, *arguments], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    time.sleep(wait)
    try:
        printed, _ = process.communicate(timeout=600)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        pytest.fail(f"{arguments[0]}: the process does not end")
    assert process.returncode == code, printed[-500:]
    return [line.lstrip(". ") for line in printed.splitlines()]


def test_all_lines_are_printed_before_the_end(program: Path, tmp_path: Path) -> None:
    """Most lines are still queued when main returns: the pipe is full and is read later."""
    assert run(program, "return", wait=0.3) == LINES
    assert run(program, "exit in a thread", code=3, wait=0.3) == LINES
    assert run(program, "file", tmp_path / "log.txt", wait=0.3) == LINES
    assert [line.lstrip(". ") for line in (tmp_path / "log.txt").read_text().splitlines()] == LINES


def test_a_destructor_may_log(program: Path) -> None:
    assert run(program, "destructor", wait=0.3) == [*LINES, "from a destructor"]


def test_pause_and_resume(program: Path) -> None:
    assert run(program, "pause and resume") == ["before", "after"]
    assert run(program, "paused") == ["before"]
    assert run(program, "freed") == ["line"]


def test_pausing_with_a_full_queue_ends(program: Path) -> None:
    assert run(program, "full queue") == [str(i) for i in range(511)] * 300


@pytest.mark.parametrize("way", ["signal handler", "signal handler in the log's thread"])
def test_exit_in_a_signal_handler_does_not_hang(program: Path, way: str) -> None:
    run(program, way, code=3)


def test_the_child_of_a_fork_ends(program: Path) -> None:
    assert [line for line in run(program, "child") if line != "child"] == ["parent", "child ended with 3"]


def test_abort_ends(program: Path) -> None:
    run(program, "abort", code=-6)

"""The package installed from its wheel, away from the checkout: it builds llama.cpp and writes the checkout's bytes."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

import llama
from gguf_itq3s import upstream
from packing import build_wheel

# An environment of its own, and a build below a cache.
pytestmark = pytest.mark.long


class Installed:
    """A fresh virtual environment with the wheel in it; dependencies come from the tests' own."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.cache = folder / "elsewhere", folder / "cache"
        self.folder.mkdir()
        self.cache.mkdir()
        environment = folder / "venv"
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", environment], check=True)
        self.bin = environment / "bin"
        pip: list[str | Path] = [
            sys.executable,
            "-m",
            "pip",
            "--python",
            self.bin / "python",
            "install",
            "--quiet",
            "--no-index",
        ]
        subprocess.run([*pip, "--no-deps", build_wheel(folder)], check=True)
        # A folder that is named in a .pth file is searched, but the editable install that it holds is not followed.
        (site,) = environment.glob("lib/python*/site-packages")
        (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
        (self.cache / upstream.SOURCE).symlink_to(upstream.cache_dir() / upstream.SOURCE)

    def run(self, command: str, *args: str | Path) -> subprocess.CompletedProcess[str]:
        leave = ("GGUF_ITQ3S_OUT", "GGUF_ITQ3S_LIBRARY", "LLAMA_CPP_DIR", "PYTHONPATH", "GGML_OPTIONS", "ITQ3S_TARGETS")
        env = {name: value for name, value in os.environ.items() if name not in leave}
        env["GGUF_ITQ3S_CACHE"] = str(self.cache)
        return subprocess.run(
            [str(self.bin / command), *map(str, args)], cwd=self.folder, env=env, capture_output=True, text=True
        )


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    return Installed(tmp_path_factory.mktemp("installed"))


def test_an_installed_package_builds_and_writes_the_same_file(installed: Installed) -> None:
    where = installed.run("python", "-c", "import gguf_itq3s.upstream as u; print(u.__file__, u.checkout())")
    assert where.stdout.split() == [str(next(installed.bin.parent.rglob("gguf_itq3s/upstream/__init__.py"))), "None"]

    without = installed.run("convert-hf-to-itq3s", llama.MODEL, "without.gguf", "--dry-run")
    notes = [line for line in (without.stdout + without.stderr).splitlines() if "built library" in line]
    assert without.returncode == 0 and len(notes) == 1
    assert re.search(r"Q6_K -> Q8_0.*; gguf-itq3s build adds it$", notes[0]), notes
    assert "make build" not in without.stdout + without.stderr

    # From the cache, which the checkout's build filled; nothing is compiled.
    text = (llama.BIN / "build.txt").read_text()
    (entry,) = [p.parent for p in (upstream.cache_dir() / "build").glob("llama-*/build.txt") if p.read_text() == text]
    shutil.copytree(entry, installed.cache / "build" / entry.name, symlinks=True)
    done = installed.run("gguf-itq3s", "build")
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"is up to date: {installed.cache / 'build' / entry.name}" in done.stdout
    tools = Path(re.findall(r"(?m)^llama.cpp with .* is in (.*)$", done.stdout)[0])
    assert tools.is_relative_to(installed.cache / "tools")

    done = installed.run("convert-hf-to-itq3s", llama.MODEL, "model.gguf")
    assert done.returncode == 0, done.stderr
    assert "built library" not in done.stdout + done.stderr
    checkout = subprocess.run(
        [sys.executable, "-m", "gguf_itq3s.cli", "convert", llama.MODEL, installed.folder / "checkout.gguf"],
        cwd=llama.ROOT, capture_output=True, text=True,
    )  # fmt: skip
    assert checkout.returncode == 0, checkout.stderr
    model = installed.folder / "model.gguf"
    assert model.read_bytes() == (installed.folder / "checkout.gguf").read_bytes()
    said = llama.run_program(tools / "llama-completion", "-m", model, "-p", "The sea", "-n", "8", "-no-cnv", "-t", "1")
    assert said.stdout.strip().startswith("The sea") and len(said.stdout.strip()) > len("The sea") + 8


def test_a_build_that_cannot_be_made_says_so(installed: Installed) -> None:
    done = installed.run("gguf-itq3s", "build", "--targets", "rpc-server")
    assert done.returncode == 1
    lines = done.stderr.splitlines()
    assert "error: this llama.cpp, with these options, has no program rpc-server" in lines
    assert lines[-1].startswith("error: ") and lines[-1].endswith("llama.cpp was not built; the reason stands above")
    assert "Traceback" not in done.stderr

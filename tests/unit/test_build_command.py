"""``gguf-itq3s build``: what it asks of CMake, and what it says where it cannot."""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path

import pytest

from gguf_itq3s import cli, upstream
from gguf_itq3s.codec import native
from gguf_itq3s.upstream import build

ROOT = Path(__file__).resolve().parents[2]
SETTINGS = ("GGML_OPTIONS", "ITQ3S_TARGETS", "ITQ3S_SOURCE", "GGUF_ITQ3S_OUT", "CMAKE_BUILD_PARALLEL_LEVEL")


@pytest.fixture
def cmake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A CMake that writes down its calls and fails where the file ``fail`` is; the file with the calls."""
    calls, folder = tmp_path / "calls", tmp_path / "programs"
    folder.mkdir()
    program = folder / "cmake"
    program.write_text(
        f"#!{sys.executable}\nimport os, sys\n"
        f"with open({str(calls)!r}, 'a') as file:\n"
        f"    values = (f'{{name}}={{os.environ.get(name)}}' for name in {SETTINGS!r})\n"
        "    print(*sys.argv[1:], *values, sep='|', file=file)\n"
        f"sys.exit(os.path.exists({str(tmp_path / 'fail')!r}))\n"
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=os.pathsep)
    for name in ("GGML_OPTIONS", "ITQ3S_TARGETS", "GGUF_ITQ3S_OUT", "LLAMA_CPP_DIR"):
        monkeypatch.delenv(name, raising=False)
    return calls


def test_options_reach_cmake(cmake: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda path: path)
    monkeypatch.setenv("GGML_OPTIONS", "-DGGML_LTO=ON")
    command = ["build", "--rpc", "--cuda", "--targets", "llama-tts,llama-gguf", "-DA=1", "-DB=2 3", "--jobs", "3"]
    assert cli.main(command) == 0
    options = "GGML_OPTIONS=-DGGML_LTO=ON -DGGML_CUDA=ON -DGGML_RPC=ON -DA=1 '-DB=2 3'"
    out = ROOT / "build"
    settings = f"{options}|ITQ3S_TARGETS=llama-tts llama-gguf|ITQ3S_SOURCE=None|GGUF_ITQ3S_OUT={out}|"
    settings += "CMAKE_BUILD_PARALLEL_LEVEL=3"
    assert cmake.read_text().splitlines() == [
        f"-S|{ROOT / 'ggml-patch'}|-B|{out / 'cmake'}|-DCMAKE_BUILD_TYPE=Release|{settings}",
        f"--build|{out / 'cmake'}|{settings}",
    ]
    assert capsys.readouterr().out == f"llama.cpp with the trellis types is in {out / 'bin'}\n"


def test_an_installed_package_builds_below_the_cache(
    cmake: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (upstream, build):
        monkeypatch.setattr(module, "checkout", lambda: None)
        monkeypatch.setattr(module, "patch_folder", lambda: tmp_path / "patch")
        monkeypatch.setattr(module, "fetch_source", lambda whole: tmp_path / "source" if whole else None)
        monkeypatch.setattr(module, "cache_dir", lambda: tmp_path / "cache")
    monkeypatch.setattr(ctypes, "CDLL", lambda path: path)
    (tmp_path / "patch").mkdir()
    folders = []
    for text in ("one", "two"):  # another patch, another folder
        (tmp_path / "patch" / "CMakeLists.txt").write_text(text)
        upstream._patch_hash.cache_clear()
        folders.append(upstream.build_folder())
        assert native.tools_folder() == folders[-1] / "bin"
    assert folders[0] != folders[1] and all(folder.parent == tmp_path / "cache" / "tools" for folder in folders)
    assert cli.main(["build"]) == 0
    upstream._patch_hash.cache_clear()
    call = cmake.read_text().splitlines()[0]
    assert f"|ITQ3S_SOURCE={tmp_path / 'source'}|GGUF_ITQ3S_OUT={folders[1]}|" in call
    assert upstream.build_command() == "gguf-itq3s build"


def test_a_build_that_fails_is_one_line(cmake: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "fail").touch()
    assert cli.main(["build"]) == 1
    message = f"error: {ROOT / 'build'}: llama.cpp was not built; the reason stands above\n"
    assert capsys.readouterr().err == message
    assert len(cmake.read_text().splitlines()) == 1, "built after a failed configuration"


def test_without_cmake(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert cli.main(["build"]) == 1
    assert capsys.readouterr().err.startswith("error: cmake: is not installed; install CMake 3.21 or newer")


def test_an_install_without_the_patch(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(upstream, "checkout", lambda: None)
    monkeypatch.delenv(native.LIBRARY_VARIABLE)
    upstream._patch_hash.cache_clear()
    assert native.library_path() is None  # numpy does
    assert cli.main(["build"]) == 1
    assert capsys.readouterr().err.endswith("ggml_patch: not there; install gguf-itq3s anew\n")

"""The build of llama.cpp: the cache, the patches, the user's own checkout. Nothing is compiled here."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

import llama
from gguf_itq3s import upstream


def clone(folder: Path) -> Path:
    """What a build needs of this repository, in a folder of its own."""
    shutil.copytree(llama.ROOT / "ggml-patch", folder / "ggml-patch")
    (folder / "scripts").mkdir()
    (folder / "gguf_itq3s" / "upstream").mkdir(parents=True)
    for file in ("scripts/fetch_llama_cpp.py", "gguf_itq3s/upstream/__init__.py"):
        shutil.copy(llama.ROOT / file, folder / file)
    return folder


def build(folder: Path, **environment: str | Path) -> subprocess.CompletedProcess[str]:
    """Configure and build as the README says; the outer project finds the compilers, then runs ours."""
    env = {**os.environ, **{name: str(value) for name, value in environment.items()}}
    python = llama.ROOT / ".venv" / "bin" / "python"
    configure = ["cmake", "-S", "ggml-patch", "-B", "build/cmake"]
    if python.exists():
        configure.append(f"-DPython3_EXECUTABLE={python}")
    for command in (configure, ["cmake", "--build", "build/cmake"]):
        done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=1800)
        if done.returncode:
            break
    return done


def test_another_clone_takes_the_build_from_the_cache(tmp_path: Path) -> None:
    assert llama.BIN.exists(), "make build first"
    folder = clone(tmp_path / "clone")
    done = build(folder)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "is up to date" in done.stdout, "the content of ggml-patch has changed since make build"
    assert not (folder / "build" / "tree" / "llama.cpp").exists()
    for tool in ("llama-cli", "llama-quantize", "llama-perplexity"):
        copy, own = folder / "build" / "bin" / tool, llama.BIN / tool
        assert copy.read_bytes() == own.read_bytes()
        assert copy.stat().st_nlink == 1 and os.access(copy, os.X_OK), "the cache can be changed from a clone"
    version = subprocess.run([folder / "build" / "bin" / "llama-cli", "--version"], capture_output=True, text=True)
    assert version.returncode == 0 and upstream.SOURCE in version.stdout + version.stderr


def test_a_build_in_the_cache_counts_only_with_its_content(tmp_path: Path) -> None:
    folder, cache = clone(tmp_path / "clone"), tmp_path / "cache"
    made = build(folder)
    entry = Path(re.findall(r"is up to date: (.*)", made.stdout)[0])
    shutil.copytree(entry, cache / "build" / entry.name, symlinks=True)
    (cache / upstream.SOURCE).symlink_to(upstream.cache_dir() / upstream.SOURCE)
    assert f"is up to date: {cache}" in build(folder, GGUF_ITQ3S_CACHE=cache).stdout
    tool = cache / "build" / entry.name / "bin" / "llama-cli"
    tool.write_bytes(tool.read_bytes()[:-1] + b"x")
    # Built again, as far as it gets without a generator: the damaged one is not published.
    environment = {**os.environ, "GGUF_ITQ3S_CACHE": str(cache), "CMAKE_GENERATOR": "none"}
    again = subprocess.run(
        ["cmake", "--build", "build/cmake"], cwd=folder, env=environment, capture_output=True, text=True
    )
    assert again.returncode and "is not what was built there; building it again" in again.stderr
    assert "could not be configured" in again.stderr
    assert (folder / "build" / "bin" / "llama-cli").read_bytes() == (entry / "bin" / "llama-cli").read_bytes()


@pytest.mark.parametrize(
    ("programs", "said"),
    [
        ("llama-nonsense", "this llama.cpp, with these options, has no program llama-nonsense"),
        ("../llama-cli", "ITQ3S_TARGETS: ../llama-cli is no name of a target"),
    ],
)
def test_programs_that_cannot_be_built(tmp_path: Path, programs: str, said: str) -> None:
    folder = clone(tmp_path / "clone")
    done = build(folder, ITQ3S_TARGETS=programs)
    assert done.returncode != 0 and f"error: {said}" in done.stderr


def test_a_patch_that_does_not_apply_stops_the_build(tmp_path: Path) -> None:
    folder = clone(tmp_path / "clone")
    (folder / "ggml-patch" / "patches" / "0099-wrong.patch").write_text(
        "--- a/ggml/src/ggml.c\n+++ b/ggml/src/ggml.c\n@@ -1,3 +1,3 @@\n one\n-two\n+2\n three\n"
    )
    done = build(folder)
    assert done.returncode != 0
    assert "0099-wrong.patch does not apply" in done.stderr and "ggml/src/ggml.c" in done.stderr
    assert not (folder / "build" / "bin").exists()


def test_every_patch_has_a_number_of_its_own() -> None:
    numbers = [path.name.split("-")[0] for path in sorted((llama.ROOT / "ggml-patch" / "patches").rglob("*.patch"))]
    assert numbers and len(set(numbers)) == len(numbers) and all(len(n) == 4 and n.isdigit() for n in numbers)


def test_required_patches_only_add_lines() -> None:
    """What they would replace is upstream's, and changes with its releases."""
    patches = sorted((llama.ROOT / "ggml-patch" / "patches").glob("*.patch"))
    assert len(patches) >= 6
    for patch in patches:
        removed = [line for line in patch.read_text().splitlines() if re.match(r"-(?!-- a/)", line)]
        assert removed == [], patch.name


def test_our_files_never_overwrite_upstreams(tmp_path: Path) -> None:
    folder = clone(tmp_path / "clone")
    (folder / "ggml-patch" / "src" / "format" / "ggml.c").write_text("int x;\n")
    done = build(folder)
    assert done.returncode != 0
    assert "would overwrite llama.cpp's own ggml/src/ggml.c" in done.stderr


def test_a_checkout_of_the_users_own_is_not_changed(tmp_path: Path) -> None:
    source = tmp_path / "llama.cpp"
    (source / "ggml" / "src").mkdir(parents=True)
    (source / "ggml" / "src" / "ggml.c").write_text("int other;\n")
    before = {path: path.read_bytes() for path in source.rglob("*") if path.is_file()}
    done = build(clone(tmp_path / "clone"), LLAMA_CPP_DIR=source)
    assert done.returncode != 0 and "0001-ggml-type.patch does not apply" in done.stderr
    assert before == {path: path.read_bytes() for path in source.rglob("*") if path.is_file()}


def test_llama_cpp_dir_must_be_llama_cpp(tmp_path: Path) -> None:
    done = build(clone(tmp_path / "clone"), LLAMA_CPP_DIR=tmp_path)
    assert done.returncode != 0 and f"{tmp_path} is not a checkout of llama.cpp" in done.stderr


def test_a_change_in_the_users_checkout_reaches_the_patched_source(tmp_path: Path) -> None:
    source = tmp_path / "llama.cpp" / "ggml" / "src"
    source.mkdir(parents=True)
    folder = clone(tmp_path / "clone")
    shutil.rmtree(folder / "ggml-patch" / "patches")  # they would not apply to so small a source
    tree = tmp_path / "tree"
    command: list[str | Path] = [
        "cmake",
        f"-DTREE={tree}",
        "-P",
        folder / "ggml-patch" / "cmake" / "patched-source.cmake",
    ]
    for text in ("int first;\n", "int second;\n"):
        (source / "ggml.c").write_text(text)
        env = {**os.environ, "LLAMA_CPP_DIR": str(tmp_path / "llama.cpp")}
        done = subprocess.run(command, env=env, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert f"upstream {tmp_path / 'llama.cpp'}" in done.stdout
        assert (tree / "ggml" / "src" / "ggml.c").read_text() == text
        assert (tree / "ggml" / "src" / "ggml-itq.h").exists()


@pytest.fixture
def prepare(tmp_path: Path) -> tuple[Path, Path]:
    """A clone and a script that makes its patched source tree."""
    folder = clone(tmp_path / "clone")
    script = folder / "prepare.cmake"
    script.write_text(
        "cmake_minimum_required(VERSION 3.21)\n"
        f'include("{folder}/ggml-patch/cmake/settings.cmake")\n'
        f'include("{folder}/ggml-patch/cmake/source.cmake")\n'
        f'itq3s_prepare_source("{upstream.fetch_source()}" id "{folder}/tree")\n'
    )
    return folder, script


def stamps(folder: Path) -> dict[str, int]:
    return {
        str(path.relative_to(folder)): path.stat().st_mtime_ns
        for path in folder.rglob("*")
        if path.is_file() and not path.name.startswith(".itq3s")
    }


def test_an_optional_patch_that_does_not_apply_is_left_out(prepare: tuple[Path, Path]) -> None:
    folder, script = prepare
    patches = folder / "ggml-patch" / "patches" / "optional"

    def prepared() -> tuple[dict[str, bytes], list[str]]:
        done = subprocess.run(["cmake", "-P", script], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        files = (path for path in (folder / "tree").rglob("*") if path.is_file() and not path.name.startswith(".itq3s"))
        return {str(path.relative_to(folder)): path.read_bytes() for path in files}, done.stderr.splitlines()

    without, printed = prepared()
    assert printed == []
    # one file as it is, one changed upstream, one that upstream no longer has: none of them is touched
    (patches / "0099-other.patch").write_text(
        "Without it, nothing is missing.\n\n"
        "--- a/ggml/src/ggml-quants.h\n+++ b/ggml/src/ggml-quants.h\n@@ -1 +1 @@\n-#pragma once\n+#pragma twice\n"
        "--- a/ggml/src/ggml.c\n+++ b/ggml/src/ggml.c\n@@ -1,3 +1,3 @@\n one\n-two\n+2\n three\n"
        "--- a/common/gone.cpp\n+++ b/common/gone.cpp\n@@ -1,3 +1,3 @@\n one\n-two\n+2\n three\n"
    )
    found, printed = prepared()
    left_out = "warning: optional patches that do not apply to this llama.cpp are left out:"
    assert printed == [left_out, "  0099-other: Without it, nothing is missing."]
    assert found == without


@pytest.mark.long
def test_patches_apply_without_git(prepare: tuple[Path, Path], tmp_path: Path) -> None:
    program = shutil.which("patch")
    if program is None:
        assert not os.environ.get("CI"), "patch is not installed"
        pytest.skip("patch is not installed")
    folder, script = prepare
    subprocess.run(["cmake", "-P", script], check=True)
    by_git = {path: (folder / "tree" / path).read_bytes() for path in stamps(folder / "tree")}
    shutil.rmtree(folder / "tree")
    nowhere = ["-DCMAKE_FIND_USE_CMAKE_SYSTEM_PATH=OFF", "-DCMAKE_FIND_USE_SYSTEM_ENVIRONMENT_PATH=OFF"]
    called = f"{program} --batch"
    done = subprocess.run(
        ["cmake", *nowhere, f"-DITQ3S_PATCH={program}", "--trace-expand", "-P", script], capture_output=True, text=True
    )
    assert done.returncode == 0 and "git;apply" not in done.stderr, done.stderr[-2000:]
    assert called.replace(" ", ";") in done.stderr
    assert by_git == {path: (folder / "tree" / path).read_bytes() for path in stamps(folder / "tree")}


def test_optional_patches_apply_and_say_what_they_are_for(prepare: tuple[Path, Path]) -> None:
    folder, script = prepare
    subprocess.run(["cmake", "-P", script], check=True)
    assert "atexit(common_log_at_exit)" in (folder / "tree" / "common" / "log.cpp").read_text()
    optional = sorted((folder / "ggml-patch" / "patches" / "optional").iterdir())
    for patch in optional:
        head = patch if patch.is_file() else min(patch.glob("*.patch"))
        assert head.read_text().startswith("Without it, "), patch.name
    # and without them the file is upstream's
    shutil.rmtree(folder / "ggml-patch" / "patches" / "optional")
    subprocess.run(["cmake", "-P", script], check=True)
    plain = upstream.fetch_source() / "common" / "log.cpp"
    assert (folder / "tree" / "common" / "log.cpp").read_bytes() == plain.read_bytes()

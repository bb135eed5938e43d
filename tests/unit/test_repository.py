"""The package is packed whole, and nothing in the repository tells of the machines and plans that it was made by."""

from __future__ import annotations

import re
import subprocess
import zipfile
from pathlib import Path

import pytest

from packing import build_wheel

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "gguf_itq3s"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_wheel(tmp_path_factory.mktemp("wheel"))


@pytest.mark.slow
def test_the_wheel_holds_every_module(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        packed = {name for name in archive.namelist() if ".dist-info/" not in name}
        entry_points = next(archive.read(name).decode() for name in archive.namelist() if "entry_points" in name)
    modules = {path.relative_to(ROOT).as_posix() for path in PACKAGE.rglob("*.py")}
    rooms = {path.name for path in PACKAGE.iterdir() if path.is_dir() and path.name != "__pycache__"}
    assert rooms >= {"codec", "rounding", "checkpoint", "calibrate", "convert", "inspect", "evaluate"}
    patch = ROOT / "ggml-patch"
    parts = [
        patch / "CMakeLists.txt",
        *(path for part in ("cmake", "patches", "src") for path in (patch / part).rglob("*")),
    ]
    copies = {f"gguf_itq3s/ggml_patch/{path.relative_to(patch).as_posix()}" for path in parts if path.is_file()}
    assert len(copies) > 60
    assert packed == modules | copies | {"gguf_itq3s/py.typed", "gguf_itq3s/calibrate/text.jsonl.xz"}
    assert {f"gguf_itq3s/{room}/__init__.py" for room in rooms} <= packed
    assert "gguf-itq3s = gguf_itq3s.cli:main" in entry_points


# ------------------------------------------------------------------------------------------------------- traces

#: What must not stand in a file: pattern -> the files that may.
TRACES: dict[str, tuple[str, ...]] = {
    r"(?<![\w.~$}/-])/(?:home|Users|root|work|workspace|mnt|data)/\w": (),  # of somebody's machine
    r"\bissue\s+#?\d": (),
    r"\bdesign section\b": (),
    r"\.\./shared\b": (),
}
#: Where an address may point: namespaces, licences, sources that are named, the index of PyTorch's CPU builds, here.
HOSTS = {
    "creativecommons.org", "download.pytorch.org", "github.com", "huggingface.co", "keepachangelog.com",
    "matplotlib.org", "purl.org", "semver.org", "www.w3.org", "127.0.0.1", "localhost",
}  # fmt: skip


def texts() -> dict[str, str]:
    """Every text file that is, or is about to be, in the repository, by its name."""
    listed = subprocess.run(
        ["git", "-C", ROOT, "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        check=True, capture_output=True, text=True,
    )  # fmt: skip
    found = {}
    for name in listed.stdout.split("\0"):
        path = ROOT / name
        if name and path.is_file() and path != Path(__file__).resolve():
            try:
                found[name] = path.read_text(encoding="utf-8")
            except UnicodeDecodeError:
                continue  # pictures and weights
    return found


def traces(name: str, text: str) -> list[str]:
    """The lines of a file that hold a trace, as file:line: text."""
    places = [match.start() for match in re.finditer(r"\bhttps?://([\w.-]+)", text) if match[1] not in HOSTS]
    for pattern, allowed in TRACES.items():
        if not name.startswith(allowed):
            places += [match.start() for match in re.finditer(pattern, text, re.IGNORECASE)]
    lines = text.split("\n")
    numbers = sorted({text.count("\n", 0, place) for place in places})
    return [f"{name}:{number + 1}: {lines[number].strip()[:120]}" for number in numbers]


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="not a clone: what belongs to the repository is not known")
def test_no_file_holds_traces() -> None:
    files = texts()
    assert {"README.md", "pyproject.toml", "gguf_itq3s/cli.py", ".ci/run"} <= set(files)
    assert [line for name, text in files.items() for line in traces(name, text)] == []


@pytest.mark.parametrize(
    "line",
    [
        "see /home/someone/gguf", 'open("/work/data/x")', "as issue 3 asks", "Issue #12", "design section 2.6",
        "put it into ../shared/data", "--index-url https://mirror.example.net/simple",
    ],
)  # fmt: skip
def test_traces_are_found(line: str) -> None:
    assert traces("scripts/demo.py", f"fine\n{line}\n") == [f"scripts/demo.py:2: {line}"]


def test_what_is_no_trace() -> None:
    lines = [
        "~/.cache/gguf-itq3s",
        "/usr/local/cuda",
        "/proc/self/status",
        "https://github.com/a/b",
        "$HOME/work/x",
        "http://127.0.0.1:8080/v1",
    ]
    assert traces("scripts/demo.py", "\n".join(lines)) == []


def test_every_tool_that_make_installs_has_its_hashes() -> None:
    """The extra "dev" is in requirements-tools.txt, in the versions of constraints.txt and with hashes for pip."""
    text = (ROOT / "requirements-tools.txt").read_text()
    entries = re.findall(r"^([a-z][\w-]*)==(\S+)(.*?)(?=^[a-z]|\Z)", text, re.MULTILINE | re.DOTALL)
    assert entries and all(re.search(r"--hash=sha256:[0-9a-f]{64}\b", rest) for *_, rest in entries)
    versions = {name: version for name, version, _ in entries}
    (dev,) = re.findall(r"^dev = \[(.*?)^\]", (ROOT / "pyproject.toml").read_text(), re.MULTILINE | re.DOTALL)
    tools = {name.lower() for name in re.findall(r'"([\w-]+)', dev)} - {"gguf-itq3s"}
    assert len(tools) > 5 and tools <= set(versions)
    pinned = dict(re.findall(r"^([\w-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
    assert {name: versions[name] for name in pinned if name != "torch"} == {
        name: version for name, version in pinned.items() if name != "torch"
    }

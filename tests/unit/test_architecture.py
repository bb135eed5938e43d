"""The order of the rooms, and what starting a command costs."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest

import gguf_itq3s
from gguf_itq3s.codec import blocks, native

PACKAGE = Path(gguf_itq3s.__file__).parent
ROOT = PACKAGE.parent


@pytest.mark.slow
def test_imports_point_one_way() -> None:
    done = subprocess.run(
        [Path(sys.executable).with_name("lint-imports"), "--no-cache"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout
    assert "2 kept, 0 broken" in done.stdout


def test_the_page_names_every_room() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text()
    table = page.split("| room | what comes in, what goes out |")[1].split("\n\n")[0]
    rows = re.findall(r"^\| `(\w+)` \|", table, re.M)
    assert set(rows) == {path.parent.name for path in PACKAGE.glob("*/__init__.py")} | {"cli"}
    reading = (PACKAGE / "codec" / "__init__.py").read_text()
    assert set(re.findall(r"``(\w+)``", reading)) == {path.stem for path in (PACKAGE / "codec").glob("[!_]*.py")}


def test_the_ways_lead_through_files_that_are_there() -> None:
    """What the page follows a tensor and an activation through: modules, their names, and C sources."""
    page = (ROOT / "docs" / "architecture.md").read_text()
    ways = page[page.index("## The way of a tensor, from") : page.index("## The C and CUDA sources")]
    rooms = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    modules = [name.split(".") for name in re.findall(r"`(\w+(?:\.\w+)+)`", ways)]
    named = [parts for parts in modules if parts[0] in rooms]
    files = [name for name in re.findall(r"`(\w+(?:/[\w.-]+)+)`", ways) if "." in name]
    assert len(named) > 25 and len(files) > 15
    for room, file, *names in named:
        path = PACKAGE / room / f"{file}.py"
        assert path.exists(), path
        for name in names:
            assert re.search(rf"\b(def|class) {name}\b", path.read_text()), (path, name)
    for name in files:
        assert any((root / name).exists() for root in (PACKAGE, ROOT / "ggml-patch" / "src")), name


def test_what_imports_torch_at_its_head() -> None:
    """The rooms torch and calibrate: what the page says."""
    found = set()
    for path in PACKAGE.glob("*/*.py"):
        names = []
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.Import):
                names += [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and not node.level:
                names.append(node.module or "")
        if any(name.partition(".")[0] in ("torch", "transformers") for name in names):
            found.add(path.parent.name)
    assert found == {"torch", "calibrate"}


@pytest.mark.slow
def test_help_imports_nothing_that_takes_seconds() -> None:
    program = "import sys; from gguf_itq3s.cli import main\ntry: main(['--help'])\nexcept SystemExit: pass\n"
    program += "print([m for m in ('torch', 'transformers', 'matplotlib', 'conversion') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_quantize_takes_c_where_it_is_built(monkeypatch, library=None) -> None:  # type: ignore[no-untyped-def]
    """The package's quantize and gguf-py's registry go through one function, which asks for the library."""
    asked = []

    class Library:
        def quantize(self, array, **options):  # type: ignore[no-untyped-def]
            asked.append(options)
            return blocks.quantize(array, effort=options["effort"], codec=options["codec"])

    monkeypatch.setattr(native, "_usable", Library)
    weights = [[1.0] * 256]
    expected = blocks.quantize(weights)
    assert (gguf_itq3s.quantize(weights) == expected).all()
    assert (gguf.quants.quantize(np.array(weights, "f4"), gguf_itq3s.ITQ3_S) == expected).all()
    assert len(asked) == 2

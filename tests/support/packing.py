"""The wheel of the package, built without a network by the setuptools that is installed."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def build_wheel(folder: Path) -> Path:
    """The wheel, built below ``folder`` from a copy: setuptools would write into build/."""
    source, out = folder / "source", folder / "wheel"
    for name in ("gguf_itq3s", "ggml-patch"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    out.mkdir()
    program = "import sys; from setuptools import build_meta; build_meta.build_wheel(sys.argv[1])"
    done = subprocess.run([sys.executable, "-c", program, out], cwd=source, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    (made,) = out.glob("gguf_itq3s-*.whl")
    return made

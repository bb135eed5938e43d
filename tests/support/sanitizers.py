"""The address and undefined-behaviour sanitizers of the C compiler in use."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

FLAGS = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"]


def require(compiler: str, folder: Path) -> None:
    """Skip the test where the compiler has no sanitizers; in continuous integration that is a failure."""
    probe = folder / "probe.c"
    probe.write_text("int main(void) { return 0; }\n")
    done = subprocess.run([compiler, *FLAGS, probe, "-o", folder / "probe"], capture_output=True, text=True)
    if done.returncode:
        reason = f"{compiler} has no sanitizers"
        if os.environ.get("CI"):
            pytest.fail(f"{reason}: {done.stderr[-500:]}")
        pytest.skip(reason)

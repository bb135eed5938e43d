"""Kills while a clone takes its llama.cpp from the cache: the same call ends with the files that were built."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import llama
from killing import Outcome, Record, content, kill_often


@pytest.mark.skipif(not llama.BIN.exists() and not os.environ.get("CI"), reason="make build first")
def test_publishing_a_build(tmp_path: Path, rounds: int, record: Record) -> None:
    clone = tmp_path / "clone"
    for name in ("ggml-patch", "scripts", "gguf_itq3s"):
        shutil.copytree(llama.ROOT / name, clone / name, ignore=shutil.ignore_patterns("__pycache__"))
    built = clone / "build"
    configure = ["cmake", "-S", "ggml-patch", "-B", "build/cmake", f"-DPython3_EXECUTABLE={sys.executable}"]
    subprocess.run(configure, cwd=clone, check=True, capture_output=True)

    def work() -> int:
        return subprocess.run(["cmake", "--build", "build/cmake"], cwd=clone).returncode

    def fresh() -> None:
        for name in ("bin", "bin.new", "include", "include.new"):
            shutil.rmtree(built / name, ignore_errors=True)

    assert work() == 0  # once without a kill
    wanted = content(built / "bin")
    assert wanted.items() <= content(llama.BIN).items(), "make build first"

    def check(outcome: Outcome) -> None:
        assert outcome.code != 0 or "is up to date" in outcome.said, (
            "the content of ggml-patch has changed since make build"
        )
        if outcome.code == 0:
            assert content(built / "bin") == wanted
            assert not list(built.glob("*.new"))

    record(
        "kills of the publishing of a build",
        kills=kill_often(work, rounds, tmp_path, check=check, fresh=fresh),
        other_bytes=0,
    )

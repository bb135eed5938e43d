#!/usr/bin/env python3
"""Cross-compile the NEON kernels for aarch64 and run their tests under qemu: with and without the dot product
instructions."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from scripts.check import cuda as cuda_check
from scripts.check import simd_program

COMPILER = "aarch64-linux-gnu-gcc"
EMULATOR = "qemu-aarch64"
PACKAGES = "gcc-aarch64-linux-gnu libc6-dev-arm64-cross qemu-user"

VARIANTS = {
    "NEON": ["-march=armv8-a"],
    "NEON, dot product": ["-march=armv8.2-a+dotprod"],
    "NEON, dot product, three-way exclusive or": ["-march=armv8.2-a+dotprod+sha3"],
    "NEON, fused multiply-add wherever the compiler may": ["-march=armv8-a", "-O3", "-ffp-contract=fast"],
}


def run(name: str, _program: str) -> tuple[subprocess.CompletedProcess[str], float]:
    """What test-simd, compiled for a variant, ends with, and the seconds; RuntimeError where it does not compile."""
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        path = simd_program.compile_program(Path(folder), COMPILER, "arm", ["-static", *VARIANTS[name]])
        vectors = simd_program.write_vectors(Path(folder))
        done = subprocess.run([EMULATOR, path, *vectors], capture_output=True, text=True, check=False)
    return done, time.monotonic() - start


def main() -> int:
    missing = [tool for tool in (COMPILER, EMULATOR) if shutil.which(tool) is None]
    if missing:
        print(f"error: {' and '.join(missing)} not found; on Debian: apt-get install {PACKAGES}", file=sys.stderr)
        return 1
    failed = False
    try:
        for name, done in cuda_check.compile_all([(name, "test-simd") for name in VARIANTS], run, os.cpu_count() or 1):
            lines = done.stdout.splitlines()
            bad = [line for line in lines if line.endswith("FAILED")]
            if done.returncode:
                failed = True
                print(f"{name}: FAILED\n" + "\n".join(bad) + done.stderr)
            else:
                print(f"{name}: {sum(line.endswith(' ok') for line in lines)} checks passed")
    except RuntimeError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return int(failed)


if __name__ == "__main__":
    raise SystemExit(main())

#!/usr/bin/env python3
"""Cross-compile the NEON kernels for aarch64 and run their tests under qemu: with and without the dot product
instructions."""

from __future__ import annotations

import concurrent.futures
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

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


def run(flags: list[str]) -> subprocess.CompletedProcess[str]:
    """The test program, compiled with these flags; raises RuntimeError where it does not compile."""
    with tempfile.TemporaryDirectory() as folder:
        program = simd_program.compile_program(Path(folder), COMPILER, "arm", ["-static", *flags])
        vectors = simd_program.write_vectors(Path(folder))
        return subprocess.run([EMULATOR, program, *vectors], capture_output=True, text=True, check=False)


def main() -> int:
    missing = [tool for tool in (COMPILER, EMULATOR) if shutil.which(tool) is None]
    if missing:
        print(f"error: {' and '.join(missing)} not found; on Debian: apt-get install {PACKAGES}", file=sys.stderr)
        return 1
    failed = False
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        runs = {name: pool.submit(run, flags) for name, flags in VARIANTS.items()}
        for name, task in runs.items():
            try:
                done = task.result()
            except RuntimeError as error:
                print(f"error: {name}: {error}", file=sys.stderr)
                return 1
            lines = done.stdout.splitlines()
            bad = [line for line in lines if line.endswith("FAILED")]
            if done.returncode:
                failed = True
                print(f"{name}: FAILED\n" + "\n".join(bad) + done.stderr)
            else:
                print(f"{name}: {sum(line.endswith(' ok') for line in lines)} checks passed")
    return int(failed)


if __name__ == "__main__":
    raise SystemExit(main())

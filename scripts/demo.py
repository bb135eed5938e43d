#!/usr/bin/env python3
"""The whole way in one command: a Hugging Face folder, a GGUF file in ITQ3_S, and llama.cpp writing with it.

    make demo

Converts ``models/demo-llama`` to F16 and ITQ3_S below ``build/demo``, then runs the built ``llama-simple`` on the
ITQ3_S file, which takes the most probable token each time, and prints text, sizes and speed. ``llama-cli`` and the
other tools come with ``make build``.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import subprocess
from pathlib import Path

from gguf_itq3s.base import report
from gguf_itq3s.base.errors import UserError, report_errors
from gguf_itq3s.codec import native
from gguf_itq3s.convert.command import describe
from gguf_itq3s.convert.options import ConvertOptions
from gguf_itq3s.convert.pipeline import convert

ROOT = Path(__file__).resolve().parents[1]
MODEL = ROOT / "models" / "demo-llama"
OUT = ROOT / "build" / "demo"
PROMPTS = (
    "In the morning they went down to the river",
    "It was a dark night in November, and the wind",
    "My father had a",
)


def shown(part: str | Path) -> str:
    """A path as seen from the repository."""
    return str(part).removeprefix(f"{ROOT}/")


def continuation(model: Path, prompt: str, tokens: int, threads: int) -> tuple[str, float]:
    """llama-simple's continuation of a prompt, and the tokens per second it says."""
    program = native.tools_folder() / "llama-simple"
    if not program.exists():
        raise UserError(program, "is not built", f"run {native.build_command()}")
    command = [str(program), "-m", str(model), "-n", str(tokens), prompt]
    print(f"\n$ {shlex.join(map(shown, command))}")
    # it has no option for threads
    environment = {**os.environ, "OMP_THREAD_LIMIT": str(threads)}
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, env=environment)
    stdout, stderr = done.stdout.decode(errors="replace"), done.stderr.decode(errors="replace")
    speed = re.search(r"speed: ([\d.]+) t/s", stderr)
    if done.returncode or not speed:
        lines = (stderr + stdout).strip().splitlines()
        what = f"failed: {lines[-1] if lines else done.returncode}"
        raise UserError(program, what, "run the command above to see more")
    return stdout.strip().removeprefix("<s> "), float(speed[1])


@report_errors
def main() -> int:
    parser = argparse.ArgumentParser(description="Convert the bundled model to ITQ3_S and let llama.cpp write with it.")
    parser.add_argument("--model", type=Path, default=MODEL, help="Hugging Face folder (default: models/demo-llama)")
    parser.add_argument("--prompt", help="default: three of its own")
    parser.add_argument("--tokens", type=int, default=24, help="tokens to write (default: %(default)s)")
    # A model of a few million weights gains nothing from more threads, which spend their time waiting for each other.
    parser.add_argument("--threads", type=int, default=1, help="default: %(default)s")
    args = parser.parse_args()

    OUT.mkdir(parents=True, exist_ok=True)
    files = {outtype: OUT / f"{args.model.resolve().name}-{outtype.upper()}.gguf" for outtype in ("f16", "itq3_s")}
    for outtype, path in files.items():
        print(f"\n$ convert-hf-to-itq3s {shown(args.model)} {shown(path)} --outtype {outtype}")
        print(describe(convert(ConvertOptions.of(args.model, path, outtype=outtype, threads=args.threads))))

    speeds = []
    for text in [args.prompt] if args.prompt else PROMPTS:
        written, speed = continuation(files["itq3_s"], text, args.tokens, args.threads)
        speeds.append(speed)
        print(f"\n{written}")

    sizes = {outtype: path.stat().st_size for outtype, path in files.items()}
    print(
        f"\nITQ3_S {report.size(sizes['itq3_s'])}, F16 {report.size(sizes['f16'])}: "
        f"{sizes['f16'] / sizes['itq3_s']:.2f} times smaller"
    )
    print(f"llama-simple, tokens/s on {args.threads} thread: {max(speeds):.0f}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

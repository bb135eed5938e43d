#!/usr/bin/env python3
"""The whole way in one command: a Hugging Face folder, a GGUF file in ITQ3_S, and llama.cpp writing with it.

    make demo

Converts ``models/demo-llama`` to F16 and ITQ3_S below ``build/demo``, then runs the built ``llama-cli`` (one turn) and
``llama-completion`` (plain continuation) on the ITQ3_S file and prints text, sizes and speed.
"""

from __future__ import annotations

import argparse
import re
import shlex
import subprocess
from pathlib import Path

from gguf_itq3s import report
from gguf_itq3s.convert import Options, convert
from gguf_itq3s.errors import UserError, report_errors

ROOT = Path(__file__).resolve().parent.parent
MODEL = ROOT / "models" / "demo-llama"
TOOLS = ROOT / "build" / "bin"
OUT = ROOT / "build" / "demo"
PROMPTS = {
    "llama-cli": "The old house stood at the end of the lane, and",
    "llama-completion": "When the captain came back on deck, the sea was",
}


def run(tool: str, *arguments: str | Path) -> tuple[str, str]:
    """Run a built tool without input, after printing its command line; returns stdout and stderr."""
    program = TOOLS / tool
    if not program.exists():
        raise UserError(program, "is not built", "run make build")
    command = [str(program), *map(str, arguments)]
    print(f"\n$ {shlex.join(part.removeprefix(f'{ROOT}/') for part in command)}")
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True)
    stdout, stderr = done.stdout.decode(errors="replace"), done.stderr.decode(errors="replace")
    if done.returncode:
        lines = (stderr + stdout).strip().splitlines()
        raise UserError(
            program, f"failed: {lines[-1] if lines else done.returncode}", "run the command above to see more"
        )
    return stdout, stderr


def single_turn(model: Path, prompt: str, options: list[str]) -> tuple[str, float]:
    """llama-cli's answer to one prompt, and its tokens per second."""
    stdout, _ = run("llama-cli", "-m", model, "-p", prompt, "--single-turn", "--simple-io", *options)
    text, _, rest = stdout.rpartition("[ Prompt:")
    speed = re.search(r"Generation: ([0-9.]+) t/s", rest)
    return prompt + text.partition(f"> {prompt}\n")[2].rstrip(), float(speed[1]) if speed else 0.0


def continuation(model: Path, prompt: str, options: list[str]) -> tuple[str, float]:
    """llama-completion's continuation of a prompt, and its tokens per second."""
    stdout, stderr = run("llama-completion", "-m", model, "-p", prompt, "-no-cnv", *options)
    speed = re.search(r"\beval time =.*runs.*?([0-9.]+) tokens per second", stderr)
    return stdout.strip(), float(speed[1]) if speed else 0.0


@report_errors
def main() -> int:
    parser = argparse.ArgumentParser(description="Convert the bundled model to ITQ3_S and let llama.cpp write with it.")
    parser.add_argument("--model", type=Path, default=MODEL, help="Hugging Face folder (default: models/demo-llama)")
    parser.add_argument("--prompt", help="for both programs (default: one of its own for each)")
    parser.add_argument("--tokens", type=int, default=96, help="tokens to write (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="of the sampler (default: %(default)s)")
    # A model of a few million weights gains nothing from more threads, which spend their time waiting for each other.
    parser.add_argument("--threads", type=int, default=1, help="default: %(default)s")
    args = parser.parse_args()

    OUT.mkdir(parents=True, exist_ok=True)
    files = {outtype: OUT / f"{args.model.resolve().name}-{outtype.upper()}.gguf" for outtype in ("f16", "itq3_s")}
    for outtype, path in files.items():
        print(f"\n$ convert-hf-to-itq3s {args.model} {path.relative_to(ROOT)} --outtype {outtype}")
        convert(Options(args.model, path, outtype=outtype, threads=args.threads))

    sampling = ["-n", str(args.tokens), "--temp", "0.7", "--seed", str(args.seed), "-t", str(args.threads)]
    speeds = {}
    for name, function in {"llama-cli": single_turn, "llama-completion": continuation}.items():
        text, speeds[name] = function(files["itq3_s"], args.prompt or PROMPTS[name], sampling)
        print(f"\n{text}")

    sizes = {outtype: path.stat().st_size for outtype, path in files.items()}
    print(
        f"\nITQ3_S {report.size(sizes['itq3_s'])}, F16 {report.size(sizes['f16'])}: "
        f"{sizes['f16'] / sizes['itq3_s']:.2f} times smaller"
    )
    print(
        "; ".join(f"{name}: {speed:.0f} tokens/s" for name, speed in speeds.items()) + f" on {args.threads} thread(s)"
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

#!/usr/bin/env python3
"""The whole way in one command: a Hugging Face folder, a GGUF file in ITQ3_S, and llama.cpp writing with it.

    make demo

Converts ``models/demo-llama`` to F16 and ITQ3_S below ``build/demo``, then runs the built ``llama-completion`` on the
ITQ3_S file and prints text, sizes and speed. ``llama-cli`` and the other tools come with ``make build``.
"""

from __future__ import annotations

import argparse
import json
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
TOOLS = native.tools_folder()
OUT = ROOT / "build" / "demo"
PROMPTS = ("The old house stood at the end of the lane, and", "When the captain came back on deck, the sea was")


def shown(part: str | Path) -> str:
    """A path as seen from the repository."""
    return str(part).removeprefix(f"{ROOT}/")


def run(tool: str, *arguments: str | Path) -> str:
    """Run a built tool without input, after printing its command line; returns what it wrote to stdout."""
    program = TOOLS / tool
    if not program.exists():
        raise UserError(program, "is not built", f"run {native.build_command()}")
    command = [str(program), *map(str, arguments)]
    print(f"\n$ {shlex.join(map(shown, command))}")
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True)
    stdout, stderr = done.stdout.decode(errors="replace"), done.stderr.decode(errors="replace")
    if done.returncode:
        lines = (stderr + stdout).strip().splitlines()
        what = f"failed: {lines[-1] if lines else done.returncode}"
        raise UserError(program, what, "run the command above to see more")
    return stdout


def continuation(model: Path, prompt: str, options: list[str]) -> str:
    """llama-completion's continuation of a prompt."""
    return run("llama-completion", "-m", model, "-p", prompt, "-no-cnv", *options).strip()


def benchmark(model: Path, threads: int) -> tuple[float, float]:
    """Tokens per second of llama-bench: (prompt of 128, generation of 64), three runs each."""
    options = ["-p", "128", "-n", "64", "-r", "3", "-t", str(threads), "-o", "json"]
    prompt, generation = json.loads(run("llama-bench", "-m", model, *options))
    return float(prompt["avg_ts"]), float(generation["avg_ts"])


@report_errors
def main() -> int:
    parser = argparse.ArgumentParser(description="Convert the bundled model to ITQ3_S and let llama.cpp write with it.")
    parser.add_argument("--model", type=Path, default=MODEL, help="Hugging Face folder (default: models/demo-llama)")
    parser.add_argument("--prompt", help="default: two of its own")
    parser.add_argument("--tokens", type=int, default=96, help="tokens to write (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="of the sampler (default: %(default)s)")
    # A model of a few million weights gains nothing from more threads, which spend their time waiting for each other.
    parser.add_argument("--threads", type=int, default=1, help="default: %(default)s")
    args = parser.parse_args()

    OUT.mkdir(parents=True, exist_ok=True)
    files = {outtype: OUT / f"{args.model.resolve().name}-{outtype.upper()}.gguf" for outtype in ("f16", "itq3_s")}
    for outtype, path in files.items():
        print(f"\n$ convert-hf-to-itq3s {shown(args.model)} {shown(path)} --outtype {outtype}")
        print(describe(convert(ConvertOptions.of(args.model, path, outtype=outtype, threads=args.threads))))

    sampling = ["-n", str(args.tokens), "--temp", "0.7", "--seed", str(args.seed), "-t", str(args.threads)]
    for text in [args.prompt] if args.prompt else PROMPTS:
        print(f"\n{continuation(files['itq3_s'], text, sampling)}")
    prompt, generation = benchmark(files["itq3_s"], args.threads)

    sizes = {outtype: path.stat().st_size for outtype, path in files.items()}
    print(
        f"\nITQ3_S {report.size(sizes['itq3_s'])}, F16 {report.size(sizes['f16'])}: "
        f"{sizes['f16'] / sizes['itq3_s']:.2f} times smaller"
    )
    print(f"llama-bench, tokens/s on {args.threads} thread: prompt {prompt:.0f}, generation {generation:.0f}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

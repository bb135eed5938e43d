"""Running the built llama.cpp tools in tests."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

from checkpoints import NOVEL

ROOT = Path(__file__).resolve().parents[2]
BIN = ROOT / "build" / "bin"
MODEL = ROOT / "models" / "demo-llama"


def run(tool: str, *args: str | Path, check: bool = True, timeout: int = 600) -> subprocess.CompletedProcess[str]:
    """Run a built tool with no input; with ``check`` a failure shows the end of what it printed."""
    return run_program(BIN / tool, *args, check=check, timeout=timeout)


def run_program(
    program: Path, *args: str | Path, check: bool = True, timeout: int = 600
) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [str(program), *map(str, args)], stdin=subprocess.DEVNULL, capture_output=True, timeout=timeout, check=False
    )
    # A tool may print a token that ends inside a character.
    result = subprocess.CompletedProcess(
        done.args, done.returncode, done.stdout.decode(errors="replace"), done.stderr.decode(errors="replace")
    )
    if check and result.returncode:
        raise AssertionError(
            f"{program.name} exited with {result.returncode}: {result.stdout[-500:]}{result.stderr[-2000:]}"
        )
    return result


def evaluation_text() -> Path:
    """WikiText-2's test split where it is at hand, else the beginning of a novel: enough to compare two files."""
    wikitext = ROOT.parent / "shared" / "data" / "wikitext-2" / "wiki.test.raw"
    return wikitext if wikitext.exists() else NOVEL


def perplexity(model: Path, text: Path, chunks: int = 8, context: int = 512) -> float:
    """Final perplexity of llama-perplexity over the first ``chunks`` windows of ``context`` tokens."""
    done = run("llama-perplexity", "-m", model, "-f", text, "-c", str(context), "--chunks", str(chunks), "-t", "1")
    output = done.stdout + done.stderr
    found = re.search(r"Final estimate: PPL = ([0-9.]+)", output)
    assert found, f"llama-perplexity printed no result: {output[-2000:]}"
    return float(found.group(1))

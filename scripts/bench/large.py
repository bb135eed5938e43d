#!/usr/bin/env python3
"""What converting and calibrating a large model takes on this machine, measured on one of its layers.

    scripts/bench/large.py --update docs            a Llama of 70B by `calibrate`, one of 8B by `convert --calibrate`

Writes a Llama of one layer with random weights in the large model's shapes and a small vocabulary, and runs the
commands on it, each in a process of its own: processor time of all threads, largest resident memory, sizes of what they
write. What a command takes to start is subtracted; the rest is multiplied by the number of layers, a calibration's by
its tokens too, and for the model of 70B the matrices of the vocabulary are added at the measured rates.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import gguf
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from gguf_itq3s.base import report
from gguf_itq3s.base.errors import UserError, report_errors
from gguf_itq3s.codec import native
from gguf_itq3s.rounding import hessian

ROOT: Final = Path(__file__).resolve().parents[2]
DEMO: Final = ROOT / "models" / "demo-llama"
TEXT: Final = ROOT / "tests" / "data" / "novel.txt"
#: Tokens of a calibration by default, what times are given for.
TOKENS: Final = 262144
HEAD: Final = 128


@dataclass(frozen=True)
class Shape:
    """A Llama: columns, columns of the feed-forward part, layers, tokens of the vocabulary, columns of keys."""

    hidden: int
    feed_forward: int
    layers: int
    vocabulary: int
    keys: int

    @property
    def layer(self) -> int:
        """Weights of a layer's matrices."""
        return 2 * self.hidden * (self.hidden + self.keys) + 3 * self.hidden * self.feed_forward

    @property
    def weights(self) -> int:
        """All of them."""
        return self.layers * self.layer + 2 * self.vocabulary * self.hidden


LLAMA_70B: Final = Shape(hidden=8192, feed_forward=28672, layers=80, vocabulary=128256, keys=1024)
LLAMA_8B: Final = Shape(hidden=4096, feed_forward=14336, layers=32, vocabulary=128256, keys=1024)


@dataclass(frozen=True)
class Run:
    """One command on the one layer: seconds of all threads, the largest resident set in bytes."""

    processor: float
    memory: int


def write_model(folder: Path, shape: Shape, vocabulary: int) -> None:
    """A checkpoint with one layer of random weights in bfloat16."""
    config = LlamaConfig(
        hidden_size=shape.hidden, intermediate_size=shape.feed_forward, num_hidden_layers=1, vocab_size=vocabulary,
        num_attention_heads=shape.hidden // HEAD, num_key_value_heads=shape.keys // HEAD, head_dim=HEAD,
        max_position_embeddings=2048, tie_word_embeddings=False, bos_token_id=1, eos_token_id=2,
        dtype="bfloat16", initializer_range=0.02,
    )  # fmt: skip
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    for name in ("tokenizer.model", "tokenizer_config.json"):
        shutil.copy(DEMO / name, folder)


def in_a_process(work: Callable[..., object], *arguments: Any) -> None:
    """Do something in a process of its own: the largest resident set of this one is where those of commands begin."""
    process = multiprocessing.get_context("spawn").Process(target=work, args=arguments)
    process.start()
    process.join()


def run(*arguments: str | Path) -> Run:
    """Run a subcommand of gguf-itq3s and measure it; a UserError if it fails."""
    print("$ gguf-itq3s", *arguments, file=sys.stderr, flush=True)
    command = [sys.executable, "-m", "gguf_itq3s.cli", *map(str, arguments)]
    child = os.posix_spawn(sys.executable, command, os.environ)
    _, status, usage = os.wait4(child, 0)
    if status:
        raise UserError(Path(str(arguments[1])), f"gguf-itq3s {arguments[0]} failed", "see above")
    return Run(usage.ru_utime + usage.ru_stime, usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024))


def hours(seconds: float) -> str:
    """A time as a reader wants it."""
    if seconds < 5400:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h" if seconds < 48 * 3600 else f"{seconds / 86400:.1f} days"


def measure(shape: Shape, tokens: int, work: Path) -> dict[str, object]:
    """Run the commands on one layer."""
    model = work / "model"
    vocabulary = json.loads((DEMO / "config.json").read_text())["vocab_size"]
    in_a_process(write_model, model, shape, vocabulary)
    idle = run("convert", model, work / "plain.gguf", "--dry-run")
    plain = run("convert", model, work / "plain.gguf")
    files = {"plain": (work / "plain.gguf").stat().st_size}
    (work / "plain.gguf").unlink()
    calibrations = [
        run("calibrate", model, "--text", TEXT, "--tokens", str(count), "--context", "2048", "-o", work / f"h{count}")
        for count in (tokens, 2 * tokens)
    ]
    files["statistics"] = sum(path.stat().st_size for path in (work / f"h{tokens}").iterdir())
    # Rounding with statistics is the slowest: one matrix for each kind of Hessian, the others in a type of little cost.
    calibrated = {}
    for name in ("none", "attn_q", "ffn_down"):
        types = ["--tensor-type", f"{name}=itq3_s", "--tensor-type", "blk=q8_0"]
        calibrated[name] = run("convert", model, work / f"{name}.gguf", "--calibration", work / f"h{tokens}", *types)
        (work / f"{name}.gguf").unlink()
    library = native.load()
    assert library is not None
    chance = torch.Generator().manual_seed(0)
    inputs = torch.zeros((shape.hidden // 4, shape.hidden)).normal_(generator=chance)
    moment = (inputs.T @ inputs + torch.eye(shape.hidden)).numpy()
    started = time.process_time()
    hessian.factorize(moment)
    factor = time.process_time() - started
    rows = torch.zeros((2048, shape.hidden)).normal_(0, 0.02, generator=chance).numpy()
    started = time.process_time()
    library.quantize_type(rows, gguf.GGMLQuantizationType.Q6_K, threads=native.processors())
    seconds = (time.process_time() - started) / len(rows)
    return {
        "shape": asdict(shape), "processors": native.processors(), "vocabulary": vocabulary, "tokens": tokens,
        "idle": asdict(idle), "plain": asdict(plain), "calibrations": [asdict(run) for run in calibrations],
        "calibrated": {name: asdict(run) for name, run in calibrated.items()},
        "factor_seconds": factor, "q6_k_seconds_a_row": seconds, "files": files,
    }  # fmt: skip


def table(results: dict) -> str:
    """What the whole model takes, from what one layer took."""
    shape, small = Shape(**results["shape"]), results["vocabulary"]
    # Of the vocabulary's matrices the embedding is in ITQ3_S, the output in Q6_K: 100 and 210 bytes for 256 weights.
    word, idle = results["q6_k_seconds_a_row"], results["idle"]["processor"]
    rate = (results["plain"]["processor"] - idle - small * word) / (shape.layer + small * shape.hidden)
    words = shape.vocabulary * (word + shape.hidden * rate)
    both = shape.hidden * 310 // 256
    output = shape.layers * (results["files"]["plain"] - small * both) + shape.vocabulary * both
    # Three inputs of a layer are as wide as the model: of its norms and of attn_output. Each has a factor of its own.
    runs, factor, query = results["calibrated"], results["factor_seconds"], shape.hidden**2
    others = shape.layer - shape.hidden * shape.feed_forward
    calibrated = runs["none"]["processor"] - idle - small * (word + shape.hidden * rate)
    calibrated += runs["ffn_down"]["processor"] - runs["none"]["processor"] + 3 * factor
    calibrated += (runs["attn_q"]["processor"] - runs["none"]["processor"] - factor) * others / query
    one = {"processor": calibrated, "memory": max(run["memory"] for run in runs.values())}
    first, second = results["calibrations"]
    token = max(0.0, second["processor"] - first["processor"]) / results["tokens"]
    once = first["processor"] - idle - token * results["tokens"]
    collected = f"{report.size(shape.layers * results['files']['statistics'])}, while it runs "
    collected += f"{report.size(2 * 4 * shape.hidden * TOKENS)} more"

    def row(name: str, run: dict, seconds: float, disk: str) -> list[str]:
        return [name, f"{run['processor']:.0f} s", hours(seconds), report.size(run["memory"]), disk]

    rows = [
        row("convert", results["plain"], shape.layers * shape.layer * rate + words, report.size(output)),
        row(f"calibrate, {TOKENS} tokens", second, shape.layers * (once + TOKENS * token), collected),
        row("convert --calibration", one, shape.layers * calibrated + words, report.size(output)),
    ]
    head = (
        f"{report.count(shape.weights)} weights in {shape.layers} layers of {shape.hidden} and {shape.feed_forward} "
        f"columns, {report.size(2 * shape.weights)} as a checkpoint; measured on {results['processors']} cores, one "
        f"layer of calibrate with {2 * results['tokens']} tokens. Core time is that of all threads together: by the "
        "clock it is shorter by as many cores as there are.\n\n"
    )
    return head + report.markdown(["", "one layer, core time", "all, core time", "memory", "disk"], rows)


def measure_layerwise(shape: Shape, tokens: int, work: Path) -> dict[str, Any]:
    """Run the command on one layer: with and without feedback across rows, kept in F16 and quantized."""
    model = work / "model"
    in_a_process(write_model, model, shape, json.loads((DEMO / "config.json").read_text())["vocab_size"])
    ends = ["--token-embedding-type", "f16", "--output-tensor-type", "f16", "--threads", "1"]

    def convert(count: int, *more: str) -> Run:
        text = ["--calibrate", str(TEXT), "--context", str(tokens), "--tokens", str(count)]
        result = run("convert", model, work / "out.gguf", *ends, *text, *more)
        (work / "out.gguf").unlink()
        return result

    kept = ("--tensor-type", "blk=f16")
    found = {}
    for name, more in (("--calibrate", ()), ("--calibrate --fisher", ("--fisher",))):
        runs = {"few": convert(tokens, *kept, *more), "more": convert(3 * tokens, *kept, *more)}
        found[name] = {key: asdict(value) for key, value in {**runs, "quantized": convert(tokens, *more)}.items()}
    return {"shape": asdict(shape), "threads": 1, "tokens": tokens, "runs": found}


def layerwise_table(results: dict[str, Any]) -> str:
    """What the whole model takes, from what one layer took."""
    shape = Shape(**results["shape"])
    rows = []
    for name, runs in results["runs"].items():
        token = (runs["more"]["processor"] - runs["few"]["processor"]) / (2 * results["tokens"])
        layer = runs["quantized"]["processor"] - runs["few"]["processor"]
        streams = 4 + (shape.layers + 3 if "--fisher" in name else 0)
        for count in (TOKENS // 2, TOKENS):
            seconds = shape.layers * (layer + token * count)
            disk = streams * 4 * shape.hidden * count + shape.layers * shape.layer * 3.125 / 8
            memory = report.size(max(run["memory"] for run in runs.values()))
            cells = [f"{layer:.0f} s", f"{1000 * token:.1f} ms", hours(seconds), hours(seconds / 2)]
            rows.append([f"`{name}`, {count} tokens", *cells, memory, report.size(disk)])
    head = (
        f"{report.count(shape.weights)} weights, {shape.layers} layers of {shape.hidden} and {shape.feed_forward} "
        f"columns in the mix of ITQ3_S; one layer measured, {results['threads']} thread:\n\n"
    )
    titles = ["", "a layer", "and for each token", "all, one core", "half of it", "memory", "disk while it runs"]
    return head + report.markdown(titles, rows)


@report_errors
def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--update", type=Path, metavar="DOCS", help="put the tables between the marks of the pages")
    args = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"  # of the commands, which are processes of their own
    for name, page, work in (
        ("sequential", "calibration.md", lambda folder: measure_layerwise(LLAMA_8B, 512, folder)),
        ("large", "distributed.md", lambda folder: measure(LLAMA_70B, 2048, folder)),
    ):
        with tempfile.TemporaryDirectory() as folder:
            results = work(Path(folder))
        text = layerwise_table(results) if name == "sequential" else table(results)
        print(text)
        if args.update:
            (args.update / "results" / f"{name}.json").write_text(json.dumps(results, indent=1) + "\n")
            report.replace_section(args.update / page, name, text)
        os.environ.pop("OMP_NUM_THREADS", None)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

#!/usr/bin/env python3
"""What quantizing a large mixture of experts while calibrating takes, measured on one of its layers.

    scripts/bench/large_mixture.py --update docs/distributed.md
    scripts/bench/large_mixture.py --experts 16 --tokens 1024 --effort fast --fisher

Writes a Mixtral of one layer with random weights in the large model's shapes and a small vocabulary, and runs `convert
--calibrate` on it in a process of its own, with the options that are not known here. Beside the largest resident set,
which counts pages of mapped files, the largest memory of the process's own is read four times a second. The checkpoint
is in bfloat16, in files of a few experts each. Rounding billions of weights takes long: with `--limit` a command is
interrupted after some seconds, and how many experts it has rounded by then is said. `--update` keeps what was measured
with other options.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Final

import torch
from safetensors.torch import save_file
from transformers import MixtralConfig

ROOT: Final = Path(__file__).resolve().parents[2]
if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))

from gguf_itq3s.base import report  # noqa: E402
from gguf_itq3s.base.errors import UserError, positive, report_errors  # noqa: E402
from gguf_itq3s.codec import native  # noqa: E402
from scripts.bench.large import DEMO, HEAD, hours, size_of  # noqa: E402

RESULTS: Final = ROOT / "docs" / "results" / "large-mixture.json"
TEXT: Final = ROOT / "tests" / "data" / "novel.txt"
#: Experts in one file of the checkpoint.
_FILE: Final = 16


@dataclass(frozen=True)
class Shape:
    """A mixture: columns, columns of an expert, experts, experts of a token, layers, columns of queries and of keys."""

    hidden: int
    feed_forward: int
    experts: int
    chosen: int
    layers: int
    queries: int
    keys: int

    @property
    def expert(self) -> int:
        """Weights of one expert."""
        return 3 * self.hidden * self.feed_forward

    @property
    def layer(self) -> int:
        """Weights of a layer's matrices."""
        return self.experts * (self.expert + self.hidden) + 2 * self.hidden * (self.queries + self.keys)


QWEN3_235B: Final = Shape(
    hidden=4096, feed_forward=1536, experts=128, chosen=8, layers=94, queries=8192, keys=512
)  # fmt: skip


@dataclass(frozen=True)
class Run:
    """One command on the one layer.

    Attributes:
        seconds: by the clock.
        processor: of all threads.
        resident: largest resident set, bytes, mapped files among it.
        own: largest memory that no file is behind, bytes.
        disk: largest size of the folder of work and the output, bytes.
        experts: how many were rounded when it was ended, or all.
    """

    seconds: float
    processor: float
    resident: int
    own: int
    disk: int
    experts: int


def write_model(folder: Path, shape: Shape, vocabulary: int) -> None:
    """A checkpoint with one layer of random weights in bfloat16."""
    config = MixtralConfig(
        hidden_size=shape.hidden, intermediate_size=shape.feed_forward, num_hidden_layers=1, vocab_size=vocabulary,
        num_attention_heads=shape.queries // HEAD, num_key_value_heads=shape.keys // HEAD, head_dim=HEAD,
        num_local_experts=shape.experts, num_experts_per_tok=shape.chosen, max_position_embeddings=2048,
        tie_word_embeddings=False, bos_token_id=1, eos_token_id=2, architectures=["MixtralForCausalLM"],
        dtype="bfloat16",
    )  # fmt: skip
    folder.mkdir()
    config.save_pretrained(folder)
    for name in ("tokenizer.model", "tokenizer_config.json"):
        shutil.copy(DEMO / name, folder)
    chance = torch.Generator().manual_seed(0)
    index: dict[str, str] = {}
    parts = list(_parts(shape, vocabulary))
    for number, shapes in enumerate(parts):
        file = f"model-{number + 1:05d}-of-{len(parts):05d}.safetensors"
        tensors = {
            name: torch.ones(size, dtype=torch.bfloat16) if len(size) == 1
            else torch.empty(size, dtype=torch.bfloat16).normal_(0, 0.02, generator=chance)
            for name, size in shapes.items()
        }  # fmt: skip
        save_file(tensors, folder / file, metadata={"format": "pt"})
        index |= dict.fromkeys(tensors, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))


def _parts(shape: Shape, vocabulary: int) -> Iterator[dict[str, tuple[int, ...]]]:
    """The tensors of each file, with their shapes."""
    layer = "model.layers.0."
    yield {
        "model.embed_tokens.weight": (vocabulary, shape.hidden),
        "lm_head.weight": (vocabulary, shape.hidden),
        f"{layer}self_attn.q_proj.weight": (shape.queries, shape.hidden),
        f"{layer}self_attn.k_proj.weight": (shape.keys, shape.hidden),
        f"{layer}self_attn.v_proj.weight": (shape.keys, shape.hidden),
        f"{layer}self_attn.o_proj.weight": (shape.hidden, shape.queries),
        f"{layer}block_sparse_moe.gate.weight": (shape.experts, shape.hidden),
        f"{layer}input_layernorm.weight": (shape.hidden,),
        f"{layer}post_attention_layernorm.weight": (shape.hidden,),
        "model.norm.weight": (shape.hidden,),
    }
    wide, narrow = (shape.feed_forward, shape.hidden), (shape.hidden, shape.feed_forward)
    for start in range(0, shape.experts, _FILE):
        yield {
            f"{layer}block_sparse_moe.experts.{expert}.{name}.weight": size
            for expert in range(start, min(start + _FILE, shape.experts))
            for name, size in (("w1", wide), ("w2", narrow), ("w3", wide))
        }


#: A process begins with the largest resident set of the one that starts it, which must be small. What a shell runs in
#: the background ignores interrupts, and so would the command.
WATCHER: Final = """
import json, os, signal, sys, time
started, limit = time.monotonic(), float(sys.argv[2])
child = os.posix_spawnp(sys.argv[3], sys.argv[3:], os.environ, setsigdef=[signal.SIGINT])
own = 0
while True:
    if limit and time.monotonic() - started > limit:
        os.kill(child, signal.SIGINT)
        limit = 0
    found, status, usage = os.wait4(child, os.WNOHANG)
    if found:
        break
    try:
        with open(f"/proc/{child}/status") as file:
            lines = dict(line.split(":", 1) for line in file)
        own = max(own, int(lines.get("RssAnon", "0 kB").split()[0]) * 1024)
    except OSError:
        pass
    time.sleep(0.25)
times = time.monotonic() - started, usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024, own
with open(sys.argv[1], "w") as file:
    json.dump([*times, status != 0], file)
"""


def watched(command: list[str], work: Path, experts: int, limit: float = 0) -> Run | None:
    """Run a program and measure it (Linux).

    Args:
        command: the program and its arguments.
        work: folder whose size is watched.
        experts: how many it rounds.
        limit: seconds after which it is interrupted; 0 for none.

    Returns:
        None if it failed before the limit.
    """
    ended, largest = threading.Event(), [0]
    before = size_of(work)

    def watch() -> None:
        while not ended.wait(1):
            with suppress(OSError):  # a file has gone between two looks at it
                largest[0] = max(largest[0], size_of(work) - before)

    watching = threading.Thread(target=watch)
    watching.start()
    try:
        with tempfile.TemporaryDirectory() as folder:
            result, log = Path(folder, "times"), Path(folder, "log")
            with log.open("w") as said:
                caller = [sys.executable, "-S", "-c", WATCHER, str(result), str(limit), *command]
                subprocess.run(caller, check=True, stdout=said, stderr=said)
            seconds, processor, resident, own, failed = json.loads(result.read_text())
            text = log.read_text()
    finally:
        ended.set()
        watching.join()
    if failed and not 0 < limit < seconds:
        print(text, file=sys.stderr)
        return None
    return Run(seconds, processor, resident, own, largest[0], rounded(text) if failed else experts)


def rounded(progress: str) -> int:
    """How many experts were rounded, by what an interrupted command has said of its progress.

    Groups are worked off one after the other; the first expert of that at work is the last that is named.
    """
    named = re.findall(r"_exps\.weight\[(\d+)\]", progress)
    return int(named[-1]) if named else 0


def measure(shape: Shape, tokens: int, work: Path, options: list[str], limit: float) -> dict[str, object]:
    """Run the command on one layer.

    Raises:
        UserError: it failed.
    """
    model = work / "model"
    vocabulary = json.loads((DEMO / "config.json").read_text())["vocab_size"]
    write_model(model, shape, vocabulary)
    command = ["convert", str(model), str(work / "x.gguf"), "--calibrate", str(TEXT), "--tokens", str(tokens), *options]
    print("$ gguf-itq3s", *command, file=sys.stderr, flush=True)
    done = watched([sys.executable, "-m", "gguf_itq3s.cli", *command], work, shape.experts, limit)
    if done is None:
        raise UserError(model, "gguf-itq3s convert failed", "see above")
    return {"options": options, "tokens": tokens, "processors": native.processors(), **asdict(done)}


def table(results: dict) -> str:
    """What one layer took, by the options of the command."""
    shape = Shape(**results["shape"])
    rows = [
        [
            " ".join(["--calibrate", *run["options"]]), str(run["tokens"]), str(run["experts"]),
            f"{run['processor'] / 60:.0f} min",
            hours(shape.layers * run["processor"]) if run["experts"] == shape.experts else "-",
            report.size(run["resident"]), report.size(run["own"]), report.size(run["disk"]),
        ]
        for run in results["runs"]
    ]  # fmt: skip
    cores = " and ".join(sorted({str(run["processors"]) for run in results["runs"]}))
    head = (
        f"One layer of {report.count(shape.layer)} weights: {shape.experts} experts of {shape.feed_forward} columns, "
        f"{shape.chosen} for a token, {shape.hidden} columns; {report.size(4 * shape.layer)} in float32, "
        f"{report.size(2 * shape.layer)} in the checkpoint; {cores} cores. Core time is that of all threads together, "
        f"that of {shape.layers} layers by multiplication; a run with fewer than {shape.experts} experts was "
        "interrupted when it had rounded so many.\n\n"
    )
    header = [
        "", "tokens", "experts", "core time", "all layers", "largest resident set", "without mapped files", "disk"
    ]  # fmt: skip
    return head + report.markdown(header, rows)


@report_errors
def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, number in asdict(QWEN3_235B).items():
        help_text = "default: %(default)s, Qwen3-235B-A22B"
        parser.add_argument(f"--{name.replace('_', '-')}", type=positive, default=number, help=help_text)
    parser.add_argument("--tokens", type=positive, default=2048, help="of the calibration, default: %(default)s")
    parser.add_argument("--limit", type=float, default=0, metavar="SECONDS", help="interrupt a command then")
    parser.add_argument("--work", type=Path, help="folder of the model (default: a temporary one)")
    parser.add_argument("--update", type=Path, metavar="FILE", help="put the table between the marks in the file")
    args, options = parser.parse_known_args()
    shape = Shape(**{field.name: getattr(args, field.name) for field in fields(Shape)})
    with tempfile.TemporaryDirectory(dir=args.work) as folder:
        run = measure(shape, args.tokens, Path(folder), options, args.limit)
    results = {"shape": asdict(shape), "runs": [run]}
    if args.update:
        before = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
        if before.get("shape") == results["shape"]:
            results["runs"] = [*(other for other in before["runs"] if other["options"] != options), run]
        RESULTS.write_text(json.dumps(results, indent=1) + "\n")
        report.replace_section(args.update, "large-mixture", table(results))
    print(table(results))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

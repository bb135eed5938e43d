#!/usr/bin/env python3
"""What Transformers needs to load a model in bfloat16, to quantize it while it loads, and to load it packed.

    scripts/bench/packed_loading.py --update docs/transformers.md
    scripts/bench/packed_loading.py --experts --update docs/transformers.md

A random Llama or, with ``--experts``, a random Mixtral; each way in a process of its own, on one thread. Memory is
what the process has for itself (RssAnon, every 10 ms): the pages of a mapped file, which the system can take back, are
not counted. Needs Linux.
"""

from __future__ import annotations

import argparse
import io
import json
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any, Final

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from gguf_itq3s.base import report  # noqa: E402
from gguf_itq3s.base.errors import report_errors  # noqa: E402

WAYS: Final = {
    "floats": "bfloat16",
    "quantize": "`quantization_config=ITQ3SConfig()`",
    "packed": "saved packed",
    "gguf": "`load_gguf`",
}


def make(folder: Path, experts: bool) -> None:
    """The checkpoint in bfloat16, saved packed, and as a GGUF file."""
    import torch
    import transformers

    from gguf_itq3s.convert.options import ConvertOptions
    from gguf_itq3s.convert.pipeline import convert
    from gguf_itq3s.transformers import ITQ3SConfig

    kind, hidden, inner, layers = (
        (transformers.MixtralConfig, 1024, 2816, 6) if experts else (transformers.LlamaConfig, 2048, 5632, 10)
    )
    config = kind(
        vocab_size=4096, max_position_embeddings=2048, tie_word_embeddings=False, num_key_value_heads=8,
        hidden_size=hidden, intermediate_size=inner, num_hidden_layers=layers, num_attention_heads=hidden // 64,
    )  # fmt: skip
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder / "floats")
    for path in (ROOT / "models" / "demo-llama").glob("tokenizer*"):
        (folder / "floats" / path.name).write_bytes(path.read_bytes())
    convert(ConvertOptions.of(folder / "floats", folder / "model.gguf", pure=True, effort="fast"), io.StringIO())
    quantized = transformers.AutoModelForCausalLM.from_pretrained(
        folder / "floats", quantization_config=ITQ3SConfig(effort="fast")
    )
    quantized.save_pretrained(folder / "packed")


def anonymous() -> int:
    """Bytes that this process has for itself."""
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(fields["RssAnon"].split()[0]) * 1024


def load(way: str, folder: Path) -> dict[str, float]:
    """Load the model one way: seconds, peak of memory beyond what was there before, bytes of its parameters."""
    import torch
    from transformers import AutoModelForCausalLM

    from gguf_itq3s.transformers import ITQ3SConfig, load_gguf

    torch.set_num_threads(1)
    before, peak, done = anonymous(), [0], threading.Event()

    def watch() -> None:
        while not done.wait(0.01):
            peak[0] = max(peak[0], anonymous())

    watcher = threading.Thread(target=watch)
    watcher.start()
    started = time.monotonic()
    if way == "gguf":
        model = load_gguf(folder / "model.gguf", dtype=torch.bfloat16)
    else:
        options: dict[str, Any] = {"quantization_config": ITQ3SConfig(threads=1)} if way == "quantize" else {}
        model = AutoModelForCausalLM.from_pretrained(folder / ("packed" if way == "packed" else "floats"), **options)
    # Mapped tensors are read when they are used.
    size = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    seconds = time.monotonic() - started
    done.set()
    watcher.join()
    return {"seconds": seconds, "peak": max(peak[0], anonymous()) - before, "size": size}


def table(results: dict[str, dict[str, float]], weights: int, largest: str) -> str:
    """The measurements, a row for each way."""
    rows = [
        [title, f"{found['seconds']:.1f} s", report.size(found["peak"]), report.size(found["size"])]
        for title, found in ((title, results[way]) for way, title in WAYS.items())
    ]
    header = ["", "time", "memory at most", "the model"]
    notes = f"{report.count(weights)} weights, one thread, {largest}."
    return f"{report.markdown(header, rows)}\n{notes}\n"


@report_errors
def main() -> int:
    parser = argparse.ArgumentParser(description="Loading a model with Transformers, in floats and packed.")
    parser.add_argument("--update", type=Path, metavar="PAGE", help="the page whose section to rewrite")
    parser.add_argument("--folder", type=Path, help="where the models are made, and found again")
    parser.add_argument("--experts", action="store_true", help="a mixture of experts")
    parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.way:
        print(json.dumps(load(args.way, args.folder)))
        return 0
    with tempfile.TemporaryDirectory() as scratch:
        folder = args.folder or Path(scratch)
        if not (folder / "packed" / "config.json").is_file():
            make(folder, args.experts)
        results = {}
        for way in WAYS:
            command = [sys.executable, str(Path(__file__)), "--way", way, "--folder", str(folder)]
            done = subprocess.run(command, check=True, capture_output=True, text=True)
            results[way] = json.loads(done.stdout.splitlines()[-1])
    if args.experts:
        largest = f"{report.size(4 * 2 * 2816 * 1024)} the gate and up matrices of an expert in float32"
    else:
        largest = f"{report.size(4 * 5632 * 2048)} the largest matrix in float32"
    text = table(results, int(results["floats"]["size"] / 2), largest)
    if args.update:
        report.replace_section(args.update, "packed loading of experts" if args.experts else "packed loading", text)
    else:
        print(text)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

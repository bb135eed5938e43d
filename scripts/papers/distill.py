#!/usr/bin/env python3
"""Self-distillation: what training a model to its codes adds to calibration, and what it makes of the nearest codes.

    scripts/papers/distill.py models/demo-llama --update scripts/papers/README.md

The student computes with the codes that a file will hold and learns the predictions of the model itself; block scales,
norms and, where a row says so, the token embedding learn too. It starts from the decoded matrices of a file, so that
converting the trained model gives its codes back: decoding a block and encoding it again gives the same bytes. Files
and trained models stay in the work folder; the same command goes on from there.
"""

from __future__ import annotations

import argparse
import copy
import io
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from torch.nn.utils import parametrize
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from gguf_itq3s.base import report
from gguf_itq3s.base.errors import positive, report_errors
from gguf_itq3s.calibrate.options import BUNDLED, CalibrationOptions
from gguf_itq3s.calibrate.text import windows
from gguf_itq3s.codec.native import processors
from gguf_itq3s.convert.options import ConvertOptions
from gguf_itq3s.convert.pipeline import convert
from gguf_itq3s.evaluate.tools import Tools
from gguf_itq3s.transformers import load_gguf
from scripts.papers.coding import Coded, adam, divergence, layer_matrices
from scripts.papers.reference import remembered, test_text

#: The matrices of the layers alone.
KEPT: Final[dict[str, Any]] = {"pure": True, "token_embedding_type": "f16", "output_tensor_type": "f16"}
#: Steps between two encodings, windows of a step, tokens of a window.
EVERY, BATCH, LENGTH = 10, 8, 256


@dataclass(frozen=True)
class Row:
    """A row of the table.

    Attributes:
        how: its first cell.
        start: ``fisher`` or ``nearest``: the file that it begins with.
        steps: of training, 0 for none.
        lr: learning rate of the weights, in shares of their root mean square.
        norm_lr: of norms.
        embedding_lr: of the token embedding.
    """

    how: str
    start: str
    steps: int = 0
    lr: float = 3e-3
    norm_lr: float = 2e-3
    embedding_lr: float = 0.0


ROWS: Final = {
    "fisher": Row("`--layerwise --fisher`", "fisher"),
    "A": Row("... 240 steps, rate 0.0005", "fisher", 240, 5e-4, 1e-3),
    "B": Row("... 240 steps, rate 0.003", "fisher", 240),
    "E": Row("... 160 steps, rate 0.003, embedding 0.001", "fisher", 160, embedding_lr=1e-3),
    "nearest": Row("nearest codes", "nearest"),
    "N": Row("... 60 steps, rate 0.001", "nearest", 60, 1e-3),
}  # fmt: skip


def distill(teacher: Any, student: Any, texts: torch.Tensor, row: Row) -> list[float]:
    """Train a student, in place, until its matrices are the codes that it has learned; the losses, step by step."""
    matrices = list(layer_matrices(student).values())
    student.requires_grad_(False)
    for layer in matrices:
        parametrize.register_parametrization(layer, "weight", Coded(layer.weight.detach(), "itq3_s"))
    coded = [(layer.parametrizations.weight[0], layer.parametrizations.weight.original) for layer in matrices]
    norms = [parameter for name, parameter in student.named_parameters() if "norm" in name]
    groups = [
        ([weight for _, weight in coded], row.lr), ([code.factor for code, _ in coded], 1e-3), (norms, row.norm_lr),
        ([student.get_input_embeddings().weight], row.embedding_lr),
    ]  # fmt: skip
    groups = [group for group in groups if group[1]]
    for parameters, _ in groups:
        for parameter in parameters:
            parameter.requires_grad_(True)
    optimizer, schedule = adam(groups, row.steps)
    order, losses = np.random.default_rng(0).permutation(len(texts)), []
    for step in tqdm(range(row.steps), unit="step", desc=row.how):
        if step % EVERY == 0:
            for code, weight in coded:
                code.encode(weight)
        part = texts[order[np.arange(step * BATCH, (step + 1) * BATCH) % len(order)]]
        with torch.autocast("cpu", dtype=torch.bfloat16):
            with torch.no_grad():
                wanted = teacher(input_ids=part).logits
            loss = divergence(student(input_ids=part).logits, wanted)
        loss.backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    for layer, (code, weight) in zip(matrices, coded, strict=True):
        code.encode(weight)
        parametrize.remove_parametrizations(layer, "weight")  # what it computes with takes the weight's place
    return losses


def files_of(model: Path, text: Path, tokens: int, work: Path, threads: int) -> dict[str, Path]:
    """The file of every row, made if it is not there."""
    quiet = io.StringIO()
    files = {key: work / f"{key}.gguf" for key in ("f16", *ROWS)}
    made: dict[str, dict[str, Any]] = {
        "f16": {"outtype": "f16"}, "nearest": KEPT,
        "fisher": {"calibrate": (text,), "tokens": tokens, "context": 512, "fisher": True, **KEPT},
    }  # fmt: skip
    for key, options in made.items():
        if not files[key].exists():
            convert(ConvertOptions.of(model, files[key], threads=threads, **options), quiet)
    teacher = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval().requires_grad_(False)
    texts = torch.from_numpy(windows(CalibrationOptions(model, [text], tokens=1 << 20, context=LENGTH), LENGTH))
    for key, row in ROWS.items():
        if not row.steps or files[key].exists():
            continue
        student = copy.deepcopy(load_gguf(files[row.start], dtype=torch.float32).dequantize())
        distill(teacher, student, texts, row)
        student.save_pretrained(work / key)
        AutoTokenizer.from_pretrained(model).save_pretrained(work / key)
        convert(ConvertOptions.of(work / key, files[key], equalize=False, threads=threads, **KEPT), quiet)
    return files


@report_errors
def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="Hugging Face folder of a small model with Llama's names")
    parser.add_argument(
        "--text", type=Path, default=BUNDLED, help="to calibrate and train on (default: the bundled mix)"
    )
    parser.add_argument("--tokens", type=positive, default=131072, help="of the calibration (default: %(default)s)")
    parser.add_argument("--chunks", type=positive, default=64, help="windows of 512 to score (default: %(default)s)")
    parser.add_argument("--threads", type=positive, default=processors(), help="default: %(default)s")
    parser.add_argument("--work-dir", type=Path, default=Path("build/distill"), help="default: %(default)s")
    parser.add_argument("--update", type=Path, metavar="FILE", help="put the table between its marks in this file")
    args = parser.parse_args()
    work, tools = args.work_dir, Tools.find(args.threads)
    work.mkdir(parents=True, exist_ok=True)
    files = files_of(args.model, args.text, args.tokens, work, args.threads)
    text, base, log = work / "text.txt", work / "base.kld", work / "log.txt"
    text.write_text(test_text(), encoding="utf-8", newline="\n")
    tools.log_probabilities(files["f16"], text, base, args.chunks, 512, log)
    rows: list[list[str]] = []
    starts: dict[str, float] = {}
    for key, row in ROWS.items():
        content = files[key].read_bytes()
        score = partial(tools.divergence, files[key], base, 512, log)
        found = remembered(work, score, content)
        starts.setdefault(row.start, found["mean_kld"])
        ratio = f"{found['mean_kld'] / starts[row.start]:.3f}" if row.steps else ""
        rows.append([row.how, f"{found['mean_kld']:.5f} ± {found['mean_kld_error']:.5f}", ratio])
    base.unlink()
    table = report.markdown(["", "mean KLD", "over the start's"], rows)
    print(table)
    if args.update:
        report.replace_section(args.update, "distill", table)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

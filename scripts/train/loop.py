"""What both trainings share: texts, windows of tokens, optimizers, a loop that goes on after an interruption."""

from __future__ import annotations

import argparse
import json
import lzma
import math
import re
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

BOS = 1
Loss = Callable[[Any, torch.Tensor], torch.Tensor]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of both."""
    parser.add_argument("--data", type=Path, required=True, help="folder of *.txt and *.txt.xz files")
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument("--layers", type=int, default=6, help="default: %(default)s")
    parser.add_argument("--minutes", type=float, default=100, help="training time (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=0, help="fixed number of steps instead of --minutes")
    parser.add_argument("--batch", type=int, default=16, help="windows per step (default: %(default)s)")
    parser.add_argument("--lr", type=float, default=4e-3, help="peak learning rate (default: %(default)s)")
    parser.add_argument("--repeat", action="append", default=[], metavar="FILE=N", help="take a file N times an epoch")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")


def repeats_of(args: argparse.Namespace) -> dict[str, int]:
    """File name -> how often it is taken."""
    return {name: int(times) for name, _, times in (item.partition("=") for item in args.repeat)}


def read_texts(folder: Path) -> list[tuple[str, str]]:
    """(name, text) of every training file below ``folder``, in name order; a test split is never read."""
    paths = sorted(p for pattern in ("*.txt", "*.txt.xz") for p in folder.rglob(pattern))
    texts = []
    for path in [path for path in paths if path.is_file() and "test" not in path.name.lower()]:
        raw = lzma.decompress(path.read_bytes()) if path.suffix == ".xz" else path.read_bytes()
        text = raw.decode("utf-8-sig")
        if path.name.startswith("wiki."):  # the marks of WikiText's ``.tokens`` form
            text = re.sub(r" @([-,.])@ ", r"\1", text).replace("<unk>", "")
            text = re.sub(r"[ \t]+\n", "\n", re.sub(r"[ \t]{2,}", " ", text))
        texts.append((path.name, text))
    if not texts:
        raise SystemExit(f"error: {folder}: no *.txt or *.txt.xz file to train on")
    return texts


class Windows:
    """Random non-overlapping windows of the token stream: every window once an epoch, then shuffled anew."""

    def __init__(self, tokens: np.ndarray, length: int) -> None:
        self.tokens, self.length = tokens, length - 1  # the first position of a window is BOS
        self.count = tokens.size // self.length - 1
        self._epoch = -1

    def batch(self, step: int, size: int) -> torch.Tensor:
        """int64 (size, length); a pure function of ``step``, so a resumed run reads the same data."""
        rows = np.empty((size, self.length + 1), dtype=np.int64)
        for row in range(size):
            epoch, index = divmod(step * size + row, self.count)
            if self._epoch != epoch:
                rng = np.random.default_rng((1, epoch))
                self._epoch, self._order, self._shift = epoch, rng.permutation(self.count), rng.integers(self.length)
            start = int(self._order[index]) * self.length + int(self._shift)
            rows[row, 0] = BOS
            rows[row, 1:] = self.tokens[start : start + self.length]
        return torch.from_numpy(rows)


def cross_entropy(model: Any, batch: torch.Tensor) -> torch.Tensor:
    """Of the text."""
    batch = batch.to(model.device, non_blocking=True)
    with torch.autocast(batch.device.type, dtype=torch.bfloat16):
        logits = model(input_ids=batch).logits
    return torch.nn.functional.cross_entropy(logits[:, :-1].float().flatten(0, 1), batch[:, 1:].flatten())


def optimizers_of(model: Any, lr: float) -> list[torch.optim.Optimizer]:
    """Muon for matrices (Jordan et al. 2024), AdamW for embeddings and gains."""
    inner = {n: p.ndim == 2 and "embed" not in n and "lm_head" not in n for n, p in model.named_parameters()}
    matrices = [p for n, p in model.named_parameters() if inner[n]]
    others = [p for n, p in model.named_parameters() if not inner[n]]
    return [
        torch.optim.Muon(matrices, lr=lr, weight_decay=0.05, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=lr, betas=(0.9, 0.95), weight_decay=0.0),
    ]


def schedule(share: float) -> float:
    """Learning-rate factor: 1% warm-up, flat to 30% of the budget, then linear to zero."""
    return min(share / 0.01 + 0.01, 1.0) * min((1.0 - share) / 0.7, 1.0)


def train(model: Any, windows: Windows, loss_of: Loss, args: argparse.Namespace, checkpoint: Path) -> list[list[float]]:
    """Train until the budget of ``--steps`` or ``--minutes`` is used up; returns rows of step, seconds and loss.

    Time of training counts, which is in the checkpoint: an interruption does not.
    """
    optimizers = optimizers_of(model, args.lr)
    step, spent, rows, recent = 0, 0.0, [], []
    if checkpoint.exists():
        state = torch.load(checkpoint, map_location=args.device, weights_only=True)
        model.load_state_dict(state["model"])
        for optimizer, saved in zip(optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        step, spent, rows = state["step"], state["spent"], state["log"]

    def save() -> None:
        states = [optimizer.state_dict() for optimizer in optimizers]
        partial = checkpoint.with_suffix(".partial")
        state = {"model": model.state_dict(), "optimizers": states, "step": step, "spent": spent, "log": rows}
        torch.save(state, partial)
        partial.replace(checkpoint)

    # Ctrl-C and a polite kill both end with a checkpoint, also where a shell started the run with SIGINT ignored.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
    model.train()
    saved_at = time.monotonic()
    try:
        with tqdm(initial=step, unit="step") as bar:
            while (share := step / args.steps if args.steps else spent / (args.minutes * 60)) < 1:
                started = time.monotonic()
                for optimizer in optimizers:
                    for group in optimizer.param_groups:
                        group["lr"] = args.lr * schedule(share)
                loss = loss_of(model, windows.batch(step, args.batch))
                loss.backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                for optimizer in optimizers:
                    optimizer.step()
                    optimizer.zero_grad(set_to_none=True)
                recent.append(loss.item())
                if not math.isfinite(recent[-1]):
                    raise SystemExit(f"error: the loss is {recent[-1]} at step {step}; lower --lr")
                step += 1
                spent += time.monotonic() - started
                bar.set_postfix(loss=f"{recent[-1]:.3f}", done=f"{share:.0%}", refresh=False)
                bar.update()
                if step % 50 == 0:
                    rows.append([step, round(spent, 1), round(float(np.mean(recent)), 4)])
                    recent.clear()
                    tqdm.write(f"step {step}, {spent / 60:.1f} min, loss {rows[-1][2]:.4f}", file=sys.stderr)
                if time.monotonic() - saved_at > 300:
                    save()
                    saved_at = time.monotonic()
    except KeyboardInterrupt:
        save()
        raise SystemExit(f"interrupted at step {step}; the same command continues from {checkpoint}") from None
    save()
    return [*rows, [step, round(spent, 1), round(float(np.mean(recent or [rows[-1][2]])), 4)]]


def write_log(folder: Path, rows: list[list[float]], tokens: int) -> None:
    """Write what :func:`train` has logged to training_log.json; ``tokens``: of a step."""
    steps, seconds, *_ = rows[-1]
    facts = {"steps": steps, "tokens": steps * tokens, "minutes": seconds / 60, "log": rows}
    (folder / "training_log.json").write_text(json.dumps(facts) + "\n")

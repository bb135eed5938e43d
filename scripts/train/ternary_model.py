#!/usr/bin/env python3
"""Train a small ternary Llama with straight-through estimation, and export it in Hugging Face form.

    scripts/train/ternary_model.py --data DIR --from models/demo-llama --out build/ternary/model --minutes 40
    scripts/train/ternary_model.py --data DIR --tokenizer models/demo-llama --out build/ternary/small --steps 800

The linear layers compute with W~ = gamma * round(clip(W / gamma, -1, 1)), gamma = eps + mean|W| (BitNet b1.58,
TriTera); the gradient passes the rounding unchanged (Bengio et al. 2013). With ``--from`` the training goes on from
the weights of a float model, which also teaches: the loss is half the cross-entropy of the text and half the KL
divergence from the float model's next-token distribution. Without, it starts from random weights and the text alone,
and ``--float`` trains the same model in float in the same way, to compare with.

Written are ``OUT/latent`` with the latent weights, for ``--ternary force``, ``OUT/ternary`` with gamma multiplied in,
as ternary checkpoints are published, for ``--ternary auto``, and ``OUT/float`` with the float model. Files of a test
split are never read. An interrupted run goes on from its last checkpoint when the same command is given again.
"""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import nn
from tqdm import tqdm
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from gguf_itq3s.codec.ternary import GAMMA_EPSILON  # noqa: E402
from scripts.train import demo_model  # noqa: E402

Loss = Callable[[LlamaForCausalLM, torch.Tensor], torch.Tensor]


def ternary_form(weight: torch.Tensor) -> torch.Tensor:
    """W~ of the docstring above."""
    gamma = GAMMA_EPSILON + weight.abs().mean()
    return gamma * torch.round(torch.clamp(weight / gamma, -1, 1))


class TernaryWeight(nn.Module):
    """A parametrization: the layer sees the ternary form of its latent weight, the gradient is the identity's."""

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight + (ternary_form(weight) - weight).detach()


def layer_matrices(model: LlamaForCausalLM) -> list[nn.Linear]:
    """The linear layers within the blocks; embedding and output head stay in full precision."""
    return [
        module for name, module in model.named_modules() if isinstance(module, nn.Linear) and ".layers." in f".{name}"
    ]


def read_tokens(data: Path, tokenizer_dir: Path, characters: int, repeats: dict[str, int]) -> np.ndarray:
    """Token ids of up to ``characters`` of each text below ``data``, files named in ``repeats`` several times."""
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_dir)
    parts: list[np.ndarray] = []
    for name, whole in demo_model.read_texts(data):
        text = whole[:characters]
        ids: list[int] = []
        for start in tqdm(range(0, len(text), 100_000), desc=f"tokenize {name}", leave=False):
            ids += tokenizer(text[start : start + 100_000], add_special_tokens=False, verbose=False)["input_ids"]
        parts += [np.array(ids, dtype=np.int32)] * repeats.get(name, 1)
    return np.concatenate(parts)


def distillation(teacher: LlamaForCausalLM) -> Loss:
    """Half the text's cross-entropy, half the KL divergence from ``teacher``."""

    def loss(model: LlamaForCausalLM, batch: torch.Tensor) -> torch.Tensor:
        batch = batch.to(next(model.parameters()).device, non_blocking=True)
        with torch.autocast(batch.device.type, dtype=torch.bfloat16):
            with torch.no_grad():
                soft = torch.softmax(teacher(input_ids=batch).logits[:, :-1].float(), dim=-1)
            logits = model(input_ids=batch).logits[:, :-1].float()
        # Both terms are cross-entropies, with the teacher's distribution and with the text: one with their mean. The
        # teacher's own entropy is left out; it has no gradient.
        soft *= 0.5
        soft.scatter_add_(-1, batch[:, 1:, None], torch.full_like(batch[:, 1:, None], 0.5, dtype=soft.dtype))
        return nn.functional.cross_entropy(logits.flatten(0, 1), soft.flatten(0, 1))

    return loss


def train(model: LlamaForCausalLM, windows: demo_model.Windows, loss_of: Loss, args: argparse.Namespace,
          checkpoint: Path) -> list[list[float]]:  # fmt: skip
    """Train until the budget of ``--steps`` or ``--minutes`` is used up; returns rows of step, seconds and loss."""
    optimizers = demo_model.optimizers(model, args.lr, args.lr)
    step, spent, rows, recent = 0, 0.0, [], []
    if checkpoint.exists():
        state = torch.load(checkpoint, map_location=args.device, weights_only=True)
        model.load_state_dict(state["model"])
        for optimizer, saved in zip(optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        step, spent, rows = state["step"], state["spent"], state["log"]

    def save() -> None:
        states = [optimizer.state_dict() for optimizer in optimizers]
        state = {"model": model.state_dict(), "optimizers": states, "step": step, "spent": spent, "log": rows}
        demo_model.save_checkpoint(checkpoint, state)

    # Ctrl-C and a polite kill both end with a checkpoint, also where a shell started the run with SIGINT ignored.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
    model.train()
    saved_at = time.monotonic()
    total = args.steps or round(args.minutes * 60)
    try:
        with tqdm(total=total, initial=step if args.steps else round(spent), unit="step" if args.steps else "s") as bar:
            while (share := step / args.steps if args.steps else spent / (args.minutes * 60)) < 1:
                started = time.monotonic()
                for optimizer in optimizers:
                    for group in optimizer.param_groups:
                        group["lr"] = args.lr * demo_model.schedule(share)
                loss = loss_of(model, windows.batch(step, args.batch))
                loss.backward()
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                for optimizer in optimizers:
                    optimizer.step()
                    optimizer.zero_grad(set_to_none=True)
                recent.append(loss.item())
                if not np.isfinite(recent[-1]):
                    raise SystemExit(f"error: the loss is {recent[-1]} at step {step}; lower --lr")
                step += 1
                spent += time.monotonic() - started
                bar.set_postfix(loss=f"{recent[-1]:.3f}", refresh=False)
                bar.update(1 if args.steps else time.monotonic() - started)
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


def export(model: LlamaForCausalLM, tokenizer_dir: Path, out: Path) -> None:
    """Write the model in float32 (a latent weight rounded to F16 may ternarize otherwise) with its tokenizer."""
    model.config.use_cache = True
    model.float().save_pretrained(out)
    for name in ("tokenizer.model", "tokenizer_config.json", "tokenizer.json"):
        if (tokenizer_dir / name).is_file():
            shutil.copyfile(tokenizer_dir / name, out / name)


def ternarize(model: LlamaForCausalLM, windows: demo_model.Windows, loss: Loss, args: argparse.Namespace) -> None:
    """Train ``model`` with ternary matrices and write ``latent`` and ``ternary``."""
    matrices = layer_matrices(model)
    for layer in matrices:
        nn.utils.parametrize.register_parametrization(layer, "weight", TernaryWeight())
    rows = train(model, windows, loss, args, args.out / "ternary.pt")
    for layer in matrices:  # leave the latent weight in place
        nn.utils.parametrize.remove_parametrizations(layer, "weight", leave_parametrized=False)
    export(model, args.tokenizer, args.out / "latent")
    with torch.no_grad():
        for layer in matrices:
            layer.weight.copy_(ternary_form(layer.weight))
    export(model, args.tokenizer, args.out / "ternary")
    summary = {
        "from": str(args.source) if args.source else None, "steps": rows[-1][0], "batch": args.batch,
        "length": args.length, "tokens": rows[-1][0] * args.batch * args.length, "lr": args.lr,
        "minutes": round(rows[-1][1] / 60, 1), "device": args.device, "log": rows,
    }  # fmt: skip
    (args.out / "training_log.json").write_text(json.dumps(summary) + "\n")
    print(f"loss {rows[-1][2]:.3f} after {rows[-1][0]} steps, {rows[-1][1] / 60:.1f} minutes")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder of *.txt and *.txt.xz files")
    start = parser.add_mutually_exclusive_group(required=True)
    start.add_argument("--from", dest="source", type=Path, help="Hugging Face folder of the Llama to start from")
    start.add_argument("--tokenizer", type=Path, help="start from random weights, with this folder's tokenizer")
    parser.add_argument("--out", type=Path, required=True, help="folder for latent/, ternary/, float/, checkpoints")
    parser.add_argument("--float", action="store_true", help="without --from: train the float model too")
    parser.add_argument("--steps", type=int, default=0, help="a fixed number of steps instead of --minutes")
    parser.add_argument("--minutes", type=float, default=40, help="training time (default: %(default)s)")
    parser.add_argument("--batch", type=int, default=8, help="windows per step (default: %(default)s)")
    parser.add_argument("--length", type=int, default=256, help="tokens of a window (default: %(default)s)")
    parser.add_argument("--lr", type=float, default=4e-3, help="peak learning rate (default: %(default)s)")
    parser.add_argument("--layers", type=int, default=2, help="without --from (default: %(default)s)")
    parser.add_argument("--characters", type=int, default=100_000_000, help="of each text (default: %(default)s)")
    parser.add_argument("--repeat", action="append", default=[], metavar="FILE=N", help="take a file N times an epoch")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    args.tokenizer = args.source or args.tokenizer
    stream = args.out / "tokens.npy"
    if not stream.exists():
        repeats = {name: int(times) for name, _, times in (item.partition("=") for item in args.repeat)}
        partial = args.out / "partial.npy"
        np.save(partial, read_tokens(args.data, args.tokenizer, args.characters, repeats))
        partial.replace(stream)
    tokens = np.load(stream, mmap_mode="r")
    windows = demo_model.Windows(tokens, args.length)
    print(f"{tokens.size} tokens of text")

    torch.manual_seed(0)
    if args.source:
        teacher = LlamaForCausalLM.from_pretrained(args.source, dtype=torch.float32).to(args.device).eval()
        model = LlamaForCausalLM.from_pretrained(args.source, dtype=torch.float32).to(args.device)
        model.config.use_cache = False
        export(teacher, args.tokenizer, args.out / "float")
        ternarize(model, windows, distillation(teacher), args)
        return 0
    config = LlamaConfig(
        vocab_size=len(AutoTokenizer.from_pretrained(args.tokenizer)), hidden_size=256, intermediate_size=512,
        num_hidden_layers=args.layers, num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=512,
        tie_word_embeddings=True, bos_token_id=1, eos_token_id=2, use_cache=False,
    )  # fmt: skip
    first = LlamaForCausalLM(config).to(args.device)
    weights = {name: tensor.clone() for name, tensor in first.state_dict().items()}
    ternarize(first, windows, demo_model.loss_of, args)
    if args.float:
        model = LlamaForCausalLM(config).to(args.device)
        model.config.use_cache = False  # the export above has set the shared config
        model.load_state_dict(weights)
        train(model, windows, demo_model.loss_of, args, args.out / "float.pt")
        export(model, args.tokenizer, args.out / "float")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

#!/usr/bin/env python3
"""Train a tiny ternary Llama with straight-through estimation, and export it in Hugging Face form.

    scripts/train/ternary_model.py --data DIR --tokenizer models/demo-llama --out build/ternary/model

The linear layers compute with W~ = gamma * round(clip(W / gamma, -1, 1)), gamma = eps + mean|W| (BitNet b1.58,
TriTera); the gradient passes the rounding unchanged (Bengio et al. 2013). Written are ``OUT/latent`` with the latent
weights, for ``--ternary force``, and ``OUT/ternary`` with gamma multiplied in, as ternary checkpoints are published,
for ``--ternary auto``. Minutes on two cores.
"""

from __future__ import annotations

import argparse
import lzma
import shutil
import sys
from pathlib import Path

import numpy as np
import torch
from torch import nn
from tqdm import tqdm
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from gguf_itq3s.codec.ternary import GAMMA_EPSILON  # noqa: E402


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


def read_tokens(data: Path, tokenizer_dir: Path, limit: int) -> np.ndarray:
    """Up to ``limit`` characters of the first text file below ``data`` that is no test split, as token ids."""
    paths = sorted(p for pattern in ("*.txt", "*.txt.xz") for p in data.rglob(pattern) if "test" not in p.name)
    if not paths:
        raise SystemExit(f"error: {data}: no *.txt or *.txt.xz file to train on")
    opener = lzma.open if paths[0].suffix == ".xz" else open
    with opener(paths[0], "rt", encoding="utf-8", errors="replace") as file:
        text = file.read(limit)
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_dir)
    ids: list[int] = []
    for start in range(0, len(text), 100_000):
        ids += tokenizer(text[start : start + 100_000], add_special_tokens=False, verbose=False)["input_ids"]
    return np.array(ids, dtype=np.int64)


def train(model: LlamaForCausalLM, tokens: np.ndarray, steps: int, batch: int, length: int, rate: float) -> float:
    """Adam with a linear decay; returns the mean loss of the last tenth."""
    rng = np.random.default_rng(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.9, 0.95), weight_decay=0.0)
    losses: list[float] = []
    with tqdm(total=steps, unit="step") as bar:
        for step in range(steps):
            starts = rng.integers(0, tokens.size - length, batch)
            ids = torch.from_numpy(np.stack([tokens[s : s + length] for s in starts]))
            for group in optimizer.param_groups:
                group["lr"] = rate * min(1.0, step / 20 + 0.05) * (1 - step / steps)
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            losses.append(loss.item())
            bar.set_postfix(loss=f"{losses[-1]:.3f}")
            bar.update()
    return float(np.mean(losses[-max(1, steps // 10) :]))


def export(model: LlamaForCausalLM, tokenizer_dir: Path, out: Path) -> None:
    """Write the model in float32 (a latent weight rounded to F16 may ternarize otherwise) with its tokenizer."""
    model.save_pretrained(out)
    for name in ("tokenizer.model", "tokenizer_config.json", "tokenizer.json"):
        if (tokenizer_dir / name).is_file():
            shutil.copyfile(tokenizer_dir / name, out / name)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder of *.txt and *.txt.xz files")
    parser.add_argument("--tokenizer", type=Path, required=True, help="Hugging Face folder whose tokenizer is used")
    parser.add_argument("--out", type=Path, required=True, help="folder for latent/ and ternary/")
    parser.add_argument("--steps", type=int, default=800, help="default: %(default)s")
    parser.add_argument("--batch", type=int, default=4, help="windows per step (default: %(default)s)")
    parser.add_argument("--length", type=int, default=128, help="tokens of a window (default: %(default)s)")
    parser.add_argument("--layers", type=int, default=2, help="default: %(default)s")
    parser.add_argument("--characters", type=int, default=3_000_000, help="of the text (default: %(default)s)")
    args = parser.parse_args()

    tokens = read_tokens(args.data, args.tokenizer, args.characters)
    vocab = len(AutoTokenizer.from_pretrained(args.tokenizer))
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=vocab, hidden_size=256, intermediate_size=512, num_hidden_layers=args.layers,
            num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=512, tie_word_embeddings=True,
            bos_token_id=1, eos_token_id=2, use_cache=False,
        )
    )  # fmt: skip
    matrices = layer_matrices(model)
    for layer in matrices:
        nn.utils.parametrize.register_parametrization(layer, "weight", TernaryWeight())
    loss = train(model, tokens, args.steps, args.batch, args.length, 3e-3)
    print(f"loss {loss:.3f} over the last tenth of {args.steps} steps, {tokens.size} tokens of text")

    for layer in matrices:  # leave the latent weight in place
        nn.utils.parametrize.remove_parametrizations(layer, "weight", leave_parametrized=False)
    model.config.use_cache = True
    export(model, args.tokenizer, args.out / "latent")
    with torch.no_grad():
        for layer in matrices:
            layer.weight.copy_(ternary_form(layer.weight))
    export(model, args.tokenizer, args.out / "ternary")
    print(f"wrote {args.out / 'latent'} and {args.out / 'ternary'}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

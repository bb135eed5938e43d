#!/usr/bin/env python3
"""Train a small ternary Llama from a float one with straight-through estimation, and export it.

    scripts/train/ternary_model.py --data DIR --from models/demo-llama --out build/ternary/model --minutes 40

The linear layers compute with W~ = gamma * round(clip(W / gamma, -1, 1)), gamma = eps + mean|W| (BitNet b1.58,
TriTera); the gradient passes the rounding unchanged (Bengio et al. 2013). The float model teaches: the loss is half
the cross-entropy of the text and half the KL divergence from its next-token distribution.

Written are ``OUT/latent`` with the latent weights, for ``--ternary force``, ``OUT/ternary`` with gamma multiplied in,
as ternary checkpoints are published, for ``--ternary auto``, and ``OUT/float`` with the float model. Files of a test
split are never read. An interrupted run goes on from its last checkpoint when the same command is given again.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.utils import parametrize
from tqdm import tqdm
from transformers import AutoTokenizer, LlamaForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from gguf_itq3s.codec.ternary import GAMMA_EPSILON
from scripts.papers.coding import layer_matrices
from scripts.train import loop

LENGTH = 256
#: Of each text.
CHARACTERS = 100_000_000


def ternary_form(weight: torch.Tensor) -> torch.Tensor:
    """W~ of the docstring above."""
    gamma = GAMMA_EPSILON + weight.abs().mean()
    return gamma * torch.round(torch.clamp(weight / gamma, -1, 1))


class TernaryWeight(nn.Module):
    """A parametrization: the layer sees the ternary form of its latent weight, the gradient is the identity's."""

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight + (ternary_form(weight) - weight).detach()


def read_tokens(args: argparse.Namespace) -> np.ndarray:
    """Token ids of the texts, files named in ``--repeat`` several times."""
    tokenizer, repeats = AutoTokenizer.from_pretrained(args.source), loop.repeats_of(args)
    parts: list[np.ndarray] = []
    for name, text in loop.read_texts(args.data):
        ids: list[int] = []
        for start in tqdm(range(0, min(len(text), CHARACTERS), 100_000), desc=f"tokenize {name}", leave=False):
            ids += tokenizer(text[start : start + 100_000], add_special_tokens=False, verbose=False)["input_ids"]
        parts += [np.array(ids, dtype=np.int32)] * repeats.get(name, 1)
    return np.concatenate(parts)


def taught_by(teacher: LlamaForCausalLM) -> loop.Loss:
    """Half the text's cross-entropy, half the KL divergence from ``teacher``."""

    def loss(model: Any, batch: torch.Tensor) -> torch.Tensor:
        batch = batch.to(model.device, non_blocking=True)
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


def export(model: LlamaForCausalLM, tokenizer: Path, out: Path) -> None:
    """Write the model in float32 (a latent weight rounded to F16 may ternarize otherwise) with its tokenizer."""
    model.config.use_cache = True
    model.float().save_pretrained(out)
    AutoTokenizer.from_pretrained(tokenizer).save_pretrained(out)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    loop.add_arguments(parser)
    parser.add_argument("--from", dest="source", type=Path, required=True, help="Hugging Face folder of a Llama")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    stream = args.out / "tokens.npy"
    if not stream.exists():
        partial = args.out / "partial.npy"
        np.save(partial, read_tokens(args))
        partial.replace(stream)
    torch.manual_seed(0)
    teacher, model = (
        LlamaForCausalLM.from_pretrained(args.source, dtype=torch.float32).to(args.device) for _ in range(2)
    )
    export(teacher.eval(), args.source, args.out / "float")
    model.config.use_cache = False
    matrices = list(layer_matrices(model).values())
    for layer in matrices:
        parametrize.register_parametrization(layer, "weight", TernaryWeight())
    windows = loop.Windows(np.load(stream, mmap_mode="r"), LENGTH)
    rows = loop.train(model, windows, taught_by(teacher), args, args.out / "ternary.pt")
    for layer in matrices:  # leave the latent weight in place
        parametrize.remove_parametrizations(layer, "weight", leave_parametrized=False)
    export(model, args.source, args.out / "latent")
    with torch.no_grad():
        for layer in matrices:
            layer.weight.copy_(ternary_form(layer.weight))
    export(model, args.source, args.out / "ternary")
    loop.write_log(args.out, rows, args.batch * LENGTH)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

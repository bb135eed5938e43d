"""KL divergence between two runs of llama-perplexity on the fixed prose."""

from __future__ import annotations

import re
from pathlib import Path

import llama
from checkpoints import NOVEL

_WINDOWS = ("-c", "128", "--chunks", "16", "-t", "1")


def log_probabilities(model: Path, out: Path, *arguments: str | Path) -> Path:
    """Score a model, with ``arguments`` such as an adapter; returns ``out``, what others are compared with."""
    llama.run("llama-perplexity", "-m", model, "-f", NOVEL, "--kl-divergence-base", out, *_WINDOWS, *arguments)
    return out


def mean_kld(model: Path, base: Path, *arguments: str | Path) -> float:
    """Mean KL divergence, nats, from what :func:`log_probabilities` wrote."""
    done = llama.run(
        "llama-perplexity", "-m", model, "--kl-divergence", "--kl-divergence-base", base, *_WINDOWS, *arguments
    )
    match = re.search(r"^Mean    KLD:\s*(\S+)\s+±", done.stdout, re.M)
    assert match, done.stdout[-500:] + done.stderr[-500:]
    return float(match[1])

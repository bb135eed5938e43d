"""KL divergence between two runs of llama-perplexity on the fixed prose."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np

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


def read_log_probabilities(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """What :func:`log_probabilities` wrote.

    Returns:
        tokens (windows, context), and log-probabilities float32 (windows, scored, vocabulary) of what follows the
        tokens from the middle of a window on; those 16 below the likeliest are cut off there.
    """
    data = path.read_bytes()
    assert data[:8] == b"_logits_"
    context, vocabulary, windows = np.frombuffer(data, "<i4", 3, 8)
    tokens = np.frombuffer(data, "<i4", windows * context, 20).reshape(windows, context)
    words = 2 * ((vocabulary + 1) // 2) + 4
    rows = np.frombuffer(data, "<u2", offset=20 + 4 * windows * context).reshape(windows, -1, words)
    scale, least = rows[..., :2].copy().view("<f4"), rows[..., 2:4].copy().view("<f4")
    return tokens, least + scale * rows[..., 4 : 4 + vocabulary]

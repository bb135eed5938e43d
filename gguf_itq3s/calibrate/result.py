"""What a quantized model has lost, on windows that no sum has seen."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final, TextIO

import numpy as np
import torch

from ..base.memory import give_back
from .activations import activation_path, activations
from .finished import STREAMS
from .layers import LayeredModel
from .matrices import Source
from .options import BUNDLED
from .ranks import ALONE, Ranks
from .shares import Batches
from .text import Text

#: Tokens that the result is measured on at most: their logits are held twice.
MEASURED: Final = 1024


def say(
    folder: Path, model: LayeredModel, source: Source, text: Text, batches: Batches, messages: TextIO,
    ranks: Ranks = ALONE,
) -> None:  # fmt: skip
    """Print perplexity and KL divergence of the quantized model on the windows held out.

    Args:
        folder: of this rank's work, with both streams behind the last layer.
        text: the windows of this rank.
    """
    inputs = text.tokens
    behind_last = [activation_path(folder / stream, model.layers, model.dtype) for stream in STREAMS]
    windows = sum(map(len, batches.held)) + batches.elsewhere
    if not windows or not ranks.all(all(path.exists() for path in behind_last)):
        return
    give_back()
    # The second half of a window has context, and its last token no successor.
    context = inputs.shape[1]
    count = min(context // 2 - 1, max(1, MEASURED // windows))
    places = np.linspace(context // 2, context - 2, count).astype(np.int64)
    sums = np.zeros((len(text.files), 4))
    if batches.held:
        held = np.concatenate(batches.held)
        for number, found in zip(text.of[held], _sums(folder, model, source, inputs, held, places), strict=True):
            sums[number] += found
    sums = np.array(ranks.sums(*sums.reshape(-1))).reshape(sums.shape)
    tokens, before, now, divergence = sums.sum(axis=0)
    print(
        f"on {tokens:.0f} tokens that were held out: perplexity {np.exp(now / tokens):.4g}, of the original "
        f"{np.exp(before / tokens):.4g}; mean KL divergence {divergence / tokens:.4f}",
        file=messages,
    )
    if len(text.files) > 1:
        names = ["bundled" if path == BUNDLED else path.name for path in text.files]
        named = [
            f"{name} {total / count:.4f}" if count else f"{name} not held out"
            for name, (count, _, _, total) in zip(names, sums, strict=True)
        ]
        print(f"by text: {', '.join(named)}", file=messages)


def _sums(
    folder: Path, model: LayeredModel, source: Source, inputs: np.ndarray, numbers: np.ndarray, places: np.ndarray
) -> np.ndarray:
    """For each window (windows, 4) over its tokens: how many, what their successors cost in the original and in the
    quantized model, the divergence."""
    labels = torch.from_numpy(inputs[numbers][:, places + 1].reshape(-1)).split(MEASURED // 8)

    def log_likely(stream: str, weights: Iterable[np.ndarray] | None) -> Iterator[torch.Tensor]:
        shape = (*inputs.shape, model.hidden)
        behind = activations(folder / stream, model.layers, shape, "r", model.dtype)
        hidden = torch.from_numpy(behind[numbers][:, places].reshape(1, -1, model.hidden))
        with torch.no_grad(), model.head(weights) as head:
            for part in hidden.split(MEASURED // 8, 1):
                yield torch.log_softmax(head(part.to(model.device))[0].float().cpu(), -1)

    originals = list(log_likely(STREAMS[0], None))
    found = []
    for original, quantized, right in zip(
        originals, log_likely(STREAMS[1], source.output()), labels, strict=True
    ):  # a part at a time: a vocabulary is wide
        rows = torch.arange(len(right))
        costs = -original[rows, right], -quantized[rows, right], (original.exp() * (original - quantized)).sum(-1)
        found.append(torch.stack([torch.ones(len(right)), *costs], 1).double())
    return np.asarray(torch.cat(found).reshape(len(numbers), len(places), 4).sum(1).numpy())

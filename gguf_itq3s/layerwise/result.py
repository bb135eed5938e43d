"""What a quantized model has lost, on windows that no sum has seen."""

from __future__ import annotations

from pathlib import Path
from typing import Final, TextIO

import numpy as np
import torch

from ..calibration.activations import activation_path, activations
from ..calibration.layers import LayeredModel
from .finished import STREAMS
from .matrices import Source
from .streams import Batches

#: Tokens that the result is measured on at most: their logits are held twice.
MEASURED: Final = 1024


def say(
    folder: Path, model: LayeredModel, source: Source, inputs: np.ndarray, batches: Batches, messages: TextIO
) -> None:
    """Print perplexity and KL divergence of the quantized model.

    Args:
        folder: of work, with both streams behind the last layer.
        model: the original.
        source: what was quantized.
        inputs: tokens, int64 (windows, context).
        batches: which of them are held out.
        messages: where it is said.
    """
    behind_last = [activation_path(folder / stream, model.layers) for stream in STREAMS]
    if not batches.held or not all(path.exists() for path in behind_last):
        return
    numbers = np.concatenate(batches.held)
    # The second half of a window has context, and its last token no successor.
    context = inputs.shape[1]
    count = min(context // 2 - 1, max(1, MEASURED // len(numbers)))
    places = np.linspace(context // 2, context - 2, count).astype(np.int64)
    labels = torch.from_numpy(inputs[numbers][:, places + 1].reshape(-1))
    log_likely = []
    for stream, weights in zip(STREAMS, (None, source.output()), strict=True):
        behind = activations(folder / stream, model.layers, (*inputs.shape, model.hidden), "r")
        hidden = torch.from_numpy(behind[numbers][:, places].reshape(1, -1, model.hidden))
        with torch.no_grad(), model.head(weights) as head:
            parts = [head(part.to(model.device))[0].float().cpu() for part in hidden.split(MEASURED // 8, 1)]
        log_likely.append(torch.log_softmax(torch.cat(parts), -1))
    original, quantized = log_likely
    rows = torch.arange(len(labels))
    before, now = (float(torch.exp(-each[rows, labels].mean())) for each in log_likely)
    divergence = float((original.exp() * (original - quantized)).sum(-1).mean())
    print(
        f"on {len(labels)} tokens that were held out: perplexity {now:.4g}, of the original {before:.4g}; "
        f"mean KL divergence {divergence:.4f}",
        file=messages,
    )

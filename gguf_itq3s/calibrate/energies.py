"""Mean squares of the inputs of a model's matrices, from a short run: what equalization asks, and no more.

A layer at a time, like a calibration, but without Hessians: some thousand tokens tell the size of every column, and
cost a forward pass of them.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TextIO

import numpy as np
import numpy.typing as npt
from tqdm import tqdm

from ..checkpoint.source import Checkpoint
from ..rounding.factors import tensor_entry
from .activations import activations
from .inputs import Seen
from .layers import LayeredModel, quick_products
from .options import CalibrationOptions
from .statistics import bytes_of_expert, run_layer
from .text import windows


@dataclass(frozen=True)
class MeasuredEnergies:
    """Mean squares of inputs, as :class:`gguf_itq3s.rounding.factors.Energies`.

    Attributes:
        means: matrix -> float64 (n,), without the gain of ``norms``.
        norms: matrix -> the norm whose gain is left out.
    """

    path: Path
    means: Mapping[str, npt.NDArray[np.float64]]
    norms: Mapping[str, str] = field(default_factory=dict)

    def known(self, name: str) -> bool:
        return name in self.means or tensor_entry(name, 0) in self.means

    def left_out(self, name: str, expert: int | None) -> str | None:
        return self.norms.get(tensor_entry(name, expert))

    def diagonal(self, name: str, columns: int, expert: int | None) -> npt.NDArray[np.float64] | None:
        found = self.means.get(tensor_entry(name, expert))
        if found is not None and found.size != columns:
            raise ValueError(f"the statistics have {found.size} columns, the matrix {columns}")
        return found


@quick_products()
def measure(options: CalibrationOptions, checkpoint: Checkpoint, messages: TextIO) -> MeasuredEnergies:
    """Run a model and measure its inputs.

    Raises:
        UserError: the model or the text cannot be used.
        OSError: there is no room for the inputs of the first layer, for a moment.
    """
    model = LayeredModel(options, checkpoint)
    inputs = windows(replace(options, context=min(options.context or model.context, model.context)), model.context)
    batches = [np.arange(i, min(i + options.batch, len(inputs))) for i in range(0, len(inputs), options.batch)]
    with tempfile.TemporaryDirectory() as scratch:
        keywords = model.start(Path(scratch), inputs, batches, 0)
        hidden = np.array(activations(Path(scratch), 0, (*inputs.shape, model.hidden), "r", model.dtype)[:])
    means: dict[str, npt.NDArray[np.float64]] = {}
    norms: dict[str, str] = {}
    progress = tqdm(total=model.layers, unit=" layers", file=messages, mininterval=0.5, desc="sizes of inputs")
    with progress as bar, tempfile.TemporaryDirectory() as scratch:
        for number in range(model.layers):
            groups = model.layout.groups(number, model.blocks[number])
            sums = {group.key: np.zeros(group.columns) for group in groups}
            tokens = dict.fromkeys(sums, 0)

            def add(seen: Seen, sums: dict[str, np.ndarray] = sums, tokens: dict[str, int] = tokens) -> None:
                for group in seen.groups:
                    rows = seen.rows(group)
                    sums[group.key] += rows.double().square().sum(dim=0).cpu().numpy()
                    tokens[group.key] += rows.shape[0]

            run_layer(
                model, number, hidden, hidden, batches, keywords[number], Path(scratch),
                lambda found: bytes_of_expert(found, options), add,
            )  # fmt: skip
            for group in groups:
                # Of what saw no token nothing is known.
                for reader in group.readers if tokens[group.key] and sums[group.key].any() else ():
                    means[reader.entry] = sums[group.key] / tokens[group.key]
                    if group.norm is not None:
                        norms[reader.entry] = group.norm
            bar.update()
    return MeasuredEnergies(options.model, means, norms)

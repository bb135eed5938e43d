"""Output Fisher matrices of layers whose experts are too large to be in memory together.

The experts run in groups outside the layer (:mod:`gguf_itq3s.calibrate.mixture`), forward and backward. What comes
into them, what they put out and the gradient behind it are kept for all windows. The products of each group are
computed anew with gradients: these go to the sums, and to the gradients of what came into the experts, with which the
rest of the layer is differentiated. The matrices of a group are written before the next group comes; those of down,
which are drawn to the mean of all experts, are read and written once more when that is known.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from ..base.journal import save_arrays
from ..checkpoint import experts
from ..torch.outside import Outside
from . import mixture
from .activations import Activations, activations
from .backward import _GRADIENTS, OutputFisher
from .gradients import PRIOR, GradientSums, check_finite
from .groups import Reader
from .layers import LayeredModel
from .mixture import Batch, Expert, Mixture, Routed
from .shares import Batches

#: Folder for what is kept of a layer's experts.
_KEPT = "experts"


class GroupedFisher(OutputFisher):
    """Output Fisher matrices, large layers of experts in groups of these."""

    def blocks(self, reader: Reader, number: int) -> list[np.ndarray]:
        """As :meth:`OutputFisher.blocks`."""
        found = super().blocks(reader, number)
        for path in () if found or reader.expert is None else sorted(self.folder.glob(f"{_stem(number)}-*")):
            with safe_open(path, framework="numpy") as file:
                names = sorted(name for name in file.keys() if name.rpartition("/")[0] == reader.entry)  # noqa: SIM118
                found += [file.get_tensor(name) for name in names]
        return found

    def _forward(
        self, model: LayeredModel, number: int, source: Activations, target: Activations,
        batches: Sequence[np.ndarray], keywords: dict[int, dict[str, Any]],
    ) -> None:  # fmt: skip
        found = self._find(model, number)
        if found is None:
            super()._forward(model, number, source, target, batches, keywords)
            return
        routed = Routed(self._own() / _KEPT, *source.shape[:2])
        with found.loaded() as layer:
            mixture.run(found, layer, routed, source, batches, keywords, 4 * found.weights)
            outside = found.outside(layer)
            for batch in batches:
                outside.answer = mixture.given(routed, batch)
                target[batch] = model.step(layer, source[batch], keywords[len(batch)])
        routed.close()

    def _load_backward(
        self, model: LayeredModel, number: int, shape: tuple[int, ...], batches: Batches,
        keywords: dict[int, dict[str, Any]], *, again: bool,
    ) -> tuple[int, int]:  # fmt: skip
        found = self._find(model, number)
        if found is None:
            return super()._load_backward(model, number, shape, batches, keywords, again=again)
        groups = model.layout.groups(number, model.base.layers[number])
        readers = [reader for group in groups if group.path == found.path for reader in group.readers]
        source = activations(self._own(), number, shape, "r", model.dtype)
        behind = activations(self._own() / _GRADIENTS, number + 1, shape, "r", model.dtype)
        routed = Routed(self._own() / _KEPT, *shape[:2])
        with found.loaded() as layer:
            mixture.run(found, layer, routed, source, batches.all, keywords, 4 * found.weights)
            outside = found.outside(layer)
            for batch in batches.all:
                gradient = _behind_experts(model, layer, outside, routed, batch, source, behind, keywords)
                routed.put("behind", batch, gradient)
            (tokens,) = self._ranks.numbers(shape[0] * shape[1])
            few = self._experts(found, () if again else readers, routed, batches.all, int(tokens))
            # The layer is called once for each batch, in this order.
            order = iter(batches.all)

            def answer(hidden: torch.Tensor, _: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
                batch = next(order)
                output = routed.output(batch, hidden.device).reshape(hidden.shape)
                of_hidden = routed.values("of hidden", batch, hidden.device).reshape(hidden.shape)
                of_weights = routed.values("of weights", batch, hidden.device).reshape(weights.shape)
                return _Known.apply(hidden, weights, output, of_hidden, of_weights)

            outside.answer = answer
            others = self._backward(model, number, layer, shape, batches, keywords, again=again)
        routed.close()
        return few + others[0], len(readers) + others[1]

    def _find(self, model: LayeredModel, number: int) -> Mixture | None:
        return mixture.find(model, number, self._each)

    def _each(self, found: Mixture) -> int:
        """Bytes of one expert: its weights, and the sums of the gradients of its three matrices."""
        hidden, inner = found.columns
        sizes = (rows * (rows if rows <= self._full else self._block) for rows in (inner, inner, hidden))
        return 4 * found.weights + 8 * sum(sizes)

    def _experts(
        self, found: Mixture, readers: Sequence[Reader], routed: Routed, batches: Sequence[Batch], tokens: int
    ) -> int:
        """The matrices of all experts to files, and the gradients of what came into them.

        Args:
            found: the experts.
            readers: their matrices; none where the files are there already.
            routed: what came into the experts, and the gradients behind them.
            batches: windows of this rank that run together.
            tokens: of all ranks.

        Returns:
            How many matrices saw so few tokens that their own count for less.
        """
        entries: dict[tuple[int, str], list[str]] = {}
        for reader in readers:
            assert reader.expert is not None
            # Gate before up, as their rows are.
            entries.setdefault((reader.expert, reader.parameter), []).append(reader.entry)
        for batch in batches:
            routed.put("of hidden", batch, torch.zeros_like(routed.hidden(batch, torch.device("cpu"))))
            routed.put("of weights", batch, torch.zeros_like(routed.weights(batch, torch.device("cpu"))))
        downs = _Downs()
        few = 0
        for count, numbers in enumerate(found.groups(self._each(found))):
            sums = GradientSums(self._full, self._block, found.model.device)
            loaded = found.load(numbers)
            for batch in batches:
                _add(routed, batch, loaded, entries, sums, found.model.device)
            del loaded
            sums.add_up([reader for reader in readers if reader.expert in numbers], self._ranks)
            if not readers or not self._ranks.first:
                continue
            for number in numbers:
                for entry in entries.get((number, experts.GATE_UP), ()):
                    few += sums.draw_to_diagonal(entry)
                for entry in entries.get((number, experts.DOWN), ()):
                    downs.add(entry, sums)
            matrices = dict(sums.means(tokens))
            check_finite(found.model.folder, matrices)
            of_down = {name: matrices.pop(name) for name in list(matrices) if "ffn_down" in name}
            save_arrays(matrices, self.folder / f"{_stem(found.number)}-{count:04d}.safetensors")
            path = self.folder / f"{_stem(found.number)}-{count:04d}-down.safetensors"
            save_arrays(of_down, path)
            downs.files[path] = [entry for number in numbers for entry in entries.get((number, experts.DOWN), ())]
        # Of gate and up of experts without a token nothing is known, and their matrices count among the few.
        return few + downs.write(tokens)


@dataclass
class _Downs:
    """The matrices of down, which are drawn to the mean of all experts.

    Attributes:
        counts: entry -> tokens.
        together: the sums over all experts, block by block, float64.
        files: file -> the entries whose matrices it holds, or would if tokens had come to them.
    """

    counts: dict[str, int] = field(default_factory=dict)
    together: list[torch.Tensor] = field(default_factory=list)
    files: dict[Path, list[str]] = field(default_factory=dict)

    def add(self, entry: str, sums: GradientSums) -> None:
        """Count the sums of an expert."""
        blocks, self.counts[entry] = sums.of(entry)
        if not self.together:
            self.together = [block.clone() for block in blocks]
        else:
            for total, block in zip(self.together, blocks, strict=False):
                total += block

    def write(self, tokens: int) -> int:
        """Draw all of them, as :meth:`GradientSums.shrink`; how many saw few tokens."""
        if not self.together:
            return 0
        mean = [(total / tokens).cpu() for total in self.together]
        prior, every, few = PRIOR * len(mean[0]), sum(self.counts.values()), 0
        for path, names in self.files.items():
            before = load_file(path)
            after: dict[str, np.ndarray] = {}
            for entry in names:
                count = self.counts.get(entry, 0)
                few += count < prior
                for place, together in enumerate(mean):
                    own = before.get(f"{entry}/{place:05d}")
                    if own is None:
                        drawn = together / every
                    else:
                        own = own.double()
                        other = together * (own.trace() / together.trace().clamp(min=1e-300))
                        drawn = own.lerp(other, prior / (count + prior))
                    after[f"{entry}/{place:05d}"] = drawn.float().numpy()
            save_arrays(after, path)
        return few


class _Known(torch.autograd.Function):
    """The outputs of experts, and gradients of what came into them, that are known already."""

    @staticmethod
    def forward(
        context: Any, hidden: torch.Tensor, weights: torch.Tensor, output: torch.Tensor, of_hidden: torch.Tensor,
        of_weights: torch.Tensor,
    ) -> torch.Tensor:  # fmt: skip
        del hidden, weights
        context.save_for_backward(of_hidden, of_weights)
        return output

    @staticmethod
    def backward(context: Any, *_: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return (*context.saved_tensors, None, None, None)


def _behind_experts(
    model: LayeredModel,
    layer: torch.nn.Module,
    outside: Outside,
    routed: Routed,
    batch: Batch,
    source: Activations,
    behind: Activations,
    keywords: Mapping[int, dict[str, Any]],
) -> torch.Tensor:
    """The gradient at the outputs of the experts, (tokens, hidden)."""
    output = routed.output(batch, model.device).requires_grad_(True)
    outside.answer = lambda hidden, *_: output.reshape(hidden.shape)
    out = layer(torch.from_numpy(np.array(source[batch])).to(model.device), **keywords[len(batch)])
    out = out[0] if isinstance(out, tuple) else out
    (gradient,) = torch.autograd.grad(out, output, torch.from_numpy(np.array(behind[batch])).to(model.device))
    return gradient


def _add(
    routed: Routed,
    batch: Batch,
    loaded: Mapping[int, Expert],
    entries: Mapping[tuple[int, str], list[str]],
    sums: GradientSums,
    device: torch.device,
) -> None:
    """Add the gradients of some experts to the sums and to those of what came into them."""
    hidden, chosen, weights = routed.hidden(batch, device), routed.chosen(batch, device), routed.weights(batch, device)
    behind = routed.values("behind", batch, device)
    of_hidden, of_weights = routed.values("of hidden", batch, device), routed.values("of weights", batch, device)
    for number, expert in loaded.items():
        tokens, places = torch.where(chosen == number)
        if not len(tokens):
            continue
        x = hidden[tokens].requires_grad_(True)
        share = weights[tokens, places].requires_grad_(True)
        first = x @ expert.gate_up.T
        out = expert.gate(first) @ expert.down.T
        wanted = (x, share, first, out)
        found = torch.autograd.grad(out * share[:, None], wanted, behind[tokens])
        of_hidden.index_add_(0, tokens, found[0])
        of_weights[tokens, places] = found[1]
        for parameter, gradient in ((experts.GATE_UP, found[2]), (experts.DOWN, found[3])):
            names = entries.get((number, parameter), [])
            for entry, part in zip(names, gradient.chunk(max(1, len(names)), dim=-1), strict=False):
                sums.add(entry, part)
    routed.put("of hidden", batch, of_hidden)
    routed.put("of weights", batch, of_weights)


def _stem(number: int) -> str:
    return f"fisher-{number:04d}-experts"

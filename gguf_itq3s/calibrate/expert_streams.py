"""The two streams of a layer whose experts are too large to be in memory together.

The layer runs up to its experts once, and what comes into them is kept. They are loaded, summed and rounded in groups,
outside the layer, over all windows; what a group puts out is added to what the layer will be given in their place. The
sums are those of :class:`gguf_itq3s.calibrate.streams.Streams`, to the bit where the inputs are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ..checkpoint import experts
from ..codec.transform import rotation_block
from ..torch.outside import Outside
from . import mixture
from .activations import Activations
from .groups import Group, Reader
from .inputs import Seen
from .layers import LayeredModel, Stop
from .mixture import Expert, Mixture, Routed, inner_of
from .options import CalibrationOptions
from .ranks import ALONE, Ranks
from .shares import Batch, Batches
from .streams import KEPT, Streams


def each(found: Mixture, options: CalibrationOptions) -> int:
    """Bytes of one expert while its layer is quantized: its weights in both models, the sums of one of its inputs."""
    sums = (columns * (columns if options.full(columns) else rotation_block(columns)) for columns in found.columns)
    return 2 * 4 * found.weights + 2 * 8 * max(sums)


def large(model: LayeredModel, number: int, options: CalibrationOptions) -> Mixture | None:
    """The experts of a layer, if they are quantized in groups."""
    return mixture.find(model, number, lambda found: each(found, options))


def streams_of(model: LayeredModel, number: int, options: CalibrationOptions, *rest: Any) -> Streams:
    """The streams of a layer; arguments as :class:`Streams` takes them."""
    found = large(model, number, options)
    return Streams(model, number, options, *rest) if found is None else ExpertStreams(found, options, *rest)


class ExpertStreams(Streams):
    """The two layers, the experts outside them.

    Args:
        found: the experts.
        options: form of the sums.
        inputs: as :class:`Streams` takes it, as what follows.
    """

    def __init__(
        self,
        found: Mixture,
        options: CalibrationOptions,
        inputs: tuple[Activations, ...],
        batches: Batches,
        keywords: Mapping[int, dict[str, Any]],
        scales: Callable[[Reader], npt.NDArray[np.float32] | None],
        folders: tuple[Path, Path],
        ranks: Ranks = ALONE,
    ) -> None:
        self._mixture, self._numbers = found, found.groups(each(found, options))
        self._every = found.model.layout.groups(found.number, found.model.base.layers[found.number])
        self._stack = ExitStack()
        self._layer = self._stack.enter_context(found.loaded())
        self._loaded: list[dict[int, Expert]] = []  # of both streams, the group that is in memory
        self._ended = 0  # groups whose outputs are known
        super().__init__(found.model, found.number, options, inputs, batches, keywords, scales, folders, ranks)
        self._routed = [Routed(folder / KEPT / "experts", *inputs[0].shape[:2]) for folder in folders]

    def _load(self) -> torch.nn.Module:
        return self._layer

    def _groups(self, layer: torch.nn.Module) -> list[Group]:
        return self._every

    def close(self) -> None:
        """As :meth:`Streams.close`."""
        self._loaded.clear()
        self._routed.clear()
        super().close()
        self._stack.close()

    def weights(self, reader: Reader) -> npt.NDArray[np.float32]:
        """As :meth:`Streams.weights`; of an expert while its group is at work."""
        if not self._outside(reader):
            return super().weights(reader)
        return self._matrix(0, reader).cpu().numpy().copy()

    def put(self, reader: Reader, weights: npt.NDArray[np.float32]) -> None:
        """As :meth:`Streams.put`; of an expert while its group is at work."""
        if not self._outside(reader):
            super().put(reader, weights)
        else:
            self._matrix(1, reader).copy_(torch.from_numpy(weights))

    def begin(self, passage: Sequence[Group]) -> None:
        """As :meth:`Streams.begin`: have a group of experts in memory, those before it run; behind them, all run."""
        if passage[0].path == self._mixture.path:
            self._open(next(i for i, numbers in enumerate(self._numbers) if passage[0].expert in numbers))
        elif any(group.path == self._mixture.path for before in self._before(passage) for group in before):
            self._finish()

    def step(self, batch: Batch) -> tuple[np.ndarray, np.ndarray]:
        """As :meth:`Streams.step`."""
        self._finish()
        for which in range(2):
            self._give(which, batch)
        return super().step(batch)

    def _in_order(self, groups: Sequence[Group]) -> list[list[Group]]:
        """As :meth:`Streams._in_order`, the passages of the experts in groups of experts."""
        found = super()._in_order(groups)
        mine = [number for number, passage in enumerate(found) if passage[0].path == self._mixture.path]
        parts = [
            part
            for numbers in self._numbers
            for number in mine
            if (part := [group for group in found[number] if group.expert in numbers])
        ]
        return found[: mine[0]] + parts + found[mine[-1] + 1 :] if mine else found

    def _seen(self, which: int, batch: Batch, passage: Sequence[Group]) -> tuple[Seen, torch.Tensor]:
        if passage[0].path != self._mixture.path:
            self._give(which, batch)
            return super()._seen(which, batch, passage)
        routed, device = self._routed[which], self._model.device
        raw = routed.hidden(batch, device)
        # No norm's gain is left out here, and no expert writes to the residual stream.
        return Seen(passage, raw, raw, routed.chosen(batch, device), inner_of(self._loaded[which])), raw[:0]

    def _before(self, passage: Sequence[Group]) -> list[list[Group]]:
        return self.passages[: next(i for i, other in enumerate(self.passages) if other[0] is passage[0])]

    def _outside(self, reader: Reader) -> bool:
        return reader.path == self._mixture.path

    def _matrix(self, which: int, reader: Reader) -> torch.Tensor:
        """A matrix of an expert of the group at work, a view."""
        assert reader.expert is not None
        expert = self._loaded[which][reader.expert]
        whole = expert.gate_up if reader.parameter == experts.GATE_UP else expert.down
        return whole if reader.half is None else whole.chunk(2, dim=0)[reader.half]

    def _stand_in(self, which: int) -> Outside:
        return self._mixture.outside(self._streams[which].layer)

    def _give(self, which: int, batch: Batch) -> None:
        """Let the layer have what the experts put out, if they have run; before that it is not run so far."""
        known = self._ended == len(self._numbers)
        self._stand_in(which).answer = mixture.given(self._routed[which], batch) if known else None

    def _keep(self) -> None:
        """Run both layers up to their experts and keep what comes into these."""
        for which, stream in enumerate(self._streams):
            for batch in self._batches.all:
                self._stand_in(which).answer = mixture.kept(self._routed[which], batch)
                with suppress(Stop):
                    stream.run(batch, self._shortcuts)

    def _open(self, group: int) -> None:
        """Load a group of experts, all before it having run."""
        if not self._ended and not self._loaded:
            self._keep()
        while self._ended < group:
            self._load_group(self._ended)
            with torch.no_grad():
                for routed, loaded in zip(self._routed, self._loaded, strict=True):
                    for batch in self._batches.all:
                        routed.run(batch, loaded, self._model.device)
            self._loaded.clear()
            self._ended += 1
        if group < len(self._numbers):
            self._load_group(group)

    def _finish(self) -> None:
        """Let all experts run that have not."""
        if self._ended < len(self._numbers):
            self._open(len(self._numbers))

    def _load_group(self, group: int) -> None:
        if not self._loaded:
            first = self._mixture.load(self._numbers[group])
            second = {
                number: Expert(expert.gate_up.clone(), expert.down.clone(), expert.gate)
                for number, expert in first.items()
            }
            self._loaded += [first, second]

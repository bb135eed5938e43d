"""Second moments of the inputs of a layer whose experts are too large to be in memory together.

The layer runs twice: up to its experts, what comes into which is kept, and, once they have run in groups outside it, as
a whole with what they have put out. The sums of a group are written before those of the next begin.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..codec.transform import rotation_block
from .activations import Activations
from .collector import Collector, add_up
from .inputs import Seen, Watch
from .layers import LayeredModel, Stop
from .mixture import Batch, Expert, Mixture, Routed, given, inner_of
from .mixture import find as find_mixture
from .moments import Moment, rotated
from .options import CalibrationOptions
from .ranks import ALONE, Ranks

if TYPE_CHECKING:
    import torch

#: A file's name, its second moments by key, and matrix -> key, tokens and the norm whose gain is left out.
Part = tuple[str, dict[str, np.ndarray], dict[str, tuple[str, int, str | None]]]


def each(found: Mixture, options: CalibrationOptions) -> int:
    """Bytes of one expert while statistics are taken: its weights, and the sums of both of its inputs."""
    sums = (columns * (columns if options.full(columns) else rotation_block(columns)) for columns in found.columns)
    return 4 * found.weights + 8 * sum(sums)


def find(model: LayeredModel, number: int, options: CalibrationOptions) -> Mixture | None:
    """The experts of a layer, if they are too large to be in memory together."""
    return find_mixture(model, number, lambda found: each(found, options))


def collect(
    found: Mixture,
    options: CalibrationOptions,
    folder: Path,
    source: Activations,
    target: Activations,
    batches: Sequence[slice],
    keywords: Mapping[int, dict[str, Any]],
    done: Callable[[], Any],
    ranks: Ranks = ALONE,
    *,
    collects: bool = True,
) -> Iterator[Part]:
    """Run a layer on all windows and take its statistics.

    Args:
        found: its experts.
        options: form of the sums.
        folder: for files that are needed meanwhile; made.
        source: its inputs, float32 (windows, context, hidden).
        target: its outputs, which are written here, of the same shape.
        batches: windows that run together.
        keywords: batch size -> arguments of the layer.
        done: called after each batch.
        ranks: those that run the same layer on other windows.
        collects: whether statistics are wanted, or the outputs alone.

    Yields:
        On the first rank the statistics of each group of experts, then those of the rest of the layer.

    Raises:
        OSError: the folder cannot be written.
        UserError: the checkpoint lacks a matrix.
    """
    import torch

    model, number = found.model, found.number
    groups = model.layout.groups(number, model.base.layers[number])
    mine = [group for group in groups if group.path == found.path]
    routed = Routed(folder, *source.shape[:2])
    numbers = [np.arange(source.shape[0])[batch] for batch in batches]
    with found.loaded() as layer:
        outside = found.outside(layer)
        for batch in numbers:
            seen: list[Seen] = []
            outside.answer = _keep(routed, batch, seen)
            with Watch(model, number, layer, mine, seen.append), suppress(Stop):
                model.step(layer, source[batch], keywords[len(batch)])
        file = f"layer-{number:04d}"
        for count, members in enumerate(found.groups(each(found, options))):
            loaded = found.load(members)
            here = [group for group in mine if group.expert in members] if collects else []
            moments = {group.key: Moment(group.columns, options.full(group.columns)) for group in here}
            for batch in numbers:
                with torch.no_grad():
                    _add(routed, batch, loaded, here, moments, model.device)
                    routed.run(batch, loaded, model.device)
            del loaded
            add_up(list(moments.values()), ranks, model.device)
            entries = {
                reader.entry: (group.key, moments[group.key].tokens, group.norm)
                for group in here for reader in group.readers
            }  # fmt: skip
            if ranks.first and here:
                yield f"{file}-experts-{count:04d}.safetensors", {k: m.mean() for k, m in moments.items()}, entries
            del moments
        collector = Collector(model, number, layer, options) if collects else None
        for batch in numbers:
            outside.answer = given(routed, batch)
            target[batch] = model.step(layer, source[batch], keywords[len(batch)])
            done()
        if collector is not None:
            collector.close()
            collector.add_up(ranks)
            if ranks.first:
                yield f"{file}.safetensors", collector.statistics(), collector.entries()


def _keep(routed: Routed, batch: Batch, seen: list[Seen]) -> Callable[..., torch.Tensor]:
    def keep(_: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        (call,) = seen
        routed.keep(batch, call.raw, chosen.reshape(len(call.raw), -1), weights)
        if call.plain is not call.raw:
            routed.put("plain", batch, call.plain)
        raise Stop

    return keep


def _add(
    routed: Routed, batch: Batch, loaded: Mapping[int, Expert], groups: Sequence[Any],
    moments: Mapping[str, Moment], device: torch.device,
) -> None:  # fmt: skip
    """Add the tokens of a batch, as :class:`Collector` does."""
    hidden, plain, chosen = (part(batch, device) for part in (routed.hidden, routed.plain, routed.chosen))
    seen = Seen(groups, hidden, plain, chosen, inner_of(loaded))
    for group in groups:
        rows = seen.rows(group)
        if rows.shape[0]:
            moments[group.key].add(rotated(rows))

"""One layer of the original model beside the same layer of the quantized one, on the inputs that each gives it.

A passage is a set of matrices that run at the same moment: q, k and v; the output of attention; gate and up; down; the
experts' first and second matrices. Its statistics are taken with everything before it quantized, then its matrices are
quantized and put into the second layer, and the next passage comes. Layers run up to the passage only, and what comes
into the last matrix of attention and of the feed-forward network is kept, so that nothing before it runs again.

Some windows are held out: no sum has them, and what they say of a matrix decides how far its statistics are trusted
(:mod:`gguf_itq3s.rounding.target`).
"""

from __future__ import annotations

import copy
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from ..checkpoint import row_order
from ..rounding import target
from .activations import Activations, activations, narrowed, widened
from .groups import Group, Reader
from .inputs import Seen, Watch
from .layers import LayeredModel, Stop
from .moments import Moment, rotated
from .options import CalibrationOptions
from .panels import Panels
from .ranks import ALONE, Ranks
from .shares import Batch, Batches
from .sums import Held, Sums

#: What a matrix that writes to the residual stream is called.
WRITERS: Final = ("attn_output.weight", "ffn_down.weight")

#: In the folder of a stream: what comes into the matrices that its shortcuts need.
KEPT: Final = "kept"


@dataclass(frozen=True)
class _Shortcut:
    """A module whose output is that of its last matrix.

    Attributes:
        module: its path.
        length: of the tuple that it gives, the others of which are None; 0 where it gives the output alone.
    """

    module: str
    length: int

    def result(self, out: torch.Tensor) -> Any:
        """What the module gives where its last matrix gives ``out``."""
        return (out, *[None] * (self.length - 1)) if self.length else out


class _Stream:
    """One of the two.

    Args:
        model: the original.
        layer: with its weights.
        inputs: float32 (windows, context, hidden).
        keywords: batch size -> arguments of the layer.
        folder: where inputs of matrices are kept.
    """

    def __init__(
        self,
        model: LayeredModel,
        layer: torch.nn.Module,
        inputs: Activations,
        keywords: Mapping[int, dict[str, Any]],
        folder: Path,
    ) -> None:
        self.layer, self.inputs = layer, inputs
        self._model, self._keywords, self._folder = model, keywords, folder
        self._kept: dict[str, Activations] = {}  # path of a matrix -> its inputs

    def keep(self, path: str, columns: int) -> None:
        """Make room for the inputs of a matrix."""
        self._folder.mkdir(exist_ok=True)
        shape = (*self.inputs.shape[:2], columns)
        self._kept[path] = activations(self._folder, len(self._kept), shape, "w+", self._model.dtype)

    def put(self, path: str, batch: Batch, values: torch.Tensor) -> None:
        """Keep the inputs of a matrix, (tokens, columns)."""
        kept = self._kept[path]
        kept[batch] = values.reshape(len(batch), *kept.shape[1:]).float().cpu().numpy()

    def close(self) -> None:
        """Forget what was kept."""
        self._kept.clear()
        shutil.rmtree(self._folder, ignore_errors=True)

    def run(self, batch: Batch, shortcuts: Mapping[str, _Shortcut]) -> np.ndarray:
        """The layer's output for some windows.

        Args:
            batch: the windows.
            shortcuts: path of a matrix -> the module that ends with it: where the inputs of the matrix are kept, the
                module runs that matrix alone.
        """
        with ExitStack() as stack:
            for path, shortcut in shortcuts.items():
                if path in self._kept:
                    stack.enter_context(self._shortened(path, shortcut, batch))
            return self._model.step(self.layer, self.inputs[batch], self._keywords[len(batch)])

    @contextmanager
    def _shortened(self, path: str, shortcut: _Shortcut, batch: Batch) -> Iterator[None]:

        module: Any = self.layer.get_submodule(shortcut.module)
        values = torch.from_numpy(self._kept[path][batch]).to(self._model.device)
        matrix = self.layer.get_submodule(path)
        own = module.forward
        module.forward = lambda *_, **__: shortcut.result(matrix(values))
        try:
            yield
        finally:
            module.forward = own


class Streams:
    """The two layers.

    Args:
        model: the original.
        number: of the layer.
        options: form of the sums.
        inputs: two, float32 (windows, context, hidden): of the original layer, and of the quantized one.
        batches: windows that run together.
        keywords: batch size -> arguments of the layer.
        scales: matrix -> float32 (columns,), the factors of its columns in the file, whose inputs are divided by
            them; None where they are as in the model. Matrices that read the same input have the same.
        folders: where each stream keeps activations while the layer is at work.
        ranks: those that run the same layer on other windows.
    """

    def __init__(
        self,
        model: LayeredModel,
        number: int,
        options: CalibrationOptions,
        inputs: tuple[Activations, ...],
        batches: Batches,
        keywords: Mapping[int, dict[str, Any]],
        scales: Callable[[Reader], npt.NDArray[np.float32] | None],
        folders: tuple[Path, Path],
        ranks: Ranks = ALONE,
    ) -> None:
        self._model, self._number, self._options = model, number, options
        self._batches, self._scales = batches, scales
        first = self._load()
        self._streams = tuple(
            _Stream(model, layer, stream, keywords, folder / KEPT)
            for layer, stream, folder in zip((first, copy.deepcopy(first)), inputs, folders, strict=True)
        )
        self._modules = model.layout.modules(number, first)
        self._few = min(batches.all, key=len)  # to see how the layer runs
        self._kept = batches.kept(inputs[0].shape[1])
        groups = self._groups(first)
        self.passages = self._in_order(groups)
        self._writers, self._shortcuts = self._find_writers()
        if not ranks.alone:  # what was tried on other windows may have gone another way
            by_key = {group.key: group for group in groups}
            passages = ranks.tell([[group.key for group in part] for part in self.passages])
            self.passages = [[by_key[key] for key in part] for part in passages]
            shortcuts = {path: (found.module, found.length) for path, found in self._shortcuts.items()}
            writers, shortcuts = ranks.tell((sorted(self._writers), shortcuts))
            self._writers = frozenset(writers)
            self._shortcuts = {path: _Shortcut(*found) for path, found in shortcuts.items()}

    def _load(self) -> torch.nn.Module:
        """The layer with its weights."""
        return self._model.load(self._number)

    def _groups(self, layer: torch.nn.Module) -> list[Group]:
        """All groups of the layer."""
        return self._model.layout.groups(self._number, layer)

    def close(self) -> None:
        """Forget the weights and what was kept."""
        self._model.unload(self._number)
        self._streams[1].layer.to("meta")
        for stream in self._streams:
            stream.close()

    def row_order(self, reader: Reader, tensor: npt.NDArray[np.floating]) -> npt.NDArray[np.int64]:
        """Which row of a matrix each row of its GGUF tensor is, as :func:`gguf_itq3s.checkpoint.row_order.of_matrix`.

        Args:
            reader: the matrix.
            tensor: (m, n) as GGUF has it.
        """
        if self._model.in_bfloat16:
            tensor = widened(narrowed(np.asarray(tensor, dtype=np.float32)))  # as the layer has it
        return row_order.of_matrix(self._model.folder, reader.entry, self.weights(reader), tensor)

    def weights(self, reader: Reader) -> npt.NDArray[np.float32]:
        """The weights of a matrix in the original layer, as Transformers has them: (rows, columns)."""
        return reader.rows(self._streams[0].layer).detach().float().cpu().numpy().copy()

    def put(self, reader: Reader, weights: npt.NDArray[np.float32]) -> None:
        """Replace the weights of a matrix of the quantized layer, as :meth:`weights` has them."""

        with torch.no_grad():
            reader.rows(self._streams[1].layer).copy_(torch.from_numpy(weights))

    def begin(self, passage: Sequence[Group]) -> None:
        """Make the matrices of a passage ready to be read and replaced, all those before it being so."""

    def sums(self, passage: Sequence[Group], ranks: Ranks = ALONE) -> dict[str, Sums]:
        """The sums of every group of a passage, by its key.

        Args:
            passage: the groups.
            ranks: those that are to share wide Hessians.
        """

        self.begin(passage)
        with torch.no_grad():
            result = {group.key: self._empty(group, ranks) for group in passage}
            for path in {group.path for group in passage} & self._shortcuts.keys():
                for stream in self._streams:
                    stream.keep(path, passage[0].columns)
            for held, batches in ((False, self._batches.train), (True, self._batches.held)):
                for batch in batches:
                    self._add(passage, batch, result, held=held)
        return result

    def step(self, batch: Batch) -> tuple[np.ndarray, np.ndarray]:
        """The outputs of both layers."""
        original, quantized = (stream.run(batch, self._shortcuts) for stream in self._streams)
        return original, quantized

    def _weighted(self, group: Group) -> bool:
        """Whether the matrix of a group writes to the residual stream."""
        return group.readers[0].entry in self._writers

    def _empty(self, group: Group, ranks: Ranks = ALONE) -> Sums:
        full = self._options.full(group.columns)
        hessian = Moment(group.columns, full)
        if full and group.columns > target.WIDE and not ranks.alone:
            hessian.panels = Panels.begun(group.columns, self._model.device, ranks)
        writes = self._weighted(group)
        by_outputs = writes or self._smaller_by_outputs(group, hessian)
        return Sums(hessian, Moment(group.columns, full, symmetric=False), writes=writes, by_outputs=by_outputs)

    def _smaller_by_outputs(self, group: Group, hessian: Moment) -> bool:
        """Whether what is missing in the outputs takes less than the difference of the inputs, where ranks share."""
        if hessian.panels is None:
            return False
        return sum(len(reader.rows(self._streams[0].layer)) for reader in group.readers) < group.columns

    def _add(self, passage: Sequence[Group], batch: Batch, result: dict[str, Sums], *, held: bool) -> None:
        """Add the tokens of a batch to the sums, or to what is held out."""
        (first, stream), (second, stream_now) = (self._seen(which, batch, passage) for which in range(2))
        if passage[0].path in self._shortcuts:
            for which, seen in enumerate((first, second)):
                self._streams[which].put(passage[0].path, batch, seen.raw)
        some = self._kept if held else slice(None)
        for group in passage:
            of = result[group.key]
            now = second.rows(group, gain=True)[some]
            if not now.shape[0]:
                continue
            # Of an expert that is a module of its own, the tokens of the two calls need not be the same.
            alone = group.expert is None and group.readers[0].expert is not None
            before = now if alone else first.rows(group, second.chosen, gain=True)[some]
            written = None
            if of.writes:
                # One matrix alone reads the input of a writer.
                with self._model.products():
                    behind = stream[some] + self._streams[0].layer.get_submodule(group.path)(before)
                root = behind.square().mean(-1, keepdim=True).rsqrt()
                root = root.where(root.isfinite(), 0)  # a stream of zeros
                before, now, written = before * root, now * root, (stream - stream_now)[some] * root
            scale = self._scales(group.readers[0])
            here = rotated(_over(now, scale))
            if held:
                flat = here.reshape(len(here), -1)
                found = Held(flat, rotated(_over(before, scale)).reshape(flat.shape) - flat, written)
                of.held = found if of.held is None else of.held.and_also(found)
                continue
            of.hessian.add(here)
            if not of.by_outputs:
                of.cross.add(here, rotated(_over(before, scale)) - here)
                continue
            for reader in group.readers:
                missing = (before - now) @ reader.rows(self._streams[0].layer).float().T
                if written is not None:
                    missing = missing + written
                product = (missing.T @ here.reshape(len(here), -1)).double()
                total = of.missing.get(reader.entry)
                of.missing[reader.entry] = product if total is None else total.add_(product)

    def _seen(self, which: int, batch: Batch, passage: Sequence[Group]) -> tuple[Seen, torch.Tensor]:
        """The inputs of a passage, and the residual stream that its matrices add to, (tokens, hidden)."""

        stream = self._streams[which]
        found: list[Seen] = []
        residual = torch.from_numpy(np.array(stream.inputs[batch])).to(self._model.device)

        def stop(seen: Seen) -> None:
            found.append(seen)
            raise Stop

        def note(_: Any, args: tuple[torch.Tensor, ...]) -> None:
            nonlocal residual
            residual = args[0]

        feed_forward = self._modules.get(f"blk.{self._number}.ffn_norm.weight")
        with Watch(self._model, self._number, stream.layer, passage, stop):
            handle = stream.layer.get_submodule(feed_forward).register_forward_pre_hook(note) if feed_forward else None
            # The passage itself must be run into.
            shortcuts = {path: found for path, found in self._shortcuts.items() if path != passage[0].path}
            try:
                with suppress(Stop):
                    stream.run(batch, shortcuts)
            finally:
                if handle is not None:
                    handle.remove()
        return found[0], residual.reshape(-1, residual.shape[-1])

    def _in_order(self, groups: Sequence[Group]) -> list[list[Group]]:
        """The groups by the order in which the layer comes to them; inner inputs of experts after their first ones."""
        order: list[str] = []
        stream = self._streams[0]
        with Watch(self._model, self._number, stream.layer, groups, lambda seen: order.append(seen.groups[0].path)):
            stream.run(self._few, {})
        passages: list[list[Group]] = []
        for path in dict.fromkeys(order):
            here = [group for group in groups if group.path == path]
            passages += [part for inner in (False, True) if (part := [g for g in here if g.inner == inner])]
        return passages

    def _find_writers(self) -> tuple[frozenset[str], dict[str, _Shortcut]]:
        """By trying, which matrices the residual stream is added to as they are, and whose modules end with them.

        Returns:
            The matrices, no norm or factor between them and the stream; and path of a matrix -> the module around it,
            where its output is that of the matrix.
        """

        stream, batch = self._streams[0], self._few
        out: dict[str, Any] = {}
        handles = []

        def keep(name: str) -> Callable[..., None]:
            def hook(_: Any, args: tuple[torch.Tensor, ...], result: Any) -> None:
                out[name], out[f"{name} input"] = result, args[0] if args else None

            return hook

        names = [f"blk.{self._number}.{part}" for part in (*WRITERS, "ffn_norm.weight")]
        parents = {}
        for name in names:
            if name in self._modules:
                path = self._modules[name]
                handles.append(stream.layer.get_submodule(path).register_forward_hook(keep(name)))
                if name != names[-1] and (parent := path.rpartition(".")[0]):
                    parents[path] = parent
                    handles.append(stream.layer.get_submodule(parent).register_forward_hook(keep(parent)))
        try:
            end = torch.from_numpy(stream.run(batch, {}))
        finally:
            for handle in handles:
                handle.remove()
        attention, feed_forward, norm = names
        start = torch.from_numpy(np.array(stream.inputs[batch]))
        middle = out.get(f"{norm} input")
        sums = ((attention, start, middle), (feed_forward, middle, end))
        writers = frozenset(
            name
            for name, before, after in sums
            if name in out and before is not None and after is not None
            and torch.allclose(before.cpu() + out[name].cpu(), after.cpu(), rtol=1e-4, atol=1e-5)
        )  # fmt: skip
        shortcuts: dict[str, _Shortcut] = {}
        for name in (attention, feed_forward):
            if name in out and (path := self._modules[name]) in parents:
                found = _shortcut(parents[path], out.get(parents[path]), out[name])
                shortcuts |= {path: found} if found else {}
        return writers, shortcuts


def _over(x: torch.Tensor, scale: npt.NDArray[np.float32] | None) -> torch.Tensor:
    """Inputs (tokens, n) over the factors of the columns; nothing comes through a channel with factor 0."""

    if scale is None:
        return x
    factor = torch.from_numpy(scale).to(x)
    return x * torch.where(factor == 0, 0.0, 1 / torch.where(factor == 0, 1.0, factor))


def _shortcut(module: str, whole: Any, out: torch.Tensor) -> _Shortcut | None:
    """The module as a shortcut, if it has given the output of its last matrix as it is, alone or before nothing."""

    first = whole[0] if isinstance(whole, tuple) and whole else whole
    if not isinstance(first, torch.Tensor) or first.shape != out.shape or not torch.equal(first, out):
        return None
    if isinstance(whole, tuple):
        return _Shortcut(module, len(whole)) if all(other is None for other in whole[1:]) else None
    return _Shortcut(module, 0)

"""One layer of the original model beside the same layer of the quantized one, on the inputs that each gives it.

A passage is a set of matrices that run at the same moment: q, k and v; the output of attention; gate and up; down; the
experts' first and second matrices. Its statistics are taken with everything before it quantized, then its matrices are
quantized and put into the second layer, and the next passage comes. Layers run up to the passage only.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ..errors import UserError
from .groups import Group, Reader
from .inputs import Seen, Watch
from .layers import LayeredModel
from .moments import Moment, rotated
from .options import CalibrationOptions

if TYPE_CHECKING:
    import torch

#: What a matrix that writes to the residual stream is called.
_WRITERS = ("attn_output.weight", "ffn_down.weight")


class _Stop(Exception):  # noqa: N818 (a signal, not an error)
    """Ends a layer's forward pass at a passage."""


@dataclass
class Sums:
    """Sums over the tokens of a group's inputs, rotated: x of the original model, x' of the quantized one.

    Attributes:
        hessian: of x' x'^T.
        cross: of (x - x') x'^T.
        residual: matrix -> float64 (rows, columns), of (r - r') x'^T with the residual stream r before the addition;
            none where a matrix does not write to it.
    """

    hessian: Moment
    cross: Moment
    residual: dict[str, torch.Tensor] = field(default_factory=dict)


class Streams:
    """The two layers.

    Args:
        model: the original.
        number: of the layer.
        options: form of the sums.
        inputs: float32 (windows, context, hidden): of the original layer, and of the quantized one.
        batches: windows that run together.
        keywords: batch size -> arguments of the layer.
    """

    def __init__(
        self,
        model: LayeredModel,
        number: int,
        options: CalibrationOptions,
        inputs: tuple[np.ndarray, np.ndarray],
        batches: Sequence[slice],
        keywords: Mapping[int, dict[str, Any]],
    ) -> None:
        self._model, self._number, self._options = model, number, options
        self._inputs, self._batches, self._keywords = inputs, batches, keywords
        first = model.load(number)
        self._layers = (first, copy.deepcopy(first))
        self._modules = model.layout.modules(number, first)
        groups = model.layout.groups(number, first)
        self.passages = self._in_order(groups)
        self._writers = self._find_writers()

    def close(self) -> None:
        """Forget the weights."""
        self._model.unload(self._number)
        self._layers[1].to("meta")

    def weights(self, reader: Reader) -> npt.NDArray[np.float32]:
        """The weights of a matrix in the original layer, as Transformers has them: (rows, columns)."""
        return reader.rows(self._layers[0]).detach().float().cpu().numpy().copy()

    def put(self, reader: Reader, weights: npt.NDArray[np.float32]) -> None:
        """Replace the weights of a matrix of the quantized layer, as :meth:`weights` has them."""
        import torch

        with torch.no_grad():
            reader.rows(self._layers[1]).copy_(torch.from_numpy(weights))

    def sums(self, passage: Sequence[Group]) -> dict[str, Sums]:
        """The sums of every group of a passage, by its key."""
        import torch

        with torch.no_grad():
            return self._sums(passage)

    def _sums(self, passage: Sequence[Group]) -> dict[str, Sums]:
        full = self._options.full
        result = {
            group.key: Sums(Moment(group.columns, full(group.columns)), Moment(group.columns, full(group.columns)))
            for group in passage
        }
        for batch in self._batches:
            (first, stream), (second, stream_now) = (self._seen(which, batch, passage) for which in range(2))
            for group in passage:
                of = result[group.key]
                now = rotated(second.rows(group))
                # Of an expert that is a module of its own, the tokens of the two calls need not be the same.
                alone = group.expert is None and group.readers[0].expert is not None
                before = now if alone else rotated(first.rows(group, second.chosen))
                if not now.shape[0]:
                    continue
                of.hessian.add(now)
                of.cross.add(now, before - now)
                for reader in group.readers:
                    if reader.entry in self._writers:
                        product = (stream - stream_now).T @ now.reshape(now.shape[0], -1)
                        total = of.residual.get(reader.entry)
                        of.residual[reader.entry] = product.double() if total is None else total.add_(product)
        return result

    def step(self, batch: slice) -> tuple[np.ndarray, np.ndarray]:
        """The outputs of both layers."""
        original, quantized = (
            self._model.step(layer, inputs[batch], self._keywords[len(inputs[batch])])
            for layer, inputs in zip(self._layers, self._inputs, strict=True)
        )
        return original, quantized

    def _seen(self, which: int, batch: slice, passage: Sequence[Group]) -> tuple[Seen, torch.Tensor]:
        """The inputs of a passage, and the residual stream that its matrices add to, (tokens, hidden)."""
        import torch

        layer, inputs = self._layers[which], self._inputs[which][batch]
        found: list[Seen] = []
        stream = torch.from_numpy(np.array(inputs)).to(self._model.device)

        def stop(seen: Seen) -> None:
            found.append(seen)
            raise _Stop

        def note(_: Any, args: tuple[torch.Tensor, ...]) -> None:
            nonlocal stream
            stream = args[0]

        feed_forward = self._modules.get(f"blk.{self._number}.ffn_norm.weight")
        with Watch(self._model, self._number, layer, passage, stop):
            handle = layer.get_submodule(feed_forward).register_forward_pre_hook(note) if feed_forward else None
            try:
                self._model.step(layer, inputs, self._keywords[len(inputs)])
            except _Stop:
                pass
            finally:
                if handle is not None:
                    handle.remove()
        return found[0], stream.reshape(-1, stream.shape[-1])

    def _in_order(self, groups: Sequence[Group]) -> list[list[Group]]:
        """The groups by the order in which the layer comes to them; inner inputs of experts after their first ones."""
        order: list[str] = []
        with Watch(self._model, self._number, self._layers[0], groups, lambda seen: order.append(seen.groups[0].path)):
            inputs = self._inputs[0][self._batches[0]]
            self._model.step(self._layers[0], inputs, self._keywords[len(inputs)])
        passages: list[list[Group]] = []
        for path in dict.fromkeys(order):
            here = [group for group in groups if group.path == path]
            passages += [part for inner in (False, True) if (part := [g for g in here if g.inner == inner])]
        return passages

    def _find_writers(self) -> frozenset[str]:
        """The matrices whose output is added to the residual stream as it is, by trying: no norm or factor between."""
        import torch

        layer, inputs = self._layers[0], self._inputs[0][self._batches[0]]
        out: dict[str, torch.Tensor] = {}
        handles = []

        def keep(name: str) -> Callable[..., None]:
            def hook(_: Any, args: tuple[torch.Tensor, ...], result: torch.Tensor) -> None:
                out[name], out[f"{name} input"] = result, args[0]

            return hook

        names = [f"blk.{self._number}.{part}" for part in (*_WRITERS, "ffn_norm.weight")]
        for name in names:
            if name in self._modules:
                module = layer.get_submodule(self._modules[name])
                handles.append(module.register_forward_hook(keep(name)))
        try:
            end = torch.from_numpy(self._model.step(layer, inputs, self._keywords[len(inputs)]))
        finally:
            for handle in handles:
                handle.remove()
        attention, feed_forward, norm = names
        start = torch.from_numpy(np.array(inputs))
        middle = out.get(f"{norm} input")
        sums = ((attention, start, middle), (feed_forward, middle, end))
        return frozenset(
            name
            for name, before, after in sums
            if name in out and before is not None and after is not None
            and torch.allclose(before.cpu() + out[name].cpu(), after.cpu(), rtol=1e-4, atol=1e-5)
        )  # fmt: skip


def row_order(model: npt.NDArray[np.floating], tensor: npt.NDArray[np.floating]) -> npt.NDArray[np.int64]:
    """Which row of a matrix each row of a GGUF tensor is: the conversion permutes the rows of some.

    Args:
        model: (m, n) as Transformers has it.
        tensor: (m, n) as GGUF has it.

    Returns:
        (m,), ``tensor[i] == model[order[i]]``.

    Raises:
        ValueError: the rows are not the same.
    """
    if model.shape != tensor.shape:
        raise ValueError(f"it is {tensor.shape} in GGUF and {model.shape} in the model")
    here, there = (np.ascontiguousarray(array, dtype=np.float32) + np.float32(0) for array in (model, tensor))
    if np.array_equal(here, there):
        return np.arange(len(here))
    kind = np.dtype((np.void, here.shape[1] * 4))
    of_here, of_there = (np.argsort(array.view(kind).ravel(), kind="stable") for array in (here, there))
    if not np.array_equal(here[of_here], there[of_there]):
        raise ValueError("its weights in GGUF are not those of the model, row by row")
    order = np.empty(len(here), dtype=np.int64)
    order[of_there] = of_here
    return order


def check_rows(model: LayeredModel, reader: Reader, problem: ValueError) -> UserError:
    """The error for a matrix whose rows cannot be told apart."""
    remedy = "use gguf-itq3s calibrate and --calibration"
    return UserError(model.folder, f"cannot be quantized layer by layer: {problem}", remedy, reader.entry)

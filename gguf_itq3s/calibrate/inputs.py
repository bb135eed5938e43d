"""Which matrices of a layer read the same input, and that input, handed over while the layer runs."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt
import torch

from ..base.errors import UserError
from ..checkpoint import experts
from ..checkpoint.channels import Norms, plan_norms
from ..checkpoint.row_order import row_order
from ..checkpoint.source import SourceTensor
from ..checkpoint.weights import Parameters
from ..codec.transform import rotation_block
from ..rounding.factors import tensor_entry
from ..torch import stacked
from .options import BY_IMATRIX

if TYPE_CHECKING:
    from .layers import LayeredModel


#: Why a tensor that is made of what a module's weight is made of is none of its matrices.
_OTHER_ROWS: Final = "its rows are other ones than those of a module"


@dataclass(frozen=True)
class LayerMatrix:
    """A matrix of a layer.

    Attributes:
        name: GGUF name of its tensor.
        expert: which matrix of a stack, None for a plain one.
        path: of the module.
        parameter: of the module, that holds it.
        part: the rows of the parameter's matrix that it has, ascending; None for all of them.
        order: which of these each row of the tensor is, int64 (m,); None where they are in order.
        transposed: whether the parameter has it the other way round.
        columns: which of the matrix each column of the tensor is, int64 (n,); None where they are in order.
    """

    name: str
    expert: int | None
    path: str
    parameter: str = "weight"
    part: slice | npt.NDArray[np.int64] | None = field(default=None, compare=False)
    order: npt.NDArray[np.int64] | None = field(default=None, compare=False)
    transposed: bool = False
    columns: npt.NDArray[np.int64] | None = field(default=None, compare=False)

    @property
    def entry(self) -> str:
        """Its name in statistics."""
        return tensor_entry(self.name, self.expert)

    def matrix(self, layer: torch.nn.Module) -> torch.Tensor:
        """The parameter's matrix in a layer that holds its weights, (rows, columns), a view."""
        weights: torch.Tensor = getattr(layer.get_submodule(self.path), self.parameter)
        weights = weights if self.expert is None else weights[self.expert]
        return weights.mT if self.transposed else weights

    def rows_of(self, matrix: torch.Tensor) -> torch.Tensor:
        """Its rows out of the parameter's matrix."""
        return matrix if self.part is None else matrix[self.part]

    def put(self, matrix: torch.Tensor, weights: torch.Tensor) -> None:
        """Replace its rows of the parameter's matrix, a view."""
        if self.columns is not None:
            matrix[:, self.columns] = weights.to(matrix)
        else:
            matrix[slice(None) if self.part is None else self.part] = weights.to(matrix)

    def outputs_of(self, values: torch.Tensor) -> torch.Tensor:
        """Its outputs out of those of the parameter's matrix, (..., rows)."""
        return values if self.part is None else values[..., self.part]

    def in_order(self, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """What belongs to its rows (m, ...), by the rows of the tensor."""
        return values if self.order is None else values[self.order]

    def in_model(self, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """What belongs to the rows of the tensor (m, ...), by its rows in the model."""
        if self.order is None:
            return values
        found = np.empty_like(values)
        found[self.order] = values
        return found


@dataclass
class Group:
    """Matrices that read the same input.

    Attributes:
        key: its name in statistics.
        columns: length of the input, a multiple of 64.
        norm: the norm that the input comes from, by GGUF name, if its readers are known: statistics leave its gain out;
            else None.
        path: of the module whose input it is.
        expert: of stacked experts, which one; else None.
        inner: whether the input is what gate and up make within stacked experts, not what the module is called with.
        readers: the matrices.
    """

    key: str
    columns: int
    norm: str | None
    path: str
    expert: int | None = None
    inner: bool = False
    readers: list[LayerMatrix] = field(default_factory=list)


class Layout:
    """Which tensors of the file the modules of a model hold.

    A module and a tensor belong together where both are made of the same tensors of the checkpoint, and where the rows
    of the tensor are found among those of the module.

    Args:
        prefix: of the layers' names in the model.
        layers: that the model runs.
    """

    def __init__(
        self, arch: str, prefix: str, layers: int, tensors: Mapping[str, SourceTensor], weights: Parameters
    ) -> None:
        self._prefix, self._layers, self._tensors, self._weights = prefix, layers, tensors, weights
        self.norms: Norms = plan_norms(arch, tensors)
        self._found: dict[int, list[Group]] = {}
        #: Tensors of which no matrix is known in the layers that were looked at -> why.
        self.left_alone: dict[str, str] = {}

    @cached_property
    def _by_source(self) -> dict[str, list[SourceTensor]]:
        found: dict[str, list[SourceTensor]] = {}
        for tensor in self._tensors.values():
            for source in tensor.sources if tensor.name.startswith("blk.") else ():
                found.setdefault(source, []).append(tensor)
        return found

    @staticmethod
    def _number(name: str) -> int:
        """Of the layer of a tensor; -1 of one of the ends."""
        start, _, rest = name.partition(".")
        return int(rest.partition(".")[0]) if start == "blk" else -1

    def _candidates(self, name: str) -> list[SourceTensor]:
        """The tensors that are made of what a parameter of the model is made of."""
        found = (tensor for source in sorted(self._weights.sources(name)) for tensor in self._by_source.get(source, ()))
        return list({tensor.name: tensor for tensor in found}.values())

    def note(self, of: Callable[[str], bool]) -> str:
        """Which matrices are not calibrated, and why, a sentence; empty where all that ``of`` holds for are."""
        kinds: dict[str, set[str]] = {}
        beyond = {
            name: "layers that do not run" for name, tensor in self._tensors.items()
            if self._number(name) >= self._layers and len(tensor.shape) > 1
        }  # fmt: skip
        for name, why in {**self.left_alone, **beyond}.items():
            if of(name):
                kinds.setdefault(why, set()).add(name.split(".")[2])
        found = "; ".join(f"{', '.join(sorted(names))} ({why})" for why, names in kinds.items())
        return f"not calibrated: {found}" if found else ""

    def modules(self, number: int, layer: torch.nn.Module) -> dict[str, str]:
        """GGUF name -> path of the modules of a layer whose weight alone is a tensor of that shape."""
        found: dict[str, str] = {}
        for path, module in layer.named_modules():
            if (weight := module._parameters.get("weight")) is not None:
                candidates = self._candidates(f"{self._prefix}.{number}.{path}.weight")
                found |= {tensor.name: path for tensor in candidates if tensor.shape == tuple(weight.shape)}
        return found

    def groups(self, number: int, layer: torch.nn.Module) -> list[Group]:
        """The groups of a layer, members in the order of its modules; rows that are not whole blocks are left out."""
        if number not in self._found:
            self._found[number] = self._look(number, layer)
        return self._found[number]

    def _look(self, number: int, layer: torch.nn.Module) -> list[Group]:
        found: dict[str, Group] = {}
        refused: dict[str, str] = {}
        for path, module in layer.named_modules():
            for reader, columns, inner in self._matrices(number, path, module, refused):
                norm = self.norms.norm_of(reader.name)
                shared = experts.gate_and_up(reader.entry) if norm is None else norm
                key = f"{shared}[{reader.expert}]" if norm and reader.expert is not None else shared
                group = found.setdefault(key, Group(key, columns, norm, path, reader.expert, inner))
                group.readers.append(reader)
        here = {reader.name for group in found.values() for reader in group.readers}
        for name, tensor in self._tensors.items():
            mine = self._number(name) == number and name.endswith(".weight") and name not in here
            if mine and len(tensor.shape) > 1 and rotation_block(tensor.shape[-1]):
                self.left_alone[name] = refused.get(name, "no product of the model is with it")
        return list(found.values())

    def _matrices(
        self, number: int, path: str, module: torch.nn.Module, refused: dict[str, str]
    ) -> Iterable[tuple[LayerMatrix, int, bool]]:
        """The matrices of a module, with the length of their input, and whether it is an inner one."""
        name = f"{self._prefix}.{number}.{path}"
        if _is_product(module):
            return self._of_product(name, path, module, refused)
        if not stacked.is_stacked(module):
            return ()
        known = stacked.find(module)
        if not isinstance(known, str):
            return self._of_stacks(name, path, known, refused)
        for parameter in stacked.stacks(module):
            for tensor in self._candidates(f"{name}.{parameter}"):
                refused[tensor.name] = f"{type(module).__name__}: {known}"
        return ()

    def _of_product(
        self, name: str, path: str, module: torch.nn.Module, refused: dict[str, str]
    ) -> Iterable[tuple[LayerMatrix, int, bool]]:
        transposed = not isinstance(module, torch.nn.Linear)
        shape = tuple(module.weight.shape)[:: -1 if transposed else 1]
        weights: torch.Tensor | None = None
        for tensor in self._candidates(f"{name}.weight"):
            if not rotation_block(shape[1]) or (len(tensor.shape) > 2 and tensor.shape[-1] != shape[1]):
                refused[tensor.name] = _OTHER_ROWS
                continue
            # Matrices of heads that read the same are one.
            whole = tensor.whole().reshape(-1, tensor.shape[-1])
            if weights is None:
                weights = self._weights.get(f"{name}.weight", module.weight.shape)
                weights = weights.mT if transposed else weights
            rows = _rows(weights, whole)
            if rows is None and weights.shape == whole.shape and (across := _rows(weights.mT, whole.T)):
                rows = {"columns": across["order"]}
            if rows is None:
                refused[tensor.name] = _OTHER_ROWS
            else:
                yield LayerMatrix(tensor.name, None, path, transposed=transposed, **rows), shape[1], False

    def _of_stacks(
        self, name: str, path: str, known: stacked.Experts, refused: dict[str, str]
    ) -> Iterable[tuple[LayerMatrix, int, bool]]:
        """The matrices of all experts, where those of the first are found."""
        _, inner = known.stacks
        for parameter, stack in known.stacks.items():
            shape = stack.float_shape(known.count)
            first: torch.Tensor | None = None
            for tensor in self._candidates(f"{name}.{parameter}"):
                of_these = len(tensor.shape) == 3 and tensor.shape[::2] == (known.count, stack.columns)
                if not of_these or not rotation_block(stack.columns):
                    continue
                if first is None:
                    first = self._weights.get(f"{name}.{parameter}", shape[1:], 0)
                    first = first.mT if stack.transposed else first
                alone = tensor.matrix(0)
                rows = _rows(first, tensor.whole()[0] if alone is None else alone)
                if rows is None:
                    refused[tensor.name] = _OTHER_ROWS
                    continue
                for expert in range(known.count):
                    reader = LayerMatrix(tensor.name, expert, path, parameter, transposed=stack.transposed, **rows)
                    yield reader, stack.columns, parameter == inner


def _is_product(module: torch.nn.Module) -> bool:
    """Whether a module multiplies by the matrix that it holds: ``Linear`` or, the other way round, GPT-2's ``Conv1D``.

    Classes made of ``Linear`` that have a way of their own are tried on a few numbers.
    """
    if not isinstance(module, torch.nn.Linear) or type(module).forward is torch.nn.Linear.forward:
        return isinstance(module, torch.nn.Linear) or type(module).__name__ == "Conv1D"
    shell = copy.copy(module)
    numbers = torch.linspace(-1, 2, 15, device="cpu")
    shell._parameters = {"weight": torch.nn.Parameter(numbers.reshape(5, 3)), "bias": None}
    try:
        with torch.no_grad():
            found = shell(numbers[:6].reshape(1, 2, 3))
    except Exception:  # a class of another signature can fail in any way
        return False
    wanted = numbers[:6].reshape(1, 2, 3) @ numbers.reshape(5, 3).T
    return isinstance(found, torch.Tensor) and found.shape == wanted.shape and torch.allclose(found, wanted, rtol=1e-4)


def _rows(matrix: torch.Tensor, tensor: npt.NDArray[np.floating]) -> dict[str, Any] | None:
    """``part`` and ``order`` of a :class:`LayerMatrix` for a tensor (m, n), by its rows among those of a matrix of the
    model; None where they are not there."""
    try:
        found = row_order(matrix.float().numpy(), tensor)
    except ValueError:
        return None
    part = np.sort(found)
    order = np.searchsorted(part, found)
    kept: Any = part
    if part[-1] - part[0] + 1 == len(part):
        kept = None if len(part) == len(matrix) else slice(int(part[0]), int(part[-1]) + 1)
    return {"part": kept, "order": None if (order == np.arange(len(order))).all() else order}


@dataclass(frozen=True)
class Seen:
    """What a module was called with.

    Attributes:
        groups: whose input it is.
        raw: (tokens, n) as it came.
        plain: without the gain of a norm whose readers are known.
        chosen: of experts, (tokens, k) the experts of each token; else None.
        inner: of experts that are in memory, what is between both matrices of one, by its number and inputs: (tokens,
            columns) -> (tokens, inner); else None.
    """

    groups: Sequence[Group]
    raw: torch.Tensor
    plain: torch.Tensor
    chosen: torch.Tensor | None = None
    inner: Callable[[int, torch.Tensor], torch.Tensor] | None = None

    def rows(self, group: Group, chosen: torch.Tensor | None = None, *, gain: bool = False) -> torch.Tensor:
        """The input of one group, (tokens, columns), as its tensors read it.

        Of an expert, that of the tokens that ``chosen`` sends to it.

        Args:
            chosen: the routing to go by; None for that of this call.
            gain: as the matrices read it, with the gain of its norm.
        """
        inputs = self.raw if gain else self.plain
        if group.expert is None:
            columns = group.readers[0].columns
            return inputs if columns is None else inputs[:, columns]
        chosen = self.chosen if chosen is None else chosen
        assert chosen is not None
        tokens = torch.where((chosen == group.expert).any(-1))[0]
        if not group.inner:
            return inputs[tokens]
        assert self.inner is not None
        return self.inner(group.expert, self.raw[tokens])


class Watch:
    """Hooks on the modules of one layer; ``receive`` is called before each that has the input of one of the groups."""

    def __init__(
        self, model: LayeredModel, number: int, layer: torch.nn.Module, groups: Sequence[Group], receive:
        Callable[[Seen], None],
    ) -> None:  # fmt: skip
        self._model, self._receive = model, receive
        self._handles: list[Any] = []
        self._plain: dict[str, torch.Tensor] = {}  # norm -> its last output without the gain
        norms = {group.norm for group in groups}
        for name, path in model.layout.modules(number, layer).items():
            if name in norms:
                self._handles.append(layer.get_submodule(path).register_forward_hook(self._normalised(name)))
        by_path: dict[str, list[Group]] = {}
        for group in groups:
            by_path.setdefault(group.path, []).append(group)
        for path, members in by_path.items():
            called = self._called(members)
            self._handles.append(layer.get_submodule(path).register_forward_pre_hook(called, with_kwargs=True))

    def __enter__(self) -> Watch:
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()

    def _normalised(self, name: str) -> Callable[..., None]:
        effective = torch.from_numpy(self._model.gain(name))
        centred: bool | None = None  # as a LayerNorm's

        def hook(norm: torch.nn.Module, args: tuple[torch.Tensor, ...], out: torch.Tensor) -> None:
            nonlocal centred
            epsilon = getattr(norm, "variance_epsilon", None) or getattr(norm, "eps", 1e-6)

            def plain(centre: bool) -> torch.Tensor:
                x = args[0].float()
                x = x - x.mean(-1, keepdim=True) if centre else x
                return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + epsilon)

            def is_right(centre: bool) -> bool:
                found = plain(centre)
                return torch.allclose(found * effective.to(found), out.float(), rtol=1e-3, atol=1e-4)

            if centred is None:
                centred = next((centre for centre in (False, True) if is_right(centre)), None)
            if centred is None:
                what = "is not a norm with the gain that the checkpoint has"
                raise UserError(self._model.folder, what, BY_IMATRIX, name)
            self._plain[name] = plain(centred).reshape(-1, args[0].shape[-1])

        return hook

    def _called(self, groups: Sequence[Group]) -> Callable[..., None]:
        """Before a matrix, or what stands for the experts of a layer: (hidden, chosen experts, weights) come in."""
        norm = next((group.norm for group in groups if not group.inner), None)
        routed = groups[0].expert is not None

        def hook(_: Any, args: tuple[Any, ...], keywords: dict[str, Any]) -> None:
            states = args[0] if args else keywords["hidden_states" if routed else "input"]
            raw = states.reshape(-1, states.shape[-1])
            chosen = None
            if routed:
                chosen = (args[1] if len(args) > 1 else keywords["top_k_index"]).reshape(raw.shape[0], -1)
            with self._model.products(quick=False):
                self._receive(Seen(groups, raw, raw if norm is None else self._plain[norm], chosen))

        return hook

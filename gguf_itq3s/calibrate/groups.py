"""Which matrices of a layer read the same input, and where the model of Transformers holds them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import gguf

from ..checkpoint import experts
from ..checkpoint.channels import Norms, plan_norms
from ..codec.transform import rotation_block
from ..rounding.factors import tensor_entry

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Reader:
    """A matrix of a layer.

    Attributes:
        name: GGUF name of its tensor.
        expert: which matrix of a stack, None for a plain one.
        path: of the module in the layer.
        parameter: of the module.
        half: of a parameter that holds the gate's and the up matrix's rows in one, 0 or 1; else None.
    """

    name: str
    expert: int | None
    path: str
    parameter: str = "weight"
    half: int | None = None

    @property
    def entry(self) -> str:
        """Its name in statistics."""
        return tensor_entry(self.name, self.expert)

    def rows(self, layer: torch.nn.Module) -> torch.Tensor:
        """Its weights in a layer, (rows, columns), a view."""
        weights = getattr(layer.get_submodule(self.path), self.parameter)
        if self.expert is not None and weights.ndim == 3:
            weights = weights[self.expert]
        return weights if self.half is None else weights.chunk(2, dim=0)[self.half]


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
    readers: list[Reader] = field(default_factory=list)


class Layout:
    """The names of a model: its modules in Transformers, its tensors in GGUF.

    Args:
        arch: ``general.architecture``.
        layers: how many.
        prefix: of a layer's modules, without its number.
        tensors: GGUF names of all tensors.
    """

    def __init__(self, arch: str, layers: int, prefix: str, tensors: Iterable[str]) -> None:
        known = next(key for key, value in gguf.MODEL_ARCH_NAMES.items() if value == arch)
        self._names = gguf.get_tensor_name_map(known, layers)
        self._prefix, self._tensors = prefix, frozenset(tensors)
        self.norms: Norms = plan_norms(arch, self._tensors)

    def name(self, number: int, path: str) -> str:
        """GGUF name of a module's weight, empty where it has none."""
        short = self._names.get_name(f"{self._prefix}.{number}.{path}".replace("language_model.", ""))
        return f"{short}.weight" if short else ""

    def modules(self, number: int, layer: torch.nn.Module) -> dict[str, str]:
        """GGUF name -> path of the modules of a layer that hold one tensor."""
        return {name: path for path, _ in layer.named_modules() if (name := self.name(number, path)) in self._tensors}

    def groups(self, number: int, layer: torch.nn.Module) -> list[Group]:
        """The groups of a layer, members in the order of its modules; rows that are not whole blocks are left out."""
        import torch

        found: dict[str, Group] = {}

        def add(reader: Reader, columns: int, norm: str | None, *, inner: bool = False, stacked: bool = False) -> None:
            if not rotation_block(columns) or reader.name not in self._tensors:
                return
            shared = experts.gate_and_up(reader.entry) if norm is None else norm
            key = f"{shared}[{reader.expert}]" if norm and reader.expert is not None else shared
            expert = reader.expert if stacked else None
            group = found.setdefault(key, Group(key, columns, norm, reader.path, expert, inner))
            group.readers.append(reader)

        for path, module in layer.named_modules():
            if isinstance(module, torch.nn.Linear):
                expert, part = experts.single(path) or (None, "")
                name = experts.tensor(number, part) if part else self.name(number, path)
                add(Reader(name, expert, path), module.in_features, self.norms.norm_of(name))
            elif isinstance(getattr(module, experts.GATE_UP, None), torch.nn.Parameter):
                stacks: dict[str, Any] = {name: getattr(module, name) for name in (experts.GATE_UP, experts.DOWN)}
                for expert in range(len(stacks[experts.DOWN])):
                    for parameter, weights in stacks.items():
                        parts = experts.STACKS[parameter]
                        for half, part in enumerate(parts):
                            name = experts.tensor(number, part)
                            reader = Reader(name, expert, path, parameter, half if len(parts) > 1 else None)
                            inner = parameter == experts.DOWN
                            add(reader, weights.shape[2], self.norms.norm_of(name), inner=inner, stacked=True)
        return list(found.values())

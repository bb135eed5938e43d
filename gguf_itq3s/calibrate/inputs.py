"""Which matrices of a layer read the same input, and that input, handed over while the layer runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import gguf
import torch

from ..base.errors import UserError
from ..checkpoint import experts
from ..checkpoint.channels import Norms, plan_norms
from ..codec.transform import rotation_block
from ..rounding.factors import tensor_entry

if TYPE_CHECKING:
    from .layers import LayeredModel


@dataclass(frozen=True)
class LayerMatrix:
    """A matrix of a layer.

    Attributes:
        name: GGUF name of its tensor.
        expert: which matrix of a stack, None for a plain one.
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
        return weights if self.expert is None else self.rows_of(weights[self.expert])

    def rows_of(self, matrix: torch.Tensor) -> torch.Tensor:
        """The same of the parameter's matrix of its expert."""
        return matrix if self.half is None else matrix.chunk(2, dim=0)[self.half]


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
    """The names of a model: its modules in Transformers, below ``prefix`` and a number, its tensors in GGUF."""

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
        found: dict[str, Group] = {}

        def add(reader: LayerMatrix, columns: int, norm: str | None, *, inner: bool = False) -> None:
            if not rotation_block(columns) or reader.name not in self._tensors:
                return
            shared = experts.gate_and_up(reader.entry) if norm is None else norm
            key = f"{shared}[{reader.expert}]" if norm and reader.expert is not None else shared
            group = found.setdefault(key, Group(key, columns, norm, reader.path, reader.expert, inner))
            group.readers.append(reader)

        for path, module in layer.named_modules():
            if isinstance(module, torch.nn.Linear):
                name = self.name(number, path)
                add(LayerMatrix(name, None, path), module.in_features, self.norms.norm_of(name))
            elif isinstance(getattr(module, experts.GATE_UP, None), torch.nn.Parameter):
                stacks: dict[str, Any] = {name: getattr(module, name) for name in (experts.GATE_UP, experts.DOWN)}
                for expert in range(len(stacks[experts.DOWN])):
                    for parameter, weights in stacks.items():
                        parts = experts.STACKS[parameter]
                        for half, part in enumerate(parts):
                            name = experts.tensor(number, part)
                            reader = LayerMatrix(name, expert, path, parameter, half if len(parts) > 1 else None)
                            inner = parameter == experts.DOWN
                            add(reader, weights.shape[2], self.norms.norm_of(name), inner=inner)
        return list(found.values())


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
        """The input of one group, (tokens, columns); of an expert, the tokens that ``chosen`` sends to it.

        Args:
            chosen: the routing to go by; None for that of this call.
            gain: as the matrices read it, with the gain of its norm.
        """
        inputs = self.raw if gain else self.plain
        if group.expert is None:
            return inputs
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
        checked = False

        def hook(norm: torch.nn.Module, args: tuple[torch.Tensor, ...], out: torch.Tensor) -> None:
            nonlocal checked
            x = args[0].float()
            epsilon = getattr(norm, "variance_epsilon", None) or getattr(norm, "eps", 1e-6)
            plain = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + epsilon)
            if not checked and not torch.allclose(plain * effective.to(plain), out.float(), rtol=1e-3, atol=1e-4):
                what = "is not an RMSNorm with the gain that the checkpoint has"
                raise UserError(self._model.folder, what, "use an importance matrix of llama-imatrix (--imatrix)", name)
            checked = True
            self._plain[name] = plain.reshape(-1, plain.shape[-1])

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

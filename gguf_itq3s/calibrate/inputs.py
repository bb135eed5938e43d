"""The inputs of a layer's matrices, handed over while the layer runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..base.errors import UserError
from ..checkpoint import experts
from .groups import Group
from .layers import LayeredModel

if TYPE_CHECKING:
    import torch

    from ..torch import stacked


@dataclass(frozen=True)
class Seen:
    """What a module was called with.

    Attributes:
        groups: whose input it is.
        raw: (tokens, n) as it came.
        plain: without the gain of a norm whose readers are known.
        chosen: of stacked experts, (tokens, k) the experts of each token; else None.
        inner: of stacked experts, what is between both matrices of one, by its number and inputs: (tokens, columns) ->
            (tokens, inner); else None.
    """

    groups: Sequence[Group]
    raw: torch.Tensor
    plain: torch.Tensor
    chosen: torch.Tensor | None = None
    inner: Callable[[int, torch.Tensor], torch.Tensor] | None = None

    def rows(self, group: Group, chosen: torch.Tensor | None = None, *, gain: bool = False) -> torch.Tensor:
        """The input of one group, (tokens, columns); of an expert, the tokens that ``chosen`` sends to it.

        Args:
            group: one of the groups.
            chosen: the routing to go by; None for that of this call.
            gain: as the matrices read it, with the gain of its norm.
        """
        import torch

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


def known_experts(module: torch.nn.Module) -> stacked.Experts | str:
    """Stacked experts whose second matrices' inputs follow from what the module is called with, or why they do not."""
    from ..torch import stacked

    if not stacked.is_stacked(module):
        return "its parameters are no stacks of matrices"
    known = stacked.find(module)
    if isinstance(known, str):
        return known
    if known.bias or any(stack.transposed for stack in known.stacks.values()):
        return "its matrices have biases, or lie the other way round"
    return known


class Watch:
    """Hooks on the modules of one layer; a context manager.

    Args:
        model: the model, for its tensors.
        number: of the layer.
        layer: its modules.
        groups: the groups to watch.
        receive: called before each module that has one of them as its input.
    """

    def __init__(
        self,
        model: LayeredModel,
        number: int,
        layer: torch.nn.Module,
        groups: Sequence[Group],
        receive: Callable[[Seen], None],
    ) -> None:
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
            module = layer.get_submodule(path)
            hook = self._called(members) if members[0].expert is None else self._routed(members, module)
            self._handles.append(module.register_forward_pre_hook(hook, with_kwargs=True))

    def __enter__(self) -> Watch:
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()

    def _normalised(self, name: str) -> Callable[..., None]:
        import torch

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
        import torch

        (group,) = groups
        single = group.readers[0].expert is not None  # of an expert that is a module, its rows alone are not known
        factor = None
        if group.norm is not None and single:
            # The gain is divided out again; a channel with gain 0 counts as never seen.
            gain = torch.from_numpy(self._model.gain(group.norm))
            factor = torch.where(gain == 0, 0.0, 1 / torch.where(gain == 0, 1.0, gain))

        def hook(_: Any, args: tuple[Any, ...], keywords: dict[str, Any]) -> None:
            states = args[0] if args else keywords["input"]
            raw = states.reshape(-1, states.shape[-1])
            if group.norm is None:
                plain = raw
            else:
                plain = self._plain[group.norm] if factor is None else raw * factor.to(raw)
            with self._model.products(quick=False):
                self._receive(Seen(groups, raw, plain))

        return hook

    def _routed(self, groups: Sequence[Group], module: Any) -> Callable[..., None]:
        """Experts that transformers keeps as stacked parameters: (hidden, chosen experts, weights) come in."""
        norm = next((group.norm for group in groups if not group.inner), None)
        inner = self._between(module) if hasattr(module, experts.GATE_UP) else None  # else they run outside

        def hook(_: Any, args: tuple[Any, ...], keywords: dict[str, Any]) -> None:
            states = args[0] if args else keywords["hidden_states"]
            raw = states.reshape(-1, states.shape[-1])
            chosen = (args[1] if len(args) > 1 else keywords["top_k_index"]).reshape(raw.shape[0], -1)
            with self._model.products(quick=False):
                self._receive(Seen(groups, raw, raw if norm is None else self._plain[norm], chosen, inner))

        return hook

    def _between(self, module: Any) -> Callable[[int, torch.Tensor], torch.Tensor]:
        """As :attr:`Seen.inner`.

        Raises:
            UserError: the module computes in a way that is not known.
        """
        known = known_experts(module)
        if isinstance(known, str):
            what = f"has experts that cannot be calibrated ({type(module).__name__}): {known}"
            raise UserError(self._model.folder, what, "use an importance matrix of llama-imatrix (--imatrix)")
        gate = known.gate

        def inner(expert: int, x: torch.Tensor) -> torch.Tensor:
            weights = module.gate_up_proj[expert]
            return gate(x.to(weights.dtype) @ weights.T)

        return inner

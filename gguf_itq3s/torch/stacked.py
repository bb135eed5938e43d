"""Which modules of a model of Transformers are stacked experts, and what they compute.

Transformers 5 stacks the experts of a layer into parameters with three axes, in classes that differ in orientation,
gating and biases. A module is taken where its parameters have a known layout and a small copy of it, with random
weights, computes what :class:`.experts.PackedExperts` computes; others keep their floats.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import nn

from .experts import DOWN, PackedExperts, Stack

#: Names of the first stack: gate and up in one, or up alone.
FIRST: Final = ("gate_up_proj", "up_proj")
#: Sizes of the small copy: experts, tokens, experts of a token, hidden, inner.
_EXPERTS, _TOKENS, _CHOSEN, _HIDDEN, _INNER = 3, 9, 2, 6, 4


@dataclass(frozen=True)
class Experts:
    """The ``count`` experts of a layer: both matrices by parameter name, as floats, and the gate between them."""

    module: nn.Module
    count: int
    stacks: dict[str, Stack]
    bias: bool
    gate: Callable[[torch.Tensor], torch.Tensor]


def is_stacked(module: nn.Module) -> bool:
    """Whether a module looks like stacked experts, whatever it computes."""
    return _first(module) is not None


def stacks(module: nn.Module) -> tuple[str, ...]:
    """Names of its two parameters that are stacks of matrices; none of a module that does not look so."""
    first = _first(module)
    return () if first is None else (first, DOWN)


def find(module: nn.Module) -> Experts | str:
    """The experts of a module for which :func:`is_stacked` holds, or why they cannot be packed."""
    first = _first(module)
    assert first is not None
    bias = getattr(module, f"{first}_bias", None) is not None
    known = {first, DOWN, *((f"{first}_bias", f"{DOWN}_bias") if bias else ())}
    held = {name for name, _ in module.named_parameters()} | {name for name, _ in module.named_buffers()}
    if held != known:
        return f"it has other parameters than are known ({', '.join(sorted(held ^ known))})"
    count, *shape = getattr(module, first).shape
    if getattr(module, DOWN).shape[0] != count or getattr(module, "num_experts", count) != count:
        return "its parameters are of different numbers of experts"
    gated = first == FIRST[0]
    for transposed in (False, True):
        rows, columns = reversed(shape) if transposed else shape
        inner = rows // 2 if gated else rows
        two = {
            first: Stack(rows, columns, transposed=transposed),
            DOWN: Stack(columns, inner, transposed=transposed),
        }
        fits = getattr(module, DOWN).shape == two[DOWN].float_shape(count) and rows == inner * (2 if gated else 1)
        if fits and transposed == getattr(module, "is_transposed", transposed):
            found = Experts(module, count, two, bias, _gate(module, gated))
            if _computes_the_same(found):
                return found
    return "its class computes in a way that is not known"


def _first(module: nn.Module) -> str | None:
    for name in FIRST:
        if all(getattr(getattr(module, part, None), "ndim", 0) == 3 for part in (name, DOWN)) and all(
            isinstance(getattr(module, part), nn.Parameter) for part in (name, DOWN)
        ):
            return name
    return None


def _gate(module: nn.Module, gated: bool) -> Callable[[torch.Tensor], torch.Tensor]:
    """What lies between the two matrices: the class's own, of a copy that holds no weights."""
    shell = copy.copy(module)
    shell._parameters = {}
    own: Any = getattr(shell, "_apply_gate", None)
    if gated and own is not None:
        return own
    return _Gate(shell.act_fn) if gated and hasattr(shell, "act_fn") else getattr(shell, "act_fn", nn.Identity())


class _Gate:
    """``act(gate) * up``, gate above up."""

    def __init__(self, act: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self.act = act

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = x.chunk(2, dim=-1)
        return self.act(gate) * up


def _computes_the_same(experts: Experts) -> bool:
    """Whether a small copy of the module and our forward agree, on inputs small and large."""
    sizes = {name: (_INNER * (2 if name == FIRST[0] else 1), _HIDDEN) for name in experts.stacks}
    sizes[DOWN] = (_HIDDEN, _INNER)
    small = {name: Stack(*sizes[name], transposed=stack.transposed) for name, stack in experts.stacks.items()}
    count = min(_EXPERTS, experts.count)
    chosen = min(_CHOSEN, count)
    generator = torch.Generator("cpu").manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu")

    with torch.device("cpu"), torch.no_grad():  # within from_pretrained tensors are made nowhere
        ours = PackedExperts(count, small, experts.gate, bias=experts.bias, dtype=torch.float32)
        for parameter in ours.parameters():
            parameter.copy_(random(*parameter.shape))
        theirs = copy.copy(experts.module)
        theirs._parameters = dict(ours._parameters)
        x = random(_TOKENS, _HIDDEN) * torch.logspace(-1, 2, _TOKENS, device="cpu")[:, None]
        index = torch.stack([torch.randperm(count, generator=generator)[:chosen] for _ in range(_TOKENS)])
        weights = random(_TOKENS, chosen).abs()
        # The class's own, behind Transformers' choice of an implementation.
        kind = type(experts.module)
        own = getattr(kind.forward, "__wrapped__", kind.forward)
        try:
            expected = own(theirs, x, index, weights)
        except Exception:  # a class of another signature can fail in any way
            return False
        got = ours(x, index, weights)
        if not isinstance(expected, torch.Tensor) or expected.shape != got.shape:
            return False
        scale = expected.abs().amax(-1, keepdim=True)
        return bool(((got - expected).abs() <= 1e-4 * scale + 1e-6).all())

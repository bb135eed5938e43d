"""Stacked experts whose weights stay packed: products, gradients, memory, and living in PyTorch's ways."""

from __future__ import annotations

import pytest
import torch
from gguf import GGMLQuantizationType as Type

from gguf_itq3s.codec.types import ITQ3_S
from gguf_itq3s.torch import PackedExperts
from gguf_itq3s.torch.experts import Stack
from packed import TYPES, packed_rows

EXPERTS, HIDDEN, INNER, TOKENS = 5, 512, 256, 11


def gate(x: torch.Tensor) -> torch.Tensor:
    a, b = x.chunk(2, dim=-1)
    return torch.nn.functional.silu(a) * b


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def built(qtype: Type = ITQ3_S, experts: int = EXPERTS, hidden: int = HIDDEN, inner: int = INNER) -> PackedExperts:
    """Of random blocks."""
    stacks = {"gate_up_proj": Stack(2 * inner, hidden, qtype), "down_proj": Stack(hidden, inner, qtype)}
    layer = PackedExperts(experts, stacks, gate)
    state = {}
    for seed, (name, stack) in enumerate(stacks.items()):
        rows = packed_rows(qtype, experts * stack.rows, stack.columns, seed)
        state[name] = torch.from_numpy(rows).view(experts, stack.rows, -1)
    layer.load_state_dict(state)
    return layer


def routed(
    experts: int = EXPERTS, hidden: int = HIDDEN, tokens: int = TOKENS
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Inputs, the experts of each token, their weights; a choice is of none, and no token goes to the last expert."""
    generator = torch.Generator().manual_seed(2)
    index = torch.stack([torch.randperm(experts - 1, generator=generator)[:2] for _ in range(tokens)])
    index[3 % tokens, 1] = experts
    return random(tokens, hidden, seed=3) / 100, index, torch.rand(tokens, 2, generator=generator)


def plain(
    weights: tuple[torch.Tensor, torch.Tensor], x: torch.Tensor, index: torch.Tensor, routing: torch.Tensor
) -> torch.Tensor:
    """One token and one expert after the other."""
    first, down = weights
    rows = []
    for token, chosen, factors in zip(x, index.tolist(), routing, strict=True):
        parts = [f * (down[e] @ gate(first[e] @ token)) for e, f in zip(chosen, factors, strict=True) if e < len(first)]
        rows.append(sum(parts, torch.zeros_like(token)))
    return torch.stack(rows)


def decoded(layer: PackedExperts, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    return layer.dequantize("gate_up_proj", dtype), layer.dequantize("down_proj", dtype)


def error(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a.detach() - b.detach()).norm() / b.detach().norm())


@pytest.mark.parametrize("qtype", TYPES, ids=lambda t: t.name)
def test_what_the_experts_compute_and_its_gradient(qtype: Type) -> None:
    layer = built(qtype)
    x, index, routing = routed()
    x.requires_grad_()
    routing.requires_grad_()
    weights = decoded(layer)
    expected = plain(weights, x, index, routing)
    wanted = torch.autograd.grad(expected.square().sum(), (x, routing))
    y = layer(x, index, routing)
    got = torch.autograd.grad(y.square().sum(), (x, routing))
    assert y.dtype == torch.float32 and error(y, expected) < 2e-6
    for ours, theirs in zip(got, wanted, strict=True):
        assert error(ours, theirs) < 4e-6
    assert got[1][3, 1] == 0  # a choice of no expert


def test_floats_transposed_and_biases() -> None:
    """One stack packed, the other as it is with its rows last; both with biases."""
    stacks = {
        "gate_up_proj": Stack(2 * INNER, HIDDEN, ITQ3_S, transposed=True),
        "down_proj": Stack(HIDDEN, INNER, transposed=True),
    }
    layer = PackedExperts(EXPERTS, stacks, gate, bias=True)
    assert layer.down_proj.shape == (EXPERTS, INNER, HIDDEN)
    full = built()
    state = {"gate_up_proj": full.gate_up_proj, "down_proj": random(EXPERTS, INNER, HIDDEN, seed=1) / 20}
    biases = {
        "gate_up_proj_bias": random(EXPERTS, 2 * INNER, seed=5),
        "down_proj_bias": random(EXPERTS, HIDDEN, seed=6),
    }
    layer.load_state_dict(state | biases)
    x, index, routing = routed()
    first, down = layer.dequantize("gate_up_proj"), layer.dequantize("down_proj")
    assert first.shape == (EXPERTS, HIDDEN, 2 * INNER)
    expected = torch.zeros_like(x)
    for token in range(TOKENS):
        for expert, factor in zip(index[token].tolist(), routing[token], strict=True):
            if expert < EXPERTS:
                inner = gate(x[token] @ first[expert] + biases["gate_up_proj_bias"][expert])
                expected[token] += factor * (inner @ down[expert] + biases["down_proj_bias"][expert])
    assert error(layer(x, index, routing), expected) < 2e-6


def test_shapes_and_mistakes() -> None:
    layer = built()
    x, index, routing = routed()
    y = layer(x, index, routing)
    assert layer(x[:0], index[:0], routing[:0]).shape == (0, HIDDEN)
    assert torch.equal(layer(x.view(1, TOKENS, HIDDEN), index, routing), y[None])
    with pytest.raises(ValueError, match="do not match 5 matrices of 512 columns"):
        layer(x[:, :256], index, routing)
    with pytest.raises(ValueError, match="ITQ3_N rows must be a multiple of 64 long, not 300"):
        PackedExperts(2, {"up_proj": Stack(256, 300, ITQ3_S), "down_proj": Stack(300, 256)}, torch.relu)
    with pytest.raises(ValueError, match="stacks of matrices are needed; the shapes are"):
        PackedExperts.from_weights(random(4, 256), random(4, 256), gate)


# --------------------------------------------------------------------------------------------------------------- memory
